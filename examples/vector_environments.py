"""Q-learning from vector environments of Gymnasium, without storing their reset steps.

    python -m examples.vector_environments      with gymnasium and optax

By default, such an environment resets in the step after the last one of an episode: this step
ignores the action and returns the first observation of the next episode. It is not a transition.
With `writer=jrb.PerEnvironment()`, a mask leaves it out for the environments that reset, and the
steps of all others are stored.

Reference: Mnih et al., 2015, "Human-level control through deep reinforcement learning"; van Hasselt
et al., 2016, "Deep reinforcement learning with double Q-learning".
"""

import argparse
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrb

ENVS, MOST, WIDTH = 8, 200, 128
BATCH, DISCOUNT, RATE, FOLLOW, ENOUGH = 128, 0.99, 2e-3, 0.01, 1000

buffer = jrb.ReplayBuffer(
    capacity=2500 * ENVS,
    num_envs=ENVS,
    batch_size=BATCH,
    min_size=ENOUGH,
    unit=jrb.NStep(3, DISCOUNT),
    writer=jrb.PerEnvironment(),
    cast=True,
)
optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(RATE))


def environments() -> gymnasium.vector.VectorEnv:
    """Returns CartPole environments, each of which resets in the step after its end."""
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    make = lambda: gymnasium.make("CartPole-v1", max_episode_steps=MOST)
    return gymnasium.vector.SyncVectorEnv([make] * ENVS, autoreset_mode=mode)


def network(key: jax.Array) -> Any:
    """Returns the initial parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    dense = jax.nn.initializers.lecun_uniform()
    return {
        "in": dense(first, (4, WIDTH)),
        "bias": jnp.zeros(WIDTH),
        "out": dense(second, (WIDTH, 2)),
    }


def values(params: Any, observation: jax.Array) -> jax.Array:
    """Returns the action values, `[..., 2]`."""
    hidden = jax.nn.relu(observation @ params["in"] + params["bias"])
    return hidden @ params["out"]


@jax.jit
def act(params: Any, observation: jax.Array, key: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Returns epsilon-greedy actions `[E]`."""
    coin, which = jax.random.split(key)
    random = jax.random.randint(which, (ENVS,), 0, 2)
    explores = jax.random.bernoulli(coin, epsilon, (ENVS,))
    return jnp.where(explores, random, jnp.argmax(values(params, observation), axis=-1))


@functools.partial(jax.jit, donate_argnames="state")
def learn(agent: Any, state: jrb.BufferState, key: jax.Array) -> Any:
    """Takes one optimizer step; returns the agent and the buffer's state."""
    params, target, moments = agent
    batch = buffer.sample(state, key)
    data, after = batch.data, batch.data["next"]
    best = jnp.argmax(values(params, after["observation"]), axis=-1, keepdims=True)
    future = jnp.take_along_axis(values(target, after["observation"]), best, axis=-1)[:, 0]
    goal = after["reward"] + batch.info["discount"] * jnp.where(after["terminated"], 0.0, future)

    def loss(params: Any) -> jax.Array:
        worth = values(params, data["observation"])
        chosen = jnp.take_along_axis(worth, data["action"][:, None], axis=-1)[:, 0]
        return jnp.mean(batch.mask * optax.huber_loss(chosen, goal))

    change, moments = optimizer.update(jax.grad(loss)(params), moments)
    params = optax.apply_updates(params, change)
    return (params, optax.incremental_update(params, target, FOLLOW), moments), state


def evaluate(params: Any, seed: int = 10_000) -> float:
    """Returns the mean return of one episode in each environment, without exploration."""
    world, total, running = environments(), np.zeros(ENVS), np.ones(ENVS, bool)
    seen, _ = world.reset(seed=seed)
    while running.any():
        action = act(params, seen, jax.random.key(0), 0.0)
        seen, reward, terminated, truncated, _ = world.step(np.asarray(action))
        total += reward * running
        running &= ~(terminated | truncated)
    return float(total.mean())


def run(steps: int = 4000, seed: int = 0) -> tuple[float, float, jrb.BufferState]:
    """Trains; returns the mean returns before and after, and the final state of the buffer."""
    key, first = jax.random.split(jax.random.key(seed))
    params = network(first)
    agent, methods, state = (params, params, optimizer.init(params)), jrb.jitted(buffer), None
    before, world = evaluate(params), environments()
    (seen, _), ended = world.reset(seed=seed), np.zeros(ENVS, bool)
    for step in range(steps):
        acting, learning = jax.random.split(jax.random.fold_in(key, step))
        epsilon = max(0.05, 1 - 2 * step / steps)
        action = np.asarray(act(agent[0], seen, acting, epsilon))
        observation, reward, terminated, truncated, _ = world.step(action)
        following = {"observation": observation, "reward": np.float32(reward)}
        following |= {"terminated": terminated, "truncated": truncated}
        row = {"observation": seen, "action": action, "next": following}
        if state is None:
            state = methods.init(jax.tree.map(lambda leaf: leaf[0], row))
        state = methods.add(state, row, mask=~ended)  # environments that had ended only reset
        seen, ended = observation, terminated | truncated
        if step * ENVS >= ENOUGH:
            agent, state = learn(agent, state, learning)
    return before, evaluate(agent[0]), state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="steps of each environment")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    before, after, _ = run(options.steps, options.seed)
    print(f"an episode of at most {MOST} steps lasts {before:.0f} before, {after:.0f} after")
