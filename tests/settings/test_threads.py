"""JAX settings of a `with` statement hold for one thread; the threads of jrb inherit them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

COUNT = 8
STORAGES = {
    "device": lambda path: jrb.DeviceStorage(),
    "files": lambda path: jrb.MemmapStorage(path / "store"),
    "spill": lambda path: jrb.SpillStorage(path / "store", device_capacity=4),
    "compressed": lambda path: jrb.CompressedStorage(min_bytes=1),
}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def item(number):
    """Returns an item most of whose leaves need 64 bits."""
    return {
        "float": jnp.float64(0.1) + jnp.float64(number),
        "signed": jnp.int64(-(2**40)) - jnp.int64(number),
        "unsigned": jnp.uint64(2**63) + jnp.uint64(number),
        "complex": jnp.complex128(0.1 + 0.3j) + jnp.complex128(number),
        "none": jnp.zeros((0,), jnp.float64),
        "narrow": jnp.full((2, 3), number, jnp.uint8),
    }


def items():
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(item, range(COUNT)))


equal = functools.partial(chex.assert_trees_all_equal, strict=True)


def busy(number):
    """Returns `number` after work that makes XLA run host callbacks in another thread."""
    matrix = jnp.ones((800, 800), jnp.float32)
    power = functools.reduce(
        lambda power, _: power @ matrix / 800, range(6), matrix + jnp.float32(number.sum())
    )
    return number + jnp.asarray(0 * power[0, 0], number.dtype)


@pytest.mark.parametrize("kind", STORAGES)
def test_wide_numbers_are_written_and_read_by_compiled_code(tmp_path, kind):
    buffer = jrb.ReplayBuffer(16, batch_size=4, storage=STORAGES[kind](tmp_path))
    state = buffer.init(item(0))
    add = jax.jit(lambda state, number: buffer.add(state, item(busy(number))))
    for number in range(COUNT):
        state = add(state, jnp.asarray(number))
    slots = jnp.arange(COUNT, dtype=jnp.int32)
    equal(buffer.take(state, slots), items())
    equal(jax.jit(lambda state, slots: buffer.take(state, busy(slots)))(state, slots), items())


@pytest.mark.parametrize("kind", STORAGES)
def test_wide_numbers_are_drawn_ahead_and_saved_in_the_background(tmp_path, kind):
    buffer = jrb.ReplayBuffer(16, batch_size=4, storage=STORAGES[kind](tmp_path))
    state = buffer.extend(buffer.init(item(0)), items())
    key = jax.random.key(0)
    with jrb.prefetch(buffer, state, key) as batches:
        found = next(batches)
    expected = buffer.draw(state, jax.random.fold_in(key, 0))[1]
    equal(found.data, jax.tree.map(np.asarray, expected.data))
    jrb.checkpoint.save_async(tmp_path / "saved", buffer, state).wait()
    loaded, restored = jrb.load(tmp_path / "saved")
    equal(loaded.take(restored, jnp.arange(COUNT, dtype=jnp.int32)), items())


def test_wide_numbers_of_several_parts_are_encoded(tmp_path):
    buffer = jrb.ReplayBuffer(16, batch_size=4)
    state = buffer.extend(buffer.init(item(0)), items())
    save = functools.partial(jrb.save, tmp_path, encode=dict.fromkeys("ab", lambda items: items))
    save(dict.fromkeys("ab", buffer), dict.fromkeys("ab", state))
    buffers, states = jrb.load(tmp_path, decode=dict.fromkeys("ab", lambda items: items))
    for name in "ab":
        equal(buffers[name].take(states[name], jnp.arange(COUNT, dtype=jnp.int32)), items())


def test_wide_numbers_are_recorded_by_compiled_code(tmp_path):
    def ted(number):
        done = jnp.bool_(False)
        after = {"observation": jnp.float64(1.1) + jnp.float64(number), "reward": jnp.float32(0)}
        return {
            "observation": jnp.float64(0.1) + jnp.float64(number),
            "action": jnp.int64(2**40) + jnp.int64(number),
            "next": {**after, "done": done, "terminated": done, "truncated": done},
        }

    with jrb.datasets.Recorder(tmp_path, ted(0), num_envs=None) as recorder:
        record = jax.jit(lambda number: recorder.record(ted(busy(number))))
        for number in range(COUNT):
            record(jnp.asarray(number))
        jax.effects_barrier()
    (episode,) = jrb.datasets.open(tmp_path)
    np.testing.assert_array_equal(episode["observation"], 0.1 + np.arange(COUNT))
    np.testing.assert_array_equal(episode["action"], 2**40 + np.arange(COUNT))
