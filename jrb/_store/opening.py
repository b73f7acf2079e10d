"""Makes stores, opens them, and says what is wrong with them."""

import contextlib
import itertools
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jrb._store import files, generation, removal, table
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.generation import Generation
from jrb._store.lock import Lock
from jrb._store.places import Places
from jrb._store.store import Store, folder_of, is_table, writing
from jrb._store.table import Column, Table
from jrb._store.threads import share

Progress = Callable[[float], None]
"""What is told the share of some work that is done, from 0 to 1."""

_TEMPORARY = "jrb-temporary-"
"""How the folders of temporary stores are called; each process removes those of dead ones."""


def nobody(share: float) -> None:
    """Is told, and says nothing."""


def steps(progress: Progress, count: int) -> list[Progress]:
    """What each of some tasks calls, which are taken to be of one length."""
    return [lambda share, done=done: progress((done + share) / count) for done in range(count)]


def create(
    path: str | None, columns: tuple[Column, ...], slots: int, room: int, reserve: bool
) -> Store:
    """A new store, to which nothing is saved yet, and which this process writes.

    Args:
        path: of the folder; None for a temporary one that goes with the store.
        columns: of the rows.
        slots: N.
        room: P, for how many rows there is room, at least N.
        reserve: whether the disk sets the room aside now.

    Raises:
        ValueError: the folder holds something.
        LockedError: another process writes there.
        OSError: there is no room, or it cannot be written to.
    """
    columns = table.blocked(columns, slots, room)
    if path is not None:
        return _made(os.path.realpath(path), columns, slots, room, reserve)
    removal.discard_stale(tempfile.gettempdir(), _TEMPORARY)
    path = os.path.realpath(tempfile.mkdtemp(prefix=_TEMPORARY))
    try:
        store = _made(path, columns, slots, room, reserve)
    except BaseException:
        _discard(path, os.getpid())
        raise
    weakref.finalize(store, _discard, path, os.getpid())
    return store


def _discard(path: str, process: int) -> None:
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            removal.discard(path, removal.is_of_store)


def _made(path: str, columns: tuple[Column, ...], slots: int, room: int, reserve: bool) -> Store:
    if path in writing and os.path.exists(path):
        raise ValueError(
            f"{path}: expected nothing there, found a store that a state of this process is in. "
            "Go on with that state, or let go of it first."
        )
    _check_free(path)
    files.make_folder(path)
    folder = Folder(path)
    lock = Lock(folder)
    try:
        _check_free(path)  # another process may have made one meanwhile
        store = writing[path] = _begun(folder, columns, slots, room, reserve, lock)
        return store
    except BaseException:
        writing.pop(path, None)
        lock.release()
        raise


def _check_free(path: str) -> None:
    """Raises unless there is nothing, or a store to which nothing was saved."""
    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        raise ValueError(f"{path}: expected nothing there, found a file.")
    folder = Folder(path)
    generation.check_own(folder)
    there = generation.numbers(folder)
    if there and there != [0]:
        raise ValueError(
            f"{path}: expected nothing there, found a store. Open it with jrb.load(path), or "
            "remove it."
        )
    others = set(folder.names()) - {"lock", "generation.new", "rows", generation.name_of(0)}
    if others or (not there and "rows" in folder.names()):
        raise ValueError(
            f"{path}: expected an empty folder, found '{min(others or {'rows'})}' in it. Choose "
            "another path."
        )


def _begun(
    folder: Folder, columns: tuple[Column, ...], slots: int, room: int, reserve: bool, lock: Lock
) -> Store:
    """A store with an empty table, in a folder where there is none."""
    folder.clear(folder_of(0), sign=table.NUMBERS)
    generation.write(folder, generation.blank(columns, slots, room), {})
    folder.sync()
    return _with_table(folder, columns, slots, room, reserve, lock, 0, 0)


def _with_table(
    folder: Folder,
    columns: tuple[Column, ...],
    slots: int,
    room: int,
    reserve: bool,
    lock: Lock,
    number: int,
    table_folder: int,
) -> Store:
    first = table.first_room(columns, room)
    places = Places(np.zeros((0, 3), np.int64), slots, first)
    table.make(folder, folder_of(table_folder), columns, room if reserve else first, reserve)
    rows = Table(folder, folder_of(table_folder), columns, first, writable=True)
    store = Store(folder, rows, places, number, table_folder, reserve, lock, room)
    store.keep_all()
    return store


def to_save(path: str, columns: tuple[Column, ...], slots: int, parts: Iterable[str] = ()) -> Store:
    """The store at a path, made if there is none, with a table of these columns; it has the lock.

    Where the last save had other columns, or is damaged, the table is a new one.

    Args:
        path: of the folder.
        columns: of the rows.
        slots: N.
        parts: the names of folders in it that are checkpoints themselves.

    Raises:
        LockedError: somebody else writes there.
        ValueError: there is something else.
    """
    columns = table.blocked(columns, slots, slots)
    files.make_folder(path)
    folder = Folder(path)
    _check_names(folder, parts)  # before there is a lock of ours among what is not
    lock = Lock(folder)
    try:
        there = generation.numbers(folder)
        if there in ([], [0]):
            return _begun(folder, columns, slots, slots, False, lock)
        with contextlib.suppress(DamagedError):
            last = generation.newest(folder)
            if last.columns == columns and last.body["table"]["slots"] == slots:
                store = store_of(last)
                store.table.check_numbers()
                if not len(store.lost):
                    store.begin(lock)
                    return store
        number = there[-1]
        folder.clear(folder_of(number + 1), sign=table.NUMBERS)
        return _with_table(folder, columns, slots, slots, False, lock, number, number + 1)
    except BaseException:
        lock.release()
        raise


def _check_names(folder: Folder, parts: Iterable[str]) -> None:
    """Raises unless the folder has a checkpoint, or nothing; and if a name of ours is another's."""
    generation.check_own(folder)
    names, there = folder.names(), generation.numbers(folder)
    if there:
        following = folder_of(there[-1] + 1)
        foreign = [following] * (following in names and not is_table(folder, following))
    else:
        foreign = sorted({*names} - {"lock", "generation.new", *parts})
    if foreign:
        raise ValueError(
            f"{folder.path}: expected a checkpoint, or an empty folder, found {foreign[0]!r}, "
            "which belongs to none. Choose another path."
        )


def check(store: Store, rows: bool) -> None:
    """Raises `DamagedError` unless the numbers of the rows, and the rows, are what was written."""
    store.table.check_numbers()
    for damage in _damages(store) if rows else ():
        raise DamagedError(damage)


def folder_at(path: str) -> Folder:
    """The folder of a store.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        return Folder(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path}: expected a checkpoint, found no folder there. Save one first, or look at the "
            "path."
        ) from None


def at(folder: Folder, number: int) -> Generation:
    """A generation.

    Raises:
        FileNotFoundError: it is not there.
    """
    try:
        return Generation(folder, number)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder.path}: expected generation {number}, found {generation.numbers(folder)}. "
            "Save with keep=n to keep n older ones."
        ) from None


def store_of(opened: Generation) -> Store:
    """The store as a generation has it; no rows are looked at.

    Raises:
        FileNotFoundError: it is of a store to which nothing was saved.
        DamagedError: a file is not what was written.
    """
    folder, body = opened.folder, opened.body["table"]
    if not opened.number:
        raise FileNotFoundError(
            f"{folder.path}: expected a store with something saved, found one to which nothing "
            "was. jrb.save(path, buffer, state) does that."
        )
    rows = Table(folder, folder_of(body["folder"]), opened.columns, body["room"], writable=False)
    places = Places(opened.runs(), body["slots"], body["room"], opened.body["rows"])
    store = Store(folder, rows, places, opened.number, body["folder"], most=body["most"])
    store.load_generation(opened)
    return store


def damages(path: str, progress: Progress = nobody) -> list[str]:
    """All that is wrong with a store and its older generations, a line each.

    Args:
        path: of the folder.
        progress: is told how far it is, perhaps from other threads, one at a time.
    """
    folder = folder_at(path)
    while True:
        there = generation.numbers(folder)
        if not there:
            generation.newest(folder)  # raises
        found = []
        for number, step in zip(reversed(there), steps(progress, len(there)), strict=True):
            found += _damages_of(folder, number, step)
        if not found or generation.numbers(folder)[-1:] == there[-1:]:
            progress(1.0)
            return list(dict.fromkeys(found))


def _damages_of(folder: Folder, number: int, progress: Progress) -> list[str]:
    try:
        opened = Generation(folder, number)
        if not number:
            return []
        for entry in opened.body["arrays"]:
            opened.check(entry["name"])
        store = store_of(opened)
        store.table.check_numbers()
        return list(_damages(store, progress))
    except (DamagedError, OSError) as error:
        return [str(error)]


def _damages(store: Store, progress: Progress = nobody) -> Iterator[str]:
    found: list[tuple[int, int, str]] = []
    blocks = store.sums.blocks()
    done, turn = itertools.count(1), threading.Lock()

    def check(task: tuple[int, int]) -> None:
        damage = store.sums.damage(*task)
        if damage:
            found.append((*task, damage))
        with turn:
            progress(next(done) / len(blocks))

    share(check, blocks)
    if found and store.leave_out_gone():
        yield from _damages(store)
    else:
        yield from (damage for *_, damage in sorted(found))
