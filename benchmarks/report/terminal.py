"""Prints results in a terminal: a heading per case, a line per program."""

from typing import Any

import rich.console
import rich.table
import rich.text

from . import figures, markdown


def show(result: dict[str, Any], console: rich.console.Console) -> None:
    """Prints the cases of a group, with notes on its peers and the machine."""
    varying, same = markdown.facts(result["rows"])
    console.print(rich.text.Text(result["about"], style="italic"))
    if same:
        console.print("All: " + "; ".join(figures.sizes(same, list(same))), highlight=False)
    if any(row.get("ratio") is not None for row in result["rows"]):
        console.print("In brackets: what jrb takes, over what the other takes.")
    width = 2 + max(len(_named(row)) for row in result["rows"])
    for cells in markdown.by_case(result["rows"]):
        first = next(iter(cells.values()))
        sizes = ", ".join(figures.sizes(first["facts"], varying))
        heading = rich.text.Text.assemble((first["what"], "bold"), "  " if sizes else "", sizes)
        console.print("", heading, sep="\n")
        console.print(_lines(list(cells.values()), width))
    console.print("\n" + markdown.notes(result), highlight=False)
    console.print(markdown.machine(result), highlight=False)


def _lines(rows: list[dict[str, Any]], width: int) -> rich.table.Table:
    """Returns a line per program, with the same column widths in all cases."""
    table = rich.table.Table.grid(padding=(0, 2))
    table.add_column(min_width=width)
    table.add_column(min_width=10, justify="right")
    table.add_column(justify="right")
    for row in rows:
        table.add_row("  " + _named(row), *_figures(row))
    return table


def _named(row: dict[str, Any]) -> str:
    return row["peer"] if row["on_device"] else f"{row['peer']} {markdown.HOST}"


def _figures(row: dict[str, Any]) -> tuple[str, str]:
    if "failed" in row:
        return "failed", ""
    ratio = row.get("ratio")
    beside = "" if ratio is None else f"({figures.ratio(ratio)})"
    return figures.told(row["median"], row["unit"]), beside
