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
from typing import Any, ClassVar

import numpy as np

from jrb._util import checks, expansion
from jrb.datasets.format import Source
from jrb.datasets.formats.lerobot import meta as lerobot_meta
from jrb.datasets.formats.lerobot.meta import Meta
from jrb.datasets.reading import arrow, arrow_columns, images
from jrb.datasets.reading.derived import Flag, Flags, Numbered, Shaped
from jrb.datasets.reading.flat import Column, Flat, Table
from jrb.datasets.reading.mapping import to_ted
from jrb.datasets.reading.stat_cache import Remembered

OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns that each set has: a number for each step, though LeRobot calls their shape [1]."""

_FLAGS = ("next/done", "next/terminated", "next/truncated")


@dataclasses.dataclass(frozen=True)
class LeRobot(Flat):
    """Sets of LeRobot, versions 2 and 3.

    Images in tables are decoded; frames of videos too where `av` is installed. Many sets have no
    rewards, and nothing that tells how episodes ended.

    Attributes:
        done: what `next.done` says where there is no `next.terminated`: "terminated", as LeRobot
            itself takes it, or "truncated".
        videos: whether frames of videos are decoded; else they are left out.
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
        """Whether `meta/info.json` is there, with a version and features."""
        return lerobot_meta.is_set(source)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """The columns, which read what they are asked for."""
        meta = _known.get(lerobot_meta.stamps(source), lambda: lerobot_meta.read(source))
        tables = _Tables(source, meta)
        limit = expansion.Limit(source, meta.files, self.max_expansion)
        limit.add(expansion.nbytes(tables.columns))
        videos, lacking = self._videos(meta, tables.columns)
        columns = tables.columns | {tables.names[name]: each for name, each in videos.items()}
        flags = {name: Flag(columns.pop(name), name, source) for name in _FLAGS if name in columns}
        about = {name: value for name, value in meta.info.items() if not name.endswith("_path")}
        about["tasks"] = meta.tasks
        notes = (*tables.notes(), *lacking, *self._notes(flags))
        columns |= self._ends(flags, int(tables.ends[-1]))
        yield Table(columns, tables.ends, meta.facts, about, notes)

    def _videos(
        self, meta: Meta, columns: Mapping[str, Column]
    ) -> tuple[dict[str, Column], tuple[str, ...]]:
        """The frames of videos by feature; and why others are left out."""
        found: dict[str, Column] = {}
        notes = []
        for name, (paths, begins) in meta.videos.items():
            about = meta.features[name]
            why = self._why_not(about, paths, columns)
            if why is None:
                shape = images.by_channel(about["shape"], about.get("names"))
                ends, times = np.cumsum(meta.lengths), columns["timestamp"]
                found[name] = images.Videos(paths, begins, ends, times, shape, meta.info["fps"])
            notes.append(
                f"The video {name} is left out: {why}."
                if why
                else f"The frames {name} are decoded from a video, which keeps them inexactly."
            )
        return found, tuple(notes)

    def _why_not(
        self, about: Mapping[str, Any], paths: list[str], columns: Mapping[str, Column]
    ) -> str | None:
        """Why frames of a video cannot be there; None if they can."""
        lacking = next((path for path in dict.fromkeys(paths) if not os.path.isfile(path)), None)
        reasons = {
            "videos=False": not self.videos,
            "av is not installed": importlib.util.find_spec("av") is None,
            f"there is no {lacking}": lacking is not None,
            "it is of depths, which are coded in another way": _is_depth(about),
            "there is no column 'timestamp'": "timestamp" not in columns,
            f"its shape is {about['shape']}": len(about["shape"]) != 3,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _ends(self, flags: Mapping[str, Flag], steps: int) -> dict[str, Column]:
        """How episodes ended."""
        nothing = Flags(steps)
        done, terminated, truncated = (flags.get(name, nothing) for name in _FLAGS)
        if "next/terminated" not in flags and self.done == "terminated":
            terminated = Flags(steps, lambda done, over: done & ~over, (done, truncated))
        return {
            "next/terminated": Flags(steps, np.array, (terminated,)),
            "next/truncated": Flags(steps, _truncated, (done, terminated, truncated)),
        }

    def _notes(self, flags: Mapping[str, Flag]) -> tuple[str, ...]:
        if not flags:
            return ("Nothing tells how episodes ended: all are taken for truncated.",)
        if "next/done" in flags and "next/terminated" not in flags:
            other = ", unless they are truncated" * ("next/truncated" in flags)
            return (f"Steps that are done (next.done) are taken for {self.done}{other} (done=).",)
        return ()


def _truncated(done: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    return truncated | (done & ~terminated)


def _is_depth(about: Mapping[str, Any]) -> bool:
    info = about.get("info")
    told = [about, info if isinstance(info, dict) else {}]
    return any(each.get(name) for each in told for name in ("is_depth_map", "video.is_depth_map"))


_known: Remembered[Meta] = Remembered()


class _Tables:
    """The tables of a set.

    Attributes:
        ends: int64 `[K]`, the number of steps up to the end of each episode.
        names: from features to leaves of TED.
        columns: by leaf, without those of videos.
    """

    def __init__(self, source: str, meta: Meta) -> None:
        self._meta, self._files = meta, arrow.Files(meta.files, meta.counts)
        self.ends, self._schema = np.cumsum(meta.lengths), self._files.schema.names
        leaves, _ = arrow_columns.leaves(self._files.schema)
        self._leaves = {leaf.path[0]: leaf for leaf in leaves if len(leaf.path) == 1}
        own = {"episode_index": "episode_index"} if "episode_index" in meta.features else {}
        self.names = to_ted(meta.features, own, source)
        self.columns: dict[str, Column] = {
            self.names[name]: self._column(name, about["dtype"])
            for name, about in meta.features.items()
            if about["dtype"] != "video" and not self._is_left_out(name)
        }

    def notes(self) -> tuple[str, ...]:
        """What is left out."""
        features = self._meta.features
        others = [
            f"{name} ({about['dtype']})"
            for name, about in features.items()
            if about["dtype"] != "video" and self._is_left_out(name)
        ]
        strange = ", ".join(name for name in self._schema if name not in features)
        told = f"Columns that are not in info.json are left out: {strange}."
        return (*arrow_columns.left_out(others), *[told] * bool(strange))

    def _is_left_out(self, name: str) -> bool:
        """Whether a feature is neither of numbers nor of images."""
        if name not in self._schema:
            raise ValueError(
                f"{self._files.path}: expected a column '{name}', as in info.json, got "
                f"{sorted(self._schema)}."
            )
        return self._meta.features[name]["dtype"] != "image" and name not in self._leaves

    def _column(self, name: str, kind: str) -> Column:
        if kind == "image":
            return images.Images(self._files, name)
        column = arrow_columns.Column(self._files, self._leaves[name])
        shape = self._shape(name, column)
        if math.prod(shape) != math.prod(column.shape[1:]):
            raise ValueError(
                f"{self._files.path}: column '{name}': expected {list(shape)} for each step, as in "
                f"info.json, got {list(column.shape[1:])}."
            )
        shaped = Shaped(column, shape)
        is_number = name == "episode_index" and not shape
        return Numbered(shaped, self.ends, self._files.path) if is_number else shaped

    def _shape(self, name: str, column: Column) -> tuple[int, ...]:
        """Of a step. LeRobot has no scalars: it says [1], and stores numbers."""
        is_scalar = not column.shape[1:] and (name in OWN or name.startswith("next."))
        return () if is_scalar else tuple(self._meta.features[name]["shape"])
