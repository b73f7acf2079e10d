"""Datasets as buffers: exact, in files, resumed after a crash, made only once."""

import functools
import gc
import logging
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import chex
import h5py
import jax
import numpy as np
import pytest

import jrb
from jrb import authoring, datasets, migrate
from jrb.datasets import copies
from tests import seams

pytestmark = pytest.mark.slow

MINARI = pathlib.Path(__file__).parents[1] / "data" / "minari" / "cartpole-v0"
LENGTHS = [3, 1, 7, 2, 5, 1, 9, 4, 6, 2, 8, 3]


def d4rl(path, lengths=LENGTHS, seed=0):
    rng, steps = np.random.default_rng(seed), sum(lengths)
    last = np.zeros(steps, bool)
    last[np.cumsum(lengths) - 1] = True
    terminals = last & (rng.random(steps) < 0.5)
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(steps, 2)).astype(np.float32)
        file["actions"] = rng.integers(0, 5, steps)
        file["rewards"] = np.arange(steps, dtype=np.float64)
        file["terminals"], file["timeouts"] = terminals, last & ~terminals
    return str(path)


@pytest.fixture
def dataset(tmp_path):
    return datasets.open(d4rl(tmp_path / "set.hdf5"))


def whole(dataset):
    """All steps one after the other, in the dtypes that JAX keeps."""
    steps = jax.tree.map(lambda *leaves: np.concatenate(leaves), *dataset)
    keep = lambda leaf: leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return jax.tree.map(keep, steps)


same = functools.partial(chex.assert_trees_all_equal, strict=True)


def storages(tmp_path):
    return jrb.DeviceStorage(), jrb.MemmapStorage(), jrb.MemmapStorage(tmp_path / "files")


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("piece", [1, 400, 8 << 20])
def test_a_buffer_holds_all_steps_in_their_order(dataset, tmp_path, number, piece, monkeypatch):
    monkeypatch.setattr(copies, "_PIECE", piece)
    storage = storages(tmp_path)[number]
    buffer, state = dataset.buffer(storage=storage, batch_size=4)
    assert buffer.capacity == int(buffer.size(state)) == sum(LENGTHS)
    assert buffer.writer == jrb.ReadOnly()
    same(jrb.items(buffer, state), whole(dataset))
    found = jrb.episodes(buffer, state)
    assert [episode.length for episode in found] == LENGTHS
    assert all(episode.complete for episode in found)
    with pytest.raises(TypeError, match="ReadOnly"):
        buffer.extend(state, whole(dataset))


@pytest.mark.slow
@pytest.mark.parametrize("envs", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [LENGTHS, [4] * 30], ids=["uneven", "even"])
def test_each_episode_is_in_one_environment(tmp_path, envs, lengths, monkeypatch):
    monkeypatch.setattr(copies, "_PIECE", 700)
    dataset = datasets.open(d4rl(tmp_path / "set.hdf5", lengths))
    buffer, state = dataset.buffer(
        num_envs=envs, unit=jrb.Sequence(3, partial="pad"), batch_size=64
    )
    assert int(buffer.size(state)) == sum(lengths)
    assert buffer.writer.per_env == (lengths is LENGTHS and envs > 1)
    keep = lambda episode: whole([episode])
    want = {episode["next"]["reward"][0]: keep(episode) for episode in dataset}
    for episode in jrb.episodes(buffer, state):
        same(episode.items, want.pop(episode.items["next"]["reward"][0]))
    assert not want
    drawn = buffer.sample(state, jax.random.key(0))
    rewards = np.asarray(drawn.data["next"]["reward"])
    ends = np.cumsum(lengths)
    episode = np.searchsorted(ends, rewards, side="right")
    assert (episode == episode[:, :1])[np.asarray(drawn.mask)].all()


def test_parts_of_a_dataset(dataset):
    lengths = lambda **which: np.array(
        [episode.length for episode in jrb.episodes(*dataset.buffer(**which))]
    )
    assert lengths(fraction=0.25).tolist() == LENGTHS[:3]
    assert lengths(episodes=2).tolist() == LENGTHS[:2]
    assert lengths(episodes=slice(None, None, 5)).tolist() == LENGTHS[::5]
    assert lengths(episodes=[4, 2]).tolist() == [LENGTHS[4], LENGTHS[2]]
    for which, error in (
        ({"episodes": 0}, ValueError),
        ({"episodes": 13}, ValueError),
        ({"episodes": [12]}, ValueError),
        ({"episodes": [-1]}, ValueError),
        ({"episodes": "all"}, TypeError),
        ({"fraction": 2}, ValueError),
        ({"fraction": 0.5, "episodes": 1}, ValueError),
        ({"root": "x"}, ValueError),
        ({"capacity": 3}, TypeError),
    ):
        with pytest.raises(error):
            dataset.buffer(**which)
    with pytest.raises(ValueError, match="at least one step"):
        dataset[:0].buffer()


def test_dtypes_are_refused_where_that_is_asked_for(dataset):
    with pytest.raises((TypeError, ValueError), match="dtype that JAX keeps"):
        dataset.buffer(cast=False)


class Died(BaseException):
    """In place of a signal that ends the process."""


def dying(at):
    left = [at]

    def hook(*event):
        left[0] -= 1
        if not left[0]:
            raise Died

    return hook


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("envs", [None, 3])
def test_a_copy_goes_on_where_it_was(dataset, tmp_path, envs, monkeypatch, caplog):
    monkeypatch.setattr(copies, "_PIECE", 100)
    monkeypatch.setattr(copies, "_BETWEEN", 200)
    path = tmp_path / "files"
    make = lambda: dataset.buffer(
        storage=jrb.MemmapStorage(path), num_envs=envs, sampler=jrb.Prioritized(), batch_size=4
    )
    rng, deaths, state = np.random.default_rng(0), 0, None
    while state is None:
        at = int(rng.integers(30, 200)) if deaths < 12 else 10**6
        with seams.hooked(dying(at)):
            try:
                buffer, state = make()
            except Died:
                deaths += 1
        gc.collect()
    assert deaths >= 3
    assert "continuing a copy" in caplog.text
    want = dataset.buffer(num_envs=envs, sampler=jrb.Prioritized(), batch_size=4)
    same(jrb.items(buffer, state), jrb.items(*want))
    for mine, other in zip(
        jax.tree.leaves(state.replace(storage=None)),
        jax.tree.leaves(want[1].replace(storage=None)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, other)
    assert jrb.checkpoint.verify(path) == []


KILLED = """
import os, random, signal, sys
import jrb
from jrb.datasets import copies
from tests import seams

source, path, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
copies._PIECE, copies._BETWEEN = 100, 200
left = random.Random(seed).randrange(100, 250) if seed else 0
def kill(*event):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
seams.set_hook(kill)
jrb.datasets.open(source).buffer(storage=jrb.MemmapStorage(path))
"""


@pytest.mark.slow
@pytest.mark.faults
def test_a_copy_whose_process_is_killed_goes_on(dataset, tmp_path):
    command = [sys.executable, "-c", KILLED, dataset.source, str(tmp_path / "files")]
    root = pathlib.Path(__file__).parents[2]
    run = lambda seed: subprocess.run([*command, str(seed)], check=False, cwd=root).returncode
    assert [run(seed) for seed in (1, 2, 0)] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    buffer, state = dataset.buffer(storage=jrb.MemmapStorage(tmp_path / "files"))
    same(jrb.items(buffer, state), whole(dataset))


@pytest.mark.parametrize("envs", [None, 3])
@pytest.mark.parametrize(
    "parts",
    [
        {"unit": jrb.NStep(3, 0.9)},
        {"unit": jrb.Sequence(3), "sampler": jrb.Prioritized()},
        {"unit": jrb.FrameStack(2), "sampler": jrb.WithoutReplacement()},
        {"transforms": (jrb.transforms.RunningNormalize(),)},
    ],
    ids=repr,
)
def test_a_copy_serves_other_parts(dataset, tmp_path, parts, envs, monkeypatch):
    monkeypatch.setattr(migrate, "_PIECE", 500)
    storage = jrb.MemmapStorage(tmp_path / "files")
    dataset.buffer(storage=storage, num_envs=envs)
    buffer, state = dataset.buffer(storage=storage, num_envs=envs, batch_size=16, **parts)
    want, its = dataset.buffer(num_envs=envs, batch_size=16, **parts)
    assert buffer.sampler == want.sampler
    assert buffer.unit == want.unit
    for seed in range(3):
        got, expected = (
            each.draw(there, jax.random.key(seed))[1]
            for each, there in ((buffer, state), (want, its))
        )
        for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5)


def test_a_path_with_something_else_is_left_alone(dataset, tmp_path):
    path = tmp_path / "files"
    storage = jrb.MemmapStorage(path)
    dataset.buffer(storage=storage)
    with pytest.raises(ValueError, match="a copy of this dataset"):
        dataset.buffer(storage=storage, episodes=3)
    with pytest.raises(ValueError, match="a copy of this dataset"):
        dataset.buffer(storage=storage, num_envs=2)
    os.utime(dataset.source, ns=(1, 1))
    with pytest.raises(ValueError, match="changed since"):
        dataset.buffer(storage=storage)
    buffer, state = jrb.from_items({"x": np.arange(3, dtype=np.int32)})
    jrb.save(tmp_path / "other", buffer, state)
    with pytest.raises(ValueError, match="found another store"):
        dataset.buffer(storage=jrb.MemmapStorage(tmp_path / "other"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="empty folder"):
        dataset.buffer(storage=jrb.MemmapStorage(tmp_path / "text"))
    assert (tmp_path / "text" / "notes").read_text() == "mine"


def test_a_copy_is_made_once_for_each_content(dataset, tmp_path, monkeypatch):
    root = tmp_path / "root"
    make = lambda dataset, **which: dataset.buffer(cache=True, root=root, **which)
    buffer, state = make(dataset)
    same(jrb.items(buffer, state), whole(dataset))
    copied = os.listdir(root)
    monkeypatch.setattr(copies, "write_streams", None)  # nothing is made any more
    same(jrb.items(*make(dataset, unit=jrb.NStep(2, 0.9))), whole(dataset))
    same(jrb.items(*make(dataset, storage=jrb.DeviceStorage())), whole(dataset))
    elsewhere = tmp_path / "folder" / "set.hdf5"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(pathlib.Path(dataset.source).read_bytes())
    same(jrb.items(*make(datasets.open(elsewhere))), whole(dataset))
    assert sorted(os.listdir(root)) == sorted(copied)
    with pytest.raises(TypeError):
        make(dataset, episodes=3)  # another copy
    with h5py.File(elsewhere, "r+") as file:
        file["rewards"][0] = -1
    with pytest.raises(TypeError):
        make(datasets.open(elsewhere))  # as many bytes, of another content


def test_a_copy_has_the_dtypes_that_jax_has_then(dataset, tmp_path):
    rewards = lambda: jrb.items(*dataset.buffer(cache=True, root=tmp_path / "root"))["next"][
        "reward"
    ]
    with authoring.enable_x64():
        assert rewards().dtype == np.float64
    assert rewards().dtype == np.float32
    with authoring.enable_x64():
        assert rewards().dtype == np.float64


def test_what_cannot_be_cached_is_refused(dataset, tmp_path):
    class Doubled:
        def __call__(self, data):
            return data

        def inverse(self, item):
            return item

    with pytest.raises(ValueError, match="without an inverse"):
        dataset.buffer(cache=True, root=tmp_path, transforms=(Doubled(),))


def test_one_makes_a_copy_and_others_wait(dataset, tmp_path, monkeypatch, caplog):
    """They are told by the lock, and open what was made."""
    monkeypatch.setattr(copies, "_PAUSE", 0.01)
    path, _ = copies.copy_of(dataset, None, str(tmp_path))
    entered, found = threading.Event(), []
    make = lambda: found.append(dataset.buffer(cache=True, root=tmp_path))
    with copies.lock_copy(path, wait=False):
        monkeypatch.setattr(copies._log, "warning", lambda *_: entered.set(), raising=True)
        thread = threading.Thread(target=make)
        thread.start()
        assert entered.wait(60)
        with pytest.raises(jrb.checkpoint.LockedError), copies.lock_copy(path, wait=False):
            pass
    thread.join()
    same(jrb.items(*found[0]), whole(dataset))


@pytest.mark.slow
def test_two_processes_make_one_copy(dataset, tmp_path):
    processes = multiprocessing.get_context("spawn")
    with processes.Pool(2) as pool:
        counts = pool.starmap(made_in, [(dataset.source, str(tmp_path / "root"))] * 2)
    assert counts == [sum(LENGTHS)] * 2


def made_in(source, root):
    logging.disable()
    buffer, state = datasets.open(source).buffer(cache=True, root=root)
    return int(buffer.size(state))


def linked(folder, path):
    """A set of Minari, in the cache's eyes a folder, whose files lie behind a link."""
    shutil.copytree(MINARI, path)
    os.makedirs(folder)
    os.symlink(path / "data", folder / "data")
    return str(folder)


def test_what_lies_behind_links_tells_sets_apart(tmp_path):
    made = [linked(tmp_path / name / "set", tmp_path / f"files-{name}") for name in "ab"]
    with h5py.File(tmp_path / "files-b" / "data" / "main_data.hdf5", "r+") as file:
        file["episode_0/rewards"][...] = 77
    os.symlink(tmp_path / "a", tmp_path / "a" / "set" / "round")
    os.symlink("nowhere", tmp_path / "a" / "set" / "dangling")
    os.mkfifo(tmp_path / "a" / "set" / "pipe")
    for path, reward in zip(made, (1, 77), strict=True):
        buffer, state = datasets.open(path).buffer(episodes=1, cache=True, root=tmp_path / "root")
        assert set(np.asarray(jrb.items(buffer, state)["next"]["reward"]).tolist()) == {reward}


def test_joined_sets_are_told_by_their_parts(tmp_path):
    parts = [datasets.open(d4rl(tmp_path / name, seed=seed)) for name, seed in (("a", 0), ("b", 1))]
    keep = {"cache": True, "root": tmp_path / "root"}
    for chosen in (parts, parts[::-1], [parts[0], parts[1][:3]]):
        joined = datasets.concatenate(*chosen)
        for _ in range(2):
            same(jrb.items(*joined.buffer(**keep)), jrb.items(*joined.buffer()))
    path = jrb.MemmapStorage(tmp_path / "files")
    same(jrb.items(*joined.buffer(storage=path)), jrb.items(*joined.buffer()))
    with pytest.raises(ValueError, match="another store"):
        datasets.concatenate(*parts).buffer(storage=path)


@pytest.mark.parametrize("lengths", [LENGTHS[:-1], [*LENGTHS, 2]])
@pytest.mark.parametrize("envs", [None, 2])
def test_files_that_were_changed_since_are_refused(tmp_path, lengths, envs):
    path = tmp_path / "set.hdf5"
    dataset = datasets.open(d4rl(path))
    d4rl(path, lengths)
    if lengths[: len(LENGTHS)] != LENGTHS:
        places = (
            {},
            {"cache": True, "root": tmp_path},
            {"storage": jrb.MemmapStorage(tmp_path / "f")},
        )
        for where in places:
            with pytest.raises(ValueError, match=r"changed since\. Open it again"):
                dataset.buffer(num_envs=envs, **where)
    d4rl(path, LENGTHS[::-1])
    with pytest.raises(ValueError, match="up to episode"):
        list(dataset)
    with pytest.raises(ValueError, match="changed since"):
        dataset[2]


def test_a_copy_made_of_changed_files_is_nobody_elses(tmp_path):
    """The ends that were looked up before belong to it."""
    path = tmp_path / "set.hdf5"
    dataset = datasets.open(d4rl(path))
    d4rl(path, LENGTHS[::-1], seed=1)
    dataset.buffer(cache=True, root=tmp_path)
    again = datasets.open(path)
    same(jrb.items(*again.buffer(cache=True, root=tmp_path)), jrb.items(*again.buffer()))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"num_envs": 0}, ValueError, "num_envs: expected at least 1, got 0"),
        ({"num_envs": -2}, ValueError, "num_envs: expected at least 1, got -2"),
        ({"num_envs": 2.0}, TypeError, "num_envs: expected an integer"),
        ({"writer": jrb.RoundRobin()}, TypeError, "writer: expected none"),
        ({"capacity": 7}, TypeError, "capacity: expected none.* got 7"),
    ],
)
def test_what_a_dataset_chooses_itself_is_refused(dataset, given, error, match):
    with pytest.raises(error, match=match):
        dataset.buffer(**given)
