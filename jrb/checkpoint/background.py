"""Saves that go on while the program does."""

import atexit
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from jrb.checkpoint.native import Pending

_lock = threading.Lock()
_running: dict[str, Future] = {}
_pool = ThreadPoolExecutor(1, thread_name_prefix="jrb-save")
atexit.register(_pool.shutdown)


class Save:
    """A save under way."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether it is over."""
        return self._future.done()

    def wait(self) -> None:
        """Returns when it is over.

        Raises:
            OSError: what went wrong.
        """
        self._future.result()


def start(path: str, pending: Pending, keep: int) -> Save:
    """Writes in a thread of its own; nothing else may be under way for this path."""
    with _lock:
        future = _pool.submit(pending.finish, keep)
        _running[os.path.realpath(path)] = future
    return Save(future)


def settle(path: str) -> None:
    """Waits until nothing is under way for a path, and raises what went wrong there, once."""
    with _lock:
        future = _running.pop(os.path.realpath(path), None)
    if future is not None:
        future.result()
