"""LeRobot's tables of a set that is being written, and what its `meta/` tells of them.

K episodes, L steps of one.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrb._base import extras
from jrb._store import files
from jrb.datasets.writing.lerobot.features import Feature, own_features
from jrb.datasets.writing.lerobot.stats import Stats, joined, stats_of
from jrb.layouts.names import Leaves

_CHUNK = 1000  # files in a folder
_PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_DATA, _EPISODES = "data/" + _PLACE, "meta/episodes/" + _PLACE


class Tasks:
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


class Tables:
    """The tables.

    Args:
        folder: which is made.
        features: without LeRobot's own.
        tasks: of the steps.
        fps: steps in a second.
        most: bytes of a table before the next one begins.
    """

    def __init__(
        self, folder: str, features: list[Feature], tasks: Tasks, fps: int, most: int
    ) -> None:
        self._folder, self._tasks, self._fps, self._most = folder, tasks, fps, most
        self._features = [*features, *own_features()]
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
