"""Draws that writes let end."""

import threading
from contextlib import AbstractContextManager

PATIENCE = 1.0
"""Seconds that a write waits for draws of other threads; those that take longer come too late."""


class Gate:
    """Lets threads in, and another wait until those that are in have left.

    One that an interrupt has thrown out without its leaving holds a writer up for a moment only.

    Attributes:
        inside: the visits of threads that are in, by their numbers.
        waiting: how many threads wait. Whoever leaves looks at it afterwards, and whoever waits
            counts himself before he looks who is in: one of the two sees the other.
        changed: is told when one has left, if any wait.
    """

    inside: dict[int, object]
    waiting: int
    changed: threading.Condition

    def __init__(self) -> None:
        self.inside, self.waiting, self.changed = {}, 0, threading.Condition()

    def entered(self) -> AbstractContextManager[None]:
        """A time during which this thread is in."""
        return _Visit(self)

    def wait(self) -> None:
        """Returns when all other threads that are in now have left, or after a second."""
        with self.changed:
            self.waiting += 1
            try:
                self._wait()
            finally:
                self.waiting -= 1

    def _wait(self) -> None:
        me = threading.get_ident()
        inside = [(thread, time) for thread, time in list(self.inside.items()) if thread != me]
        gone = lambda: all(self.inside.get(thread) is not time for thread, time in inside)
        if inside and not self.changed.wait_for(gone, PATIENCE):
            for thread, _ in inside:
                self.inside.pop(thread, None)


class _Visit:
    """A time during which a thread is in; each draw is one, so that it has to be quick."""

    __slots__ = ("_before", "_gate", "_thread")

    def __init__(self, gate: Gate) -> None:
        self._gate, self._thread, self._before = gate, threading.get_ident(), None

    def __enter__(self) -> None:
        inside = self._gate.inside
        self._before, inside[self._thread] = inside.get(self._thread), self

    def __exit__(self, *error: object) -> None:
        gate = self._gate
        gate.inside.pop(self._thread, None)
        if self._before is not None:
            gate.inside[self._thread] = self._before
        elif gate.waiting:
            with gate.changed:
                gate.changed.notify_all()
