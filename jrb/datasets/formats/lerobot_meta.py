"""The metadata of LeRobot's datasets, `meta/` in its versions 2 and 3.

K episodes.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrb.authoring import require
from jrb.datasets.reading import arrow
from jrb.datasets.reading.names import natural_order
from jrb.datasets.reading.stat_cache import FileStamps, file_stamps

_INFO = os.path.join("meta", "info.json")
_MAX_STEPS = 1 << 48  # of one episode
_OWN = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")
_GROUPS = ("stats/", "data/", "videos/", "meta/")

_FIELD = re.compile(r"\{(\w+)(?::0?(\d{0,2})d?)?\}")
_V2_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_V2_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_V3_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_V3_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


@dataclasses.dataclass(frozen=True, eq=False)
class LeRobotMeta:
    """The metadata of a dataset, read before its tables are opened.

    Attributes:
        info: `info.json`.
        lengths: int64 `[K]`, the steps of each episode.
        files: the tables in order.
        counts: the number of rows of each.
        facts: arrays `[K]` by name.
        tasks: texts by number.
        videos: for each feature that is a video, the files of all episodes, and float64 `[K]`, the
            time in seconds at which each begins in its file.
    """

    info: Mapping[str, Any]
    lengths: np.ndarray
    files: list[str]
    counts: list[int]
    facts: Mapping[str, np.ndarray]
    tasks: Mapping[int, str]
    videos: Mapping[str, tuple[list[str], np.ndarray]]

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        """The description of each leaf of a step, by name."""
        return self.info["features"]


def is_dataset(path: object) -> bool:
    """Returns whether a folder has an `info.json` of LeRobot's."""
    if not isinstance(path, str) or not os.path.isfile(os.path.join(path, _INFO)):
        return False
    try:
        info = _read_json(os.path.join(path, _INFO))
    except (ValueError, OSError):
        return False
    return isinstance(info, dict) and {"codebase_version", "features"} <= info.keys()


def stamps(root: str) -> FileStamps:
    """Returns the stamps of all files in `meta/`."""
    walk = os.walk(os.path.join(root, "meta"))
    return file_stamps(os.path.join(folder, name) for folder, _, names in walk for name in names)


def read(root: str) -> LeRobotMeta:
    """Reads the metadata of a dataset.

    Raises:
        ValueError: it is of another version, something is missing, or does not fit together.
    """
    path = os.path.join(root, _INFO)
    if not os.path.isfile(path):
        raise ValueError(f"{root}: expected {_INFO}, found none.")
    info = _read_json(path)
    _check_info(info, path)
    version = re.fullmatch(r"v?([23])\.\d+", str(info["codebase_version"]))
    if version is None:
        raise ValueError(
            f"{path}: codebase_version: expected v2 or v3, got {info['codebase_version']!r}. "
            "Convert it with LeRobot."
        )
    meta = (_version_2 if version[1] == "2" else _version_3)(root, info)
    for name, total in (("episodes", len(meta.lengths)), ("frames", int(meta.lengths.sum()))):
        declared = info.get(f"total_{name}", total)
        if declared != total:
            raise ValueError(
                f"{path}: total_{name}: expected {total}, as listed, got {declared!r}."
            )
    return meta


def _check_info(info: Any, path: str) -> None:
    """Refuses an `info.json` of another form."""
    if not isinstance(info, dict) or "codebase_version" not in info:
        raise ValueError(f"{path}: expected 'codebase_version', got {info!r:.80}.")
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


def _is_feature(about: Any) -> bool:
    shape = about.get("shape") if isinstance(about, dict) else None
    if not isinstance(shape, list) or not isinstance(about.get("dtype"), str):
        return False
    return all(type(size) is int and size >= 0 for size in shape)


def _version_2(root: str, info: dict[str, Any]) -> LeRobotMeta:
    """Reads the metadata of a table for each episode."""
    path = os.path.join(root, "meta", "episodes.jsonl")
    if not os.path.isfile(path):
        raise ValueError(f"{path}: expected a file, found none.")
    lines = _sorted_episodes(_read_lines(path), path)
    lengths = _lengths(lines, path)
    size = info.get("chunks_size", 1000)
    if type(size) is not int or size < 1:
        raise ValueError(f"{root}: chunks_size: expected a number above 0, got {size!r}.")
    fields = [{"episode_chunk": k // size, "episode_index": k} for k in range(len(lines))]
    data, video = info.get("data_path") or _V2_DATA, info.get("video_path") or _V2_VIDEO
    files = [_path_in(root, data, **each) for each in fields]
    videos = {
        key: (
            [_path_in(root, video, video_key=key, **each) for each in fields],
            np.zeros(len(fields)),
        )
        for key in _video_keys(info)
    }
    tasks = _tasks(_read_lines(os.path.join(root, "meta", "tasks.jsonl")))
    return LeRobotMeta(info, lengths, files, lengths.tolist(), _facts(lines), tasks, videos)


def _version_3(root: str, info: dict[str, Any]) -> LeRobotMeta:
    """Reads the metadata of tables with many episodes each."""
    folder = os.path.join(root, "meta", "episodes")
    lines = _read_tables(folder)
    if not lines:
        raise ValueError(f"{folder}: expected a table of episodes, found none.")
    lines = _sorted_episodes(lines, folder)
    lengths = _lengths(lines, folder)
    _check_rows(lines, lengths, folder)
    data, video = info.get("data_path") or _V3_DATA, info.get("video_path") or _V3_VIDEO
    files = [_path_in(root, data, **_file_fields(line, "data", folder)) for line in lines]
    counts = dict.fromkeys(files, 0)
    if 1 + sum(one != other for one, other in itertools.pairwise(files)) != len(counts):
        raise ValueError(f"{folder}: expected the episodes of a file side by side, got them apart.")
    for file, length in zip(files, lengths.tolist(), strict=True):
        counts[file] += length
    videos = {}
    for key in _video_keys(info):
        fields = [_file_fields(line, f"videos/{key}", folder) for line in lines]
        begins = [line.get(f"videos/{key}/from_timestamp") for line in lines]
        if not all(isinstance(begin, float | int) for begin in begins):
            raise ValueError(f"{folder}: expected numbers in 'videos/{key}/from_timestamp'.")
        paths = [_path_in(root, video, video_key=key, **each) for each in fields]
        videos[key] = paths, np.array(begins, np.float64)
    tasks = _tasks(_read_tables(os.path.join(root, "meta", "tasks.parquet")))
    facts = _facts(lines)
    return LeRobotMeta(info, lengths, [*counts], [*counts.values()], facts, tasks, videos)


def _file_fields(line: Mapping[str, Any], group: str, where: str) -> dict[str, Any]:
    """Returns chunk and number of the file that an episode is in."""
    fields = {name: line.get(f"{group}/{name}") for name in ("chunk_index", "file_index")}
    if not all(type(number) is int and number >= 0 for number in fields.values()):
        raise ValueError(
            f"{where}: episode {line.get('episode_index')}: expected numbers in "
            f"'{group}/chunk_index' and '{group}/file_index', got {list(fields.values())}."
        )
    return fields


def _check_rows(lines: Sequence[dict[str, Any]], lengths: np.ndarray, where: str) -> None:
    """Refuses episodes whose rows do not follow each other."""
    ends = arrow.starts_of(lengths).tolist()
    for name, rows in (("dataset_from_index", ends[:-1]), ("dataset_to_index", ends[1:])):
        for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
            if line.get(name, row) != row:
                raise ValueError(
                    f"{where}: episode {number}: {name}: expected {row}, as lengths tell, got "
                    f"{line[name]!r}."
                )


def _path_in(root: str, template: Any, **fields: Any) -> str:
    """Returns the path that a template of `info.json` gives.

    Raises:
        ValueError: it has fields that are not known, or leads out of the folder.
    """
    if not isinstance(template, str):
        raise ValueError(f"{root}: {_INFO}: expected the template of a path, got {template!r}.")
    for match in _FIELD.finditer(template):
        if match[1] not in fields:
            raise ValueError(
                f"{root}: {_INFO}: expected a path of {sorted(fields)}, got {template!r}."
            )

    def replaced(match: re.Match[str]) -> str:
        value = fields[match[1]]
        return f"{value:0{match[2] or 0}d}" if isinstance(value, int) else value

    name = _FIELD.sub(replaced, template)
    parts = re.split(r"[/\\]", name)
    if set(name) & set("{}\0:") or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"{root}: {_INFO}: expected the template of a path within the folder, got {template!r}."
        )
    return os.path.join(root, *parts)


def _video_keys(info: Mapping[str, Any]) -> list[str]:
    return [name for name, about in info["features"].items() if about["dtype"] == "video"]


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


def _sorted_episodes(lines: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Returns the episodes by their numbers; refuses gaps."""
    numbers = [line.get("episode_index") for line in lines]
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{path}: expected a number 'episode_index' for each episode.")
    missing = sorted(set(range(len(lines))) - set(numbers))
    if missing or not lines:
        raise ValueError(
            f"{path}: expected episodes from 0 to {len(lines) - 1}, got none with the numbers "
            f"{missing[:5]}."
        )
    return sorted(lines, key=lambda line: line["episode_index"])


def _lengths(lines: Sequence[Mapping[str, Any]], path: str) -> np.ndarray:
    """Returns the lengths of episodes, int64 `[K]`."""
    lengths = [line.get("length") for line in lines]
    for number, length in enumerate(lengths):
        if type(length) is not int or not 0 < length < _MAX_STEPS:
            raise ValueError(
                f"{path}: episode {number}: length: expected a number above 0, got {length!r}."
            )
    return np.array(lengths, np.int64)


def _read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected JSON, got something else: {error}") from error


def _read_lines(path: str) -> list[dict[str, Any]]:
    """Reads the dicts of a file of JSON lines; none if there is no such file."""
    if not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        try:
            lines = [json.loads(line) for line in file if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected lines of JSON, got others: {error}") from error
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError(f"{path}: expected a dict of JSON in each line, got others.")
    return lines


def _read_tables(path: str) -> list[dict[str, Any]]:
    """Reads the rows of a table, or of those in the folders of a folder, without statistics."""
    parquet, rows = require("pyarrow.parquet", "datasets"), list[dict[str, Any]]()
    for table in _tables(path):
        with arrow.refused(table):
            names = parquet.read_schema(table).names
            names = [name for name in names if not name.startswith("stats/")]
            rows += parquet.ParquetFile(table).read(names).to_pylist()
    return rows


def _tables(path: str) -> Iterator[str]:
    chunks = sorted(os.listdir(path), key=natural_order) if os.path.isdir(path) else [""]
    for chunk in chunks:
        yield from arrow.tables(os.path.join(path, chunk) if chunk else path)
