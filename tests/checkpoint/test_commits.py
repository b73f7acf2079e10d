"""Storages on the host, saved and loaded: a load returns what was committed."""

import dataclasses
import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import checkpoint
from tests.small_blocks import before_the_arrays_are_written, damage, file_of, small_blocks
from tests.storages.test_on_host import EXAMPLE, KEY, numbered, same, steps

pytestmark = pytest.mark.slow

STORAGES = {
    "memmap": lambda path: jrb.MemmapStorage(path),
    "spill": lambda path: jrb.SpillStorage(path, 4),
}


def small(path, storage):
    """Returns a buffer of eight numbers, its full state, and a function that loads the path."""
    buffer = jrb.ReplayBuffer(8, batch_size=4, storage=STORAGES[storage](path))
    state = buffer.extend(buffer.init({"x": 0}), {"x": np.arange(8, dtype=np.int32)})
    loaded = lambda: jrb.items(*jrb.load(path))["x"].tolist()
    return buffer, state, loaded


@pytest.mark.parametrize("save", [jrb.save, checkpoint.save_async])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_write_in_the_middle_of_a_commit_is_noticed(tmp_path, monkeypatch, storage, save):
    buffer, state, loaded = small(tmp_path / "store", storage)
    jrb.save(tmp_path / "store", buffer, state)
    before_the_arrays_are_written(monkeypatch, lambda: buffer.add(state, {"x": 99}))
    with pytest.raises(jrb.StaleError, match="newest state"):
        save(tmp_path / "store", buffer, state)
    assert loaded() == list(range(8))


@pytest.mark.parametrize("storage", STORAGES)
def test_no_other_save_or_takeover_begins_while_a_storage_is_saved(tmp_path, monkeypatch, storage):
    path = tmp_path / "store"
    buffer, state, loaded = small(path, storage)
    jrb.save(path, buffer, state)
    state, (same_buffer, again) = buffer.add(state, {"x": 8}), jrb.load(path)
    refused = []

    def attempts():
        for act in (
            lambda: jrb.save(path, buffer, state),
            lambda: checkpoint.save_async(path, buffer, state),
            lambda: same_buffer.add(again, {"x": 99}),
            lambda: jrb.save(path, same_buffer, again),
        ):
            with pytest.raises(checkpoint.LockedError, match="another thread is saving"):
                act()
            refused.append(act)

    with monkeypatch.context() as patch:
        before_the_arrays_are_written(patch, attempts)
        jrb.save(path, buffer, state)
    assert len(refused) == 4
    assert loaded() == list(range(1, 9))
    with pytest.raises(jrb.StaleError):
        same_buffer.add(again, {"x": 99})
    jrb.save(path, buffer, buffer.add(state, {"x": 9}))
    assert loaded() == list(range(2, 10))


def test_an_interrupted_save_lets_the_next_one_begin(tmp_path, monkeypatch):
    path = tmp_path / "store"
    buffer, state, loaded = small(path, "memmap")

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_the_arrays_are_written(patch, interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:  # with the frames of the save
            jrb.save(path, buffer, state)
    assert jrb.save(path, buffer, state) == 1
    assert loaded() == list(range(8))
    del kept


def test_a_save_waits_for_the_device_without_the_turn(tmp_path):
    # A callback of the program that makes the version may need the turn itself.
    buffer, state, loaded = small(tmp_path / "store", "memmap")
    store, words, turns = state.storage.rows.store, np.asarray(state.storage.words), []

    def take_turn():
        turns.append(store.turn.acquire(blocking=False))
        if turns[-1]:
            store.turn.release()

    class Words:
        shape, dtype = words.shape, words.dtype

        def __array__(self, *arguments, **options):
            thread = threading.Thread(target=take_turn)
            thread.start()
            thread.join()
            return words

    late = state.replace(storage=state.storage.replace(words=Words()))
    jrb.save(tmp_path / "store", buffer, late)
    assert turns
    assert all(turns)
    assert loaded() == list(range(8))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_write_of_another_thread_waits_for_a_commit(tmp_path, monkeypatch, storage):
    buffer, state, loaded = small(tmp_path / "store", storage)
    after = []
    writer = threading.Thread(target=lambda: after.append(buffer.add(state, {"x": 99})))
    before_the_arrays_are_written(monkeypatch, writer.start)
    jrb.save(tmp_path / "store", buffer, state)
    writer.join()
    assert loaded() == list(range(8))
    jrb.save(tmp_path / "store", buffer, after[0])
    assert loaded() == [*range(1, 8), 99]


def made(path, storage="memmap", rows=9):
    """Returns a buffer and a state with items and priorities."""
    buffer = jrb.ReplayBuffer(
        capacity=12,
        num_envs=2,
        batch_size=8,
        sampler=jrb.Prioritized(),
        unit=jrb.NStep(2, 0.9),
        storage=STORAGES[storage](path),
    )
    state = buffer.extend(buffer.init(EXAMPLE), steps(1, rows, 2))
    sample = buffer.sample(state, KEY)
    return buffer, buffer.update_priority(state, sample, jnp.arange(8.0))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_load_gives_what_was_committed(storage, tmp_path):
    path = tmp_path / "store"
    buffer, state = made(path, storage)
    jrb.save(path, buffer, state)
    expected = buffer.sample(state, KEY)
    later = buffer.extend(state, steps(2, 4, 2))
    again, restored = jrb.load(path)
    assert again == buffer
    same(again.sample(restored, KEY), expected)
    assert checkpoint.verify(path) == []
    jrb.save(path, buffer, later)
    same(again.sample(restored, KEY), expected)  # an open state keeps reading its commit
    buffer, state = jrb.load(path, buffer=buffer)
    same(buffer.sample(state, KEY), buffer.sample(later, KEY))
    state = buffer.extend(state, steps(3, 2, 2))  # takes over the store from `later`
    with pytest.raises(jrb.StaleError):
        buffer.sample(later, KEY)
    with pytest.raises(jrb.StaleError):
        buffer.extend(later, steps(3, 1, 2))
    with pytest.raises(jrb.StaleError, match="somebody has saved since"):
        again.extend(restored, steps(3, 1, 2))
    jrb.save(path, buffer, state)
    same(again.sample(restored, KEY), expected)
    assert checkpoint.verify(path) == []
    assert checkpoint.generations(path) == [1, 3]  # the first is still open
    del restored
    gc.collect()
    jrb.save(path, buffer, state)
    assert checkpoint.generations(path) == [4]


@pytest.mark.faults
@pytest.mark.parametrize("storage", STORAGES)
def test_a_reader_keeps_what_it_has_loaded_however_much_is_written(storage, tmp_path):
    path = tmp_path / "store"
    with small_blocks(64):
        buffer, state = made(path, storage)
    jrb.save(path, buffer, state)
    expected, items = buffer.sample(state, KEY), jrb.items(buffer, state)
    script = """
import sys
from tests.checkpoint.test_commits import *
buffer, state = jrb.load(sys.argv[1])
before = jrb.items(buffer, state)
print("loaded", flush=True)
sys.stdin.readline()
jax.tree.map(np.testing.assert_array_equal, jrb.items(buffer, state), before)
"""
    reader = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        cwd=pathlib.Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout.readline() == "loaded\n"
    again, restored = jrb.load(path)
    for number in range(2, 7):
        state = buffer.extend(state, steps(number, 5, 2))
        jrb.save(path, buffer, state)
        same(again.sample(restored, KEY), expected)
        jax.tree.map(np.testing.assert_array_equal, jrb.items(again, restored), items)
        assert checkpoint.generations(path) == [1, number]
    assert reader.communicate("\n")[0] == ""
    assert reader.returncode == 0
    del restored
    gc.collect()
    jrb.save(path, buffer, state)
    assert checkpoint.generations(path) == [7]
    assert checkpoint.verify(path) == []


@pytest.mark.parametrize("storage", STORAGES)
def test_older_commits_stay_as_long_as_asked(storage, tmp_path):
    path = tmp_path / "store"
    with small_blocks(64):
        buffer, state = made(path, storage)
    saved = {}
    for number in range(1, 6):
        save = checkpoint.save_async if number % 2 else jrb.save
        save(path, buffer, state, keep=2)
        saved[number] = jrb.items(buffer, state), buffer.sample(state, KEY)
        state = buffer.extend(state, steps(number, 4, 2))
    assert checkpoint.generations(path) == [3, 4, 5]
    assert checkpoint.verify(path) == []
    for number in (3, 4, 5):
        again, back = jrb.load(path, generation=number)
        items, sample = saved[number]
        jax.tree.map(np.testing.assert_array_equal, jrb.items(again, back), items)
        same(again.sample(back, KEY), sample)
        if number < 5:
            with pytest.raises(jrb.StaleError, match="somebody has saved since"):
                again.extend(back, steps(3, 1, 2))
        del back
        gc.collect()
    jrb.save(path, buffer, state)
    assert checkpoint.generations(path) == [6]
    assert checkpoint.verify(path) == []


@pytest.mark.faults
@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_goes_on_as_if_it_had_never_been_killed(storage, tmp_path):
    script = """
import os, signal, sys
from tests.checkpoint.test_commits import *
buffer, state = made(sys.argv[1], sys.argv[2])
jrb.save(sys.argv[1], buffer, state)
for number in range(7, 12):
    state = buffer.extend(state, steps(number, 5, 2))
buffer.sample(state, KEY)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "store"
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(path), storage]
    assert subprocess.run(command, check=False, cwd=root).returncode == -signal.SIGKILL
    whole, state = made(tmp_path / "whole", storage)
    buffer, restored = jrb.load(path)
    for number in range(3):
        key = jax.random.fold_in(KEY, number)
        same(buffer.sample(restored, key), whole.sample(state, key))
        rows = steps(number, 3, 2)
        restored, state = buffer.extend(restored, rows), whole.extend(state, rows)


@pytest.mark.parametrize("storage", STORAGES)
def test_another_path_is_a_checkpoint_like_any_other(storage, tmp_path):
    buffer, state = made(tmp_path / "store", storage)
    other = tmp_path / "checkpoint"
    for rows in (steps(2, 1, 2), steps(3, 2, 2)):
        jrb.save(other, buffer, state, keep=1)
        expected, state = state, buffer.extend(state, rows)
    jrb.checkpoint.save_async(other, buffer, state, keep=1).wait()
    assert len(checkpoint.generations(other)) == 2
    again, restored = jrb.load(other)
    assert again.storage.path is None  # not the store's path, which may be in use
    same(again.sample(restored, KEY), buffer.sample(state, KEY))
    with pytest.raises(jrb.StaleError):
        jrb.save(other, buffer, expected)
    third = dataclasses.replace(buffer, storage=STORAGES[storage](tmp_path / "third"))
    _, restored = jrb.load(other, buffer=third)
    same(third.sample(restored, KEY), buffer.sample(state, KEY))
    jrb.save(tmp_path / "third", third, restored)
    same(third.sample(jrb.load(tmp_path / "third")[1], KEY), buffer.sample(state, KEY))


def test_an_hdf5_file(tmp_path):
    buffer, state = made(tmp_path / "store")
    jrb.save(tmp_path / "replay.h5", buffer, state, layout="h5")
    again, restored = jrb.load(tmp_path / "replay.h5")
    assert again.storage.path is None
    same(again.sample(restored, KEY), buffer.sample(state, KEY))


def test_another_capacity_is_a_temporary_store(tmp_path):
    buffer, state = made(tmp_path / "store")
    jrb.save(tmp_path / "store", buffer, state)
    larger, more = jrb.load(tmp_path / "store", capacity=20, num_envs=4)
    assert (larger.capacity, larger.num_envs, larger.storage.path) == (20, 4, None)
    assert int(larger.size(more)) == 12
    assert int(buffer.size(buffer.extend(state, steps(2, 1, 2)))) == 12


def test_a_folder_that_was_moved(tmp_path):
    buffer, state = made(tmp_path / "store")
    jrb.save(tmp_path / "store", buffer, state)
    expected = buffer.sample(state, KEY)
    del state
    shutil.move(tmp_path / "store", tmp_path / "moved")
    again, restored = jrb.load(tmp_path / "moved")
    assert os.fspath(again.storage.path) == str(tmp_path / "moved")
    same(again.sample(restored, KEY), expected)
    jrb.save(tmp_path / "moved", again, again.extend(restored, steps(2, 1, 2)))


def test_a_mix_with_a_store(tmp_path):
    demos = jrb.ReplayBuffer(8, storage=jrb.MemmapStorage(tmp_path / "store"))
    mix = jrb.Mix((demos, jrb.ReplayBuffer(8)), (0.5, 0.5), batch_size=8)
    one, other = mix.init({"x": jnp.zeros(2)})
    states = (
        demos.extend(one, numbered(1, 2)),
        mix.buffers[1].extend(other, numbered(3)),
    )
    jrb.save(tmp_path / "checkpoint", mix, states)
    again, restored = jrb.load(tmp_path / "checkpoint")
    same(again.sample(restored, KEY), mix.sample(states, KEY))


def test_nothing_was_saved_yet(tmp_path):
    buffer = jrb.ReplayBuffer(4, storage=jrb.MemmapStorage(tmp_path / "store"))
    state = buffer.init({"x": 0.0})
    with pytest.raises(FileNotFoundError, match="nothing was"):
        jrb.load(tmp_path / "store")
    with pytest.raises(ValueError, match="of this process"):
        buffer.init({"x": 0.0})
    del state
    gc.collect()
    state = buffer.init({"y": 0})  # allowed, as nothing was saved
    jrb.save(tmp_path / "store", buffer, state)
    assert [name.name[:8] for name in (tmp_path / "store" / "arrays").iterdir()] == ["items.y-"]
    del state
    gc.collect()
    with pytest.raises(ValueError, match=r"jrb\.load"):
        buffer.init({"x": 0.0})


def test_what_cannot_be(tmp_path):
    buffer, state = made(tmp_path / "store")
    plain = jrb.ReplayBuffer(4)
    with pytest.raises((ValueError, jrb.checkpoint.LockedError)):
        jrb.save(tmp_path / "store", plain, plain.init({"x": 0.0}))
    with pytest.raises(ValueError, match="expected a state of this buffer"):
        jrb.save(tmp_path / "other", buffer, plain.init({"x": 0.0}))
    jrb.save(tmp_path / "store", buffer, state)
    with pytest.raises(ValueError, match="capacity"):
        jrb.load(tmp_path / "store", buffer=dataclasses.replace(buffer, capacity=24))


@pytest.mark.faults
@pytest.mark.parametrize(
    "storage", [jrb.MemmapStorage, lambda path: jrb.SpillStorage(path, 8)], ids=["memmap", "spill"]
)
@pytest.mark.parametrize(
    "unit", [jrb.Transition(), jrb.NStep(2, 0.5)], ids=["transition", "n-step"]
)
def test_a_commit_is_whole_after_a_crash_whatever_was_written_since(storage, unit, tmp_path):
    path, example = tmp_path / "store", {"next": {"reward": jnp.zeros(()), "done": False}}
    example["frame"] = jnp.zeros(2**13)  # 8 rows in a block
    buffer = jrb.ReplayBuffer(
        64, num_envs=2, batch_size=64, sampler=jrb.Prioritized(), unit=unit, storage=storage(path)
    )

    def rows(first, count):
        reward = jnp.repeat(jnp.arange(first, first + count, dtype=jnp.float32), 2)
        reward = reward.reshape(count, 2)
        frame = jnp.broadcast_to(reward[..., None], (count, 2, 2**13))
        return {"next": {"reward": reward, "done": jnp.zeros((count, 2), bool)}, "frame": frame}

    state = buffer.extend(buffer.init(example), rows(0, 40))
    state = buffer.update_priority(state, jnp.arange(64), jnp.arange(64.0))
    jrb.save(path, buffer, state)
    expected = buffer.sample(state, KEY)
    for first in range(40, 140, 20):  # three rounds of the ring
        state = buffer.extend(state, rows(first, 20))
    state = buffer.set(state, jnp.arange(5), {"frame": jnp.ones((5, 2**13))})
    del state
    gc.collect()
    again, back = jrb.load(path)
    assert int(again.size(back)) == 64
    held = again.writer.held(again.ring, back.writer)
    slots = (int(held.first[0]) + np.arange(int(held.size))) % 64
    frames = np.asarray(again.take(back, jnp.asarray(slots))["frame"])
    want = np.repeat(np.arange(8, 40), 2)
    np.testing.assert_array_equal(frames, np.broadcast_to(want[:, None], frames.shape))
    same(again.sample(back, KEY), expected)
    back = again.extend(back, rows(40, 20))
    jrb.save(path, again, back)
    again, back = jrb.load(path)
    assert int(again.size(back)) == 64
    assert checkpoint.verify(path) == []


def test_a_store_opens_without_a_look_at_its_rows(tmp_path):
    buffer, state = jrb.from_items(
        {"x": jnp.arange(8)}, storage=jrb.MemmapStorage(tmp_path / "rows"), batch_size=2
    )
    jrb.save(tmp_path / "rows", buffer, state)
    del state
    damage(file_of(tmp_path / "rows", "items/x"), 8)
    with pytest.raises(checkpoint.DamagedError, match="leaf 'x', block 0"):
        jrb.load(tmp_path / "rows")
    buffer, state = jrb.load(tmp_path / "rows", verify=False)
    assert jrb.items(buffer, state)["x"].tolist() == [0, 1, 3, 3, 4, 5, 6, 7]
    jrb.save(tmp_path / "rows", buffer, state)
    assert len(checkpoint.verify(tmp_path / "rows")) == 1
    with pytest.raises(TypeError, match="verify"):
        jrb.load(tmp_path / "rows", verify="no")
