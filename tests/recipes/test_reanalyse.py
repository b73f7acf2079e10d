"""Search targets that are recomputed and written back into sampled windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytestmark = [pytest.mark.slow, pytest.mark.whole]

ACTIONS, UNROLL, ENVS = 3, 4, 2
AFTER = {"reward": jnp.zeros(()), "terminated": jnp.zeros((), bool)}
EXAMPLE = {
    "observation": jnp.zeros((), jnp.int32),
    "policy": jnp.zeros(ACTIONS),
    "value": jnp.zeros(()),
    "next": AFTER,
}
BUFFER = jrb.ReplayBuffer(
    24,
    num_envs=ENVS,
    batch_size=6,
    sampler=jrb.Prioritized(1.0, beta=1.0),
    unit=jrb.Sequence(UNROLL + 1, partial="pad", slots=True),
)


def search(version, observation):
    """A stand-in: what it finds tells the parameters and the observation that it was given."""
    value = jnp.float32(1000) * jnp.asarray(version, jnp.float32) + observation.astype(jnp.float32)
    return jnp.stack([value + jnp.float32(number) for number in range(ACTIONS)], axis=-1), value


def played(steps, first=0, ends=0.2):
    """Rows `[T, E]` that a search of version 0 was made for."""
    random = np.random.default_rng(first)
    seen = first + jnp.arange(steps * ENVS, dtype=jnp.int32).reshape(steps, ENVS)
    policy, value = search(0, seen)
    done = jnp.asarray(random.random((steps, ENVS)) < ends)
    after = {"reward": seen.astype(jnp.float32), "terminated": done}
    return {"observation": seen, "policy": policy, "value": value, "next": after}


def refresh(state, batch, version):
    policy, value = search(version, batch.data["observation"])
    state = BUFFER.set(state, batch, {"policy": policy, "value": value})
    surprise = jnp.abs(batch.data["value"] - value).max(axis=1)
    return BUFFER.update_priority(state, batch, surprise)


def versions(state):
    """Returns the version of the search of each slot's targets, after a check of the targets."""
    items = BUFFER.take(state, jnp.arange(BUFFER.capacity))
    version = (np.asarray(items["value"]) - np.asarray(items["observation"])) / 1000
    policy, value = search(version.astype(np.float32), items["observation"])
    np.testing.assert_array_equal(items["value"], value)
    np.testing.assert_array_equal(items["policy"], policy)
    return version


@pytest.mark.parametrize("steps", [10, 30])  # before and after the ring is full
def test_targets_of_all_rows_of_the_windows_are_fresh(steps):
    state = BUFFER.extend(BUFFER.init(EXAMPLE), played(min(steps, 12)))
    state = BUFFER.extend(state, played(max(steps - 12, 2), first=100))
    batch = BUFFER.sample(state, jax.random.key(0))
    after = jax.jit(refresh, static_argnums=2)(state, batch, 1)
    slots = np.asarray(batch.info["slots"])[np.asarray(batch.mask)]
    expected = np.zeros(BUFFER.capacity)
    expected[slots] = 1
    np.testing.assert_array_equal(versions(after), expected)
    priorities = np.asarray(BUFFER.priorities(after, batch.indices))
    np.testing.assert_allclose(priorities, 1000)


def test_rows_that_were_overwritten_while_the_search_ran_are_left_alone():
    state = BUFFER.extend(BUFFER.init(EXAMPLE), played(12, ends=0.0))
    batch = BUFFER.sample(state, jax.random.key(1))
    state = BUFFER.extend(state, played(5, first=100, ends=0.0))
    after = refresh(state, batch, 1)
    version, items = versions(after), BUFFER.take(after, jnp.arange(BUFFER.capacity))
    assert (version[np.asarray(items["observation"]) >= 100] == 0).all()
    assert (version == 1).any()


def test_everything_is_refreshed_at_once():
    state = BUFFER.extend(BUFFER.init(EXAMPLE), played(30))

    def newest(items):
        policy, value = search(2, items["observation"])
        return items | {"policy": policy, "value": value}

    assert (versions(BUFFER.map(state, newest)) == 2).all()


def test_search_play_and_learning_in_one_scan():
    def cycle(state, number):
        rows = jax.tree.map(lambda leaf: leaf[number], played(40))
        state = BUFFER.add(state, rows, priorities=jnp.ones(ENVS))
        state, batch = BUFFER.draw(state, jax.random.key(number))
        return refresh(state, batch, number), batch.mask.sum()

    state, sizes = jax.jit(lambda state: jax.lax.scan(cycle, state, jnp.arange(40)))(
        BUFFER.init(EXAMPLE)
    )
    assert sizes.min() > 0
    assert versions(state).max() == 39
