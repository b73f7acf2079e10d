"""A jrb buffer as the replay buffer of Stable-Baselines3; needs stable-baselines3 and torch.

    DQN("MlpPolicy", env, replay_buffer_class=JrbBuffer, replay_buffer_kwargs={"unit": ...})

The models need no change: DQN, SAC, TD3 and DDPG, with one or several environments, observations
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
    """Stores the transitions of an off-policy model; `parts` are arguments of `jrb.ReplayBuffer`.

    Use its attributes `buffer` and `state` for jrb's other functions, such as
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
        # Skip the base class's own __init__, which would allocate its arrays.
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
        terminated = (done & ~truncated).astype(np.float32)  # the losses multiply by it
        step = jrb.transition(obs, action, next_obs, reward, terminated, truncated)
        if self.state is None:
            one = jax.tree.map(lambda leaf: leaf[0], step)
            self.state = jrb.jitted(self.buffer).init(one)
        self.state = jrb.jitted(self.buffer).add(self.state, step)

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        """Returns a batch as tensors; on the CPU they share the memory of the sampled arrays."""
        # The model seeds this generator, so its seed decides the batches.
        seed = np.random.randint(2**32, dtype=np.uint32)  # noqa: NPY002
        return self._get_samples(jrb.jitted(self.buffer).sample(self.state, seed, batch_size), env)

    def _get_samples(self, batch: Any, env: Any = None) -> ReplayBufferSamples:
        # Reshape tensors, or NumPy arrays if `env` normalizes them: on a JAX array, each operation
        # would compile and run its own program.
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
        """Returns the number of stored steps of each environment."""
        return 0 if self.state is None else int(self.buffer.size(self.state)) // self.n_envs

    def reset(self) -> None:
        """Removes all transitions."""
        super().reset()
        self.state = None
