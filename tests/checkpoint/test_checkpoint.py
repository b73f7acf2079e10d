"""Checkpoints: a loaded state equals the saved one, and continues as the saved one would."""

import collections
import dataclasses
import errno
import fcntl
import functools
import os
import subprocess
import sys
import threading

import chex
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import authoring, checkpoint, testing, types
from jrb._store import commits
from jrb.authoring import casting
from jrb.checkpoint import api, saving
from tests import seams
from tests.small_blocks import damage, file_of, small_blocks

TED = {
    "observation": jnp.zeros(3),
    "action": jnp.int32(0),
    "next": {
        "observation": jnp.zeros(3),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}

# Tests reuse older states, so they do not donate them, which warns.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::jrb.CopyWarning")]


class Named(collections.namedtuple("Named", ["observation", "done"])):
    """An item class that the program defines."""


@chex.dataclass(frozen=True)
class Classed:
    observation: jax.Array
    done: jax.Array


def filled(rows=20, envs=3, example=TED, **parts):
    """Returns a buffer and its state after writes, a draw and, if prioritized, new priorities."""
    parts = {"capacity": 8 * (envs or 1), "num_envs": envs, "batch_size": 4, **parts}
    buffer = jrb.ReplayBuffer(**parts)
    lead = (rows,) if envs is None else (rows, envs)
    items = testing.rows(example, jnp.float32(1), *lead)
    state = buffer.extend(buffer.init(example), items)
    state, sample = buffer.draw(state, jax.random.key(0))
    if buffer.sampler.prioritized:
        state = buffer.update_priority(state, sample, jnp.array([0.5, 2.0, 3.0, 0.0]))
    return buffer, state


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(casting.raw(a)).tobytes() == np.asarray(casting.raw(b)).tobytes()


def there_and_back(path, buffer, state, layout="native", **how):
    jrb.save(path, buffer, state, layout=layout)
    got, back = jrb.load(path, **how)
    assert got == buffer
    assert_same(state, back)
    assert checkpoint.verify(path) == []
    return back


BUFFERS = {
    "uniform": {},
    "one stream": {"envs": None},
    "partial": {"rows": 5},
    "prioritized": {"sampler": jrb.Prioritized(normalize="buffer")},
    "epochs": {"sampler": jrb.WithoutReplacement()},
    "queue": {"sampler": jrb.Queue()},
    "n-step": {"unit": jrb.NStep(3, 0.9, strict=True), "sampler": jrb.Prioritized()},
    "windows": {"unit": jrb.Sequence(2, burn_in=1, partial="pad")},
    "episodes": {"unit": jrb.Sequence(2, sample_by="episodes", partial="pad")},
    "stacks": {"unit": jrb.FrameStack(2, unit=jrb.NStep(2, 0.9))},
    "once": {"storage": jrb.DeviceStorage(share_next_observations=True, terminal_capacity=24)},
    "environments": {"unit": jrb.Sequence(2)},
    "best": {"writer": jrb.MaxValue(("next", "reward")), "sampler": jrb.Prioritized()},
    "other keys": {
        "keys": jrb.Keys(observation="a", next_observation="b"),
        "example": {"a": jnp.zeros(2), "b": jnp.zeros(2)},
    },
}


@pytest.mark.parametrize("name", BUFFERS)
def test_what_comes_back_is_what_was_there(name, tmp_path):
    buffer, state = filled(**BUFFERS[name])
    there_and_back(tmp_path / "native", buffer, state)
    with small_blocks():  # the arrays move out of the generation, and back
        there_and_back(tmp_path / "native", buffer, state)
        state = buffer.empty(state)
        there_and_back(tmp_path / "native", buffer, state)
    there_and_back(tmp_path / "native", buffer, state)
    assert os.listdir(tmp_path / "native" / "arrays") == []


@pytest.mark.parametrize("name", [name for name in BUFFERS if name != "once"])
def test_an_h5_file_holds_the_same(name, tmp_path):
    buffer, state = filled(**BUFFERS[name])
    there_and_back(tmp_path / "file.h5", buffer, state, "h5")


def test_an_empty_buffer(tmp_path):
    buffer = jrb.ReplayBuffer(8, batch_size=2)
    state = buffer.init(TED)
    there_and_back(tmp_path / "native", buffer, state)
    there_and_back(tmp_path / "file.h5", buffer, state, "h5")


def test_an_h5_file_of_observations_stored_once_gives_the_same_draws(tmp_path):
    buffer, state = filled(**BUFFERS["once"])
    jrb.save(tmp_path / "file.h5", buffer, state, layout="h5")
    _, back = jrb.load(tmp_path / "file.h5")
    for number in range(5):
        key = jax.random.key(number)
        assert_same(buffer.sample(state, key), buffer.sample(back, key))
        row = testing.rows(TED, jnp.float32(number), 3)
        state, back = buffer.add(state, row), buffer.add(back, row)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("n-step", "native"), ("n-step", "h5"), ("epochs", "h5"), ("episodes", "native")],
)
def test_the_next_draws_are_those_of_an_uninterrupted_run(name, layout, tmp_path):
    buffer, state = filled(**BUFFERS[name])
    jrb.save(tmp_path / "saved", buffer, state, layout=layout)
    _, back = jrb.load(tmp_path / "saved")

    @jax.jit
    def run(state):
        def step(state, number):
            state, sample = buffer.draw(state, jax.random.key(number))
            state = buffer.add(state, testing.rows(TED, number.astype(jnp.float32), 3))
            if buffer.sampler.prioritized:
                state = buffer.update_priority(state, sample, sample.data["next"]["reward"])
            return state, sample

        return jax.lax.scan(step, state, jnp.arange(1000))

    assert_same(run(state), run(back))


@pytest.mark.parametrize("layout", ["native", "h5"])
def test_every_dtype_and_name(layout, tmp_path):
    example = {
        name: jnp.zeros(3, name)
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "uint8", "int4", "float16")
    }
    example |= {
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 2),
        "complex": jnp.zeros(2, jnp.complex64),
        "nothing": jnp.zeros((0, 3)),
        "shape": jnp.float32(0),
        "device": {"shape": jnp.int8(0)},
        "dtype": (jnp.zeros(2), [jnp.int16(0)], None),
    }
    other = example.pop("keys")
    items = testing.rows(example, jnp.float32(1), 20, 3)
    items["keys"] = jax.random.split(other[0], (20, 3, 2))
    buffer = jrb.ReplayBuffer(24, num_envs=3)
    state = buffer.extend(buffer.init({**example, "keys": other}), items)
    assert_same(jrb.load(_saved(tmp_path, buffer, state, layout))[1], state)
    if layout == "native":
        with small_blocks():
            there_and_back(tmp_path / "native", buffer, state)


def _saved(tmp_path, buffer, state, layout):
    path = tmp_path / ("file.h5" if layout == "h5" else "native")
    jrb.save(path, buffer, state, layout=layout)
    return path


def test_64_bits(tmp_path):
    with authoring.enable_x64():
        buffer, state = filled(example={"x": jnp.float64(0), "n": jnp.int64(0)}, envs=None)
        there_and_back(tmp_path, buffer, state)
    with pytest.raises(TypeError, match=r"leaf 'n'.*int64.*jax_enable_x64"):
        jrb.load(tmp_path)


@pytest.mark.parametrize("layout", ["native", "h5"])
@pytest.mark.parametrize(
    "example", [jnp.zeros(2), (jnp.zeros(2), {"a": jnp.int32(0)}), [jnp.zeros(1)]]
)
def test_items_of_any_structure(example, layout, tmp_path):
    buffer, state = filled(example=example)
    there_and_back(tmp_path / "saved", buffer, state, layout)


@pytest.mark.parametrize("cls", [Named, Classed])
def test_items_of_classes_of_the_program(cls, tmp_path):
    example = cls(observation=jnp.zeros(2), done=jnp.bool_(False))
    buffer, state = filled(example=example)
    back = there_and_back(tmp_path, buffer, state)
    assert isinstance(back.storage, cls)


def test_items_of_classes_that_are_not_there_need_an_example(tmp_path):
    class Local(collections.namedtuple("Local", ["x"])):
        pass

    buffer, state = filled(example=Local(jnp.zeros(2)))
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match="example="):
        jrb.load(tmp_path)
    there_and_back(tmp_path, buffer, state, example=Local(jnp.zeros(2)))
    with pytest.raises(ValueError, match="expected shape"):
        jrb.load(tmp_path, example=Local(jnp.zeros(3)))


def test_states_side_by_side(tmp_path):
    buffer, state = filled(**BUFFERS["n-step"])
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    there_and_back(tmp_path, buffer, states)
    with pytest.raises(ValueError, match="under vmap"):
        jrb.save(tmp_path / "file.h5", buffer, states, layout="h5")


def test_a_mix(tmp_path):
    demos, replay = filled(), filled(**BUFFERS["prioritized"])
    mix = jrb.Mix((demos[0], replay[0]), (0.25, 0.75), batch_size=8)
    there_and_back(tmp_path, mix, (demos[1], replay[1]))
    assert_same(jrb.load(tmp_path, mix)[1], (demos[1], replay[1]))


def test_functions_have_to_be_brought(tmp_path):
    buffer, state = filled(transforms=(lambda data: data,))
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match=r"buffer\.transforms\[0\].*holds no code.*buffer="):
        jrb.load(tmp_path)
    assert_same(jrb.load(tmp_path, buffer)[1], state)


def test_a_part_of_ones_own_is_found_if_it_is_defined(tmp_path, monkeypatch):
    @types.component
    class Sometimes(jrb.Uniform):
        pass

    Sometimes.__qualname__ = "Sometimes"
    monkeypatch.setitem(globals(), "Sometimes", Sometimes)
    buffer, state = filled(sampler=Sometimes())
    there_and_back(tmp_path, buffer, state)
    monkeypatch.delitem(globals(), "Sometimes")
    text = r"tests\.checkpoint\.test_checkpoint:Sometimes\. Import its module"
    with pytest.raises(ValueError, match=text):
        jrb.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ({"capacity": 48}, "native"),
        ({"capacity": 48}, "h5"),
        ({"num_envs": 4}, "native"),
        ({"sampler": jrb.Uniform()}, "h5"),
        ({"sampler": jrb.Prioritized(alpha=0.7)}, "h5"),
        ({"unit": jrb.NStep(2, 0.9)}, "native"),
    ],
    ids=str,
)
def test_another_description_gets_what_a_rebuild_in_memory_gives(change, layout, tmp_path):
    buffer, state = filled(unit=jrb.NStep(3, 0.9), sampler=jrb.Prioritized())
    path, other = _saved(tmp_path, buffer, state, layout), dataclasses.replace(buffer, **change)
    found, back = jrb.load(path, other)
    assert found == other
    assert_same(back, jrb.rebuild(buffer, state, other))


def test_another_description_is_refused_where_the_saved_one_has_functions(tmp_path):
    buffer, state = filled(transforms=(lambda data: data,))
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match=r"buffer\.capacity: expected 24 .* got 48"):
        jrb.load(tmp_path, dataclasses.replace(buffer, capacity=48))


@pytest.mark.parametrize("layout", ["native", "h5"])
def test_another_example_is_refused(layout, tmp_path):
    buffer, state = filled()
    path = _saved(tmp_path, buffer, state, layout)
    jrb.load(path, example=TED)
    with pytest.raises(ValueError, match="leaf 'observation': expected shape"):
        jrb.load(path, example={**TED, "observation": jnp.zeros(4)})
    with pytest.raises(TypeError, match="leaf 'action': expected dtype int32, got uint8"):
        jrb.load(path, example={**TED, "action": jnp.uint8(0)})
    with pytest.raises(ValueError, match="leaf 'action'"):
        jrb.load(path, example={"observation": TED["observation"], "next": TED["next"]})


def test_a_state_of_another_buffer_is_refused(tmp_path):
    buffer, state = filled()
    other = dataclasses.replace(buffer, capacity=48)
    with pytest.raises(ValueError, match="save: leaf 'storage/action': expected shape"):
        jrb.save(tmp_path / "x", other, state)
    with pytest.raises(ValueError, match="order is"):
        jrb.save(tmp_path / "x", buffer, {"a": jnp.zeros(3)})
    with pytest.raises(TypeError, match="order is"):
        jrb.save(tmp_path / "x", state, buffer)
    with pytest.raises(ValueError, match="layout"):
        jrb.save(tmp_path / "x", buffer, state, layout="zarr")
    with pytest.raises(ValueError, match="layout='h5'"):
        jrb.save(tmp_path / "x", buffer, state, compression="gzip")
    with pytest.raises(ValueError, match="keep"):
        jrb.save(tmp_path / "x", buffer, state, keep=-1)
    assert not (tmp_path / "x").exists()


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="found none there"):
        jrb.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        jrb.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        checkpoint.verify(tmp_path / "nowhere")


def test_generations(tmp_path):
    buffer, state = filled()
    for number in range(4):
        jrb.save(tmp_path, buffer, state, keep=np.int64(2))
        sizes = int(buffer.size(state))
        state = buffer.empty(state) if number == 2 else state
    assert checkpoint.generations(tmp_path) == [2, 3, 4]
    assert int(buffer.size(jrb.load(tmp_path)[1])) == 0
    assert int(buffer.size(jrb.load(tmp_path, generation=3)[1])) == 24
    assert sizes == 0
    with pytest.raises(FileNotFoundError, match=r"expected generation 1, found \[2, 3, 4\]"):
        jrb.load(tmp_path, generation=1)
    for number in (0, -1, True, "2", 2.0):
        for method in (jrb.load, checkpoint.metadata):
            with pytest.raises((TypeError, ValueError), match="generation: expected"):
                method(tmp_path, generation=number)


@pytest.mark.parametrize("once", [False, True])
def test_a_save_after_a_few_rows_writes_about_these(once, tmp_path):
    example = {"observation": jnp.zeros(256), "next": {"observation": jnp.zeros(256)}}
    buffer = jrb.ReplayBuffer(
        16_384, num_envs=2, storage=jrb.DeviceStorage(share_next_observations=once)
    )
    state = buffer.init(example)
    rows = lambda count, seed: testing.rows(example, jnp.float32(seed), count, 2)
    state = buffer.extend(state, rows(12_000, 1))
    whole = seams.bytes_written(lambda: jrb.save(tmp_path, buffer, state))
    assert whole > 0.9 * authoring.tree_nbytes(state)
    for seed in range(2, 40):
        state = buffer.extend(state, rows(20, seed))
        few = seams.bytes_written(functools.partial(jrb.save, tmp_path, buffer, state))
        assert few < 0.12 * whole
        assert (
            seams.bytes_written(functools.partial(jrb.save, tmp_path, buffer, state))
            <= 0.08 * whole
        )
        assert_same(jrb.load(tmp_path)[1], state)


def test_another_state_is_not_taken_for_the_one_before(tmp_path):
    example = {"x": jnp.zeros(5000)}
    buffer = jrb.ReplayBuffer(64)
    states = [
        buffer.extend(buffer.init(example), testing.rows(example, jnp.float32(seed), 40))
        for seed in (1, 2)
    ]
    later = buffer.extend(states[0], testing.rows(example, jnp.float32(3), 5))
    for state in (*states, later, states[0], buffer.empty(later), states[1]):
        there_and_back(tmp_path, buffer, state)


def hold_threads(go):
    """Returns a hook that blocks renames by other threads until an event is set."""

    def hold(operation, *rest):
        if operation == "replace" and threading.current_thread() is not threading.main_thread():
            go.wait(60)

    return hold


def test_a_background_save_holds_what_the_state_was(tmp_path):
    buffer, state = filled(sampler=jrb.Prioritized(), example={"x": jnp.zeros(10_000)})
    kept = jax.tree.map(jnp.copy, state)
    go = threading.Event()
    with seams.hooked(hold_threads(go)):
        try:
            save = checkpoint.save_async(tmp_path, buffer, state)
            add = jax.jit(buffer.add, donate_argnums=0)
            for number in range(9):
                state = add(state, testing.rows({"x": jnp.zeros(10_000)}, jnp.float32(number), 3))
            assert not save.done()
            with pytest.raises(checkpoint.LockedError):
                api.save_job(saving.SaveJob(str(tmp_path), buffer, kept), 0)
        finally:
            go.set()
        save.wait()
    assert_same(jrb.load(tmp_path)[1], kept)
    checkpoint.save_async(tmp_path, buffer, state)
    assert_same(jrb.load(tmp_path)[1], state)  # waits for the save


def test_what_goes_wrong_in_the_background_comes_out_at_the_next_call(tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path, buffer, state)

    def strike(operation, path, *rest):
        if operation == "replace":
            raise OSError(28, "No space left on device", path)

    def failing():
        with seams.hooked(strike):
            save = checkpoint.save_async(tmp_path, buffer, buffer.empty(state))
            while not save.done():
                pass
        return save

    failing()
    with pytest.raises(OSError, match="No space left"):
        jrb.load(tmp_path)
    assert_same(jrb.load(tmp_path)[1], state)
    with pytest.raises(OSError, match="No space left") as caught:
        failing().wait()
    assert "has not happened" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_async(tmp_path, buffer, state)
    there_and_back(tmp_path, buffer, state)


def test_an_array_of_another_device_is_read_and_written_in_pieces(tmp_path, monkeypatch):
    buffer, state = filled(example={"x": jnp.zeros(3000), "k": jax.random.key(0)})
    seams.read_in_pieces(monkeypatch, 70_000, on_device=True)
    there_and_back(tmp_path, buffer, state)


def test_a_large_array_is_read_in_place(tmp_path, monkeypatch):
    buffer, state = filled(example={"x": jnp.zeros(3000)})
    seams.read_in_pieces(monkeypatch, 70_000)
    back = there_and_back(tmp_path, buffer, state)
    again = jax.jit(buffer.add, donate_argnums=0)(
        back, testing.rows({"x": jnp.zeros(3000)}, 1.0, 3)
    )
    assert_same(again, buffer.add(state, testing.rows({"x": jnp.zeros(3000)}, 1.0, 3)))


def test_on_a_device_of_ones_choice(tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path / "native", buffer, state)
    jrb.save(tmp_path / "h5", buffer, state, layout="h5")
    device = jax.devices()[1]
    for name in ("native", "h5"):
        _, back = jrb.load(tmp_path / name, device=device)
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(back))
        assert_same(back, state)


# Migration


def contents(buffer, state):
    """Returns the numbers of the held items, oldest first, `[T, E]`."""
    held = buffer.writer.held(buffer.ring, state.writer)
    slots = (int(held.first[0]) + np.arange(int(held.size))) % buffer.capacity
    return np.asarray(buffer.take(state, slots)["action"]).reshape(-1, buffer.ring.envs)


def numbered(rows, envs, capacity, **parts):
    """Returns a buffer and a state whose actions are 100 * environment + time."""
    buffer = jrb.ReplayBuffer(capacity, num_envs=envs, batch_size=8, **parts)
    time, env = np.meshgrid(np.arange(rows), np.arange(envs), indexing="ij")
    items = {
        "observation": np.repeat((100 * env + time)[..., None], 3, axis=2).astype(np.float32),
        "action": (100 * env + time).astype(np.int32),
        "next": {
            "observation": np.repeat((100 * env + time + 1)[..., None], 3, axis=2).astype(
                np.float32
            ),
            "reward": time.astype(np.float32),
            "done": time % 7 == 6,
        },
    }
    return buffer, buffer.extend(buffer.init(TED), items)


@pytest.mark.parametrize(
    ("layout", "capacity"), [("native", 6), ("h5", 6), ("h5", 16), ("native", 60)]
)
def test_another_capacity_keeps_the_newest_rows(layout, capacity, tmp_path):
    buffer, state = numbered(25, 2, 20)
    path = _saved(tmp_path, buffer, state, layout)
    target, back = jrb.load(path, capacity=capacity)
    assert target == dataclasses.replace(buffer, capacity=capacity)
    np.testing.assert_array_equal(contents(target, back), contents(buffer, state)[-capacity // 2 :])
    row = testing.rows(TED, jnp.float32(0), 2)
    after = target.add(back, row)
    assert int(target.size(after)) == min(capacity, 22)


def test_another_capacity_keeps_priorities(tmp_path):
    buffer, state = numbered(25, 2, 20, sampler=jrb.Prioritized(alpha=0.5))
    slots = jnp.arange(20)
    state = buffer.set_alpha(buffer.update_priority(state, slots, slots + 3), 0.9)
    jrb.save(tmp_path, buffer, state)
    target, back = jrb.load(tmp_path, capacity=12)
    old = dict(
        zip(
            np.asarray(state.storage["action"]).tolist(), np.asarray(state.sampler.raw), strict=True
        )
    )
    for number, raw in zip(
        np.asarray(back.storage["action"]).tolist(), back.sampler.raw, strict=True
    ):
        assert old[number] == raw
    assert back.sampler.highest == 22.0
    assert back.sampler.alpha == jnp.float32(0.9)
    expected = (back.sampler.raw + jnp.float32(1e-6)) ** jnp.float32(0.9)
    np.testing.assert_allclose(
        target.sampler.set_alpha(back.sampler, 0.9).masses.nodes, back.sampler.masses.nodes
    )
    np.testing.assert_allclose(jrb.sum_tree.leaves(back.sampler.masses), expected, rtol=1e-6)


def test_a_queue_gives_nothing_twice_after_a_change(tmp_path):
    buffer, state = numbered(8, 1, 10, sampler=jrb.Queue())
    state, _ = buffer.draw(state, jax.random.key(0), 3)
    jrb.save(tmp_path, buffer, state)
    target, back = jrb.load(tmp_path, capacity=20)
    assert target.draw(back, jax.random.key(0), 5)[1].data["action"].tolist() == [3, 4, 5, 6, 7]


def test_the_best_stay_when_there_is_room_for_fewer(tmp_path):
    buffer, state = numbered(
        9, 2, 12, writer=jrb.MaxValue(("next", "reward")), sampler=jrb.Prioritized()
    )
    ranks = state.storage["next"]["reward"]
    state = buffer.update_priority(state, jnp.arange(12), ranks + 1)
    jrb.save(tmp_path, buffer, state)
    _, back = jrb.load(tmp_path, capacity=4)
    assert sorted(back.storage["next"]["reward"].tolist()) == [7, 7, 8, 8]
    np.testing.assert_array_equal(back.sampler.raw, back.storage["next"]["reward"] + 1)


@pytest.mark.parametrize(
    ("envs", "rows"), [(1, 1), (1, 25), (2, 4), (5, 25), (6, 4), (6, 1), (None, 25)]
)
def test_another_number_of_environments_loses_only_the_oldest_and_crosses_no_seam(
    envs, rows, tmp_path
):
    buffer, state = numbered(rows, 3, 30, unit=jrb.Sequence(3))
    jrb.save(tmp_path, buffer, state)
    target, back = jrb.load(tmp_path, num_envs=envs)
    assert target.num_envs == envs
    before, after = contents(buffer, state), contents(target, back)
    assert set(after.ravel()) <= set(before.ravel())
    assert after.size == before.size // (envs or 1) * (envs or 1)
    assert len(set(after.ravel())) == after.size
    row = testing.rows(TED, jnp.float32(500), *(() if envs is None else (envs,)))
    row["action"] = row["action"] * 0 + 9999
    back = target.add(back, row)
    if bool(target.can_sample(back)):
        for number in range(4):
            sample = target.sample(back, jax.random.key(number))
            windows = np.asarray(sample.data["action"])
            np.testing.assert_array_equal(np.diff(windows), np.ones_like(windows[:, 1:]))


def test_only_a_single_buffer_changes_its_size(tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path, buffer, jax.tree.map(lambda leaf: leaf[None], state))
    with pytest.raises(TypeError, match="single buffer"):
        jrb.load(tmp_path, capacity=48)
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match="nearest are 24 or 27"):
        jrb.load(tmp_path, capacity=25)


# HDF5


def test_an_h5_file_is_read_without_us(tmp_path):
    buffer, state = numbered(9, 2, 20)
    path = tmp_path / "file.h5"
    jrb.save(path, buffer, state, layout="h5", compression="gzip")
    with h5py.File(path) as file:
        first = file["trajectories/000000"]
        assert first["action"][:].tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert first["observation"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert first["next/done"][:].tolist() == [False] * 6 + [True]
        assert first["action"].compression == "gzip"
        assert [group.attrs["environment"] for group in file["trajectories"].values()] == [
            0,
            0,
            1,
            1,
        ]
        assert file["state/writer/cursor"][()] == 9
    assert_same(jrb.load(path)[1], state)
    assert not list(tmp_path.glob("*.new"))


def test_damage_to_an_h5_file_is_noticed(tmp_path):
    buffer, state = filled(**BUFFERS["n-step"])
    path = tmp_path / "file.h5"
    jrb.save(path, buffer, state, layout="h5")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    noticed = 0
    for place in rng.integers(0, len(whole), 60):
        data = bytearray(whole)
        data[place] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        try:
            assert_same(jrb.load(path)[1], state)
        except (ValueError, TypeError):
            noticed += 1
    assert noticed
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoint.DamagedError):
            jrb.load(path)
        assert checkpoint.verify(path)
    with h5py.File(path, "w") as file:
        file["x"] = 1
    with pytest.raises(ValueError, match="not a jrb checkpoint"):
        jrb.load(path)


def test_hdf5_never_sees_a_damaged_file(tmp_path, monkeypatch):
    buffer, state = numbered(9, 2, 20)
    path = tmp_path / "file.h5"
    jrb.save(path, buffer, state, layout="h5")
    whole, rng = path.read_bytes(), np.random.default_rng(1)

    def opened(*_, **__):
        raise AssertionError("opened")

    monkeypatch.setattr(h5py, "File", opened)
    for place in rng.integers(0, len(whole) - 20, 30):
        data = bytearray(whole)
        data[place] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        with pytest.raises(checkpoint.DamagedError, match="its bytes were damaged"):
            jrb.load(path)
        assert "its bytes were damaged" in checkpoint.verify(path)[0]


def test_an_h5_file_that_another_program_has_changed_is_refused(tmp_path):
    buffer, state = numbered(9, 2, 20)
    path = tmp_path / "file.h5"
    jrb.save(path, buffer, state, layout="h5")
    with h5py.File(path, "r+") as file:
        file["trajectories/000001/action"][0] = 77
    with pytest.raises(checkpoint.DamagedError, match="another program has changed it"):
        jrb.load(path)
    assert "another program has changed it" in checkpoint.verify(path)[0]


def test_an_h5_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    buffer, state = filled()
    path = tmp_path / "file.h5"
    jrb.save(path, buffer, state, layout="h5")

    def strike(operation, place, *rest):
        if operation == "replace":
            raise OSError(28, "No space left on device")

    with seams.hooked(strike), pytest.raises(OSError, match="No space left"):
        jrb.save(path, buffer, buffer.empty(state), layout="h5")
    assert_same(jrb.load(path)[1], state)
    assert os.listdir(tmp_path) == ["file.h5"]
    with open(tmp_path / ".file.h5.jrb-new", "w") as file:  # as if another process saved there
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(checkpoint.LockedError):
            jrb.save(path, buffer, state, layout="h5")


def test_a_killed_h5_save_leaves_a_file_that_the_next_one_takes_over(tmp_path):
    buffer, state = filled()
    path = tmp_path / "file.h5"
    jrb.save(path, buffer, state, layout="h5")
    (tmp_path / ".file.h5.jrb-new").write_bytes(b"half of it")
    assert_same(jrb.load(path)[1], state)
    there_and_back(path, buffer, state, "h5")
    assert os.listdir(tmp_path) == ["file.h5"]


def change_meta(path, change):
    """Changes the newest generation's metadata, with valid checksums."""
    folder = commits.open_folder(str(path))
    opened = commits.open_newest(folder)
    change(opened.generation.meta)
    commits.write_generation(folder, opened.generation)
    opened.close()


@pytest.mark.faults
@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "jrb.ring:Held", "no.such:Thing"]
)
def test_a_file_cannot_make_the_program_call_anything(name, tmp_path):
    buffer, state = filled(example=Named(jnp.zeros(1), jnp.bool_(False)))
    jrb.save(tmp_path, buffer, state)
    change_meta(tmp_path, lambda meta: meta["buffer"]["fields"]["sampler"].update(part=name))
    with pytest.raises(ValueError, match="expected a part that this program has defined"):
        jrb.load(tmp_path)
    jrb.save(tmp_path, buffer, state)
    change_meta(tmp_path, lambda meta: meta["items"].update({"class": name}))
    with pytest.raises(ValueError, match="expected the class"):
        jrb.load(tmp_path)


def test_a_store_of_another_kind_is_refused(tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path, buffer, state)
    change_meta(tmp_path, lambda meta: meta.update(kind="parameters"))
    with pytest.raises(ValueError, match="kind 'parameters'"):
        jrb.load(tmp_path)


@pytest.mark.parametrize(("version", "cure"), [(5, "load it with that one"), (7, "install it")])
def test_another_version_is_refused_by_name_and_not_overwritten(version, cure, tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path, buffer, state)
    file = tmp_path / "generation-000000000001"
    head, _, rest = file.read_bytes().partition(b"\n")
    other = head.replace(b'"version":6', b'"version":%d' % version) + b"\n" + rest
    file.write_bytes(other)
    message = f"{file.name}: expected version 6 of the format, got version {version}.*{cure}"
    for read in (jrb.load, checkpoint.metadata):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    with pytest.raises(ValueError, match=message):
        jrb.save(tmp_path, buffer, state)
    assert file.read_bytes() == other


def test_a_capacity_that_the_files_do_not_hold_is_refused(tmp_path):
    buffer, state = filled(envs=None, capacity=8)
    jrb.save(tmp_path, buffer, state)
    change_meta(tmp_path, lambda meta: meta["buffer"]["fields"].update(capacity=2**31 - 1))
    with pytest.raises(
        ValueError, match=r"leaf 'storage/action'.*: expected .* of 60129542116 bytes"
    ):
        jrb.load(tmp_path)
    with small_blocks():
        jrb.save(tmp_path, buffer, state)
    change_meta(tmp_path, lambda meta: meta["buffer"]["fields"].update(capacity=2**31 - 1))
    with pytest.raises(
        ValueError, match=r"leaf 'storage/action'.*: expected .* of 60129542116 bytes"
    ):
        jrb.load(tmp_path)


def test_a_program_that_ends_waits_for_its_saves(tmp_path):
    script = """
import sys, threading, jax.numpy as jnp, jrb
from tests import seams
def hook(name, *rest):
    if name == "replace" and threading.current_thread() is not threading.main_thread():
        threading.main_thread().join()
seams.set_hook(hook)
buffer = jrb.ReplayBuffer(1000)
jrb.checkpoint.save_async(sys.argv[1], buffer, buffer.init({"x": jnp.zeros(5000)}))
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "saved")], check=True)
    assert checkpoint.verify(tmp_path / "saved") == []


def test_flipped_bits_name_the_leaf_and_the_block(tmp_path):
    buffer, state = filled(example={"x": jnp.zeros(30_000)})
    jrb.save(tmp_path, buffer, state)
    file = file_of(tmp_path, "storage/x")
    whole = file.read_bytes()
    damage(file, 700_000, 4)
    message = rf"{file.name}: leaf 'storage/x', block 2: expected the checksum"
    with pytest.raises(checkpoint.DamagedError, match=message):
        jrb.load(tmp_path)
    assert len(checkpoint.verify(tmp_path)) == 1
    file.write_bytes(whole[:-1])
    with pytest.raises(checkpoint.DamagedError, match=rf"{file.name}: "):
        jrb.load(tmp_path)
    assert len(checkpoint.verify(tmp_path)) == 1
    file.unlink()
    with pytest.raises(checkpoint.DamagedError, match="leaf 'storage/x': expected a file"):
        jrb.load(tmp_path)
    there_and_back(tmp_path, buffer, state)  # a save does not rely on what was damaged


def test_flipped_bits_of_a_small_array_name_the_generation(tmp_path):
    buffer, state = filled()
    jrb.save(tmp_path, buffer, state)
    file = tmp_path / "generation-000000000001"
    damage(file, len(file.read_bytes()) - 1)
    message = rf"{file.name}: array '.*': expected the checksum"
    with pytest.raises(checkpoint.DamagedError, match=message):
        jrb.load(tmp_path)
    assert len(checkpoint.verify(tmp_path)) == 1
    there_and_back(tmp_path, buffer, state)


def rerun(buffer, seed, rows):
    """Returns items of a run with this seed; most leaves have few different values."""
    rng = np.random.default_rng(seed)
    done, reward = rng.random(rows) < 0.01, (rng.random(rows) < 0.02).astype(np.float32)
    items = {**TED, "observation": rng.normal(size=(rows, 3)).astype(np.float32)}
    items["action"] = rng.integers(0, 4, rows).astype(np.int32)
    after = rng.normal(size=(rows, 3)).astype(np.float32)
    items["next"] = {"observation": after, "reward": reward, "done": done}
    return items


def test_another_run_with_the_same_clock_is_not_mixed_with_the_one_before(tmp_path):
    buffer = jrb.ReplayBuffer(20_000)
    for seed in range(3):
        there_and_back(tmp_path, buffer, buffer.extend(buffer.init(TED), rerun(buffer, seed, 4000)))


def test_going_on_from_an_older_generation_is_not_mixed_with_what_came_after(tmp_path):
    buffer = jrb.ReplayBuffer(100_000)
    state = buffer.extend(buffer.init(TED), rerun(buffer, 0, 1000))
    jrb.save(tmp_path, buffer, state, keep=3)
    jrb.save(tmp_path, buffer, buffer.extend(state, rerun(buffer, 1, 80_000)), keep=3)
    _, state = jrb.load(tmp_path, generation=1)
    state = buffer.extend(state, rerun(buffer, 2, 80_000))
    state = buffer.extend(state, rerun(buffer, 3, 1000))
    there_and_back(tmp_path, buffer, state)


def test_large_arrays_of_another_run_are_noticed(tmp_path):
    example = {"done": jnp.bool_(False)}
    buffer = jrb.ReplayBuffer(1_000_000)
    rng = np.random.default_rng(0)
    for _ in range(3):
        rows = {"done": rng.random(700_000) < 0.01}
        there_and_back(tmp_path, buffer, buffer.extend(buffer.init(example), rows))


@pytest.mark.parametrize("capacity", [10, 14])
def test_stacks_that_a_smaller_ring_cuts_are_not_drawn(capacity, tmp_path):
    unit, sampler = jrb.FrameStack(3), jrb.WithoutReplacement()
    buffer = jrb.ReplayBuffer(40, unit=unit, sampler=sampler, batch_size=64)
    count = np.arange(15, dtype=np.float32)
    items = {"observation": count, "next": {"observation": count + 1, "done": count == 11}}
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], items)), items)
    jrb.save(tmp_path, buffer, state)
    target, back = jrb.load(tmp_path, capacity=capacity)
    sample = target.sample(back, jax.random.key(0))
    first = 15 - capacity
    stacks = sorted(map(tuple, np.asarray(sample.data["observation"])[np.asarray(sample.mask)]))
    want = [(k - 2, k - 1, k) for k in range(first + 2, 12)]
    want += [(12, 12, 12), (12, 12, 13), (12, 13, 14)]
    assert stacks == sorted(want)
    dump = checkpoint.Dump(items, {"cursor": 0, "full": True, "num_envs": None})
    sample = buffer.sample(dump.into(buffer), jax.random.key(0))
    assert (np.asarray(sample.data["observation"])[np.asarray(sample.mask)][:, 0] >= 0).all()
    assert int(sample.mask.sum()) == 13


def test_what_cannot_be_dealt_out_anew_is_refused(tmp_path):
    buffer, state = numbered(8, 2, 20, unit=jrb.FrameStack(2))
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match="FrameStack"):
        jrb.load(tmp_path, num_envs=4)
    buffer, state = numbered(8, 2, 20, sampler=jrb.Queue())
    jrb.save(tmp_path, buffer, state)
    with pytest.raises(ValueError, match="Queue"):
        jrb.load(tmp_path, num_envs=None)
    state, _ = buffer.draw(state, jax.random.key(0), 16)
    jrb.save(tmp_path, buffer, state)
    target, back = jrb.load(tmp_path, num_envs=None)
    assert int(target.size(back)) == 16
    assert not bool(target.can_sample(back))


def test_the_best_of_a_dump_are_kept_and_their_priorities_refused():
    buffer = jrb.ReplayBuffer(4, writer=jrb.MaxValue("r"), sampler=jrb.Prioritized())
    items = {"r": np.array([9, 8, 1, 2, 3, 4], np.float32)}
    info = {"cursor": 0, "full": True, "num_envs": None}
    state = checkpoint.Dump(items, info).into(buffer)
    assert sorted(state.storage["r"].tolist()) == [3, 4, 8, 9]
    with pytest.raises(ValueError, match="MaxValue"):
        checkpoint.Dump(items, {**info, "priorities": items["r"]}).into(buffer)


def test_a_background_save_goes_where_it_was_sent(tmp_path, monkeypatch):
    buffer, state = filled()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    go = threading.Event()
    with seams.hooked(hold_threads(go)):
        try:
            save = checkpoint.save_async("saved", buffer, state)
            monkeypatch.chdir(tmp_path / "elsewhere")
        finally:
            go.set()
        save.wait()
    assert checkpoint.generations(tmp_path / "saved") == [1]
    assert_same(jrb.load(tmp_path / "saved")[1], state)


def test_generations_are_numbered_on_after_damage(tmp_path):
    buffer, state = filled()
    for _ in range(3):
        jrb.save(tmp_path, buffer, state, keep=5)
    (tmp_path / "generation-000000000003").write_text("{")
    state = buffer.empty(state)
    jrb.save(tmp_path, buffer, state, keep=5)
    jrb.save(tmp_path, buffer, state, keep=5)
    assert checkpoint.generations(tmp_path) == [1, 2, 3, 4, 5]
    assert int(buffer.size(jrb.load(tmp_path, generation=4)[1])) == 0
    assert int(buffer.size(jrb.load(tmp_path, generation=2)[1])) == 24


def test_what_cannot_be_saved_is_said(tmp_path):
    buffer, state = filled()
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda state: jrb.save(tmp_path / "x", buffer, state))(state)
    gone = jax.tree.map(jnp.copy, state)
    jax.jit(buffer.add, donate_argnums=0)(gone, testing.rows(TED, jnp.float32(0), 3))
    with pytest.raises(ValueError, match="donated"):
        jrb.save(tmp_path / "x", buffer, gone)
    with pytest.raises(TypeError, match="leaf 'writer/cursor': expected an array, got int"):
        jrb.save(tmp_path / "x", buffer, state.replace(writer=state.writer.replace(cursor=1)))
    mix = jrb.Mix((buffer, buffer), (0.5, 0.5))
    with pytest.raises(ValueError, match="tuple of 2 states"):
        jrb.save(tmp_path / "x", mix, (state, state, state))
    with pytest.raises(TypeError, match="path"):
        jrb.save(3, buffer, state)
    with pytest.raises(ValueError, match="keep"):
        jrb.save(tmp_path / "x.h5", buffer, state, layout="h5", keep=2)
    assert os.listdir(tmp_path) == []
    jrb.save(tmp_path / "new" / "x.h5", buffer, state, layout="h5")
    with pytest.raises(ValueError, match="generation"):
        jrb.load(tmp_path / "new" / "x.h5", generation=1)
    with pytest.raises(TypeError, match=r"load\(path, buffer\)"):
        jrb.load(tmp_path / "new" / "x.h5", state)


def test_an_h5_file_takes_any_name(tmp_path):
    example = {".": jnp.zeros(1), "item": {"a/b": jnp.int32(0), "%": jnp.int32(0)}, "": jnp.int8(0)}
    example |= {"a/": jnp.zeros(2), "a": {"": jnp.zeros(3), "..": (jnp.bool_(False),)}, "é": 0.0}
    buffer, state = filled(example=example)
    there_and_back(tmp_path / "file.h5", buffer, state, "h5")
    there_and_back(tmp_path / "native", buffer, state)
    own = tmp_path / "own"
    buffer, state = filled(example=example | {"A": 0, "x" * 300: 0}, storage=jrb.MemmapStorage(own))
    jrb.save(own, buffer, state)
    assert_same(jrb.items(*jrb.load(own)), jrb.items(buffer, state))
    assert checkpoint.verify(own) == []


def test_older_generations_of_a_mix_stay_as_long_as_asked(tmp_path):
    one = jrb.ReplayBuffer(8, storage=jrb.DeviceStorage())
    mix = jrb.Mix((one, dataclasses.replace(one, capacity=4)), (0.5, 0.5), batch_size=4)
    states = mix.init({"x": jnp.zeros(2)})
    jrb.save(tmp_path, one, states[0])  # the path held a single buffer before
    for number in range(5):
        rows = {"x": jnp.full((2, 2), float(number))}
        states = tuple(b.extend(s, rows) for b, s in zip(mix.buffers, states, strict=True))
        assert jrb.save(tmp_path, mix, states, keep=1) == number + 2
        if number == 3:
            before = states
    assert checkpoint.generations(tmp_path) == [5, 6]
    assert_same(jrb.load(tmp_path)[1], states)
    assert_same(jrb.load(tmp_path, generation=5)[1], before)
    assert checkpoint.verify(tmp_path) == []
    checkpoint.save_async(tmp_path, mix, before).wait()
    assert_same(jrb.load(tmp_path)[1], before)


@pytest.mark.faults
def test_a_link_to_a_file_in_hdf5_stays_a_link(tmp_path):
    buffer, state = filled()
    link, path = tmp_path / "latest", tmp_path / "disk" / "file.h5"
    jrb.save(path, buffer, buffer.empty(state), layout="h5")
    link.symlink_to(path)
    jrb.save(link, buffer, state, layout="h5")
    assert link.is_symlink()
    assert_same(jrb.load(path)[1], state)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_disk_that_fails_under_hdf5_leaves_the_file_that_was_there(compression, tmp_path):
    buffer, state = filled(example={"x": jnp.zeros(5000)})
    path = tmp_path / "file.h5"
    jrb.save(path, buffer, state, layout="h5")
    seen, fatal = [], [-1]

    def strike(operation, *rest):
        if operation in ("create", "pwrite", "fsync"):
            seen.append(operation)
            if len(seen) == fatal[0]:
                raise OSError(errno.ENOSPC, "No space left on device")

    save = lambda: jrb.save(path, buffer, buffer.empty(state), layout="h5", compression=compression)
    with seams.hooked(strike):
        save()
        total = len(seen) - 1  # without the sync of the folder, after the rename
        jrb.save(path, buffer, state, layout="h5")
        for fatal[0] in range(1, total + 1):
            seen.clear()
            with pytest.raises(OSError, match="No space left"):
                save()
            assert os.listdir(tmp_path) == ["file.h5"]
            assert checkpoint.verify(path) == []
    assert total >= 4
    assert_same(jrb.load(path)[1], state)


@pytest.mark.faults
@pytest.mark.parametrize("piece", [1, 7, 64, 1000])
@pytest.mark.parametrize("layout", ["native", "h5"])
def test_verify_reads_by_pieces_of_any_size(layout, piece, tmp_path, monkeypatch):
    items = {"wide": jnp.arange(60.0).reshape(20, 3), "x": jnp.arange(20)}
    buffer = jrb.ReplayBuffer(30, sampler=jrb.Prioritized())
    state = buffer.extend(buffer.init({"wide": jnp.zeros(3), "x": 0}), items)
    path = tmp_path / "a"
    seams.verify_in_pieces(monkeypatch, piece)
    with small_blocks(piece):
        jrb.save(path, buffer, state, layout=layout)
    shares = []
    assert jrb.checkpoint.verify(path, shares.append) == []
    assert shares == sorted(shares)
    assert shares[-1] == 1
    file = path if layout == "h5" else file_of(path, "storage/arrays/uint32")
    damage(file, file.read_bytes().find(np.float32(40).tobytes()))
    (line,) = jrb.checkpoint.verify(path)
    assert "checksum" in line
