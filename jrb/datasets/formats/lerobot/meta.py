"""What LeRobot's sets say of themselves: `meta/` in its versions 2 and 3.

K episodes.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrb.datasets.formats.lerobot import rows
from jrb.datasets.reading import arrow, stat_cache

INFO = os.path.join("meta", "info.json")

_FIELD = re.compile(r"\{(\w+)(?::0?(\d{0,2})d?)?\}")
_V2_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_V2_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_V3_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_V3_VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


@dataclasses.dataclass(frozen=True, eq=False)
class Meta:
    """What is known of a set before its tables are opened.

    Attributes:
        info: `info.json`.
        lengths: int64 `[K]`, the steps of each episode.
        files: the tables in order.
        counts: how many rows each has.
        facts: arrays `[K]` by name.
        tasks: their texts by number.
        videos: for each feature that is a video, the files of all episodes, and float64 `[K]`, when
            in them they begin, in seconds.
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
        """What a step has, by name."""
        return self.info["features"]


def is_set(path: object) -> bool:
    """Whether a folder has an `info.json` of LeRobot's."""
    if not isinstance(path, str) or not os.path.isfile(os.path.join(path, INFO)):
        return False
    try:
        info = rows.read_json(os.path.join(path, INFO))
    except (ValueError, OSError):
        return False
    return isinstance(info, dict) and {"codebase_version", "features"} <= info.keys()


def stamps(root: str) -> stat_cache.Stamps:
    """What tells `meta/`, as it is now, from what it may become."""
    walked = os.walk(os.path.join(root, "meta"))
    return stat_cache.stamps(os.path.join(at, name) for at, _, names in walked for name in names)


def read(root: str) -> Meta:
    """What a set says of itself.

    Raises:
        ValueError: it is of another version, something lacks, or does not fit together.
    """
    path = os.path.join(root, INFO)
    if not os.path.isfile(path):
        raise ValueError(f"{root}: expected {INFO}, found none.")
    info = _checked(rows.read_json(path), path)
    version = re.fullmatch(r"v?([23])\.\d+", str(info["codebase_version"]))
    if version is None:
        raise ValueError(
            f"{path}: codebase_version: expected v2 or v3, got {info['codebase_version']!r}. "
            "Convert it with LeRobot."
        )
    meta = (_second if version[1] == "2" else _third)(root, info)
    for name, total in (("episodes", len(meta.lengths)), ("frames", int(meta.lengths.sum()))):
        said = info.get(f"total_{name}", total)
        if said != total:
            raise ValueError(f"{path}: total_{name}: expected {total}, as listed, got {said!r}.")
    return meta


def _checked(info: Any, path: str) -> dict[str, Any]:
    """Refuses what lacks or is of another form."""
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
    return info


def _is_feature(about: Any) -> bool:
    if not isinstance(about, dict) or not isinstance(about.get("dtype"), str):
        return False
    shape = about.get("shape")
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)


def _second(root: str, info: dict[str, Any]) -> Meta:
    """Version 2: a table for each episode."""
    path = os.path.join(root, "meta", "episodes.jsonl")
    lines = rows.in_order(rows.read_lines(path), path)
    lengths = rows.lengths([line.get("length") for line in lines], path)
    size = info.get("chunks_size", 1000)
    if type(size) is not int or size < 1:
        raise ValueError(f"{root}: chunks_size: expected a number above 0, got {size!r}.")
    places = [{"episode_chunk": k // size, "episode_index": k} for k in range(len(lines))]
    tasks = rows.read_lines(os.path.join(root, "meta", "tasks.jsonl"), is_needed=False)
    template = info.get("video_path") or _V2_VIDEO
    videos = {
        key: (
            [inside(root, template, video_key=key, **place) for place in places],
            np.zeros(len(places)),
        )
        for key in _videos(info)
    }
    files = [inside(root, info.get("data_path") or _V2_DATA, **place) for place in places]
    facts = rows.facts({name: [line.get(name) for line in lines] for name in rows.names(lines)})
    return Meta(info, lengths, files, lengths.tolist(), facts, rows.tasks(tasks), videos)


def _third(root: str, info: dict[str, Any]) -> Meta:
    """Version 3: tables with many episodes each."""
    folder = os.path.join(root, "meta", "episodes")
    lines = rows.in_order(rows.read_tables(folder, is_needed=True), folder)
    lengths = rows.lengths([line.get("length") for line in lines], folder)
    _check_places(lines, lengths, folder)
    template = info.get("data_path") or _V3_DATA
    files = [inside(root, template, **_place(line, "data", folder)) for line in lines]
    order = list(dict.fromkeys(files))
    runs = 1 + sum(one != other for one, other in itertools.pairwise(files))
    if runs != len(order):
        raise ValueError(f"{folder}: expected the episodes of a file side by side, got them apart.")
    counts = dict.fromkeys(order, 0)
    for file, length in zip(files, lengths.tolist(), strict=True):
        counts[file] += length
    videos = {key: _spans(root, info, key, lines, folder) for key in _videos(info)}
    tasks = rows.tasks(
        rows.read_tables(os.path.join(root, "meta", "tasks.parquet"), is_needed=False)
    )
    facts = rows.facts({name: [line.get(name) for line in lines] for name in rows.names(lines)})
    return Meta(info, lengths, order, list(counts.values()), facts, tasks, videos)


def _spans(
    root: str, info: dict[str, Any], key: str, lines: Sequence[dict[str, Any]], where: str
) -> tuple[list[str], np.ndarray]:
    """The video of each episode, and when it begins."""
    template = info.get("video_path") or _V3_VIDEO
    places = [_place(line, f"videos/{key}", where) for line in lines]
    begins = [line.get(f"videos/{key}/from_timestamp") for line in lines]
    if not all(isinstance(begin, float | int) for begin in begins):
        raise ValueError(f"{where}: expected numbers in 'videos/{key}/from_timestamp'.")
    paths = [inside(root, template, video_key=key, **place) for place in places]
    return paths, np.array(begins, np.float64)


def _place(line: Mapping[str, Any], group: str, where: str) -> dict[str, int]:
    """Which file of which chunk an episode is in."""
    names = ("chunk_index", "file_index")
    found: dict[str, Any] = {name: line.get(f"{group}/{name}") for name in names}
    if not all(type(number) is int and number >= 0 for number in found.values()):
        raise ValueError(
            f"{where}: episode {line.get('episode_index')}: expected numbers in "
            f"'{group}/chunk_index' and '{group}/file_index', got {list(found.values())}."
        )
    return found


def _check_places(lines: Sequence[dict[str, Any]], lengths: np.ndarray, where: str) -> None:
    """Refuses rows that do not follow each other."""
    ends = arrow.starts_of(lengths).tolist()
    for name, wanted in (("dataset_from_index", ends[:-1]), ("dataset_to_index", ends[1:])):
        for number, (line, place) in enumerate(zip(lines, wanted, strict=True)):
            if line.get(name, place) != place:
                raise ValueError(
                    f"{where}: episode {number}: {name}: expected {place}, as lengths tell, got "
                    f"{line[name]!r}."
                )


def inside(root: str, template: str, **values: Any) -> str:
    """The path that a template of `info.json` gives.

    Raises:
        ValueError: it asks for what is not known, or leads out of the folder.
    """

    def put(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(
                f"{root}: {INFO}: expected a path of {sorted(values)}, got {template!r}."
            )
        value = values[match[1]]
        return f"{value:0{match[2] or 0}d}" if isinstance(value, int) else value

    if not isinstance(template, str):
        raise ValueError(f"{root}: {INFO}: expected the template of a path, got {template!r}.")
    name = _FIELD.sub(put, template)
    parts = re.split(r"[/\\]", name)
    is_plain = not set(name) & set("{}\0:") and not any(part in ("", ".", "..") for part in parts)
    if not is_plain:
        raise ValueError(
            f"{root}: {INFO}: expected the template of a path within the folder, got {template!r}."
        )
    return os.path.join(root, *parts)


def _videos(info: Mapping[str, Any]) -> list[str]:
    return [name for name, about in info["features"].items() if about["dtype"] == "video"]
