"""Draws of several shards that are, together, a draw from one buffer.

Each shard draws its part of the batch from its own anchors. What all shards say of themselves
(`ShardStats`) makes the weights those of the whole. S shards, s of them here, B batch, b = B / S.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import steps
from jrb._core.over_mesh import Here
from jrb.state import Buffer, BufferState
from jrb.types import Draw, ShardedSampler, ShardStats

_LEAST, _MOST = 1e-36, 3e38  # of probabilities that are raised to a power, and of weights
_TINY = float(np.finfo(np.float32).tiny)  # a weight of 0 is for what was not drawn


class Chosen(NamedTuple):
    """What samplers of shards drew, before rows are read.

    Attributes:
        samplers: their states after it, arrays `[s, ...]`.
        draws: arrays `[s, b]`, with weights among all shards.
        every: what all shards said, arrays `[S]`; None of samplers that say nothing.
        sizes: how many items each holds, int32 `[s]`.
    """

    samplers: Any
    draws: Draw
    every: ShardStats | None
    sizes: jax.Array


def choose(
    part: Buffer,
    here: Here,
    states: BufferState,
    keys: jax.Array,
    batch_size: int,
    beta: jax.Array | None,
) -> Chosen:
    """What the shards that lie here draw, b each, as their parts of a batch.

    Args:
        part: the description of one shard.
        here: which they are.
        states: theirs, arrays `[s, ...]`.
        keys: `[s]`, one for each.
        batch_size: b.
        beta: of the importance weights; None for the sampler's.
    """
    one = functools.partial(steps.choose_among, part, batch_size=batch_size, beta=beta)
    samplers, draws, shares, sizes = jax.vmap(one)(states, keys)
    if shares is None:
        return Chosen(samplers, draws, None, sizes)
    every = here.gather(shares)
    sampler: Any = part.sampler  # below ShardedSampler, as there are stats
    draws = weighed(sampler, draws, shares, Whole(every), beta, here.greatest)
    return Chosen(samplers, draws, every, sizes)


@dataclasses.dataclass(frozen=True)
class Whole:
    """What all shards are together.

    Attributes:
        every: what each says, arrays `[S]`.
    """

    every: ShardStats

    @functools.cached_property
    def some(self) -> jax.Array:
        """Whether any anchor has mass, bool `[]`; if not, all are alike."""
        return jnp.max(self.every.mass) > 0

    @functools.cached_property
    def anchors(self) -> jax.Array:
        """How many there are, float32 `[]`."""
        return _sum(self.every.num_anchors.astype(jnp.float32))

    @functools.cached_property
    def inverse(self) -> jax.Array:
        """One divided by the mass of all, float32 `[]`: a quotient may be rounded in two ways."""
        return 1 / jnp.maximum(_sum(self._mass(self.every)), _TINY)

    @functools.cached_property
    def parts(self) -> jax.Array:
        """The part of the whole that each shard has, float32 `[S]`."""
        return self.part_of(self.every)

    def part_of(self, shares: ShardStats) -> jax.Array:
        """The same of some shards."""
        return self._mass(shares) * self.inverse

    def _mass(self, shares: ShardStats) -> jax.Array:
        return jnp.where(self.some, shares.mass, shares.num_drawable.astype(jnp.float32))

    @property
    def least(self) -> jax.Array:
        """The least positive probability of an anchor in each shard, float32 `[S]`."""
        return jnp.where(self.some, self.every.min_mass * self.inverse, 1 / self.anchors)


def weighed(
    sampler: ShardedSampler,
    draws: Draw,
    mine: ShardStats,
    whole: Whole,
    beta: jax.Array | None,
    greatest: Callable[[jax.Array], jax.Array],
) -> Draw:
    """The draws of some shards, as parts of a draw from all.

    With P_i the probability of anchor i among those of all shards, M_s the mass of its shard, M
    that of all and n their anchors, its weight is (n P_i)^-beta S M_s / M, as shards draw equally
    often, whatever their mass. A shard without mass is masked, and the others outweigh that.

    Args:
        sampler: that of each shard.
        draws: arrays `[s, b]`, with probabilities among the anchors of the shard.
        mine: of these shards, arrays `[s]`.
        whole: all shards.
        beta: of the importance weights; None for the sampler's.
        greatest: from numbers of these shards to the greatest of all, `[]`.
    """
    part, power = whole.part_of(mine), sampler.exponent(beta)
    chances, mask = draws.probabilities * part[:, None], draws.mask & (part > 0)[:, None]
    outweigh = lambda part: len(whole.parts) * part
    relative = lambda chance: jnp.maximum(whole.anchors * chance, _LEAST) ** -power
    weights = jnp.minimum(outweigh(part)[:, None] * relative(chances), _MOST)
    if sampler.normalize == "batch":
        weights = weights * (1 / jnp.maximum(greatest(jnp.where(mask, weights, 0.0)), _TINY))
    elif sampler.normalize == "buffer":
        most = outweigh(whole.parts) * relative(whole.least)
        weights = weights * (1 / jnp.max(jnp.where(whole.parts > 0, most, _TINY)))
    return draws.replace(
        probabilities=jnp.where(mask, chances, 0.0),
        weights=jnp.where(mask, jnp.maximum(weights, _TINY), 0.0),
        mask=mask,
    )


def _sum(numbers: jax.Array) -> jax.Array:
    """The sum of `[S]`, added up by pairs: alike in all programs, which `jnp.sum` is not."""
    while numbers.size > 1:
        even = jnp.pad(numbers, (0, numbers.size % 2))
        numbers = even[0::2] + even[1::2]
    return numbers[0]
