"""The output of commands: tables for people, JSON for programs, and progress bars."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jrb._util.wording import printable, require

rich_box: Any = require("rich.box", "cli")
rich_console: Any = require("rich.console", "cli")
rich_table: Any = require("rich.table", "cli")
rich_text: Any = require("rich.text", "cli")

_ENDLESS = 4096
"""The width in characters of output to a pipe, so that lines are not broken."""


def show(*blocks: Any) -> None:
    """Prints tables and texts that functions of this module made."""
    # A pipe has no width, unless COLUMNS sets one.
    console = rich_console.Console(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = rich_console.Console(highlight=False, width=_ENDLESS)
    for block in blocks:
        console.print(block)


def show_help(context: Any) -> None:
    """Prints the help of a group of commands that was called without one."""
    if context.invoked_subcommand is None:
        sys.stdout.write(f"{context.get_help()}\n")


def write_json(value: Any) -> None:
    """Writes a value to stdout as JSON, with null for NaN and infinities."""
    # JSON has no such numbers: `parse_constant` is called for each of them.
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    sys.stdout.write(json.dumps(plain, indent=2, allow_nan=False) + "\n")


def fact_table(pairs: Sequence[tuple[str, str]]) -> Any:
    """Returns a table of names and values; leaves out empty values."""
    table = rich_table.Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            table.add_row(plain(name), plain(value))
    return table


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> Any:
    """Returns a table with a header; the last `numbers` columns are numbers, aligned right."""
    # Numbers are never broken; other cells are, if the terminal is too narrow.
    look = {"pad_edge": False, "show_edge": False, "header_style": "bold"}
    view = rich_table.Table(box=rich_box.SIMPLE_HEAD, **look)
    for place, name in enumerate(head):
        right = place >= len(head) - numbers
        side = "right" if right else "left"
        view.add_column(plain(name), justify=side, overflow="fold", no_wrap=right)
    for row in rows:
        view.add_row(*(rich_text.Text(printable(cell, "")) for cell in row))
    return view


def plain(text: str, style: str = "") -> Any:
    """Returns text that rich and the terminal show literally, without markup or control codes."""
    return rich_text.Text(printable(text), style=style)


@contextlib.contextmanager
def show_spinner(text: str) -> Iterator[None]:
    """Shows a spinner with a text on a terminal while the block runs."""
    console = rich_console.Console(stderr=True)
    with console.status(plain(text)) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def show_progress(text: str) -> Iterator[Callable[[float], None]]:
    """Shows a progress bar on a terminal; yields a function that takes the fraction done."""
    # On stderr, the bar does not mix with the output of the command.
    console, rich = rich_console.Console(stderr=True), require("rich.progress", "cli")
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn()
    columns += (rich.TimeRemainingColumn(),)
    look = {"console": console, "transient": True, "disable": not console.is_terminal}
    with rich.Progress(*columns, **look) as progress:
        task = progress.add_task(text, total=1.0)
        yield lambda share: progress.update(task, completed=share)
