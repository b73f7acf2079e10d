"""Calls of Ray that nobody waits for, bounded."""

import collections
from typing import Any

from jrb.remote.library import ray


class Flight:
    """Calls that are under way, at most so many.

    What one of them raised comes out of a later call here.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: collections.deque[Any] = collections.deque()

    def add(self, call: Any) -> None:
        """One more."""
        self._calls.append(call)

    def make_room(self) -> None:
        """Waits until there is room for one more."""
        while len(self._calls) >= self._most:
            self._land()

    def wait(self) -> None:
        """Waits for all of them."""
        while self._calls:
            self._land()

    def _land(self) -> None:
        ray().wait([self._calls[0]])  # an interrupt leaves it in line, with what it may raise
        ray().get(self._calls.popleft())
