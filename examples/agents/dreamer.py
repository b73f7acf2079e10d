"""A small Dreamer on Catch: a world model, and a policy that learns from the model's predictions.

    python -m examples.agents.dreamer        with optax, flax and gymnax

The world model is recurrent. The state h of a row and its observation give a random code z; h, z
and the action give the h of the next row. The policy learns from imagined steps that start at the
rows of a batch. One half of each batch is new windows, each sampled once (a queue), the other half
is sampled uniformly. Windows continue into the next episode. Each row is stored with its h, so that
windows can start anywhere; newly computed h are written back to the buffer.

Reference: Hafner et al., 2023, "Mastering diverse domains through world models" (DreamerV3). This
agent lacks symlog, the scaling of returns, and the slow critic.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

import jrb
from examples.agents import common

ENV, ENV_PARAMS = gymnax.make("Catch-bsuite")
PIXELS, ACTIONS = 50, ENV.num_actions


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters; `steps` are those of all environments together."""

    steps: int = 40_000
    points: int = 20  # points of the learning curve
    num_envs: int = 8
    rollout: int = 2  # steps of each environment between two updates, and the stride of windows
    capacity: int = 16_384
    length: int = 12  # steps of a window
    horizon: int = 8  # imagined steps
    width: int = 64
    groups: int = 8  # one-hot vectors in a code, each of `classes` numbers
    classes: int = 8
    learning_rate: float = 2e-3
    discount: float = 0.97
    trace: float = 0.95  # lambda of the returns
    free_nats: float = 0.1
    entropy: float = 0.03

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The numbers of inputs and outputs of each network, by name."""
        code = self.groups * self.classes
        feature = self.width + code
        return {
            "cell": (code + ACTIONS, self.width),  # from z and action to the next h
            "prior": (self.width, code),  # from h to z
            "posterior": (self.width + PIXELS, code),  # from h and observation to z
            "pixels": (feature, PIXELS),
            "outcome": (feature + ACTIONS, 2),  # the reward, and the logit that no end follows
            "actor": (feature, ACTIONS),
            "critic": (feature, 1),
        }


def network(config: Config, name: str) -> nn.Module:
    """Returns a network by name: the recurrent cell, or a perceptron with one hidden layer."""
    layers = [nn.Dense(config.width), nn.LayerNorm(), nn.silu, nn.Dense(config.sizes[name][1])]
    return nn.GRUCell(config.width) if name == "cell" else nn.Sequential(layers)


def apply(config: Config, params: Any, name: str, *inputs: jax.Array) -> jax.Array:
    """Applies a perceptron to inputs `[..., n]`, concatenated along the last axis."""
    return network(config, name).apply(params[name], jnp.concatenate(inputs, axis=-1))


def advance(config: Config, params: Any, h: Any, z: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the h of the next rows."""
    inputs = jnp.concatenate([z, jax.nn.one_hot(action, ACTIONS)], axis=-1)
    return network(config, "cell").apply(params["cell"], h, inputs)[0]


def code_log_probs(config: Config, logits: jax.Array) -> jax.Array:
    """Returns log-probabilities `[..., G, C]` of codes, mixed with 1 % of uniform ones."""
    logits = logits.reshape(*logits.shape[:-1], config.groups, config.classes)
    return jnp.log(0.99 * jax.nn.softmax(logits) + 0.01 / config.classes)


def sample_code(log_probs: jax.Array, key: jax.Array) -> jax.Array:
    """Returns random codes `[..., G * C]`, with the straight-through gradient."""
    probs = jnp.exp(log_probs)
    code = jax.nn.one_hot(jax.random.categorical(key, log_probs), log_probs.shape[-1])
    code = code + probs - jax.lax.stop_gradient(probs)
    return code.reshape(*code.shape[:-2], -1)


def make_buffer(config: Config) -> jrb.ReplayBuffer:
    """Returns the replay buffer; half of a batch is a new window of each environment."""
    return jrb.ReplayBuffer(
        capacity=config.capacity,
        num_envs=config.num_envs,
        batch_size=2 * config.num_envs,
        sampler=jrb.Mixture((jrb.Queue(), jrb.Uniform()), (0.5, 0.5)),
        unit=jrb.Sequence(config.length, stride=config.rollout, cross_episodes=True),
    )


def act(config: Config, params: Any, carry: Any, key: jax.Array) -> tuple[Any, Any]:
    """Takes one step in each environment; returns the carry, the row, and the ends of episodes."""
    pixels, env_state, h, returns = carry
    keys, observation = jax.random.split(key, config.num_envs + 2), pixels.reshape(-1, PIXELS)
    posterior = code_log_probs(config, apply(config, params, "posterior", h, observation))
    z = sample_code(posterior, keys[0])
    action = jax.random.categorical(keys[1], apply(config, params, "actor", h, z))
    step = jax.vmap(ENV.step, in_axes=(0, 0, 0, None))
    pixels, env_state, reward, *flags, _ = step(keys[2:], env_state, action, ENV_PARAMS)
    outcome = {"reward": reward, "terminated": flags[0], "truncated": flags[1]}
    row = {"observation": observation, "h": h, "action": action, "next": outcome}
    ended = flags[0] | flags[1]
    h = jnp.where(ended[:, None], 0.0, advance(config, params, h, z, action))
    returns, ends = common.track(returns, reward, ended)
    return (pixels, env_state, h, returns), (row, ends)


def model_losses(config: Config, params: Any, batch: jrb.Sample, key: jax.Array) -> Any:
    """Returns the loss of the world model, and the h and z of all rows, `[B, L, ...]`."""
    data, call = batch.data, functools.partial(apply, config, params)

    def one(h: jax.Array, row: Any) -> tuple[jax.Array, Any]:
        observation, action, is_first, key = row
        h = jnp.where(is_first[:, None], 0.0, h)
        posterior = code_log_probs(config, call("posterior", h, observation))
        z = sample_code(posterior, key)
        return advance(config, params, h, z, action), (h, z, posterior)

    rows = data["observation"], data["action"], batch.info["is_first"]
    rows = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), rows)
    rows = *rows, jax.random.split(key, config.length)
    outputs = jax.lax.scan(one, data["h"][:, 0], rows)[1]
    h, z, posterior = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), outputs)
    prior, fixed = code_log_probs(config, call("prior", h)), jax.lax.stop_gradient
    # The prior learns faster; else the posterior would lose information about observations.
    kl = lambda p, q: jnp.maximum((jnp.exp(p) * (p - q)).sum(axis=(-2, -1)), config.free_nats)
    loss = 0.5 * kl(fixed(posterior), prior) + 0.1 * kl(posterior, fixed(prior))
    entropy = optax.sigmoid_binary_cross_entropy
    loss += entropy(call("pixels", h, z), data["observation"]).sum(axis=-1)
    outcome = call("outcome", h, z, jax.nn.one_hot(data["action"], ACTIONS))
    loss += (outcome[..., 0] - data["next"]["reward"]) ** 2
    loss += entropy(outcome[..., 1], 1.0 - data["next"]["terminated"])
    return jnp.mean(loss, where=batch.mask), (h, z)


def imagine(config: Config, params: Any, h: jax.Array, z: jax.Array, key: jax.Array) -> Any:
    """Imagines T steps; returns `[T + 1, B]` features, `[T, B]` actions, rewards and discounts."""

    def one(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        h, z = carry
        keys = jax.random.split(key)
        action = jax.random.categorical(keys[0], apply(config, params, "actor", h, z))
        outcome = apply(config, params, "outcome", h, z, jax.nn.one_hot(action, ACTIONS))
        discount = config.discount * jax.nn.sigmoid(outcome[..., 1])
        h = advance(config, params, h, z, action)
        prior = code_log_probs(config, apply(config, params, "prior", h))
        following = h, sample_code(prior, keys[1])
        return following, (following, action, outcome[..., 0], discount)

    keys = jax.random.split(key, config.horizon)
    following, *steps = jax.lax.scan(one, (h, z), keys)[1]
    states = jax.tree.map(lambda first, later: jnp.vstack([first[None], later]), (h, z), following)
    return jnp.concatenate(states, axis=-1), *steps


def policy_losses(config: Config, params: Any, h: Any, z: Any, key: jax.Array) -> jax.Array:
    """Returns the loss of policy and critic on imagined steps that start at all rows."""
    flat = lambda leaf: leaf.reshape(-1, leaf.shape[-1])
    steps = imagine(config, params, flat(h), flat(z), key)
    feature, action, reward, discount = jax.lax.stop_gradient(steps)
    values = apply(config, params, "critic", feature)[..., 0]
    fixed = jax.lax.stop_gradient(values)

    def one(target: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        reward, discount, value = row
        target = reward + discount * ((1 - config.trace) * value + config.trace * target)
        return target, target

    targets = jax.lax.scan(one, fixed[-1], (reward, discount, fixed[1:]), reverse=True)[1]
    log_probs = jax.nn.log_softmax(apply(config, params, "actor", feature[:-1]))
    chosen = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    loss = (values[:-1] - targets) ** 2 / 2 - chosen * (targets - fixed[:-1])
    # A step's weight is the product of the discounts before it, which include chances of an end.
    weights = jnp.cumprod(discount, axis=0) / discount
    return jnp.mean(weights * (loss - config.entropy * entropy))


def learn(config: Config, learner: Any, state: jrb.BufferState, key: jax.Array) -> Any:
    """Updates the networks, and the stored h of the sampled windows."""
    (params, moments), buffer, keys = learner, make_buffer(config), jax.random.split(key, 3)
    state, batch = buffer.draw(state, keys[0])

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        model_loss, (h, z) = model_losses(config, params, batch, keys[1])
        starts = jax.lax.stop_gradient((h, z))
        return model_loss + policy_losses(config, params, *starts, keys[2]), h

    gradient, h = jax.grad(loss, has_aux=True)(params)
    change, moments = optax.adam(config.learning_rate).update(gradient, moments)
    params = optax.apply_updates(params, change)
    return (params, moments), buffer.set(state, batch, {"h": h})


def train(key: jax.Array, config: Config) -> jax.Array:
    """Returns the learning curve of one training, the returns of its episodes, `[points]`."""
    keys, buffer = jax.random.split(key, 4), make_buffer(config)
    envs = jax.random.split(keys[0], config.num_envs)
    pixels, env_state = jax.vmap(ENV.reset, in_axes=(0, None))(envs, ENV_PARAMS)
    h = jnp.zeros((config.num_envs, config.width))
    carry = pixels, env_state, h, jnp.zeros(config.num_envs)
    params = {}
    for number, (name, (inputs, _)) in enumerate(config.sizes.items()):
        arguments = jax.random.fold_in(keys[1], number), *([h] * (name == "cell"))
        params[name] = network(config, name).init(*arguments, jnp.zeros((1, inputs)))
    one_row = lambda: jax.tree.map(lambda leaf: leaf[0], act(config, params, carry, key)[1][0])

    def collect(params: Any, carry: Any, state: Any, key: jax.Array, count: int) -> Any:
        one = functools.partial(act, config, params)
        carry, (rows, ends) = jax.lax.scan(one, carry, jax.random.split(key, count))
        return carry, buffer.extend(state, rows), ends

    def iteration(runner: Any, key: jax.Array) -> tuple[Any, Any]:
        learner, carry, state = runner
        acting, learning = jax.random.split(key)
        carry, state, ends = collect(learner[0], carry, state, acting, config.rollout)
        learner, state = learn(config, learner, state, learning)
        return (learner, carry, state), ends

    state = buffer.init(jax.eval_shape(one_row))
    carry, state, _ = collect(params, carry, state, keys[2], config.length)
    runner = (params, optax.adam(config.learning_rate).init(params)), carry, state
    iterations = jax.random.split(keys[3], config.steps // (config.rollout * config.num_envs))
    _, ends = jax.lax.scan(iteration, runner, iterations)
    return common.curve(jax.tree.map(jnp.ravel, ends), config.points)


if __name__ == "__main__":
    common.main(train, Config(), random_return=-0.6)
