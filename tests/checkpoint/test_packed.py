"""Checkpoints of leaves that are packed in one array."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.small_blocks import damage, file_of, small_blocks

pytestmark = pytest.mark.slow

ITEM = {"a": jnp.zeros(3), "b": jnp.zeros((), jnp.int32), "c": jnp.zeros((2, 2))}


UNITS = {"time": jrb.Transition(), "environments": jrb.Sequence(1, cross_episodes=True)}
LAYOUTS = list(UNITS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_packed_leaves_come_back_in_either_order_of_rows(layout, batch, tmp_path):
    buffer = jrb.ReplayBuffer(6, num_envs=2, unit=UNITS[layout])
    row = lambda leaf: jnp.arange(4 * leaf.size).reshape(2, 2, *leaf.shape).astype(leaf.dtype)
    state = buffer.extend(buffer.init(ITEM), jax.tree.map(row, ITEM))
    add = lambda leaf, number: leaf + jnp.asarray(number).astype(leaf.dtype)
    for count in batch:
        stacked = lambda leaf, n=count: jnp.stack([add(leaf, i) for i in range(n)])
        state = jax.tree.map(stacked, state)
    with small_blocks(64):
        jrb.save(tmp_path / "x", buffer, state)
        assert file_of(tmp_path / "x", "storage/arrays/uint32").stat().st_size > 64
        chex.assert_trees_all_equal(jrb.load(tmp_path / "x")[1], state)
        state = jax.tree.map(lambda leaf: add(leaf, 1), state)
        jrb.save(tmp_path / "x", buffer, state)
    chex.assert_trees_all_equal(jrb.load(tmp_path / "x")[1], state)


LARGE = jnp.zeros(300)
ODD_NAMES = {
    "alone": {"": LARGE, "%": LARGE, "+": LARGE, "%2B": LARGE},
    "beside others": {"+": jnp.zeros(2), "%2B": jnp.zeros(8, jnp.uint8), "~x": jnp.zeros(2)}
    | {"~y": jnp.zeros(8, jnp.uint8)},
    "folders": {"a": LARGE, "a.bin": {"q": LARGE}},
    "long": {"a" * 250: jnp.zeros(2), "b" * 300: LARGE, "c": jnp.zeros(2)},
}


@pytest.mark.whole
@pytest.mark.parametrize("item", ODD_NAMES.values(), ids=ODD_NAMES)
def test_leaves_whose_names_are_alike_as_files_are_kept_apart(item, tmp_path):
    buffer, rng = jrb.ReplayBuffer(9), np.random.default_rng(0)
    rows = jax.tree.map(lambda x: rng.integers(0, 99, (7, *x.shape)).astype(x.dtype), item)
    state = buffer.extend(buffer.init(item), rows)
    jrb.save(tmp_path, buffer, state)
    assert jrb.checkpoint.verify(tmp_path) == []
    chex.assert_trees_all_equal(jrb.load(tmp_path)[1], state)
    with small_blocks(64):
        jrb.save(tmp_path, buffer, state)
    assert jrb.checkpoint.verify(tmp_path) == []
    chex.assert_trees_all_equal(jrb.load(tmp_path)[1], state)


def test_damage_names_all_leaves_of_a_file(tmp_path):
    buffer = jrb.ReplayBuffer(9)
    with small_blocks():
        jrb.save(tmp_path, buffer, buffer.add(buffer.init(ITEM), ITEM | {"b": jnp.int32(7)}))
    damage(file_of(tmp_path, "storage/arrays/uint32"), 0)
    names = "leaf 'storage/a', leaf 'storage/b', leaf 'storage/c', block 0: expected the checksum"
    with pytest.raises(jrb.checkpoint.DamagedError, match=re.escape(names)):
        jrb.load(tmp_path)
    assert len(jrb.checkpoint.verify(tmp_path)) == 1


def test_arrays_that_are_not_those_of_the_buffer_are_refused(tmp_path):
    buffer = jrb.ReplayBuffer(9)
    state = buffer.init(ITEM)
    words = state.storage.arrays["uint32"]
    for other in ({}, {"uint32": words[:, :-1]}, {"uint32": words.astype(jnp.int16)}):
        changed = state.replace(storage=state.storage.replace(arrays=other))
        with pytest.raises((TypeError, ValueError), match="save: "):
            jrb.save(tmp_path / "x", buffer, changed)
        with pytest.raises(TypeError, match="expected a state of this buffer"):
            buffer.add(changed, ITEM)
    once = dataclasses.replace(buffer, storage=jrb.DeviceStorage(share_next_observations=True))
    with pytest.raises(ValueError, match="save: expected a state of this buffer, got another"):
        jrb.save(tmp_path / "x", once, state)
    assert not (tmp_path / "x").exists()
    words.delete()
    with pytest.raises(ValueError, match=r"'storage/arrays/uint32': .*donated"):
        jrb.save(tmp_path / "x", buffer, state)


class Own(jrb.DeviceStorage):
    def init(self, context, spec):
        return {"items": super().init(context, spec)}

    def spec(self, state):
        return super().spec(state["items"])


def test_a_storage_of_ones_own_is_saved_as_it_lies(tmp_path):
    buffer = jrb.ReplayBuffer(9, storage=Own())
    state = buffer.init(ITEM)
    state = state.replace(storage=jax.tree.map(lambda leaf: leaf + 1, state.storage))
    jrb.save(tmp_path / "x", buffer, state)
    loaded = jrb.load(tmp_path / "x", buffer)[1]
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    chex.assert_trees_all_equal(loaded, state)
