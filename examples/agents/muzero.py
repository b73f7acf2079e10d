"""MuZero on Catch: search in a learned model, with targets that newer searches refresh.

    python -m examples.agents.muzero        with optax, flax, gymnax and mctx

Each row is stored with the results of the search when the step was taken: a policy, and the value
of the root. Every iteration repeats the search for some rows of the buffer with the newest network,
and overwrites their targets with the results (reanalyse). The network learns from windows of rows:
it encodes the first observation, continues with the actions alone, and predicts the rewards, values
and policies of the following rows. The priority of a window is the error of its first value.

Reference: Schrittwieser et al., 2020, "Mastering Atari, Go, chess and shogi by planning with a
learned model"; Schrittwieser et al., 2021, "Online and offline reinforcement learning by planning
with a learned model" (reanalyse); Danihelka et al., 2022, "Policy improvement by planning with
Gumbel" (the search).
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import mctx
import optax

import jrb
from examples.agents import common

ENV, ENV_PARAMS = gymnax.make("Catch-bsuite")
OBSERVATION, ACTIONS = (10, 5), ENV.num_actions


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters; `steps` are those of all environments together."""

    steps: int = 60_000
    points: int = 20  # points of the learning curve
    num_envs: int = 8
    rollout: int = 2  # steps of each environment between two updates
    capacity: int = 8_192
    batch_size: int = 64
    reanalysed: int = 16  # windows whose searches are repeated in each iteration
    unroll: int = 5
    simulations: int = 12
    width: int = 64
    learning_rate: float = 2e-3
    discount: float = 0.97
    trace: float = 0.9  # lambda of the value targets


class Network(nn.Module):
    """Encoder, model and heads; each is a perceptron with one hidden layer."""

    width: int

    def setup(self) -> None:
        """Makes the layers."""
        self.encoder, self.model = self.perceptron(self.width), self.perceptron(self.width)
        self.heads, self.reward = self.perceptron(ACTIONS + 1), self.perceptron(1)

    def perceptron(self, size: int) -> nn.Module:
        """Returns a network with `size` outputs."""
        return nn.Sequential([nn.Dense(self.width), nn.relu, nn.Dense(size)])

    def predict(self, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits `[..., A]` and values `[...]`."""
        outputs = self.heads(latent)
        return outputs[..., :-1], outputs[..., -1]

    def encode(self, observation: jax.Array) -> jax.Array:
        """Returns the latents `[..., width]` of observations `[..., 10, 5]`."""
        return unit_range(self.encoder(observation.reshape(*observation.shape[:-2], -1)))

    def advance(self, latent: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the latents after actions, and the predicted rewards."""
        pair = jnp.concatenate([latent, jax.nn.one_hot(action, ACTIONS)], axis=-1)
        return unit_range(latent + self.model(pair)), self.reward(pair)[..., 0]

    def __call__(self, observation: jax.Array, action: jax.Array) -> Any:
        """Calls all parts, so that `init` creates their parameters."""
        return self.predict(self.advance(self.encode(observation), action)[0])


def unit_range(latent: jax.Array) -> jax.Array:
    """Returns latents scaled to [0, 1], so that the model can be applied many times."""
    low, high = latent.min(axis=-1, keepdims=True), latent.max(axis=-1, keepdims=True)
    return (latent - low) / (high - low + 1e-5)


def make_buffer(config: Config) -> jrb.ReplayBuffer:
    """Returns the replay buffer."""
    return jrb.ReplayBuffer(
        capacity=config.capacity,
        num_envs=config.num_envs,
        batch_size=config.batch_size,
        sampler=jrb.Prioritized(alpha=1.0, beta=1.0),
        unit=jrb.Sequence(config.unroll + 1, partial="pad"),
    )


def search(config: Config, params: Any, observation: jax.Array, key: jax.Array) -> Any:
    """Returns actions `[B]`, and the roots' policies, searched values and predicted values."""
    call = functools.partial(Network(config.width).apply, params)

    def recurrent(_: Any, key: jax.Array, action: jax.Array, latent: jax.Array) -> Any:
        latent, reward = call(latent, action, method="advance")
        logits, value = call(latent, method="predict")
        output = {"reward": reward, "discount": jnp.full_like(value, config.discount)}
        return mctx.RecurrentFnOutput(**output, prior_logits=logits, value=value), latent

    latent = call(observation, method="encode")
    logits, value = call(latent, method="predict")
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=latent)
    output = mctx.gumbel_muzero_policy(params, key, root, recurrent, config.simulations)
    return output.action, output.action_weights, output.search_tree.summary().value, value


def act(config: Config, params: Any, carry: Any, key: jax.Array) -> tuple[Any, Any]:
    """Takes one step in each environment; returns the carry, and row, priority and ends."""
    observation, env_state, returns = carry
    keys = jax.random.split(key, config.num_envs + 1)
    action, policy, value, guess = search(config, params, observation, keys[0])
    step = jax.vmap(ENV.step, in_axes=(0, 0, 0, None))
    after, env_state, reward, terminated, truncated, _ = step(
        keys[1:], env_state, action, ENV_PARAMS
    )
    outcome = {"reward": reward, "terminated": terminated, "truncated": truncated}
    row = {"observation": observation, "action": action, "policy": policy, "value": value}
    returns, ends = common.track(returns, reward, terminated | truncated)
    return (after, env_state, returns), (row | {"next": outcome}, jnp.abs(value - guess), ends)


def reanalyse(config: Config, params: Any, state: jrb.BufferState, key: jax.Array) -> Any:
    """Repeats the search at all rows of some windows, and overwrites the targets in the buffer."""
    buffer, keys = make_buffer(config), jax.random.split(key)
    state, batch = buffer.draw(state, keys[0], batch_size=config.reanalysed)
    observation = batch.data["observation"]
    _, policy, value, _ = search(config, params, observation.reshape(-1, *OBSERVATION), keys[1])
    windows = lambda leaf: leaf.reshape(*batch.mask.shape, *leaf.shape[1:])
    return buffer.set(state, batch, {"policy": windows(policy), "value": windows(value)})


def value_targets(config: Config, batch: jrb.Sample) -> jax.Array:
    """Returns value targets `[B, L]`: lambda-returns of the searched values, 0 at masked rows.

    If the window has no next row and the row does not terminate the episode, the target is the
    row's own value.
    """

    def one(later: Any, row: Any) -> tuple[Any, jax.Array]:
        (target, next_value), (reward, terminated, value, has_next) = later, row
        mixed = (1 - config.trace) * next_value + config.trace * target
        target = reward + config.discount * jnp.where(terminated, 0.0, mixed)
        target = jnp.where(has_next | terminated, target, value)
        return (target, value), target

    after, value = batch.data["next"], batch.data["value"]
    has_next = jnp.pad(batch.mask[:, 1:], ((0, 0), (0, 1)))
    rows = after["reward"].T, after["terminated"].T, value.T, has_next.T
    zeros = jnp.zeros(len(value))
    targets = jax.lax.scan(one, (zeros, zeros), rows, reverse=True)[1].T
    return jnp.where(batch.mask, targets, 0.0)


def losses(config: Config, params: Any, batch: jrb.Sample) -> tuple[jax.Array, jax.Array]:
    """Returns the loss, and the errors `[B]` of the windows' first values."""
    call = functools.partial(Network(config.width).apply, params)
    data, targets = batch.data, value_targets(config, batch)
    rewards = jnp.where(batch.mask, data["next"]["reward"], 0.0)

    def one(latent: jax.Array, row: Any) -> tuple[jax.Array, Any]:
        action, reward, policy, target, is_real = row
        logits, value = call(latent, method="predict")
        latent, guess = call(latent, action, method="advance")
        policy_loss = optax.softmax_cross_entropy(logits, policy) * is_real
        loss = policy_loss + (value - target) ** 2 + (guess - reward) ** 2
        # The gradient is halved at each step, so that it does not grow with the number of steps.
        return (latent + jax.lax.stop_gradient(latent)) / 2, (loss, target - value)

    rows = data["action"], rewards, data["policy"], targets, batch.mask
    rows = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), rows)
    latent = call(data["observation"][:, 0], method="encode")
    _, (loss, errors) = jax.lax.scan(one, latent, rows)
    return jnp.mean(batch.weights * loss.mean(axis=0)), errors[0]


def learn(config: Config, learner: Any, state: jrb.BufferState, key: jax.Array) -> Any:
    """Updates the network and the priorities of the windows."""
    (params, moments), buffer = learner, make_buffer(config)
    state, batch = buffer.draw(state, key)
    gradient, errors = jax.grad(functools.partial(losses, config), has_aux=True)(params, batch)
    change, moments = optax.adam(config.learning_rate).update(gradient, moments)
    state = buffer.update_priority(state, batch, jnp.abs(errors))
    return (optax.apply_updates(params, change), moments), state


def train(key: jax.Array, config: Config) -> jax.Array:
    """Returns the learning curve of one training, the returns of its episodes, `[points]`."""
    keys, buffer = jax.random.split(key, 4), make_buffer(config)
    envs = jax.random.split(keys[0], config.num_envs)
    observation, env_state = jax.vmap(ENV.reset, in_axes=(0, None))(envs, ENV_PARAMS)
    carry = observation, env_state, jnp.zeros(config.num_envs)
    params = Network(config.width).init(keys[1], observation, jnp.zeros(config.num_envs, int))
    learner = params, optax.adam(config.learning_rate).init(params)
    one_row = lambda: jax.tree.map(lambda leaf: leaf[0], act(config, params, carry, key)[1][0])
    state = buffer.init(jax.eval_shape(one_row))

    def iteration(runner: Any, key: jax.Array) -> tuple[Any, Any]:
        learner, carry, state = runner
        keys = jax.random.split(key, 3)
        steps = jax.random.split(keys[0], config.rollout)
        carry, (rows, errors, ends) = jax.lax.scan(
            functools.partial(act, config, learner[0]), carry, steps
        )
        state = buffer.extend(state, rows, priorities=errors)
        state = reanalyse(config, learner[0], state, keys[1])
        learner, state = learn(config, learner, state, keys[2])
        return (learner, carry, state), ends

    count = config.steps // (config.rollout * config.num_envs)
    _, ends = jax.lax.scan(iteration, (learner, carry, state), jax.random.split(keys[2], count))
    return common.curve(jax.tree.map(jnp.ravel, ends), config.points)


if __name__ == "__main__":
    common.main(train, Config(), random_return=-0.6)
