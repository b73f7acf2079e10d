"""Checkpoints as a folder: a store with the rows of one buffer (see `jrb._store.store`)."""

from typing import Any

import jax
import numpy as np

from jrb._engine import memory
from jrb._store import opening
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb.checkpoint import commits, host_items, matching, rows, state_specs
from jrb.checkpoint.beside import Beside
from jrb.mix import AnyState, Description
from jrb.state import Buffer, Device
from jrb.types import Item

KIND = "buffer"


class Pending:
    """A save that knows what it will write, and holds the lock.

    Args:
        path: of the checkpoint.
        buffer: the description.
        state: its state.
        copy: whether what will be written is copied now, so that the state may change.
        extra: what is saved besides.
    """

    def __init__(
        self, path: str, buffer: Description, state: AnyState, copy: bool, extra: Beside
    ) -> None:
        saved = state_specs.snapshot(buffer, state)
        self.meta = matching.about(KIND, buffer, saved) | extra.meta
        held, self.arrays = rows.split(saved)
        self.kinds = matching.kinds(saved.state, self.arrays) | extra.kinds
        self.extra = extra
        self.store = opening.to_save(path, held.columns, held.count)
        try:
            last = _last(self.store, self.meta)
            which = rows.changed(self.store, held, last, saved)
            self._pieces = rows.pieces(self.store, held, which)
            if copy:
                self._pieces = [
                    (slots, list(map(np.array, found))) for slots, found in self._pieces
                ]
                self.arrays = {name: bytes(array) for name, array in self.arrays.items()}
            self.arrays |= extra.arrays
        except BaseException:
            self.close()
            raise

    def write(self, keep: int | None = None) -> int:
        """Writes; the number of the generation."""
        for slots, found in self._pieces:
            self.store.put(self.store.version, slots, found, expiring=False)
        store, also = self.store, self.extra.best_of(self.store.folder)
        return store.commit(store.version, self.meta, self.kinds, self.arrays, keep, also)

    def finish(self, keep: int) -> int:
        """Writes, and gives the lock back; the number of the generation."""
        try:
            return self.write(keep)
        finally:
            self.close()

    def close(self) -> None:
        """Gives the lock back."""
        self.store.close()
        self._pieces, self.arrays = [], {}


def _last(store: Store, meta: dict[str, Any]) -> Generation | None:
    """The generation that a save may go on from."""
    if not store.generation or store.is_new_table():
        return None
    last = Generation(store.folder, store.generation)
    then = (last.body["meta"] or {}).get("buffer")
    return last if matching.binding(then) == matching.binding(meta["buffer"]) else None


def load(
    path: str, given: Any, example: Item, device: Device, number: int | None = None
) -> tuple[Any, Any]:
    """Loads a generation, the newest one if none is named; see `jrb.checkpoint.load`."""
    store = opening.reopen(path, number, check=False)
    opened = Generation(store.folder, store.generation)
    kind = (opened.body["meta"] or {}).get("kind")
    if kind == commits.KIND:
        return commits.reopened(path, given, example, device, opened, store)
    return _restored(path, given, example, device, opened, store)


def _restored(
    path: str, given: Buffer | None, example: Item, device: Device, opened: Generation, store: Store
) -> tuple[Any, Any]:
    """The buffer and its state, from an open store."""
    buffer, spec = matching.described(path, opened, KIND, given, example)
    buffer = host_items.prepared(buffer, given is not None)
    batch = matching.batch_of(path, opened)
    want = state_specs.batched(state_specs.blank(buffer, spec), batch)
    packed = state_specs.packed(want)
    places = matching.places(path, opened, packed)
    on_host, leaves = host_items.is_on_host(buffer), []
    opening.check(store, rows=on_host)
    for leaf, (name, column) in zip(jax.tree.leaves(packed), places, strict=True):
        if on_host and column is not None:
            leaves.append(np.zeros(0, np.uint8))  # what stands for it is attached
            continue
        read = rows.reader(store, opened, name, column, int(np.prod(batch, dtype=int)))
        leaves.append(memory.restored(leaf, read, device))
    state = state_specs.unpacked(want, jax.tree.unflatten(jax.tree.structure(packed), leaves))
    if not on_host:
        return buffer, state
    view = host_items.filled(buffer, spec, store, rows.ranges(store))
    return buffer, host_items.attach(buffer, state, view)
