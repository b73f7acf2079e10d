"""Sets of LeRobot, written as its layout is published, without its library."""

import io
import json

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")
import pyarrow as pa
import pyarrow.parquet as parquet
from PIL import Image

FPS = 10


def lists(array):
    """Arrow's array of an array `[T, ...]`."""
    inner = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        offsets = np.arange(0, len(inner) + 1, size, dtype=np.int32)
        inner = pa.ListArray.from_arrays(offsets, inner)
    return inner


def png(image, form="PNG"):
    data = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(data, form)
    return {"bytes": data.getvalue(), "path": None}


def images(array, form="PNG"):
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.array([png(image, form) for image in array], kind)


def columns_of(lengths, leaves):
    """The columns of all steps, with LeRobot's own."""
    steps = sum(lengths)
    frame = np.concatenate([np.arange(length) for length in lengths])
    return {
        **leaves,
        "timestamp": (frame / FPS).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.repeat(np.arange(len(lengths)), lengths),
        "index": np.arange(steps),
        "task_index": np.repeat(np.arange(len(lengths)) % 2, lengths),
    }


def table_of(columns):
    made = {name: images(c) if is_image(c) else lists(c) for name, c in columns.items()}
    return pa.table(made)


def is_image(array):
    return array.ndim == 4 and array.dtype == np.uint8


def features_of(columns):
    found = {}
    for name, leaf in columns.items():
        dtype = "image" if is_image(leaf) else str(leaf.dtype)
        found[name] = {"dtype": dtype, "shape": list(leaf.shape[1:]) or [1], "names": None}
    return found


def write_info(root, version, lengths, features, **more):
    info = {
        "codebase_version": version,
        "robot_type": "arm",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": 2,
        "chunks_size": 5 if version == "v2.1" else 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(lengths)}"},
        "features": features,
        **more,
    }
    (root / "meta").mkdir(parents=True, exist_ok=True)
    (root / "meta" / "info.json").write_text(json.dumps(info, indent=4))
    return info


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_v21(root, lengths, leaves, **more):
    """A table for each episode, five in a folder."""
    columns = columns_of(lengths, leaves)
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    more = {"data_path": data, "video_path": video, "total_chunks": 3, "total_videos": 0, **more}
    features = features_of(columns) | more.pop("features", {})
    write_info(root, "v2.1", lengths, features, **more)
    table, start = table_of(columns), 0
    for number, length in enumerate(lengths):
        path = root / "data" / f"chunk-{number // 5:03d}" / f"episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table.slice(start, length), path)
        start += length
    tasks = [{"task_index": number, "task": text} for number, text in enumerate(("push", "pull"))]
    write_lines(root / "meta" / "tasks.jsonl", tasks)
    episodes = [
        {"episode_index": k, "tasks": [("push", "pull")[k % 2]], "length": length, "score": k / 2}
        for k, length in enumerate(lengths)
    ]
    write_lines(root / "meta" / "episodes.jsonl", episodes[::-1])
    return columns


def write_v30(root, lengths, leaves, per_file=5, **more):
    """Some episodes in each file, two files in each folder."""
    columns = columns_of(lengths, leaves)
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    more = {"data_path": data, "video_path": video, "data_files_size_in_mb": 100, **more}
    spans = more.pop("spans", {})
    write_info(root, "v3.0", lengths, features_of(columns) | more.pop("features", {}), **more)
    table, ends = table_of(columns), np.cumsum([0, *lengths]).tolist()
    rows = []
    for first in range(0, len(lengths), per_file):
        chunk, file = divmod(first // per_file, 2)
        last = min(first + per_file, len(lengths))
        path = root / "data" / f"chunk-{chunk:03d}" / f"file-{file:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = table.slice(ends[first], ends[last] - ends[first])
        parquet.write_table(part, path, row_group_size=4)
        rows += [
            {
                "episode_index": k,
                "tasks": [("push", "pull")[k % 2]],
                "length": lengths[k],
                "data/chunk_index": chunk,
                "data/file_index": file,
                "dataset_from_index": ends[k],
                "dataset_to_index": ends[k + 1],
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                "stats/action/mean": [0.0],
                "score": k / 2,
                **{name: span[k] for name, span in spans.items()},
            }
            for k in range(first, last)
        ]
    write_episodes(root, rows)
    tasks = pa.table({"task_index": [0, 1], "__index_level_0__": ["push", "pull"]})
    parquet.write_table(tasks, root / "meta" / "tasks.parquet")
    return columns


def write_episodes(root, rows):
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


def read_episodes(root):
    path = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    return parquet.read_table(path).to_pylist()
