"""Results as people read them in a terminal: a line for each program."""

from typing import Any

import rich.box
import rich.console
import rich.table

from . import figures, markdown


def show(result: dict[str, Any], console: rich.console.Console) -> None:
    """Prints the table of a group, and what must be known of it."""
    varying, same = markdown.facts(result["rows"])
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=result["about"], title_justify="left")
    for name in ("", ", ".join(figures.sizes(same, list(same))), "", "time", "ratio"):
        table.add_column(name, justify="right" if name in ("time", "ratio") else "left")
    for cells in markdown.by_case(result["rows"]):
        names = [next(iter(cells.values()))["what"]]
        for peer, row in cells.items():
            sizes = ", ".join(figures.sizes(row["facts"], varying))
            where = "" if row["on_device"] else f" {markdown.HOST}"
            value, ratio = _figures(row)
            table.add_row(names.pop() if names else "", sizes, peer + where, value, ratio)
        table.add_section()
    console.print(table)
    console.print(markdown.notes(result), highlight=False)
    console.print(markdown.machine(result), highlight=False)


def _figures(row: dict[str, Any]) -> tuple[str, str]:
    if "failed" in row:
        return "failed", ""
    ratio = row.get("ratio")
    return figures.told(row["median"], row["unit"]), "" if ratio is None else figures.ratio(ratio)
