"""Uniform draws, among all anchors or the newest."""

import dataclasses
import fractions
from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb._xla import random_bits
from jrb.ring import Ring
from jrb.types import Anchors, Draw, LimitedSampler, OrderedSampler, ShardedSampler, ShardStats
from jrb.types.messages import PartState

_PARTS = 2**16 - 1  # the most parts of a whole that are multiplied in 32 bits


class EvenSampler(ShardedSampler):
    """A sampler that draws the anchors of `among` with equal probability; all weights are 1."""

    replacement: bool = True

    def among(self, anchors: Anchors) -> Anchors:
        """Returns the anchors to draw from, by default all."""
        return anchors

    def draw(
        self,
        ring: Ring,
        state: PartState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[Any, Draw]:
        """Draws random ranks, or the first B of a random permutation of all ranks."""
        anchors = self.among(anchors)
        if self.replacement:
            mask = jnp.broadcast_to(anchors.count > 0, (batch_size,))
            ranks = random_bits.below(anchors.count, *random_bits.words(key, batch_size))
        else:
            # The permutation is computed for B ranks alone, so this costs O(B) too.
            offset = jnp.arange(batch_size, dtype=jnp.int32)
            mask = offset < anchors.count
            offset = jnp.where(mask, offset, 0)
            ranks = random_bits.permute(random_bits.seed(key), anchors.count, offset)
        return state, anchors.uniform_draw(ranks, mask, key)

    def stats(self, ring: Ring, state: PartState, anchors: Anchors) -> ShardStats:
        """Returns statistics in which each anchor of `among` has mass 1."""
        return ShardStats.uniform(self.among(anchors))

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns 0, as all weights are 1."""
        return jnp.zeros((), jnp.float32)


@pytree.component
class Uniform(EvenSampler, LimitedSampler):
    """Draws every anchor with the same probability.

    With `max_draws=k`, an item is used up after k draws, as with Reverb's `max_times_sampled`: it
    is not drawn again, and `jrb.BlockWhenFull` may overwrite it. `draw` counts, `sample` only
    looks. If a batch has an item more often than it has draws left, the last entries of it are
    masked; with `replacement=False` this cannot happen. A draw then costs O(B log N).

    Attributes:
        replacement: if True, a batch may have an anchor twice. If False, the end of a batch that is
            larger than the number of anchors is masked.
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).
        max_draws: the number of draws after which an item is used up; None for no limit. It sets
            `count_draws`, and a state can have at most 2^24 slots.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=jrb.Uniform(replacement=False))
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(3)})
        >>> batch = buffer.sample(state, jax.random.key(0))
        >>> sorted(batch.data["x"][batch.mask].tolist()), batch.mask.tolist()
        ([0, 1, 2], [True, True, True, False])

        Each item is used twice, then nothing is left to draw.

        >>> sampler = jrb.Uniform(replacement=False, max_draws=2)
        >>> buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=sampler)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(4)})
        >>> for number in range(2):
        ...     state, batch = buffer.draw(state, jax.random.key(number))
        >>> sorted(batch.data["x"].tolist()), bool(buffer.can_sample(state))
        ([0, 1, 2, 3], False)
    """

    replacement: bool = True
    count_draws: bool = False
    max_draws: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.flag("replacement", self.replacement)


@pytree.component
class Newest(EvenSampler, OrderedSampler, LimitedSampler):
    """Draws uniformly, with replacement, from the newest anchors: a fraction or a number of them.

    Of n anchors these are the last ceil(fraction * n), or the last min(count, n). Use it to
    emphasize recent experience, alone or in a `jrb.Mixture` with `jrb.Uniform()`. With
    `max_draws`, the n anchors are those that have draws left, in the order of their rows: as the
    newest are used up, older ones are drawn.

    Attributes:
        fraction: the part of all anchors, above 0 and at most 1; it is rounded to the nearest
            quotient of two integers below 2^16.
        count: the number of newest anchors, at least 1; in place of `fraction`.
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).
        max_draws: the number of draws after which an item is used up, as for `jrb.Uniform`; None
            for no limit.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(100, batch_size=1000, sampler=jrb.Newest(0.1))
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(25)})
        >>> sample = buffer.sample(state, jax.random.key(0))
        >>> sorted(set(sample.data["x"].tolist())), round(float(sample.probabilities[0]), 4)
        ([22, 23, 24], 0.3333)
    """

    fraction: float | None = None
    count: int | None = None
    count_draws: bool = False
    max_draws: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.fraction is None) == (self.count is None):
            raise ValueError(
                f"Newest: expected a fraction or a count, got fraction={self.fraction!r} and "
                f"count={self.count!r}. Name one of them, as jrb.Newest(0.1)."
            )
        if self.count is not None:
            checks.count("count", self.count, 2**31 - 1)
        if self.fraction is not None:
            checks.fraction("fraction", self.fraction)
            if not fractions.Fraction(self.fraction).limit_denominator(_PARTS):
                raise ValueError(
                    f"fraction: expected at least 1 / {_PARTS}, got {self.fraction}. "
                    "Say how many by count=."
                )

    def among(self, anchors: Anchors) -> Anchors:
        """Returns the newest anchors, as `fraction` or `count` says."""
        if self.count is not None:
            count = jnp.minimum(anchors.count, self.count)
        else:
            fraction = fractions.Fraction(self.fraction or 0).limit_denominator(_PARTS)
            # In integers, as float32 cannot count beyond 2^24.
            part, whole = (jnp.uint32(number) for number in fraction.as_integer_ratio())
            # ceil(total * part / whole) in 32 bits: the remainder is below 2^16, as is the part.
            times, remainder = jnp.divmod(anchors.count.astype(jnp.uint32), whole)
            count = (times * part + (remainder * part + whole - 1) // whole).astype(jnp.int32)
        first = anchors.count - count
        # Ranks among the newest anchors, shifted by the number of older ones.
        nth = lambda ranks, key: anchors.nth(ranks + first, key)
        return dataclasses.replace(anchors, count=count, nth=nth)

    def for_shard(self, num_shards: int) -> "Newest":
        """Returns the sampler of a shard: an equal part of the count, or the same fraction."""
        if self.count is None:
            return self
        if self.count % num_shards:
            raise ValueError(
                f"Newest: count: expected a multiple of {num_shards}, the number of shards, got "
                f"{self.count}."
            )
        return dataclasses.replace(self, count=self.count // num_shards)
