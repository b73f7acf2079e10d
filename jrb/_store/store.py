"""A store of rows on a disk: written as a ring, committed as a whole, never over what it promised.

```
generation-000000000007     what the last commit has promised (see `jrb._store.generation`)
rows/next/observation.bin   the rows of a leaf, or of several (see `jrb._store.table`)
rows/.numbers               which row lies at which place, or will
lock                        of the process that writes
```

A row is written to a free place (see `jrb._store.places`), so what the last commit names stays as
it is, and a commit has nothing to do but to sync the rows and to write one file. There is nothing
to be undone after a crash. Only where a ring has no free place left since the last commit, the
oldest rows that it promised go, after the numbers of their places have changed on the disk: a
reader, and whoever opens the store after a crash, finds by the numbers which rows are gone.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from jrb._store import generation as generations
from jrb._store.errors import DamagedError, StaleError
from jrb._store.files import Folder
from jrb._store.generation import Body, Generation
from jrb._store.lock import Lock
from jrb._store.places import LOST, NEVER, Places, by_place, named_by, within
from jrb._store.sums import Sums, longer
from jrb._store.table import NUMBERS, Stretch, Table
from jrb._store.threads import Gate, share

writing: "weakref.WeakValueDictionary[str, Store]" = weakref.WeakValueDictionary()
"""The stores that this process writes to, by their folders."""


class Store:
    """A store as it is open in this process; see `jrb._store.opening`.

    All states of a buffer share it. Each is known by its version, the number of the newest row that
    it knows of; only the newest may be written to, and of others rows that are still there are
    read. The first write takes the lock.

    Args:
        folder: where it is.
        table: the rows.
        places: where they lie.
        number: of the generation that is open.
        table_folder: the generation that made the table.
        reserve: whether room is set aside on the disk when the table grows.
        lock: of one who writes already.
        most: P, for how many rows the table is to have room before old ones go.

    Attributes:
        drawing: lets draws in, which writes of other threads wait for.
        sums: of what was committed or opened.
        lost: int64, the slots whose rows were promised, but are gone.
        promised: says which generation is the one to go on from, where not the newest is: of a
            store that is part of a whole, which names it. Later ones go with the first write.
    """

    folder: Folder
    table: Table
    generation: int
    sums: Sums
    lost: np.ndarray
    drawing: Gate
    promised: Callable[[], int | None] | None = None

    def __init__(
        self,
        folder: Folder,
        table: Table,
        places: Places,
        number: int,
        table_folder: int,
        reserve: bool = False,
        lock: Lock | None = None,
        most: int = 0,
    ) -> None:
        self.folder, self.table, self.generation = folder, table, number
        self.drawing = Gate()
        self._places, self._table_folder = places, table_folder
        self._reserve, self._lock, self._ousted, self._most = reserve, lock, False, most
        self.sums = Sums(table)
        self._kept: dict[int, np.ndarray] = {}  # places by generation
        self._folders: dict[int, int] = {}  # those of tables, by generation
        self.lost = np.zeros(0, np.int64)
        self._turn, self._writer = threading.RLock(), 0

    def load_generation(self, opened: Generation) -> None:
        """Takes over the sums of the generation that is open, and leaves out rows that went."""
        self.sums.load_checksums(opened.sums(), self._places.named)
        self.leave_out_gone()

    def leave_out_gone(self) -> bool:
        """Leaves out the rows that went since this was done last; whether there were any.

        They went because the ring came round to them before the next commit. As the rest of their
        block cannot be checked any more, that goes too.
        """
        gone = self.gone()
        if not len(gone):
            return False
        of = self._places.used
        blocks = np.unique(of[gone] // self.sums.block)
        gone = np.flatnonzero((of >= 0) & np.isin(of // self.sums.block, blocks))
        self._places.mark(gone, NEVER)
        self.sums.forget(blocks)
        self.lost = np.concatenate([self.lost, gone])
        return True

    @property
    def path(self) -> str:
        """Of the folder."""
        return self.folder.path

    @property
    def slots(self) -> int:
        """N, how many rows there can be."""
        return self._places.slots

    @property
    def reach(self) -> int:
        """One more than the highest slot that was ever written."""
        return self._places.reach

    @property
    def version(self) -> int:
        """Of the newest state."""
        return self._places.version

    # Reading.

    def take(self, version: int, slots: list[np.ndarray]) -> list[np.ndarray]:
        """Rows of every column, uint8 `[B, width]`, at slots `[B]`; zeros where none was written.

        Raises:
            StaleError: one of them was overwritten after this version.
        """
        found, looked = [], {}
        for number, at in enumerate(slots):
            if id(at) not in looked:
                looked[id(at)] = self._there(at)
            found.append(self._rows(number, *looked[id(at)]))
        for places, blank in looked.values():  # meanwhile one may have been overwritten
            self._check_there(version, places, blank)
        return found

    def take_column(
        self, version: int, number: int, slots: np.ndarray, part: slice | None = None
    ) -> np.ndarray:
        """The same of one column, or of a part of its bytes."""
        places, blank = self._there(slots)
        rows = self._rows(number, places, blank, part)
        self._check_there(version, places, blank)
        return rows

    def _there(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The places of slots; and at which of them none was written, bool `[B]`, None if all."""
        places = self._places.at(slots)
        if not places.size or places.item(places.argmin()) >= 0:
            return places, None
        if (places == LOST).any():
            raise self._stale()
        return places, places < 0

    def _check_there(
        self, version: int, places: np.ndarray, blank: np.ndarray | None = None
    ) -> None:
        """Raises `StaleError` if a row was overwritten after this version.

        Args:
            version: of the state.
            places: of the rows, as `_there` gives them.
            blank: at which of them there is none, bool `[B]`; None if at all there is one.
        """
        written = places if blank is None else places[~blank]
        if self._ousted or self.table.newest_number(written) > version:
            raise self._stale()

    def _stale(self) -> StaleError:
        return StaleError(
            f"{self.path}: expected a state whose rows are still there, got one of which some "
            "that were asked for were overwritten since. Draw from the state that the last "
            "write returned, or load the path again."
        )

    def _rows(
        self, number: int, places: np.ndarray, blank: np.ndarray | None, part: slice | None = None
    ) -> np.ndarray:
        if blank is None:
            return self.table.take(number, places, part)
        written = self.table.take(number, places[~blank], part)  # reading a hole may take disk
        rows = np.zeros((len(places), written.shape[1]), np.uint8)
        rows[~blank] = written
        return rows

    def read_columns(self, targets: dict[int, np.ndarray]) -> None:
        """Fills targets, uint8 `[N, width]` by the numbers of columns, with all rows, checked.

        Some rows of all columns are read before the next ones: targets may be parts of the rows of
        one array, which then pass through the cache once.

        Raises:
            DamagedError: a block is not what was written.
            StaleError: some of it was overwritten meanwhile.
        """
        lying, size = by_place(self._places.runs), self.sums.block

        def read(blocks: range) -> None:
            inside = within(lying, blocks.start * size, blocks.stop * size)
            stretch = Stretch(blocks, size, inside)
            for number, target in targets.items():
                found = self.table.read_blocks(number, stretch, target)
                wanted = self.sums.columns[number][blocks.start : blocks.stop].tolist()
                for block, expected, its in zip(blocks, wanted, found, strict=True):
                    if its != expected:
                        raise DamagedError(self.table.damage(number, block, expected, its))

        try:
            share(read, self.sums.runs(list(targets)))
        except DamagedError:
            of = self._places.used
            self._check_there(self.version, of[of >= 0])
            raise
        never = self._places.never()
        for target in targets.values():
            target[never] = 0
            target[self._places.reach :] = 0

    def numbers(self, slots: np.ndarray) -> np.ndarray:
        """The numbers of rows, those of slots that were never written 0."""
        places = self._places.at(slots)
        return np.where(places >= 0, self.table.numbers_at(places), 0)

    def is_new_table(self) -> bool:
        """Whether no generation has this table yet."""
        return self._folders.get(self.generation) != self._table_folder

    def is_blank(self, slots: np.ndarray) -> bool:
        """Whether none of some slots was ever written."""
        return bool((self._places.at(slots) == NEVER).all())

    def gone(self) -> np.ndarray:
        """The slots whose rows this store has promised, but that are there no more."""
        later = self.table.places_after(self.version)
        if not len(later) or not self._places.named()[later].any():  # as mostly
            return np.zeros(0, np.int64)
        of = self._places.used
        return np.flatnonzero((of >= 0) & self.table.newer(of, self.version))

    def check_newest(self, version: int) -> None:
        """Raises `StaleError` unless this is the version of the newest state."""
        self._places.settle()
        if self._ousted or version != self.version:
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
        """Writes rows, uint8 `[B, width]` of every column, at slots `[B]`, each at most once.

        Where it fails, nothing has happened; but where there are fewer free places than rows, the
        old rows of these slots may be lost, which draws and commits then say.

        Args:
            version: of the state; it must be the newest.
            slots: int64.
            rows: of every column.
            expiring: whether rows that were promised may go where the line is empty, because the
                ring has come round to them; otherwise the table grows.
            patient: whether draws of other threads that are under way are waited for.

        Returns:
            The version of the state that knows of them.

        Raises:
            StaleError: the state is not the newest one.
            LockedError: another process writes.
            OSError: the disk is full or broken.
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

    def resize(self, slots: int) -> None:
        """Makes N another number, for rows whose number nobody knows beforehand.

        Slots from there on are no more. To be called before anything was committed.
        """
        with self._turn:
            self._places.resize(slots)

    def take_back(self, version: int) -> None:
        """Makes this version the newest again, if this thread made the last write to it.

        For one that was interrupted after it had happened: nobody has the state that knows of it.
        """
        with self._turn:
            if self._writer == threading.get_ident():
                self._places.take_back(version)

    def _make_room(self, slots: np.ndarray, expiring: bool) -> None:
        """Sees to it that there are free places, and that their numbers are known."""
        places, count = self._places, len(slots)
        if places.free < count and places.room < self._most:
            wanted = max(2 * places.room, places.room + count - places.free)
            self._grow(min(wanted, self._most))
        chunk = max(count, places.room // 16)
        if places.free < count and expiring:
            places.give_up(chunk - places.free)
            if places.free < count:
                places.release(slots, count - places.free)
        if places.free < count:
            self._grow(places.room + max(count - places.free, places.room // 8))
        if places.numbered < count:
            self._number(min(chunk, places.free))

    def _number(self, count: int) -> None:
        """Numbers the places at the head of the line, for good where a generation names them."""
        places = self._places
        line = places.next(count)[places.numbered :]
        numbers = places.following + np.arange(places.numbered, count)
        self.table.number(line, numbers, lasting=bool(places.kept[line].any()))
        places.kept[line], places.numbered = False, count

    def _grow(self, room: int) -> None:
        self.table.grow(room, self._reserve)
        self._fit()

    def _fit(self) -> None:
        """Makes all as large as the table, also where an interrupt came between."""
        room = self.table.room
        if self._places.room < room:
            self.sums.grow()
            self._kept = {number: longer(mask, room) for number, mask in self._kept.items()}
            self._places.grow(room)

    def own(self) -> None:
        """Makes this the one that writes.

        Raises:
            LockedError: another process writes.
            StaleError: another has committed since this one was opened.
        """
        with self._turn:
            if self._lock is not None and not self._ousted:
                self._lock.check()
                return
            self.folder.check()
            self._check_generation()
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
                lock.release() if rival is None else rival.reinstate(lock)
                raise
            writing[self.path] = self

    def _check_generation(self) -> None:
        there = generations.last(self.folder) if self.promised is None else self.promised()
        if self._ousted or there != self.generation:
            raise StaleError(
                f"{self.path}: expected generation {self.generation}, which was loaded, found "
                f"{there}: somebody has saved since. Load it again."
            )

    def begin(self, lock: Lock) -> None:
        """Opens the files to write, and finds out what is free."""
        folder, old = folder_of(self._table_folder), self.table
        self.table = Table(self.folder, folder, old.columns, old.room, writable=True)
        self.sums.table = self.table
        generations.check_own(self.folder)
        places, _ = self._places, self.sums.named  # as long as all that went is known
        places.mark(self.gone(), LOST)
        places.following = max(self.table.highest(), places.version) + 1
        used = places.used
        places.last = self.table.newest(used[used >= 0])
        self._lock = lock
        self._undo_later()
        self.keep_all()

    def _undo_later(self) -> None:
        """Removes generations that were written, but that the whole never came to name."""
        later = [one for one in generations.numbers(self.folder) if one > self.generation]
        for number in later:
            self.folder.remove(generations.name_of(number))
        if later:
            self.folder.sync()

    def keep_all(self) -> None:
        """Notes down which places the generations name that are there."""
        for number in generations.numbers(self.folder):
            try:
                kept = Generation(self.folder, number)
            except DamagedError:
                continue  # nothing of it can be kept
            self._folders[number] = kept.body["table"]["folder"]
            if self._folders[number] == self._table_folder and number:
                self._kept[number] = self._named_by(kept)
        self._free()

    def _named_by(self, kept: Generation) -> np.ndarray:
        """The places that a generation names and whose rows are still there, bool `[P]`."""
        if kept.number == self.generation:
            return self.sums.named.copy()
        named = named_by(kept.runs(), self.table.room)
        places = np.flatnonzero(named)
        named[places[self.table.newer(places, kept.body["rows"])]] = False
        return named

    def _free(self) -> None:
        """Puts places into the line that nothing names any more."""
        kept = np.zeros(self.table.room, bool)
        for mask in self._kept.values():
            kept |= mask
        self._places.line_up(kept)

    def oust(self) -> Lock:
        """Gives the lock to another that is opened in the same process; this one is of no use."""
        with self._turn:
            self._ousted = True
            if self._lock is None:
                raise StaleError(f"{self.path}: expected a store that writes.")
            lock, self._lock = self._lock, None
            return lock

    def reinstate(self, lock: Lock) -> None:
        """Takes the lock back from one that could not be opened after all."""
        self._lock, self._ousted = lock, False

    def forked(self) -> None:
        """In a process that was forked off: forgets what other threads held then."""
        self._turn, self.drawing = threading.RLock(), Gate()

    def close(self) -> None:
        """Gives the lock back."""
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
        """Makes all that was written the next generation.

        Args:
            version: of the state; it must be the newest.
            meta: what the owner wants to know, for JSON.
            kinds: of its other arrays, for JSON, by name.
            arrays: their bytes.
            keep: how many older generations stay; None for all, until `expire`.

        Returns:
            The number of the generation.

        Raises:
            StaleError: the state is not the newest one, or some of its rows are lost.
            LockedError: another process writes.
            OSError: the disk is full or broken. A note says whether it has happened.
        """
        with self._turn:
            self.own()
            self.check_newest(version)
            self._check_whole()
            self._fit()
            number, named = self.generation + 1, self._places.named()
            try:
                self.sums.settle(named)
                body, inner = self._body(number, meta, kinds)
                generations.write(self.folder, body, {**arrays, **inner})
                self._moved_on(number, named)
                self.folder.sync()
            except BaseException as error:
                happened = number in generations.numbers(self.folder)
                if happened:
                    self._moved_on(number, named)
                error.add_note(_OUTCOMES[happened])
                raise
            try:
                self.folder.check()
                if keep is not None:
                    newest = generations.numbers(self.folder)[-1 - keep :]
                    self.expire(set(newest))
            except BaseException as error:
                error.add_note(_OUTCOMES[2])
                raise
            return number

    def _check_whole(self) -> None:
        if self._places.has_lost():
            raise StaleError(
                f"{self.path}: expected whole rows, found some that were lost: a write failed, or "
                "another process went on from what was loaded here. Make that write again, or load "
                "the path to go on from what was saved last."
            )

    def _body(self, number: int, meta: Any, kinds: dict[str, list]) -> tuple[Body, dict[str, Any]]:
        """What the generation's file says of it, and the store's own arrays."""
        inner: dict[str, Any] = {".places": self._places.runs.tobytes()}
        inner |= {f".sums/{n}": column.tobytes() for n, column in enumerate(self.sums.columns)}
        entries = [{"name": name, "kind": kind} for name, kind in kinds.items()]
        entries += [{"name": name, "kind": []} for name in inner]
        table = self.table
        most = max(self._most, table.room)
        about = generations.table_of(
            self._table_folder, self.slots, table.room, most, table.columns
        )
        body = generations.body_of(number, self.version, meta, about, entries)
        return body, inner

    def _moved_on(self, number: int, named: np.ndarray) -> None:
        self._kept[number], self._folders[number] = named, self._table_folder
        self._places.kept |= named
        self.generation = number

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay, and frees what only they named."""
        known = {*generations.numbers(self.folder), *self._kept, *self._folders}
        expired = sorted(known - kept)
        for number in expired:
            self.folder.remove(generations.name_of(number))
        if expired:
            self.folder.sync()
        for number in expired:
            self._kept.pop(number, None)
            self._folders.pop(number, None)
        used = {folder_of(folder) for folder in (self._table_folder, *self._folders.values())}
        for name in self.folder.names():
            if is_table(self.folder, name) and name not in used:
                self.folder.clear(name, sign=NUMBERS)
        self._free()


_OUTCOMES = (
    "It has not happened: what was saved before is still there.",
    "It has happened, but may not survive a loss of power before the next save.",
    "It has happened, and lasts; what it makes superfluous is still there.",
)


def is_table(folder: Folder, name: str) -> bool:
    """Whether a folder in a store's is that of a table, or what is left of one."""
    inside = folder.names(name) if is_for_table(name) else ["another"]
    return not inside or NUMBERS in inside


def is_for_table(name: str) -> bool:
    """Whether a table's folder may have this name."""
    return name == folder_of(0) or (name.startswith("rows-") and name[5:].isdecimal())


def folder_of(generation: int) -> str:
    """The folder of the table that a generation has made."""
    return f"rows-{generation}" if generation else "rows"


def _forget_writers() -> None:
    """In a process that was forked off, which writes nowhere."""
    for store in list(writing.values()):
        store.forked()
    writing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_writers)
