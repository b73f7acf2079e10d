import numpy as np
import pytest

import jrb
from jrb.datasets.reading import tabular
from tests.datasets.access import after, check_access

SAVES = {"plain": np.savez, "compressed": np.savez_compressed}


def arrays_of(seed, lengths, **more):
    """Returns arrays as OGBench's scripts write them: T steps and a row of the last observation."""
    rng = np.random.default_rng(seed)
    rows = sum(lengths) + len(lengths)
    terminals = np.zeros(rows, bool)
    terminals[np.cumsum(np.array(lengths) + 1) - 1] = True
    return {
        "observations": rng.normal(size=(rows, 4)).astype(np.float32),
        "actions": rng.normal(size=(rows, 2)).astype(np.float32),
        "terminals": terminals,
        "qpos": rng.normal(size=(rows, 5)).astype(np.float32),
        "button_states": rng.integers(0, 2, (rows, 3)),
        **more,
    }


def expected_of(arrays, lengths):
    episodes, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        truncated = np.arange(length) == length - 1
        nexts = arrays["observations"][start + 1 : start + length + 1]
        episodes.append(
            {
                "observation": arrays["observations"][part],
                "action": arrays["actions"][part],
                "qpos": arrays["qpos"][part],
                "button_states": arrays["button_states"][part],
                "next": after(None, np.zeros(length, bool), truncated, nexts),
            }
        )
        start += length + 1
    return episodes


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_transitions_with_all_next_observations(tmp_path, save, block, monkeypatch):
    monkeypatch.setattr(tabular, "_BLOCK", block)
    lengths = [3, 1, 6, 2, 1, 1, 9]
    arrays = arrays_of(0, lengths)
    SAVES[save](tmp_path / "maze.npz", **arrays)
    dataset = jrb.datasets.open(tmp_path / "maze.npz")
    assert dataset.format.name == "ogbench"
    check_access(dataset, expected_of(arrays, lengths))
    assert "no rewards" in dataset.notes[0]


def test_the_transitions_are_those_of_its_own_loader(tmp_path):
    lengths = [4, 2, 7]
    arrays = arrays_of(1, lengths)
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    block = next(jrb.datasets.open(tmp_path / "a.npz").steps(100))
    real = ~arrays["terminals"]
    before = np.append(False, real[:-1])
    np.testing.assert_array_equal(block["observation"], arrays["observations"][real])
    np.testing.assert_array_equal(block["action"], arrays["actions"][real])
    np.testing.assert_array_equal(block["next"]["observation"], arrays["observations"][before])
    ends = np.append(arrays["terminals"][1:], True)[real]
    np.testing.assert_array_equal(block["next"]["truncated"], ends)


BAD = {
    "missing": (lambda a: {**a, "actions": None}, "expected an array 'actions'"),
    "lengths": (lambda a: {**a, "actions": a["actions"][:-1]}, "arrays of one len.*'actions': 6"),
    "one row": (lambda a: {**a, "terminals": np.ones(7, bool)}, "two rows or more.*episode 0"),
    "values": (lambda a: {**a, "terminals": np.arange(7)}, "flags of 0 and 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(tmp_path, case):
    change, message = BAD[case]
    arrays = {name: leaf for name, leaf in change(arrays_of(0, [3, 2])).items() if leaf is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        jrb.datasets.open(tmp_path / "a.npz", format="ogbench")


def test_a_set_with_rewards_is_of_another_kind(tmp_path):
    arrays = arrays_of(0, [3, 2], rewards=np.zeros(7))
    np.savez(tmp_path / "a.npz", **arrays)
    assert jrb.datasets.open(tmp_path / "a.npz").format.name == "arrays"
