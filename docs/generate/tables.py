"""The tables of the pages on performance and scale, out of `benchmarks/results`.

A line `<!-- summary -->` becomes the headline table. `<!-- folded: cycle -->` becomes the table of
`cycle.json` and its machine, folded. `<!-- table: cycle -->` becomes the table; with words behind a
bar, `<!-- table: cycle | uniform | tree -->`, the rows whose name contains one of them;
`<!-- machine: cycle -->` says where they were measured, `<!-- plot: cycle | words -->` shows the
picture, with the words below it. What has not been measured yet says how it would be.
"""

import pathlib
import re
from typing import Any

from benchmarks.report import files, markdown, own

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
PAGES = ("performance", "scale")
_LINE = re.compile(r"<!-- (table|machine|plot|folded|summary):? ?(\w*)(?: \| (.*?))? -->")


def table(name: str, words: str = "") -> str:
    """The rows of a result as a table in Markdown.

    Args:
        name: of the group, such as "cycle".
        words: those rows only whose name contains one of these, with bars between; all if empty.

    Raises:
        ValueError: there are no such rows.
    """
    result = files.read(RESULTS, name)
    if result is None:
        return (
            f"*Not measured yet: `python -m benchmarks {name} --out benchmarks/results` does it.*"
        )
    wanted = [word.strip() for word in words.split("|")]
    rows = [row for row in result["rows"] if any(word in row["what"] for word in wanted)]
    if not rows:
        raise ValueError(f"table: expected rows of {name}.json whose name has {words!r}, got none.")
    return own.table(name, rows)


def machine(name: str) -> str:
    """Where a result was measured, and what must be known of the peers; nothing without one."""
    result = files.read(RESULTS, name)
    if result is None:
        return ""
    notes = markdown.notes(result) if name not in own.COLUMNS else ""
    told = f"{markdown.machine(result)} `benchmarks/results/{name}.json`"
    return f"{notes}\n\n{told}" if notes else told


def plot(name: str, words: str) -> str:
    """A picture that lies beside the result; nothing where none was drawn."""
    there = (RESULTS / f"{name}.png").exists()
    return f"![{words}](../benchmarks/results/{name}.png)" if there else ""


def folded(name: str) -> str:
    """Returns a table and its machine, which open at a click."""
    parts = (f"<details><summary>Table: {name}</summary>", table(name), machine(name), "</details>")
    return "\n\n".join(parts)


HEADLINES = (
    ("cycle", "uniform step", "5 leaves", 10**6, "Uniform replay, DQN or SAC, 10⁶ transitions"),
    ("cycle", "prioritized step", "5 leaves", 10**6, "Prioritized replay, 10⁶ transitions"),
    ("cycle", "prioritized step", "19 leaves", 10**5, "Prioritized replay, items with 19 leaves"),
    ("cycle", "prioritized step", "84 x 84 uint8", 10**4, "Prioritized replay of frames"),
    ("cycle", "sum-tree alone", "masses", 10**6, "The sum-tree alone, 10⁶ leaves"),
    (
        "units",
        "prioritized, 3-step returns",
        "5 leaves",
        10**5,
        "Rainbow: prioritized three-step returns",
    ),
    (
        "units",
        "prioritized, windows of 64",
        "5 leaves",
        10**5,
        "R2D2: prioritized windows of 64 steps",
    ),
    (
        "windows",
        "sample of slices",
        "5 leaves",
        10**6,
        "World models: windows of 64 out of 10⁶ steps",
    ),
    ("units", "stacks of 4 frames", "84 x 84 uint8", 4096, "Atari: stacks of 4 frames"),
    (
        "calls",
        "prioritized: add + sample + update",
        "5 leaves",
        10**5,
        "Python loop, prioritized, three calls",
    ),
)
"""Rows of results, and what they mean to a user."""


def summary() -> str:
    """Returns the headline table: jrb's time, and its ratio to the fastest other library."""
    lines = ["| What | jrb | the fastest other | ratio |", "|---|---|---|---|"]
    for group, what, items, size, words in HEADLINES:
        result = files.read(RESULTS, group)
        rows = [] if result is None else result["rows"]
        rows = [
            r
            for r in rows
            if (r["what"], r["facts"]["items"], r["facts"]["N"]) == (what, items, size)
        ]
        mine = next((r for r in rows if r["peer"] == "jrb"), None)
        last = rows.index(mine) if mine else 0  # of several shapes, the first
        others = []
        for row in rows[last + 1 :]:
            if row["peer"] == "jrb":
                break
            if row["peer"] not in ("limit", "NumPy", "NumPy take"):
                others.append(row)
        if mine is None or not others:
            continue
        best = min(others, key=lambda row: row["median"])
        times = [f"{1e6 * row['median']:,.0f} µs" for row in (mine, best)]
        lines.append(f"| {words} | {times[0]} | {best['peer']}, {times[1]} | {best['ratio']:.2f} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """A page with its tables and pictures."""
    made = {
        "table": table,
        "machine": lambda name, words: machine(name),
        "plot": plot,
        "folded": lambda name, words: folded(name),
        "summary": lambda name, words: summary(),
    }
    return _LINE.sub(lambda at: made[at[1]](at[2], at[3] or ""), text)


def _on_read(app: Any, page: str, source: list[str]) -> None:
    """Called by Sphinx with the text of each page, in a list of one."""
    if page not in PAGES:
        return
    for path in sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*.png")]):
        app.env.note_dependency(str(path))
    source[0] = filled(source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _on_read)
