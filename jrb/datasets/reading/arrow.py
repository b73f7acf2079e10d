"""Reads Parquet and Arrow files of other programs, column by column, and images in them.

T rows over all files. A group of rows is the unit that a file can read without the rest. Images are
`[height, width, channel]`.
"""

import contextlib
import functools
import io
import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.datasets.reading import names
from jrb.datasets.reading.names import check, natural_order

_ENDINGS = (".parquet", ".arrow", ".feather")
_SIGNATURES = {b"PAR1": "parquet", b"ARRO": "file", b"\xff\xff\xff\xff": "stream"}
_PIECE = 1 << 20  # bytes of a column that are decoded at a time
_IMAGES = 16  # the number of images that are decoded at once
_OPEN = 32  # the maximum number of open files


def format_of(path: object) -> str | None:
    """Returns `parquet`, `file` or `stream` (of Arrow) by a file's first bytes; else None."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            return _SIGNATURES.get(file.read(4))
    except OSError:
        return None


def table_paths(path: Any) -> list[str]:
    """Returns `[path]` for a table, or the paths of a folder's tables, `part-9` before `part-10`.

    Files whose names begin with `.` or `_` are left out: they are hidden or hold metadata. A file
    that has only the ending of a table is kept, so that opening it raises an error.
    """
    if not isinstance(path, str) or not os.path.isdir(path):
        return [path] if format_of(path) else []
    names = sorted(os.listdir(path), key=natural_order)
    paths = (os.path.join(path, name) for name in names if name[0] not in "._")
    return [each for each in paths if format_of(each) or each.endswith(_ENDINGS)]


def explain_damage(path: str) -> contextlib.AbstractContextManager[None]:
    """Turns pyarrow's errors on damaged files into a `ValueError` that names the path."""
    # Imported before the body: a reader closed at the program's end can no longer import.
    damage = (require("pyarrow", "datasets").ArrowException, OSError, UnicodeDecodeError)
    return names.explain_damage(path, "a whole Parquet or Arrow file", damage)


class TableFile:
    """A table in one file, of G groups; `starts`, int64 `[G + 1]`, are their first rows, and T.

    Parquet files have row groups, Arrow files a group for each batch, Arrow streams one group.
    """

    def __init__(self, path: str) -> None:
        self.path: str = path
        self._form = format_of(path)
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path}: no such file or directory.")
        check(self._form, path, "a Parquet or Arrow file", "another")
        with explain_damage(path):
            # Count the rows of each group. Parquet files list them; of Arrow files, one column is
            # read.
            if self._form == "parquet":
                file = require("pyarrow.parquet", "datasets").ParquetFile(path, memory_map=True)
                self.schema: Any = file.schema_arrow
                self._metadata = file.metadata
                groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
                counts = [group.num_rows for group in groups]
            else:
                self.schema = self._reader([]).schema
                # The rows are counted in a column without children, which is read fastest.
                kinds = [field.type.num_fields for field in self.schema]
                batches = self._batches(0, kinds.index(0) if 0 in kinds else 0) if kinds else ()
                counts = [batch.num_rows for batch in batches]
                counts = [sum(counts)] if self._form == "stream" else counts
            names = self.schema.names
        self.starts: np.ndarray = np.cumsum([0, *counts], dtype=np.int64)
        check(len({*names}) == len(names), path, "a name of its own for each column", names)

    def column(self, group: int, name: str, rows: int) -> Iterator[Any]:
        """Yields Arrow arrays of about `rows` rows of a column, from a group on."""
        # Arrow files have batches of their own sizes, which are read one by one.
        if self._form != "parquet":
            for batch in self._batches(group, self.schema.get_field_index(name)):
                yield batch.column(0)
            return
        kind = self.schema.field(name).type
        # Opened for each column: a ParquetFile reads all its columns with one batch size.
        file = require("pyarrow.parquet", "datasets").ParquetFile(
            self.path,
            metadata=self._metadata,
            memory_map=True,
            page_checksum_verification=True,
            # A dictionary keeps a text that many rows share once, instead of a copy for each row.
            read_dictionary=[name] if _is_text(kind) else None,
        )
        groups = list(range(group, len(self.starts) - 1))
        for batch in file.iter_batches(rows, groups, [name], use_threads=False):
            yield batch.column(name)

    def check_numbers(self, group: int, path: str, width: int) -> None:
        """Raises if groups, from `group` on, declare far more than `width` numbers for each row."""
        # Only Parquet declares these numbers for each group of rows.
        for number in range(group, len(self.starts) - 1 if self._form == "parquet" else 0):
            about = self._metadata.row_group(number)
            for column in map(about.column, range(about.num_columns)):
                name = column.path_in_schema
                if name == path or name.startswith(f"{path}.list."):
                    most, count = about.num_rows * max(width, 1), column.num_values
                    where = f"{self.path}: column '{path}'"
                    is_near = count - most < _PIECE  # a smaller excess is found when rows are read
                    check(is_near, where, f"lists of one length, {most} numbers", count)

    def _reader(self, fields: list[int]) -> Any:
        """Opens a reader of the columns with these indices; no other is decompressed."""
        pa, ipc = require("pyarrow", "datasets"), require("pyarrow.ipc", "datasets")
        read = ipc.open_stream if self._form == "stream" else ipc.open_file
        options = ipc.IpcReadOptions(included_fields=fields)
        return read(pa.memory_map(self.path), options=options)

    def _batches(self, group: int, column: int) -> Iterator[Any]:
        reader = self._reader([column])
        if self._form == "stream":
            yield from reader
        else:
            yield from map(reader.get_batch, range(group, reader.num_record_batches))


class ArrowFiles:
    """Files with the same columns, seen as one table with the rows of one file after the other.

    If `counts` gives their numbers of rows, files are opened only when read, else all at once.
    """

    def __init__(self, paths: Sequence[str], counts: Sequence[int] | None = None) -> None:
        self.paths: list[str] = list(paths)
        self._counts = counts
        self._open = functools.lru_cache(maxsize=_OPEN)(TableFile)
        self.schema: Any = self.file(0).schema
        # Without counts, open all files, count their rows and compare their columns.
        if counts is None:
            names, counts = sorted(self.schema.names), list[int]()
            for number, path in enumerate(self.paths):
                file = self.file(number)
                expected = f"the columns {names}, as in {paths[0]}"
                check(sorted(file.schema.names) == names, path, expected, sorted(file.schema.names))
                counts.append(int(file.starts[-1]))
        self.starts: np.ndarray = np.cumsum([0, *counts], dtype=np.int64)

    def file(self, number: int) -> TableFile:
        """Returns an open file; the last few that were used stay open."""
        file = self._open(self.paths[number])
        rows, counts = file.starts[-1], self._counts
        # A file may have changed since its rows were counted.
        expected = rows if counts is None else counts[number]
        check(rows == expected, file.path, f"{expected} rows", rows)
        return file


def fields_by_type(
    schema: Any,
) -> tuple[dict[str, tuple[str, ...]], list[str], list[tuple[tuple[str, ...], Any]]]:
    """Returns the paths of numeric fields by name, the names of text columns, and other fields.

    A path is the name of a column and of the struct fields below it; a name joins these by dots
    (`observation.arm`). Other fields, texts included, are pairs of a path and an Arrow type.
    """
    pa = require("pyarrow", "datasets")
    types, paths, texts = pa.types, dict[str, tuple[str, ...]](), list[str]()
    others, fields = list[Any](), [((field.name,), field.type) for field in schema]
    while fields:
        path, kind = fields.pop(0)
        # Fields of a struct take its place in the list, so the order of the file is kept.
        if types.is_struct(kind):
            fields = [((*path, field.name), field.type) for field in kind] + fields
            continue
        # Look through lists and extension types for the type of the single numbers.
        element = kind
        while _is_list(element) or hasattr(element, "storage_type"):
            axes = getattr(element, "permutation", None)
            # The axes of such a tensor are stored in another order, which reading would not undo.
            if axes is not None and axes != sorted(axes):
                break
            element = element.value_type if _is_list(element) else element.storage_type
        if types.is_integer(element) or types.is_floating(element) or types.is_boolean(element):
            name = ".".join(path)
            check(name not in paths, "columns", "a name of its own for each field", repr(name))
            paths[name] = path
            continue
        others.append((path, kind))
        if len(path) == 1 and _is_text(kind.value_type if types.is_dictionary(kind) else kind):
            texts.append(path[0])
    return paths, texts, others


def _is_text(kind: Any) -> bool:
    types = require("pyarrow", "datasets").types
    return types.is_string(kind) or types.is_large_string(kind)


def _is_list(kind: Any) -> bool:
    types = require("pyarrow", "datasets").types
    return types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)


def note_left_out(others: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    """Returns the note on columns without numbers, given their names and types, or no note."""
    columns = ", ".join(f"{name} ({kind})" for name, kind in others)
    return (f"Columns that hold no numbers are left out: {columns}.",) * bool(others)


class ArrowColumn:
    """A column of numbers that is read from its files by slices, a megabyte at a time.

    All rows must have the shape and dtype of the first. A slice that follows the previous one
    continues its reader; any other begins at the start of its group of rows. `path` is the name of
    the column, followed by those of the struct fields below it.
    """

    def __init__(self, files: ArrowFiles, path: tuple[str, ...]) -> None:
        self._files, self._path = files, path
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._batch: Any = None
        self._lock = threading.Lock()  # threads share the cached tables of recordings
        self._first, self._stop, self._file = 0, -1, 0  # the bounds of the batch, and its file

    def __len__(self) -> int:
        return int(self._files.starts[-1])

    @functools.cached_property
    def _example(self) -> np.ndarray:
        """The first row, `[1, ...]`."""
        batch: Any = next(self._read(0, 1), (0, None))[1]
        self._check(batch is not None, "rows, as the file counts them", "none")
        return self._values(batch.slice(0, 1))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape `[T, ...]`."""
        return (len(self), *self._example.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype."""
        return self._example.dtype

    @property
    def _rows_at_once(self) -> int:
        return max(1, _PIECE // max(1, self._example.nbytes))

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        values = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype)
        # Copy the rows from the batches in which they are.
        with self._lock:
            for place, piece in self._pieces(start, stop):
                part = self._values(piece)
                about = [f"{each.dtype} {list(each.shape[1:])}" for each in (values, part)]
                self._check(about[0] == about[1], *about)
                values[place : place + len(part)] = part
        return values

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Yields Arrow arrays of the rows `start` to `stop`, each with its offset from `start`."""
        row = start
        while row < stop:
            # Rows before the batch, or in a later group, are read with a new reader.
            if row < self._first or self._stop < self._group_of(row)[2]:
                self._batches = self._read(row, self._rows_at_once)
                self._first = self._stop = self._group_of(row)[2]
            while row >= self._stop:
                self._stop = -1  # if the read fails, the next call makes a new reader
                self._first, self._batch = next(self._batches, (row, None))
                self._check(self._batch is not None, "rows, as the file counts them", "none")
                self._stop = self._first + len(self._batch)
            end = min(stop, self._stop)
            yield row - start, self._batch.slice(row - self._first, end - row)
            row = end

    def _group_of(self, row: int) -> tuple[int, int, int]:
        """Returns the indices of a row's file and group, and the first row of that group."""
        # Find the file by its first row, and the group by its first row in the file.
        number = int(np.searchsorted(self._files.starts, row, side="right")) - 1
        begin, starts = int(self._files.starts[number]), self._files.file(number).starts
        group = int(np.searchsorted(starts, row - begin, side="right")) - 1
        return number, group, begin + int(starts[group])

    def _read(self, row: int, count: int) -> Iterator[tuple[int, Any]]:
        """Yields batches of about `count` rows, each with its first row, from `row`'s group on."""
        while row < len(self):
            self._file, group, row = self._group_of(row)
            file = self._files.file(self._file)
            self._check(self._path[0] in file.schema.names, "a column of this name", "none")
            stop = int(self._files.starts[self._file + 1])
            if "_example" in vars(self):
                # Checked before decoding: a kilobyte can hold a list of gigabytes of zeros.
                file.check_numbers(group, ".".join(self._path), math.prod(self.shape[1:]))
            with explain_damage(file.path):
                for batch in file.column(group, self._path[0], count):
                    batch.validate(full=True)
                    yield row, batch
                    row += len(batch)
            # A file that was cut short has fewer rows than it declares.
            self._check(row == stop, f"rows up to {stop}", str(row))

    def _field(self, piece: Any) -> Any:
        """Returns the struct field at this column's path."""
        for name in self._path[1:]:
            piece = piece.flatten()[piece.type.get_field_index(name)]
        return piece

    def _values(self, piece: Any) -> np.ndarray:
        """Converts rows to NumPy, `[rows, ...]`."""
        array, shape = self._field(piece), [len(piece)]
        pa, compute = require("pyarrow", "datasets"), require("pyarrow.compute", "datasets")
        while True:
            # Remove one level of nesting at a time, and collect the shape of a row.
            self._check(array.null_count == 0, "values everywhere", "a null")
            if isinstance(array.type, pa.FixedShapeTensorType):
                shape += array.type.shape
                array = array.storage.flatten()
            elif hasattr(array, "storage"):
                array = array.storage
            elif _is_list(array.type):
                lengths = sorted(compute.unique(compute.list_value_length(array)).to_pylist())
                self._check(len(lengths) < 2, "lists of one length", f"some of {lengths}")
                shape += lengths or [0]
                array = array.flatten()
            else:
                return array.to_numpy(zero_copy_only=False).reshape(shape)

    @property
    def _where(self) -> str:
        return f"{self._files.paths[self._file]}: column '{'.'.join(self._path)}'"

    def _check(self, is_right: bool, expected: str, got: str) -> None:
        check(is_right, self._where, expected, f"{got} in the rows from {self._first} on")


class TextColumn(ArrowColumn):
    """A column of texts, read as an array of Python strings."""

    def _values(self, piece: Any) -> np.ndarray:
        self._check(piece.null_count == 0, "texts everywhere", "a null")
        # Each distinct text becomes one Python string, which many rows may share.
        piece = piece.dictionary_encode() if _is_text(piece.type) else piece
        return np.array(piece.dictionary.to_pylist(), object)[piece.indices.to_numpy()]


class ImageColumn(ArrowColumn):
    """A column of encoded images, which are bytes or `{bytes, path}`; reading decodes them.

    Gray images get an axis of one channel, unless `has_channels` is False.
    """

    def __init__(self, files: ArrowFiles, path: tuple[str, ...], has_channels: bool = True) -> None:
        super().__init__(files, path)
        self._has_channels = has_channels

    @property
    def _rows_at_once(self) -> int:
        return _IMAGES

    def _values(self, piece: Any) -> np.ndarray:
        types = require("pyarrow", "datasets").types
        array = self._field(piece)
        # A struct has the bytes of the image, and often a path, which is not read.
        if types.is_struct(array.type):
            place = array.type.get_field_index("bytes")
            self._check(place >= 0, "a field 'bytes'", str(array.type))
            array = array.flatten()[place]
        is_bytes = types.is_binary(array.type) or types.is_large_binary(array.type)
        self._check(is_bytes, "images as bytes", str(array.type))
        self._check(array.null_count == 0, "the bytes of images", "a null")
        # Decode the images, and compare each with the first of the column.
        images = [decode_image(data, self._where) for data in array.to_pylist()]
        if self._has_channels:
            images = [image if image.ndim == 3 else image[..., None] for image in images]
        first = vars(self)["_example"][0] if "_example" in vars(self) else images[0]
        for image in images:
            about = [f"{each.dtype} {list(each.shape)}" for each in (first, image)]
            self._check(about[0] == about[1], *about)
        return np.stack(images)


def decode_image(data: bytes, where: str) -> np.ndarray:
    """Decodes an image to `[height, width]` or `[height, width, channel]`; raises if damaged."""
    pillow = require("PIL.Image", "datasets")
    damage = (OSError, SyntaxError, ValueError, pillow.DecompressionBombError)
    # The pixels of a palette image are indices of colours, so such an image becomes RGB.
    with (
        names.explain_damage(where, "whole images", damage),
        pillow.open(io.BytesIO(data)) as image,
    ):
        return np.array(image.convert("RGB") if image.mode == "P" else image)
