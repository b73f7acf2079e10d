"""What all chunks of a writer have in common: how items look, and where their parts are."""

import dataclasses
import functools
import os
from typing import Any

import numpy as np

from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb.checkpoint import descriptions
from jrb.datasets.recording import framed
from jrb.keys import Keys

HEAD = "head"
"""The name of the file."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of an item, as it lies in the files.

    Attributes:
        name: such as `next/reward`.
        dtype: the name of NumPy's.
        shape: of one item.
        keys: of PRNG keys, whose words these are, what made them; else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    keys: str | None = None

    @functools.cached_property
    def numpy(self) -> np.dtype:
        """The dtype."""
        return np.dtype(descriptions.dtype_of(self.dtype))

    @functools.cached_property
    def width(self) -> int:
        """Bytes of one item."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.numpy.itemsize


@dataclasses.dataclass(frozen=True)
class Head:
    """What all chunks of a writer have in common.

    Attributes:
        num_envs: E; None for one stream without an axis of environments.
        leaves: of an item.
        keys: how items are keyed.
        metadata: the user's, and when and with what it was written.
    """

    num_envs: int | None
    leaves: tuple[Leaf, ...]
    keys: Keys
    metadata: dict[str, Any]

    @property
    def envs(self) -> int:
        """How many streams there are."""
        return self.num_envs or 1

    @property
    def names(self) -> list[str]:
        """Those of the leaves."""
        return [leaf.name for leaf in self.leaves]


def write_head(folder: Folder, head: Head) -> int:
    """Writes a head; its checksum."""
    leaves = [[leaf.name, leaf.dtype, list(leaf.shape), leaf.keys] for leaf in head.leaves]
    keys = dataclasses.asdict(head.keys)
    body = {"num_envs": head.num_envs, "leaves": leaves, "keys": keys, "metadata": head.metadata}
    return framed.write(folder, HEAD, body, [])


def read_head(folder: Folder) -> tuple[Head, int]:
    """A head, and its checksum.

    Raises:
        DamagedError: it is not what was written.
        ValueError: a newer version has written it.
    """
    file, path = folder.open(HEAD), folder.path_of(HEAD)
    try:
        body, _, checksum = framed.read(file, path)
    finally:
        os.close(file)
    try:
        return _head_of(body), checksum
    except framed.NONSENSE as error:
        raise DamagedError(f"{path}: expected the head of a recording, got {error!r}.") from error


def _head_of(body: framed.Body) -> Head:
    leaves = tuple(
        Leaf(name, dtype, tuple(map(natural, shape)), keys)
        for name, dtype, shape, keys in body["leaves"]
    )
    if not all(isinstance(leaf.name, str) and leaf.width >= 0 for leaf in leaves) or not leaves:
        raise ValueError("leaves")
    envs = body["num_envs"]
    if envs is not None and natural(envs) < 1:
        raise ValueError("num_envs")
    settled = lambda path: tuple(path) if isinstance(path, list) else path
    keys = Keys(**{role: settled(path) for role, path in body["keys"].items()})
    return Head(envs, leaves, keys, dict(body["metadata"]))


def natural(value: object) -> int:
    """The same number; raises `ValueError` unless it is one that a file may have."""
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(repr(value))
    return value


def check_alike(path: str, name: str, other: Head, head: Head) -> None:
    """Raises `ValueError` unless a head is of the same items as that of another writer."""
    if (other.leaves, other.keys) == (head.leaves, head.keys):
        return
    text = lambda one: [(leaf.name, leaf.keys or leaf.dtype, leaf.shape) for leaf in one.leaves]
    what = f"the leaves {text(other)}, got {text(head)}"
    if other.leaves == head.leaves:
        what = f"the keys {other.keys}, got {head.keys}"
    raise ValueError(
        f"{path}: expected items as the writer '{name}' has them, {what}. Record them to another "
        "path."
    )
