"""Implicit Q-learning from a Minari dataset: a fixed buffer, shared by all seeds, in one jit.

    python -m examples.agents.iql --seeds 5 --plot iql.png

The dataset is recorded first: a scripted controller of a pendulum, disturbed by random actions at a
different rate in each episode. It is written in Minari's layout and opened like any other dataset:
`load("D4RL/pen/human-v2")` opens one that Minari downloaded. IQL never evaluates an action that is
not in the dataset. Its value function is an upper expectile of the values of the dataset's actions,
and the policy clones the better ones of these. With `temperature=0` it clones all actions alike,
which is behaviour cloning.

Reference: Kostrikov et al., 2022, "Offline reinforcement learning with implicit Q-learning".
"""

import dataclasses
import functools
import tempfile
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

import jrb
from examples.agents import common

ENV, LENGTH = "Pendulum-v1", 200  # the environment, and the steps of each episode


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a training."""

    steps: int = 8_000  # gradient steps
    batch_size: int = 256
    discount: float = 0.99
    expectile: float = 0.9
    temperature: float = 3.0  # the factor of advantages in the exponent of actions' weights
    max_weight: float = 100.0
    reward_scale: float = 0.1
    target_rate: float = 0.005
    hidden: int = 64
    learning_rate: float = 1e-3
    points: int = 20  # points of the learning curve
    eval_envs: int = 20  # episodes that are evaluated for each point


RANDOM_RETURN = -1214.0  # measured over 640 episodes


def controller(observation: jax.Array) -> jax.Array:
    """Returns the torque `[..., 1]`, in [-1, 1], that swings a pendulum up and balances it."""
    cos, sin, speed = observation[..., 0], observation[..., 1], observation[..., 2]
    energy = speed**2 / 6 + 5 * (cos - 1)  # 0 for the upright pendulum at rest
    pump = jnp.sign(speed) * jnp.sign(-energy)
    balance = -(8 * jnp.arctan2(sin, cos) + 2 * speed)
    return jnp.clip(jnp.where(cos > 0.9, balance, pump), -1, 1)[..., None]


def rollout(act: Any, key: jax.Array, num_envs: int) -> dict[str, Any]:
    """Returns an episode in each environment, `[T, E, ...]`, with the policy `act`."""
    env, env_params = gymnax.make(ENV)

    def step(carry: tuple, key: jax.Array) -> tuple:
        env_state, observation = carry
        for_act, for_env = jax.random.split(key)
        action = act(observation, for_act)
        after, env_state, *result = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            jax.random.split(for_env, num_envs), env_state, 2 * action, env_params
        )
        return (env_state, after), jrb.transition(observation, action, after, *result)

    for_env, for_steps = jax.random.split(key)
    keys = jax.random.split(for_env, num_envs)
    observation, env_state = jax.vmap(env.reset, in_axes=(0, None))(keys, env_params)
    return jax.lax.scan(step, (env_state, observation), jax.random.split(for_steps, LENGTH))[1]


def record(path: str, episodes: int = 100, seed: int = 0) -> None:
    """Writes a Minari dataset; the rate of random actions rises from 0.2 to 1 over the episodes."""
    share = jnp.linspace(0.2, 1.0, episodes)

    def act(observation: jax.Array, key: jax.Array) -> jax.Array:
        coin, which = jax.random.split(key)
        random = jax.random.uniform(which, (episodes, 1), minval=-1.0, maxval=1.0)
        is_random = jax.random.uniform(coin, (episodes,)) < share
        return jnp.where(is_random[:, None], random, controller(observation))

    rows = jax.jit(lambda key: rollout(act, key, episodes))(jax.random.key(seed))
    buffer = jrb.ReplayBuffer(episodes * LENGTH, num_envs=episodes)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], rows))
    state = buffer.extend(state, rows)
    jrb.datasets.write_minari(path, buffer, state, dataset_id="pendulum/mixed-v0")


def load(name: str, config: Config) -> tuple[jrb.ReplayBuffer, jrb.BufferState]:
    """Returns a buffer with a dataset, given its path or its Minari id, and the buffer's state."""
    return jrb.datasets.open(name).buffer(batch_size=config.batch_size)


class Network(nn.Module):
    """A multilayer perceptron with one or several inputs, and outputs `[..., size]`."""

    size: int
    hidden: int

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        """Applies the layers to the concatenated inputs, `[..., D]` each."""
        x = jnp.concatenate(inputs, axis=-1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.size)(x)


def train(
    buffer: jrb.ReplayBuffer, key: jax.Array, config: Config, replay: jrb.BufferState
) -> jax.Array:
    """Returns the learning curve of one training, the mean returns of evaluations, `[points]`."""
    example = buffer.sample(replay, key, batch_size=1).data
    size = example["action"].shape[-1]
    actor, value = Network(size, config.hidden), Network(1, config.hidden)
    twin = nn.vmap(
        Network, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2
    )(1, config.hidden)
    optimizer = optax.adam(config.learning_rate)

    def loss(params: dict, target: Any, data: Any) -> jax.Array:
        """Returns the sum of three losses, each of which has gradients for its own network only."""
        observation, action, after = data["observation"], data["action"], data["next"]
        # The value is an expectile of the target critics over the dataset's actions.
        critics = twin.apply(target, observation, action)[..., 0].min(axis=0)
        advantage = critics - value.apply(params["value"], observation)[..., 0]
        weight = jnp.where(advantage > 0, config.expectile, 1 - config.expectile)
        value_loss = jnp.mean(weight * advantage**2)
        # The critics learn one-step targets, with the value instead of a maximum over actions.
        future = jax.lax.stop_gradient(value.apply(params["value"], after["observation"])[..., 0])
        future = jnp.where(after["terminated"], 0.0, config.discount * future)
        goal = config.reward_scale * after["reward"] + future
        critic_loss = jnp.mean(
            (twin.apply(params["critic"], observation, action)[..., 0] - goal) ** 2
        )
        # The policy is a regression to the dataset's actions, weighted by their advantages.
        weight = jnp.exp(config.temperature * jax.lax.stop_gradient(advantage))
        mean = jnp.tanh(actor.apply(params["actor"], observation))
        distance = jnp.sum((mean - action) ** 2, axis=-1)
        actor_loss = jnp.mean(jnp.minimum(weight, config.max_weight) * distance)
        return value_loss + critic_loss + actor_loss

    def learn(carry: tuple, key: jax.Array) -> tuple:
        params, target, moments = carry
        data = buffer.sample(replay, key).data
        gradient = jax.grad(loss)(params, target, data)
        change, moments = optimizer.update(gradient, moments)
        params = optax.apply_updates(params, change)
        target = optax.incremental_update(params["critic"], target, config.target_rate)
        return (params, target, moments), None

    def stage(carry: tuple, key: jax.Array) -> tuple:
        """Learns for a part of the training, then evaluates."""
        for_learn, for_eval = jax.random.split(key)
        steps = config.steps // config.points
        carry, _ = jax.lax.scan(learn, carry, jax.random.split(for_learn, steps))
        act = lambda observation, _: jnp.tanh(actor.apply(carry[0]["actor"], observation))
        rows = rollout(act, for_eval, config.eval_envs)
        return carry, rows["next"]["reward"].sum(axis=0).mean()

    keys = jax.random.split(key, 4)
    params = {
        "actor": actor.init(keys[0], example["observation"]),
        "value": value.init(keys[1], example["observation"]),
        "critic": twin.init(keys[2], example["observation"], example["action"]),
    }
    carry = params, params["critic"], optimizer.init(params)
    return jax.lax.scan(stage, carry, jax.random.split(keys[3], config.points))[1]


def main() -> None:
    """Records the dataset, opens it, and trains."""
    config = Config()
    with tempfile.TemporaryDirectory() as folder:
        record(f"{folder}/mixed-v0")
        buffer, replay = load(f"{folder}/mixed-v0", config)
    print(f"mean return of the set: {jrb.stats(buffer, replay)['return']['mean']:.0f}")
    learner = functools.partial(train, buffer)
    common.main(learner, config, RANDOM_RETURN, replay, unit="gradient steps")


if __name__ == "__main__":
    main()
