"""One batch from several servers, in proportion to their masses. S shards, B batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrb.authoring import context_of
from jrb.buffer import ReplayBuffer
from jrb.state import BufferState, Sample
from jrb.types import ShardedSampler


class ShardFacts(NamedTuple):
    """What a server tells of its shard.

    Attributes:
        mass: of all anchors, (p + eps)^alpha each; their number where there are no priorities.
        least: the least mass of an anchor; infinite if that is not known.
        anchors: the number of anchors.
        size: the number of items.
    """

    mass: float
    least: float
    anchors: int
    size: int


def facts(buffer: ReplayBuffer, state: BufferState) -> ShardFacts:
    """Returns the facts of a state."""
    mass, least, anchors, size = jax.device_get(_facts(buffer, state.replace(storage=None)))
    return ShardFacts(float(mass), float(least), int(anchors), int(size))


@jax.jit
def _facts(buffer: ReplayBuffer, state: BufferState) -> tuple[Any, ...]:
    context, sampler = context_of(buffer, state.writer), buffer.sampler
    anchors = buffer.unit.anchors(context, state.unit)
    if not isinstance(sampler, ShardedSampler):  # it consumes, and there is one shard
        return anchors.count, jnp.float32(jnp.inf), anchors.count, context.held.size
    stats = sampler.stats(buffer.ring, state.sampler, anchors)
    return stats.mass, stats.min_mass, stats.num_anchors, context.held.size


def masses(each: list[ShardFacts]) -> np.ndarray:
    """Returns how likely each shard is, float64 `[S]`: by anchors if all masses are 0."""
    every = np.array([one.mass for one in each], np.float64)
    return every if every.sum() > 0 else np.array([one.anchors for one in each], np.float64)


def ready(each: list[ShardFacts], min_size: int | None) -> bool:
    """Returns whether there is enough, in all shards together, for a draw."""
    enough = min_size is None or sum(one.size for one in each) >= min_size
    return enough and masses(each).sum() > 0


def shares(each: list[ShardFacts], batch_size: int, seed: list[int]) -> list[int]:
    """Returns how many of a batch each shard gives: in the mean, exactly its part of the mass.

    A systematic draw: the running sums of B m_s / M, moved by one random number, are rounded down.
    """
    every = masses(each)
    reached = np.cumsum(every) / every.sum() * batch_size
    reached[-1] = batch_size
    ends = np.floor(reached + np.random.default_rng(seed).random()).astype(int)
    ends[-1] = batch_size
    return np.diff(ends, prepend=0).tolist()


def combine(
    buffer: ReplayBuffer, parts: list[Sample | None], each: list[ShardFacts], beta: float | None
) -> Sample:
    """Returns the batch of all parts, with probabilities and weights over all shards.

    Weights are (n P(i))^-beta over the n anchors of all shards, divided as the sampler says.
    """
    every = masses(each)
    chances = every / every.sum()
    scaled = [
        part.replace(probabilities=part.probabilities * np.float32(chances[shard]))
        for shard, part in enumerate(parts)
        if part is not None
    ]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *scaled)
    sampler = buffer.sampler
    if not isinstance(sampler, ShardedSampler):  # each shard for itself
        return whole
    drawn = whole.mask.reshape(len(whole.mask), -1).any(axis=1)
    likely = np.where(drawn, whole.probabilities, 1).astype(np.float64)
    divisor = 1 / sum(one.anchors for one in each)
    if sampler.normalize == "batch":
        divisor = likely[drawn].min(initial=1)
    elif sampler.normalize == "buffer":
        divisor = min(one.least for one in each) / every.sum()
        divisor = divisor if 0 < divisor < 1 else likely.min()
    weights = np.where(drawn, (likely / divisor) ** -float(sampler.exponent(beta)), 0)
    return whole.replace(weights=weights.astype(np.float32))
