"""Layouts: conversion there and back is the identity, and each layout has its stated form."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import jrb
from jrb import layouts

FLAT_KEYS = jrb.Keys(
    observation="obs",
    action="act",
    reward="rew",
    done="done",
    terminated="term",
    truncated="trunc",
    next_observation="obs2",
)


def walk(length, ends=(), width=3, dtype=np.float32):
    """Transitions of one environment: observations count on, and jump after an end."""
    ends = np.isin(np.arange(length), ends)
    first = np.arange(length) + 10 * (np.cumsum(ends) - ends)
    column = lambda values: np.repeat(values[:, None], width, axis=1).astype(dtype)
    return {
        "observation": column(first),
        "action": np.arange(length, dtype=np.int32),
        "next": {
            "observation": column(first + 1),
            "reward": np.ones(length, np.float32),
            "done": ends,
        },
    }


def stacked(*streams):
    """Streams of one environment each, as `[T, E, ...]`."""
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *streams)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert type(a) is type(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def there_and_back(items, keys=jrb.TED, num_envs=None, cuts=()):
    flat = layouts.ted_to_flat(items, keys, num_envs, cuts)
    assert_same(layouts.flat_to_ted(flat, keys), items)
    nested = layouts.ted_to_nested(items, keys, num_envs, cuts)
    assert_same(layouts.nested_to_ted(nested, keys), items)
    parts = layouts.split(items, keys, num_envs, cuts)
    assert_same(layouts.combine(parts, keys), items)
    return flat, nested, parts


def test_an_observation_stands_once_and_the_last_one_behind_its_trajectory():
    flat, nested, parts = there_and_back(walk(5, ends=[2]))
    assert flat["observation"][:, 0].tolist() == [0, 1, 2, 3, 13, 14, 15]
    assert flat["ends"].tolist() == [False, False, True, False, True]
    assert "observation" not in flat["next"]
    assert nested["lengths"].tolist() == [3, 2]
    assert [part["observation"][:, 0].tolist() for part in parts] == [[0, 1, 2, 3], [13, 14, 15]]
    assert [part["action"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]


def test_environments_come_one_after_the_other():
    items = stacked(walk(3, ends=[0]), walk(3))
    flat, nested, parts = there_and_back(items, num_envs=2)
    assert flat["action"].tolist() == [0, 1, 2, 0, 1, 2]
    assert flat["ends"].tolist() == [[True, False, True], [False, False, True]]
    assert nested["lengths"].tolist() == [1, 2, 3]
    assert nested["environments"].tolist() == [0, 0, 1]
    assert [int(part["environment"]) for part in parts] == [0, 0, 1]


def test_steps_of_several_rows_keep_their_next_observations():
    items = walk(20, ends=[9])
    items["next"]["observation"] = items["observation"] + 3
    flat, _, parts = there_and_back(items)
    assert flat["next"]["observation"].shape == (20, 3)
    assert flat["observation"].shape == (20, 3)
    assert [int(part["length"]) for part in parts] == [10, 10]


def test_a_break_that_no_flag_tells_is_a_seam():
    items = walk(10)
    items["observation"][4:] += 7
    items["next"]["observation"][4:] += 7
    _, nested, _ = there_and_back(items)
    assert nested["lengths"].tolist() == [4, 6]


def test_a_cut_ends_trajectories_that_look_whole():
    _, nested, _ = there_and_back(walk(6), cuts=[2])
    assert nested["lengths"].tolist() == [3, 3]


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_an_end_may_be_marked_by_one_flag_alone(flag):
    items = walk(6)
    done = items["next"].pop("done")
    items["next"][flag] = done.copy()
    items["next"][flag][2] = True
    _, nested, _ = there_and_back(items)
    assert nested["lengths"].tolist() == [3, 3]


def test_flags_of_the_root_and_leaves_that_only_next_has_stay():
    items = walk(6, ends=[3])
    items["done"] = np.array([True, False, False, False, False, True])
    items["terminated"] = np.zeros((6, 1), bool)
    items["next"]["value"] = np.arange(6.0)
    items["collector"] = {"traj_ids": np.arange(6)}
    there_and_back(items)


def test_flags_with_a_trailing_axis():
    items = walk(6, ends=[3])
    items["next"]["done"] = items["next"]["done"][:, None]
    _, nested, _ = there_and_back(items)
    assert nested["lengths"].tolist() == [4, 2]


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.bool_, np.int64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16]
)
def test_every_dtype(dtype):
    there_and_back(walk(7, ends=[3], dtype=dtype))
    there_and_back(stacked(walk(4, dtype=dtype), walk(4, [1], dtype=dtype)), num_envs=2)


def test_nan_is_equal_to_itself():
    items = walk(4)
    items["observation"][1] = items["next"]["observation"][0] = np.nan
    _, nested, _ = there_and_back(items)
    assert nested["lengths"].tolist() == [4]


def test_minus_zero_is_not_zero():
    items = walk(4)
    items["observation"][1], items["next"]["observation"][0] = 0.0, -0.0
    _, nested, _ = there_and_back(items)
    assert nested["lengths"].tolist() == [1, 3]


def test_leaves_of_no_size():
    items = walk(5, ends=[1], width=0)
    there_and_back(items)


def test_jax_arrays_and_keys_stay_on_the_device():
    items = jax.tree.map(jnp.asarray, walk(5, ends=[2]))
    items["key"] = jax.random.split(jax.random.key(0), 5)
    flat = layouts.ted_to_flat(items)
    assert isinstance(flat["observation"], jax.Array)
    back = layouts.flat_to_ted(flat)
    items["key"], back["key"] = map(jax.random.key_data, (items["key"], back["key"]))
    assert_same(back, items)


def test_keys_of_ones_own():
    ted = walk(6, ends=[2])
    items = {
        "obs": ted["observation"],
        "act": ted["action"],
        "rew": ted["next"]["reward"],
        "done": ted["next"]["done"],
        "obs2": ted["next"]["observation"],
    }
    flat, _, _ = there_and_back(items, FLAT_KEYS)
    assert "obs2" not in flat


def test_nested_observations_are_shared_leaf_by_leaf():
    items = walk(6, ends=[2])
    for part in (items, items["next"]):
        part["observation"] = {"eye": part["observation"], "ear": part["observation"][:, 0]}
    items["next"]["observation"]["new"] = np.arange(6)
    flat, _, _ = there_and_back(items)
    assert flat["next"]["observation"].keys() == {"new"}
    assert flat["observation"]["ear"].shape == (8,)


def test_observations_alone():
    items = {"observation": np.arange(4), "next": {"observation": np.arange(1, 5)}}
    there_and_back(items)


def test_flat_saves_nearly_half():
    items = walk(1000, ends=range(49, 1000, 50), width=1000)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert size(items) / size(layouts.ted_to_flat(items)) > 1.9


@st.composite
def random_items(draw):
    """Transitions with few different values, so that rows chain, break and end in all ways."""
    length, envs = draw(st.integers(1, 12)), draw(st.sampled_from([None, 1, 3]))
    lead = (length,) if envs is None else (length, envs)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    items = {
        "observation": rng.integers(0, 2, (*lead, draw(st.integers(0, 2)))).astype(np.uint8),
        "action": rng.normal(size=lead),
        "next": {"reward": rng.normal(size=lead).astype(np.float32)},
    }
    after = np.roll(items["observation"], -1, axis=0)
    noise = rng.random(after.shape) < draw(st.sampled_from([0.0, 0.1, 0.9]))
    items["next"]["observation"] = np.where(noise, 1 - after, after)
    for flag in draw(st.sets(st.sampled_from(["done", "terminated", "truncated"]))):
        items["next"][flag] = rng.random(lead) < 0.2
    for flag in draw(st.sets(st.sampled_from(["done", "terminated"]))):
        items[flag] = rng.random(lead) < 0.5
    cuts = draw(st.sets(st.integers(0, length - 1), max_size=2))
    return items, envs, sorted(cuts)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(random_items())
def test_there_and_back_is_the_identity(drawn):
    items, envs, cuts = drawn
    flat, nested, parts = there_and_back(items, num_envs=envs, cuts=cuts)
    ends = flat["ends"].reshape(-1)
    assert nested["lengths"].sum() == ends.size
    assert len(parts) == ends.sum()
    for part in parts:
        inner = {k: v for k, v in part.get("next", {}).items() if k in ("done", "terminated")}
        for flag in inner.values():
            assert not flag[:-1].any()


def test_what_is_wrong_is_said():
    items = walk(4)
    with pytest.raises(TypeError, match="expected a dict"):
        layouts.ted_to_flat([np.zeros(3)])
    with pytest.raises(TypeError, match="leaf 'action'"):
        layouts.ted_to_flat({**items, "action": [1, 2, 3, 4]})
    with pytest.raises(ValueError, match="leaf 'action': expected 4 rows"):
        layouts.ted_to_flat({**items, "action": np.zeros(3)})
    with pytest.raises(ValueError, match=r"expected shape \[T, 2, ...\]"):
        layouts.ted_to_flat(items, num_envs=2)
    with pytest.raises(ValueError, match="leaf 'ends'"):
        layouts.ted_to_flat({**items, "ends": np.zeros(4)})
    with pytest.raises(ValueError, match="without a slash"):
        layouts.ted_to_flat({**items, "a/b": np.zeros(4)})
    with pytest.raises(ValueError, match="cuts: expected rows"):
        layouts.ted_to_flat(items, cuts=[4])
    with pytest.raises(ValueError, match="expected a leaf 'ends'"):
        layouts.flat_to_ted(items)
    with pytest.raises(ValueError, match="at least one leaf"):
        layouts.ted_to_flat({})
    with pytest.raises(ValueError, match="trajectory 1"):
        layouts.combine([layouts.split(items)[0], {"length": np.int64(1)}])
    with pytest.raises(ValueError, match="at least one trajectory"):
        layouts.combine([])
    flat = layouts.ted_to_flat(items)
    with pytest.raises(ValueError, match="leaf 'action'"):
        layouts.flat_to_ted({**flat, "action": np.zeros(2)})
