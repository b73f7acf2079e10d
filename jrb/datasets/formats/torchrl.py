"""TorchRL's dumps of replay buffers, in any of its layouts. T rows of time, E environments."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np

from jrb._util import pytree
from jrb._util.pytree import PyTree
from jrb.datasets.format import Source
from jrb.datasets.reading import vectorized
from jrb.datasets.reading.flat import Flat, Table
from jrb.datasets.reading.vectorized import Leaf
from jrb.interop.torchrl import read_torchrl
from jrb.interop.torchrl_files import Folder
from jrb.keys import Keys, lookup

_WRITER = ("writer", "metadata.json")
_STORAGES = (("storage", "storage_metadata.json"), ("storage", "checkpoint.h5"))
_COLLECTOR = ("collector", "traj_ids")
_KEYS = Keys(episode=_COLLECTOR)
_TOLD = ("layout", "capacity", "num_envs", "write_count")


@dataclasses.dataclass(frozen=True)
class TorchRL(Flat):
    """Dumps of TorchRL's replay buffers.

    Rewards and done flags of shape `[1]` become `[]`. An episode ends where a flag of the next step
    says so, and before another number in `collector/traj_ids`, if there is such a leaf.

    Attributes:
        keys: where the parts of a transition lie in an item; `episode` names the numbers of
            trajectories.
    """

    name: ClassVar[str] = "torchrl"
    looks_for: ClassVar[str] = "a folder that ReplayBuffer.dumps of TorchRL has made"

    own_files: ClassVar[str] = (
        r"buffer_metadata\.json|writer/metadata\.json|storage/(.+/)?[^/]+\.(json|memmap|pt|h5)|"
        r"sampler/[^/]+\.(json|memmap)|transforms?(\.t|\.pt|/.+\.(json|memmap))"
    )

    keys: Keys = _KEYS

    def matches(self, source: Source) -> bool:
        """Whether there are a storage and where its writer stands."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return False
        with contextlib.suppress(OSError, ValueError, TypeError):
            folder = Folder(source)
            has_storage = any(folder.has(*names) for names in _STORAGES)
            return has_storage and "cursor" in folder.json(*_WRITER)
        return False

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """All steps; those of the default layout stay on the disk until they are asked for."""
        about = os.stat(Folder(source).file(*_WRITER))
        yield _opened(source, self.keys, self.max_expansion, about.st_mtime_ns, about.st_ino)


@functools.lru_cache(maxsize=4)
def _opened(path: str, keys: Keys, max_expansion: float, changed: int, node: int) -> Table:
    """A dump that is open; remembered until it is another one."""
    items, info = read_torchrl(path, squeeze=True, max_expansion=max_expansion)
    envs, axes = info["num_envs"] or 1, 1 if info["num_envs"] is None else 2
    time = len(jax.tree.leaves(items)[0])
    first = info["cursor"] if info["full"] else 0
    rows = (first + np.arange(time)) % max(time, 1)
    numbers = rows[:, None] * envs + np.arange(envs)
    flat = [leaf.reshape(time * envs, *leaf.shape[axes:]) for leaf in jax.tree.leaves(items)]
    named = zip(pytree.leaf_names(items), flat, strict=True)
    leaves = {name: Leaf(_spec(leaf), leaf.__getitem__) for name, leaf in named}
    over = _over(path, jax.tree.unflatten(jax.tree.structure(items), flat), keys, numbers)
    found = vectorized.in_episodes(
        numbers, over, np.ones(numbers.shape, bool), np.full(envs, info["write_count"] > time)
    )
    table = vectorized.table(path, leaves, keys, found)
    return dataclasses.replace(table, metadata={name: info[name] for name in _TOLD})


def _spec(leaf: np.ndarray) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def _over(path: str, items: PyTree, keys: Keys, numbers: np.ndarray) -> np.ndarray:
    """Which rows `[T, E]`, oldest first, end an episode."""
    flags = keys.flags(items)
    if not flags:
        raise ValueError(
            f"{path}: done: expected flags such as next/done, got items with the leaves "
            f"{pytree.leaf_names(items)}. Name them with keys=jrb.Keys(done=...)."
        )
    over = np.zeros(numbers.shape, bool)
    for flag in flags.values():
        over |= (flag != 0).any(axis=tuple(range(1, flag.ndim)))[numbers]
    which = None if keys.episode is None else lookup(items, keys.episode)
    if which is not None:
        which = which.reshape(-1)[numbers]
        over[:-1] |= which[1:] != which[:-1]
    return over
