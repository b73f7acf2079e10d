"""The numbers of timesteps that came, so that none is written twice and lost ones are counted.

Every sender numbers the timesteps that it sends to a stream. A call that Ray makes again, because
its answer was lost, begins with a number that came before. After a server was restarted from its
last save, numbers are missing; those of calls that were under way may still come, in any order.
"""

from typing import Any, NamedTuple

import numpy as np

_SENDERS, _GAPS = 4, 8  # of each stream, and of each sender, that are remembered


class Arrival(NamedTuple):
    """The place of a call among those of its sender."""

    again: bool  # all of it came before
    goes_on: bool  # it follows what came last of the stream
    missing: int  # timesteps before it that did not come; negative for those that come late


class Ledger:
    """Numbers of timesteps by stream and sender. L streams."""

    _ARRAYS = ("senders", "following", "gaps", "ends")
    _COUNTS = ("received", "lost", "drawn", "held")

    def __init__(self, lanes: int) -> None:
        # The senders of a stream, the last one first, 0 for none; and one more than the highest
        # number that came of each.
        self.senders: np.ndarray = np.zeros((lanes, _SENDERS), np.uint64)
        self.following: np.ndarray = np.zeros((lanes, _SENDERS), np.int64)
        # The first missing number and the one after the last; (0, 0) for no gap.
        self.gaps: np.ndarray = np.zeros((lanes, _SENDERS, _GAPS, 2), np.int64)
        # The number after those that came last, of the last sender.
        self.ends: np.ndarray = np.zeros(lanes, np.int64)
        self.received: int = 0  # items
        self.lost: int = 0  # items that are missing, as far as is known
        self.drawn: int = 0  # batches
        self.held: int = 0  # items that were stored when it was saved

    def note(self, lane: int, sender: int, first: int, count: int) -> Arrival:
        """Notes that `count` timesteps come, of which the first has this number."""
        goes_on = bool(self.senders[lane, 0] == np.uint64(sender) and self.ends[lane] == first)
        # The sender becomes the first one; a new one takes the place of the last.
        same = np.flatnonzero(self.senders[lane] == np.uint64(sender))
        place = same[0] if len(same) else _SENDERS - 1
        order = [place, *(other for other in range(_SENDERS) if other != place)]
        for array in (self.senders, self.following, self.gaps):
            array[lane] = array[lane, order]
        if not len(same):
            self.senders[lane, 0], self.following[lane, 0], self.gaps[lane, 0] = sender, 0, 0
        following, end, gaps = int(self.following[lane, 0]), first + count, self.gaps[lane, 0]
        missing = first - following
        if missing >= 0:
            self._add_gaps(lane, [(following, first)])
            self.following[lane, 0] = end
        else:
            around = np.flatnonzero((gaps[:, 0] <= first) & (end <= gaps[:, 1]))
            if not len(around):
                return Arrival(again=True, goes_on=False, missing=0)
            before, after = gaps[around[0]].tolist()
            gaps[around[0]] = 0
            self._add_gaps(lane, [(before, first), (end, after)])
            missing = -count
        self.ends[lane] = end
        return Arrival(again=False, goes_on=goes_on, missing=missing)

    def note_failure(self, lane: int, first: int, count: int) -> None:
        """Notes that timesteps which came last could not be written."""
        self._add_gaps(lane, [(first, first + count)])
        self.ends[lane] = -1

    def _add_gaps(self, lane: int, new: list[tuple[int, int]]) -> None:
        """Remembers gaps that are not empty, the last ones of all."""
        every = [*map(tuple, self.gaps[lane, 0].tolist()), *new]
        kept = [gap for gap in every if gap[0] < gap[1]][-_GAPS:]
        self.gaps[lane, 0] = 0
        self.gaps[lane, 0, : len(kept)] = np.array(kept).reshape(-1, 2)

    def saved(self) -> dict[str, Any]:
        """Returns the arrays to save with the buffer, which are also the example to load them."""
        counts = np.array([getattr(self, name) for name in self._COUNTS], np.int64)
        return {name: getattr(self, name) for name in self._ARRAYS} | {"counts": counts}

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> "Ledger":
        """Returns the ledger that was saved."""
        ledger = cls(len(saved["senders"]))
        for name in cls._ARRAYS:
            setattr(ledger, name, saved[name].copy())
        for name, count in zip(cls._COUNTS, saved["counts"].tolist(), strict=True):
            setattr(ledger, name, count)
        return ledger
