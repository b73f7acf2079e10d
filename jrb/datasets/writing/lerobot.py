"""Sets of LeRobot, version 3, written without LeRobot.

K episodes, L steps of one.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jrb import read
from jrb._base import checks, extras, pytree
from jrb._store import files
from jrb.buffer import ReplayBuffer
from jrb.datasets.writing import lerobot_features as known
from jrb.datasets.writing.lerobot_features import Feature
from jrb.datasets.writing.stats import Stats, joined, stats_of
from jrb.layouts.names import Leaves, flatten
from jrb.state import BufferState

_CHUNK = 1000  # files in a folder
_PIECE = 32 << 20  # bytes of items that are read at a time
_PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_DATA, _EPISODES = "data/" + _PLACE, "meta/episodes/" + _PLACE


def write_lerobot(
    path: str | os.PathLike[str],
    buffer: ReplayBuffer,
    state: BufferState,
    *,
    fps: int,
    robot_type: str | None = None,
    task: str | Sequence[str] = "",
    images: bool = True,
    next_observations: bool = False,
    whole: bool = False,
    file_mb: int = 100,
) -> None:
    """Writes what a buffer holds as a set that LeRobot loads (version 3.0).

    Names are TED's with dots for slashes; an observation that is a single array becomes
    `observation.state`, or `observation.image`. LeRobot has no place for the observation after the
    last step of an episode: it is left out, unless next observations are features too. Leaves
    `timestamp, frame_index, episode_index, index` are made anew.

    Args:
        path: of a folder, which is not there yet.
        buffer: the description; its items are nested dicts, and tell where episodes end.
        state: its state. It is only read, a few episodes at a time.
        fps: steps in a second.
        robot_type: which robot it was.
        task: what was to be done; or texts, of which an integer leaf `task_index` takes one for
            each step.
        images: whether observations uint8 `[height, width, 1 or 3]` are stored as PNGs, which is
            exact, rather than as lists.
        next_observations: whether they are stored, as `next.observation...`; needed where they are
            not the observations of the next steps.
        whole: whether episodes are left out that are running, or whose beginning was overwritten.
        file_mb: about how large a table becomes before the next one begins.

    Raises:
        ValueError: something is at the path; there are no episodes; LeRobot cannot hold a leaf;
            next observations that would be lost.
        TypeError: items are no nested dicts.
    """
    target = os.path.realpath(os.fspath(path))
    if os.path.lexists(target):
        raise ValueError(f"{target}: expected nothing there, found something. Choose another path.")
    checks.count("fps", fps)
    checks.count("file_mb", file_mb)
    held = _Held(buffer, state, whole)
    features = known.features_of(held.spec, next_observations, images)
    tasks = _Tasks(task, held.spec)
    files.make_folder(os.path.dirname(target))
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target), prefix=".jrb-") as beside:
        folder = os.path.join(beside, "set")
        with contextlib.closing(_Writer(folder, features, tasks, fps, file_mb << 20)) as writer:
            for number, leaves in enumerate(held):
                if not next_observations:
                    known.check_chain(leaves, number)
                writer.add(leaves)
            writer.finish(robot_type)
        _sync(folder)
        files.replace(folder, target)


class _Held:
    """The episodes of a buffer as leaves of TED, `[L, ...]`.

    Attributes:
        spec: of one step, by leaf.
    """

    def __init__(self, buffer: ReplayBuffer, state: BufferState, whole: bool) -> None:
        self._buffer, self._state = buffer, state
        every = read.episodes(buffer, state)
        self._episodes = [each for each in every if not whole or (each.complete and not each.cut)]
        if not self._episodes:
            raise ValueError("write_lerobot: expected a buffer that holds episodes, got none.")
        spec = flatten(buffer.stored(state), "write_lerobot")
        self._names = known.ted_names(spec, buffer.keys)
        self.spec = {self._names[name]: leaf for name, leaf in spec.items()}
        if any(flag in self.spec for flag in known.FLAGS):
            self.spec["next/done"] = jax.ShapeDtypeStruct((), np.dtype(bool))

    def __iter__(self) -> Iterator[Leaves]:
        for group in self._groups():
            slots = np.concatenate([each.slots for each in group])
            items = flatten(read.taken(self._buffer, self._state, slots), "write_lerobot")
            found = {self._names[name]: leaf for name, leaf in items.items()}
            done = known.done_of(found)
            if done is not None:
                found["next/done"] = done
            start = 0
            for each in group:
                part = slice(start, start + len(each))
                yield {name: leaf[part] for name, leaf in found.items()}
                start += len(each)

    def _groups(self) -> Iterator[list[read.Episode]]:
        """Episodes that are read together, some megabytes if they are not longer."""
        most = _PIECE // max(pytree.nbytes(self._buffer.stored(self._state)), 1)
        group: list[read.Episode] = []
        for each in self._episodes:
            if group and sum(map(len, group)) + len(each) > most:
                yield group
                group = []
            group.append(each)
        yield group


class _Tasks:
    """Which task each step belongs to."""

    def __init__(self, task: str | Sequence[str], spec: dict[str, Any]) -> None:
        self.texts = [task] if isinstance(task, str) else list(task)
        self._is_told = not isinstance(task, str)
        if not self.texts or not all(isinstance(text, str) for text in self.texts):
            raise TypeError(f"task: expected a text, or texts, got {task!r}.")
        if len(set(self.texts)) < len(self.texts):
            raise ValueError(f"task: expected texts that differ, got {self.texts}.")
        about = spec.get("task_index")
        if self._is_told and (about is None or about.shape or about.dtype.kind not in "iu"):
            raise ValueError(
                "task: expected a leaf 'task_index', an integer for each step, that takes one of "
                f"the texts, got items with {sorted(spec)}."
            )

    def numbers(self, leaves: Leaves, steps: int) -> np.ndarray:
        """int64 `[L]`."""
        if not self._is_told:
            return np.zeros(steps, np.int64)
        found = leaves["task_index"].astype(np.int64)
        if found.min() < 0 or found.max() >= len(self.texts):
            raise ValueError(
                f"task_index: expected numbers from 0 to {len(self.texts) - 1}, got "
                f"{found.min()} to {found.max()}."
            )
        return found


class _Writer:
    """A set that is being written.

    Args:
        folder: which is made.
        features: without LeRobot's own.
        tasks: of the steps.
        fps: steps in a second.
        most: bytes of a table before the next one begins.
    """

    def __init__(
        self, folder: str, features: list[Feature], tasks: _Tasks, fps: int, most: int
    ) -> None:
        self._folder, self._tasks, self._fps, self._most = folder, tasks, fps, most
        self._features = [*features, *known.own_features()]
        self._rows: list[dict[str, Any]] = []
        self._stats: dict[str, Stats] = {}
        self._file, self._size, self._steps, self._table = -1, 0, 0, None

    def add(self, leaves: Leaves) -> None:
        """Writes an episode, one group of rows."""
        pa = extras.require("pyarrow", "datasets")
        steps = len(next(iter(leaves.values())))
        leaves = {**leaves, **self._own(leaves, steps)}
        columns = {each.name: each.column(leaves[each.leaf]) for each in self._features}
        self._write(pa.table(columns))
        stats = {each.name: stats_of(leaves[each.leaf], each.is_image) for each in self._features}
        self._rows.append(self._row(leaves["task_index"], steps, stats))
        self._stats = {name: joined(self._stats.get(name), each) for name, each in stats.items()}
        self._steps += steps

    def _own(self, leaves: Leaves, steps: int) -> Leaves:
        """The leaves that each set has."""
        frame = np.arange(steps)
        return {
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(steps, len(self._rows)),
            "index": self._steps + frame,
            "task_index": self._tasks.numbers(leaves, steps),
        }

    def _row(self, tasks: np.ndarray, steps: int, stats: dict[str, Stats]) -> dict[str, Any]:
        """What is told of an episode."""
        return {
            "episode_index": len(self._rows),
            "tasks": [self._tasks.texts[number] for number in np.unique(tasks)],
            "length": steps,
            "data/chunk_index": self._file // _CHUNK,
            "data/file_index": self._file % _CHUNK,
            "dataset_from_index": self._steps,
            "dataset_to_index": self._steps + steps,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
            **{
                f"stats/{name}/{key}": value.tolist()
                for name, each in stats.items()
                for key, value in each.items()
            },
        }

    def _write(self, table: Any) -> None:
        parquet = extras.require("pyarrow.parquet", "datasets")
        if self._table is None or self._size + table.nbytes > self._most:
            self.close()
            self._file += 1
            chunk, file = divmod(self._file, _CHUNK)
            path = self._path(_DATA.format(chunk_index=chunk, file_index=file))
            self._table, self._size = (
                parquet.ParquetWriter(path, table.schema, write_page_checksum=True),
                0,
            )
        self._table.write_table(table, row_group_size=len(table))
        self._size += table.nbytes

    def finish(self, robot_type: str | None) -> None:
        """Writes what is told of the set."""
        self.close()
        pa = extras.require("pyarrow", "datasets")
        parquet = extras.require("pyarrow.parquet", "datasets")
        episodes = self._path(_EPISODES.format(chunk_index=0, file_index=0))
        parquet.write_table(pa.Table.from_pylist(self._rows), episodes)
        parquet.write_table(_task_table(self._tasks.texts), self._path("meta/tasks.parquet"))
        stats = {
            name: {key: value.tolist() for key, value in each.items()}
            for name, each in self._stats.items()
        }
        self._json("meta/stats.json", stats)
        self._json("meta/info.json", self._info(robot_type))

    def close(self) -> None:
        """Ends the table that is being written."""
        if self._table is not None:
            self._table.close()
        self._table = None

    def _info(self, robot_type: str | None) -> dict[str, Any]:
        return {
            "codebase_version": "v3.0",
            "robot_type": robot_type,
            "total_episodes": len(self._rows),
            "total_frames": self._steps,
            "total_tasks": len(self._tasks.texts),
            "chunks_size": _CHUNK,
            "data_files_size_in_mb": max(1, self._most >> 20),
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": _DATA,
            "video_path": None,
            "features": {each.name: each.about for each in self._features},
        }

    def _json(self, name: str, about: Any) -> None:
        files.write_new(self._path(name), [json.dumps(about, indent=4).encode()])

    def _path(self, name: str) -> str:
        path = os.path.join(self._folder, name)
        files.make_folder(os.path.dirname(path))
        return path


def _task_table(texts: Sequence[str]) -> Any:
    """Tasks as pandas stores a table whose index has their texts."""
    pa = extras.require("pyarrow", "datasets")
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": of, "numpy_type": to, "metadata": None}
        for name, (of, to) in kinds.items()
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    about["pandas_version"] = "2.0.0"
    table = pa.table({"task_index": np.arange(len(texts)), "task": list(texts)})
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


def _sync(folder: str) -> None:
    """All files below are on the disk afterwards."""
    for inner, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inner, name)
            file = os.open(path, os.O_RDONLY)
            try:
                files.sync(file, path)
            finally:
                os.close(file)
        files.Folder(inner).sync()
