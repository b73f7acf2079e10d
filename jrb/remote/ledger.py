"""Records which timesteps arrived, so that none is written twice and lost ones are counted.

Every sender numbers the timesteps that it sends to a stream. If Ray repeats a call because its
answer was lost, the call begins with a number that arrived before. If a server restarts from its
last save, numbers are missing; those of unfinished calls may still arrive, in any order.

No sender is forgotten, as Ray may repeat its calls at any time: each sender of a stream takes about
250 bytes, and 32 in a save. Each gap that lost calls left takes 150 bytes more, and 32 in a save.
"""

from typing import NamedTuple

import numpy as np

from jrb._store.block_store import BlockStore
from jrb.checkpoint.manifest import EXTRA

_END = 2**63 - 1  # above every number of a timestep


class Arrival(NamedTuple):
    """The relation of a call's timesteps to those that arrived before."""

    is_repeat: bool  # True if some of them arrived before
    is_next: bool  # True if they directly follow the stream's last timestep
    missing: int  # the number of timesteps missing before them; minus their number if they are late


class Ledger:
    """The numbers of the timesteps that arrived, by stream and sender. L streams."""

    def __init__(self, lanes: int) -> None:
        # By stream and sender, the ranges of numbers that did not arrive, as their first number and
        # the one after their last. The range of all later numbers, up to `_END`, comes last.
        self.missing: dict[tuple[int, int], list[tuple[int, int]]] = {}
        # The sender of each stream's last timestep, 0 for none, and the number that would follow.
        self.last: list[tuple[int, int]] = [(0, 0)] * lanes
        self.received: int = 0  # items that arrived
        self.lost: int = 0  # items known to be missing
        self.drawn: int = 0  # batches
        self.size_at_save: int = 0  # items stored at the last save

    def note(self, lane: int, sender: int, first: int, count: int) -> Arrival:
        """Records the arrival of `count` timesteps, the first of which has the number `first`."""
        # Find the range of missing numbers in which all of these are.
        end, ranges = first + count, self.missing.setdefault((lane, sender), [(0, _END)])
        indices = [at for at, (start, stop) in enumerate(ranges) if start <= first and end <= stop]
        if not indices:
            return Arrival(is_repeat=True, is_next=False, missing=0)
        index = indices[0]
        start, stop = ranges[index]
        # The numbers before and after these are still missing.
        parts = (start, first), (end, stop)
        ranges[index : index + 1] = [part for part in parts if part[0] < part[1]]
        is_next, self.last[lane] = self.last[lane] == (sender, first), (sender, end)
        # Numbers below those that arrived last were counted as missing, and arrive late.
        return Arrival(False, is_next, first - start if stop == _END else -count)

    def note_failure(self, lane: int, sender: int, first: int, count: int) -> None:
        """Records that the timesteps that arrived last could not be written, and are missing."""
        self.missing[lane, sender].insert(0, (first, first + count))
        # No sender has the number 0, so whatever arrives next cuts the stream.
        self.last[lane] = 0, 0

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays to save with the buffer."""
        missing = [(*key, *bounds) for key, ranges in self.missing.items() for bounds in ranges]
        counts = [self.received, self.lost, self.drawn, self.size_at_save]
        return {
            "missing": np.array(missing, np.int64).reshape(-1, 4),
            "last": np.array(self.last, np.int64),
            "counts": np.array(counts, np.int64),
        }

    @classmethod
    def load(cls, path: str, generation: int) -> "Ledger":
        """Returns the ledger that was saved with a generation of a checkpoint."""
        # `checkpoint.load` would need an example of the arrays, with the number of senders.
        with BlockStore.open_to_read(path, generation) as store:
            missing, last, counts = (
                store.array_bytes(EXTRA + name).view(np.int64)
                for name in ("missing", "last", "counts")
            )
        # Undo `to_arrays`.
        ledger = cls(0)
        ledger.last = [(sender, number) for sender, number in last.reshape(-1, 2).tolist()]
        for lane, sender, *bounds in missing.reshape(-1, 4).tolist():
            ledger.missing.setdefault((lane, sender), []).append((bounds[0], bounds[1]))
        ledger.received, ledger.lost, ledger.drawn, ledger.size_at_save = counts.tolist()
        return ledger
