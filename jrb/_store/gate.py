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
        changed: is told when one has left.
    """

    inside: dict[int, object]
    changed: threading.Condition

    def __init__(self) -> None:
        self.inside, self.changed = {}, threading.Condition()

    def entered(self) -> AbstractContextManager[None]:
        """A time during which this thread is in."""
        return _Visit(self)

    def wait(self) -> None:
        """Returns when all other threads that are in now have left, or after a second."""
        me = threading.get_ident()
        inside = [(thread, time) for thread, time in list(self.inside.items()) if thread != me]
        if not inside:
            return
        gone = lambda: all(self.inside.get(thread) is not time for thread, time in inside)
        with self.changed:
            if not self.changed.wait_for(gone, PATIENCE):
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
            return
        with gate.changed:
            gate.changed.notify_all()
