"""Rewards that are NaN or infinite: kept bit for bit, counted, and reported once."""

import logging

import jax
import numpy as np
import pytest

import jrb
from jrb.datasets import copies


def made(path, lengths, odd, reward=np.float32):
    """Plain arrays of episodes whose rewards at some rows are not finite."""
    steps = sum(lengths)
    rewards = np.arange(steps).astype(reward)
    for number, row in enumerate(odd):
        rewards[row] = (np.nan, np.inf, -np.inf)[number % 3]
    terminals = np.zeros(steps, bool)
    terminals[np.cumsum(lengths) - 1] = True
    arrays = {"observations": np.zeros((steps, 2), np.float32), "actions": np.arange(steps)}
    np.savez(path, **arrays, rewards=rewards, terminals=terminals)
    return jrb.datasets.open(path)


def told(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_how_many_and_where_the_first_is(tmp_path, num_envs, piece, seed, caplog, monkeypatch):
    monkeypatch.setattr(copies, "_PIECE", piece)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, 6)
    odd = np.sort(rng.choice(lengths.sum(), 3, replace=False))
    dataset = made(tmp_path / "set.npz", lengths, odd)[::-1]
    state = jax.tree.map(np.asarray, jrb.items(*dataset.buffer(num_envs=num_envs)))
    stored = state["next"]["reward"]
    assert (~np.isfinite(stored)).sum() == 3
    (message,) = told(caplog)
    first = int(np.searchsorted(np.cumsum(lengths), odd[0], side="right"))
    assert f"3 rewards are NaN or infinite, the first in episode {first}:" in message


def test_a_copy_tells_it_once(tmp_path, caplog):
    dataset = made(tmp_path / "set.npz", [2, 3], [4])
    for _ in range(2):
        dataset.buffer(cache=True, root=tmp_path / "root")
        assert len(told(caplog)) == 1


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_nothing_is_told_of_finite_ones(tmp_path, dtype, caplog):
    made(tmp_path / "set.npz", [2, 3], [], dtype).buffer()
    assert not told(caplog)
