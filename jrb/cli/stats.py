"""`jrb stats`: returns, lengths and rewards of what lies at a path."""

import importlib
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from jrb._util import wording
from jrb.cli import console, found

typer: Any = wording.require("typer", "cli")

_BLOCKS = "▁▂▃▄▅▆▇█"
_BINS = 16
_ROWS = ("count", "min", "median", "mean", "max", "std")

Summary = dict[str, Any]


def stats(
    path: Annotated[str, found.SOURCE],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show returns, lengths and rewards of the episodes at PATH."""
    found.kind_of(path)  # raises where nothing is
    with importlib.import_module("jrb._xla.compat").enable_x64():  # for items of any dtype
        dataset = found.dataset(path)
        counts = {"episodes": dataset.episodes, "transitions": dataset.transitions}
        counts |= _ends(dataset)
        told = {name: summary(values) for name, values in _numbers(dataset).items()}
    if json:
        empty = {"returns": None, "rewards": None}
        console.write_json({"path": path, **empty, **counts, **told})
        return
    out = console.out()
    out.print(console.plain(path, "bold"))
    out.print(console.facts([(name, f"{count:,}") for name, count in counts.items()]))
    some = {name: each for name, each in told.items() if each["count"]}
    if some:
        rows = [[row, *(_text(each[row]) for each in some.values())] for row in _ROWS]
        out.print(console.plain(""))
        out.print(console.table(["", *some], rows, numbers=len(some)))
        drawn = [(name, _drawn(each)) for name, each in told.items() if _drawn(each)]
        for block in [console.plain(""), console.facts(drawn)] if drawn else []:
            out.print(block)


def _ends(dataset: Any) -> dict[str, int]:
    """Returns how many episodes are complete, and how many are running."""
    running = dataset.facts.get("running", np.zeros(len(dataset), bool))
    return {"complete": int(dataset.complete.sum()), "running": int(running.sum())}


def _numbers(dataset: Any) -> dict[str, np.ndarray]:
    """Lengths and returns of complete episodes, and all rewards; each number of one by itself."""
    complete = dataset.only(dataset.numbers[dataset.complete])
    found = {"lengths": complete.lengths}
    if "reward" not in dataset.spec["next"]:
        return found
    returns = complete.returns()
    rewards = list(dataset.format.rewards(dataset.source, dataset.numbers.tolist()))
    rows = [reward[:n] for reward, n in zip(rewards, dataset.lengths.tolist(), strict=True)]
    rewards = np.concatenate(rows) if rows else np.zeros(0)
    return found | _apart("returns", returns) | _apart("rewards", rewards)


def _apart(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Numbers `[K]`; of several, `[K, ...]`, each by itself."""
    if values.ndim == 1:
        return {name: values}
    rows = values.reshape(len(values), -1)
    return {f"{name}[{place}]": rows[:, place] for place in range(rows.shape[1])}


def summary(values: Sequence[float] | np.ndarray) -> Summary:
    """Count, least, median, mean, most, deviation, and a histogram; None where there are none."""
    array = np.asarray(values, np.float64)
    fine = array[np.isfinite(array)]
    told: Summary = {"count": len(array), "finite": len(fine)}
    names = {"min": np.min, "median": np.median, "mean": np.mean, "max": np.max, "std": np.std}
    told |= {name: float(of(fine)) if len(fine) else None for name, of in names.items()}
    counts = np.histogram(fine, _BINS)[0] if len(fine) else np.zeros(0, int)
    return {**told, "histogram": counts.tolist()}


def _drawn(told: Summary) -> str:
    """A histogram from the least to the most, a character a bin."""
    if not told["histogram"] or told["min"] == told["max"]:
        return ""
    return f"{told['min']:.5g} {bars(told['histogram'])} {told['max']:.5g}"


def bars(counts: list[int]) -> str:
    """A character for each count, as high as it is large; a blank for none."""
    most = max(counts, default=0)
    level = lambda count: -(-count * len(_BLOCKS) // most) - 1
    return "".join(_BLOCKS[level(count)] if count else " " for count in counts)


def _text(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,}" if isinstance(number, int) else f"{number:.5g}"
