"""Makes stores whose rows are written in place, opens them again, and says what is wrong."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator

import numpy as np

from jrb.disk import files, manifest, store, table, undo
from jrb.disk.errors import DamagedError
from jrb.disk.live import Live, entry_of, writing
from jrb.disk.manifest import Body
from jrb.disk.past import Past
from jrb.disk.table import Column, Table
from jrb.disk.threads import share


def create(path: str | None, columns: tuple[Column, ...], capacity: int, prealloc: bool) -> Live:
    """A new store, of which nothing is saved yet, and which this process writes.

    Args:
        path: of the folder; None for a temporary one that goes with the store.
        columns: of the rows.
        capacity: N.
        prealloc: whether the disk sets the room aside now.

    Raises:
        ValueError: the folder holds something.
        LockedError: another process writes there.
        OSError: there is no room, or it cannot be written to.
    """
    if path is None:
        path = tempfile.mkdtemp(prefix="jrb-")
        try:
            live = _made(path, columns, capacity, prealloc)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        weakref.finalize(live, _discard, path, os.getpid())
        return live
    return _made(os.path.realpath(path), columns, capacity, prealloc)


def _discard(path: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def _made(path: str, columns: tuple[Column, ...], capacity: int, prealloc: bool) -> Live:
    store.check_free(path)
    files.make_folder(path)
    rival = writing.get(path)
    if rival is not None:
        raise ValueError(
            f"{path}: expected nothing there, found a store that a state of this process is in. "
            "Go on with that state, or let go of it first."
        )
    lock = files.lock(os.path.join(path, "lock"))
    try:
        _clear(path)
        entries = [entry_of(column, np.zeros(0, np.uint32)) for column in columns]
        rows = {"capacity": capacity, "held": 0, "columns": entries}
        body: Body = {"generation": 1, "meta": {}, "leaves": [], "table": rows}
        store.publish(path, body)
        table.create(path, columns, capacity, prealloc)
        live = Live(path, Table(path, columns, capacity, writable=True), body, lock)
    except BaseException:
        files.unlock(lock)
        raise
    writing[path] = live
    return live


def _clear(path: str) -> None:
    """Removes a store to which nothing was ever saved."""
    try:
        body = manifest.read(path)
    except FileNotFoundError:
        return
    if "table" not in body or body["meta"]:
        raise ValueError(_occupied(path))
    table.remove(path, _columns(body))


def _occupied(path: str) -> str:
    return (
        f"{path}: expected nothing there, found a store. Open it with jrb.load(path), or remove it."
    )


def _columns(body: Body) -> tuple[Column, ...]:
    return tuple(
        Column(entry["name"], tuple(entry["kind"]), entry["width"])
        for entry in body["table"]["columns"]
    )


def reopen(path: str, body: Body) -> Live:
    """The store as a manifest describes it, checked, to be read; its first write takes the lock.

    Raises:
        DamagedError: a file is not what was written; the message names leaf, block and file.
    """
    path = os.path.realpath(path)
    live = open_unchecked(path, body)
    for damage in _damages(live):
        raise DamagedError(damage)
    return live


def open_unchecked(path: str, body: Body) -> Live:
    """The same without a look at the rows."""
    columns, capacity = _columns(body), body["table"]["capacity"]
    rows = Table(path, columns, capacity, writable=False)
    widths = tuple(column.width for column in columns)
    try:
        past = Past(path, body["generation"], widths, capacity)
    except FileNotFoundError:
        name = undo.path_of(path, body["generation"])
        raise DamagedError(f"{name}: expected a file, found none.") from None
    return Live(path, rows, body, past=past)


def damages(path: str, body: Body) -> list[str]:
    """All that is wrong with the rows, a line each."""
    try:
        return list(_damages(open_unchecked(os.path.realpath(path), body)))
    except (DamagedError, OSError) as error:
        return [str(error)]


def _damages(live: Live) -> Iterator[str]:
    for number in range(len(live.table.columns)):
        found: list[tuple[int, str]] = []

        def check(block: int, number: int = number, found: list = found) -> None:
            damage = live.damage(number, block)
            if damage:
                found.append((block, damage))

        share(check, range(len(live.sums(number))))
        yield from (damage for _, damage in sorted(found))
