"""Parquet and Arrow files that others wrote: opened, looked at, and read by stretches of rows.

T rows over all files.
"""

import abc
import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb._base import extras

_SIGNATURES = {b"PAR1": "parquet", b"ARRO": "file", b"\xff\xff\xff\xff": "stream"}
_PIECE = 4 << 20  # bytes of a column that are decoded at a time
_UNKNOWN = 256 << 10  # bytes of a row, where only the data tell


def format_of(path: Any) -> str | None:
    """`parquet`, or Arrow's `file` or `stream`, by how a file begins; None if it is neither."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            return _SIGNATURES.get(file.read(4))
    except OSError:
        return None


def tables(path: Any) -> list[str]:
    """The tables that a path has: itself, or those in a folder, `part-9` before `part-10`.

    Hidden files are left out, as those whose names begin with `_`, which hold metadata.
    """
    if not isinstance(path, str) or not os.path.isdir(path):
        return [path] if format_of(path) else []
    names = sorted(os.listdir(path), key=in_order)
    found = (os.path.join(path, name) for name in names if name[0] not in "._")
    return [each for each in found if format_of(each)]


def in_order(name: str) -> list[tuple[int, int, str]]:
    """The key by which names are sorted so that numbers in them count."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


@contextlib.contextmanager
def refused(path: str) -> Iterator[None]:
    """Tells of a file that cannot be read as what it begins like.

    Raises:
        ValueError: it is cut short or damaged.
    """
    pa = extras.require("pyarrow", "datasets")
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(
            f"{path}: expected a whole Parquet or Arrow file, got one that is not: {error}"
        ) from error


class File(abc.ABC):
    """A table in a file.

    Attributes:
        path: where it lies.
        schema: Arrow's.
        starts: int64 `[G + 1]`, the rows before each of G groups that can be read alone, and all.
    """

    path: str
    schema: Any
    starts: np.ndarray

    @abc.abstractmethod
    def batches(self, group: int, name: str, rows: int) -> Iterator[Any]:
        """A column from a group on, in Arrow's arrays of about so many rows."""


class _Parquet(File):
    def __init__(self, path: str) -> None:
        self._parquet = extras.require("pyarrow.parquet", "datasets")
        file = self._parquet.ParquetFile(path, memory_map=True)
        self.path, self.schema, self._about = path, file.schema_arrow, file.metadata
        groups = map(self._about.row_group, range(self._about.num_row_groups))
        self.starts = starts_of([group.num_rows for group in groups])

    def batches(self, group: int, name: str, rows: int) -> Iterator[Any]:
        groups = list(range(group, len(self.starts) - 1))
        # A file of its own: how many rows are read at once is kept there for all its columns.
        file = self._parquet.ParquetFile(
            self.path, metadata=self._about, memory_map=True, page_checksum_verification=True
        )
        for batch in file.iter_batches(rows, groups, [name], use_threads=False):
            yield batch.column(name)


class _Arrow(File):
    """Batches of a file are its groups; a stream is one."""

    def __init__(self, path: str, is_stream: bool) -> None:
        self._ipc = extras.require("pyarrow.ipc", "datasets")
        self.path, self._is_stream = path, is_stream
        self.schema = self._reader(None).schema
        light = [n for n, field in enumerate(self.schema) if field.type.num_fields == 0]
        counts = [batch.num_rows for batch in self._read(0, light[0] if light else 0)]
        self.starts = starts_of([sum(counts)] if is_stream else counts)

    def batches(self, group: int, name: str, rows: int) -> Iterator[Any]:
        for batch in self._read(group, self.schema.get_field_index(name)):
            yield batch.column(0)

    def _reader(self, column: int | None) -> Any:
        """Of one column, so that no other is decompressed."""
        opened = self._ipc.open_stream if self._is_stream else self._ipc.open_file
        only = self._ipc.IpcReadOptions(included_fields=[] if column is None else [column])
        return opened(extras.require("pyarrow", "datasets").memory_map(self.path), options=only)

    def _read(self, first: int, column: int) -> Iterator[Any]:
        if not len(self.schema):
            return
        reader = self._reader(column)
        if self._is_stream:
            yield from reader
            return
        for number in range(first, reader.num_record_batches):
            yield reader.get_batch(number)


def opened(path: str) -> File:
    """A table in a file.

    Raises:
        ValueError: it is damaged, is none, or has two columns of one name.
        FileNotFoundError: it is not there.
    """
    form = format_of(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is nothing.")
    if form is None:
        raise ValueError(f"{path}: expected a Parquet or Arrow file, got another.")
    with refused(path):
        file = _Parquet(path) if form == "parquet" else _Arrow(path, form == "stream")
        names = file.schema.names
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: expected a name of its own for each column, got {names}.")
    return file


def starts_of(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64, the sum of the counts before each, and of all."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


class Files:
    """Tables of the same columns, the rows of which follow each other.

    Args:
        paths: where they lie, in order; at least one.
        counts: how many rows they have, if that is known; then a file is opened when it is read.

    Attributes:
        starts: int64, the rows before each file, and all.
    """

    def __init__(self, paths: Sequence[str], counts: Sequence[int] | None = None) -> None:
        self._paths, self._last = list(paths), (-1, None)
        self._is_known = counts is not None
        self.starts = starts_of(self._counted() if counts is None else counts)

    @property
    def path(self) -> str:
        """The first one's."""
        return self._paths[0]

    @property
    def schema(self) -> Any:
        """The first one's."""
        return self.file(0).schema

    def file(self, number: int) -> File:
        """One of them; the last one stays open.

        Raises:
            ValueError: it has another number of rows than was told.
        """
        last, file = self._last
        if last == number and file is not None:
            return file
        file = opened(self._paths[number])
        self._last = (number, file)
        if self._is_known and file.starts[-1] != (expected := np.diff(self.starts)[number]):
            raise ValueError(f"{file.path}: expected {expected} rows, got {file.starts[-1]}.")
        return file

    def _counted(self) -> list[int]:
        """The rows of each, by opening them."""
        names = set(self.file(0).schema.names)
        return [self._rows(number, names) for number in range(len(self._paths))]

    def _rows(self, number: int, names: set[str]) -> int:
        file = self.file(number)
        if set(file.schema.names) != names:
            raise ValueError(
                f"{file.path}: expected the columns {sorted(names)}, as in {self.path}, got "
                f"{sorted(file.schema.names)}."
            )
        return int(file.starts[-1])


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
