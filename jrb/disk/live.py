"""A store whose rows are written in place, and whose saves are whole nevertheless.

```
manifest.json               the newest generation: checksums of the rows, and the other arrays
next/observation.bin        the rows of a leaf (see `jrb.disk.table`)
undo/000000000007           rows of the seventh generation, overwritten since (see `jrb.disk.undo`)
blocks/  lock               as in any store (see `jrb.disk.store`)
```

One process writes, any number read; each reads the generation that it has opened, for as long as it
has it open. Every write has a number, the version, and every row knows the one that put it there:
so a state that does not know of it is told apart.
"""

import contextlib
import os
import threading
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrb.disk import files, manifest, store, table, undo
from jrb.disk.blocks import Source, bounds
from jrb.disk.errors import LockedError, StaleError
from jrb.disk.manifest import Body
from jrb.disk.past import Past
from jrb.disk.table import Column, Table
from jrb.disk.threads import share

CHUNK = 16 << 20
"""Bytes of the largest chunk of an undo log that is written at once."""

_FIRST = 1 << 20  # bytes of the first one
_TORN = 1 << 62  # the version of a row that a write which failed has left half-written

writing: "weakref.WeakValueDictionary[str, Live]" = weakref.WeakValueDictionary()
"""The stores that this process writes to, by their folders."""


class Live:
    """A store as it is open in this process; made by `create` and `reopen`.

    Attributes:
        path: of the folder.
        table: the rows.
        generation: the one that was opened, or saved last.
        version: the number of the last write.
    """

    def __init__(
        self, path: str, rows: Table, body: Body, lock: int | None = None, past: Past | None = None
    ) -> None:
        self.path, self.table = path, rows
        self.generation: int = body["generation"]
        self._held: int = body["table"]["held"]
        self._filled = self._held
        self._sums = [np.asarray(entry["sums"], np.uint32) for entry in body["table"]["columns"]]
        self._dirty = [np.zeros(_count(rows, column), bool) for column in rows.columns]
        self._kept = np.zeros(rows.capacity, bool)
        self._ahead = _FIRST
        self._log: undo.Log | None = None  # for what this one overwrites
        self._past = past  # of what others do
        self._lock = lock
        self.version = self._done = 0
        self._written = np.zeros(rows.capacity, np.int64)
        self._torn = False  # whether some rows may be
        self._error: BaseException | None = None
        self._ousted = False
        self._draws: set[object] = set()
        self._gathers: set[object] = set()
        self._changed = threading.Condition()
        self._turn = threading.RLock()
        self._unlock: Any = None if lock is None else _unlocking(self, lock)

    # Reading.

    def drawing(self) -> "_Among":
        """A time during which a draw may go on before rows are overwritten."""
        return _Among(self._draws, self._changed)

    def take(self, version: int, places: list[np.ndarray]) -> list[np.ndarray]:
        """Rows of every column, uint8 `[B, width]`, at slots `[B]`.

        Raises:
            StaleError: one of them was overwritten after this version.
        """
        with _Among(self._gathers, self._changed):
            last = None
            for slots in places:
                if slots is not last:
                    self._check_there(version, slots)
                last = slots
            return [self._rows(number, slots) for number, slots in enumerate(places)]

    def _let_gathers_end(self) -> None:
        """Waits for those that are under way."""
        with self._changed:
            gathers = set(self._gathers)
            self._changed.wait_for(lambda: not gathers & self._gathers)

    def _check_there(self, version: int, slots: np.ndarray) -> None:
        """Returns when rows are in their files. Raises if they were overwritten since."""
        newest = int(self._written[slots].max()) if slots.size else 0
        if newest > version or self._ousted:
            raise _stale(self.path)
        self._wait_for(newest)

    def _rows(self, number: int, slots: np.ndarray) -> np.ndarray:
        past, rows = self._past, self.table.take(number, slots)
        if past is not None:
            past.restore(number, slots, rows)
        if slots.size and slots.max() >= self._filled:  # zeros, and what a crash has left
            rows[slots >= self._filled] = 0
        return rows

    @property
    def _widths(self) -> tuple[int, ...]:
        return tuple(column.width for column in self.table.columns)

    def _open_log(self) -> undo.Log:
        path = undo.path_of(self.path, self.generation)
        return undo.Log(path, self._widths, self.table.capacity, writable=True)

    def sums(self, number: int) -> np.ndarray:
        """The checksums of a column's blocks, uint32."""
        return self._sums[number]

    def damage(self, number: int, block: int) -> str:
        """What is wrong with a block of what was opened; nothing if it is whole."""
        column = self.table.columns[number]
        parts = bounds(self._held * column.width, column.block(self.table.capacity))
        found = zlib.crc32(self.read(0, number, *parts[block]))
        if found == self._sums[number][block]:
            return ""
        return (
            f"{self.table.paths[number]}: leaf '{column.name}', block {block}: expected the "
            f"checksum {self._sums[number][block]:08x}, found {found:08x}: the bytes from "
            f"{parts[block][0]} on were damaged."
        )

    def read(self, version: int, number: int, start: int, stop: int) -> memoryview:
        """The bytes of a column from a start to a stop.

        Raises:
            StaleError: one of its rows was overwritten after this version.
        """
        width = self.table.columns[number].width
        if start == stop:
            return memoryview(b"")
        slots = np.arange(start // width, -(-stop // width))
        with _Among(self._gathers, self._changed):
            self._check_there(version, slots)
            rows = self._rows(number, slots).reshape(-1)
        offset = int(slots[0]) * width
        return rows[start - offset : stop - offset].data

    def settle(self, version: int) -> None:
        """Returns when all is written.

        Raises:
            StaleError: this is not the version of the last write.
        """
        self.check_newest(version)
        self._wait_for(version)

    # Writing.

    def put(self, version: int, slots: np.ndarray, rows: list[np.ndarray], patient: bool) -> int:
        """Writes rows, uint8 `[B, width]` of every column, at slots `[B]`, each at most once.

        Args:
            version: of the state; it must be the newest.
            slots: int64.
            rows: of every column.
            patient: whether draws that are under way are waited for.

        Returns:
            The version of the state that knows of them.

        Raises:
            StaleError: the state is not the newest one.
            LockedError: another process writes.
            OSError: the disk is full or broken; the old state no longer has these rows.
        """
        with self._turn:
            self.own()
            self.check_newest(version)
            self._keep(slots)
            version = self.claim(version, slots, patient, advance=False)
            try:
                self.apply(slots, rows)
            except BaseException:
                self._written[slots], self._torn = _TORN, True
                raise
            self.version = self._done = version
            return version

    def claim(self, version: int, slots: np.ndarray, patient: bool, advance: bool = True) -> int:
        """Says that rows at slots are to be overwritten, and gives the write its number."""
        with self._turn:
            self.own()
            self.check_newest(version)
            self._check_whole()
            with self._changed:
                if patient:
                    under_way = set(self._draws)
                    self._changed.wait_for(lambda: not under_way & self._draws)
                self._written[slots] = version + 1
            self._let_gathers_end()
            if advance:
                self.version = version + 1
            return version + 1

    def check_newest(self, version: int) -> None:
        """Raises `StaleError` unless this is the version of the last write."""
        if self._ousted or version != self.version:
            raise StaleError(
                f"{self.path}: expected the newest state, got one that has been written to before. "
                "States share their rows on the host: go on with the state that the last write "
                "returned, or the one that was loaded last."
            )

    def _check_untorn(self) -> None:
        self._torn = self._torn and bool((self._written == _TORN).any())
        if self._torn:
            raise StaleError(
                f"{self.path}: expected whole rows, found some that a write which failed has left "
                "half-written. Make that write again, or load the path to go on from what was "
                "saved last."
            )

    def apply(self, slots: np.ndarray, rows: list[np.ndarray]) -> None:
        """Writes the rows that were claimed."""
        if not len(slots):
            return
        self._keep(slots)
        reach = int(slots.max()) + 1
        changed = [(slots[start], slots[stop - 1] + 1) for start, stop in table.runs(slots)]
        changed += [(self._filled, reach)] if reach > self._filled else []
        self._filled = max(self._filled, reach)
        for number, column in enumerate(self.table.columns):
            self._mark(number, column, changed)
            self.table.put(number, slots, rows[number])

    def _mark(self, number: int, column: Column, changed: list[tuple[int, int]]) -> None:
        """Notes down the blocks of rows from a start to a stop."""
        block = column.block(self.table.capacity)
        for start, stop in changed if column.width else ():
            last = (stop * column.width - 1) // block
            self._dirty[number][start * column.width // block : last + 1] = True

    def _keep(self, slots: np.ndarray) -> None:
        """Copies rows of the last generation that will be overwritten, and some that may be next.

        Nothing may be overwritten before the copies are synced, which is slow: hence ahead.
        """
        wanted = slots[slots < self._held]
        wanted = wanted[~self._kept[wanted]]
        if not len(wanted):
            return
        log, each = self._log, max(sum(self._widths), 1)
        if log is None:
            raise LockedError(f"{self.path}: expected a store that writes.")
        following = (int(wanted[-1]) + 1 + np.arange(self._ahead // each)) % self._held
        following = following[: self._held]
        following = following[~self._kept[following]]
        wanted = np.concatenate([wanted, np.setdiff1d(following, wanted)])
        step, before = max(CHUNK // each, 1), log.chunks
        try:
            for start in range(0, len(wanted), step):
                part = wanted[start : start + step]
                log.append(part, [self.table.take(n, part) for n in range(len(self._widths))])
            log.sync()
        except BaseException:
            log.cut(before)
            raise
        self._kept[wanted] = True
        self._ahead = min(2 * self._ahead, CHUNK)

    def fill(self, number: int, pieces: Iterator[tuple[int, Any]]) -> None:
        """Writes all bytes of a column of a new store: offsets, and what stands there."""
        for offset, data in pieces:
            self.table.put_bytes(number, offset, data)
        self._dirty[number][:] = True
        self._filled = self.table.capacity

    def own(self) -> None:
        """Makes this the one that writes, and undoes what a crash has left.

        Raises:
            LockedError: another process writes.
            StaleError: another has written since this one was opened.
        """
        with self._turn:
            if self._lock is not None or self._ousted:
                return
            self._check_generation()
            rival = writing.pop(self.path, None)
            lock = files.lock(os.path.join(self.path, "lock")) if rival is None else rival.oust()
            try:
                self._check_generation()
                self._begin(lock)
            except BaseException:
                files.unlock(lock)
                raise
            writing[self.path] = self

    def _check_generation(self) -> None:
        newest = manifest.read(self.path)["generation"]
        if newest != self.generation:
            raise StaleError(
                f"{self.path}: expected generation {self.generation}, which was loaded, found "
                f"{newest}: somebody has saved since. Load it again."
            )

    def _begin(self, lock: int) -> None:
        """Undoes what a crash has left."""
        rows = Table(self.path, self.table.columns, self.table.capacity, writable=True)
        log = self._open_log()
        log.refresh()
        slots = np.unique(log.slots())
        if len(slots):
            log.sync()
        for number in range(len(rows.columns)):
            rows.put(number, slots, log.rows(number, log.find(slots)))
        if len(slots):
            rows.sync(list(range(len(rows.columns))))
        self._kept[slots] = True
        self.table, self._log, self._lock = rows, log, lock
        self._past = None
        self._unlock = _unlocking(self, lock)

    def oust(self) -> int:
        """Gives the lock to another that is opened in the same process; this one is of no use."""
        with self._turn:
            with contextlib.suppress(Exception):
                self._wait_for(self.version)
            lock, self._ousted = self._lock, True
            self._let_gathers_end()
            self._lock = None
            if lock is None:
                raise LockedError(f"{self.path}: expected a store that writes.")
            self._unlock.detach()
            return lock

    def apply_behind(self, version: int, slots: np.ndarray, rows: list[np.ndarray]) -> None:
        """Writes the rows of a write that was claimed; what goes wrong comes out later."""
        error = self._error
        if error is None:
            try:
                self.apply(slots, rows)
            except BaseException as caught:
                error = caught
        with self._changed:
            self._done, self._error = version, error
            self._changed.notify_all()

    def _wait_for(self, version: int) -> None:
        """Returns when writes up to this version are applied.

        Raises:
            OSError: what went wrong in the background.
        """
        if self._done < version:
            with self._changed:
                self._changed.wait_for(lambda: self._done >= version)
        self._check_whole()

    def _check_whole(self) -> None:
        if self._error is not None:
            cause = self._error
            error: Exception = RuntimeError(f"{self.path}: writing rows failed: {cause!r}.")
            if isinstance(cause, OSError):
                error = OSError(cause.errno, f"{cause.strerror}: {self.path}")
            error.add_note("Rows are lost: load the path to go on from what was saved last.")
            raise error from cause

    # Saving.

    def commit(self, version: int, meta: dict[str, Any], sources: list[Source]) -> None:
        """Makes all that was written the next generation.

        Args:
            version: of the state; it must be the newest.
            meta: what the owner wants to know, for JSON.
            sources: its other arrays.

        Raises:
            StaleError: the state is not the newest one, or a write failed and was not made again.
            LockedError: another process writes.
            OSError: the disk is full or broken; what was saved before is still there.
        """
        with self._turn:
            self.own()
            self.settle(version)
            self._check_untorn()
            columns = self.table.columns
            self.table.sync([n for n in range(len(columns)) if self._dirty[n].any()])
            sums = self._new_sums()
            saving = store.Saving(self.path, self._lock)
            undo.create(self.path, saving.generation)
            entry = {
                "capacity": self.table.capacity,
                "held": self._filled,
                "columns": [entry_of(*pair) for pair in zip(columns, sums, strict=True)],
            }
            try:
                saving.commit(meta, sources, saving.plan(sources), 0, entry)
            except BaseException:
                if manifest.read(self.path)["generation"] == saving.generation:
                    self._moved_on(saving.generation, sums)  # it failed after its moment
                raise
            self._moved_on(saving.generation, sums)
            _forget(self.path, saving.generation)

    def _new_sums(self) -> list[np.ndarray]:
        """The checksums of all blocks, those computed that may have changed."""
        sums, work = [], []
        for number, column in enumerate(self.table.columns):
            parts = bounds(self._filled * column.width, column.block(self.table.capacity))
            new = np.zeros(len(parts), np.uint32)
            known = self._sums[number][: len(parts)]
            new[: len(known)] = known
            sums.append(new)
            data = self.table.rows[number].reshape(-1)
            changed = np.flatnonzero(self._dirty[number][: len(parts)]).tolist()
            work += [(new, block, data[slice(*parts[block])]) for block in changed]

        def check(task: tuple[np.ndarray, int, np.ndarray]) -> None:
            task[0][task[1]] = zlib.crc32(task[2].data)

        share(check, work)
        return sums

    def _moved_on(self, generation: int, sums: list[np.ndarray]) -> None:
        self.generation, self._sums, self._held = generation, sums, self._filled
        self._kept[:] = False
        self._ahead = _FIRST
        for dirty in self._dirty:
            dirty[:] = False
        self._log = self._open_log()


class _Among:
    """A time that somebody spends in a group."""

    __slots__ = ("_changed", "_group", "_me")

    def __init__(self, group: set[object], changed: threading.Condition) -> None:
        self._group, self._changed, self._me = group, changed, object()

    def __enter__(self) -> None:
        with self._changed:
            self._group.add(self._me)

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._group.discard(self._me)
            self._changed.notify_all()


def _forget(path: str, newest: int) -> None:
    """Removes logs that nobody reads any more, oldest first."""
    for number in undo.numbers(path):
        if number >= newest:
            return
        name = undo.path_of(path, number)
        file = files.open_to_read(name)
        try:
            if not files.lock_alone(file):
                return
            files.remove(name)  # while nobody else can begin to share it
        finally:
            os.close(file)


def _unlocking(live: Live, lock: int) -> Any:
    """Gives the lock back when the store is gone; not in a process that was forked off."""
    return weakref.finalize(live, _unlock, lock, os.getpid())


def _unlock(lock: int, process: int) -> None:
    if os.getpid() == process:
        files.unlock(lock)


def _stale(path: str) -> StaleError:
    return StaleError(
        f"{path}: expected a state whose rows are still there, got one of which some that were "
        "asked for were overwritten since. Draw from the state that the last write returned."
    )


def _count(rows: Table, column: Column) -> int:
    return len(bounds(rows.capacity * column.width, column.block(rows.capacity)))


def entry_of(column: Column, sums: np.ndarray) -> dict[str, Any]:
    """A column in the manifest."""
    return {
        "name": column.name,
        "kind": list(column.kind),
        "width": column.width,
        "sums": sums.tolist(),
    }
