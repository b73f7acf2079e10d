"""HDF5 files that others wrote: opened, looked at, and refused where they are damaged."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def is_hdf5(path: Any) -> bool:
    """Whether a path is that of an HDF5 file."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


@contextlib.contextmanager
def opened(path: str) -> Iterator[h5py.File]:
    """The file, to be read.

    Raises:
        ValueError: HDF5 cannot read it, as it is cut short or damaged.
    """
    try:
        with h5py.File(path, "r") as file:
            yield file
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(
            f"{path}: expected a whole HDF5 file, got one that is not: {error}"
        ) from error


def top(path: Any) -> dict[str, Any]:
    """What lies at the top of a file, by name; nothing if it is no HDF5 file or damaged.

    Datasets and groups are there as `(shape, dtype)` and None.
    """
    if not is_hdf5(path):
        return {}
    try:
        with h5py.File(path, "r") as file:
            return {str(name): _about(file.get(name)) for name in file}
    except OSError:
        return {}


def _about(entry: Any) -> Any:
    return (entry.shape, entry.dtype) if isinstance(entry, h5py.Dataset) else None


def leaves(group: h5py.Group, prefix: str = "") -> dict[str, h5py.Dataset]:
    """All datasets of numbers below a group, by name (`a/b`); those of strings are left out.

    Links to other files are not followed.
    """
    found: dict[str, h5py.Dataset] = {}
    for name in map(str, group):
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            continue
        entry = group[name]
        if isinstance(entry, h5py.Group):
            found |= leaves(entry, f"{prefix}{name}/")
        elif isinstance(entry, h5py.Dataset) and is_numeric(entry):
            found[prefix + name] = entry
    return found


def is_numeric(dataset: h5py.Dataset) -> bool:
    """Whether a dataset is one of numbers that NumPy knows, kept in its own file."""
    return dataset.dtype.kind in "biufc" and dataset.shape is not None and not dataset.external


def strings(group: h5py.Group) -> dict[str, Any]:
    """The texts and single numbers below a group, and its attributes, as Python values."""
    found: dict[str, Any] = {name: plain(value) for name, value in group.attrs.items()}
    for name in map(str, group):
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            continue
        entry = group[name]
        if isinstance(entry, h5py.Dataset) and entry.shape == () and not entry.external:
            found[name] = plain(entry[()])
    return found


def plain(value: Any) -> Any:
    """A value of an attribute as one of Python."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
