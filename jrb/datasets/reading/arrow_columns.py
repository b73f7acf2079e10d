"""Columns of Parquet and Arrow files that hold numbers, and what they hold in each row.

T rows over all files.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb._util import extras
from jrb.datasets.reading.arrow import Files, refused, starts_of

_PIECE = 4 << 20  # bytes of a column that are decoded at a time


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a column holds in each row.

    Attributes:
        path: the name of the column, and of the fields within it.
        dtype: NumPy's.
        levels: how long the lists in a row are, from the outside in; None if only the data tell.
        shape: of a row, where that is not the same.
    """

    path: tuple[str, ...]
    dtype: np.dtype
    levels: tuple[int | None, ...] = ()
    shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """`observation.arm` for a field of a column."""
        return ".".join(self.path)


def leaves(schema: Any) -> tuple[list[Leaf], list[str]]:
    """The columns of numbers; and the names of others, with their types."""
    found: list[Leaf] = []
    others: list[str] = []
    for field in schema:
        _gather((field.name,), field.type, found, others)
    names = [leaf.name for leaf in found]
    if len(set(names)) < len(names):
        raise ValueError(f"expected a name of its own for each column and field, got {names}.")
    return found, others


def _gather(path: tuple[str, ...], kind: Any, found: list[Leaf], others: list[str]) -> None:
    types = extras.require("pyarrow", "datasets").types
    if types.is_struct(kind):
        for field in kind:
            _gather((*path, field.name), field.type, found, others)
        return
    leaf = _leaf(path, kind)
    if leaf is None:
        others.append(f"{'.'.join(path)} ({kind})")
    else:
        found.append(leaf)


def _leaf(path: tuple[str, ...], kind: Any) -> Leaf | None:
    """What a type holds; None if it is not of numbers."""
    pa = extras.require("pyarrow", "datasets")
    shape, levels = None, []
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation not in (None, sorted(kind.permutation or ())):
            return None
        shape = tuple(kind.shape)
    kind = _stored(kind)
    while (size := _size(pa.types, kind)) is not None:
        levels.append(None if size < 0 else size)
        kind = _stored(kind.value_type)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not is_number and not pa.types.is_boolean(kind):
        return None
    return Leaf(path, np.dtype(kind.to_pandas_dtype()), tuple(levels), shape)


def _stored(kind: Any) -> Any:
    """What an extension's type is stored as."""
    return _stored(kind.storage_type) if hasattr(kind, "storage_type") else kind


def _size(types: Any, kind: Any) -> int | None:
    """How long the lists of a type are, -1 if that varies; None for other types."""
    if types.is_fixed_size_list(kind):
        return kind.list_size
    return -1 if types.is_list(kind) or types.is_large_list(kind) else None


class Column:
    """A column of numbers, read from its files by slices, a few megabytes at a time.

    Rows that follow those that were read last are read on from there; for others, reading begins
    with their group of rows.
    """

    def __init__(self, files: Files, leaf: Leaf) -> None:
        self._files, self._leaf = files, leaf
        self._batches: Iterator[Any] = iter(())
        self._first = self._stop = self._file = self._group = -1
        self._starts, self._path = starts_of([]), files.path
        self._held: Any = None
        if None in leaf.levels:
            self._leaf = dataclasses.replace(leaf, levels=self._first_lengths())
            self._file = -1  # from now on, more rows than one are read at once

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        row = self._leaf.levels if self._leaf.shape is None else self._leaf.shape
        return (len(self), *(size or 0 for size in row))

    @property
    def dtype(self) -> np.dtype:
        """NumPy's."""
        return self._leaf.dtype

    def __len__(self) -> int:
        """T."""
        return int(self._files.starts[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """These rows, an array of their own."""
        start, stop, _ = part.indices(len(self))
        found, place = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype), 0
        for piece in self._pieces(start, stop):
            found[place : place + len(piece)] = self._numbers(piece)
            place += len(piece)
        return found

    def _pieces(self, start: int, stop: int) -> Iterator[Any]:
        """Arrow's arrays of these rows, and no others."""
        while start < stop:
            self._reach(start)
            end = min(stop, self._stop)
            yield self._held.slice(start - self._first, end - start)
            start = end

    def _reach(self, row: int) -> None:
        """Holds the batch in which a row lies."""
        number = int(np.searchsorted(self._files.starts, row, side="right")) - 1
        if number != self._file:
            file = self._files.file(number)
            self._file, self._starts, self._path = number, file.starts, file.path
            self._stop = -1
        begin = int(self._files.starts[number])
        group = int(np.searchsorted(self._starts, row - begin, side="right")) - 1
        if not self._first <= row or self._stop < 0 or group > self._group + 1:
            self._seek(number, group, begin)
        with refused(self._path):
            while self._stop <= row:
                self._next()
        self._group = group

    def _seek(self, number: int, group: int, begin: int) -> None:
        """Begins with a group of rows of a file."""
        file, name = self._files.file(number), self._leaf.path[0]
        self._check(name in file.schema.names, "a column of this name", "none")
        self._batches = file.batches(group, name, self._rows_at_once)
        self._first = self._stop = begin + int(self._starts[group])

    def _next(self) -> None:
        found = next(self._batches, None)
        if found is None:
            raise ValueError(f"{self._path}: expected more rows of '{self._leaf.name}', got none.")
        found.validate(full=True)
        self._held = found
        self._first, self._stop = self._stop, self._stop + len(found)

    @property
    def _rows_at_once(self) -> int:
        if None in self._leaf.levels:
            return 1
        sizes = [size for size in self._leaf.levels if size]
        return max(1, _PIECE // (self.dtype.itemsize * int(np.prod(sizes, dtype=np.int64))))

    def _first_lengths(self) -> tuple[int, ...]:
        """How long the lists of the first row are."""
        held, found = self._field(next(self._pieces(0, 1))), []
        for _ in self._leaf.levels:
            held = _storage(held)
            self._check(held.null_count == 0, "values everywhere", "a null")
            found.append(int(_lengths(held)[0]) if len(held) else 0)
            held = held.flatten().slice(0, 1)
        return tuple(found)

    def _field(self, held: Any) -> Any:
        """The field of a column of structs."""
        for name in self._leaf.path[1:]:
            held = held.flatten()[held.type.get_field_index(name)]
        return held

    def _numbers(self, held: Any) -> np.ndarray:
        rows, held = len(held), self._field(held)
        for size in self._leaf.levels:
            held = _storage(held)
            self._check(held.null_count == 0, "values everywhere", "a null")
            lengths = _lengths(held)
            is_right = bool((lengths == size).all())
            self._check(is_right, f"lists of {size}", f"some of {sorted(set(lengths.tolist()))}")
            held = held.flatten()
        self._check(held.null_count == 0, "values everywhere", "a null")
        found = held.to_numpy(zero_copy_only=False)
        self._check(found.dtype == self.dtype, str(self.dtype), str(found.dtype))
        return found.reshape(rows, *self.shape[1:])

    def _check(self, is_right: bool, expected: str, got: str) -> None:
        if not is_right:
            raise ValueError(
                f"{self._path}: column '{self._leaf.name}': expected {expected}, got {got} in the "
                f"rows from {self._first} on."
            )


class Texts(Column):
    """A column of texts, read as an array of Python strings."""

    def __init__(self, files: Files, name: str) -> None:
        super().__init__(files, Leaf((name,), np.dtype(object)))

    def _numbers(self, held: Any) -> np.ndarray:
        self._check(held.null_count == 0, "texts everywhere", "a null")
        return np.array(held.to_pylist(), object)


def texts(schema: Any) -> list[str]:
    """Returns the names of columns of texts."""
    types, found = extras.require("pyarrow", "datasets").types, []
    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        if types.is_string(kind) or types.is_large_string(kind):
            found.append(field.name)
    return found


def _lengths(held: Any) -> np.ndarray:
    """Of the lists in an array."""
    compute = extras.require("pyarrow.compute", "datasets")
    return compute.list_value_length(held).to_numpy(zero_copy_only=False)


def _storage(held: Any) -> Any:
    """An array of an extension's type as what it is stored as."""
    return _storage(held.storage) if hasattr(held, "storage") else held


def left_out(others: Sequence[str]) -> tuple[str, ...]:
    """What is said of columns that hold no numbers."""
    if not others:
        return ()
    return (f"Columns that hold no numbers are left out: {', '.join(others)}.",)
