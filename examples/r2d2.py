"""R2D2: Q-learning with a recurrent network, from prioritized windows with stored states.

    python -m examples.r2d2                     with gymnasium and optax

The pole has to be balanced without being told how fast it moves: what the network sees now is not
enough, it has to remember. Each row is stored with the recurrent state that the actor had before
it. A window is drawn with the state of its first row alone; the network runs over the burn-in to
bring that state up to date, and learns from the rows behind it.

Reference: Kapturowski et al., 2019, "Recurrent experience replay in distributed reinforcement
learning"; Peng and Williams, 1996, "Incremental multi-step Q-learning" (what `goals` are).
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

ENVS, MOST, HIDDEN = 8, 200, 64
BATCH, BURN_IN, LENGTH, ENOUGH = 32, 8, 16, 1000
DISCOUNT, TRACE, RATE, FOLLOW = 0.99, 0.9, 1e-3, 0.005
EPSILONS = 0.4 ** (1 + 7 * jnp.arange(ENVS) / (ENVS - 1))  # each actor explores in its own way

buffer = jrb.ReplayBuffer(
    capacity=5000 * ENVS,
    num_envs=ENVS,
    batch_size=BATCH,
    min_size=ENOUGH,
    sampler=jrb.Prioritized(alpha=0.9, beta=0.6),
    unit=jrb.Sequence(
        LENGTH, burn_in=BURN_IN, partial="pad", priority_max_weight=0.9, first_only=("hidden",)
    ),
    cast=True,
)
optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(RATE))


class Unmoved(gymnasium.ObservationWrapper):
    """A cart and a pole of which only the places are seen, not the velocities."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1", max_episode_steps=MOST))
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """The cart's place and the pole's angle, brought to a range of about one."""
        return observation[[0, 2]] / np.float32([2.4, 0.2])


def environments() -> gymnasium.vector.VectorEnv:
    """Each begins anew in the step in which it ends, so that every step is one of an episode."""
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    return gymnasium.vector.SyncVectorEnv([Unmoved] * ENVS, autoreset_mode=mode)


def network(key: jax.Array) -> Any:
    """Parameters of a recurrent network with two heads: a value, and what each action adds."""
    keys, dense = jax.random.split(key, 4), jax.nn.initializers.lecun_uniform()
    return {
        "in": dense(keys[0], (2, 3 * HIDDEN)),
        "hidden": dense(keys[1], (HIDDEN, 3 * HIDDEN)),
        "bias": jnp.zeros(3 * HIDDEN),
        "value": dense(keys[2], (HIDDEN, 1)),
        "advantage": dense(keys[3], (HIDDEN, 2)),
    }


def remember(params: Any, hidden: jax.Array, observation: jax.Array) -> jax.Array:
    """The next recurrent state `[..., HIDDEN]`: a gated recurrent unit."""
    seen = jnp.split(observation @ params["in"] + params["bias"], 3, axis=-1)
    known = jnp.split(hidden @ params["hidden"], 3, axis=-1)
    reset, keep = jax.nn.sigmoid(seen[0] + known[0]), jax.nn.sigmoid(seen[1] + known[1])
    new = jnp.tanh(seen[2] + reset * known[2])
    return new + keep * (hidden - new)


def values(params: Any, hidden: jax.Array) -> jax.Array:
    """Q of each action `[..., 2]`, on the scale of `squeezed`."""
    advantage = hidden @ params["advantage"]
    return hidden @ params["value"] + advantage - advantage.mean(-1, keepdims=True)


def squeezed(x: jax.Array) -> jax.Array:
    """Large values closer together: sign(x) (sqrt(|x| + 1) - 1) + x / 1000.

    Without it the network learns half as fast.
    """
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + 1e-3 * x


def widened(y: jax.Array) -> jax.Array:
    """The inverse of `squeezed`."""
    root = (jnp.sqrt(1 + 4e-3 * (jnp.abs(y) + 1 + 1e-3)) - 1) / 2e-3
    return jnp.sign(y) * (root**2 - 1)


def unrolled(params: Any, hidden: jax.Array, seen: jax.Array, mask: jax.Array) -> jax.Array:
    """The states `[B, L, HIDDEN]` after each row of windows `[B, L, 2]`, from those before."""

    def step(hidden: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        seen, real = row
        hidden = jnp.where(real[:, None], remember(params, hidden, seen), hidden)
        return hidden, hidden

    rows = jnp.swapaxes(seen, 0, 1), mask.T
    return jnp.swapaxes(jax.lax.scan(step, hidden, rows)[1], 0, 1)


def goals(after: Any, future: jax.Array, real: jax.Array) -> jax.Array:
    """What the chosen actions should be worth `[B, L]`: of later goals and of `future` a mixture.

    `future`, float32 `[B, L]`, is the value of each row's next observation. An episode that was cut
    off would have gone on, and only a fallen pole is worth nothing: `terminated` alone counts here.
    Episodes end for either reason, and no window goes beyond.
    """

    def step(later: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        reward, terminated, future, follows = row
        mixed = jnp.where(follows, (1 - TRACE) * future + TRACE * later, future)
        goal = reward + DISCOUNT * jnp.where(terminated, 0.0, mixed)
        return goal, goal

    follows = jnp.pad(real[:, 1:], ((0, 0), (0, 1)))  # whether the window has the row behind
    rows = after["reward"].T, after["terminated"].T, future.T, follows.T
    return jax.lax.scan(step, jnp.zeros(len(real)), rows, reverse=True)[1].T


def errors(params: Any, target: Any, batch: jrb.Sample) -> jax.Array:
    """Temporal-difference errors `[B, L]`; 0 for rows that are not real."""
    warm, rest = slice(None, BURN_IN), slice(BURN_IN, None)
    seen, after = batch.data["observation"], jax.tree.map(lambda x: x[:, rest], batch.data["next"])
    real, action = batch.mask[:, rest], batch.data["action"][:, rest, None]

    def states(params: Any) -> jax.Array:
        before = unrolled(params, batch.data["hidden"], seen[:, warm], batch.mask[:, warm])
        return unrolled(params, jax.lax.stop_gradient(before[:, -1]), seen[:, rest], real)

    def worth_after(params: Any, states: jax.Array) -> jax.Array:
        return values(params, remember(params, states, after["observation"]))

    online = states(params)
    best = jnp.argmax(worth_after(params, online), axis=-1, keepdims=True)  # double Q-learning
    future = jnp.take_along_axis(worth_after(target, states(target)), best, axis=-1)[..., 0]
    goal = jax.lax.stop_gradient(squeezed(goals(after, widened(future), real)))
    chosen = jnp.take_along_axis(values(params, online), action, axis=-1)[..., 0]
    return jnp.where(real, goal - chosen, 0.0)


@functools.partial(jax.jit, donate_argnames="state")
def learn(agent: Any, state: jrb.BufferState, key: jax.Array) -> Any:
    """One step of the optimizer, and new priorities of the windows that it saw."""
    params, target, moments = agent
    batch = buffer.sample(state, key)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        error = errors(params, target, batch)
        return jnp.mean(batch.weights[:, None] * error**2), error

    gradient, error = jax.grad(loss, has_aux=True)(params)
    change, moments = optimizer.update(gradient, moments)
    params = optax.apply_updates(params, change)
    target = optax.incremental_update(params, target, FOLLOW)
    return (params, target, moments), buffer.update_priority(state, batch, jnp.abs(error))


@jax.jit
def act(
    params: Any, hidden: jax.Array, observation: jax.Array, key: jax.Array, epsilon: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Actions `[E]`, now and then random ones; and the states after what was seen."""
    hidden = remember(params, hidden, observation)
    coin, which = jax.random.split(key)
    random = jax.random.randint(which, (ENVS,), 0, 2)
    explores = jax.random.bernoulli(coin, epsilon, (ENVS,))
    return jnp.where(explores, random, jnp.argmax(values(params, hidden), axis=-1)), hidden


def transition(seen: Any, hidden: Any, action: Any, stepped: Any) -> tuple[Any, np.ndarray]:
    """The row to be stored, leaves `[E, ...]`; and which environments begin anew, bool `[E]`."""
    observation, reward, terminated, truncated, info = stepped
    after, ended = observation.copy(), terminated | truncated
    for env in np.flatnonzero(ended):  # what came back is the first of its next episode
        after[env] = info["final_obs"][env]
    following = {"observation": after, "reward": reward.astype(np.float32)}
    following |= {"terminated": terminated, "truncated": truncated}
    return {"observation": seen, "hidden": hidden, "action": action, "next": following}, ended


def evaluate(params: Any, memory: bool = True, seed: int = 10_000) -> float:
    """The mean return of an episode in each environment, without exploration."""
    world, total, running = environments(), np.zeros(ENVS), np.ones(ENVS, bool)
    (seen, _), hidden = world.reset(seed=seed), jnp.zeros((ENVS, HIDDEN))
    while running.any():
        action, hidden = act(params, hidden * float(memory), seen, jax.random.key(0), 0.0)
        seen, reward, terminated, truncated, _ = world.step(np.asarray(action))
        total += reward * running
        running &= ~(terminated | truncated)
    return float(total.mean())


def run(
    steps: int = 3000, seed: int = 0, memory: bool = True, every: int = 500
) -> tuple[Any, list[float]]:
    """Trains; the parameters, and what an episode gives before and after every so many steps.

    Args:
        steps: of each environment; with every second one goes one of the optimizer.
        seed: of all that is random.
        memory: whether the network has more to go by than what it sees now.
        every: how often it is tested.
    """
    key, first = jax.random.split(jax.random.key(seed))
    params = network(first)
    agent, scores = (params, params, optimizer.init(params)), [evaluate(params, memory)]
    world, verbs, state = environments(), jrb.jitted(buffer), None
    (seen, _), hidden = world.reset(seed=seed), jnp.zeros((ENVS, HIDDEN))
    for step in range(1, steps + 1):
        acting, learning = jax.random.split(jax.random.fold_in(key, step))
        hidden = hidden * float(memory)
        action, after = act(agent[0], hidden, seen, acting, EPSILONS)
        action = np.asarray(action)
        stepped = world.step(action)
        row, ended = transition(seen, hidden, action, stepped)
        if state is None:
            state = verbs.init(jax.tree.map(lambda leaf: leaf[0], row))
        state = verbs.add(state, row)
        seen, hidden = stepped[0], jnp.where(ended[:, None], 0.0, after)
        if step % 2 == 0 and step * ENVS >= ENOUGH:
            agent, state = learn(agent, state, learning)
        if step % every == 0:
            scores.append(evaluate(agent[0], memory))
    return agent[0], scores


def main() -> None:
    """Trains, and says how well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000, help="of each environment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forgetful", action="store_true", help="without memory, to compare")
    options = parser.parse_args()
    _, scores = run(options.steps, options.seed, not options.forgetful)
    listed = ", ".join(f"{score:.0f}" for score in scores)
    print(f"an episode of at most {MOST} steps lasts {listed}: before, and every 500 steps")


if __name__ == "__main__":
    main()
