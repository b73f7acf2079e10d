"""Draws of several shards that are, together, a draw from one buffer.

Each shard draws its part of the batch from its own anchors. What all shards say of themselves
(`Share`) makes the weights those of the whole. S shards, s of them here, B batch, b = B / S.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jrb._base import random_bits
from jrb._engine import steps
from jrb._engine.over_mesh import Here
from jrb.state import Buffer, BufferState, Sample
from jrb.types import Draw, Sampler, Share

_LEAST, _MOST = 1e-36, 3e38  # of probabilities that are raised to a power, and of weights
_TINY = float(np.finfo(np.float32).tiny)  # a weight of 0 is for what was not drawn


def draw(
    part: Buffer,
    here: Here,
    states: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | None,
    min_size: int | None,
) -> tuple[BufferState, Sample]:
    """A draw from the shards that lie here.

    Args:
        part: the description of one shard.
        here: which they are.
        states: theirs, arrays `[s, ...]`.
        key: the same for all shards.
        batch_size: b.
        beta: of the importance weights; None for the sampler's.
        min_size: what all shards together must hold.

    Returns:
        The states after the draw, and samples `[s, b, ...]`.
    """
    keys = jax.vmap(lambda number: random_bits.fold_in(key, number))(here.numbers)
    choose = functools.partial(steps.choose_among, part, batch_size=batch_size, beta=beta)
    samplers, draws, shares, sizes = jax.vmap(choose)(states, keys)
    if shares is not None:
        every = here.gather(shares)
        heed = lambda sampler, number: part.sampler.heed(sampler, every)
        samplers = jax.vmap(heed)(samplers, here.numbers)  # a state may be without arrays
        draws = weighed(part.sampler, draws, shares, every, beta, here.greatest)
    if min_size is not None:
        enough = here.total(sizes) >= min_size
        samplers, draws = steps.if_enough(enough, states.sampler, samplers, draws)
    finish = functools.partial(steps.finish_draw, part)
    return jax.vmap(finish)(states, samplers, draws, keys)


def weighed(
    sampler: Sampler,
    draws: Draw,
    mine: Share,
    every: Share,
    beta: jax.Array | None,
    greatest: Callable[[jax.Array], jax.Array],
) -> Draw:
    """The draws of some shards, as parts of a draw from all.

    With P_i the probability of anchor i among those of all shards, M_s the mass of its shard, M
    that of all and n their anchors, its weight is (n P_i)^-beta S M_s / M: shards draw equally
    often, whatever their mass. A shard without mass is masked, and the others outweigh that.

    Args:
        sampler: that of each shard.
        draws: arrays `[s, b]`, with probabilities among the anchors of the shard.
        mine: of these shards, arrays `[s]`.
        every: of all shards, arrays `[S]`.
        beta: of the importance weights; None for the sampler's.
        greatest: from numbers of these shards to the greatest of all, `[]`.
    """
    some = jnp.max(every.mass) > 0
    mass = lambda share: jnp.where(some, share.mass, share.alike.astype(jnp.float32))
    inverse = 1 / jnp.maximum(_sum(mass(every)), _LEAST)  # a quotient may be rounded in two ways
    part, parts = mass(mine) * inverse, mass(every) * inverse
    mask = draws.mask & (part > 0)[:, None]
    chances = draws.probabilities * part[:, None]
    weights = len(parts) * jnp.broadcast_to(part[:, None], chances.shape)
    anchors, power = _sum(every.count.astype(jnp.float32)), sampler.exponent(beta)
    relative = lambda chance: jnp.maximum(anchors * chance, _LEAST) ** -power
    weights = jnp.minimum(weights * relative(chances), _MOST)
    if sampler.normalize == "batch":
        weights = weights * (1 / jnp.maximum(greatest(jnp.where(mask, weights, 0.0)), _TINY))
    elif sampler.normalize == "buffer":
        least = jnp.where(some, every.smallest * inverse, 1.0 / anchors)
        most = len(parts) * parts * relative(least)
        weights = weights * (1 / jnp.max(jnp.where(parts > 0, most, _TINY)))
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
