"""TorchRL's dumps in HDF5; imported when there is one, as its library is slow to import."""

import math
import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from jrb._util.checks import ExpansionLimit as Limit
from jrb.interop import torchrl_files as dump
from jrb.interop.torchrl_files import Key, Leaves

_MOST_RATIO = 1032  # that a filter of HDF5 can pack


def read_h5(path: str, max_expansion: float) -> tuple[dict[str, Any], Leaves]:
    """What a dump in HDF5 says about itself, and its leaves `[N, ...]` or `[N + K, ...]`."""
    limit = Limit(path, [path], max_expansion)
    try:
        with h5py.File(path, "r") as file:
            about = {name: _scalar(file, name, limit) for name in (*dump.ABOUT, "_len")}
            leaves = {
                key: np.concatenate(parts) for key, parts in _trajectories(file, limit).items()
            }
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise dump.damaged(path, "a dump in HDF5", error) from error
    return about, leaves


def _scalar(file: h5py.File, name: str, limit: Limit) -> Any:
    found = _member(file, name)
    if not isinstance(found, h5py.Dataset) or found.shape is None or math.prod(found.shape) > 32:
        raise dump.damaged(file.filename, f"'{name}': a number or a few", found)
    return _array(found, limit).tolist()


def _trajectories(file: h5py.File, limit: Limit) -> dict[Key, list[np.ndarray]]:
    """The arrays of each leaf, trajectory after trajectory."""
    groups = [name for name in map(str, file) if name.startswith("traj_") and name[5:].isdecimal()]
    groups.sort(key=lambda name: int(name[5:]))
    if [int(name[5:]) for name in groups] != list(range(len(groups))):
        raise dump.damaged(file.filename, "trajectories from 0 on, each once", groups[:8])
    leaves: dict[Key, list[np.ndarray]] = {}
    seen: set[Any] = set()
    for number, name in enumerate(groups):
        for key, leaf in _datasets(_member(file, name), seen, limit):
            parts = leaves.setdefault(key, [])
            parts.append(leaf)
            if len(parts) != number + 1 or not leaf.ndim or leaf.shape[1:] != parts[0].shape[1:]:
                expected = f"'{'/'.join(key)}' in every trajectory, with rows of one shape"
                raise dump.damaged(file.filename, expected, f"{leaf.shape} in {name}")
    return leaves


def _datasets(group: Any, seen: set[Any], limit: Limit) -> Iterator[tuple[Key, np.ndarray]]:
    """Key and array of all datasets under a group; those that hold no numbers are passed over."""
    if group in seen or not isinstance(group, h5py.Group):
        raise dump.damaged(group.file.filename, f"{group.name} to be a group of its own", group)
    seen.add(group)
    for name in map(str, group):
        entry = _member(group, name)
        if not isinstance(entry, h5py.Dataset):
            yield from (((name, *key), leaf) for key, leaf in _datasets(entry, seen, limit))
        elif entry.dtype.kind in "biufc" and entry.shape is not None:
            yield (name,), _array(entry, limit)


def _member(group: h5py.Group, name: str) -> Any:
    """What lies in a group itself, and not elsewhere."""
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise dump.damaged(
            group.file.filename, f"'{name}' in {group.name} itself", "nothing, or a link"
        )
    return group[name]


def _array(dataset: h5py.Dataset, limit: Limit) -> np.ndarray:
    """What a dataset holds, if its file can hold as much."""
    where, size = dataset.file.filename, math.prod(dataset.shape) * dataset.dtype.itemsize
    if dataset.external or dataset.is_virtual:
        raise dump.damaged(where, f"the data of {dataset.name} in this file", "them elsewhere")
    found = dataset.id.get_storage_size()
    filters = dataset.id.get_create_plist().get_nfilters()
    end = (dataset.id.get_offset() or 0) + found
    if size > found * _MOST_RATIO**filters or end > os.path.getsize(where):
        raise dump.damaged(where, f"{size} bytes of {dataset.name}", f"{found} bytes")
    limit.add(size)
    return np.asarray(dataset[()])
