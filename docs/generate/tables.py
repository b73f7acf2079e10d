"""The tables of the pages on performance and scale, out of `benchmarks/results`.

- `<!-- summary -->` becomes the headline table, `<!-- chart -->` its picture, `<!-- meaning -->` an
  example of what it means to a user.
- `<!-- table: cycle -->` becomes the table of `cycle.json`; with words behind a bar, as in
  `<!-- table: cycle | uniform | tree -->`, the rows whose name contains one of them.
- `<!-- machine: cycle -->` says where they were measured.
- `<!-- plot: cycle | words -->` shows the picture, with the words below it.
- `<!-- folded: cycle -->` is table and machine, folded; with words behind a bar, the picture too.

What has not been measured yet says how it would be.
"""

import pathlib
import re
from typing import Any, NamedTuple

from benchmarks.report import files, markdown, own
from generate import drawings

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
PAGES = ("performance", "scale")
_LINE = re.compile(
    r"<!-- (table|machine|plot|folded|summary|chart|meaning):? ?(\w*)(?: \| (.*?))? -->"
)


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
    """Returns the picture of a result, which `made` draws; nothing where none was measured."""
    there = (RESULTS / f"{name}.json").exists()
    return f"![{words}](_made/{name}.png)" if there else ""


def folded(name: str, words: str = "") -> str:
    """Returns a table and its machine, folded; with words, the picture too."""
    title = f"{words}: picture and table" if words else f"The table of {name}"
    parts = [f"<details><summary>{title}</summary>", plot(name, words) if words else ""]
    parts += [table(name), machine(name), "</details>"]
    return "\n\n".join(part for part in parts if part)


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


class Headline(NamedTuple):
    """A row of the summary, with times in seconds."""

    words: str
    mine: float
    peer: str
    other: float
    ratio: float  # the median of the ratios of rounds


def headlines() -> list[Headline]:
    """Returns the rows of the summary that were measured."""
    found = []
    for group, what, items, size, words in HEADLINES:
        result = files.read(RESULTS, group)
        cases = markdown.by_case([] if result is None else result["rows"])
        for case in cases:
            mine, *others = case.values()
            facts = (mine["what"], mine["facts"]["items"], mine["facts"]["N"])
            others = [row for row in others if row["peer"] not in ("limit", "NumPy", "NumPy take")]
            if facts == (what, items, size) and mine["peer"] == "jrb" and others:
                best = min(others, key=lambda row: row["median"])
                row = (words, mine["median"], best["peer"], best["median"], best["ratio"])
                found.append(Headline(*row))
                break  # of several shapes, the first
    return found


def summary() -> str:
    """Returns the headline table: jrb's time, and its ratio to the fastest other library."""
    lines = ["| What | jrb | the fastest other | ratio |", "|---|---|---|---|"]
    for row in headlines():
        times = [f"{1e6 * seconds:,.0f} µs" for seconds in (row.mine, row.other)]
        lines.append(f"| {row.words} | {times[0]} | {row.peer}, {times[1]} | {row.ratio:.2f} |")
    return "\n".join(lines)


UPDATE = 500e-6
"""Seconds that the update of a small network takes on a CPU, in the example of `meaning`."""


def meaning() -> str:
    """Returns what the row on prioritized replay means for the time of a training."""
    row = next(row for row in headlines() if row.words.startswith("Prioritized replay"))
    shares = [f"{seconds / (UPDATE + seconds):.0%}" for seconds in (row.mine, row.other)]
    return (
        f"For example, if the update of the network takes {1e6 * UPDATE:.0f} µs, prioritized "
        f"replay of 10⁶ transitions is {shares[0]} of the time of a training with jrb, and "
        f"{shares[1]} with {row.peer}. With a large network, or a slow environment, the buffer "
        "hardly matters."
    )


def chart() -> str:
    """Returns the summary as a drawing for the page."""
    bars = [(row.words, row.peer, row.ratio) for row in headlines()]
    return f'<figure class="drawing">{drawings.ratios(bars)}</figure>'


def filled(text: str) -> str:
    """A page with its tables and pictures."""
    made = {
        "table": table,
        "machine": lambda name, words: machine(name),
        "plot": plot,
        "folded": folded,
        "summary": lambda name, words: summary(),
        "chart": lambda name, words: chart(),
        "meaning": lambda name, words: meaning(),
    }
    return _LINE.sub(lambda at: made[at[1]](at[2], at[3] or ""), text)


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
