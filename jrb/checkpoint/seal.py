"""A checksum behind the last byte of a file, looked at before a library trusts what it reads.

HDF5 may read a damaged file forever. It ignores what stands behind the end of a file, and cuts it
off when it writes to the file: one that something else has changed has no seal.
"""

import os
import struct
import zlib

import numpy as np

from jrb._store import files
from jrb._store.errors import DamagedError

_MARK = b"jrb-crc1"
_FORM = struct.Struct("<8sIQ")  # the mark, the CRC-32 of all before it, and how many bytes that is
_PIECE = 4 << 20  # bytes


def put(file: int, path: str) -> None:
    """Puts a seal behind a file that is open to be read and written."""
    size = os.fstat(file).st_size
    files.write_at(file, path, size, _FORM.pack(_MARK, _sum(file, path, size), size))


def is_there(path: str) -> bool:
    """Returns whether a file ends with a seal."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _FORM.size))
        return file.read().startswith(_MARK)


def check(path: str) -> None:
    """Raises `DamagedError` if a file with a seal is not what was sealed."""
    file = os.open(path, os.O_RDONLY)
    try:
        whole = os.fstat(file).st_size
        tail = os.pread(file, _FORM.size, max(0, whole - _FORM.size))
        if _MARK not in tail:
            return
        mark, expected, size = _FORM.unpack(tail.rjust(_FORM.size))
        if mark != _MARK or size != whole - _FORM.size:
            raise DamagedError(f"{path}: found {whole} bytes, of which the last ones are missing.")
        found = _sum(file, path, size)
        if found != expected:
            raise DamagedError(
                f"{path}: expected the checksum {expected:08x}, found {found:08x}: its bytes were "
                "damaged."
            )
    finally:
        os.close(file)


def _sum(file: int, path: str, size: int) -> int:
    """The CRC-32 of so many bytes."""
    buffer, found = np.empty(min(_PIECE, size), np.uint8), 0
    for start in range(0, size, _PIECE):
        piece = buffer[: size - start].data
        files.read_at(file, path, start, piece)
        found = zlib.crc32(piece, found)
    return found
