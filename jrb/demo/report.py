"""What a person sees of the demo: a progress bar, a table, and a picture."""

import math
from typing import Any

import numpy as np

from jrb._util import wording
from jrb.demo import training
from jrb.plot import canvas
from jrb.plot.of_state import priority_spread

rich_console: Any = wording.require("rich.console", "demo")
rich_progress: Any = wording.require("rich.progress", "demo")
rich_table: Any = wording.require("rich.table", "demo")

_PARTS = 8


def main(env: str, steps: int, seeds: int, seed: int, out: str, devices: int = 1) -> None:
    """Trains behind a progress bar, prints a table, and writes the picture to `out`."""
    config = training.Config(env=env, steps=steps, seeds=seeds, seed=seed, devices=devices)
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
    curve = lambda *at: _curve(config, result.mean_return(config.chunks), *at)
    spread = lambda *at: _spread(result.priorities, config, *at)
    return canvas.drawn([canvas.Row(3.3, [curve, spread])], None, "demo")


def _curve(config: training.Config, curves: np.ndarray, axes: Any, tone: canvas.Tone) -> None:
    """Mean returns, `[C, K]`: a line for each seed, and of several their mean."""
    steps = np.linspace(0, config.played / 1000, config.chunks + 1)[1:]
    one = curves.shape[1] == 1
    axes.plot(
        steps,
        curves,
        color=canvas.BLUE if one else canvas.GREY,
        linewidth=2 if one else 1,
    )
    if not one:
        mean = curves.mean(axis=1)
        axes.plot(steps, mean, color=canvas.BLUE, linewidth=2, label="mean of seeds")
        canvas.legend(axes, tone, "upper left")
    axes.set_ylim(bottom=min(0.0, float(np.nanmin(curves, initial=0))))
    canvas.whole_numbers(axes.xaxis)
    axes.set(xlabel="thousands of environment steps", ylabel="mean return")
    more = "the episodes that ended since the point before"
    canvas.say(axes, tone, f"{config.env}: {_last(curves)} at the end", more)


def _last(curves: np.ndarray) -> str:
    """The mean return of the last tenth, over all seeds."""
    known = curves[-max(1, len(curves) // 10) :]
    known = known[np.isfinite(known)]
    return f"return {known.mean():.1f}" if known.size else "no episode"


def _spread(raw: np.ndarray, config: training.Config, axes: Any, tone: canvas.Tone) -> None:
    """The priorities at the end, and what share of the mass the largest hold."""
    masses = (raw.astype(np.float64) + config.eps) ** config.alpha
    priority_spread(raw, masses, axes, tone)
    axes.set_xlabel("priority: |TD error| when last drawn, or the largest so far")
