"""Checks that every dataset must pass, in whichever files it is stored."""

import jax
import numpy as np
import pytest


def leaves_of(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in _with_path(tree)}


def _with_path(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def assert_same(found, expected):
    """Two trees of arrays, bit by bit."""
    found, expected = leaves_of(found), leaves_of(expected)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        leaf, got = np.asarray(leaf), np.asarray(found[name])
        assert (got.dtype, got.shape) == (leaf.dtype, leaf.shape), name
        assert got.tobytes() == leaf.tobytes(), name


def joined(parts):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def chained(episode, steps):
    """The next observations of an episode of one array, with zeros after the last."""
    after = np.zeros_like(episode[:steps])
    after[: len(episode[1 : steps + 1])] = episode[1 : steps + 1]
    return after


def after(reward, terminated, truncated, observation, valid=None):
    """The part `next` of an episode in TED."""
    terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
    found = {"observation": observation, "terminated": terminated, "truncated": truncated}
    found["done"] = terminated | truncated
    if reward is not None:
        found["reward"] = reward
    if valid is not None:
        found["valid"] = np.asarray(valid, bool)
    return found


def check_access(dataset, expected):
    """All ways to read a dataset give these episodes.

    Args:
        dataset: the dataset.
        expected: a list of episodes in TED, with `next/done`, and with `next/valid` if any has it.
    """
    count = len(expected)
    assert len(dataset) == dataset.episodes == count
    lengths = [len(episode["next"]["done"]) for episode in expected]
    assert dataset.lengths.tolist() == lengths
    assert dataset.lengths.dtype == np.int64
    assert dataset.transitions == sum(lengths)
    for episode, wanted in zip(dataset, expected, strict=True):
        assert_same(episode, wanted)
    for index in {0, 1 % count, count // 2, count - 1, -1, -count}:
        assert_same(dataset[index], expected[index])
    with pytest.raises(IndexError, match="expected an episode of"):
        dataset[count]
    for part in (slice(1, 4), slice(None, None, -1), slice(None, None, 3), slice(3, 3)):
        assert len(dataset[part]) == len(expected[part])
        for episode, wanted in zip(dataset[part], expected[part], strict=True):
            assert_same(episode, wanted)
    assert_same(joined(list(dataset.blocks())), joined(expected))
    assert_same(joined(list(dataset[::-1].blocks())), joined(expected[::-1]))
    whole = joined(expected)
    for rows in (1, 3, sum(lengths), sum(lengths) + 1):
        blocks = list(dataset.steps(rows))
        assert all(len(block["next"]["done"]) == rows for block in blocks[:-1])
        assert_same(joined(blocks), whole)
    steps = list(dataset.steps())
    assert len(steps) == sum(lengths)
    assert_same(steps[-1], jax.tree.map(lambda leaf: leaf[-1], whole))
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), whole)
    assert leaves_of(dataset.spec) == leaves_of(spec)
    if "reward" in whole["next"]:
        returns = [episode["next"]["reward"].sum(0, np.float64) for episode in expected]
        np.testing.assert_allclose(dataset.returns(), returns)
        assert dataset.returns().dtype == np.float64
    else:
        with pytest.raises(ValueError, match="without rewards"):
            dataset.returns()
