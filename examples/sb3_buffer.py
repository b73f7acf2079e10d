"""A replay buffer of jrb in Stable-Baselines3, with stable-baselines3 and torch.

    DQN("MlpPolicy", env, replay_buffer_class=JrbBuffer, replay_buffer_kwargs={"unit": ...})

The models stay as they are: DQN, SAC, TD3 and DDPG, with one environment or several, observations
that are arrays or dicts of arrays, time limits and `VecNormalize`.
"""

import functools
from typing import Any

import jax
import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples

import jrb


class JrbBuffer(ReplayBuffer):
    """Stores the transitions of an off-policy model; `parts` are those of `jrb.ReplayBuffer`.

    `buffer` and `state` are for all that jrb has beyond Stable-Baselines3, such as
    `jrb.save(path, replay.buffer, replay.state)`.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        **parts: Any,
    ):
        # Not the arrays of the base, which models ask for when they load.
        super(ReplayBuffer, self).__init__(
            buffer_size // n_envs, observation_space, action_space, device, n_envs
        )
        if optimize_memory_usage:
            parts = {"storage": jrb.DeviceStorage(share_next_observations=True)} | parts
        self.buffer = jrb.ReplayBuffer.rounded(buffer_size, num_envs=n_envs, cast=True, **parts)
        self.handle_timeout_termination, self.state = handle_timeout_termination, None

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Stores one step of all environments."""
        limits = [info.get("TimeLimit.truncated", False) for info in infos]
        truncated = np.array(limits, bool) & self.handle_timeout_termination
        action = action.reshape(self.n_envs, self.action_dim)
        terminated = (done & ~truncated).astype(np.float32)  # as the losses take it
        step = jrb.transition(obs, action, next_obs, reward, terminated, truncated)
        if self.state is None:
            one = jax.tree.map(lambda leaf: leaf[0], step)
            self.state = jrb.jitted(self.buffer).init(one)
        self.state = jrb.jitted(self.buffer).add(self.state, step)

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        """Returns tensors; those on the CPU share the memory of the arrays that were sampled."""
        # The model seeds this generator, so its seed decides the batches.
        seed = np.random.randint(2**32, dtype=np.uint32)  # noqa: NPY002
        return self._get_samples(jrb.jitted(self.buffer).sample(self.state, seed, batch_size), env)

    def _get_samples(self, batch: Any, env: Any = None) -> ReplayBufferSamples:
        # Columns are made of tensors, or of NumPy's arrays where `env` normalizes them: each
        # operation on an array of JAX would be a program of its own.
        convert = jrb.to_torch if env is None else functools.partial(jax.tree.map, np.array)
        data, info = convert((batch.data, batch.info))
        after, column = data["next"], lambda leaf: leaf.reshape(-1, 1)
        samples = ReplayBufferSamples(
            self._normalize_obs(data["observation"], env),
            data["action"],
            self._normalize_obs(after["observation"], env),
            column(after["terminated"]),
            self._normalize_reward(column(after["reward"]), env),
            column(info["discount"]) if "discount" in info else None,
        )
        return jax.tree.map(lambda leaf: leaf.to(self.device), jrb.to_torch(samples))

    def size(self) -> int:
        """Returns how many steps of each environment are stored."""
        return 0 if self.state is None else int(self.buffer.size(self.state)) // self.n_envs

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self.state = None
