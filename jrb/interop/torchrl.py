"""Reads dumps of TorchRL's replay buffers, without TorchRL.

N capacity, E environments, T rows, K ends of trajectories. TorchRL has four layouts. The default
one holds the storage's arrays. The compact ones hold each observation once, in order of time, one
environment after the other: the flat one as arrays, the nested one as ragged arrays of
trajectories, and the HDF5 one with a group for each trajectory.

Nothing is unpickled, no file outside the dump is opened, and declared sizes are compared with the
lengths of files before memory is allocated.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

import h5py
import jax.numpy as jnp
import numpy as np

from jrb._store.files import DamagedError
from jrb.authoring import MAX_EXPANSION, ExpansionLimit, absolute_path, escape_errors
from jrb.interop.dump import Dump
from jrb.layouts import compact

Key = tuple[str, ...]
Leaves = dict[Key, np.ndarray]

DTYPES: dict[str, Any] = {
    name: getattr(jnp, "bool_" if name == "bool" else name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
        *("complex64", "complex128"),
    )
}
"""The dtypes that PyTorch and JAX share, by their common names."""

FLAGS = ("done", "terminated", "truncated")
"""The flags, which compact layouts store only for `next`; those at the root are read as zeros."""

ABOUT = ("is_full", "shift", "_storage_shape")
"""The names of the entries of compact layouts that are not tensors."""

_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | frozenset(map(chr, range(32)))
_MOST_RATIO = 1032
"""The maximum compression ratio of an HDF5 filter."""

_H5 = ("storage", "checkpoint.h5")
_ONCE = tuple((name,) for name in ("reward", *FLAGS))


class StoredDump(NamedTuple):
    """The arrays of a dump in their stored layout."""

    layout: str
    leaves: Leaves  # `[T, ...]` or `[T, E, ...]`; in compact layouts `[N, ...]` or `[N + K, ...]`
    shape: tuple[int, ...]  # T and the axes of the environments
    length: int  # the number of items
    shift: int = 0  # in compact layouts, the row after the newest one
    full: bool = False  # in compact layouts, True if rows were rotated to put the oldest first


@escape_errors()
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
    cursor = whole(writer.get("cursor"), where, "cursor")
    count = whole(writer.get("write_count", cursor), where, "write_count")
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


def _read_storage(folder: "DumpFolder", max_expansion: float) -> StoredDump:
    """Finds the layout of a dump, and reads its arrays."""
    if folder.has(*_H5):
        layout, where = "h5", folder.file(*_H5)
        about, leaves, left_out = read_h5(where, max_expansion)
        folder.left_out |= left_out
        length = whole(about["_len"], where, "_len")
    else:
        where = folder.path("storage", "storage_metadata.json")
        metadata = folder.json("storage", "storage_metadata.json")
        if metadata.get("is_pytree"):
            raise ValueError(
                f"{where}: expected a storage of TensorDicts, got one of other pytrees."
            )
        meta = folder.json("storage", "meta.json")
        length = whole(metadata.get("len"), where, "len")
        # The default layout has none of the entries that compact layouts have.
        if any(kind_of(meta.get(name)) != "NonTensorData" for name in ABOUT):
            shape = shape_of(meta.get("shape"), folder.path("storage", "meta.json"))
            tensors = folder.tensors(("storage",), shape)
            return StoredDump("default", {key: leaf for key, leaf, _ in tensors}, shape, length)
        about: dict[str, Any] = {
            name: folder.json("storage", name, "meta.json").get("data") for name in ABOUT
        }
        where, tensors = folder.path("storage"), list(folder.tensors(("storage",), ()))
        leaves = {key: leaf for key, leaf, _ in tensors}
        layout = "nested" if any(ragged for _, _, ragged in tensors) else "flat"
    # Check the entries of a compact layout; the shift may be negative.
    full, shift, shape = (about[name] for name in ABOUT)
    check(isinstance(full, bool), where, "is_full to be true or false", full)
    shape = shape_of([shape] if isinstance(shape, int) else shape, where)
    sign = -1 if isinstance(shift, int) and shift < 0 else 1
    shift = sign * whole(-shift if sign < 0 else shift, where, "shift")
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
    place, items, more = compact.places(ends)[index], {}, total + int(ends.sum())
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


def _read_priorities(folder: "DumpFolder", lead: tuple[int, ...]) -> dict[str, Any]:
    """Reads the state of a prioritized sampler for the rows that hold items; else returns {}."""
    name, size = ("sampler", "sampler_metadata.json"), math.prod(lead)
    about = folder.json(*name) if folder.has(*name) else {}
    if "_alpha" not in about:
        return {}
    # Read the leaves of the sum-tree, which may have more of them than the storage has items.
    where, tree = folder.path(*name), ("sampler", "sumtree.memmap")
    capacity = whole(about.get("_max_capacity"), where, "_max_capacity")
    leaves = folder.array(tree, (capacity,), np.dtype(np.float64))
    check(capacity >= size, where, f"a _max_capacity of at least {size}", capacity)
    leaves = leaves[:size].reshape(lead)
    is_right = (np.isfinite(leaves) & (leaves >= 0)).all()
    check(is_right, folder.path(*tree), "finite leaves of at least 0", "others")
    alpha, beta, eps = (number(about.get(key), where, key) for key in ("_alpha", "_beta", "_eps"))
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
        "max_priority": 1.0 if highest is None else number(highest, where, "_max_priority"),
    }


# The files of a dump.


def file_name(key: str) -> str:
    """Returns the file name for a key, percent-encoded as by TorchRL, without an ending."""
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    return "".join(f"%{ord(char):02X}" if char in _UNSAFE else char for char in key)


def check(is_right: object, where: str, expected: str, got: object) -> None:
    """Raises `DamagedError` unless `is_right`; the message names file, expectation and finding."""
    if not is_right:
        raise DamagedError(f"{where}: expected {expected}, found {got}.")


def whole(value: Any, where: str, name: str) -> int:
    """Returns a value from a file as a whole number of at least 0; raises for others."""
    is_whole = number(value, where, name) == int(value) and value < 2**63
    check(is_whole, where, f"{name} to be a whole number", value)
    return int(value)


def number(value: Any, where: str, name: str) -> float:
    """Returns a value from a file as a number of at least 0; raises for others."""
    is_number = type(value) in (int, float) and 0 <= value < 2**128
    check(is_number, where, f"{name} to be a finite number of at least 0", value)
    return float(value)


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """Returns a value from a file as a shape; raises for others."""
    is_shape = isinstance(value, list) and len(value) <= 32
    check(is_shape, where, "a shape of at most 32 axes", value)
    return tuple(whole(size, where, "a size") for size in value)


class DumpFolder:
    """The folder of a dump. No name can lead out of it.

    Attributes:
        root: the path of the folder.
        left_out: the keys of entries that are no tensors, such as `info/text`, found by `tensors`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.left_out: set[str] = set()
        self.root: str = os.path.realpath(absolute_path(path))
        if not os.path.isdir(self.root):
            raise FileNotFoundError(f"{self.root}: expected a dump, found no folder there.")

    def path(self, *names: str) -> str:
        """Returns the path of a file, which need not exist; raises if it is outside the dump."""
        # A name must be one component of a path, and no component may be a symbolic link.
        path = os.path.join(self.root, *names)
        plain = all(name not in ("", ".", "..") and not {"/", "\0"} & {*name} for name in names)
        if not plain or os.path.realpath(path) != path:
            raise ValueError(f"{path}: expected a file of the dump itself, found another place.")
        return path

    def has(self, *names: str) -> bool:
        """Returns True if the dump has this file."""
        return os.path.lexists(self.path(*names))

    def name(self, names: Key, key: str, ending: str = "") -> str:
        """Returns the name of a key's file or folder, which early TorchRL did not encode."""
        # Prefer the encoded name, and take the plain one if only that exists.
        name = file_name(key) + ending
        plain = key not in ("", ".", "..") and not {"/", "\\", "\0"} & {*key}
        if plain and not self.has(*names, name) and self.has(*names, key + ending):
            return key + ending
        return name

    def file(self, *names: str) -> str:
        """Returns the path of a regular file; raises if there is none."""
        path = self.path(*names)
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{path}: expected a file of the dump, found none.")
        check(stat.S_ISREG(os.lstat(path).st_mode), path, "a plain file", "something else")
        return path

    def json(self, *names: str) -> dict[str, Any]:
        """Reads the JSON object in a file."""
        path = self.file(*names)
        try:
            with open(path, "rb") as file:
                value = json.load(file)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{path}: expected JSON, found {error}.") from error
        check(isinstance(value, dict), path, "a JSON object", type(value).__name__)
        return value

    def array(self, names: Key, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Memory-maps a file as a read-only array; an array of size 0 has no file."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.zeros(shape, dtype)
        path = self.file(*names)
        stored, expected = os.path.getsize(path), f"{size} bytes for {dtype} of shape {shape}"
        check(stored == size, path, expected, f"{stored} bytes")
        return np.asarray(np.memmap(path, dtype, "r", shape=shape))

    def tensors(self, names: Key, lead: tuple[int, ...]) -> Iterator[tuple[Key, np.ndarray, bool]]:
        """Yields, for each tensor of a folder, its key, its array, and True if it was ragged.

        A ragged tensor is a list of trajectories, which are concatenated. `lead` is the leading
        shape that all tensors must have; () allows `[N]` of any length, and ragged tensors.
        """
        where = self.path(*names, "meta.json")
        for key, entry in self.json(*names, "meta.json").items():
            kind = kind_of(entry)
            if kind == "TensorDict":
                for inner, leaf, ragged in self.tensors((*names, self.name(names, key)), lead):
                    yield (key, *inner), leaf, ragged
            elif kind == "tensor":
                leaf, ragged = self._read_tensor(names, key, entry, where)
                is_right = leaf.ndim and leaf.shape[: len(lead)] == lead and not (ragged and lead)
                expected = f"leaf '{key}' with leading axes {lead or '[N]'}"
                check(is_right, where, expected, f"shape {leaf.shape}")
                yield (key,), leaf, ragged
            elif kind in ("NonTensorData", "NonTensorStack"):
                self.left_out |= {"/".join((*names[1:], key))} - {*ABOUT}
            elif kind is not None:
                raise ValueError(
                    f"{where}: expected tensors and TensorDicts, got '{key}', a {kind}."
                )

    def _read_tensor(
        self, names: Key, key: str, entry: dict[str, Any], where: str
    ) -> tuple[np.ndarray, bool]:
        shape, name = shape_of(entry.get("shape"), where), str(entry.get("dtype"))
        if name.removeprefix("torch.") not in DTYPES:
            raise ValueError(
                f"{where}: leaf '{key}': expected a dtype out of {list(DTYPES)}, got {name}."
            )
        dtype, ragged = np.dtype(DTYPES[name.removeprefix("torch.")]), bool(entry.get("is_nested"))
        place = (*names, self.name(names, key, ".memmap"))
        if ragged:
            # The file has the trajectories one after the other; another file has their shapes.
            check(len(shape) == 2 and 0 not in shape, where, f"'{key}': the shape of shapes", shape)
            at = (*names, self.name(names, key, ".shape.memmap"))
            shapes = self.array(at, shape, np.dtype(np.int64))
            is_right = (shapes >= 0).all() and (shapes[:, 1:] == shapes[0, 1:]).all()
            check(is_right, self.path(*at), "shapes that differ in time alone", "others")
            rows, inner = sum(shapes[:, 0].tolist()), shapes[0, 1:].tolist()
            # TorchRL counts one row too few of trajectories that end unwritten in the last row: the
            # length of the file tells how many rows there are.
            path, width = self.path(*place), math.prod(inner) * dtype.itemsize
            more = os.path.getsize(path) // width - rows if width and os.path.isfile(path) else 0
            shape = (rows + more if 0 < more <= len(shapes) else rows, *inner)
        return self.array(place, shape, dtype), ragged


def kind_of(entry: Any) -> str | None:
    """Returns the kind of an entry of a `meta.json`; None for other values."""
    if not isinstance(entry, dict):
        return None
    kind = entry.get("type")
    return str(kind) if kind is not None else "tensor" if "dtype" in entry else None


class DumpFile:
    """A dump in HDF5. Links are not followed, and declared sizes are checked before reading.

    `left_out` has the names of entries that are neither numbers nor a trajectory, by `leaves`.
    """

    def __init__(self, path: str, file: h5py.File, max_expansion: float) -> None:
        self._path, self._file = path, file
        self._limit = ExpansionLimit(path, [path], max_expansion)
        self._seen: set[Any] = set()
        self.left_out: set[str] = set()

    def member(self, group: Any, name: str) -> Any:
        """Returns the member `name` of a group; raises if it is a link, or missing."""
        is_own = isinstance(group.get(name, getlink=True), h5py.HardLink)
        check(is_own, self._path, f"'{name}' in {group.name} itself", "nothing, or a link")
        return group[name]

    def array(self, dataset: Any) -> np.ndarray:
        """Reads a dataset; raises if the file is too small for its declared size."""
        size = math.prod(dataset.shape) * dataset.dtype.itemsize
        is_own = not dataset.external and not dataset.is_virtual
        check(is_own, self._path, f"the data of {dataset.name} in this file", "them elsewhere")
        # Filters may have compressed the data, each of them at most by the largest ratio.
        stored = dataset.id.get_storage_size()
        filters = dataset.id.get_create_plist().get_nfilters()
        is_whole = size <= stored * _MOST_RATIO**filters
        check(is_whole, self._path, f"{size} bytes of {dataset.name}", f"{stored} bytes")
        self._limit.add(size)
        return np.asarray(dataset[()])

    def datasets(self, group: Any) -> Iterator[tuple[Key, np.ndarray]]:
        """Yields key and array of all numeric datasets under a group."""
        # A group may be a member of itself, by a hard link.
        is_own = isinstance(group, h5py.Group) and group not in self._seen
        check(is_own, self._path, f"{group.name} to be a group of its own", group)
        self._seen.add(group)
        # Leave out members that are neither groups nor numbers, such as texts.
        for name in map(str, group):
            entry = self.member(group, name)
            if not isinstance(entry, h5py.Dataset):
                yield from (((name, *key), leaf) for key, leaf in self.datasets(entry))
            elif entry.dtype.kind in "biufc" and entry.shape is not None:
                yield (name,), self.array(entry)
            else:
                self.left_out.add(str(entry.name)[1:])

    def about(self) -> dict[str, Any]:
        """Returns the dump's entries that are not tensors: `ABOUT` and `_len`."""
        about: dict[str, Any] = {}
        for name in (*ABOUT, "_len"):
            value = self.member(self._file, name)
            shape = value.shape if isinstance(value, h5py.Dataset) else None
            is_small = shape is not None and math.prod(shape) <= 32
            check(is_small, self._path, f"'{name}': a number or a few", value)
            about[name] = self.array(value).tolist()
        return about

    def leaves(self) -> Leaves:
        """Returns the leaves of all trajectories, concatenated."""
        # Sort the groups of trajectories by their numbers, which must have no gaps.
        groups = [name for name in map(str, self._file) if name.startswith("traj_")]
        groups = [name for name in groups if name[5:].isdecimal()]
        self.left_out |= {*map(str, self._file)} - {*groups, *ABOUT, "_len"}
        groups.sort(key=lambda name: int(name[5:]))
        has_all = [int(name[5:]) for name in groups] == list(range(len(groups)))
        check(has_all, self._path, "trajectories from 0 on, each once", groups[:8])
        # Collect each leaf from all trajectories, in this order.
        leaves: dict[Key, list[np.ndarray]] = {}
        for place, name in enumerate(groups):
            for key, leaf in self.datasets(self.member(self._file, name)):
                parts = leaves.setdefault(key, [])
                parts.append(leaf)
                same = leaf.ndim and leaf.shape[1:] == parts[0].shape[1:]
                expected = f"'{'/'.join(key)}' in every trajectory, with rows of one shape"
                is_right = same and len(parts) == place + 1
                check(is_right, self._path, expected, f"{leaf.shape} in {name}")
        return {key: np.concatenate(parts) for key, parts in leaves.items()}


def read_h5(path: str, max_expansion: float) -> tuple[dict[str, Any], Leaves, set[str]]:
    """Reads `ABOUT` and `_len`, leaves `[N, ...]` or `[N + K, ...]`, and names of other entries."""
    try:
        with h5py.File(path, "r") as file:
            dump = DumpFile(path, file, max_expansion)
            return dump.about(), dump.leaves(), dump.left_out
    except (OSError, RuntimeError, KeyError, TypeError) as error:
        raise DamagedError(f"{path}: expected a dump in HDF5, found {error}.") from error
