"""Functions for `jrb.Weighted`, which checkpoints find by their names; and units to draw from."""

import jax.numpy as jnp

import jrb

UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(2, 0.9),
    "strict": jrb.NStep(3, 0.9, strict=True),
    "windows": jrb.Sequence(3),
    "stacks": jrb.FrameStack(2),
    "whole": jrb.Sequence(4, sample_by="whole_episodes", partial="pad"),
}


def every(leaves, age, context):
    """Returns the weight 1 for all slots."""
    (leaf,) = leaves.values()
    return jnp.ones(leaf.shape[0])


def alike(leaves, age, context):
    """Returns the weight 1 for all groups."""
    return jnp.ones(age.shape[0])


def fresh(leaves, age, context):
    """Returns 0.9^age for items whose reward is at least the context, or 0 without one."""
    reward = leaves["next/reward"]
    return jnp.where(reward >= (0.0 if context is None else context), 0.9 ** age.astype(float), 0.0)


def by_reward(leaves, age, context):
    """Returns the reward, as it is: NaN, infinite and negative ones too."""
    return leaves["next/reward"]
