"""Reads dumps of TorchRL's replay buffers, without TorchRL.

N capacity, E environments, T rows, K ends of trajectories. TorchRL has four layouts. The default
one holds the storage's arrays. The compact ones hold each observation once, in order of time, one
environment after the other: the flat one as arrays, the nested one as ragged arrays of
trajectories, and the HDF5 one with a group for each trajectory.
"""

import math
import os
from typing import Any, NamedTuple

import numpy as np

from jrb.authoring import MAX_EXPANSION, escaped_errors
from jrb.interop import torchrl_files as files
from jrb.interop.dump import Dump
from jrb.interop.torchrl_files import DumpFolder, Leaves, check
from jrb.interop.torchrl_write import write_torchrl
from jrb.layouts import flat

__all__ = ["read_torchrl", "write_torchrl"]

_H5 = ("storage", "checkpoint.h5")
_ONCE = tuple((name,) for name in ("reward", *files.FLAGS))


class StoredDump(NamedTuple):
    """The arrays of a dump in their stored layout."""

    layout: str
    leaves: Leaves  # `[T, ...]` or `[T, E, ...]`; in compact layouts `[N, ...]` or `[N + K, ...]`
    shape: tuple[int, ...]  # T and the axes of the environments
    length: int  # the number of items
    shift: int = 0  # in compact layouts, the row after the newest one
    full: bool = False  # in compact layouts, True if rows were rotated to put the oldest first


@escaped_errors()
def read_torchrl(
    path: str | os.PathLike[str],
    squeeze: bool = False,
    max_expansion: float = MAX_EXPANSION,
) -> Dump:
    """Reads a dump that TorchRL's `ReplayBuffer.dumps` has written, in any of its layouts.

    Args:
        path: the dump's folder.
        squeeze: True to change the shape `[1]` of rewards and flags to `[]`, as jrb's units expect.
        max_expansion: the largest ratio of the size of arrays in HDF5 to that of their file.

    Returns:
        The items, in the order of `rb[:]` but with time before the environments; memory-mapped in
        the default layout. `info` has `cursor`, `full`, `num_envs`; `capacity`, N; `layout`,
        "default", "flat", "nested" or "h5"; and `write_count`, the number of rows ever written.
        For a prioritized sampler, also `priorities`, float64 `[T]` or `[T, E]`; `leaves`, their
        powers (p + eps)^alpha; `alpha`, `beta`, `eps` and `max_priority`. If alpha is 0, priorities
        cannot be derived from the powers, and are 1. `left_out`, the names of entries that are no
        tensors, and are not read.

    Raises:
        FileNotFoundError: there is no dump, or one of its files is missing.
        DamagedError: a file has the wrong length or invalid contents.
        ValueError: the dump holds something other than arrays, or a dtype that jrb lacks.
    """
    folder = DumpFolder(path)
    stored = _read_storage(folder, max_expansion)
    storage, where = folder.path("storage"), folder.path("writer", "metadata.json")
    # Without a tensor file, nothing confirms the declared number of rows.
    has_rows = any(leaf.size for leaf in stored.leaves.values()) and all(stored.shape[:1] or (0,))
    got = f"shape {stored.shape} and {['/'.join(key) for key in stored.leaves]}"
    check(has_rows, storage, "a row and a tensor with entries", got)
    writer = folder.json("writer", "metadata.json")
    cursor = files.whole(writer.get("cursor"), where, "cursor")
    count = files.whole(writer.get("write_count", cursor), where, "write_count")
    time, envs, length = stored.shape[0], math.prod(stored.shape[1:]), stored.length
    # The length counts items of all environments. But if the storage has one axis, it counts rows,
    # and the other axes of `shape` are axes of the items; the write count tells these cases apart.
    each = envs if length > time or count * envs == length else 1
    rows = length // each
    is_right = not length % each and rows <= time and (rows == time or not stored.full)
    expected = f"a length for {time} rows of {envs} items{', all full' * stored.full}"
    check(is_right, storage, expected, length)
    check(cursor <= time, where, f"a cursor of at most {time}", cursor)
    # Read the items with one axis of environments, however many the storage has.
    lead = (rows,) if len(stored.shape) == 1 else (rows, envs)
    if stored.layout == "default":
        axes = len(stored.shape)
        leaves = {
            key: (leaf if axes < 3 else leaf.reshape(time, envs, *leaf.shape[axes:]))[:rows]
            for key, leaf in stored.leaves.items()
        }
    else:
        leaves = _expand_compact(storage, stored, rows)
    items = _nest_leaves(storage, leaves, len(lead), squeeze)
    num_envs, capacity = None if len(stored.shape) == 1 else envs, math.prod(stored.shape)
    info = {"cursor": cursor % time, "full": rows == time, "num_envs": num_envs}
    info |= {"capacity": capacity, "layout": stored.layout, "write_count": count}
    info["left_out"] = sorted(folder.left_out)
    return Dump(items, info | _read_priorities(folder, lead))


def _nest_leaves(where: str, leaves: Leaves, axes: int, squeeze: bool) -> dict[str, Any]:
    """Returns leaves as a nested dict; see `read_torchrl` for `squeeze`."""
    items: dict[str, Any] = {}
    for key, leaf in leaves.items():
        # NumPy misreads bools that are neither 0 nor 1, which files may hold.
        is_right = leaf.dtype != np.bool_ or (leaf.view(np.uint8) <= 1).all()
        check(is_right, where, f"leaf '{'/'.join(key)}' with bytes that are 0 or 1", "others")
        is_one = key[key[:1] == ("next",) :] in _ONCE and leaf.shape[axes:] == (1,)
        inner = items
        for name in key[:-1]:
            inner = inner.setdefault(name, {})
        inner[key[-1]] = leaf[..., 0] if squeeze and is_one else leaf
    return items


def _read_storage(folder: DumpFolder, max_expansion: float) -> StoredDump:
    """Finds the layout of a dump, and reads its arrays."""
    if folder.has(*_H5):
        layout, where = "h5", folder.file(*_H5)
        about, leaves, left_out = files.read_h5(where, max_expansion)
        folder.left_out |= left_out
        length = files.whole(about["_len"], where, "_len")
    else:
        where = folder.path("storage", "storage_metadata.json")
        metadata = folder.json("storage", "storage_metadata.json")
        if metadata.get("is_pytree"):
            raise ValueError(
                f"{where}: expected a storage of TensorDicts, got one of other pytrees."
            )
        meta = folder.json("storage", "meta.json")
        length = files.whole(metadata.get("len"), where, "len")
        # The default layout has none of the entries that compact layouts have.
        if any(files.kind_of(meta.get(name)) != "NonTensorData" for name in files.ABOUT):
            shape = files.shape_of(meta.get("shape"), folder.path("storage", "meta.json"))
            tensors = folder.tensors(("storage",), shape)
            return StoredDump("default", {key: leaf for key, leaf, _ in tensors}, shape, length)
        about: dict[str, Any] = {
            name: folder.json("storage", name, "meta.json").get("data") for name in files.ABOUT
        }
        where, tensors = folder.path("storage"), list(folder.tensors(("storage",), ()))
        leaves = {key: leaf for key, leaf, _ in tensors}
        layout = "nested" if any(ragged for _, _, ragged in tensors) else "flat"
    # Check the entries of a compact layout; the shift may be negative.
    full, shift, shape = (about[name] for name in files.ABOUT)
    check(isinstance(full, bool), where, "is_full to be true or false", full)
    shape = files.shape_of([shape] if isinstance(shape, int) else shape, where)
    sign = -1 if isinstance(shift, int) and shift < 0 else 1
    shift = sign * files.whole(-shift if sign < 0 else shift, where, "shift")
    return StoredDump(layout, leaves, shape, length, shift, full)


def _expand_compact(where: str, stored: StoredDump, rows: int) -> Leaves:
    """Returns the items `[T, ...]` or `[T, E, ...]` of a compact layout."""
    leaves, shift = stored.leaves, stored.shift
    time, envs, total = stored.shape[0], math.prod(stored.shape[1:]), math.prod(stored.shape)
    done, least = leaves.get(("done",), np.zeros(0)), -time if stored.full else 1
    got = f"shape {done.shape}" if done.size else "none"
    check(done.size == total, where, f"a leaf 'done' with {total} flags", got)
    check(least <= shift <= time, where, f"a shift from {least} to {time}", shift)
    # A next observation was inserted after each last row of a trajectory, and the newest row.
    ends = (done.view(np.uint8) != 0 if done.dtype == np.bool_ else done != 0).reshape(-1, time)
    ends[:, time - 1 if stored.full else shift - 1] = True
    ends = ends.reshape(-1)
    # A full ring was rotated by the shift: `index` has the place of each row, `[T]` or `[T, E]`.
    order = (np.arange(rows) - shift) % time if stored.full else np.arange(rows)
    index = order[:, None] + time * np.arange(envs) if len(stored.shape) > 1 else order
    place, items, more = flat.places(ends)[index], {}, total + int(ends.sum())
    for key, leaf in leaves.items():
        has_next = len(leaf) == more
        if not stored.full and not has_next:
            # Rows that were never written may have any flags. With one environment, they come after
            # all rows that are read. With several, HDF5 lacks one row at the very end for each
            # environment whose last row is flagged.
            enough = len(leaf) > max(total, place.max(initial=-1) + 1)
            last = ends[time - 1 :: time]
            has_next = enough and (last.size == 1 or len(leaf) == more - last.sum())
        if has_next:
            items[key] = _take_rows(leaf, place)
            items["next", *key] = _take_rows(leaf, np.minimum(place + 1, len(leaf) - 1))
            continue
        expected = f"leaf '{'/'.join(key)}' with {total} rows, or {more} of an observation"
        check(len(leaf) == total, where, expected, len(leaf))
        name = ("next", *key) if key in _ONCE else key
        items[name] = _take_rows(leaf, index)
        if name != key and key != ("reward",):
            items[key] = np.zeros_like(items[name])
    return items


def _take_rows(leaf: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Returns the rows at `index`, as a view if they are consecutive."""
    if index.ndim == 1 and len(index) and (np.diff(index) == 1).all():
        return leaf[index[0] : index[0] + len(index)]
    return leaf[index]


def _read_priorities(folder: DumpFolder, lead: tuple[int, ...]) -> dict[str, Any]:
    """Reads the state of a prioritized sampler for the rows that hold items; else returns {}."""
    name, size = ("sampler", "sampler_metadata.json"), math.prod(lead)
    about = folder.json(*name) if folder.has(*name) else {}
    if "_alpha" not in about:
        return {}
    # Read the leaves of the sum-tree, which may have more of them than the storage has items.
    where, tree = folder.path(*name), ("sampler", "sumtree.memmap")
    capacity = files.whole(about.get("_max_capacity"), where, "_max_capacity")
    leaves = folder.array(tree, (capacity,), np.dtype(np.float64))
    check(capacity >= size, where, f"a _max_capacity of at least {size}", capacity)
    leaves = leaves[:size].reshape(lead)
    is_right = (np.isfinite(leaves) & (leaves >= 0)).all()
    check(is_right, folder.path(*tree), "finite leaves of at least 0", "others")
    alpha, beta, eps = (
        files.number(about.get(key), where, key) for key in ("_alpha", "_beta", "_eps")
    )
    # The greatest priority is a number, or comes first in a list with its index.
    highest = about.get("_max_priority")
    highest = highest[0] if isinstance(highest, list) and highest else highest
    with np.errstate(over="ignore", under="ignore"):
        raw = np.maximum(leaves ** (1 / alpha) - eps, 0.0) if alpha else np.ones(leaves.shape)
    return {
        "priorities": raw,
        "leaves": leaves,
        "alpha": alpha,
        "beta": beta,
        "eps": eps,
        "max_priority": 1.0 if highest is None else files.number(highest, where, "_max_priority"),
    }
