"""Functions that recognise checkpoints, stores and datasets at a path, and `jrb verify`."""

import contextlib
import importlib
import os
import stat
import sys
from collections.abc import Callable
from typing import Annotated, Any

from jrb._store import block_store, files
from jrb._util.wording import printable, require
from jrb.checkpoint import manifest
from jrb.cli import console

typer: Any = require("typer", "cli")

FOLDER, FILE, OTHER = "folder", "file", "other"
"""The kinds of paths: a checkpoint or store in a folder, one in an HDF5 file, or anything else."""


def user_path(text: str | None) -> str | None:
    """Returns a local path with `~` expanded; serves as the callback of options that are paths."""
    try:
        path = None if text is None else files.absolute_path(text)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("path: ")) from None
    # Keep the path as it was given, for messages, unless it is a URL.
    return path if text is None or text.lower().startswith("file:") else os.path.expanduser(text)


def picture_path(text: str | None) -> str | None:
    """Returns a path with `~` expanded; raises unless a picture can be written to it."""
    path = user_path(text)
    if path is None:
        return None
    # matplotlib chooses the format by the ending.
    formats = require("matplotlib.figure", "plot").Figure().canvas.get_supported_filetypes()
    if os.path.splitext(path)[1][1:].lower() not in formats:
        raise typer.BadParameter(f"expected a file such as state.png or state.svg, got {path}.")
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise typer.BadParameter(f"expected a file, got the folder {path}.")
    if not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise typer.BadParameter(f"expected a file in a folder to write in, got {path}.")
    return path


SOURCE: Any = typer.Argument(
    help="A checkpoint, a store, or a dataset of any kind.", callback=user_path
)
"""The argument of commands that read a path."""

State = Annotated[
    str | None, typer.Option(help="The number of one of the states under vmap; 0,1 for two axes.")
]
"""The option of commands that read one of the states of a checkpoint."""

_ERRORS = (OSError, ValueError, RuntimeError, KeyError)
"""The errors that reading a damaged file can raise."""


class NotOursError(ValueError):
    """Raised for a path that exists, but is of no format that jrb can read."""


NOT_THERE = (FileNotFoundError, NotADirectoryError, NotOursError)
"""The errors for a path with nothing to read, which end a command with status 2."""


def kind_of(path: str) -> str:
    """Returns the kind of a path, without importing JAX; raises if it cannot be read."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    if os.path.isdir(path):
        # Raise for an unreadable folder, for which `is_checkpoint` is False.
        os.listdir(path)
        return FOLDER if manifest.is_checkpoint(path) else OTHER
    if not os.path.isfile(path):
        return OTHER
    # Look for the signature of HDF5, then for the attribute of jrb's own files.
    with open(path, "rb") as file:
        if file.read(8) != b"\x89HDF\r\n\x1a\n":
            return OTHER
    # h5py is imported late, because it is slow.
    h5py = importlib.import_module("h5py")
    try:
        with h5py.File(path, "r", locking=False) as file:
            return FILE if file.attrs.get("format") == manifest.HDF5 else OTHER
    except OSError:
        return OTHER


def _parse_index(state: str) -> tuple[int, ...]:
    parts = state.split(",")
    if not all(map(str.isdecimal, parts)):
        raise typer.BadParameter(f"--state: expected a number, or such as 0,1, got {state!r}.")
    return tuple(map(int, parts))


def open_dataset(path: str, state: str | None = None) -> Any:
    """Returns the dataset at a path, of any format; raises `NotOursError` if none matches."""
    if kind_of(path) == FOLDER:
        # Raise for a damaged checkpoint here, as no format of datasets would match it.
        manifest.metadata(path)
    datasets = importlib.import_module("jrb.datasets")
    try:
        return datasets.open(path, **({} if state is None else {"state": _parse_index(state)}))
    except datasets.library.UnknownFormatError as error:
        raise NotOursError(
            f"{path}: expected a checkpoint, a store, or a dataset of a format that jrb knows, "
            "found something else."
        ) from error


def check_no_overlap(source: str, dest: str) -> None:
    """Raises if two paths are the same, or one contains the other."""
    # Two names may also be links to one file.
    one, other = os.path.realpath(source), os.path.realpath(dest)
    is_same = os.path.exists(dest) and os.path.samefile(source, dest)
    if is_same or os.path.commonpath([one, other]) in (one, other):
        raise ValueError(f"{dest}: expected a path apart from that of the source, got {source}.")


def load_buffer(path: str, state: str | None = None) -> tuple[Any, Any]:
    """Returns the saved buffer at a path, and its state, or the one that `state` selects."""
    buffer, loaded = importlib.import_module("jrb.checkpoint").load(path)
    if state is not None:
        loaded = importlib.import_module("jrb.read").one_state(path, loaded, _parse_index(state))
    return buffer, loaded


def verify(path: Annotated[str, SOURCE]) -> None:
    """Read everything at PATH and report damage.

    Prints one line for each defect, and exits with status 1 if there are any.
    """
    # Stores in folders are verified without JAX.
    kind = kind_of(path)
    with console.show_progress("verifying") as progress:
        if kind == FOLDER:
            lines = block_store.find_damages(path, progress)
        elif kind == FILE:
            lines = importlib.import_module("jrb.checkpoint").verify(path, progress)
        else:
            lines = _find_damage(path, progress)
    for line in lines:
        sys.stdout.write(f"{printable(' '.join(line.split()))}\n")
    if lines:
        raise typer.Exit(1)
    what = "is whole" if kind != OTHER else "can be read from end to end"
    sys.stdout.write(f"{printable(path)} {what}.\n")


def _find_damage(path: str, progress: Callable[[float], None]) -> list[str]:
    """Reads a dataset in blocks, and after an error each episode; returns a line per defect."""
    source = open_dataset(path)
    steps, done = max(source.transitions, 1), 0
    count_steps = importlib.import_module("jrb.datasets.format").count_steps
    try:
        for block in source.blocks():
            done += count_steps(block)
            progress(done / steps)
        return []
    except _ERRORS as error:
        # Several episodes may have the same defect, such as that of their file: name it once.
        lines: dict[str, None] = {}
        for number in range(len(source)):
            try:
                source[number]
            except _ERRORS as damage:
                lines[str(damage)] = None
            progress((number + 1) / len(source))
        return list(lines) or [str(error)]
