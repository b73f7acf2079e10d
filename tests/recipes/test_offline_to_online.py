"""Training as in RLPD: exact shares of a fixed dataset and of a ring in every minibatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytestmark = [pytest.mark.slow, pytest.mark.whole]

UTD, B = 5, 8
AFTER = {"reward": jnp.zeros(()), "terminated": jnp.zeros((), bool)}
EXAMPLE = {"observation": jnp.zeros(3), "action": jnp.zeros(2), "next": AFTER}


def rows(count, source):
    """Returns transitions whose observation names their source."""
    leading = lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape))
    items = jax.tree.map(leading, EXAMPLE)
    numbers = jnp.arange(count, dtype=jnp.float32)
    return items | {"observation": jnp.stack([jnp.full(count, source), numbers, numbers], axis=1)}


def offline_and_online(share=0.5, utd=UTD, size=B, **online):
    dataset, stored = jrb.from_items(rows(40, 0.0))
    replay = jrb.ReplayBuffer(64, **online)
    mix = jrb.Mix((dataset, replay), (share, 1 - share), batch_size=utd * size, exact=True)
    return mix, (stored, replay.init(EXAMPLE))


def cut(batch, utd=UTD):
    return jax.tree.map(lambda leaf: leaf.reshape(utd, -1, *leaf.shape[1:]), batch.data)


@pytest.mark.parametrize(
    ("share", "size", "counts"),
    [(0.5, 8, {4}), (0.25, 8, {2}), (0.0, 8, {0}), (0.5, 7, {3, 4}), (0.3, 8, {2, 3})],
)
def test_every_minibatch_has_its_share(share, size, counts):
    mix, (stored, state) = offline_and_online(share, size=size)
    replay = mix.buffers[1]
    state = replay.extend(state, rows(100, 1.0))
    batch = mix.sample((stored, state), jax.random.key(0))
    source = np.asarray(cut(batch)["observation"][..., 0])
    assert source.shape == (UTD, size)
    assert set((source == 0).sum(axis=1).tolist()) == counts
    assert (source == 0).sum() == round(share * UTD * size)


def test_a_loop_of_steps_and_updates():
    mix, (stored, state) = offline_and_online()
    replay, examples = mix.buffers[1], rows(30, 1.0)

    def step(state, number):
        state = replay.add(state, jax.tree.map(lambda leaf: leaf[number], examples))
        (_, state), batch = mix.draw((stored, state), jax.random.key(number))

        def update(updates, minibatch):
            half = jnp.mean(minibatch["observation"][:, 0])
            return updates + 1, (half, jnp.max(minibatch["observation"][:, 1] * half))

        return state, jax.lax.scan(update, jnp.int32(0), cut(batch))[1]

    state, (halves, _) = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(30)))(state)
    assert halves.shape == (30, UTD)
    assert (halves == 0.5).all()
    assert int(replay.size(state)) == 30


def test_the_share_is_annealed_without_compiling_again(compilations):
    mix, states = offline_and_online(sampler=jrb.Prioritized(1.0))
    states = states[0], mix.buffers[1].extend(states[1], rows(64, 1.0))

    @jax.jit
    def step(states, number):
        share = 1 - number / 10  # of the dataset
        batch = mix.sample(
            states, jax.random.key(number), proportions=jnp.stack([share, 1 - share])
        )
        error = 1 + batch.data["observation"][:, 1]
        return mix.update_priority(states, batch, error), batch, cut(batch)["observation"]

    step(states, jnp.int32(0))
    count = 0
    for number in range(11):
        with compilations() as compiled:
            states, batch, seen = step(states, jnp.int32(number))
        count += compiled()
        share = (np.asarray(seen)[..., 0] == 0).sum(axis=1) / B
        assert (np.abs(share - (1 - number / 10)) < 1 / B).all()
        assert np.isfinite(batch.weights).all()
        online = np.asarray(batch.info["source"]) == 1
        indices = np.asarray(batch.indices)[online]
        priorities = np.asarray(mix.buffers[1].priorities(states[1], jnp.asarray(indices)))
        np.testing.assert_allclose(priorities, 1 + indices)
    assert count == 0


def test_both_sources_may_have_priorities():
    dataset, stored = jrb.from_items(rows(40, 0.0), sampler=jrb.Prioritized(1.0))
    replay = jrb.ReplayBuffer(16, sampler=jrb.Prioritized(0.5))
    mix = jrb.Mix((dataset, replay), (0.5, 0.5), batch_size=UTD * B, exact=True)
    states = stored, replay.extend(replay.init(EXAMPLE), rows(16, 1.0))
    batch = mix.sample(states, jax.random.key(0))
    error = 1 + batch.data["observation"][:, 1] + 100 * batch.data["observation"][:, 0]
    after = mix.update_priority(states, batch, error)
    for number, buffer in enumerate(mix.buffers):
        own = np.asarray(batch.info["source"]) == number
        slots = batch.indices[own]
        np.testing.assert_allclose(buffer.priorities(after[number], slots), error[own])


def test_until_something_is_online_only_the_dataset_counts():
    mix, states = offline_and_online()
    with pytest.raises(ValueError, match="something to draw"):
        mix.sample(states, jax.random.key(0))
    batch = jax.jit(mix.sample)(states, jax.random.key(0))
    assert (batch.mask == (batch.info["source"] == 0)).all()
    assert ((batch.weights == 1) == batch.mask).all()
    all_offline = jnp.array([1.0, 0.0])
    batch = mix.sample(states, jax.random.key(0), proportions=all_offline)
    assert batch.mask.all()
    assert not mix.can_sample(states)
