import h5py
import numpy as np
import pytest

import jrb
from jrb.datasets.formats.d4rl import D4RL
from jrb.datasets.reading import tabular
from tests.datasets.access import after, assert_same, chained, check_access


def arrays_of(lengths, terminated, seed=0, **more):
    """Arrays of episodes of these lengths; those of `terminated` end so, the others by time."""
    rng = np.random.default_rng(seed)
    steps, ends = sum(lengths), np.cumsum(lengths) - 1
    terminals, timeouts = np.zeros(steps, bool), np.zeros(steps, bool)
    terminals[ends[np.array(terminated)]] = True
    timeouts[ends[~np.array(terminated)]] = True
    return {
        "observations": rng.normal(size=(steps, 3)).astype(np.float32),
        "actions": rng.normal(size=(steps, 2)).astype(np.float64),
        "rewards": rng.normal(size=steps).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
        **more,
    }


def write(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file[name] = array
    return str(path)


def expected_of(arrays, lengths):
    """The episodes in plain Python: what lacks after a last step that did not terminate is zero."""
    episodes, start = [], 0
    terminals = arrays["terminals"].astype(bool).reshape(-1)
    lacks = "next_observations" not in arrays
    is_marked = lacks and any(not terminals[end - 1] for end in np.cumsum(lengths))
    for length in lengths:
        part = slice(start, start + length)
        seen, terminated = arrays["observations"][part], terminals[part]
        truncated = arrays["timeouts"][part].copy() if "timeouts" in arrays else ~terminated
        truncated[:-1] &= "timeouts" in arrays
        truncated[-1] |= not terminated[-1]
        valid = np.ones(length, bool)
        valid[-1] = terminated[-1]
        nexts = chained(seen, length) if lacks else arrays["next_observations"][part]
        episode = {
            "observation": seen,
            "action": arrays["actions"][part],
            "next": after(
                arrays["rewards"][part], terminated, truncated, nexts, valid if is_marked else None
            ),
        }
        infos = {n[6:]: a[part] for n, a in arrays.items() if n.startswith("infos/")}
        episodes.append({**episode, "info": infos} if infos else episode)
        start += length
    return episodes


@pytest.mark.parametrize("seed", range(4))
def test_episodes_as_they_are_in_the_file(tmp_path, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 12).tolist()
    arrays = arrays_of(lengths, rng.random(12) < 0.5, seed)
    dataset = jrb.datasets.open(write(tmp_path / "any.name", arrays))
    assert dataset.format.name == "d4rl"
    check_access(dataset, expected_of(arrays, lengths))


def test_next_observations_and_infos_are_read(tmp_path):
    lengths, rng = [3, 1, 4], np.random.default_rng(1)
    more = {
        "next_observations": rng.normal(size=(8, 3)).astype(np.float32),
        "infos/qpos": rng.normal(size=(8, 2)),
        "infos/goal": np.arange(8, dtype=np.int8),
    }
    arrays = arrays_of(lengths, [False, True, False], **more)
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", arrays))
    assert "valid" not in dataset.spec["next"]
    check_access(dataset, expected_of(arrays, lengths))


def test_blocks_do_not_look_across_their_edges(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "_BLOCK", 64)
    lengths = [1, 7, 2, 5, 1, 1]
    arrays = arrays_of(lengths, [False, True, False, True, True, False])
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", arrays))
    assert len(list(dataset.blocks())) > 6
    check_access(dataset, expected_of(arrays, lengths))


def test_both_flags_of_one_step_stay(tmp_path):
    arrays = arrays_of([2, 2], [True, True])
    arrays["timeouts"][1] = True
    episode = jrb.datasets.open(write(tmp_path / "a.h5", arrays))[0]
    assert episode["next"]["terminated"].tolist() == episode["next"]["truncated"].tolist()
    assert episode["next"]["done"].tolist() == [False, True]


def test_dropped_last_steps(tmp_path):
    lengths = [3, 1, 2, 4]
    arrays = arrays_of(lengths, [False, False, True, False])
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", arrays), final="drop")
    expected = expected_of(arrays, lengths)
    for episode in expected:
        keep = episode["next"].pop("valid")
        for part in (episode, episode["next"]):
            part |= {name: leaf[keep] for name, leaf in part.items() if name != "next"}
        if not keep.all() and keep.any():
            episode["next"]["truncated"][-1] = episode["next"]["done"][-1] = True
    assert dataset.lengths.tolist() == [2, 0, 2, 3]
    for episode, wanted in zip(dataset, expected, strict=True):
        assert_same(episode, wanted)
    assert "left out" in dataset.notes[-1] and "3 of 4" in dataset.notes[-1]


@pytest.mark.parametrize(
    ("horizon", "lengths"), [(None, [5, 6]), (3, [3, 2, 3, 3]), (5, [5, 5, 1])]
)
def test_a_horizon_stands_for_time_outs(tmp_path, horizon, lengths):
    arrays = arrays_of([5, 6], [True, False])
    del arrays["timeouts"]
    options = {} if horizon is None else {"horizon": horizon}
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", arrays), **options)
    check_access(dataset, expected_of(arrays, lengths))
    assert "time-outs" in dataset.notes[0]
    assert (str(horizon) in dataset.notes[0]) == (horizon is not None)


def test_flags_of_numbers_and_of_two_axes(tmp_path):
    arrays = arrays_of([2, 3], [True, False])
    arrays["terminals"] = arrays["terminals"].astype(np.float32)[:, None]
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", arrays))
    check_access(dataset, expected_of(arrays, [2, 3]))


def test_rewards_that_are_no_numbers_stay(tmp_path):
    arrays = arrays_of([2, 2], [True, True])
    arrays["rewards"][1] = np.nan
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", arrays))
    assert np.isnan(dataset.returns()).tolist() == [True, False]
    assert np.isnan(dataset[0]["next"]["reward"]).tolist() == [False, True]


def test_metadata_and_what_is_left_out(tmp_path):
    arrays = arrays_of([2, 2], [True, True])
    arrays |= {"metadata/algorithm": "SAC", "infos/text": np.array([b"a"] * 4, "S1")}
    path = write(tmp_path / "a.h5", arrays)
    with h5py.File(path, "r+") as file:
        file["metadata/policy/weight"] = np.zeros((9, 9))
        file.attrs["env"] = "hopper"
    dataset = jrb.datasets.open(path)
    assert dict(dataset.metadata) == {"algorithm": "SAC", "env": "hopper"}
    left_out = "'infos/text', 'metadata/policy/weight'"
    assert dataset.notes == (f"Left out, as no arrays of numbers for each step: {left_out}.",)


def test_nothing_large_is_read_to_open(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", arrays_of([2, 2], [True, False]))
    read, get = [], h5py.Dataset.__getitem__
    spy = lambda self, part, *rest: read.append(self.name) or get(self, part, *rest)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", spy)
    dataset = jrb.datasets.open(path)
    assert set(read) == {"/terminals", "/timeouts"}
    dataset.returns()
    assert set(read) == {"/terminals", "/timeouts", "/rewards"}


def without(name):
    return lambda arrays: {key: leaf for key, leaf in arrays.items() if key != name}


def cut(name):
    return lambda arrays: {**arrays, name: arrays[name][:-1]}


BAD = {
    "missing": (without("actions"), {}, "expected an array 'actions'"),
    "lengths": (cut("rewards"), {}, "arrays of one length.*'rewards': 3"),
    "shape": (lambda a: {**a, "terminals": np.zeros((4, 2))}, {}, r"a flag for each step.*\[2\]"),
    "values": (lambda a: {**a, "timeouts": np.full(4, 7)}, {}, "flags of 0 and 1"),
    "nan": (lambda a: {**a, "terminals": np.full(4, np.nan)}, {}, "flags of 0 and 1"),
    "horizon": (lambda a: a, {"horizon": 3}, "its own 'timeouts'"),
    "scalar": (lambda a: {**a, "rewards": np.float32(1)}, {}, "expected an array 'rewards'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(tmp_path, case):
    change, options, message = BAD[case]
    path = write(tmp_path / "a.h5", change(arrays_of([2, 2], [True, False])))
    with pytest.raises(ValueError, match=message) as error:
        jrb.datasets.open(path, format=D4RL(**options))
    assert path in str(error.value)


def test_a_damaged_file_is_refused(tmp_path):
    path = write(tmp_path / "a.h5", arrays_of([200, 2], [True, False]))
    with open(path, "r+b") as file:
        file.truncate(3000)
    with pytest.raises(ValueError, match="expected a whole HDF5 file"):
        jrb.datasets.open(path, format="d4rl")
    with pytest.raises(ValueError, match="expected a whole HDF5 file"):
        jrb.datasets.open(path)


def virtual(file, name, secret):
    layout = h5py.VirtualLayout((4,), np.float64)
    layout[:] = h5py.VirtualSource(secret, "x", (4,))
    file.create_virtual_dataset(name, layout)


def circle(file, name, secret):
    file[name] = h5py.SoftLink("/other")
    file["other"] = h5py.SoftLink("/" + name)


ELSEWHERE = {
    "external": lambda file, name, secret: file.__setitem__(name, h5py.ExternalLink(secret, "/x")),
    "nowhere": lambda file, name, secret: file.__setitem__(name, h5py.SoftLink("/nothing")),
    "circle": circle,
    "virtual": virtual,
    "raw": lambda file, name, secret: file.create_dataset(
        name, (4,), np.float64, external=[(secret, 0, 32)]
    ),
}


@pytest.mark.parametrize("kind", [None, "d4rl", "arrays"])
@pytest.mark.parametrize("name", ["rewards", "infos/x"])
@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_lies_elsewhere_is_refused(tmp_path, case, name, kind):
    arrays = arrays_of([2, 2], [True, False])
    arrays.pop(name, None)
    secret = write(tmp_path / "secret.h5", {"x": np.arange(4.0)})
    path = write(tmp_path / "a.h5", arrays)
    with h5py.File(path, "r+") as file:
        ELSEWHERE[case](file, name, secret)
    with pytest.raises(ValueError, match="': expected data in the"):
        jrb.datasets.open(path, format=kind)


@pytest.mark.parametrize("target", ["/hidden/r", "hidden/./r", "/again/r"])
def test_soft_links_are_followed_within_the_file(tmp_path, target):
    arrays = arrays_of([2, 2], [True, False])
    path = write(tmp_path / "a.h5", arrays)
    with h5py.File(path, "r+") as file:
        file["hidden/r"] = file["rewards"][()]
        file["again"] = h5py.SoftLink("/hidden")
        del file["rewards"]
        file["rewards"] = h5py.SoftLink(target)
    found = np.concatenate([each["next"]["reward"] for each in jrb.datasets.open(path)])
    assert found.tobytes() == arrays["rewards"].tobytes()


@pytest.mark.parametrize("name", ["..", "a/../b"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    path = write(tmp_path / "a.h5", arrays_of([2, 2], [True, False]))
    with h5py.File(path, "r+") as file:
        group = file.create_group("infos")
        for part in name.split("/")[:-1]:
            group = group.create_group(part)
        group[name.split("/")[-1]] = np.zeros(4)
    with pytest.raises(ValueError, match="expected names of arrays"):
        jrb.datasets.open(path)


def test_a_group_in_itself_is_refused(tmp_path):
    path = write(tmp_path / "a.h5", arrays_of([2, 2], [True, False]))
    with h5py.File(path, "r+") as file:
        group = file.create_group("infos")
        group["again"] = group
    with pytest.raises(ValueError, match="in itself"):
        jrb.datasets.open(path)


@pytest.mark.parametrize("chunks", [None, (1 << 20,)])
def test_a_shape_that_nothing_is_stored_of_is_refused(tmp_path, chunks):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file.create_dataset(name, (1 << 40,), np.uint8, chunks=chunks)
    with pytest.raises(ValueError, match=r"of the files, got 4398046511104 declared bytes"):
        jrb.datasets.open(tmp_path / "a.h5")


@pytest.mark.parametrize("name", ["truncations", "truncated", "timeout", "truncation"])
def test_time_outs_under_other_names(tmp_path, name):
    lengths = [3, 4, 2, 5]
    arrays = arrays_of(lengths, [True, False, False, True])
    path = write(tmp_path / "a.h5", {**arrays, name: arrays["timeouts"]} | {"timeouts": None})
    dataset = jrb.datasets.open(path)
    assert dataset.format.name == "d4rl" and dataset.lengths.tolist() == lengths
    check_access(dataset, expected_of(arrays, lengths))
    assert not any("time-outs" in note for note in dataset.notes)
    with pytest.raises(ValueError, match="its own 'timeouts'"):
        jrb.datasets.open(path, horizon=4)


def test_numbers_of_episodes_and_dones_tell_where_they_end(tmp_path):
    lengths = [3, 4, 2]
    arrays = arrays_of(lengths, [True, False, False])
    ends = arrays["terminals"] | arrays["timeouts"]
    for number, more in enumerate(({"dones": ends}, {"episode_id": np.repeat([4, 1, 7], lengths)})):
        path = write(tmp_path / f"{number}.h5", {**arrays, **more} | {"timeouts": None})
        dataset = jrb.datasets.open(path)
        assert dataset.lengths.tolist() == lengths
        assert not any("time-outs" in note for note in dataset.notes)
        assert [bool(each["next"]["terminated"][-1]) for each in dataset] == [True, False, False]


def test_names_of_its_own_come_before_other_usual_ones(tmp_path):
    arrays = arrays_of([2, 3], [True, False])
    more = {"reward": np.arange(5), "timeout": np.ones(5), "dots.in/it": np.arange(5)}
    dataset = jrb.datasets.open(write(tmp_path / "a.h5", arrays | more))
    assert dataset.lengths.tolist() == [2, 3]
    assert dataset[1]["reward"].tolist() == [2, 3, 4]
    assert dataset[1]["timeout"].tolist() == [1, 1, 1]
    assert dataset[1]["dots.in"]["it"].tolist() == [2, 3, 4]
    assert dataset[0]["next"]["reward"].tobytes() == arrays["rewards"][:2].tobytes()


def test_two_further_names_of_one_role_are_told_apart_by_a_mapping(tmp_path):
    arrays = arrays_of([2, 3], [True, False])
    path = write(tmp_path / "a.h5", arrays | {"obs_2": np.arange(5), "done": np.ones(5)})
    with h5py.File(path, "r+") as file:
        file["dones"] = np.zeros(5)
    with pytest.raises(ValueError, match=r"\['done', 'dones'\] for 'next/done'.*mapping="):
        jrb.datasets.open(path)
    dataset = jrb.datasets.open(path, mapping={"done": "info/done", "dones": "done"})
    assert dataset.lengths.tolist() == [2, 3]
    assert dataset[0]["info"]["done"].tolist() == [1, 1]
