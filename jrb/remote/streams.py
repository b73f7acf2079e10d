"""Writes a stream's timesteps to its lane, which is the stream's part of a server's ring.

L lanes, W environments in each, E = L W, T time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core import steps
from jrb._core.host_calls import write_rows
from jrb._core.validate import for_device
from jrb._xla.compiling import by_description
from jrb.buffer import ReplayBuffer
from jrb.loops import jitted
from jrb.state import BufferState
from jrb.types import Context, Item, SlotsForLeaf, Storage, WritePlan, component

_MAX_LENGTHS = 4  # the number of lengths for which a write is compiled as it is


@component
class OneStream(Storage):
    """A storage that writes only the environments of one lane, and leaves the rest to `inner`.

    Writing the items of all lanes, with all but one masked, would take L times as long.
    """

    inner: Any
    width: int

    def init(self, context: Context, spec: Item) -> Any:
        """Returns the inner storage's empty state."""
        return self.inner.init(context, spec)

    def spec(self, state: Any) -> Item:
        """Returns the inner storage's spec of an item."""
        return self.inner.spec(state)

    def write(
        self, context: Context, state: Any, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes the items of the only lane with slots; `items` repeats them for all lanes."""
        # Find the first environment of the lane that has slots.
        has_slots = jnp.any(plan.slots < context.ring.capacity, axis=0)
        first = jnp.argmax(has_slots).astype(jnp.int32) // self.width * self.width
        # Write with the slots of this lane only.
        slots = lax.dynamic_slice_in_dim(plan.slots, first, self.width, axis=1)
        lane_plan = dataclasses.replace(plan, slots=slots, starts=slots.reshape(-1))
        items = jax.tree.map(lambda leaf: leaf[:, : self.width], items)
        state, _ = self.inner.write(context, state, lane_plan, items)
        return state, plan

    def read(self, context: Context, state: Any, where: SlotsForLeaf) -> Item:
        """Returns the items that the inner storage reads."""
        return self.inner.read(context, state, where)


def make_writer(buffer: ReplayBuffer, lanes: int) -> Callable[..., BufferState]:
    """Returns a function that writes a stream's timesteps and returns the new state.

    Its arguments are a state, the lane, items `[T, W, ...]`, and a mask and priorities `[T, W]` or
    None. If there is only one lane, the last three are those of `ReplayBuffer.extend`.
    """
    # A single lane is the whole ring.
    if lanes == 1:
        methods: Any = jitted(buffer)
        return lambda state, lane, *items: methods.extend(state, *items)
    # On the device, one compiled function plans and writes.
    storage: Any = buffer.storage
    envs = buffer.ring.envs
    lane_buffer = dataclasses.replace(buffer, storage=OneStream(storage, envs // lanes))
    if not storage.is_on_host:
        return lambda state, lane, *items: _write(lane_buffer, state, np.int32(lane), *items)

    def write_on_host(state: BufferState, lane: int, items: Item, *options: Any) -> BufferState:
        # The jitted function plans the write, and the host storage executes it.
        half = for_device(buffer, state)
        after = _plan(lane_buffer, half, np.int32(lane), items, *options)
        if any(hasattr(transform, "inverse") for transform in buffer.transforms):
            items = _to_stored(lane_buffer, items)
        put = state.storage.rows.put_items
        return write_rows(state, put, after.storage.planned, items, lambda: after)

    return write_on_host


def _write_lane(
    buffer: ReplayBuffer, state: BufferState, lane: Any, items: Item, mask: Any, priorities: Any
) -> Any:
    """Writes items `[T, W, ...]` of one lane; all other lanes are masked."""
    storage: Any = buffer.storage
    envs, width = buffer.ring.envs, storage.width
    items = _to_stored(buffer, items)
    length = jax.tree.leaves(items)[0].shape[0]

    def repeat(leaf: Any) -> jax.Array:
        """Repeats a leaf for all lanes, `[T, E, ...]`."""
        # XLA does not store the repetitions, as the storage reads one of them.
        shape = (length, envs // width, width, *leaf.shape[2:])
        return jnp.broadcast_to(leaf[:, None], shape).reshape(length, envs, *leaf.shape[2:])

    # Mask the other lanes, and write.
    in_lane = jnp.arange(envs, dtype=jnp.int32) // width == lane
    written = in_lane if mask is None else in_lane & repeat(mask)
    written = jnp.broadcast_to(written, (length, envs))
    priorities = None if priorities is None else repeat(priorities)
    return steps.write(buffer, state, jax.tree.map(repeat, items), written, None, priorities)


# `_write` donates the state; `_plan` does not, as the storage on the host needs the old one.
_write: Callable[..., BufferState] = by_description(donated=("state",))(_write_lane)
_plan: Callable[..., BufferState] = by_description()(_write_lane)


@by_description()
def _to_stored(buffer: ReplayBuffer, items: Item) -> Any:
    """Returns items `[T, W, ...]` in the stored form, after the inverses of all transforms."""
    for transform in reversed(buffer.transforms):
        if hasattr(transform, "inverse"):
            items = jax.vmap(jax.vmap(transform.inverse))(items)
    return items


def pieces(length: int, lengths: set[int]) -> list[int]:
    """Returns the lengths of the pieces in which `length` timesteps are written.

    A write is compiled for each length. The first few lengths are used as they are and added to
    `lengths`; others are divided into powers of two.
    """
    if length in lengths or len(lengths) < _MAX_LENGTHS:
        lengths.add(length)
        return [length]
    return [1 << bit for bit in reversed(range(length.bit_length())) if length >> bit & 1]
