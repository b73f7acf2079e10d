"""Rainbow on MinAtar: six extensions of DQN, environment, buffer and network in one jit.

    python -m examples.agents.rainbow --seeds 5 --plot rainbow.png

The extensions are double Q-learning, a dueling network, noisy layers, 3-step returns, prioritized
replay, and a distribution of returns (C51) instead of their mean. The buffer stores each
observation once, as bool, and computes n-step returns when it is sampled.

Two things differ from the paper. Dense layers replace the convolution, which is slow under `vmap`
on a CPU. And at first a tenth of the actions are random: gymnax's Breakout has two starts and no
sticky actions, and with noisy layers alone, two of three trainings ended below 7.

References: Hessel et al., 2018, "Rainbow"; Bellemare et al., 2017, "A distributional perspective on
reinforcement learning", algorithm 1; Fortunato et al., 2018, "Noisy networks for exploration",
section 3; Young and Tian, 2019, "MinAtar".
"""

import dataclasses
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

    env: str = "Breakout-MinAtar"
    steps: int = 400_000  # steps of all environments together
    num_envs: int = 64  # E
    updates: int = 8  # U, gradient steps for each step of the E environments
    capacity: int = 100_000
    batch_size: int = 128  # B, of each gradient step
    min_size: int = 5_000
    discount: float = 0.99
    n_step: int = 3
    alpha: float = 0.5
    beta: float = 0.4  # the initial value, which rises to 1
    atoms: int = 51
    value_max: float = 20.0  # the largest return of the support, which begins at 0
    hidden: int = 128
    noise: float = 0.5
    epsilon: float = 0.1  # the initial probability of a random action, which falls to 0
    learning_rate: float = 5e-4
    target_rate: float = 0.005
    points: int = 40  # points of the learning curve


RANDOM_RETURN = 0.41  # measured over 39,013 episodes


class NoisyDense(nn.Module):
    """A dense layer whose weights have factorized Gaussian noise of learned scale, new per call."""

    features: int
    noise: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `x @ w + b` with `w = mean + sigma * outer(f(e), f(e'))`, likewise `b`."""
        size, bound = x.shape[-1], x.shape[-1] ** -0.5

        def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

        sigma = nn.initializers.constant(self.noise * bound)
        kernel = self.param("kernel", uniform, (size, self.features))
        bias = self.param("bias", uniform, (self.features,))
        kernel_sigma = self.param("kernel_sigma", sigma, (size, self.features))
        bias_sigma = self.param("bias_sigma", sigma, (self.features,))
        keys = jax.random.split(self.make_rng("noise"))
        inner, outer = jax.random.normal(keys[0], (size,)), jax.random.normal(keys[1], bias.shape)
        inner, outer = (jnp.sign(e) * jnp.sqrt(jnp.abs(e)) for e in (inner, outer))
        kernel = kernel + kernel_sigma * inner[:, None] * outer
        return x @ kernel + bias + bias_sigma * outer


class Network(nn.Module):
    """A dueling network of the distribution of returns of each action."""

    actions: int
    config: Config

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Returns log-probabilities `[..., actions, atoms]` of bool planes `[..., H, W, C]`."""
        config = self.config
        x = observation.reshape(*observation.shape[:-3], -1).astype(jnp.float32)
        x = nn.relu(nn.Dense(config.hidden)(x))
        x = nn.relu(NoisyDense(config.hidden, config.noise)(x))
        value = NoisyDense(config.atoms, config.noise)(x)[..., None, :]
        advantage = NoisyDense(self.actions * config.atoms, config.noise)(x)
        advantage = advantage.reshape(*x.shape[:-1], self.actions, config.atoms)
        logits = value + advantage - advantage.mean(axis=-2, keepdims=True)
        return jax.nn.log_softmax(logits)


def make_buffer(config: Config) -> jrb.ReplayBuffer:
    """Returns the replay buffer."""
    return jrb.ReplayBuffer.rounded(
        config.capacity,
        num_envs=config.num_envs,
        batch_size=config.updates * config.batch_size,
        min_size=config.min_size,
        sampler=jrb.Prioritized(config.alpha, beta=config.beta),
        unit=jrb.NStep(config.n_step, config.discount),
        storage=jrb.DeviceStorage(share_next_observations=True),
    )


def project(probabilities: jax.Array, returns: jax.Array, support: jax.Array) -> jax.Array:
    """Divides the mass at `returns` `[B, atoms]` between the nearest two atoms of `support`."""
    step = support[1] - support[0]
    returns = jnp.clip(returns, support[0], support[-1])
    shares = 1 - jnp.abs(returns[:, :, None] - support) / step
    return jnp.einsum("bj,bji->bi", probabilities, jnp.clip(shares, 0, 1))


def train(key: jax.Array, config: Config) -> jax.Array:
    """Returns the learning curve of one training, float32 `[points]`."""
    env, env_params = gymnax.make(config.env)
    network = Network(env.num_actions, config)
    optimizer = optax.chain(
        optax.clip_by_global_norm(10.0), optax.adam(config.learning_rate, eps=1e-5)
    )
    support = jnp.linspace(0.0, config.value_max, config.atoms)
    iterations = config.steps // config.num_envs
    buffer = make_buffer(config)

    def log_probabilities(params: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        return network.apply(params, observation, rngs={"noise": key})

    def values(logs: jax.Array) -> jax.Array:
        return jnp.exp(logs) @ support

    def of_action(x: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, action[:, None, None], axis=1)[:, 0]

    def loss(params: Any, target: Any, batch: jrb.Sample, key: jax.Array) -> tuple:
        """Returns the weighted cross entropy, and priorities `[B]`, the KL divergences."""
        data, after = batch.data, batch.data["next"]
        here, choice, there = jax.random.split(key, 3)
        future = values(log_probabilities(params, after["observation"], choice))
        best = jnp.argmax(future, axis=-1)  # double Q-learning: the target network evaluates it
        future = of_action(log_probabilities(target, after["observation"], there), best)
        # `info["discount"]` is that of the n-step return, which has fewer steps before an end.
        discount = batch.info["discount"] * (1 - after["terminated"])
        goal = after["reward"][:, None] + discount[:, None] * support
        goal = jax.lax.stop_gradient(project(jnp.exp(future), goal, support))
        logs = of_action(log_probabilities(params, data["observation"], here), data["action"])
        error = -jnp.sum(goal * logs, axis=-1)
        entropy = jnp.sum(jax.scipy.special.entr(goal), axis=-1)
        return jnp.mean(batch.weights * error), jnp.maximum(error - entropy, 0.0)

    def act(params: Any, observation: jax.Array, epsilon: jax.Array, key: jax.Array) -> jax.Array:
        for_noise, for_coin, for_action = jax.random.split(key, 3)
        best = jnp.argmax(values(log_probabilities(params, observation, for_noise)), axis=-1)
        action = jax.random.randint(for_action, best.shape, 0, env.num_actions)
        return jnp.where(jax.random.uniform(for_coin, best.shape) < epsilon, action, best)

    def learn(agent: Any, batch_and_key: tuple[jrb.Sample, jax.Array]) -> tuple:
        params, target, moments = agent
        # Below `min_size` all weights are 0, and so is the gradient: no condition is needed.
        gradient, priorities = jax.grad(loss, has_aux=True)(params, target, *batch_and_key)
        change, moments = optimizer.update(gradient, moments)
        params = optax.apply_updates(params, change)
        target = optax.incremental_update(params, target, config.target_rate)
        return (params, target, moments), priorities

    def iterate(carry: tuple, iteration: jax.Array) -> tuple:
        agent, replay, env_state, observation, returns, key = carry
        key, for_act, for_env, for_draw, for_loss = jax.random.split(key, 5)
        progress = iteration / iterations
        action = act(agent[0], observation, config.epsilon * (1 - progress), for_act)
        after, env_state, reward, terminated, truncated, info = jax.vmap(
            env.step, in_axes=(0, 0, 0, None)
        )(jax.random.split(for_env, config.num_envs), env_state, action, env_params)
        info = {"final_observation": info["final_observation"].astype(bool)}
        after = after.astype(bool)
        row = jrb.transition(observation, action, after, reward, terminated, truncated, info)
        replay = buffer.add(replay, row)

        # One draw for all gradient steps. It is stratified, so each takes every U-th item.
        batch = buffer.sample(replay, for_draw, beta=config.beta + (1 - config.beta) * progress)
        split = lambda x: jnp.swapaxes(x.reshape(-1, config.updates, *x.shape[1:]), 0, 1)
        keys = jax.random.split(for_loss, config.updates)
        agent, priorities = jax.lax.scan(learn, agent, (jax.tree.map(split, batch), keys))
        priorities = jnp.swapaxes(priorities, 0, 1).reshape(-1)
        replay = buffer.update_priority(replay, batch, priorities)
        returns, ends = common.track(returns, reward, terminated | truncated)
        return (agent, replay, env_state, after, returns, key), ends

    key, for_env, for_net, for_noise = jax.random.split(key, 4)
    keys = jax.random.split(for_env, config.num_envs)
    observation, env_state = jax.vmap(env.reset, in_axes=(0, None))(keys, env_params)
    observation = observation.astype(bool)
    params = network.init({"params": for_net, "noise": for_noise}, observation)
    agent = params, params, optimizer.init(params)
    row = jrb.transition(observation[0], jnp.int32(0), observation[0], 0.0, False, False)
    carry = agent, buffer.init(row), env_state, observation, jnp.zeros(config.num_envs), key
    _, ends = jax.lax.scan(iterate, carry, jnp.arange(iterations))
    return common.curve(ends, config.points)


if __name__ == "__main__":
    common.main(train, Config(), RANDOM_RETURN)
