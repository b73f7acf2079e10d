import pytest

from jrb import Keys
from jrb.datasets.reading.mapping import to_ted


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("obs", "observation"),
        ("observations", "observation"),
        ("observation.state", "observation/state"),
        ("obs/arm/joints", "observation/arm/joints"),
        ("actions", "action"),
        ("rewards", "next/reward"),
        ("terminals", "next/terminated"),
        ("timeouts", "next/truncated"),
        ("dones", "next/done"),
        ("next_obs.camera", "next/observation/camera"),
        ("next.reward", "next/reward"),
        ("next.success", "next/success"),
        ("next.obs.camera", "next/observation/camera"),
        ("next/observations", "next/observation"),
        ("episode_index", "episode"),
        ("info.speed", "info/speed"),
        ("qpos", "qpos"),
        ("a..b", "a..b"),
    ],
)
def test_usual_names_and_others(name, leaf):
    assert to_ted([name], None, "here") == {name: leaf}


def test_a_mapping_comes_before_usual_names():
    told = {
        "r": "reward",
        "reward": "info/reward",
        "x": ("next", "observation"),
        "o": "observation",
    }
    names = ["r", "reward", "x.left", "x.right", "o", "dones", "other"]
    assert to_ted(names, told, "here") == {
        "r": "next/reward",
        "reward": "info/reward",
        "x.left": "next/observation/left",
        "x.right": "next/observation/right",
        "o": "observation",
        "dones": "next/done",
        "other": "other",
    }


def test_a_usual_name_that_a_mapping_made_superfluous_keeps_its_own():
    assert to_ted(["r", "reward"], {"r": "reward"}, "here") == {
        "r": "next/reward",
        "reward": "reward",
    }


def test_keys_say_where_things_lie():
    keys = Keys(reward="r", observation=("seen", "now"), episode="traj")
    names = ["seen.now.arm", "r", "traj", "action", "next/done"]
    assert to_ted(names, keys, "here") == {
        "seen.now.arm": "observation/arm",
        "r": "next/reward",
        "traj": "episode",
        "action": "action",
        "next/done": "next/done",
    }


def test_what_lies_below_another_leaf_keeps_its_name():
    found = to_ted(["action", "action.tokens"], None, "here")
    assert found == {"action": "action", "action.tokens": "action.tokens"}


@pytest.mark.parametrize("mapping", [{"nothing": "reward"}, Keys(reward="nothing")])
def test_absent_names_are_told(mapping):
    with pytest.raises(ValueError, match=r"here: mapping: .*'nothing'.*\['obs', 'r'\]"):
        to_ted(["r", "obs"], mapping, "here")


@pytest.mark.parametrize("names", [["obs", "observation"], ["obs/a", "obs.a"], ["obs", "obs/a"]])
def test_a_leaf_has_one_name(names):
    with pytest.raises(ValueError, match="here: expected a leaf of its own"):
        to_ted(names, None, "here")


@pytest.mark.parametrize("name", ["../x", "/etc", "a//b", "..", "", "a/../b"])
def test_names_that_are_no_paths_are_refused(name):
    with pytest.raises(ValueError, match="here: expected names"):
        to_ted([name], None, "here")


@pytest.mark.parametrize("mapping", [3, {"r": 3}, {"r": ()}, {"r": (1,)}])
def test_mappings_of_other_things_are_refused(mapping):
    with pytest.raises(TypeError, match="mapping"):
        to_ted(["r"], mapping, "here")
