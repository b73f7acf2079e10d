"""A folder of datasets: what lies there, and how it goes."""

import os
from collections.abc import Iterator

from jrb._util.printing import escaped_errors
from jrb.datasets import cache, opening, removing
from jrb.datasets.dataset import Dataset

_DEPTH = 3  # folders, as Minari has them


@escaped_errors()
def list(root: cache.Path | None = None) -> dict[str, Dataset]:
    """The datasets in a folder, copies that were made by `cache=True` among them, by name.

    Args:
        root: the folder; None for the one that `cache=True` uses.

    Returns:
        Names as `delete` takes them, paths below the folder, in their order.
    """
    folder = cache.root_of(root)
    return {os.path.relpath(path, folder): found for path, found in _below(folder, _DEPTH)}


@escaped_errors()
def delete(name: str, root: cache.Path | None = None) -> None:
    """Removes a dataset from the disk: the files of its layout, or nothing if there are others.

    Args:
        name: as `list` has it.
        root: the folder; None for the one that `cache=True` uses.

    Raises:
        FileNotFoundError: there is none of this name.
        ValueError: what is there is no dataset, or does not lie in the folder; or there are other
            files in its folder, which the message names.
        LockedError: it is being made, or written to.
    """
    folder = cache.root_of(root)
    path = os.path.normpath(os.path.join(folder, name))
    inside = os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)
    if not inside or not path.startswith(folder + os.sep) or os.path.islink(path):
        raise ValueError(f"delete: expected the name of a dataset in {folder}, got {name!r}.")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or directory.")
    with cache.locked(path, wait=False):  # what is being made may be no dataset yet
        opening.open(path)
        removing.remove(path)


def _below(folder: str, depth: int) -> Iterator[tuple[str, Dataset]]:
    """The datasets below a folder, at most so many folders deep."""
    if not depth or not os.path.isdir(folder):
        return
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith(".") or os.path.islink(path):
            continue
        try:
            yield path, opening.open(path)
        except (ValueError, OSError):
            yield from _below(path, depth - 1)
