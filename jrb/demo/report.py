"""What a person sees of the demo: a progress bar, a table, and a picture."""

import math
from typing import Any

import numpy as np

from jrb._base import extras
from jrb.demo import training

rich_console = extras.require("rich.console", "demo")
rich_progress = extras.require("rich.progress", "demo")
rich_table = extras.require("rich.table", "demo")
figure = extras.require("matplotlib.figure", "demo")

_PARTS = 8
_BLUE, _ORANGE, _GREY = "#3366aa", "#cc7733", "#bbbbbb"


def main(env: str, steps: int, seeds: int, seed: int, out: str) -> None:
    """Trains behind a progress bar, prints a table, and writes the picture to `out`."""
    config = training.Config(env=env, steps=steps, seeds=seeds, seed=seed)
    console = rich_console.Console()
    result = _train(config, console)
    console.print(table(config, result))
    picture(config, result).savefig(out, dpi=150)
    console.print(f"The learning curve and the priorities are in {out}")


def _train(config: training.Config, console: Any) -> training.Result:
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TextColumn("{task.fields[rate]}"),
        rich_progress.TextColumn("return {task.fields[mean]:.2f}"),
        rich_progress.TimeElapsedColumn(),
    )
    chunk_steps = config.played // config.chunks * config.seeds
    with rich_progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=config.chunks, rate="", mean=math.nan)

        def report(chunk: int, mean: float) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed * chunk_steps:,.0f} steps/s" if speed else ""
            bar.update(task, description=config.env, completed=chunk, rate=rate, mean=mean)

        return training.train(config, report)


def table(config: training.Config, result: training.Result) -> Any:
    """The mean return of each eighth of the training, for every seed."""
    total = config.played * config.seeds
    view = rich_table.Table(
        title=f"{config.env}: {total:,} steps in {result.seconds:.0f} s, mean return by eighth"
    )
    view.add_column("seed", justify="right")
    for part in range(_PARTS):
        view.add_column(f"{part + 1}/{_PARTS}", justify="right")
    for seed, row in enumerate(result.mean_return(_PARTS).T):
        view.add_row(str(config.seed + seed), *(f"{value:.2f}" for value in row))
    return view


def picture(config: training.Config, result: training.Result) -> Any:
    """The learning curve of every seed, and the priorities held at the end."""
    sheet = figure.Figure(figsize=(9, 3.4), layout="constrained")
    left, right = sheet.subplots(1, 2)
    curves = result.mean_return(config.chunks)
    steps = np.linspace(0, config.played / 1000, config.chunks + 1)[1:]
    one = curves.shape[1] == 1
    left.plot(steps, curves, color=_BLUE if one else _GREY, linewidth=2 if one else 1)
    if not one:
        left.plot(steps, curves.mean(axis=1), color=_BLUE, linewidth=2, label="mean of seeds")
        left.legend(frameon=False)
    left.set(xlabel="thousands of environment steps", ylabel="mean return", title=config.env)
    right.hist(result.priorities, bins=60, color=_ORANGE)
    right.set(
        xlabel="priority: the |TD error| when last drawn,\nor the largest so far if never drawn",
        ylabel="transitions",
        title="priorities at the end",
    )
    right.set_yscale("log")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return sheet
