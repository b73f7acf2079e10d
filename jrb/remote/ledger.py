"""Records which timesteps arrived, so that none is written twice and lost ones are counted.

Every sender numbers the timesteps that it sends to a stream. If Ray repeats a call because its
answer was lost, the call begins with a number that arrived before. If a server restarts from its
last save, numbers are missing; those of unfinished calls may still arrive, in any order.
"""

from typing import Any, NamedTuple

import numpy as np

_SENDERS, _GAPS = 4, 8  # the number of senders kept per stream, and of gaps kept per sender


class Arrival(NamedTuple):
    """The relation of a call's timesteps to those that arrived before."""

    again: bool  # True if all of them arrived before
    goes_on: bool  # True if they directly follow the stream's last timestep
    missing: int  # the number of timesteps missing before them; minus their number if they are late


class Ledger:
    """The numbers of the timesteps that arrived, by stream and sender. L streams."""

    _ARRAYS = ("senders", "following", "gaps", "ends")
    _COUNTS = ("received", "lost", "drawn", "held")

    def __init__(self, lanes: int) -> None:
        # The senders of each stream, most recent first, 0 for none; and the number that each sends
        # next, one above the highest that arrived.
        self.senders: np.ndarray = np.zeros((lanes, _SENDERS), np.uint64)
        self.following: np.ndarray = np.zeros((lanes, _SENDERS), np.int64)
        # The bounds of each gap: the first missing number and the next that arrived; else (0, 0).
        self.gaps: np.ndarray = np.zeros((lanes, _SENDERS, _GAPS, 2), np.int64)
        # The number after the stream's last timestep, from its most recent sender.
        self.ends: np.ndarray = np.zeros(lanes, np.int64)
        self.received: int = 0  # items that arrived
        self.lost: int = 0  # items known to be missing
        self.drawn: int = 0  # batches
        self.held: int = 0  # items stored at the last save

    def note(self, lane: int, sender: int, first: int, count: int) -> Arrival:
        """Records the arrival of `count` timesteps, the first of which has the number `first`."""
        goes_on = bool(self.senders[lane, 0] == np.uint64(sender) and self.ends[lane] == first)
        # The sender moves to the front; a new sender replaces the last one.
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
        """Records that the timesteps that arrived last could not be written, as a gap."""
        self._add_gaps(lane, [(first, first + count)])
        self.ends[lane] = -1

    def _add_gaps(self, lane: int, new: list[tuple[int, int]]) -> None:
        """Adds gaps that are not empty, and keeps the newest of all gaps."""
        every = [*map(tuple, self.gaps[lane, 0].tolist()), *new]
        kept = [gap for gap in every if gap[0] < gap[1]][-_GAPS:]
        self.gaps[lane, 0] = 0
        self.gaps[lane, 0, : len(kept)] = np.array(kept).reshape(-1, 2)

    def saved(self) -> dict[str, Any]:
        """Returns the arrays to save with the buffer, also used as the example for loading."""
        counts = np.array([getattr(self, name) for name in self._COUNTS], np.int64)
        return {name: getattr(self, name) for name in self._ARRAYS} | {"counts": counts}

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> "Ledger":
        """Returns the ledger of saved arrays."""
        ledger = cls(len(saved["senders"]))
        for name in cls._ARRAYS:
            setattr(ledger, name, saved[name].copy())
        for name, count in zip(cls._COUNTS, saved["counts"].tolist(), strict=True):
            setattr(ledger, name, count)
        return ledger
