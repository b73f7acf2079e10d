"""The files of TorchRL's dumps: their names, and arrays out of them by name.

N rows, K trajectories. Nothing is unpickled, no file outside the dump is opened, and no size is
believed before the file is as long as that.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrb._store import files
from jrb._store.errors import DamagedError

Key = tuple[str, ...]
Leaves = dict[Key, np.ndarray]

DTYPES = {
    "bool": jnp.bool_,
    "uint8": jnp.uint8,
    "uint16": jnp.uint16,
    "uint32": jnp.uint32,
    "uint64": jnp.uint64,
    "int8": jnp.int8,
    "int16": jnp.int16,
    "int32": jnp.int32,
    "int64": jnp.int64,
    "float16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "float32": jnp.float32,
    "float64": jnp.float64,
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
    "complex64": jnp.complex64,
    "complex128": jnp.complex128,
}
"""The dtypes that both sides have, by the names of both."""

FLAGS = ("done", "terminated", "truncated")
"""What the compact layouts keep once, and give back at the root as zeros."""

ABOUT = ("is_full", "shift", "_storage_shape")
"""What the compact layouts hold besides tensors."""

_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | frozenset(map(chr, range(32)))
_MOST_JSON = 64 << 20


def file_name(key: str) -> str:
    """The name of a file for a key, without its ending."""
    if key in ("", ".", ".."):
        return "%2E" * len(key) or "%"
    return "".join(f"%{ord(char):02X}" if char in _UNSAFE else char for char in key)


class Folder:
    """A dump, out of which no name leads."""

    root: str

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(files.absolute(path))
        if not os.path.isdir(self.root):
            raise FileNotFoundError(f"{self.root}: expected a dump, found no folder there.")

    def path(self, *names: str) -> str:
        """The path of a file, which need not be there.

        Raises:
            ValueError: a name leads elsewhere, by itself or by a link.
        """
        path = os.path.join(self.root, *names)
        plain = all(name not in ("", ".", "..") and not {"/", "\0"} & {*name} for name in names)
        if not plain or os.path.realpath(path) != path:
            raise ValueError(f"{path}: expected a file of the dump itself, found another place.")
        return path

    def has(self, *names: str) -> bool:
        """Whether there is such a file."""
        return os.path.lexists(self.path(*names))

    def name(self, names: Key, key: str, ending: str = "") -> str:
        """The name of a key's file or folder; earlier versions did not encode it."""
        name = file_name(key) + ending
        plain = key not in ("", ".", "..") and not {"/", "\\", "\0"} & {*key}
        if plain and not self.has(*names, name) and self.has(*names, key + ending):
            return key + ending
        return name

    def file(self, *names: str) -> str:
        """The path of a plain file, which is there."""
        path = self.path(*names)
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{path}: expected a file of the dump, found none.")
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise damaged(path, "a plain file", "something else")
        return path

    def json(self, *names: str) -> dict[str, Any]:
        """What a file of JSON holds."""
        path = self.file(*names)
        if os.path.getsize(path) > _MOST_JSON:
            raise damaged(path, f"at most {_MOST_JSON} bytes of JSON", os.path.getsize(path))
        try:
            found = json.loads(files.read_all(path))
        except (ValueError, RecursionError) as error:
            raise damaged(path, "JSON", error) from error
        if not isinstance(found, dict):
            raise damaged(path, "a JSON object", type(found).__name__)
        return found

    def array(self, names: Key, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A file as an array that is only read; without entries it has none."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.zeros(shape, dtype)
        path = self.file(*names)
        if os.path.getsize(path) != size:
            what = f"{size} bytes for {dtype} of shape {shape}"
            raise damaged(path, what, f"{os.path.getsize(path)} bytes")
        return np.asarray(np.memmap(path, dtype, "r", shape=shape))


def tensors(
    folder: Folder, names: Key, lead: tuple[int, ...]
) -> Iterator[tuple[Key, np.ndarray, bool]]:
    """Key, array, and whether it is one of trajectories, of all tensors under a folder.

    Args:
        folder: the dump.
        names: the folder within it.
        lead: the leading axes that all must have, or () for `[N]` of any length; then those of
            trajectories are joined.

    Raises:
        ValueError: something that has no array.
    """
    where = folder.path(*names, "meta.json")
    for key, entry in folder.json(*names, "meta.json").items():
        what = kind(entry)
        if what == "TensorDict":
            for inner, leaf, ragged in tensors(folder, (*names, folder.name(names, key)), lead):
                yield (key, *inner), leaf, ragged
        elif what == "tensor":
            leaf, ragged = _tensor(folder, names, key, entry)
            if leaf.shape[: len(lead)] != lead or not leaf.ndim or (ragged and lead):
                expected = f"leaf '{key}' with leading axes {lead or '[N]'}"
                raise damaged(where, expected, f"shape {leaf.shape}")
            yield (key,), leaf, ragged
        elif what not in (None, "NonTensorData", "NonTensorStack"):
            raise ValueError(f"{where}: expected tensors and TensorDicts, got '{key}', a {what}.")


def kind(entry: Any) -> str | None:
    """What an entry of a `meta.json` stands for; None for what is no entry."""
    if not isinstance(entry, Mapping):
        return None
    what = entry.get("type")
    return str(what) if what is not None else "tensor" if "dtype" in entry else None


def _tensor(
    folder: Folder, names: Key, key: str, entry: Mapping[str, Any]
) -> tuple[np.ndarray, bool]:
    where = folder.path(*names, "meta.json")
    shape, dtype = shape_of(entry.get("shape"), where), str(entry.get("dtype"))
    known = DTYPES.get(dtype.removeprefix("torch."))
    if known is None:
        raise ValueError(
            f"{where}: leaf '{key}': expected a dtype out of {list(DTYPES)}, got {dtype}."
        )
    ragged = bool(entry.get("is_nested"))
    if ragged:
        shape = _joint_shape(folder, names, key, shape, np.dtype(known))
    place = (*names, folder.name(names, key, ".memmap"))
    return folder.array(place, shape, np.dtype(known)), ragged


def _joint_shape(
    folder: Folder, names: Key, key: str, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[int, ...]:
    """The shape of all trajectories one after the other, whose shapes a file tells.

    TorchRL counts a row too few of those that end in the last row of time without being written.
    """
    place = (*names, folder.name(names, key, ".shape.memmap"))
    if len(shape) != 2 or 0 in shape:
        raise damaged(folder.path(*names, "meta.json"), f"'{key}': the shape of shapes", shape)
    shapes = folder.array(place, shape, np.dtype(np.int64))
    if (shapes < 0).any() or (shapes[:, 1:] != shapes[0, 1:]).any():
        raise damaged(folder.path(*place), "shapes that differ in time alone", "others")
    rows, inner = sum(shapes[:, 0].tolist()), shapes[0, 1:].tolist()
    path = folder.path(*names, folder.name(names, key, ".memmap"))
    width = math.prod(inner) * dtype.itemsize
    more = os.path.getsize(path) // width - rows if width and os.path.isfile(path) else 0
    return (rows + more if 0 < more <= len(shapes) else rows, *inner)


def damaged(where: str, expected: str, found: object) -> DamagedError:
    """The error for a file that is not what it should be."""
    return DamagedError(f"{where}: expected {expected}, found {found}.")


def whole(value: Any, where: str, name: str) -> int:
    """A whole number of at least 0 out of a file."""
    if number(value, where, name) != int(value) or value >= 2**63:
        raise damaged(where, f"{name} to be a whole number", value)
    return int(value)


def number(value: object, where: str, name: str) -> float:
    """A number of at least 0 out of a file."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**128:
        raise damaged(where, f"{name} to be a finite number of at least 0", value)
    return float(value)


def shape_of(value: object, where: str) -> tuple[int, ...]:
    """A shape out of a file."""
    if not isinstance(value, list) or len(value) > 32:
        raise damaged(where, "a shape of at most 32 axes", value)
    return tuple(whole(size, where, "a size") for size in value)
