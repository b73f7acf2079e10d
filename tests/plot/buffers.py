"""Buffers of many kinds, filled with random streams."""

import jax
import jax.numpy as jnp
import numpy as np

IMAGE = jax.ShapeDtypeStruct((10, 10, 4), jnp.bool_)


def example(observation=IMAGE):
    flag, number = jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((), jnp.float32)
    after = {"observation": observation, "reward": number, "done": flag}
    action = jax.ShapeDtypeStruct((), jnp.int32)
    return {"observation": observation, "action": action, "next": after}


def stream(rng, length, envs=None, observation=IMAGE, ends=0.1):
    lead = (length,) if envs is None else (length, envs)
    numbers = rng.integers(0, 2, (*lead, *observation.shape))
    seen = jnp.asarray(numbers, observation.dtype)
    rewards = rng.normal(size=lead).astype(np.float32)
    after = {"observation": seen, "reward": rewards, "done": rng.random(lead) < ends}
    action = rng.integers(0, 4, lead).astype(np.int32)
    return {"observation": seen, "action": action, "next": after}


def filled(buffer, length, seed=0, observation=IMAGE, mask=None):
    items = stream(np.random.default_rng(seed), length, buffer.num_envs, observation)
    state = buffer.init(example(observation))
    return buffer.extend(state, items, mask=mask) if length else state
