"""A store of rows on a disk: written as a ring, committed as a whole, never over what it promised.

A row is written to a free place (see `jrb._store.places`), so the rows that the last commit names
stay as they are, and a commit has nothing to do but to sync the rows and to write one file. There
is nothing to be undone after a crash. Only where a ring has no free place left since the last
commit, the oldest rows that it promised go, after the numbers of their places have changed on the
disk: a reader, and whoever opens the store after a crash, finds by the numbers which rows are lost.
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
    """A store as it is open in this process; see `jrb._store.opening`.

    All states of a buffer share it. Each is known by its version, the number of the newest row that
    it knows of; only the newest may be written to, and of others rows that are still there are
    read. The first write takes the lock.
    """

    # Returns the generation to go on from, where that is not the newest: of a store that is part of
    # a whole, which names it. Later ones go with the first write.
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
        self.drawing: Gate = Gate()  # lets draws in, for which writes of other threads wait
        self.sums: Sums = Sums(table)  # of the rows that were committed or opened
        self.lost: np.ndarray = np.zeros(0, np.int64)  # slots whose rows were promised
        self._places = places
        self._table_folder = table_folder  # the generation that made the table
        self._reserve = reserve  # whether the disk sets room aside when the table grows
        self._most = most  # P, up to which the table grows before old rows go
        self._lock, self._is_ousted = lock, False
        self._kept: dict[int, np.ndarray] = {}  # places by generation
        self._folders: dict[int, int] = {}  # those of tables, by generation
        self._turn, self._writer = threading.RLock(), 0

    def leave_out_lost(self) -> bool:
        """Leaves out the rows that were overwritten since the last call; returns if any were.

        The ring came round to them before the next commit. As the other rows of their block cannot
        be checked any more, these go too.
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
        """Returns the slots whose rows this store has promised, but that were overwritten."""
        # Numbers are written ahead of rows, to free places: a look at those that slots have shows
        # in 1 ms of a million rows that none was overwritten; to look for these slots takes 15.
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
        """Returns rows as `take`, of one column or of a part of its bytes."""
        return self.take(version, [slots], number, part)[0]

    def take(
        self, version: int, slots: list[np.ndarray], first: int = 0, part: slice | None = None
    ) -> list[np.ndarray]:
        """Returns rows of consecutive columns, uint8 `[B, width]`, at slots `[B]` of each.

        They are zeros where none was written. `StaleError`: one is newer than the version.
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
            is_written = places >= 0  # reading a hole may take disk
            written = self.table.take(number, places[is_written], part)
            rows.append(np.zeros((len(places), written.shape[1]), np.uint8))
            rows[-1][is_written] = written
        # Last of all: meanwhile a row may have been overwritten.
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
        """Fills targets, uint8 `[N, width]` by the numbers of columns, with all rows, checked.

        Some rows of all columns are read before the next ones: targets may be parts of the rows of
        one array, which then pass through the cache once.
        """
        # By places and not by slots: a file is read from its beginning to its end.
        slots_at, size = self._places.slots_at(), self.sums.block

        def read(blocks: range) -> None:
            slots = slots_at[blocks.start * size : blocks.stop * size]
            is_named = slots >= 0
            slots = slots[is_named]
            # Rows of a ring that were written in order are read to where they belong, and others
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
        """Returns if no generation has this table yet."""
        return self._folders.get(self.generation) != self._table_folder

    def is_blank(self, slots: np.ndarray) -> bool:
        """Returns if none of some slots was ever written."""
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

        Returns the version of the state that knows of them. Where it fails, nothing has happened;
        but where there are fewer free places than rows, the old rows of these slots may be lost,
        which draws and commits then say. If `expiring`, rows that were promised may go where no
        place is free, because the ring has come round to them; otherwise the table grows. If
        `patient`, it waits for draws of other threads that are under way.
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
        """Makes this version the newest again, if this thread made the last write to it.

        For a write that was interrupted after it had happened: no state knows of it.
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
            # Some places ahead at a time, as a sync takes longer than all else. The numbers are on
            # the disk before the rows change where a generation names these places.
            count = min(chunk, places.free)
            line = places.next(count)[places.numbered :]
            numbers = places.following + np.arange(places.numbered, count)
            self.table.number(line, numbers, lasting=bool(places.kept[line].any()))
            places.kept[line], places.numbered = False, count

    def _fit(self) -> None:
        """Makes all as large as the table, also where an interrupt came between."""
        room = self.table.room
        if self._places.room < room:
            self.sums.grow()
            self._kept = {number: longer(mask, room) for number, mask in self._kept.items()}
            self._places.grow(room)

    def own(self) -> None:
        """Makes this the store that writes."""
        with self._turn:
            if self._lock is not None and not self._is_ousted:
                self._lock.check()
                return
            self.folder.check()
            self._check_generation()
            # A store of this process that has the lock hands it over: the state that is written to
            # first stays the newest, and the other one is stale.
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
        """Returns the lock for another store of the same process; this one is stale from now on."""
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
        # Generations that were written, but that the whole never came to name, are undone.
        later = [one for one in generations.numbers(self.folder) if one > self.generation]
        self._remove(later)
        self.keep_all()

    def _remove(self, numbers: list[int]) -> None:
        """Removes generations; they are gone for good afterwards."""
        for number in numbers:
            self.folder.remove(generations.name_of(number))
        if numbers:
            self.folder.sync()

    def keep_all(self) -> None:
        """Reads which places the generations name that are in the folder."""
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
        """Queues the places that nothing names any more."""
        kept = np.zeros(self.table.room, bool)
        for mask in self._kept.values():
            kept |= mask
        self._places.line_up(kept)

    def close(self) -> None:
        with self._turn:
            if self._lock is not None:
                writing.pop(self.path, None)
                self._lock.release()  # before it is forgotten: an interrupt leaves it to be done
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
        """Makes all that was written the next generation, and returns its number.

        The owner has `meta` and the kinds of other arrays, for JSON, and their bytes. `keep` older
        generations stay, all with None. Where it fails, a note says whether it has happened.
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
        # A commit names the places that slots have now.
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
            # From the renaming of its file on it has happened; with the sync it lasts.
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
        """Removes the generations that need not stay, and frees what only they named."""
        numbers = {*generations.numbers(self.folder), *self._kept, *self._folders}
        # Files go before their places are free: no generation names a row that was overwritten.
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
    """Returns if a folder in a store's is that of a table, or a remainder of one."""
    if not re.fullmatch(r"rows(-[0-9]+)?", name):
        return False
    try:
        inside = folder.names(name)
    except DamagedError:  # a file, or a link
        return False
    return not inside or NUMBERS in inside


def _forget_writers() -> None:
    """Lets a process that was forked off write nowhere."""
    for store in list(writing.values()):
        # Other threads, which are not here, may have held these locks.
        store._turn, store.drawing = threading.RLock(), Gate()
    writing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_writers)
