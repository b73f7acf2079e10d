"""The metadata of LeRobot's datasets, `meta/` in its versions 2 and 3.

K episodes.
"""

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrb.authoring import ExpansionLimit, require
from jrb.datasets.formats.arrays import read_json
from jrb.datasets.reading import arrow
from jrb.datasets.reading.names import check, natural_order
from jrb.datasets.reading.tabular import cached

_INFO = os.path.join("meta", "info.json")
_MAX_STEPS = 1 << 48  # of one episode
_OWN = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
_OBJECT = 32  # bytes of a number of Python
_GROUPS = ("stats/", "data/", "videos/", "meta/")

_FIELD = re.compile(r"\{(\w+)(?::0?(\d{0,2})d?)?\}")
_PATHS = {  # by version
    ("2", "data"): "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    ("2", "video"): "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ("3", "data"): "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    ("3", "video"): "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


class LeRobotMeta(NamedTuple):
    """The metadata of a dataset, read before its tables are opened."""

    info: Mapping[str, Any]  # `info.json`, which describes each leaf of a step under `features`
    lengths: np.ndarray  # int64 `[K]`, the steps of each episode
    counts: Mapping[str, int]  # the number of rows of each table, by its path, in order
    facts: Mapping[str, np.ndarray]  # arrays `[K]` by name
    tasks: Mapping[int, str]  # texts by number
    # For each feature that is a video, the files of all episodes, and float64 `[K]`, the time in
    # seconds at which each begins in its file.
    videos: Mapping[str, tuple[list[str], np.ndarray]]


def is_dataset(path: object) -> bool:
    """Returns True if a folder has an `info.json` of LeRobot's."""
    if not isinstance(path, str) or not os.path.isfile(os.path.join(path, _INFO)):
        return False
    try:
        info = read_json(os.path.join(path, _INFO))
    except (ValueError, OSError):
        return False
    return isinstance(info, dict) and {"codebase_version", "features"} <= info.keys()


def read(root: str, max_expansion: float) -> LeRobotMeta:
    """Reads the metadata of a dataset, once as long as they stay the same."""
    walk = os.walk(os.path.join(root, "meta"))
    files = [os.path.join(folder, name) for folder, _, names in walk for name in names]
    limit = ExpansionLimit(os.path.join(root, "meta"), files, max_expansion)
    return cached(files, ("lerobot", root, max_expansion), lambda: _read(root, limit))


def _read(root: str, limit: ExpansionLimit) -> LeRobotMeta:
    info, version = _info(root)
    kind = "jsonl" if version == "2" else "parquet"
    path = os.path.join(root, "meta", "episodes.jsonl" if version == "2" else "episodes")
    lines = _episodes(root, info, path, limit)
    lengths, chunk_size = [line["length"] for line in lines], info.get("chunks_size", 1000)

    def paths(kind: str, group: str, **fields: str) -> list[str]:
        """Returns the paths of the tables or videos that episodes are in."""
        template, files = info.get(f"{kind}_path") or _PATHS[version, kind], list[str]()
        for number, line in enumerate(lines):
            numbers = {"episode_chunk": number // chunk_size, "episode_index": number}
            if version == "3":
                numbers = {n: line.get(f"{group}/{n}") for n in ("chunk_index", "file_index")}
            are_right = all(type(each) is int and each >= 0 for each in numbers.values())
            expected = f"numbers in '{group}/chunk_index' and '{group}/file_index'"
            check(are_right, f"{path}: episode {number}", expected, [*numbers.values()])
            files.append(_path_in(root, template, **numbers, **fields))
        return files

    files = paths("data", "data")
    counts = dict.fromkeys(files, 0)
    runs = 1 + sum(one != other for one, other in itertools.pairwise(files))
    check(runs == len(counts), path, "the episodes of a file side by side", "them apart")
    for file, length in zip(files, lengths, strict=True):
        counts[file] += length
    videos = dict[str, tuple[list[str], np.ndarray]]()
    for key in [name for name, about in info["features"].items() if about["dtype"] == "video"]:
        name = f"videos/{key}/from_timestamp"
        begins = [0.0 if version == "2" else line.get(name) for line in lines]
        are_numbers = all(isinstance(begin, float | int) for begin in begins)
        check(are_numbers, f"{path}: '{name}'", "numbers", begins)
        videos[key] = paths("video", f"videos/{key}", video_key=key), np.array(begins, np.float64)
    tasks = dict[int, str]()
    for line in _rows(os.path.join(root, "meta", f"tasks.{kind}"), limit):
        # pandas keeps texts in a column that has no name of its own.
        text = next((value for value in line.values() if isinstance(value, str)), None)
        if isinstance(line.get("task_index"), int) and text is not None:
            tasks[line["task_index"]] = text
    steps, tasks = np.array(lengths, np.int64), dict(sorted(tasks.items()))
    return LeRobotMeta(info, steps, counts, _facts(lines), tasks, videos)


def _episodes(
    root: str, info: Mapping[str, Any], path: str, limit: ExpansionLimit
) -> list[dict[str, Any]]:
    """Returns what is said of each episode, in their order; refuses gaps and false totals."""
    lines = _rows(path, limit)
    is_number = all(type(line.get("episode_index")) is int for line in lines)
    check(is_number, path, "a number 'episode_index' for each episode", "others")
    missing = sorted({*range(len(lines))} - {line["episode_index"] for line in lines})
    expected = f"a table of episodes from 0 to {len(lines) - 1}"
    check(lines and not missing, path, expected, f"none with the numbers {missing[:5]}")
    lines = sorted(lines, key=lambda line: line["episode_index"])
    for number, line in enumerate(lines):
        length = line.get("length")
        is_right = type(length) is int and 0 < length < _MAX_STEPS
        check(is_right, f"{path}: episode {number}: length", "a number above 0", repr(length))
    totals = {"episodes": len(lines), "frames": sum(line["length"] for line in lines)}
    for name, total in totals.items():
        where, declared = f"{root}: {_INFO}: total_{name}", info.get(f"total_{name}", total)
        check(declared == total, where, f"{total}, as listed", repr(declared))
    return lines


def _info(root: str) -> tuple[dict[str, Any], str]:
    """Reads `info.json`, and returns it and the number of the version."""
    path = os.path.join(root, _INFO)
    check(os.path.isfile(path), root, _INFO, "none")
    info = read_json(path)
    has_version = isinstance(info, dict) and "codebase_version" in info
    check(has_version, path, "'codebase_version'", f"{info!r:.80}")
    version, fps = info["codebase_version"], info.get("fps")
    features: Any = info.get("features", None)
    is_fps = isinstance(fps, int | float) and not isinstance(fps, bool) and fps > 0
    check(is_fps, f"{path}: fps", "a number above 0", repr(fps))
    are_right = isinstance(features, dict) and all(map(_is_feature, features.values()))
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


def _is_feature(about: Any) -> bool:
    shape = about.get("shape") if isinstance(about, dict) else None
    if not isinstance(shape, list) or not isinstance(about.get("dtype"), str):
        return False
    return all(type(size) is int and size >= 0 for size in shape)


def _path_in(root: str, template: Any, **fields: Any) -> str:
    """Returns the path that a template of `info.json` gives; refuses one that leads elsewhere."""
    where = f"{root}: {_INFO}"
    check(isinstance(template, str), where, "the template of a path", repr(template))
    names = {match[1] for match in _FIELD.finditer(template)}
    check(names <= fields.keys(), where, f"a path of {sorted(fields)}", repr(template))

    def replaced(match: re.Match[str]) -> str:
        value = fields[match[1]]
        return f"{value:0{match[2] or 0}d}" if isinstance(value, int) else value

    # Not `str.format`, which reads attributes (`{video_key.__class__}`).
    name = _FIELD.sub(replaced, template)
    parts = re.split(r"[/\\]", name)
    is_inside = {"", ".", ".."}.isdisjoint(parts) and {*"{}\0:"}.isdisjoint(name)
    check(is_inside, where, "the template of a path within the folder", repr(template))
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


def _rows(path: str, limit: ExpansionLimit) -> list[dict[str, Any]]:
    """Reads a file of JSON lines, a table, or the tables in the folders of a folder.

    Columns of statistics are left out. There are no rows where there is no file.
    """
    rows = list[dict[str, Any]]()
    if path.endswith(".jsonl"):
        try:
            if os.path.isfile(path):
                with open(path, encoding="utf-8") as file:
                    rows = [json.loads(line) for line in file if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected lines of JSON, got others: {error}") from error
        check(all(isinstance(row, dict) for row in rows), path, "a dict in each line", "others")
        return rows
    parquet = require("pyarrow.parquet", "datasets")
    chunks = sorted(os.listdir(path), key=natural_order) if os.path.isdir(path) else [""]
    folders = [os.path.join(path, chunk) if chunk else path for chunk in chunks]
    for table in [each for folder in folders for each in arrow.tables(folder)]:
        with arrow.refused(table):
            file = parquet.ParquetFile(table)
            names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
            limit.add(file.metadata.num_rows * len(names) * _OBJECT)
            rows += file.read(names).to_pylist()
    return rows
