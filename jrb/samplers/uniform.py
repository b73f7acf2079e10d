"""Uniform draws."""

from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb._xla import random_bits
from jrb.ring import Ring
from jrb.types import Anchors, Draw, ShardedSampler, ShardStats


@pytree.component
class Uniform(ShardedSampler):
    """Draws every anchor with the same probability.

    Attributes:
        replacement: whether an anchor may stand twice in a batch. If not, a batch that is larger
            than the number of anchors is masked at its end.
        count_draws: whether to count how often each item is drawn (see `jrb.types.Sampler`).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=jrb.Uniform(replacement=False))
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(3)})
        >>> batch = buffer.sample(state, jax.random.key(0))
        >>> sorted(batch.data["x"][batch.mask].tolist()), batch.mask.tolist()
        ([0, 1, 2], [True, True, True, False])
    """

    replacement: bool = True
    count_draws: bool = False

    def __post_init__(self) -> None:
        checks.flag("replacement", self.replacement)
        checks.flag("count_draws", self.count_draws)

    def draw(
        self,
        ring: Ring,
        state: Any,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[Any, Draw]:
        """Draws random ranks, or the first B of a random permutation of all ranks."""
        if self.replacement:
            mask = jnp.broadcast_to(anchors.count > 0, (batch_size,))
            ranks = random_bits.below(anchors.count, *random_bits.words(key, batch_size))
        else:
            offset = jnp.arange(batch_size, dtype=jnp.int32)
            mask = offset < anchors.count
            offset = jnp.where(mask, offset, 0)
            ranks = random_bits.permute(random_bits.seed(key), anchors.count, offset)
        return state, anchors.uniform_draw(ranks, mask, key)

    def stats(self, ring: Ring, state: Any, anchors: Anchors) -> ShardStats:
        """Returns the number of anchors, as mass too."""
        return ShardStats.uniform(anchors)

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns 0, as all weights are 1."""
        return jnp.zeros((), jnp.float32)
