"""Draws of several shards that are, together, a draw from one buffer.

Each shard draws its part of the batch from its own anchors. The statistics of all shards
(`ShardStats`, one `all_gather`) make probabilities and weights those of the whole. S shards, s of
them on this device, B batch, b = B / S.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import steps
from jrb.sharding.mesh import LocalShards
from jrb.state import Buffer, BufferState
from jrb.types import Draw, ShardedSampler, ShardStats

_LEAST, _MOST = 1e-36, 3e38  # of probabilities that are raised to a power, and of weights
_TINY = float(np.finfo(np.float32).tiny)  # a weight of 0 is for what was not drawn


def choose(
    part: Buffer,
    here: LocalShards,
    states: BufferState,
    keys: jax.Array,
    batch_size: int,
    beta: jax.Array | None,
    min_size: int | None,
) -> tuple[Any, Draw]:
    """Draws b anchors in each shard on this device, as parts of a batch.

    Args:
        part: the description of one shard.
        here: which they are.
        states: theirs, arrays `[s, ...]`.
        keys: `[s]`, one for each.
        batch_size: b.
        beta: of the importance weights; None for the sampler's.
        min_size: the items that all shards together must hold.

    Returns:
        The samplers' states, arrays `[s, ...]`; and the draws, arrays `[s, b]`, weighted among all
        shards.
    """
    choose = functools.partial(steps.choose, part, batch_size=batch_size, beta=beta)
    samplers, draws = jax.vmap(choose)(states, keys)

    def stats_of(state: BufferState) -> tuple[ShardStats | None, jax.Array]:
        size = steps.context_of(part, state.writer).held.size
        return steps.shard_stats(part, state), size

    own, sizes = jax.vmap(stats_of)(states)
    if own is not None:  # else the sampler has no weights, as each shard uses up its own anchors
        every = here.all_gather(own)
        sampler: Any = part.sampler  # a ShardedSampler, as it has stats
        draws = weighted(sampler, draws, own, every, beta, here)
        sync = lambda state, _: sampler.sync_shards(state, every)
        samplers = jax.vmap(sync)(samplers, here.numbers)  # a sampler's state may have no arrays
    if min_size is not None:
        enough = here.total(sizes) >= min_size
        samplers, draws = steps.if_enough(enough, states.sampler, samplers, draws)
    return samplers, draws


def weighted(
    sampler: ShardedSampler,
    draws: Draw,
    own: ShardStats,
    every: ShardStats,
    beta: jax.Array | None,
    here: LocalShards,
) -> Draw:
    """Returns the draws of some shards as parts of a draw from all.

    With P_i the probability of anchor i among those of all shards, M_s the mass of its shard, M
    that of all and n their anchors, its weight is (n P_i)^-beta S M_s / M, as shards draw equally
    often, whatever their mass. A shard without mass is masked, and the others outweigh that.

    Args:
        sampler: that of each shard.
        draws: arrays `[s, b]`, with probabilities among the anchors of the shard.
        own: stats of these shards, arrays `[s]`.
        every: stats of all, arrays `[S]`.
        beta: of the importance weights; None for the sampler's.
        here: how to communicate.
    """
    power, num_shards = sampler.exponent(beta), len(every.mass)
    # While no anchor has mass, all that may be drawn are alike.
    has_mass = jnp.max(every.mass) > 0
    mass_of = lambda it: jnp.where(has_mass, it.mass, it.num_drawable.astype(jnp.float32))
    anchors = _sum(every.num_anchors.astype(jnp.float32))
    # Multiplied by the inverse, as XLA may round one quotient in two ways in two programs.
    inverse = 1 / jnp.maximum(_sum(mass_of(every)), _TINY)
    own_part, parts = mass_of(own) * inverse, mass_of(every) * inverse  # M_s / M

    relative = lambda probability: jnp.maximum(anchors * probability, _LEAST) ** -power
    probabilities = draws.probabilities * own_part[:, None]
    mask = draws.mask & (own_part > 0)[:, None]
    weights = jnp.minimum(num_shards * own_part[:, None] * relative(probabilities), _MOST)
    if sampler.normalize == "batch":
        weights = weights * (1 / jnp.maximum(here.max(jnp.where(mask, weights, 0.0)), _TINY))
    elif sampler.normalize == "buffer":
        # By the weight of the least likely anchor of any shard.
        least = jnp.where(has_mass, every.min_mass * inverse, 1 / anchors)
        greatest = num_shards * parts * relative(least)
        weights = weights * (1 / jnp.max(jnp.where(parts > 0, greatest, _TINY)))
    return draws.replace(
        probabilities=jnp.where(mask, probabilities, 0.0),
        weights=jnp.where(mask, jnp.maximum(weights, _TINY), 0.0),
        mask=mask,
    )


def _sum(numbers: jax.Array) -> jax.Array:
    """Returns the sum of `[S]`, added by pairs: alike in all programs, which `jnp.sum` is not."""
    while numbers.size > 1:
        even = jnp.pad(numbers, (0, numbers.size % 2))
        numbers = even[0::2] + even[1::2]
    return numbers[0]
