"""Checksums of the rows that a commit names, block by block, and what has to be done for the next.

A sum is over those rows of a block that are named, in the order of their places.
"""

import functools
from collections.abc import Callable

import numpy as np

from jrb._store.errors import DamagedError
from jrb._store.table import Table, runs
from jrb._store.threads import WORKERS, share

RUN = 8 << 20
"""Bytes that are read at once."""


class Sums:
    """The checksums of a table.

    Attributes:
        table: the rows.
        columns: for each column the sums of its blocks, uint32.
    """

    table: Table
    columns: list[np.ndarray]

    def __init__(self, table: Table) -> None:
        self.table = table
        self.columns = [np.zeros(0, np.uint32) for _ in table.columns]
        self._named: np.ndarray | Callable[[], np.ndarray] = np.zeros(table.room, bool)
        self._touched = np.zeros(table.room, bool)  # written since
        self._unsynced = np.zeros(table.room, bool)  # summed, but a sync failed since

    def load_checksums(self, columns: list[np.ndarray], named: Callable[[], np.ndarray]) -> None:
        """Takes over sums; a function says over which places, once that is asked."""
        self.columns, self._named = columns, named

    @property
    def named(self) -> np.ndarray:
        """The places that the sums are over, bool `[P]`."""
        if callable(self._named):
            self._named = self._named()
        return self._named

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.table.columns[0].block if self.table.columns else 1

    def blocks(self) -> list[tuple[int, int]]:
        """The blocks that have sums: number of the column, number of the block."""
        blocks = self._blocks_of(self.named)
        return [(number, block) for number in range(len(self.columns)) for block in blocks]

    def runs(self, numbers: list[int]) -> list[range]:
        """The blocks that have sums, in runs of a few megabytes at most of these columns.

        They are as many, and so alike, that all threads have as much to do.
        """
        width = sum(self.table.columns[number].width for number in numbers)
        step = max(1, RUN // max(width * self.block, 1))
        blocks = np.array(self._blocks_of(self.named), np.int64)
        found = [range(blocks[a], blocks[b - 1] + 1) for a, b in runs(blocks)]
        return [part for run in found for part in _alike(run, -(-len(run) // step))]

    def _blocks_of(self, places: np.ndarray) -> list[int]:
        """The blocks in which some places are, bool `[P]`."""
        whole, size = len(places) // self.block, self.block
        some = places[: whole * size].reshape(whole, size).any(axis=1)
        rest = places[whole * size :].any()
        return [*np.flatnonzero(some).tolist(), *([whole] if rest else [])]

    def forget(self, blocks: np.ndarray) -> None:
        """Leaves out blocks of which rows are gone: what is left there cannot be checked."""
        for column in self.columns:
            column[blocks] = 0
        self.named[np.isin(np.arange(len(self.named)) // self.block, blocks)] = False

    def touch(self, places: np.ndarray) -> None:
        """Notes down that rows at places are written."""
        self._touched[places] = True

    def grow(self) -> None:
        """Makes room for the rows of the table."""
        room = self.table.room
        self._named, self._touched = longer(self.named, room), longer(self._touched, room)
        self._unsynced = longer(self._unsynced, room)

    def damage(self, number: int, block: int) -> str:
        """What is wrong with a block; nothing if it is whole."""
        return self.table.check(number, block, self.named, int(self.columns[number][block]))

    def check_column(self, number: int) -> None:
        """Raises `DamagedError` unless all of a column is what was written."""
        share(lambda block: self._check(number, block), self._blocks_of(self.named))

    def _check(self, number: int, block: int) -> None:
        damage = self.damage(number, block)
        if damage:
            raise DamagedError(damage)

    def settle(self, named: np.ndarray) -> None:
        """Sums up the blocks that changed, and takes all rows to the disk, both at once.

        Args:
            named: bool `[P]`, the places that the next commit names.

        Raises:
            DamagedError: rows that were committed before are not what was written.
            OSError: the disk is full or broken.
        """
        touched = self._touched | self._unsynced
        changed = np.logical_or(named != self.named, self._touched)
        if self._unsynced.any():  # a sync failed: the system may believe that it is done with them
            self._write_again(self._unsynced & ~self._touched)
        syncs = [functools.partial(self.table.sync, n) for n in range(len(self.columns))]
        try:
            self._sum_up(named, changed, syncs if touched.any() else [])
        except BaseException:
            self._sum_up(named, changed, [])  # by which they will be told then
            self._unsynced, self._touched = touched, np.zeros(len(touched), bool)
            raise
        # New arrays: zeros of the system take no memory until rows are written.
        self._unsynced, self._touched = np.zeros((2, len(touched)), bool)

    def _write_again(self, places: np.ndarray) -> None:
        """Writes rows that a sync has failed for, if they are still what they were."""
        others = self._blocks_of(self._touched & self.named)
        for number in range(len(self.columns)):
            for block in sorted(set(self._blocks_of(places)) - set(others)):
                self._check(number, block)
            self.table.again(number, np.flatnonzero(places))

    def _sum_up(
        self, named: np.ndarray, changed: np.ndarray, others: list[Callable[[], None]]
    ) -> None:
        """Computes the sums of the blocks of places that changed, and does other things beside."""
        count = -(-self.table.room // self.block)
        sums = [longer(column, count) for column in self.columns]

        def compute(task: tuple[int, int]) -> None:
            number, block = task
            part = slice(block * self.block, (block + 1) * self.block)
            before = self.named[part]
            if (before & named[part]).any() and not (before & self._touched[part]).any():
                self._check(number, block)  # or what was damaged would count as right
            sums[number][block] = self.table.sum_of(number, block, named)

        blocks = self._blocks_of(changed)
        share(compute, [(n, block) for n in range(len(sums)) for block in blocks], beside=others)
        self.columns, self._named = sums, named


def _alike(run: range, count: int) -> list[range]:
    """A range in at least so many parts of about one length, none of them empty."""
    count = min(len(run), count + -count % WORKERS)
    return [run[len(run) * n // count : len(run) * (n + 1) // count] for n in range(count)]


def longer(array: np.ndarray, length: int) -> np.ndarray:
    """An array with zeros behind it."""
    return np.concatenate([array, np.zeros(length - len(array), array.dtype)])
