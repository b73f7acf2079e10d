"""Reads from a state what pictures show: a few leaves, not whole items.

N capacity, E environments, K rows stored at most by any environment.
"""

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb.authoring import context_of, leaf_name
from jrb.buffer import ReplayBuffer, check_single
from jrb.keys import leaves_at
from jrb.read import Episodes, episodes
from jrb.samplers import Prioritized
from jrb.state import Buffer, BufferState
from jrb.types import Anchors, Item


def check(buffer: ReplayBuffer, state: BufferState, who: str) -> None:
    """Raises unless it is a single state of this buffer, outside `jit`.

    Raises:
        TypeError: no buffer, a state of another one, or one inside `jit`.
        ValueError: states under `vmap`, or one that was donated.
    """
    check_single(buffer, who)
    if isinstance(state, BufferState):
        check_concrete(state, f"{who}: state")
        lead = jnp.shape(state.edits)
        if lead:
            raise ValueError(
                f"{who}: state: expected a single state, got {' x '.join(map(str, lead))} of them "
                "under vmap. Pick one with jax.tree.map(lambda x: x[0], state)."
            )
    try:
        buffer.size(state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: state: {error}") from None


def check_concrete(tree: Any, what: str) -> None:
    """Raises where arrays have no values to look at; the message begins with `what`."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{what}: expected arrays with values, got traced ones. Draw the picture outside "
                "jit, of what the jitted function returns."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{what}: expected arrays with values, got donated ones. Pass what the function "
                "returned to which they were donated."
            )


def stored_slots(buffer: ReplayBuffer, state: BufferState) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slots of all stored items by time, int32 `[K, E]`, and which are stored, bool.

    The newest row of each environment is the last one. Where a writer does not keep the order of
    time, all items are in one column, `[K, 1]`, oldest first.
    """
    if not buffer.writer.is_chronological:
        slots, size = buffer.in_order(state)
        column = np.asarray(slots)[: int(size), None]
        return column, np.ones(column.shape, bool)
    rows = int(buffer.writer.held(buffer.ring, state.writer).rows(buffer.ring).max())
    slots, stored = map(np.asarray, buffer.newest(state, max(rows, 1)))
    return slots.reshape(-1, buffer.ring.envs), stored.reshape(-1, buffer.ring.envs)


def anchors_of(buffer: Buffer, state: BufferState) -> Anchors:
    """Returns the valid start slots."""
    return buffer.unit.anchors(context_of(buffer, state.writer), state.unit)


def masses(buffer: ReplayBuffer, state: BufferState, raw: np.ndarray) -> np.ndarray:
    """Returns the masses, by which draws are proportional, of priorities `[N]`; 0 for no anchor."""
    known = np.maximum(raw, 0).astype(np.float64)
    if isinstance(buffer.sampler, Prioritized):
        known = (known + buffer.sampler.eps) ** float(state.sampler.alpha)
    return np.where(raw < 0, 0.0, known)


def specs(buffer: ReplayBuffer, state: BufferState) -> dict[str, Any]:
    """Returns dtype and shape of each leaf of an item, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(buffer.stored(state))
    return {leaf_name(path): leaf for path, leaf in leaves}


def leaves(
    buffer: ReplayBuffer, state: BufferState, slots: np.ndarray, names: set[str]
) -> dict[str, np.ndarray]:
    """Reads the leaves of these names at slots, int32 `[...]`, and nothing else of the items."""
    if not names:
        return {}
    items = _read(buffer, state, jnp.asarray(slots), tuple(sorted(names)))
    named = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(items)}
    values = {name: np.asarray(named[name]) for name in sorted(names)}
    # NumPy and matplotlib compute with few of the dtypes that it has from JAX, such as bfloat16.
    return {
        name: leaf if leaf.dtype.kind in "biuf" else leaf.astype(np.float32)
        for name, leaf in values.items()
    }


@functools.partial(jax.jit, static_argnames="names")
def _read(buffer: Buffer, state: BufferState, slots: jax.Array, names: tuple[str, ...]) -> Item:
    where = lambda name: slots if name in names else slots[..., None][..., :0]
    return buffer.storage.read(context_of(buffer, state.writer), state.storage, where)


def stored_episodes(buffer: ReplayBuffer, state: BufferState) -> Episodes:
    """Returns `jrb.episodes`, without a warning of returns that are not finite."""
    with np.errstate(invalid="ignore"):
        return episodes(buffer, state)


def rewards(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> np.ndarray | None:
    """Reads the rewards at slots `[K, E]`, real `[K, E, parts]`; None if items have none."""
    if buffer.storage.of_objects:
        return None
    spec = leaves_at(buffer.stored(state), buffer.keys.reward)
    names = {name for name, leaf in spec.items() if is_real(leaf.dtype) and leaf.size}
    parts = list(leaves(buffer, state, slots, names).values())
    if not parts:
        return None
    # Several leaves are the rewards of several agents; none is copied if there is one.
    parts = [part.reshape(*slots.shape, -1) for part in parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1, dtype=np.float32)


def is_real(dtype: Any) -> bool:
    """Returns True if values of this dtype are real numbers, or bool."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
