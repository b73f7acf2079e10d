"""R2D2 in a maze in which an agent without memory can only guess.

    python -m examples.agents.r2d2                  with optax and flax
    python -m examples.agents.r2d2 --no-memory      the same agent without memory

A light at the start of a corridor, seen once, shows on which side of its end the reward is. Without
memory a policy returns 0 on average, like a random one; the best return is 1.

The actor stores its recurrent state with each row. A window is sampled with the state of its first
row. The network runs over the burn-in and learns from the rows after it. The states that it
computes are written back to the buffer, so that later windows start from newer states.

References: Kapturowski et al., 2019, "Recurrent experience replay in distributed reinforcement
learning"; Bakker, 2002, "Reinforcement learning with long short-term memory" (the maze); Peng and
Williams, 1996, "Incremental multi-step Q-learning" (the targets).
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jrb
from examples.agents import common

FORWARD, LEFT, RIGHT = range(3)  # the actions


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters; `steps` are those of all environments together."""

    steps: int = 96_000
    evaluations: int = 20
    corridor: int = 10  # steps from the light to the junction
    time_limit: int = 40
    memory: bool = True  # if False, the recurrent state is zero before every observation
    num_envs: int = 16
    rollout: int = 4  # steps of each environment between two updates
    capacity: int = 16_000
    batch_size: int = 32
    burn_in: int = 4
    length: int = 16
    stride: int = 8
    hidden: int = 32
    learning_rate: float = 1e-3
    discount: float = 0.97
    trace: float = 0.8  # lambda of the targets
    target_rate: float = 0.02  # the step of the target network to the online one at each update


def reset(key: jax.Array) -> Any:
    """Returns a maze at the start of an episode."""
    return {"position": 0, "is_left": jax.random.bernoulli(key), "time": 0}


def observe(config: Config, maze: Any) -> jax.Array:
    """Returns `[light, junction]`: the light is 1 or -1 in the first step, and 0 later."""
    light = jnp.where(maze["is_left"], 1.0, -1.0) * (maze["time"] == 0)
    return jnp.stack([light, (maze["position"] == config.corridor).astype(float)])


def step(config: Config, maze: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Any]:
    """Returns the next maze, a new one after an end, and the part `next` of the transition."""
    terminated = (maze["position"] == config.corridor) & (action != FORWARD)
    reward = jnp.where((action == LEFT) == maze["is_left"], 1.0, -1.0) * terminated
    position = jnp.minimum(maze["position"] + (action == FORWARD), config.corridor)
    maze = maze | {"position": position, "time": maze["time"] + 1}
    truncated = ~terminated & (maze["time"] == config.time_limit)
    after = {"observation": observe(config, maze), "reward": reward}
    again = functools.partial(jnp.where, terminated | truncated)
    maze = jax.tree.map(again, reset(key), maze)
    return maze, after | {"terminated": terminated, "truncated": truncated}


class Network(nn.Module):
    """A recurrent network of action values."""

    config: Config

    @nn.compact
    def __call__(self, carry: Any, observation: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the recurrent state after observations `[..., 2]`, and values `[..., 3]`."""
        size, has_memory = self.config.hidden, float(self.config.memory)
        features = nn.relu(nn.Dense(size)(observation))
        carry = jax.tree.map(lambda leaf: leaf * has_memory, carry)
        carry, features = nn.OptimizedLSTMCell(size)(carry, features)
        return carry, nn.Dense(3)(features)


def first_states(config: Config, key: jax.Array, count: int) -> tuple[Any, Any]:
    """Returns the mazes and recurrent states at the start of episodes."""
    zeros = jnp.zeros((count, config.hidden))
    return jax.vmap(reset)(jax.random.split(key, count)), (zeros, zeros)


def make_buffer(config: Config) -> jrb.ReplayBuffer:
    """Returns the replay buffer."""
    options = {"partial": "pad", "priority_max_weight": 0.9, "first_only": ("hidden",)}
    return jrb.ReplayBuffer(
        capacity=config.capacity,
        num_envs=config.num_envs,
        batch_size=config.batch_size,
        sampler=jrb.Prioritized(alpha=0.9, beta=0.6),
        unit=jrb.Sequence(config.length, config.burn_in, stride=config.stride, **options),
    )


def act(config: Config, params: Any, carry: Any, epsilon: jax.Array, key: jax.Array) -> Any:
    """Takes one step in each environment; returns the new carry, and the row to store."""
    maze, hidden = carry
    observation = jax.vmap(functools.partial(observe, config))(maze)
    next_hidden, values = Network(config).apply(params, hidden, observation)
    keys = jax.random.split(key, 3)
    explores = jax.random.bernoulli(keys[0], epsilon)
    action = jax.random.randint(keys[1], epsilon.shape, 0, 3)
    action = jnp.where(explores, action, jnp.argmax(values, axis=-1))
    envs = jax.random.split(keys[2], len(epsilon))
    maze, after = jax.vmap(functools.partial(step, config))(maze, action, envs)
    row = {"observation": observation, "hidden": hidden, "action": action, "next": after}
    ended = after["terminated"] | after["truncated"]
    hidden = jax.tree.map(lambda leaf: jnp.where(ended[:, None], 0.0, leaf), next_hidden)
    return (maze, hidden), row


def unroll(config: Config, params: Any, hidden: Any, rows: jax.Array, mask: jax.Array) -> Any:
    """Returns the recurrent states after each row of windows `[B, L, ...]`, and action values."""

    def one(hidden: Any, row: Any) -> Any:
        observation, is_real = row
        following, values = Network(config).apply(params, hidden, observation)
        keep = lambda new, old: jnp.where(is_real[:, None], new, old)
        hidden = jax.tree.map(keep, following, hidden)  # masked rows leave the state unchanged
        return hidden, (hidden, values)

    hidden, outputs = jax.lax.scan(one, hidden, (jnp.swapaxes(rows, 0, 1), mask.T))
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), outputs)


def lambda_targets(config: Config, after: Any, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns value targets `[B, L]`, given the values `[B, L]` of the next observations.

    A target mixes the value after the row with the next row's target, if the window has one.
    """

    def one(later: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        reward, terminated, value, has_next = row
        mixed = jnp.where(has_next, (1 - config.trace) * value + config.trace * later, value)
        target = reward + config.discount * jnp.where(terminated, 0.0, mixed)
        return target, target

    has_next = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    rows = after["reward"].T, after["terminated"].T, values.T, has_next.T
    return jax.lax.scan(one, jnp.zeros(len(mask)), rows, reverse=True)[1].T


def td_errors(config: Config, params: Any, target: Any, batch: jrb.Sample) -> tuple[Any, Any]:
    """Returns TD errors `[B, L]`, 0 at masked rows, and the recurrent states before all rows."""
    data, mask = batch.data, batch.mask
    warm, learned = (lambda x: x[:, : config.burn_in]), (lambda x: x[:, config.burn_in :])
    after, real = jax.tree.map(learned, data["next"]), learned(mask)

    def run(params: Any) -> tuple[Any, jax.Array, jax.Array]:
        seen = data["observation"]
        before, _ = unroll(config, params, data["hidden"], warm(seen), warm(mask))
        start = jax.lax.stop_gradient(jax.tree.map(lambda leaf: leaf[:, -1], before))
        states, values = unroll(config, params, start, learned(seen), real)
        next_values = Network(config).apply(params, states, after["observation"])[1]
        joined = lambda *leaves: jnp.concatenate(leaves, axis=1)[:, :-1]
        first = jax.tree.map(lambda leaf: leaf[:, None], data["hidden"])
        return jax.tree.map(joined, first, before, states), values, next_values

    hidden, values, next_values = run(params)
    best = jnp.argmax(next_values, axis=-1, keepdims=True)  # double Q-learning
    future = jnp.take_along_axis(run(target)[2], best, axis=-1)[..., 0]
    goal = jax.lax.stop_gradient(lambda_targets(config, after, future, real))
    chosen = jnp.take_along_axis(values, learned(data["action"])[..., None], axis=-1)[..., 0]
    return jnp.where(real, goal - chosen, 0.0), hidden


def learn(config: Config, learner: Any, state: jrb.BufferState, key: jax.Array) -> Any:
    """Updates the network, and the priorities and recurrent states of the sampled windows."""
    params, target, moments = learner
    buffer = make_buffer(config)
    state, batch = buffer.draw(state, key)

    def loss(params: Any) -> Any:
        error, hidden = td_errors(config, params, target, batch)
        return jnp.mean(batch.weights[:, None] * error**2), (error, hidden)

    gradient, (error, hidden) = jax.grad(loss, has_aux=True)(params)
    change, moments = optax.adam(config.learning_rate).update(gradient, moments)
    params = optax.apply_updates(params, change)
    target = optax.incremental_update(params, target, config.target_rate)
    state = buffer.update_priority(state, batch, jnp.abs(error))
    return (params, target, moments), buffer.set(state, batch, {"hidden": hidden})


def evaluate(config: Config, params: Any, key: jax.Array) -> jax.Array:
    """Returns the mean return of one episode in each of 64 mazes, without exploration."""
    start, steps = first_states(config, key, 64), jax.random.split(key, config.time_limit)
    one = lambda carry, key: act(config, params, carry, jnp.zeros(64), key)
    after = jax.lax.scan(one, start, steps)[1]["next"]
    ended = after["terminated"] | after["truncated"]
    is_first_episode = jnp.cumsum(ended, axis=0) - ended == 0
    return (after["reward"] * is_first_episode).sum(axis=0).mean()


def train(key: jax.Array, config: Config) -> jax.Array:
    """Returns the learning curve of one training, returns of `[evaluations]` without exploring."""
    keys, buffer = jax.random.split(key, 4), make_buffer(config)
    epsilon = 0.4 ** jnp.linspace(1, 8, config.num_envs)  # each environment has its own
    carry = first_states(config, keys[0], config.num_envs)
    params = Network(config).init(keys[1], carry[1], jnp.zeros((config.num_envs, 2)))
    one_row = lambda: jax.tree.map(
        lambda leaf: leaf[0], act(config, params, carry, epsilon, key)[1]
    )
    learner = params, params, optax.adam(config.learning_rate).init(params)

    def collect(params: Any, carry: Any, state: jrb.BufferState, key: jax.Array) -> Any:
        one = lambda carry, key: act(config, params, carry, epsilon, key)
        carry, rows = jax.lax.scan(one, carry, jax.random.split(key, config.rollout))
        return carry, buffer.extend(state, rows)

    def iteration(runner: Any, key: jax.Array) -> tuple[Any, None]:
        learner, carry, state = runner
        acting, learning = jax.random.split(key)
        carry, state = collect(learner[0], carry, state, acting)
        learner, state = learn(config, learner, state, learning)
        return (learner, carry, state), None

    def period(runner: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        count = config.steps // (config.evaluations * config.rollout * config.num_envs)
        runner, _ = jax.lax.scan(iteration, runner, jax.random.split(key, count))
        return runner, evaluate(config, runner[0][0], key)

    carry, state = collect(params, carry, buffer.init(jax.eval_shape(one_row)), keys[2])
    periods = jax.random.split(keys[3], config.evaluations)
    return jax.lax.scan(period, (learner, carry, state), periods)[1]


if __name__ == "__main__":
    common.main(train, Config(), random_return=0.0)
