"""What came of each stream, so that nothing is written twice and what is lost is told.

Every sender numbers the timesteps that it sends to a stream. A call that is made again, as its
answer was lost, begins with a number that was seen; after a server was restarted from its last
save, numbers are missing.
"""

import dataclasses
from typing import Any

import numpy as np

_SENDERS = 4  # of each stream, that are remembered


@dataclasses.dataclass(frozen=True)
class Arrival:
    """What a call brings.

    Attributes:
        again: whether it was here before.
        missing: the timesteps before it that are not here.
        goes_on: whether it follows what the stream has.
    """

    again: bool
    missing: int
    goes_on: bool


class Ledger:
    """Numbers of timesteps by stream and sender. L streams.

    Attributes:
        senders: uint64 `[L, 4]`, who sent to a stream, the last one first; 0 for nobody.
        following: int64 `[L, 4]`, the number of the next timestep of each.
        received: items that came.
        lost: items that had come, or were sent, and are gone, as far as is known.
        drawn: how many batches were drawn.
        restarts: how often the server was begun anew.
        held: items that were held when it was saved.
    """

    _COUNTS = ("received", "lost", "drawn", "restarts", "held")

    def __init__(self, lanes: int) -> None:
        self.senders = np.zeros((lanes, _SENDERS), np.uint64)
        self.following = np.zeros((lanes, _SENDERS), np.int64)
        self.received = self.lost = self.drawn = self.restarts = self.held = 0

    def look(self, lane: int, sender: int, first: int) -> Arrival:
        """What a call brings whose first timestep has this number."""
        known = np.flatnonzero(self.senders[lane] == np.uint64(sender))
        following = int(self.following[lane, known[0]]) if len(known) else 0
        return Arrival(
            again=first < following,
            missing=max(first - following, 0),
            goes_on=first == following and bool(len(known)) and known[0] == 0,
        )

    def note(self, lane: int, sender: int, following: int) -> None:
        """A call came; the next timestep has the number `following`."""
        others = np.flatnonzero(self.senders[lane] != np.uint64(sender))[: _SENDERS - 1]
        senders = np.concatenate([[np.uint64(sender)], self.senders[lane, others]])
        numbers = np.concatenate([[following], self.following[lane, others]])
        self.senders[lane, : len(senders)], self.following[lane, : len(numbers)] = senders, numbers

    def saved(self) -> dict[str, Any]:
        """What is saved beside the buffer; as an example, what is loaded."""
        counts = np.array([getattr(self, name) for name in self._COUNTS], np.int64)
        return {"senders": self.senders, "following": self.following, "counts": counts}

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> "Ledger":
        """The ledger that was saved."""
        ledger = cls(len(saved["senders"]))
        ledger.senders, ledger.following = saved["senders"].copy(), saved["following"].copy()
        for name, count in zip(cls._COUNTS, saved["counts"].tolist(), strict=True):
            setattr(ledger, name, count)
        return ledger
