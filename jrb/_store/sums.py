"""Checksums of committed rows, one for each block of a column.

A checksum covers the rows of a block that a commit refers to, in the order of their places.
"""

import functools
from collections.abc import Callable

import numpy as np

from jrb._store.table import RowTable, runs
from jrb._store.threads import share

# Bytes that are read at a time: 8 MB would not stay in the cache, and a load of a million rows of
# 36 bytes would take 1.25x as long.
_RUN = 1 << 20


class Sums:
    """The checksums of a table."""

    def __init__(self, table: RowTable) -> None:
        self.table: RowTable = table
        # For each column the checksums of its blocks, uint32; and the places that they cover.
        self.columns: list[np.ndarray] = [np.zeros(0, np.uint32) for _ in table.columns]
        self.named: np.ndarray = np.zeros(table.room, bool)
        self._touched = np.zeros(table.room, bool)  # places written since the last commit
        self._unsynced = np.zeros(table.room, bool)  # covered by a checksum, but their sync failed

    @property
    def block(self) -> int:
        return self.table.columns[0].block if self.table.columns else 1

    def blocks(self) -> list[tuple[int, int]]:
        """Returns all blocks that have checksums, as pairs (index of column, index of block)."""
        blocks = self._blocks_of(self.named)
        return [(number, block) for number in range(len(self.columns)) for block in blocks]

    def runs(self, numbers: list[int]) -> list[range]:
        """Returns ranges of blocks with checksums, each about a megabyte of some columns."""
        width = sum(self.table.columns[number].width for number in numbers)
        step = max(1, _RUN // max(width * self.block, 1))
        blocks = np.array(self._blocks_of(self.named), np.int64)
        bounds = [(int(blocks[a]), int(blocks[b - 1]) + 1) for a, b in runs(blocks)]
        return [
            range(at, min(at + step, stop))
            for start, stop in bounds
            for at in range(start, stop, step)
        ]

    def _blocks_of(self, places: np.ndarray) -> list[int]:
        """Returns the indices of the blocks that contain some of these places, bool `[P]`."""
        if not len(places):
            return []
        starts = np.arange(0, len(places), self.block)
        return np.flatnonzero(np.logical_or.reduceat(places, starts)).tolist()

    def forget(self, blocks: np.ndarray) -> None:
        """Drops the checksums of blocks with lost rows: their other rows cannot be checked."""
        for column in self.columns:
            column[blocks] = 0
        self.named[np.isin(np.arange(len(self.named)) // self.block, blocks)] = False

    def touch(self, places: np.ndarray) -> None:
        self._touched[places] = True

    def grow(self) -> None:
        room = self.table.room
        self.named, self._touched = longer(self.named, room), longer(self._touched, room)
        self._unsynced = longer(self._unsynced, room)

    def check(self, number: int, block: int) -> None:
        """Raises `DamagedError` unless a block is what was written."""
        checksum = self.table.checksum(number, block, self.named)
        self.table.check(number, block, self.columns[number][block], checksum)

    def check_column(self, number: int) -> None:
        share(lambda block: self.check(number, block), self._blocks_of(self.named))

    def settle(self, named: np.ndarray) -> None:
        """Computes the checksums of changed blocks, and meanwhile syncs all rows to the disk."""
        touched = self._touched | self._unsynced
        changed = (named != self.named) | self._touched
        if self._unsynced.any():
            # After a failed sync the system may consider the pages written. So these rows are
            # written once more, if they still have their checksums.
            places = self._unsynced & ~self._touched
            unchecked = set(self._blocks_of(self._touched & self.named))
            for number, column in enumerate(self.table.columns):
                for block in sorted(set(self._blocks_of(places)) - unchecked):
                    self.check(number, block)
                step = max(1, (4 << 20) // max(column.width, 1))
                at = np.flatnonzero(places)
                for part in (at[start : start + step] for start in range(0, len(at), step)):
                    self.table.put(number, part, self.table.take(number, part))
        syncs = [functools.partial(self.table.sync, n) for n in range(len(self.columns))]
        try:
            self._sum_up(named, changed, syncs if touched.any() else [])
        except BaseException:
            self._sum_up(named, changed, [])  # the next attempt checks rows against these
            self._unsynced, self._touched = touched, np.zeros(len(touched), bool)
            raise
        # New arrays, as zeros from the system take no memory until they are written to.
        self._unsynced, self._touched = np.zeros((2, len(touched)), bool)

    def _sum_up(
        self, named: np.ndarray, changed: np.ndarray, others: list[Callable[[], None]]
    ) -> None:
        """Computes the checksums of blocks with changed places, and calls `others` meanwhile."""
        count = -(-self.table.room // self.block)
        sums = [longer(column, count) for column in self.columns]

        def compute(task: tuple[int, int]) -> None:
            number, block = task
            part = slice(block * self.block, (block + 1) * self.block)
            before = self.named[part]
            # A committed block to which nothing was written must still have its checksum.
            if (before & named[part]).any() and not (before & self._touched[part]).any():
                self.check(number, block)
            sums[number][block] = self.table.checksum(number, block, named)

        blocks = self._blocks_of(changed)
        share(compute, [(n, block) for n in range(len(sums)) for block in blocks], others)
        self.columns, self.named = sums, named


def longer(array: np.ndarray, length: int) -> np.ndarray:
    """Returns an array that is extended to a length by zeros."""
    return np.concatenate([array, np.zeros(length - len(array), array.dtype)])
