"""Makes stores, opens them, and finds their damage."""

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
from jrb._store.store import Store, is_table, writing
from jrb._store.table import Column, RowTable, folder_of
from jrb._store.threads import share

Progress = Callable[[float], None]
"""A function that is called with the share of the work that is done, from 0 to 1."""

_TEMPORARY = "jrb-temporary-"
"""The prefix of folders of temporary stores; each process removes those that dead ones left."""


def no_progress(share: float) -> None:
    """Does nothing."""


def steps(progress: Progress, count: int) -> list[Progress]:
    """Returns a progress function for each of `count` tasks, as if all took equally long."""
    return [lambda share, done=done: progress((done + share) / count) for done in range(count)]


def create(
    path: str | None, columns: tuple[Column, ...], slots: int, room: int, reserve: bool
) -> Store:
    """Makes a new store without a commit, to which this process writes.

    The folder at `path` must be empty or missing; None makes a temporary one, which is removed with
    the store. `room` is P, at least N; if `reserve`, disk space for P rows is allocated now.
    """
    if path is not None:
        files.make_folder(path)
        return _create(os.path.realpath(path), columns, slots, room, reserve)
    files.check_system(tempfile.gettempdir())
    removal.discard_stale(tempfile.gettempdir(), _TEMPORARY)
    path = os.path.realpath(tempfile.mkdtemp(prefix=_TEMPORARY))
    try:
        store = _create(path, columns, slots, room, reserve)
    except BaseException:
        _discard(path, os.getpid())
        raise
    weakref.finalize(store, _discard, path, os.getpid())
    return store


def _create(path: str, columns: tuple[Column, ...], slots: int, room: int, reserve: bool) -> Store:
    if path in writing and os.path.exists(path):
        raise ValueError(
            f"{path}: expected nothing there, found a store that a state of this process is in. Go "
            "on with that state, or let go of it first."
        )
    folder = Folder(path)
    _check_names(folder)
    lock = Lock(folder)
    try:
        if _check_names(folder):  # under the lock: another process may have saved meanwhile
            raise ValueError(
                f"{path}: expected nothing there, found a store. Open it with jrb.load(path), or "
                "remove it."
            )
        columns = table.blocked(columns, slots, room)
        store = writing[path] = _with_table(folder, columns, slots, room, reserve, lock)
        return store
    except BaseException:
        writing.pop(path, None)
        lock.release()
        raise


def store_at(path: str) -> Store | None:
    """Returns the store at a path that this process writes; None if there is none."""
    return writing.get(os.path.realpath(path))


def _discard(path: str, process: int) -> None:
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            removal.discard(path, removal.is_of_store)


def _with_table(
    folder: Folder,
    columns: tuple[Column, ...],
    slots: int,
    room: int,
    reserve: bool,
    lock: Lock,
    number: int | None = None,
) -> Store:
    """Makes a store with an empty table; `number` is the newest generation, None for none."""
    table_folder = 0 if number is None else number + 1
    # A crash of an earlier attempt may have left some files of this table.
    folder.clear(folder_of(table_folder), sign=table.NUMBERS)
    if number is None:
        about = {"folder": 0, "slots": slots, "room": room, "most": room}
        generation.write(folder, generation.body_of(0, 0, None, {}, columns, **about), {})
        folder.sync()
    # With `reserve`, files get their final size now; arrays in memory always grow with the rows.
    first = table.first_room(columns, room)
    table.make(folder, folder_of(table_folder), columns, room if reserve else first, reserve)
    rows = RowTable(folder, folder_of(table_folder), columns, first, writable=True)
    places = Places(np.zeros((0, 3), np.int64), slots, first)
    store = Store(folder, rows, places, number or 0, table_folder, reserve, lock, room)
    store.keep_all()
    return store


def to_save(path: str, columns: tuple[Column, ...], slots: int, parts: Iterable[str] = ()) -> Store:
    """Opens the store at a path for writing, or makes one; its table has these columns.

    If the last save had other columns, or is damaged, the store gets a new table.
    """
    columns = table.blocked(columns, slots, slots)
    files.make_folder(path)
    folder = Folder(path)
    # Checked before a lock file is made, which would be put among files of other programs.
    _check_names(folder, parts)
    lock = Lock(folder)
    try:
        number = generation.last(folder)
        if not number:
            return _with_table(folder, columns, slots, slots, False, lock)
        # The rows of the last save are reused only if none is lost or damaged: otherwise such a row
        # would be committed again.
        with contextlib.suppress(DamagedError):
            last = generation.newest(folder)
            if last.columns == columns and last.body["table"]["slots"] == slots:
                store = store_of(last)
                store.table.check_numbers()
                if not len(store.lost):
                    store.begin(lock)
                    return store
        return _with_table(folder, columns, slots, slots, False, lock, number)
    except BaseException:
        lock.release()
        raise


def check_free(path: str, parts: Iterable[str] = ()) -> None:
    """Raises `ValueError` if files of other programs prevent a save to a path; writes nothing."""
    files.check_links(path)
    if os.path.isdir(path):
        _check_names(Folder(path), parts)
    elif os.path.lexists(path):
        raise ValueError(f"{path}: expected a folder, or nothing, found a file. Move it away.")


def _check_names(folder: Folder, parts: Iterable[str] = ()) -> int | None:
    """Returns the newest generation; raises `ValueError` if the folder has foreign files."""
    generation.check_own(folder)
    names, last = folder.names(), generation.last(folder)
    if last is None:
        foreign = sorted({*names} - {"lock", "generation.new", *parts})
    else:
        following = folder_of(last + 1)
        foreign = [following] * (following in names and not is_table(folder, following))
    if foreign:
        raise ValueError(
            f"{folder.path}: expected a checkpoint, or an empty folder, found {foreign[0]!r}, "
            "which belongs to none. Choose another path."
        )
    return last


def folder_at(path: str) -> Folder:
    try:
        return Folder(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"{path}: expected a checkpoint, found no folder there. Save one first, or look at the "
            "path."
        ) from None


def at(folder: Folder, number: int) -> Generation:
    try:
        return Generation(folder, number)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{folder.path}: expected generation {number}, found "
            f"{list(filter(None, generation.numbers(folder)))}. "
            "Save with keep=n to keep n older ones."
        ) from None


def check_saved(one: Generation) -> None:
    """Raises `FileNotFoundError` for a store to which nothing was saved."""
    if not one.number:
        raise FileNotFoundError(
            f"{one.folder.path}: expected a store with something saved, found one to which nothing "
            "was. jrb.save(path, buffer, state) does that."
        )


def store_of(one: Generation) -> Store:
    """Returns the store with the rows of a generation; the rows are not read."""
    folder, about = one.folder, one.body["table"]
    check_saved(one)
    rows = RowTable(folder, folder_of(about["folder"]), one.columns, about["room"], writable=False)
    places = Places(one.runs(), about["slots"], about["room"], one.body["rows"])
    store = Store(folder, rows, places, one.number, about["folder"], most=about["most"])
    store.sums.columns, store.sums.named = one.sums(), places.named()
    store.leave_out_lost()
    return store


def check(store: Store, rows: bool) -> None:
    """Raises `DamagedError` if the numbers of rows, or with `rows` the rows, are damaged."""
    store.table.check_numbers()
    for damage in _damages(store) if rows else ():
        raise DamagedError(damage)


def damages(path: str, progress: Progress = no_progress) -> list[str]:
    """Returns a line about each damage in a store, its older generations included."""
    folder = folder_at(path)
    while True:
        numbers = generation.numbers(folder)
        if not numbers:
            generation.newest(folder)  # raises
        lines: list[str] = []
        for number, step in zip(reversed(numbers), steps(progress, len(numbers)), strict=True):
            try:
                one = Generation(folder, number)
                if not number:
                    continue
                for entry in one.body["arrays"]:
                    one.array(entry["name"], np.uint8)
                store = store_of(one)
                store.table.check_numbers()
                lines += _damages(store, step)
            except (DamagedError, OSError) as error:
                lines.append(str(error))
        # If a newer generation was committed meanwhile, files of these may have been removed.
        if not lines or generation.numbers(folder)[-1:] == numbers[-1:]:
            progress(1.0)
            return list(dict.fromkeys(lines))


def _damages(store: Store, progress: Progress = no_progress) -> Iterator[str]:
    """Yields a line about each damaged block of rows, in order."""
    damages: list[tuple[int, int, str]] = []
    blocks = store.sums.blocks()
    count, turn = itertools.count(1), threading.Lock()

    def check(task: tuple[int, int]) -> None:
        try:
            store.sums.check(*task)
        except DamagedError as error:
            damages.append((*task, str(error)))
        with turn:
            progress(next(count) / len(blocks))

    share(check, blocks)
    if damages and store.leave_out_lost():  # another process overwrote rows meanwhile
        yield from _damages(store)
    else:
        yield from (damage for *_, damage in sorted(damages))
