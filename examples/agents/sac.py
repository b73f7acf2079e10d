"""Soft actor-critic on Pendulum: environment, buffer and networks in one jit.

    python -m examples.agents.sac --seeds 5 --plot sac.png

The buffer samples uniformly and stores each observation once: the next observation of a step is the
observation of the following step. Episodes of Pendulum end only by a time limit, so the target must
bootstrap from the last observation: it depends on `terminated`, not on `truncated`.

References: Haarnoja et al., 2018, "Soft actor-critic algorithms and applications" (with the
learned temperature of section 5); Fujimoto et al., 2018, "Addressing function approximation error
in actor-critic methods" (two critics).
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

import jrb
from examples.agents import common


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a training."""

    env: str = "Pendulum-v1"  # a gymnax environment with actions in a symmetric box
    steps: int = 20_000  # steps of all environments together
    num_envs: int = 4  # E
    updates: int = 4  # gradient steps for each step of the E environments
    capacity: int = 20_000
    batch_size: int = 128  # B, transitions per gradient step
    min_size: int = 1_000  # until then, actions are random and nothing is learned
    discount: float = 0.99
    target_rate: float = 0.01
    hidden: int = 64
    learning_rate: float = 1e-3
    points: int = 25  # points of the learning curve: two episodes of each environment


RANDOM_RETURN = -1214.0  # measured over 640 episodes


def make_buffer(config: Config) -> jrb.ReplayBuffer:
    """Returns the replay buffer."""
    return jrb.ReplayBuffer.rounded(
        config.capacity,
        num_envs=config.num_envs,
        batch_size=config.updates * config.batch_size,
        min_size=config.min_size,
        storage=jrb.DeviceStorage(share_next_observations=True),
    )


class Actor(nn.Module):
    """A Gaussian policy, squashed by tanh to actions in [-1, 1]."""

    actions: int
    hidden: int

    @nn.compact
    def __call__(self, observation: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns random actions `[..., A]` and their log-densities `[...]`."""
        x = nn.relu(nn.Dense(self.hidden)(observation))
        x = nn.relu(nn.Dense(self.hidden)(x))
        mean, log_std = nn.Dense(self.actions)(x), nn.Dense(self.actions)(x)
        log_std = jnp.clip(log_std, -5.0, 2.0)
        noise = jax.random.normal(key, mean.shape)
        raw = mean + jnp.exp(log_std) * noise
        density = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2), in a form that does not overflow
        squash = 2 * (math.log(2) - raw - jax.nn.softplus(-2 * raw))
        return jnp.tanh(raw), jnp.sum(density - squash, axis=-1)


class Critic(nn.Module):
    """A network of the value of an action."""

    hidden: int

    @nn.compact
    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Returns the values `[...]` of actions `[..., A]` after observations `[..., D]`."""
        x = jnp.concatenate([observation, action], axis=-1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(1)(x)[..., 0]


def train(key: jax.Array, config: Config) -> jax.Array:
    """Returns the learning curve of one training, float32 `[points]`."""
    env, env_params = gymnax.make(config.env)
    space = env.action_space(env_params)
    size, scale = space.shape[0], space.high
    actor = Actor(size, config.hidden)
    # Both critics are one module under `vmap`, whose parameters have an axis of length 2.
    twin = nn.vmap(
        Critic, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2
    )(config.hidden)
    optimizer = optax.adam(config.learning_rate)
    buffer = make_buffer(config)

    def critic_loss(critic: Any, goal: jax.Array, data: Any) -> jax.Array:
        values = twin.apply(critic, data["observation"], data["action"])
        return jnp.mean((values - goal) ** 2)

    def actor_loss(params: Any, critic: Any, alpha: jax.Array, data: Any, key: jax.Array) -> tuple:
        action, density = actor.apply(params, data["observation"], key)
        value = twin.apply(critic, data["observation"], action).min(axis=0)
        return jnp.mean(alpha * density - value), jnp.mean(density)

    def descend(agent: dict, name: str, gradient: Any) -> dict:
        change, moments = optimizer.update(gradient, agent["moments"][name])
        params = optax.apply_updates(agent[name], change)
        return agent | {name: params, "moments": agent["moments"] | {name: moments}}

    def learn(agent: dict, inputs: tuple) -> tuple[dict, None]:
        """Takes one gradient step for the critics, the actor and the temperature."""
        data, key = inputs
        for_next, for_action = jax.random.split(key)
        alpha, after = jnp.exp(agent["log_alpha"]), data["next"]
        action, density = actor.apply(agent["actor"], after["observation"], for_next)
        future = twin.apply(agent["target"], after["observation"], action).min(axis=0)
        future = jnp.where(after["terminated"], 0.0, future - alpha * density)
        goal = after["reward"] + config.discount * future
        agent = descend(agent, "critic", jax.grad(critic_loss)(agent["critic"], goal, data))
        gradient, density = jax.grad(actor_loss, has_aux=True)(
            agent["actor"], agent["critic"], alpha, data, for_action
        )
        agent = descend(agent, "actor", gradient)
        # The temperature rises while the entropy, `-density`, is below its target, `-size`.
        agent = descend(agent, "log_alpha", -(density - size))
        target = optax.incremental_update(agent["critic"], agent["target"], config.target_rate)
        return agent | {"target": target}, None

    def iterate(carry: tuple, _: None) -> tuple:
        agent, replay, env_state, observation, returns, key = carry
        key, for_act, for_random, for_env, for_draw, for_learn = jax.random.split(key, 6)
        action = actor.apply(agent["actor"], observation, for_act)[0]
        random = jax.random.uniform(for_random, action.shape, minval=-1.0, maxval=1.0)
        action = jnp.where(buffer.can_sample(replay), action, random)
        after, env_state, reward, terminated, truncated, info = jax.vmap(
            env.step, in_axes=(0, 0, 0, None)
        )(jax.random.split(for_env, config.num_envs), env_state, scale * action, env_params)
        row = jrb.transition(observation, action, after, reward, terminated, truncated, info)
        replay = buffer.add(replay, row)

        # One sample for all updates is cheaper than one for each.
        replay, batch = buffer.draw(replay, for_draw)
        cut = lambda leaf: leaf.reshape(config.updates, -1, *leaf.shape[1:])
        inputs = jax.tree.map(cut, batch.data), jax.random.split(for_learn, config.updates)
        new, _ = jax.lax.scan(learn, agent, inputs)
        agent = jax.tree.map(lambda new, old: jnp.where(batch.mask[0], new, old), new, agent)
        returns, ends = common.track(returns, reward, terminated | truncated)
        return (agent, replay, env_state, after, returns, key), ends

    key, for_env, for_actor, for_critic = jax.random.split(key, 4)
    keys = jax.random.split(for_env, config.num_envs)
    observation, env_state = jax.vmap(env.reset, in_axes=(0, None))(keys, env_params)
    critic = twin.init(for_critic, observation, jnp.zeros((config.num_envs, size)))
    row = jrb.transition(observation[0], jnp.zeros(size), observation[0], 0.0, False, False)
    agent = {"actor": actor.init(for_actor, observation, key), "log_alpha": jnp.float32(0)}
    agent["critic"] = critic
    agent["moments"] = {name: optimizer.init(params) for name, params in agent.items()}
    agent["target"] = critic
    carry = agent, buffer.init(row), env_state, observation, jnp.zeros(config.num_envs), key
    _, ends = jax.lax.scan(iterate, carry, None, config.steps // config.num_envs)
    return common.curve(ends, config.points)


if __name__ == "__main__":
    common.main(train, Config(), RANDOM_RETURN)
