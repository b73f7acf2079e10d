"""The newest anchors alone, all alike."""

import dataclasses
import fractions
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb._xla import random_bits
from jrb.ring import Ring
from jrb.types import Anchors, Draw, Sampler, ShardStats
from jrb.types.messages import PartState

_PARTS = 2**16 - 1  # a whole of so many parts can be multiplied in 32 bits


@pytree.component
class Newest(Sampler):
    """Draws uniformly, with replacement, among the newest anchors: a share, or a number of them.

    Of n anchors those are the last ceil(fraction * n), or the last min(count, n). For emphasis on
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
            if not self._share:
                raise ValueError(
                    f"fraction: expected at least 1 / {_PARTS}, got {self.fraction}. "
                    "Say how many by count=."
                )

    @property
    def _share(self) -> fractions.Fraction:
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
        """A random integer below the number of the newest, for each of the batch."""
        last = self._last(anchors)
        chosen = random_bits.below(last.count, *random_bits.words(key, batch_size))
        mask = jnp.broadcast_to(last.count > 0, (batch_size,))
        return state, last.drawn(chosen, mask, key)

    def of_shard(self, shards: int) -> "Newest":
        """Its part of the count; a fraction is the same of each."""
        if self.count is None:
            return self
        if self.count % shards:
            raise ValueError(
                f"Newest: count: expected a multiple of {shards}, the number of shards, got "
                f"{self.count}."
            )
        return dataclasses.replace(self, count=self.count // shards)

    def share(self, ring: Ring, state: PartState, anchors: Anchors) -> ShardStats:
        """Of the newest anchors alone."""
        return ShardStats.uniform(self._last(anchors))

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """All weights are 1."""
        return jnp.zeros((), jnp.float32)

    def _last(self, anchors: Anchors) -> Anchors:
        """The newest of the anchors, in their order."""
        count = self._some(anchors.count)
        first = anchors.count - count
        nth = lambda places, key: anchors.nth(places + first, key)
        return dataclasses.replace(anchors, count=count, nth=nth)

    def _some(self, total: jax.Array) -> jax.Array:
        """How many of `total`, int32 `[]`."""
        if self.count is not None:
            return jnp.minimum(total, self.count)
        part, whole = (jnp.uint32(number) for number in self._share.as_integer_ratio())
        times, rest = jnp.divmod(total.astype(jnp.uint32), whole)
        return (times * part + (rest * part + whole - 1) // whole).astype(jnp.int32)
