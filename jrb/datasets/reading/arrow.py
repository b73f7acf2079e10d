"""Parquet and Arrow files that others wrote: opened, looked at, and read column by column.

T rows over all files.
"""

import abc
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.datasets.reading.names import natural_order

_ENDINGS = (".parquet", ".arrow", ".feather")
_SIGNATURES = {b"PAR1": "parquet", b"ARRO": "file", b"\xff\xff\xff\xff": "stream"}
_PIECE = 4 << 20  # bytes of a column that are decoded at a time


def format_of(path: object) -> str | None:
    """Returns `parquet`, or Arrow's `file` or `stream`, by how a file begins; None for others."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            return _SIGNATURES.get(file.read(4))
    except OSError:
        return None


def tables(path: Any) -> list[str]:
    """Returns the path of a table, or of those in a folder, `part-9` before `part-10`.

    Hidden files are left out, as those whose names begin with `_`, which hold metadata. A file with
    the name of a table that is none is kept, so that it is refused when it is opened.
    """
    if not isinstance(path, str) or not os.path.isdir(path):
        return [path] if format_of(path) else []
    names = sorted(os.listdir(path), key=natural_order)
    paths = (os.path.join(path, name) for name in names if name[0] not in "._")
    return [each for each in paths if format_of(each) or each.endswith(_ENDINGS)]


@contextlib.contextmanager
def refused(path: str) -> Iterator[None]:
    """Raises `ValueError` with the path for what pyarrow raises over damaged files."""
    pa = require("pyarrow", "datasets")
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(
            f"{path}: expected a whole Parquet or Arrow file, got one that is not: {error}"
        ) from error


class TableFile(abc.ABC):
    """A table in a file.

    Attributes:
        path: of the file.
        schema: Arrow's.
        starts: int64 `[G + 1]`, the rows before each of G groups that can be read alone, and all.
    """

    path: str
    schema: Any
    starts: np.ndarray

    @abc.abstractmethod
    def batches(self, group: int, name: str, rows: int) -> Iterator[Any]:
        """Yields a column from a group on, in arrays of Arrow of about so many rows."""


class _ParquetFile(TableFile):
    def __init__(self, path: str) -> None:
        self._parquet = require("pyarrow.parquet", "datasets")
        file = self._parquet.ParquetFile(path, memory_map=True)
        self.path, self.schema, self._metadata = path, file.schema_arrow, file.metadata
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        self.starts = starts_of([group.num_rows for group in groups])

    def batches(self, group: int, name: str, rows: int) -> Iterator[Any]:
        groups = list(range(group, len(self.starts) - 1))
        # A file of its own: it keeps one number of rows that are read at once for all its columns.
        file = self._parquet.ParquetFile(
            self.path, metadata=self._metadata, memory_map=True, page_checksum_verification=True
        )
        for batch in file.iter_batches(rows, groups, [name], use_threads=False):
            yield batch.column(name)


class _ArrowFile(TableFile):
    """An Arrow file, whose batches are its groups, or a stream, which is one group."""

    def __init__(self, path: str, is_stream: bool) -> None:
        self._ipc = require("pyarrow.ipc", "datasets")
        self.path, self._is_stream = path, is_stream
        self.schema = self._reader(None).schema
        flat = [number for number, each in enumerate(self.schema) if each.type.num_fields == 0]
        counts = [batch.num_rows for batch in self._read(0, flat[0] if flat else 0)]
        self.starts = starts_of([sum(counts)] if is_stream else counts)

    def batches(self, group: int, name: str, rows: int) -> Iterator[Any]:
        for batch in self._read(group, self.schema.get_field_index(name)):
            yield batch.column(0)

    def _reader(self, column: int | None) -> Any:
        """Opens a reader of one column, so that no other is decompressed."""
        opened = self._ipc.open_stream if self._is_stream else self._ipc.open_file
        options = self._ipc.IpcReadOptions(included_fields=[] if column is None else [column])
        return opened(require("pyarrow", "datasets").memory_map(self.path), options=options)

    def _read(self, first: int, column: int) -> Iterator[Any]:
        if not len(self.schema):
            return
        reader = self._reader(column)
        if self._is_stream:
            yield from reader
        else:
            yield from map(reader.get_batch, range(first, reader.num_record_batches))


def opened(path: str) -> TableFile:
    """Opens a table.

    Raises:
        ValueError: it is damaged, is none, or has two columns of one name.
        FileNotFoundError: there is no such file.
    """
    form = format_of(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    if form is None:
        raise ValueError(f"{path}: expected a Parquet or Arrow file, got another.")
    with refused(path):
        file = _ParquetFile(path) if form == "parquet" else _ArrowFile(path, form == "stream")
        names = file.schema.names
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: expected a name of its own for each column, got {names}.")
    return file


def starts_of(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns int64, the sum of the counts before each, and of all."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


class ArrowFiles:
    """Tables of the same columns, the rows of which follow each other.

    Args:
        paths: of the files, in order; at least one.
        counts: the rows of each, if they are known; a file is then opened when it is read.

    Attributes:
        starts: int64, the rows before each file, and all.
    """

    starts: np.ndarray

    def __init__(self, paths: Sequence[str], counts: Sequence[int] | None = None) -> None:
        self._paths, self._counts = list(paths), counts
        self._newest: tuple[int, TableFile | None] = -1, None
        self.starts = starts_of(self._counted() if counts is None else counts)

    @property
    def path(self) -> str:
        """The path of the first file."""
        return self._paths[0]

    @property
    def schema(self) -> Any:
        """The schema of the first file."""
        return self.file(0).schema

    def file(self, number: int) -> TableFile:
        """Opens a file; the newest one stays open.

        Raises:
            ValueError: it has another number of rows than `counts`.
        """
        newest, file = self._newest
        if newest != number or file is None:
            file = opened(self._paths[number])
            self._newest = number, file
        if self._counts is not None and file.starts[-1] != self._counts[number]:
            raise ValueError(
                f"{file.path}: expected {self._counts[number]} rows, got {file.starts[-1]}."
            )
        return file

    def _counted(self) -> list[int]:
        """Opens all files for their numbers of rows; refuses other columns than the first has."""
        names, counts = sorted(self.schema.names), list[int]()
        for number in range(len(self._paths)):
            file = self.file(number)
            if sorted(file.schema.names) != names:
                raise ValueError(
                    f"{file.path}: expected the columns {names}, as in {self.path}, got "
                    f"{sorted(file.schema.names)}."
                )
            counts.append(int(file.starts[-1]))
        return counts


@dataclasses.dataclass(frozen=True)
class ArrowLeaf:
    """The contents of a column, or of a field of a column of structs.

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
        """The names joined by dots, such as `observation.arm`."""
        return ".".join(self.path)


def numeric_leaves(schema: Any) -> tuple[list[ArrowLeaf], list[str]]:
    """Returns the leaves of numbers; and the names of others, with their types."""
    leaves, others = list[ArrowLeaf](), list[str]()
    for field in schema:
        _collect((field.name,), field.type, leaves, others)
    names = [leaf.name for leaf in leaves]
    if len(set(names)) < len(names):
        raise ValueError(f"expected a name of its own for each column and field, got {names}.")
    return leaves, others


def _collect(
    path: tuple[str, ...], arrow_type: Any, leaves: list[ArrowLeaf], others: list[str]
) -> None:
    if require("pyarrow", "datasets").types.is_struct(arrow_type):
        for field in arrow_type:
            _collect((*path, field.name), field.type, leaves, others)
    elif (leaf := _leaf(path, arrow_type)) is None:
        others.append(f"{'.'.join(path)} ({arrow_type})")
    else:
        leaves.append(leaf)


def _leaf(path: tuple[str, ...], arrow_type: Any) -> ArrowLeaf | None:
    """Returns the leaf of a type; None if it is not of numbers."""
    pa = require("pyarrow", "datasets")
    shape, levels = None, list[int | None]()
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        if arrow_type.permutation not in (None, sorted(arrow_type.permutation or ())):
            return None
        shape = tuple(arrow_type.shape)
    element = _storage_type(arrow_type)
    while True:
        if pa.types.is_fixed_size_list(element):
            levels.append(element.list_size)
        elif pa.types.is_list(element) or pa.types.is_large_list(element):
            levels.append(None)
        else:
            break
        element = _storage_type(element.value_type)
    is_number = pa.types.is_integer(element) or pa.types.is_floating(element)
    if not is_number and not pa.types.is_boolean(element):
        return None
    return ArrowLeaf(path, np.dtype(element.to_pandas_dtype()), tuple(levels), shape)


def _storage_type(arrow_type: Any) -> Any:
    """Returns the type in which an extension's type is stored."""
    is_extension = hasattr(arrow_type, "storage_type")
    return _storage_type(arrow_type.storage_type) if is_extension else arrow_type


def _storage(array: Any) -> Any:
    """Returns an array of an extension's type as it is stored."""
    return _storage(array.storage) if hasattr(array, "storage") else array


def text_columns(schema: Any) -> list[str]:
    """Returns the names of columns of texts."""
    types, names = require("pyarrow", "datasets").types, list[str]()
    for field in schema:
        is_dictionary = types.is_dictionary(field.type)
        element = field.type.value_type if is_dictionary else field.type
        if types.is_string(element) or types.is_large_string(element):
            names.append(field.name)
    return names


def left_out(others: Sequence[str]) -> tuple[str, ...]:
    """Returns the note on columns that hold no numbers."""
    return (f"Columns that hold no numbers are left out: {', '.join(others)}.",) * bool(others)


class ArrowColumn:
    """A column of numbers, read from its files by slices, a few megabytes at a time.

    Rows that follow those that were read last are read on from there; for others, reading begins
    with their group of rows.
    """

    def __init__(self, files: ArrowFiles, leaf: ArrowLeaf) -> None:
        self._files, self._leaf, self._path = files, leaf, files.path
        self._batches: Iterator[Any] = iter(())
        # The batch of rows from `first` to `stop`, in a group of a file.
        self._batch: Any = None
        self._first = self._stop = self._file = self._group = -1
        self._starts = starts_of([])
        if None in leaf.levels:
            self._leaf = dataclasses.replace(leaf, levels=self._first_lengths())
            self._file = -1  # reading begins anew: so far, one row was read at once

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        row = self._leaf.levels if self._leaf.shape is None else self._leaf.shape
        return (len(self), *(size or 0 for size in row))

    @property
    def dtype(self) -> np.dtype:
        """A dtype of NumPy."""
        return self._leaf.dtype

    def __len__(self) -> int:
        """T."""
        return int(self._files.starts[-1])

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Returns the rows of a slice, in an array of their own."""
        start, stop, _ = rows.indices(len(self))
        values, place = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype), 0
        for piece in self._pieces(start, stop):
            values[place : place + len(piece)] = self._values(piece)
            place += len(piece)
        return values

    def _pieces(self, start: int, stop: int) -> Iterator[Any]:
        """Yields arrays of Arrow with these rows, and no others."""
        while start < stop:
            self._reach(start)
            end = min(stop, self._stop)
            yield self._batch.slice(start - self._first, end - start)
            start = end

    def _reach(self, row: int) -> None:
        """Reads batches up to the one that a row is in."""
        number = int(np.searchsorted(self._files.starts, row, side="right")) - 1
        if number != self._file:
            file = self._files.file(number)
            self._file, self._starts, self._path = number, file.starts, file.path
            self._stop = -1
        begin = int(self._files.starts[number])
        group = int(np.searchsorted(self._starts, row - begin, side="right")) - 1
        if not self._first <= row or self._stop < 0 or group > self._group + 1:
            file, name = self._files.file(number), self._leaf.path[0]
            self._check(name in file.schema.names, "a column of this name", "none")
            self._batches = file.batches(group, name, self._rows_at_once)
            self._first = self._stop = begin + int(self._starts[group])
        with refused(self._path):
            while self._stop <= row:
                batch = next(self._batches, None)
                if batch is None:
                    raise ValueError(
                        f"{self._path}: expected more rows of '{self._leaf.name}', got none."
                    )
                batch.validate(full=True)
                self._batch = batch
                self._first, self._stop = self._stop, self._stop + len(batch)
        self._group = group

    @property
    def _rows_at_once(self) -> int:
        if None in self._leaf.levels:
            return 1
        sizes = [size for size in self._leaf.levels if size]
        return max(1, _PIECE // (self.dtype.itemsize * int(np.prod(sizes, dtype=np.int64))))

    def _first_lengths(self) -> tuple[int, ...]:
        """Reads how long the lists of the first row are."""
        array, lengths = self._field(next(self._pieces(0, 1))), list[int]()
        for _ in self._leaf.levels:
            array = _storage(array)
            self._check_no_nulls(array)
            lengths.append(int(_list_lengths(array)[0]) if len(array) else 0)
            array = array.flatten().slice(0, 1)
        return tuple(lengths)

    def _field(self, array: Any) -> Any:
        """Returns the field of a column of structs."""
        for name in self._leaf.path[1:]:
            array = array.flatten()[array.type.get_field_index(name)]
        return array

    def _values(self, piece: Any) -> np.ndarray:
        """Converts rows to NumPy."""
        array = self._field(piece)
        for size in self._leaf.levels:
            array = _storage(array)
            self._check_no_nulls(array)
            lengths = _list_lengths(array)
            is_right = bool((lengths == size).all())
            self._check(is_right, f"lists of {size}", f"some of {sorted(set(lengths.tolist()))}")
            array = array.flatten()
        self._check_no_nulls(array)
        values = array.to_numpy(zero_copy_only=False)
        self._check(values.dtype == self.dtype, str(self.dtype), str(values.dtype))
        return values.reshape(len(piece), *self.shape[1:])

    def _check_no_nulls(self, array: Any) -> None:
        self._check(array.null_count == 0, "values everywhere", "a null")

    def _check(self, is_right: bool, expected: str, got: str) -> None:
        if not is_right:
            raise ValueError(
                f"{self._path}: column '{self._leaf.name}': expected {expected}, got {got} in the "
                f"rows from {self._first} on."
            )


class TextColumn(ArrowColumn):
    """A column of texts, read as an array of Python strings."""

    def __init__(self, files: ArrowFiles, name: str) -> None:
        super().__init__(files, ArrowLeaf((name,), np.dtype(object)))

    def _values(self, piece: Any) -> np.ndarray:
        self._check(piece.null_count == 0, "texts everywhere", "a null")
        return np.array(piece.to_pylist(), object)


def _list_lengths(array: Any) -> np.ndarray:
    compute = require("pyarrow.compute", "datasets")
    return compute.list_value_length(array).to_numpy(zero_copy_only=False)
