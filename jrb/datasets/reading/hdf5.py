"""HDF5 files that others wrote: opened, looked at, and refused where they are damaged."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from jrb.datasets.reading.names import check_names

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LARGE = 1 << 28  # bytes, from which on an array is looked at before it is read
_MOST_RATIO = 1032  # that a filter of HDF5 can pack


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
    except (OSError, RuntimeError, KeyError) as error:  # h5py's, for what HDF5 cannot read
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(
            f"{path}: expected a whole HDF5 file, got one that is not: {error}"
        ) from error


def top(path: Any) -> dict[str, Any]:
    """What lies at the top of a file, by name; nothing if it is no HDF5 file or damaged.

    Datasets and groups are there as `(shape, dtype)` and None; links elsewhere are left out.
    """
    if not is_hdf5(path):
        return {}
    try:
        with opened(path) as file:
            entries = {name: own(file, name) for name in map(str, file)}
            return {name: _about(entry) for name, entry in entries.items() if entry is not None}
    except (ValueError, OSError):
        return {}


def _about(entry: Any) -> Any:
    return (entry.shape, entry.dtype) if isinstance(entry, h5py.Dataset) else None


def leaves(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """All datasets of numbers below a group, by name (`a/b`); those of strings are left out.

    Links to other files are not followed.

    Raises:
        ValueError: a name that leads elsewhere (`..`), or a group that lies in itself.
    """
    return {name: entry for name, entry in below(group).items() if is_numeric(entry)}


def below(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """All datasets below a group, of whatever they are; see `leaves`."""
    found = dict(_below(group, "", (group,)))
    check_names(group.file.filename, found)
    return found


def _below(
    group: h5py.Group, prefix: str, above: tuple[h5py.Group, ...]
) -> Iterator[tuple[str, h5py.Dataset]]:
    for name in map(str, group):
        entry = own(group, name)
        if isinstance(entry, h5py.Dataset):
            _check_size(entry)
            yield prefix + name, entry
        elif isinstance(entry, h5py.Group):
            if entry in above:
                raise ValueError(
                    f"{group.file.filename}: expected groups in groups, got '{entry.name}' in "
                    "itself."
                )
            yield from _below(entry, f"{prefix}{name}/", (*above, entry))


def _check_size(dataset: h5py.Dataset) -> None:
    """Refuses an array that says it is larger than what is stored of it could be."""
    if dataset.shape is None or dataset.nbytes < _LARGE or dataset.external or dataset.is_virtual:
        return
    stored = dataset.id.get_storage_size()
    filters = dataset.id.get_create_plist().get_nfilters()
    if dataset.nbytes > stored * _MOST_RATIO**filters:
        raise ValueError(
            f"{dataset.file.filename}: '{dataset.name}': expected {dataset.nbytes} bytes, which "
            f"its shape {dataset.shape} takes, got {stored}. The file may be cut or damaged."
        )


def own(group: h5py.Group, name: str) -> Any:
    """What lies in a group itself; None for a link elsewhere, and for what is not there."""
    return group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None


def is_numeric(dataset: h5py.Dataset) -> bool:
    """Whether a dataset is an array of numbers that NumPy knows, kept in its own file."""
    if dataset.external or dataset.is_virtual or not dataset.shape:
        return False
    return dataset.dtype.kind in "biufc"


def strings(group: h5py.Group) -> dict[str, Any]:
    """The texts and single numbers below a group, and its attributes, as Python values."""
    found: dict[str, Any] = {name: plain(value) for name, value in group.attrs.items()}
    for name in map(str, group):
        entry = own(group, name)
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
