"""Threads that an interrupt cannot harm, and work shared by a few of them.

An interrupt (Ctrl-C) raises `KeyboardInterrupt` in the main thread, between any two instructions of
Python. `Thread.start`, `Thread.join`, `Event`, `Condition` and `queue.Queue` wait in Python code,
where an interrupt can leave a lock taken, so that another thread hangs for ever; and Python 3.11
marks a thread as ended if its `join` was interrupted. Calls of C are safe: either a
`threading.Lock` is taken, or the wait for it raises.
`tests/interrupts/test_interrupts.py` guards this.
"""

import _thread
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WORKERS: int = 2
"""The number of threads that compute, write or read at a time; with 1, all runs in order."""

PATIENCE: float = 1.0
"""Seconds that a write waits for draws of other threads; slower ones may find rows overwritten."""


def taken_lock() -> threading.Lock:
    """Returns a lock that is taken already: to acquire it is to wait until a thread releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Worker:
    """Calls a function once in a thread, which interrupts of `start` and `wait` do not disturb."""

    def __init__(self, work: Callable[[], None], name: str, daemon: bool = False) -> None:
        self.error: BaseException | None = None  # what the function raised
        self._work = [work]
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._starters: list[int] = []
        # The thread releases these locks; to wait for one is a call of C.
        self._starting, self._running, self._is_over = taken_lock(), taken_lock(), False

    def start(self) -> None:
        # One call of C: an interrupt comes either before it, or after the starter is in the list.
        # Another thread calls `Thread.start`, as interrupts come in the main thread only.
        self._starters.extend(map(_thread.start_new_thread, [self._start], [()]))
        with self._starting:  # so that Python waits for the thread if the program ends next
            pass

    def _start(self) -> None:
        try:
            self._thread.start()
        except BaseException as error:
            self._end(error)
        finally:
            self._starting.release()

    def _run(self) -> None:
        error = None
        try:
            self._work.pop()()  # popped, so that the function is freed before `wait` returns
        except BaseException as raised:
            error = raised
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.error, self._is_over = error, True
        self._running.release()

    @property
    def is_started(self) -> bool:
        """True if the function was called, or is about to be."""
        return bool(self._starters)

    def is_alive(self) -> bool:
        """Returns True while the function was started and has not returned."""
        return self.is_started and not self._is_over

    def wait(self) -> None:
        """Waits until the function has returned; not if it was not started, or calls this."""
        if not self.is_started or self._thread.ident == threading.get_ident():
            return
        # Each waiting thread releases the lock at once, for the other waiting threads.
        if not self._is_over:
            with self._running:
                pass
        if self._thread.ident is not None:
            self._thread.join()  # this takes a moment, and an interrupt of it does no harm


def run_all(tasks: Sequence[Callable[[], Any]]) -> None:
    """Calls functions in `WORKERS` threads.

    An error of one of them is raised after all threads have ended.
    """
    # The executors of the standard library accept no work once the program is ending, but a save
    # has to be completed then.
    errors: list[BaseException] = []
    remaining, lock = iter(tasks), threading.Lock()

    def call_tasks() -> None:
        while not errors:
            try:
                with lock:
                    task = next(remaining, None)
                if task is None:
                    return
                task()
            except BaseException as error:
                errors.append(error)

    def run() -> None:
        threads = [threading.Thread(target=call_tasks) for _ in range(WORKERS - 1)]
        with contextlib.suppress(RuntimeError):  # no more threads: this one does all that remains
            for thread in threads:
                thread.start()
        call_tasks()
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()

    if len(tasks) < 2:
        call_tasks()
    elif threading.get_ident() != threading.main_thread().ident:
        run()  # no interrupt comes outside the main thread
    else:
        worker = Worker(run, "jrb-share")
        try:
            worker.start()
            worker.wait()
        except BaseException as error:
            errors.append(error)  # because of it, the threads end after their present tasks
            _wait_for(worker)
            raise
        errors += [] if worker.error is None else [worker.error]
    if errors:
        raise errors[0]


def _wait_for(worker: Worker) -> None:
    """Returns when a worker has ended, however many interrupts come."""
    try:
        worker.wait()
    except BaseException:
        _wait_for(worker)
        raise


class Gate:
    """Tracks which threads are inside a context, so that another thread can wait for them.

    If an interrupt ended a thread's visit without a trace, one writer waits for it for a second.
    """

    def __init__(self) -> None:
        # A lock for each thread inside, by its identifier; the thread releases it when it leaves.
        self.inside: dict[int, threading.Lock] = {}
        self._late: set[weakref.ref[threading.Lock]] = set()  # those that were waited for in vain

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Returns a context during which this thread is inside."""
        thread, lock = threading.get_ident(), taken_lock()
        is_outer = self.inside.setdefault(thread, lock) is lock  # a nested context does not count
        try:
            yield
        finally:
            if is_outer:
                self.inside.pop(thread, None)
            lock.release()

    def wait(self) -> bool:
        """Waits until all other threads that are inside now have left, at most `PATIENCE`.

        Returns True if they have, and all for which an earlier call waited in vain.
        """
        end = time.monotonic() + PATIENCE
        for thread, lock in list(self.inside.items()):
            if thread == threading.get_ident():
                continue
            if lock.acquire(timeout=max(0.0, end - time.monotonic())):
                lock.release()
            else:
                self._late.add(weakref.ref(lock))
                if self.inside.get(thread) is lock:  # otherwise the thread is inside once more
                    self.inside.pop(thread, None)
        for ref in list(self._late):
            if (late := ref()) is None or not late.locked():
                self._late.discard(ref)
        return not self._late
