"""Anchors join the end of a queue in their order, be they few or many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrb.ring import Ring
from jrb.units import anchors as anchor_queue


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130])
def test_those_that_join_follow_one_another(count):
    ring, rng = Ring(150, 1), np.random.default_rng(count)
    slots = np.where(rng.random(count) < 0.6, rng.permutation(150)[:count], 150).astype(np.int32)
    queue = anchor_queue.AnchorQueue(
        slots=jnp.arange(150, dtype=jnp.int32), head=jnp.int32(145), count=jnp.int32(9)
    )
    after = jax.jit(anchor_queue.append, static_argnums=0)(ring, queue, jnp.asarray(slots))
    joined, held = slots[slots < 150], np.arange(150)
    want = np.concatenate([held[(145 + held[:9]) % 150], joined])
    assert int(after.count) == len(want)
    assert np.array_equal(after.slots[(145 + np.arange(len(want))) % 150], want)
