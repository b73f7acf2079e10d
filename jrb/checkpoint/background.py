"""Saves that go on while the program does."""

import atexit
import os
import threading

from jrb.checkpoint.parts import AnyPending

_running: dict[str, "Save"] = {}  # without a lock, as an interrupt could leave that taken


class Save:
    """A save under way, in a thread that a program waits for before it ends."""

    def __init__(self, pending: AnyPending | None, keep: int) -> None:
        self._pending, self._keep = pending, keep
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="jrb-save")
        self._thread.start()

    def _run(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.finish(self._keep)
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Whether it is over."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when it is over.

        Raises:
            OSError: what went wrong.
        """
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        elif self._pending is not None:
            self._pending.close()  # an interrupt came before it began
        if self._error is not None:
            raise self._error


@atexit.register
def _report() -> None:
    """What went wrong and nobody asked for is at least shown when the program ends."""
    errors = []
    for save in list(_running.values()):
        try:
            save.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def start(path: str, pending: AnyPending | None, keep: int) -> Save:
    """Begins to write, if there is something left; nothing else may be under way there."""
    save = _running[os.path.realpath(path)] = Save(pending, keep)
    save.begin()
    return save


def settle(path: str) -> None:
    """Waits until nothing is under way for a path, and raises what went wrong there, once."""
    save = _running.pop(os.path.realpath(path), None)
    if save is not None:
        save.wait()
