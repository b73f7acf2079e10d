"""The rows of a generation, seen by somebody who reads while others overwrite them."""

import contextlib
import threading

import numpy as np

from jrb.disk import files, undo
from jrb.disk.errors import StaleError

FEW = 32
"""Logs that a reader has open."""


class Past:
    """What was overwritten since a generation was saved.

    As long as this is there, no log that it needs is removed.

    Args:
        path: of the store.
        generation: the one that is read.
        widths: bytes of a row of each column.
        capacity: N.

    Raises:
        FileNotFoundError: its log was removed already.
    """

    def __init__(self, path: str, generation: int, widths: tuple[int, ...], capacity: int) -> None:
        self._path, self._widths, self._capacity = path, widths, capacity
        self._first = self._held_log(generation)
        self._later: list[undo.Log] = []
        self._folded: undo.Log | None = None
        self._next = generation + 1
        self._turn = threading.Lock()

    def _held_log(self, generation: int) -> undo.Log:
        while True:
            log = self._log(generation)
            if files.share_lock(log.file):
                break
        if log.is_removed:
            raise FileNotFoundError(log.path)
        return log

    def _log(self, generation: int) -> undo.Log:
        path = undo.path_of(self._path, generation)
        return undo.Log(path, self._widths, self._capacity, writable=False)

    def restore(self, number: int, slots: np.ndarray, rows: np.ndarray) -> None:
        """Puts rows of a column, just read at these slots, back as they were.

        Raises:
            StaleError: that cannot be told any more.
        """
        left = np.ones(len(slots), bool)
        for log in self._logs():
            entries = log.find(slots)
            here = left & (entries >= 0)
            rows[here] = log.rows(number, entries[here])
            left &= ~here

    def _logs(self) -> list[undo.Log]:
        """All logs since this generation, its own first, with what writers have added."""
        with self._turn:
            with contextlib.suppress(FileNotFoundError):
                while True:
                    self._later.append(self._log(self._next))
                    self._next += 1
            for log in (self._first, *self._later):
                log.refresh()
            if self._first.is_removed:
                raise StaleError(
                    f"{self._path}: expected the log of the generation that was loaded, found it "
                    "removed. Load the path again."
                )
            if len(self._later) > FEW:
                self._fold()
            folded = [] if self._folded is None else [self._folded]
            return [self._first, *folded, *self._later]

    def _fold(self) -> None:
        """Puts logs that grow no more into one, so that few files are open."""
        folded = self._folded or undo.private(self._widths, self._capacity)
        for log in self._later[:-1]:
            slots = log.slots()
            slots = slots[(folded.find(slots) < 0) & (self._first.find(slots) < 0)]
            entries = log.find(slots)
            if len(slots):
                folded.append(slots, [log.rows(n, entries) for n in range(len(self._widths))])
        self._later, self._folded = self._later[-1:], folded
