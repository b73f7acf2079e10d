"""Several datasets as one, and as one stream of batches."""

import dataclasses

import h5py
import jax
import numpy as np
import pytest

import jrb
from jrb.datasets import Dataset, concatenate, mix
from tests.datasets.access import assert_same


def make(path, lengths, seed=0, whole=False, real=np.float32):
    """A set of D4RL; with all next observations, if it is whole."""
    rng, steps = np.random.default_rng(seed), sum(lengths)
    ends = np.zeros(steps, bool)
    ends[np.cumsum(lengths) - 1] = True
    terminated = ends & (rng.random(steps) < 0.5)
    with h5py.File(path, "w") as file:
        file["observations"] = rng.normal(size=(steps, 2)).astype(real)
        file["actions"] = np.full(steps, seed, np.int32)
        file["rewards"] = rng.normal(size=steps).astype(np.float32)
        file["terminals"], file["timeouts"] = terminated, ends & ~terminated
        if whole:
            file["next_observations"] = rng.normal(size=(steps, 2)).astype(real)
    return jrb.datasets.open(path)


def marked(episode):
    """An episode with the leaf that says that all of it is there."""
    after = episode["next"]
    return {**episode, "next": {"valid": np.ones(len(after["done"]), bool), **after}}


@pytest.fixture
def sets(tmp_path):
    one = make(tmp_path / "one", (3, 1, 4, 2), seed=1)
    other = make(tmp_path / "other", (2, 5), seed=2, whole=True)
    return one, other


def test_one_after_the_other(sets):
    one, other = sets
    joined = concatenate(one, other[::-1], one[1:3])
    every = [marked(each) for part in (one, other[::-1], one[1:3]) for each in part]
    assert joined.lengths.tolist() == [3, 1, 4, 2, 5, 2, 1, 4]
    assert joined.facts["dataset"].tolist() == [0] * 4 + [1] * 2 + [2] * 2
    for number, episode in enumerate(joined):
        assert_same(episode, every[number])
        assert_same(joined[number - 8], every[number])
    for episode, wanted in zip(joined[::-3], every[::-3], strict=True):
        assert_same(episode, wanted)
    steps = jax.tree.map(lambda *leaves: np.concatenate(leaves), *joined.steps(rows=4))
    assert_same(steps, jax.tree.map(lambda *leaves: np.concatenate(leaves), *every))
    np.testing.assert_array_equal(joined.returns()[4:6], other.returns()[::-1])
    assert joined.spec["next"]["valid"].dtype == bool
    assert "joined" in repr(joined) and joined.transitions == 22


def test_marks_only_where_they_are_needed(sets, tmp_path):
    other = sets[1]
    joined = concatenate(other, make(tmp_path / "more", (2, 2), whole=True))
    assert "valid" not in joined.spec["next"] and "valid" not in joined[0]["next"]
    dropped = concatenate(dataclasses.replace(sets[0], final="drop"), other)
    assert "valid" not in dropped.spec["next"]
    wanted = [*dataclasses.replace(sets[0], final="drop"), *other]
    for episode, one in zip(dropped, wanted, strict=True):
        assert_same(episode, one)
    later = dataclasses.replace(concatenate(*sets), final="drop")
    for episode, one in zip(later, wanted, strict=True):
        assert_same(episode, one)
    assert later.lengths.tolist() == dropped.lengths.tolist()


def test_joined_sets_can_be_joined_and_mapped(sets, tmp_path):
    twice = concatenate(concatenate(*sets), sets[0])
    for episode, one in zip(twice, [*sets[0], *sets[1], *sets[0]], strict=True):
        assert_same(episode["observation"], one["observation"])
        assert_same(episode, marked(one))
    new = twice.preprocess(lambda step: step, tmp_path / "new")
    for episode, one in zip(new, twice, strict=True):
        assert_same(episode, one)
    assert new.facts["dataset"].tolist() == twice.facts["dataset"].tolist()


def test_sets_that_differ(sets, tmp_path):
    wide = make(tmp_path / "wide", (3,), real=np.float64)
    with pytest.raises(ValueError, match=r"dataset 2: leaf 'next/observation': expected float32"):
        concatenate(*sets, wide)
    with h5py.File(tmp_path / "one", "a") as file:
        file["infos/x"] = np.zeros(10)
    with pytest.raises(ValueError, match=r"dataset 1: leaf 'info/x': expected nothing.*float64"):
        concatenate(sets[0], jrb.datasets.open(tmp_path / "one"))
    with pytest.raises(ValueError, match="expected at least one dataset"):
        concatenate()
    with pytest.raises(TypeError, match="expected datasets, got dict"):
        concatenate(sets[0], {})


def buffer_of(dataset, batch_size=None, **parts):
    """Stands for the method, which is there or not."""
    (whole,) = dataset.steps(rows=dataset.transitions)
    return jrb.from_items(whole, batch_size=batch_size, **parts)


@pytest.fixture
def with_buffers(monkeypatch):
    monkeypatch.setattr(Dataset, "buffer", buffer_of, raising=False)


@pytest.mark.parametrize("weights", [(1, 3), [0.25, 0.75], {"a": 1, "b": 3}])
def test_a_mix_draws_by_weight(sets, weights, with_buffers):
    named = {"a": sets[0], "b": sets[1]} if isinstance(weights, dict) else sets
    mixed, states = mix(named, weights, 8)
    sample = mixed.sample(states, jax.random.key(0))
    assert sample.info["source"].tolist() == [0] * 2 + [1] * 6
    assert sample.data["action"].tolist() == [1] * 2 + [2] * 6
    assert sample.data["next"]["valid"].shape == (8,)


def test_a_mix_by_size(sets, with_buffers):
    mixed, states = mix(sets, batch_size=17, sampler=jrb.Prioritized())
    assert mixed.proportions == (10 / 17, 7 / 17)
    assert isinstance(mixed.buffers[1].sampler, jrb.Prioritized)
    assert mixed.sample(states, jax.random.key(0)).info["source"].tolist() == [0] * 10 + [1] * 7


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, 2, 3), "weights: expected one for each of"),
        ({"a": 1, "b": 2}, "weights: expected one for each of"),
        ((-1, 2), "expected finite numbers of at least 0"),
        ((0, 0), "not all 0"),
        ((np.nan, 1), "expected finite numbers"),
    ],
)
def test_weights_that_are_none(sets, weights, message, with_buffers):
    with pytest.raises(ValueError, match=message):
        mix(sets, weights, 4)


def test_a_mix_names_the_set_that_differs(sets, tmp_path, with_buffers):
    wide = make(tmp_path / "wide", (3,), real=np.float64)
    with pytest.raises(ValueError, match="dataset wide: leaf 'next/observation'"):
        mix({"demos": sets[0], "wide": wide})
