"""Parquet and Arrow files that others wrote: opened, looked at, and read by stretches of rows.

T rows over all files.
"""

import abc
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jrb._util import extras
from jrb.datasets.reading.names import natural_order

_ENDINGS = (".parquet", ".arrow", ".feather")
_SIGNATURES = {b"PAR1": "parquet", b"ARRO": "file", b"\xff\xff\xff\xff": "stream"}


def format_of(path: object) -> str | None:
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

    Hidden files are left out, as those whose names begin with `_`, which hold metadata. What is
    named as a table and is none is there, so that it is refused when it is opened.
    """
    if not isinstance(path, str) or not os.path.isdir(path):
        return [path] if format_of(path) else []
    names = sorted(os.listdir(path), key=natural_order)
    found = (os.path.join(path, name) for name in names if name[0] not in "._")
    return [each for each in found if format_of(each) or each.endswith(_ENDINGS)]


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
        raise FileNotFoundError(f"{path}: no such file or directory.")
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

    starts: np.ndarray

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
