import h5py
import numpy as np
import pytest

import jrb
from tests.datasets.access import after, chained, check_access


def trial_of(rng, steps, over=True):
    done = np.zeros(steps, bool)
    done[-1] = over
    return {
        "observations": rng.normal(size=(steps, 4)),
        "actions": rng.normal(size=(steps, 2)).astype(np.float32),
        "rewards": rng.normal(size=steps),
        "done": done,
        "env_infos/solved": rng.integers(0, 2, steps).astype(bool),
        "env_infos/obs_dict/qp": rng.normal(size=(steps, 3)),
        "time": np.arange(steps) * 0.02,
    }


def write(path, trials):
    """A file of trials by their numbers, written in the order in which they are given."""
    with h5py.File(path, "w") as file:
        for name, arrays in trials.items():
            for leaf, array in arrays.items():
                file[f"{name}/{leaf}"] = array
    return str(path)


def expected_of(trial, is_marked):
    done = trial["done"]
    truncated = np.zeros(len(done), bool)
    truncated[-1] = not done[-1]
    valid = ~truncated
    return {
        "observation": trial["observations"],
        "action": trial["actions"],
        "time": trial["time"],
        "info": {
            "solved": trial["env_infos/solved"],
            "obs_dict": {"qp": trial["env_infos/obs_dict/qp"]},
        },
        "next": after(
            trial["rewards"],
            done,
            truncated,
            chained(trial["observations"], len(done)),
            valid if is_marked else None,
        ),
    }


def trials_of(seed, count, over=None):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, count)
    over = rng.random(count) < 0.5 if over is None else [over] * count
    return {f"Trial{n}": trial_of(rng, lengths[n], over[n]) for n in range(count)}


@pytest.mark.parametrize("over", [None, True])
def test_trials_of_a_file_in_the_order_of_their_numbers(tmp_path, over):
    trials = trials_of(0, 12, over)
    path = write(tmp_path / "set.h5", dict(sorted(trials.items())))
    dataset = jrb.datasets.open(path)
    assert dataset.format.name == "roboset"
    check_access(dataset, [expected_of(trial, over is None) for trial in trials.values()])
    assert dataset.facts["episode"].tolist() == list(range(12))
    assert dataset.facts["seed"].tolist() == [0] * 12
    assert "'done'" in dataset.notes[0]


@pytest.mark.slow
def test_files_of_a_folder_in_the_order_of_the_numbers_in_their_names(tmp_path):
    trials = [trials_of(seed, 1 + seed % 3) for seed in range(12)]
    for number, each in enumerate(trials):
        write(tmp_path / f"door_{number}.h5", each)
    (tmp_path / "README.md").write_text("no data")
    dataset = jrb.datasets.open(tmp_path)
    every = [trial for each in trials for trial in each.values()]
    check_access(dataset, [expected_of(trial, True) for trial in every])
    counts = [len(each) for each in trials]
    assert dataset.facts["seed"].tolist() == np.repeat(np.arange(12), counts).tolist()
    assert dataset.facts["episode"].tolist() == [n for count in counts for n in range(count)]
    assert dataset.metadata["files"] == [f"door_{number}.h5" for number in range(12)]


def test_nested_observations_and_dropped_last_steps(tmp_path):
    trial = trial_of(np.random.default_rng(0), 4, False)
    trial["observations/image"] = np.arange(4 * 12, dtype=np.uint8).reshape(4, 2, 2, 3)
    trial["observations/state"] = trial.pop("observations")
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", {"Trial0": trial}), final="drop")
    episode = dataset[0]
    assert dataset.lengths.tolist() == [3]
    np.testing.assert_array_equal(episode["observation"]["image"], trial["observations/image"][:3])
    np.testing.assert_array_equal(
        episode["next"]["observation"]["image"], trial["observations/image"][1:]
    )
    assert episode["next"]["truncated"].tolist() == [False, False, True]


def test_texts_and_arrays_of_other_lengths_beside_the_steps_are_left_out(tmp_path):
    trial = trial_of(np.random.default_rng(0), 4)
    trial |= {"env_infos/name": np.array([b"x"] * 4, "S1"), "notes": np.zeros(7)}
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", {"Trial0": trial}))
    assert "'env_infos/name', 'notes'" in dataset.notes[-1]
    assert "notes" not in dataset.spec


def wrong(**changes):
    trial = trial_of(np.random.default_rng(0), 4)
    trial |= changes
    return {name: array for name, array in trial.items() if array is not None}


BAD = {
    "twice": ({"Trial0": wrong(), "Trial00": wrong()}, "a number of its own"),
    "missing": ({"Trial0": wrong(rewards=None)}, "Trial0: expected an array 'rewards'"),
    "unseen": ({"Trial0": wrong(observations=None)}, "expected observations"),
    "lengths": ({"Trial0": wrong(rewards=np.zeros(3))}, "Trial0.*arrays of one length"),
    "none": ({"Trial0": {name: array[:0] for name, array in wrong().items()}}, "one step or more"),
    "other": ({"Trial0": wrong(), "Trial1": wrong(actions=np.zeros((4, 9)))}, "Trial1.*the leaves"),
    "flag": ({"Trial0": wrong(done=np.full(4, 3))}, "flags of 0 and 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(tmp_path, case):
    trials, message = BAD[case]
    path = write(tmp_path / "a.h5", trials)
    with pytest.raises(ValueError, match=message) as error:
        jrb.datasets.open(path)
    assert path in str(error.value)


def test_numbers_with_gaps_are_taken_in_their_order(tmp_path):
    trials = trials_of(0, 4)
    named = dict(zip(("Trial0", "Trial1", "Trial10", "Trial2"), trials.values(), strict=True))
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", named))
    assert dataset.facts["episode"].tolist() == [0, 1, 2, 10]
    for name, episode in zip(("Trial0", "Trial1", "Trial2", "Trial10"), dataset, strict=True):
        assert episode["action"].tobytes() == named[name]["actions"].tobytes()
    assert "a.h5: 7 numbers are missing between Trial0 and Trial10." in dataset.notes


def test_a_file_of_a_folder_that_is_no_more_of_hdf5_is_not_left_out(tmp_path):
    for number in range(3):
        path = write(tmp_path / f"{number}.h5", trials_of(number, 2))
    with open(path, "r+b") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=r"2\.h5: expected a whole HDF5 file"):
        jrb.datasets.open(tmp_path)


def test_a_damaged_file_of_a_folder_is_named(tmp_path):
    for number in range(2):
        path = write(tmp_path / f"{number}.h5", trials_of(number, 20))
    with open(path, "r+b") as file:
        file.truncate(20_000)
    with pytest.raises(ValueError, match=r"1\.h5: expected a whole HDF5 file"):
        jrb.datasets.open(tmp_path)


def test_a_trial_that_lies_elsewhere_is_refused(tmp_path):
    other = write(tmp_path / "other.h5", trials_of(0, 1))
    path = write(tmp_path / "a.h5", trials_of(0, 1))
    with h5py.File(path, "r+") as file:
        file["Trial1"] = h5py.ExternalLink(other, "/Trial0")
    with pytest.raises(ValueError, match="'Trial1': expected data in the file itself"):
        jrb.datasets.open(path)


def test_trials_without_done_are_truncated_at_their_ends(tmp_path):
    trials = trials_of(2, 3)
    for trial in trials.values():
        del trial["done"]
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", trials))
    for episode, trial in zip(dataset, trials.values(), strict=True):
        assert np.flatnonzero(episode["next"]["truncated"]).tolist() == [len(trial["time"]) - 1]
        assert not episode["next"]["terminated"].any()
    assert any("No flags" in note for note in dataset.notes)
