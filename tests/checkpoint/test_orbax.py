"""A buffer beside the parameters in an Orbax checkpoint."""

import importlib
import os
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint
from jrb.authoring import casting
from jrb.checkpoint import api

pytestmark = pytest.mark.slow

ocp = pytest.importorskip("orbax.checkpoint")
orbax = importlib.import_module("jrb.checkpoint.orbax")

BUFFER = jrb.ReplayBuffer(
    capacity=6000, num_envs=2, batch_size=8, sampler=jrb.Prioritized(stratified=False)
)
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3)}
ITEM = {"x": jnp.zeros(4), "key": jax.random.key(0)}


def filled(rows=400, start=0):
    """Returns a state whose rows hold distinct numbers and keys."""
    state = BUFFER.init(ITEM)
    number = start + jnp.arange(rows * 2, dtype=jnp.float32).reshape(rows, 2)
    keys = jax.random.split(jax.random.key(start), (rows, 2))
    state = BUFFER.extend(state, {"x": jnp.repeat(number[..., None], 4, axis=-1), "key": keys})
    sample = BUFFER.sample(state, jax.random.key(1))
    return BUFFER.update_priority(state, sample, jnp.arange(1.0, 9.0))


def raw(state):
    """Returns copies of all arrays of a state, on the host."""
    return [np.array(casting.raw(leaf)) for leaf in jax.tree.leaves(state)]


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, theirs in zip(raw(one), raw(other), strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)


def save_args(state):
    return ocp.args.Composite(
        params=ocp.args.StandardSave(PARAMS), buffer=orbax.BufferSave(BUFFER, state)
    )


def restore_args(**how):
    return ocp.args.Composite(
        params=ocp.args.StandardRestore(PARAMS), buffer=orbax.BufferRestore(**how)
    )


def managed(folder, **options):
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options))


def flip_a_bit(folder):
    """Damages the largest file below a folder."""
    files = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    largest = max(files, key=os.path.getsize)
    with open(largest, "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("background", [True, False])
def test_a_buffer_beside_parameters(tmp_path, background):
    state = filled()
    with managed(tmp_path, enable_async_checkpointing=background) as manager:
        manager.save(3, args=save_args(state))
        manager.wait_until_finished()
        restored = manager.restore(3, args=restore_args(buffer=BUFFER))
    chex.assert_trees_all_equal(restored.params, PARAMS)
    buffer, back = restored.buffer
    assert buffer == BUFFER
    assert_same(back, state)
    key = jax.random.key(7)
    assert_same(BUFFER.sample(back, key), BUFFER.sample(state, key))


def test_the_best_steps_stay_by_a_score(tmp_path):
    options = {"best_fn": lambda metrics: metrics["score"], "best_mode": "max", "max_to_keep": 2}
    with managed(tmp_path, **options) as manager:
        for step, score in enumerate([3.0, 1.0, 7.0, 2.0]):
            manager.save(step, args=save_args(filled(start=step)), metrics={"score": score})
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [0, 2]
        assert_same(manager.restore(2, args=restore_args()).buffer[1], filled(start=2))


def test_another_program_restores_without_a_description(tmp_path):
    state = filled()
    with managed(tmp_path) as manager:
        manager.save(0, args=save_args(state))
    with managed(tmp_path) as manager:
        buffer, back = manager.restore(0, args=restore_args()).buffer
        assert buffer == BUFFER
        assert_same(back, state)
        _, back = manager.restore(0).buffer  # without arguments, all items are restored
        assert_same(back, state)
        assert manager.item_metadata(0).buffer is None


def test_a_donated_state_is_saved_as_it_was(tmp_path, monkeypatch):
    go_on, save = threading.Event(), api.save_job

    def late(*args):
        assert go_on.wait(60)
        save(*args)

    monkeypatch.setattr(api, "save_job", late)
    add = jax.jit(BUFFER.add, donate_argnums=0)
    state = filled()
    expected, structure = raw(state), jax.tree.structure(state)
    item = {"x": jnp.full((2, 4), -1.0), "key": jax.random.split(jax.random.key(9), 2)}
    with managed(tmp_path) as manager:
        manager.save(0, args=save_args(state))
        for _ in range(3):
            state = jax.block_until_ready(add(state, item))
        go_on.set()
        manager.wait_until_finished()
        back = manager.restore(0, args=restore_args()).buffer[1]
    assert jax.tree.structure(back) == structure
    for mine, theirs in zip(raw(back), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_older_steps_go_and_newer_ones_are_whole(tmp_path):
    states = [filled(start=1000 * step) for step in range(4)]
    with managed(tmp_path, max_to_keep=2) as manager:
        for step, state in enumerate(states):
            manager.save(step, args=save_args(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        for step in (2, 3):
            assert_same(manager.restore(step, args=restore_args()).buffer[1], states[step])


def test_a_flipped_bit_is_found(tmp_path):
    with managed(tmp_path) as manager:
        manager.save(0, args=save_args(filled()))
        manager.wait_until_finished()
        flip_a_bit(tmp_path / "0" / "buffer")
        with pytest.raises(checkpoint.DamagedError, match=r"leaf '.*', block 0"):
            manager.restore(0, args=restore_args())
    assert len(checkpoint.verify(tmp_path / "0" / "buffer" / orbax.FOLDER)) == 1


@pytest.mark.parametrize("kind", ["Checkpointer", "AsyncCheckpointer"])
def test_a_checkpointer_of_the_buffer_alone(tmp_path, kind):
    state = filled()
    with getattr(ocp, kind)(orbax.BufferHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=orbax.BufferSave(BUFFER, state))
        if kind == "AsyncCheckpointer":
            checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(tmp_path / "one")[1], state)
        flip_a_bit(tmp_path / "one")
        with pytest.raises(checkpoint.DamagedError):
            checkpointer.restore(tmp_path / "one", args=orbax.BufferRestore(BUFFER))


def test_states_under_vmap_and_mixes(tmp_path):
    plain = jrb.ReplayBuffer(capacity=4)
    mix = jrb.Mix((plain, plain), (0.5, 0.5), batch_size=2)
    states = jax.vmap(lambda x: plain.add(plain.init(ITEM["x"]), x))(jnp.ones((3, 4)))
    with ocp.Checkpointer(orbax.BufferHandler()) as checkpointer:
        checkpointer.save(tmp_path / "many", args=orbax.BufferSave(plain, states))
        assert_same(checkpointer.restore(tmp_path / "many")[1], states)
        pair = mix.init(ITEM["x"])
        checkpointer.save(tmp_path / "mix", args=orbax.BufferSave(mix, pair))
        assert_same(checkpointer.restore(tmp_path / "mix")[1], pair)


def test_what_is_saved_loads_without_orbax(tmp_path):
    state = filled()
    with managed(tmp_path) as manager:
        manager.save(5, args=save_args(state))
    buffer, small = checkpoint.load(tmp_path / "5" / "buffer" / orbax.FOLDER, capacity=100)
    assert buffer.capacity == 100
    assert float(small.storage["x"][0, 0]) == 700.0


def test_a_device_is_kept_to(tmp_path):
    device = jax.devices()[1]
    with managed(tmp_path) as manager:
        manager.save(0, args=save_args(filled()))
        manager.wait_until_finished()
        state = manager.restore(0, args=restore_args(device=device)).buffer[1]
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(state))


def test_what_cannot_be_saved_is_refused_before_orbax_begins(monkeypatch):
    """A later refusal would leave the threads of the other items waiting."""
    other = jrb.ReplayBuffer(capacity=4).init(ITEM)
    with pytest.raises(ValueError, match="save"):
        save_args(other)
    with pytest.raises(TypeError, match="expected a ReplayBuffer, a Mix, or"):
        orbax.BufferSave(filled(), BUFFER)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="expected a program of one process, got 2"):
        orbax.BufferSave(BUFFER, filled())


def test_another_description_is_refused(tmp_path):
    with managed(tmp_path) as manager:
        manager.save(0, args=save_args(filled()))
        manager.wait_until_finished()
        other = jrb.ReplayBuffer(capacity=3000, num_envs=2, sampler=BUFFER.sampler)
        with pytest.raises(ValueError, match=r"buffer.capacity: expected 6000"):
            manager.restore(0, args=restore_args(buffer=other))


def test_a_full_disk_is_told_and_leaves_the_older_step(tmp_path, monkeypatch):
    state = filled()
    with managed(tmp_path) as manager:
        manager.save(0, args=save_args(state))
        manager.wait_until_finished()

        def full(*args):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(api, "save_job", full)
            manager.save(1, args=save_args(filled(start=9)))
            with pytest.raises(OSError, match="No space left"):
                manager.wait_until_finished()
    with managed(tmp_path) as manager:
        assert manager.latest_step() == 0
        assert_same(manager.restore(0, args=restore_args()).buffer[1], state)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "jrb.checkpoint.orbax")
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jrb\[orbax\]'"):
        importlib.import_module("jrb.checkpoint.orbax")
