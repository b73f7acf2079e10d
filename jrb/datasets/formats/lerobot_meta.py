"""The metadata of LeRobot's datasets, `meta/` in its versions 2 and 3.

K episodes.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.datasets.formats.arrays import read_json
from jrb.datasets.reading import arrow
from jrb.datasets.reading.columns import cached
from jrb.datasets.reading.names import natural_order

_INFO = os.path.join("meta", "info.json")
_MAX_STEPS = 1 << 48  # of one episode
_OWN = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")
_GROUPS = ("stats/", "data/", "videos/", "meta/")

_FIELD = re.compile(r"\{(\w+)(?::0?(\d{0,2})d?)?\}")
_PATHS = {  # of tables and of videos, by version
    "2": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    "3": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class LeRobotMeta:
    """The metadata of a dataset, read before its tables are opened.

    Attributes:
        info: `info.json`.
        lengths: int64 `[K]`, the steps of each episode.
        counts: the number of rows of each table, by its path, in order.
        facts: arrays `[K]` by name.
        tasks: texts by number.
        videos: for each feature that is a video, the files of all episodes, and float64 `[K]`, the
            time in seconds at which each begins in its file.
    """

    info: Mapping[str, Any]
    lengths: np.ndarray
    counts: Mapping[str, int]
    facts: Mapping[str, np.ndarray]
    tasks: Mapping[int, str]
    videos: Mapping[str, tuple[list[str], np.ndarray]]

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The description of each leaf of a step, by name."""
        return self.info["features"]


def is_dataset(path: object) -> bool:
    """Returns True if a folder has an `info.json` of LeRobot's."""
    if not isinstance(path, str) or not os.path.isfile(os.path.join(path, _INFO)):
        return False
    try:
        info = read_json(os.path.join(path, _INFO))
    except (ValueError, OSError):
        return False
    return isinstance(info, dict) and {"codebase_version", "features"} <= info.keys()


def read(root: str) -> LeRobotMeta:
    """Reads the metadata of a dataset, once as long as they stay the same.

    Raises:
        ValueError: it is of another version, something is missing, or does not fit together.
    """
    walk = os.walk(os.path.join(root, "meta"))
    files = [os.path.join(folder, name) for folder, _, names in walk for name in names]
    return cached(files, ("lerobot", root), lambda: _read(root))


def _read(root: str) -> LeRobotMeta:
    info, version = _info(root)
    path = os.path.join(root, "meta", "episodes.jsonl" if version == "2" else "episodes")
    lines = _rows(path)
    numbers = [line.get("episode_index") for line in lines]
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{path}: expected a number 'episode_index' for each episode.")
    missing = sorted({*range(len(lines))} - {*numbers})
    if missing or not lines:
        raise ValueError(
            f"{path}: expected a table of episodes from 0 to {len(lines) - 1}, got none with the "
            f"numbers {missing[:5]}."
        )
    lines = sorted(lines, key=lambda line: line["episode_index"])
    for number, line in enumerate(lines):
        length = line.get("length")
        if type(length) is not int or not 0 < length < _MAX_STEPS:
            raise ValueError(
                f"{path}: episode {number}: length: expected a number above 0, got {length!r}."
            )
    lengths = np.array([line["length"] for line in lines], np.int64)
    stops = np.cumsum(lengths)
    for name, rows in (("dataset_from_index", stops - lengths), ("dataset_to_index", stops)):
        for number, (line, row) in enumerate(zip(lines, rows.tolist(), strict=True)):
            if line.get(name, row) != row:
                raise ValueError(
                    f"{path}: episode {number}: {name}: expected {row}, as lengths tell, got "
                    f"{line[name]!r}."
                )
    for name, total in (("episodes", len(lengths)), ("frames", int(lengths.sum()))):
        if (declared := info.get(f"total_{name}", total)) != total:
            raise ValueError(
                f"{root}: {_INFO}: total_{name}: expected {total}, as listed, got {declared!r}."
            )
    paths = [
        info.get(f"{kind}_path") or _PATHS[version][kind == "video"] for kind in ("data", "video")
    ]
    fields = _file_fields(path, lines, version, info, "data")
    files = [_path_in(root, paths[0], **each) for each in fields]
    counts = dict.fromkeys(files, 0)
    if 1 + sum(one != other for one, other in itertools.pairwise(files)) != len(counts):
        raise ValueError(f"{path}: expected the episodes of a file side by side, got them apart.")
    for file, length in zip(files, lengths.tolist(), strict=True):
        counts[file] += length
    videos = dict[str, tuple[list[str], np.ndarray]]()
    for key in [name for name, about in info["features"].items() if about["dtype"] == "video"]:
        fields = _file_fields(path, lines, version, info, f"videos/{key}")
        name = f"videos/{key}/from_timestamp"
        begins = [0.0 if version == "2" else line.get(name) for line in lines]
        if not all(isinstance(begin, float | int) for begin in begins):
            raise ValueError(f"{path}: expected numbers in '{name}'.")
        files = [_path_in(root, paths[1], video_key=key, **each) for each in fields]
        videos[key] = files, np.array(begins, np.float64)
    tasks = _rows(os.path.join(root, "meta", "tasks." + ("jsonl" if version == "2" else "parquet")))
    return LeRobotMeta(info, lengths, counts, _facts(lines), _tasks(tasks), videos)


def _info(root: str) -> tuple[dict[str, Any], str]:
    """Reads `info.json`, and returns it and the number of the version."""
    path = os.path.join(root, _INFO)
    if not os.path.isfile(path):
        raise ValueError(f"{root}: expected {_INFO}, found none.")
    info = read_json(path)
    if not isinstance(info, dict) or "codebase_version" not in info:
        raise ValueError(f"{path}: expected 'codebase_version', got {info!r:.80}.")
    version = re.fullmatch(r"v?([23])\.\d+", str(info["codebase_version"]))
    fps, features = info.get("fps"), info.get("features")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not fps > 0:
        raise ValueError(f"{path}: fps: expected a number above 0, got {fps!r}.")
    if not isinstance(features, dict) or not all(map(_is_feature, features.values())):
        raise ValueError(
            f"{path}: features: expected dicts with 'dtype' and 'shape', got {features!r:.200}."
        )
    for name in features:
        if "/" in name or "\0" in name or not name.strip("."):
            raise ValueError(f"{path}: features: expected names without a slash, got {name!r}.")
    if version is None:
        raise ValueError(
            f"{path}: codebase_version: expected v2 or v3, got {info['codebase_version']!r}. "
            "Convert it with LeRobot."
        )
    size = info.get("chunks_size", 1000)
    if type(size) is not int or size < 1:
        raise ValueError(f"{path}: chunks_size: expected a number above 0, got {size!r}.")
    return info, version[1]


def _is_feature(about: Any) -> bool:
    shape = about.get("shape") if isinstance(about, dict) else None
    if not isinstance(shape, list) or not isinstance(about.get("dtype"), str):
        return False
    return all(type(size) is int and size >= 0 for size in shape)


def _file_fields(
    where: str,
    lines: Sequence[Mapping[str, Any]],
    version: str,
    info: Mapping[str, Any],
    group: str,
) -> list[dict[str, Any]]:
    """Returns the numbers in the paths of the files that episodes are in."""
    if version == "2":
        size = info.get("chunks_size", 1000)
        return [{"episode_chunk": k // size, "episode_index": k} for k in range(len(lines))]
    fields = [
        {n: line.get(f"{group}/{n}") for n in ("chunk_index", "file_index")} for line in lines
    ]
    for episode, each in enumerate(fields):
        if not all(type(number) is int and number >= 0 for number in each.values()):
            raise ValueError(
                f"{where}: episode {episode}: expected numbers in '{group}/chunk_index' and "
                f"'{group}/file_index', got {list(each.values())}."
            )
    return fields


def _path_in(root: str, template: Any, **fields: Any) -> str:
    """Returns the path that a template of `info.json` gives.

    Raises:
        ValueError: it has fields that are not known, or leads out of the folder.
    """
    where = f"{root}: {_INFO}"
    if not isinstance(template, str):
        raise ValueError(f"{where}: expected the template of a path, got {template!r}.")
    for match in _FIELD.finditer(template):
        if match[1] not in fields:
            raise ValueError(f"{where}: expected a path of {sorted(fields)}, got {template!r}.")

    def replaced(match: re.Match[str]) -> str:
        value = fields[match[1]]
        return f"{value:0{match[2] or 0}d}" if isinstance(value, int) else value

    # Not `str.format`, which reads attributes (`{video_key.__class__}`).
    name = _FIELD.sub(replaced, template)
    parts = re.split(r"[/\\]", name)
    if set(name) & set("{}\0:") or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(
            f"{where}: expected the template of a path within the folder, got {template!r}."
        )
    return os.path.join(root, *parts)


def _facts(lines: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Returns arrays `[K]` of numbers that all episodes have; tasks as tuples of texts."""
    facts: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        values = [line.get(name) for line in lines]
        is_number = all(isinstance(value, bool | int | float) for value in values)
        if is_number and name not in _OWN and not name.startswith(_GROUPS):
            facts[name] = np.array(values)
    if any("tasks" in line for line in lines):
        texts = [line.get("tasks") for line in lines]
        facts["tasks"] = np.empty(len(texts), object)
        facts["tasks"][:] = [tuple(each) if isinstance(each, list) else each for each in texts]
    return facts


def _tasks(lines: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Returns texts by number; pandas keeps them in a column that has no name of its own."""
    tasks = dict[int, str]()
    for line in lines:
        text = next((value for value in line.values() if isinstance(value, str)), None)
        if isinstance(line.get("task_index"), int) and text is not None:
            tasks[line["task_index"]] = text
    return dict(sorted(tasks.items()))


def _rows(path: str) -> list[dict[str, Any]]:
    """Reads a file of JSON lines, a table, or the tables in the folders of a folder.

    Columns of statistics are left out. There are no rows where there is no file.
    """
    rows = list[dict[str, Any]]()
    if path.endswith(".jsonl"):
        lines = []
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                lines = [line for line in file if line.strip()]
        try:
            rows = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected lines of JSON, got others: {error}") from error
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: expected a dict of JSON in each line, got others.")
        return rows
    parquet = require("pyarrow.parquet", "datasets")
    chunks = sorted(os.listdir(path), key=natural_order) if os.path.isdir(path) else [""]
    for table in [
        each for chunk in chunks for each in arrow.tables(os.path.join(path, chunk).rstrip("/"))
    ]:
        with arrow.refused(table):
            names = parquet.read_schema(table).names
            names = [name for name in names if not name.startswith("stats/")]
            rows += parquet.ParquetFile(table).read(names).to_pylist()
    return rows
