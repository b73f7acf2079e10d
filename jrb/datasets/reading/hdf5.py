"""Reads HDF5 files of other programs; raises `ValueError` for damaged ones."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5o  # pyright: ignore[reportAttributeAccessIssue]: in C

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.reading.names import (
    check,
    check_names,
    explain_damage,
    has_signature,
    names_above,
)
from jrb.datasets.reading.tabular import Column, DerivedColumn

_DEPTH = 16  # maximum depth of groups in groups, and of links to links, against cycles

is_hdf5: Callable[[object], bool] = functools.partial(has_signature, signature=b"\x89HDF\r\n\x1a\n")
"""Returns True if a path is a file that begins as HDF5."""
_DAMAGE = (OSError, RuntimeError, KeyError)
_explain_damage = functools.partial(explain_damage, expected="a whole HDF5 file", errors=_DAMAGE)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[h5py.File]:
    """Opens a file for reading; refuses one that is cut short or damaged."""
    with _explain_damage(path), h5py.File(path, "r") as file:
        yield file


def top_level(path: Any) -> dict[str, bool]:
    """Returns the top-level names of a file, True for groups; {} if it is not intact HDF5."""
    if not is_hdf5(path):
        return {}
    try:
        with open_file(path) as file:
            return {name: isinstance(open_entry(file, name), h5py.Group) for name in map(str, file)}
    except (ValueError, OSError):
        return {}


def columns_below(group: h5py.Group) -> dict[str, Column]:
    """Returns all datasets below a group by name (`a/b`), of any dtype.

    Soft links within the file are followed. Raises for links, names and datasets that lead out of
    the file, and for groups that contain themselves.
    """
    path = group.file.filename
    arrays: dict[str, Column] = {
        name: _column(path, name, entry) for name, entry in _datasets(group)
    }
    check_names(path, arrays)
    return arrays


def _datasets(group: h5py.Group, prefix: str = "") -> Iterator[tuple[str, h5py.Dataset]]:
    """Yields the name and the dataset of all datasets below a group; see `columns_below`."""
    path, is_deep = group.file.filename, prefix.count("/") > _DEPTH
    check(not is_deep, path, f"at most {_DEPTH} groups in each other", "more, or one in itself")
    with _explain_damage(path):
        names = list(map(str, _open_path(path, group, prefix, _DEPTH)))
    for name in names:
        entry = open_entry(group, prefix + name)
        if isinstance(entry, h5py.Group):
            yield from _datasets(group, f"{prefix}{name}/")
        elif isinstance(entry, h5py.Dataset):
            yield prefix + name, entry


def names_outside(path: str, groups: set[str]) -> set[str]:
    """Returns the names of the datasets of a file to which none of `groups`, such as `/a`, lead."""
    # By address in the file, as links and further names lead to the same dataset.
    names = dict[int, str]()

    def visit(name: bytes | str, entry: Any) -> None:
        name = os.fsdecode(name)
        if isinstance(entry, h5py.Dataset) and groups.isdisjoint(names_above(f"/{name}")):
            names[h5o.get_info(entry.id).addr] = name

    with open_file(path) as file:
        # Visit all datasets, but no links; then remove those to which the groups lead by links.
        file.visititems(visit)
        for group in map(functools.partial(open_entry, file), groups if names else ()):
            if isinstance(group, h5py.Group):
                for _, entry in _datasets(group):
                    names.pop(h5o.get_info(entry.id).addr, None)
    return {*names.values()}


def _column(path: str, name: str, entry: h5py.Dataset) -> DerivedColumn:
    """Returns the column of a dataset, with texts as Python strings; reads raise for damage."""
    with _explain_damage(path):
        # A hostile file could name any file of the user as the place of its data.
        is_elsewhere = entry.external or entry.id.get_create_plist().get_layout() == h5d.VIRTUAL
        got = "an external or virtual one. Copy the data into the file"
        check(not is_elsewhere, f"{path}: '{name}'", "data in the dataset itself", got)
        is_text = h5py.check_string_dtype(entry.dtype) is not None

    def read(start: int, stop: int) -> Any:
        with _explain_damage(path):
            rows: Any = entry.asstr(errors="surrogateescape") if is_text else entry
            return rows[start:stop]

    return DerivedColumn(entry.shape, entry.dtype, read)


def open_entry(group: h5py.Group, path: str) -> Any:
    """Returns the group or dataset at a path below a group, never in another file; else None."""
    filename = group.file.filename
    with _explain_damage(filename):
        return _open_path(f"{filename}: '{path}'", group, path, _DEPTH)


def _open_path(where: str, group: h5py.Group, path: str, depth: int) -> Any:
    """Opens a path part by part and checks each link, so that no other file is opened."""
    # A path that begins with a slash begins at the top of the file.
    entry: Any = group.file["/"] if path.startswith("/") else group
    for part in path.split("/"):
        if part in ("", "."):
            continue
        link = entry.get(part, getlink=True) if isinstance(entry, h5py.Group) else None
        if isinstance(link, h5py.HardLink):
            entry = entry[part]
        # Each soft link takes one from `depth`, so that links in a circle end.
        elif isinstance(link, h5py.SoftLink) and depth:
            entry = _open_path(where, entry, link.path, depth - 1)
        # Nothing is there, and no link has led to this path.
        elif link is None and depth == _DEPTH:
            return None
        else:
            what = "out of it" if isinstance(link, h5py.ExternalLink) else "that leads nowhere"
            raise ValueError(f"{where}: expected data in the file itself, got a link {what}.")
    return entry


def read_scalars(group: h5py.Group, limit: ExpansionLimit) -> dict[str, Any]:
    """Returns the texts and single numbers below a group, and its attributes, as Python values."""
    values: dict[str, Any] = {name: to_python(value) for name, value in group.attrs.items()}
    for name in map(str, group):
        entry = open_entry(group, name)
        if isinstance(entry, h5py.Dataset) and entry.shape == () and not entry.external:
            # A text of fixed length can declare 2 GiB.
            limit.add(declared_nbytes({name: entry}))
            values[name] = to_python(entry[()])
    return values


def to_python(value: object) -> Any:
    """Returns the value of an HDF5 attribute as a Python value."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
