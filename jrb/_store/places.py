"""Which row lies where in a table, and where the next one goes.

A row is known by a *slot*, of which there are N, and lies at a *place*, of which there are P. Rows
are numbered in the order in which they were ever written. A new row never goes to the place of the
one that it takes the slot from: free places stand in a line, and are used in turn. So a ring of
time is written round and round, and what a kept generation names stays where it is, until that
generation goes, or the line is empty.

N may be large and most slots empty: nothing here takes memory, or time, for slots beyond the
highest that was ever written, nor for places beyond the room that the table has so far.

An interrupt may come between any two statements. What belongs together changes in one, or is taken
back by `settle`; what may be done twice, or left out until places line up anew, needs no more.
"""

import numpy as np

NEVER, LOST = -1, -2
"""What stands for the place of a slot that was never written, and of one whose row is gone."""


class Places:
    """The places of all slots.

    Args:
        runs: where slots lie, int64 `[K, 3]`, as `runs_of` gives them and `check_runs` lets them
            pass; the others were never written.
        slots: N.
        room: P.
        version: the number of the newest row.

    Attributes:
        kept: bool `[P]`, places that a generation names which must stay.
        free: how many places stand in line; before `line_up`, none.
        version: the number of the newest row, rows being counted from 1.
        following: the number that the next row will have.
        numbered: of how many places at the head of the line the table knows those numbers.
        last: the place that was written last, -1 for none.
        reach: one more than the highest slot that was ever written.
    """

    kept: np.ndarray
    version: int
    following: int
    numbered: int
    last: int
    free: int
    reach: int

    def __init__(self, runs: np.ndarray, slots: int, room: int, version: int = 0) -> None:
        self._runs, self._slots = runs, slots
        self._of: list[np.ndarray] = []  # where two threads make it, both take the first
        self.version, self.following, self.numbered = version, version + 1, 0
        self.kept = np.zeros(room, bool)
        self._line = np.zeros(0, _dtype(room))  # a ring, of which `free` entries count
        self._head, self.last, self.free = 0, -1, 0
        self.reach = int((runs[:, 0] + runs[:, 2]).max(initial=0))
        self._may_lack = False
        self._left: list[np.ndarray] = []
        self._before: tuple | None = None
        self._under_way = False

    @property
    def _inverted(self) -> np.ndarray:
        """The places of slots, bitwise inverted, so that `NEVER` is 0; int32, or int64 for large P.

        There is an entry for each slot up to `reach`, perhaps some more, and one at the end that
        stands for all others, and stays `NEVER`. It is made when it is first asked for: to read all
        rows, their runs are enough.
        """
        if not self._of:
            inverted = np.zeros(self.reach + 1, _dtype(self.room))
            for slot, place, length in self._runs.tolist():
                np.invert(np.arange(place, place + length), out=inverted[slot : slot + length])
            self._of.append(inverted)
        return self._of[0]

    def at(self, slots: np.ndarray) -> np.ndarray:
        """Returns the places of slots, each a place, or `NEVER`, or `LOST`."""
        return ~self._inverted.take(slots, mode="clip")

    @property
    def used(self) -> np.ndarray:
        """The places of all slots up to the highest that was ever written."""
        return ~self._inverted[: self.reach]

    def mark(self, slots: np.ndarray, what: int) -> None:
        """Says that slots have no place: `NEVER`, or `LOST`."""
        self._inverted[slots] = ~what
        self._may_lack = self._may_lack or what == LOST

    def has_lost(self) -> bool:
        """Returns whether the row of any slot is `LOST`."""
        return self._may_lack and bool((self.used == LOST).any())

    @property
    def runs(self) -> np.ndarray:
        """The same as runs, as `runs_of` gives them."""
        return runs_of(self.used) if self._of else self._runs

    @property
    def slots(self) -> int:
        """N."""
        return self._slots

    @property
    def room(self) -> int:
        """P."""
        return len(self.kept)

    def named(self) -> np.ndarray:
        """The places that slots have, bool `[P]`."""
        runs = self.runs
        if len(runs) > _FEW:
            named, used = np.zeros(self.room, bool), self.used
            named[used[used >= 0]] = True
            return named
        return named_by(runs, self.room)

    def never(self) -> np.ndarray:
        """The slots below `reach` that have no place, int64, in order."""
        if self.runs[:, 2].sum() == self.reach:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.used < 0)

    def line_up(self, kept: np.ndarray) -> None:
        """All places that nothing names stand in line, from the one written last on, around.

        Args:
            kept: bool `[P]`, the places that generations name which must stay.
        """
        first = self.next(self.numbered)
        busy = kept | self.named()
        busy[first] = True
        free = np.flatnonzero(np.logical_not(busy, out=busy))
        turn = np.searchsorted(free, self.last, side="right")
        line = np.concatenate([first, free[turn:], free[:turn]]).astype(_dtype(len(kept)))
        self._left, self._before = [], None
        self.kept, self._line, self._head, self.free = kept, line, 0, len(line)

    def next(self, count: int) -> np.ndarray:
        """The first places in the line, int64 `[count]`."""
        stop, size = self._head + count, len(self._line)
        if stop <= size:
            return self._line[self._head : stop].astype(np.int64)
        parts = [self._line[self._head :], self._line[: stop - size]]
        return np.concatenate(parts, dtype=np.int64)

    def assign(self, slots: np.ndarray, expiring: bool) -> None:
        """Gives slots the first places in the line; it happens, or it does not.

        Args:
            slots: int64 `[B]`, each once.
            expiring: whether their old rows may be given up where a generation still names them.
        """
        self.settle()
        new, old, count = self.next(len(slots)), self.at(slots), len(slots)
        reach = max(self.reach, slots.item(slots.argmax()) + 1)
        self._extend(reach)
        self._widen(self.free + count)  # or the first places would be lost to `_revert`
        self._before = (slots, old, self._marks())
        self._under_way = True
        self.reach = reach
        self._inverted[slots] = ~new
        self._head = (self._head + count) % len(self._line)
        self.free, self.numbered = self.free - count, self.numbered - count
        self.version, self.following = self.following + count - 1, self.following + count
        self.last = int(new[-1])
        self._let_go(old[old >= 0], expiring)
        self._under_way = False

    def _marks(self) -> tuple:
        marks = self._head, self.free, self.numbered, self.version, self.following, self.last
        return *marks, list(self._left)

    def _let_go(self, old: np.ndarray, expiring: bool) -> None:
        waiting = self.kept[old]
        self._append(old[~waiting])
        if expiring and waiting.any():
            self._left.append(old[waiting])

    def _extend(self, reach: int) -> None:
        """Makes entries for the slots below this one."""
        size = len(self._inverted) - 1
        if size < reach:
            inverted = np.zeros(max(reach, min(2 * size, self._slots)) + 1, self._inverted.dtype)
            inverted[: self.reach] = self._inverted[: self.reach]
            self._of[:] = [inverted]

    def _widen(self, count: int) -> None:
        """Makes the line long enough for so many places."""
        if len(self._line) < count:
            line = np.zeros(max(count, len(self._line) * 5 // 4), self._line.dtype)
            line[: self.free] = self.next(self.free)
            self._line, self._head = line, 0

    def _append(self, places: np.ndarray) -> None:
        self._widen(self.free + len(places))
        start = (self._head + self.free) % max(len(self._line), 1)
        first = min(len(places), len(self._line) - start)
        self._line[start : start + first] = places[:first]
        self._line[: len(places) - first] = places[first:]
        self.free += len(places)

    def settle(self) -> None:
        """Takes an assignment back that something interrupted."""
        if self._under_way:
            self._revert()

    def take_back(self, version: int) -> None:
        """Takes the last assignment back if it made another version of this one."""
        self.settle()
        if self._before is not None and self._before[2][3] == version != self.version:
            self._under_way = True
            self._revert()

    def _revert(self) -> None:
        if self._before is not None:
            slots, old, marks = self._before
            self._inverted[slots] = ~old
            self._head, self.free, self.numbered, self.version = marks[:4]
            self.following, self.last, self._left = marks[4], marks[5], list(marks[6])
        self._under_way, self._before = False, None

    def give_up(self, count: int) -> None:
        """Puts places into the line whose rows left the ring, though a generation names them.

        At least as many as asked for, if there are, those that left first.
        """
        self._before = None
        while self._left and count > 0:
            first = self._left.pop(0)
            self._append(first)
            count -= len(first)

    def release(self, slots: np.ndarray, count: int) -> None:
        """Puts the places of some of these slots into the line; their rows are lost."""
        self._before = None
        slots = slots[self.at(slots) >= 0][:count]
        places = self.at(slots)
        self.mark(slots, LOST)
        self._append(places)

    def resize(self, slots: int) -> None:
        """Makes N another number; slots from there on are no more."""
        self._before, self._slots, self.reach = None, slots, min(self.reach, slots)
        self._of[:] = [np.append(self._inverted[: self.reach], self._inverted[-1:])]

    def grow(self, room: int) -> None:
        """Makes room for so many rows."""
        self._of[:] = [self._inverted.astype(_dtype(room), copy=False)]
        line = np.concatenate([self.next(self.free), np.arange(self.room, room)])
        kept = np.concatenate([self.kept, np.zeros(room - self.room, bool)])
        self._before = None
        line = line.astype(_dtype(room), copy=False)
        self.kept, self._line, self._head, self.free = kept, line, 0, len(line)


def _dtype(room: int) -> type:
    """Returns the dtype of P places."""
    return np.int32 if room < 1 << 31 else np.int64


def runs_of(of: np.ndarray) -> np.ndarray:
    """The places of slots as runs, int64 `[K, 3]`: a slot, its place, and how many follow both."""
    found = [_runs_from(of[start : start + _PART], start) for start in range(0, len(of), _PART)]
    runs = np.concatenate([np.zeros((0, 3), np.int64), *found], dtype=np.int64)
    if not len(runs):
        return runs
    slot, place, length = runs.T
    goes_on = (slot[1:] == (slot + length)[:-1]) & (place[1:] == (place + length)[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return np.stack([slot[first], place[first], np.add.reduceat(length, first)], axis=1)


_PART = 1 << 18
"""Slots that are looked at together: what is made of all at once is several times as large."""

_FEW = 64
"""Runs that are gone through one by one."""


def _runs_from(of: np.ndarray, start: int) -> np.ndarray:
    """The runs of some slots, the first of which has this number."""
    if of[0] >= 0 and of[-1] - of[0] == len(of) - 1 and (of[1:] > of[:-1]).all():  # as mostly
        return np.array([[start, of[0], len(of)]])  # so they can only follow one another
    there = np.concatenate([[False], of >= 0, [False]])
    breaks = np.ones(len(of) + 1, bool)
    breaks[1:-1] = np.diff(of) != 1
    breaks |= ~there[:-1]  # `NEVER`, -1, and place 0 do not follow one another
    first = np.flatnonzero(there[1:] & breaks)
    stop = np.flatnonzero(there[:-1] & (breaks | ~there[1:]))
    return np.stack([first + start, of[first], stop - first], axis=1)


def named_by(runs: np.ndarray, room: int) -> np.ndarray:
    """The places that runs have, bool `[P]`."""
    named = np.zeros(room, bool)
    for _, place, length in runs.tolist():
        named[place : place + length] = True
    return named


def by_place(runs: np.ndarray) -> np.ndarray:
    """Runs in the order of their places."""
    return runs[np.argsort(runs[:, 1])]


def within(runs: np.ndarray, start: int, stop: int) -> np.ndarray:
    """What of runs lies in a range of places, int64 `[K, 3]`.

    Args:
        runs: as `by_place` gives them.
        start: the first place of the range.
        stop: the one behind it.
    """
    first = np.searchsorted(runs[:, 1] + runs[:, 2], start, side="right")
    slot, place, length = runs[first : np.searchsorted(runs[:, 1], stop)].T
    skipped = np.maximum(start - place, 0)
    counts = np.minimum(length, stop - place) - skipped
    return np.stack([slot + skipped, place + skipped, counts], axis=1)


def check_runs(runs: np.ndarray, slots: int, room: int) -> None:
    """Looks at runs that should be of N slots and P places.

    Raises:
        ValueError: runs that overlap, or that are not within the table.
    """
    for starts, most in ((runs[:, 0], slots), (runs[:, 1], room)):
        order = np.argsort(starts)
        first, length = starts[order], runs[order, 2]
        after = np.append(first[1:], most)
        if len(runs) and ((length < 1).any() or first[0] < 0 or (after - first < length).any()):
            raise ValueError("expected runs of places without a gap or an overlap")
