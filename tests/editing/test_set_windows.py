"""`set` with a sample of windows writes only real rows that are still stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

ENVS, ROWS, L = 2, 8, 3
ITEM = {
    "observation": np.zeros(2, np.float32),
    "latent": np.zeros(4, np.float32),
    "number": np.int32(0),
    "next": {"done": np.bool_(False), "reward": np.float32(0)},
}


def rows(start, count, ends=()):
    numbers = np.arange(start * ENVS, (start + count) * ENVS, dtype=np.int32).reshape(count, ENVS)
    done = np.isin(np.arange(start, start + count), ends)[:, None] | np.zeros((1, ENVS), bool)
    return {
        "observation": np.stack([numbers] * 2, -1).astype(np.float32),
        "latent": np.zeros((count, ENVS, 4), np.float32),
        "number": numbers,
        "next": {"done": done, "reward": numbers.astype(np.float32)},
    }


def made(unit, count=6, ends=(), **parts):
    buffer = jrb.ReplayBuffer(ROWS * ENVS, num_envs=ENVS, batch_size=16, unit=unit, **parts)
    return buffer, buffer.extend(buffer.init(ITEM), rows(0, count, ends))


def latents_of(sample, length=None):
    """Returns a different value for each row of the batch, `[B, L, 4]`."""
    shape = sample.mask.shape if length is None else (sample.mask.shape[0], length)
    values = 1 + np.arange(np.prod(shape), dtype=np.float32).reshape(*shape, 1)
    return np.broadcast_to(values, (*shape, 4)).copy()


def expected(buffer, state, numbers, mask, values):
    """Returns the expected latents by slot: the last value given for each real, stored row."""
    held = np.asarray(buffer.take(state, jnp.arange(buffer.capacity))["number"])
    latents = np.asarray(buffer.take(state, jnp.arange(buffer.capacity))["latent"]).copy()
    for number, real, value in zip(
        numbers.reshape(-1), mask.reshape(-1), values.reshape(-1, 4), strict=True
    ):
        if real:
            latents[held == number] = value
    return latents


UNITS = {
    "windows": jrb.Sequence(L),
    "padded": jrb.Sequence(L, partial="pad"),
    "burn-in": jrb.Sequence(L, burn_in=2),
    "across": jrb.Sequence(L, cross_episodes=True),
    "whole": jrb.Sequence(L, sample_by="whole_episodes"),
    "stacks": jrb.FrameStack(2, unit=jrb.Sequence(L, burn_in=1, partial="pad")),
}


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize(
    "later", [0, 5, *(pytest.param(later, marks=pytest.mark.slow) for later in (3, 9))]
)
def test_real_rows_that_are_still_there_are_written(unit, later):
    buffer, state = made(unit, 11, ends=(1, 4, 8))  # windows wrap around the end of the ring
    sample = buffer.sample(state, jax.random.key(0))
    state = buffer.extend(state, rows(11, later)) if later else state
    values, numbers = latents_of(sample), np.asarray(sample.data["number"])
    want = expected(buffer, state, numbers, np.asarray(sample.mask), values)
    assert later > 3 or (want != 0).any()
    for set_ in (buffer.set, jax.jit(buffer.set)):
        after = set_(state, sample, {"latent": jnp.asarray(values)})
        found = buffer.take(after, jnp.arange(buffer.capacity))
        np.testing.assert_array_equal(found["latent"], want)
        before = buffer.take(state, jnp.arange(buffer.capacity))
        np.testing.assert_array_equal(found["observation"], before["observation"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        {"storage": jrb.DeviceStorage()},
        {"storage": "memmap"},
        {"writer": jrb.PerEnvironment()},
        {"sampler": jrb.Prioritized()},
    ],
    ids=["runs", "files", "lanes", "priorities"],
)
def test_every_storage_writer_and_sampler_takes_them(parts, tmp_path):
    if parts.get("storage") == "memmap":
        parts = {"storage": jrb.MemmapStorage(str(tmp_path / "rows"))}
    buffer, state = made(jrb.Sequence(L, burn_in=1, slots=True), 11, ends=(4,), **parts)
    sample = buffer.sample(state, jax.random.key(1))
    state = buffer.extend(state, rows(11, 4))
    values, numbers = latents_of(sample), np.asarray(sample.data["number"])
    want = expected(buffer, state, numbers, np.asarray(sample.mask), values)
    state = buffer.set(state, sample, {"latent": jnp.asarray(values)})
    found = buffer.take(state, jnp.arange(buffer.capacity))["latent"]
    np.testing.assert_array_equal(found, want)
    if buffer.sampler.prioritized:
        state = buffer.update_priority(state, sample, jnp.full(sample.mask.shape, 7.0))
        assert (np.asarray(buffer.priorities(state)) == 7).any()


def test_rows_may_be_given_without_burn_in_and_anchors_by_themselves():
    buffer, state = made(jrb.Sequence(L, burn_in=2), 8)
    sample = buffer.sample(state, jax.random.key(0))
    values, numbers = latents_of(sample, L), np.asarray(sample.data["number"])[:, 2:]
    mask = np.asarray(sample.mask)[:, 2:]
    want = expected(buffer, state, numbers, mask, values)
    after = buffer.set(state, sample, {"latent": jnp.asarray(values)})
    found = buffer.take(after, jnp.arange(buffer.capacity))["latent"]
    np.testing.assert_array_equal(found, want)
    after = buffer.set(state, sample, {"latent": jnp.asarray(values[:, 0])})
    want = expected(buffer, state, numbers[:, 0], mask[:, 0], values[:, 0])
    found = buffer.take(after, jnp.arange(buffer.capacity))["latent"]
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("stacked", [False, True])
def test_slots_say_where_rows_lie(stacked):
    unit = jrb.Sequence(L, burn_in=1, partial="pad", slots=True)
    buffer, state = made(jrb.FrameStack(2, unit=unit) if stacked else unit, 11, ends=(4, 8))
    sample = buffer.sample(state, jax.random.key(0))
    slots = sample.info["slots"]
    assert (slots.dtype, slots.shape) == (jnp.int32, sample.mask.shape)
    np.testing.assert_array_equal(buffer.take(state, slots)["number"], sample.data["number"])


def test_goals_and_flags_in_windows_are_edited_too():
    buffer, state = made(jrb.Sequence(L), 6)
    sample = buffer.sample(state, jax.random.key(0))
    done = jnp.asarray(np.asarray(sample.data["number"]) // ENVS == 2)
    state = buffer.set(state, sample, {"next": {"done": done}})
    again = buffer.sample(state, jax.random.key(1), 64)
    assert {tuple(row) for row in (again.data["number"] // ENVS).tolist()} == {(0, 1, 2), (3, 4, 5)}


def test_an_emptied_buffer_is_left_alone():
    buffer, state = made(jrb.Sequence(L), 11)
    sample = buffer.sample(state, jax.random.key(0))
    state = buffer.extend(buffer.empty(state), rows(20, 8))
    after = buffer.set(state, sample, {"latent": jnp.asarray(latents_of(sample))})
    assert not buffer.take(after, jnp.arange(16))["latent"].any()


@pytest.mark.slow
def test_shards_write_their_own_windows():
    buffer = jrb.ReplayBuffer(ROWS * ENVS, num_envs=ENVS, batch_size=16, unit=jrb.Sequence(L))
    sharded = jrb.Sharded(buffer, shards=2)
    state = sharded.extend(sharded.init(ITEM), rows(0, 6))
    sample = sharded.sample(state, jax.random.key(0))
    values = latents_of(sample)
    state = sharded.set(state, sample, {"latent": jnp.asarray(values)})
    whole = jrb.rebuild(sharded, state, buffer)
    want = {}
    for number, value in zip(
        np.asarray(sample.data["number"]).reshape(-1), values.reshape(-1, 4), strict=True
    ):
        want[int(number)] = value
    found = buffer.take(whole, buffer.in_order(whole)[0][:12])
    for number, latent in zip(found["number"].tolist(), found["latent"], strict=True):
        np.testing.assert_array_equal(latent, want.get(number, np.zeros(4)))


@pytest.mark.parametrize("order", ["draw", "sample"])
def test_windows_are_written_in_place(order):
    item = {**ITEM, "latent": np.zeros(64, np.float32)}
    row = jax.tree.map(lambda leaf: np.stack([leaf] * ENVS), item)

    def temporary(capacity):
        unit = jrb.Sequence(L, burn_in=1)
        buffer = jrb.ReplayBuffer(capacity, num_envs=ENVS, batch_size=16, unit=unit)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state, key, row, value):
            if order == "draw":
                state, sample = buffer.draw(state, key)
            else:
                sample = buffer.sample(state, key)
            latents = value + jnp.zeros((*sample.mask.shape, 64))
            state = buffer.set(state, sample, {"latent": latents})
            return buffer.add(state, row)

        state = jax.eval_shape(buffer.init, item)
        lowered = step.lower(state, jax.random.key(0), row, jnp.float32(0))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(1 << 14), temporary(1 << 16)
    assert large < small + 1_000  # the buffer grows by 13 MB


def test_what_does_not_fit_is_refused():
    buffer, state = made(jrb.Sequence(L, burn_in=1))
    sample = buffer.sample(state, jax.random.key(0))
    with pytest.raises(ValueError, match=r"leaf 'latent': expected shape \(16, 4, 4\)"):
        buffer.set(state, sample, {"latent": jnp.zeros((16, 2, 4))})
    with pytest.raises(ValueError, match=r"leaf 'number'"):
        buffer.set(state, sample, {"latent": jnp.zeros((16, 4, 4)), "number": jnp.zeros(16, int)})
    with pytest.raises(TypeError, match="leaf 'latent'"):
        buffer.set(state, sample, {"latent": jnp.zeros((16, 4, 4), jnp.bfloat16)})
