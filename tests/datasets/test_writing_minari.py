"""Sets that are written for Minari: Minari and this package read the same arrays back."""

import contextlib
import errno
import json
import os
import pathlib

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("minari")

import gymnasium
import minari
from gymnasium import spaces

import jrb
import jrb.datasets
from jrb.datasets.formats.minari import Minari
from tests.datasets.formats import minari_sets as sets

pytestmark = [pytest.mark.slow, pytest.mark.interop]

CARTPOLE = pathlib.Path(__file__).parents[1] / "data" / "minari" / "cartpole-v0"


def steps(count, envs, seed=0, ends=0.2):
    """Items `[T, E, ...]` as an environment that resets itself gives them, in NumPy."""
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random((2, count, envs)) < ends / 2
    truncated &= ~terminated
    seen = _seen(rng, (count, envs))
    last = _seen(rng, (count, envs))
    after = jax.tree.map(lambda leaf: np.concatenate([leaf[1:], leaf[:1]]), seen)
    over = terminated | truncated
    over[-1] = True
    mixed = lambda a, b: np.where(over.reshape(over.shape + (1,) * (a.ndim - 2)), a, b)
    return {
        "observation": seen,
        "action": {
            "go": rng.integers(0, 4, (count, envs), np.int32),
            "by": _floats(rng, count, envs),
        },
        "logp": _floats(rng, count, envs),
        "next": {
            "observation": jax.tree.map(mixed, last, after),
            "reward": _floats(rng, count, envs),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        },
    }


def _seen(rng, lead):
    image = rng.integers(0, 256, (*lead, 40, 36), np.uint8)
    bits = rng.random((*lead, 3)) < 0.5
    return {
        "image": image,
        "pair": (rng.integers(-2, 9, lead, np.int32), bits),
        "x": _floats(rng, *lead, 2),
    }


def _floats(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def filled(buffer, items, chunk=5):
    single = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), items)
    state = buffer.init(single)
    count = len(items["logp"])
    for start in range(0, count, chunk):
        rows = slice(start, start + chunk)
        part = jax.tree.map(lambda leaf, rows=rows: jnp.asarray(leaf[rows]), items)
        if buffer.num_envs is None:
            part = jax.tree.map(lambda leaf: leaf[:, 0], part)
        state = buffer.extend(state, part)
    return state


def loaded(path):
    return list(minari.MinariDataset(os.path.join(path, "data")).iterate_episodes())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("capacity", "envs", "count"), [(40, None, 30), (20, None, 35), (21, 3, 10)]
)
def test_minari_reads_what_a_buffer_holds(tmp_path, capacity, envs, count, seed):
    """Rings with room, and wrapped ones; the reference goes through `jrb.episodes` item by item."""
    buffer = jrb.ReplayBuffer(capacity, num_envs=envs)
    items = steps(count, envs or 1, seed)
    state = filled(buffer, items)
    path = tmp_path / "name-v0"
    jrb.datasets.write_minari(path, buffer, state)
    held, found = jrb.episodes(buffer, state), loaded(path)
    assert len(found) == len(held)
    for number, (episode, each) in enumerate(zip(found, held, strict=True)):
        want = each.items
        assert episode.id == number
        after = jax.tree.map(lambda leaf: leaf[-1:], want["next"]["observation"])
        seen = jax.tree.map(lambda *parts: np.concatenate(parts), want["observation"], after)
        sets.assert_same(sets.named(episode.observations), sets.named(seen))
        sets.assert_same(episode.actions, want["action"])
        sets.assert_same(episode.rewards, want["next"]["reward"])
        sets.assert_same(episode.terminations, want["next"]["terminated"])
        assert episode.truncations[:-1].tolist() == want["next"]["truncated"][:-1].tolist()
        assert episode.truncations[-1] == ~want["next"]["terminated"][-1]
        sets.assert_same(episode.infos, {"logp": want["logp"]})
    dataset = jrb.datasets.open(path)
    for name in ("environment", "complete", "cut"):
        assert dataset.facts[name].tolist() == [getattr(each, name) for each in held]
    for back, each in zip(dataset, held, strict=True):
        sets.assert_same(back["next"]["observation"], sets.named(each.items["next"]["observation"]))
    running = sum(not each.complete for each in held)
    assert any("had not ended" in note for note in dataset.notes) == bool(running)


def test_load_dataset_finds_it_with_its_spaces(tmp_path):
    buffer = jrb.ReplayBuffer(40)
    state = filled(buffer, steps(30, 1))
    spec = gymnasium.spec("CartPole-v1")
    about = {"author": "one", "algorithm_name": "none", "description": "a text", "env_spec": spec}
    path = tmp_path / "space" / "name-v3"
    jrb.datasets.write_minari(path, buffer, state, dataset_id="space/name-v3", **about)
    with sets.root(tmp_path):
        dataset = minari.load_dataset("space/name-v3")
        assert "space/name-v3" in minari.list_local_datasets()
    assert dataset.spec.env_spec.id == "CartPole-v1"
    assert dataset.spec.total_steps == 30
    assert dataset.storage.metadata["author"] == {"one"}
    pair = spaces.Tuple((spaces.Discrete(11, start=-2), spaces.MultiBinary(3)))
    whole = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    image = spaces.Box(0, 255, (40, 36), np.uint8)
    assert dataset.observation_space == spaces.Dict({"image": image, "pair": pair, "x": whole})
    by = spaces.Box(-np.inf, np.inf, (), np.float32)
    assert dataset.action_space == spaces.Dict({"by": by, "go": spaces.Discrete(4)})


def test_spaces_that_are_given(tmp_path):
    buffer = jrb.ReplayBuffer(40)
    state = filled(buffer, steps(30, 1))
    pair = spaces.Tuple((spaces.Discrete(20, start=-5), spaces.MultiBinary(3)))
    seen = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (40, 36), np.uint8),
            "pair": pair,
            "x": spaces.Box(-9, 9, (2,)),
        }
    )
    given = {"go": spaces.Discrete(9), "by": spaces.Box(-1, 1, (), np.float64)}
    path = tmp_path / "name-v0"
    given = {"observation_space": seen, "action_space": spaces.Dict(given)}
    jrb.datasets.write_minari(path, buffer, state, **given)
    dataset = minari.MinariDataset(path / "data")
    assert dataset.observation_space == seen
    assert dataset.action_space == given["action_space"]
    about = json.loads((path / "data" / "metadata.json").read_text())
    for form in (json.loads(about["action_space"]), about["action_space"]):
        other = tmp_path / f"{type(form).__name__}-v0"
        jrb.datasets.write_minari(other, buffer, state, action_space=form)
        assert minari.MinariDataset(other / "data").action_space == given["action_space"]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"action_space": spaces.Discrete(4)},
            "action_space: expected a space of arrays of the shapes",
        ),
        (
            {"action_space": spaces.Dict({"go": spaces.Discrete(4)})},
            "action_space: expected a space of arrays",
        ),
        (
            {"action_space": spaces.Dict({"go": spaces.Discrete(4), "by": spaces.Box(0, 1, (2,))})},
            r"action_space: .* got one of .*'actions/by': \(2,\)",
        ),
        ({"dataset_id": "a name"}, "dataset_id: expected <namespace>/<name>-v<number>"),
        ({"dataset_id": "../name-v0"}, "dataset_id: expected"),
        ({"dataset_id": "name"}, "dataset_id: expected"),
        ({"env_spec": "CartPole-v1"}, "env_spec: expected Gymnasium's spec"),
        ({"env_spec": 7}, "env_spec: expected Gymnasium's spec"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, given, match):
    buffer = jrb.ReplayBuffer(40)
    state = filled(buffer, steps(10, 1))
    with pytest.raises(ValueError, match=match):
        jrb.datasets.write_minari(tmp_path / "name-v0", buffer, state, **given)
    assert os.listdir(tmp_path) == []


def test_spaces_of_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="action_space: expected a space of arrays"):
        written(tmp_path / "a-v0", plain(), action_space=spaces.Text(3))
    assert os.listdir(tmp_path) == []


def plain(**changes):
    """Returns four steps of one environment; the last one ends the episode."""
    seen, over = np.arange(5.0, dtype=np.float32), np.arange(4) == 3
    after = {
        "observation": seen[1:],
        "reward": seen[1:],
        "terminated": over,
        "truncated": ~over & over,
    }
    items = {"observation": seen[:-1], "action": np.arange(4, dtype=np.int32), "next": after}
    for name, leaf in changes.items():
        *path, last = name.split("__")
        inner = items["next"] if path else items
        if leaf is None:
            del inner[last]
        else:
            inner[last] = leaf
    return items


def written(path, items, **options):
    items = jax.tree.map(jnp.asarray, items)
    buffer = jrb.ReplayBuffer(10)
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], items)), items)
    jrb.datasets.write_minari(path, buffer, state, **options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"observation": None}, "observation: expected a leaf at 'observation'"),
        ({"action": None}, "action: expected a leaf at 'action'"),
        ({"next__observation": None}, "next_observation: expected a leaf at 'next/observation'"),
        ({"next__reward": None}, "reward: expected a leaf at 'next/reward'"),
        ({"next__terminated": None}, "terminated: expected a leaf at 'next/terminated'"),
        ({"next__truncated": None}, "truncated: expected a leaf at 'next/truncated'"),
        ({"next__truncated": np.zeros(4, np.int32)}, "'next/truncated': expected one bool"),
        ({"next__reward": np.zeros((4, 2), np.float32)}, "'next/reward': expected one number"),
        ({"next__observation": np.zeros(4, np.float32)}, "got another after step 0"),
        (
            {"next__observation": np.zeros((4, 1), np.float32)},
            "expected (next observations|rows) like",
        ),
        (
            {"next__observation": {"a": np.zeros(4, np.float32)}},
            "expected (next observations|rows) like",
        ),
        ({"next__reward": {"a": np.zeros(4, np.float32)}}, "'next/reward': expected an array"),
        ({"action": {"a/b": np.zeros(4, np.float32)}}, "expected names without a slash"),
        ({"action": jnp.zeros(4, jnp.bfloat16)}, "'action': expected a dtype that HDF5 has"),
        (
            {"info": {"x": np.zeros(4, np.int32)}, "x": np.zeros(4, np.int32)},
            "expected one array of each name, got 'infos/x' twice",
        ),
        (
            {
                "info": {"x": np.arange(4, dtype=np.int32)},
                "next__info": {"x": np.arange(4, dtype=np.int32)},
            },
            "'next/info/x': expected what stands before",
        ),
    ],
)
def test_items_that_a_set_cannot_hold_are_refused(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        written(tmp_path / "name-v0", plain(**changes))
    assert os.listdir(tmp_path) == []


def test_an_empty_buffer_and_a_path_that_is_there_are_refused(tmp_path):
    buffer = jrb.ReplayBuffer(10)
    state = buffer.init(jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), plain()))
    with pytest.raises(ValueError, match="at least one episode"):
        jrb.datasets.write_minari(tmp_path / "name-v0", buffer, state)
    assert os.listdir(tmp_path) == []
    (tmp_path / "name-v0").mkdir()
    with pytest.raises(ValueError, match="expected nothing there"):
        jrb.datasets.write_minari(tmp_path / "name-v0", buffer, state)
    for wrong in [(buffer,), (buffer, None), ("x", state), (jrb.datasets.open(CARTPOLE), state)]:
        with pytest.raises(TypeError, match="expected a ReplayBuffer and its state, or a Dataset"):
            jrb.datasets.write_minari(tmp_path / "other-v0", *wrong)


def test_keys_of_ones_own(tmp_path):
    items = plain()
    after = items.pop("next")
    items = {"obs": items["observation"], "act": items["action"], "r": after["reward"]}
    items |= {"over": after["terminated"], "cut": after["truncated"], "obs2": after["observation"]}
    keys = jrb.Keys("obs", "act", "r", "done", "over", "cut", "obs2")
    buffer = jrb.ReplayBuffer(10, keys=keys)
    items = jax.tree.map(jnp.asarray, items)
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], items)), items)
    jrb.datasets.write_minari(tmp_path / "name-v0", buffer, state)
    (episode,) = loaded(tmp_path / "name-v0")
    assert episode.observations.tolist() == [0, 1, 2, 3, 4]
    assert episode.infos == {}


def test_infos_go_there_and_back(tmp_path):
    info = np.arange(5, dtype=np.int32)
    items = plain(info={"a": info[:-1], "b": info[:-1]}, next__info={"a": info[1:]})
    written(tmp_path / "name-v0", items)
    (episode,) = loaded(tmp_path / "name-v0")
    assert episode.infos["a"].tolist() == [0, 1, 2, 3, 4]
    assert episode.infos["b"].tolist() == [0, 1, 2, 3]
    found = jrb.datasets.open(tmp_path / "name-v0")[0]
    assert found["next"]["info"]["a"].tolist() == [1, 2, 3, 4]


def test_arrays_without_an_entry_go_there_and_back(tmp_path):
    written(tmp_path / "name-v0", plain(info={"none": np.zeros((4, 0), np.float32)}))
    dataset = jrb.datasets.open(tmp_path / "name-v0")
    assert dataset[0]["info"]["none"].shape == (4, 0)


def test_steps_without_a_next_observation_are_left_out(tmp_path):
    valid = np.array([True, True, True, False])
    flags = {"next__terminated": ~valid & valid, "next__truncated": ~valid}
    written(tmp_path / "name-v0", plain(**flags, next__valid=valid))
    (episode,) = loaded(tmp_path / "name-v0")
    assert episode.observations.tolist() == [0, 1, 2, 3]
    assert episode.truncations.tolist() == [False, False, True]
    assert "1 steps whose next observation" in jrb.datasets.open(tmp_path / "name-v0").notes[0]
    with pytest.raises(ValueError, match="'next/valid': expected True but for last steps"):
        written(tmp_path / "other-v0", plain(next__valid=~valid))


def test_a_dataset_is_written_as_it_is_read(tmp_path):
    """Minari's episodes are read back bit for bit, with their seeds."""
    dataset = jrb.datasets.open(CARTPOLE)[3:15]
    about = {name: dataset.metadata[name] for name in ("observation_space", "env_spec")}
    jrb.datasets.write_minari(tmp_path / "name-v0", dataset, **about)
    again = jrb.datasets.open(tmp_path / "name-v0")
    for one, other in zip(dataset, again, strict=True):
        sets.assert_same(one, other)
    assert again.facts["seed"].tolist() == list(range(3, 15))
    assert again.facts["rewards_sum"].tolist() == dataset.facts["rewards_sum"].tolist()
    assert again.metadata["observation_space"] == dataset.metadata["observation_space"]
    assert again.metadata["environment"] == "CartPole-v1"


def test_minari_goes_on_with_a_set(tmp_path):
    """It appends what it recorded later."""
    dataset = jrb.datasets.open(CARTPOLE)[:2]
    spec = gymnasium.spec("CartPole-v1")
    jrb.datasets.write_minari(tmp_path / "ours-v0", dataset, env_spec=spec)
    path, more = sets.recorded(tmp_path, gymnasium.make(spec), "theirs-v0", episodes=3)
    ours = minari.MinariDataset(tmp_path / "ours-v0" / "data")
    ours.storage.update_from_storage(minari.MinariDataset(path + "/data").storage)
    found = jrb.datasets.open(tmp_path / "ours-v0")
    assert len(found) == 5
    assert found[4]["action"].tolist() == more[2].actions.tolist()
    assert found.facts["seed"].tolist()[:2] == [0, 1]


def test_whatever_fails_nothing_is_left(tmp_path, monkeypatch):
    """Every sync and renaming fails once; the set is whole, or nothing is there."""

    def failing(name, call):
        def act(*args, **options):
            calls.append(name)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, "no room")
            return call(*args, **options)

        return act

    for name in ("fsync", "replace", "mkdir"):
        monkeypatch.setattr(os, name, failing(name, getattr(os, name)))
    calls, tried, number = [], 0, 0
    while True:
        number, tried = 0, tried + 1
        path = tmp_path / str(tried) / "name-v0"
        path.parent.mkdir()
        calls, number = [], tried
        with contextlib.suppress(OSError):
            written(path, plain())
        if path.exists():  # all went well, or only the last sync, of the folder, failed
            assert len(jrb.datasets.open(path)) == 1
        else:
            assert os.listdir(path.parent) == []
        if len(calls) < tried:
            break
    assert tried > 6
    assert len(jrb.datasets.open(path)) == 1


def test_a_failure_amid_episodes_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, source, numbers):
        yield from pick(self, source, numbers[:3])
        raise KeyboardInterrupt

    dataset, pick = jrb.datasets.open(CARTPOLE), Minari.pick
    monkeypatch.setattr(Minari, "pick", fail)
    with pytest.raises(KeyboardInterrupt):
        jrb.datasets.write_minari(tmp_path / "name-v0", dataset)
    assert os.listdir(tmp_path) == []


def test_what_is_written_is_plain_hdf5(tmp_path):
    written(tmp_path / "name-v0", plain())
    with h5py.File(tmp_path / "name-v0" / "data" / "main_data.hdf5") as file:
        assert list(file) == ["episode_0"]
        assert file["episode_0"].attrs["rewards_sum"] == 10.0
        assert file["episode_0/rewards"].dtype == np.float32


def test_what_a_buffer_in_any_storage_holds(tmp_path):
    """Rows of a file have dtypes that NumPy made anew, and does not call its own."""
    dataset = jrb.datasets.open(CARTPOLE)[:2]
    for name, storage in (("device", None), ("files", jrb.MemmapStorage())):
        path = tmp_path / name / "set-v0"
        jrb.datasets.write_minari(path, *dataset.buffer(storage=storage))
        found = jrb.datasets.open(path)
        for episode, wanted in zip(found, dataset, strict=True):
            for leaf in ("observation", "action"):
                np.testing.assert_array_equal(episode[leaf], wanted[leaf])
            for leaf, value in wanted["next"].items():
                np.testing.assert_array_equal(episode["next"][leaf], value)
