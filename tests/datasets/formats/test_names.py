"""Names in files, and the leaves in TED that they stand for."""

import pathlib
import re

import numpy as np
import pytest

import jrb
from jrb.datasets.reading import names as table
from tests.datasets.formats.trees import flat

USUAL = [
    {
        "obs/arm/joints": "observation/arm/joints",
        "observation.state": "observation/state",
        "next_obs.state": "next/observation/state",
        "next.obs.arm.joints": "next/observation/arm/joints",
        "actions": "action",
        "rewards": "next/reward",
        "terminals": "next/terminated",
        "timeouts": "next/truncated",
        "next.success": "next/success",
        "info.speed": "info/speed",
        "episode_index": "episode",
        "qpos": "qpos",
        "a..b": "a..b",
    },
    {
        "observations": "observation",
        "next/observations": "next/observation",
        "action": "action",
        "action.tokens": "action.tokens",  # what is below another leaf keeps its name
        "next.reward": "next/reward",
        "dones": "next/done",
    },
]


def opened(path, names, mapping=None):
    """The leaves of a file, by the numbers in them: one for each name."""
    arrays = {name: np.full(3, number + 2.0) for number, name in enumerate(names)}
    for name in ("terminals", "timeouts", "dones", "next/done"):
        arrays |= {name: np.array([0, 0, 1])} if name in arrays else {}
    np.savez(path / "x.npz", **arrays)
    (episode,) = jrb.datasets.open(path / "x.npz", format="arrays", mapping=mapping)
    leaves = {float(leaf[0]): name for name, leaf in flat(episode).items() if leaf[0] >= 2}
    return {
        name: leaves[number + 2.0] for number, name in enumerate(names) if number + 2.0 in leaves
    }


@pytest.mark.parametrize("names", USUAL)
def test_usual_names_and_others(tmp_path, names):
    flags = ("terminals", "timeouts", "dones")
    found = opened(tmp_path, names)
    assert found == {name: leaf for name, leaf in names.items() if name not in flags}


def test_a_mapping_comes_before_usual_names(tmp_path):
    mapping = {
        "r": "reward",
        "reward": "info/reward",
        "x": ("next", "observation"),
        "o": "observation",
    }
    names = ["r", "reward", "x.left", "x.right", "o.left", "o.right", "action", "dones", "other"]
    assert opened(tmp_path, names, mapping) == {
        "r": "next/reward",
        "reward": "info/reward",
        "x.left": "next/observation/left",
        "x.right": "next/observation/right",
        "o.left": "observation/left",
        "o.right": "observation/right",
        "action": "action",
        "other": "other",
    }


def test_a_usual_name_that_a_mapping_made_superfluous_keeps_its_own(tmp_path):
    found = opened(tmp_path, ["r", "reward", "obs", "action", "dones"], {"r": "reward"})
    assert (found["r"], found["reward"]) == ("next/reward", "reward")


def test_keys_name_the_arrays(tmp_path):
    keys = jrb.Keys(reward="r", observation=("seen", "now"), episode="traj")
    assert opened(tmp_path, ["seen.now.arm", "r", "traj", "action", "next/done"], keys) == {
        "seen.now.arm": "observation/arm",
        "r": "next/reward",
        "traj": "episode",
        "action": "action",
    }


@pytest.mark.parametrize("mapping", [{"nothing": "reward"}, jrb.Keys(reward="nothing")])
def test_absent_names_are_refused(tmp_path, mapping):
    with pytest.raises(ValueError, match=r"x\.npz: mapping: .*'nothing'.*\['obs', 'r'\]"):
        opened(tmp_path, ["r", "obs"], mapping)


@pytest.mark.parametrize("names", [["obs", "observation"], ["obs/a", "obs.a"], ["obs", "obs.a/b"]])
def test_a_leaf_has_one_name(tmp_path, names):
    with pytest.raises(ValueError, match=r"x\.npz: expected a leaf of its own"):
        opened(tmp_path, names)


@pytest.mark.parametrize("name", ["../x", "/etc", "a//b", "..", "a/../b", "a/./b"])
def test_names_that_are_no_paths_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"x\.npz: expected names of arrays such as"):
        opened(tmp_path, [name])


@pytest.mark.parametrize("mapping", [3, {"r": 3}, {"r": ()}, {"r": (1,)}])
def test_mappings_of_other_things_are_refused(tmp_path, mapping):
    with pytest.raises(TypeError, match="mapping"):
        opened(tmp_path, ["r"], mapping)


def test_an_array_that_is_a_group_too_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got both"):
        opened(tmp_path, ["a", "a/b"])


def test_the_page_on_datasets_has_all_names():
    page = pathlib.Path("docs/use/datasets.md").read_text()
    part = page.split("## Names of arrays")[1].split("\n## ")[0]
    rows = [re.findall(r"`([^`]+)`", row) for row in part.splitlines() if row.startswith("| `")]
    assert {leaf: tuple(names) for *names, leaf in rows} == table.USUAL_NAMES
    (masks,) = re.findall(r"per step named (.*?)\. An end", part.replace("\n", " "))
    assert tuple(re.findall(r"`([^`]+)`", masks)) == table.MASK_NAMES


@pytest.mark.parametrize("leaf", table.USUAL_NAMES)
def test_every_name_of_the_page_is_read(tmp_path, leaf):
    last = np.array([0, 0, 0, 1])
    for number, name in enumerate(table.USUAL_NAMES[leaf]):
        arrays = {"observation": last, "action": last, "next/terminated": last}
        arrays.pop(leaf, None)
        arrays[f"{name}/x" if leaf == "info" else name] = last
        path = tmp_path / f"{number}.npz"
        np.savez(path, **arrays)
        steps = flat(next(jrb.datasets.open(path).steps(4)))
        assert np.array_equal(steps[leaf + "/x" * (leaf == "info")], last)
        assert name == leaf or name not in steps
