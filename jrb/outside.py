"""The verbs for items that lie outside JAX: jitted parts, and the storage between them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb import checks, compiled
from jrb.storages.objects import Elsewhere
from jrb.transforms import run


@functools.lru_cache(maxsize=64)
def bare(buffer: Any) -> Any:
    """The same buffer without its items, for what happens inside `jit`."""
    return dataclasses.replace(buffer, storage=Elsewhere(), transforms=())


def without_items(state: Any) -> Any:
    """The state for `bare`.

    Raises:
        TypeError: inside `jit`.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        raise TypeError(
            "ListStorage: expected to be called outside jit, vmap and scan, as it holds Python "
            "objects. Use jrb.DeviceStorage() there, with items of arrays."
        )
    return state.replace(storage=None)


def init(buffer: Any) -> Any:
    """An empty state."""
    state = bare(buffer).blank(None)
    return state.replace(storage=buffer.storage.init(buffer.ring, None, buffer.keys))


def extend(buffer: Any, state: Any, items: Any, mask: Any, verb: str) -> Any:
    """Writes T rows of objects: a sequence of them, with `num_envs` of sequences of E."""
    rows = _rows(buffer, items, verb)
    if mask is not None:
        mask = checks.mask(verb, mask, (len(rows),))
    if not rows:
        return state
    inner = without_items(state)
    blanks = {"item": np.zeros((len(rows), buffer.ring.envs), np.uint8)}
    if buffer.num_envs is None:
        blanks = {"item": blanks["item"][:, 0]}
    after = compiled.write(bare(buffer), inner, blanks, mask)
    storage = buffer.storage.put(state.storage, np.asarray(after.storage), rows)
    return after.replace(storage=storage)


def _rows(buffer: Any, items: Any, verb: str) -> list[list[Any]]:
    if isinstance(items, str | bytes | dict) or not isinstance(items, Sequence):
        raise TypeError(
            f"{verb}: expected a sequence of objects, got {type(items).__name__}. Put them in a "
            "list; for a single one there is add."
        )
    rows = [[item] for item in items] if buffer.num_envs is None else list(map(list, items))
    for row in rows:
        if len(row) != buffer.ring.envs:
            raise ValueError(
                f"{verb}: expected {buffer.ring.envs} objects in a row, one for each environment, "
                f"got {len(row)}."
            )
    return [[run.inward(buffer.transforms, item) for item in row] for row in rows]


def draw(buffer: Any, state: Any, key: jax.Array, batch_size: int, beta: Any) -> tuple[Any, Any]:
    """Draws slots inside `jit`, and fetches the objects."""
    inner, sample = compiled.draw(bare(buffer), without_items(state), key, batch_size, beta)
    slots, mask = np.asarray(sample.indices), np.asarray(sample.mask)
    found = buffer.storage.get(state.storage, np.where(mask, slots, 0))
    objects = [item if drawn else None for item, drawn in zip(found, mask.tolist(), strict=True)]
    data = objects if buffer.storage.collate is None else buffer.storage.collate(objects)
    data = run.outward(buffer.transforms, data, sample.mask, key, buffer.keys)
    return inner.replace(storage=state.storage), sample.replace(data=data)


def take(buffer: Any, state: Any, indices: jax.Array) -> list[Any]:
    """The objects at slots."""
    return buffer.storage.get(state.storage, np.asarray(jnp.ravel(indices)))


def update(buffer: Any, state: Any, sample: Any, priorities: jax.Array) -> Any:
    """New priorities."""
    if hasattr(sample, "data"):
        sample = sample.replace(data=None)
    after = compiled.update(bare(buffer), without_items(state), sample, priorities)
    return after.replace(storage=state.storage)


def empty(buffer: Any, state: Any) -> Any:
    """The state without its items."""
    after = compiled.empty(bare(buffer), without_items(state))
    return after.replace(storage=buffer.storage.emptied(buffer.ring, state.storage))
