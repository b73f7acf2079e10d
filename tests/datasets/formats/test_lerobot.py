import importlib.util
import itertools
import json
import re

import numpy as np
import pytest

from jrb import datasets
from tests.datasets.formats.trees import flat, same

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")
import pyarrow as pa
import pyarrow.parquet as parquet

from tests.datasets.formats import lerobot_sets as sets

LENGTHS = [5, 1, 7, 3, 1, 1, 9, 2, 4, 6, 8, 3]
WRITERS = [sets.write_v21, sets.write_v30]


def made(lengths=LENGTHS, seed=0, rewards=True):
    rng, steps = np.random.default_rng(seed), sum(lengths)
    over = np.zeros(steps, bool)
    over[np.cumsum(lengths) - 1] = rng.integers(0, 2, len(lengths)).astype(bool)
    leaves = {
        "observation.state": rng.normal(size=(steps, 3)).astype(np.float32),
        "observation.images.top": rng.integers(0, 256, (steps, 4, 6, 3)).astype(np.uint8),
        "observation.force": rng.normal(size=(steps, 2, 2)),
        "action": rng.normal(size=(steps, 1)).astype(np.float32),
    }
    reward = rng.normal(size=steps).astype(np.float32)
    reward[2] = np.nan
    ends = {"next.reward": reward, "next.done": over, "next.success": over}
    return leaves | (ends if rewards else {})


def expected(columns, lengths, number):
    """An episode in TED, in plain Python."""
    start = sum(lengths[:number])
    part = slice(start, start + lengths[number])
    found = {name.replace(".", "/"): leaf[part] for name, leaf in columns.items()}
    for name in [name for name in found if name.startswith("observation")]:
        found["next/" + name] = np.concatenate([found[name][1:], np.zeros_like(found[name][:1])])
    over = np.zeros(lengths[number], bool)
    over[-1] = True
    terminated = found.get("next/done", ~over & over)
    found["next/terminated"] = terminated
    found["next/truncated"] = over & ~terminated
    found["next/done"] = over
    found["next/valid"] = terminated | ~over
    return found


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("rewards", [True, False])
def test_every_way_of_reading_gives_what_was_written(tmp_path, write, rewards):
    leaves = made(rewards=rewards)
    columns = write(tmp_path, LENGTHS, leaves)
    dataset = datasets.open(tmp_path)
    assert dataset.format.name == "lerobot"
    assert dataset.lengths.tolist() == LENGTHS
    wanted = [expected(columns, LENGTHS, number) for number in range(len(LENGTHS))]
    for number in [*range(len(LENGTHS)), -1, -12, 3, 2]:
        same(dataset[number], wanted[number])
    for episode, want in zip(dataset, wanted, strict=True):
        same(episode, want)
    for episode, want in zip(dataset[9:2:-3], wanted[9:2:-3], strict=True):
        same(episode, want)
    whole = {name: np.concatenate([each[name] for each in wanted]) for name in wanted[0]}
    for read in (dataset.blocks(), dataset.steps(11)):
        found = [flat(block) for block in read]
        same(
            {name: np.concatenate([each[name] for each in found]) for name in found[0]},
            whole,
        )
    if rewards:
        np.testing.assert_allclose(
            dataset.returns(), [each["next/reward"].sum(dtype=np.float64) for each in wanted]
        )
    else:
        with pytest.raises(ValueError, match="without rewards"):
            dataset.returns()


@pytest.mark.parametrize("write", WRITERS)
def test_what_a_set_says_of_itself(tmp_path, write):
    write(tmp_path, LENGTHS, made())
    dataset = datasets.open(tmp_path)
    assert dataset.metadata["tasks"] == {0: "push", 1: "pull"}
    assert dataset.metadata["robot_type"] == "arm" and dataset.metadata["fps"] == sets.FPS
    assert dataset.metadata["features"]["action"]["shape"] == [1]
    assert dataset.facts["score"].tolist() == [k / 2 for k in range(len(LENGTHS))]
    assert dataset[1:3].facts["tasks"].tolist() == [("pull",), ("push",)]
    assert any("taken for terminated" in note for note in dataset.notes)


def test_a_set_that_says_little(tmp_path):
    leaves = made(rewards=False)
    sets.write_v21(tmp_path, LENGTHS, {"observation.state": leaves["observation.state"]})
    (tmp_path / "meta" / "tasks.jsonl").unlink()
    dataset = datasets.open(tmp_path)
    assert dataset.metadata["tasks"] == {}
    assert any("all are taken for truncated" in note for note in dataset.notes)
    assert set(dataset.spec) - {"observation", "next"} == {
        "timestamp",
        "frame_index",
        "episode_index",
        "index",
        "task_index",
    }


def test_done_as_truncated(tmp_path):
    columns = sets.write_v30(tmp_path, LENGTHS, made())
    whole = next(datasets.open(tmp_path, done="truncated").steps(sum(LENGTHS)))["next"]
    assert not whole["terminated"].any()
    assert whole["truncated"][columns["next.done"]].all()
    with pytest.raises(ValueError, match="done: expected"):
        datasets.open(tmp_path, done="over")


@pytest.mark.parametrize("names", [("truncated",), ("terminated",), ("terminated", "truncated")])
def test_done_beside_other_flags(tmp_path, names):
    leaves, over = made(), np.zeros(sum(LENGTHS), bool)
    over[np.cumsum(LENGTHS) - 1] = True
    flags = {"terminated": leaves["next.done"], "truncated": over & ~leaves["next.done"]}
    more = {f"next.{name}": flags[name] for name in names} | {"next.done": over}
    sets.write_v30(tmp_path, LENGTHS, leaves | more)
    whole = next(datasets.open(tmp_path).steps(sum(LENGTHS)))["next"]
    for name, flag in flags.items():
        np.testing.assert_array_equal(whole[name], flag)


def test_last_steps_without_next_observations_are_dropped(tmp_path):
    columns = sets.write_v30(tmp_path, LENGTHS, made())
    terminated = columns["next.done"][np.cumsum(LENGTHS) - 1]
    dataset = datasets.open(tmp_path, final="drop")
    assert dataset.lengths.tolist() == (np.array(LENGTHS) - ~terminated).tolist()


def test_other_images(tmp_path):
    rng = np.random.default_rng(0)
    gray = rng.integers(0, 256, (8, 5, 4, 1)).astype(np.uint8)
    sets.write_v30(tmp_path, [3, 5], {"observation.image": gray})
    whole = next(datasets.open(tmp_path).steps(8))
    np.testing.assert_array_equal(whole["observation"]["image"], gray)


@pytest.mark.parametrize("write", WRITERS)
def test_texts_and_unknown_columns_are_left_out_and_told(tmp_path, write):
    text = {"words": {"dtype": "string", "shape": [1], "names": None}}
    write(tmp_path, [2, 3], {"observation.state": np.zeros((5, 2), np.float32)}, features=text)
    for path in (tmp_path / "data").rglob("*.parquet"):
        table = parquet.read_table(path)
        rows = table.num_rows
        table = table.append_column("words", pa.array(["a"] * rows))
        parquet.write_table(table.append_column("odd", pa.array([1] * rows)), path)
    dataset = datasets.open(tmp_path)
    assert any("no numbers are left out: words (string)" in note for note in dataset.notes)
    assert any("not in info.json are left out: odd" in note for note in dataset.notes)
    assert "words" not in dataset.spec and "odd" not in dataset.spec


VIDEO = {"dtype": "video", "shape": [16, 32, 3], "names": ["height", "width", "channels"]}


@pytest.mark.parametrize("write", WRITERS)
def test_videos_that_are_not_there_are_named(tmp_path, write):
    spans = {} if write is sets.write_v21 else {"spans": spans_of([0, 0], [0.0, 0.2])}
    features = {"observation.images.top": VIDEO}
    write(tmp_path, [2, 3], {"observation.state": np.ones((5, 2))}, features=features, **spans)
    for options, why in (({}, "there is no .*mp4|av is not"), ({"videos": False}, "videos=False")):
        dataset = datasets.open(tmp_path, **options)
        assert "images" not in dataset.spec["observation"]
        pattern = f"video observation.images.top is left out: ({why})"
        assert any(re.search(pattern, note) for note in dataset.notes)


def spans_of(files, begins, key="observation.images.top"):
    return {
        f"videos/{key}/chunk_index": [0] * len(files),
        f"videos/{key}/file_index": files,
        f"videos/{key}/from_timestamp": begins,
        f"videos/{key}/to_timestamp": begins,
    }


def write_video(path, levels):
    """Frames of one gray level each."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=sets.FPS, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 32, 16, "yuv420p", 4
        for level in levels:
            image = np.full((16, 32, 3), level, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


LEVELS = np.arange(sum(LENGTHS)) * 5


def with_videos(root, write):
    ends = np.cumsum([0, *LENGTHS]).tolist()
    leaves, features = (
        {"observation.state": made()["observation.state"]},
        {"observation.images.top": VIDEO},
    )
    if write is sets.write_v21:
        write(root, LENGTHS, leaves, features=features)
        for k, (start, stop) in enumerate(itertools.pairwise(ends)):
            folder = root / "videos" / f"chunk-{k // 5:03d}" / "observation.images.top"
            write_video(folder / f"episode_{k:06d}.mp4", LEVELS[start:stop])
        return
    first = ends[7]
    begins = [(end - first * (k >= 7)) / sets.FPS for k, end in enumerate(ends[:-1])]
    spans = spans_of([int(k >= 7) for k in range(12)], begins)
    write(root, LENGTHS, leaves, features=features, spans=spans)
    folder = root / "videos" / "observation.images.top" / "chunk-000"
    write_video(folder / "file-000.mp4", LEVELS[:first])
    write_video(folder / "file-001.mp4", LEVELS[first:])


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="av decodes videos")
@pytest.mark.parametrize("write", WRITERS)
def test_frames_of_videos_are_those_of_the_steps(tmp_path, write):
    with_videos(tmp_path, write)
    dataset = datasets.open(tmp_path)
    assert dataset.spec["observation"]["images"]["top"].shape == (16, 32, 3)
    assert any("decoded from a video" in note for note in dataset.notes)
    ends = np.cumsum([0, *LENGTHS])
    for number in (0, 11, 6, 2, 8, 7, 6):
        frames = dataset[number]["observation"]["images"]["top"]
        levels = LEVELS[ends[number] : ends[number + 1]]
        np.testing.assert_allclose(frames.mean((1, 2, 3)), levels, atol=2)
    whole = next(dataset.steps(sum(LENGTHS)))
    frames = whole["observation"]["images"]["top"]
    np.testing.assert_allclose(frames.mean((1, 2, 3)), LEVELS, atol=2)
    after = whole["next"]["observation"]["images"]["top"][whole["next"]["valid"]]
    np.testing.assert_array_equal(after, frames[np.flatnonzero(whole["next"]["valid"]) + 1])


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="av decodes videos")
def test_bad_videos_are_refused(tmp_path):
    with_videos(tmp_path, sets.write_v30)
    path = tmp_path / "videos" / "observation.images.top" / "chunk-000" / "file-001.mp4"
    write_video(path, LEVELS[:9])
    with pytest.raises(ValueError, match=r"file-001\.mp4: expected a frame at"):
        datasets.open(tmp_path)[-1]
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match=r"file-001\.mp4: expected a whole video"):
        datasets.open(tmp_path)[-1]


def changed(root, change):
    path = root / "meta" / "info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda info: info.update(codebase_version="v1.6"), "expected v2 or v3, got 'v1.6'"),
        (lambda info: info.update(codebase_version=3), "expected v2 or v3"),
        (lambda info: info.update(fps=0), "fps: expected a number above 0"),
        (lambda info: info.update(fps=None), "fps: expected a number above 0"),
        (lambda info: info.update(features=[]), "features: expected dicts"),
        (lambda info: info["features"].update(x={"dtype": "float32"}), "features: expected dicts"),
        (
            lambda info: info["features"].update(x={"dtype": "float32", "shape": [1]}),
            "expected a column 'x'",
        ),
        (lambda info: info["features"].update({"../x": VIDEO}), "names without a slash"),
        (lambda info: info["features"]["action"].update(shape=[10**30]), "for each step"),
        (lambda info: info["features"]["action"].update(shape=[7]), r"\[7\] for each step"),
        (lambda info: info.update(total_episodes=13), "total_episodes: expected 12"),
        (lambda info: info.update(total_frames=51), "total_frames: expected 50"),
        (lambda info: info.update(data_path="../{episode_index}"), "within the folder|a path of"),
        (lambda info: info.update(data_path="/etc/passwd"), "within the folder"),
        (lambda info: info.update(data_path="data/../../x"), "within the folder"),
        (lambda info: info.update(data_path="{video_key.__class__}"), "within the folder"),
        (lambda info: info.update(data_path="{nothing}"), "a path of"),
        (lambda info: info.update(data_path=3), "the template of a path"),
    ],
)
def test_bad_info_is_refused(tmp_path, write, change, told):
    write(tmp_path, LENGTHS, made())
    changed(tmp_path, change)
    with pytest.raises(ValueError, match=told):
        list(datasets.open(tmp_path, format="lerobot"))


@pytest.mark.parametrize("path", ["../../x.mp4", "/x.mp4", "{video_key.x}", "a//b", "videos/.."])
@pytest.mark.parametrize("write", WRITERS)
def test_videos_lie_within_the_folder(tmp_path, write, path):
    spans = {} if write is sets.write_v21 else {"spans": spans_of([0, 0], [0.0, 0.2])}
    features = {"observation.images.top": VIDEO}
    leaves = {"observation.state": np.ones((5, 2))}
    write(tmp_path, [2, 3], leaves, features=features, video_path=path, **spans)
    with pytest.raises(ValueError, match="within the folder"):
        datasets.open(tmp_path)


def edit(rows, number, **changes):
    rows[number].update(changes)
    return rows


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[:3] + rows[4:], r"from 0 to 10, got none with the numbers \[3\]"),
        (lambda rows: [], "from 0|expected a table"),
        (lambda rows: edit(rows, 3, length=0), "episode 3: length: expected a number above 0"),
        (
            lambda rows: edit(rows, 3, length=1 << 50),
            "episode 3: length: expected a number above 0",
        ),
        (lambda rows: edit(rows, 3, length=None), "episode 3: length: expected a number above 0"),
        (lambda rows: edit(rows, 3, episode_index=2), r"with the numbers \[3\]"),
        (lambda rows: edit(rows, 3, episode_index=None), "a number 'episode_index'"),
    ],
)
@pytest.mark.parametrize("write", WRITERS)
def test_bad_episodes_are_refused(tmp_path, write, change, told):
    write(tmp_path, LENGTHS, made())
    if write is sets.write_v21:
        path = tmp_path / "meta" / "episodes.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()][::-1]
        sets.write_lines(path, change(rows))
    else:
        sets.write_episodes(tmp_path, change(sets.read_episodes(tmp_path)))
    with pytest.raises(ValueError, match=told):
        datasets.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: edit(rows, 3, **{"data/file_index": None}), "'data/file_index'"),
        (lambda rows: edit(rows, 3, **{"data/file_index": -1}), "'data/file_index'"),
        (lambda rows: edit(rows, 3, **{"data/file_index": 1}), "side by side"),
        (lambda rows: edit(rows, 11, **{"data/file_index": 7}), "rows, got|nothing"),
    ],
)
def test_bad_places_are_refused(tmp_path, change, told):
    sets.write_v30(tmp_path, LENGTHS, made())
    sets.write_episodes(tmp_path, change(sets.read_episodes(tmp_path)))
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        list(datasets.open(tmp_path))


def test_tables_of_other_lengths_and_episodes_are_refused(tmp_path):
    sets.write_v21(tmp_path, LENGTHS, made())
    data = tmp_path / "data" / "chunk-000"
    table = parquet.read_table(data / "episode_000002.parquet")
    parquet.write_table(table.slice(1), data / "episode_000002.parquet")
    with pytest.raises(ValueError, match=r"episode_000002.parquet: expected 7 rows, got 6"):
        datasets.open(tmp_path)[2]
    other = table.set_column(
        table.column_names.index("episode_index"), "episode_index", pa.array([3] * 7)
    )
    parquet.write_table(other, data / "episode_000002.parquet")
    with pytest.raises(ValueError, match=r"expected a step of episode 2, .* got one of 3"):
        datasets.open(tmp_path)[2]
    (data / "episode_000002.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="episode_000002"):
        datasets.open(tmp_path)[2]


def test_a_column_that_lacks_in_a_file_is_named(tmp_path):
    sets.write_v30(tmp_path, LENGTHS, made())
    path = tmp_path / "data" / "chunk-000" / "file-001.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(["observation.force"]), path)
    with pytest.raises(ValueError, match=r"file-001.parquet: column 'observation.force'.*got none"):
        list(datasets.open(tmp_path))


@pytest.mark.parametrize(
    ("done", "told"),
    [(np.full(50, 0.5), "flags of 0 and 1"), (np.ones((50, 2), bool), "a flag for each step")],
)
def test_bad_flags_are_refused(tmp_path, done, told):
    sets.write_v30(tmp_path, LENGTHS, made() | {"next.done": done})
    with pytest.raises(ValueError, match=f"'next/done': expected {told}"):
        datasets.open(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\x89PNG none", None])
def test_bad_images_are_refused(tmp_path, data):
    sets.write_v30(tmp_path, LENGTHS, made(), per_file=12)
    path = tmp_path / "data" / "chunk-000" / "file-000.parquet"
    table = parquet.read_table(path)
    name = "observation.images.top"
    images = table[name].to_pylist()
    images[30]["bytes"] = data
    column = pa.array(images, table.schema.field(name).type)
    parquet.write_table(table.set_column(table.column_names.index(name), name, column), path)
    with pytest.raises(ValueError, match=r"observation.images.top.*image"):
        list(datasets.open(tmp_path))


def test_images_of_other_sizes_are_refused(tmp_path):
    sets.write_v30(tmp_path, LENGTHS, made(), per_file=12)
    path = tmp_path / "data" / "chunk-000" / "file-000.parquet"
    table = parquet.read_table(path)
    name = "observation.images.top"
    images = table[name].to_pylist()
    images[30] = sets.png(np.zeros((5, 6, 3), np.uint8))
    column = pa.array(images, table.schema.field(name).type)
    parquet.write_table(table.set_column(table.column_names.index(name), name, column), path)
    with pytest.raises(ValueError, match=r"expected uint8 \[4, 6, 3\], got uint8 \[5, 6, 3\]"):
        list(datasets.open(tmp_path))


def test_other_folders_are_no_sets(tmp_path):
    kind = datasets.formats()["lerobot"]
    assert not kind.matches(str(tmp_path))
    (tmp_path / "meta").mkdir()
    for text in ("", "[1]", "{}", "[" * 100_000, '{"features": {}}'):
        (tmp_path / "meta" / "info.json").write_text(text)
        assert not kind.matches(str(tmp_path))
        with pytest.raises(ValueError, match=r"info.json: expected"):
            datasets.open(tmp_path, format="lerobot")
    (tmp_path / "meta" / "info.json").write_bytes(b"\xff\xfe{}")
    assert not kind.matches(str(tmp_path))
    assert not kind.matches([1])


def test_all_entries_of_episodes_are_facts(tmp_path):
    sets.write_v21(tmp_path, LENGTHS, made())
    path = tmp_path / "meta" / "episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line |= {"operator": f"person {line['episode_index'] % 3}", "target": [0.5, line["score"]]}
    sets.write_lines(path, lines)
    facts = datasets.open(tmp_path).facts
    count = len(LENGTHS)
    assert facts["operator"].tolist() == [f"person {k % 3}" for k in range(count)]
    assert facts["target"].tolist() == [(0.5, k / 2) for k in range(count)]
    assert facts["score"].tolist() == [k / 2 for k in range(count)]
