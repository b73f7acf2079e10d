"""Leaves that lie side by side, as bytes of rows, wherever their array is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb._engine import memory
from jrb.checkpoint import one_by_one

pytestmark = pytest.mark.slow

ITEM = {"a": jnp.zeros(3), "b": jnp.zeros((), jnp.int32), "c": jnp.zeros((2, 2))}


LAYOUTS = ["time", "environments"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_rows_of_a_leaf_are_its_bytes(elsewhere, layout):
    buffer = jrb.ReplayBuffer(9, num_envs=3, storage=jrb.DeviceStorage(layout=layout))
    rng = np.random.default_rng(0)
    rows = jax.tree.map(lambda leaf: rng.random((3, 3, *leaf.shape)).astype(leaf.dtype), ITEM)
    storage = buffer.extend(buffer.init(ITEM), rows).storage
    rows = jax.tree.map(lambda leaf: leaf.reshape(9, *leaf.shape[2:]), rows)
    if elsewhere:  # as the shards of another device are taken
        part = lambda array: memory.Part(jnp.stack([array + 1, array]), 1)
        storage = storage.replace(arrays={name: part(a) for name, a in storage.arrays.items()})
    leaves = one_by_one.leaves_of(storage)
    for slots in (np.arange(2, 7), np.array([8, 0, 1, 5]), np.arange(0)):
        for name, leaf in leaves.items():
            want = rows[name][slots].reshape(len(slots), rows[name][0].size).view(np.uint8)
            np.testing.assert_array_equal(leaf.rows(np.zeros(len(slots), int), slots), want)


@pytest.mark.parametrize(("layout", "lead"), [("time", (9,)), ("environments", (3, 3))])
def test_a_load_needs_no_more_than_the_arrays(layout, lead):
    """Each array is filled where it stays: no leaf lies beside it as well."""
    buffer = jrb.ReplayBuffer(9, num_envs=3, storage=jrb.DeviceStorage(layout=layout))
    room = one_by_one.room_for(buffer, buffer.stored(buffer.init(ITEM)), (2,))
    for leaf in room.leaves():
        assert leaf.rows.shape[0] == 18 and not leaf.rows.flags.owndata
        leaf[np.divmod(np.arange(18), 9)] = np.ones((18, *leaf.spec.shape), leaf.spec.dtype)
    storage = room.filled(ITEM, None)
    shapes = {name: array.shape for name, array in storage.arrays.items()}
    assert shapes == {"uint32": (2, *lead, 8)}
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(storage.leaves))


def test_arrays_that_are_not_those_of_the_buffer_are_refused(tmp_path):
    buffer = jrb.ReplayBuffer(9)
    state = buffer.init(ITEM)
    words = state.storage.arrays["uint32"]
    for other in ({}, {"uint32": words[:, :-1]}, {"uint32": words.astype(jnp.int16)}):
        changed = state.replace(storage=state.storage.replace(arrays=other))
        with pytest.raises(ValueError, match="save: leaf 'storage/arrays': expected arrays"):
            jrb.save(tmp_path / "x", buffer, changed)
    once = dataclasses.replace(buffer, storage=jrb.DeviceStorage(once=True))
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
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
