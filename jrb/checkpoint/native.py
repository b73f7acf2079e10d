"""Checkpoints as a folder: a store with the rows of one buffer (see `jrb._store.store`)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jrb._store import generation, opening
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb.checkpoint import (
    apart,
    commits,
    descriptions,
    hooks,
    host_items,
    matching,
    narrowing,
    objects,
    one_by_one,
    rows,
    state_specs,
)
from jrb.checkpoint.beside import Beside
from jrb.checkpoint.hooks import Inward, Outward
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Snapshot
from jrb.mix import Description
from jrb.state import Buffer, BufferState, Device
from jrb.types import Item

KIND = "buffer"

Table = Callable[[Generation | None], tuple[rows.Rows, dict[str, Any]]]
"""What lies in rows, and the arrays beside it, given the generation that this goes on from."""


class Pending:
    """A save of one buffer, after all checks.

    Args:
        path: of the checkpoint.
        saved: the state.
        extra: what is saved besides.
        out: what becomes of its items.
    """

    path: str
    extra: Beside
    meta: dict[str, Any]
    kinds: dict[str, Any]
    arrays: dict[str, Any]

    def __init__(self, path: str, saved: Snapshot, extra: Beside, out: Outward) -> None:
        form, self._table = _form(saved, out)
        self._saved = saved if form is None else _without_items(saved)
        self.path, self.extra = path, extra
        self.meta = {**matching.about(KIND, saved), "form": form, **extra.meta}
        self._pieces: Any = []
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """Where it is written."""
        if self._store is None:
            raise ValueError("expected a save that was opened.")
        return self._store

    def open(self, copy: bool) -> None:
        """Takes the lock, and finds out what will be written.

        Args:
            copy: whether that is copied now, so that the state may change.
        """
        last = _last(self.path, self.meta)
        held, beside = self._table(last)
        rest, arrays, kinds = rows.split(self._saved)
        held = rest if self.meta["form"] is None else held
        self.kinds = kinds | {name: [] for name in (*beside, rows.DIGEST)} | self.extra.kinds
        self._store = store = opening.to_save(self.path, held.columns, held.count)
        try:
            if last is not None and (store.is_new_table() or store.generation != last.number):
                last = None
            sums = rows.digest(held, store.sums.block, rows.reach(store, held, self._saved))
            pieces = rows.pieces(store, held, rows.changed(store, held, last, self._saved, sums))
            if copy:
                pieces = [(slots, list(map(np.array, found))) for slots, found in pieces]
                arrays = {name: bytes(array) for name, array in arrays.items()}
            beside = {**beside, rows.DIGEST: sums.tobytes(), **self.extra.arrays}
            self._pieces, self.arrays = pieces, {**arrays, **beside}
        except BaseException:
            self.close()
            raise

    def write(self, keep: int | None = None) -> int:
        """Writes; the number of the generation."""
        for slots, found in self._pieces:
            self.store.put(self.store.version, slots, found, expiring=False)
        store = self.store
        return store.commit(store.version, self.meta, self.kinds, self.arrays, keep)

    def finish(self, keep: int) -> int:
        """Writes, and gives the lock back; the number of the generation."""
        try:
            return self.write(keep)
        finally:
            self.close()

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
        self.store.expire(kept)

    def close(self) -> None:
        """Gives the lock back."""
        if self._store is not None:
            self._store.close()
        self._pieces, self.arrays = [], {}


def _form(saved: Snapshot, out: Outward) -> tuple[dict[str, Any] | None, Table]:
    """What a generation says of the items, None for rows of the state's own leaves; and these."""
    nothing = rows.Rows((), (), 0, 1, in_slots=False), {}
    if not out.items:
        return apart.form_of(saved), lambda last: nothing
    if saved.buffer.storage.of_objects:
        if out.encode is not None:
            raise TypeError(
                "encode: expected items of arrays, got a ListStorage, whose objects are written as "
                "they are. Leave it out."
            )
        blobs = objects.blobs(saved)
        return {"kind": objects.KIND}, functools.partial(objects.paged, blobs)
    if out.encode is None:
        return None, lambda last: nothing
    held = hooks.encoded(saved, out.encode)
    return hooks.form_of(held), lambda last: (held, hooks.arrays_of(held))


def _without_items(saved: Snapshot) -> Snapshot:
    return dataclasses.replace(saved, state=apart.without(saved.plain, saved.state))


def _last(path: str, meta: dict[str, Any]) -> Generation | None:
    """The generation that a save may go on from."""
    try:
        last = generation.newest(opening.folder_at(path))
    except (DamagedError, FileNotFoundError):
        return None
    then = last.body["meta"] or {}
    before = matching.binding(descriptions.upgraded(then.get("buffer")))
    same = before == matching.binding(meta["buffer"])
    return last if same and then.get("form") == meta["form"] else None


def load(
    opened: Opened, given: Description | None, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    """The description and the state of a generation; see `jrb.checkpoint.load`."""
    read = lambda device: _load(opened, given, example, device, back)
    return narrowing.narrowed(read, opened.path, given is not None, device, back.cast)


def _load(
    opened: Opened, given: Description | None, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    """The same without a conversion."""
    store = opened.store
    back.check(opened)
    if opened.meta.get("kind") == commits.KIND:
        return commits.reopened(opened, given, example, device, back.verify)
    buffer, spec = matching.described(opened, KIND, given, example)
    buffer = host_items.prepared(buffer, given is not None)
    batch = tuple(opened.meta["batch"])
    want = state_specs.batched(state_specs.blank(buffer, spec), batch)
    on_host, is_apart = host_items.is_on_host(buffer), bool(opened.form)
    seen = apart.without(host_items.on_device(buffer), want) if is_apart else want
    opening.check(store, rows=on_host or is_apart)  # else they are looked at as they are read
    room = None if is_apart else one_by_one.room_for(buffer, spec, batch)
    state = matching.restored(opened, seen, device, not is_apart, is_attached=on_host, room=room)
    if is_apart:
        return buffer, _joined(opened, buffer, want, state, spec, device, back)
    if not on_host:
        return buffer, state
    all_columns = lambda slots: store.take(store.version, [slots] * len(opened.generation.columns))
    pieces = ((slots, all_columns(slots)) for slots in rows.ranges(store))
    return buffer, host_items.attach(buffer, state, host_items.filled(buffer, spec, pieces))


def _joined(
    opened: Opened,
    buffer: Buffer,
    want: BufferState,
    state: BufferState,
    spec: Item,
    device: Device,
    back: Inward,
) -> BufferState:
    """The state with its items, which do not lie in rows of its own."""
    kind = opened.form["kind"]
    if kind == objects.KIND:
        return state.replace(storage=objects.restored(opened, buffer, device))
    if kind != apart.KIND:
        pieces = hooks.decoded(opened, spec, back.decode)
    else:
        slots = apart.in_order(buffer, state.writer)
        if buffer.storage.of_objects:
            return state.replace(storage=objects.brought(opened, slots, buffer, back.items))
        pieces = apart.brought(opened, slots, spec, back.items)
    if host_items.is_on_host(buffer):
        return host_items.attach(buffer, state, host_items.filled(buffer, spec, pieces))
    return apart.joined(buffer, want, state, spec, pieces, device)
