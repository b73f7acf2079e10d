"""The format of LeRobot: a folder with `meta/`, tables of steps in `data/`, and often `videos/`.

Version 2 has one table per episode, version 3 many episodes in a table. K episodes, T steps over
all of them.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from jrb.authoring import ExpansionLimit, checks, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.formats import lerobot_meta
from jrb.datasets.formats.arrays import read_json
from jrb.datasets.formats.lerobot_meta import LeRobotMeta
from jrb.datasets.reading import arrow, images, tabular
from jrb.datasets.reading.names import check, to_ted
from jrb.datasets.reading.tabular import DONE, TERMINATED, Column, Table

# Columns of every dataset with one number per step, though `info.json` gives them the shape [1].
_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclasses.dataclass(frozen=True)
class LeRobot(tabular.TableFormat):
    """Datasets of LeRobot, versions 2 and 3.

    Images in tables are decoded, and frames of videos too if `av` is installed. Many datasets have
    no rewards, and no flags that tell how episodes ended.

    Attributes:
        done: the meaning of `next.done` if there is no `next.terminated`: "terminated", as in
            LeRobot itself, or "truncated".
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
        """Returns True if the folder has a `meta/info.json` with a version and features."""
        path = os.path.join(source, lerobot_meta.INFO) if isinstance(source, str) else ""
        if not os.path.isfile(path):
            return False
        with contextlib.suppress(ValueError, OSError):
            info = read_json(path)
            return isinstance(info, dict) and {"codebase_version", "features"} <= info.keys()
        return False

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the tables and videos as one table."""
        meta = lerobot_meta.read(source, self.max_expansion)
        files = arrow.ArrowFiles([*meta.counts], [*meta.counts.values()])
        features = meta.info["features"]
        own = {"episode_index": "episode_index"} if "episode_index" in features else {}
        names, ends = to_ted(features, own, source), np.cumsum(meta.lengths)
        # Take the columns of the tables, and check the memory that they declare.
        in_tables, notes = _columns(files, meta)
        columns = {names[name]: column for name, column in in_tables.items()}
        limit = ExpansionLimit(source, files.paths, self.max_expansion)
        limit.add(declared_nbytes(columns))
        # Add the frames of videos, or a note on why they are left out.
        for feature, (paths, begins) in meta.videos.items():
            reason = self._why_left_out(features[feature], paths, columns)
            if reason is not None:
                notes.append(f"The video {feature} is left out: {reason}.")
                continue
            times, frame, fps = columns["timestamp"], _frame(features[feature]), meta.info["fps"]
            columns[names[feature]] = images.video_column(paths, begins, ends, times, frame, fps)
            how = "are decoded from a video, which keeps them inexactly"
            notes.append(f"The frames {feature} {how}.")
        # With a flag of termination that is never set, all that is done counts as truncated.
        if self.done == "truncated" and DONE in columns:
            columns.setdefault(TERMINATED, np.zeros(int(ends[-1]), bool))
        notes += tabular.flag_notes(columns, done="'next.done', see done=")
        columns = tabular.with_flags(columns, ends, source)
        # Templates of paths do not describe the data.
        metadata = {name: value for name, value in meta.info.items() if not name.endswith("_path")}
        yield Table(columns, ends, meta.facts, metadata | {"tasks": meta.tasks}, tuple(notes))

    def _why_left_out(
        self, about: Mapping[str, Any], paths: list[str], columns: Mapping[str, Column]
    ) -> str | None:
        """Returns the reason why a video cannot be read; None if it can."""
        missing = (path for path in dict.fromkeys(paths) if not os.path.isfile(path))
        missing_path = next(missing, None)
        # Depth maps may be marked in the feature or in its `info`.
        info = about.get("info")
        entries = [about, info if isinstance(info, dict) else {}]
        depth = [entry.get(n) for entry in entries for n in ("is_depth_map", "video.is_depth_map")]
        reasons = {
            "videos=False": not self.videos,
            "av is not installed": importlib.util.find_spec("av") is None,
            f"there is no {missing_path}": missing_path is not None,
            "it is of depths, which are coded in another way": any(depth),
            "there is no column 'timestamp'": "timestamp" not in columns,
            f"its shape is {about['shape']}": len(about["shape"]) != 3,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def _columns(files: arrow.ArrowFiles, meta: LeRobotMeta) -> tuple[dict[str, Column], list[str]]:
    """Returns the tables' columns by feature, and notes on columns that are left out."""
    present, (numbers, _, _) = files.schema.names, arrow.fields_by_type(files.schema)
    columns, others = dict[str, Column](), list[tuple[str, str]]()
    for name, about in meta.info["features"].items():
        if about["dtype"] == "video":
            continue
        expected = f"a column '{name}', as in info.json"
        check(name in present, files.paths[0], expected, sorted(present))
        # Images are decoded, numbers brought to their shapes, and all else is left out.
        if about["dtype"] == "image":
            columns[name] = images.ImageColumn(files, (name,))
        elif numbers.get(name) == (name,):
            columns[name] = _number_column(files, meta, name)
        else:
            others.append((name, about["dtype"]))
    notes = [*arrow.note_left_out(others)]
    if strange := ", ".join(name for name in present if name not in meta.info["features"]):
        notes.append(f"Columns that are not in info.json are left out: {strange}.")
    return columns, notes


def _number_column(files: arrow.ArrowFiles, meta: LeRobotMeta, name: str) -> Column:
    """Returns a column with the shape that `info.json` gives its feature."""
    column, path = arrow.ArrowColumn(files, (name,)), files.paths[0]
    is_scalar = not column.shape[1:] and (name in _OWN or name.startswith("next."))
    shape = () if is_scalar else tuple(meta.info["features"][name]["shape"])
    row = list(column.shape[1:])
    expected = f"{list(shape)} for each step, as in info.json"
    check(math.prod(shape) == math.prod(row), f"{path}: column '{name}'", expected, row)
    stops = np.cumsum(meta.lengths)

    def read(start: int, stop: int) -> np.ndarray:
        values = column[start:stop].reshape(stop - start, *shape)
        # The column must agree with the lengths in `meta/`, which give the bounds of episodes.
        if name == "episode_index" and not shape:
            rows = np.arange(start, stop)
            episodes = np.searchsorted(stops, rows, side="right")
            wrong = np.flatnonzero(values != episodes)
            for row in wrong[:1]:
                expected = f"a step of episode {episodes[row]}, as lengths tell"
                check(False, f"{path}: row {rows[row]}", expected, f"one of {values[row]}")
        return values

    return tabular.DerivedColumn((len(column), *shape), column.dtype, read)


def _frame(about: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the shape (height, width, channel) of frames; `info.json` may put channels first."""
    (first, second, last), names = about["shape"], about.get("names")
    # The names of the axes decide; without them, the axis with a usual number of channels.
    named = isinstance(names, list) and names and str(names[0]).startswith("channel")
    is_first = named or (first in (1, 3, 4) and last not in (1, 3, 4))
    return (second, last, first) if is_first else (first, second, last)
