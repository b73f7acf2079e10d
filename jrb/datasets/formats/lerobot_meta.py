"""Reads the metadata of LeRobot datasets, the folder `meta/` of versions 2 and 3. K episodes."""

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
from jrb.datasets.reading.names import check, explain_damage, natural_order
from jrb.datasets.reading.tabular import read_once

INFO = os.path.join("meta", "info.json")
_MAX_STEPS = 1 << 48  # the number of steps that an episode must stay below
_OWN = ("episode_index", "length", "dataset_from_index", "dataset_to_index")
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


def read(root: str, max_expansion: float) -> LeRobotMeta:
    """Reads the metadata of a dataset; caches them until one of their files changes."""
    walk = os.walk(os.path.join(root, "meta"))
    files = [os.path.join(folder, name) for folder, _, names in walk for name in names]
    limit = ExpansionLimit(os.path.join(root, "meta"), files, max_expansion)
    return read_once(files, ("lerobot", root, max_expansion), lambda: _read(root, limit))


def _read(root: str, limit: ExpansionLimit) -> LeRobotMeta:
    info, version = _info(root)
    path = os.path.join(root, "meta", "episodes.jsonl" if version == "2" else "episodes")
    lines = _episodes(root, info, path, limit)
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
    about = _facts(lines), _tasks(table, limit), videos
    return LeRobotMeta(info, np.array(lengths, np.int64), counts, *about)


def _tasks(path: str, limit: ExpansionLimit) -> dict[int, str]:
    """Returns the texts of the tasks by their numbers, sorted."""
    tasks = dict[int, str]()
    for line in _rows(path, limit):
        # The text may be in a column of any name, as pandas stores it as an index.
        text = next((value for value in line.values() if isinstance(value, str)), None)
        if isinstance(line.get("task_index"), int) and text is not None:
            tasks[line["task_index"]] = text
    return dict(sorted(tasks.items()))


def _episodes(
    root: str, info: Mapping[str, Any], path: str, limit: ExpansionLimit
) -> list[dict[str, Any]]:
    """Returns the entries of all episodes in order; raises for gaps and wrong totals."""
    lines = _rows(path, limit)
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
        where, declared = f"{root}: {INFO}: total_{name}", info.get(f"total_{name}", total)
        check(declared == total, where, f"{total}, as listed", repr(declared))
    return lines


def _info(root: str) -> tuple[dict[str, Any], str]:
    """Reads and checks `info.json`; returns it and the major version, "2" or "3"."""
    path = os.path.join(root, INFO)
    check(os.path.isfile(path), root, INFO, "none")
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
    where = f"{root}: {INFO}"
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
        if name not in _OWN and not name.startswith(_GROUPS):
            entries = (line.get(name) for line in lines)
            values = [tuple(entry) if isinstance(entry, list) else entry for entry in entries]
            is_number = all(isinstance(value, bool | int | float) for value in values)
            facts[name] = np.array(values) if is_number else np.fromiter(values, object)
    return facts


def _rows(path: str, limit: ExpansionLimit) -> list[dict[str, Any]]:
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
