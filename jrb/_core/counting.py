"""Counts of how often each item was drawn, for samplers with `count_draws=True`.

N capacity, B batch. The counts are in the sampler's state (see `jrb.types.DrawCounts`), which
samplers hand on as it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._core import rows
from jrb._xla import dependencies, gather, scatter
from jrb.ring import Ring
from jrb.state import Sample
from jrb.types import Draw, DrawCounts, Sampler, WritePlan
from jrb.types.messages import PartState

_MOST = 2**31 - 1


def init(sampler: Sampler, ring: Ring, state: PartState) -> Any:
    """Returns the sampler's state with counts of 0, if draws are counted."""
    if not sampler.count_draws:
        return state
    if not isinstance(state, DrawCounts):
        raise TypeError(
            f"{type(sampler).__name__}: count_draws: expected a state below "
            f"jrb.types.DrawCounts, got {type(state).__name__}. Nothing could be counted."
        )
    return state.replace(draws=jnp.zeros(ring.capacity, jnp.int32))


def written(sampler: PartState, write: WritePlan) -> Any:
    """The sampler's state in which new items were drawn 0 times."""
    if not isinstance(sampler, DrawCounts) or sampler.draws is None:
        return sampler
    none = jnp.zeros(write.slots.shape, jnp.int32)
    return sampler.replace(draws=rows.put(sampler.draws, write, none))


def drawn(sampler: PartState, draw: Draw) -> tuple[Any, Draw]:
    """The sampler's state that counts a draw, and the draw that tells what was counted before."""
    if not isinstance(sampler, DrawCounts) or sampler.draws is None:
        return sampler, draw
    draws, slots = sampler.draws, jnp.where(draw.mask, draw.slots, 0)
    before = jnp.where(draw.mask, gather.read(draws, slots), 0)
    counted = _counted(draws, draw.slots, draw.mask, before)
    return sampler.replace(draws=counted), draw.replace(draws=before)


def drawn_of(before: PartState, after: PartState, sample: Sample, mask: jax.Array) -> Any:
    """The state after a draw of which only some came into a sample.

    Args:
        before: the sampler's state before the draw.
        after: the one after it.
        sample: what came of it, and of others.
        mask: bool `[B]`, which of that is from this sampler.
    """
    if not isinstance(before, DrawCounts) or before.draws is None:
        return after
    draws = _counted(before.draws, sample.indices, mask, sample.info["draws"])
    return after.replace(draws=draws)


def _counted(draws: jax.Array, slots: jax.Array, mask: jax.Array, before: jax.Array) -> jax.Array:
    """Counts slots, int32 `[B]`, where `mask`, drawn so often `before`; near 2^31 it stops."""
    counts = mask & (before < _MOST - slots.size)
    at = jnp.where(counts, slots, draws.size) + dependencies.zero_depending_on(before)
    one = jnp.ones(slots.shape, jnp.int32)
    return scatter.put(draws, at, one, lax.scatter_add)


def adopted(new: PartState, old: list[PartState], slots: jax.Array, places: jax.Array) -> Any:
    """The new sampler's state, with what others counted; from `slots`, of all, to `places`."""
    if not all(isinstance(state, DrawCounts) and state.draws is not None for state in (new, *old)):
        return new
    draws = jnp.concatenate([jnp.asarray(state.draws) for state in old])
    return new.replace(draws=new.draws.at[places].set(draws[slots]))
