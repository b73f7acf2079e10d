"""Saves check a state before they write anything, and accept states under two vmaps."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jrb

ITEM = {"x": jnp.float32(0)}


def rows(count):
    return {"x": jnp.arange(count, dtype=jnp.float32)}


@pytest.mark.parametrize("layout", ["native", "h5"])
def test_an_old_state_is_refused_before_anything_is_written(layout, tmp_path):
    buffer = jrb.ReplayBuffer(4, storage=jrb.MemmapStorage())
    old = buffer.extend(buffer.init(ITEM), rows(3))
    state = jax.block_until_ready(buffer.extend(old, rows(1)))
    with pytest.raises(jrb.StaleError):
        jrb.save(tmp_path / "folder" / "x", buffer, old, layout=layout)
    assert not (tmp_path / "folder").exists()
    jrb.save(tmp_path / "folder" / "x", buffer, state, layout=layout)


def test_what_does_not_fit_is_refused_each_time(tmp_path):
    buffer, other = jrb.ReplayBuffer(4), jrb.ReplayBuffer(5)
    state = buffer.init(ITEM)
    for _ in range(2):
        with pytest.raises(ValueError, match="save: leaf 'storage/x': expected shape"):
            jrb.save(tmp_path / "x", other, state)
        jrb.save(tmp_path / "x", buffer, state)
        gone = jax.tree.map(jnp.copy, state)
        gone.edits.delete()
        with pytest.raises(ValueError, match="donated"):
            jrb.save(tmp_path / "x", buffer, gone)


def test_several_axes_are_told_from_items(tmp_path):
    buffer = jrb.ReplayBuffer(4)
    init = lambda _: buffer.init(ITEM)
    state = jax.vmap(jax.vmap(init))(jnp.zeros((2, 3)))
    jrb.save(tmp_path / "x", buffer, state)
    chex.assert_trees_all_equal(jrb.load(tmp_path / "x")[1], state)
