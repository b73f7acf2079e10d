"""The output of the demo: a progress bar, a table, and a plot."""

import functools
import math
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.demo import training
from jrb.plot import canvas
from jrb.plot.of_state import plot_priority_histogram

rich_console: Any = require("rich.console", "demo")
rich_progress: Any = require("rich.progress", "demo")
rich_table: Any = require("rich.table", "demo")

_PARTS = 8


def main(env: str, steps: int, seeds: int, seed: int, out: str, devices: int = 1) -> None:
    """Trains with a progress bar, prints a table, and writes the plot to the path `out`."""
    config = training.Config(env=env, steps=steps, seeds=seeds, seed=seed, devices=devices)
    # Raise for a wrong config before anything is shown.
    training.Agent(config)
    console = rich_console.Console()
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

        result = training.train(config, report)
    console.print(make_table(config, result))
    plot_training(config, result).savefig(out, dpi=150)
    console.print(f"The learning curve and the priorities are in {out}")


def make_table(config: training.Config, result: training.Result) -> Any:
    """Returns a table of the mean return in each eighth of the training, by seed."""
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


def plot_training(config: training.Config, result: training.Result) -> Any:
    """Returns a figure of the learning curve of every seed, and of the final priorities."""
    curves = result.mean_return(config.chunks)
    masses = (result.priorities.astype(np.float64) + config.eps) ** config.alpha

    def plot_curves(axes: canvas.Axes, tone: canvas.Tone) -> None:
        # Plot the curve of a single seed, or pale ones of several seeds and their mean.
        steps = np.linspace(0, config.played / 1000, config.chunks + 1)[1:]
        one = curves.shape[1] == 1
        axes.plot(steps, curves, color=canvas.BLUE if one else canvas.GREY, linewidth=1 + one)
        if not one:
            mean = curves.mean(axis=1)
            axes.plot(steps, mean, color=canvas.BLUE, linewidth=2, label="mean of seeds")
            canvas.add_legend(axes, tone, "upper left")
        axes.set_ylim(bottom=min(0.0, float(np.nanmin(curves, initial=0))))
        axes.set(xlabel="thousands of environment steps", ylabel="mean return")
        canvas.whole_numbers(axes.xaxis)
        # Say the mean return in the last tenth of the training.
        last = curves[-max(1, len(curves) // 10) :]
        last = last[np.isfinite(last)]
        end = f"return {last.mean():.1f}" if last.size else "no episode"
        more = "the episodes that ended since the point before"
        canvas.write_title(axes, tone, f"{config.env}: {end} at the end", more)

    label = "priority: |TD error| when last drawn, or the largest so far"
    histogram = functools.partial(plot_priority_histogram, result.priorities, masses, label=label)
    return canvas.draw_rows([canvas.Row(3.3, [plot_curves, histogram])], None, "demo")
