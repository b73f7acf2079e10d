"""Functions for `jrb.Weighted`, which checkpoints find by their names."""

import jax.numpy as jnp


def every(leaves, age, context):
    """Returns the weight 1 for all slots."""
    (leaf,) = leaves.values()
    return jnp.ones(leaf.shape[0])


def fresh(leaves, age, context):
    """Returns 2^-age for items whose reward is at least the context, or 0 without one."""
    reward = leaves["next/reward"]
    return jnp.where(reward >= (0.0 if context is None else context), 0.9 ** age.astype(float), 0.0)


def by_reward(leaves, age, context):
    """Returns the reward, as it is: NaN, infinite and negative ones too."""
    return leaves["next/reward"]
