import numpy as np
import pytest

import jrb
from tests.datasets.access import after, chained, check_access

SAVES = {"plain": np.savez, "packed": np.savez_compressed}
LENGTHS = [3, 1, 4, 2, 5, 1, 2, 3, 1, 6, 2, 4]


def episode_of(rng, steps):
    """Returns a random episode, with the observation after the last action."""
    return {
        "seen": {
            "image": rng.integers(0, 256, (steps + 1, 4, 4, 3)).astype(np.uint8),
            "state": rng.normal(size=(steps + 1, 2)).astype(np.float32),
        },
        "action": rng.normal(size=(steps, 2)).astype(np.float32),
        "reward": rng.normal(size=steps).astype(np.float32),
        "over": bool(rng.random() < 0.5),
    }


def aligned(each, rows):
    """A row has the action that was taken at its observation."""
    last = np.arange(len(each["action"])) == len(each["action"]) - 1
    found = {f"obs/{name}": leaf[:rows] for name, leaf in each["seen"].items()}
    found |= {"action": each["action"], "reward": each["reward"]}
    return found | {"terminal": last & each["over"], "timeout": last & ~np.bool_(each["over"])}


def arriving(each):
    """A row has the action that led to its observation."""
    first = lambda leaf: np.concatenate([np.zeros_like(leaf[:1]), leaf])
    rows = len(each["action"]) + 1
    found = {f"observation/{name}": leaf for name, leaf in each["seen"].items()}
    found |= {"action": first(each["action"]), "reward": first(each["reward"])}
    discount = np.ones(rows, np.float32)
    discount[-1] = not each["over"]
    return found | {"discount": discount, "is_first": np.arange(rows) == 0}


def expected_of(each, valid, **more):
    steps, seen = len(each["action"]), each["seen"]
    last = np.arange(steps) == steps - 1
    over = last & each["over"]
    nexts = {name: chained(leaf, steps) for name, leaf in seen.items()}
    if valid is not None:
        valid = ~last | over
        nexts = {name: chained(leaf[:steps], steps) for name, leaf in seen.items()}
    return {
        "observation": {name: leaf[:steps] for name, leaf in seen.items()},
        "action": each["action"],
        "next": after(each["reward"], over, last & ~over, nexts, valid),
        **more,
    }


@pytest.mark.slow
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("layout", ["aligned", "with the last", "arriving"])
def test_a_file_for_each_episode_in_the_order_of_their_numbers(tmp_path, layout, save):
    rng = np.random.default_rng(0)
    every = [episode_of(rng, steps) for steps in LENGTHS]
    for number, each in enumerate(every):
        steps = len(each["action"])
        rows = steps + (layout == "with the last")
        arrays = arriving(each) if layout == "arriving" else aligned(each, rows)
        SAVES[save](tmp_path / f"{number}-{steps}.npz", **arrays)
    (tmp_path / "notes.txt").write_text("by hand")
    dataset = jrb.datasets.open(tmp_path)
    assert dataset.format.name == "npz-episodes"
    discount = lambda each: arriving(each)["discount"][1:]
    check_access(
        dataset,
        [
            expected_of(each, True if layout == "aligned" else None)
            | ({"discount": discount(each)} if layout == "arriving" else {})
            for each in every
        ],
    )
    assert dataset.facts["file"][10] == "10-2.npz"
    assert ("arrives=" in " ".join(dataset.notes)) == (layout == "arriving")
    assert jrb.stats(*dataset.buffer())["complete"] == len(LENGTHS)


def test_what_a_row_has_can_be_told(tmp_path):
    each = arriving(episode_of(np.random.default_rng(0), 4))
    np.savez(tmp_path / "a.npz", **each)
    assert jrb.datasets.open(tmp_path).lengths.tolist() == [4]
    assert jrb.datasets.open(tmp_path, arrives=False).lengths.tolist() == [5]
    del each["discount"], each["is_first"]
    np.savez(tmp_path / "a.npz", **each)
    assert jrb.datasets.open(tmp_path).lengths.tolist() == [5]
    assert jrb.datasets.open(tmp_path, arrives=True).lengths.tolist() == [4]
    with pytest.raises(TypeError, match="arrives"):
        jrb.datasets.open(tmp_path, arrives=1)


def test_names_are_told_by_a_mapping(tmp_path):
    np.savez(tmp_path / "a.npz", image=np.zeros((3, 2, 2)), act=np.zeros(3), done=[0, 0, 1])
    mapping = {"image": "observation", "act": "action"}
    (episode,) = jrb.datasets.open(tmp_path, mapping=mapping)
    assert episode["observation"].shape == (3, 2, 2)
    with pytest.raises(ValueError, match=r"a\.npz: expected an array for 'observation', got"):
        jrb.datasets.open(tmp_path)


STEPS = {"observation": np.zeros((3, 2)), "action": np.zeros(3), "reward": np.zeros(3)}
BAD = {
    "lengths": ({"reward": np.zeros(2)}, "expected arrays of one length"),
    "observations": ({"observation": np.zeros((6, 2))}, "expected arrays of one length"),
    "several": (
        {"done": np.array([0, 1, 1])},
        "one episode in the file, got one that ends after 2",
    ),
    "other": ({"action": np.zeros((3, 2))}, "expected the leaves of"),
    "none": ({name: leaf[:0] for name, leaf in STEPS.items()}, "observations of one step or more"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(tmp_path, case):
    change, told = BAD[case]
    np.savez(tmp_path / "a.npz", **STEPS)
    np.savez(tmp_path / "b.npz", **STEPS | change)
    with pytest.raises(ValueError, match=rf"b\.npz: .*{told}"):
        jrb.datasets.open(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", **STEPS)
    with open(tmp_path / "b.npz", "r+b") as file:
        file.truncate(300)
    with pytest.raises(ValueError, match=r"b\.npz: expected a whole \.npz file"):
        jrb.datasets.open(tmp_path)
