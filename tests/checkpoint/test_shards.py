"""Checkpoints of sharded states: exact on all numbers of devices, complete if processes die."""

import contextlib
import functools
import os
import shutil
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jrb
from jrb import checkpoint
from jrb.checkpoint import api, descriptions, saving
from tests import seams
from tests.small_blocks import damage, file_of, small_blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.devices,
    pytest.mark.filterwarnings("ignore::jrb.CopyWarning"),
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
    pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map"),
]

S, E, B = 4, 8, 16
EXAMPLE = {
    "observation": jnp.zeros(3),
    "next": {"observation": jnp.zeros(3), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}
BUFFER = jrb.ReplayBuffer(6 * E, E, batch_size=B, sampler=jrb.Prioritized(), unit=jrb.NStep(2, 0.9))


def mesh_of(devices, kind=AxisType.Auto):
    return jax.make_mesh((devices,), ("data",), (kind,), devices=jax.devices()[:devices])


def rows(rng, *lead):
    after = {"observation": rng.normal(size=(*lead, 3)), "reward": rng.normal(size=lead)}
    found = {"observation": rng.normal(size=(*lead, 3)), "next": after}
    found = jax.tree.map(lambda leaf: leaf.astype(np.float32), found)
    found["next"]["done"] = rng.random(lead) < 0.2
    return found


def filled(sharded, length=9, seed=0):
    rng = np.random.default_rng(seed)
    given = rng.random((length, E)).astype(np.float32) * 3
    return sharded.extend(sharded.init(EXAMPLE), rows(rng, length, E), priorities=given)


@pytest.mark.parametrize("devices", [4, 2])
def test_what_was_saved_on_some_devices_goes_on_bit_for_bit_on_others(devices, tmp_path):
    sharded = jrb.Sharded(BUFFER, S, mesh_of(devices))
    state = filled(sharded)
    assert jrb.save(tmp_path / "set", sharded, state) == 1
    state = sharded.add(state, rows(np.random.default_rng(1), E))
    extra = {"step": 7, "key": jax.random.key(3)}
    assert jrb.save(tmp_path / "set", sharded, state, extra=extra) == 2
    key, other = jax.random.key(0), mesh_of(1, AxisType.Explicit)
    for mesh in (None, mesh_of(4), mesh_of(2), other):
        found, there, besides = jrb.load(tmp_path / "set", device=mesh, extra=extra)
        assert found == jrb.Sharded(BUFFER, S, mesh)
        assert besides["step"] == 7
        chex.assert_trees_all_equal(jax.device_get(there), jax.device_get(state))
        if mesh is not None:
            spec = NamedSharding(mesh, PartitionSpec("data"))
            assert {leaf.sharding for leaf in jax.tree.leaves(there)} == {spec}
        told = found.draw(there, key), sharded.draw(state, key)
        chex.assert_trees_all_equal(*jax.device_get(told))
    assert checkpoint.verify(tmp_path / "set") == []
    told = checkpoint.metadata(tmp_path / "set")
    assert (told["kind"], list(told["parts"])) == ("sharded", ["0", "1", "2", "3"])
    assert told["parts"]["2"]["capacity"] == sharded.part.capacity


def test_a_description_that_is_given_says_the_mesh_and_what_is_drawn(tmp_path):
    sharded = jrb.Sharded(BUFFER, S, mesh_of(4))
    state = filled(sharded)
    jrb.save(tmp_path, sharded, state, keep=1)
    jrb.save(tmp_path, sharded, sharded.empty(state), keep=1)
    assert checkpoint.generations(tmp_path) == [1, 2]
    wider = jrb.ReplayBuffer(**{**vars(BUFFER), "batch_size": 2 * B})
    found, there = jrb.load(tmp_path, jrb.Sharded(wider, S, mesh_of(2)), generation=1)
    assert (found.batch_size, found.mesh) == (2 * B, mesh_of(2))
    chex.assert_trees_all_equal(jax.device_get(there), jax.device_get(state))
    with pytest.raises(TypeError, match=r"device: expected a mesh for a checkpoint of shards"):
        jrb.load(tmp_path, device=jax.devices()[0])


def test_a_mix_of_shards_goes_on_on_other_devices(tmp_path):
    make = lambda mesh: jrb.Mix((jrb.Sharded(BUFFER, S, mesh),) * 2, (0.5, 0.5), batch_size=2 * S)
    mix, key = make(mesh_of(4)), jax.random.key(0)
    states = tuple(filled(part, seed=seed) for seed, part in enumerate(mix.buffers))
    jrb.save(tmp_path, mix, states)
    want = jax.device_get(mix.sample(states, key))
    for given, device in ((None, None), (make(mesh_of(2)), None), (None, mesh_of(2)), (mix, None)):
        found, there = jrb.load(tmp_path, given, device=device)
        assert found == (given or make(device))
        chex.assert_trees_all_equal(jax.device_get(there), jax.device_get(states))
        chex.assert_trees_all_equal(jax.device_get(found.sample(there, key)), want)


@pytest.mark.parametrize("count", [2, 8])
def test_other_shards_are_made_of_those_that_were_saved(count, tmp_path):
    sharded = jrb.Sharded(BUFFER, S, mesh_of(4))
    state = filled(sharded)
    jrb.save(tmp_path, sharded, state, extra={"step": 3})
    wanted = jrb.Sharded(BUFFER, count, mesh_of(count))
    found, there, extra = jrb.load(tmp_path, wanted, extra={"step": 0})
    assert (found, extra) == (wanted, {"step": 3})
    want = jrb.rebuild(sharded, state, wanted)
    chex.assert_trees_all_equal(jax.device_get(there), jax.device_get(want))
    one, alone = jrb.load(tmp_path, BUFFER)
    assert one == BUFFER
    jrb.save(tmp_path / "one", BUFFER, alone)
    found, there = jrb.load(tmp_path / "one", wanted)
    chex.assert_trees_all_equal(jax.device_get(there.storage), jax.device_get(want.storage))


def test_in_the_background_and_with_functions_over_items(tmp_path):
    sharded = jrb.Sharded(BUFFER, S, mesh_of(4))
    state = filled(sharded)
    want = jax.device_get(state)
    save = checkpoint.save_async(tmp_path, sharded, state, encode=_halved)
    jax.jit(sharded.empty, donate_argnums=0)(state)
    save.wait()
    _, there = jrb.load(tmp_path, decode=_doubled, device=mesh_of(4))
    chex.assert_trees_all_equal(jax.device_get(there), want)


def _halved(items):
    return {**items, "observation": items["observation"] / 2}


def _doubled(items):
    return {**items, "observation": items["observation"] * 2}


def test_a_second_save_writes_what_is_new(tmp_path):
    sharded = jrb.Sharded(jrb.ReplayBuffer(2**12 * E, E), S, mesh_of(4))
    state = filled_wide(sharded)
    jrb.save(tmp_path, sharded, state)
    state = sharded.add(state, {"x": jnp.ones((E, 64))})
    written = seams.bytes_written(lambda: jrb.save(tmp_path, sharded, state))
    assert 0 < written < 0.2 * sharded.nbytes({"x": jnp.zeros(64)})


def filled_wide(sharded):
    items = {"x": np.random.default_rng(0).normal(size=(2**12 - 4, E, 64)).astype(np.float32)}
    return sharded.extend(sharded.init({"x": jnp.zeros(64)}), items)


def test_shards_that_are_missing_or_damaged_are_named(tmp_path):
    sharded = jrb.Sharded(BUFFER, S, mesh_of(4))
    state = filled(sharded)
    with small_blocks():
        jrb.save(tmp_path, sharded, state)
    file = file_of(tmp_path, "3/storage/arrays/uint32")
    damage(file, 5)
    message = f"{file.name}: leaf 'storage/.*', block 0: expected the checksum"
    with pytest.raises(jrb.checkpoint.DamagedError, match=message):
        jrb.load(tmp_path)
    (line,) = checkpoint.verify(tmp_path)
    assert file.name in line
    file.unlink()
    with pytest.raises(jrb.checkpoint.DamagedError, match=f"{file.name}: .*found none"):
        jrb.load(tmp_path)
    assert file.name in checkpoint.verify(tmp_path)[0]
    jrb.save(tmp_path, sharded, state)
    chex.assert_trees_all_equal(jax.device_get(jrb.load(tmp_path)[1]), jax.device_get(state))
    with pytest.raises(ValueError, match=r"expected a state of 4 shards"):
        jrb.save(tmp_path, sharded, BUFFER.init(EXAMPLE))


# Simulated processes: each is a thread that holds some of the shards. Only one runs at a time, so
# that the files can be copied at any operation.


class Board:
    """A board on which the simulated processes leave messages for each other."""

    def __init__(self, count):
        self.count, self.told = count, {}
        self.turn, self.changed = threading.RLock(), threading.Condition()

    def leave(self, name, text):
        with self.changed:
            self.told[name] = text
            self.changed.notify_all()

    def fetch(self, name):
        with self.changed:
            if not self.changed.wait_for(lambda: name in self.told, timeout=60):
                raise OSError(f"nobody left {name}")
            return self.told[name]


class Process(saving.ProcessGroup):
    """A simulated process that runs only while no other one does."""

    board: Board

    def all_gather_json(self, work):
        def alone():
            with self.board.turn:
                return work()

        return super().all_gather_json(alone)


def saved_by(count, path, sharded, state, monkeypatch, extra=None, background=False):
    """Saves from `count` simulated processes; returns the generation or the error of each."""
    board, local = Board(count), threading.local()
    whole = jrb.Sharded.split

    def of_this_process():
        process = Process(local.number, count, board.leave, board.fetch, "save")
        process.board = board
        return process

    def mine(sharded, state):
        each = whole(sharded, state)
        return {name: one for name, one in each.items() if name % count == local.number}

    monkeypatch.setattr(saving.ProcessGroup, "of_program", of_this_process)
    monkeypatch.setattr(jrb.Sharded, "split", mine)

    def in_turn(method):
        def alone(*arguments):
            with board.turn:
                return method(*arguments)

        return alone

    monkeypatch.setattr(saving.SaveJob, "close", in_turn(saving.SaveJob.close))
    seams.use_one_thread(monkeypatch)
    told = [None] * count

    def run(number):
        local.number = number
        try:
            job = saving.SaveJob(str(path), sharded, state, extra)
            if background:
                save = api.Save(0)
                save._begin(job)
                save.wait()
                told[number] = checkpoint.generations(path)[-1]
            else:
                told[number] = api.save_job(job, 0)
        except OSError as error:
            told[number] = error

    running = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    monkeypatch.undo()
    return told


def step(number):
    return {"step": number}


def there(path, sharded, states):
    """Returns the step of the saved state, after a check of all its leaves."""
    assert checkpoint.verify(path) == []
    _, state, extra = jrb.load(path, extra={"step": 0})
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(states[extra["step"]]))
    return extra["step"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("count", "large", "background"),
    [(2, True, False), (4, True, True), (2, False, False)],
    ids=["blocks", "background", "small"],
)
def test_processes_that_are_killed_at_any_moment_leave_the_old_or_the_new(
    count, large, background, tmp_path, monkeypatch
):
    sharded = jrb.Sharded(BUFFER, S)
    old, path = filled(sharded), tmp_path / "set"
    new = sharded.add(old, rows(np.random.default_rng(1), E))
    with small_blocks(128) if large else contextlib.nullcontext():
        save = functools.partial(saved_by, count, sharded=sharded, monkeypatch=monkeypatch)
        save = functools.partial(save, background=background)
        assert save(path=path, state=old, extra=step(0)) == [1] * count
        with seams.copied_at_each_operation(path, tmp_path) as copies:
            told = save(path=path, state=new, extra=step(1))
        assert told == [2] * count
        found = [there(one, sharded, (old, new)) for one in copies]
        assert found == sorted(found)
        assert set(found) == {0, 1}
        for one in copies[:: max(1, len(copies) // 6)]:
            save(path=one, state=new, extra=step(1))
            assert there(one, sharded, (old, new)) == 1


def test_each_process_writes_what_is_new_in_its_shards(tmp_path, monkeypatch):
    sharded = jrb.Sharded(jrb.ReplayBuffer(2**12 * E, E), S)
    state = filled_wide(sharded)
    assert saved_by(4, tmp_path, sharded, state, monkeypatch) == [1] * 4
    state = sharded.add(state, {"x": jnp.ones((E, 64))})
    told = []
    written = seams.bytes_written(
        lambda: told.extend(saved_by(4, tmp_path, sharded, state, monkeypatch))
    )
    assert told == [2] * 4
    assert 0 < written < 0.2 * sharded.nbytes({"x": jnp.zeros(64)})
    chex.assert_trees_all_equal(jax.device_get(jrb.load(tmp_path)[1]), jax.device_get(state))
    assert checkpoint.verify(tmp_path) == []
    for number in range(3, 6):  # by another number of processes, which use room again
        state = sharded.add(state, {"x": jnp.full((E, 64), float(number))})
        assert saved_by(2, tmp_path, sharded, state, monkeypatch) == [number] * 2
    chex.assert_trees_all_equal(jax.device_get(jrb.load(tmp_path)[1]), jax.device_get(state))
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.bin"))
    assert size < 1.5 * sharded.nbytes({"x": jnp.zeros(64)})
    assert checkpoint.verify(tmp_path) == []


@pytest.mark.faults
@pytest.mark.parametrize("strikes", [0, 1])
def test_a_disk_that_fails_in_one_process_fails_the_save_of_all(strikes, tmp_path, monkeypatch):
    sharded = jrb.Sharded(BUFFER, S)
    old, count, number, over = filled(sharded), 2, 0, False
    new = sharded.add(old, rows(np.random.default_rng(1), E))
    while not over:
        path, left = tmp_path / str(number), [number]
        with small_blocks(128):
            saved_by(count, path, sharded, old, monkeypatch, extra=step(0))

            def strike(operation, where, *rest, left=left):
                part = os.path.basename(where).split(".")[0]
                left[0] -= (int(part) % count if part.isdigit() else 0) == strikes
                if left[0] == -1:
                    raise OSError(28, "No space left on device")

            with seams.hooked(strike):
                told = saved_by(count, path, sharded, new, monkeypatch, extra=step(1))
            over = left[0] >= 0
            failed = [isinstance(one, OSError) for one in told]
            assert failed == [False] * count if over else any(failed)
            assert there(path, sharded, (old, new)) in ((1,) if over else (0, 1))
            assert saved_by(count, path, sharded, new, monkeypatch, extra=step(1))[0] >= 2
            assert there(path, sharded, (old, new)) == 1
        shutil.rmtree(path)
        number += 9
    assert number > 18


def test_one_that_fails_before_it_writes_says_so_to_the_others():
    board = Board(2)
    told = []

    def run(number, work):
        one = saving.ProcessGroup(number, 2, board.leave, board.fetch, "save")
        try:
            told.append(one.all_gather_json(work))
        except Exception as error:
            told.append(str(error))

    def fails():
        raise ValueError("no such leaf")

    pair = [threading.Thread(target=run, args=pair) for pair in ((0, fails), (1, lambda: 5))]
    for one in pair:
        one.start()
    for one in pair:
        one.join()
    assert sorted(told)[0] == "no such leaf"
    assert "save: process 0 of 2 failed: ValueError('no such leaf')" in sorted(told)[1]


# Arrays on several devices, and options of older descriptions.


@pytest.mark.whole
@pytest.mark.parametrize("spec", [("data",), (None, "data"), ()])
def test_bytes_are_read_from_the_device_that_has_them(spec):
    where = NamedSharding(mesh_of(4), PartitionSpec(*spec))
    array = np.random.default_rng(0).normal(size=(8, 4, 5)).astype(np.float32)
    read, want = seams.memory.reader(jax.device_put(array, where)), array.tobytes()
    rng = np.random.default_rng(1)
    for start, stop in rng.integers(0, array.size + 1, (50, 2)).tolist():
        start, stop = 4 * min(start, stop), 4 * max(start, stop)
        assert bytes(read(start, stop)) == want[start:stop]


def test_a_part_of_an_array_is_read_like_an_array():
    array = np.random.default_rng(0).integers(0, 9, (3, 4, 5), np.int32)
    part = seams.memory.Part(jnp.asarray(array), 1)
    assert (part.shape, part.ndim, part.size, part.dtype) == ((4, 5), 2, 20, jnp.int32)
    assert bytes(seams.memory.reader(part)(8, 60)) == array[1].tobytes()[8:60]
    np.testing.assert_array_equal(np.asarray(part), array[1])
    np.testing.assert_array_equal(part[2:], array[1][2:])


def test_large_leaves_of_another_device_are_saved_where_they_lie(tmp_path, monkeypatch):
    sharded = jrb.Sharded(BUFFER, S, mesh_of(2))
    state = filled(sharded)
    seams.keep_on_device(monkeypatch)
    jrb.save(tmp_path, sharded, state)
    monkeypatch.undo()
    chex.assert_trees_all_equal(jax.device_get(jrb.load(tmp_path)[1]), jax.device_get(state))


def test_an_option_that_a_part_did_not_have_is_its_default():
    node = descriptions.encode(jrb.Prioritized())
    older = {**node, "fields": {name: it for name, it in node["fields"].items() if name != "beta"}}
    assert descriptions.decode(older) == jrb.Prioritized()
    assert descriptions.drop_unbound_options(older) == descriptions.drop_unbound_options(node)


def test_an_option_that_a_part_no_longer_has_is_an_error():
    node = descriptions.encode(jrb.Sharded(BUFFER, S))
    node["fields"]["exchange"] = True
    with pytest.raises(descriptions.UnknownError, match="has other fields"):
        descriptions.decode(node)
