"""Measures the additional memory that a block of code needs."""

import os
import threading


class Peak:
    """A context that samples the resident memory; `extra` is its peak above the start."""

    extra = 0

    def __enter__(self) -> "Peak":
        self._before = self._most = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._most = max(self._most, _resident())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = self._most - self._before


def _resident() -> int:
    """Returns the resident bytes of the process without mapped files; 0 if not on Linux."""
    try:
        with open("/proc/self/statm") as file:
            pages = file.read().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
