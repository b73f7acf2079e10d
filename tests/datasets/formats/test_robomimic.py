import json

import h5py
import numpy as np
import pytest

import jrb
from tests.datasets.access import after, chained, check_access

ARGS = {"env_name": "Lift", "env_type": 1, "env_kwargs": {"robots": ["Panda"]}}


def demo_of(rng, steps, over=True, has_next=True):
    seen = {
        "image": rng.integers(0, 256, (steps + 1, 4, 4, 3)).astype(np.uint8),
        "eef": rng.normal(size=(steps + 1, 3)),
    }
    dones = np.zeros(steps, np.int64)
    dones[-1] = over
    demo = {
        "actions": rng.normal(size=(steps, 7)),
        "rewards": rng.normal(size=steps),
        "dones": dones,
        "states": rng.normal(size=(steps, 9)),
    }
    demo |= {f"obs/{name}": leaf[:-1] for name, leaf in seen.items()}
    nexts = {f"next_obs/{name}": leaf[1:] for name, leaf in seen.items()}
    return demo | nexts if has_next else demo


def write(path, demos, masks=(), samples=True):
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(ARGS)
        data.attrs["total"] = sum(len(demo["actions"]) for demo in demos.values())
        for name, arrays in demos.items():
            group = data.create_group(name)
            for leaf, array in arrays.items():
                group[leaf] = array
            if samples:
                group.attrs["num_samples"] = len(arrays["actions"])
            group.attrs["model_file"] = "<mujoco/>"
        for key, names in dict(masks).items():
            file[f"mask/{key}"] = np.array(names, "S")
    return str(path)


def expected_of(demo, is_marked=False):
    steps = len(demo["actions"])
    seen = {name: demo[f"obs/{name}"] for name in ("image", "eef")}
    nexts = {n: demo.get(f"next_obs/{n}", chained(leaf, steps)) for n, leaf in seen.items()}
    terminated = demo["dones"].astype(bool)
    truncated = np.arange(steps) == steps - 1
    truncated &= ~terminated
    valid = ~truncated if is_marked else None
    return {
        "observation": seen,
        "action": demo["actions"],
        "states": demo["states"],
        "next": after(demo["rewards"], terminated, truncated, nexts, valid),
    }


def demos_of(seed, count, has_next=True, first=0):
    rng = np.random.default_rng(seed)
    return {
        f"demo_{n}": demo_of(rng, rng.integers(1, 6), rng.random() < 0.5, has_next)
        for n in range(first, first + count)
    }


@pytest.mark.parametrize("has_next", [True, False])
def test_demonstrations_in_the_order_of_their_numbers(tmp_path, has_next):
    demos = demos_of(0, 12, has_next)
    dataset = jrb.datasets.open(write(tmp_path / "low_dim", dict(sorted(demos.items()))))
    assert dataset.format.name == "robomimic"
    check_access(dataset, [expected_of(demo, not has_next) for demo in demos.values()])
    assert dataset.facts["demo"].tolist() == list(range(12))
    assert dataset.metadata["env_args"] == ARGS
    assert dataset.metadata["total"] == dataset.transitions
    assert "'dones'" in dataset.notes[0]


def test_masks_are_facts(tmp_path):
    masks = {"train": ["demo_3", "demo_1"], "valid": ["demo_2"]}
    dataset = jrb.datasets.open(write(tmp_path / "a", demos_of(0, 3, first=1), masks))
    assert dataset.facts["mask/train"].tolist() == [True, False, True]
    assert dataset.facts["mask/valid"].tolist() == [False, True, False]
    part = dataset.only(dataset.numbers[dataset.facts["mask/train"]])
    assert part.facts["demo"].tolist() == [1, 3]


def test_numbers_that_lack_are_told(tmp_path):
    demos = demos_of(0, 5)
    del demos["demo_1"], demos["demo_3"]
    dataset = jrb.datasets.open(write(tmp_path / "a", demos))
    assert dataset.facts["demo"].tolist() == [0, 2, 4]
    assert "a: 2 numbers are missing between demo_0 and demo_4." in dataset.notes
    check_access(dataset, [expected_of(demo) for demo in demos.values()])


def test_rewards_are_read_alone(tmp_path, monkeypatch):
    dataset = jrb.datasets.open(write(tmp_path / "a", demos_of(0, 3)))
    read, get = set(), h5py.Dataset.__getitem__
    spy = lambda self, part, *rest: read.add(self.name.split("/")[-1]) or get(self, part, *rest)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    dataset.returns()
    assert read == {"rewards"}


def test_names_of_lost_demonstrations_are_told(tmp_path):
    masks = {"train": ["demo_10", "demo_1", "demo_7"], "valid": ["demo_0"]}
    dataset = jrb.datasets.open(write(tmp_path / "a", demos_of(0, 2), masks))
    assert dataset.facts["mask/train"].tolist() == [False, True]
    told = "mask/train lists 2 names that no demonstration has: demo_7, demo_10."
    assert dataset.notes[1:] == (told,)


def test_files_without_rewards_are_opened(tmp_path):
    demos = demos_of(0, 3)
    for demo in demos.values():
        del demo["rewards"]
    dataset = jrb.datasets.open(write(tmp_path / "a", demos))
    assert "There are no rewards in the files." in dataset.notes
    assert "reward" not in dataset.spec["next"]
    for episode, demo in zip(dataset, demos.values(), strict=True):
        assert episode["action"].tobytes() == demo["actions"].tobytes()
    assert jrb.stats(*dataset.buffer())["complete"] == 3


def test_states_without_observations_are_refused(tmp_path):
    demo = {name: leaf for name, leaf in demos_of(0, 1)["demo_0"].items() if "obs" not in name}
    with pytest.raises(ValueError, match=r"demo_0: expected observations.*states"):
        jrb.datasets.open(write(tmp_path / "a", {"demo_0": demo}))


@pytest.mark.parametrize("name", ["actions", "rewards", "dones"])
def test_what_lacks_is_named(tmp_path, name):
    path = write(tmp_path / "a", demos_of(0, 2))
    with h5py.File(path, "r+") as file:
        del file["data/demo_1"][name]
    told = "the leaves of the first" if name == "rewards" else f"an array '{name}'"
    with pytest.raises(ValueError, match=f"demo_1: expected {told}"):
        jrb.datasets.open(path)


def test_other_files_are_not_recognised(tmp_path):
    with h5py.File(tmp_path / "a", "w") as file:
        file["data"] = np.zeros(3)
        file["obs/x"] = np.zeros(4)
    with h5py.File(tmp_path / "b", "w") as file:
        file["data"] = h5py.SoftLink("/nowhere")
    for name, told in (("a", "no format matches"), ("b", "'data': .*leads nowhere")):
        with pytest.raises(ValueError, match=told):
            jrb.datasets.open(tmp_path / name)
        with pytest.raises(ValueError, match="expected"):
            jrb.datasets.open(tmp_path / name, format="robomimic")


@pytest.mark.parametrize("has_next", [True, False])
def test_demonstrations_without_flags_end_where_they_end(tmp_path, has_next):
    """Isaac Lab writes neither dones nor rewards, but states and the state of the reset."""
    demos = demos_of(3, 4, has_next)
    for demo in demos.values():
        del demo["dones"], demo["rewards"]
        demo["initial_state/robot/joints"] = np.zeros((8, 9))
        demo["states/robot/joints"] = demo.pop("states")
    dataset = jrb.datasets.open(write(tmp_path / "a.hdf5", demos))
    assert dataset.format.name == "robomimic"
    for episode, demo in zip(dataset, demos.values(), strict=True):
        is_last = np.arange(len(demo["actions"])) == len(demo["actions"]) - 1
        assert episode["next"]["truncated"].tolist() == is_last.tolist()
        assert not episode["next"]["terminated"].any()
        assert np.array_equal(episode["states"]["robot"]["joints"], demo["states/robot/joints"])
        if not has_next:
            assert episode["next"]["valid"].tolist() == (~is_last).tolist()
    assert "No flags tell how episodes ended: all are taken for truncated." in dataset.notes
    assert any("'initial_state/robot/joints'" in note for note in dataset.notes)
    assert jrb.stats(*dataset.buffer())["complete"] == 4


def test_a_flag_that_only_the_first_has_not_is_an_error(tmp_path):
    path = write(tmp_path / "a", demos_of(0, 3))
    with h5py.File(path, "r+") as file:
        del file["data/demo_0/dones"]
    with pytest.raises(ValueError, match="demo_0: expected an array 'dones'"):
        jrb.datasets.open(path)


def linked(source, target):
    """Returns a function that moves `source` of a file to `target`, with a soft link instead."""

    def move(file):
        file.move(source, target)
        file[source] = h5py.SoftLink(f"/{target}")

    return move


def linked_twice(file):
    linked("data/demo_1", "pool/demo")(file)
    linked("pool/demo/obs", "images/obs")(file)
    linked("images", "z/images")(file)


LINKED = {
    "leaf": linked("data/demo_1/obs/image", "pool/image"),
    "group": linked("data/demo_1/obs", "pool/obs"),
    "demonstration": linked("data/demo_1", "pool/demo"),
    "inside": linked("data/demo_1", "data/pool"),
    "twice": linked_twice,
    "data": linked("data", "v2"),
    "masks": linked("mask", "splits"),
    "mask": linked("mask/train", "splits/train"),
    "two names": lambda file: file.__setitem__("archive", file["data/demo_1"]),
    "two names of a mask": lambda file: file.__setitem__("archive", file["mask/train"]),
    "backwards": lambda file: file.__setitem__("again", h5py.SoftLink("/data/demo_1")),
}


@pytest.mark.parametrize("case", LINKED)
def test_no_note_says_that_arrays_behind_links_are_left_out(tmp_path, case):
    demos = demos_of(0, 3)
    path = write(tmp_path / "a", demos, {"train": ["demo_1"]})
    with h5py.File(path, "r+") as file:
        LINKED[case](file)
    dataset = jrb.datasets.open(path)
    assert len(dataset.notes) == 1 and "'dones'" in dataset.notes[0]
    assert dataset.facts["mask/train"].tolist() == [False, True, False]
    check_access(dataset, [expected_of(demo) for demo in demos.values()])


def test_arrays_that_no_demonstration_links_to_are_noted(tmp_path):
    path = write(tmp_path / "a", demos_of(0, 2), {"train": ["demo_1"]})
    with h5py.File(path, "r+") as file:
        linked("data/demo_1/obs", "pool/obs")(file)
        file["pool/other"], file["texts"] = np.zeros(3), np.array(["a"], "S")
        file["again"] = h5py.SoftLink("/pool/other")
        file["data/demo_0/text"] = h5py.SoftLink("/texts")  # noted under the name of its leaf
        file["data/demo_1/text"] = h5py.SoftLink("/texts")
    left_out = "Left out, as no arrays of numbers for each step: "
    notes = [note for note in jrb.datasets.open(path).notes if note.startswith(left_out)]
    assert sorted(notes) == [f"{left_out}'pool/other'.", f"{left_out}'text'."]


def test_a_mask_that_is_no_group_is_noted(tmp_path):
    path = write(tmp_path / "a", demos_of(0, 2))
    with h5py.File(path, "r+") as file:
        file["mask"] = np.zeros(3)
    assert "each step: 'mask'." in jrb.datasets.open(path).notes[-1]


def test_names_in_masks_of_links_to_demonstrations_are_noted(tmp_path):
    path = write(tmp_path / "a", demos_of(0, 2), {"best": ["expert", "demo_0"]})
    with h5py.File(path, "r+") as file:
        file["data/expert"] = h5py.SoftLink("/data/demo_1")
    dataset = jrb.datasets.open(path)
    assert dataset.facts["mask/best"].tolist() == [True, False]
    told = "mask/best lists 1 names that no demonstration has: expert."
    assert dataset.notes[1:] == (told,)


@pytest.mark.parametrize("name", ["data/demo_7", "data/demo_0/obs/image", "mask/all"])
def test_links_that_lead_nowhere_are_refused(tmp_path, name):
    path = write(tmp_path / "a", demos_of(0, 2), {"train": ["demo_1"]})
    with h5py.File(path, "r+") as file:
        if name in file:
            del file[name]
        file[name] = h5py.SoftLink("/nothing")
    with pytest.raises(ValueError, match="expected data in the file itself, got a link that leads"):
        jrb.datasets.open(path)
