"""Every agent of examples/agents learns in a small configuration, its buffer written in place.

To learn takes a minute each. Except for two agents, it is left out unless asked for; all agents are
traced with their own configurations.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytestmark = pytest.mark.slow
NEXT = {"reward": jnp.float32(0), "terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}


def trained(name, example, seeds=2, **changes):
    """Returns an agent's learning curves; asserts that only its buffers need much memory."""
    agent = importlib.import_module(f"examples.agents.{name}")
    config = dataclasses.replace(agent.Config(), **changes)
    keys = jax.random.split(jax.random.key(0), seeds)
    program = agent.common.compiled(agent.train, config, keys)
    buffers = seeds * agent.make_buffer(config).nbytes(example)
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * buffers
    return np.asarray(program(keys))


@pytest.mark.long
def test_r2d2_remembers_the_light_that_it_saw_once():
    pytest.importorskip("flax")
    zeros = jnp.zeros(32)
    example = {"observation": jnp.zeros(2), "hidden": (zeros, zeros), "action": jnp.int32(0)}
    example["next"] = NEXT | {"observation": jnp.zeros(2)}
    small = {"steps": 64_000, "evaluations": 4, "corridor": 5, "capacity": 160_000}
    assert trained("r2d2", example, **small)[:, -1].mean() > 0.7  # an agent without memory scores 0


@pytest.mark.long
def test_muzero_catches_after_search_in_its_model():
    for module in ("flax", "gymnax", "mctx"):
        pytest.importorskip(module)
    example = {"observation": jnp.zeros((10, 5)), "action": jnp.int32(0), "policy": jnp.zeros(3)}
    example |= {"value": jnp.float32(0), "next": NEXT}
    curves = trained("muzero", example, steps=20_000, points=10, capacity=262_144)
    assert curves[:, -2:].mean() > 0  # random actions score -0.6


def test_grpo_learns_to_count_down():
    pytest.importorskip("flax")
    agent = importlib.import_module("examples.agents.grpo")
    config = dataclasses.replace(agent.Config(), steps=40, points=4)
    keys = jax.random.split(jax.random.key(0), 1)
    curves = np.asarray(agent.common.compiled(agent.train, config, keys)(keys))
    assert curves[:, -1].mean() > 0.3  # random tokens score 0.03


@pytest.mark.long
def test_dreamer_catches_after_imagining():
    for module in ("flax", "gymnax"):
        pytest.importorskip(module)
    example = {"observation": jnp.zeros(50), "h": jnp.zeros(64), "action": jnp.int32(0)}
    small = {"steps": 12_000, "points": 10, "capacity": 262_144}
    curves = trained("dreamer", example | {"next": NEXT}, seeds=1, **small)
    assert curves[:, -2:].mean() > -0.4  # random actions score -0.6


@pytest.mark.long
def test_rainbow_returns_more_than_random_play():
    for module in ("flax", "gymnax"):
        pytest.importorskip(module)
    planes = jnp.zeros((10, 10, 4), bool)
    example = {
        "observation": planes,
        "action": jnp.int32(0),
        "next": NEXT | {"observation": planes},
    }
    small = {"steps": 16_000, "points": 4, "min_size": 1000, "batch_size": 64, "hidden": 64}
    curves = trained("rainbow", example, seeds=1, learning_rate=2e-3, **small)
    assert curves[:, -1].mean() > 1.0  # random actions score 0.4


@pytest.mark.long
def test_sac_swings_the_pendulum_up():
    for module in ("flax", "gymnax"):
        pytest.importorskip(module)
    example = {"observation": jnp.zeros(3), "action": jnp.zeros(1)}
    example["next"] = NEXT | {"observation": jnp.zeros(3)}
    curves = trained("sac", example, steps=8_000, points=10, capacity=262_144, batch_size=64)
    assert curves[:, -2:].mean() > -600  # random actions score -1214


@pytest.mark.long
def test_qmix_finds_the_best_payoff_and_sums_of_values_do_not():
    pytest.importorskip("flax")
    each = {"observation": jnp.zeros((2, 7)), "state": jnp.zeros(6)}
    example = each | {"action": jnp.zeros(2, jnp.int32)}
    example["next"] = each | {"reward": jnp.float32(0), "terminated": jnp.bool_(False)}
    small = {"steps": 20_000, "points": 5, "capacity": 262_144}
    assert trained("qmix", example, **small)[:, -1].mean() == 8
    assert trained("qmix", example, mixer="vdn", **small)[:, -1].mean() == 7


def test_iql_plays_better_than_the_set_that_it_learns_from(tmp_path):
    for module in ("flax", "gymnax", "minari"):
        pytest.importorskip(module)
    from examples.agents import iql

    config = iql.Config(steps=3_000, points=3, batch_size=128)
    with jax.numpy_dtype_promotion("standard"):
        iql.record(tmp_path / "mixed-v0", episodes=50)
    buffer, replay = iql.load(tmp_path / "mixed-v0", config)
    assert buffer.size(replay) == 50 * iql.LENGTH
    learner = functools.partial(iql.train, buffer)
    curves, _ = iql.common.run(learner, config, range(2), replay)
    recorded = jrb.stats(buffer, replay)["return"]["mean"]
    assert -750 < recorded < -500
    assert curves[:, -1].mean() > recorded + 150


@pytest.mark.parametrize("name", ["dreamer", "muzero", "qmix", "r2d2", "rainbow", "sac"])
@pytest.mark.whole
def test_agents_are_traced(name):
    for module in ("flax", "gymnax", "mctx"):
        pytest.importorskip(module)
    agent = importlib.import_module(f"examples.agents.{name}")
    config = agent.Config()
    with jax.numpy_dtype_promotion("standard"):
        curve = jax.eval_shape(lambda key: agent.train(key, config), jax.random.key(0))
    assert curve.dtype == jnp.float32 and curve.ndim == 1


def test_returns_of_episodes_are_tracked_and_averaged_by_parts():
    pytest.importorskip("flax")
    from examples.agents import common

    reward = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0], [9.0, 9.0]])
    ended = jnp.array([[False, True], [True, False], [False, False], [False, False], [False] * 2])
    step = lambda returns, row: common.track(returns, *row)
    returns, ends = jax.lax.scan(step, jnp.zeros(2), (reward, ended))
    np.testing.assert_array_equal(returns, [21.0, 27.0])
    with jax.numpy_dtype_promotion("standard"):  # the setting in which agents run
        np.testing.assert_array_equal(common.curve(ends, 2), [3.0, np.nan])
