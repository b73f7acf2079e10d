"""Stores on the host: a save to their own path, and a load of it."""

import dataclasses
import warnings
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jrb import migrate
from jrb._core import eager
from jrb._store import opening
from jrb._store.errors import DamagedError, LostWarning
from jrb._store.store import Store
from jrb.checkpoint import host_items, matching, rows, state_specs
from jrb.checkpoint.beside import Beside
from jrb.checkpoint.hooks import Outward
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Snapshot
from jrb.mix import Description
from jrb.state import Buffer, BufferState, Device
from jrb.storages import host_rows
from jrb.storages.store_rows import StoreRows, columns
from jrb.types import Item

KIND = "store"


def check(keep: int, out: Outward) -> None:
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


class Pending:
    """As `native.Pending`, of a state whose rows are at the path: they only have to be promised."""

    def __init__(self, saved: Snapshot, extra: Beside) -> None:
        (view,) = saved.views
        self._saved, self._extra, self._version = saved, extra, host_rows.number(view.version)
        self.store: Store = cast(StoreRows, view.rows).store  # no other rows are at a path

    def open(self, copy: bool) -> None:
        """Takes the lock, if the state was only loaded until now."""
        self.store.own()

    def write(self, keep: int | None = None) -> int:
        """Makes what was written the newest generation; its number."""
        _, arrays, kinds = rows.split(self._saved)
        meta, extra = matching.about(KIND, self._saved), self._extra
        written = meta | extra.meta, kinds | extra.kinds, arrays | extra.arrays
        return self.store.commit(self._version, *written, keep)

    def finish(self, keep: int) -> int:
        """The same."""
        return self.write(keep)

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
        self.store.expire(kept)

    def close(self) -> None:
        """Nothing: the state keeps the lock."""


def reopened(
    opened: Opened, given: Description | None, example: Item, device: Device, verify: bool
) -> tuple[Any, Any]:
    """The buffer and its state as they were committed; the first write takes the lock."""
    buffer, spec = matching.described(opened, KIND, given, example)
    buffer, store = _at(buffer, opened.path), opened.store
    _check_columns(buffer, spec, opened)
    want = state_specs.blank(buffer, spec).replace(storage=None)
    if verify:
        opening.check(store, rows=True)
    state = matching.restored(opened, want, device, has_rows=False)
    if len(store.lost):
        state = _without(opened, buffer, spec, state)
    view = host_rows.view(StoreRows(store, spec, buffer.writer.is_chronological), store.version)
    state = host_items.attach(buffer, state, view)
    return buffer, state if device is None else jax.device_put(state, device)


def _without(opened: Opened, buffer: Buffer, spec: Item, state: BufferState) -> Any:
    """The state without the oldest rows, of which some are gone."""
    store, ring = opened.store, buffer.ring
    held = buffer.writer.held(ring, state.writer)
    lost = jnp.asarray(store.lost[np.asarray(held.holds(ring, jnp.asarray(store.lost, jnp.int32)))])
    if not lost.size:
        return state
    gone = np.zeros(ring.envs, np.int32)
    np.maximum.at(gone, np.asarray(lost % ring.envs), np.asarray(held.before(ring, lost)) + 1)
    if not buffer.writer.per_env:
        gone = np.full_like(gone, gone.max())
    warnings.warn(
        f"{opened.path}: {gone.sum()} of the {int(held.size)} items that generation "
        f"{store.generation} had are gone, the oldest ones: more was written after it than there "
        "is room for beside the ring, and not saved. Save more often, or make the storage with a "
        "larger spare_fraction=.",
        LostWarning,
        stacklevel=2,
    )
    rows_gone = gone if buffer.writer.per_env else gone[0]
    return eager.expire(migrate.writable(buffer), state, spec, rows_gone)


def _at(buffer: Buffer, path: str) -> Any:
    """The description, with the path at which the store is found."""
    if host_items.is_at(path, buffer):
        return buffer
    return dataclasses.replace(buffer, storage=buffer.storage.at(path))


def _check_columns(buffer: Buffer, spec: Item, opened: Opened) -> None:
    """Raises unless the rows are those of the description."""
    slots, want = opened.store.slots, columns(spec)
    wanted = [(leaf.name, leaf.width) for column in want for leaf in column.leaves]
    there = opened.generation.columns
    found = [(leaf.name, leaf.width) for column in there for leaf in column.leaves]
    if slots != buffer.capacity or len(there) != len(want) or found != wanted:
        raise DamagedError(
            f"{opened.path}: expected {buffer.capacity} rows of {[name for name, _ in wanted]}, "
            f"found {slots} of {[name for name, _ in found]}."
        )
