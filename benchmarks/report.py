"""Runs comparisons, prints them as a table, and writes them as JSON."""

import argparse
import json
import platform
from collections.abc import Callable

import jax
import rich.console
import rich.progress
import rich.table

from benchmarks import timing

Task = tuple[str, int, Callable[[], tuple], Callable[[], tuple], int]
"""What is compared: name, N, jrb, the other (each a body and a state), cycles a call."""


def compare(task: str, n: int, one: tuple, other: tuple, steps: int, rounds: int) -> dict:
    """One row of the table."""
    ours = timing.program("jrb", *one, steps)
    theirs = timing.program("other", *other, steps)
    timing.in_turn([ours, theirs], rounds)
    return {
        "task": task,
        "n": n,
        "jrb_us": ours.median_us,
        "other_us": theirs.median_us,
        "ratio": timing.ratio(ours, theirs),
        "compile_ratio": timing.compile_ratio(ours, theirs),
        "jrb_compile_s": sorted(ours.compiles_s)[2],
        "jrb_temp_bytes": ours.temp_bytes,
        "other_temp_bytes": theirs.temp_bytes,
    }


def run(doc: str, file: str, tasks: Callable[[bool], list[Task]]) -> None:
    """Runs all tasks, prints a table, and writes JSON.

    Args:
        doc: the module's docstring.
        file: where the JSON goes by default, below `benchmarks/results`.
        tasks: from whether only small ones are wanted.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only small buffers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default=f"benchmarks/results/{file}")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    options = parser.parse_args()
    chosen = [task for task in tasks(options.quick) if options.only in task[0]]
    rows = [
        compare(name, n, one(), other(), steps, options.rounds)
        for name, n, one, other, steps in rich.progress.track(chosen, file)
    ]
    print_table(rows)
    with open(options.json, "w") as out:
        json.dump({"machine": machine(), "rows": rows}, out, indent=2)


def machine() -> dict:
    """Where this was measured."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "processor": platform.machine(),
    }


def print_table(rows: list[dict]) -> None:
    """The rows, as a person reads them."""
    table = rich.table.Table(title="microseconds a cycle, jrb and the other in turn")
    for head in ("task", "N", "jrb", "other", "ratio", "compile", "temporaries"):
        table.add_column(head, justify="left" if head == "task" else "right")
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['n']:.0e}",
            f"{row['jrb_us']:.1f}",
            f"{row['other_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['compile_ratio']:.2f}",
            f"{row['jrb_temp_bytes'] / 1e3:.0f} kB",
        )
    rich.console.Console().print(table)
