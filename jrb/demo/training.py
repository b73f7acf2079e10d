"""A double DQN with prioritized replay: environment, buffer and network inside one jit.

    jrb demo --env Breakout-MinAtar --steps 400000 --seeds 1 --seed 0 --devices 1

One iteration steps E environments, adds the E transitions, samples U batches at once, takes U
gradient steps, and updates the priorities of the U batches. A jitted scan runs many iterations; the
training is divided into chunks of them only to update the progress bar. With `seeds=K`, K trainings
run together under `vmap`, each with its own buffer.

With `devices=D`, environments, buffer and batches are sharded over D devices, and the network is
replicated: the buffer is a `jrb.Sharded`. The code of a step is the same; XLA averages gradients.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrb.authoring import require
from jrb.buffer import ReplayBuffer
from jrb.samplers import Prioritized
from jrb.sharding import Sharded
from jrb.state import BufferState, Sample

gymnax: Any = require("gymnax", "demo")
optax: Any = require("optax", "demo")

Network = list[tuple[jax.Array, jax.Array]]
AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a training."""

    env: str = "Breakout-MinAtar"  # a gymnax environment with discrete actions
    steps: int = 400_000  # environment steps of each training, over all its environments
    seeds: int = 1  # K, the number of trainings that run together
    seed: int = 0  # the seed of the first training; those of the others follow it
    num_envs: int = 64  # E
    updates: int = 8  # U, gradient steps per iteration
    batch_size: int = 128  # B, transitions per gradient step
    capacity: int = 100_000  # transitions, rounded down to a multiple of E
    hidden: tuple[int, ...] = (128, 128)  # the widths of the network's hidden layers
    # The peak: the rate rises linearly over the first 2 % of updates, and then falls to a tenth of
    # the peak along a cosine.
    learning_rate: float = 1e-3
    discount: float = 0.99
    target_rate: float = 0.005  # the step of the target network towards the network, per update
    exploration: float = 0.1  # fraction of the training in which epsilon falls from 1 to `epsilon`
    epsilon: float = 0.01  # the final probability of a random action
    alpha: float = 0.6  # alpha, beta and eps of the prioritized sampler
    beta: float = 0.4
    eps: float = 1e-3
    chunks: int = 40  # the number of updates of the progress bar
    devices: int = 1  # D, which divides E and B

    def __post_init__(self) -> None:
        names = gymnax.registered_envs
        if self.env not in names:
            raise ValueError(f"env: expected one of {', '.join(names)}, got {self.env!r}.")

    @property
    def iterations(self) -> int:
        """The number of iterations of one chunk, at least one."""
        return max(1, self.steps // self.num_envs // self.chunks)

    @property
    def played(self) -> int:
        """The number of environment steps of one training: `steps`, rounded to whole chunks."""
        return self.iterations * self.chunks * self.num_envs


class Carry(NamedTuple):
    """The state that `scan` carries from one iteration to the next."""

    key: jax.Array
    network: Network
    target: Network
    optimizer: Any
    replay: BufferState
    env_state: Any
    observation: jax.Array
    running_return: jax.Array
    iteration: jax.Array


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a training. C chunks, K seeds."""

    returns: np.ndarray  # the sum of the returns of episodes that ended in a chunk, float `[C, K]`
    episodes: np.ndarray  # the number of these episodes, `[C, K]`
    priorities: np.ndarray  # the priorities stored at the end by the first seed, float
    seconds: float  # the time of the training, including compilation

    def mean_return(self, parts: int) -> np.ndarray:
        """Returns the mean return of each of `parts` equal parts of the training, `[parts, K]`.

        NaN where no episode ended.
        """
        split = lambda x: np.stack([part.sum(0) for part in np.array_split(x, parts)])
        episodes = split(self.episodes)
        return np.where(episodes, split(self.returns) / np.maximum(episodes, 1), np.nan)


class Environment:
    """E copies of a gymnax environment, without its automatic reset."""

    def __init__(self, name: str, num_envs: int) -> None:
        self.num_envs = num_envs
        self.env: Any = None
        self.params: Any = None
        self.env, self.params = gymnax.make(name)
        # The network has a value for each action.
        space = self.env.action_space(self.params)
        if not isinstance(space, gymnax.environments.spaces.Discrete):
            raise ValueError(
                f"env: expected an environment with discrete actions, got {name!r}, whose space "
                f"of actions is a {type(space).__name__}."
            )
        example = jax.eval_shape(self.reset, jax.random.key(0))[0]
        # MinAtar's planes are zeros and ones: bool takes a quarter of the bytes of float32.
        self.dtype: Any = jnp.bool_ if len(example.shape) == 4 else jnp.float32
        self.width: int = math.prod(example.shape[1:])
        self.actions: int = self.env.num_actions

    def reset(self, key: jax.Array) -> tuple[jax.Array, Any]:
        """Starts episodes; returns their first observations and states."""
        keys = jax.random.split(key, self.num_envs)
        return jax.vmap(self.env.reset_env, (0, None))(keys, self.params)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, dict[str, Any]]:
        """Takes a step; returns states, and the part `next` of the transitions.

        `step_env` is called because gymnax's `step` resets at once, which loses the last
        observation and the difference between termination and truncation.
        """
        keys = jax.random.split(key, self.num_envs)
        step = jax.vmap(self.env.step_env, (0, 0, 0, None))
        observation, state, reward, terminated = step(keys, state, action, self.params)[:4]
        truncated = jax.vmap(self.env.is_truncated, (0, None))(state, self.params) & ~terminated
        return state, {
            "observation": self.flat(observation),
            "reward": reward.astype(jnp.float32),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }

    def flat(self, observation: jax.Array) -> jax.Array:
        """Returns observations in the stored shape `[E, width]` and dtype."""
        return observation.reshape(self.num_envs, self.width).astype(self.dtype)


def new_network(key: jax.Array, widths: tuple[int, ...]) -> Network:
    """Returns the weights of a multilayer perceptron, initialized as by He et al., 2015."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        (jax.random.normal(k, (m, n)) * math.sqrt(2 / m), jnp.zeros(n))
        for k, m, n in zip(keys, widths, widths[1:], strict=False)
    ]


def action_values(network: Network, observation: jax.Array) -> jax.Array:
    """Returns Q(s, .) for a batch of observations."""
    x = observation.astype(jnp.float32)
    for weight, bias in network[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = network[-1]
    return x @ weight + bias


def loss(
    network: Network, target: Network, discount: float, batch: Any, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted Huber loss of double Q-learning, and the absolute errors `[B]`.

    Only termination stops the bootstrap; a truncated episode would have continued.
    """
    # The network chooses the next action, the target network evaluates it.
    after = batch["next"]
    pick = lambda values, action: jnp.take_along_axis(values, action[:, None], axis=1)[:, 0]
    best = jnp.argmax(action_values(network, after["observation"]), axis=1)
    value = pick(action_values(target, after["observation"]), best)
    goal = after["reward"] + discount * jnp.where(after["terminated"], 0.0, value)
    values = pick(action_values(network, batch["observation"]), batch["action"])
    error = jax.lax.stop_gradient(goal) - values
    return jnp.mean(weights * optax.losses.huber_loss(error)), jnp.abs(error)


class Agent:
    """The environment, buffer and optimizer of a training, with its functions."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.env: Environment = Environment(config.env, config.num_envs)
        self.mesh: jax.sharding.Mesh | None = None
        self.buffer: ReplayBuffer | Sharded = ReplayBuffer(
            capacity=max(1, config.capacity // config.num_envs) * config.num_envs,
            num_envs=config.num_envs,
            batch_size=config.updates * config.batch_size,
            sampler=Prioritized(alpha=config.alpha, beta=config.beta, eps=config.eps),
        )
        if config.devices > 1:
            # Use the CPU's devices if the default backend has too few.
            enough = jax.device_count() >= config.devices
            devices = jax.devices() if enough else jax.devices("cpu")
            if len(devices) < config.devices:
                raise ValueError(
                    f"devices: expected at most {len(devices)}, as many as there are, got "
                    f"{config.devices}. Call jrb.demo.prepare_devices before JAX starts, and the "
                    "CPU counts as more."
                )
            mesh = Mesh(np.array(devices[: config.devices]), (AXIS,))
            self.mesh = mesh
            self.buffer = Sharded(self.buffer, config.devices, self.mesh, AXIS)
        # The learning rate rises for 2 % of the updates, then falls along a cosine.
        total, peak = config.iterations * config.chunks * config.updates, config.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, total // 50 + 1, total, peak / 10)
        clip = optax.clip_by_global_norm(10.0)
        self.optimizer: Any = optax.chain(clip, optax.adam(schedule, eps=1e-5))

    def init(self, key: jax.Array) -> Carry:
        """Returns the initial carry."""
        key, for_network, for_env = jax.random.split(key, 3)
        observation, env_state = self.env.reset(for_env)
        observation = self.env.flat(observation)
        widths = (self.env.width, *self.config.hidden, self.env.actions)
        network = new_network(for_network, widths)
        # An abstract step gives the leaves of a transition.
        action = jnp.zeros(self.config.num_envs, jnp.int32)
        step = lambda: self.env.step(key, env_state, action)[1]
        rows = {"observation": observation, "action": action, "next": jax.eval_shape(step)}
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
        carry = Carry(
            key=key,
            network=network,
            target=jax.tree.map(jnp.copy, network),
            optimizer=self.optimizer.init(network),
            replay=self.buffer.init(example),
            env_state=env_state,
            observation=observation,
            running_return=jnp.zeros(self.config.num_envs),
            iteration=jnp.int32(0),
        )
        return self._constrain(carry)

    def chunk(self, carry: Carry) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
        """Runs one chunk; also returns the sum of ended episodes' returns, and their number."""
        carry, ended = jax.lax.scan(self._iterate, carry, None, self.config.iterations)
        return carry, jax.tree.map(lambda x: jnp.sum(x, axis=0), ended)

    def _constrain(self, carry: Carry) -> Carry:
        """Shards the parts with an axis of environments over the devices; replicates the others."""
        mesh = self.mesh
        if mesh is None:
            return carry
        cuts = dict.fromkeys(Carry._fields, PartitionSpec())
        names = ("replay", "env_state", "observation", "running_return")
        cuts |= dict.fromkeys(names, PartitionSpec(AXIS))
        place = lambda tree, spec: jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))
        return Carry(**{name: place(getattr(carry, name), cuts[name]) for name in cuts})

    def _iterate(self, carry: Carry, _: None) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
        key, for_act, for_reset, for_draw = jax.random.split(carry.key, 4)
        for_coin, for_action, for_step = jax.random.split(for_act, 3)
        # Take one epsilon-greedy step of all environments.
        config, shape = self.config, (self.config.num_envs,)
        explored = config.exploration * config.iterations * config.chunks
        epsilon = jnp.maximum(config.epsilon, 1 - carry.iteration.astype(jnp.float32) / explored)
        greedy = jnp.argmax(action_values(carry.network, carry.observation), axis=1)
        action = jnp.where(
            jax.random.uniform(for_coin, shape) < epsilon,
            jax.random.randint(for_action, shape, 0, self.env.actions),
            greedy.astype(jnp.int32),
        )
        env_state, after = self.env.step(for_step, carry.env_state, action)
        transition = {"observation": carry.observation, "action": action, "next": after}
        # Sample after the write, on which the sample depends: XLA need not copy the buffer.
        replay = self.buffer.add(carry.replay, transition)
        sample = self.buffer.sample(replay, for_draw)
        network, target, optimizer, priorities = self._learn(carry, sample)
        replay = self.buffer.update_priority(replay, sample, priorities)
        # Start new episodes where the old ones ended.
        first, fresh_state = self.env.reset(for_reset)
        done, returns = after["done"], carry.running_return + after["reward"]

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            ended = done.reshape(-1, *(1,) * (old.ndim - 1))
            return jnp.where(ended, new.astype(old.dtype), old)

        carry = Carry(
            key=key,
            network=network,
            target=target,
            optimizer=optimizer,
            replay=replay,
            env_state=jax.tree.map(choose, fresh_state, env_state),
            observation=choose(self.env.flat(first), after["observation"]),
            running_return=jnp.where(done, 0.0, returns),
            iteration=carry.iteration + 1,
        )
        return self._constrain(carry), (jnp.sum(jnp.where(done, returns, 0.0)), jnp.sum(done))

    def _learn(self, carry: Carry, sample: Sample) -> tuple[Network, Network, Any, jax.Array]:
        """Takes U gradient steps on U batches; also returns the errors as priorities, `[U * B]`."""

        def descend(parts: tuple, batch: tuple) -> tuple[tuple, jax.Array]:
            network, target, optimizer = parts
            gradient, errors = jax.grad(loss, has_aux=True)(
                network, target, self.config.discount, *batch
            )
            change, optimizer = self.optimizer.update(gradient, optimizer, network)
            network = optax.apply_updates(network, change)
            target = optax.incremental_update(network, target, self.config.target_rate)
            return (network, target, optimizer), errors

        # Batch u has the draws u, u + U, and so on: every U-th stratum, as draws are stratified.
        split = lambda x: jnp.swapaxes(x.reshape(-1, self.config.updates, *x.shape[1:]), 0, 1)
        batches = jax.tree.map(split, (sample.data, sample.weights))
        parts, errors = jax.lax.scan(
            descend, (carry.network, carry.target, carry.optimizer), batches
        )
        return *parts, jnp.swapaxes(errors, 0, 1).reshape(-1)


def train(
    config: Config, report: Callable[[int, float], None] = lambda chunk, mean: None
) -> Result:
    """Trains `config.seeds` agents, and returns the result.

    `report` is called after every chunk with the number of chunks done, and with the mean return of
    the episodes that ended in this chunk, NaN if none did.
    """
    # Make one agent, or K of them by `vmap`.
    start = time.perf_counter()
    agent, many = Agent(config), config.seeds > 1
    vmapped = jax.vmap if many else lambda function: function
    seeds = config.seed + jnp.arange(config.seeds) if many else config.seed
    carry = jax.jit(vmapped(agent.init))(vmapped(jax.random.key)(seeds))
    # Run chunk after chunk, in the memory of the same carry.
    run = jax.jit(vmapped(agent.chunk), donate_argnums=0)
    sums: list[tuple[np.ndarray, np.ndarray]] = []
    for chunk in range(config.chunks):
        carry, ended = run(carry)
        returns, episodes = map(np.atleast_1d, jax.device_get(ended))
        sums.append((returns, episodes))
        mean = float(returns.sum() / episodes.sum()) if episodes.sum() else math.nan
        report(chunk + 1, mean)
    # Slots without an anchor have negative priorities.
    raw = np.asarray(carry.replay.sampler.raw).reshape(config.seeds, -1)[0]
    return Result(
        returns=np.stack([returns for returns, _ in sums]),
        episodes=np.stack([episodes for _, episodes in sums]),
        priorities=raw[raw >= 0],
        seconds=time.perf_counter() - start,
    )
