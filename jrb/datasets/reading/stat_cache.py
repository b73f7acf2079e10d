"""Results of costly looks at files, kept as long as the files stay as they are."""

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

_MAX_ENTRIES = 8

_T = TypeVar("_T")

FileStamps = tuple[tuple[str, int, int, int], ...]


def file_stamps(paths: Iterable[str]) -> FileStamps:
    """Returns path, inode, time of change and size of each file or folder that exists."""
    stats = ((path, os.stat(path)) for path in paths if os.path.exists(path))
    return tuple((path, stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


class StatCache(Generic[_T]):
    """The most recently used results, by keys of which `file_stamps` are a part."""

    def __init__(self) -> None:
        self._results: dict[Hashable, _T] = {}

    def get(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Returns the result of a key, computed if it is not kept any more."""
        result = self._results.pop(key, None)
        if result is None:
            result = compute()
        self._results[key] = result
        while len(self._results) > _MAX_ENTRIES:
            self._results.pop(next(iter(self._results)), None)
        return result
