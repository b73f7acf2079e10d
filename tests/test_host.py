"""Storages on the host: bit for bit what a buffer on the device gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(3)
EXAMPLE = {
    "observation": jnp.zeros(3, jnp.bfloat16),
    "action": jnp.int32(0),
    "key": jax.random.key(0),
    "next": {
        "observation": jnp.zeros(3, jnp.bfloat16),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}
UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(3, 0.9),
    "sequence": jrb.Sequence(3, burn_in=1, short="pad"),
    "stack": jrb.FrameStack(2, unit=jrb.NStep(2, 0.9)),
}
STORAGES = {
    "memmap": lambda: jrb.MemmapStorage(),
    "spill": lambda: jrb.SpillStorage(None, 6),
    "spill all": lambda: jrb.SpillStorage(None, 600),
}


def steps(number, time, envs):
    """Rows of time that no others are like."""
    lead = (time,) if envs is None else (time, envs)
    count = number * 1000 + np.arange(np.prod(lead)).reshape(lead)
    observation = np.stack([count, count % 7, -count], -1)
    return {
        "observation": jnp.asarray(observation, jnp.bfloat16),
        "action": jnp.asarray(count, jnp.int32),
        "key": jax.vmap(jax.random.key)(count.reshape(-1)).reshape(lead),
        "next": {
            "observation": jnp.asarray(observation + 1, jnp.bfloat16),
            "reward": jnp.asarray(count % 5, jnp.float32),
            "done": jnp.asarray(count % 6 == 5),
        },
    }


def same(one, other):
    """Whether two pytrees are the same, bit for bit."""
    raw = lambda leaf: (
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(raw(a)), np.asarray(raw(b)))


@pytest.mark.parametrize("envs", [None, 2])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("storage", STORAGES)
def test_draws_are_those_of_the_device(storage, unit, envs):
    parts = {"capacity": 12, "num_envs": envs, "batch_size": 16, "unit": UNITS[unit]}
    parts["sampler"] = jrb.Prioritized()
    plain = jrb.ReplayBuffer(**parts)
    other = jrb.ReplayBuffer(storage=STORAGES[storage](), **parts)
    state, hosted = plain.init(EXAMPLE), other.init(EXAMPLE)
    for number, time in enumerate([1, 2, 4, 1, 3, 20, 2]):
        rows = steps(number, time, envs)
        mask = jnp.arange(time) % 3 != 2 if number % 2 else None
        state, hosted = plain.extend(state, rows, mask), other.extend(hosted, rows, mask)
        if not bool(plain.can_sample(state)):
            continue
        key = jax.random.fold_in(KEY, number)
        state, expected = plain.draw(state, key)
        hosted, found = other.draw(hosted, key)
        same(expected, found)
        state = plain.update_priority(state, expected, jnp.arange(16.0))
        hosted = other.update_priority(hosted, found, jnp.arange(16.0))
    every = jnp.arange(12).reshape(3, 4)
    same(plain.take(state, every), other.take(hosted, every))
    state, hosted = plain.empty(state), other.empty(hosted)
    rows = steps(9, 4, envs)
    state, hosted = plain.extend(state, rows), other.extend(hosted, rows)
    same(plain.sample(state, KEY), other.sample(hosted, KEY))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("storage", STORAGES)
def test_draws_inside_jit_are_those_of_the_device(storage, unit):
    parts = {"capacity": 12, "num_envs": 2, "batch_size": 8, "unit": UNITS[unit]}
    parts["sampler"] = jrb.Prioritized()
    rows = steps(1, 24, 2)

    def train(buffer):
        @functools.partial(jax.jit, donate_argnums=0)
        def run(state, rows):
            def step(state, inputs):
                number, row = inputs
                state = buffer.add(state, row, number % 4 != 3)
                sample = buffer.sample(state, jax.random.fold_in(KEY, number))
                state = buffer.update_priority(state, sample, jnp.arange(8.0))
                state, drawn = buffer.draw(state, jax.random.fold_in(KEY, 100 + number))
                return state, (sample, drawn)

            return jax.lax.scan(step, state, (jnp.arange(24), rows))

        state, samples = run(buffer.init(EXAMPLE), rows)
        return samples, jax.jit(buffer.take)(state, jnp.arange(12)), buffer.sample(state, KEY)

    other = jrb.ReplayBuffer(storage=STORAGES[storage](), **parts)
    same(train(jrb.ReplayBuffer(**parts)), train(other))
