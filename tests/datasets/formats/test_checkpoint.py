"""Our own checkpoints and stores as datasets."""

import dataclasses
import os
import pathlib
import pickle
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import StaleError, authoring
from jrb.checkpoint import DamagedError
from tests.datasets.access import assert_same
from tests.small_blocks import damage, file_of, small_blocks

pytestmark = pytest.mark.slow

NARROW = "storage/arrays/uint32"
"""The array of action, log_prob and poses, which are packed."""


def steps(rng, *lead, chance=0.15):
    """Random steps in TED, `[T, ...]` or `[T, E, ...]`."""
    normal = lambda *shape: rng.normal(size=(*lead, *shape)).astype(np.float32)
    return {
        "observation": {"camera": rng.integers(0, 256, (*lead, 2, 3), np.uint8), "pose": normal(4)},
        "action": rng.integers(-9, 9, lead).astype(np.int32),
        "next": {
            "observation": {
                "camera": rng.integers(0, 256, (*lead, 2, 3), np.uint8),
                "pose": normal(4),
            },
            "reward": normal(),
            "terminated": rng.random(lead) < chance,
            "truncated": rng.random(lead) < chance,
        },
        "log_prob": normal(),
    }


def as_dataset(episode):
    """Returns the items of an episode as a dataset gives them: the last step ends it."""
    after = episode.items["next"]
    truncated = after["truncated"].copy()
    truncated[-1] |= not after["terminated"][-1]
    flags = {"truncated": truncated, "done": after["terminated"] | truncated}
    return {**episode.items, "next": {**after, **flags}}


def filled(rng, num_envs, rows, capacity, **parts):
    """A buffer into which rows were written by several calls, with an end that no flag tells."""
    lead = () if num_envs is None else (num_envs,)
    data = steps(rng, rows, *lead)
    buffer = jrb.ReplayBuffer(capacity=capacity, num_envs=num_envs, **parts)
    first = jax.tree.map(lambda leaf: jnp.asarray(leaf[(0,) * (1 + len(lead))]), data)
    state = buffer.init(first)
    for start in range(0, rows, 8):
        part = jax.tree.map(lambda leaf, start=start: leaf[start : start + 8], data)
        state = buffer.extend(state, part)
        if start == 8:
            state = buffer.truncate(state)
    return buffer, state


def storages(name, path):
    """A storage by name, and where a checkpoint of it goes."""
    made = {
        "device": jrb.DeviceStorage(),
        "once": jrb.DeviceStorage(share_next_observations=True, terminal_capacity=24),
    }
    made |= {"memmap": jrb.MemmapStorage(), "own": jrb.MemmapStorage(path)}
    made |= {"spill": jrb.SpillStorage(path, device_capacity=6)}
    made |= {"compressed": jrb.CompressedStorage(min_bytes=1)}
    return made[name.removeprefix("h5-")], path + ".h5" * name.startswith("h5")


@pytest.mark.parametrize(
    ("storage", "num_envs", "rows"),
    [
        ("device", None, 20),
        ("device", None, 61),
        ("device", 3, 20),
        ("own", 3, 6),
        ("own", None, 61),
        ("memmap", 2, 40),
        ("spill", None, 40),
        ("compressed", 2, 40),
        ("once", None, 61),
        ("h5-device", 3, 20),
        ("h5-memmap", None, 40),
    ],
)
def test_episodes_are_those_of_the_buffer(storage, num_envs, rows, tmp_path):
    rng = np.random.default_rng(rows)
    storage, path = storages(storage, str(tmp_path / "replay"))
    buffer, state = filled(rng, num_envs, rows, 24, storage=storage, unit=jrb.Sequence(2))
    jrb.save(path, buffer, state, **({"layout": "h5"} if path.endswith("h5") else {}))
    found, wanted = jrb.datasets.open(path), jrb.episodes(buffer, state)
    assert found.format.name == ("jrb-h5" if path.endswith("h5") else "jrb")
    assert found.lengths.tolist() == [len(each) for each in wanted]
    assert found.facts["environment"].tolist() == [each.environment for each in wanted]
    assert found.facts["complete"].tolist() == [each.complete for each in wanted]
    every = [as_dataset(each) for each in wanted]
    assert found.transitions == buffer.size(state)
    for number, episode in enumerate(found):
        assert_same(episode, every[number])
        assert_same(found[number - len(found)], every[number])
    for episode, other in zip(found[::-2], every[::-2], strict=True):
        assert_same(episode, other)
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *every)
    for parts in (found.blocks(), found.steps(rows=5)):
        assert_same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), whole)
    returns = [each["next"]["reward"].astype(np.float64).sum() for each in every]
    np.testing.assert_allclose(found.returns(), returns)
    assert_same(
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), found.spec),
        jax.tree.map(lambda leaf: np.zeros_like(leaf[0]), whole),
    )


class Step(NamedTuple):
    obs: dict
    act: jax.Array
    r: jax.Array
    done: jax.Array
    extra: jax.Array


OWN = jrb.Keys(
    observation="obs", action="act", reward="r", done="done", next_observation="next_obs"
)


def test_names_of_the_buffer_become_those_of_ted(tmp_path):
    done = np.array([0, 0, 1, 0, 1, 0, 0], np.float32)
    data = Step({"x": np.arange(7)[:, None]}, np.arange(7) + 10, np.ones(7), done, np.arange(7) * 2)
    buffer, state = jrb.from_items(data, keys=OWN, cast=True)
    jrb.save(tmp_path / "a", buffer, state)
    found = jrb.datasets.open(tmp_path / "a")
    assert found.lengths.tolist() == [3, 2, 2]
    assert any("counts as terminated" in note for note in found.notes)
    last = found[2]
    assert last["observation"]["x"].tolist() == [[5], [6]] and last["extra"].tolist() == [10, 12]
    assert last["next"]["observation"]["x"].tolist() == [[6], [0]]
    assert last["next"]["valid"].tolist() == [True, False]
    assert last["next"]["truncated"].tolist() == [False, True]
    assert found[0]["next"]["terminated"].tolist() == [False, False, True]
    assert found[0]["next"]["valid"].all()
    dropped = jrb.datasets.open(tmp_path / "a", final="drop")
    assert dropped.lengths.tolist() == [3, 2, 1]
    given = jrb.datasets.open(tmp_path / "a", keys=dataclasses.replace(OWN, action="extra"))
    assert given[1]["action"].tolist() == [6, 8] and given[1]["act"].tolist() == [13, 14]


def test_numbers_of_episodes_tell_their_ends(tmp_path):
    data = {"r": np.ones(6, np.float32), "n": np.array([4, 4, 5, 5, 5, 4], np.int32)}
    keys = jrb.Keys(reward="r", episode="n")
    buffer, state = jrb.from_items(data, keys=keys)
    jrb.save(tmp_path / "a", buffer, state)
    assert jrb.datasets.open(tmp_path / "a").lengths.tolist() == [2, 3, 1]


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    with authoring.enable_x64():
        data = {
            "next": {"reward": np.array([1.0, np.nan, 1e300]), "done": np.array([0, 1, 1]) > 0},
            "wide": np.array([2**40, -1, 3]),
            "none": np.zeros((3, 0), np.float32),
            "half": jnp.array([1.5, jnp.nan, -0.0], jnp.bfloat16),
            "key": jax.random.split(jax.random.key(3), 3),
            "small": jnp.array([-3, 7, 0], jnp.int4),
        }
        buffer, state = jrb.from_items(data, storage=jrb.MemmapStorage(tmp_path / "a"))
        jrb.save(tmp_path / "a", buffer, state)
        jrb.save(tmp_path / "b", *jrb.from_items(data))
    for name in "ab":
        found = jrb.datasets.open(tmp_path / name)
        whole = next(found.steps(rows=3))
        for leaf in ("wide", "none", "half", "small"):
            assert_same(whole[leaf], np.asarray(data[leaf]))
        assert_same(whole["next"]["reward"], data["next"]["reward"])
        assert_same(whole["key"], np.asarray(jax.random.key_data(data["key"])))
        assert np.isnan(found.returns()[0])


def test_nothing_in_a_checkpoint(tmp_path):
    buffer = jrb.ReplayBuffer(5)
    jrb.save(tmp_path / "a", buffer, buffer.init({"next": {"reward": 0.0, "done": False}}))
    found = jrb.datasets.open(tmp_path / "a")
    assert (len(found), found.transitions, list(found.steps(4)), list(found)) == (0, 0, [], [])
    assert found.returns().tolist() == []


def saved(path, rows=40, **parts):
    data = steps(np.random.default_rng(1), rows)
    jrb.save(path, *jrb.from_items(data, **parts))
    return data


def test_a_dataset_stays_what_it_was_when_it_was_opened(tmp_path):
    path = tmp_path / "a"
    data = saved(path)
    buffer, state = jrb.from_items(steps(np.random.default_rng(2), 40))
    found = jrb.datasets.open(path)
    before = next(found.steps(rows=40))
    jrb.save(path, buffer, state, keep=1)
    assert_same(next(found.steps(rows=40)), before)
    assert_same(before["observation"], data["observation"])
    after = next(jrb.datasets.open(path).steps(rows=40))
    assert not np.array_equal(after["log_prob"], before["log_prob"])
    old = jrb.datasets.open(path, generation=1)
    assert_same(next(old.steps(rows=40)), before)
    with pytest.raises(FileNotFoundError, match="expected generation 7"):
        jrb.datasets.open(path, generation=7)


def test_rows_that_were_overwritten_since_are_still_those_of_the_dataset(tmp_path):
    path = tmp_path / "a"
    buffer = jrb.ReplayBuffer(40, storage=jrb.MemmapStorage(path))
    data = steps(np.random.default_rng(1), 40)
    state = buffer.init(jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data))
    with small_blocks(64):
        state = buffer.extend(state, data)
    jrb.save(path, buffer, state)
    found = jrb.datasets.open(path)
    before = next(found.steps(rows=40))
    assert_same(before["log_prob"], data["log_prob"])
    later = steps(np.random.default_rng(2), 30)
    for _ in range(3):
        state = buffer.extend(state, later)
        assert_same(next(found.steps(rows=40)), before)
    assert_same(next(jrb.datasets.open(path).steps(rows=40)), before)  # what was saved
    jrb.save(path, buffer, state)
    assert_same(next(found.steps(rows=40)), before)
    assert jrb.checkpoint.generations(path) == [1, 2]
    again = jrb.datasets.open(path)
    assert_same(next(again.steps(rows=40))["log_prob"][10:], later["log_prob"])


def test_a_path_with_another_checkpoint_of_the_same_number(tmp_path):
    first = saved(tmp_path / "a")
    found = jrb.datasets.open(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    other = saved(tmp_path / "a", rows=20)
    assert jrb.datasets.open(tmp_path / "a").transitions == 20
    assert_same(next(found.steps(rows=40))["log_prob"], first["log_prob"])  # still open
    assert_same(next(jrb.datasets.open(tmp_path / "a").steps(20))["log_prob"], other["log_prob"])
    with pytest.raises(StaleError, match="Open it again"):
        pickle.loads(pickle.dumps(found))[0]
    again = jrb.datasets.open(tmp_path / "a")
    assert_same(pickle.loads(pickle.dumps(again))[0], again[0])


def test_damage_is_found_where_it_is_opened(tmp_path):
    with small_blocks():
        saved(tmp_path / "a")
    damage(file_of(tmp_path / "a", NARROW), 5)
    with pytest.raises(DamagedError, match="observation/pose"):
        jrb.datasets.open(tmp_path / "a")
    saved(tmp_path / "b", storage=jrb.MemmapStorage(tmp_path / "b"))
    damage(file_of(tmp_path / "b", "items/next/terminated"), 5)
    with pytest.raises(DamagedError, match="next/terminated"):
        jrb.datasets.open(tmp_path / "b")
    assert jrb.datasets.open(tmp_path / "b", verify=False).transitions == 40
    saved(tmp_path / "c")
    damage(tmp_path / "c" / "generation-000000000001", -5)
    with pytest.raises(DamagedError, match="generation-000000000001"):
        jrb.datasets.open(tmp_path / "c")


@pytest.mark.parametrize("storage", ["device", "memmap"])
def test_files_that_are_cut_or_gone(storage, tmp_path):
    path = tmp_path / "a"
    with small_blocks():
        saved(path, **({} if storage == "device" else {"storage": jrb.MemmapStorage(path)}))
    file = file_of(path, NARROW if storage == "device" else "items/log_prob")
    os.truncate(file, 10)
    with pytest.raises(DamagedError, match=rf"{file.name}: .*expected \d+ bytes, found 10"):
        jrb.datasets.open(path)
    os.truncate(path / "generation-000000000001", 90)
    with pytest.raises(ValueError, match="generation-000000000001"):
        jrb.datasets.open(path)
    os.truncate(path / "generation-000000000001", 9)
    with pytest.raises(DamagedError, match="generation-000000000001"):
        jrb.datasets.open(path)
    path = tmp_path / "b"
    with small_blocks():
        saved(path, **({} if storage == "device" else {"storage": jrb.MemmapStorage(path)}))
    shutil.rmtree(path / "arrays")
    with pytest.raises(DamagedError):
        jrb.datasets.open(path)


def test_a_file_of_hdf5_that_is_damaged(tmp_path):
    path = tmp_path / "c.h5"
    jrb.save(path, *jrb.from_items(steps(np.random.default_rng(1), 9)), layout="h5")
    damage(path, path.stat().st_size // 2)
    with pytest.raises(DamagedError):
        jrb.datasets.open(path)


@pytest.mark.parametrize("once", [False, True])
def test_leaves_of_one_name_are_refused(once, tmp_path):
    item = steps(np.random.default_rng(0)) | {"x": {"y": np.float32(1)}, "x/y": np.float32(2)}
    buffer = jrb.ReplayBuffer(8, storage=jrb.DeviceStorage(share_next_observations=once))
    jrb.save(tmp_path, buffer, buffer.add(buffer.init(item), item))
    with pytest.raises(ValueError, match="leaf 'x/y': expected leaves with names of their own"):
        jrb.datasets.open(tmp_path)


def test_what_is_none_of_ours(tmp_path):
    kinds = jrb.datasets.formats()
    (tmp_path / "generation-000000000001").write_text("[1]\n")
    (tmp_path / "file").write_bytes(b"")
    for name in ("jrb", "jrb-h5"):
        for source in (str(tmp_path), str(tmp_path / "file"), [], "/nowhere", 3):
            assert not kinds[name].matches(source)


def two(path):
    data = steps(np.random.default_rng(1), 9)
    one, state = jrb.from_items(data, batch_size=2)
    jrb.save(path, {"demo": one, "../x": one}, {"demo": state, "../x": state})


def packed(path):
    jrb.save(path, *jrb.from_items(steps(np.random.default_rng(1), 9)), encode=_same)


def _same(items):
    return items


def apart(path):
    jrb.save(path, *jrb.from_items(steps(np.random.default_rng(1), 9)), items=False)


def objects(path):
    jrb.save(path, *jrb.from_items([1, "a"], storage=jrb.ListStorage()))


def many(path):
    buffer = jrb.ReplayBuffer(4)
    example = {"next": {"reward": 0.0, "done": False}}
    jrb.save(path, buffer, jax.vmap(lambda _: buffer.init(example))(jnp.arange(3)))


def unrewarded(path):
    jrb.save(path, *jrb.from_items({"r": jnp.ones(3), "next": {"done": jnp.ones(3) > 0}}))


def endless(path):
    jrb.save(path, *jrb.from_items({"next": {"reward": jnp.ones(3)}}))


def timeless(path):
    data = {"next": {"reward": jnp.ones(3), "done": jnp.ones(3) > 0}}
    jrb.save(path, *jrb.from_items(data, writer=jrb.Reservoir()))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (two, r"part: expected one of \['demo', '\.\./x'\]"),
        (packed, "expected decode="),
        (apart, "expected items="),
        (objects, "got objects, whose flags"),
        (many, r"one of the states under vmap, of shape \(3,\)"),
        (unrewarded, "expected a leaf at 'next/reward', got items with the leaves"),
        (endless, "expected a leaf at 'next/done'"),
        (timeless, "order of time"),
    ],
)
def test_checkpoints_that_hold_no_episodes(write, message, tmp_path):
    write(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        jrb.datasets.open(tmp_path / "a")


def test_each_of_several_buffers_can_be_opened(tmp_path):
    two(tmp_path / "a")
    for part in ("demo", "../x"):
        assert jrb.datasets.open(tmp_path / "a", part=part).transitions == 9
    with pytest.raises(ValueError, match=r"part: expected one of .*, got 'x'"):
        jrb.datasets.open(tmp_path / "a", part="x")
    saved(tmp_path / "b")
    with pytest.raises(ValueError, match="part: expected None, as it has one"):
        jrb.datasets.open(tmp_path / "b", part="demo")
    assert not (tmp_path / "x").exists()


def test_two_leaves_of_one_name(tmp_path):
    data = {"r": jnp.ones(3), "next": {"reward": jnp.ones(3), "done": jnp.ones(3) > 0}}
    jrb.save(tmp_path / "a", *jrb.from_items(data))
    with pytest.raises(ValueError, match=r"a leaf of its own for each name, got .*'r'"):
        jrb.datasets.open(tmp_path / "a", keys=jrb.Keys(reward="r"))
    with pytest.raises(ValueError, match="reward: expected a leaf at 'rew'"):
        jrb.datasets.open(tmp_path / "a", keys=jrb.Keys(reward="rew"))


def test_a_description_with_functions_has_to_be_given(tmp_path):
    buffer, state = jrb.from_items(
        steps(np.random.default_rng(1), 9), transforms=(lambda data: data,)
    )
    jrb.save(tmp_path / "a", buffer, state)
    with pytest.raises(ValueError, match="buffer="):
        jrb.datasets.open(tmp_path / "a")
    assert jrb.datasets.open(tmp_path / "a", buffer=buffer).transitions == 9


def test_a_leaf_that_tells_missing_next_observations(tmp_path):
    data = steps(np.random.default_rng(1), 9)
    data["next"]["terminated"][:] = False
    data["next"]["truncated"][:] = np.arange(9) % 3 == 2
    data["next"]["valid"] = np.arange(9) != 5
    jrb.save(tmp_path / "a", *jrb.from_items(data))
    found = jrb.datasets.open(tmp_path / "a")
    assert [each["next"]["valid"].tolist() for each in found] == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert jrb.datasets.open(tmp_path / "a", final="drop").lengths.tolist() == [3, 2, 3]
    data["next"]["valid"] = np.arange(9) != 4
    jrb.save(tmp_path / "b", *jrb.from_items(data))
    with pytest.raises(ValueError, match="'next/valid': expected True but for last steps"):
        list(jrb.datasets.open(tmp_path / "b"))


def test_paths_of_any_form(tmp_path, monkeypatch):
    saved(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert jrb.datasets.open("a").transitions == 40
    assert jrb.datasets.open(pathlib.Path("a"), format="jrb").transitions == 40


def test_a_file_has_no_generations(tmp_path):
    path = tmp_path / "a.h5"
    jrb.save(path, *jrb.from_items(steps(np.random.default_rng(1), 9)), layout="h5")
    with pytest.raises(ValueError, match="expected None for an HDF5 file"):
        jrb.datasets.open(path, generation=1)


def test_a_save_while_a_checkpoint_is_opened(tmp_path, monkeypatch):
    saved(tmp_path / "a", rows=20)
    load, saves = jrb.load, [lambda: saved(tmp_path / "a", rows=30)]

    def slow(*args, **options):
        if saves:
            saves.pop()()
        return load(*args, **options)

    monkeypatch.setattr(jrb, "load", slow)
    assert jrb.datasets.open(tmp_path / "a").transitions == 30
