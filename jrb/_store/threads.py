"""Threads that an interrupt cannot harm, and work shared by a few of them.

An interrupt (Ctrl-C) raises `KeyboardInterrupt` in the main thread, between any two instructions of
Python. `Thread.start`, `Thread.join`, `Event`, `Condition` and `queue.Queue` wait in Python code:
there an interrupt can leave a lock taken, so that the other thread hangs for ever, and Python 3.11
marks a thread as ended if its `join` was interrupted. Calls of C are safe: a `threading.Lock` is
taken, or the wait for it raises. `tests/test_interrupts.py` guards this.
"""

import _thread
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")


WORKERS: int = 2
"""Threads that compute, write or read at a time; where it is one, all happens in order."""


def taken_lock() -> threading.Lock:
    """Returns a lock that is taken: who waits for it waits until another thread releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Worker:
    """A thread that calls a function once; an interrupt of `start` or `wait` changes nothing of it.

    Args:
        work: the function.
        name: of the thread.
        daemon: whether a program may end while it runs.

    Attributes:
        error: what the function raised, or None.
    """

    error: BaseException | None

    def __init__(self, work: Callable[[], None], name: str, daemon: bool = False) -> None:
        self.error = None
        self._work = [work]
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._starters: list[int] = []
        self._starting, self._running, self._is_over = taken_lock(), taken_lock(), False

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: the system or the interpreter, which is ending, allows no more threads.
        """
        # One call of C: an interrupt comes before it, or finds the starter in the list. `start` of
        # a `Thread` is called by another thread, as no interrupt comes there.
        self._starters.extend(map(_thread.start_new_thread, [self._start], [()]))
        with self._starting:  # a program that ends next has to know of the thread
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
            self._work.pop()()  # what it holds is free before anybody hears that it is over
        except BaseException as raised:
            error = raised
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.error, self._is_over = error, True
        self._running.release()

    @property
    def is_started(self) -> bool:
        """Whether the function is called, or was, or will be at once."""
        return bool(self._starters)

    def is_alive(self) -> bool:
        """Returns whether the function was started and has not returned."""
        return self.is_started and not self._is_over

    def wait(self) -> None:
        """Returns when the function has returned; at once if it was not started, or calls this."""
        if not self.is_started or self._thread.ident == threading.get_ident():
            return
        if not self._is_over:
            with self._running:
                pass
        if self._thread.ident is not None:
            self._thread.join()  # it takes a moment: nothing is left to be lost by an interrupt


def share(
    work: Callable[[T], None],
    tasks: Iterable[T],
    beside: Iterable[Callable[[], None]] = (),
    most: int = 1,
) -> None:
    """Does all tasks; what a task raises comes out after the threads have ended.

    The executors of the standard library take no work any more once the program is ending, and a
    save has to end well then.

    Args:
        work: what is done with a task.
        tasks: in any order, but for a single worker.
        beside: what one more thread does meanwhile, one after the other: it waits for the disk. A
            single worker does it first.
        most: how many times as many threads as usual, where tasks wait for the disk.
    """
    errors: list[BaseException] = []
    run = functools.partial(_share, work, iter(tasks), list(beside), most, errors)
    if threading.get_ident() != threading.main_thread().ident:
        run()  # no interrupt comes here
    else:
        worker = Worker(run, "jrb-share")
        try:
            worker.start()
            worker.wait()
        except BaseException as error:
            errors.append(error)  # the threads end after the tasks that they are at
            _wait_for(worker)
            raise
        if worker.error is not None:
            raise worker.error
    if errors:
        raise errors[0]


def _wait_for(worker: Worker) -> None:
    """Returns when a worker has ended, however many interrupts come."""
    try:
        worker.wait()
    except BaseException:
        _wait_for(worker)
        raise


def _share(
    work: Callable[[T], None],
    tasks: Iterator[T],
    others: list[Callable[[], None]],
    most: int,
    errors: list[BaseException],
) -> None:
    """Does all tasks, in this thread and in some more; not for the main thread."""
    do_tasks = functools.partial(_drain, work, tasks, threading.Lock(), errors)
    do_others = functools.partial(_drain, _call, iter(others), threading.Lock(), errors)
    works = [do_tasks] * (most * WORKERS - 1) + [do_others] * bool(others)
    threads = [threading.Thread(target=one) for one in works]
    if WORKERS == 1:
        threads.clear()
        do_others()
    with contextlib.suppress(RuntimeError):  # no more threads: this one does what is left
        for thread in threads:
            thread.start()
    do_tasks()
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join()
    do_others()


_NOTHING: Any = object()


def _drain(
    work: Callable[[T], None], left: Iterator[T], lock: threading.Lock, errors: list[BaseException]
) -> None:
    """Takes one task after the other until there is none, or something went wrong."""
    while not errors:
        try:
            with lock:
                task = next(left, _NOTHING)
            if task is _NOTHING:
                return
            work(task)
        except BaseException as error:
            errors.append(error)


def _call(task: Callable[[], None]) -> None:
    task()


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
