"""Items that stay where they are, told to other parts."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrb._base import pytree
from jrb._engine import dispatch
from jrb._engine.replaying import replaying
from jrb.state import Buffer, BufferState

_PIECE = 16 << 20  # bytes of items that are told at a time


def retold(old: Buffer, state: BufferState, new: Buffer) -> Any:
    """The state of a description with other parts over the same items, which stay where they are.

    Sampler, unit and transforms with a state learn from all rows, in their order. N capacity, E
    environments.

    Args:
        old: the description of the state: of a storage on the host whose rows were written once,
            from slot 0 on.
        state: is only read; its rows are those of the new state too.
        new: with the same capacity, environments and storage, and a writer of the same states.
    """
    into, envs = replaying(new), old.ring.envs
    half = dispatch.half(into, old.storage.spec(state.storage))
    counts = np.broadcast_to(old.writer.held(old.ring, state.writer).rows(old.ring), envs)
    size = max(1, _PIECE // max(1, pytree.nbytes(old.storage.spec(state.storage)) * envs))
    for start in range(0, int(counts.max()), size):
        row = np.arange(start, start + size)
        slots = np.minimum(row, old.ring.rows - 1)[:, None] * envs + np.arange(envs)
        slots = slots[:, 0] if new.num_envs is None else slots
        items = old.storage.take(state.storage, slots)
        mask = row[:, None] < counts
        mask = mask if new.writer.in_lanes else mask[:, 0]
        half = dispatch.told(into, half, items, jnp.asarray(mask))
    return half.replace(storage=state.storage)
