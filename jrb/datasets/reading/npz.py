"""`.npz` archives that others wrote, their arrays read by slices.

What is not compressed is mapped into memory where it lies. What is compressed is decompressed as it
is gone through, so that a large archive takes little memory; going back begins anew. T rows.
"""

import contextlib
import math
import mmap
import os
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jrb.datasets.reading.flat import Column
from jrb.datasets.reading.names import check_names

_SIGNATURE, _SUFFIX = b"PK\x03\x04", ".npy"
_BEFORE_NAME, _ENCRYPTED = 30, 1  # bytes of a local header; a bit of its flags
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


class Archive(NamedTuple):
    """What is in an archive.

    Attributes:
        columns: the arrays of numbers `[T, ...]`, by name (`a/b`).
        left_out: the names of the rest: texts, objects, single numbers.
    """

    columns: dict[str, Column]
    left_out: tuple[str, ...]


class _Header(NamedTuple):
    """What stands before the data of an array: how many bytes, and what they say."""

    size: int
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype

    @property
    def is_column(self) -> bool:
        return bool(self.shape) and self.dtype.kind in "biufc"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextlib.contextmanager
def opened(path: str) -> Iterator[Archive]:
    """The archive, to be read.

    Raises:
        ValueError: it is cut short, damaged or encrypted, or two arrays have one name.
    """
    try:
        with zipfile.ZipFile(path) as file, contextlib.ExitStack() as streams:
            columns: dict[str, Column] = {}
            left_out: list[str] = []
            names = [info.filename.removesuffix(_SUFFIX) for info in file.infolist()]
            check_names(path, names)
            for name, info in zip(names, file.infolist(), strict=True):
                header = _header(path, file, info)
                if header is None or not header.is_column:
                    left_out.append(name)
                else:
                    columns[name] = _column(path, file, info, header, streams)
            yield Archive(columns, tuple(left_out))
    except _DAMAGED as error:
        raise ValueError(f"{path}: expected a whole .npz file, got one that is not: {error}") from (
            error
        )


def is_npz(path: object) -> bool:
    """Whether a path is that of an archive, such as `.npz` is."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def top(path: Any) -> dict[str, Any]:
    """Shape and dtype of each array of numbers, by name; nothing if this is no whole archive."""
    if not is_npz(path):
        return {}
    try:
        with opened(path) as archive:
            return {name: (leaf.shape, leaf.dtype) for name, leaf in archive.columns.items()}
    except (ValueError, OSError):
        return {}


class Mapped:
    """A column that lies in a file as it is."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __len__(self) -> int:
        """T."""
        return self.shape[0]

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """A copy of these rows."""
        return np.array(self._array[part])


class Packed:
    """A column that is compressed."""

    def __init__(self, path: str, archive: zipfile.ZipFile, info: Any, header: _Header) -> None:
        self._path, self._archive, self._info, self._header = path, archive, info, header
        self.shape, self.dtype = header.shape, header.dtype
        self._file: Any = None
        self._place, self._last = 0, np.empty((0, *self.shape[1:]), self.dtype)

    def __len__(self) -> int:
        """T."""
        return self.shape[0]

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """These rows; the last one that was read comes without going back."""
        start, stop, _ = part.indices(len(self))
        rows = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype)
        if not rows.nbytes:
            return rows
        again = len(self._last) if start == self._place - len(self._last) else 0
        rows[:again] = self._last[:again]
        self._read(rows[again:], start + again)
        self._place, self._last = stop, rows[-1:].copy()
        return rows

    def close(self) -> None:
        """Closes its stream."""
        if self._file is not None:
            self._file.close()

    def _read(self, rows: np.ndarray, start: int) -> None:
        if not len(rows):
            return
        if self._file is None:
            self._file = self._archive.open(self._info)
        if not len(self._last) or start != self._place:
            self._file.seek(self._header.size + start * (rows.nbytes // len(rows)))
        target = memoryview(rows.data).cast("B")
        found = self._file.read(len(target))
        if len(found) != len(target):
            what = self._info.filename
            raise _damage(self._path, what, f"{len(target)} bytes, got {len(found)}")
        target[:] = found


def _header(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Header | None:
    """What a member says of itself; None for one that is no array."""
    if not info.filename.endswith(_SUFFIX):
        return None
    if info.flag_bits & _ENCRYPTED:
        raise _damage(path, info.filename, "data in the clear, got encrypted ones")
    with archive.open(info) as file:
        try:
            read = _HEADERS.get(np.lib.format.read_magic(file))
            if read is None:  # names of fields in Unicode, which no column has
                return None
            shape, is_fortran, dtype = read(file)
        except ValueError as error:
            raise _damage(path, info.filename, f"an array, got something else: {error}") from error
        header = _Header(file.tell(), shape, is_fortran, dtype)
    if header.is_column and header.size + header.nbytes != info.file_size:
        expected = f"{header.nbytes} bytes for shape {shape} of {dtype}"
        got = info.file_size - header.size
        raise _damage(path, info.filename, f"{expected}, got {got}")
    return header


def _column(
    path: str,
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    header: _Header,
    streams: contextlib.ExitStack,
) -> Column:
    if info.compress_type == zipfile.ZIP_STORED:
        return Mapped(_mapped(path, info, header))
    if header.is_fortran and len(header.shape) > 1:
        raise ValueError(
            f"{path}: '{info.filename}': expected rows that lie together, got a compressed array "
            "in the order of Fortran. Save np.ascontiguousarray of it, or do not compress."
        )
    packed = Packed(path, archive, info, header)
    streams.callback(packed.close)
    return packed


def _mapped(path: str, info: zipfile.ZipInfo, header: _Header) -> np.ndarray:
    """The array where it lies in the file."""
    order = "F" if header.is_fortran else "C"
    with open(path, "rb") as file:
        place = _data_of(path, file, info) + header.size
        if not header.nbytes:
            return np.empty(header.shape, header.dtype)
        if place + header.nbytes > os.fstat(file.fileno()).st_size:
            raise _damage(path, info.filename, f"{header.nbytes} bytes, got fewer")
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(header.shape, header.dtype, whole, place, order=order)


def _data_of(path: str, file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where the data of a member begins: behind its local header, and the name and more in that."""
    file.seek(info.header_offset)
    local = file.read(_BEFORE_NAME)
    if len(local) < _BEFORE_NAME or not local.startswith(_SIGNATURE):
        raise _damage(path, info.filename, "a header, got something else")
    name, more = (int.from_bytes(local[place : place + 2], "little") for place in (26, 28))
    return info.header_offset + _BEFORE_NAME + name + more


def _damage(path: str, name: str, what: str) -> ValueError:
    return ValueError(f"{path}: '{name}': expected {what}. The file may be cut or damaged.")
