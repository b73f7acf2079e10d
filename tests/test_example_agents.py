"""Every agent of examples/agents learns in a small form, with its buffer in place."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.slow
NEXT = {"reward": jnp.float32(0), "terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}


def trained(name, example, seeds=2, **changes):
    """Returns the curves of an agent, of which the buffers are the only large arrays."""
    agent = importlib.import_module(f"examples.agents.{name}")
    config = dataclasses.replace(agent.Config(), **changes)
    keys = jax.random.split(jax.random.key(0), seeds)
    program = agent.common.compiled(agent.train, config, keys)
    buffers = seeds * agent.make_buffer(config).nbytes(example)
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * buffers
    return np.asarray(program(keys))


def test_r2d2_remembers_the_light_that_it_saw_once():
    pytest.importorskip("flax")
    zeros = jnp.zeros(32)
    example = {"observation": jnp.zeros(2), "hidden": (zeros, zeros), "action": jnp.int32(0)}
    example["next"] = NEXT | {"observation": jnp.zeros(2)}
    small = {"steps": 64_000, "evaluations": 4, "corridor": 5, "capacity": 160_000}
    assert trained("r2d2", example, **small)[:, -1].mean() > 0.7  # without memory it is 0


def test_muzero_catches_after_search_in_its_model():
    for module in ("flax", "gymnax", "mctx"):
        pytest.importorskip(module)
    example = {"observation": jnp.zeros((10, 5)), "action": jnp.int32(0), "policy": jnp.zeros(3)}
    example |= {"value": jnp.float32(0), "next": NEXT}
    curves = trained("muzero", example, steps=20_000, points=10, capacity=262_144)
    assert curves[:, -2:].mean() > 0  # random actions come to -0.6


def test_dreamer_catches_after_imagining():
    for module in ("flax", "gymnax"):
        pytest.importorskip(module)
    example = {"observation": jnp.zeros(50), "h": jnp.zeros(64), "action": jnp.int32(0)}
    curves = trained("dreamer", example | {"next": NEXT}, steps=12_000, points=10, capacity=262_144)
    assert curves[:, -2:].mean() > -0.3  # random actions come to -0.6
