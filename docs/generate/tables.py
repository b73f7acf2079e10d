"""The tables of the pages on performance and scale, out of `benchmarks/results`.

A line `<!-- table: cycle -->` of a page becomes the table of `cycle.json`; with words behind a bar,
`<!-- table: cycle | uniform | tree -->`, the rows whose name contains one of them;
`<!-- machine: cycle -->` says where they were measured, `<!-- plot: cycle | words -->` shows the
picture, with the words below it. What has not been measured yet says how it would be.
"""

import pathlib
import re
from typing import Any

from benchmarks.report import files, markdown, own

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
PAGES = ("performance", "scale")
_LINE = re.compile(r"<!-- (table|machine|plot): (\w+)(?: \| (.*?))? -->")


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


def filled(text: str) -> str:
    """A page with its tables and pictures."""
    made = {
        "table": table,
        "machine": lambda name, words: machine(name),
        "plot": plot,
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
