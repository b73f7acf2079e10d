"""`jrb stats`, which shows returns, lengths and rewards of the episodes at a path."""

import importlib
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from jrb._util.wording import require
from jrb.cli import console, sources

typer: Any = require("typer", "cli")

_BLOCKS, _BINS = "▁▂▃▄▅▆▇█", 16
_ROWS = ("count", "min", "median", "mean", "max", "std")


def stats(
    path: Annotated[str, sources.SOURCE],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    where: Annotated[
        str | None,
        typer.Option(help="Only episodes such as 'return > 100 and length < 500 and complete'."),
    ] = None,
    state: sources.State = None,
) -> None:
    """Show returns, lengths and rewards of the episodes at PATH."""
    # Raise for a path that does not exist; then read the numbers in their own dtypes.
    sources.kind_of(path)
    with importlib.import_module("jrb.authoring").enable_x64():
        dataset = sources.open_dataset(path, state)
        dataset = dataset if where is None else dataset.where(where)
        running = dataset.facts.get("running", np.zeros(len(dataset), bool))
        counts = {"episodes": dataset.episodes, "transitions": dataset.transitions}
        counts |= {"complete": int(dataset.complete.sum()), "running": int(running.sum())}
        summaries = {name: summary(values) for name, values in _read_numbers(dataset).items()}
    if json:
        empty = {"returns": None, "rewards": None}
        console.write_json({"path": path, **empty, **counts, **summaries})
        return
    blocks = [console.plain(path, "bold")]
    blocks.append(console.fact_table([(name, f"{count:,}") for name, count in counts.items()]))
    # Show a column of statistics for each group of numbers, then its histogram in a line.
    some = {name: each for name, each in summaries.items() if each["count"]}
    if some:
        rows: list[list[str]] = []
        for name in _ROWS:
            values = [each[name] for each in some.values()]
            texts = [
                "" if it is None else f"{it:,}" if name == "count" else f"{it:.5g}" for it in values
            ]
            rows.append([name, *texts])
        blocks += [console.plain(""), console.table(["", *some], rows, numbers=len(some))]
    histograms = [
        (name, f"{each['min']:.5g} {bars(each['histogram'])} {each['max']:.5g}")
        for name, each in some.items()
        if each["min"] != each["max"]
    ]
    blocks += [console.plain(""), console.fact_table(histograms)] if histograms else []
    console.show(*blocks)


def _read_numbers(dataset: Any) -> dict[str, np.ndarray]:
    """Returns the lengths and returns of complete episodes, and the rewards of all steps.

    If a reward has several leaves or numbers, each of them is a separate entry.
    """
    complete = dataset.only(dataset.numbers[dataset.complete])
    arrays = {"lengths": complete.lengths}
    if "reward" in dataset.spec["next"]:
        # Concatenate the rewards of all episodes, leaf by leaf.
        jax = importlib.import_module("jax")
        every = list(dataset.format.rewards(dataset.source, dataset.numbers.tolist()))
        rows = [
            jax.tree.map(lambda leaf, n=n: leaf[:n], reward)
            for reward, n in zip(every, dataset.lengths.tolist(), strict=True)
        ]
        concat = lambda *leaves: np.concatenate(leaves)
        rewards = jax.tree.map(concat, *rows) if rows else np.zeros(0)
        # Name each number of each leaf.
        summed = {"returns": complete.returns(), "rewards": rewards}
        for path, values in jax.tree_util.tree_leaves_with_path(summed):
            name = importlib.import_module("jrb.authoring").leaf_name(path)
            parts = values.reshape(len(values), -1) if values.ndim > 1 else values[:, None]
            for place in range(parts.shape[1]):
                arrays[name if values.ndim == 1 else f"{name}[{place}]"] = parts[:, place]
    return arrays


def summary(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Returns statistics of the finite numbers, None if there are none, and a histogram."""
    array = np.asarray(values, np.float64)
    # Statistics are of the finite numbers, of which there may be none.
    fine = array[np.isfinite(array)]
    names = {"min": np.min, "median": np.median, "mean": np.mean, "max": np.max, "std": np.std}
    numbers = {name: float(of(fine)) if len(fine) else None for name, of in names.items()}
    counts = np.histogram(fine, _BINS)[0] if len(fine) else np.zeros(0, int)
    return {"count": len(array), "finite": len(fine), **numbers, "histogram": counts.tolist()}


def bars(counts: list[int]) -> str:
    """Returns a bar chart of one character per count, as high as the count; blank for 0."""
    # The highest count has the highest character, and any count above 0 at least the lowest.
    most = max(counts, default=0)
    level = lambda count: -(-count * len(_BLOCKS) // most) - 1
    return "".join(_BLOCKS[level(count)] if count else " " for count in counts)
