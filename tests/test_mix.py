"""One batch from several buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

EXAMPLE = {"id": jnp.int32(0), "reward": jnp.float32(0)}


def buffer(**parts):
    return jrb.ReplayBuffer(64, **{"batch_size": 1, **parts})


def filled(mix, counts):
    """Returns states; that of buffer k holds ids from 100 k on."""
    states = []
    for number, (part, state) in enumerate(zip(mix.buffers, mix.init(EXAMPLE), strict=True)):
        ids = np.arange(counts[number], dtype=np.int32) + 100 * number
        items = {"id": ids, "reward": np.zeros(len(ids), np.float32)}
        states.append(part.extend(state, items))
    return tuple(states)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("proportions", "counts"),
    [
        ((0.25, 0.75), [4, 12]),
        ((0.1, 0.9), [2, 14]),
        ((0.0, 1.0), [0, 16]),
        ((1 / 3, 2 / 3), [5, 11]),
    ],
)
def test_counts_are_exact(proportions, counts, traced):
    given = (0.5, 0.5) if traced else proportions
    mix = jrb.Mix((buffer(), buffer(sampler=jrb.Prioritized())), given, batch_size=16)
    states = filled(mix, [10, 10])
    shares = jnp.array(proportions) if traced else None
    for seed in range(5):
        sample = mix.sample(states, jax.random.key(seed), proportions=shares)
        source = np.asarray(sample.info["source"])
        assert np.bincount(source, minlength=2).tolist() == counts
        assert (np.asarray(sample.data["id"]) // 100 == source).all()
        assert sample.mask.all()


def test_traced_proportions_do_not_retrace_and_work_in_a_scan():
    mix = jrb.Mix((buffer(), buffer()), (0.5, 0.5), batch_size=8)
    states = filled(mix, [10, 10])

    def step(share, key):
        sample = mix.sample(states, key, proportions=jnp.stack([share, 1 - share]))
        return share + 0.25, jnp.sum(sample.info["source"] == 0)

    counts = jax.lax.scan(step, jnp.float32(0), jax.random.split(jax.random.key(0), 5))[1]
    assert counts.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_each_part_covers_the_whole_distribution_of_its_buffer(traced):
    stratified = buffer(sampler=jrb.Prioritized(alpha=1.0, eps=0.0))
    mix = jrb.Mix((buffer(), stratified), (0.5, 0.5), batch_size=8)
    states = filled(mix, [1, 8])
    priorities = jnp.arange(1.0, 9.0)
    states = states[0], stratified.update_priority(states[1], jnp.arange(8), priorities)
    shares = jnp.array([0.5, 0.5]) if traced else None
    draw = jax.jit(jax.vmap(lambda key: mix.sample(states, key, proportions=shares)))
    sample = draw(jax.random.split(jax.random.key(0), 4000))
    ids = np.asarray(sample.data["id"])[np.asarray(sample.info["source"]) == 1] - 100
    seen = np.bincount(ids, minlength=8)
    expected = ids.size * np.arange(1, 9) / 36
    assert ((seen - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees, p = 0.001


@pytest.mark.slow
def test_priorities_find_their_buffer():
    parts = (buffer(sampler=jrb.Prioritized(eps=0.0)), buffer(), buffer(sampler=jrb.Prioritized()))
    mix = jrb.Mix(parts, (0.5, 0.25, 0.25), batch_size=16)
    states = filled(mix, [20, 20, 20])
    states, sample = mix.draw(states, jax.random.key(0))
    priorities = 1.0 + jnp.arange(16.0)
    after = mix.update_priority(states, sample, priorities)
    for k in (0, 2):
        want = np.ones(20, np.float32)
        for b in range(16):
            if sample.info["source"][b] == k:
                want[int(sample.indices[b])] = priorities[b]
        np.testing.assert_array_equal(after[k].sampler.raw[:20], want)


def test_windows_are_mixed_too():
    item = {"id": jnp.int32(0), "next": {"done": jnp.bool_(False)}}
    part = jrb.ReplayBuffer(16, unit=jrb.Sequence(3), batch_size=1, sampler=jrb.Prioritized())
    mix = jrb.Mix((part, part), (0.5, 0.5), batch_size=4)
    rows = {"id": np.arange(9, dtype=np.int32), "next": {"done": np.zeros(9, bool)}}
    states = tuple(part.extend(state, rows) for state in mix.init(item))
    sample = mix.sample(states, jax.random.key(0))
    assert sample.data["id"].shape == (4, 3)
    after = mix.update_priority(states, sample, jnp.full((4, 3), 7.0))
    assert all(float(state.sampler.raw.max()) == 7.0 for state in after)


def test_an_empty_part_is_masked_inside_jit_and_raises_outside():
    mix = jrb.Mix((buffer(), buffer()), (0.5, 0.5), batch_size=4)
    states = filled(mix, [0, 5])
    assert not mix.can_sample(states)
    with pytest.raises(ValueError, match="expected something to draw"):
        mix.sample(states, jax.random.key(0))
    sample = jax.jit(mix.sample)(states, jax.random.key(0))
    assert sample.mask.tolist() == [False, False, True, True]
    assert sample.weights.tolist() == [0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_a_buffer_without_mass_is_masked_inside_jit_and_raises_outside(exact):
    parts = buffer(), buffer(sampler=jrb.Prioritized(eps=0.0))
    mix = jrb.Mix(parts, (0.5, 0.5), batch_size=8, exact=exact)
    plain, other = filled(mix, [5, 3])
    states = plain, parts[1].update_priority(other, jnp.arange(3), jnp.zeros(3))
    assert not mix.can_sample(states)
    with pytest.raises(ValueError, match="finds no mass"):
        mix.sample(states, jax.random.key(0))
    for proportions in (None, jnp.array([0.5, 0.5])):
        sample = jax.jit(mix.sample)(states, jax.random.key(0), proportions=proportions)
        assert np.array_equal(sample.mask, sample.info["source"] == 0)
        assert np.array_equal(sample.weights, sample.mask.astype(np.float32))


def test_size_and_memory():
    mix = jrb.Mix((buffer(), buffer()), (0.5, 0.5))
    states = filled(mix, [3, 5])
    assert mix.size(states).tolist() == [3, 5]
    assert mix.nbytes(EXAMPLE) == 2 * mix.buffers[0].nbytes(EXAMPLE)


def test_wrong_proportions_are_refused():
    two = (buffer(), buffer())
    with pytest.raises(ValueError, match=r"add up to 1, got \[0.5, 0.6\], which add up to 1.1"):
        jrb.Mix(two, (0.5, 0.6))
    with pytest.raises(ValueError, match="expected 2 numbers, one for each buffer"):
        jrb.Mix(two, (1.0,))
    with pytest.raises(ValueError, match=r"at least 0, got \[-0.5, 1.5\]"):
        jrb.Mix(two, (-0.5, 1.5))
    mix = jrb.Mix(two, (0.5, 0.5), batch_size=4)
    with pytest.raises(ValueError, match="add up to 1"):
        mix.sample(filled(mix, [2, 2]), jax.random.key(0), proportions=jnp.array([0.5, 0.2]))
    with pytest.raises(ValueError, match="batch_size: expected a number, got None"):
        jrb.Mix(two, (0.5, 0.5)).sample(filled(mix, [2, 2]), jax.random.key(0))


def test_a_sampler_that_consumes_needs_fixed_proportions():
    mix = jrb.Mix((buffer(), buffer(sampler=jrb.Queue())), (0.5, 0.5), batch_size=4)
    states = filled(mix, [9, 9])
    for _ in range(2):
        states, sample = mix.draw(states, jax.random.key(0))
    assert sample.data["id"].tolist()[2:] == [102, 103]
    with pytest.raises(ValueError, match="Queue, which would lose a part of what it draws"):
        mix.draw(states, jax.random.key(0), proportions=jnp.array([0.5, 0.5]))


def test_parts_whose_data_differ_are_refused():
    windows = jrb.ReplayBuffer(8, unit=jrb.Sequence(2), batch_size=1)
    mix = jrb.Mix((jrb.ReplayBuffer(8, batch_size=1), windows), (0.5, 0.5), batch_size=4)
    item = {"id": jnp.int32(0), "next": {"done": jnp.bool_(False)}}
    states = tuple(
        part.add(part.add(state, item), item)
        for part, state in zip(mix.buffers, mix.init(item), strict=True)
    )
    with pytest.raises(ValueError, match=r"Mix: leaf 'data/id': expected shape \(\), got \(2,\)"):
        mix.sample(states, jax.random.key(0))


def test_an_empty_part_that_gives_nothing_does_not_matter():
    mix = jrb.Mix((buffer(), buffer()), (0.0, 1.0), batch_size=4)
    states = filled(mix, [0, 5])
    assert mix.can_sample(states)
    for proportions in (None, jnp.array([0.0, 1.0])):
        sample = mix.sample(states, jax.random.key(0), proportions=proportions)
        assert sample.mask.all()


def test_ready_means_ready_for_its_part_of_the_batch():
    epochs = buffer(sampler=jrb.WithoutReplacement(drop_last=True))
    mix = jrb.Mix((epochs,), (1.0,), batch_size=4)
    assert not mix.can_sample(filled(mix, [3]))
    assert mix.can_sample(filled(mix, [4]))


def test_wrong_samples_and_parts_are_refused():
    mix = jrb.Mix((buffer(), buffer()), (0.5, 0.5), batch_size=4)
    states = filled(mix, [5, 5])
    sample = mix.sample(states, jax.random.key(0))
    with pytest.raises(TypeError, match="expected a buffer with priorities, got none"):
        mix.update_priority(states, sample, jnp.ones(4))
    own = mix.buffers[0].sample(states[0], jax.random.key(0))
    with pytest.raises(ValueError, match="expected a Sample of this Mix"):
        mix.update_priority(states, own, jnp.ones(1))
    with pytest.raises(TypeError, match="expected a tuple of buffers"):
        jrb.Mix((1, 2), (0.5, 0.5))
    with pytest.raises(TypeError, match="expected a tuple of numbers"):
        jrb.Mix((buffer(),), ("1",))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75), (0.75, 0.25), (0.0, 1.0)])
def test_exact_parts_have_their_share_of_every_run(shares, traced):
    given = (0.5, 0.5) if traced else shares
    mix = jrb.Mix((buffer(), buffer(sampler=jrb.Prioritized())), given, batch_size=24, exact=True)
    states = filled(mix, [20, 20])
    sample = mix.sample(
        states, jax.random.key(0), proportions=jnp.array(shares) if traced else None
    )
    source = np.asarray(sample.info["source"])
    assert (np.asarray(sample.data["id"]) // 100 == source).all()
    for size in (4, 8, 12):
        runs = (source.reshape(-1, size) == 0).sum(axis=1)
        assert (runs == shares[0] * size).all()
    for start in range(24):
        for stop in range(start + 1, 25):
            assert abs((source[start:stop] == 0).sum() - shares[0] * (stop - start)) <= 1


def test_exact_parts_are_the_same_items_and_take_priorities():
    parts = buffer(), buffer(sampler=jrb.Prioritized())
    plain, exact = (jrb.Mix(parts, (0.25, 0.75), 16, exact=it) for it in (False, True))
    states = filled(exact, [20, 20])
    one, other = (mix.sample(states, jax.random.key(3)) for mix in (plain, exact))
    assert sorted(one.data["id"].tolist()) == sorted(other.data["id"].tolist())
    after = exact.update_priority(states, other, other.data["id"].astype(jnp.float32))
    for name, source in zip(other.data["id"].tolist(), other.info["source"].tolist(), strict=True):
        if source == 1:
            priority = parts[1].priorities(after[1], jnp.array([name - 100]))
            assert float(priority[0]) == pytest.approx(name)


def test_exact_parts_of_shards():
    whole = jrb.ReplayBuffer(64, num_envs=4, batch_size=8)
    parts = jrb.Sharded(whole, 2), jrb.Sharded(whole, 2)
    mix = jrb.Mix(parts, (0.5, 0.5), batch_size=16, exact=True)
    states = mix.init(EXAMPLE)
    rows = {"id": jnp.zeros((8, 4), jnp.int32), "reward": jnp.zeros((8, 4))}
    states = tuple(part.extend(state, rows) for part, state in zip(parts, states, strict=True))
    source = np.asarray(mix.sample(states, jax.random.key(0)).info["source"])
    assert (source.reshape(-1, 2).sum(axis=1) == 1).all()
