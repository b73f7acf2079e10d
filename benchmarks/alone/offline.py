"""Behaviour cloning: a policy that imitates a dataset, evaluated in the environment.

It needs gymnasium and optax, and a checkout of the repository, which has the dataset.

The dataset is opened, loaded into a buffer, and sampled in one jitted scan. After each part of the
training, the policy plays some episodes, in which it takes the most likely actions.

Reference: Pomerleau, 1991, "Efficient training of artificial neural networks for autonomous
navigation".
"""

import functools
import itertools
import pathlib
import time
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jrb
from jrb._util import wording

from ..workloads.case import Wanted

RECORDED = pathlib.Path(jrb.__file__).parents[1] / "tests" / "data" / "minari" / "cartpole-v0"
PARTS, STEPS, BATCH, HIDDEN, EPISODES = 25, 50, 256, 64, 20

optimizer = optax.adam(1e-3)


def scores(params: Any, observation: jax.Array) -> jax.Array:
    """Returns the logits of all actions, `[..., A]`."""
    hidden = jnp.tanh(observation @ params["w0"] + params["b0"])
    hidden = jnp.tanh(hidden @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def begun(key: jax.Array, width: int, actions: int) -> Any:
    """Returns the initial parameters of a network with two hidden layers."""
    sizes = [width, HIDDEN, HIDDEN, actions]
    params = {}
    for number, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        drawn = jax.random.normal(jax.random.fold_in(key, number), (rows, columns))
        params[f"w{number}"] = drawn / np.float32(np.sqrt(rows))
        params[f"b{number}"] = jnp.zeros(columns)
    return params


@functools.partial(jax.jit, static_argnums=0)
def trained(
    buffer: jrb.ReplayBuffer, state: jrb.BufferState, learner: Any, key: jax.Array
) -> tuple[Any, jax.Array]:
    """Returns the learner after `STEPS` steps, and the mean loss."""

    def loss(params: Any, data: Any) -> jax.Array:
        found = scores(params, data["observation"])
        return optax.softmax_cross_entropy_with_integer_labels(found, data["action"]).mean()

    def step(learner: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = learner
        batch = buffer.sample(state, key)
        value, slope = jax.value_and_grad(loss)(params, batch.data)
        change, moments = optimizer.update(slope, moments)
        return (optax.apply_updates(params, change), moments), value

    learner, losses = jax.lax.scan(step, learner, jax.random.split(key, STEPS))
    return learner, losses.mean()


@jax.jit
def likeliest(params: Any, observation: jax.Array) -> jax.Array:
    """Returns the most likely actions, `[...]`."""
    return scores(params, observation).argmax(axis=-1)


def played(params: Any, environment: str, seed: int) -> list[float]:
    """Returns the returns of `EPISODES` episodes, played in parallel environments."""
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.make_vec(
        environment, EPISODES, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    seen, _ = envs.reset(seed=seed)
    returns, over = np.zeros(EPISODES), np.zeros(EPISODES, bool)
    while not over.all():
        seen, reward, terminated, truncated, _ = envs.step(np.asarray(likeliest(params, seen)))
        returns += reward * ~over
        over |= terminated | truncated
    envs.close()
    return returns.tolist()


def cloned(path: str) -> dict[str, Any]:
    """Trains and evaluates a policy; returns the results."""
    start = time.perf_counter()
    dataset = jrb.datasets.open(path)
    environment = dataset.metadata["env_spec"]["id"]
    buffer, state = dataset.buffer(batch_size=BATCH)
    opened = time.perf_counter() - start
    actions = int(jrb.items(buffer, state)["action"].max()) + 1
    params = begun(jax.random.key(0), dataset.spec["observation"].shape[-1], actions)
    learner, losses, returns = (params, optimizer.init(params)), [], []
    for part in range(PARTS):
        learner, loss = trained(buffer, state, learner, jax.random.key(part + 1))
        losses.append(float(loss))
        returns.append(played(learner[0], environment, seed=1000 * part))
    return {
        "set": pathlib.Path(path).name,
        "environment": environment,
        "episodes": len(dataset),
        "recorded_return": float(dataset.returns().mean()),
        "losses": losses,
        "returns": returns,
        "mean_return": float(np.mean(returns[-1])),
        "seconds_to_buffer": opened,
        "seconds": time.perf_counter() - start,
    }


def picture(result: dict[str, Any]) -> Any:
    """Draws a figure of the returns over training steps, with the mean return of the dataset."""
    figure = wording.require("matplotlib.figure", "demo").Figure((6.4, 4), layout="constrained")
    axes, steps = figure.subplots(), STEPS * np.arange(1, PARTS + 1)
    returns = np.array(result["returns"])
    axes.fill_between(
        steps, returns.min(axis=1), returns.max(axis=1), alpha=0.2, lw=0, label="all of them"
    )
    axes.plot(steps, returns.mean(axis=1), marker="o", label=f"played, mean of {EPISODES}")
    axes.axhline(result["recorded_return"], color="grey", ls="--", label="recorded, mean")
    axes.set(xlabel="steps of training", ylabel="return", ylim=(0, 1.08 * returns.max()))
    axes.set_title(f"{result['environment']}: behaviour cloned from {result['episodes']} episodes")
    axes.legend(loc="lower right")
    return figure


def run(wanted: Wanted) -> dict[str, Any]:
    """Returns the results as a single row."""
    found = cloned(str(RECORDED))
    return {"rows": [{"what": found["environment"], **found}]}
