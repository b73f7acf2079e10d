"""QMIX in a cooperative game with memory: complete episodes, recurrent agents, a monotonic mixer.

    python -m examples.agents.qmix --seeds 5 --plot qmix.png

This is the two-step game of the QMIX paper, with a corridor. The first agent's first action leads
both agents to room A or B, which they see for one step. Then they walk through a corridor of random
length, which looks the same for both rooms. At its end both act once more and share a payoff: 7 for
room A; for room B 8 if both choose action 1, 1 if one does, 0 if none does. A sum of agents' values
(VDN) cannot represent the payoff of B: it underrates 8 and settles for 7 (`Config(mixer="vdn")`).
As in the paper, agents act at random while they learn, so that mixers differ only in capacity.

The buffer samples complete episodes, because the recurrent networks start at the first step, and
pads shorter ones: `batch.mask` is False at the padding.

References: Rashid et al., 2018, "QMIX", sections 4 and 5; Sunehag et al., 2018,
"Value-decomposition networks for cooperative multi-agent learning".
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jrb
from examples.agents import common

AGENTS, ACTIONS, LONGEST = 2, 2, 6  # `LONGEST` is the maximum number of steps of an episode
START, ROOM_A, ROOM_B, CORRIDOR, END = range(5)
PAYOFFS = jnp.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]])
RANDOM_RETURN = 4.75  # (7 + 7 + 7 + 7 + 0 + 1 + 1 + 8) / 8


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a training."""

    mixer: str = "qmix"  # or "vdn", or "independent" learners
    steps: int = 32_000  # steps of all environments together
    num_envs: int = 16  # E
    capacity: int = 20_000
    batch_size: int = 32  # B, episodes
    min_size: int = 100  # episodes
    discount: float = 0.99
    epsilon: float = 1.0  # probability of a random action while learning
    hidden: int = 32
    embedding: int = 16  # the width of the mixer
    learning_rate: float = 1e-3
    target_rate: float = 0.01
    points: int = 32  # points of the learning curve
    eval_envs: int = 32  # episodes that are evaluated for each point


def reset(key: jax.Array) -> dict[str, jax.Array]:
    """Returns a world before its first step, with a corridor of 1 to 4 steps."""
    length = jax.random.randint(key, (), 3, LONGEST + 1)
    return {"time": jnp.int32(0), "room": jnp.int32(0), "length": length}


def phase(world: dict[str, jax.Array]) -> jax.Array:
    """Returns the place that the agents see, int32: START, ROOM_A, ROOM_B, CORRIDOR or END."""
    time, last = world["time"], world["length"] - 1
    inside = jnp.where(time == 1, ROOM_A + world["room"], CORRIDOR)
    return jnp.where(time == 0, START, jnp.where(time == last, END, inside))


def observe(world: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the observations of the agents `[n, D]`, and the state that the mixer sees `[S]`."""
    seen = jax.nn.one_hot(phase(world), 5)
    observation = jnp.concatenate([jnp.tile(seen, (AGENTS, 1)), jnp.eye(AGENTS)], axis=1)
    return {"observation": observation, "state": jnp.append(seen, world["room"])}


def step(world: dict[str, jax.Array], action: jax.Array, key: jax.Array) -> tuple[Any, Any]:
    """Executes the actions `[n]`; returns the next world, and the part `next` of the transition.

    At an end, the next world is a new episode's; `next` has the last observation of the old one.
    """
    ended = world["time"] == world["length"] - 1
    payoff = PAYOFFS[world["room"], action[0], action[1]]
    room = jnp.where(world["time"] == 0, action[0], world["room"])
    world = world | {"time": world["time"] + 1, "room": room}
    after = observe(world) | {"reward": jnp.where(ended, payoff, 0.0), "terminated": ended}
    return jax.tree.map(lambda new, old: jnp.where(ended, new, old), reset(key), world), after


def make_buffer(config: Config) -> jrb.ReplayBuffer:
    """Returns the replay buffer."""
    return jrb.ReplayBuffer.rounded(
        config.capacity,
        num_envs=config.num_envs,
        batch_size=config.batch_size,
        min_size=config.min_size,
        unit=jrb.Sequence(LONGEST, sample_by="whole_episodes", partial="pad"),
    )


class Agent(nn.Module):
    """A recurrent network of action values, shared by all agents."""

    hidden: int

    @nn.compact
    def __call__(self, memory: jax.Array | None, observation: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the memory after observations `[..., L, D]`, and values `[..., L, actions]`.

        The argument is the memory `[..., H]` before these; None at the start of an episode.
        """
        x = nn.relu(nn.Dense(self.hidden)(observation))
        rnn = nn.RNN(nn.GRUCell(self.hidden), return_carry=True)
        memory, x = rnn(x, initial_carry=memory)
        return memory, nn.Dense(ACTIONS)(x)


class Mixer(nn.Module):
    """A network of the team's value, which increases with each agent's value in any state."""

    embedding: int

    @nn.compact
    def __call__(self, values: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the team's values `[...]`, given agents' values `[..., n]`, states `[..., S]`."""
        first = jnp.abs(nn.Dense(values.shape[-1] * self.embedding)(state))
        first = first.reshape(*values.shape, self.embedding)
        x = jnp.einsum("...n,...ne->...e", values, first) + nn.Dense(self.embedding)(state)
        second = jnp.abs(nn.Dense(self.embedding)(state))
        bias = nn.Dense(1)(nn.relu(nn.Dense(self.embedding)(state)))[..., 0]
        return jnp.sum(nn.elu(x) * second, axis=-1) + bias


def train(key: jax.Array, config: Config) -> jax.Array:
    """Returns the learning curve of one training, the mean returns of greedy play, `[points]`."""
    agent, mixer = Agent(config.hidden), Mixer(config.embedding)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(config.learning_rate))
    iterations = config.steps // config.num_envs // config.points  # for each point of the curve
    buffer = make_buffer(config)

    def mix(params: Any, values: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the values `[..., k]` to learn: one of the team, or one of each agent."""
        if config.mixer == "independent":
            return values
        if config.mixer == "vdn":
            return values.sum(axis=-1, keepdims=True)
        return mixer.apply(params["mixer"], values, state)[..., None]

    def loss(params: Any, target: Any, batch: jrb.Sample) -> jax.Array:
        """Returns the squared error of double Q-learning over the real steps of episodes."""
        data, after = batch.data, batch.data["next"]
        seen = jnp.concatenate([data["observation"][:, :1], after["observation"]], axis=1)
        seen = jnp.swapaxes(seen, 1, 2)  # [B, n, L + 1, D]
        run = lambda params: jnp.swapaxes(agent.apply(params["agent"], None, seen)[1], 1, 2)
        of = lambda values, action: jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]
        values, future = run(params), run(target)  # [B, L + 1, n, actions]
        best = jnp.argmax(values[:, 1:], axis=-1)
        future = mix(target, of(future[:, 1:], best), after["state"])
        future = jnp.where(after["terminated"][..., None], 0.0, future)
        goal = jax.lax.stop_gradient(after["reward"][..., None] + config.discount * future)
        error = mix(params, of(values[:, :-1], data["action"]), data["state"]) - goal
        return jnp.mean(jnp.where(batch.mask[..., None], error**2, 0.0))

    def act(params: Any, memory: jax.Array, seen: jax.Array, key: jax.Array, epsilon: Any) -> tuple:
        """Returns memories `[E, n, H]` after observations `[E, n, D]`, and actions `[E, n]`."""
        memory, values = agent.apply(params["agent"], memory, seen[:, :, None])
        coin, which = jax.random.split(key)
        random = jax.random.randint(which, seen.shape[:2], 0, ACTIONS)
        explores = jax.random.uniform(coin, seen.shape[:2]) < epsilon
        return memory, jnp.where(explores, random, jnp.argmax(values[:, :, 0], axis=-1))

    def play(params: Any, worlds: Any, memory: jax.Array, key: jax.Array, epsilon: Any) -> tuple:
        """Takes one step in all worlds; returns worlds, memories and transitions."""
        for_act, for_worlds = jax.random.split(key)
        before = jax.vmap(observe)(worlds)
        memory, action = act(params, memory, before["observation"], for_act, epsilon)
        keys = jax.random.split(for_worlds, len(action))
        worlds, after = jax.vmap(step)(worlds, action, keys)
        memory = jnp.where(after["terminated"][:, None, None], 0.0, memory)
        return worlds, memory, before | {"action": action, "next": after}

    def begin(key: jax.Array, num_envs: int) -> tuple[Any, jax.Array]:
        worlds = jax.vmap(reset)(jax.random.split(key, num_envs))
        return worlds, jnp.zeros((num_envs, AGENTS, config.hidden))

    def iterate(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
        (params, target, moments), replay, worlds, memory = carry
        for_play, for_draw = jax.random.split(key)
        worlds, memory, rows = play(params, worlds, memory, for_play, config.epsilon)
        replay = buffer.add(replay, rows)
        replay, batch = buffer.draw(replay, for_draw)
        gradient = jax.grad(loss)(params, target, batch)
        change, moments = optimizer.update(gradient, moments)
        params = optax.apply_updates(params, change)
        target = optax.incremental_update(params, target, config.target_rate)
        return ((params, target, moments), replay, worlds, memory), None

    def stage(carry: tuple, key: jax.Array) -> tuple:
        """Learns for one part of the training, then evaluates episodes without exploration."""
        for_learn, for_begin, for_eval = jax.random.split(key, 3)
        carry, _ = jax.lax.scan(iterate, carry, jax.random.split(for_learn, iterations))

        def evaluate(game: tuple, key: jax.Array) -> tuple:
            worlds, memory, rows = play(carry[0][0], *game, key, 0.0)
            return (worlds, memory), (rows["next"]["reward"], rows["next"]["terminated"])

        keys = jax.random.split(for_eval, LONGEST)
        _, (reward, ended) = jax.lax.scan(evaluate, begin(for_begin, config.eval_envs), keys)
        first = jnp.cumsum(ended, axis=0) - ended == 0  # True in the first episode of each world
        return carry, jnp.sum(jnp.where(first, reward, 0.0), axis=0).mean()

    keys = jax.random.split(key, 4)
    worlds, memory = begin(keys[0], config.num_envs)
    seen = jax.vmap(observe)(worlds)
    params = {
        "agent": agent.init(keys[1], memory, seen["observation"][:, :, None]),
        "mixer": mixer.init(keys[2], jnp.zeros(AGENTS), seen["state"][0]),
    }
    rows = jax.eval_shape(lambda: play(params, worlds, memory, keys[0], 0.0)[2])
    example = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), rows)
    learner = params, params, optimizer.init(params)
    carry = learner, buffer.init(example), worlds, memory
    return jax.lax.scan(stage, carry, jax.random.split(keys[3], config.points))[1]


if __name__ == "__main__":
    common.main(train, Config(), RANDOM_RETURN)
