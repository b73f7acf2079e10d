"""HDF5 files that others wrote: opened, looked at, and refused where they are damaged."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o  # pyright: ignore[reportAttributeAccessIssue]: in C

from jrb.datasets.reading.names import check_names

# These of `h5py.h5d` and `h5py.h5g` are in C, and have no types.
DatasetID: TypeAlias = Any
GroupID: TypeAlias = Any

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LARGE = 1 << 28  # bytes, from which on an array is looked at before it is read
_MOST_RATIO = 1032  # that a filter of HDF5 can pack
_DEPTH = 16  # of groups within groups, and of links to links: more only in a circle


def is_hdf5(path: object) -> bool:
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


class Array:
    """A dataset in a file, read by slices; h5py's own takes several times as long to be made.

    Attributes:
        shape: `[T, ...]`; None or empty where it is no array.
        dtype: NumPy's.
        is_numeric: whether it is an array of numbers that NumPy knows.

    Raises:
        ValueError: see `check_stored`.
    """

    shape: Any
    dtype: np.dtype
    is_numeric: bool
    is_text: bool

    def __init__(self, where: str, found: DatasetID) -> None:
        self._found = found
        self.shape, self.dtype = found.shape, found.dtype
        check_stored(where, found)
        self.is_numeric = bool(self.shape) and self.dtype.kind in "biufc"
        self.is_text = len(self.shape or ()) == 1 and (
            h5py.check_string_dtype(self.dtype) is not None
        )

    def __len__(self) -> int:
        """T."""
        return self.shape[0]

    def __getitem__(self, part: Any) -> Any:
        """Returns these rows, or all there is for `()`."""
        dataset = h5py.Dataset(self._found)
        return dataset.asstr(errors="surrogateescape")[part] if self.is_text else dataset[part]


def check_stored(where: str, found: DatasetID) -> None:
    """Refuses a dataset whose data are not, or cannot be, in the dataset itself.

    Raises:
        ValueError: they lie in other datasets or files, or are declared as more than what is stored
            of them could be.
    """
    plan = found.get_create_plist()
    if plan.get_external_count() or plan.get_layout() == h5d.VIRTUAL:
        raise ValueError(
            f"{where}: expected data in the dataset itself, got an external or virtual one. Copy "
            "the data into the file."
        )
    size = math.prod(found.shape or ()) * found.dtype.itemsize
    stored = found.get_storage_size() if size >= _LARGE else size
    if size > stored * _MOST_RATIO ** plan.get_nfilters():
        raise ValueError(
            f"{where}: expected {size} bytes, which its shape {found.shape} takes, got {stored}. "
            "The file may be cut or damaged."
        )


def below(group: h5py.Group) -> dict[str, Array]:
    """All datasets below a group, of whatever they are, by name (`a/b`).

    Soft links are followed within the file.

    Raises:
        ValueError: a name or a link that leads elsewhere, or a group that lies in itself.
    """
    path, above = group.file.filename, str(group.name).rstrip("/")
    found = {name: Array(f"{path}: '{above}/{name}'", each) for name, each in walk(path, group.id)}
    check_names(path, found)
    return found


def walk(where: str, group: GroupID, prefix: str = "") -> Iterator[tuple[str, DatasetID]]:
    """The same as objects of HDF5 itself."""
    if prefix.count("/") > _DEPTH:
        raise ValueError(
            f"{where}: expected at most {_DEPTH} groups in each other, got more, or one in itself."
        )
    names: list[bytes] = []
    group.links.iterate(names.append)
    for name in names:
        path = prefix + os.fsdecode(name)
        entry = follow(f"{where}: '{path}'", group, name)
        if isinstance(entry, h5g.GroupID):
            yield from walk(where, entry, path + "/")
        elif isinstance(entry, h5d.DatasetID):
            yield path, entry


def follow(where: str, group: GroupID, path: bytes, depth: int = _DEPTH) -> Any:
    """Opens what a path leads to, part by part, so that no other file is ever opened.

    Raises:
        ValueError: a link leads out of the file, to nothing, or to itself.
    """
    entry: Any = h5o.open(group, b"/") if path.startswith(b"/") else group
    for part in path.split(b"/"):
        if part in (b"", b"."):
            continue
        is_there = isinstance(entry, h5g.GroupID) and entry.links.exists(part)
        kind = entry.links.get_info(part).type if is_there else None
        if kind == h5l.TYPE_HARD:
            entry = h5o.open(entry, part)
        elif kind == h5l.TYPE_SOFT and depth:
            entry = follow(where, entry, entry.links.get_val(part), depth - 1)
        else:
            what = "a link that leads nowhere" if kind in (None, h5l.TYPE_SOFT) else "a link out"
            raise ValueError(f"{where}: expected data in the file itself, got {what} of it.")
    return entry


def own(group: h5py.Group, name: str) -> Any:
    """Returns what lies at a path below a group of this file, also behind a soft link, or None.

    Raises:
        ValueError: a link leads out of the file, or to nothing.
    """
    if name not in group:
        return None
    found = follow(f"{group.file.filename}: '{name}'", group.id, os.fsencode(name))
    made = {h5g.GroupID: h5py.Group, h5d.DatasetID: h5py.Dataset}.get(type(found))
    return made(found) if made else None


def strings(group: h5py.Group) -> dict[str, Any]:
    """The texts and single numbers below a group, and its attributes, as Python values."""
    found: dict[str, Any] = {name: plain(value) for name, value in group.attrs.items()}
    for name in map(str, group):
        entry = own(group, name)
        if isinstance(entry, h5py.Dataset) and entry.shape == () and not entry.external:
            found[name] = plain(entry[()])
    return found


def plain(value: object) -> Any:
    """A value of an attribute as one of Python."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
