"""rejax's DQN on CartPole, with its own replay buffer or with jrb's."""

import functools
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import rejax
from flax import struct
from rejax.algos import algorithm
from rejax.buffers import Minibatch

import jrb

from .dqn import Train

SIZES = {"buffer_size": 131_072, "fill_buffer": 1000, "batch_size": 256, "num_envs": 10}


class Ours(struct.PyTreeNode):
    """A jrb buffer with the two methods that rejax calls."""

    buffer: jrb.ReplayBuffer = struct.field(pytree_node=False)
    state: Any

    def extend(self, batch: Minibatch) -> "Ours":
        """Adds one row of all environments."""
        return self.replace(state=self.buffer.add(self.state, batch._asdict()))

    def sample(self, count: int, key: jax.Array) -> Minibatch:
        """Samples with replacement; rejax's buffer permutes all N to sample without."""
        return Minibatch(**self.buffer.sample(self.state, key, count).data)


_CartPole: Any = type(gymnax.make("CartPole-v1")[0])


class Environment(_CartPole):
    """gymnax's CartPole with a single done flag, as rejax expects."""

    def step(self, *given: Any) -> tuple:
        """Returns observation, state, reward, done and info."""
        observation, state, reward, *ends, info = super().step(*given)
        return observation, state, reward, functools.reduce(jnp.logical_or, ends), info


class WithOurs(rejax.DQN):
    """The same algorithm with jrb's buffer."""

    @algorithm.register_init
    def initialize_replay_buffer(self, rng: jax.Array) -> dict[str, Ours]:
        """Returns an empty buffer."""
        capacity = self.buffer_size // self.num_envs * self.num_envs
        buffer = jrb.ReplayBuffer(capacity, num_envs=self.num_envs)
        example = {
            "obs": jnp.zeros(self.obs_space.shape, self.obs_space.dtype),
            "action": jnp.zeros(self.action_space.shape, self.action_space.dtype),
            "reward": jnp.float32(0),
            "done": jnp.bool_(False),
            "next_obs": jnp.zeros(self.obs_space.shape, self.obs_space.dtype),
        }
        return {"replay_buffer": Ours(buffer, buffer.init(example))}


def train(steps: int, with_ours: bool) -> Train:
    """Returns a complete training without evaluations, as a function of a key."""
    kind = WithOurs if with_ours else rejax.DQN
    quiet = {"eval_freq": steps, "total_timesteps": steps, "skip_initial_evaluation": True}
    made = kind.create(env=Environment(), **SIZES, **quiet)
    made = made.replace(eval_callback=lambda algo, state, key: jnp.float32(0))
    return lambda key: made.train(key)[0].q_ts.params
