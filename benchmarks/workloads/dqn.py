"""A DQN on CartPole in one jitted scan, in the style of purejaxrl, with any of three buffers.

10 environments; after each of their steps a gradient step on 128 transitions.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jrb
from jrb.demo import training

optax = importlib.import_module("optax")

E, B, DISCOUNT, EPSILON = 10, 128, 0.99, 0.05
Train = Callable[[jax.Array], Any]


class Replay(NamedTuple):
    """The functions of a buffer: `init(example)`, `add(state, rows)`, `sample(state, key)`."""

    init: Callable[[Any], Any]
    add: Callable[[Any, Any], Any]
    sample: Callable[[Any, jax.Array], Any]


def ours(capacity: int) -> Replay:
    """Returns a uniform buffer of jrb."""
    buffer = jrb.ReplayBuffer(capacity // E * E, num_envs=E, batch_size=B)
    return Replay(buffer.init, buffer.add, lambda state, key: buffer.sample(state, key).data)


def flashbax(capacity: int) -> Replay:
    """Returns an item buffer of flashbax."""
    make = importlib.import_module("flashbax").make_item_buffer
    buffer = make(max_length=capacity, min_length=1, sample_batch_size=B, add_batches=True)
    return Replay(buffer.init, buffer.add, lambda state, key: buffer.sample(state, key).experience)


def brax(capacity: int) -> Replay:
    """Returns brax's uniform queue, whose state contains a key."""
    queues = importlib.import_module("brax.training.replay_buffers")
    made: list[Any] = []

    def init(example: Any) -> Any:
        made.append(queues.UniformSamplingQueue(capacity, example, B))
        return made[-1].init(jax.random.key(0))

    def sample(state: Any, key: jax.Array) -> Any:
        return made[-1].sample_internal(state.replace(key=key))[1]

    return Replay(init, lambda state, rows: made[-1].insert_internal(state, rows), sample)


REPLAYS: dict[str, Callable[[int], Replay]] = {"jrb": ours, "flashbax": flashbax, "brax": brax}


def train(replay: Replay, steps: int) -> Train:
    """Returns a function from a key to the network after `steps` environment steps."""
    env, optimizer = training.Environment("CartPole-v1", E), optax.adam(3e-4)
    widths = (env.width, 64, 64, env.actions)

    def iterate(carry: Any, key: jax.Array) -> tuple[Any, None]:
        network, target, moments, held, env_state, seen, time = carry
        act, step, reset, draw, coin = jax.random.split(key, 5)
        greedy = training.action_values(network, seen).argmax(axis=1).astype(jnp.int32)
        random = jax.random.randint(act, (E,), 0, env.actions)
        action = jnp.where(jax.random.uniform(coin, (E,)) < EPSILON, random, greedy)
        env_state, seen, row = played(env, env_state, seen, action, step, reset)
        held = replay.add(held, row)
        change = jax.grad(loss)(network, target, replay.sample(held, draw))
        change, moments = optimizer.update(change, moments, network)
        network = optax.apply_updates(network, change)
        fresh = time % 50 == 0
        target = jax.tree.map(lambda new, old: jnp.where(fresh, new, old), network, target)
        return (network, target, moments, held, env_state, seen, time + 1), None

    def run(key: jax.Array) -> Any:
        begin, net, rest = jax.random.split(key, 3)
        seen, env_state = env.reset(begin)
        network, seen = training.new_network(net, widths), env.flat(seen)
        held = replay.init(example(env))
        carry = (network, network, optimizer.init(network), held, env_state, seen, jnp.int32(0))
        return jax.lax.scan(iterate, carry, jax.random.split(rest, max(1, steps // E)))[0][0]

    return run


def example(env: Any) -> Any:
    """Returns one transition of float32 leaves, which all three buffers can hold."""
    seen, number = np.zeros(env.width, np.float32), np.float32(0)
    return {"obs": seen, "action": number, "reward": number, "done": number, "next_obs": seen}


def played(env: Any, state: Any, seen: Any, action: Any, step: Any, reset: Any) -> tuple:
    """Steps all environments and resets those whose episode ends; returns also the row."""
    state, step_rows = env.step(step, state, action)
    after, done = step_rows["observation"], step_rows["done"]
    begun, fresh = env.reset(reset)
    row = {"obs": seen, "action": action.astype(jnp.float32), "reward": step_rows["reward"]}
    row |= {"done": done.astype(jnp.float32), "next_obs": after}
    pick = lambda new, old: jnp.where(done.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
    return jax.tree.map(pick, fresh, state), pick(env.flat(begun), after), row


def loss(network: Any, target: Any, batch: Any) -> jax.Array:
    """Returns the mean squared error of Q-learning."""
    ahead = training.action_values(target, batch["next_obs"]).max(axis=1)
    goal = batch["reward"] + DISCOUNT * (1 - batch["done"]) * ahead
    action = batch["action"].astype(jnp.int32)[:, None]
    values = jnp.take_along_axis(training.action_values(network, batch["obs"]), action, axis=1)
    return jnp.mean((values[:, 0] - goal) ** 2)
