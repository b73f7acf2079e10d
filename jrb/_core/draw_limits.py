"""Limits of draws: which anchors have draws left (see `jrb.types.LimitedSampler`).

`DrawCounts.drawable` is a sum-tree over 1 for anchors with draws left, and 0 for other slots: its
sums find the anchors to draw, and the oldest of them, in O(log N). N capacity, B batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrb import sum_tree
from jrb._xla import dependencies, gather
from jrb.state import Buffer
from jrb.types import Anchors, AnchorUpdate, PrioritizedSampler
from jrb.types.messages import PartState


def drawable_anchors(
    state: PartState, anchors: Anchors, oldest: jax.Array | None = None
) -> Anchors:
    """Returns the anchors that have draws left, in the order of their slots.

    The order begins at the slot `oldest`, int32 `[]`, or at slot 0 if it is None. If all
    environments share a clock, the order from the oldest slot held on is that of time.
    """
    tree, count = state.drawable, sum_tree.root(state.drawable).astype(jnp.int32)

    def nth(ranks: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        if oldest is not None:
            # In integers, as the sum may exceed 2^24. Slot 0 follows the last slot.
            ranks = ranks + sum_tree.sum_before(tree, oldest).astype(jnp.int32)
            ranks = jnp.where(ranks < count, ranks, ranks - count)
        slots = sum_tree.find(tree, ranks.astype(jnp.float32))
        return slots, jnp.ones(ranks.shape, jnp.float32)

    return dataclasses.replace(anchors, count=count, nth=nth, all_held=False)


def update_anchors(buffer: Buffer, state: PartState, change: AnchorUpdate) -> Any:
    """Returns the sampler's state after anchors departed and others entered."""
    ring = buffer.ring
    # A run of unknown length is removed separately.
    clear_all = lambda tree, departs: sum_tree.set_all(
        tree, jnp.where(departs, 0.0, sum_tree.leaf_values(tree))
    )
    tree, change = change.clear_expired(ring, state.drawable, _clear, clear_all)
    # Departures come first, as a slot may do both in one call.
    departed, entered = change.departed_slots(ring), change.entered
    slots = jnp.concatenate([departed, entered])
    if slots.size:
        leaves = _zeros(slots).at[departed.size :].add(1.0)
        tree = sum_tree.set_leaves(tree, slots, leaves, (departed.size, entered.size))
    state = state.replace(drawable=tree)
    if not (entered.size and buffer.unit.has_delayed_anchors):
        return state
    # An anchor that enters later than its row may have been one before an edit, and used up.
    draws = gather.read_at(state.draws, entered)
    # Writes nothing, but makes later writes to the counts wait for this read.
    nowhere = (ring.capacity + dependencies.zero_depending_on(draws))[None]
    counts = gather.put(state.draws, nowhere, jnp.zeros(1, jnp.int32))
    most: Any = buffer.sampler.max_draws
    return exclude(buffer, state.replace(draws=counts), entered, draws >= most)


def exclude(buffer: Buffer, state: PartState, slots: jax.Array, ok: jax.Array) -> Any:
    """Returns the sampler's state after anchors, `slots`, int32 `[B]`, were used up, or dropped.

    Entries where `ok`, bool `[B]`, is False are ignored.
    """
    ring, sampler = buffer.ring, buffer.sampler
    if sampler.max_draws is not None:
        tree = _clear(state.drawable, jnp.where(ok, slots, ring.capacity))
        state = state.replace(drawable=tree)
    is_prioritized = isinstance(sampler, PrioritizedSampler)
    return sampler.drop(ring, state, slots, ok) if is_prioritized else state


def rebuild(buffer: Buffer, state: PartState, is_anchor: jax.Array) -> Any:
    """Returns the sampler's state for the anchors `is_anchor`, bool `[N]`, by their counts."""
    slots = jnp.arange(buffer.ring.capacity, dtype=jnp.int32)
    # Anchors that were dropped are not drawn either.
    if isinstance(buffer.sampler, PrioritizedSampler):
        is_anchor = is_anchor & (buffer.sampler.priorities(state) >= 0)
    tree = sum_tree.set_all(state.drawable, is_anchor.astype(jnp.float32))
    is_used_up = is_anchor & (state.draws >= buffer.sampler.max_draws)
    return exclude(buffer, state.replace(drawable=tree), slots, is_used_up)


def _clear(tree: sum_tree.Tree, slots: jax.Array) -> sum_tree.Tree:
    return sum_tree.set_leaves(tree, slots, _zeros(slots))


def _zeros(slots: jax.Array) -> jax.Array:
    # Made from the slots, as writes of a constant would wait for nothing.
    return jnp.minimum(slots, 0).astype(jnp.float32)
