"""Saves that go on while the program does."""

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

from jrb._store.threads import Worker
from jrb.checkpoint.composite import AnyJob

_running: dict[str, "Save"] = {}  # without a lock, as an interrupt could leave that taken


class Save:
    """A save under way, in a thread that a program waits for before it ends."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._job: AnyJob | int = 0
        self._worker = Worker(self._finish, "jrb-save")
        self._is_told = False  # whether an error was raised by `wait`

    def _begin(self, open_job: Callable[[], AnyJob | int]) -> None:
        """Finds out what will be written, and starts the thread if anything is left to be done."""
        try:
            self._job = open_job()
            if not isinstance(self._job, int):
                self._worker.start()
        except BaseException:
            if not self._worker.is_started and not isinstance(self._job, int):
                self._job.close()
            raise

    def _finish(self) -> None:
        job, self._job = self._job, 0
        if not isinstance(job, int):
            job.finish(self._keep)

    def done(self) -> bool:
        """Whether it is over."""
        return not self._worker.is_alive()

    def wait(self) -> None:
        """Returns when it is over. An interrupt ends the waiting, and the save goes on.

        Raises:
            OSError: what went wrong.
        """
        self._worker.wait()
        if self._worker.error is not None:
            self._is_told = True
            raise self._worker.error


def start(path: str, open_job: Callable[[], AnyJob | int], keep: int) -> Save:
    """Begins a save, in the background but for what `open_job` does.

    Args:
        path: where nothing else is under way.
        open_job: opens the save; returns what is left to be done, or a number if it is over.
        keep: how many older generations stay.
    """
    save = _running[os.path.realpath(path)] = Save(keep)
    save._begin(open_job)
    atexit.unregister(_report)
    atexit.register(_report)  # called before the finalizers that close the files of the save
    return save


def settle(path: str) -> None:
    """Waits until nothing is under way for a path, and raises what went wrong there, once."""
    path = os.path.realpath(path)
    save = _running.get(path)
    if save is None:
        return
    save._worker.wait()
    error = save._worker.error
    # Without a call in between, so without an interrupt: it is forgotten when it is raised.
    if path in _running and _running[path] is save:
        del _running[path]
    if error is not None:
        raise error


class _FailingOutput:
    """Takes the place of `sys.stdout` when the program ends: what was not saved is an error.

    The status of a program whose main module has ended can be changed in one way only: Python makes
    it 120 where the standard output cannot be flushed, and shows what was raised. An exception in a
    function of `atexit` is shown, but leaves the status 0; `os._exit` would leave out all that
    others do when the program ends.
    """

    def __init__(self, output: Any, error: BaseException) -> None:
        self._output, self._error = output, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def __repr__(self) -> str:
        return "a save in the background that failed"

    def flush(self) -> None:
        if self._output is not None:
            self._output.flush()
        if sys.is_finalizing():  # after all functions of `atexit`, which may flush it too
            raise self._error


@atexit.register
def _report() -> None:
    """Waits for all saves; a failure that nobody asked for makes the program end with an error."""
    errors: list[BaseException] = []
    for save in list(_running.values()):
        try:
            save._worker.wait()
            if save._worker.error is not None and not save._is_told:
                errors.append(save._worker.error)
        except BaseException as error:  # an interrupt: the program ends before the save
            errors.append(error)
    if errors:
        error = errors[0] if len(errors) == 1 else BaseExceptionGroup("saves failed", errors)
        sys.stdout = _FailingOutput(sys.stdout, error)
