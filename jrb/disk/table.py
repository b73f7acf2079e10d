"""Columns of N rows, each a raw file that is written in place.

Row s of a column begins at byte s times its width. A file is called like its leaf
(`next/observation.bin`). Rows are read through a mapping and written by `pwrite`, so that a full
disk is an error and what was written is no memory of this process.
"""

import contextlib
import dataclasses
import itertools
import math
import mmap
import os
import weakref
from typing import Any
from urllib.parse import quote

import numpy as np

from jrb.disk import files
from jrb.disk.errors import DamagedError

SMALLEST, MOST = 1 << 16, 4096
SMALL = 1 << 17
"""Bytes of a gather below which another copy does not matter."""

_RESERVED = ("blocks", "undo", "lock", "manifest.json", "manifest.json.new")
_ALIGNMENT = 64  # bytes; where XLA takes memory without a copy


@dataclasses.dataclass(frozen=True)
class Column:
    """One leaf of all rows.

    Attributes:
        name: of the leaf, such as `next/observation`, in which a part has no `/`, and `%` stands
            for itself as `%25`; `.` for items that are one array.
        kind: dtype and shape of an item, for the owner.
        width: bytes of a row.
    """

    name: str
    kind: tuple
    width: int

    @property
    def file(self) -> str:
        """The file's name, below the folder of the store."""
        if self.name == ".":
            return "items.bin"
        first, *others = [quote(part, safe="%", errors="surrogatepass") for part in _parts(self)]
        first = f"%{ord(first[0]):02X}{first[1:]}" if first in _RESERVED else first
        return os.path.join(*[_visible(part) for part in (first, *others)]) + ".bin"

    def block(self, capacity: int) -> int:
        """Bytes of a block, the unit of checksums: at most 4096 of them, a power of two."""
        return max(SMALLEST, 1 << max(capacity * self.width // MOST - 1, 0).bit_length())


def _parts(column: Column) -> list[str]:
    return column.name.split("/")


def _visible(part: str) -> str:
    """Never empty, and never `..`."""
    return "%2E" + part[1:] if part.startswith(".") else part or "%"


class Table:
    """The open files of all columns.

    Args:
        path: of the folder.
        columns: of the rows.
        capacity: N.
        writable: whether rows will be written.

    Raises:
        DamagedError: a file is missing, or of another size.
    """

    def __init__(self, path: str, columns: tuple[Column, ...], capacity: int, writable: bool):
        self.columns, self.capacity = columns, capacity
        self.paths = [os.path.join(path, column.file) for column in columns]
        self._files: list[int] = []
        weakref.finalize(self, _close, self._files)
        self.rows: list[np.ndarray] = []
        for column, file in zip(columns, self.paths, strict=True):
            self._files.append(_open(file, column.width * capacity, writable))
            self.rows.append(_mapped(self._files[-1], capacity, column.width))

    def take(self, number: int, slots: np.ndarray) -> np.ndarray:
        """Rows of a column, uint8 `[B, width]`, at slots `[B]`, all in range."""
        whole, width = self.rows[number], self.columns[number].width
        if len(slots) * width < SMALL:
            return whole[slots]
        return np.take(whole, slots, axis=0, out=aligned((len(slots), width)), mode="clip")

    def put(self, number: int, slots: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows, uint8 `[B, width]`, at slots `[B]`.

        Raises:
            OSError: the disk is full or broken; some of the rows may be written.
        """
        width = self.columns[number].width
        for start, stop in runs(slots):
            data = rows[start:stop].reshape(-1).data
            self.put_bytes(number, int(slots[start]) * width, data)

    def put_bytes(self, number: int, offset: int, data: files.Bytes) -> None:
        """Writes bytes at an offset in the file of a column."""
        files.write_at(self._files[number], self.paths[number], offset, data)

    def sync(self, numbers: list[int]) -> None:
        """What was written to these columns is on the disk afterwards."""
        for number in numbers:
            files.sync(self._files[number], self.paths[number])


def _close(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)


def create(path: str, columns: tuple[Column, ...], capacity: int, prealloc: bool) -> None:
    """Makes the files in a folder, full of zeros.

    Raises:
        OSError: there is no room for them; then there are none.
    """
    try:
        for column in columns:
            file = os.path.join(path, column.file)
            folder = os.path.dirname(file)
            _make_folders(path, folder)
            files.make_file(file, column.width * capacity, prealloc)
            files.sync_folder(folder)
    except OSError:
        with contextlib.suppress(OSError):
            remove(path, columns)
        raise


def _make_folders(root: str, folder: str) -> None:
    if folder != root:
        _make_folders(root, os.path.dirname(folder))
        files.make_folder(folder)


def remove(path: str, columns: tuple[Column, ...]) -> None:
    """Removes the files of columns, and folders that are empty then."""
    for column in columns:
        file = os.path.join(path, column.file)
        files.remove(file)
        folder = os.path.dirname(file)
        while folder != path and os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


def _open(path: str, size: int, writable: bool) -> int:
    try:
        file = files.open_to_write(path) if writable else files.open_to_read(path)
    except FileNotFoundError:
        raise DamagedError(f"{path}: expected {size} bytes, found no file.") from None
    found = os.fstat(file).st_size
    if found != size:
        os.close(file)
        raise DamagedError(f"{path}: expected {size} bytes, found {found}.")
    return file


def _mapped(file: int, capacity: int, width: int) -> np.ndarray:
    """The rows, uint8 `[N, width]`, as they are in the file at any time."""
    if not width:
        return np.zeros((capacity, 0), np.uint8)
    whole: Any = mmap.mmap(file, capacity * width, prot=mmap.PROT_READ)
    return np.frombuffer(whole, np.uint8).reshape(capacity, width)


def runs(slots: np.ndarray) -> list[tuple[int, int]]:
    """Where slots follow one another: pairs of a start and a stop in the array."""
    if not len(slots):
        return []
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    edges = [0, *breaks.tolist(), len(slots)]
    return list(itertools.pairwise(edges))


def aligned(shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
    """An empty array where XLA takes it without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)
