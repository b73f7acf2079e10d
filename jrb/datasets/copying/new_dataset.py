"""A dataset on the disk that is being written: whole at its path, or not there.

T steps, K episodes.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._store import files, opening, removal
from jrb._store.store import Store
from jrb._util.pytree import PyTree
from jrb._xla import compat
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import commits, host_items, matching, rows, state_specs
from jrb.checkpoint.snapshots import Snapshot
from jrb.datasets.format import Episode, spec_of
from jrb.datasets.formats.native import ENDS, FACTS
from jrb.datasets.writing.beside import free
from jrb.ring import Clock
from jrb.storages import MemmapStorage
from jrb.storages.host_rows import bytes_of
from jrb.storages.store_rows import columns
from jrb.writers import ReadOnly


class NewDataset:
    """A dataset in our own layout, to which blocks of steps are appended.

    It lies beside its path until it is whole. `jrb.load` opens it too, as a buffer that is only
    read, where JAX knows its dtypes.

    Args:
        dest: where it goes; nothing may be there.
        about: how many steps there may be, as far as anybody knows.

    Attributes:
        dest: where it goes.
        steps: T, how many were written.
        spec: of one of them; None as long as there is none.
        like: a step, for those who write to compare others with; None as long as there is none.

    Raises:
        ValueError: there is something.
    """

    dest: str
    steps: int
    spec: PyTree
    like: dict[str, np.ndarray] | None

    def __init__(self, dest: Any, about: int) -> None:
        self.dest = free(dest)
        folder, name = os.path.split(self.dest)
        self._beside = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
        self._about, self._store = max(about, 1), None
        self.steps, self.spec, self.like = 0, None, None

    def append(self, block: Episode) -> None:
        """Writes steps, arrays `[T, ...]` as those before them.

        Raises:
            OSError: the disk is full or broken.
        """
        store, count = self._opened(block), len(jax.tree.leaves(block)[0])
        if store.slots < self.steps + count:
            store.resize(max(self.steps + count, store.slots * 2))
        leaves = [bytes_of(np.asarray(leaf), count) for leaf in jax.tree.leaves(block)]
        slots = np.arange(self.steps, self.steps + count)
        store.put(store.version, slots, leaves, expiring=False)
        self.steps += count

    def _opened(self, block: Episode) -> Store:
        """The store, made when it is known what goes there."""
        if self._store is None:
            self.spec = spec_of(block)
            folder, name = os.path.split(self.dest)
            files.make_folder(folder)
            removal.discard_stale(folder, f".{name}.")  # of processes that were killed
            made = columns(self.spec)
            self._store = opening.create(self._beside, made, self._about, self._about, False)
        return self._store

    def finish(
        self, ends: np.ndarray, facts: Mapping[str, np.ndarray], about: Mapping[str, Any]
    ) -> None:
        """Puts it at its path.

        Args:
            ends: int64 `[K]`, the number of steps up to the end of each episode.
            facts: arrays `[K]` by name.
            about: `metadata` and `notes`; what is nothing for JSON is left out.

        Raises:
            ValueError: there are no steps, or there is something at the path by now.
        """
        if self._store is None:
            raise ValueError(f"{self.dest}: expected at least one step to be written, got none.")
        store, self._store = self._store, None
        try:
            store.resize(self.steps)
            self._commit(store, ends, facts, about)
        finally:
            store.close()
        files.replace(self._beside, free(self.dest))

    def _commit(
        self,
        store: Store,
        ends: np.ndarray,
        facts: Mapping[str, np.ndarray],
        about: Mapping[str, Any],
    ) -> None:
        """Makes it what a buffer would have saved that holds these steps."""
        storage = MemmapStorage(self.dest)
        buffer = ReplayBuffer(self.steps, writer=ReadOnly(), storage=storage)
        saved = Snapshot(buffer, _state(buffer, self.spec), self.spec, ())
        meta, (_, arrays, kinds) = matching.about(commits.KIND, saved), rows.split(saved)
        named = {ENDS: ends, **{FACTS + name: fact for name, fact in facts.items()}}
        for name, array in named.items():
            if array.dtype.kind in "biuf":
                arrays[name] = rows.array_bytes(array)
                kinds[name] = list(rows.kind_of(array))
        told = {name: _for_json(value) for name, value in about.items()}
        store.commit(store.version, {**meta, "dataset": told}, kinds, arrays)

    def discard(self) -> None:
        """Removes what was written, if it is not whole."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        with contextlib.suppress(OSError):
            removal.discard(self._beside, removal.is_of_store)


def _state(buffer: ReplayBuffer, spec: PyTree) -> Any:
    """The state of a full buffer, without its items."""
    with compat.enable_x64():
        want = state_specs.blank(host_items.on_device(buffer), spec).replace(storage=None)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), want)
    clock = Clock(cursor=jnp.int32(0), count=jnp.int32(buffer.capacity), lap=jnp.uint32(1))
    return state.replace(writer=clock)


def _for_json(value: object) -> Any:
    """What JSON has of a value."""
    if isinstance(value, Mapping):
        return {str(key): _for_json(entry) for key, entry in value.items() if _fits(entry)}
    return list(value) if isinstance(value, tuple) else value


def _fits(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
