"""`jrb verify`: whether everything is what was written."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from jrb._store.opening import Progress
from jrb._util import wording
from jrb._util.wording import printable
from jrb.checkpoint import manifest
from jrb.cli import console, found

typer: Any = wording.require("typer", "cli")

_ERRORS = (OSError, ValueError, RuntimeError, KeyError)
"""What is raised by files that are not what they should be."""


def verify(
    path: Annotated[str, found.SOURCE],
) -> None:
    """Read everything at PATH and report damage.

    Prints a line for each damage, and exits with status 1 if there is any.
    """
    kind = found.kind_of(path)
    with console.bar("verifying") as progress:
        damages = _CHECKS[kind](path, progress)
    for line in damages:
        sys.stdout.write(f"{printable(' '.join(line.split()))}\n")
    if damages:
        raise typer.Exit(1)
    what = "is whole" if kind != found.OTHER else "can be read from end to end"
    sys.stdout.write(f"{printable(path)} {what}.\n")


def _in_file(path: str, progress: Progress) -> list[str]:
    return importlib.import_module("jrb.checkpoint").verify(path, progress)


def _by_reading(path: str, progress: Progress) -> list[str]:
    """Reads a dataset block by block; once something is wrong, episode by episode."""
    dataset = found.dataset(path)
    steps, done = max(dataset.transitions, 1), 0
    rows_of = importlib.import_module("jrb.datasets.format").rows_of
    try:
        for block in dataset.blocks():
            done += rows_of(block)
            progress(done / steps)
    except _ERRORS as error:
        lines = _damages(dataset.__getitem__, range(len(dataset)), progress)
        return lines or [str(error)]
    return []


def _damages(read: Callable[[Any], Any], pieces: Sequence[Any], progress: Progress) -> list[str]:
    """What is said of pieces that cannot be read, each once."""
    lines: dict[str, None] = {}
    for done, piece in enumerate(pieces):
        try:
            read(piece)
        except _ERRORS as error:
            lines[str(error)] = None
        progress((done + 1) / len(pieces))
    return list(lines)


_CHECKS = {found.FOLDER: manifest.damages, found.FILE: _in_file, found.OTHER: _by_reading}
