"""Observations that are stored once are read as they were written."""

import functools
import itertools
import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests.reference import OnceModel
from tests.units.streams import EXAMPLE, KEY, Stream, arrays, commands, pick

pytestmark = pytest.mark.slow

RINGS = [(1, 1, 1), (5, 1, 1), (4, 2, 2), (6, 2, 12), (9, 3, 4)]


@functools.lru_cache
def compiled(rows, envs, room, sampler):
    buffer = jrb.ReplayBuffer(
        rows * envs,
        num_envs=envs,
        batch_size=rows * envs,
        sampler=sampler,
        storage=jrb.DeviceStorage(share_next_observations=True, terminal_capacity=room),
    )
    return buffer, *map(jax.jit, (buffer.add, buffer.extend, buffer.sample, buffer.empty))


def played(rows, envs, room, calls, sampler=None):
    """The state and the model after the calls, checked after each."""
    sampler = sampler or jrb.Uniform(replacement=False)
    buffer, add, extend, sample, empty = compiled(rows, envs, room, sampler)
    state, model, stream = buffer.init(EXAMPLE), OnceModel(rows, envs, room), Stream(envs)
    for method, dones, mask in calls:
        if method == "empty":
            state, stream = empty(state), Stream(envs)
            model.empty()
            continue
        written = [stream.row(flags) for flags in dones]
        items = arrays(written)
        if method == "add":
            state = add(state, jax.tree.map(lambda leaf: leaf[0], items), mask[0])
        else:
            state = extend(state, items, mask)
        for row, is_written in zip(written, mask, strict=True):
            model.add(row, is_written)
        assert int(buffer.size(state)) == len(model.held) * envs
    return buffer, state, sample, model


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=30)
def test_every_item_comes_back_and_rows_leave_only_for_room(data):
    rows, envs, room = data.draw(st.sampled_from(RINGS[:2] + RINGS[3:]))
    calls = data.draw(commands(envs, rows))
    _, state, sample, model = played(rows, envs, room, calls)
    drawn = jax.tree.map(np.asarray, sample(state, KEY))
    want = {item["action"]: item for row in model.held for item in row}
    assert sorted(drawn.data["action"][drawn.mask].tolist()) == sorted(want)
    for b in np.flatnonzero(drawn.mask):
        item = want[int(drawn.data["action"][b])]
        assert pick(drawn, "data/observation/frame")[b] == item["frame"]
        assert pick(drawn, "data/next/observation/frame")[b] == item["after"]
        assert drawn.data["next"]["observation"]["goal"][b] == item["after"]
        assert drawn.data["next"]["reward"][b] == item["reward"]


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=30)
def test_priorities_leave_with_the_rows_that_leave_early(data):
    rows, envs, room = data.draw(st.sampled_from(RINGS[::2]))
    calls = data.draw(commands(envs, rows))
    _, state, sample, model = played(rows, envs, room, calls, jrb.Prioritized())
    raw = np.asarray(state.sampler.raw)
    assert (raw >= 0).sum() == len(model.held) * envs
    drawn = jax.tree.map(np.asarray, sample(state, KEY))
    actions = {item["action"] for row in model.held for item in row}
    assert set(drawn.data["action"][drawn.mask].tolist()) <= actions
    assert (np.asarray(jrb.sum_tree.leaves(state.sampler.masses)) > 0).sum() == (raw >= 0).sum()


@pytest.mark.parametrize("dtype", ["uint8", "bool", "bfloat16", "float8_e4m3fn", "float32", "int4"])
def test_any_dtype_is_compared_bit_by_bit(dtype):
    buffer = jrb.ReplayBuffer(
        4,
        storage=jrb.DeviceStorage(share_next_observations=True, terminal_capacity=1),
        batch_size=4,
    )
    spec = jax.ShapeDtypeStruct((2,), jnp.dtype(dtype))
    state = buffer.init({"observation": spec, "next": {"observation": spec}})
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.integers(0, 2, 2)).astype(dtype) for _ in range(5)]
    for now, after in itertools.pairwise(values):
        state = buffer.add(state, {"observation": now, "next": {"observation": after}})
    held = buffer.take(state, jnp.arange(4))
    for slot in range(4):
        assert (held["observation"][slot] == values[slot]).all()
        assert (held["next"]["observation"][slot] == values[slot + 1]).all()
    assert int(state.storage.count) == 0  # each is the observation of the next row


def test_nan_is_itself_and_minus_zero_is_not_zero():
    buffer = jrb.ReplayBuffer(
        4,
        storage=jrb.DeviceStorage(share_next_observations=True, terminal_capacity=2),
        batch_size=4,
    )
    state = buffer.init({"observation": jnp.zeros(()), "next": {"observation": jnp.zeros(())}})
    for now, after in [(1.0, jnp.nan), (jnp.nan, 0.0), (-0.0, 1.0)]:
        item = {"observation": jnp.float32(now), "next": {"observation": jnp.float32(after)}}
        state = buffer.add(state, item)
    assert int(state.storage.count) == 1
    after = np.asarray(buffer.take(state, jnp.arange(3))["next"]["observation"])
    assert np.isnan(after[0])
    assert not np.signbit(after[1])


def test_keys_of_random_numbers_are_observations_too():
    buffer = jrb.ReplayBuffer(
        3,
        storage=jrb.DeviceStorage(share_next_observations=True, terminal_capacity=1),
        batch_size=4,
    )
    keys = jax.random.split(jax.random.key(3), 4)
    state = buffer.init({"observation": keys[0], "next": {"observation": keys[0]}})
    for now, after in itertools.pairwise(keys):
        state = buffer.add(state, {"observation": now, "next": {"observation": after}})
    after = buffer.take(state, jnp.arange(3))["next"]["observation"]
    assert (jax.random.key_data(after) == jax.random.key_data(keys[1:])).all()


def test_it_takes_about_half_the_memory():
    spec = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)
    example = {"observation": spec, "next": {"observation": spec, "done": jnp.bool_(False)}}
    plain = jrb.ReplayBuffer(10_000, num_envs=8)
    once = jrb.ReplayBuffer(
        10_000, num_envs=8, storage=jrb.DeviceStorage(share_next_observations=True)
    )
    assert plain.nbytes(example) / once.nbytes(example) > 1.9


def test_episodes_of_50_steps_never_shorten_the_ring():
    envs, rows = 2, 320
    buffer = jrb.ReplayBuffer(
        envs * rows, num_envs=envs, storage=jrb.DeviceStorage(share_next_observations=True)
    )
    number, zero = jnp.int32(0), jnp.zeros(())
    example = {"observation": number, "next": {"observation": number, "reward": zero}}
    state = buffer.init(example)
    time = np.arange(3 * rows)[:, None] + np.array([0, 25])
    after = np.where(time % 50 == 49, -1, time + 1)
    see = lambda values: jnp.asarray(values, jnp.int32)
    items = {
        "observation": see(time),
        "next": {"observation": see(after), "reward": jnp.zeros(time.shape)},
    }
    for first in range(0, len(time), 96):
        state = buffer.extend(
            state, jax.tree.map(operator.itemgetter(slice(first, first + 96)), items)
        )
        assert int(buffer.size(state)) == min(first + 96, rows) * envs
    held = buffer.take(state, jnp.arange(envs * rows))
    now, after = np.asarray(held["observation"]), np.asarray(held["next"]["observation"])
    assert (after == np.where(now % 50 == 49, -1, now + 1)).all()


def test_what_cannot_be_shared_is_refused():
    storage = jrb.DeviceStorage(share_next_observations=True)
    with pytest.raises(ValueError, match=r"expected leaves at 'next/observation'.*'next/reward'"):
        jrb.ReplayBuffer(4, storage=storage).init({"next": {"reward": jnp.zeros(())}})
    with pytest.raises(ValueError, match="in the order of time, got MaxValue"):
        jrb.ReplayBuffer(4, storage=storage, writer=jrb.MaxValue("observation"))
    buffer = jrb.ReplayBuffer(
        8, num_envs=4, storage=jrb.DeviceStorage(share_next_observations=True, terminal_capacity=2)
    )
    with pytest.raises(ValueError, match="at least one for each of 4"):
        buffer.init({"observation": jnp.zeros(2), "next": {"observation": jnp.zeros(2)}})


@pytest.mark.parametrize("once", [False, True])
def test_gradients_stop_at_the_storage(once):
    buffer = jrb.ReplayBuffer(
        4, batch_size=2, storage=jrb.DeviceStorage(share_next_observations=once)
    )
    blank = jnp.zeros(2)
    example = {"observation": blank, "action": blank, "next": {"observation": blank}}
    state = buffer.init(example)

    def total(weight):
        item = jax.tree.map(lambda leaf: leaf + weight, example)
        data = buffer.sample(buffer.add(state, item), KEY).data
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(data))

    assert float(jax.grad(total)(1.0)) == 0.0
