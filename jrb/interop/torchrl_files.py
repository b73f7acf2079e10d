"""Reads the files of TorchRL's dumps, memory-mapped or HDF5, as arrays by name.

N rows, K trajectories. Nothing is unpickled, no file outside the dump is opened, and declared sizes
are compared with the lengths of files before memory is allocated.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from typing import Any

import h5py
import jax.numpy as jnp
import numpy as np

from jrb._store.files import DamagedError
from jrb.authoring import ExpansionLimit, absolute_path

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
