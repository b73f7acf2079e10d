"""`.npz` archives that others wrote, their arrays read by slices and checked by their CRC-32.

An array that is not compressed is mapped into memory, so that of a large archive only what is used
is read; a compressed one is decompressed as a whole. Either is compared with its CRC-32 before its
first row is given out. T rows.
"""

import contextlib
import functools
import math
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jrb._util import expansion
from jrb.datasets.reading.flat import Column
from jrb.datasets.reading.names import check_names
from jrb.datasets.reading.stat_cache import Remembered, stamps

_SIGNATURE, _SUFFIX = b"PK\x03\x04", ".npy"
_LOCAL = struct.Struct("<4s5H3I2H")  # the header before the data of a member
_END, _END_SIZE, _COMMENT = b"PK\x05\x06", 22, 1 << 16  # of the directory at the end of the file
_PIECE = 1 << 20  # bytes
_SETTLED = 2.0  # seconds
_ENCRYPTED, _SIZES_FOLLOW = 1, 8  # bits of a member's flags
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, RuntimeError)


class Archive(NamedTuple):
    """What is in an archive.

    Attributes:
        columns: the arrays of numbers `[T, ...]`, by name (`a/b`).
        texts: the arrays of texts `[T]`, by name.
        left_out: the names of everything else, such as objects and single numbers.
    """

    columns: dict[str, Column]
    texts: dict[str, Column]
    left_out: tuple[str, ...]


class _Header(NamedTuple):
    """The size of an array's own header in bytes, and what it declares."""

    size: int
    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextlib.contextmanager
def opened(path: str, max_expansion: float = expansion.MAX_EXPANSION) -> Iterator[Archive]:
    """Opens an archive for reading.

    Raises:
        ValueError: it is cut short, damaged or encrypted, two arrays have one name, or it declares
            many times more than it stores.
    """
    with _directory(path) as archive:
        declared = sum(info.file_size for info in archive.infolist())
        expansion.Limit(path, [path], max_expansion).add(declared)
        columns: dict[str, Column] = {}
        texts: dict[str, Column] = {}
        left_out: list[str] = []
        for info in archive.infolist():
            name, array = info.filename.removesuffix(_SUFFIX), _array(path, archive, info)
            if array is not None and array.is_column:
                columns[name] = array
            elif array is not None and array.is_text:
                texts[name] = array
            else:
                # Damage may have made something else of a column, so these are checked at once.
                _check_sum(path, archive, info)
                left_out.append(name)
        yield Archive(columns, texts, tuple(left_out))


@contextlib.contextmanager
def _directory(path: str) -> Iterator[zipfile.ZipFile]:
    """Opens an archive of which the names of all members are fine."""
    with contextlib.ExitStack() as stack:
        with _refused(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            _check_count(path, len(archive.infolist()))
        check_names(path, [info.filename.removesuffix(_SUFFIX) for info in archive.infolist()])
        yield archive


def is_npz(path: object) -> bool:
    """Whether a file begins as an archive."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def top(path: Any) -> dict[str, Any]:
    """Returns shape and dtype of each array of numbers; nothing of what is no whole archive."""
    if not is_npz(path):
        return {}
    try:
        with _directory(path) as archive:
            arrays = [(info, _array(path, archive, info)) for info in archive.infolist()]
    except (ValueError, OSError):
        return {}
    return {
        info.filename.removesuffix(_SUFFIX): (array.shape, array.dtype)
        for info, array in arrays
        if array is not None and array.is_column
    }


class _Array:
    """An array of an archive, read and checked when its first row is asked for."""

    def __init__(
        self, path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, header: _Header
    ) -> None:
        self._path, self._archive, self._info, self._header = path, archive, info, header
        self.shape, self.dtype = header.shape, header.dtype
        self.is_column = bool(self.shape) and self.dtype.kind in "biufc"
        self.is_text = len(self.shape) == 1 and self.dtype.kind in "US"

    def __len__(self) -> int:
        """T."""
        return self.shape[0]

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Returns a copy of these rows."""
        return np.array(self._whole[part])

    @functools.cached_property
    def _whole(self) -> np.ndarray:
        if self._info.compress_type == zipfile.ZIP_STORED:
            return self._mapped()
        with _refused(self._path, self._info), self._archive.open(self._info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    def _mapped(self) -> np.ndarray:
        """Maps the array where it lies in the file."""
        _check_sum(self._path, self._archive, self._info)
        with open(self._path, "rb") as file:
            start = _data_of(self._path, file, self._info) + self._header.size
        if not self._header.nbytes:
            return np.empty(self.shape, self.dtype)
        order = "F" if self._header.is_fortran else "C"
        return np.memmap(self._path, self.dtype, "r", start, self.shape, order)


_whole: Remembered[set[str]] = Remembered()
"""The members of files whose checksums are known to be right."""


def _check_sum(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Reads a member to its end, where zipfile compares the CRC-32; once for each file."""
    whole = _whole.get(stamps([path]), set)
    if info.filename in whole:
        return
    with _refused(path, info), archive.open(info) as file:
        while file.read(_PIECE):
            pass
    # Clocks of file systems are coarse: a file changed just now may change again unseen.
    if time.time() - os.path.getmtime(path) > _SETTLED:
        whole.add(info.filename)


def _array(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> "_Array | None":
    """Reads what an array says of itself; None for a member that is no array.

    Every member is opened, as zipfile then compares its two names, which damage may have changed.
    """
    if info.flag_bits & _ENCRYPTED:
        raise _damage(path, info.filename, "data in the clear, got encrypted ones")
    with _refused(path, info), archive.open(info) as file:
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise _damage(path, info.filename, f"{info.file_size} bytes, got {info.compress_size}")
        with open(path, "rb") as raw:
            _data_of(path, raw, info)
        if not info.filename.endswith(_SUFFIX):
            return None
        try:
            read = _HEADERS.get(np.lib.format.read_magic(file))
            # Other versions have names of fields in Unicode, which no column has.
            header = None if read is None else _Header(0, *read(file))._replace(size=file.tell())
        except ValueError as error:
            raise _damage(path, info.filename, f"an array, got something else: {error}") from error
    if header is None or header.dtype.hasobject:
        return None
    if header.size + header.nbytes != info.file_size:
        expected = f"{header.nbytes} bytes for shape {header.shape} of {header.dtype}"
        raise _damage(path, info.filename, f"{expected}, got {info.file_size - header.size}")
    return _Array(path, archive, info, header)


def _data_of(path: str, file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Returns where the data of a member begin; refuses two headers that contradict each other."""
    file.seek(info.header_offset)
    local = file.read(_LOCAL.size)
    if len(local) < _LOCAL.size or not local.startswith(_SIGNATURE):
        raise _damage(path, info.filename, "a header, got something else")
    _, _, flags, method, _, _, crc, packed, size, name, more = _LOCAL.unpack(local)
    found = [flags, method]
    wanted = [info.flag_bits, info.compress_type]
    if not flags & _SIZES_FOLLOW:
        found, wanted = [*found, crc], [*wanted, info.CRC]
        # All ones say that the number stands elsewhere, as it has more than 32 bits or may have.
        known = [(packed, info.compress_size), (size, info.file_size)]
        found += [one for one, _ in known if one != 0xFFFFFFFF]
        wanted += [other for one, other in known if one != 0xFFFFFFFF]
    if found != wanted:
        raise _damage(path, info.filename, f"a header with {wanted}, as at the end, got {found}")
    return info.header_offset + _LOCAL.size + name + more


def _check_count(path: str, count: int) -> None:
    """Refuses an archive with other members than its directory counts."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _END_SIZE - _COMMENT))
        tail = file.read()
    place = tail.rfind(_END)
    told = int.from_bytes(tail[place + 10 : place + 12], "little")
    if told not in (count, 0xFFFF):
        raise zipfile.BadZipFile(f"{told} members by its directory, {count} found")


@contextlib.contextmanager
def _refused(path: str, info: zipfile.ZipInfo | None = None) -> Iterator[None]:
    """Tells of damage with the file and the member."""
    try:
        yield
    except _DAMAGED as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        member = f" '{info.filename}':" if info else ""
        raise ValueError(
            f"{path}:{member} expected a whole .npz file, got one that is damaged: {error}"
        ) from error


def _damage(path: str, name: str, what: str) -> ValueError:
    return ValueError(f"{path}: '{name}': expected {what}. The file may be cut or damaged.")
