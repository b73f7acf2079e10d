"""The layouts of items in memory: in slot order, or contiguous per environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

EXAMPLE = {
    "x": jnp.zeros(3),
    "id": jnp.int32(0),
    "half": jnp.zeros(2, jnp.bfloat16),
    "next": {"x": jnp.zeros(3), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}


def rows(rng, *lead):
    number = lambda *shape: rng.random((*lead, *shape)).astype(np.float32)
    after = {"x": number(3), "reward": number(), "done": rng.random(lead) < 0.2}
    ids = rng.integers(0, 1000, lead).astype(np.int32)
    return {"x": number(3), "id": ids, "half": jnp.asarray(number(2), jnp.bfloat16), "next": after}


def story(buffer, seed):
    """Runs a random sequence of methods, and returns everything that was read."""
    rng, found = np.random.default_rng(seed), []
    lead = () if buffer.num_envs is None else (buffer.num_envs,)
    state, extend = buffer.init(EXAMPLE), jax.jit(buffer.extend)
    for number in range(2):
        state = extend(state, rows(rng, 5, *lead), mask=jnp.asarray(rng.random(5) < 0.7))
        for _ in range(2):
            state = jax.jit(buffer.add)(state, rows(rng, *lead))
        state = buffer.set(state, jnp.array([3 + number]), {"x": jnp.full((1, 3), float(number))})
        state = buffer.map(state, lambda items: {"id": items["id"] + 1}, batch_size=5)
        found += [jrb.items(buffer, state), state.storage.leaves]
        if buffer.writer.is_chronological:
            found += [[episode.items for episode in jrb.episodes(buffer, state)]]
    return [*found, buffer.take(state, jnp.arange(4).reshape(2, 2))]


def assert_same(one, other):
    def same(got, want):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes())

    jax.tree.map(same, one, other)


@pytest.mark.slow
def test_the_order_in_memory_changes_nothing_that_is_read():
    """Windows store each environment contiguously; other units store items in slot order."""
    parts = {"num_envs": 3, "batch_size": 5}
    plain = story(jrb.ReplayBuffer(12, **parts), 0)
    assert_same(story(jrb.ReplayBuffer(12, unit=jrb.Sequence(1), **parts), 0), plain)


def test_rows_of_an_environment_are_one_run():
    buffer = jrb.ReplayBuffer(8, num_envs=2, unit=jrb.Sequence(2, cross_episodes=True))
    items = {"t": jnp.arange(8).reshape(4, 2), "e": jnp.arange(8).reshape(4, 2) % 2}
    state = buffer.extend(buffer.init({"t": 0, "e": 0}), items)
    (words,) = state.storage.arrays.values()
    assert words[:, :, :2].tolist() == [
        [[0, 0], [0, 2], [0, 4], [0, 6]],
        [[1, 1], [1, 3], [1, 5], [1, 7]],
    ]
    assert state.storage["t"].tolist() == list(range(8))
