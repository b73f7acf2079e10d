"""Uniform draws among the newest anchors."""

import dataclasses
import fractions
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb._xla import random_bits
from jrb.ring import Ring
from jrb.types import Anchors, Draw, ShardedSampler, ShardStats
from jrb.types.messages import PartState

_PARTS = 2**16 - 1  # a whole of so many parts can be multiplied in 32 bits


@pytree.component
class Newest(ShardedSampler):
    """Draws uniformly, with replacement, among the newest anchors: a share, or a number of them.

    Of n anchors these are the last ceil(fraction * n), or the last min(count, n). For emphasis on
    recent experience; in a `jrb.Mix` with `jrb.Uniform()`, or on its own.

    Attributes:
        fraction: above 0 and at most 1, taken for the nearest quotient of integers below 65536.
        count: how many, at least 1; instead of a fraction.
        count_draws: whether to count how often each item is drawn (see `jrb.types.Sampler`).

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
    in_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.flag("count_draws", self.count_draws)
        if (self.fraction is None) == (self.count is None):
            raise ValueError(
                f"Newest: expected a fraction or a count, got fraction={self.fraction!r} and "
                f"count={self.count!r}. Name one of them, as jrb.Newest(0.1)."
            )
        if self.count is not None:
            checks.count("count", self.count, 2**31 - 1)
        if self.fraction is not None:
            checks.fraction("fraction", self.fraction)
            if not self._fraction:
                raise ValueError(
                    f"fraction: expected at least 1 / {_PARTS}, got {self.fraction}. "
                    "Say how many by count=."
                )

    @property
    def _fraction(self) -> fractions.Fraction:
        return fractions.Fraction(self.fraction or 0).limit_denominator(_PARTS)

    def draw(
        self,
        ring: Ring,
        state: PartState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[Any, Draw]:
        """Draws random ranks among the newest anchors."""
        last = self._last(anchors)
        ranks = random_bits.below(last.count, *random_bits.words(key, batch_size))
        mask = jnp.broadcast_to(last.count > 0, (batch_size,))
        return state, last.uniform_draw(ranks, mask, key)

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

    def stats(self, ring: Ring, state: PartState, anchors: Anchors) -> ShardStats:
        """Returns the number of the newest anchors, as mass too."""
        return ShardStats.uniform(self._last(anchors))

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns 0, as all weights are 1."""
        return jnp.zeros((), jnp.float32)

    def _last(self, anchors: Anchors) -> Anchors:
        """Returns the newest of the anchors, in their order."""
        count = self._count_of(anchors.count)
        first = anchors.count - count
        nth = lambda ranks, key: anchors.nth(ranks + first, key)
        return dataclasses.replace(anchors, count=count, nth=nth)

    def _count_of(self, total: jax.Array) -> jax.Array:
        """Returns how many of `total` anchors count as newest, int32 `[]`."""
        if self.count is not None:
            return jnp.minimum(total, self.count)
        part, whole = (jnp.uint32(number) for number in self._fraction.as_integer_ratio())
        # ceil(total * part / whole) in 32 bits: the remainder is below 2^16, as is the part.
        times, remainder = jnp.divmod(total.astype(jnp.uint32), whole)
        return (times * part + (remainder * part + whole - 1) // whole).astype(jnp.int32)
