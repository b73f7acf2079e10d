"""TorchRL's dumps as datasets."""

import json
import os
import pathlib
import shutil

import h5py
import jax
import numpy as np
import pytest

import jrb
from jrb.checkpoint import DamagedError

DATA = pathlib.Path(__file__).parents[2] / "data" / "torchrl"
DUMPS = sorted(path.stem for path in DATA.glob("*_[12]d_*.npz") if "sampler" not in path.name)
ONE = ("reward", "done", "terminated", "truncated")


def truth_of(name):
    """`rb[:]` with time first, oldest row first, an axis of environments always, as leaves."""
    with np.load(DATA / f"{name}.npz") as file:
        leaves = {key: file[key] for key in file}
    about = json.loads(str(leaves.pop("__meta__")))
    axes = 2 if "_2d_" in name else 1
    leaves = {key: leaf.swapaxes(0, 1) if axes == 2 else leaf for key, leaf in leaves.items()}
    for key, leaf in leaves.items():
        leaves[key] = leaf[..., 0] if key.split("/")[-1] in ONE else leaf
    first = about["cursor"] if about["is_full"] else 0
    turned = {key: np.roll(leaf, -first, axis=0) for key, leaf in leaves.items()}
    return {key: leaf if axes == 2 else leaf[:, None] for key, leaf in turned.items()}


def episodes_of(truth):
    """Rows of each episode, in plain Python: (begin, environment, stop)."""
    found, over = [], truth["next/done"] | truth["next/terminated"] | truth["next/truncated"]
    number = truth.get("collector/traj_ids")
    rows, envs = over.shape
    for env in range(envs):
        begin = 0
        for row in range(rows):
            other = number is not None and row + 1 < rows
            other = other and number[row, env] != number[row + 1, env]
            if over[row, env] or other or row == rows - 1:
                found.append((begin, env, row + 1))
                begin = row + 1
    return sorted(found)


@pytest.mark.parametrize("name", DUMPS)
def test_real_dumps(name):
    found, truth = jrb.datasets.open(DATA / name), truth_of(name)
    wanted = episodes_of(truth)
    assert found.format.name == "torchrl" and len(found) == len(wanted) > 2
    for number, (begin, env, stop) in enumerate(wanted):
        for episode in (found[number], found[number - len(wanted)]):
            flat = {
                "/".join(key.key for key in path): leaf
                for path, leaf in jax.tree_util.tree_leaves_with_path(episode)
            }
            for key, leaf in truth.items():
                if key in ("next/done", "next/truncated"):
                    continue  # an end is one in any case
                part = leaf[begin:stop, env]
                assert flat[key].dtype == part.dtype
                assert flat[key].tobytes() == np.ascontiguousarray(part).tobytes(), key
            after = episode["next"]
            ends = truth["next/terminated"] | truth["next/truncated"]
            assert after["done"].tolist()[:-1] == ends[begin : stop - 1, env].tolist()
            assert after["done"][-1]
    reverse = [each["next"]["reward"].sum() for each in found[::-1]]
    np.testing.assert_allclose(found.returns()[::-1], reverse)
    assert sum(len(part["action"]) for part in found.steps(rows=7)) == found.transitions
    assert found.metadata["layout"] in name


def test_two_dumps_one_after_the_other_at_a_path(tmp_path):
    shutil.copytree(DATA / DUMPS[0], tmp_path / "a")
    first = len(jrb.datasets.open(tmp_path / "a"))
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(DATA / "default_2d_partial", tmp_path / "a", copy_function=shutil.copyfile)
    assert first != len(jrb.datasets.open(tmp_path / "a"))


def test_keys_name_the_numbers_of_trajectories():
    with_numbers = jrb.datasets.open(DATA / "default_1d_wrapped")
    without = jrb.datasets.open(DATA / "default_1d_wrapped", keys=jrb.TED)
    assert len(without) <= len(with_numbers)
    with pytest.raises(ValueError, match="reward: expected a leaf at 'rew'"):
        jrb.datasets.open(DATA / "default_1d_wrapped", keys=jrb.Keys(reward="rew"))
    with pytest.raises(ValueError, match="done: expected flags such as next/done"):
        jrb.datasets.open(
            DATA / "default_1d_wrapped", keys=jrb.Keys(done="d", terminated="e", truncated="f")
        )


@pytest.mark.parametrize("name", ["default_1d_wrapped", "flat_1d_wrapped", "nested_1d_partial"])
def test_entries_that_are_no_tensors_are_named(name, tmp_path):
    assert jrb.datasets.open(DATA / name).notes == ()
    shutil.copytree(DATA / name, tmp_path / "a", copy_function=shutil.copyfile)
    path = tmp_path / "a" / "storage" / "meta.json"
    about = json.loads(path.read_text()) | {"caption": {"type": "NonTensorData"}}
    path.write_text(json.dumps(about))
    dataset = jrb.datasets.open(tmp_path / "a")
    assert any("'caption'" in note for note in dataset.notes)
    assert jrb.interop.read_torchrl(tmp_path / "a").info["left_out"] == ["caption"]


def test_datasets_beside_the_trajectories_are_named(tmp_path):
    assert jrb.datasets.open(DATA / "h5_1d_wrapped").notes == ()
    shutil.copytree(DATA / "h5_1d_wrapped", tmp_path / "a", copy_function=shutil.copyfile)
    with h5py.File(tmp_path / "a" / "storage" / "checkpoint.h5", "r+") as file:
        file["calibration"] = np.arange(3.0)
        file["traj_0/caption"] = "left"
    (note,) = jrb.datasets.open(tmp_path / "a").notes
    assert "'calibration'" in note and "'traj_0/caption'" in note


def test_what_is_no_dump(tmp_path):
    kind = jrb.datasets.formats()["torchrl"]
    os.makedirs(tmp_path / "a" / "writer")
    (tmp_path / "a" / "writer" / "metadata.json").write_text("[")
    os.makedirs(tmp_path / "a" / "storage")
    (tmp_path / "a" / "storage" / "storage_metadata.json").write_text("{")
    for source in (str(tmp_path / "a"), str(tmp_path), "/nowhere", 3, [], __file__):
        assert not kind.matches(source)
    with pytest.raises(FileNotFoundError, match="expected a file of the dump, found none"):
        jrb.datasets.open(tmp_path, format="torchrl")


def test_damage_names_the_file(tmp_path):
    shutil.copytree(DATA / "default_1d_wrapped", tmp_path / "a")
    path = tmp_path / "a" / "storage" / "action.memmap"
    os.truncate(path, 12)
    with pytest.raises(DamagedError, match=r"action.memmap: expected \d+ bytes"):
        jrb.datasets.open(tmp_path / "a")
    path.unlink()
    path.symlink_to(DATA / "default_1d_wrapped" / "storage" / "action.memmap")
    with pytest.raises(ValueError, match="expected a file of the dump itself"):
        jrb.datasets.open(tmp_path / "a")


def test_the_default_layout_stays_on_the_disk():
    found = jrb.datasets.open(DATA / "default_1d_wrapped")
    with found.format.table(found.source) as table:
        (base,) = table.columns["observation"].read.__defaults__
        while base.base is not None and not isinstance(base, np.memmap):
            base = base.base
    assert isinstance(base, np.memmap)
