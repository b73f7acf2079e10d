"""The format of TorchRL's replay buffer dumps, in all its layouts. R rows, E environments."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import jax
import numpy as np

from jrb import interop
from jrb.authoring import leaf_names
from jrb.datasets.format import Source
from jrb.datasets.formats.arrays import read_json
from jrb.datasets.reading import tabular
from jrb.datasets.reading.names import check, leaves_in_ted
from jrb.datasets.reading.tabular import DONE, FLAGS, Table, TableFormat
from jrb.keys import Keys, lookup

_WRITER = os.path.join("writer", "metadata.json")
_STORAGES = ("storage_metadata.json", "checkpoint.h5")
_KEYS = Keys(episode=("collector", "traj_ids"))


@dataclasses.dataclass(frozen=True)
class TorchRL(TableFormat):
    """Dumps of TorchRL's replay buffers.

    Rewards and done flags of shape `[1]` become `[]`. An episode ends at flags below `next`, and
    where the number in `collector/traj_ids` changes, if there is such a leaf.

    Attributes:
        keys: the paths of a transition's parts in an item; `episode` is that of the numbers of
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
        """Returns True if a folder has a storage, and a writer with a cursor."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return False
        if not any(os.path.isfile(os.path.join(source, "storage", name)) for name in _STORAGES):
            return False
        with suppress(OSError, ValueError, TypeError):
            return "cursor" in read_json(os.path.join(source, _WRITER))
        return False

    @contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens a dump; steps in TorchRL's default layout stay on disk until they are read."""
        key = source, self.keys, self.max_expansion
        yield tabular.read_once([os.path.join(source, _WRITER)], key, lambda: self._table(source))

    def _table(self, path: str) -> Table:
        items, info = interop.read_torchrl(path, squeeze=True, max_expansion=self.max_expansion)
        envs, axes = info["num_envs"] or 1, 1 if info["num_envs"] is None else 2
        count = len(jax.tree.leaves(items)[0])
        # Order the rows by time, from the oldest one; row r of environment e is item `r * E + e`.
        oldest = info["cursor"] if info["full"] else 0
        rows = ((oldest + np.arange(count)) % max(count, 1))[:, None] * envs + np.arange(envs)
        items = jax.tree.map(lambda leaf: leaf.reshape(count * envs, *leaf.shape[axes:]), items)
        is_end, has_lost = self._is_end(path, items, rows), info["write_count"] > count
        # Episodes are sorted by their first row, then by environment.
        ranges = list[tuple[int, int, int]]()
        for env in range(envs):
            stops = sorted({count, *(np.flatnonzero(is_end[:, env]) + 1).tolist()} - {0})
            ranges += [(start, env, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        ranges.sort()
        parts = [np.zeros(0, np.int64), *(rows[a:b, env] for a, env, b in ranges)]
        order = np.concatenate(parts).astype(np.int64)
        ends = np.cumsum([stop - start for start, _, stop in ranges], dtype=np.int64)
        # Last episodes may still be running, and first ones may have lost rows to newer ones.
        is_running = np.array([not is_end[stop - 1, env] for _, env, stop in ranges], bool)
        is_cut = np.array([start == 0 and has_lost for start, _, _ in ranges], bool)
        facts = {
            "environment": np.array([env for _, env, _ in ranges], np.int64),
            "complete": ~is_running & ~is_cut,
            "running": is_running,
            "cut": is_cut,
        }
        names = leaves_in_ted(path, leaf_names(items), self.keys)
        # Leaves are read in this order of items, when they are accessed.
        columns = dict[str, Any]()
        for name, leaf in zip(names.values(), jax.tree.leaves(items), strict=True):
            shape, read = (len(order), *leaf.shape[1:]), lambda a, b, leaf=leaf: leaf[order[a:b]]
            columns[name] = tabular.DerivedColumn(shape, leaf.dtype, read)
        metadata = {name: info[name] for name in ("layout", "capacity", "num_envs", "write_count")}
        notes = (tabular.DONE_NOTE,) * ({*FLAGS} & columns.keys() == {DONE})
        columns = tabular.merge_flags(columns, len(order))
        return Table(columns, ends, facts, metadata, notes, info["left_out"])

    def _is_end(self, path: str, items: Any, rows: np.ndarray) -> np.ndarray:
        """Returns bool `[R, E]`, oldest row first, True for items that end an episode."""
        flags = self.keys.flags(items)
        got = f"items with the leaves {leaf_names(items)}. Name them with keys=jrb.Keys(done=...)"
        check(flags, f"{path}: done", "flags such as next/done", got)
        is_end = np.zeros(rows.shape, bool)
        # An episode ends at any flag, and before another number.
        for flag in flags.values():
            is_end |= (flag != 0).any(axis=tuple(range(1, flag.ndim)))[rows]
        numbers = None if self.keys.episode is None else lookup(items, self.keys.episode)
        if numbers is not None:
            numbers = numbers.reshape(-1)[rows]
            is_end[:-1] |= numbers[1:] != numbers[:-1]
        return is_end
