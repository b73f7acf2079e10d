"""Writes a state into a store: the rows that are new or changed, and all other arrays."""

import abc
import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jrb._core import memory
from jrb._store import generation, opening, table
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb._store.threads import share
from jrb._util import casting, pytree
from jrb._util.pytree import Leaf
from jrb.checkpoint import descriptions, external_items, objects, schema
from jrb.checkpoint.external_items import EncodedRows, Outward
from jrb.checkpoint.manifest import EXTRA
from jrb.checkpoint.schema import Snapshot, StateRows
from jrb.state import Buffer
from jrb.storages import host_rows
from jrb.storages.memmap import StoreRows
from jrb.types import Item
from jrb.types.messages import PartState

BUFFER, STORE = "buffer", "store"
"""The kinds of checkpoints of one buffer: with rows of its own, or with those of its storage."""

DIGEST = ".digest"
"""The name of the array with a checksum of each block of rows, by which hand edits are found."""


# What a user saves in one generation with a buffer: parameters, keys, the number of a step.


@dataclasses.dataclass(frozen=True)
class ExtraData:
    """Data of the user in a generation.

    Attributes:
        meta: for JSON.
        kinds: of its arrays, by name.
        arrays: their bytes.
    """

    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)


def extra_data(extra: Item, copy: bool) -> ExtraData:
    """Returns a pytree of arrays and numbers, None for nothing, to be saved.

    Args:
        extra: the pytree.
        copy: whether its bytes are copied now, so that it may change.
    """
    if extra is None:
        return ExtraData()
    kinds, arrays = {}, {}
    for name, leaf in schema.by_name(extra).items():
        array = extra_array(name, leaf)
        kinds[EXTRA + name] = list(schema.kind_of(array))
        raw = casting.raw(array)
        if isinstance(raw, jax.Array) and not (raw.is_fully_addressable or raw.is_fully_replicated):
            raw = multihost_utils.process_allgather(raw, tiled=True)  # which all processes call
        data = schema.array_bytes(raw)
        arrays[EXTRA + name] = bytes(data) if copy else data
    return ExtraData({"extra": list(kinds)}, kinds, arrays)


def extra_array(name: str, leaf: Leaf) -> Any:
    """Returns a leaf as an array; raises if it is neither an array of numbers nor a number."""
    array: Any = np.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf
    if isinstance(array, jax.core.Tracer) or not pytree.is_array(array):
        raise TypeError(
            f"save: extra: leaf '{name}': expected an array or a number, got "
            f"{type(leaf).__name__}. Encode it, or leave it out."
        )
    if not casting.is_keys(array.dtype) and np.dtype(array.dtype).kind in "OSUMm":
        raise TypeError(f"save: extra: leaf '{name}': expected numbers, got dtype {array.dtype}.")
    return array


# Saves of one buffer.


class Job(abc.ABC):
    """A save, after all checks."""

    _store: Store | None = None

    @property
    def store(self) -> Store:
        """The store that is written to."""
        if self._store is None:
            raise ValueError("expected a save that was opened.")
        return self._store

    @abc.abstractmethod
    def open(self, copy: bool) -> None:
        """Takes the lock, and finds out what will be written.

        Args:
            copy: whether that is copied now, so that the state may change.
        """

    @abc.abstractmethod
    def write(self, keep: int | None = None) -> int:
        """Writes, and returns the number of the generation."""

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


class SaveJob(Job):
    """A save of one buffer to a store of its own.

    Args:
        path: of the checkpoint.
        saved: the state.
        extra: other data of the user.
        out: what becomes of its items.
    """

    path: str
    extra: ExtraData
    meta: dict[str, Any]
    kinds: dict[str, Any]
    arrays: dict[str, Any]

    def __init__(self, path: str, saved: Snapshot, extra: ExtraData, out: Outward) -> None:
        form, self._item_rows, self._item_arrays = _external(saved, out)
        if form is not None:  # the items are not in rows of the state's own leaves
            state = external_items.without(saved.plain, saved.state)
            saved = dataclasses.replace(saved, state=state)
        self.path, self.extra, self._saved = path, extra, saved
        self.meta = {**schema.about(BUFFER, saved), "form": form, **extra.meta}
        self._pieces: Any = []

    def open(self, copy: bool) -> None:
        """See `Job.open`."""
        last = self._last()
        rows, arrays, kinds = schema.split(self._saved)
        rows = rows if self._item_rows is None else self._item_rows
        self._store = store = opening.to_save(self.path, rows.columns, rows.count)
        try:
            # Rows of another table, or of a generation that came in between, say nothing.
            if last is not None and (store.is_new_table() or store.generation != last.number):
                last = None
            reach = rows.count  # no row from there on was ever written, in memory or in the store
            if rows.count and self._saved.views:
                reach = min(reach, max(store.reach, *(v.rows.reach for v in self._saved.views)))
            sums = _digest(rows, store.sums.block, reach)
            changed = _changed(store, rows, last, self._saved, sums, reach)
            # A generator: rows of the state are copied to the host while the save writes.
            pieces = _pieces(store, rows, changed)
            if copy:
                pieces = [(slots, list(map(np.array, columns))) for slots, columns in pieces]
                arrays = {name: bytes(array) for name, array in arrays.items()}
            own = {**self._item_arrays, DIGEST: sums.tobytes()}
            self.kinds = kinds | {name: [] for name in own} | self.extra.kinds
            self._pieces, self.arrays = pieces, {**arrays, **own, **self.extra.arrays}
        except BaseException:
            self.close()
            raise

    def _last(self) -> Generation | None:
        """Returns the generation that this save may go on from."""
        try:
            last = generation.newest(opening.folder_at(self.path))
        except (DamagedError, FileNotFoundError):
            return None
        # Of another description or form, bytes could be equal by chance and mean something else.
        meta = last.body["meta"] or {}
        before = descriptions.binding(descriptions.upgraded(meta.get("buffer")))
        is_same = before == descriptions.binding(self.meta["buffer"])
        return last if is_same and meta.get("form") == self.meta["form"] else None

    def write(self, keep: int | None = None) -> int:
        """See `Job.write`."""
        # Rows go to free places, so the last generation stays whole until the commit names the new
        # ones: a crash before that leaves the old checkpoint.
        store = self.store
        for slots, columns in self._pieces:
            store.put(store.version, slots, columns, expiring=False)
        return store.commit(store.version, self.meta, self.kinds, self.arrays, keep)

    def close(self) -> None:
        """Gives the lock back, and lets go of what was to be written."""
        super().close()
        self._pieces, self.arrays = [], {}


class CommitJob(Job):
    """A save to the path of the state's own storage: its rows are there, and are only promised."""

    def __init__(self, saved: Snapshot, extra: ExtraData) -> None:
        (view,) = saved.views
        self._saved, self._extra, self._version = saved, extra, host_rows.number(view.version)
        self._store = cast(StoreRows, view.rows).store  # no other rows are at a path

    def open(self, copy: bool) -> None:
        """Takes the lock, if the state was only loaded until now."""
        self.store.own()

    def write(self, keep: int | None = None) -> int:
        """Makes what was written the newest generation, and returns its number."""
        _, arrays, kinds = schema.split(self._saved)
        meta, extra = schema.about(STORE, self._saved), self._extra
        parts = meta | extra.meta, kinds | extra.kinds, arrays | extra.arrays
        return self.store.commit(self._version, *parts, keep)

    def close(self) -> None:
        """Does nothing: the state keeps the lock."""


def _external(
    saved: Snapshot, out: Outward
) -> tuple[dict[str, Any] | None, StateRows | None, dict[str, Any]]:
    """Returns what a generation says of items that are not in the state's own rows.

    Also the rows of such items, and their other arrays. None and None for all other items.
    """
    nothing = StateRows((), (), (), 0, 1)
    if not out.items:
        return external_items.kept_form(saved), nothing, {}
    if saved.buffer.storage.of_objects:
        if out.encode is not None:
            raise TypeError(
                "encode: expected items of arrays, got a ListStorage, whose objects are written as "
                "they are. Leave it out."
            )
        return objects.FORM, nothing, objects.arrays_of(saved)
    if out.encode is None:
        return None, None, {}
    rows = external_items.encoded(saved, out.encode)
    return rows.form, rows, rows.arrays


# Which rows are written.


def _digest(rows: StateRows, block: int, count: int) -> np.ndarray:
    """Returns checksums of blocks of the first `count` rows in memory, uint32; 0 behind them.

    They are computed for each save: hand edits leave no other trace. Arrays of a device are hashed
    there, since to bring 10 GB to the host takes seconds.
    """
    sums = np.zeros(-(-rows.count // block), np.uint32)

    def add(number: int) -> None:
        which = np.arange(number * block, min((number + 1) * block, count))
        for column in rows.fingerprints(which):
            sums[number] = zlib.crc32(memory.view(column), int(sums[number]))

    numbers = range(-(-count // block))
    if isinstance(rows, EncodedRows):  # which JAX takes out, with the settings of this thread
        for number in numbers:
            add(number)
    else:
        share(add, numbers)
    return sums


def _changed(
    store: Store,
    rows: StateRows,
    last: Generation | None,
    saved: Snapshot,
    sums: np.ndarray,
    reach: int,
) -> np.ndarray:
    """Returns the rows that the last generation lacks or has otherwise, int64, in order."""
    every, state = np.arange(reach), saved.state
    before = None if last is None else _as_saved(last, state)
    if not reach or last is None or before is None:
        return every
    count, axes = saved.plain.capacity, len(saved.batch)
    if saved.views:  # a power of two, so that little is compiled while it grows
        count = min(count, 1 << len(every).bit_length())
    stamps = lambda writer: np.asarray(_stamps(saved.plain, axes, count, writer)).reshape(-1)
    # The writer's stamps tell which are new, if the state continues the one that was saved. All
    # others are compared with the store where the digest of their block is another, or everywhere
    # if a verb has edited items.
    is_new = (stamps(before["writer"]) != stamps(state.writer))[: len(every)]
    suspects = ~is_new
    if (before["edits"] == np.asarray(state.edits)).all():
        is_like = np.zeros(len(sums), np.bool_)
        with contextlib.suppress(DamagedError):
            old = last.array(DIGEST, np.uint32)
            is_like = old == sums if len(old) == len(sums) else is_like
        suspects &= ~is_like[every // store.sums.block]
    which = np.flatnonzero(suspects)
    # Equal digests of items do not tell whether a function over them has changed: try a few.
    if _differ(store, rows, rows.witnesses(store, np.flatnonzero(~is_new & ~suspects))).any():
        return every
    return np.union1d(every[is_new], which[_differ(store, rows, which)])


def _differ(store: Store, rows: StateRows, which: np.ndarray) -> np.ndarray:
    """Returns which of some rows are not what the store has, bool like `which`."""
    flags = [np.zeros(0, np.bool_)]
    for piece in schema.in_parts(which, rows.width):
        stored = store.take(store.version, [piece] * len(rows.columns))
        differs = np.zeros(len(piece), np.bool_)
        for one, other in zip(rows.take(piece), stored, strict=True):
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
    store: Store, rows: StateRows, which: np.ndarray
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields rows and their bytes; zeros that were never written are left out."""
    for piece in schema.in_parts(which, rows.width):
        columns = rows.take(piece)
        if not store.is_blank(piece) or not all(map(table.is_zero, columns)):
            yield piece, columns
