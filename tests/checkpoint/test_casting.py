"""Checkpoints with 64-bit items, loaded in a program in which JAX keeps 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import authoring
from tests.checkpoint.test_checkpoint import assert_same

EXAMPLE = {
    "observation": {"seen": np.zeros(2), "goal": np.float32(0)},
    "action": np.int64(0),
    "next": {
        "observation": {"seen": np.zeros(2), "goal": np.float32(0)},
        "reward": np.float64(0),
        "done": np.bool_(False),
    },
    "key": jax.random.key(0),
}


def rows(count, wide):
    """Returns rows `[count, 2, ...]` with 64-bit leaves if `wide`, otherwise 32-bit ones."""
    rng, every = np.random.default_rng(3), {}
    for name in ("observation", "after"):
        every[name] = rng.integers(-99, 99, (count, 2, 2)).astype(
            np.float64 if wide else np.float32
        )
    number = np.arange(count * 2).reshape(count, 2)
    items = {
        "observation": {"seen": every["observation"], "goal": np.float32(number)},
        "action": number.astype(np.int64 if wide else np.int32),
        "next": {
            "observation": {"seen": every["after"], "goal": np.float32(number)},
            "reward": number.astype(np.float64 if wide else np.float32),
            "done": number % 5 == 4,
        },
        "key": jax.random.split(jax.random.key(1), (count, 2)),
    }
    return jax.tree.map(jnp.asarray, items)


PARTS = {
    "device": {},
    "prioritized": {"sampler": jrb.Prioritized(), "unit": jrb.NStep(2, 0.9)},
    "memmap": {"storage": jrb.MemmapStorage(None)},
    "compressed": {"storage": jrb.CompressedStorage(min_bytes=1)},
    "windows": {"unit": jrb.Sequence(2)},
}


def pair(parts, count=6):
    """Returns a buffer and its states in 64 and in 32 bits after the same calls."""
    buffer, states = jrb.ReplayBuffer(10, 2, batch_size=4, **parts), []
    for wide in (True, False):
        with authoring.enable_x64() if wide else jax.disable_jit(False):
            example = jax.tree.map(lambda leaf: leaf[0, 0], rows(1, wide))
            states.append(buffer.extend(buffer.init(example), rows(count, wide)))
    return buffer, *states


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["native", "h5"])
@pytest.mark.parametrize("name", PARTS)
def test_items_are_converted_where_asked_for(name, layout, tmp_path):
    buffer, wide, state = pair(PARTS[name])
    with authoring.enable_x64():
        jrb.save(tmp_path / "x", buffer, wide, layout=layout)
    with pytest.raises(TypeError, match=r"x: leaf 'action': .*got int64.*load\(path, cast=True\)"):
        jrb.load(tmp_path / "x")
    for given in (None, buffer):
        again, back = jrb.load(tmp_path / "x", given, cast=True)
        assert again == buffer
        assert_same(jrb.items(again, back), jrb.items(buffer, state))
        key = jax.random.key(4)
        assert_same(again.sample(back, key), buffer.sample(state, key))
        assert_same(again.draw(back, key)[1], buffer.draw(state, key)[1])
    more = rows(2, wide=False)
    one, other = again.extend(back, more), buffer.extend(state, more)
    assert_same(again.sample(one, key), buffer.sample(other, key))


def test_parts_and_shards(tmp_path):
    buffer, wide, state = pair({})
    with authoring.enable_x64():
        jrb.save(tmp_path, {"a": buffer, "b": buffer}, {"a": wide, "b": wide})
    with pytest.raises(TypeError, match="cast=True"):
        jrb.load(tmp_path)
    _, back = jrb.load(tmp_path, cast=True)
    assert_same(back["a"], state)
    assert_same(back["b"], state)


def test_what_has_no_wide_items_is_loaded_as_it_is(tmp_path):
    buffer, _, state = pair({})
    jrb.save(tmp_path, buffer, state)
    assert_same(jrb.load(tmp_path, cast=True)[1], state)


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    buffer = jrb.ReplayBuffer(4)
    with authoring.enable_x64():
        state = buffer.extend(buffer.init({"n": np.int64(0)}), {"n": np.array([1, 2**40])})
        jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match="leaf 'n'"):
        jrb.load(tmp_path, cast=True)
