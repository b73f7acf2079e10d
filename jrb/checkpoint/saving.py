"""Writes a state into a store: the rows that are new or changed, and the arrays beside them."""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import memory
from jrb._store import generation, opening, table
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb._store.threads import share
from jrb.checkpoint import descriptions, external_items, hooks, objects, rows, schema
from jrb.checkpoint.extra import ExtraData
from jrb.checkpoint.hooks import Outward
from jrb.checkpoint.rows import StateRows
from jrb.checkpoint.schema import Snapshot
from jrb.state import Buffer
from jrb.storages import host_rows
from jrb.storages.memmap import StoreRows
from jrb.types.messages import PartState

BUFFER, STORE = "buffer", "store"
"""The kinds of checkpoints of one buffer: with rows of its own, or with those of its storage."""

DIGEST = ".digest"
"""The name of the array with a checksum of each block of rows, by which hand edits are found."""

_Items = Callable[[Generation | None], tuple[StateRows | None, dict[str, Any]]]
"""Returns the rows of items, None for those of the state, and the arrays beside them."""


class SaveJob:
    """A save of one buffer, after all checks.

    Args:
        path: of the checkpoint.
        saved: the state.
        extra: what is saved besides.
        out: what becomes of its items.
    """

    path: str
    extra: ExtraData
    meta: dict[str, Any]
    kinds: dict[str, Any]
    arrays: dict[str, Any]

    def __init__(self, path: str, saved: Snapshot, extra: ExtraData, out: Outward) -> None:
        form, self._items = _form(saved, out)
        if form is not None:  # the items are not in rows of the state's own leaves
            saved = dataclasses.replace(
                saved, state=external_items.without(saved.plain, saved.state)
            )
        self.path, self.extra, self._saved = path, extra, saved
        self.meta = {**schema.about(BUFFER, saved), "form": form, **extra.meta}
        self._pieces: Any = []
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The store that is written to."""
        if self._store is None:
            raise ValueError("expected a save that was opened.")
        return self._store

    def open(self, copy: bool) -> None:
        """Takes the lock, and finds out what will be written.

        Args:
            copy: whether that is copied now, so that the state may change.
        """
        last = self._last()
        item_rows, beside = self._items(last)
        own, arrays, kinds = rows.split(self._saved)
        of = own if item_rows is None else item_rows
        self.kinds = kinds | {name: [] for name in (*beside, DIGEST)} | self.extra.kinds
        self._store = store = opening.to_save(self.path, of.columns, of.count)
        try:
            if last is not None and (store.is_new_table() or store.generation != last.number):
                last = None
            sums = _digest(of, store.sums.block, _reach(store, of, self._saved))
            pieces = _pieces(store, of, _changed(store, of, last, self._saved, sums))
            if copy:
                pieces = [(slots, list(map(np.array, columns))) for slots, columns in pieces]
                arrays = {name: bytes(array) for name, array in arrays.items()}
            beside = {**beside, DIGEST: sums.tobytes(), **self.extra.arrays}
            self._pieces, self.arrays = pieces, {**arrays, **beside}
        except BaseException:
            self.close()
            raise

    def _last(self) -> Generation | None:
        """Returns the generation that this save may go on from."""
        try:
            last = generation.newest(opening.folder_at(self.path))
        except (DamagedError, FileNotFoundError):
            return None
        meta = last.body["meta"] or {}
        before = schema.binding(descriptions.upgraded(meta.get("buffer")))
        same = before == schema.binding(self.meta["buffer"])
        return last if same and meta.get("form") == self.meta["form"] else None

    def write(self, keep: int | None = None) -> int:
        """Writes, and returns the number of the generation."""
        store = self.store
        for slots, columns in self._pieces:
            store.put(store.version, slots, columns, expiring=False)
        return store.commit(store.version, self.meta, self.kinds, self.arrays, keep)

    def finish(self, keep: int) -> int:
        """Writes, gives the lock back, and returns the number of the generation."""
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


class CommitJob:
    """A save to the path of the state's own storage: its rows are there, and are only promised."""

    def __init__(self, saved: Snapshot, extra: ExtraData) -> None:
        (view,) = saved.views
        self._saved, self._extra, self._version = saved, extra, host_rows.number(view.version)
        self.store: Store = cast(StoreRows, view.rows).store  # no other rows are at a path

    def open(self, copy: bool) -> None:
        """Takes the lock, if the state was only loaded until now."""
        self.store.own()

    def write(self, keep: int | None = None) -> int:
        """Makes what was written the newest generation, and returns its number."""
        _, arrays, kinds = rows.split(self._saved)
        meta, extra = schema.about(STORE, self._saved), self._extra
        parts = meta | extra.meta, kinds | extra.kinds, arrays | extra.arrays
        return self.store.commit(self._version, *parts, keep)

    def finish(self, keep: int) -> int:
        """As `write`."""
        return self.write(keep)

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
        self.store.expire(kept)

    def close(self) -> None:
        """Does nothing: the state keeps the lock."""


def check_commit(keep: int, out: Outward) -> None:
    """Raises where something is asked for that a commit cannot do."""
    if not out.is_plain:
        raise ValueError(
            "encode, items: expected none for the path of the storage itself, whose rows are "
            "there already, as they are. Save to another path."
        )
    if keep:
        raise ValueError(
            "keep: expected 0 for the path of the storage itself, where there is room for one "
            f"generation, got {keep}. Save to another path to keep older ones."
        )


def _form(saved: Snapshot, out: Outward) -> tuple[dict[str, Any] | None, _Items]:
    """Returns what a generation says of items that are not in the state's own rows; and these."""
    if not out.items:
        nothing = StateRows((), (), 0, 1, in_slots=False)
        return external_items.form_of(saved), lambda last: (nothing, {})
    if saved.buffer.storage.of_objects:
        if out.encode is not None:
            raise TypeError(
                "encode: expected items of arrays, got a ListStorage, whose objects are written as "
                "they are. Leave it out."
            )
        return objects.FORM, functools.partial(objects.paged, objects.blobs(saved))
    if out.encode is None:
        return None, lambda last: (None, {})
    encoded = hooks.encoded(saved, out.encode)
    return hooks.form_of(encoded), lambda last: (encoded, hooks.arrays_of(encoded))


# Which rows are written.


def _reach(store: Store, of: StateRows, saved: Snapshot) -> int:
    """Returns the number of rows behind which none was ever written, in memory or in the store."""
    if not of.in_slots or not saved.views:
        return of.count
    return min(of.count, max(store.reach, *(view.rows.reach for view in saved.views)))


def _digest(of: StateRows, block: int, count: int) -> np.ndarray:
    """Returns checksums of blocks of the first `count` rows in memory, uint32; 0 behind them.

    They are made anew for each save: hand edits leave no other trace. Arrays of a device are hashed
    there, since to bring 10 GB to the host takes seconds.
    """
    sums = np.zeros(-(-of.count // block), np.uint32)

    def add(number: int) -> None:
        which = np.arange(number * block, min((number + 1) * block, count))
        for column in of.fingerprints(which):
            sums[number] = zlib.crc32(memory.view(column), int(sums[number]))

    share(add, range(-(-count // block)))
    return sums


def _changed(
    store: Store, of: StateRows, last: Generation | None, saved: Snapshot, sums: np.ndarray
) -> np.ndarray:
    """Returns the rows that the last generation lacks or has otherwise, int64, in order.

    The writer's stamps tell which are new, if the state goes on from the one that was saved. All
    others are compared with the store where the digest of their block is another, and everywhere if
    items were edited by a verb, or are not in slots.
    """
    every, state = np.arange(_reach(store, of, saved)), saved.state
    if not of.in_slots:
        return every if last is None else every[_differ(store, of, every)]
    before = None if last is None else _as_saved(last, state)
    if last is None or before is None:
        return every
    count, axes = saved.plain.capacity, len(saved.batch)
    if saved.views:  # a power of two, so that little is compiled while it grows
        count = min(count, 1 << len(every).bit_length())
    stamps = lambda writer: np.asarray(_stamps(saved.plain, axes, count, writer)).reshape(-1)
    is_new = (stamps(before["writer"]) != stamps(state.writer))[: len(every)]
    suspects = ~is_new
    if (before["edits"] == np.asarray(state.edits)).all():
        suspects &= (_digest_of(last, sums) != sums)[every // store.sums.block]
    which = np.flatnonzero(suspects)
    if _differ(store, of, of.witnesses(store, np.flatnonzero(~is_new & ~suspects))).any():
        return every
    return np.union1d(every[is_new], which[_differ(store, of, which)])


def _digest_of(last: Generation, like: np.ndarray) -> np.ndarray:
    """Returns the digest of a generation; where it has none, one that differs everywhere."""
    with contextlib.suppress(DamagedError):
        sums = last.array(DIGEST, np.uint32)
        if len(sums) == len(like):
            return sums
    return ~like


def _differ(store: Store, of: StateRows, which: np.ndarray) -> np.ndarray:
    """Returns which of some rows are not what the store has, bool like `which`."""
    flags = [np.zeros(0, np.bool_)]
    for piece in of.pieces(which):
        stored = store.take(store.version, [piece] * len(of.columns))
        differs = np.zeros(len(piece), np.bool_)
        for one, other in zip(of.take(piece), stored, strict=True):
            differs |= (one != other).any(axis=1)
        flags.append(differs)
    return np.concatenate(flags)


def _as_saved(last: Generation, state: Any) -> Any:
    """Returns the writer's state and the edits that were saved; None if of other kinds."""
    parts = {"writer": state.writer, "edits": state.edits}
    entries, leaves = last.arrays, []
    for name, leaf in schema.by_name(parts).items():
        if name not in entries or entries[name]["kind"] != list(schema.kind_of(leaf)):
            return None
        try:
            leaves.append(last.array(name, leaf.dtype).reshape(leaf.shape))
        except (DamagedError, ValueError):
            return None
    return jax.tree.unflatten(jax.tree.structure(parts), leaves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _stamps(buffer: Buffer, axes: int, count: int, writer: PartState) -> jax.Array:
    """Returns the stamps of the first slots, uint32 `[V, count]`."""
    slots = jnp.arange(count, dtype=jnp.int32)
    stamp = lambda writer: buffer.writer.generation_of(buffer.ring, writer, slots)
    for _ in range(axes):
        stamp = jax.vmap(stamp)
    return stamp(writer)


def _pieces(
    store: Store, of: StateRows, which: np.ndarray
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields rows and their bytes; zeros that were never written are left out."""
    for piece in of.pieces(which):
        columns = of.take(piece)
        if not store.is_blank(piece) or not all(map(table.is_zero, columns)):
            yield piece, columns
