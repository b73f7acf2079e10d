import os

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.datasets.access import assert_same, check_access
from tests.datasets.streams import cut_off, episodes_of, filled

pytestmark = pytest.mark.slow


def expected_of(episode, ended=True):
    """Returns an episode as the set reads it: a running episode is truncated."""
    after = dict(episode["next"])
    if not ended:
        last = np.arange(len(after["reward"])) == len(after["reward"]) - 1
        after["truncated"] = after["done"] = last
    return {**episode, "next": after}


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_is_read_back(tmp_path, seed):
    episodes = episodes_of(seed)
    jrb.datasets.write_d4rl(tmp_path / "a.hdf5", *filled(episodes))
    dataset = jrb.datasets.open(tmp_path / "a.hdf5")
    assert dataset.format.name == "d4rl"
    assert dataset.metadata["running"] == 0
    check_access(dataset, list(map(expected_of, episodes)))
    assert os.listdir(tmp_path) == ["a.hdf5"]
    assert os.stat(tmp_path / "a.hdf5").st_mode & 0o777 == 0o666 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_layout_is_that_of_d4rl(tmp_path):
    episodes = episodes_of(0)
    jrb.datasets.write_d4rl(tmp_path / "a.hdf5", *filled(episodes))
    with h5py.File(tmp_path / "a.hdf5") as file:
        names = {"observations", "actions", "rewards", "terminals", "timeouts", "infos"}
        assert set(file) == names | {"next_observations"}
        assert list(file["infos"]) == ["goal"]
        done = np.concatenate([episode["next"]["done"] for episode in episodes])
        np.testing.assert_array_equal(file["terminals"][:] | file["timeouts"][:], done)


def test_a_wrapped_ring_and_a_running_episode(tmp_path):
    episodes = episodes_of(1, 6)
    running = cut_off(episodes_of(7, 1)[0], 1)
    lengths = [len(episode["action"]) for episode in episodes]
    held = sum(lengths[2:]) + 1
    buffer, state = filled([*episodes, running], capacity=held)
    jrb.datasets.write_d4rl(tmp_path / "a.hdf5", buffer, state)
    dataset = jrb.datasets.open(tmp_path / "a.hdf5")
    expected = [*map(expected_of, episodes[2:]), expected_of(running, running["next"]["done"][-1])]
    check_access(dataset, expected)
    assert dataset.metadata["running"] == int(not running["next"]["done"][-1])
    assert dataset.metadata["cut"] == 1


def test_environments_one_episode_after_the_other(tmp_path):
    pairs = [episodes_of(seed, 1)[0] for seed in (3, 4)]
    steps = min(len(episode["action"]) for episode in pairs)
    items = [cut_off(episode, steps) for episode in pairs]
    buffer = jrb.ReplayBuffer(2 * steps, num_envs=2)
    both = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *items)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], both))
    state = buffer.extend(state, both)
    jrb.datasets.write_d4rl(tmp_path / "a.hdf5", buffer, state)
    dataset = jrb.datasets.open(tmp_path / "a.hdf5")
    for episode, item in zip(dataset, items, strict=True):
        assert_same(episode["observation"], item["observation"])
        assert_same(episode["next"]["reward"], item["next"]["reward"])


def test_other_keys_and_done_alone(tmp_path):
    keys = jrb.Keys(observation="obs", next_observation="obs2", reward="r", done="over")
    buffer = jrb.ReplayBuffer(4, keys=keys)
    items = {
        "obs": jnp.arange(4.0),
        "obs2": jnp.arange(1.0, 5.0),
        "action": jnp.arange(4),
        "r": jnp.ones(4),
        "over": jnp.array([0, 1, 0, 0], jnp.float32),
    }
    state = buffer.extend(buffer.init({name: leaf[0] for name, leaf in items.items()}), items)
    jrb.datasets.write_d4rl(tmp_path / "a.hdf5", buffer, state)
    first, second = jrb.datasets.open(tmp_path / "a.hdf5")
    assert first["next"]["terminated"].tolist() == [False, True]
    assert second["next"]["truncated"].tolist() == [False, True]
    assert second["next"]["observation"].tolist() == [3.0, 4.0]


def test_last_observations_that_lack_are_not_written(tmp_path):
    episodes = episodes_of(0, 3)
    for episode in episodes:
        count = len(episode["action"])
        episode["next"]["valid"] = ~episode["next"]["truncated"]
        episode["next"]["observation"][count - 1] = 0
    jrb.datasets.write_d4rl(tmp_path / "a.hdf5", *filled(episodes))
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert "next_observations" not in file
    is_cut = any(episode["next"]["truncated"].any() for episode in episodes)
    assert is_cut
    check_access(jrb.datasets.open(tmp_path / "a.hdf5"), episodes)


def changed(**more):
    episodes = episodes_of(0, 2)
    for episode in episodes:
        for name, leaf in more.items():
            episode[name] = leaf(episode)
    return episodes


def test_what_the_layout_lacks_is_refused(tmp_path):
    path = tmp_path / "a.hdf5"
    for episodes, message in [
        (changed(observation=lambda e: {"a": e["observation"]}), "one array 'observation'"),
        (changed(low=lambda e: np.zeros(len(e["action"]), jnp.bfloat16)), "a dtype that HDF5 has"),
    ]:
        with pytest.raises(ValueError, match=message):
            jrb.datasets.write_d4rl(path, *filled(episodes))
    episodes = episodes_of(0, 2)
    for episode in episodes:
        del episode["next"]["observation"]
    with pytest.raises(ValueError, match="expected items with 'next/observation'"):
        jrb.datasets.write_d4rl(path, *filled(episodes))
    buffer, state = filled(episodes_of(0, 2))
    with pytest.raises(ValueError, match="an empty one"):
        jrb.datasets.write_d4rl(path, buffer, buffer.empty(state))
    assert os.listdir(tmp_path) == []


def test_what_is_there_stays(tmp_path):
    path = tmp_path / "a.hdf5"
    path.write_text("mine")
    with pytest.raises(ValueError, match="found something"):
        jrb.datasets.write_d4rl(path, *filled(episodes_of(0)))
    assert path.read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="expected no broken link"):
        jrb.datasets.write_d4rl(tmp_path / "link", *filled(episodes_of(0)))


@pytest.mark.faults
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_is_left_after_a_failure(tmp_path, monkeypatch, error):
    count, put = [0], h5py.Dataset.__setitem__

    def fail(self, *rest):
        count[0] += 1
        if count[0] == 9:
            raise error("full")
        put(self, *rest)

    monkeypatch.setattr(h5py.Dataset, "__setitem__", fail)
    with pytest.raises(error):
        jrb.datasets.write_d4rl(tmp_path / "a.hdf5", *filled(episodes_of(0)))
    assert os.listdir(tmp_path) == []


def test_a_dataset_is_written_as_it_is_read(tmp_path):
    """The dataset lacks last observations; a slice of it is written too."""
    jrb.datasets.write_d4rl(tmp_path / "a.hdf5", *filled(episodes_of(4)))
    dataset = jrb.datasets.open(tmp_path / "a.hdf5")
    jrb.datasets.write_d4rl(tmp_path / "b.hdf5", dataset)
    check_access(jrb.datasets.open(tmp_path / "b.hdf5"), list(dataset))
    with h5py.File(tmp_path / "b.hdf5", "r+") as file:
        del file["next_observations"]
    lacking = jrb.datasets.open(tmp_path / "b.hdf5")[1:4]
    jrb.datasets.write_d4rl(tmp_path / "c.hdf5", lacking)
    check_access(jrb.datasets.open(tmp_path / "c.hdf5"), list(lacking))
    buffer, state = filled(episodes_of(0))
    for wrong in [(buffer,), ("x", state), (dataset, state)]:
        with pytest.raises(TypeError, match="expected a ReplayBuffer and its state, or a Dataset"):
            jrb.datasets.write_d4rl(tmp_path / "d.hdf5", *wrong)
    assert sorted(os.listdir(tmp_path)) == ["a.hdf5", "b.hdf5", "c.hdf5"]
