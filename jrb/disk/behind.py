"""Writes that a thread makes behind the back of the program."""

import collections
import threading

import numpy as np

from jrb.disk.live import Live

ROOM = 64 << 20
"""Bytes that may wait; a single larger write waits alone."""


class Behind:
    """What waits to be written to a store.

    A thread works while there is something to write, and ends then.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._waiting: collections.deque[tuple[int, np.ndarray, list[np.ndarray]]] = (
            collections.deque()
        )
        self._size = 0
        self._working = False
        self._changed = threading.Condition()

    def put(self, version: int, slots: np.ndarray, rows: list[np.ndarray], patient: bool) -> int:
        """As `Live.put`, but that errors of the disk come out at the next call."""
        size = sum(leaf.nbytes for leaf in rows)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._size + size <= ROOM)
        version = self._live.claim(version, slots, patient)
        with self._changed:
            self._waiting.append((version, slots, [leaf.copy() for leaf in rows]))
            self._size += size
            idle, self._working = not self._working, True
        if idle:
            try:
                threading.Thread(target=self._work, name="jrb-spill", daemon=True).start()
            except RuntimeError:  # no thread is to be had, as when the program ends
                self._work()
        return version

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._working = False
                    return
                version, slots, rows = self._waiting[0]
            self._live.apply_behind(version, slots, rows)
            with self._changed:
                self._waiting.popleft()
                self._size -= sum(leaf.nbytes for leaf in rows)
                self._changed.notify_all()
