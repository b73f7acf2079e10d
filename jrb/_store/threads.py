"""Work shared by a few threads, also while the program is ending."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


WORKERS: int = 2
"""Threads that compute, write or read at a time; where it is one, all happens in order."""


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
    own, left, lock = list(beside), iter(tasks), threading.Lock()
    count = 1 if WORKERS == 1 else most * WORKERS
    threads = [
        threading.Thread(target=_drain, args=(work, left, lock, errors)) for _ in range(count)
    ]
    waiting = threading.Thread(target=_drain, args=(_call, iter(own), threading.Lock(), errors))
    try:
        if own:
            waiting.start()
        if WORKERS == 1:
            _join(waiting)
        for thread in threads:
            thread.start()
        _join(waiting, *threads)
    except BaseException as error:  # an interrupt: nothing goes on behind the caller's back
        errors.append(error)
        _join(waiting, *threads)
        raise
    if errors:
        raise errors[0]


def _join(*threads: threading.Thread) -> None:
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join()


def _drain(
    work: Callable[[T], None], left: Iterator[T], lock: threading.Lock, errors: list[BaseException]
) -> None:
    """Takes one task after the other until there is none, or something went wrong."""
    while not errors:
        with lock:
            try:
                task = next(left)
            except StopIteration:
                return
        try:
            work(task)
        except BaseException as error:
            errors.append(error)


def _call(task: Callable[[], None]) -> None:
    task()
