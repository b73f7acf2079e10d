"""Rows of the last save that were overwritten since, as they were.

A log belongs to one generation of a store. Before a row that this generation holds is overwritten,
it is appended here and synced; a crash is then undone by putting such rows back, and somebody who
reads this generation looks for a row here after having looked in its file. A log is a sequence of
chunks: the count of rows and CRC-32 of what follows, both uint64; the slots, uint32; then column by
column the rows. What comes behind the last whole chunk was not synced, and counts for nothing.
"""

import mmap
import os
import struct
import tempfile
import weakref
import zlib
from typing import Any

import numpy as np

from jrb.disk import files

FOLDER = "undo"
_HEAD = struct.Struct("<QQ")


def path_of(store: str, generation: int) -> str:
    """The log of a generation."""
    return os.path.join(store, FOLDER, f"{generation:012d}")


def numbers(store: str) -> list[int]:
    """The generations that have a log, oldest first."""
    folder = os.path.join(store, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name) for name in names if name.isdigit())


def private(widths: tuple[int, ...], capacity: int) -> "Log":
    """An empty log of one's own, which nobody else sees and which goes by itself."""
    file, path = tempfile.mkstemp(prefix="jrb-")
    os.close(file)
    log = Log(path, widths, capacity, writable=True)
    os.unlink(path)
    return log


def create(store: str, generation: int) -> None:
    """An empty log."""
    files.make_folder(os.path.join(store, FOLDER))
    files.write_new(path_of(store, generation), [])
    files.sync_folder(os.path.join(store, FOLDER))


class Log:
    """The log of one generation, open.

    Args:
        path: of the log.
        widths: bytes of a row of each column.
        capacity: N.
        writable: whether rows will be appended.
    """

    def __init__(self, path: str, widths: tuple[int, ...], capacity: int, writable: bool) -> None:
        self.path, self._widths, self._capacity = path, widths, capacity
        self.file = files.open_to_write(path) if writable else files.open_to_read(path)
        weakref.finalize(self, os.close, self.file)
        self._end = 0
        self._offsets: list[int] = []  # of the rows of each chunk
        self._firsts: list[int] = []  # the number of its first entry
        self._count = 0
        self._slots: list[np.ndarray] = []  # of each chunk
        self._index: tuple[np.ndarray, np.ndarray] | None = None  # slots in order, their entries
        self._map: Any = b""

    def refresh(self) -> None:
        """Learns of the chunks that came since."""
        size = os.fstat(self.file).st_size
        while self._end + _HEAD.size <= size:
            count, check = _HEAD.unpack(os.pread(self.file, _HEAD.size, self._end))
            length = count * (4 + sum(self._widths))
            if not 0 < count <= self._capacity or self._end + _HEAD.size + length > size:
                return
            data = os.pread(self.file, length, self._end + _HEAD.size)
            slots = np.frombuffer(data, np.uint32, min(count, len(data) // 4)).astype(np.int64)
            if zlib.crc32(data) != check or slots.max() >= self._capacity:
                return
            self._learn(slots)

    def _learn(self, slots: np.ndarray) -> None:
        self._slots.append(slots)
        self._firsts.append(self._count)
        self._offsets.append(self._end + _HEAD.size + 4 * len(slots))
        self._count += len(slots)
        self._end = self._offsets[-1] + len(slots) * sum(self._widths)
        self._index = None

    def find(self, slots: np.ndarray) -> np.ndarray:
        """The entries, int64, that rows at slots have here; -1 for none."""
        if not self._count:
            return np.full(len(slots), -1, np.int64)
        if self._index is None:
            known = self.slots()
            order = np.argsort(known, kind="stable")
            self._index = known[order], order
        known, entries = self._index
        at = np.minimum(np.searchsorted(known, slots), len(known) - 1)
        return np.where(known[at] == slots, entries[at], -1)

    def slots(self) -> np.ndarray:
        """The slots of all entries, in order."""
        return np.concatenate([np.zeros(0, np.int64), *self._slots])

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return not os.fstat(self.file).st_nlink

    def rows(self, column: int, entries: np.ndarray) -> np.ndarray:
        """The rows of a column, uint8 `[B, width]`, that these entries keep."""
        width, firsts = self._widths[column], np.asarray([*self._firsts, self._count])
        rows = np.empty((len(entries), width), np.uint8)
        if len(self._map) < self._end and width:
            self._map = mmap.mmap(self.file, self._end, prot=mmap.PROT_READ)
        chunks = np.searchsorted(firsts, entries, side="right") - 1
        for chunk in np.unique(chunks) if width else ():
            count, here = firsts[chunk + 1] - firsts[chunk], chunks == chunk
            offset = self._offsets[chunk] + count * sum(self._widths[:column])
            kept = np.frombuffer(self._map, np.uint8, count * width, offset).reshape(count, width)
            rows[here] = kept[entries[here] - firsts[chunk]]
        return rows

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self._slots)

    def cut(self, chunks: int) -> None:
        """Forgets all but so many chunks: the others could not be synced."""
        while len(self._slots) > chunks:
            gone = len(self._slots.pop())
            self._end = self._offsets.pop() - _HEAD.size - 4 * gone
            self._count = self._firsts.pop()
        self._index = None

    def append(self, slots: np.ndarray, columns: list[np.ndarray]) -> None:
        """Keeps rows, uint8 `[B, width]` of each column, at slots `[B]`; to be synced."""
        parts = [slots.astype(np.uint32).tobytes(), *(rows.tobytes() for rows in columns)]
        data = b"".join(parts)
        chunk = _HEAD.pack(len(slots), zlib.crc32(data)) + data
        files.truncate(self.file, self.path, self._end)  # what a crash may have left
        files.write_at(self.file, self.path, self._end, chunk)
        self._learn(slots)

    def sync(self) -> None:
        """What was appended is on the disk afterwards."""
        files.sync(self.file, self.path)
