"""Formats the groups without peers, which have their own columns, and complete reports."""

from collections.abc import Callable
from typing import Any

from . import markdown
from .figures import figure, power

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]

BESIDE_RAY: list[Column] = [
    ("", lambda row: row["what"]),
    ("best", lambda row: figure(row["best"])),
    ("median", lambda row: figure(row["median"])),
    ("beside", lambda row: row.get("beside", "Ray")),
    ("its best", lambda row: figure(row["ray_best"])),
    ("its median", lambda row: figure(row["ray_median"])),
    ("ratio", lambda row: f"{row['ratio']:.2f}"),
]
SPREADS: list[Column] = [
    ("priorities", lambda row: row["what"]),
    ("beta", lambda row: f"{row['beta']:.1f}"),
    ("error of weights", lambda row: f"{row['error']:.1e}"),
    ("spread, 256 shards", lambda row: f"{row['ours_sd']:.4f}"),
    ("one buffer", lambda row: f"{row['one_sd']:.4f}"),
    ("ratio", lambda row: figure(row["ratio"])),
]
RETURNS: list[Column] = [
    ("environment", lambda row: row["what"]),
    ("recorded return", lambda row: figure(row["recorded_return"])),
    ("cloned return", lambda row: figure(row["mean_return"])),
    ("seconds", lambda row: figure(row["seconds"])),
]


def _costs(rows: list[Row]) -> list[Column]:
    """Returns the columns of `scale`: the least microseconds at each N."""

    def least(n: str) -> Column:
        return f"N = {power(int(n))}, µs", lambda row: figure(row["n"][n]["least_us"])

    return [("", lambda row: row["what"]), *map(least, rows[0]["n"])]


COLUMNS: dict[str, Callable[[list[Row]], list[Column]]] = {
    "remote": lambda rows: BESIDE_RAY,
    "skew": lambda rows: SPREADS,
    "scale": _costs,
    "offline": lambda rows: RETURNS,
}


def table(group: str, rows: list[Row]) -> str:
    """Formats the table of any group, with or without peers.

    Raises:
        ValueError: there are no rows.
    """
    if not rows or group not in COLUMNS:
        return markdown.table(rows)
    columns = COLUMNS[group](rows)
    lines = [[head for head, _ in columns], [":--"] + ["--:"] * (len(columns) - 1)]
    lines += [[cell(row) for _, cell in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def section(result: Row) -> str:
    """Formats a group of a report."""
    if result["group"] not in COLUMNS:
        return markdown.section(result)
    head = [f"## {result['group']}", result["about"], table(result["group"], result["rows"])]
    return "\n\n".join([*head, markdown.machine(result)])


def page(results: list[Row], missing: dict[str, list[str]]) -> str:
    """Formats a complete report."""
    parts = ["# Benchmarks", markdown.lead()]
    if missing:
        lacks = [f"{name} (`pip install {' '.join(what)}`)" for name, what in missing.items()]
        parts.append(f"Not installed, so not compared: {', '.join(lacks)}.")
    return "\n\n".join([*parts, *map(section, results)]) + "\n"
