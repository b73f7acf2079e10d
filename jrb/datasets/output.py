"""Output that appears at its path only when complete, and a progress bar."""

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jrb.authoring import Folder, absolute_path, check_links, checks, make_folder, require


def check_absent(path: str | os.PathLike[str]) -> str:
    """Returns the absolute form of a path; raises `ValueError` if the path exists."""
    target = absolute_path(path)
    check_links(target)
    if os.path.lexists(target):
        raise ValueError(
            f"{target}: expected nothing there, found something. Remove it, or choose another path."
        )
    return target


@contextlib.contextmanager
def new_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields a temporary path to write to; afterwards syncs the result and renames it to `path`.

    Parent folders are created. After an error nothing is left at either path.
    """
    target = check_absent(path)
    above, name = os.path.split(target)
    make_folder(above)
    folder, temporary = Folder(above), f".{name}.{secrets.token_hex(4)}.new"
    new = folder.path_of(temporary)
    try:
        yield new
        # Sync all files and then all folders: a rename must not become durable before them.
        folders = list(os.walk(new))
        files = [os.path.join(inner, each) for inner, _, names in folders for each in names]
        for path in files if folders else [new]:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        for inner, *_ in folders:
            Folder(inner).sync()
        # Another program may have created the path meanwhile.
        check_absent(target)
        folder.replace(temporary, name)
        folder.sync()
    finally:
        # After the rename nothing is there any more, so this removes only an unfinished result.
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)


@contextlib.contextmanager
def track_progress(
    total: int, text: str, show: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on stderr; yields a function that takes the number of new steps.

    If `show` is None, the bar appears only if stderr is a terminal and rich is installed.
    """
    if show is not None:
        checks.flag("progress", show)
    rich: Any = None
    # A missing package is an error only if the user asks for the bar.
    if show or (show is None and sys.stderr.isatty()):
        with contextlib.nullcontext() if show else contextlib.suppress(ModuleNotFoundError):
            rich = require("rich.progress", "datasets")
    if rich is None:
        yield lambda steps: None
        return
    # Show the bar on stderr, so that stdout stays free for results.
    console = require("rich.console", "datasets")
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()
    bar = rich.Progress(*columns, rich.TimeRemainingColumn(), console=console.Console(stderr=True))
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda steps: bar.advance(task, steps)
