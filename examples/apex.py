"""Ape-X: actors in their own processes fill a prioritized buffer, from which a learner samples.

    python -m examples.apex      with gymnasium, optax and ray

Four actors play with copies of the parameters, and explore at different rates. Each sends its
transitions, with initial priorities, to its stream of a buffer in another process. The learner
receives batches that were drawn ahead, and sends new priorities back. A limit fixes the number of
samples per step of an actor, whatever the speeds of the processes.

Reference: Horgan et al., 2018, "Distributed prioritized experience replay".
"""

import argparse
import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import jrb

ACTORS, MOST, WIDTH, CHUNK = 4, 200, 128, 50
BATCH, DISCOUNT, STEPS_BACK, RATE, FOLLOW = 64, 0.99, 3, 2e-3, 0.01

buffer = jrb.ReplayBuffer(
    capacity=20_000,
    batch_size=BATCH,
    sampler=jrb.Prioritized(alpha=0.6, beta=0.4),
    unit=jrb.NStep(STEPS_BACK, DISCOUNT),
)
limits = jrb.limits.SampleToInsert(ratio=8, min_size=1000, tolerance=2000)
optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(RATE))
EXAMPLE = {
    "observation": np.zeros(4, np.float32),
    "action": np.int32(0),
    "next": {
        "observation": np.zeros(4, np.float32),
        "reward": np.float32(0),
        "terminated": np.bool_(False),
        "truncated": np.bool_(False),
    },
}


def network(key: jax.Array) -> Any:
    """Returns the initial parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    dense = jax.nn.initializers.lecun_uniform()
    return {
        "in": dense(first, (4, WIDTH)),
        "bias": jnp.zeros(WIDTH),
        "out": dense(second, (WIDTH, 2)),
    }


def values(params: Any, observation: Any) -> Any:
    """Returns the action values `[..., 2]`; in NumPy for actors, in JAX for the learner."""
    hidden = observation @ params["in"] + params["bias"]
    return (hidden * (hidden > 0)) @ params["out"]


def epsilon(actor: int) -> float:
    """Returns an actor's rate of random actions, the paper's 0.4^(1 + 7 i / (N - 1))."""
    return 0.4 ** (1 + 7 * actor / (ACTORS - 1))


class Parameters:
    """A Ray actor that holds the newest parameters for all actors."""

    def __init__(self, newest: Any) -> None:
        self._newest = newest

    def put(self, newest: Any) -> None:
        """Replaces the parameters by newer ones."""
        self._newest = newest

    def get(self) -> Any:
        """Returns the newest parameters."""
        return self._newest


class Actor:
    """A Ray actor that plays one environment, and sends its transitions to one stream."""

    def __init__(self, replay: jrb.remote.Remote, number: int, seed: int) -> None:
        self._replay, self._number = replay, number
        self._rng = np.random.default_rng([seed, number])
        self._world = gymnasium.make("CartPole-v1", max_episode_steps=MOST)
        self._seen, _ = self._world.reset(seed=seed + number)

    def play(self, parameters: Any) -> None:
        """Plays until the process is killed."""
        while True:
            params = ray.get(parameters.get.remote())
            steps = [self._step(params) for _ in range(CHUNK)]
            items = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
            surprise = self._surprise(params, items)
            self._replay.extend(items, stream=self._number, priorities=surprise)

    def _step(self, params: Any) -> dict:
        seen, explores = self._seen, self._rng.random() < epsilon(self._number)
        action = self._rng.integers(2) if explores else np.argmax(values(params, seen))
        observation, reward, terminated, truncated, _ = self._world.step(int(action))
        self._seen = observation
        if terminated or truncated:
            self._seen, _ = self._world.reset()
        after = {"observation": observation, "reward": np.float32(reward)}
        after |= {"terminated": np.bool_(terminated), "truncated": np.bool_(truncated)}
        return {"observation": seen, "action": np.int32(action), "next": after}

    def _surprise(self, params: Any, items: Any) -> np.ndarray:
        """Returns the absolute one-step TD errors, `[T]`."""
        after, rows = items["next"], np.arange(CHUNK)
        future = values(params, after["observation"]).max(axis=-1) * ~after["terminated"]
        chosen = values(params, items["observation"])[rows, items["action"]]
        return np.abs(after["reward"] + DISCOUNT * future - chosen)


@functools.partial(jax.jit, donate_argnums=0)
def learn(agent: Any, batch: jrb.Sample) -> tuple[Any, jax.Array]:
    """Takes one optimizer step; returns the agent, and the absolute errors `[B]`."""
    params, target, moments = agent
    data, after, rows = batch.data, batch.data["next"], jnp.arange(BATCH)
    best = jnp.argmax(values(params, after["observation"]), axis=-1)
    future = values(target, after["observation"])[rows, best]
    discount = jnp.where(after["terminated"], 0.0, batch.info["discount"])
    goal = after["reward"] + discount * future

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        error = values(params, data["observation"])[rows, data["action"]] - goal
        return jnp.mean(batch.weights * optax.huber_loss(error)), error

    change, errors = jax.grad(loss, has_aux=True)(params)
    change, moments = optimizer.update(change, moments)
    params = optax.apply_updates(params, change)
    target = optax.incremental_update(params, target, FOLLOW)
    return (params, target, moments), jnp.abs(errors)


def evaluate(params: Any, episodes: int = 10) -> float:
    """Returns the mean return of episodes without exploration."""
    world, total = gymnasium.make("CartPole-v1", max_episode_steps=MOST), 0.0
    for seed in range(10_000, 10_000 + episodes):
        (seen, _), over = world.reset(seed=seed), False
        while not over:
            action = int(np.argmax(values(params, seen)))
            seen, reward, terminated, truncated, _ = world.step(action)
            total, over = total + float(reward), terminated or truncated
    return total / episodes


def run(steps: int = 6000, seed: int = 0) -> tuple[float, float, dict]:
    """Trains; returns the mean returns before and after, and the buffer's statistics."""
    params = network(jax.random.key(seed))
    agent = params, jax.tree.map(jnp.copy, params), optimizer.init(params)
    before = evaluate(jax.device_get(params))
    parameters = ray.remote(num_cpus=0)(Parameters).remote(jax.device_get(params))
    make = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Actor)
    with jrb.remote.serve(
        buffer, EXAMPLE, streams=ACTORS, limits=limits, seed=seed, num_cpus=0
    ) as replay:
        actors = [make.remote(replay, number, seed) for number in range(ACTORS)]
        for actor in actors:
            actor.play.remote(parameters)
        batches = replay.ahead(depth=4)
        for step in range(steps):
            batch = next(batches)
            agent, errors = learn(agent, batch)
            replay.update_priority(batch, errors)
            if step % 10 == 0:
                parameters.put.remote(jax.device_get(agent[0]))
        stats = replay.stats()
        for actor in actors:
            ray.kill(actor)
    return before, evaluate(jax.device_get(agent[0])), stats


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6000, help="number of the learner's steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ray.init(include_dashboard=False)
    before, after, stats = run(options.steps, options.seed)
    print(f"an episode of at most {MOST} steps lasts {before:.0f} before, {after:.0f} after")
    print(f"{stats['received']} steps were played, {stats['draws']} batches drawn")
