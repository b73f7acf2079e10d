"""A buffer that is made of what it is to hold."""

from typing import Any

import jax
import numpy as np

from jrb._util import casting, pytree
from jrb.buffer import ReplayBuffer
from jrb.loops import Jitted
from jrb.migrate import pieces, writable
from jrb.state import BufferState
from jrb.storages import DeviceStorage
from jrb.types import Item


def from_items(
    data: Item, *, capacity: int | None = None, num_envs: int | None = None, **parts: Any
) -> tuple[ReplayBuffer, BufferState]:
    """A buffer that holds these items, and its state.

    N capacity, E environments, T time.

    Args:
        data: arrays `[T, ...]`, or `[T, E, ...]` with `num_envs`, time first. Of objects, with
            `storage=jrb.ListStorage()`, a sequence.
        capacity: N; None for what the items take. Of more, the last ones stay.
        num_envs: E, or None for one stream.
        parts: what else `jrb.ReplayBuffer` takes; with `cast=True` NumPy's float64 will do, and
            with `writer=jrb.ReadOnly()` nothing is written later.

    Raises:
        ValueError, TypeError: as `ReplayBuffer`, `init` and `extend`.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer, state = jrb.from_items({"x": jnp.arange(5)}, batch_size=2)
        >>> buffer.capacity, jrb.items(buffer, state)["x"].tolist()
        (5, [0, 1, 2, 3, 4])
    """
    storage = parts.get("storage", DeviceStorage())
    data = data if storage.of_objects else casting.arrays(data, "from_items")
    length = len(data) if storage.of_objects else _length(data)
    if not length:
        raise ValueError("from_items: expected at least one item, got none.")
    wanted = length * (num_envs or 1) if capacity is None else capacity
    buffer = ReplayBuffer(capacity=wanted, num_envs=num_envs, **parts)
    into = Jitted(writable(buffer))
    if storage.of_objects:
        return buffer, into.extend(into.init(None), data)
    axes = 1 if num_envs is None else 2
    first = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)
    example = jax.tree.map(first, data)
    state = into.init(example)
    for piece in pieces(np.arange(length), pytree.nbytes(example) * (num_envs or 1)):
        part = slice(piece[0], piece[-1] + 1)
        state = into.extend(state, jax.tree.map(lambda leaf, part=part: leaf[part], data))
    return buffer, state


def _length(data: Item) -> int:
    """T, the same for all leaves."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if not pytree.is_array(leaf) or not leaf.shape:
            raise TypeError(
                f"from_items: leaf '{pytree.leaf_name(path)}': expected an array with an axis of "
                f"time, got {leaf!r}."
            )
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(data)}
    if len(lengths) > 1:
        raise ValueError(
            f"from_items: expected leaves of one length, time first, got {sorted(lengths)}."
        )
    return lengths.pop() if lengths else 0
