"""Named arrays in a folder, which are written in blocks and committed together.

A store has a folder with a file for each array (`blocks.py`) and a file for each commit that is
kept, a generation (`commits.py`). `README.md` says in which order a commit writes them, and why the
last commit is whole after a crash. One process may write, under a lock; any number may read.
"""

import base64
import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import numpy as np

from jrb._store import commits, files
from jrb._store.blocks import (
    NO_POSITION,
    RUN,
    ArraySpec,
    BlockArray,
    Reader,
    rows_per_block,
)
from jrb._store.commits import (
    ARRAYS,
    Generation,
    OpenGeneration,
    SmallArray,
    Table,
)
from jrb._store.files import DamagedError, Folder, Lock, LockedError, StaleError, VersionError
from jrb._store.threads import Gate, run_all

Progress = Callable[[float], None]
"""A function that is called with the share of the work that is done, from 0 to 1."""

HASHES = ".hashes/"
"""The prefix of the small arrays with hashes of blocks that were computed on a device."""

writing: "weakref.WeakValueDictionary[str, BlockStore]" = weakref.WeakValueDictionary()
"""The stores that this process writes to for longer than one save, by their folders."""

_gates: "weakref.WeakValueDictionary[str, Gate]" = weakref.WeakValueDictionary()
"""Which threads read rows from mappings of the files, by the folders of stores."""

_registry = threading.RLock()  # held while a save begins, and `writing` or `_gates` change

_TEMPORARY = "jrb-temporary-"
"""The prefix of folders of temporary stores; each process removes those that dead ones left."""

_LONGEST = 100  # characters of an array's name in the name of its file
_MOST_OPEN = 32  # files of a store that stay open for writes

_NOT_HAPPENED = "It has not happened: what was saved before is still there."
_NOT_DURABLE = "It has happened, but may not survive a loss of power before the next save."
_NOT_TIDIED = "It has happened, and lasts; what it makes superfluous is still there."


def no_progress(share: float) -> None:
    """Does nothing."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of an array for a save.

    Attributes:
        kind: JSON for its owner.
        label: its name in messages.
        rows: N.
        width: the bytes of a row.
        read: returns the bytes of rows; None for an array whose rows are written one by one.
        reach: the row from which on all rows are zeros; None for none.
        hashes: a function that returns a hash of each block, uint64 `[K]`, of the number of bytes
            that it is given; None if reading a block takes less time than a hash.
        owner: an object whose rows never change, of which weak references can be made; if the last
            save of this process had the same one, its rows are not read. None if there is none.
        block: the rows of a block; 0 for the default.
    """

    kind: Any
    label: str
    rows: int
    width: int
    read: Reader | None = None
    reach: int | None = None
    hashes: Callable[[int], np.ndarray] | None = None
    owner: Any = None
    block: int = 0


_last_saved: dict[str, tuple[Any, dict[str, "weakref.ref[Any]"]]] = {}
"""By path, the last generation that this process wrote, and the owners of its arrays."""


class BlockStore:
    """A store that is open in this process.

    Attributes:
        folder: the open folder.
        path: of the folder.
        generation: the number of the newest commit, 0 before the first one.
        meta: JSON of the owner in that commit.
        small: the small arrays of that commit, by name.
        arrays: the arrays in blocks as they are now, by name.
        hashes: the hashes of the blocks of some arrays, as these are now; see `Source`.
        turn: a lock that a write or a commit holds.
        is_ousted: True if another store of this process writes to the folder instead of this one.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder: Folder = folder
        self.path: str = folder.path
        self.generation: int = 0
        self.meta: dict[str, Any] = {}
        self.small: dict[str, SmallArray] = {}
        self.arrays: dict[str, BlockArray] = {}
        self.turn: Any = threading.RLock()
        self.hashes: dict[str, np.ndarray] = {}
        self.is_ousted: bool = False
        self._opened: OpenGeneration | None = None  # what a reader reads, which must not expire
        self._lock: Lock | None = None
        self._is_joined = False  # True if another process of the same program has the lock
        self._num_files = 0  # files made since the last commit
        self._saver: weakref.ref[Any] | None = None  # the save that is under way
        self._identity: Any = None  # of the generation that the arrays are those of
        self._owners: dict[str, weakref.ref[Any]] = {}  # of the arrays that were put

    # Opening.

    @classmethod
    def create(cls, path: str | None) -> "BlockStore":
        """Makes a new store in a folder that is empty or missing; this process writes to it.

        None makes a temporary one, which is removed with the store or with the process.
        """
        if path is not None:
            return cls._create(path)
        files.check_system(tempfile.gettempdir())
        _remove_stale(tempfile.gettempdir())
        process, attempts = os.getpid(), 3
        while True:
            path, attempts = os.path.realpath(tempfile.mkdtemp(prefix=_TEMPORARY)), attempts - 1
            try:
                store = cls._create(path)
            except BaseException as error:
                _discard(path, process)
                # Before it was locked, another process may have taken it for that of a dead one.
                if not attempts or not isinstance(error, LockedError | FileNotFoundError):
                    raise
            else:
                weakref.finalize(store, _discard, path, process)
                return store

    @classmethod
    def _create(cls, path: str) -> "BlockStore":
        if os.path.realpath(path) in writing and os.path.exists(path):
            raise ValueError(
                f"{path}: expected nothing there, found a store that a state of this process is "
                "in. Go on with that state, or let go of it first."
            )
        store = cls._lock_folder(path)
        if commits.list_generations(store.folder):
            store.close()
            raise ValueError(
                f"{path}: expected nothing there, found a store. Open it with jrb.load(path), or "
                "remove it."
            )
        writing[store.path] = store
        return store

    @classmethod
    def open_to_save(cls, path: str) -> "BlockStore":
        """Opens the store at a path to write to it, or makes one.

        If the newest generation is damaged, or the file of an array is cut short, no block of it
        is used again.
        """
        store = cls._lock_folder(path)
        try:
            store._load_newest()
            return store
        except BaseException:
            store.close()
            raise

    @classmethod
    def join(cls, path: str) -> "BlockStore":
        """Opens a store to which another process of this program has the lock, to write arrays."""
        store = cls(Folder(path))
        store._is_joined = True
        store._load_newest()
        return store

    @classmethod
    def open_to_read(cls, path: str, number: int | None = None) -> "BlockStore":
        """Opens a generation, the newest one by default; it does not expire before `close`."""
        reader = commits.open_generation(path, number)
        store = cls(reader.folder)
        store._opened = reader
        store._load_arrays(reader.generation)
        return store

    @classmethod
    def _lock_folder(cls, path: str) -> "BlockStore":
        """Returns a store without arrays in a folder in which this process may write."""
        files.make_folder(path)
        store = cls(Folder(path))
        # Before a lock file is put among files of other programs.
        commits.check_folder(store.folder)
        store._lock = Lock(store.folder)
        return store

    def _load_newest(self) -> None:
        """Takes the arrays of the newest generation, as far as their files are whole."""
        numbers = commits.list_generations(self.folder)
        if numbers:
            self.generation = numbers[-1]
            with contextlib.suppress(DamagedError):
                one = commits.open_newest(self.folder)
                one.close()  # who has the lock of the store decides what expires
                self._load_arrays(one.generation)
                self.arrays = {name: it for name, it in self.arrays.items() if it.is_whole()}
        self._find_used_positions()

    def _load_arrays(self, one: Generation) -> None:
        self.generation, self.meta, self.small = one.number, one.meta, one.small
        self.arrays, self.hashes, self._identity = {}, {}, one.identity
        for name, table in one.large.items():
            array = BlockArray(self.folder, name, table.spec)
            array.positions, array.checksums = table.positions.copy(), table.checksums.copy()
            self.arrays[name] = array
            if HASHES + name in one.small:
                self.hashes[name] = np.frombuffer(one.small[HASHES + name].data, np.uint64)

    def _find_used_positions(self) -> set[str]:
        """Finds the positions that must not be written, as generations in the folder use them.

        Returns:
            The files that a generation or this store uses.
        """
        tables: dict[str, list[np.ndarray]] = {}  # by file
        for number in commits.list_generations(self.folder):
            try:
                one = OpenGeneration(self.folder, number)
            except (DamagedError, VersionError, FileNotFoundError):
                continue  # nothing of it can be kept
            one.close()
            for table in one.generation.large.values():
                tables.setdefault(table.spec.file, []).append(table.positions)
        for array in self.arrays.values():
            array.set_used_positions(tables.get(array.spec.file, []))
        return {*tables, *(array.spec.file for array in self.arrays.values())}

    def close(self) -> None:
        """Gives all locks back; the store can neither be written nor read any more."""
        with self.turn:
            if self._opened is not None:
                self._opened.close()
            if self._lock is not None:
                if writing.get(self.path) is self:
                    del writing[self.path]
                if not self.is_ousted:  # otherwise the lock is another store's
                    self._lock.release()  # released first: `close` can be repeated
                self._lock = None

    def __enter__(self) -> "BlockStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The right to write.

    def ensure_writer(self) -> None:
        """Makes this the only store that writes to its folder, or raises."""
        if self._lock is not None and not self.is_ousted:
            self._lock.check()
        elif self._is_joined:
            self.folder.check()
        else:
            with self.turn:
                self._take_over()

    def _take_over(self) -> None:
        """Takes the lock; a store of this process that has it hands it over, and is stale."""
        self._check_newest()
        with _registry:  # no two stores take the lock from the same one
            rival, taken = writing.get(self.path), None
            if rival is not None and (rival._lock is None or not rival.folder.is_same(self.folder)):
                rival = None
            # The rival keeps its reference to the lock until this store has it: an interrupt in
            # between must not drop the lock.
            try:
                taken = Lock(self.folder) if rival is None else rival.oust()
                taken.check()
                self._check_newest()
                commits.check_own_files(self.folder)
                self._find_used_positions()
                self._lock = taken
                writing[self.path] = self
                if rival is not None:
                    rival._lock = None
            except BaseException:
                self._lock = None
                if rival is not None:
                    lock = taken or rival._lock
                    rival._lock, rival.is_ousted, writing[self.path] = lock, False, rival
                elif taken is not None:
                    taken.release()
                raise
        if self._opened is not None:
            self._opened.close()  # otherwise this process would keep it from expiring

    def oust(self) -> Lock:
        """Gives the lock to another store of the same process; this one is stale from now on."""
        with self.turn:
            if self._lock is None:
                raise StaleError(f"{self.path}: expected a store that writes.")
            self._check_not_saving()
            self.is_ousted = True
            return self._lock

    def begin_save(self, save: object) -> None:
        """Makes this the only save of the store until `end_save`, or raises `LockedError`."""
        with _registry:
            self._check_not_saving()
            self._saver = weakref.ref(save)  # an interrupted save may not reach its end
        self.ensure_writer()

    def end_save(self, save: object) -> None:
        """Lets other saves begin."""
        if self._saver is not None and self._saver() is save:
            self._saver = None

    def _check_not_saving(self) -> None:
        if self._saver is not None and self._saver() is not None:
            raise LockedError(f"{self.path}: another thread is saving there. Wait for its end.")

    def _check_newest(self) -> None:
        """Raises if somebody has saved since the store was opened."""
        self.folder.check()
        newest = commits.list_generations(self.folder)[-1:]
        if self.is_ousted or newest != [self.generation]:
            raise StaleError(
                f"{self.path}: expected generation {self.generation}, which was loaded, found "
                f"{newest}: somebody has saved since. Load it again."
            )

    # Arrays.

    def array(self, name: str, source: Source, reserve: int = 0) -> BlockArray:
        """Returns an array to write to; if it has other rows than before, a new one of zeros.

        Args:
            name: of the array.
            source: says its kind, label, rows and width.
            reserve: the number of positions for which a new file gets room on the disk.
        """
        block = source.block or rows_per_block(source.rows, source.width)
        spec = ArraySpec(source.kind, source.label, source.rows, source.width, block)
        array = self.arrays.get(name)
        if array is not None and dataclasses.replace(array.spec, file="") == spec:
            return array
        # The number of the next generation makes the name of the file new, whatever was there.
        short = quote(name, safe="", errors="surrogatepass").replace("%2F", ".")
        if len(short) > _LONGEST:  # another process may write an array whose name begins so too
            short = f"{short[:_LONGEST]}~{zlib.crc32(short.encode()):08x}"
        if not self._num_files:
            self.folder.make(ARRAYS)
        self._num_files += 1
        file = f"{ARRAYS}/{short.lstrip('.')}-{self.generation + 1}-{self._num_files}.bin"
        array = BlockArray(self.folder, name, dataclasses.replace(spec, file=file))
        array.make_file(reserve)
        self.arrays[name] = array
        return array

    def keep_open(self) -> None:
        """Keeps the files of the first arrays open, for small writes."""
        for array in list(self.arrays.values())[:_MOST_OPEN]:
            array.keep_open()

    def put(
        self, sources: dict[str, Source], copy: bool = False, kept: Iterable[str] = ()
    ) -> Callable[[], None]:
        """Writes what differs from the last commit; all other arrays are left out of the next one.

        Args:
            sources: the arrays by name.
            copy: False writes at once; True copies the blocks that differ, so that the arrays may
                change before they are written.
            kept: the names of arrays that stay as they are.

        Returns:
            A function that writes what was copied; it does nothing if all is written.
        """
        self.ensure_writer()
        # Find out which objects the last save had, if the arrays are still those of that save.
        before, hashes = dict(self.arrays), {}
        saved, owners = _last_saved.get(self.path, (None, {}))
        owners = owners if saved == self._identity else {}
        self._identity = None  # until the next commit, the arrays are those of no generation
        self._owners = {
            name: weakref.ref(it.owner) for name, it in sources.items() if it.owner is not None
        }
        # From here on, the store has these arrays and no others.
        changed = {name: self.array(name, source) for name, source in sources.items()}
        self.arrays = {name: self.arrays[name] for name in kept} | changed
        writes: list[Callable[[], None]] | None = [] if copy else None
        tasks: list[Callable[[], None]] = []
        # Collect the work for each array, unless its object is that of the last save.
        for name, source in sources.items():
            array = changed[name]
            owner = owners[name]() if name in owners else None  # None if it is gone
            if owner is not None and owner is source.owner and before.get(name) is array:
                continue
            old_hashes = self.hashes.pop(name, None)
            if source.hashes is not None and array.spec.size:
                hashes[name] = source.hashes(array.spec.size)
                # The hashes of the last save are of use only if its blocks are there.
                old_hashes = None if before.get(name) is not array else old_hashes
            tasks += self._change_tasks(array, source, hashes.get(name), old_hashes, writes)
        if tasks:  # a small state has none, and needs no threads
            run_all(tasks)

        def write() -> None:
            if writes:
                run_all(writes)
            self.hashes |= hashes

        if writes is None:
            write()
        return write

    def _change_tasks(
        self,
        array: BlockArray,
        source: Source,
        hashes: np.ndarray | None,
        old_hashes: np.ndarray | None,
        writes: list[Callable[[], None]] | None,
    ) -> list[Callable[[], None]]:
        """Returns tasks that find the changed blocks of an array, and write or copy these."""
        spec, read = array.spec, source.read
        if read is None:
            raise TypeError(f"{spec.label}: expected a function that reads the rows, got None.")
        # Beyond the reach all rows are zeros, which take no room.
        reach = spec.num_blocks if source.reach is None else -(-source.reach // spec.block)
        for block in (reach + np.flatnonzero(array.positions[reach:] != NO_POSITION)).tolist():
            array.clear_block(block)

        def task(first: int, last: int) -> None:
            blocks = list(array.find_changed_blocks(read(*spec.rows_of(first, last)), first))
            if writes is not None:
                blocks = [(block, part.copy(), checksum) for block, part, checksum in blocks]
                writes.append(lambda: array.write_blocks(blocks))
            else:
                array.write_blocks(blocks)

        if hashes is not None and old_hashes is not None and len(old_hashes) == len(hashes):
            # Only blocks whose hashes have changed are transferred from the device.
            suspects = np.flatnonzero(hashes[:reach] != old_hashes[:reach]).tolist()
            return [functools.partial(task, block, block) for block in suspects]
        starts = range(0, reach, RUN)
        return [functools.partial(task, first, min(first + RUN, reach) - 1) for first in starts]

    def array_bytes(self, name: str) -> np.ndarray:
        """Returns the checked bytes of an array, small or in blocks, uint8."""
        if name in self.small:
            return np.frombuffer(self.small[name].data, np.uint8)
        spec = self.arrays[name].spec
        target = np.empty((spec.rows, spec.width), np.uint8)
        self.read({name: target})
        return target.reshape(-1)

    def read(self, targets: dict[str, np.ndarray]) -> None:
        """Reads arrays into targets, uint8 `[N, width]`, and checks every block."""
        run_all([task for name in targets for task in self.arrays[name].read_tasks(targets[name])])

    # Commits.

    def tables(self) -> dict[str, Any]:
        """Makes the arrays durable, and returns their tables for `commit` in another process."""
        self._sync_arrays()
        tables = {}
        for name, array in self.arrays.items():
            data = Table(array.spec, array.positions, array.checksums).to_bytes()
            hashes = self.hashes.get(name, np.zeros(0, np.uint64)).tobytes()
            texts = [base64.b85encode(each).decode() for each in (data, hashes)]
            tables[name] = [dataclasses.asdict(array.spec), *texts]
        return tables

    def commit(
        self,
        meta: dict[str, Any],
        small: dict[str, SmallArray],
        keep: int = 0,
        others: dict[str, Any] | None = None,
    ) -> int:
        """Commits the arrays as they are now, and returns the number of the new generation.

        Args:
            meta: JSON of the owner.
            small: arrays that are written with the generation, by name.
            keep: the number of older generations that stay.
            others: the tables of arrays that other processes have written.

        Raises:
            OSError: with a note that says if the commit has happened.
        """
        with self.turn:
            self.ensure_writer()
            number = self.generation + 1
            named = self.hashes.keys() & self.arrays.keys()
            hashes = {name: self.hashes[name].tobytes() for name in named}
            # Everything that the generation refers to is durable before it is written.
            try:
                self._sync_arrays()
                tables = {
                    name: Table(array.spec, array.positions, array.checksums)
                    for name, array in self.arrays.items()
                }
                for name, (spec, *texts) in (others or {}).items():
                    data, hashes[name] = map(base64.b85decode, texts)
                    tables[name] = Table.from_bytes(ArraySpec(**spec), data)
                small = small | {
                    HASHES + name: SmallArray([], it) for name, it in hashes.items() if it
                }
                identity = commits.write_generation(
                    self.folder, Generation(number, meta, small, tables)
                )
                self._set_generation(number, meta, small)
                self._identity, _last_saved[self.path] = identity, (identity, self._owners)
                self.folder.sync()
            except BaseException as error:
                happened = number in commits.list_generations(self.folder)
                if happened:
                    self._set_generation(number, meta, small)
                error.add_note(_NOT_DURABLE if happened else _NOT_HAPPENED)
                raise
            # The commit has happened: make room.
            try:
                self.folder.check()
                self.expire(commits.list_generations(self.folder)[-1 - keep :])
            except BaseException as error:
                error.add_note(_NOT_TIDIED)
                raise
            return number

    def _sync_arrays(self) -> None:
        if self.arrays:
            run_all([array.sync for array in self.arrays.values()])
        if self._num_files:
            self.folder.sync(ARRAYS)

    def _set_generation(
        self, number: int, meta: dict[str, Any], small: dict[str, SmallArray]
    ) -> None:
        """Makes the new generation the one that later writes must not touch."""
        for array in self.arrays.values():
            array.commit_positions()
        self.generation, self.meta, self.small = number, meta, small
        self._num_files = 0

    def expire(self, kept: Iterable[int]) -> None:
        """Removes all generations but these, and those that readers have open."""
        expired = sorted({*commits.list_generations(self.folder)} - {*kept})
        for number in expired:
            files.remove_unless_shared(self.folder, commits.generation_name(number))
        # Files are removed durably before their positions are free: otherwise a generation that
        # comes back after a loss of power would refer to blocks that were overwritten.
        if expired:
            self.folder.sync()
        used = self.truncate_files()
        for name in commits.array_files(self.folder):
            if name not in used and commits.ARRAY_FILE.fullmatch(name):
                self.folder.remove(name)

    def truncate_files(self) -> set[str]:
        """Shortens the files of the arrays; returns the files that a generation or this store uses.

        Other processes than the one that commits call it after the commit.
        """
        used = self._find_used_positions()
        # To read a mapping beyond the end of its file would kill the process.
        gate = _gates.get(self.path)
        if gate is None or gate.wait():
            for array in self.arrays.values():
                array.truncate_file()
        return used


def gate_of(path: str) -> Gate:
    """Returns the gate of all stores of this process in a folder."""
    with _registry:
        return _gates.setdefault(path, Gate())


def find_damages(path: str, progress: Progress = no_progress) -> list[str]:
    """Returns a line about each damage in a store, its older generations included."""
    folder = commits.open_folder(path)
    numbers = commits.list_generations(folder)
    if not numbers:
        commits.open_newest(folder)  # raises
    lines: list[str] = []
    stores: list[BlockStore] = []
    damaged: list[tuple[str, int, str]] = []
    done, turn = 0, threading.Lock()

    def check(array: BlockArray, block: int) -> None:
        nonlocal done
        try:
            array.read_block(block)
        except (DamagedError, OSError) as error:
            damaged.append((array.name, block, str(error)))
        with turn:
            done += 1
            progress(done / len(tasks))

    with contextlib.ExitStack() as stack:
        for number in reversed(numbers):
            try:
                stores.append(stack.enter_context(BlockStore.open_to_read(path, number)))
            except FileNotFoundError:
                continue  # it was removed meanwhile
            except (DamagedError, VersionError, OSError) as error:
                if isinstance(error, VersionError) and number == numbers[-1]:
                    raise  # it may be whole, for another version of jrb
                lines.append(str(error))
        # Generations share most blocks: each is read once.
        tasks: dict[tuple[str, int, int], Callable[[], None]] = {}
        for array in (array for store in stores for array in store.arrays.values()):
            for block in np.flatnonzero(array.positions != NO_POSITION).tolist():
                which = array.spec.file, array.positions.item(block), array.checksums.item(block)
                tasks.setdefault(which, functools.partial(check, array, block))
        run_all(list(tasks.values()))
    if not tasks:
        progress(1.0)
    return list(dict.fromkeys([*lines, *(line for *_, line in sorted(damaged))]))


def store_at(path: str) -> BlockStore | None:
    """Returns the store at a path that this process writes; None if there is none."""
    return writing.get(os.path.realpath(path))


def _remove_stale(folder: str) -> None:
    """Removes the temporary stores of this user whose processes have died.

    The system takes the lock of a process back when it ends, however it ends. So whoever gets the
    lock of a temporary store knows that no process uses it, and that none is removing it.
    """
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if not name.startswith(_TEMPORARY):
            continue
        with contextlib.suppress(OSError, ValueError, LockedError), contextlib.ExitStack() as stack:
            # Without a lock file it may be so new that its process has yet to make one.
            is_mine = os.lstat(path).st_uid == os.getuid() and not os.path.islink(path)
            if (
                is_mine
                and files.LOCK in os.listdir(path)
                and not commits.list_generations(Folder(path))
            ):
                stack.callback(Lock(Folder(path)).release)
                commits.remove_files(path, commits.belongs_to_store)


def _discard(path: str, process: int) -> None:
    """Removes a temporary store, in the process that has made it."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            commits.remove_files(path, commits.belongs_to_store)


def _forget_writers() -> None:
    """Keeps a forked process from writing to the stores of its parent."""
    global _registry
    _registry = threading.RLock()
    for store in list(writing.values()):
        store.turn = threading.RLock()  # a thread that this process does not have may hold it
    writing.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_writers)
