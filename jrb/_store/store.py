"""A store of rows on a disk, which is written as a ring and committed as a whole.

A row is written to a free place (see `jrb._store.places`), so the rows of the last commit stay as
they are, and a commit only has to sync the rows and to write one file. After a crash, nothing has
to be undone. Only if no place is free any more before the next commit, the oldest committed rows
are overwritten, after the numbers of their places have changed on the disk: by these numbers a
reader, and whoever opens the store after a crash, recognises the lost rows.
"""

import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from jrb._store import generation as generations
from jrb._store.errors import DamagedError, StaleError
from jrb._store.files import Folder
from jrb._store.generation import Generation
from jrb._store.lock import Lock
from jrb._store.places import LOST, NEVER, Places, named_by
from jrb._store.sums import Sums, longer
from jrb._store.table import NUMBERS, RowTable, checksum_of, folder_of
from jrb._store.threads import Gate, share

writing: "weakref.WeakValueDictionary[str, Store]" = weakref.WeakValueDictionary()
"""The stores that this process writes to, by their folders."""

_OUTCOMES = (
    "It has not happened: what was saved before is still there.",
    "It has happened, but may not survive a loss of power before the next save.",
    "It has happened, and lasts; what it makes superfluous is still there.",
)


class Store:
    """A store that is open in this process; `jrb._store.opening` opens it.

    All states of a buffer share it. A state has a version, which is the number of its newest row.
    Only the newest state may be written to; of older ones, rows that were not overwritten since can
    be read. The first write takes the lock.
    """

    # Set if the store is one of several that are saved together: returns the generation that the
    # common one refers to, even if it is not the newest. The first write removes later ones.
    promised: Callable[[], int | None] | None = None

    def __init__(
        self,
        folder: Folder,
        table: RowTable,
        places: Places,
        number: int,
        table_folder: int,
        reserve: bool = False,
        lock: Lock | None = None,
        most: int = 0,
    ) -> None:
        self.folder: Folder = folder
        self.path: str = folder.path
        self.slots: int = places.slots  # N
        self.table: RowTable = table
        self.generation: int = number
        self.drawing: Gate = Gate()  # tracks draws, for which writes of other threads wait
        self.sums: Sums = Sums(table)  # of the rows that were committed or opened
        self.lost: np.ndarray = np.zeros(0, np.int64)  # slots whose committed rows are gone
        self._places = places
        self._table_folder = table_folder  # the generation that made the table
        self._reserve = reserve  # True if disk space is allocated when the table grows
        self._most = most  # P, up to which the table grows before old rows are overwritten
        self._lock, self._is_ousted = lock, False
        self._kept: dict[int, np.ndarray] = {}  # the places that each generation refers to
        self._folders: dict[int, int] = {}  # the folder of each generation's table
        self._turn, self._writer = threading.RLock(), 0

    def leave_out_lost(self) -> bool:
        """Drops the rows that were overwritten since the last call; returns True if any were.

        The ring wrapped around to them before the next commit. The other rows of their blocks are
        dropped too, as they cannot be checked any more.
        """
        slots = self._overwritten()
        if not len(slots):
            return False
        places = self._places.used
        blocks = np.unique(places[slots] // self.sums.block)
        slots = np.flatnonzero((places >= 0) & np.isin(places // self.sums.block, blocks))
        self._places.mark(slots, NEVER)
        self.sums.forget(blocks)
        self.lost = np.concatenate([self.lost, slots])
        return True

    def _overwritten(self) -> np.ndarray:
        """Returns the slots whose committed rows were overwritten."""
        # Newer numbers are mostly at free places, as they are written ahead of rows. With a million
        # rows, it takes 1 ms to see that no slot has such a place, and 15 ms to find the slots.
        is_newer = self.table.is_after(self.version)
        if not (is_newer & named_by(self._places.runs, self.table.room)).any():
            return np.zeros(0, np.int64)
        places = self._places.used
        return np.flatnonzero((places >= 0) & is_newer.take(places, mode="clip"))

    @property
    def reach(self) -> int:
        """One more than the highest slot that was ever written."""
        return self._places.reach

    @property
    def version(self) -> int:
        return self._places.version

    # Reading.

    def take_column(
        self, version: int, number: int, slots: np.ndarray, part: slice | None = None
    ) -> np.ndarray:
        """Calls `take` for one column, or for a part of the bytes of its rows."""
        return self.take(version, [slots], number, part)[0]

    def take(
        self, version: int, slots: list[np.ndarray], first: int = 0, part: slice | None = None
    ) -> list[np.ndarray]:
        """Returns rows of the columns from `first` on, uint8 `[B, width]`, each at its slots `[B]`.

        Rows that were never written are zeros. Raises `StaleError` if one is newer than `version`.
        """
        rows, places_at = [], {}
        for number, at in enumerate(slots, first):
            if id(at) not in places_at:  # mostly, all columns are read at the same slots
                places_at[id(at)] = self._places.at(at)
            places = places_at[id(at)]
            # `min` of an array takes 3 to 6 us more than `argmin`, as its code in Python is cold.
            if not places.size or places.item(places.argmin()) >= 0:
                rows.append(self.table.take(number, places, part))
                continue
            is_written = places >= 0  # to read a hole in a file may take disk space
            written = self.table.take(number, places[is_written], part)
            rows.append(np.zeros((len(places), written.shape[1]), np.uint8))
            rows[-1][is_written] = written
        # Checked after the reads, as a row may have been overwritten meanwhile.
        for places in places_at.values():
            self._check_unchanged(version, places)
        return rows

    def _check_unchanged(self, version: int, places: np.ndarray) -> None:
        """Raises `StaleError` if a row is lost, or may be of a later version."""
        lowest = places.item(places.argmin()) if places.size else 0
        numbers = self.table.numbers(places[places >= 0] if lowest < 0 else places)
        is_newer = numbers.size and numbers.item(numbers.argmax()) > version
        if self._is_ousted or is_newer or (lowest <= LOST and (places == LOST).any()):
            raise StaleError(
                f"{self.path}: expected a state whose rows are still there, got one of which some "
                "that were asked for were overwritten since. Draw from the state that the last "
                "write returned, or load the path again."
            )

    def read_columns(self, targets: dict[int, np.ndarray]) -> None:
        """Reads and checks all rows of columns into targets, uint8 `[N, width]`, by column index.

        It reads some blocks of all columns before the next ones: if the targets are parts of the
        rows of one array, this array passes through the cache only once.
        """
        # In the order of places and not of slots: a file is read from its beginning to its end.
        slots_at, size = self._places.slots_at(), self.sums.block

        def read(blocks: range) -> None:
            slots = slots_at[blocks.start * size : blocks.stop * size]
            is_named = slots >= 0
            slots = slots[is_named]
            # Rows that were written in the order of slots are read directly into the target; others
            # are copied once more.
            in_order = is_named.all() and bool((np.diff(slots) == 1).all())
            for number, target in targets.items():
                at = slice(slots[0], slots[0] + len(slots)) if in_order else slots
                is_direct = in_order and target.flags.c_contiguous
                shape = len(is_named), target.shape[1]
                rows = target[at] if is_direct else np.empty(shape, np.uint8)
                self.table.read(number, blocks.start * size, rows)
                for start, block in zip(range(0, len(rows), size), blocks, strict=True):
                    part = slice(start, start + size)
                    checksum = checksum_of(rows[part], is_named[part])
                    self.table.check(number, block, self.sums.columns[number][block], checksum)
                if not is_direct:
                    target[at] = rows if in_order else rows[is_named]

        try:
            share(read, self.sums.runs(list(targets)))
        except DamagedError:
            self._check_unchanged(self.version, self._places.used)
            raise
        is_full = self._places.runs[:, 2].sum() == self.reach
        blank = [] if is_full else np.flatnonzero(self._places.used < 0)
        for target in targets.values():
            target[blank] = 0
            target[self.reach :] = 0

    def numbers(self, slots: np.ndarray) -> np.ndarray:
        """Returns the numbers of rows; 0 for slots that were never written."""
        places = self._places.at(slots)
        return np.where(places >= 0, self.table.numbers(np.maximum(places, 0)), 0)

    def is_new_table(self) -> bool:
        """Returns True if no generation has this table yet."""
        return self._folders.get(self.generation) != self._table_folder

    def is_blank(self, slots: np.ndarray) -> bool:
        """Returns True if none of some slots was ever written."""
        return bool((self._places.at(slots) == NEVER).all())

    def check_newest(self, version: int) -> None:
        """Raises `StaleError` unless this is the version of the newest state."""
        self._places.settle()
        if self._is_ousted or version != self.version:
            raise StaleError(
                f"{self.path}: expected the newest state, got one that has been written to before. "
                "States share their rows on the host: go on with the state that the last write "
                "returned, or the one that was loaded last."
            )

    # Writing.

    def put(
        self,
        version: int,
        slots: np.ndarray,
        rows: list[np.ndarray],
        expiring: bool = True,
        patient: bool = True,
    ) -> int:
        """Writes rows, uint8 `[B, width]` of every column, at distinct slots, int64 `[B]`.

        Returns the version of the new state. If it fails, nothing has changed; except that, with
        fewer free places than rows, the old rows of these slots may be lost, and then draws and
        commits raise. If no place is free, committed rows are overwritten if `expiring`, as the
        ring has wrapped around to them; otherwise the table grows. If `patient`, the write waits
        for draws of other threads.
        """
        with self._turn:
            self.own()
            self.check_newest(version)
            if not len(slots):
                return version
            self._fit()
            self._make_room(slots, expiring)
            places = self._places.next(len(slots))
            self.sums.touch(places)
            self.table.put(0, places, *rows)
            if patient:
                self.drawing.wait()
            self._writer = threading.get_ident()
            self._places.assign(slots, expiring)
            return self.version

    def take_back(self, version: int) -> None:
        """Undoes the last write if this thread made it, to the state of this version.

        It is for a write that was interrupted after it had happened, so that no state includes it.
        """
        with self._turn:
            if self._writer == threading.get_ident():
                self._places.settle(version)

    def _make_room(self, slots: np.ndarray, expiring: bool) -> None:
        """Frees as many places as there are slots, and writes the numbers of the next rows."""
        places, count = self._places, len(slots)
        if places.free < count and places.room < self._most:
            room = max(2 * places.room, places.room + count - places.free)
            self.table.grow(min(room, self._most), self._reserve)
            self._fit()
        chunk = max(count, places.room // 16)
        if places.free < count and expiring:
            places.give_up(chunk - places.free)
            if places.free < count:
                places.release(slots, count - places.free)
        if places.free < count:
            room = places.room + max(count - places.free, places.room // 8)
            self.table.grow(room, self._reserve)
            self._fit()
        if places.numbered < count:
            # Numbers are written for many places ahead, as a sync takes longer than all else. They
            # are synced before the rows change, if a generation refers to these places.
            count = min(chunk, places.free)
            line = places.next(count)[places.numbered :]
            numbers = places.following + np.arange(places.numbered, count)
            self.table.number(line, numbers, lasting=bool(places.kept[line].any()))
            places.kept[line], places.numbered = False, count

    def _fit(self) -> None:
        """Grows all arrays to the size of the table, also if an interrupt prevented that before."""
        room = self.table.room
        if self._places.room < room:
            self.sums.grow()
            self._kept = {number: longer(mask, room) for number, mask in self._kept.items()}
            self._places.grow(room)

    def own(self) -> None:
        """Makes this the only store that writes to its folder."""
        with self._turn:
            if self._lock is not None and not self._is_ousted:
                self._lock.check()
                return
            self.folder.check()
            self._check_generation()
            # If another store of this process has the lock, it hands it over. So whichever store is
            # written to first after both were opened stays valid, and the other one is stale.
            rival = writing.get(self.path)
            if rival is not None and not rival.folder.is_same(self.folder):
                rival = None
            lock = Lock(self.folder) if rival is None else rival.oust()
            try:
                lock.check()
                self._check_generation()
                self.begin(lock)
            except BaseException:
                self._lock = None
                if rival is None:
                    lock.release()
                else:
                    rival._lock, rival._is_ousted = lock, False
                raise
            writing[self.path] = self

    def oust(self) -> Lock:
        """Gives the lock to another store of the same process; this one is stale from now on."""
        with self._turn:
            self._is_ousted = True
            if self._lock is None:
                raise StaleError(f"{self.path}: expected a store that writes.")
            lock, self._lock = self._lock, None
            return lock

    def _check_generation(self) -> None:
        newest = generations.last(self.folder) if self.promised is None else self.promised()
        if self._is_ousted or newest != self.generation:
            raise StaleError(
                f"{self.path}: expected generation {self.generation}, which was loaded, found "
                f"{newest}: somebody has saved since. Load it again."
            )

    def begin(self, lock: Lock) -> None:
        """Opens the files to write, and finds out which places are free."""
        folder, old = folder_of(self._table_folder), self.table
        self.table = RowTable(self.folder, folder, old.columns, old.room, writable=True)
        self.sums.table = self.table
        generations.check_own(self.folder)
        places = self._places
        places.mark(self._overwritten(), LOST)
        places.following = max(self.table.newest(), places.version) + 1
        used = places.used[places.used >= 0]
        places.last = int(used[self.table.numbers(used).argmax()]) if len(used) else -1
        self._lock = lock
        # Removes generations that were written, but never became part of a common generation.
        later = [one for one in generations.numbers(self.folder) if one > self.generation]
        self._remove(later)
        self.keep_all()

    def _remove(self, numbers: list[int]) -> None:
        """Removes generations, durably."""
        for number in numbers:
            self.folder.remove(generations.name_of(number))
        if numbers:
            self.folder.sync()

    def keep_all(self) -> None:
        """Reads which places the generations in the folder refer to, so that these are kept."""
        for number in generations.numbers(self.folder):
            try:
                generation = Generation(self.folder, number)
            except DamagedError:
                continue  # nothing of it can be kept
            self._folders[number] = generation.body["table"]["folder"]
            if self._folders[number] != self._table_folder or not number:
                continue
            if number == self.generation:
                self._kept[number] = self.sums.named.copy()
                continue
            is_named = named_by(generation.runs(), self.table.room)
            places = np.flatnonzero(is_named)
            is_named[places[self.table.numbers(places) > generation.body["rows"]]] = False
            self._kept[number] = is_named
        self._free()

    def _free(self) -> None:
        """Queues the places that no slot and no generation refers to any more."""
        kept = np.zeros(self.table.room, bool)
        for mask in self._kept.values():
            kept |= mask
        self._places.line_up(kept)

    def close(self) -> None:
        with self._turn:
            if self._lock is not None:
                writing.pop(self.path, None)
                self._lock.release()  # released first: after an interrupt, `close` can be repeated
                self._lock = None

    # Committing.

    def commit(
        self,
        version: int,
        meta: Any,
        kinds: dict[str, list[Any]],
        arrays: dict[str, Any],
        keep: int | None = 0,
    ) -> int:
        """Commits all writes as the next generation, and returns its number.

        `meta`, for JSON, and the kinds and bytes of `arrays`, by name, come from the owner. `keep`
        older generations stay; None keeps all. Errors have a note that says if it has happened.
        """
        with self._turn:
            self.own()
            self.check_newest(version)
            if self._places.has_lost():
                raise StaleError(
                    f"{self.path}: expected whole rows, found some that were lost: a write failed, "
                    "or another process went on from what was loaded here. Make that write again, "
                    "or load the path to go on from what was saved last."
                )
            self._fit()
            self._write_generation(meta, kinds, arrays)
            try:
                self.folder.check()
                if keep is not None:
                    self.expire(set(generations.numbers(self.folder)[-1 - keep :]))
            except BaseException as error:
                error.add_note(_OUTCOMES[2])
                raise
            return self.generation

    def _write_generation(
        self, meta: Any, kinds: dict[str, list[Any]], arrays: dict[str, Any]
    ) -> None:
        """Syncs the rows, and writes the file of the next generation with the store's arrays."""
        # The commit refers to the places that slots have now.
        number, is_named = self.generation + 1, self._places.named()
        try:
            self.sums.settle(is_named)
            own: dict[str, Any] = {".places": self._places.runs.tobytes()}
            own |= {f".sums/{n}": column.tobytes() for n, column in enumerate(self.sums.columns)}
            body = generations.body_of(
                number,
                self.version,
                meta,
                kinds | {name: [] for name in own},
                self.table.columns,
                folder=self._table_folder,
                slots=self.slots,
                room=self.table.room,
                most=max(self._most, self.table.room),
            )
            # Once its file is renamed, the commit has happened; after the sync, it is durable.
            generations.write(self.folder, body, {**arrays, **own})
            self._move_on(number, is_named)
            self.folder.sync()
        except BaseException as error:
            happened = number in generations.numbers(self.folder)
            if happened:
                self._move_on(number, is_named)
            error.add_note(_OUTCOMES[happened])
            raise

    def _move_on(self, number: int, is_named: np.ndarray) -> None:
        self._kept[number], self._folders[number] = is_named, self._table_folder
        self._places.kept |= is_named
        self.generation = number

    def expire(self, kept: set[int]) -> None:
        """Removes all generations but `kept`, and frees the places that only they referred to."""
        numbers = {*generations.numbers(self.folder), *self._kept, *self._folders}
        # Files are removed before places are freed: no generation refers to an overwritten row.
        expired = sorted(numbers - kept)
        self._remove(expired)
        for number in expired:
            self._kept.pop(number, None)
            self._folders.pop(number, None)
        used = {folder_of(folder) for folder in (self._table_folder, *self._folders.values())}
        for name in self.folder.names():
            if is_table(self.folder, name) and name not in used:
                self.folder.clear(name, sign=NUMBERS)
        self._free()


def is_table(folder: Folder, name: str) -> bool:
    """Returns True if a folder inside a store's folder is a table, or the remainder of one."""
    if not re.fullmatch(r"rows(-[0-9]+)?", name):
        return False
    try:
        inside = folder.names(name)
    except DamagedError:  # a file, or a link
        return False
    return not inside or NUMBERS in inside


def _forget_writers() -> None:
    """Keeps a forked process from writing to the stores of its parent."""
    for store in list(writing.values()):
        # Threads of the parent, which this process does not have, may have held these locks.
        store._turn, store.drawing = threading.RLock(), Gate()
    writing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_writers)
