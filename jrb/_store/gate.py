"""Draws that writes let end."""

import contextlib
import threading
from collections.abc import Iterator

PATIENCE = 1.0
"""Seconds that a write waits for draws of other threads; those that take longer come too late."""


class Gate:
    """Lets threads in, and another wait until those that are in have left.

    One that an interrupt has thrown out without its leaving holds a writer up for a moment only.
    """

    def __init__(self) -> None:
        self._inside: dict[int, object] = {}
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A time during which this thread is in."""
        me = threading.get_ident()
        before = self._inside.get(me)
        self._inside[me] = object()
        try:
            yield
        finally:
            self._inside.pop(me, None)
            if before is not None:
                self._inside[me] = before
            else:
                with self._changed:
                    self._changed.notify_all()

    def wait(self) -> None:
        """Returns when all other threads that are in now have left, or after a second."""
        me = threading.get_ident()
        inside = [(thread, time) for thread, time in list(self._inside.items()) if thread != me]
        if not inside:
            return
        gone = lambda: all(self._inside.get(thread) is not time for thread, time in inside)
        with self._changed:
            if not self._changed.wait_for(gone, PATIENCE):
                for thread, _ in inside:
                    self._inside.pop(thread, None)
