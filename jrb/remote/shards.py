"""One batch from several servers, in proportion to the masses that they hold. S shards, B batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core.steps import context_of, shard_stats
from jrb.buffer import ReplayBuffer
from jrb.state import BufferState, Sample
from jrb.types import ShardedSampler


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a shard holds.

    Attributes:
        mass: of all anchors, (p + eps)^alpha each; their number where there are no priorities.
        least: the least mass of an anchor; infinite if that is not known.
        anchors: how many there are.
        size: how many items.
    """

    mass: float
    least: float
    anchors: int
    size: int


def facts(buffer: ReplayBuffer, state: BufferState) -> Facts:
    """What a state holds."""
    mass, least, anchors, size = jax.device_get(_facts(buffer, state.replace(storage=None)))
    return Facts(float(mass), float(least), int(anchors), int(size))


@jax.jit
def _facts(buffer: ReplayBuffer, state: BufferState) -> tuple[Any, ...]:
    context = context_of(buffer, state.writer)
    anchors = buffer.unit.anchors(context, state.unit)
    stats = shard_stats(buffer, state)
    if stats is None:
        return anchors.count, jnp.float32(jnp.inf), anchors.count, context.held.size
    return stats.mass, stats.min_mass, stats.num_anchors, context.held.size


def masses(each: list[Facts]) -> np.ndarray:
    """The masses, float64 `[S]`, that say how likely each shard is; numbers if all masses are 0."""
    found = np.array([one.mass for one in each], np.float64)
    return found if found.sum() > 0 else np.array([one.anchors for one in each], np.float64)


def ready(each: list[Facts], min_size: int | None) -> bool:
    """Whether there is enough, in all shards together, for a draw."""
    enough = min_size is None or sum(one.size for one in each) >= min_size
    return enough and masses(each).sum() > 0


def shares(each: list[Facts], batch_size: int, seed: list[int]) -> list[int]:
    """How many of a batch each shard gives: in the mean, exactly its part of the mass.

    A systematic draw: the running sums of B m_s / M, moved by one random number, are rounded down.
    """
    found = masses(each)
    reached = np.cumsum(found) / found.sum() * batch_size
    reached[-1] = batch_size
    ends = np.floor(reached + np.random.default_rng(seed).random()).astype(int)
    ends[-1] = batch_size
    return np.diff(ends, prepend=0).tolist()


def padded(count: int, batch_size: int) -> int:
    """How many are drawn where `count` are wanted: a multiple of B / 8, so that little compiles."""
    step = max(1, batch_size // 8)
    return -(-count // step) * step


def chosen(sample: Sample, count: int, seed: list[int]) -> Sample:
    """Some of a sample, chosen at random; all if it has no more."""
    drawn = len(sample.indices)
    if count == drawn:
        return sample
    some = np.random.default_rng(seed).permutation(drawn)[:count]
    return jax.tree.map(lambda leaf: leaf[some], sample)


def joined(
    buffer: ReplayBuffer, parts: list[Sample | None], each: list[Facts], beta: float | None
) -> Sample:
    """The batch of all parts, with probabilities and weights over all shards; None gave nothing."""
    found = masses(each)
    likely = found / found.sum()
    there = [
        part.replace(probabilities=part.probabilities * np.float32(likely[shard]))
        for shard, part in enumerate(parts)
        if part is not None
    ]
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *there)
    sampler = buffer.sampler
    if not isinstance(sampler, ShardedSampler):  # each shard for itself
        return whole
    power = float(sampler.exponent(beta))
    return whole.replace(weights=_weights(sampler, whole, each, power))


def _weights(sampler: ShardedSampler, whole: Sample, each: list[Facts], beta: float) -> np.ndarray:
    """(n P(i))^-beta over the n anchors of all shards, divided as the sampler says, `[B]`."""
    drawn = whole.mask.reshape(len(whole.mask), -1).any(axis=1)
    likely = np.where(drawn, whole.probabilities, 1).astype(np.float64)
    divisor = 1 / sum(one.anchors for one in each)
    if sampler.normalize == "batch":
        divisor = likely[drawn].min(initial=1)
    elif sampler.normalize == "buffer":
        divisor = min(one.least for one in each) / masses(each).sum()
        divisor = divisor if 0 < divisor < 1 else likely.min()
    return np.where(drawn, (likely / divisor) ** -beta, 0).astype(np.float32)
