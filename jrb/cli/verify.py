"""`jrb verify`: whether everything is what was written."""

import importlib
import sys
from typing import Annotated, Any

from jrb import _saved
from jrb._base import extras
from jrb._store.opening import Progress
from jrb.cli import console, found

typer = extras.require("typer", "cli")


def verify(
    path: Annotated[str, typer.Argument(help="A checkpoint, a store, or a dataset of any kind.")],
) -> None:
    """Read everything, and say what is damaged.

    A line for each damage; then the exit status is 1.
    """
    kind = found.kind_of(path)
    with console.bar("verifying") as progress:
        damages = _CHECKS[kind](path, progress)
    for line in damages:
        sys.stdout.write(f"{' '.join(line.split())}\n")
    if damages:
        raise typer.Exit(1)
    what = "is whole" if kind != found.OTHER else "can be read from end to end"
    sys.stdout.write(f"{path} {what}.\n")


def _in_file(path: str, progress: Progress) -> list[str]:
    return importlib.import_module("jrb.checkpoint").verify(path, progress)


def _by_reading(path: str, progress: Progress) -> list[str]:
    """Reads a dataset, some megabytes at a time; once something is wrong, episode by episode."""
    dataset = found.dataset(path)
    steps, done = max(dataset.transitions, 1), 0
    rows_of = importlib.import_module("jrb.datasets.kind").rows_of
    try:
        for block in dataset.blocks():
            done += rows_of(block)
            progress(done / steps)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        found_again = [_damage(dataset, number) for number in range(len(dataset))]
        lines = [f"{path}: {error}", *filter(None, found_again)]
        return list(dict.fromkeys(lines[1:] or lines))
    return []


def _damage(dataset: Any, number: int) -> str:
    """What is wrong with an episode."""
    try:
        dataset[number]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        return f"{dataset.source}: episode {number}: {error}"
    return ""


_CHECKS = {found.FOLDER: _saved.damages, found.FILE: _in_file, found.OTHER: _by_reading}
