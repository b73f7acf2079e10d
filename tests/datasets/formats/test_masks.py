"""Bootstrap masks and discounts beside flags: they tell time-outs from terminations."""

import h5py
import numpy as np
import pytest

import jrb

LENGTHS = [3, 2, 6, 4, 5]
STEPS = sum(LENGTHS)
LAST = np.isin(np.arange(STEPS), np.cumsum(LENGTHS) - 1)
LATE = np.isin(np.arange(STEPS), [4, 14])  # the ends by a time limit: of episodes 1 and 3
OVER = LAST & ~LATE
NAMES = ("mask", "masks", "discount", "discounts", "not_done")


def steps_of(observations="observations"):
    rng = np.random.default_rng(0)
    return {
        observations: rng.normal(size=(STEPS, 2)),
        "actions": rng.normal(size=STEPS),
        "rewards": rng.normal(size=STEPS),
    }


def save(path, arrays, kind):
    if kind == "npz":
        np.savez(path / "a.npz", **arrays)
        return path / "a.npz"
    head = {"robomimic": "data/demo_", "roboset": "Trial"}.get(kind)
    ends = np.cumsum(LENGTHS)
    with h5py.File(path / "a.h5", "w") as file:
        for name, array in arrays.items():
            if head is None:
                file[name] = array
                continue
            for k, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
                file[f"{head}{k}/{name}"] = array[end - length : end]
    return path / "a.h5"


def folder(path, arrays):
    """A file for each episode."""
    for k, (end, length) in enumerate(zip(np.cumsum(LENGTHS), LENGTHS, strict=True)):
        np.savez(path / f"{k}.npz", **{n: a[end - length : end] for n, a in arrays.items()})
    return path


def table(path, arrays):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {name: pa.array(list(array)) for name, array in arrays.items()}
    parquet.write_table(pa.table(columns), path / "a.parquet")
    return path / "a.parquet"


SAVES = {
    "d4rl": lambda path, arrays: save(path, {**steps_of(), **arrays}, "d4rl"),
    "npz": lambda path, arrays: save(path, {**steps_of("obs"), **arrays}, "npz"),
    "h5": lambda path, arrays: save(path, {**steps_of("obs"), **arrays}, "h5"),
    "robomimic": lambda path, arrays: save(path, {**steps_of("obs"), **arrays}, "robomimic"),
    "roboset": lambda path, arrays: save(path, {**steps_of(), **arrays}, "roboset"),
    "npz-episodes": lambda path, arrays: folder(path, {**steps_of(), **arrays}),
    "table": lambda path, arrays: table(path, {**steps_of(), **arrays}),
}


def flags_of(dataset):
    nexts = [each["next"] for each in dataset]
    return [np.concatenate([each[name] for each in nexts]) for name in ("terminated", "truncated")]


MASKS = {
    "bool": lambda name: {name: ~OVER},
    "whole numbers": lambda name: {name: (~OVER).astype(np.int32)},
    "a column": lambda name: {name: (~OVER).astype(np.float64)[:, None]},
    "discounts below 1": lambda name: {name: np.where(OVER, 0, 0.97).astype(np.float32)},
    "of many sizes": lambda name: {name: np.where(OVER, 0, np.linspace(0.01, 1, STEPS))},
}


@pytest.mark.parametrize(("name", "mask"), [*zip(NAMES, MASKS, strict=True), ("masks", "bool")])
@pytest.mark.parametrize("flag", ["terminals", "dones"])
@pytest.mark.parametrize("kind", SAVES)
def test_ends_that_may_be_bootstrapped_are_truncated(tmp_path, kind, flag, name, mask):
    arrays = {"terminals": LAST} if kind == "d4rl" else {}
    arrays |= {flag: LAST, **MASKS[mask](name)}
    dataset = jrb.datasets.open(SAVES[kind](tmp_path, arrays))
    assert dataset.format.name == {"npz": "arrays", "h5": "arrays"}.get(kind, kind)
    assert dataset.lengths.tolist() == LENGTHS
    terminated, truncated = flags_of(dataset)
    assert terminated.tolist() == OVER.tolist() and truncated.tolist() == LATE.tolist()
    assert any(f"'{name}'" in note for note in dataset.notes)
    assert not any("no time-outs" in note or "differ" in note for note in dataset.notes)
    kept = np.concatenate([each[name] for each in dataset])
    assert kept.tobytes() == arrays[name].tobytes()


@pytest.mark.parametrize("kind", ["robomimic", "roboset", "npz-episodes"])
def test_a_mask_alone_tells_how_an_episode_of_its_own_ended(tmp_path, kind):
    dataset = jrb.datasets.open(SAVES[kind](tmp_path, {"masks": ~OVER}))
    assert [flags.tolist() for flags in flags_of(dataset)] == [OVER.tolist(), LATE.tolist()]


@pytest.mark.parametrize("kind", ["npz", "h5", "table"])
@pytest.mark.parametrize("flag", ["episode", "timeouts"])
def test_a_mask_tells_where_other_arrays_do_not(tmp_path, kind, flag):
    arrays = {"episode": np.repeat(np.arange(5), LENGTHS), "timeouts": LATE}
    path = SAVES[kind](tmp_path, {flag: arrays[flag], "discount": np.where(OVER, 0, 0.9)})
    dataset = jrb.datasets.open(path)
    assert dataset.lengths.tolist() == LENGTHS
    assert [flags.tolist() for flags in flags_of(dataset)] == [OVER.tolist(), LATE.tolist()]
    assert any("'discount' is 0" in note for note in dataset.notes)


def test_a_mask_does_not_end_a_numbered_episode(tmp_path):
    """A mask is 0 wherever a goal was reached, and the episode went on."""
    arrays = {"episode": np.repeat(np.arange(5), LENGTHS), "masks": np.arange(STEPS) % 5 != 0}
    dataset = jrb.datasets.open(SAVES["npz"](tmp_path, arrays))
    assert dataset.lengths.tolist() == LENGTHS
    assert any("'masks' is 0 at steps that did not terminate" in note for note in dataset.notes)


CONTRADICTIONS = {
    "0 amid episodes": {"masks": np.arange(STEPS) % 4 != 1},
    "0 at a time-out": {"masks": ~LAST},
    "above 0 at a termination": {"masks": np.ones(STEPS), "timeouts": LATE, "terminals": OVER},
    "no discount": {"discount": np.full(STEPS, -2.5)},
    "not numbers": {"discount": np.full(STEPS, np.nan)},
    "1 at ends alone": {"mask": LAST},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
@pytest.mark.parametrize("kind", ["d4rl", "npz", "h5"])
def test_contradictions_are_told(tmp_path, kind, case):
    arrays = {"terminals": OVER, "timeouts": LATE, **CONTRADICTIONS[case]}
    dataset = jrb.datasets.open(SAVES[kind](tmp_path, arrays))
    # Flags that tell both kinds of ends are kept.
    assert [flags.tolist() for flags in flags_of(dataset)] == [OVER.tolist(), LATE.tolist()]
    name = next(name for name in arrays if name not in ("terminals", "timeouts"))
    assert any(f"'{name}' is 0 at steps that did not terminate" in note for note in dataset.notes)


@pytest.mark.parametrize("kind", ["d4rl", "npz", "table"])
def test_flags_and_masks_that_agree(tmp_path, kind):
    for number, terminals in enumerate((OVER, LAST)):
        arrays = {"terminals": terminals, "timeouts": LATE, "masks": ~OVER}
        (place := tmp_path / str(number)).mkdir()
        dataset = jrb.datasets.open(SAVES[kind](place, arrays))
        assert [flags.tolist() for flags in flags_of(dataset)] == [OVER.tolist(), LATE.tolist()]
        assert not any("did not terminate" in note for note in dataset.notes)


@pytest.mark.parametrize("kind", ["d4rl", "npz"])
def test_time_outs_that_no_step_has_do_not_hide_those_of_a_mask(tmp_path, kind):
    arrays = {"terminals": LAST, "timeouts": LAST & False, "masks": (~OVER).astype(float)}
    terminated, truncated = flags_of(jrb.datasets.open(SAVES[kind](tmp_path, arrays)))
    assert terminated.tolist() == OVER.tolist() and truncated.tolist() == LATE.tolist()


def test_a_mask_of_each_action_is_a_leaf(tmp_path):
    masks = np.random.default_rng(0).random((STEPS, 4)) < 0.5
    dataset = jrb.datasets.open(SAVES["d4rl"](tmp_path, {"terminals": LAST, "mask": masks}))
    assert flags_of(dataset)[0].tolist() == LAST.tolist()
    assert np.array_equal(np.concatenate([each["mask"] for each in dataset]), masks)


def test_a_mapping_names_a_mask_or_says_that_it_is_none(tmp_path):
    path = SAVES["npz"](tmp_path, {"terminals": LAST, "alive": ~OVER})
    dataset = jrb.datasets.open(path, mapping={"alive": "masks"})
    assert flags_of(dataset)[0].tolist() == OVER.tolist()
    path = SAVES["d4rl"](tmp_path, {"terminals": LAST, "mask": ~OVER})
    dataset = jrb.datasets.open(path, mapping={"mask": "info/mask"})
    assert flags_of(dataset)[0].tolist() == LAST.tolist()
    assert dataset[0]["info"]["mask"].tolist() == (~OVER)[:3].tolist()


def test_a_horizon_counts_from_the_ends_of_a_mask(tmp_path):
    arrays = {"terminals": LAST, "masks": ~OVER}
    dataset = jrb.datasets.open(SAVES["d4rl"](tmp_path, arrays), horizon=4)
    terminated, truncated = flags_of(dataset)
    assert dataset.lengths.tolist() == [3, 2, 4, 2, 4, 4, 1]
    assert terminated.tolist() == OVER.tolist()
    assert np.flatnonzero(truncated).tolist() == [4, 8, 14, 18]


@pytest.mark.parametrize("last", [0, 0.5, 1])
@pytest.mark.parametrize("over", [True, False])
def test_rlds_without_is_terminal_is_told_by_its_discount(last, over):
    rows = np.arange(5)
    steps = {"observation": rows, "action": rows, "reward": rows * 0.5, "is_last": rows == 4}
    steps |= {"discount": np.where(rows == 3, last, 1.0)}
    steps |= {"is_terminal": (rows == 4) & over} if over else {}
    (episode,) = jrb.datasets.open([{"steps": steps}])
    assert bool(episode["next"]["terminated"][-1]) == (over or last == 0)


def test_ogbench_with_a_mask(tmp_path):
    arrays = {**steps_of(), "terminals": LAST, "masks": ~np.isin(np.arange(STEPS), [1, 7, 13])}
    del arrays["rewards"]
    np.savez(tmp_path / "a.npz", **arrays)
    dataset = jrb.datasets.open(tmp_path / "a.npz")
    assert dataset.format.name == "ogbench"
    ended = [bool(each["next"]["terminated"][-1]) for each in dataset]
    assert ended == [True, False, False, True, False]
    assert any("'masks' is 0" in note for note in dataset.notes)
