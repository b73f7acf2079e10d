"""What came of each stream, so that nothing is written twice and what is lost is told.

Every sender numbers the timesteps that it sends to a stream. A call that Ray makes again, as its
answer was lost, begins with a number that was seen. After a server was restarted from its last save
numbers are missing; those of calls that were under way then may still come, in any order.
"""

import dataclasses
from typing import Any

import numpy as np

_SENDERS, _GAPS = 4, 8  # of each stream, and of each sender, that are remembered


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What a call brings.

    Attributes:
        again: whether it is here already.
        goes_on: whether it follows what came last of the stream.
        missing: how many timesteps before it are not here; less than 0 for those that were missing
            and have come now.
    """

    again: bool
    goes_on: bool
    missing: int


class Ledger:
    """Numbers of timesteps by stream and sender. L streams.

    Attributes:
        senders: uint64 `[L, 4]`, who sent to a stream, the last one first; 0 for nobody.
        following: int64 `[L, 4]`, one more than the highest number that came of each.
        gaps: int64 `[L, 4, 8, 2]`, from which number to which one is missing; empty ones are none.
        ends: int64 `[L]`, the number after those that came last, of the last sender.
        received: items that came.
        lost: items that are missing, as far as is known.
        drawn: how many batches were drawn.
        held: items that were held when it was saved.
    """

    _ARRAYS = ("senders", "following", "gaps", "ends")
    _COUNTS = ("received", "lost", "drawn", "held")

    def __init__(self, lanes: int) -> None:
        self.senders: np.ndarray = np.zeros((lanes, _SENDERS), np.uint64)
        self.following: np.ndarray = np.zeros((lanes, _SENDERS), np.int64)
        self.gaps: np.ndarray = np.zeros((lanes, _SENDERS, _GAPS, 2), np.int64)
        self.ends: np.ndarray = np.zeros(lanes, np.int64)
        self.received = self.lost = self.drawn = self.held = 0

    def note(self, lane: int, sender: int, first: int, count: int) -> Arrival:
        """Notes that so many timesteps come, of which the first has this number."""
        goes_on = self.senders[lane, 0] == np.uint64(sender) and self.ends[lane] == first
        self._put_first(lane, sender)
        following, missing = int(self.following[lane, 0]), first - int(self.following[lane, 0])
        if first >= following:
            if missing:
                self._add_gaps(lane, [(following, first)])
            self.following[lane, 0] = first + count
        elif self._fill(lane, first, first + count):
            missing = -count
        else:
            return Arrival(again=True, goes_on=False, missing=0)
        self.ends[lane] = first + count
        return Arrival(again=False, goes_on=bool(goes_on), missing=missing)

    def failed(self, lane: int, first: int, count: int) -> None:
        """Notes that timesteps which came last could not be written."""
        self._add_gaps(lane, [(first, first + count)])
        self.ends[lane] = -1

    def _put_first(self, lane: int, sender: int) -> None:
        """Makes the sender the last one that sent."""
        known = np.flatnonzero(self.senders[lane] == np.uint64(sender))
        place = known[0] if len(known) else _SENDERS - 1
        order = [place, *(other for other in range(_SENDERS) if other != place)]
        for array in (self.senders, self.following, self.gaps):
            array[lane] = array[lane, order]
        if not len(known):
            self.senders[lane, 0], self.following[lane, 0], self.gaps[lane, 0] = sender, 0, 0

    def _fill(self, lane: int, first: int, end: int) -> bool:
        """Takes numbers out of the gap that they are in; whether there is one."""
        gaps = self.gaps[lane, 0]
        found = np.flatnonzero((gaps[:, 0] <= first) & (end <= gaps[:, 1]))
        if not len(found):
            return False
        before, after = gaps[found[0]].tolist()
        gaps[found[0]] = 0
        self._add_gaps(lane, [(before, first), (end, after)])
        return True

    def _add_gaps(self, lane: int, new: list[tuple[int, int]]) -> None:
        """Remembers gaps that are not empty, the last ones of all."""
        there = [*map(tuple, self.gaps[lane, 0].tolist()), *new]
        kept = [gap for gap in there if gap[0] < gap[1]][-_GAPS:]
        self.gaps[lane, 0] = 0
        self.gaps[lane, 0, : len(kept)] = np.array(kept).reshape(-1, 2)

    def saved(self) -> dict[str, Any]:
        """What is saved beside the buffer; as an example, what is loaded."""
        counts = np.array([getattr(self, name) for name in self._COUNTS], np.int64)
        return {name: getattr(self, name) for name in self._ARRAYS} | {"counts": counts}

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> "Ledger":
        """The ledger that was saved."""
        ledger = cls(len(saved["senders"]))
        for name in cls._ARRAYS:
            setattr(ledger, name, saved[name].copy())
        for name, count in zip(cls._COUNTS, saved["counts"].tolist(), strict=True):
            setattr(ledger, name, count)
        return ledger
