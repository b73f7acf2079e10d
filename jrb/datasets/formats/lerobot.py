"""The format of LeRobot: a folder with `meta/`, tables of steps in `data/`, and often `videos/`.

Version 2 has one table per episode, version 3 many episodes in a table. K episodes, T steps over
all of them.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jrb.authoring import ExpansionLimit, checks, declared_nbytes, require
from jrb.datasets.format import Source
from jrb.datasets.formats.arrays import read_json
from jrb.datasets.reading import arrow, tabular
from jrb.datasets.reading.names import check, explain_damage, natural_order, to_ted
from jrb.datasets.reading.tabular import DONE, TERMINATED, Column, DerivedColumn, Table

# Columns of every dataset with one number per step, though `info.json` gives them the shape [1].
_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_INFO = os.path.join("meta", "info.json")
_MAX_STEPS = 1 << 48  # the number of steps that an episode must stay below
_META = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
_OBJECT = 32  # bytes of a Python number
_GROUPS = ("stats/", "data/", "videos/", "meta/")

_FIELD = re.compile(r"\{(\w+)(?::0?(\d{0,2})d?)?\}")
_PATHS = {  # the default templates of paths, by version
    ("2", "data"): "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    ("2", "video"): "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ("3", "data"): "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    ("3", "video"): "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


class LeRobotMeta(NamedTuple):
    """The metadata of a dataset, read before its tables are opened."""

    info: Mapping[str, Any]  # `info.json`; its `features` describe the leaves of a step
    lengths: np.ndarray  # int64 `[K]`, the number of steps of each episode
    counts: Mapping[str, int]  # the number of rows of each table, by its path, in order
    facts: Mapping[str, np.ndarray]  # facts about each episode, arrays `[K]` by name
    tasks: Mapping[int, str]  # the texts of tasks by their numbers
    # For each feature that is a video: the file of each episode, and the seconds at which the
    # episode begins in its file, float64 `[K]`.
    videos: Mapping[str, tuple[list[str], np.ndarray]]


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
        path = os.path.join(source, _INFO) if isinstance(source, str) else ""
        if not os.path.isfile(path):
            return False
        with contextlib.suppress(ValueError, OSError):
            info = read_json(path)
            return isinstance(info, dict) and {"codebase_version", "features"} <= info.keys()
        return False

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the tables and videos as one table."""
        # Read the metadata, once until one of their files changes.
        folder = os.path.join(source, "meta")
        paths = [os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names]
        meta_limit = ExpansionLimit(folder, paths, self.max_expansion)
        read, key = lambda: _read_meta(source, meta_limit), ("lerobot", source, self.max_expansion)
        meta: LeRobotMeta = tabular.read_once(paths, key, read)
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
            columns[names[feature]] = _video_column(paths, begins, ends, times, frame, fps)
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
            columns[name] = arrow.ImageColumn(files, (name,))
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

    return DerivedColumn((len(column), *shape), column.dtype, read)


def _frame(about: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns the shape (height, width, channel) of frames; `info.json` may put channels first."""
    (first, second, last), names = about["shape"], about.get("names")
    # The names of the axes decide; without them, the axis with a usual number of channels.
    named = isinstance(names, list) and names and str(names[0]).startswith("channel")
    is_first = named or (first in (1, 3, 4) and last not in (1, 3, 4))
    return (second, last, first) if is_first else (first, second, last)


def _video_column(
    videos: Sequence[str],
    begins: np.ndarray,
    ends: np.ndarray,
    times: Column,
    shape: tuple[int, int, int],
    fps: float,
) -> DerivedColumn:
    """Returns a column of uint8 RGB frames from videos, decoded when they are read.

    Episode k begins at `begins[k]` seconds in the file `videos[k]`; `times`, `[T]`, are the seconds
    of each step after the begin of its episode. `ends` is as in `Table`.
    """

    def read(start: int, stop: int) -> np.ndarray:
        frames, row = np.empty((stop - start, *shape), np.uint8), start
        while row < stop:
            episode = int(np.searchsorted(ends, row, side="right"))
            # Decode the frames of one episode at a time, as each has a file and a begin of its own.
            end, path = min(stop, int(ends[episode])), videos[episode]
            at = times[row:end].astype(np.float64) + begins[episode]
            for frame in _nearest_frames(path, at, 0.5 / fps):
                check(frame.shape == shape, path, f"frames {list(shape)}", list(frame.shape))
                frames[row - start] = frame
                row += 1
        return frames

    return DerivedColumn((int(ends[-1]), *shape), np.dtype(np.uint8), read)


def _nearest_frames(path: str, times: np.ndarray, tolerance: float) -> Iterator[np.ndarray]:
    """Yields the frames nearest to ascending times in seconds; raises if one is too far."""
    av = require("av", "video")
    damage = (av.error.FFmpegError, IndexError)
    with explain_damage(path, "a whole video", damage), av.open(path) as container:
        stream = container.streams.video[0]
        # Seeking finds the last key frame before the first time; decoding begins there.
        begin = max(0.0, times[0] - tolerance) / stream.time_base
        container.seek(int(begin) + (stream.start_time or 0), stream=stream)
        frames: Iterator[Any] = iter(container.decode(stream))
        frame, following = next(frames, None), next(frames, None)
        # Go on to the next frame as long as it is no farther from the time than this one.
        for time in times.tolist():
            while frame and following and abs(following.time - time) <= abs(frame.time - time):
                frame, following = following, next(frames, None)
            if frame is None or abs(frame.time - time) > tolerance:
                raise ValueError(f"{path}: expected a frame at {time:.3f} s, got none so near.")
            yield frame.to_ndarray(format="rgb24")


# The metadata.


def _read_meta(root: str, limit: ExpansionLimit) -> LeRobotMeta:
    """Reads the metadata of a dataset."""
    info, version = _read_info(root)
    path = os.path.join(root, "meta", "episodes.jsonl" if version == "2" else "episodes")
    lines = _read_episodes(root, info, path, limit)
    lengths, chunk_size = [line["length"] for line in lines], info.get("chunks_size", 1000)

    def paths(kind: str, group: str, **fields: str) -> list[str]:
        """Returns the path of each episode's table or video."""
        template, files = info.get(f"{kind}_path") or _PATHS[version, kind], list[str]()
        for number, line in enumerate(lines):
            # Version 2 counts episodes in chunks; version 3 lists the file of each.
            numbers = {"episode_chunk": number // chunk_size, "episode_index": number}
            if version == "3":
                numbers = {n: line.get(f"{group}/{n}") for n in ("chunk_index", "file_index")}
            are_right = all(type(each) is int and each >= 0 for each in numbers.values())
            expected = f"numbers in '{group}/chunk_index' and '{group}/file_index'"
            check(are_right, f"{path}: episode {number}", expected, [*numbers.values()])
            files.append(_path_in(root, template, **numbers, **fields))
        return files

    # Count the rows of each table, whose episodes must have consecutive numbers.
    files = paths("data", "data")
    counts = dict.fromkeys(files, 0)
    runs = len([*itertools.groupby(files)])
    check(runs == len(counts), path, "the episodes of a file side by side", "them apart")
    for file, length in zip(files, lengths, strict=True):
        counts[file] += length
    # Find the video of each episode, and where in it the episode begins.
    videos = dict[str, tuple[list[str], np.ndarray]]()
    for key in [name for name, about in info["features"].items() if about["dtype"] == "video"]:
        name = f"videos/{key}/from_timestamp"
        begins = [0.0 if version == "2" else line.get(name) for line in lines]
        check({*map(type, begins)} <= {int, float}, f"{path}: '{name}'", "numbers", begins)
        videos[key] = paths("video", f"videos/{key}", video_key=key), np.array(begins, np.float64)
    table = os.path.join(root, "meta", "tasks.jsonl" if version == "2" else "tasks.parquet")
    about = _facts(lines), _read_tasks(table, limit), videos
    return LeRobotMeta(info, np.array(lengths, np.int64), counts, *about)


def _read_tasks(path: str, limit: ExpansionLimit) -> dict[int, str]:
    """Returns the texts of the tasks by their numbers, sorted."""
    tasks = dict[int, str]()
    for line in _read_rows(path, limit):
        # The text may be in a column of any name, as pandas stores it as an index.
        text = next((value for value in line.values() if isinstance(value, str)), None)
        if isinstance(line.get("task_index"), int) and text is not None:
            tasks[line["task_index"]] = text
    return dict(sorted(tasks.items()))


def _read_episodes(
    root: str, info: Mapping[str, Any], path: str, limit: ExpansionLimit
) -> list[dict[str, Any]]:
    """Returns the entries of all episodes in order; raises for gaps and wrong totals."""
    lines = _read_rows(path, limit)
    is_number = all(type(line.get("episode_index")) is int for line in lines)
    check(is_number, path, "a number 'episode_index' for each episode", "others")
    # The numbers must be 0, 1, 2 and so on, in any order.
    missing = sorted({*range(len(lines))} - {line["episode_index"] for line in lines})
    expected = f"a table of episodes from 0 to {len(lines) - 1}"
    check(lines and not missing, path, expected, f"none with the numbers {missing[:5]}")
    lines = sorted(lines, key=lambda line: line["episode_index"])
    for number, line in enumerate(lines):
        length = line.get("length")
        is_right = type(length) is int and 0 < length < _MAX_STEPS
        check(is_right, f"{path}: episode {number}: length", "a number above 0", repr(length))
    # Compare the totals that `info.json` declares.
    totals = {"episodes": len(lines), "frames": sum(line["length"] for line in lines)}
    for name, total in totals.items():
        where, declared = f"{root}: {_INFO}: total_{name}", info.get(f"total_{name}", total)
        check(declared == total, where, f"{total}, as listed", repr(declared))
    return lines


def _read_info(root: str) -> tuple[dict[str, Any], str]:
    """Reads and checks `info.json`; returns it and the major version, "2" or "3"."""
    path = os.path.join(root, _INFO)
    check(os.path.isfile(path), root, _INFO, "none")
    info = read_json(path)
    has_version = isinstance(info, dict) and "codebase_version" in info
    check(has_version, path, "'codebase_version'", f"{info!r:.80}")
    version, fps = info["codebase_version"], info.get("fps")
    features: Any = info.get("features", None)
    is_fps = isinstance(fps, int | float) and not isinstance(fps, bool) and fps > 0
    check(is_fps, f"{path}: fps", "a number above 0", repr(fps))
    # Each feature is a dict with the name of a dtype and the sizes of a shape.
    abouts = list(features.values()) if isinstance(features, dict) else [None]
    are_right = all(
        isinstance(about, dict)
        and isinstance(about.get("dtype"), str)
        and isinstance(about.get("shape"), list)
        and all(type(size) is int and size >= 0 for size in about["shape"])
        for about in abouts
    )
    where = f"{path}: features"
    check(are_right, where, "dicts with 'dtype' and 'shape'", f"{features!r:.200}")
    for name in features:
        is_name = "/" not in name and "\0" not in name and name.strip(".")
        check(is_name, where, "names without a slash", repr(name))
    match = re.fullmatch(r"v?([23])\.\d+", str(version))
    got = f"{version!r}. Convert it with LeRobot"
    check(match, f"{path}: codebase_version", "v2 or v3", got)
    size = info.get("chunks_size", 1000)
    is_size = type(size) is int and size > 0
    check(is_size, f"{path}: chunks_size", "a number above 0", repr(size))
    return info, match[1] if match else ""


def _path_in(root: str, template: Any, **fields: Any) -> str:
    """Returns the path from a template in `info.json`; raises if it leads out of the folder."""
    # Fill the template with numbers and names, and keep the result within the folder.
    where = f"{root}: {_INFO}"
    check(isinstance(template, str), where, "the template of a path", repr(template))
    names = {match[1] for match in _FIELD.finditer(template)}
    check(names <= fields.keys(), where, f"a path of {sorted(fields)}", repr(template))

    def fill_field(match: re.Match[str]) -> str:
        value = fields[match[1]]
        return f"{value:0{match[2] or 0}d}" if isinstance(value, int) else value

    # Not `str.format`: it would read attributes, as in `{video_key.__class__}`.
    name = _FIELD.sub(fill_field, template)
    parts = re.split(r"[/\\]", name)
    is_inside = {"", ".", ".."}.isdisjoint(parts) and {*"{}\0:"}.isdisjoint(name)
    check(is_inside, where, "the template of a path within the folder", repr(template))
    return os.path.join(root, *parts)


def _facts(lines: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Returns the entries of episodes, arrays `[K]`; of objects, lists as tuples, if no numbers."""
    facts: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        # Statistics and places in files are no facts about an episode.
        if name not in _META and not name.startswith(_GROUPS):
            entries = (line.get(name) for line in lines)
            values = [tuple(entry) if isinstance(entry, list) else entry for entry in entries]
            is_number = all(isinstance(value, bool | int | float) for value in values)
            facts[name] = np.array(values) if is_number else np.fromiter(values, object)
    return facts


def _read_rows(path: str, limit: ExpansionLimit) -> list[dict[str, Any]]:
    """Reads the rows, but no statistics, of lines of JSON, a table, or tables in subfolders."""
    rows = list[dict[str, Any]]()
    # Version 2 has lines of JSON, version 3 tables.
    if path.endswith(".jsonl"):
        if os.path.isfile(path):
            damage = (ValueError, RecursionError)
            with (
                explain_damage(path, "lines of JSON", damage),
                open(path, encoding="utf-8") as file,
            ):
                rows = [json.loads(line) for line in file if line.strip()]
        check(all(isinstance(row, dict) for row in rows), path, "a dict in each line", "others")
        return rows
    parquet = require("pyarrow.parquet", "datasets")
    chunks = sorted(os.listdir(path), key=natural_order) if os.path.isdir(path) else [""]
    folders = [os.path.join(path, chunk) if chunk else path for chunk in chunks]
    for table in [each for folder in folders for each in arrow.table_paths(folder)]:
        with arrow.explain_damage(table):
            file = parquet.ParquetFile(table)
            names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
            # Python objects need more memory than the file's numbers.
            limit.add(file.metadata.num_rows * len(names) * _OBJECT)
            rows += file.read(names).to_pylist()
    return rows
