"""Items that lie on the host from slot 0 on, told to other parts in their order.

N capacity, E environments, T rows of time.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import eager
from jrb._core.replaying import replaying
from jrb._util import pytree
from jrb.state import Buffer, BufferState
from jrb.types import Item

_PIECE = 16 << 20  # bytes of items that are on their way


def told(buffer: Buffer, state: BufferState) -> Iterator[tuple[Item, jax.Array]]:
    """All rows, in pieces of one size.

    Args:
        buffer: with a storage on the host whose rows were written once, from slot 0 on.
        state: is only read.

    Yields:
        Items `[T, ...]` or `[T, E, ...]`, as they are stored, and which of them there are, bool
        `[T]`, in lanes `[T, E]`.
    """
    ring, envs = buffer.ring, buffer.ring.envs
    counts = np.broadcast_to(buffer.writer.held(ring, state.writer).rows(ring), envs)
    size = max(1, _PIECE // max(1, pytree.nbytes(buffer.storage.spec(state.storage)) * envs))
    size = min(size, max(1, int(counts.max())))
    for start in range(0, int(counts.max()), size):
        row = np.arange(start, start + size)
        slots = np.minimum(row, ring.rows - 1)[:, None] * envs + np.arange(envs)
        slots = slots[:, 0] if buffer.num_envs is None else slots
        mask = row[:, None] < counts
        mask = mask if buffer.writer.per_env else mask[:, 0]
        yield buffer.storage.take(state.storage, slots), jnp.asarray(mask)


def retold(old: Buffer, state: BufferState, new: Buffer) -> Any:
    """The state of a description with other parts over the same items, which stay where they are.

    Sampler, unit and transforms with a state learn from all rows.

    Args:
        old: the description of the state; see `told`.
        state: is only read; its rows are those of the new state too.
        new: with the same capacity, environments and storage, and a writer of the same states.
    """
    into = replaying(new)
    half = eager.half(into, old.storage.spec(state.storage))
    for items, mask in told(old, state):
        half = eager.told(into, half, items, mask)
    return half.replace(storage=state.storage)


def moved(old: Buffer, state: BufferState, new: Buffer) -> Any:
    """The state of a description with another storage, to which the items are copied.

    Args:
        old: the description of the state; see `told`.
        state: is only read.
        new: with the same capacity and environments, and a writer of the same states.
    """
    into = replaying(new)
    made = eager.init(into, old.storage.spec(state.storage), None)
    for items, mask in told(old, state):
        made = eager.fill(into, made, items, None, mask)
    return made
