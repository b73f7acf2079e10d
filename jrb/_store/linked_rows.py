"""Rows of a ring on a disk in which some arrays repeat the rows of others, and take no room then.

N slots, E environments, B rows of a write or a read. In the order of time, the next observation of
a slot is the observation of the slot that follows it in its environment, except at ends of
episodes, at the newest row and where the ring begins again. So the file of an array of next
observations, a *repeating* one, does not have a row for each slot. An array of int32 `[N]` has the
*entry* of each slot: 0 if the slot is *linked*, that is, if its row is that of the other array at
the following slot; else the number of its row in the file of the repeating array, from 1 on.

Rows are compared byte by byte when they are written, so reads return what was written, whatever the
order of writes: a write links the slots before its own if it can, and before a row changes to which
such a slot is linked, the old values become an entry of that slot. A slot has one entry at most, so
N always suffice. Free entries are used again, the last ones first, and only blocks with entries
take room on the disk: in the order of time, two rows of the ring and the ends of episodes.
"""

from typing import Any

import numpy as np

from jrb._store.block_store import BlockStore
from jrb._store.blocks import find_runs
from jrb._store.shared_rows import ArrayWrite, SharedRows


class LinkedRows(SharedRows):
    """Rows of which some arrays repeat the rows of others.

    Args:
        store: the store.
        names: the names of the arrays.
        entries: the name of the array with the entry of each slot.
        twins: for the number of each repeating array in `names`, the number of the other one.
        stride: the number of slots from one to the slot that follows it, E.
    """

    def __init__(
        self, store: BlockStore, names: list[str], entries: str, twins: dict[int, int], stride: int
    ) -> None:
        self._entries, self._twins, self._stride = store.arrays[entries], twins, stride
        # The state in which these entries are free, and the number of entries in the files.
        self._free: tuple[Any, list[int], int] = None, [], 0
        super().__init__(store, names)
        self.names = [*names, entries]

    @property
    def reach(self) -> int:
        """See `SharedRows.reach`; entries are not in the order of slots."""
        arrays = enumerate(self._arrays)
        return max(array.reach for number, array in arrays if number not in self._twins)

    # Reading.

    def _marks(self) -> list[Any]:
        # While a write is under way, links and rows do not fit each other: no two marks are equal.
        number = object() if self._num_changes % 2 else self._num_changes
        return [number, self._entries.moves, *super()._marks()]

    def _gather(self, slots: list[np.ndarray], first: int = 0) -> list[np.ndarray]:
        """See `SharedRows`."""
        return [
            self._read_repeating(number, at)
            if number in self._twins
            else self._arrays[number].read_rows(at)
            for number, at in enumerate(slots, first)
        ]

    def _read_repeating(self, number: int, slots: np.ndarray) -> np.ndarray:
        rows = self._arrays[self._twins[number]].read_rows(self._shift(slots, 1))
        entries = self._entries_at(slots)
        own = entries.nonzero()[0]
        if len(own):
            rows[own] = self._arrays[number].read_rows(entries[own] - 1)
        return rows

    def _entries_at(self, slots: np.ndarray) -> np.ndarray:
        """Returns the entries of slots `[B]`, int32 `[B]`."""
        return self._entries.read_rows(slots).view(np.int32)[:, 0]

    def _shift(self, slots: np.ndarray, rows: int) -> np.ndarray:
        """Returns the slots some rows of the ring later."""
        return (slots + rows * self._stride) % self._slots

    # Writing.

    def _plan(
        self, slots: np.ndarray, rows: list[np.ndarray], pieces: list[tuple[int, int]]
    ) -> list[ArrayWrite]:
        """See `SharedRows`; rows of repeating arrays that are not linked get entries."""
        # Of several rows for one slot, the last one is written.
        num_rows = len(slots)
        if len(pieces) > 1 and len(np.unique(slots)) < num_rows:
            last = np.sort(num_rows - 1 - np.unique(slots[::-1], return_index=True)[1])
            slots, rows = slots[last], [part[last] for part in rows]
            pieces = find_runs(slots)
        at, repeating, is_linked = self._find_links(slots, rows)
        # Slots that are linked now leave their entries, and others take one if they have none.
        before = self._entries_at(at)
        needs = ~is_linked & (before == 0)
        after = np.where(is_linked, 0, before)
        released, count = before[is_linked].tolist(), int(np.count_nonzero(needs))
        after[needs] = self._take_entries(released, count, num_rows)
        # An undo needs the rows to which links led.
        plan = super()._plan(slots, rows, pieces)
        for it in plan:
            it.keep = bool(needs[: -len(slots)].any())
        # The rows of the write go to their entries, and of other slots those that were linked.
        is_stored = np.concatenate([needs[: -len(slots)], ~is_linked[-len(slots) :]])
        places = after[is_stored] - 1
        runs = find_runs(places)
        for number, data in repeating.items():
            plan[number] = ArrayWrite(self._arrays[number], places, data[is_stored], runs)
        changed = (after != before).nonzero()[0]
        at, data = at[changed], after[changed, None].view(np.uint8)
        return [*plan, ArrayWrite(self._entries, at, data, find_runs(at), keep=True)]

    def _find_links(
        self, slots: np.ndarray, rows: list[np.ndarray]
    ) -> tuple[np.ndarray, dict[int, np.ndarray], np.ndarray]:
        """Returns the slots whose links a write may change, and which are linked after it.

        These are the slots before `slots` that are not among them, and then `slots`. In between
        come their rows of each repeating array, by its number.
        """
        order, preceding = slots.argsort(), self._shift(slots, -1)
        is_outside = _positions(slots, order, preceding) < 0
        outside = preceding[is_outside & (preceding < self._first_unwritten)]
        at = np.concatenate([outside, slots])
        # Compare with the rows that follow in the write, or else with those that are there.
        following = self._shift(at, 1)
        positions = _positions(slots, order, following)
        stored = (positions < 0).nonzero()[0]
        repeating, is_linked = {}, np.ones(len(at), np.bool_)
        for number, twin in self._twins.items():
            own = np.concatenate([self._read_repeating(number, outside), rows[number]])
            other = rows[twin][positions]
            other[stored] = self._arrays[twin].read_rows(following[stored])
            repeating[number] = own
            # Words of 8 bytes are compared in an eighth of the time.
            if own.shape[1] and own.shape[1] % 8 == 0:
                own, other = own.view(np.uint64), other.view(np.uint64)
            is_linked &= (own == other).all(axis=1)
        return at, repeating, is_linked

    def _take_entries(self, released: list[int], count: int, num_rows: int) -> np.ndarray:
        """Returns sorted entries for a write of some rows, int32 `[count]`.

        Entries that are released by it are there for the next write only, as an undo needs them. 0
        stands for none.
        """
        (state, free, num_used), now = self._free, (self._num_undone, self.version)
        self._free = None, [], 0  # until all is known: an interrupt may come in between
        # After a write that failed or was taken back, find the free entries among all.
        if state != now:
            used = self._entries_at(np.arange(self.reach))
            num_used = int(used.max(initial=0))
            free = np.setdiff1d(np.arange(1, num_used + 1), used)[::-1].tolist()
        # Take the last free ones, and then new ones.
        start = max(len(free) - count, 0)
        num_new = count - (len(free) - start)
        taken = [*free[start:], *range(num_used + 1, num_used + 1 + num_new)]
        free[start:] = filter(None, released)
        self._free = (now[0], now[1] + num_rows), free, num_used + num_new
        return np.array(sorted(taken), np.int32)


def _positions(slots: np.ndarray, order: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the positions in `slots`, which `order` sorts, of targets `[B]`; -1 for others."""
    at = order.take(np.searchsorted(slots, targets, sorter=order), mode="clip")
    return np.where(slots[at] == targets, at, -1)
