"""Removes datasets and checkpoints: the files of their layout, and nothing else.

Whose files are whose is said by the layout: `Format.is_own`, and `manifest.is_own` for our own.
"""

import contextlib
import os
from collections.abc import Iterator

from jrb._store import generation, removal
from jrb._store.files import Folder
from jrb.checkpoint import hdf5, manifest
from jrb.datasets import opening


@contextlib.contextmanager
def locked(path: str) -> Iterator[removal.IsOwn]:
    """Holds the locks of all that may write to a dataset; yields which files are its own.

    Raises:
        ValueError: it is no dataset; or it has files in it that belong to something else.
        LockedError: it is being written to.
    """
    if os.path.islink(path):  # only the link would go
        yield lambda path, name: False
    elif os.path.isdir(path):
        is_ours = generation.numbers(Folder(path))
        is_own = manifest.is_own if is_ours else opening.chosen(path).is_own
        with removal.locked(path, is_own):
            yield is_own
    else:
        is_ours = hdf5.is_own(path)
        if not is_ours:
            opening.chosen(path)  # raises where it is no dataset
        with hdf5.locked(path) if is_ours else contextlib.nullcontext():
            yield lambda path, name: False


def remove(path: str) -> None:
    """Removes what `locked` has found to be a dataset."""
    with locked(path) as is_own:
        discard(path, is_own)


def discard(path: str, is_own: removal.IsOwn) -> None:
    """Removes a file or a link, or the files in a folder that are its layout's own."""
    if os.path.isdir(path) and not os.path.islink(path):
        removal.discard(path, is_own)
    else:
        os.unlink(path)
