"""GRPO for a tiny language model: groups of completions, packed rows, a limit on staleness.

    python -m examples.agents.grpo --seeds 3 --plot grpo.png

The model gets a digit and has to count down from it: 4 3 2 1 and an end. The reward of a completion
is the share of it that is right up to the first mistake. In each iteration the model writes a group
of completions for each of some digits. The buffer keeps them over several iterations, and its parts
say what is trained on:

- `Grouped` draws groups of completions that share a prompt, so that each is compared with others of
  its group;
- the `Weighted` in it draws fresh groups more often, and none that is older than a few versions;
- `Packed` puts completions of different lengths into rows, so that little of a batch is padding.

Reference: Shao et al., 2024, "DeepSeekMath", section 4.1 (group relative policy optimization).
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jrb
from examples.agents import common

END, VOCABULARY = 10, 11  # the tokens are ten digits and an end
MAX_STALENESS = 2  # versions by which a group of completions may be older than the policy


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of a training."""

    steps: int = 150  # iterations: collect completions, then learn
    prompts: int = 8  # groups of completions in each iteration
    group_size: int = 16  # completions of a prompt
    longest: int = 9  # tokens of a completion at most
    largest: int = 7  # the largest digit to count down from
    updates: int = 4  # gradient steps in each iteration
    rows: int = 8  # rows of a batch
    row_length: int = 64  # tokens of a row
    row_episodes: int = 16  # completions in a row at most
    clip: float = 0.2
    width: int = 64
    layers: int = 2
    learning_rate: float = 1e-3
    points: int = 10  # points of the learning curve


RANDOM_RETURN = 0.03  # measured over 6,000 completions


class Transformer(nn.Module):
    """A causal transformer over rows that hold several sequences."""

    config: Config

    @nn.compact
    def __call__(self, token: jax.Array, segment: jax.Array, position: jax.Array) -> jax.Array:
        """Returns logits of the next token, `[B, L, V]`, for tokens, segments, positions, `[B, L]`.

        A token sees those of its segment that are not behind it.
        """
        is_same = segment[:, :, None] == segment[:, None, :]
        sees = (is_same & (position[:, :, None] >= position[:, None, :]))[:, None]
        width = self.config.width
        x = nn.Embed(VOCABULARY, width)(token) + nn.Embed(self.config.longest, width)(position)
        for _ in range(self.config.layers):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=sees)
            x = x + nn.Dense(width)(nn.relu(nn.Dense(2 * width)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def fresh_groups(leaves: dict[str, jax.Array], age: jax.Array, version: jax.Array) -> jax.Array:
    """Returns the weights of groups, `[G]`: half for each version that they are older."""
    staleness = version - leaves["version"][:, 0]
    return jnp.where(staleness <= MAX_STALENESS, jnp.exp2(-staleness.astype(float)), 0.0)


def make_buffer(config: Config) -> jrb.ReplayBuffer:
    """Returns the description of the buffer: each completion of an iteration has its own lane."""
    lanes, kept = config.prompts * config.group_size, MAX_STALENESS + 1
    return jrb.ReplayBuffer(
        lanes * kept * config.longest,
        num_envs=lanes,
        batch_size=config.rows,
        writer=jrb.PerEnvironment(),
        unit=jrb.Packed(config.row_length, config.row_episodes),
        sampler=jrb.Grouped(
            "prompt",
            num_groups=config.prompts * kept,
            per_group=config.group_size,
            sampler=jrb.Weighted(fresh_groups, leaves=("version",)),
            partial="drop",
        ),
    )


def reward_of(digit: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the share of completions, `[E, T]`, that counts down from digits, `[E]`, rightly."""
    place = jnp.arange(tokens.shape[1])
    want = digit[:, None] - 1 - place
    want = jnp.where(want == 0, END, want)
    is_right = jnp.cumprod(tokens == want, axis=1)
    return jnp.sum(jnp.where(want > 0, is_right, 0), axis=1) / digit


def complete(policy: Any, config: Config, key: jax.Array, version: jax.Array) -> tuple:
    """Returns completions as rows of a buffer, `[T, E, ...]`; which are real; and mean reward."""
    for_digits, for_tokens = jax.random.split(key)
    digit = jax.random.randint(for_digits, (config.prompts,), 2, config.largest + 1)
    digit = jnp.repeat(digit, config.group_size)
    lanes, length = digit.size, config.longest
    segment = jnp.ones((lanes, length), jnp.int32)
    position = jnp.broadcast_to(jnp.arange(length), (lanes, length))

    def write(tokens: jax.Array, given: tuple) -> tuple:
        """Writes the token behind place `at` of all completions."""
        at, key = given
        logits = policy(tokens, segment, position)[:, at]
        token = jax.random.categorical(key, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
        return tokens.at[:, at + 1].set(token, mode="drop"), (token, log_prob)

    tokens = jnp.zeros((lanes, length), jnp.int32).at[:, 0].set(digit)
    keys = jax.random.split(for_tokens, length)
    seen, (action, log_prob) = jax.lax.scan(write, tokens, (jnp.arange(length), keys))
    # A completion ends with its first end, or where it is cut.
    is_end = (action == END) | (jnp.arange(length) == length - 1)[:, None]
    real = jnp.cumsum(is_end, axis=0) - is_end == 0
    reward = reward_of(digit, action.T)
    each = lambda number: jnp.broadcast_to(number, (length, lanes)).astype(jnp.int32)
    prompt = version * config.prompts + jnp.arange(lanes) // config.group_size
    rows = {
        "prompt": each(prompt),
        "version": each(version),
        "token": seen.T,
        "action": action,
        "log_prob": log_prob,
        "next": {"reward": jnp.where(is_end, reward, 0.0), "terminated": is_end},
    }
    return rows, real, reward.mean()


def advantages(batch: jrb.Sample) -> jax.Array:
    """Returns the advantage of each completion in its group, for its tokens, float32 `[B, L]`."""
    # The reward of each completion, [B * M]: the sum over the tokens of its segment.
    number = jnp.arange(1, batch.indices.shape[1] + 1)
    is_token = batch.info["segment"][:, :, None] == number
    rewards = batch.data["next"]["reward"][:, :, None]
    reward = jnp.sum(jnp.where(is_token, rewards, 0.0), axis=1).reshape(-1)
    # Mean and deviation over all completions of the group, whatever rows they are in.
    group, real = batch.info["group"].reshape(-1), (batch.weights > 0).reshape(-1)
    is_mate = (group[:, None] == group) & real
    count = jnp.maximum(jnp.sum(is_mate, axis=1), 1)
    mean_of = lambda values: jnp.sum(jnp.where(is_mate, values, 0.0), axis=1) / count
    mean = mean_of(reward)
    deviation = jnp.sqrt(jnp.maximum(mean_of(reward**2) - mean**2, 0.0))
    advantage = ((reward - mean) / (deviation + 1e-3)).reshape(batch.indices.shape)
    return jnp.sum(jnp.where(is_token, advantage[:, None], 0.0), axis=2)


def train(key: jax.Array, config: Config) -> jax.Array:
    """Returns the learning curve: mean rewards of completions, float32 `[points]`."""
    model, buffer = Transformer(config), make_buffer(config)
    optimizer = optax.adam(config.learning_rate)

    def loss(params: Any, batch: jrb.Sample) -> jax.Array:
        """Returns the clipped objective of PPO, with advantages in groups, over all tokens."""
        data, info = batch.data, batch.info
        logits = model.apply(params, data["token"], info["segment"], info["position"])
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, data["action"][..., None], axis=-1)[..., 0]
        ratio = jnp.exp(log_prob - data["log_prob"])
        near = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        advantage = advantages(batch)
        gain = jnp.minimum(ratio * advantage, near * advantage)
        return -jnp.sum(jnp.where(batch.mask, gain, 0.0)) / jnp.maximum(jnp.sum(batch.mask), 1)

    def learn(carry: tuple, given: tuple) -> tuple:
        params, moments, replay = carry
        key, version = given
        batch = buffer.sample(replay, key, context=version)
        change, moments = optimizer.update(jax.grad(loss)(params, batch), moments)
        return (optax.apply_updates(params, change), moments, replay), None

    def iterate(carry: tuple, given: tuple) -> tuple:
        """Collects completions, then learns from fresh groups of completions."""
        params, moments, replay = carry
        key, version = given
        for_tokens, for_learn = jax.random.split(key)
        policy = lambda *inputs: model.apply(params, *inputs)
        rows, real, reward = complete(policy, config, for_tokens, version)
        replay = buffer.extend(replay, rows, mask=real)
        keys = jax.random.split(for_learn, config.updates)
        versions = jnp.broadcast_to(version, config.updates)
        carry, _ = jax.lax.scan(learn, (params, moments, replay), (keys, versions))
        return carry, reward

    for_params, for_steps = jax.random.split(key)
    zeros = jnp.zeros((1, config.longest), jnp.int32)
    params = model.init(for_params, zeros, zeros, zeros)
    step = {"prompt": 0, "version": 0, "token": 0, "action": 0, "log_prob": 0.0}
    step |= {"next": {"reward": 0.0, "terminated": False}}
    carry = params, optimizer.init(params), buffer.init(step)
    given = jax.random.split(for_steps, config.steps), jnp.arange(config.steps)
    rewards = jax.lax.scan(iterate, carry, given)[1]
    size = config.steps // config.points
    return rewards[: size * config.points].reshape(config.points, size).mean(axis=1)


if __name__ == "__main__":
    common.main(train, Config(), RANDOM_RETURN, unit="iterations")
