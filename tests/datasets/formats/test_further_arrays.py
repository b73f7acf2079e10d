"""Files of every format with an array more than the format knows: none is dropped in silence."""

import json

import h5py
import numpy as np
import pytest

import jrb
from jrb.layouts.names import nest
from tests.datasets.formats.trees import flat

LENGTHS = [4, 6]
STEPS = sum(LENGTHS)
LAST = np.isin(np.arange(STEPS), np.cumsum(LENGTHS) - 1)
RNG = np.random.default_rng(0)
PARTS = [slice(0, 4), slice(4, 10)]


def steps_of(rows):
    """The arrays that most formats need, by names of D4RL."""
    return {
        "observations": RNG.normal(size=(rows, 3)),
        "actions": RNG.normal(size=(rows, 2)).astype(np.float32),
        "rewards": RNG.normal(size=rows),
    }


def save_h5(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


def in_file(save, **flags):
    """A format of one file that has the steps of all episodes side by side."""

    def write(path, name, array, place):
        arrays = {**steps_of(STEPS), **flags}
        save(path / "all", arrays | {name: array})
        return path / ("all.npz" if save is save_npz else "all")

    return write


def save_npz(path, arrays):
    np.savez(path, **arrays)


def ogbench(path, name, array, place):
    arrays = steps_of(STEPS) | {"terminals": LAST, name: array}
    del arrays["rewards"]
    save_npz(path / "maze", arrays)
    return path / "maze.npz"


def groups(head, rename, **more):
    """A format with a group for each episode; `array` is of the last one, or beside all."""

    def write(path, name, array, place):
        arrays = {name: array} if place == "beside" else {}
        for number, part in enumerate(PARTS):
            rows = part.stop - part.start
            each = {rename.get(n, n): a for n, a in steps_of(rows).items()}
            each |= {n: make(rows) for n, make in more.items()}
            if place == "inside":
                whole = array.shape[:1] == (STEPS,)
                each[name] = array[part] if whole else array
            arrays |= {f"{head}{number}/{n}": a for n, a in each.items()}
        save_h5(path / "set.h5", arrays)
        return path / "set.h5"

    return write


def last(rows):
    return np.arange(rows) == rows - 1


def minari(path, name, array, place):
    flags = {"terminations": last, "truncations": lambda rows: np.zeros(rows, bool)}
    write = groups("episode_", {}, **flags)
    write(path, name, array, place).rename(path / "main_data.hdf5")
    about = {"total_episodes": len(LENGTHS), "total_steps": STEPS, "data_format": "hdf5"}
    (path / "metadata.json").write_text(json.dumps(about))
    return path


def minari_tables(path, name, array, place):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, length in enumerate(LENGTHS):
        padded = {
            **steps_of(length + 1),
            "terminations": last(length),
            "truncations": ~last(length),
        }
        padded["truncations"] &= False
        padded |= {n: np.append(padded[n], False) for n in ("terminations", "truncations")}
        values = array.reshape(-1)[: length + 1] if array.ndim else np.full(length + 1, array)
        values = np.resize(values, length + 1)
        columns = {n: pa.array(list(leaf)) for n, leaf in padded.items()}
        (path / str(number)).mkdir()
        table = pa.table(columns | {name: pa.array(values)})
        parquet.write_table(table, path / str(number) / "0.parquet")
        (path / str(number) / "metadata.json").write_text(json.dumps({"total_steps": length}))
    about = {"total_episodes": len(LENGTHS), "total_steps": STEPS, "data_format": "parquet"}
    (path / "metadata.json").write_text(json.dumps(about))
    return path


def npz_episodes(path, name, array, place):
    for number, part in enumerate(PARTS):
        rows = part.stop - part.start
        more = array[part] if array.shape[:1] == (STEPS,) else array
        np.savez(path / f"{number}.npz", **steps_of(rows), dones=last(rows), **{name: more})
    return path


def rlds(path, name, array, place):
    episodes = []
    for part in PARTS:
        rows = part.stop - part.start + 1
        leaves = {n[:-1]: leaf for n, leaf in steps_of(rows).items()}
        leaves |= {"is_last": last(rows), "is_terminal": last(rows)}
        more = array[part] if array.shape[:1] == (STEPS,) else array
        if place == "inside" and array.shape[:1] == (STEPS,):
            more = np.concatenate([more, more[-1:]])
        episodes.append({"steps": leaves} | ({} if place == "inside" else {name: more}))
        if place == "inside":
            leaves[name] = more
    return episodes


WRITERS = {
    "d4rl": in_file(save_h5, terminals=LAST, timeouts=LAST & False),
    "arrays h5": in_file(save_h5, terminations=LAST),
    "arrays npz": in_file(save_npz, dones=LAST),
    "ogbench": ogbench,
    "robomimic": groups("data/demo_", {"observations": "obs"}, dones=last),
    "robomimic without dones": groups("data/demo_", {"observations": "obs"}),
    "roboset": groups("Trial", {}, done=last),
    "roboset without done": groups("Trial", {}),
    "minari": minari,
    "minari tables": minari_tables,
    "npz episodes": npz_episodes,
    "rlds": rlds,
}
BESIDE = ("robomimic", "robomimic without dones", "roboset", "minari", "rlds")
"""Formats with a place for arrays that belong to no episode's steps."""

ARRAYS = {
    "a number a step": RNG.integers(0, 9, STEPS),
    "a flag a step": RNG.random(STEPS) < 0.5,
    "pictures": RNG.integers(0, 9, (STEPS, 2, 3, 1)).astype(np.uint8),
    "one longer": np.arange(1.0, STEPS + 2),
    "a short one": RNG.normal(size=(2, 5)),
    "a scalar": np.float32(2.5),
    "texts": np.array([b"left", b"right"] * (STEPS // 2)),
}
NAMES = ("costs", "goals", "extra/deep", "infos/speed", "next/goal")


def has(dataset, name, array):
    """True if the dataset has an array: as a leaf, as a fact, or in a note by its name."""
    if any(f"'{name}'" in note or f" {name} " in note for note in dataset.notes):
        return True
    episodes = list(map(flat, dataset))
    for leaf in episodes[0]:
        rows = np.concatenate([each[leaf] for each in episodes])
        # An array of OGBench has a row more in each episode.
        wanted = array[~LAST] if dataset.format.name == "ogbench" and array.ndim else array
        if rows.shape == wanted.shape and (rows == wanted).all() and name.split("/")[-1] in leaf:
            return True
    facts = [*dataset.facts.items(), *dataset.metadata.items()]
    return any(key == name and np.all(fact == array) for key, fact in facts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", WRITERS)
def test_an_array_more_is_kept_or_named(tmp_path, format, name, kind):
    array = ARRAYS[kind]
    if format == "minari tables" and (array.dtype.kind == "S" or "/" in name):
        pytest.skip("a column of a table is flat")
    dataset = jrb.datasets.open(WRITERS[format](tmp_path, name, array, "inside"))
    assert dataset.format.name.split("-")[0] == format.split()[0]
    assert dataset.lengths.tolist() == [n - (format == "ogbench") for n in LENGTHS]
    assert has(dataset, name, array), dataset.notes
    is_step, leaves = array.shape[:1] == (STEPS,), flat(dataset[0])
    if is_step and array.dtype.kind != "S" and format != "minari tables":
        # RLDS has names of its own for all that it knows.
        assert (name if format == "rlds" else name.replace("infos", "info")) in leaves


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("name", ["calibration", "about/camera"])
@pytest.mark.parametrize("format", BESIDE)
def test_an_array_of_no_episode_is_named(tmp_path, format, name, kind):
    array = ARRAYS[kind]
    dataset = jrb.datasets.open(WRITERS[format](tmp_path, name, array, "beside"))
    assert dataset.lengths.tolist() == LENGTHS
    is_fact = name in dataset.facts and array.shape == ()
    assert is_fact or any(f"'{name}'" in note for note in dataset.notes)


def items_of(name, array):
    """Items in TED `[T, ...]` with a leaf more."""
    leaves = steps_of(STEPS)
    flags = {"done": LAST, "terminated": LAST, "truncated": LAST & False}
    after = {"observation": leaves["observations"], "reward": leaves["rewards"], **flags}
    items = {"observation": leaves["observations"], "action": leaves["actions"], "next": after}
    return nest({**flat(items), name: array})


def recorded(path, items):
    with jrb.datasets.Recorder(path) as recorder:
        recorder.append(items)


def saved(path, items):
    jrb.save(path, *jrb.from_items(items, cast=True))


def dumped(path, items):
    jrb.interop.write_torchrl(path, *jrb.from_items(items, cast=True))


def as_table(path, items):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.mkdir()
    columns = {name.replace("/", "."): pa.array(list(leaf)) for name, leaf in flat(items).items()}
    parquet.write_table(pa.table(columns), path / "all.parquet")


@pytest.mark.parametrize("name", ["cost", "masks", "goal/deep"])
@pytest.mark.parametrize("write", [recorded, saved, dumped, as_table])
def test_a_leaf_more_of_items_is_a_leaf_of_the_dataset(tmp_path, write, name):
    array = RNG.integers(0, 9, STEPS).astype(np.int32)
    write(tmp_path / "set", items_of(name, array))
    dataset = jrb.datasets.open(tmp_path / "set")
    rows = np.concatenate([flat(each)[name] for each in dataset])
    np.testing.assert_array_equal(rows, array)
