"""Debug checks: they cost time and run only while they are switched on."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import jrb
from jrb import DebugWarning

N, B = 8, 4
BUFFER = jrb.ReplayBuffer(N, batch_size=B, min_size=4, sampler=jrb.Prioritized())


def filled(count=6):
    state = BUFFER.init({"x": jnp.int32(0)})
    return BUFFER.extend(state, {"x": jnp.arange(count, dtype=jnp.int32)})


def told(call, *args):
    """Returns the messages of all `DebugWarning`s of a call, compiled or not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(call(*args))
        jax.effects_barrier()
    return [str(each.message) for each in caught if each.category is DebugWarning]


@pytest.fixture(params=["eager", "jit"])
def run(request):
    """Returns a wrapper that leaves a function as it is, or compiles it."""
    return (lambda function: function) if request.param == "eager" else (lambda f: jax.jit(f))


def test_keys_that_are_used_twice(run):
    state, one, two = filled(), *jax.random.split(jax.random.key(0))
    with jrb.debug():
        sample = run(lambda state, key: BUFFER.sample(state, key).data)
        assert told(sample, state, one) == []
        assert told(sample, state, two) == []
        (text,) = told(sample, state, one)
        assert "a key was used before" in text
        both = run(
            lambda state, key: (BUFFER.sample(state, key).data, BUFFER.draw(state, key)[1].data)
        )
        assert len(told(both, state, jax.random.key(7))) == 1
    assert told(lambda: BUFFER.sample(state, one).data) == []


def test_draws_of_too_little():
    with jrb.debug():
        sample = jax.jit(lambda state, key: BUFFER.sample(state, key).data)
        (text,) = told(sample, filled(2), jax.random.key(0))
        assert "min_size=4" in text
        assert told(sample, filled(4), jax.random.key(1)) == []


def test_priorities_that_are_refused(run):
    state = filled()
    sample = BUFFER.sample(state, jax.random.key(0))
    with jrb.debug():
        update = run(lambda state, new: BUFFER.update_priority(state, sample, new))
        good, bad = jnp.ones(B), jnp.array([1.0, jnp.nan, -1.0, jnp.inf])
        assert told(update, state, good) == []
        assert any("3 priorities are NaN" in text for text in told(update, state, bad))


def test_samples_that_are_stale(run):
    state = filled()
    sample = BUFFER.sample(state, jax.random.key(0))
    later = BUFFER.extend(state, {"x": jnp.arange(N, dtype=jnp.int32)})
    with jrb.debug():
        update = run(lambda state: BUFFER.update_priority(state, sample, jnp.ones(B)))
        assert told(update, state) == []
        (text,) = told(update, later)
        assert f"{B} entries of the sample were overwritten" in text


def test_checks_hold_for_agents_and_loops():
    states = jax.vmap(lambda _: filled())(jnp.arange(3))
    keys = jax.random.split(jax.random.key(0), 3)
    with jrb.debug():
        sample = jax.jit(jax.vmap(lambda state, key: BUFFER.sample(state, key).data))
        assert told(sample, states, keys) == []
        same = jnp.broadcast_to(keys[0], (3,))
        assert len(told(sample, states, same)) == 3
        body = lambda state, key: (state, BUFFER.sample(state, key).data)
        assert len(told(jax.jit(lambda state: jax.lax.scan(body, state, same)), filled())) == 3


def test_the_switch_is_put_back():
    state, key = filled(), jax.random.key(0)
    twice = lambda: [BUFFER.sample(state, key).data for _ in range(2)]
    jrb.debug()
    try:
        assert len(told(twice)) == 1
        with jrb.debug(False):
            assert told(twice) == []
        assert len(told(twice)) == 1
    finally:
        jrb.debug(False)
    assert told(twice) == []


def test_priorities_of_rows_without_a_burn_in_are_checked():
    rows = {"x": jnp.arange(20), "next": {"done": jnp.zeros(20, bool)}}
    parts = {"unit": jrb.Sequence(4, burn_in=2), "sampler": jrb.Prioritized(), "batch_size": 3}
    buffer, state = jrb.from_items(rows, **parts)
    batch = buffer.sample(state, jax.random.key(0))
    priorities = jnp.ones((3, 4)).at[0, 0].set(jnp.nan)

    def update():
        jax.block_until_ready(jax.jit(buffer.update_priority)(state, batch, priorities))
        jax.effects_barrier()

    with jrb.debug(), pytest.warns(jrb.DebugWarning, match="1 priorities are"):
        update()
