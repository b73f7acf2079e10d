"""The tables of the pages on performance and scale, out of `benchmarks/results`.

A line `<!-- table: cycle -->` of a page becomes the table of `cycle.json`; with words behind a bar,
`<!-- table: cycle | uniform, frames -->`, the rows whose name contains one of them;
`<!-- machine: cycle -->` says where they were measured.
"""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def figure(value: float) -> str:
    """Three figures, with commas between thousands."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def power(n: int) -> str:
    """`10^6` as people write it; other numbers with commas."""
    digits = str(n)
    exact = digits == "1" + "0" * (len(digits) - 1) and n >= 1000
    return f"10{str(len(digits) - 1).translate(_RAISED)}" if exact else f"{n:,}"


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

CYCLES: list[Column] = [
    ("", lambda row: row["task"]),
    ("N", lambda row: power(row["n"])),
    ("jrb, µs", lambda row: figure(row["jrb_us"])),
    ("other, µs", lambda row: figure(row["other_us"])),
    ("time ratio", lambda row: f"{row['ratio']:.2f}"),
    ("compile ratio", lambda row: f"{row['compile_ratio']:.2f}"),
]
SECONDS: list[Column] = [
    ("", lambda row: row["what"]),
    ("jrb, s", lambda row: f"{row['ours_s']:.3f}"),
    ("other, s", lambda row: f"{row['other_s']:.3f}"),
    ("times faster", lambda row: figure(row["ratio"])),
]
MICROSECONDS: list[Column] = [
    ("", lambda row: row["what"]),
    ("jrb, µs", lambda row: figure(row["ours_us"])),
    ("other, µs", lambda row: figure(row["other_us"])),
    ("time ratio", lambda row: f"{row['ratio']:.2f}"),
]
BESIDE_RAY: list[Column] = [
    ("", lambda row: row["what"]),
    ("best", lambda row: figure(row["best"])),
    ("median", lambda row: figure(row["median"])),
    ("Ray's best", lambda row: figure(row["ray_best"])),
    ("Ray's median", lambda row: figure(row["ray_median"])),
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


def _least(n: int) -> Column:
    """The least microseconds at this N."""
    return f"N = {power(n)}, µs", lambda row: figure(row["n"][str(n)]["least_us"])


COSTS: list[Column] = [("", lambda row: row["what"]), *map(_least, (10**k for k in range(4, 9)))]
COLUMNS = {
    "cycle": CYCLES,
    "windows": CYCLES,
    "checkpoint": SECONDS,
    "host": MICROSECONDS,
    "remote": BESIDE_RAY,
    "skew": SPREADS,
    "scale": COSTS,
}
PAGES = ("performance", "scale")


def table(name: str, words: str = "") -> str:
    """The rows of a result as a table in Markdown.

    Args:
        name: of the file, such as "cycle".
        words: those rows only whose name contains one of these, with bars between; all if empty.

    Raises:
        ValueError: there are no such rows.
    """
    columns = COLUMNS[name]
    wanted = [word.strip() for word in words.split("|")]
    title = columns[0][1]
    rows = [row for row in _read(name)["rows"] if any(word in title(row) for word in wanted)]
    if not rows:
        raise ValueError(f"table: expected rows of {name}.json whose name has {words!r}, got none.")
    lines = [[head for head, _ in columns], [":--"] + ["--:"] * (len(columns) - 1)]
    lines += [[cell(row) for _, cell in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(name: str) -> str:
    """Where a result was measured."""
    told = _read(name)["machine"]
    return (
        f"jax {told['jax']}, Python {told['python']}, {told['device']} ({told['processor']}); "
        f"`benchmarks/results/{name}.json`"
    )


def filled(text: str) -> str:
    """A page with its tables."""
    text = re.sub(
        r"<!-- table: (\w+)(?: \| (.*?))? -->", lambda at: table(at[1], at[2] or ""), text
    )
    return re.sub(r"<!-- machine: (\w+) -->", lambda at: machine(at[1]), text)


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _on_read(app: Any, page: str, source: list[str]) -> None:
    """Called by Sphinx with the text of each page, in a list of one."""
    if page not in PAGES:
        return
    for path in sorted(RESULTS.glob("*.json")):
        app.env.note_dependency(str(path))
    source[0] = filled(source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _on_read)
