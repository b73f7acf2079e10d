"""Transforms of rewards."""

import jax
import jax.numpy as jnp
from jax import lax

from jrb._core import episode_ends
from jrb._util import checks, pytree
from jrb.keys import Path, path_name
from jrb.transforms.structure import with_leaf
from jrb.types import Item, Transform, TransformContext


@pytree.component
class RewardToGo(Transform):
    """The discounted sum of the rewards from each row of a window to its end.

    At row t it is r_t + discount * (that at t + 1), where row t + 1 is real and of the same
    episode; 0 where a row is not real. An episode ends where a flag in the data says so, and where
    the unit knows that it ended, such as by `truncate` or `Keys(episode=...)`. With
    `Sequence(..., partial="pad")` as long as an episode, it is the return from that row on.
    Where the reward has several leaves, such as one for each agent, each has a return of its own.

    Attributes:
        discount: gamma, from 0 to 1.
        to: where it is put.

    Reference: Chen et al., 2021, "Decision transformer", section 3.
    """

    discount: float = 1.0
    to: Path = ("next", "reward_to_go")

    def __post_init__(self) -> None:
        checks.fraction("discount", self.discount)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, with one leaf `[B, L, ...]` more for each leaf of the reward."""
        reward = batch.keys.get(data, "reward")
        for leaf in jax.tree.leaves(reward):
            self._check(leaf, batch)
        goes_on = batch.mask if batch.ends is None else batch.mask & ~batch.ends
        if batch.ends is None or batch.keys.flags(data):
            goes_on = goes_on & ~episode_ends.ends(data, batch.keys)
        sums = jax.tree.map(lambda leaf: self._sums(leaf, batch.mask, goes_on), reward)
        return with_leaf(data, self.to, sums, "RewardToGo")

    def _check(self, reward: jax.Array, batch: TransformContext) -> None:
        name = path_name(batch.keys.reward)
        if batch.mask.ndim != 2:
            raise ValueError(
                f"RewardToGo: leaf '{name}': expected windows [B, L], got {reward.shape}. Use it "
                "with unit=jrb.Sequence(...)."
            )
        if not jnp.issubdtype(reward.dtype, jnp.floating):
            raise TypeError(
                f"RewardToGo: leaf '{name}': expected a floating dtype, got {reward.dtype}. Use "
                "Cast before."
            )

    def _sums(self, reward: jax.Array, real: jax.Array, goes_on: jax.Array) -> jax.Array:
        """The sums of one leaf of the reward, `[B, L, ...]`."""
        goes_on = goes_on & (self.discount > 0)  # or 0 times infinity would be no number
        lift = lambda x: x.reshape(*x.shape, *(1,) * (reward.ndim - 2))
        rows = [jnp.moveaxis(x, 1, 0) for x in (reward, lift(real), lift(goes_on))]

        def step(after: jax.Array, row: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            reward, real, goes_on = row
            rest = jnp.where(goes_on, after * self.discount, jnp.zeros_like(after))
            here = jnp.where(real, reward + rest, jnp.zeros_like(after))
            return here, here

        sums = lax.scan(step, jnp.zeros_like(rows[0][0]), rows, reverse=True)[1]
        return jnp.moveaxis(sums, 0, 1)
