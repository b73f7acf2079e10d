"""Datasets that are preprocessed by a function."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import authoring
from jrb.datasets import preprocess as preprocessing
from tests.datasets.access import assert_same

ROOT = pathlib.Path(jrb.__file__).parents[1]


def make(path, lengths=(5, 1, 12, 3), wide=True, next_=False):
    """A set of D4RL, whose episodes end by turns."""
    rng = np.random.default_rng(len(lengths))
    steps = sum(lengths)
    real = np.float64 if wide else np.float32
    ends = np.cumsum(lengths) - 1
    terminals, timeouts = np.zeros(steps, bool), np.zeros(steps, bool)
    terminals[ends[::2]] = timeouts[ends[1::2]] = True
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(steps, 3)).astype(np.float32)
        file["actions"] = rng.integers(-5, 5, (steps, 2)).astype(np.int32)
        file["rewards"] = rng.normal(size=steps).astype(real)
        file["terminals"], file["timeouts"] = terminals, timeouts
        file["metadata/env"] = "Ant-v0"
        if next_:
            file["next_observations"] = rng.normal(size=(steps, 3)).astype(np.float32)
    return jrb.datasets.open(path)


def assert_same_set(one, other):
    assert one.lengths.tolist() == other.lengths.tolist()
    for a, b in zip(one, other, strict=True):
        assert_same(a, b)


def same(item):
    return item


def changed(step):
    """Other leaves, shapes and dtypes."""
    seen = np.concatenate([step["observation"], step["observation"]]).astype(np.float16)
    after = {**step["next"], "observation": step["next"]["observation"][:1]}
    after["reward"] = step["next"]["reward"] > 0
    return {"observation": {"twice": seen, "half": seen[:2]}, "next": after, "one": 1}


def unlucky(step):
    if step["observation"][0] == np.float32(41):
        raise ZeroDivisionError("no luck")
    return step


class OddError(Exception):
    """An exception that cannot be unpickled in another process."""

    def __init__(self, one, other):
        super().__init__(one)


def odd(step):
    raise OddError("what", "else")


def dies(step):
    if step["observation"][0] == np.float32(41):
        os._exit(3)
    return step


def backwards(episode):
    """Episodes of two steps or more, turned around, the first step left out."""
    if len(episode["action"]) == 1:
        return None
    return jax.tree.map(lambda leaf: leaf[:0:-1], episode)


def doubled(episode):
    return jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), episode)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(preprocessing, "_MOST", 4)


@pytest.mark.parametrize("next_", [False, True])
def test_the_same_comes_back(next_, tmp_path, small_blocks):
    source = make(tmp_path / "a.hdf5", next_=next_)
    found = source.preprocess(same, tmp_path / "new" / "b")
    assert_same_set(found, source)
    assert_same_set(jrb.datasets.open(tmp_path / "new" / "b"), source)
    assert found.format.name == "recorded" and found.metadata == {"env": "Ant-v0"}
    assert names(tmp_path / "new") == ["b"]
    assert_same_set(found[::-1], source[::-1])
    np.testing.assert_array_equal(found.returns(), source.returns())
    again = jrb.datasets.open(tmp_path / "new" / "b", final="drop")
    assert_same_set(again, jrb.datasets.open(tmp_path / "a.hdf5", final="drop"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_other_leaves_shapes_and_dtypes(workers, tmp_path, small_blocks):
    source = make(tmp_path / "a.hdf5")
    found = source.preprocess(changed, tmp_path / "b", workers=workers, num_frames=15)
    wanted = [changed(step) for step in source.steps()][:15]
    assert found.lengths.tolist() == [5, 1, 9]
    flat = [step for episode in found for step in rows(episode)]
    for one, other in zip(flat, wanted, strict=True):
        other = jax.tree.map(np.asarray, other)
        other["next"].update({name: one["next"][name] for name in ("truncated", "done")})
        assert_same(jax.tree.map(np.asarray, one), other)
    ends = [[*[False] * (length - 1), True] for length in (5, 1, 9)]
    assert [each["next"]["done"].tolist() for each in found] == ends
    assert found[2]["next"]["valid"].all()  # it was cut where the file goes on
    assert not found[1]["next"]["valid"].any()


def rows(episode):
    return [
        jax.tree.map(lambda leaf, row=row: leaf[row], episode)
        for row in range(len(episode["next"]["done"]))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_by_episode(workers, tmp_path):
    source = make(tmp_path / "a.hdf5", lengths=(4, 1, 3, 1, 6, 2), next_=True)
    found = source.preprocess(backwards, tmp_path / "b", by="episode", workers=workers)
    wanted = [backwards(episode) for episode in source if len(episode["action"]) > 1]
    assert found.lengths.tolist() == [3, 2, 5, 1]
    for one, other in zip(found, wanted, strict=True):
        assert_same(one["observation"], other["observation"])
        assert one["next"]["done"][-1]
    few = source.preprocess(doubled, tmp_path / "c", by="episode", num_frames=12)
    assert few.lengths.tolist() == [8, 2, 2]
    assert_same(few[0]["action"], np.concatenate([source[0]["action"]] * 2))


def test_what_is_known_of_episodes_goes_along(tmp_path):
    source = make(tmp_path / "a.hdf5", lengths=(4, 1, 3, 1))
    found = source.preprocess(same, tmp_path / "b")[1:]
    found = found.preprocess(backwards, tmp_path / "c", by="episode")
    assert found.complete.tolist() == [True]
    assert any("is in no file for" in note for note in source.notes)
    twice = source.preprocess(same, tmp_path / "d").preprocess(same, tmp_path / "e")
    assert twice.notes == source.notes


def on_device(step):
    seen = jnp.sin(step["observation"]) * 2 + step["action"][0].astype(np.float32)
    after = {**step["next"], "reward": step["next"]["reward"] * np.float32(2)}
    return {**step, "observation": seen, "next": after, "row": jnp.arange(2, dtype=jnp.int8)}


def test_a_function_of_jax(tmp_path, small_blocks):
    source = make(tmp_path / "a.hdf5", wide=False)
    traced = []

    def counted(step):
        traced.append(step)
        return on_device(step)

    one = source.preprocess(counted, tmp_path / "b", jit=True, num_frames=19)
    other = source.preprocess(on_device, tmp_path / "c", num_frames=19)
    assert len(traced) == 1
    assert one.lengths.tolist() == other.lengths.tolist() == [5, 1, 12, 1]
    for a, b in zip(one, other, strict=True):
        seen = a.pop("observation"), b.pop("observation")
        np.testing.assert_allclose(*seen, rtol=1e-6)
        assert_same(a, b)


def test_numbers_of_64_bits(tmp_path):
    source = make(tmp_path / "a.hdf5")
    with pytest.raises(TypeError, match=r"'next/reward': expected a dtype that JAX keeps.*cast="):
        source.preprocess(same, tmp_path / "b", jit=True)
    found = source.preprocess(same, tmp_path / "b", jit=True, cast=True)
    assert found.spec["next"]["reward"].dtype == np.float32
    with authoring.enable_x64():
        wide = source.preprocess(same, tmp_path / "c", jit=True)
    assert_same_set(wide, source)


@pytest.mark.parametrize(("number", "dtype"), [(1e40, np.float64), (2**40, np.int64)])
def test_numbers_that_do_not_fit_are_refused(number, dtype, tmp_path):
    rows = {"observation": np.zeros(4), "terminals": np.array([False, False, False, True])}
    rows |= {"actions": np.zeros(4), "rewards": np.array([0, number, 0, 0], dtype)}
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, leaf in (rows | {"observations": rows.pop("observation")}).items():
            file[name] = leaf
    source = jrb.datasets.open(tmp_path / "a.hdf5")
    with pytest.raises(
        RuntimeError, match=r"next/reward.*expected numbers that (int|float)32 holds"
    ):
        source.preprocess(same, tmp_path / "b", jit=True, cast=True)
    assert not (tmp_path / "b").exists()


def test_facts_and_names_of_columns_stay(tmp_path):
    with jrb.datasets.Recorder(tmp_path / "a", num_envs=2, metadata={"env": "x"}) as recorder:
        for step in range(9):
            after = {"reward": np.ones(2), "done": np.array([step % 3 == 2, step == 4])}
            recorder.add({"episode_index": np.arange(2), "next": after})
    source = jrb.datasets.open(tmp_path / "a")
    found = source[1:].preprocess(same, tmp_path / "b")
    for name in ("env", "writer"):
        assert_same(found.facts[name], source[1:].facts[name])
    assert found.metadata["env"] == "x" and found.metadata["writers"] == [recorder.name]
    assert_same_set(found, source[1:])
    assert jrb.datasets.open(tmp_path / "b", format="recorded").notes == found.notes


@pytest.mark.slow
@pytest.mark.parametrize(("item", "workers"), [(0, 0), (5, 0), (11, 0), (20, 0), (11, 1)])
def test_a_failing_step_is_named(item, workers, tmp_path, small_blocks):
    source = make(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        file["observations"][item, 0] = 41
    episode = int(np.searchsorted(np.cumsum([5, 1, 12, 3]), item, side="right"))
    step = item - int(np.cumsum([0, 5, 1, 12, 3])[episode])
    wanted = f"episode {episode}, step {step}: ZeroDivisionError: no luck"
    with pytest.raises(RuntimeError, match=wanted) as caught:
        source.preprocess(unlucky, tmp_path / "b", workers=workers)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert names(tmp_path) == ["a.hdf5"]
    if workers:
        assert any("in unlucky" in note for note in caught.value.__cause__.__notes__)


@pytest.mark.slow
def test_an_error_that_cannot_travel(tmp_path):
    source = make(tmp_path / "a.hdf5")
    with pytest.raises(RuntimeError, match=r"episode 0, step 0: .*OddError\('what'\)"):
        source.preprocess(odd, tmp_path / "b", workers=1)
    assert names(tmp_path) == ["a.hdf5"]


def test_a_failing_episode_is_named(tmp_path):
    source = make(tmp_path / "a.hdf5")

    def fails(episode):
        return {**episode, "x": np.zeros(0)} if len(episode["action"]) == 12 else episode

    with pytest.raises(RuntimeError, match=r"episode 2: ValueError: expected arrays \[T, \.\.\.\]"):
        source.preprocess(fails, tmp_path / "b", by="episode")
    assert names(tmp_path) == ["a.hdf5"]


@pytest.mark.slow
def test_a_process_that_dies(tmp_path, small_blocks):
    source = make(tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        file["observations"][10, 0] = 41
    with pytest.raises(RuntimeError, match=r"from episode \d, step \d on: a process failed"):
        source.preprocess(dies, tmp_path / "b", workers=1)
    with pytest.raises(TypeError, match="expected one that other processes can import"):
        source.preprocess(lambda step: step, tmp_path / "b", workers=1)
    assert names(tmp_path) == ["a.hdf5"]


def test_an_interrupt_leaves_nothing(tmp_path, small_blocks):
    source = make(tmp_path / "a.hdf5")

    def interrupted(step, count=[0]):  # noqa: B006
        count[0] += 1
        if count[0] == 9:
            raise KeyboardInterrupt
        return step

    with pytest.raises(KeyboardInterrupt):
        source.preprocess(interrupted, tmp_path / "b")
    assert names(tmp_path) == ["a.hdf5"]


@pytest.mark.slow
def test_a_kill_leaves_nothing_at_the_path(tmp_path):
    make(tmp_path / "a.hdf5")
    code = f"""
        import os, signal
        import jrb
        from jrb.datasets import preprocess
        preprocess._MOST = 4
        def kill(step, count=[0]):
            count[0] += 1
            if count[0] == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            return step
        jrb.datasets.open({str(tmp_path / "a.hdf5")!r}).preprocess(kill, {str(tmp_path / "b")!r})
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, cwd=ROOT, check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "b").exists()
    source = jrb.datasets.open(tmp_path / "a.hdf5")
    assert_same_set(source.preprocess(same, tmp_path / "b"), source)


def without(*path):
    def function(step):
        after = {key: leaf for key, leaf in step["next"].items() if key not in path}
        return {**step, "next": after}

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda step: None, "step 0: TypeError: function: expected a dict of arrays"),
        (lambda step: step["action"], "expected a dict of arrays"),
        (without("reward"), "leaf 'next/reward': expected one in what the function returns"),
        (without("terminated"), "'next/terminated': expected one"),
        (
            lambda step: {**step, "x": np.ma.masked_array(np.ones(3), [False, True, False])},
            "leaf 'x': expected values everywhere, got a masked array",
        ),
        (lambda step: {**step, "x": "text"}, "leaf 'x': expected numbers, got dtype <U4"),
        (
            lambda step: {**step, "x": np.zeros(2 + int(step["next"]["terminated"]))},
            r"episode 0, step 4: .*leaf 'x': expected float64\[2\], as before, got float64\[3\]",
        ),
        (
            lambda step: {**step, **({"x": 1} if step["next"]["terminated"] else {})},
            "leaf 'x': expected .*, as before, got",
        ),
        (
            lambda step: {**step, "next": {**step["next"], "truncated": np.zeros(2, bool)}},
            r"'next/truncated': expected shape \(\) for a step, got \(2,\)",
        ),
    ],
)
@pytest.mark.parametrize("rows", [1, 64])
def test_steps_that_are_none(function, message, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocessing, "_MOST", rows)
    source = make(tmp_path / "a.hdf5")
    with pytest.raises(RuntimeError, match=message):
        source.preprocess(function, tmp_path / "b")
    assert names(tmp_path) == ["a.hdf5"]


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "by: expected one of 'step', 'episode', got 'row'", {"by": "row"}),
        (ValueError, "workers: expected a number of at least 0", {"workers": -1}),
        (ValueError, "num_frames: expected at least 1", {"num_frames": 0}),
        (ValueError, "jit: expected workers=0", {"jit": True, "workers": 1}),
        (ValueError, "jit: expected workers=0", {"jit": True, "by": "episode"}),
        (TypeError, "jit: expected True or False", {"jit": 1}),
        (TypeError, "function: expected a function, got 3", {"function": 3}),
        (TypeError, "progress: expected True or False", {"progress": "no"}),
    ],
)
def test_options_that_are_none(error, message, options, tmp_path):
    source = make(tmp_path / "a.hdf5")
    with pytest.raises(error, match=message):
        source.preprocess(**{"function": same, "dest": tmp_path / "b", **options})
    assert names(tmp_path) == ["a.hdf5"]


def test_what_is_there_stays(tmp_path):
    source = make(tmp_path / "a.hdf5")
    with pytest.raises(ValueError, match="expected nothing there, found something"):
        source.preprocess(same, tmp_path / "a.hdf5")
    os.symlink(tmp_path / "nowhere", tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="expected no broken link"):
        source.preprocess(same, tmp_path / "b")
    with pytest.raises(ValueError, match="expected at least one step to be written"):
        source.preprocess(lambda episode: None, tmp_path / "c", by="episode")
    with pytest.raises(ValueError, match="expected at least one step to be written"):
        source[:0].preprocess(same, tmp_path / "c")
    assert names(tmp_path) == ["a.hdf5", "b"]


def test_a_bar(tmp_path, capsys):
    pytest.importorskip("rich")
    source = make(tmp_path / "a.hdf5")
    source.preprocess(same, tmp_path / "b", progress=True)
    assert "21/21" in capsys.readouterr().err
    source.preprocess(same, tmp_path / "c")
    assert capsys.readouterr().err == ""


def test_flags_within_an_episode_end_no_episode(tmp_path):
    source = make(tmp_path / "a.hdf5", lengths=(4, 3))

    def over(step):
        return {**step, "next": {**step["next"], "terminated": True}}

    found = source.preprocess(over, tmp_path / "b")
    assert found.lengths.tolist() == [4, 3]
    assert all(each["next"]["done"].all() for each in found)
