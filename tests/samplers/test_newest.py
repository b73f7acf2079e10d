"""The newest anchors are drawn with equal probability, and no others."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.samplers.test_samplers import filled, fits

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("given", "share"),
    [
        (0.1, (1, 10)),
        (1 / 3, (1, 3)),
        (5 / 7, (5, 7)),
        (1.0, (1, 1)),
        (1, (1, 1)),
        (0.001, (1, 1000)),
    ],
)
def test_a_share_is_rounded_up_exactly(given, share):
    rng = np.random.default_rng(0)
    totals = [*range(30), 2**24 + 1, 2**31 - 1, *rng.integers(0, 2**31, 300).tolist()]
    ring = jrb.ReplayBuffer(1).ring

    @jax.vmap
    def count(total):
        anchors = jrb.types.Anchors(total, lambda ranks, key: (ranks, 1.0))
        return jrb.Newest(given).stats(ring, {}, anchors).num_anchors

    found = jax.jit(count)(jnp.array(totals, jnp.int32))
    assert found.tolist() == [math.ceil(Fraction(*share) * total) for total in totals]


@pytest.mark.parametrize("sampler", [jrb.Newest(0.3), jrb.Newest(count=4), jrb.Newest(count=99)])
@pytest.mark.parametrize("count", [1, 3, 11, 40])
def test_the_newest_are_drawn_alike(sampler, count):
    capacity = 11
    buffer, state = filled(sampler, count, capacity)
    held = min(count, capacity)
    some = math.ceil(Fraction(3, 10) * held) if sampler.count is None else min(sampler.count, held)
    sample = buffer.sample(state, KEY, 3000)
    drawn = np.bincount(np.asarray(sample.data), minlength=count)
    assert fits(drawn, np.arange(count) >= count - some)
    np.testing.assert_allclose(sample.probabilities, 1 / some)
    assert sample.weights.tolist() == [1.0] * 3000


def test_the_newest_windows_are_drawn():
    unit = jrb.Sequence(3)
    buffer = jrb.ReplayBuffer(20, num_envs=2, batch_size=64, unit=unit, sampler=jrb.Newest(count=2))
    items = {"x": jnp.arange(26).reshape(13, 2), "next": {"done": jnp.zeros((13, 2), bool)}}
    state = buffer.extend(buffer.init({"x": 0, "next": {"done": False}}), items)
    drawn = buffer.sample(state, KEY).data["x"].tolist()
    assert sorted(map(tuple, {tuple(row) for row in drawn})) == [(20, 22, 24), (21, 23, 25)]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "expected a fraction or a count"),
        ({"fraction": 0.1, "count": 3}, ValueError, "expected a fraction or a count"),
        ({"fraction": 0.0}, ValueError, "fraction: expected at least 1 / 65535"),
        ({"fraction": 1e-6}, ValueError, "count="),
        ({"fraction": 1.5}, ValueError, "from 0 to 1"),
        ({"fraction": "0.1"}, TypeError, "fraction: expected a number"),
        ({"count": 0}, ValueError, "count: expected from 1"),
        ({"count": 0.5}, TypeError, "count: expected an integer"),
    ],
)
def test_what_is_no_share_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        jrb.Newest(**options)


def test_items_without_an_order_are_refused():
    with pytest.raises(ValueError, match=r"Newest: expected a writer .* in the order of time"):
        jrb.ReplayBuffer(8, sampler=jrb.Newest(0.1), writer=jrb.Reservoir(0))
