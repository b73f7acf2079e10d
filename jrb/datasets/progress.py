"""How far something is that takes its time, as a bar in the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from jrb._util import checks, extras


@contextlib.contextmanager
def track(total: int, text: str, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the context lasts.

    Args:
        total: how many steps there are.
        text: what is done with them.
        show: None for a bar where stderr is a terminal, and rich is installed.

    Yields:
        What is called with the number of steps that were done since the last call.

    Raises:
        ModuleNotFoundError: rich is not installed, and `show` is True.
    """
    if show is not None:
        checks.flag("progress", show)
    if not (_is_wanted() if show is None else show):
        yield lambda steps: None
        return
    rich, console = (extras.require(f"rich.{part}", "datasets") for part in ("progress", "console"))
    shown = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()
    with rich.Progress(
        *shown, rich.TimeRemainingColumn(), console=console.Console(stderr=True)
    ) as bar:
        task = bar.add_task(text, total=total)
        yield lambda steps: bar.advance(task, steps)


def _is_wanted() -> bool:
    """Whether somebody is looking, and it can be drawn."""
    if not sys.stderr.isatty():
        return False
    with contextlib.suppress(ModuleNotFoundError):
        extras.require("rich.progress", "datasets")
        return True
    return False
