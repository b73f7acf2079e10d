"""Every program in examples/ runs, and does what it says."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import jrb
from examples import data_parallel
from jrb import testing

pytestmark = pytest.mark.slow


@pytest.mark.devices
@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="needs a JAX with jax.lax.pcast")
@pytest.mark.parametrize("devices", [1, jax.device_count()])
def test_data_parallel_training_learns_the_values(devices):
    assert data_parallel.run(devices) < 0.1


@pytest.mark.devices
@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="needs a JAX with jax.lax.pcast")
def test_data_parallel_training_copies_nothing_of_a_rings_size():
    def temporaries(capacity):
        train, start = data_parallel.learner(jax.device_count(), capacity)
        keys = jax.random.split(jax.random.key(0), (jax.device_count(), 3))
        return train.lower(*start, keys).compile().memory_analysis().temp_size_in_bytes

    assert abs(temporaries(2**15) - temporaries(2**13)) < 1000


@pytest.mark.parametrize("parts", [{}, {"unit": jrb.NStep(3, 0.9), "sampler": jrb.Prioritized()}])
def test_a_storage_of_zarr_keeps_the_contracts(parts, tmp_path):
    pytest.importorskip("zarr")
    from examples.zarr_storage import ZarrStorage

    numbers = itertools.count()

    def make(capacity):
        storage = ZarrStorage(str(tmp_path / str(next(numbers))))
        return jrb.ReplayBuffer(capacity, num_envs=2, batch_size=8, storage=storage, **parts)

    example = {"x": jnp.zeros(16), "next": {"reward": jnp.float32(0), "done": jnp.bool_(False)}}
    testing.conform(make, example)
