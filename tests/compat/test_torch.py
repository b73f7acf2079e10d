"""Batches as PyTorch tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        jrb.to_torch({"x": jnp.zeros(3)})


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_equal_and_memory_is_shared(torch, dtype):
    array = jnp.asarray([0, 1, 1, 0, 5], dtype)
    tensor = jrb.to_torch({"x": array})["x"]
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.to(torch.float64).tolist() == np.asarray(array, np.float64).tolist()
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert jrb.to_torch(array, copy=True).data_ptr() != array.unsafe_buffer_pointer()


def test_a_sample_stays_a_sample(torch):
    buffer = jrb.ReplayBuffer(16, batch_size=4, sampler=jrb.Prioritized())
    state = buffer.extend(buffer.init({"x": jnp.zeros(2)}), {"x": jnp.ones((8, 2))})
    batch = buffer.sample(state, jax.random.key(0))
    tensors = jrb.to_torch(batch)
    assert isinstance(tensors, jrb.Sample)
    assert tensors.data["x"].shape == (4, 2)
    assert tensors.weights.tolist() == batch.weights.tolist()


def test_arrays_of_numpy_and_keys(torch):
    frozen = np.arange(3)
    frozen.flags.writeable = False
    tensors = jrb.to_torch({"n": np.arange(3.0), "frozen": frozen, "key": jax.random.key(7)})
    assert tensors["n"].tolist() == [0, 1, 2]
    assert tensors["frozen"].tolist() == [0, 1, 2]
    assert tensors["key"].tolist() == [0, 7]


def test_dtypes_that_torch_lacks_are_refused_by_name(torch):
    with pytest.raises(TypeError, match="leaf 'a': expected a dtype of PyTorch, got int4"):
        jrb.to_torch({"a": jnp.zeros(3, jnp.int4)})
