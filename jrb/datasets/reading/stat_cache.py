"""What was found out about files once, and holds as long as they are as they were."""

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

_MOST = 8

_T = TypeVar("_T")

Stamps = tuple[tuple[str, int, int, int], ...]


def stamps(paths: Iterable[str]) -> Stamps:
    """What tells files and folders, as they are now, from what may lie at their paths later.

    What is not there is left out.
    """
    found = []
    for path in paths:
        if os.path.exists(path):
            about = os.stat(path)
            found.append((path, about.st_ino, about.st_mtime_ns, about.st_size))
    return tuple(found)


class Remembered(Generic[_T]):
    """The newest few of some things that are costly to make, by their keys."""

    def __init__(self) -> None:
        self._held: dict[Hashable, _T] = {}

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What a key stands for, made if it is not there any more."""
        found = self._held.pop(key, None)
        if found is None:
            found = make()
        self._held[key] = found
        while len(self._held) > _MOST:
            self._held.pop(next(iter(self._held)), None)
        return found
