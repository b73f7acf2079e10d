"""Rows of a ring on a disk in which some arrays repeat the rows of others, and take no room then.

N slots, E environments, B rows of a write or a read. In the order of time, the next observation of
a slot is the observation of the slot that follows it in its environment, except at ends of
episodes, at the newest row and where the ring begins again. So the file of an array of next
observations, a *repeating* one, does not have a row for each slot. An array of int32 `[N]` has the
*entry* of each slot: 0 if the slot is *linked*, that is, if its row is that of the other array at
the following slot; else the number of its row in the file of the repeating array, from 1 on. The
rows of the newest time, the *tail*, are in memory until it is known if they are repeated. A commit
gives them entries first.

Rows are compared byte by byte when they are written, so reads return what was written, whatever the
order of writes: before a row changes to which the preceding slot is linked, its old values become
an entry of that slot. A slot has one entry at most, so N always suffice. Free entries are used
again, the last ones first, and only blocks with entries take room on the disk.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jrb._store.block_store import BlockStore
from jrb._store.blocks import find_runs
from jrb._store.shared_rows import ArrayWrite, LastWrite, SharedRows

_PART = 1 << 17  # the bytes that are compared at a time, which stay in the cache

Rows = dict[int, np.ndarray]
"""Rows, uint8 `[B, width]`, by the number of their array."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """The rows of repeating arrays at the newest slots, which have no entries yet.

    Attributes:
        slots: integers `[K]`, consecutive.
        rows: uint8 `[K, width]` for each repeating array.
    """

    slots: np.ndarray
    rows: Rows


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
        # The state in which these entries are free, and the first one that was never used.
        self._free: tuple[Any, list[int], int] = None, [], 0
        self._tail: Tail | None = None
        self._next_tail: Tail | None = None  # of the write that has begun
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
        leaves, repeating = [], dict[int, Rows]()
        for number, at in enumerate(slots, first):
            if number not in self._twins:
                leaves.append(self._arrays[number].read_rows(at))
                continue
            if id(at) not in repeating:
                same = [n for n, other in enumerate(slots, first) if other is at]
                repeating[id(at)] = self._read_repeating(at, self._twins.keys() & same)
            leaves.append(repeating[id(at)][number])
        return leaves

    def _read_repeating(self, slots: np.ndarray, numbers: Iterable[int]) -> Rows:
        """Returns the rows of some repeating arrays at slots."""
        # The tail is read first: its rows get entries before it is forgotten.
        tail, entries = self._tail, self._entries_at(slots)
        own, following = entries.nonzero()[0], (slots + self._stride) % self._slots
        rows = {n: self._arrays[self._twins[n]].read_rows(following) for n in numbers}
        if len(own):
            for number in numbers:
                rows[number][own] = self._arrays[number].read_rows(entries[own] - 1)
        if tail is not None:
            at = (slots - tail.slots.item(0)) % self._slots
            newest = (at < len(tail.slots)).nonzero()[0]
            if len(newest):
                for number in numbers:
                    rows[number][newest] = tail.rows[number][at[newest]]
        return rows

    def _entries_at(self, slots: np.ndarray) -> np.ndarray:
        """Returns the entries of slots `[B]`, int32 `[B]`."""
        return self._entries.read_rows(slots).view(np.int32)[:, 0]

    # Writing.

    def prepare_commit(self, version: int) -> None:
        """See `SharedRows`; gives entries to the tail, which a commit would not have."""
        super().prepare_commit(version)
        self._store_tail()

    def _store_tail(self) -> None:
        """Gives entries to the tail; no state sees a difference."""
        tail = self._tail
        if tail is None:
            return
        # An interrupted call may have given entries already, which are taken again. No state has
        # the entries that are free now until all is written.
        given = self._entries_at(tail.slots).tolist()
        taken = self._take_entries([], given, len(tail.slots), -1)
        for number, rows in tail.rows.items():
            self._arrays[number].write_rows(taken - 1, rows)
        self._entries.write_rows(tail.slots, _entry_bytes(taken))
        self._tail, (_, free, num_used) = None, self._free
        self._free = (self._num_undone, self.version), free, num_used

    def _count_write(self, slots: np.ndarray, pieces: list[tuple[int, int]]) -> None:
        super()._count_write(slots, pieces)
        self._tail = self._next_tail

    def _overwritten(self, version: int, slots: np.ndarray, plan: list[ArrayWrite]) -> LastWrite:
        last, tail = super()._overwritten(version, slots, plan), self._tail
        forget = last.forget

        def undo() -> None:
            forget()
            self._tail = tail

        return dataclasses.replace(last, forget=undo)

    def _plan(
        self, slots: np.ndarray, rows: list[np.ndarray], pieces: list[tuple[int, int]]
    ) -> list[ArrayWrite]:
        """See `SharedRows`; rows that are neither linked nor in the next tail get entries."""
        # Mostly, one row of the ring repeats the tail before it. Then no entry changes.
        tail, num_rows = self._tail, len(slots)
        if tail is not None and len(tail.slots) == num_rows and len(pieces) == 1:
            first = (tail.slots.item(0) + self._stride) % self._slots
            if (
                slots.item(0) == first
                and self._are_equal(tail.rows, None, self._twins_of(rows), None).all()
                and not self._entries_at(slots).any()
            ):
                self._next_tail = self._tail_of(slots, rows, num_rows)
                state, free, num_used = self._free
                if state == (self._num_undone, self.version):
                    self._free = (state[0], state[1] + num_rows), free, num_used
                plan = super()._plan(slots, rows, pieces)
                return [it for number, it in enumerate(plan) if number not in self._twins]
        # Of several rows for one slot, the last one is written.
        last = num_rows - 1 - np.unique(slots[::-1], return_index=True)[1]
        if len(last) < num_rows:
            last.sort()
            slots, rows = slots[last], [part[last] for part in rows]
            pieces = find_runs(slots)
        at, kept, is_linked = self._find_links(slots, rows)
        entries, num_kept = self._entries_at(at), len(at) - len(slots)
        # The last row of the ring stays in memory until it is known if the next one repeats it.
        num_last = min(pieces[-1][1] - pieces[-1][0], self._stride)
        if num_last < min(len(slots), self._stride) or is_linked[len(at) - num_last :].any():
            num_last = 0
        self._next_tail = self._tail_of(slots, rows, num_last)
        # All others need entries, unless they keep those that they have.
        needs, is_kept = ~is_linked, np.arange(len(at)) < num_kept
        needs &= ~is_kept | (entries == 0)
        needs[len(at) - num_last :] = False
        released, reused = entries[:num_kept][is_linked[:num_kept]], entries[num_kept:]
        count = int(np.count_nonzero(needs))
        taken = self._take_entries(released.tolist(), reused.tolist(), count, num_rows)
        after = np.where(is_kept & ~is_linked, entries, 0)
        after[needs] = taken
        # If links led to rows that change, an undo needs these rows. It needs no rows of entries
        # that were free.
        keep = bool((needs & is_kept).any() and self._tail is None) or None
        plan = [dataclasses.replace(it, keep=keep) for it in super()._plan(slots, rows, pieces)]
        runs, keep = find_runs(taken), keep if reused.any() else False
        for number in self._twins:
            array = self._arrays[number]
            parts = kept[number][needs[:num_kept]], rows[number][needs[num_kept:]]
            plan[number] = ArrayWrite(array, taken - 1, np.concatenate(parts), runs, keep)
        changed = (after != entries).nonzero()[0]
        at, data = at[changed], _entry_bytes(after[changed])
        return [*plan, ArrayWrite(self._entries, at, data, find_runs(at), keep=True)]

    def _find_links(
        self, slots: np.ndarray, rows: list[np.ndarray]
    ) -> tuple[np.ndarray, Rows, np.ndarray]:
        """Returns the slots that a write may link, and which of them are linked after it.

        First come slots that precede those of the write and are not in it, whose rows are returned
        too, and then `slots`.
        """
        order, preceding = slots.argsort(), self._shift(slots, -1)
        is_outside = _positions(slots, order, preceding) < 0
        before = preceding[is_outside & (preceding < self._first_unwritten)]
        if self._tail is not None and not np.array_equal(self._tail.slots, before):
            self._store_tail()
        kept, new = self._read_repeating(before, self._twins), dict(enumerate(rows))
        # Compare with the rows that follow in the write, or else, if there may be a link to them,
        # with those that are there.
        follower = _positions(slots, order, self._shift(slots, 1))
        is_linked, is_inner = np.zeros(len(slots), np.bool_), follower >= 0
        inner = is_inner.nonzero()[0]
        outer = (~is_inner & (self._entries_at(slots) == 0)).nonzero()[0]
        after = self._shift(slots[outer], 1)
        stored = {n: self._arrays[twin].read_rows(after) for n, twin in self._twins.items()}
        is_linked[inner] = self._are_equal(new, inner, self._twins_of(rows), follower[inner])
        is_linked[outer] = self._are_equal(new, outer, stored, None)
        first = _positions(slots, order, self._shift(before, 1))
        is_repeated = self._are_equal(kept, None, self._twins_of(rows), first)
        at = np.concatenate([before, slots])
        return at, kept, np.concatenate([is_repeated, is_linked])

    def _shift(self, slots: np.ndarray, rows: int) -> np.ndarray:
        """Returns the slots some rows of the ring later."""
        return (slots + rows * self._stride) % self._slots

    def _twins_of(self, rows: list[np.ndarray]) -> Rows:
        """Returns what the rows of each repeating array may repeat, of rows of all arrays."""
        return {number: rows[twin] for number, twin in self._twins.items()}

    def _tail_of(self, slots: np.ndarray, rows: list[np.ndarray], count: int) -> Tail | None:
        """Returns the tail after a write whose last rows have no entries; None for no such rows."""
        if not count:
            return None
        # Copied, as the user may change the arrays.
        last = {number: rows[number][-count:].copy() for number in self._twins}
        return Tail(slots[-count:].copy(), last)

    def _are_equal(
        self, rows: Rows, at: np.ndarray | None, others: Rows, others_at: np.ndarray | None
    ) -> np.ndarray:
        """Returns where `rows[n][at]` equal `others[n][others_at]` in all n; None for all rows."""
        pick = lambda array, at, part: array[part if at is None else at[part]]
        is_equal = np.ones(len(next(iter(rows.values())) if at is None else at), np.bool_)
        for number in self._twins:
            one, other = rows[number], others[number]
            width = one.shape[1]
            # Compared as words of 8 bytes, which takes an eighth of the time.
            if width and width % 8 == 0:
                one, other = one.view(np.uint64), other.view(np.uint64)
            step = max(1, _PART // max(width, 1))
            for part in (slice(start, start + step) for start in range(0, len(is_equal), step)):
                same = pick(one, at, part) == pick(other, others_at, part)
                if not same.all():
                    is_equal[part] &= same.all(axis=1)
        return is_equal

    def _take_entries(
        self, released: list[int], reused: list[int], count: int, num_rows: int
    ) -> np.ndarray:
        """Returns sorted entries for a write of some rows, int32 `[count]`.

        It may use entries of the rows that it overwrites, `reused`. Those of other rows,
        `released`, are there for the next write only, as an undo needs them. 0 stands for none.
        """
        (state, free, num_used), now = self._free, (self._num_undone, self.version)
        self._free = None, [], 0  # until all is known: an interrupt may come in between
        # After a write that failed or was taken back, find the free entries among all.
        if state != now:
            used = self._entries_at(np.arange(self.reach))
            num_used = int(used.max(initial=0))
            free = np.setdiff1d(np.arange(1, num_used + 1), used)[::-1].tolist()
        free += filter(None, reused)
        start = max(len(free) - count, 0)
        taken, more = free[start:], count - (len(free) - start)
        taken += range(num_used + 1, num_used + 1 + more)
        free[start:] = filter(None, released)
        self._free = (now[0], now[1] + num_rows), free, num_used + more
        return np.array(sorted(taken), np.int32)


def _positions(slots: np.ndarray, order: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the positions in `slots`, which `order` sorts, of targets `[B]`; -1 for others."""
    at = order.take(np.searchsorted(slots, targets, sorter=order), mode="clip")
    return np.where(slots[at] == targets, at, -1)


def _entry_bytes(entries: np.ndarray) -> np.ndarray:
    return entries.astype(np.int32)[:, None].view(np.uint8)
