"""Work shared by a few threads, also while the program is ending."""

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
