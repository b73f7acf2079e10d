"""Runs of slots around a ring, read at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import types
from jrb._core import packed, rows


def _array(capacity, shape, dtype):
    numbers = np.random.default_rng(0).integers(0, 200, (capacity, *shape))
    return jnp.asarray(numbers % 2 == 0 if dtype == "bool" else numbers.astype(dtype))


def _runs(capacity, length, most=50):
    """Runs from every slot, or of a large ring from the last ones and the first ones."""
    first = np.unique(np.arange(-min(most, capacity), min(most, capacity)) % capacity)
    return jnp.asarray((first[:, None] + np.arange(length)) % capacity, jnp.int32)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), "float32"), ((1,), "int8"), ((1, 1), "uint16"), ((), "bool")]
)
@pytest.mark.parametrize(
    ("capacity", "length"), [(7, 2), (7, 7), (1, 1), (9, 1), (8, 5), (200_000, 6)]
)
def test_runs_are_their_elements(capacity, length, shape, dtype):
    array, slots = _array(capacity, shape, dtype), _runs(capacity, length)
    found = jax.jit(rows.get_runs)(array, slots)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, np.asarray(array)[np.asarray(slots)])


def test_runs_of_many_rings():
    arrays = jnp.stack([_array(11, (), "int32") + n for n in range(3)])
    slots = jnp.stack([jnp.roll(_runs(11, 4), n, axis=0) for n in range(3)])
    found = jax.jit(jax.vmap(rows.get_runs))(arrays, slots)
    np.testing.assert_array_equal(found, jax.vmap(lambda array, at: array[at])(arrays, slots))


def test_runs_of_keys():
    keys, slots = jax.random.split(jax.random.key(0), 5), _runs(5, 3)
    found = jax.jit(rows.get_runs)(keys, slots)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys[slots]))


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


@pytest.mark.parametrize(
    ("envs", "unit", "in_runs"),
    [
        (1, jrb.Sequence(4), True),
        (1, jrb.Sequence(4, sample_by="episodes"), True),
        (2, jrb.Sequence(4), False),
        (1, jrb.Sequence(4, partial="pad"), False),
        (1, jrb.Sequence(3, burn_in=1), False),
    ],
)
def test_only_whole_windows_of_one_environment_are_runs(envs, unit, in_runs):
    buffer = jrb.ReplayBuffer(16, num_envs=envs, unit=unit, batch_size=8)
    state = buffer.init({"x": 0, "next": {"done": False}})
    program = jax.make_jaxpr(buffer.sample)(state, jax.random.key(0))
    assert ("slice_sizes=(4,)" in str(program)) == in_runs


def test_what_is_looked_up_beside_runs_need_be_none():
    """Slots of a lookup are taken for a run only where they are those of the items."""
    column, beside = _array(20, (), "float32"), _array(20, (), "int32")
    run, other = _runs(20, 4), _runs(20, 4)[:, ::-1] * 7 % 20
    where = types.ContiguousSlots(lambda name: run)
    lookups = [types.AuxRead(beside, slots, lambda found: found) for slots in (other, run)]
    data, found = packed.get({"x": column}, where, lookups)
    np.testing.assert_array_equal(data["x"], np.asarray(column)[np.asarray(run)])
    for there, slots in zip(found, (other, run), strict=True):
        np.testing.assert_array_equal(there, np.asarray(beside)[np.asarray(slots)])
