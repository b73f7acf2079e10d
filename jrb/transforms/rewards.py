"""Transforms of rewards."""

import jax
import jax.numpy as jnp
from jax import lax

from jrb._base import checks, pytree
from jrb._engine import episodes
from jrb.keys import Path, path_name
from jrb.transforms.structure import with_leaf
from jrb.types import Batch, Item, Transform


@pytree.component
class RewardToGo(Transform):
    """The discounted sum of the rewards from each row of a window to its end.

    At row t it is r_t + discount * (that at t + 1), where row t + 1 is real and of the same
    episode; 0 where a row is not real. With `Sequence(..., short="pad")` as long as an episode, it
    is the return of the rest of the episode.

    Attributes:
        discount: gamma, from 0 to 1.
        to: where it is put.

    Reference: Chen et al., 2021, "Decision transformer", section 3.
    """

    discount: float = 1.0
    to: Path = ("next", "reward_to_go")

    def __post_init__(self) -> None:
        checks.fraction("discount", self.discount)

    def apply(self, data: Item, batch: Batch) -> Item:
        """The data, with one leaf `[B, L, ...]` more."""
        reward = batch.keys.get(data, "reward")
        if batch.mask.ndim != 2:
            raise ValueError(
                f"RewardToGo: leaf '{path_name(batch.keys.reward)}': expected windows [B, L], got "
                f"{reward.shape}. Use it with unit=jrb.Sequence(...)."
            )
        if not jnp.issubdtype(reward.dtype, jnp.floating):
            raise TypeError(
                f"RewardToGo: leaf '{path_name(batch.keys.reward)}': expected a floating dtype, "
                f"got {reward.dtype}. Use Cast before."
            )
        done = episodes.ends(data, batch.keys)
        lift = lambda x: x.reshape(*x.shape, *(1,) * (reward.ndim - 2))
        real, goes_on = lift(batch.mask), lift(batch.mask & ~done)
        rows = [jnp.moveaxis(x, 1, 0) for x in (reward, real, goes_on)]

        def step(after: jax.Array, row: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            reward, real, goes_on = row
            rest = jnp.where(goes_on, after * self.discount, jnp.zeros_like(after))
            here = jnp.where(real, reward + rest, jnp.zeros_like(after))
            return here, here

        sums = lax.scan(step, jnp.zeros_like(rows[0][0]), rows, reverse=True)[1]
        return with_leaf(data, self.to, jnp.moveaxis(sums, 0, 1), "RewardToGo")
