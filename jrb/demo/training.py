"""A double DQN with prioritized replay: environment, buffer and network inside one jit.

    jrb demo --env Breakout-MinAtar --steps 400000 --seeds 1 --seed 0 --devices 1

One iteration steps E environments, adds the E transitions, draws U batches at once, takes U
gradient steps, and writes the U batches' priorities back. A jitted scan runs many iterations; the
training is cut into chunks of them only so that the progress bar can move. With `seeds=K`, K whole
trainings run side by side under `vmap`, each with a buffer of its own.

With `devices=D`, environments, buffer and batches are cut over D devices, and each has the network:
the buffer is a `jrb.Sharded` of D shards. The step is the same; XLA takes the mean of gradients.

References: van Hasselt et al., 2016, "Deep reinforcement learning with double Q-learning", eq. 4.
Schaul et al., 2016, "Prioritized experience replay", algorithm 1. Young and Tian, 2019, "MinAtar".
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrb._util import wording
from jrb.buffer import ReplayBuffer
from jrb.demo import devices
from jrb.samplers import Prioritized
from jrb.sharding import Sharded
from jrb.state import BufferState, Sample

gymnax: Any = wording.require("gymnax", "demo")
optax: Any = wording.require("optax", "demo")

Network = list[tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, and how.

    Attributes:
        env: a gymnax environment with discrete actions.
        steps: environment steps of each training, over all its environments.
        seeds: K, trainings side by side.
        seed: of the first training; the others count on.
        num_envs: E.
        updates: U, gradient steps an iteration.
        batch_size: B, transitions a gradient step.
        capacity: N, transitions held, rounded down to a multiple of E.
        hidden: widths of the hidden layers.
        learning_rate: at its peak, after a linear rise over the first 2 % of updates; it falls to a
            tenth along a cosine.
        discount: gamma.
        target_rate: part of the network that the target network takes over at each update.
        exploration: part of the training in which epsilon falls from 1 to `epsilon`.
        epsilon: probability of a random action at the end.
        alpha, beta, eps: of the prioritized sampler.
        chunks: how often the progress bar moves.
        devices: D, which divides E and B.
    """

    env: str = "Breakout-MinAtar"
    steps: int = 400_000
    seeds: int = 1
    seed: int = 0
    num_envs: int = 64
    updates: int = 8
    batch_size: int = 128
    capacity: int = 100_000
    hidden: tuple[int, ...] = (128, 128)
    learning_rate: float = 1e-3
    discount: float = 0.99
    target_rate: float = 0.005
    exploration: float = 0.1
    epsilon: float = 0.01
    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-3
    chunks: int = 40
    devices: int = 1

    def __post_init__(self) -> None:
        known = gymnax.registered_envs
        if self.env not in known:
            raise ValueError(f"env: expected one of {', '.join(known)}, got {self.env!r}.")

    @property
    def iterations(self) -> int:
        """Iterations of one chunk, at least one."""
        return max(1, self.steps // self.num_envs // self.chunks)

    @property
    def played(self) -> int:
        """Environment steps that one training really takes."""
        return self.iterations * self.chunks * self.num_envs


class Carry(NamedTuple):
    """What a training hands from one iteration to the next."""

    key: jax.Array
    network: Network
    target: Network
    optimizer: Any
    replay: BufferState
    env_state: Any
    observation: jax.Array
    running_return: jax.Array
    iteration: jax.Array


class Finished(NamedTuple):
    """The episodes that ended: the sum of their returns, and how many there were."""

    returns: jax.Array
    episodes: jax.Array


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training gave. C chunks, K seeds.

    Attributes:
        returns: sums of the returns of the episodes that ended, float `[C, K]`.
        episodes: how many ended, `[C, K]`.
        priorities: of the transitions held at the end, float, of the first seed.
        seconds: how long it took, compiling included.
    """

    returns: np.ndarray
    episodes: np.ndarray
    priorities: np.ndarray
    seconds: float

    def mean_return(self, parts: int) -> np.ndarray:
        """The mean return of each of so many equal parts of the training, `[parts, K]`.

        NaN where no episode ended.
        """
        split = lambda x: np.stack([part.sum(0) for part in np.array_split(x, parts)])
        episodes = split(self.episodes)
        return np.where(episodes, split(self.returns) / np.maximum(episodes, 1), np.nan)


class Environment:
    """E copies of a gymnax environment, with the last observation and the truncation kept apart."""

    env: Any
    params: Any
    actions: int
    dtype: Any
    width: int

    def __init__(self, name: str, num_envs: int) -> None:
        self.env, self.params = gymnax.make(name)
        self.num_envs = num_envs
        self.actions = self.env.num_actions
        example = jax.eval_shape(self.reset, jax.random.key(0))[0]
        # MinAtar's planes are zeros and ones: stored as bool, they take a quarter.
        self.dtype = jnp.bool_ if len(example.shape) == 4 else jnp.float32
        self.width = math.prod(example.shape[1:])

    def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
        """New episodes: observations and states."""
        keys = jax.random.split(key, self.num_envs)
        return jax.vmap(self.env.reset_env, (0, None))(keys, self.params)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, ...]:
        """One step, without gymnax's automatic reset, which would lose the last observation.

        Returns:
            Observation, state, reward, terminated, truncated.
        """
        keys = jax.random.split(key, self.num_envs)
        step = jax.vmap(self.env.step_env, (0, 0, 0, None))
        observation, state, reward, terminated = step(keys, state, action, self.params)[:4]
        truncated = jax.vmap(self.env.is_truncated, (0, None))(state, self.params)
        return observation, state, reward, terminated, truncated & ~terminated

    def flat(self, observation: jax.Array) -> jax.Array:
        """Observations as they are stored, `[E, width]`."""
        return observation.reshape(self.num_envs, self.width).astype(self.dtype)


def new_network(key: jax.Array, widths: tuple[int, ...]) -> Network:
    """A multilayer perceptron (He et al., 2015)."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        (jax.random.normal(k, (m, n)) * math.sqrt(2 / m), jnp.zeros(n))
        for k, m, n in zip(keys, widths, widths[1:], strict=False)
    ]


def action_values(network: Network, observation: jax.Array) -> jax.Array:
    """Q(s, .) for a batch of observations."""
    x = observation.astype(jnp.float32)
    for weight, bias in network[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = network[-1]
    return x @ weight + bias


def loss(
    network: Network, target: Network, discount: float, batch: Any, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weighted Huber loss of double Q-learning, and the sizes of the errors `[B]`.

    An episode that was truncated goes on: only termination ends the sum of rewards.
    """
    after = batch["next"]
    pick = lambda values, action: jnp.take_along_axis(values, action[:, None], axis=1)[:, 0]
    best = jnp.argmax(action_values(network, after["observation"]), axis=1)
    value = pick(action_values(target, after["observation"]), best)
    goal = after["reward"] + discount * jnp.where(after["terminated"], 0.0, value)
    error = jax.lax.stop_gradient(goal) - pick(
        action_values(network, batch["observation"]), batch["action"]
    )
    return jnp.mean(weights * optax.losses.huber_loss(error)), jnp.abs(error)


class Agent:
    """The parts of one training, and its two functions `init` and `chunk`."""

    env: Environment
    mesh: jax.sharding.Mesh | None
    buffer: ReplayBuffer | Sharded
    optimizer: Any

    def __init__(self, config: Config) -> None:
        self.config = config
        self.env = Environment(config.env, config.num_envs)
        self.mesh = devices.mesh(config.devices)
        buffer = ReplayBuffer(
            capacity=max(1, config.capacity // config.num_envs) * config.num_envs,
            num_envs=config.num_envs,
            batch_size=config.updates * config.batch_size,
            sampler=Prioritized(alpha=config.alpha, beta=config.beta, eps=config.eps),
        )
        self.buffer = buffer
        if self.mesh is not None:
            self.buffer = Sharded(buffer, config.devices, self.mesh, devices.AXIS)
        total = config.iterations * config.chunks * config.updates
        peak = config.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, total // 50 + 1, total, peak / 10)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(10.0), optax.adam(schedule, eps=1e-5)
        )

    def init(self, key: jax.Array) -> Carry:
        """The first carry."""
        key, for_network, for_env = jax.random.split(key, 3)
        observation, env_state = self.env.reset(for_env)
        network = new_network(for_network, (self.env.width, *self.config.hidden, self.env.actions))
        carry = Carry(
            key=key,
            network=network,
            target=jax.tree.map(jnp.copy, network),
            optimizer=self.optimizer.init(network),
            replay=self.buffer.init(self._example()),
            env_state=env_state,
            observation=self.env.flat(observation),
            running_return=jnp.zeros(self.config.num_envs),
            iteration=jnp.int32(0),
        )
        return self._placed(carry)

    def chunk(self, carry: Carry) -> tuple[Carry, Finished]:
        """Many iterations."""
        carry, finished = jax.lax.scan(self._iterate, carry, None, self.config.iterations)
        return carry, jax.tree.map(lambda x: jnp.sum(x, axis=0), finished)

    def _example(self) -> Any:
        observation = jax.ShapeDtypeStruct((self.env.width,), self.env.dtype)
        flag, number = jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((), jnp.float32)
        after = {"observation": observation, "reward": number, "terminated": flag}
        after |= {"truncated": flag, "done": flag}
        action = jax.ShapeDtypeStruct((), jnp.int32)
        return {"observation": observation, "action": action, "next": after}

    def _iterate(self, carry: Carry, _: None) -> tuple[Carry, Finished]:
        key, for_act, for_reset, for_draw = jax.random.split(carry.key, 4)
        carry, transition, running_return = self._act(carry._replace(key=key), for_act)
        replay = self.buffer.add(carry.replay, transition)
        sample = self.buffer.sample(replay, for_draw)
        carry, priorities = self._learn(carry, sample)
        replay = self.buffer.update_priority(replay, sample, priorities)
        done = transition["next"]["done"]
        carry = self._reset(carry._replace(replay=replay), done, for_reset)
        finished = Finished(jnp.sum(jnp.where(done, running_return, 0.0)), jnp.sum(done))
        return self._placed(carry._replace(iteration=carry.iteration + 1)), finished

    def _placed(self, carry: Carry) -> Carry:
        """What belongs to environments cut over the devices, the rest whole on each."""
        mesh = self.mesh
        if mesh is None:
            return carry
        whole, cut = PartitionSpec(), PartitionSpec(devices.AXIS)
        cuts = dict.fromkeys(Carry._fields, whole)
        cuts |= dict.fromkeys(("replay", "env_state", "observation", "running_return"), cut)
        place = lambda tree, spec: jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))
        return Carry(**{name: place(getattr(carry, name), cuts[name]) for name in cuts})

    def _act(self, carry: Carry, key: jax.Array) -> tuple[Carry, Any, jax.Array]:
        """One epsilon-greedy step: the carry, the transitions, the returns so far."""
        config, shape = self.config, (self.config.num_envs,)
        for_coin, for_action, for_step = jax.random.split(key, 3)
        explored = config.exploration * config.iterations * config.chunks
        epsilon = jnp.maximum(config.epsilon, 1 - carry.iteration.astype(jnp.float32) / explored)
        greedy = jnp.argmax(action_values(carry.network, carry.observation), axis=1)
        action = jnp.where(
            jax.random.uniform(for_coin, shape) < epsilon,
            jax.random.randint(for_action, shape, 0, self.env.actions),
            greedy.astype(jnp.int32),
        )
        step = self.env.step(for_step, carry.env_state, action)
        observation, env_state, reward, terminated, truncated = step
        observation, reward = self.env.flat(observation), reward.astype(jnp.float32)
        after = {"observation": observation, "reward": reward, "terminated": terminated}
        after |= {"truncated": truncated, "done": terminated | truncated}
        transition = {"observation": carry.observation, "action": action, "next": after}
        running_return = carry.running_return + reward
        carry = carry._replace(
            env_state=env_state, observation=observation, running_return=running_return
        )
        return carry, transition, running_return

    def _reset(self, carry: Carry, done: jax.Array, key: jax.Array) -> Carry:
        """New episodes where the old ones ended."""
        observation, env_state = self.env.reset(key)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            ended = done.reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(ended, new.astype(old.dtype), old)

        return carry._replace(
            observation=choose(self.env.flat(observation), carry.observation),
            env_state=jax.tree.map(choose, env_state, carry.env_state),
            running_return=jnp.where(done, 0.0, carry.running_return),
        )

    def _learn(self, carry: Carry, sample: Sample) -> tuple[Carry, jax.Array]:
        """U gradient steps on U batches; the errors become priorities, `[U * B]`.

        The draw is stratified, so each batch takes every U-th of the strata.
        """
        split = lambda x: jnp.swapaxes(x.reshape(-1, self.config.updates, *x.shape[1:]), 0, 1)
        batches = jax.tree.map(split, (sample.data, sample.weights))
        start = (carry.network, carry.target, carry.optimizer)
        (network, target, optimizer), errors = jax.lax.scan(self._descend, start, batches)
        carry = carry._replace(network=network, target=target, optimizer=optimizer)
        return carry, jnp.swapaxes(errors, 0, 1).reshape(-1)

    def _descend(self, carry: tuple, batch: tuple) -> tuple[tuple, jax.Array]:
        """One gradient step."""
        network, target, optimizer = carry
        gradient, errors = jax.grad(loss, has_aux=True)(
            network, target, self.config.discount, *batch
        )
        change, optimizer = self.optimizer.update(gradient, optimizer, network)
        network = optax.apply_updates(network, change)
        target = optax.incremental_update(network, target, self.config.target_rate)
        return (network, target, optimizer), errors


def train(
    config: Config, report: Callable[[int, float], None] = lambda chunk, mean: None
) -> Result:
    """Trains `config.seeds` agents.

    Args:
        config: what is trained.
        report: called after every chunk with the number of chunks done and the mean return of the
            episodes that ended in it (NaN for none).
    """
    start = time.perf_counter()
    agent, many = Agent(config), config.seeds > 1
    side_by_side = jax.vmap if many else lambda function: function
    seeds = config.seed + jnp.arange(config.seeds) if many else config.seed
    carry = jax.jit(side_by_side(agent.init))(side_by_side(jax.random.key)(seeds))
    run = jax.jit(side_by_side(agent.chunk), donate_argnums=0)
    done: list[Finished] = []
    for chunk in range(config.chunks):
        carry, finished = run(carry)
        done.append(jax.tree.map(np.atleast_1d, jax.device_get(finished)))
        episodes = done[-1].episodes.sum()
        report(chunk + 1, float(done[-1].returns.sum() / episodes) if episodes else math.nan)
    raw = np.asarray(carry.replay.sampler.raw).reshape(config.seeds, -1)[0]
    return Result(
        returns=np.stack([chunk.returns for chunk in done]),
        episodes=np.stack([chunk.episodes for chunk in done]),
        priorities=raw[raw >= 0],
        seconds=time.perf_counter() - start,
    )
