"""Items as padded trajectories, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.datasets import join_trajectories, split_trajectories, trajectories


def steps(rng, count, chance):
    done = rng.random(count) < chance
    return {
        "observation": {"x": rng.normal(size=(count, 2, 3)).astype(np.float32)},
        "action": rng.integers(-9, 9, count),
        "next": {
            "reward": np.where(rng.random(count) < 0.1, np.nan, rng.normal(size=count)),
            "terminated": done & (rng.random(count) < 0.5),
            "done": done,
        },
        "half": np.asarray(jnp.asarray(rng.normal(size=count), jnp.bfloat16)),
    }


def plain(done):
    """Lists of rows, in plain Python."""
    found, row = [[]], 0
    for row, over in enumerate(done):
        found[-1].append(row)
        if over:
            found.append([])
    return [each for each in found if each]


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("seed", range(15))
def test_split_and_join(seed):
    rng = np.random.default_rng(seed)
    items = steps(rng, int(rng.integers(0 if seed else 1, 40)), rng.choice([0.0, 0.2, 1.0]))
    padded, mask, running = split_trajectories(items)
    wanted = plain(items["next"]["done"])
    longest = max(map(len, wanted), default=0)
    assert mask.shape == (len(wanted), longest) and mask.dtype == bool
    for number, rows in enumerate(wanted):
        assert mask[number].tolist() == [place < len(rows) for place in range(longest)]
        one = jax.tree.map(lambda leaf, number=number: leaf[number], padded)
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], items)
        assert_equal(jax.tree.map(lambda leaf, rows=rows: leaf[: len(rows)], one), part)
        for leaf in jax.tree.leaves(one):
            assert not leaf[len(rows) :].tobytes().strip(b"\0")
    goes_on = len(items["next"]["done"]) > 0 and not items["next"]["done"][-1]
    assert running.tolist() == [
        goes_on and number == len(wanted) - 1 for number in range(len(wanted))
    ]
    assert_equal(join_trajectories(padded, mask), items)
    assert trajectories.lengths(items).tolist() == list(map(len, wanted))
    sums = [items["next"]["reward"][rows].sum() for rows in wanted]
    np.testing.assert_allclose(trajectories.returns(items), sums)


def test_arrays_of_jax_stay_there():
    items = steps(np.random.default_rng(0), 20, 0.2)
    items["next"]["reward"] = items["next"]["reward"].astype(np.float32)
    items["action"] = items["action"].astype(np.int32)
    device = {**jax.tree.map(jnp.asarray, items), "key": jax.random.split(jax.random.key(1), 20)}
    padded, mask, running = split_trajectories(device, length=25)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((padded, mask, running)))
    assert mask.shape[1] == 25
    joined = join_trajectories(padded, mask)
    assert (jax.random.key_data(joined.pop("key")) == jax.random.key_data(device["key"])).all()
    assert_equal(jax.tree.map(np.asarray, joined), items)


def test_numbers_of_episodes_end_them():
    items = {"n": np.array([4, 4, 5, 5, 4]), "next": {"done": np.zeros((5, 1), bool)}}
    _, mask, running = split_trajectories(items, keys=jrb.Keys(episode="n"))
    assert mask.sum(1).tolist() == [2, 2, 1] and running.tolist() == [False, False, True]
    assert trajectories.lengths({"n": items["n"]}, keys=jrb.Keys(episode="n")).tolist() == [2, 2, 1]


def test_of_a_buffer():
    items = {"x": jnp.arange(9), "next": {"done": jnp.arange(9) % 4 == 3, "reward": jnp.ones(9)}}
    buffer, state = jrb.from_items(items, capacity=7)
    held = jrb.items(buffer, state)
    assert split_trajectories(held)[0]["x"].tolist() == [[2, 3, 0, 0], [4, 5, 6, 7], [8, 0, 0, 0]]
    assert trajectories.returns(held).tolist() == [2, 4, 1]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"x": np.zeros(3)}, "expected a leaf such as 'next/done', got items with the leaves"),
        ({"x": np.zeros(3), "next": {"done": np.zeros(4)}}, "leaves .* of one length"),
        ({"next": {"done": np.zeros((4, 2))}}, r"'next/done': expected shape \(4,\) or \(4, 1\)"),
        ({"next": {"done": np.False_}}, "of one length"),
        ({}, "of one length"),
    ],
)
def test_items_that_are_none(items, message):
    with pytest.raises(ValueError, match=message):
        split_trajectories(items)


def test_other_refusals():
    items = {"next": {"done": np.arange(6) % 3 == 2}}
    with pytest.raises(ValueError, match="length: expected at least 3, the longest one, got 2"):
        split_trajectories(items, length=2)
    padded, mask, _ = split_trajectories(items)
    with pytest.raises(TypeError, match="mask: expected dtype bool"):
        join_trajectories(padded, mask * 1)
    with pytest.raises(ValueError, match=r"leaf 'next/done': expected a shape from \(2, 2\)"):
        join_trajectories(padded, mask[:, :2])
    with pytest.raises(ValueError, match="reward: expected a leaf at 'next/reward'"):
        trajectories.returns(items)
