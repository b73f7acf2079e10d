"""Draws that writes let end."""

import threading
import time
from contextlib import AbstractContextManager

from jrb._store.threads import taken_lock

PATIENCE = 1.0
"""Seconds that a write waits for draws of other threads; those that take longer come too late."""


class Gate:
    """Lets threads in, and another wait until those that are in have left.

    A thread that an interrupt has thrown out without its leaving holds one writer up, for a second.

    Attributes:
        inside: the visits of threads that are in, by their numbers.
    """

    inside: dict[int, "Visit"]

    def __init__(self) -> None:
        self.inside = {}

    def entered(self) -> AbstractContextManager[None]:
        """A time during which this thread is in."""
        return Visit(self.inside)

    def wait(self) -> None:
        """Returns when all other threads that are in now have left, or after a second."""
        end = time.monotonic() + PATIENCE
        for thread, visit in list(self.inside.items()):
            if thread == threading.get_ident():
                continue
            if visit.lock.acquire(timeout=max(0.0, end - time.monotonic())):
                visit.lock.release()
            else:
                self.inside.pop(thread, None)


class Visit:
    """A time during which a thread is in; each draw is one, so that it has to be quick.

    Attributes:
        lock: is taken until the thread leaves.
    """

    __slots__ = ("_inside", "_thread", "lock")

    def __init__(self, inside: dict[int, "Visit"]) -> None:
        self._inside, self._thread, self.lock = inside, threading.get_ident(), taken_lock()

    def __enter__(self) -> None:
        self._inside.setdefault(self._thread, self)  # within another visit it does not count

    def __exit__(self, *error: object) -> None:
        if self._inside.get(self._thread) is self:
            del self._inside[self._thread]
        self.lock.release()
