"""What lies at a path."""

import importlib
import os
from typing import Any

from jrb._store import generation
from jrb._store.files import Folder
from jrb._util import wording
from jrb.checkpoint import manifest

FOLDER, FILE, OTHER = "folder", "file", "other"
"""A checkpoint or a store in a folder; one in HDF5; what somebody else made, perhaps."""

SOURCE = wording.require("typer", "cli").Argument(
    help="A checkpoint, a store, or a dataset of any kind.", callback=os.path.expanduser
)
"""The argument of commands that read."""

_SIGN = b"\x89HDF\r\n\x1a\n"


class NotOursError(ValueError):
    """There is something at the path, but nothing that jrb can read."""


NOT_THERE = (FileNotFoundError, NotADirectoryError, NotOursError)
"""What is raised of a path at which there is nothing to be read."""


def kind_of(path: str) -> str:
    """Which of the three it is; without JAX.

    Raises:
        FileNotFoundError: there is nothing.
        PermissionError: it cannot be read.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    if os.path.isdir(path):
        return FOLDER if generation.numbers(Folder(path)) else OTHER
    return FILE if os.path.isfile(path) and _is_ours(path) else OTHER


def _is_ours(path: str) -> bool:
    with open(path, "rb") as file:
        if file.read(len(_SIGN)) != _SIGN:
            return False
    h5py = importlib.import_module("h5py")  # which takes its time
    try:
        with h5py.File(path, "r", locking=False) as file:
            return file.attrs.get("format") == manifest.HDF5
    except OSError:
        return False


def dataset(path: str) -> Any:
    """The dataset at a path, whoever wrote it.

    Raises:
        NotOursError: no format matches it.
    """
    if kind_of(path) == FOLDER:
        manifest.meta_of(manifest.opened(path))  # raises of a damaged one, which no format matches
    datasets = importlib.import_module("jrb.datasets")
    try:
        return datasets.open(path)
    except datasets.library.UnknownFormatError as error:
        raise NotOursError(
            f"{path}: expected a checkpoint, a store, or a dataset of a format that jrb knows, "
            "found something else."
        ) from error


def buffer(path: str) -> tuple[Any, Any]:
    """The description and the state of what was saved at a path."""
    return importlib.import_module("jrb.checkpoint").load(path)
