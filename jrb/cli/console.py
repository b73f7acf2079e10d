"""What commands write to: tables for people, JSON for programs, bars while something lasts."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jrb._store.opening import Progress, no_progress
from jrb._util import wording
from jrb._util.wording import printable

rich_box: Any = wording.require("rich.box", "cli")
rich_console: Any = wording.require("rich.console", "cli")
rich_padding: Any = wording.require("rich.padding", "cli")
rich_table: Any = wording.require("rich.table", "cli")
rich_text: Any = wording.require("rich.text", "cli")

_ENDLESS = 4096  # columns, where nobody looks: lines are not broken in a pipe


def out() -> Any:
    """Where results go."""
    console = rich_console.Console(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = rich_console.Console(highlight=False, width=_ENDLESS)
    return console


def write_json(value: Any) -> None:
    """Writes a value, and nothing else; null for NaN and infinities, which JSON does not have."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    sys.stdout.write(json.dumps(plain, indent=2, allow_nan=False) + "\n")


def facts(pairs: Sequence[tuple[str, str]]) -> Any:
    """Names and what is said of them, without those of which nothing is."""
    table = rich_table.Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in pairs:
        if text:
            table.add_row(plain(name), plain(text))
    return table


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> Any:
    """Lines below a head.

    Args:
        head: the names of columns.
        rows: their cells.
        numbers: how many columns at the right hold numbers.
    """
    made = rich_table.Table(
        box=rich_box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold"
    )
    for place, name in enumerate(head):
        right = place >= len(head) - numbers
        side = "right" if right else "left"
        made.add_column(plain(name), justify=side, overflow="fold", no_wrap=right)
    for row in rows:
        made.add_row(*(rich_text.Text(printable(cell, "")) for cell in row))
    return made


def plain(text: str, style: str = "") -> Any:
    """Text in which nothing is taken for a mark-up, nor obeyed by a terminal."""
    return rich_text.Text(printable(text), style=style)


def indented(thing: Any) -> Any:
    """The same, two columns to the right."""
    return rich_padding.Padding(thing, (0, 0, 0, 2), expand=False)


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Says that something lasts, where somebody looks, and nobody knows for how long."""
    console = rich_console.Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(plain(text)):
        yield


@contextlib.contextmanager
def bar(text: str) -> Iterator[Progress]:
    """A bar on stderr, where somebody looks; it goes when the work is done.

    Yields:
        What is told the share that is done.
    """
    console = rich_console.Console(stderr=True)
    if not console.is_terminal:
        yield no_progress
        return
    rich = wording.require("rich.progress", "cli")
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn()
    with rich.Progress(
        *columns, rich.TimeRemainingColumn(), console=console, transient=True
    ) as shown:
        task = shown.add_task(text, total=1.0)
        yield lambda share: shown.update(task, completed=share)
