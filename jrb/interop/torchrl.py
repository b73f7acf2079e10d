"""Dumps of TorchRL's replay buffers, read without TorchRL.

N capacity, E environments, T rows of time, K ends of trajectories. TorchRL has four layouts. The
default one holds the arrays as they are stored. The flat one holds every observation once, in order
of time, environment after environment; the nested one the same bytes with the lengths of the
trajectories; and the one of HDF5 a group for each trajectory.
"""

import importlib
import math
import os
from typing import Any, NamedTuple

import numpy as np

from jrb._util.checks import MAX_EXPANSION
from jrb._util.wording import escaped_errors
from jrb.interop import torchrl_files as dump
from jrb.interop.dump import Dump
from jrb.interop.torchrl_files import Folder, Key, Leaves
from jrb.interop.torchrl_write import write_torchrl
from jrb.layouts import flat

__all__ = ["read_torchrl", "write_torchrl"]

_H5 = ("storage", "checkpoint.h5")
_ONCE = tuple((name,) for name in ("reward", *dump.FLAGS))


class Stored(NamedTuple):
    """What lies in a storage, as it lies there.

    Attributes:
        layout: its name.
        leaves: arrays `[T, ...]` or `[T, E, ...]`; in compact layouts `[N, ...]` or `[N + K, ...]`.
        shape: T and the axes of the environments.
        length: the items held.
        shift: in compact layouts, the row behind the newest one.
        full: in compact layouts, whether the rows were turned so that the oldest comes first.
    """

    layout: str
    leaves: Leaves
    shape: tuple[int, ...]
    length: int
    shift: int = 0
    full: bool = False


@escaped_errors()
def read_torchrl(
    path: str | os.PathLike[str],
    squeeze: bool = False,
    max_expansion: float = MAX_EXPANSION,
) -> Dump:
    """Reads what `ReplayBuffer.dumps` of TorchRL has written, in any of its layouts.

    Args:
        path: of the folder.
        squeeze: whether rewards and done flags of shape `[1]` become `[]`, as jrb's units take
            them.
        max_expansion: how many times larger than their file arrays in HDF5 may be.

    Returns:
        The items, as `rb[:]` has them but with time before the environments, memory-mapped where
        the layout has them as they are. In `info` besides `cursor`, `full` and `num_envs`:
        `capacity`, N; `layout`, "default", "flat", "nested" or "h5"; `write_count`, the rows ever
        written; and of a prioritized sampler `priorities`, float64 `[T]` or `[T, E]`, with
        `leaves`, the same as (p + eps)^alpha, `alpha`, `beta`, `eps` and `max_priority`. An alpha
        of 0 has left nothing to tell priorities from: they are 1.

    Raises:
        FileNotFoundError: there is no dump, or a file of it is missing.
        DamagedError: a file is shorter or longer than it should be, or not what it should be.
        ValueError: the dump holds something that has no arrays, or another dtype.
    """
    folder = Folder(path)
    stored = _read_h5(folder, max_expansion) if folder.has(*_H5) else _read_memmaps(folder)
    _check_some(folder, stored)
    writer = folder.json("writer", "metadata.json")
    where = folder.path("writer", "metadata.json")
    cursor = dump.whole(writer.get("cursor"), where, "cursor")
    count = dump.whole(writer.get("write_count", cursor), where, "write_count")
    rows, envs = _rows(folder, stored, count), math.prod(stored.shape[1:])
    if cursor > stored.shape[0]:
        raise dump.damaged(where, f"a cursor of at most {stored.shape[0]}", cursor)
    if stored.layout == "default":
        leaves = {key: _cut(leaf, stored, rows) for key, leaf in stored.leaves.items()}
    else:
        leaves = _unfolded(folder, stored, rows)
    lead = (rows,) if len(stored.shape) == 1 else (rows, envs)
    _check_bits(folder, leaves)
    if squeeze:
        leaves = {key: _squeezed(key, leaf, len(lead)) for key, leaf in leaves.items()}
    info: dict[str, Any] = {
        "cursor": cursor % stored.shape[0],
        "full": rows == stored.shape[0],
        "num_envs": None if len(stored.shape) == 1 else envs,
        "capacity": math.prod(stored.shape),
        "layout": stored.layout,
        "write_count": count,
    }
    return Dump(_nest(leaves), info | _read_priorities(folder, lead))


def _rows(folder: Folder, stored: Stored, count: int) -> int:
    """The rows of time that hold items.

    The length counts items of all environments, but rows where the storage has but one axis, and
    what are taken for environments are axes of the items: then no fewer were written.
    """
    time, envs, length = stored.shape[0], math.prod(stored.shape[1:]), stored.length
    every = envs if length > time or count * envs == length else 1
    rows = length // every
    if length % every or rows > time or (stored.full and rows != time):
        expected = f"a length for {time} rows of {envs} items{', all full' * stored.full}"
        raise dump.damaged(folder.path("storage"), expected, length)
    return rows


def _cut(leaf: np.ndarray, stored: Stored, rows: int) -> np.ndarray:
    """The rows that hold items, all axes of environments as one."""
    axes = len(stored.shape)
    if axes > 2:
        leaf = leaf.reshape(len(leaf), math.prod(leaf.shape[1:axes]), *leaf.shape[axes:])
    return leaf[:rows]


def _check_bits(folder: Folder, leaves: Leaves) -> None:
    """Raises unless bools are: no file says so, and rows that were never written may hold any."""
    for key, leaf in leaves.items():
        if leaf.dtype == np.bool_ and (leaf.view(np.uint8) > 1).any():
            expected = f"leaf '{'/'.join(key)}' with bytes that are 0 or 1"
            raise dump.damaged(folder.path("storage"), expected, "others")


def _squeezed(key: Key, leaf: np.ndarray, axes: int) -> np.ndarray:
    one = key[key[:1] == ("next",) :] in _ONCE and leaf.shape[axes:] == (1,)
    return leaf[..., 0] if one else leaf


def _nest(leaves: Leaves) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for key, leaf in leaves.items():
        inner = items
        for name in key[:-1]:
            inner = inner.setdefault(name, {})
        inner[key[-1]] = leaf
    return items


def _unfolded(folder: Folder, stored: Stored, rows: int) -> Leaves:
    """The items `[T, ...]` or `[T, E, ...]` of a compact layout."""
    where, leaves = folder.path("storage"), stored.leaves
    time, envs, total = stored.shape[0], math.prod(stored.shape[1:]), math.prod(stored.shape)
    ends = _ends(where, stored)
    order = (np.arange(rows) - stored.shift) % time if stored.full else np.arange(rows)
    index = order[:, None] + time * np.arange(envs) if len(stored.shape) > 1 else order
    place, out = flat.places(ends)[index], {}
    for key, leaf in leaves.items():
        if _has_next(leaf, stored, ends, place):
            out[key] = _taken(leaf, place)
            out["next", *key] = _taken(leaf, np.minimum(place + 1, len(leaf) - 1))
        elif len(leaf) != total:
            more = f"{total + ends.sum()} of an observation"
            expected = f"leaf '{'/'.join(key)}' with {total} rows, or {more}"
            raise dump.damaged(where, expected, len(leaf))
        elif key not in _ONCE:
            out[key] = _taken(leaf, index)
        else:
            out["next", *key] = _taken(leaf, index)
            if key != ("reward",):
                out[key] = np.zeros_like(out["next", *key])
    return out


def _has_next(leaf: np.ndarray, stored: Stored, ends: np.ndarray, place: np.ndarray) -> bool:
    """Whether a leaf has a row more behind every end.

    Rows that were never written may hold any flags. With one environment they lie behind all that
    is read. With several, HDF5 lacks as many rows at the very end as environments end in one.
    """
    rows, more = len(leaf), len(ends) + int(ends.sum())
    if stored.full or rows == more:
        return rows == more
    enough = rows > max(len(ends), place.max(initial=-1) + 1)
    last = ends[stored.shape[0] - 1 :: stored.shape[0]]
    return enough and (last.size == 1 or rows == more - last.sum())


def _ends(where: str, stored: Stored) -> np.ndarray:
    """The rows behind which an observation was added, bool `[N]`."""
    time, total = stored.shape[0], math.prod(stored.shape)
    done = stored.leaves.get(("done",))
    if done is None or done.size != total:
        found = "none" if done is None else f"shape {done.shape}"
        raise dump.damaged(where, f"a leaf 'done' with {total} flags", found)
    least = -time if stored.full else 1
    if not least <= stored.shift <= time:
        raise dump.damaged(where, f"a shift from {least} to {time}", stored.shift)
    ends = (done.view(np.uint8) != 0 if done.dtype == np.bool_ else done != 0).reshape(-1, time)
    ends[:, time - 1 if stored.full else stored.shift - 1] = True
    return ends.reshape(-1)


def _taken(leaf: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The rows of an index, without a copy where they lie in one piece."""
    if index.ndim == 1 and len(index) and (np.diff(index) == 1).all():
        return leaf[index[0] : index[0] + len(index)]
    return leaf[index]


def _read_priorities(folder: Folder, lead: tuple[int, ...]) -> dict[str, Any]:
    """What a prioritized sampler left, for the rows that hold items."""
    name = ("sampler", "sampler_metadata.json")
    about = folder.json(*name) if folder.has(*name) else {}
    if "_alpha" not in about:
        return {}
    where = folder.path(*name)
    capacity = dump.whole(about.get("_max_capacity"), where, "_max_capacity")
    leaves = folder.array(("sampler", "sumtree.memmap"), (capacity,), np.dtype(np.float64))
    if capacity < math.prod(lead):
        raise dump.damaged(where, f"a _max_capacity of at least {math.prod(lead)}", capacity)
    leaves = leaves[: math.prod(lead)].reshape(lead)
    if not (np.isfinite(leaves) & (leaves >= 0)).all():
        where = folder.path("sampler", "sumtree.memmap")
        raise dump.damaged(where, "finite leaves of at least 0", "others")
    alpha, beta, eps = (
        dump.number(about.get(key), where, key) for key in ("_alpha", "_beta", "_eps")
    )
    highest = about.get("_max_priority")
    highest = highest[0] if isinstance(highest, list) and highest else highest
    return {
        "priorities": _priorities(leaves, alpha, eps),
        "leaves": leaves,
        "alpha": alpha,
        "beta": beta,
        "eps": eps,
        "max_priority": 1.0 if highest is None else dump.number(highest, where, "_max_priority"),
    }


def _priorities(leaves: np.ndarray, alpha: float, eps: float) -> np.ndarray:
    """The p of (p + eps)^alpha."""
    if not alpha:
        return np.ones(leaves.shape)
    with np.errstate(over="ignore", under="ignore"):
        return np.maximum(leaves ** (1 / alpha) - eps, 0.0)


def _read_memmaps(folder: Folder) -> Stored:
    """The layouts that are a file for each leaf."""
    where = folder.path("storage", "storage_metadata.json")
    about = folder.json("storage", "storage_metadata.json")
    if about.get("is_pytree"):
        raise ValueError(f"{where}: expected a storage of TensorDicts, got one of other pytrees.")
    meta = folder.json("storage", "meta.json")
    length = dump.whole(about.get("len"), where, "len")
    if all(dump.kind(meta.get(name)) == "NonTensorData" for name in dump.ABOUT):
        value = lambda name: folder.json("storage", name, "meta.json").get("data")
        return _read_compact(folder, {name: value(name) for name in dump.ABOUT}, length)
    shape = dump.shape_of(meta.get("shape"), folder.path("storage", "meta.json"))
    found = dump.tensors(folder, ("storage",), shape)
    return Stored("default", {key: leaf for key, leaf, _ in found}, shape, length)


def _read_compact(folder: Folder, about: dict[str, Any], length: int) -> Stored:
    """The flat layout, and the nested one."""
    leaves, nested = {}, False
    for key, leaf, ragged in dump.tensors(folder, ("storage",), ()):
        leaves[key], nested = leaf, nested or ragged
    layout = "nested" if nested else "flat"
    return _compact(layout, leaves, folder.path("storage"), about, length)


def _read_h5(folder: Folder, max_expansion: float) -> Stored:
    """The layout of HDF5."""
    where = folder.file(*_H5)
    about, leaves = importlib.import_module("jrb.interop.torchrl_h5").read_h5(where, max_expansion)
    return _compact("h5", leaves, where, about, dump.whole(about["_len"], where, "_len"))


def _compact(layout: str, leaves: Leaves, where: str, about: dict[str, Any], length: int) -> Stored:
    full, shift, shape = (about[name] for name in dump.ABOUT)
    sign = -1 if isinstance(shift, int) and shift < 0 else 1
    if not isinstance(full, bool):
        raise dump.damaged(where, "is_full to be true or false", full)
    shape = dump.shape_of([shape] if isinstance(shape, int) else shape, where)
    whole = dump.whole(sign * shift if sign < 0 else shift, where, "shift")
    return Stored(layout, leaves, shape, length, sign * whole, full)


def _check_some(folder: Folder, stored: Stored) -> None:
    """Raises where no file would say how many rows there are."""
    some = any(leaf.size for leaf in stored.leaves.values())
    if not some or not stored.shape or not stored.shape[0]:
        got = f"shape {stored.shape} and {['/'.join(key) for key in stored.leaves]}"
        raise dump.damaged(folder.path("storage"), "a row and a tensor with entries", got)
