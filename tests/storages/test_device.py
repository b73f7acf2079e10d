"""The two layouts: one does what the other does, and only where items lie is another."""

import dataclasses

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
LINES = jrb.DeviceStorage(layout="environments")


def rows(rng, *lead):
    number = lambda *shape: rng.random((*lead, *shape)).astype(np.float32)
    after = {"x": number(3), "reward": number(), "done": rng.random(lead) < 0.2}
    ids = rng.integers(0, 1000, lead).astype(np.int32)
    return {"x": number(3), "id": ids, "half": jnp.asarray(number(2), jnp.bfloat16), "next": after}


def story(buffer, seed):
    """What a training does, and all that it sees."""
    rng, found = np.random.default_rng(seed), []
    lead = () if buffer.num_envs is None else (buffer.num_envs,)
    state, extend = buffer.init(EXAMPLE), jax.jit(buffer.extend)
    for number in range(2):
        state = extend(state, rows(rng, 5, *lead), mask=jnp.asarray(rng.random(5) < 0.7))
        for _ in range(2):
            state = jax.jit(buffer.add)(state, rows(rng, *lead))
        state, sample = jax.jit(buffer.draw)(state, jax.random.key(number))
        state = buffer.set(state, sample.indices[:1], {"x": jnp.full((1, 3), float(number))})
        state = buffer.map(state, lambda items: {"id": items["id"] + 1}, batch_size=5)
        found += [sample, jrb.items(buffer, state), state.storage.leaves]
        if buffer.writer.is_chronological:
            found += [[episode.items for episode in jrb.episodes(buffer, state)]]
    return [*found, buffer.take(state, jnp.arange(4).reshape(2, 2))]


def assert_same(one, other):
    def same(got, want):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes())

    jax.tree.map(same, one, other)


PARTS = [
    {"num_envs": None, "unit": jrb.Sequence(3)},
    {"num_envs": 3, "unit": jrb.Sequence(3, cross_episodes=True), "sampler": jrb.Prioritized()},
    {"num_envs": 12, "writer": jrb.Reservoir(0)},
    {"num_envs": 4, "unit": jrb.Sequence(2, sample_by="episodes"), "writer": jrb.PerEnvironment()},
]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "parts"), list(enumerate(PARTS)))
def test_one_layout_does_what_the_other_does(seed, parts):
    plain = jrb.ReplayBuffer(12, batch_size=5, **parts)
    turned = dataclasses.replace(plain, storage=LINES)
    assert_same(story(turned, seed), story(plain, seed))


def test_what_follows_in_time_lies_side_by_side():
    buffer = jrb.ReplayBuffer(8, num_envs=2, storage=LINES)
    items = {"t": jnp.arange(8).reshape(4, 2), "e": jnp.arange(8).reshape(4, 2) % 2}
    state = buffer.extend(buffer.init({"t": 0, "e": 0}), items)
    (words,) = state.storage.arrays.values()
    assert words[:, :, :2].tolist() == [
        [[0, 0], [0, 2], [0, 4], [0, 6]],
        [[1, 1], [1, 3], [1, 5], [1, 7]],
    ]
    assert state.storage["t"].tolist() == list(range(8))


def test_a_state_of_the_other_layout_is_refused():
    buffer = jrb.ReplayBuffer(8, num_envs=1, batch_size=2)
    state = buffer.init(EXAMPLE)
    other = dataclasses.replace(buffer, storage=LINES)
    with pytest.raises(TypeError, match="expected a state of this buffer, whose storage is"):
        other.add(state, rows(np.random.default_rng(0), 1))


def test_what_cannot_be_is_refused():
    with pytest.raises(
        ValueError, match="layout: expected 'time' with share_next_observations=True, got 'env"
    ):
        jrb.DeviceStorage(share_next_observations=True, layout="environments")
    with pytest.raises(ValueError, match="layout: expected one of 'time', 'environments', got 'x'"):
        jrb.DeviceStorage(layout="x")
