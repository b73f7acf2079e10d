"""LeRobot: a folder with `meta/`, tables of steps in `data/`, and perhaps `videos/`.

Version 2 has a table for each episode, version 3 many episodes in one. K episodes, T steps over all
of them.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from jrb.authoring import ExpansionLimit, checks, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.formats import lerobot_meta
from jrb.datasets.formats.lerobot_meta import LeRobotMeta
from jrb.datasets.reading import arrow, images
from jrb.datasets.reading.columns import (
    DONE,
    TERMINATED,
    TRUNCATED,
    Column,
    DerivedColumn,
    Table,
    TableFormat,
    combined_flags,
    flag_column,
)
from jrb.datasets.reading.mapping import to_ted
from jrb.datasets.reading.stat_cache import StatCache

# Columns that each dataset has: a number for each step, though LeRobot calls their shape [1].
_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_FLAGS = (DONE, TERMINATED, TRUNCATED)


@dataclasses.dataclass(frozen=True)
class LeRobot(TableFormat):
    """Datasets of LeRobot, versions 2 and 3.

    Images in tables are decoded; frames of videos too where `av` is installed. Many datasets have
    no rewards, and nothing that tells how episodes ended.

    Attributes:
        done: the meaning of `next.done` where there is no `next.terminated`: "terminated", as
            LeRobot itself takes it, or "truncated".
        videos: False to leave out videos.
    """

    name: ClassVar[str] = "lerobot"
    looks_for: ClassVar[str] = "a folder with LeRobot's meta/info.json"
    own_files: ClassVar[str] = (
        r"meta/((info|stats)\.json|\w+\.(jsonl|parquet)|episodes/.+\.parquet)|"
        r"(data|videos|images)/.+\.(parquet|mp4|png|jpe?g)"
    )

    done: str = "terminated"
    videos: bool = True

    def __post_init__(self) -> None:
        checks.choice("done", self.done, ("terminated", "truncated"))

    def matches(self, source: Source) -> bool:
        """Returns whether `meta/info.json` is there, with a version and features."""
        return lerobot_meta.is_dataset(source)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the tables and videos."""
        meta = _metas.get(lerobot_meta.stamps(source), lambda: lerobot_meta.read(source))
        files, ends = arrow.ArrowFiles(meta.files, meta.counts), np.cumsum(meta.lengths)
        own = {"episode_index": "episode_index"} if "episode_index" in meta.features else {}
        names = to_ted(meta.features, own, source)
        features, notes = _columns(files, meta)
        columns = {names[name]: column for name, column in features.items()}
        limit = ExpansionLimit(source, meta.files, self.max_expansion)
        limit.add(declared_nbytes(columns))
        for feature in meta.videos:
            reason = self._why_left_out(meta, feature, columns)
            if reason is None:
                columns[names[feature]] = _video_column(meta, feature, columns["timestamp"])
                how = "are decoded from a video, which keeps them inexactly"
                notes.append(f"The frames {feature} {how}.")
            else:
                notes.append(f"The video {feature} is left out: {reason}.")
        flags = {
            name: flag_column(columns.pop(name), name, source) for name in _FLAGS if name in columns
        }
        columns |= self._ends(flags, int(ends[-1]))
        metadata = {name: value for name, value in meta.info.items() if not name.endswith("_path")}
        metadata["tasks"] = meta.tasks
        yield Table(columns, ends, meta.facts, metadata, (*notes, *self._notes(flags)))

    def _why_left_out(
        self, meta: LeRobotMeta, feature: str, columns: Mapping[str, Column]
    ) -> str | None:
        """Returns why frames of a video cannot be read; None if they can."""
        about, (paths, _) = meta.features[feature], meta.videos[feature]
        missing = next((path for path in dict.fromkeys(paths) if not os.path.isfile(path)), None)
        info = about.get("info")
        entries = [about, info if isinstance(info, dict) else {}]
        depth = [entry.get(n) for entry in entries for n in ("is_depth_map", "video.is_depth_map")]
        reasons = {
            "videos=False": not self.videos,
            "av is not installed": importlib.util.find_spec("av") is None,
            f"there is no {missing}": missing is not None,
            "it is of depths, which are coded in another way": any(depth),
            "there is no column 'timestamp'": "timestamp" not in columns,
            f"its shape is {about['shape']}": len(about["shape"]) != 3,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _ends(self, flags: Mapping[str, DerivedColumn], steps: int) -> dict[str, Column]:
        """Returns columns of how episodes ended, computed from the flags when they are read."""

        def combined(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            read = {name: flag[start:stop] for name, flag in flags.items()}
            if TERMINATED not in read and self.done == "truncated":
                read[TERMINATED] = np.zeros(stop - start, bool)
            return combined_flags(stop - start, *map(read.get, _FLAGS))

        column = lambda which: DerivedColumn(
            (steps,), np.dtype(bool), lambda start, stop: combined(start, stop)[which]
        )
        return {TERMINATED: column(0), TRUNCATED: column(1)}

    def _notes(self, flags: Mapping[str, Column]) -> tuple[str, ...]:
        if not flags:
            return ("Nothing tells how episodes ended: all are taken for truncated.",)
        if DONE in flags and TERMINATED not in flags:
            other = ", unless they are truncated" * (TRUNCATED in flags)
            return (f"Steps that are done (next.done) are taken for {self.done}{other} (done=).",)
        return ()


_metas: StatCache[LeRobotMeta] = StatCache()


def _columns(files: arrow.ArrowFiles, meta: LeRobotMeta) -> tuple[dict[str, Column], list[str]]:
    """Returns the columns of features in tables, and notes on those that are left out."""
    present = files.schema.names
    numeric, _ = arrow.numeric_leaves(files.schema)
    leaves = {leaf.path[0]: leaf for leaf in numeric if len(leaf.path) == 1}
    columns, others = dict[str, Column](), list[str]()
    for name, about in meta.features.items():
        if about["dtype"] == "video":
            continue
        if name not in present:
            raise ValueError(
                f"{files.path}: expected a column '{name}', as in info.json, got {sorted(present)}."
            )
        if about["dtype"] == "image":
            columns[name] = images.ImageColumn(files, name)
        elif name in leaves:
            columns[name] = _numbers(files, meta, leaves[name])
        else:
            others.append(f"{name} ({about['dtype']})")
    notes = [*arrow.left_out(others)]
    if strange := ", ".join(name for name in present if name not in meta.features):
        notes.append(f"Columns that are not in info.json are left out: {strange}.")
    return columns, notes


def _numbers(files: arrow.ArrowFiles, meta: LeRobotMeta, leaf: arrow.ArrowLeaf) -> Column:
    """Returns a column in the shape that `info.json` says."""
    column, name = arrow.ArrowColumn(files, leaf), leaf.name
    is_scalar = not column.shape[1:] and (name in _OWN or name.startswith("next."))
    shape = () if is_scalar else tuple(meta.features[name]["shape"])
    if math.prod(shape) != math.prod(column.shape[1:]):
        raise ValueError(
            f"{files.path}: column '{name}': expected {list(shape)} for each step, as in "
            f"info.json, got {list(column.shape[1:])}."
        )

    def read(start: int, stop: int) -> np.ndarray:
        values = column[start:stop].reshape(stop - start, *shape)
        if name == "episode_index" and not shape:
            _check_episodes(files.path, start, values, meta.lengths)
        return values

    return DerivedColumn((len(column), *shape), column.dtype, read)


def _check_episodes(path: str, start: int, numbers: np.ndarray, lengths: np.ndarray) -> None:
    """Refuses rows of other episodes than the lengths tell."""
    rows = np.arange(start, start + len(numbers))
    expected = np.searchsorted(np.cumsum(lengths), rows, side="right")
    wrong = np.flatnonzero(numbers != expected)
    if len(wrong):
        raise ValueError(
            f"{path}: row {rows[wrong[0]]}: expected a step of episode {expected[wrong[0]]}, as "
            f"lengths tell, got one of {numbers[wrong[0]]}."
        )


def _video_column(meta: LeRobotMeta, feature: str, times: Column) -> Column:
    """Returns the frames of a feature."""
    about, (paths, begins) = meta.features[feature], meta.videos[feature]
    shape = images.channels_last(about["shape"], about.get("names"))
    ends = np.cumsum(meta.lengths)
    return images.VideoColumn(paths, begins, ends, times, shape, meta.info["fps"])
