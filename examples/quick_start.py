"""The quick start of the documentation: trains an agent to catch a ball, saves it, and plots.

`python -m examples.quick_start` trains for some seconds, and writes a folder `quick_start` with the
saved agent and a plot of its priorities. It needs optax and matplotlib (extra `demo`).

Reference: Mnih et al., 2015, "Human-level control through deep reinforcement learning"; Schaul et
al., 2016, "Prioritized experience replay".
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import optax

import jrb

# [buffer]
HEIGHT, WIDTH, ENVS = 8, 5, 8

buffer = jrb.ReplayBuffer(
    capacity=8_000,  # transitions, over all environments
    num_envs=ENVS,
    batch_size=64,
    sampler=jrb.Prioritized(alpha=0.6, beta=0.4),
    unit=jrb.NStep(3, discount=0.95),
    min_size=500,
)
board = jnp.zeros(HEIGHT * WIDTH)
example = {
    "observation": board,
    "action": jnp.int32(0),
    "next": {"observation": board, "reward": jnp.float32(0), "done": False},
}


# [environment]
def begun(key):
    """Returns a new world: a ball in the top row, the paddle in the middle of the bottom row."""
    ball = jax.random.randint(key, (), 0, WIDTH)
    return {"ball": ball, "row": jnp.int32(0), "paddle": jnp.int32(WIDTH // 2)}


def seen(world):
    """Returns the board, float32 [HEIGHT * WIDTH], 1 at the ball and the paddle."""
    board = jnp.zeros((HEIGHT, WIDTH)).at[world["row"], world["ball"]].set(1.0)
    return board.at[HEIGHT - 1, world["paddle"]].set(1.0).ravel()


def stepped(world, action, key):
    """Moves the paddle left (action 0), not (1) or right (2); starts a new ball after an end."""
    paddle = jnp.clip(world["paddle"] + action - 1, 0, WIDTH - 1)
    world = {"ball": world["ball"], "row": world["row"] + 1, "paddle": paddle}
    done = world["row"] == HEIGHT - 1
    caught = jnp.where(world["ball"] == paddle, 1.0, -1.0)
    reward = jnp.where(done, caught, 0.0)
    after = {"observation": seen(world), "reward": reward, "done": done}
    fresh = begun(key)
    return jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, world), after


# [network]
def values(params, observation):
    """Returns the value of each action, [..., 3]."""
    hidden = jax.nn.relu(observation @ params["in"] + params["bias"])
    return hidden @ params["out"]


optimizer = optax.adam(1e-3)


def learner(key):
    """Returns the parameters of network and target network, and the optimizer's state."""
    one, two = jax.random.split(key)
    params = {
        "in": jax.random.normal(one, (HEIGHT * WIDTH, 64)) * 0.1,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(two, (64, 3)) * 0.1,
    }
    target = jax.tree.map(jnp.copy, params)
    return {"params": params, "target": target, "optimizer": optimizer.init(params)}


def loss(params, target, batch):
    """Returns the weighted mean squared error, and the errors, [B]."""
    after = batch.data["next"]
    best = jnp.max(values(target, after["observation"]), axis=-1)
    goal = after["reward"] + batch.info["discount"] * best * (1 - after["done"])
    taken = batch.data["action"][:, None]
    value = jnp.take_along_axis(values(params, batch.data["observation"]), taken, axis=1)[:, 0]
    error = goal - value
    return jnp.mean(batch.weights * error**2), error


# [step]
def train_step(carry, key):
    """Acts once in every environment, stores the transitions, and learns from a batch."""
    agent, replay, worlds, number = carry
    names = ("explore", "act", "worlds", "draw")
    keys = dict(zip(names, jax.random.split(key, 4), strict=True))

    observation = jax.vmap(seen)(worlds)
    greedy = jnp.argmax(values(agent["params"], observation), axis=-1).astype(jnp.int32)
    anything = jax.random.randint(keys["act"], (ENVS,), 0, 3)
    share = jnp.maximum(1 - number / 1000, 0.05)
    explore = jax.random.uniform(keys["explore"], (ENVS,)) < share
    action = jnp.where(explore, anything, greedy)
    each = jax.random.split(keys["worlds"], ENVS)
    worlds, after = jax.vmap(stepped)(worlds, action, each)

    step = {"observation": observation, "action": action, "next": after}
    replay = buffer.add(replay, step)
    batch = buffer.sample(replay, keys["draw"])
    (_, error), slope = jax.value_and_grad(loss, has_aux=True)(
        agent["params"], agent["target"], batch
    )
    replay = buffer.update_priority(replay, batch, jnp.abs(error))

    change, state = optimizer.update(slope, agent["optimizer"])
    params = optax.apply_updates(agent["params"], change)
    target = optax.incremental_update(params, agent["target"], 0.01)
    agent = {"params": params, "target": target, "optimizer": state}
    ended = jnp.sum(after["done"])
    return (agent, replay, worlds, number + 1), (jnp.sum(after["reward"]), ended)


@functools.partial(jax.jit, donate_argnums=0)
def train(carry, keys):
    """Takes a step for each key, in one program that writes the buffer in place."""
    return jax.lax.scan(train_step, carry, keys)


# [main]
def main(folder="quick_start", parts=10):
    """Trains, saves, loads and plots; returns the fraction of balls caught at the end."""
    folder = pathlib.Path(folder)
    start, *keys = jax.random.split(jax.random.key(0), parts + 1)
    worlds = jax.vmap(begun)(jax.random.split(start, ENVS))
    carry = learner(start), buffer.init(example), worlds, jnp.int32(0)
    for part, key in enumerate(keys):
        carry, (reward, ended) = train(carry, jax.random.split(key, 500))
        caught = (reward.sum() / ended.sum() + 1) / 2
        print(f"step {(part + 1) * 500:5}: {caught:4.0%} of the balls caught")
    agent, replay, *_ = carry

    # [save]
    jrb.save(folder / "replay", buffer, replay, extra=agent)

    # [load]
    again, restored, agent = jrb.load(folder / "replay", extra=agent)
    print(f"Saved {int(again.size(restored)):,} transitions and the agent: {folder / 'replay'}")

    # [plot]
    figure = jrb.plot.state(again, restored)
    figure.savefig(folder / "priorities.png", dpi=110)
    print(f"Picture of the buffer: {folder / 'priorities.png'}")
    # [end]
    return float(caught)


if __name__ == "__main__":
    main()
