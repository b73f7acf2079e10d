"""Work shared by a few threads, also while the program is ending."""

import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


WORKERS = 2
"""Threads that write or read at a time."""


def share(work: Callable[[T], None], tasks: Iterable[T]) -> None:
    """Does all tasks; what a task raises comes out after the threads have ended.

    The executors of the standard library take no work any more once the program is ending, and a
    save has to end well then.
    """
    left, lock = iter(tasks), threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            with lock:
                task = next(left, left)
            if task is left:
                return
            try:
                work(task)  # pyright: ignore[reportArgumentType]
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def both(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Does two things at a time, by a thread that waits for such work; for short ones."""
    done, errors = threading.Lock(), []
    done.acquire()

    def work() -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    helper = _helper()
    if helper is None:
        one()
        other()
        return
    helper.put(work)
    try:
        other()
    finally:
        done.acquire()
    if errors:
        raise errors[0]


def _helper() -> "queue.SimpleQueue[Callable[[], None]] | None":
    """What the waiting thread takes its work from; None if no thread starts any more."""
    global _work
    with _starting:
        if _work is None or _work[0] != os.getpid():
            work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
            try:
                threading.Thread(target=_serve, args=(work,), name="jrb-help", daemon=True).start()
            except RuntimeError:
                return None
            _work = os.getpid(), work
        return _work[1]


def _serve(work: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        work.get()()


_work: "tuple[int, queue.SimpleQueue[Callable[[], None]]] | None" = None
_starting = threading.Lock()
