"""What a recorder has open: items in memory, and the chunks that they become.

E environments, n items of a chunk.
"""

import dataclasses
import os
import threading

import numpy as np

from jrb._store.files import Folder
from jrb.datasets.recording import chunks, folders, heads, shared
from jrb.datasets.recording.chunks import Index
from jrb.datasets.recording.heads import Head
from jrb.datasets.recording.indexes import Last, indexed

_CHUNK = 16 << 20  # bytes
_MOST = 1 << 20  # items


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """How far a writer is; replaced as a whole, so that an interrupt finds the old or the new.

    Attributes:
        number: of the chunk that is open.
        held: how many items are in it.
        is_due: whether it was tried to seal it. Then nothing comes into it any more: readers may
            have seen it, though the writer was told that it failed.
        sealed: how many items are in sealed chunks.
        last: the number of the episode of each environment's last sealed item, `[E]`, and whether
            there is one, bool `[E]`; None before there is any, or numbers.
        begins: places of items in it that begin an episode because the writer was told so.
        anew: bool `[E]`, the environments whose next item does; None for none.
    """

    number: int = 0
    held: int = 0
    is_due: bool = False
    sealed: int = 0
    last: Last | None = None
    begins: tuple[int, ...] = ()
    anew: np.ndarray | None = None


class Writer:
    """Takes items into memory, and seals them, a chunk at a time, in a folder of its own.

    Any thread may call it. Each call happens as a whole, or raises and has not happened.

    Args:
        path: of the recording.
        name: for the folder's.
        chunk: for how many items of a chunk there is room; None for as many as 16 MiB hold.

    Attributes:
        progress: how far it is.
        folder: its own.
        is_closed: whether it takes nothing any more.
    """

    progress: Progress
    folder: Folder
    is_closed: bool

    def __init__(self, path: str, name: str, chunk: int | None) -> None:
        self.folder, self._lock = folders.claim(path, name)
        self._chunk, self._room, self._process = chunk, 0, os.getpid()
        self._turn = threading.RLock()
        self.is_closed, self._head, self._sum = False, None, 0
        self._memory: tuple[list[np.ndarray], np.ndarray] = [], np.zeros(0, np.int32)
        self.progress = Progress()

    def check(self) -> None:
        """Raises where nothing may be written any more.

        Raises:
            ValueError: it is closed.
            LockedError: this process was forked off from the one that writes.
        """
        if os.getpid() != self._process:
            self._lock.check()
        self._check_open()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ValueError(
                f"{self.folder.path}: expected an open recorder, got one that was closed. Make "
                "another for the same path: it goes on in a folder of its own."
            )

    def begin(self, head: Head) -> None:
        """Says how items look, before the first.

        Raises:
            ValueError: it was told already that they look otherwise.
        """
        with self._turn:
            self.check()
            self._lock.check()
            if self._head is not None:  # by another thread, or by one that was interrupted then
                heads.check_alike(self.folder.path, "itself", self._head, head)
                return
            self._sum = heads.write_head(self.folder, head)
            width = max(1, sum(leaf.width for leaf in head.leaves))
            self._room = self._chunk or min(max(1, _CHUNK // width), _MOST)
            self._head = head

    def put(self, arrays: list[np.ndarray], count: int, envs: np.ndarray | None) -> None:
        """Takes items.

        Args:
            arrays: `[m, ...]`, of every leaf; of a single item also `[...]`.
            count: m.
            envs: int32 `[m]`, of which environments they are; None if there is one only.

        Raises:
            OSError: there was no room in memory, and the disk is full or broken. These items were
                not taken; all that were taken before are still there.
        """
        self.check()
        with self._turn:
            self._check_open()
            self._make_room(count)
            now, (columns, numbers) = self.progress, self._memory
            stop = now.held + count
            for column, array in zip(columns, arrays, strict=True):
                column[now.held : stop] = array
            if envs is not None:
                numbers[now.held : stop] = envs
            begins, anew = now.begins, now.anew
            if anew is not None:
                begins, anew = self._begun(now, anew, envs)
            self.progress = Progress(now.number, stop, False, now.sealed, now.last, begins, anew)

    def _begun(
        self, now: Progress, told: np.ndarray, envs: np.ndarray | None
    ) -> tuple[tuple[int, ...], np.ndarray | None]:
        """Where episodes begin that were told to, and which environments are still told to."""
        found, places = np.unique([0] if envs is None else envs, return_index=True)
        which, anew = told[found], told.copy()
        anew[found] = False
        begins = (now.held + places[which]).tolist()
        return (*now.begins, *begins), anew if anew.any() else None

    def truncate(self, which: np.ndarray) -> None:
        """With the next item of these environments, bool `[E]`, an episode begins."""
        with self._turn:
            self.check()
            now = self.progress
            anew = which if now.anew is None else now.anew | which
            self.progress = dataclasses.replace(now, anew=anew.copy() if anew.any() else None)

    def _make_room(self, count: int) -> None:
        """Sees to it that so many items fit in."""
        room = len(self._memory[1])
        if self.progress.held and (self.progress.is_due or self.progress.held + count > room):
            self.seal()
        wanted = max(self._room, count)
        if not self.progress.held and room != wanted:
            make = lambda leaf: np.empty((wanted, *leaf.shape), leaf.numpy)
            self._memory = list(map(make, self._known.leaves)), np.zeros(wanted, np.int32)

    @property
    def _known(self) -> Head:
        if self._head is None:
            raise ValueError(f"{self.folder.path}: expected items of a known structure.")
        return self._head

    def seal(self) -> None:
        """Writes what is in memory as a chunk, which is on the disk then.

        Raises:
            OSError: the disk is full or broken. All is still in memory, and may be sealed later.
        """
        with self._turn:
            self.check()
            now = self.progress
            if not now.held:
                return
            self._lock.check()
            self.progress = dataclasses.replace(now, is_due=True)
            columns, index, last = self._ordered(now)
            found = shared.found(self._known, columns)
            chunks.write_chunk(self.folder, now.number, self._sum, columns, index, found)
            sealed = now.sealed + now.held
            self.progress = Progress(now.number + 1, sealed=sealed, last=last, anew=now.anew)

    def _ordered(self, now: Progress) -> tuple[list[np.ndarray], Index, Last | None]:
        """All that is held, environment by environment, what is in it, and `Progress.last`."""
        columns = [column[: now.held] for column in self._memory[0]]
        begins, counts = np.array(now.begins), np.array([now.held])
        if self._known.envs > 1:
            numbers = self._memory[1][: now.held]
            counts = np.bincount(numbers, minlength=self._known.envs)
            order = np.argsort(numbers, kind="stable")
            columns = [column[order] for column in columns]
            begins = np.flatnonzero(np.isin(order, begins))
        index, last = indexed(self._known, columns, counts, begins, now.last)
        return columns, index, last

    def close(self) -> None:
        """Seals what is in memory, and gives the right to write back."""
        if os.getpid() != self._process:
            return  # a lock that another thread had when it was forked off stays taken
        with self._turn:
            if self.is_closed:
                return
            self.seal()
            self._lock.release()
            self.is_closed = True
