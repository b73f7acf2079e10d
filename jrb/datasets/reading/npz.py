"""Reads `.npz` archives of other programs, one array at a time, as `np.load` does. T rows."""

import contextlib
import functools
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrb.authoring import MAX_EXPANSION, ExpansionLimit
from jrb.datasets.reading.names import check_names
from jrb.datasets.reading.tabular import Column, DerivedColumn, by_content

_SIGNATURE, _SUFFIX = b"PK\x03\x04", ".npy"
_END, _END_SIZE = b"PK\x05\x06", 22 + (1 << 16)  # a zip's end record, with the longest comment
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Errors of zipfile, zlib and NumPy on damage; `RuntimeError` includes `NotImplementedError`.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)


@contextlib.contextmanager
def open_file(path: str, max_expansion: float = MAX_EXPANSION) -> Iterator[dict[str, Column]]:
    """Opens an archive; yields its arrays by name (`a/b`), None for members that are no arrays.

    Raises if it is cut short, damaged or encrypted, or declares more than `max_expansion` times
    the bytes that it stores.
    """
    with _archive(path) as archive:
        members = archive.infolist()
        # Checked before decompression: a kilobyte can hold gigabytes of zeros.
        ExpansionLimit(path, [path], max_expansion).add(sum(each.file_size for each in members))
        arrays = {_name(info): _array(path, archive, info) for info in members}
        *_, others = by_content(arrays)
        for info in members:
            if _name(info) in others:
                # It may be a damaged array, so it is read to the end, where zipfile checks CRC-32.
                with _refused(path, info), archive.open(info) as file:
                    while file.read(1 << 20):
                        pass
        yield arrays


def is_npz(path: object) -> bool:
    """Returns True if a path is a file that begins as a zip archive."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def top(path: Any) -> set[str]:
    """Returns the names of the numeric arrays in a file; none if it is not an intact archive."""
    if not is_npz(path):
        return set()
    try:
        with _archive(path) as archive:
            members = archive.infolist()
            return {*by_content({_name(info): _array(path, archive, info) for info in members})[0]}
    except (ValueError, OSError):
        return set()


def _name(info: zipfile.ZipInfo) -> str:
    return info.filename.removesuffix(_SUFFIX)


@contextlib.contextmanager
def _archive(path: str) -> Iterator[zipfile.ZipFile]:
    """Opens an archive, and checks the number and the names of its members."""
    with contextlib.ExitStack() as stack:
        with _refused(path):  # not by np.load, which leaves a damaged file open
            archive = stack.enter_context(zipfile.ZipFile(path))
            count = len(archive.infolist())
            # zipfile accepts a directory with fewer members than the archive's end record counts.
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - _END_SIZE))
                tail = file.read()
            at = tail.rfind(_END)
            declared = int.from_bytes(tail[at + 10 : at + 12], "little")
            if declared not in (count, 0xFFFF):
                raise zipfile.BadZipFile(f"{declared} members by its directory, got {count}")
        check_names(path, map(_name, archive.infolist()))
        yield archive


def _array(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> DerivedColumn | None:
    """Reads the header of an array; returns None if a member is no array, or one of objects.

    The whole array is read at the first access to a row.
    """
    with _refused(path, info), archive.open(info) as file:
        if not info.filename.endswith(_SUFFIX):
            return None
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:  # version 3 is only for structured dtypes, which are left out
            return None
        shape, _, dtype = _HEADERS[version](file)
        if dtype.hasobject:
            return None
        size, nbytes = info.file_size - file.tell(), math.prod(shape) * dtype.itemsize
        if size != nbytes:
            raise ValueError(f"{nbytes} bytes for shape {shape} of {dtype}, got {size}")

    @functools.cache
    def whole() -> np.ndarray:
        # The sizes fit, so this reads to the end of the member, where zipfile checks its CRC-32.
        with _refused(path, info), archive.open(info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return DerivedColumn(shape, dtype, lambda start, stop: np.array(whole()[start:stop]))


@contextlib.contextmanager
def _refused(path: str, info: zipfile.ZipInfo | None = None) -> Iterator[None]:
    """Turns errors of zipfile and NumPy on damage into a `ValueError` with file and member."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except _DAMAGED as error:
        member = f" '{info.filename}':" if info else ""
        raise ValueError(
            f"{path}:{member} expected a whole .npz file, got one that is damaged: {error}"
        ) from error
