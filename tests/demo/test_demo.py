"""The demo trains one or several agents, and reports the results."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gymnax")

from jrb import cli
from jrb.demo import report, training

pytestmark = pytest.mark.slow

SMALL = training.Config(
    env="CartPole-v1",
    steps=4000,
    num_envs=16,
    updates=2,
    batch_size=16,
    capacity=1000,
    hidden=(16,),
    chunks=8,
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """gymnax and optax rely on JAX's ordinary dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("seeds", [1, 3])
def test_training_reports_every_chunk(seeds):
    reported = []
    config = training.dataclasses.replace(SMALL, seeds=seeds)
    result = training.train(config, lambda chunk, mean: reported.append((chunk, mean)))
    assert [chunk for chunk, _ in reported] == list(range(1, 9))
    assert result.returns.shape == result.episodes.shape == (8, seeds)
    assert result.episodes.sum() > 50
    assert result.mean_return(2).shape == (2, seeds)
    assert len(result.priorities) == 992
    assert (result.priorities >= 0).all()


def test_the_same_seed_gives_the_same_training():
    one, other = training.train(SMALL), training.train(SMALL)
    np.testing.assert_array_equal(one.returns, other.returns)
    np.testing.assert_array_equal(one.priorities, other.priorities)


@pytest.mark.devices
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map")
def test_cut_over_devices_it_learns_too():
    """docs/scale.md compares longer trainings on one device and on several."""
    parts = {"updates": 4, "batch_size": 32, "hidden": (32,), "chunks": 4, "devices": 2}
    rates = {"learning_rate": 4e-3, "target_rate": 0.05}
    config = training.dataclasses.replace(SMALL, steps=8000, seeds=4, **parts, **rates)
    result = training.train(config)
    before, after = result.mean_return(4)[[0, -1]].mean(axis=1)
    assert after > 2 * before
    assert len(result.priorities) == 992


@pytest.mark.devices
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map")
def test_environments_and_shards_are_cut_over_devices_and_the_network_is_not():
    agent = training.Agent(training.dataclasses.replace(SMALL, devices=8, steps=1))
    carry, _ = jax.jit(agent.chunk)(jax.jit(agent.init)(jax.random.key(0)))
    for leaf in jax.tree.leaves((carry.replay, carry.env_state, carry.observation)):
        assert leaf.sharding.shard_shape(leaf.shape)[0] * 8 == leaf.shape[0]
    whole = jax.tree.leaves((carry.network, carry.target, carry.optimizer))
    assert all(leaf.is_fully_replicated for leaf in whole)


def test_more_devices_than_there_are_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"expected at most \d+, as many as there are, got 99"):
        training.Agent(training.dataclasses.replace(SMALL, devices=99))


def test_the_last_observation_is_stored_and_a_time_limit_is_no_termination():
    agent = training.Agent(SMALL)
    agent.env.params = agent.env.params.replace(max_steps_in_episode=3)
    carry, _ = jax.jit(agent.chunk)(agent.init(jax.random.key(0)))
    items = agent.buffer.take(carry.replay, jnp.arange(int(agent.buffer.size(carry.replay))))
    after = items["next"]
    assert after["truncated"].any()
    assert not after["terminated"].any()
    np.testing.assert_array_equal(after["done"], after["truncated"])
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, 16, *leaf.shape[1:]), items)
    first, then = rows["next"]["observation"][:-1], rows["observation"][1:]
    ended = np.asarray(rows["next"]["done"][:-1])
    np.testing.assert_array_equal(first[~ended], then[~ended])
    assert (np.abs(first[ended] - then[ended]).max(axis=1) > 1e-4).all()


def test_only_termination_ends_the_sum_of_rewards():
    network = [(jnp.zeros((2, 3)), jnp.array([1.0, 2.0, 3.0]))]
    flags = jnp.array([False, True])
    after = {"observation": jnp.zeros((2, 2)), "reward": jnp.array([0.5, 0.5])}
    after |= {"terminated": flags, "truncated": ~flags}
    batch = {"observation": jnp.zeros((2, 2)), "action": jnp.array([0, 0]), "next": after}
    _, errors = training.loss(network, network, 0.9, batch, jnp.ones(2))
    np.testing.assert_allclose(errors, [0.5 + 0.9 * 3 - 1, 0.5], rtol=1e-6)


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path, monkeypatch, capsys):
    out = tmp_path / "curve.png"
    command = ["jrb", "demo", "--env", "CartPole-v1", "--steps", "2560", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "CartPole-v1: 2,560 steps" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_many_seeds_shows_their_mean():
    result = training.Result(np.ones((8, 3)), np.ones((8, 3)), np.ones(5), 1.0)
    sheet = report.plot_training(SMALL, result)
    assert len(sheet.axes[0].lines) == 4
    assert report.make_table(SMALL, result).row_count == 3
