"""The command line, learning curves and plots that all agents share.

An agent is a pure, traceable function `train(key, config, *inputs)`. It returns its learning curve,
float32 `[points]`: mean returns in parts of the training of equal length. E environments.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def track(returns: jax.Array, reward: jax.Array, ended: jax.Array) -> tuple[jax.Array, Any]:
    """Adds the rewards `[E]` of a step to the returns of the running episodes.

    Returns the new returns `[E]`, 0 where an episode ended; and, for `curve`, the sum of the
    returns of the episodes that ended in this step, and their number.
    """
    returns = returns + reward
    ends = jnp.sum(jnp.where(ended, returns, 0.0)), jnp.sum(ended)
    return jnp.where(ended, 0.0, returns), ends


def curve(ends: tuple[jax.Array, jax.Array], points: int) -> jax.Array:
    """Returns the mean return of the episodes that ended in each part of a training, `[points]`.

    `ends` are the second results of `track` of all steps, stacked by `lax.scan`. Steps after the
    last full part are left out. A part in which no episode ended is NaN.
    """
    size = len(ends[1]) // points
    total, number = (leaf[: points * size].reshape(points, size).sum(axis=1) for leaf in ends)
    return jnp.where(number > 0, total / jnp.maximum(number, 1), jnp.nan)


def compiled(train: Callable, config: Any, keys: jax.Array, *inputs: Any) -> Any:
    """Returns the compiled program that trains one agent for each key, under `vmap`.

    All agents share the `inputs`, pytrees of arrays such as the state of a read-only buffer. The
    program's arguments are the keys and the inputs.

    XLA's thread pool for matrix products is switched off. Small networks do not need it, and with
    it, about one in ten programs never ended on a CPU of two cores: all of its threads waited.
    """
    with jax.numpy_dtype_promotion("standard"):  # environments and optimizers mix dtypes
        each = lambda keys, *inputs: jax.vmap(lambda key: train(key, config, *inputs))(keys)
        program = jax.jit(each).lower(keys, *inputs)
    return program.compile(compiler_options={"xla_cpu_multi_thread_eigen": False})


def run(
    train: Callable, config: Any, seeds: Iterable[int], *inputs: Any
) -> tuple[np.ndarray, float]:
    """Trains one agent for each seed, all in one program under `vmap`.

    Returns the learning curves, float32 `[seeds, points]`, and the seconds without compilation.
    """
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    program = compiled(train, config, keys, *inputs)
    start = time.perf_counter()
    curves = np.asarray(program(keys, *inputs))
    return curves, time.perf_counter() - start


def main(
    train: Callable, config: Any, random_return: float, *inputs: Any, unit: str = "steps"
) -> np.ndarray:
    """Trains with the options of the command line, prints the results, and plots the curves.

    Args:
        train: the agent's function.
        config: the agent's config, a frozen dataclass. The option `--steps` replaces its `steps`,
            and bool fields have options too, such as `--no-memory` for `memory`.
        random_return: the mean return of a policy that acts at random.
        inputs: further arguments of the agent after key and config.
        unit: the unit of `steps`, for texts.

    Returns:
        The final return of each seed: the mean over the last tenth of its curve.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5, help="number of trainings")
    parser.add_argument("--steps", type=int, default=config.steps, help=f"{unit} of each training")
    parser.add_argument("--plot", metavar="PATH", help="where to write a picture of the curves")
    flags = [name for name, value in vars(config).items() if isinstance(value, bool)]
    for name in flags:
        action = argparse.BooleanOptionalAction
        parser.add_argument(f"--{name}", action=action, default=getattr(config, name))
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("steps", *flags)}
    config = dataclasses.replace(config, **chosen)
    curves, seconds = run(train, config, range(options.seeds), *inputs)
    final = np.nanmean(curves[:, -max(1, curves.shape[1] // 10) :], axis=1)
    rate = options.seeds * options.steps / seconds
    print(
        f"final return {final.mean():.4g} +- {final.std():.2g} over {options.seeds} seeds, random "
        f"policy {random_return:.4g}; {rate:,.0f} {unit} per second over all seeds"
    )
    if options.plot:
        plot(options.plot, curves, options.steps, random_return, unit)
    return final


def plot(path: str, curves: np.ndarray, steps: int, random_return: float, unit: str) -> None:
    """Plots the mean curve, a band of one standard deviation, and the return of random actions."""
    from matplotlib.figure import Figure

    ink, blue = "#808890", "#3b82f6"  # readable on light and dark pages
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    x = np.linspace(0, steps, curves.shape[1] + 1)[1:]
    mean, spread = np.nanmean(curves, axis=0), np.nanstd(curves, axis=0)
    axes.fill_between(x, mean - spread, mean + spread, color=blue, alpha=0.25, linewidth=0)
    axes.plot(x, mean, color=blue, linewidth=1.8)
    axes.axhline(random_return, color=ink, linestyle=":", linewidth=1.2)
    axes.set_xlabel(unit, color=ink)
    axes.set_ylabel("return", color=ink)
    axes.tick_params(colors=ink)
    axes.spines[:].set_color(ink)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, transparent=True)
