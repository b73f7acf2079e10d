"""The place of every row in the files of a table, and the queue of free places.

A row is identified by its *slot*, one of N, and stored at a *place*, one of P. Rows are numbered in
the order in which they were written. A new row never goes to the place of the row that it replaces:
free places wait in a queue and are used in turn. So the files are written round and round, and a
row that a kept generation refers to stays at its place until that generation is removed, or until
no place is free.

N may be large and most slots empty: nothing here takes memory or time for slots beyond the highest
that was ever written, nor for places beyond the room that the table has so far.

An interrupt may come between any two statements. Changes that belong together are made by one
statement, or are taken back by `settle`. An interrupted `give_up` or `release` leaves places out of
the queue, to which the next `line_up` returns them.
"""

import numpy as np

NEVER, LOST = -1, -2
"""Stand in for a place: `NEVER` for a slot that was never written, `LOST` if its row is lost."""

_FEW = 64  # fewer runs than this are handled by a loop in Python
_PIECE = 1 << 14
_CURSORS = ("_head", "free", "numbered", "version", "following", "last")


class Places:
    """The places of N slots in a table of P rows; `runs` has the first ones (see `runs_of`)."""

    def __init__(self, runs: np.ndarray, slots: int, room: int, version: int = 0) -> None:
        self.slots: int = slots
        self.kept: np.ndarray = np.zeros(room, bool)  # places that a generation refers to
        self.version: int = version  # the number of the newest row; rows are counted from 1
        self.following: int = version + 1  # the number that the next row will have
        # For so many places at the head of the queue, the file of numbers already has the numbers
        # of the rows that will be written there.
        self.numbered: int = 0
        self.free: int = 0  # places in the queue; before `line_up`, none
        self.last: int = -1  # the place that was written last
        # One more than the highest slot that was ever written.
        self.reach: int = int((runs[:, 0] + runs[:, 2]).max(initial=0))
        # The queue is a ring of `free` places from `_head` on. No place is in it twice.
        self._queue, self._head = np.zeros(room, _dtype(room)), 0
        # Places are stored with all bits inverted, so that `NEVER` is 0, and untouched entries take
        # no memory. There is an entry for each slot up to `reach`, perhaps some more, and a last
        # one that stands for all other slots and stays `NEVER`.
        self._inverted = np.zeros(self.reach + 1, _dtype(room))
        self._runs: np.ndarray | None = runs  # None after a change
        _fill(self._inverted, runs[:, 0], ~runs[:, 1], runs[:, 2], -1)
        self._may_lack = False
        # Places of replaced rows that a generation still refers to, in the order of replacement.
        self._displaced: list[np.ndarray] = []
        self._undo: tuple | None = None
        self._is_under_way = False

    def at(self, slots: np.ndarray) -> np.ndarray:
        """Returns the places of slots, each a place, or `NEVER`, or `LOST`."""
        return ~self._inverted.take(slots, mode="clip")

    @property
    def used(self) -> np.ndarray:
        """The places of all slots up to the highest that was ever written."""
        return ~self._inverted[: self.reach]

    @property
    def room(self) -> int:
        return len(self.kept)

    @property
    def runs(self) -> np.ndarray:
        # A commit asks for the runs three times. For a million rows it takes 2 ms to find them.
        if self._runs is None:
            self._runs = runs_of(self.used)
        return self._runs

    def mark(self, slots: np.ndarray, what: int) -> None:
        """Sets the places of slots to `NEVER` or `LOST`."""
        self._runs = None  # first: an interrupt must not leave runs of other places
        self._inverted[slots] = ~what
        self._may_lack = self._may_lack or what == LOST

    def has_lost(self) -> bool:
        return self._may_lack and bool((self.used == LOST).any())

    def named(self) -> np.ndarray:
        return named_by(self.runs, self.room)

    def slots_at(self) -> np.ndarray:
        """Returns the slot of the row at each place, integers `[P]`; -1 at free places."""
        slots, runs = np.full(self.room, -1, _dtype(self.slots)), self.runs
        _fill(slots, runs[:, 1], runs[:, 0], runs[:, 2], 1)
        return slots

    def line_up(self, kept: np.ndarray) -> None:
        """Queues all places without a slot or a generation, from the one after `last` on."""
        first = self.next(self.numbered)  # their numbers are on the disk: they stay at the head
        # Free places follow in the order of the file, so that successive rows are adjacent.
        is_busy = kept | self.named()
        is_busy[first] = True
        free = np.flatnonzero(~is_busy)
        turn = np.searchsorted(free, self.last, side="right")
        self._requeue(np.concatenate([first, free[turn:], free[:turn]]), kept)
        self._displaced = []

    def grow(self, room: int) -> None:
        self._inverted = self._inverted.astype(_dtype(room), copy=False)
        places = np.concatenate([self.next(self.free), np.arange(self.room, room)])
        self._requeue(places, np.concatenate([self.kept, np.zeros(room - self.room, bool)]))

    def _requeue(self, places: np.ndarray, kept: np.ndarray) -> None:
        # After a change of the queue, the last assignment cannot be taken back any more.
        queue, self._undo = np.zeros(len(kept), _dtype(len(kept))), None
        queue[: len(places)] = places
        self.kept, self._queue, self._head, self.free = kept, queue, 0, len(places)

    def next(self, count: int) -> np.ndarray:
        """Returns the first places in the queue, int64 `[count]`."""
        positions = np.arange(self._head, self._head + count)
        return self._queue.take(positions, mode="wrap").astype(np.int64)

    def _append(self, places: np.ndarray) -> None:
        start, size = self._head + self.free, max(len(self._queue), 1)
        self._queue[np.arange(start, start + len(places)) % size] = places
        self.free += len(places)

    def assign(self, slots: np.ndarray, expiring: bool) -> None:
        """Gives slots the first places in the queue, completely or not at all."""
        self.settle()
        count, old, new = len(slots), self.at(slots), self.next(len(slots))
        # `max` of an array takes 3 to 6 us more than `argmax`, as its code in Python is cold.
        reach = max(self.reach, slots.item(slots.argmax()) + 1)
        if len(self._inverted) <= reach:
            size = max(reach, min(2 * len(self._inverted), self.slots)) + 1
            inverted = np.zeros(size, self._inverted.dtype)
            inverted[: self.reach] = self._inverted[: self.reach]
            self._inverted = inverted
        # From here on an interrupt leaves a half-made assignment, which `settle` takes back.
        cursors = {name: getattr(self, name) for name in _CURSORS}
        self._undo = slots, old, new, cursors, len(self._displaced)
        self._is_under_way = True
        self.reach, self._runs = reach, None
        self._inverted[slots] = ~new
        self._head = (self._head + count) % len(self._queue)
        self.free, self.numbered = self.free - count, self.numbered - count
        self.version, self.following = self.following + count - 1, self.following + count
        self.last = int(new[-1])
        old = old[old >= 0]
        is_kept = self.kept[old]
        self._append(old[~is_kept])
        # A generation refers to these places: they are used again only when no other is free.
        if expiring and is_kept.any():
            self._displaced.append(old[is_kept])
        self._is_under_way = False

    def settle(self, version: int | None = None) -> None:
        """Takes back an interrupted assignment; also the last one, if it was made to `version`."""
        if self._undo is None:
            return
        slots, old, new, cursors, displaced = self._undo
        if self._is_under_way or cursors["version"] == version != self.version:
            self._is_under_way, self._runs = True, None
            self._inverted[slots] = ~old
            del self._displaced[displaced:]
            vars(self).update(cursors)
            # If the queue was full, appended old places may have overwritten the first ones.
            self._queue[np.arange(self._head, self._head + len(new)) % len(self._queue)] = new
            self._is_under_way, self._undo = False, None

    def give_up(self, count: int) -> None:
        """Queues `count` or more places of the oldest replaced rows, despite their generations."""
        self._undo = None
        while self._displaced and count > 0:
            places = self._displaced.pop(0)
            self._append(places)
            count -= len(places)

    def release(self, slots: np.ndarray, count: int) -> None:
        """Queues the places of up to `count` of these slots, whose rows are then lost."""
        self._undo = None
        slots = slots[self.at(slots) >= 0][:count]
        places = self.at(slots)
        self.mark(slots, LOST)
        self._append(places)


def _dtype(count: int) -> type:
    """Returns the smallest dtype for numbers below a count, int32 or int64."""
    return np.int32 if count < 1 << 31 else np.int64


def _fill(
    target: np.ndarray, starts: np.ndarray, values: np.ndarray, lengths: np.ndarray, step: int
) -> None:
    """Fills each run: entry `start + i` becomes `value + i * step`, for i below its length."""
    if len(starts) < _FEW:
        # In pieces, as new memory costs more than the sums: 2 ms for a million rows, else 4.
        steps = step * np.arange(_PIECE, dtype=target.dtype)
        for start, value, length in np.stack([starts, values, lengths], 1).tolist():
            for done in range(0, length, _PIECE):
                part = target[start + done : start + min(done + _PIECE, length)]
                np.add(steps[: len(part)], value + step * done, out=part)
    else:  # a million runs take 90 ms, in the loop 3.5 s; one run takes 14 ms, in the loop 0.3
        ends = np.cumsum(lengths)
        offset = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        target[np.repeat(starts, lengths) + offset] = np.repeat(values, lengths) + step * offset


def runs_of(places: np.ndarray) -> np.ndarray:
    """Returns the places of slots as runs, int64 `[K, 3]`: first slot, first place, length."""
    # In a ring, breaks are few. There is always one between `NEVER`, -1, and place 0.
    breaks = np.flatnonzero((places[1:] != places[:-1] + 1) | (places[:-1] < 0)) + 1
    edges = np.concatenate([[0], breaks, [len(places)]])
    first, length = edges[:-1], np.diff(edges)
    if not len(places):
        return np.zeros((0, 3), np.int64)
    runs = np.stack([first, places[first], length], axis=1)
    return runs[runs[:, 1] >= 0].astype(np.int64)


def named_by(runs: np.ndarray, room: int) -> np.ndarray:
    """Returns which places are part of a run, bool `[P]`."""
    if len(runs) < _FEW:  # as in a ring: 0.02 ms for a million rows; the sum below takes 5 ms
        is_named = np.zeros(room, bool)
        for _, place, length in runs.tolist():
            is_named[place : place + length] = True
        return is_named
    # Runs do not overlap: the sum of steps up at their starts and down at their ends is 0 or 1.
    edges = np.zeros(room + 1, np.int8)
    edges[runs[:, 1]] += 1
    edges[runs[:, 1] + runs[:, 2]] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8).view(bool)
