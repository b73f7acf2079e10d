import itertools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import datasets
from jrb.datasets.writing.lerobot.stats import joined, stats_of
from tests.datasets.kinds.trees import flat, same

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")
import pyarrow as pa
import pyarrow.parquet as parquet

pytestmark = pytest.mark.slow

LENGTHS = [5, 1, 7, 3, 1, 1, 9, 2, 4, 6, 8, 3]
LACKING = ("timestamp", "frame_index", "episode_index", "index")


def made(lengths=LENGTHS, seed=0):
    """Items of whole episodes, in TED."""
    rng, steps = np.random.default_rng(seed), sum(lengths)
    ends = np.cumsum(lengths) - 1
    over = np.zeros(steps, bool)
    over[ends] = True
    terminated = over & rng.integers(0, 2, steps).astype(bool)
    seen = {
        "arm": rng.normal(size=(steps, 3)).astype(np.float32),
        "camera": rng.integers(0, 256, (steps, 5, 4, 3)).astype(np.uint8),
        "gray": rng.integers(0, 256, (steps, 5, 4, 1)).astype(np.uint8),
        "grid": rng.integers(-9, 9, (steps, 2, 3)).astype(np.int16),
        "on": rng.integers(0, 2, steps).astype(bool),
    }
    after = {name: np.roll(leaf, -1, 0) for name, leaf in seen.items()}
    for leaf in after.values():
        leaf[ends] = 1
    reward = rng.normal(size=(steps, 1)).astype(np.float32)
    reward[3] = np.nan
    return {
        "observation": seen,
        "action": rng.integers(0, 4, steps).astype(np.int32),
        "next": {
            "observation": after,
            "reward": reward,
            "done": over,
            "terminated": terminated,
            "truncated": over & ~terminated,
        },
        "half": {"one": rng.normal(size=(steps, 1)).astype(np.float16)},
    }


def held(items, keys=jrb.TED, capacity=None):
    """A buffer that holds them."""
    steps = len(jax.tree.leaves(items)[0])
    buffer = jrb.ReplayBuffer(capacity or steps, keys=keys)
    example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), items)
    return buffer, jrb.jitted(buffer).extend(buffer.init(example), jax.tree.map(jnp.asarray, items))


def check(found, wanted, start, stop):
    """An episode that was read holds what the items did, but what LeRobot has no place for."""
    found, wanted = flat(found), {name: leaf[start:stop] for name, leaf in flat(wanted).items()}
    valid = found.pop("next/valid", np.ones(stop - start, bool))
    for name in LACKING:
        found.pop(name)
    np.testing.assert_array_equal(found.pop("task_index"), np.zeros(stop - start))
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        assert found[name].dtype == leaf.dtype, name
        assert found[name].shape == leaf.shape, name
        inner = slice(None, -1) if name.startswith("next/observation") else slice(None)
        np.testing.assert_array_equal(found[name][inner], leaf[inner], err_msg=name)
    np.testing.assert_array_equal(valid[:-1], True)
    assert valid[-1] == wanted["next/terminated"][-1]


@pytest.mark.parametrize("images", [True, False])
def test_what_was_written_is_read_back(tmp_path, images):
    items = made()
    datasets.write_lerobot(
        tmp_path / "new" / "set", *held(items), fps=20, robot_type="arm", task="push", images=images
    )
    dataset = datasets.open(tmp_path / "new" / "set")
    assert dataset.kind.name == "lerobot"
    assert dataset.lengths.tolist() == LENGTHS
    assert dataset.metadata["tasks"] == {0: "push"}
    assert dataset.metadata["robot_type"] == "arm"
    ends = np.cumsum([0, *LENGTHS]).tolist()
    for episode, (start, stop) in zip(dataset, itertools.pairwise(ends), strict=True):
        check(episode, items, start, stop)
    whole = next(dataset.steps(sum(LENGTHS)))
    frames = np.concatenate([np.arange(length) for length in LENGTHS])
    np.testing.assert_array_equal(whole["frame_index"], frames)
    np.testing.assert_array_equal(whole["index"], np.arange(sum(LENGTHS)))
    np.testing.assert_array_equal(whole["timestamp"], (frames / 20).astype(np.float32))
    assert os.listdir(tmp_path) == ["new"]
    assert os.listdir(tmp_path / "new") == ["set"]


def test_next_observations_are_features_where_that_is_wished(tmp_path):
    items = made()
    buffer, state = held(items)
    datasets.write_lerobot(tmp_path / "set", buffer, state, fps=20, next_observations=True)
    for leaf in items["next"]["observation"].values():
        leaf[:] = leaf[::-1]
    with pytest.raises(
        ValueError, match=r"'next/observation/arm': .* in episode 0\. Give next_obs"
    ):
        datasets.write_lerobot(tmp_path / "other", *held(items), fps=20)
    assert os.listdir(tmp_path) == ["set"]
    datasets.write_lerobot(tmp_path / "other", *held(items), fps=20, next_observations=True)
    whole = flat(next(datasets.open(tmp_path / "other").steps(sum(LENGTHS))))
    for name, leaf in flat(items).items():
        np.testing.assert_array_equal(whole[name], leaf, err_msg=name)


def test_names_of_lerobot(tmp_path):
    items = {
        "obs": np.arange(6, dtype=np.float32).reshape(6, 1),
        "act": np.ones((6, 2), np.float32),
        "r": np.ones(6, np.float32),
        "end": np.arange(6) == 5,
    }
    keys = jrb.Keys(observation="obs", action="act", reward="r", done="end")
    datasets.write_lerobot(tmp_path / "set", *held(items, keys), fps=1)
    info = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())
    told = {name: (each["dtype"], each["shape"]) for name, each in info["features"].items()}
    assert told == {
        "observation.state": ("float32", [1]),
        "action": ("float32", [2]),
        "next.reward": ("float32", [1]),
        "next.done": ("bool", [1]),
        "timestamp": ("float32", [1]),
        "frame_index": ("int64", [1]),
        "episode_index": ("int64", [1]),
        "index": ("int64", [1]),
        "task_index": ("int64", [1]),
    }
    found = flat(datasets.open(tmp_path / "set")[0])
    np.testing.assert_array_equal(found["observation"], items["obs"])
    assert found["next/terminated"].tolist() == items["end"].tolist()


def test_flags_with_an_axis_are_read_back_without(tmp_path):
    items = made()
    flags = {name: items["next"][name] for name in ("done", "terminated", "truncated")}
    items["next"] |= {name: leaf[:, None] for name, leaf in flags.items()}
    datasets.write_lerobot(tmp_path / "set", *held(items), fps=20)
    whole = next(datasets.open(tmp_path / "set").steps(50))["next"]
    for name, flag in flags.items():
        np.testing.assert_array_equal(whole[name], flag)


def test_a_changed_byte_of_a_table_is_seen(tmp_path):
    items = {"action": np.arange(50, dtype=np.float32)[:, None] ** 3, "next": {}}
    items["next"]["done"] = np.arange(50) == 49
    datasets.write_lerobot(tmp_path / "set", *held(items), fps=20)
    path = tmp_path / "set" / "data" / "chunk-000" / "file-000.parquet"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="expected a whole Parquet"):
        list(datasets.open(tmp_path / "set"))


def test_files_are_as_lerobot_reads_them(tmp_path):
    items = made()
    items["next"]["reward"][3] = 0
    datasets.write_lerobot(tmp_path / "set", *held(items), fps=20, task="push")
    meta = tmp_path / "set" / "meta"
    info = json.loads((meta / "info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"]) == (12, 50)
    assert info["splits"] == {"train": "0:12"}
    table = parquet.read_table(tmp_path / "set" / "data" / "chunk-000" / "file-000.parquet")
    assert set(table.column_names) == set(info["features"])
    assert table["observation.camera"].type == pa.struct(
        {"bytes": pa.binary(), "path": pa.string()}
    )
    assert parquet.read_metadata(
        tmp_path / "set" / "data" / "chunk-000" / "file-000.parquet"
    ).num_row_groups == len(LENGTHS)
    rows = parquet.read_table(meta / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    ends = np.cumsum([0, *LENGTHS]).tolist()
    assert [row["dataset_from_index"] for row in rows] == ends[:-1]
    assert [row["dataset_to_index"] for row in rows] == ends[1:]
    assert all(row["tasks"] == ["push"] for row in rows)
    np.testing.assert_allclose(
        rows[6]["stats/observation.arm/mean"],
        items["observation"]["arm"][ends[6] : ends[7]].mean(0, np.float64),
    )
    stats = json.loads((meta / "stats.json").read_text())
    assert set(stats) == set(info["features"])
    arm = items["observation"]["arm"].astype(np.float64)
    camera = items["observation"]["camera"] / 255
    for name, reduce in {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}.items():
        np.testing.assert_allclose(stats["observation.arm"][name], reduce(arm, 0), rtol=1e-6)
        wanted = reduce(camera, (0, 1, 2))[:, None, None]
        np.testing.assert_allclose(stats["observation.camera"][name], wanted, rtol=1e-6)
        assert np.shape(stats["action"][name]) == (1,)
    assert stats["observation.gray"]["count"] == [50]


def test_tasks_are_a_table_of_pandas(tmp_path):
    pandas = pytest.importorskip("pandas")
    items = made() | {"task_index": np.repeat(np.arange(12, dtype=np.int32) % 2, LENGTHS)}
    datasets.write_lerobot(tmp_path / "set", *held(items), fps=20, task=["push", "pull"])
    tasks = pandas.read_parquet(tmp_path / "set" / "meta" / "tasks.parquet")
    assert [tasks.iloc[number].name for number in (0, 1)] == ["push", "pull"]
    assert int(tasks.loc["pull"].task_index) == 1
    dataset = datasets.open(tmp_path / "set")
    assert dataset.metadata["tasks"] == {0: "push", 1: "pull"}
    assert dataset.facts["tasks"].tolist() == [("push",), ("pull",)] * 6
    whole = next(dataset.steps(50))
    np.testing.assert_array_equal(whole["task_index"], items["task_index"])


def test_tables_of_some_size(tmp_path):
    items = made([40, 1, 70, 30] * 3)
    items["wide"] = np.random.default_rng(0).normal(size=(423, 1500)).astype(np.float32)
    datasets.write_lerobot(tmp_path / "set", *held(items), fps=20, file_mb=1)
    names = sorted(os.listdir(tmp_path / "set" / "data" / "chunk-000"))
    assert names == [f"file-{number:03d}.parquet" for number in range(len(names))]
    assert len(names) > 2
    dataset = datasets.open(tmp_path / "set")
    check(dataset[10], items, 323, 393)
    np.testing.assert_array_equal(next(dataset.steps(423))["wide"], items["wide"])


@pytest.mark.parametrize("whole", [True, False])
def test_of_a_ring_that_went_round_what_is_held(tmp_path, whole):
    items = made()
    flags = {name: leaf for name, leaf in items["next"].items() if name != "observation"}
    steps = {"action": items["action"], "next": flags}
    buffer, state = held(steps, capacity=40)
    datasets.write_lerobot(tmp_path / "set", buffer, state, fps=20, whole=whole)
    dataset = datasets.open(tmp_path / "set")
    assert dataset.lengths.tolist() == [3, *LENGTHS[3:]] if not whole else LENGTHS[3:]
    action = next(dataset.steps(50))["action"]
    np.testing.assert_array_equal(action, items["action"][50 - len(action) :])


def test_environments_follow_each_other(tmp_path):
    rng = np.random.default_rng(0)
    buffer = jrb.ReplayBuffer(60, num_envs=3)
    items = {
        "observation": rng.normal(size=(20, 3, 2)).astype(np.float32),
        "next": {"done": rng.random((20, 3)) < 0.2},
    }
    example = jax.tree.map(lambda leaf: leaf[0, 0], items)
    state = jrb.jitted(buffer).extend(buffer.init(example), jax.tree.map(jnp.asarray, items))
    datasets.write_lerobot(tmp_path / "set", buffer, state, fps=20)
    dataset = datasets.open(tmp_path / "set")
    every = jrb.episodes(buffer, state)
    assert dataset.lengths.tolist() == [len(each) for each in every]
    for episode, each in zip(dataset, every, strict=True):
        np.testing.assert_array_equal(episode["observation"], each.items["observation"])
        complete = each.items["next"]["done"]
        np.testing.assert_array_equal(episode["next"]["terminated"], complete)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"key": lambda: jax.random.split(jax.random.key(0), 50)}, "leaf 'key': expected a dtype"),
        ({"b": lambda: jnp.zeros(50, jnp.bfloat16)}, "leaf 'b': expected a dtype .* bfloat16"),
        ({"c": lambda: jnp.zeros(50, jnp.complex64)}, "leaf 'c': expected a dtype"),
        ({"none": lambda: jnp.zeros((50, 0))}, "leaf 'none': expected at most 5 axes"),
        ({"many": lambda: jnp.zeros((50, 1, 1, 1, 1, 1, 1))}, "leaf 'many': expected at most"),
        ({"half.one": lambda: jnp.zeros(50)}, "expected a name of its own, got 'half.one'"),
    ],
)
def test_what_lerobot_cannot_hold_is_refused(tmp_path, change, told):
    items = made() | {name: leaf() for name, leaf in change.items()}
    with pytest.raises(ValueError, match=told):
        datasets.write_lerobot(tmp_path / "set", *held(items), fps=20)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"fps": 0}, ValueError, "fps"),
        ({"fps": 2.5}, TypeError, "fps"),
        ({"file_mb": 0}, ValueError, "file_mb"),
        ({"task": ["push"]}, ValueError, "expected a leaf 'task_index'"),
        ({"task": []}, TypeError, "task: expected a text"),
        ({"task": [1]}, TypeError, "task: expected a text"),
        ({"task": ["a", "a"]}, ValueError, "texts that differ"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, error, told):
    with pytest.raises(error, match=told):
        datasets.write_lerobot(tmp_path / "set", *held(made()), **{"fps": 20, **options})
    assert os.listdir(tmp_path) == []


def test_numbers_of_tasks_have_texts(tmp_path):
    items = made() | {"task_index": np.full(50, 2, np.int32)}
    with pytest.raises(ValueError, match="task_index: expected numbers from 0 to 1, got 2 to 2"):
        datasets.write_lerobot(tmp_path / "set", *held(items), fps=20, task=["push", "pull"])
    assert os.listdir(tmp_path) == []


def test_an_empty_buffer_and_a_path_that_is_taken_are_refused(tmp_path):
    buffer, state = held(made())
    with pytest.raises(ValueError, match="holds episodes, got none"):
        datasets.write_lerobot(tmp_path / "set", buffer, buffer.empty(state), fps=20)
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError, match="expected nothing there"):
        datasets.write_lerobot(tmp_path / "set", buffer, state, fps=20)


def test_what_fails_midway_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no space")

    monkeypatch.setattr("jrb.datasets.writing.beside._sync", fails)
    with pytest.raises(OSError, match="no space"):
        datasets.write_lerobot(tmp_path / "set", *held(made()), fps=20)
    assert os.listdir(tmp_path) == []


def test_statistics_are_joined_as_if_of_all():
    rng = np.random.default_rng(0)
    parts = [rng.normal(n, n + 1, size=(n + 1, 3)) for n in range(5)]
    found = None
    for part in parts:
        found = joined(found, stats_of(part, False))
    for name, wanted in stats_of(np.concatenate(parts), False).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-12)


def test_a_dataset_is_written_as_it_is_read(tmp_path):
    buffer, state = held(made())
    datasets.write_lerobot(tmp_path / "a", buffer, state, fps=20, next_observations=True)
    dataset = datasets.open(tmp_path / "a")
    datasets.write_lerobot(tmp_path / "b", dataset, fps=20, next_observations=True)
    again = datasets.open(tmp_path / "b")
    assert again.lengths.tolist() == LENGTHS
    for one, other in zip(dataset, again, strict=True):
        same(one, flat(other))
    with pytest.raises(TypeError, match="expected a ReplayBuffer and its state, or a Dataset"):
        datasets.write_lerobot(tmp_path / "c", buffer, fps=20)
