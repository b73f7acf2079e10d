"""Windows that cross the end of the ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [4, 5, 9])
@pytest.mark.parametrize("added", [4, 7, 21])
def test_windows_that_cross_the_end_of_the_ring(capacity, added):
    item = {"x": jnp.int32(0), "wide": jnp.zeros(3), "next": {"reward": 0.0, "done": False}}
    buffer = jrb.ReplayBuffer(capacity, unit=jrb.Sequence(4), batch_size=64)
    time = jnp.arange(added, dtype=jnp.int32)
    wide = jnp.broadcast_to(time[:, None].astype(jnp.float32), (added, 3))
    done = jnp.zeros(added, jnp.bool_)
    rows = {"x": time, "wide": wide, "next": {"reward": time.astype(jnp.float32), "done": done}}
    state = buffer.extend(buffer.init(item), rows)
    batch = buffer.sample(state, jax.random.key(1))
    first = batch.data["x"][:, :1]
    assert set(first.ravel().tolist()) == set(range(max(0, added - capacity), added - 3))
    np.testing.assert_array_equal(batch.data["x"], first + np.arange(4))
    np.testing.assert_array_equal(batch.data["next"]["reward"], batch.data["x"])
    np.testing.assert_array_equal(batch.data["wide"][..., 0], batch.data["x"])
