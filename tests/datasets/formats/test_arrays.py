import os
import tracemalloc

import h5py
import numpy as np
import pytest

import jrb
from tests.datasets.access import after, chained, check_access


def save_h5(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


SAVES = {"npz": np.savez, "packed": np.savez_compressed, "h5": save_h5}
LENGTHS = [2, 1, 5, 3]
STEPS = sum(LENGTHS)
LAST = np.isin(np.arange(STEPS), np.cumsum(LENGTHS) - 1)


def usual(seed=0, **more):
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(STEPS, 3)).astype(np.float32),
        "actions": rng.integers(0, 4, STEPS),
        "rewards": rng.normal(size=STEPS),
        **more,
    }


def save_texts(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array.astype(object) if array.dtype.kind == "U" else array


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, save_texts])
@pytest.mark.parametrize("mapping", [None, {"id": "episode"}])
def test_texts_that_tell_episodes_apart_become_numbers(tmp_path, save, mapping):
    path = tmp_path / ("x.npz" if save is not save_texts else "x.h5")
    texts = np.repeat(["zoo", "ant", "bee", "yak"], LENGTHS)
    arrays = usual() | {"episode_id" if mapping is None else "id": texts}
    save(path, **arrays, task=np.array(["run"] * STEPS))
    dataset = jrb.datasets.open(path, mapping=mapping)
    assert dataset.lengths.tolist() == LENGTHS
    numbers = np.concatenate([each["episode"] for each in dataset])
    assert numbers.tolist() == np.repeat(np.arange(4), LENGTHS).tolist()
    assert dataset.facts["episode"].tolist() == ["zoo", "ant", "bee", "yak"]
    assert "Left out, as no arrays of numbers for each step: 'task'." in dataset.notes
    with pytest.raises(ValueError, match="'action': expected numbers, got 'task', which holds tex"):
        jrb.datasets.open(path, mapping={"task": "action"})


def test_declared_rows_of_which_nothing_is_stored_are_refused(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, dtype in {"obs": "f4", "action": "i1", "done": "?"}.items():
            file.create_dataset(name, (8_000_000,), dtype, chunks=(1 << 16,))
    told = r"100 times the \d+ bytes of the files, got 48000000 declared bytes.*max_expansion=\d+\."
    tracemalloc.start()
    with pytest.raises(ValueError, match=told):
        jrb.datasets.open(tmp_path / "x.h5")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    dataset = jrb.datasets.open(tmp_path / "x.h5", max_expansion=1e6)
    assert dataset.transitions == 8_000_000


def expected_of(arrays, terminated, truncated, **more):
    ends = np.cumsum(LENGTHS)
    parts = [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
    is_marked = "next_obs" not in arrays and not terminated[LAST].all()
    episodes = []
    for part in parts:
        seen = arrays["obs"][part]
        nexts = arrays["next_obs"][part] if "next_obs" in arrays else chained(seen, len(seen))
        over = truncated[part] | (LAST & ~terminated)[part]
        valid = (~LAST | terminated)[part] if is_marked else None
        nested = after(arrays["rewards"][part], terminated[part], over, nexts, valid)
        episodes.append(
            {
                "observation": seen,
                "action": arrays["actions"][part],
                "next": nested,
                **{name: leaf[part] for name, leaf in more.items()},
            }
        )
    return episodes


NONE = np.zeros(STEPS, bool)
TIMES = LAST & (np.arange(STEPS) > 3)
FLAGS = {
    "both": ({"terminals": LAST & ~TIMES, "timeouts": TIMES}, LAST & ~TIMES, TIMES),
    "done": ({"dones": LAST}, LAST, NONE),
    "done and truncated": ({"done": LAST, "truncated": TIMES}, LAST & ~TIMES, TIMES),
    "done and terminated": ({"done": LAST, "terminated": TIMES}, TIMES, LAST & ~TIMES),
    "truncated": ({"truncations": LAST.astype(np.uint8)}, NONE, LAST),
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("flags", FLAGS)
def test_usual_names(tmp_path, save, flags):
    given, terminated, truncated = FLAGS[flags]
    arrays = usual(**given)
    path = tmp_path / "data.npz"
    SAVES[save](path, **arrays)
    dataset = jrb.datasets.open(path)
    assert dataset.format.name == "arrays"
    check_access(dataset, expected_of(arrays, terminated, truncated))


@pytest.mark.parametrize("save", SAVES)
def test_numbers_of_episodes_tell_where_they_end(tmp_path, save):
    number = np.repeat([7, 3, 4, 9], LENGTHS)
    arrays = usual(episode=number)
    SAVES[save](tmp_path / "data.npz", **arrays)
    dataset = jrb.datasets.open(tmp_path / "data.npz")
    check_access(dataset, expected_of(arrays, NONE, NONE, episode=number))
    assert dataset.facts["episode"].tolist() == [7, 3, 4, 9]
    assert dataset.notes


@pytest.mark.parametrize("save", SAVES)
def test_a_mapping_names_the_arrays(tmp_path, save):
    arrays = usual(
        next_obs=np.random.default_rng(1).normal(size=(STEPS, 3)), extra=np.arange(STEPS)
    )
    names = {"obs": "s", "next_obs": "s2", "actions": "a", "rewards": "r"}
    renamed = {names.get(name, name): leaf for name, leaf in arrays.items()} | {"over": LAST}
    SAVES[save](tmp_path / "data.npz", **renamed)
    expected = expected_of(arrays, LAST, NONE, extra=arrays["extra"])
    mapping = {
        "s": "observation",
        "s2": ("next", "observation"),
        "a": "action",
        "r": "reward",
        "over": "next/terminated",
    }
    check_access(jrb.datasets.open(tmp_path / "data.npz", mapping=mapping), expected)
    keys = jrb.Keys(
        observation="s", next_observation="s2", action="a", reward="r", terminated="over"
    )
    check_access(jrb.datasets.open(tmp_path / "data.npz", mapping=keys), expected)


def test_groups_are_nested(tmp_path):
    arrays = usual(terminals=LAST)
    nested = {"obs/arm": arrays["obs"], "obs/eye/left": np.arange(STEPS), "info/x": np.ones(STEPS)}
    save_h5(tmp_path / "a", **{n: a for n, a in arrays.items() if n != "obs"}, **nested)
    np.savez(tmp_path / "b", **{n: a for n, a in arrays.items() if n != "obs"}, **nested)
    for name in ("a", "b.npz"):
        episode = jrb.datasets.open(tmp_path / name)[2]
        assert episode["observation"]["eye"]["left"].tolist() == [3, 4, 5, 6, 7]
        assert episode["next"]["observation"]["eye"]["left"].tolist() == [4, 5, 6, 7, 0]
        assert episode["info"]["x"].tolist() == [1] * 5


def test_without_rewards(tmp_path):
    arrays = usual(terminals=LAST)
    del arrays["rewards"]
    np.savez(tmp_path / "a.npz", **arrays)
    dataset = jrb.datasets.open(tmp_path / "a.npz")
    assert "reward" not in dataset.spec["next"]
    with pytest.raises(ValueError, match="without rewards"):
        dataset.best(0.5)


def test_what_is_left_out_is_told(tmp_path):
    arrays = usual(terminals=LAST, text=np.array(["a"] * STEPS), gamma=np.float32(0.9))
    np.savez(tmp_path / "a.npz", **arrays)
    dataset = jrb.datasets.open(tmp_path / "a.npz")
    assert dataset.notes == ("Left out, as no arrays of numbers for each step: 'gamma', 'text'.",)


BAD = {
    "lengths": ({"terminals": LAST, "next_obs": np.zeros(3)}, {}, "one length.*'next_obs': 3"),
    "absent": ({"terminals": LAST}, {"mapping": {"acts": "action"}}, "'acts'.*'actions'"),
    "no ends": ({}, {}, "where episodes end"),
    "apart": ({"episode": np.arange(STEPS) % 2}, {}, "side by side"),
    "flags": ({"terminals": np.zeros((STEPS, 2))}, {}, "a flag for each step"),
    "same": ({"terminals": LAST, "observation": np.zeros(STEPS)}, {}, "leaf of its own"),
    "action": ({"terminals": LAST, "actions": None}, {}, "an array for 'action'.*mapping"),
}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(tmp_path, save, case):
    more, options, message = BAD[case]
    arrays = {name: leaf for name, leaf in usual(**more).items() if leaf is not None}
    SAVES[save](tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message) as error:
        jrb.datasets.open(tmp_path / "a.npz", format="arrays", **options)
    assert str(tmp_path) in str(error.value)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("a,b\n1,2\n")
    (tmp_path / "nothing").write_bytes(b"")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("text", "nothing", "one.npy", "."):
        with pytest.raises(ValueError, match=r"no format matches(.|\n)*arrays: an \.npz"):
            jrb.datasets.open(tmp_path / name)
        with pytest.raises(ValueError, match=r"expected an \.npz or HDF5 file"):
            jrb.datasets.open(tmp_path / name, format="arrays")


def write_d4rl(path, ends):
    steps = 12
    with h5py.File(path, "w") as file:
        for name in ("observations", "actions", "rewards"):
            file[name] = np.arange(steps, dtype=np.float32)
        file["terminals"] = np.isin(np.arange(steps), ends)
        file["timeouts"] = np.zeros(steps, bool)
    return path


def test_another_file_at_the_path_is_read_anew(tmp_path):
    path = tmp_path / "a.hdf5"
    assert jrb.datasets.open(write_d4rl(path, [2, 11])).lengths.tolist() == [3, 9]
    path.unlink()
    write_d4rl(path, [4, 11])
    os.utime(path, ns=(5, 5))
    assert jrb.datasets.open(path).lengths.tolist() == [5, 7]


def test_what_was_read_may_be_changed(tmp_path):
    """Flags are kept for the next episode: none is a view of them."""
    dataset = jrb.datasets.open(write_d4rl(tmp_path / "a.hdf5", [2, 11]))
    first = dataset[0]
    for name in ("terminated", "truncated", "done"):
        first["next"][name][:] = True
    assert dataset[0]["next"]["terminated"].tolist() == [False, False, True]
    assert dataset[0]["next"]["truncated"].tolist() == [False] * 3
    for block in dataset.blocks():
        block["next"]["terminated"][:] = True
    assert dataset[1]["next"]["terminated"].tolist() == [False] * 8 + [True]


def test_options_have_their_own(tmp_path):
    path = tmp_path / "a.npz"
    over = np.arange(6) == 3
    np.savez(path, obs=np.zeros(6), actions=np.zeros(6), x=over, y=~over)
    for name, lengths in (("x", [4, 2]), ("y", [1, 1, 1, 2, 1]), ("x", [4, 2])):
        dataset = jrb.datasets.open(path, mapping={name: "done"})
        assert dataset.lengths.tolist() == lengths
        assert dataset[0]["next"]["terminated"].sum() == 1
