"""Stores on the host: a save to their own path, and a load of it."""

import dataclasses
import os
import warnings
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jrb._engine import dispatch, memory, replaying
from jrb._store import opening
from jrb._store.errors import DamagedError, LostWarning
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb.checkpoint import host_items, matching, rows, state_specs
from jrb.checkpoint.beside import Beside
from jrb.checkpoint.snapshots import Snapshot
from jrb.mix import AnyState
from jrb.state import Buffer, Device
from jrb.storages import host_rows
from jrb.storages.store_rows import StoreRows, columns
from jrb.types import Item

KIND = "store"


def save(saved: Snapshot, keep: int, extra: Beside) -> int:
    """Makes what was written the newest generation."""
    if keep or extra.best:
        raise ValueError(
            "keep, best: expected 0 for the path of the storage itself, where there is room for "
            f"one generation, got {keep or extra.best}. Save to another path to keep older ones."
        )
    (view,), rest = saved.views, saved.state.replace(storage=None)
    packed = state_specs.packed(rest)
    leaves = map(rows.array_bytes, jax.tree.leaves(packed))
    arrays = dict(zip(state_specs.leaf_names(packed), leaves, strict=True))
    kinds = matching.kinds(rest, arrays) | extra.kinds
    meta = matching.about(KIND, saved) | extra.meta
    store = cast(StoreRows, view.rows).store  # no other rows are at a path
    version = host_rows.number(view.version)
    return store.commit(version, meta, kinds, arrays | extra.arrays)


def reopened(
    path: str,
    given: Buffer | None,
    example: Item,
    device: Device,
    opened: Generation,
    store: Store,
    verify: bool,
) -> tuple[Any, Any]:
    """The buffer and its state as they were committed; the first write takes the lock."""
    buffer, spec = matching.described(path, opened, KIND, given, example)
    buffer = _at(buffer, path)
    _check_columns(path, buffer, spec, opened)
    want = state_specs.blank(buffer, spec).replace(storage=None)
    packed = state_specs.packed(want)
    places = matching.places(path, opened, packed, without_rows=True)
    if verify:
        opening.check(store, rows=True)
    leaves = [
        memory.restored(leaf, rows.reader(store, opened, name, None, 1), device)
        for leaf, (name, _) in zip(jax.tree.leaves(packed), places, strict=True)
    ]
    state = state_specs.unpacked(want, jax.tree.unflatten(jax.tree.structure(packed), leaves))
    if len(store.lost):
        state = _without(path, buffer, spec, state, store)
    view = host_rows.view(StoreRows(store, spec, buffer.writer.in_time), store.version)
    state = host_items.attach(buffer, state, view)
    return buffer, state if device is None else jax.device_put(state, device)


def _without(path: str, buffer: Buffer, spec: Item, state: AnyState, store: Store) -> Any:
    """The state without the oldest rows, of which some are gone."""
    ring, held = buffer.ring, buffer.writer.held(buffer.ring, state.writer)
    lost = jnp.asarray(store.lost[np.asarray(held.holds(ring, jnp.asarray(store.lost, jnp.int32)))])
    if not lost.size:
        return state
    gone = np.zeros(ring.envs, np.int32)
    np.maximum.at(gone, np.asarray(lost % ring.envs), np.asarray(held.before(ring, lost)) + 1)
    if not buffer.writer.in_lanes:
        gone = np.full_like(gone, gone.max())
    warnings.warn(
        f"{path}: {gone.sum()} of the {int(held.size)} items that generation "
        f"{store.generation} had are gone, the oldest ones: more was written after it than there "
        "is room for beside the ring, and not saved. Save more often, or make the storage with a "
        "larger slack=.",
        LostWarning,
        stacklevel=2,
    )
    rows_gone = gone if buffer.writer.in_lanes else gone[0]
    return dispatch.expire(replaying.writable(buffer), state, spec, rows_gone)


def _at(buffer: Buffer, path: str) -> Any:
    """The description, with the path at which the store is found."""
    named = buffer.storage.path
    if named is not None and os.path.realpath(named) == os.path.realpath(path):
        return buffer
    return dataclasses.replace(buffer, storage=dataclasses.replace(buffer.storage, path=path))


def _check_columns(path: str, buffer: Buffer, spec: Item, opened: Generation) -> None:
    """Raises unless the rows are those of the description."""
    slots, want = opened.body["table"]["slots"], columns(spec)
    found = [(column.name, column.width) for column in opened.columns]
    if slots != buffer.capacity or found != [(c.name, c.width) for c in want]:
        raise DamagedError(
            f"{path}: expected {buffer.capacity} rows of {[c.name for c in want]}, found {slots} "
            f"of {[name for name, _ in found]}."
        )
