"""How a server writes what one stream has sent: into the lanes of that stream.

L streams, W environments in each, E = L W, T time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core import eager, steps, transforming
from jrb._util import pytree
from jrb.buffer import ReplayBuffer
from jrb.loops import jitted
from jrb.state import BufferState
from jrb.types import Context, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState

Put = Callable[..., BufferState]
"""From a state, a lane, and items, mask and priorities of T timesteps to a state."""


@pytree.component
class OneStream(Storage):
    """Writes the lanes of one stream, where nothing of the others is written.

    All else is done by the storage behind it. Items of all lanes, masked, would be L times as much.
    """

    inner: Any
    width: int

    def init(self, context: Context, spec: Item) -> Any:
        """As the one behind it."""
        return self.inner.init(context, spec)

    def spec(self, state: PartState) -> Item:
        """As the one behind it."""
        return self.inner.spec(state)

    def write(
        self, context: Context, state: PartState, write: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Puts the items, the same for all streams, of the one that has slots."""
        used = jnp.any(write.slots < context.ring.capacity, axis=0)
        first = jnp.argmax(used).astype(jnp.int32) // self.width * self.width
        slots = lax.dynamic_slice_in_dim(write.slots, first, self.width, axis=1)
        own = dataclasses.replace(write, slots=slots, starts=slots.reshape(-1))
        items = jax.tree.map(lambda leaf: leaf[:, : self.width], items)
        state, _ = self.inner.write(context, state, own, items)
        return state, write

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """As the one behind it."""
        return self.inner.read(context, state, where)


def writer(buffer: ReplayBuffer, lanes: int) -> Put:
    """What writes a stream's timesteps, `[T, ...]`, or `[T, W, ...]` where it is a vector."""
    if lanes == 1:
        verbs: Any = jitted(buffer)
        return lambda state, lane, *sent: verbs.extend(state, *sent)
    width, on_host = buffer.ring.envs // lanes, eager.on_host(buffer)
    storage: Any = buffer.storage
    narrow = dataclasses.replace(
        buffer, storage=OneStream(storage.device_part if on_host else storage, width)
    )
    if on_host:
        return functools.partial(_put_on_host, buffer, narrow)
    return lambda state, lane, *sent: _written(narrow, state, np.int32(lane), *sent)


def _put_on_host(
    buffer: ReplayBuffer,
    narrow: ReplayBuffer,
    state: BufferState,
    lane: int,
    items: Item,
    mask: Any,
    priorities: Any,
) -> BufferState:
    """Writes to rows on the host, between jitted parts."""
    storage: Any = buffer.storage
    half: Any = state.replace(storage=storage.device_state(state.storage))
    after = _planned(narrow, half, np.int32(lane), items, mask, priorities)
    if transforming.inverses(buffer.transforms):
        items = _inward(narrow, items)
    with storage.writing(state.storage):
        return after.replace(storage=storage.put(state.storage, after.storage, items))


def _write(
    buffer: ReplayBuffer,
    state: BufferState,
    lane: jax.Array,
    items: Item,
    mask: jax.Array | None,
    priorities: jax.Array | None,
) -> Any:
    """Writes items `[T, W, ...]` of a stream; all others are masked."""
    storage: Any = buffer.storage
    envs, width = buffer.ring.envs, storage.width
    if transforming.inverses(buffer.transforms):
        items = _inward(buffer, items)
    length = jax.tree.leaves(items)[0].shape[0]

    def everywhere(leaf: Any) -> jax.Array:
        """`[T, E, ...]`, which takes no memory where only one stream is looked at."""
        rest = leaf.shape[2:]
        whole = jnp.broadcast_to(leaf[:, None], (length, envs // width, width, *rest))
        return whole.reshape(length, envs, *rest)

    mine = jnp.arange(envs, dtype=jnp.int32) // width == lane
    written = jnp.broadcast_to(mine if mask is None else mine & everywhere(mask), (length, envs))
    given = None if priorities is None else everywhere(priorities)
    return steps.write(buffer, state, jax.tree.map(everywhere, items), written, None, given)


_written = jax.jit(_write, donate_argnums=1)
_planned = jax.jit(_write)


@jax.jit
def _inward(buffer: ReplayBuffer, items: Item) -> Any:
    """Items `[T, W, ...]` as they are stored."""
    return jax.vmap(jax.vmap(functools.partial(transforming.inward, buffer.transforms)))(items)


def pieces(length: int, known: set[int]) -> list[int]:
    """The lengths of the parts in which T timesteps are written.

    A write is compiled for each length. So only a few lengths are taken as they come, which are
    added to `known`; others are cut into powers of two.
    """
    if length in known or len(known) < _FEW:
        known.add(length)
        return [length]
    return [1 << bit for bit in reversed(range(length.bit_length())) if length >> bit & 1]


_FEW = 4
