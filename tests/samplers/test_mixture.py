"""Several samplers over one buffer: shares, probabilities, weights, and every other method."""

import dataclasses
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

N = 32
PLAIN = jrb.Mixture((jrb.Uniform(), jrb.Newest(0.25)), (0.5, 0.5))
ONLINE = jrb.Mixture((jrb.Queue(), jrb.Uniform()), (0.25, 0.75))
WEIGHED = jrb.Mixture((jrb.Prioritized(alpha=1.0, beta=1.0, eps=0.0), jrb.Uniform()), (0.75, 0.25))
FILLED = jrb.Mixture(
    (jrb.Queue(), jrb.Prioritized(alpha=1.0, beta=1.0, eps=0.0)), (0.75, 0.25), fill=True
)
ALL = jrb.Mixture((jrb.Prioritized(), jrb.Newest(count=4), jrb.Lifo()), (0.5, 0.25, 0.25))
LIMITED = jrb.Mixture((jrb.Prioritized(), jrb.Newest(0.25)), (0.5, 0.5), max_draws=2)


def filled(sampler, count=N, batch_size=8, **parts):
    buffer = jrb.ReplayBuffer(N, batch_size=batch_size, sampler=sampler, **parts)
    state = buffer.init({"x": jnp.int32(0)})
    return buffer, buffer.extend(state, {"x": jnp.arange(count, dtype=jnp.int32)})


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 16, 101])
@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.25, 0.75), (0.0, 1.0), (1 / 3, 2 / 3), (0.9, 0.1)]
)
def test_every_batch_has_the_exact_shares_evenly_spread(shares, batch_size):
    sampler = jrb.Mixture((jrb.Uniform(), jrb.Newest(0.25)), shares)
    buffer, state = filled(sampler, batch_size=batch_size)
    for key in jax.random.split(jax.random.key(0), 3):
        sample = buffer.sample(state, key)
        source = np.asarray(sample.info["sampler"])
        assert source.dtype == np.int32
        for number, share in enumerate(shares):
            got, run = np.cumsum(source == number), np.arange(1, batch_size + 1)
            assert abs(got[-1] - share * batch_size) < 1
            assert np.all(np.abs(got - run * got[-1] / batch_size) <= 1)  # in every prefix
        assert np.all(sample.data["x"][source == 1] >= N - 8)
        assert sample.mask.all()


def test_probabilities_are_those_of_the_sampler_that_drew():
    buffer, state = filled(WEIGHED, batch_size=4096)
    priorities = 1.0 + np.arange(N) % 5
    state = buffer.update_priority(state, jnp.arange(N, dtype=jnp.int32), jnp.asarray(priorities))
    sample = buffer.sample(state, jax.random.key(1))
    mass = priorities / priorities.sum()
    expected = np.where(sample.info["sampler"] == 0, mass[sample.indices], 1 / N)
    np.testing.assert_allclose(sample.probabilities, expected, rtol=1e-5)
    for number, chances in enumerate((mass, np.full(N, 1 / N))):
        drawn = np.asarray(sample.indices)[np.asarray(sample.info["sampler"]) == number]
        counts, want = np.bincount(drawn, minlength=N), len(drawn) * chances
        assert np.sum((counts - want) ** 2 / want) < N + 6 * np.sqrt(2 * N)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", ["batch", None])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_weights_compare_over_all_samplers(beta, normalize):
    first = jrb.Prioritized(alpha=1.0, eps=0.0, normalize=normalize)
    buffer, state = filled(jrb.Mixture((first, jrb.Uniform()), (0.5, 0.5)), batch_size=256)
    priorities = jnp.float32(1) + jnp.arange(N, dtype=jnp.float32)
    state = buffer.update_priority(state, jnp.arange(N, dtype=jnp.int32), priorities)
    sample = buffer.sample(state, jax.random.key(1), beta=beta)
    expected = (N * np.asarray(sample.probabilities, np.float64)) ** -beta
    expected = expected / expected.max() if normalize else expected
    np.testing.assert_allclose(sample.weights, expected, rtol=1e-4)


def test_weights_of_beta_one_make_the_mean_unbiased():
    first = jrb.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize=None)
    buffer, state = filled(jrb.Mixture((first, jrb.Uniform()), (0.75, 0.25)), batch_size=2**15)
    priorities = jnp.float32(1) + jnp.arange(N, dtype=jnp.float32)
    state = buffer.update_priority(state, jnp.arange(N, dtype=jnp.int32), priorities)
    sample = buffer.sample(state, jax.random.key(1))
    mean = np.mean(np.asarray(sample.weights) * np.asarray(sample.data["x"]))
    assert abs(mean - (N - 1) / 2) < 0.3


@pytest.mark.slow
def test_new_priorities_reach_every_sampler_that_has_some():
    pair = jrb.Mixture(
        (jrb.Prioritized(alpha=1.0, eps=0.0), jrb.Uniform(), jrb.Prioritized(alpha=1.0, eps=0.0)),
        (0.25, 0.5, 0.25),
    )
    buffer, state = filled(pair, batch_size=N)
    slots = jnp.arange(N, dtype=jnp.int32)
    state = buffer.update_priority(state, slots, jnp.where(slots == 3, jnp.float32(1), 0.0))
    sample = buffer.sample(state, jax.random.key(0))
    assert np.all(sample.indices[sample.info["sampler"] != 1] == 3)
    assert len(np.unique(sample.indices[sample.info["sampler"] == 1])) > 3
    # A sample of all three samplers, updated in a jitted step.
    step = jax.jit(lambda state: buffer.update_priority(state, sample, jnp.full(N, 2.0)))
    drawn = np.unique(sample.indices)
    np.testing.assert_array_equal(buffer.priorities(step(state))[drawn], 2.0)
    state = buffer.set_alpha(state, 0.0)
    assert len(np.unique(buffer.sample(state, jax.random.key(0)).indices)) > 8


def test_a_queue_beside_others_gives_everything_once():
    buffer, state = filled(ONLINE, count=0)
    given, added = [], 0
    for number, key in enumerate(jax.random.split(jax.random.key(0), 60)):
        rows = 1 + number % 4
        state = buffer.extend(state, {"x": added + jnp.arange(rows, dtype=jnp.int32)})
        added += rows
        state, sample = buffer.draw(state, key)
        own = np.asarray(sample.mask) & (np.asarray(sample.info["sampler"]) == 0)
        given += np.asarray(sample.data["x"])[own].tolist()
    assert given == sorted(set(given))
    pending = int(state.sampler.states[0].count)
    assert len(given) + pending >= added - N
    assert given[-1] == added - pending - 1


def test_the_last_sampler_fills_what_a_queue_leaves():
    buffer, state = filled(FILLED, batch_size=16)
    draw, pending = jax.jit(buffer.draw), N
    for key in jax.random.split(jax.random.key(0), 4):  # the queue ends within the third batch
        state, sample = draw(state, key)
        taken, own = min(pending, 12), np.asarray(sample.info["sampler"]) == 0
        assert own.sum() == taken
        assert sample.mask.all()
        order = np.asarray(sample.data["x"])[own]
        np.testing.assert_array_equal(order, np.arange(N - pending, N - pending + taken))
        pending -= taken
    assert not buffer.can_sample(buffer.empty(state))
    assert buffer.can_sample(state)


@pytest.mark.parametrize("replacement", [True, False])
def test_a_filled_batch_of_distinct_items_has_none_twice(replacement):
    last = jrb.Uniform(replacement=replacement)
    buffer, state = filled(jrb.Mixture((jrb.Queue(), last), (0.5, 0.5), fill=True), batch_size=N)
    state, _ = buffer.draw(state, jax.random.key(0), 2 * N)  # nothing is left in the queue
    slots = np.asarray(buffer.sample(state, jax.random.key(1)).indices)
    assert (len(set(slots.tolist())) == N) == (not replacement)


def test_filled_entries_have_the_probabilities_of_the_last_sampler():
    """Stratified draws ascend, so each entry of the batch must be a random one of them."""
    buffer, state = filled(FILLED, batch_size=16)
    priorities = 1.0 + np.arange(N) % 5
    state = buffer.update_priority(state, jnp.arange(N, dtype=jnp.int32), jnp.asarray(priorities))
    state, _ = buffer.draw(state, jax.random.key(0), 36)  # five items are left in the queue
    samples = jax.vmap(lambda key: buffer.sample(state, key))(
        jax.random.split(jax.random.key(1), 400)
    )
    mass = priorities / priorities.sum()
    own = np.asarray(samples.info["sampler"]) == 1
    np.testing.assert_allclose(samples.probabilities[own], mass[samples.indices[own]], rtol=1e-5)
    np.testing.assert_allclose(samples.probabilities[~own], 1 / N, rtol=1e-5)
    counts, want = np.bincount(samples.indices[own], minlength=N), own.sum() * mass
    assert own.sum() == 400 * 11
    assert np.sum((counts - want) ** 2 / want) < N + 6 * np.sqrt(2 * N)
    odds = N * np.asarray(samples.probabilities, np.float64)
    weights = np.where(own, 1 / odds, 1.0)
    weights = weights / weights.max(axis=1, keepdims=True)
    np.testing.assert_allclose(samples.weights, weights, rtol=1e-4)


def test_a_writer_waits_for_the_queue_of_a_mixture():
    buffer, state = filled(ONLINE, writer=jrb.BlockWhenFull())
    assert not buffer.can_add(state)
    state, _ = buffer.draw(state, jax.random.key(0))
    assert buffer.can_add(state)


def test_a_mixture_is_ready_when_all_of_it_is():
    buffer, state = filled(ONLINE, count=2)
    assert buffer.can_sample(state)
    state, _ = buffer.draw(state, jax.random.key(0))
    assert not buffer.can_sample(state)
    with pytest.raises(ValueError, match="expected something to draw"):
        buffer.draw(buffer.empty(state), jax.random.key(0))


def test_a_sampler_without_mass_masks_its_part_of_a_batch():
    buffer, state = filled(WEIGHED, count=5)
    state = buffer.update_priority(state, jnp.arange(5), jnp.zeros(5))
    assert not buffer.can_sample(state)
    for sample in (
        buffer.sample(state, jax.random.key(0)),
        jax.jit(buffer.sample)(state, jax.random.key(1)),
    ):
        first = np.asarray(sample.info["sampler"]) == 0
        assert np.array_equal(sample.mask, ~first)
        assert np.array_equal(sample.weights, np.where(first, 0.0, 1.0))


def test_draws_of_all_samplers_are_counted():
    buffer, state = filled(dataclasses.replace(PLAIN, count_draws=True))
    total = np.zeros(N, int)
    for key in jax.random.split(jax.random.key(0), 5):
        state, sample = buffer.draw(state, key)
        np.testing.assert_array_equal(sample.info["draws"], total[np.asarray(sample.indices)])
        np.add.at(total, np.asarray(sample.indices), 1)
    np.testing.assert_array_equal(state.sampler.draws, total)


@pytest.mark.parametrize("sampler", [PLAIN, FILLED, WEIGHED, ONLINE, ALL, LIMITED])
def test_descriptions_are_values(sampler, tmp_path):
    assert pickle.loads(pickle.dumps(sampler)) == sampler
    assert hash(dataclasses.replace(sampler)) == hash(sampler)
    assert dataclasses.replace(sampler, shares=sampler.shares[::-1]).shares == sampler.shares[::-1]
    assert isinstance(sampler, jrb.Mixture)
    members = sampler.samplers
    for kind in (jrb.types.PrioritizedSampler, jrb.types.OrderedSampler):
        assert isinstance(sampler, kind) == any(isinstance(one, kind) for one in members)
    is_limited = sampler.max_draws is not None
    assert sampler.consumes == (is_limited or any(one.consumes for one in members))
    buffer, state = filled(sampler)
    state, _ = buffer.draw(state, jax.random.key(0))
    jrb.save(tmp_path / "saved", buffer, state)
    loaded, restored = jrb.load(tmp_path / "saved")
    assert loaded == buffer
    key = jax.random.key(1)
    after, before = loaded.draw(restored, key)[1], buffer.draw(state, key)[1]
    chex.assert_trees_all_equal(after.data, before.data)


@pytest.mark.slow
def test_priorities_and_queues_survive_a_change_of_capacity():
    buffer, state = filled(ALL)
    slots = jnp.arange(N, dtype=jnp.int32)
    state = buffer.update_priority(state, slots, 1 + slots.astype(jnp.float32))
    state, _ = buffer.draw(state, jax.random.key(0))
    larger = dataclasses.replace(buffer, capacity=2 * N)
    moved = jrb.rebuild(buffer, state, larger)
    np.testing.assert_array_equal(larger.priorities(moved)[:N], buffer.priorities(state))
    assert moved.sampler.states[2].count == state.sampler.states[2].count == N - 2
    single = dataclasses.replace(buffer, sampler=jrb.Prioritized())
    alone = jrb.rebuild(buffer, state, single)
    np.testing.assert_array_equal(single.priorities(alone), buffer.priorities(state))


def test_dropped_anchors_are_drawn_by_none():
    pair = jrb.Mixture((jrb.Prioritized(), jrb.Prioritized(alpha=0.0)), (0.5, 0.5))
    buffer, state = filled(pair, batch_size=256)
    state = buffer.drop(state, jnp.arange(N - 2, dtype=jnp.int32))
    assert set(buffer.sample(state, jax.random.key(0)).indices.tolist()) == {N - 2, N - 1}
    buffer, state = filled(WEIGHED)
    with pytest.raises(TypeError, match="drop: expected samplers that can leave anchors out"):
        buffer.drop(state, jnp.arange(2, dtype=jnp.int32))


@pytest.mark.parametrize(
    ("samplers", "shares", "error", "message"),
    [
        ((jrb.Uniform(),), (1.0,), TypeError, "a tuple of two samplers or more"),
        ([jrb.Uniform(), jrb.Queue()], (0.5, 0.5), TypeError, "Use a tuple for a list"),
        ((jrb.Uniform, jrb.Queue()), (0.5, 0.5), TypeError, "a tuple of two samplers or more"),
        ((jrb.Uniform(), jrb.Queue()), (0.5,), ValueError, "shares: expected 2 numbers"),
        ((jrb.Uniform(), jrb.Queue()), (0.5, 0.6), ValueError, "add up to 1"),
        ((jrb.Uniform(), jrb.Queue()), (-0.5, 1.5), ValueError, "at least 0"),
        ((jrb.Uniform(), jrb.Queue()), ("a", "b"), TypeError, "a tuple of numbers"),
        ((jrb.Uniform(count_draws=True), jrb.Queue()), (0.5, 0.5), ValueError, "count_draws"),
        ((jrb.Prioritized(normalize="buffer"), jrb.Uniform()), (0.5, 0.5), ValueError, "'batch'"),
    ],
)
def test_what_a_mixture_refuses(samplers, shares, error, message):
    with pytest.raises(error, match=message):
        jrb.Mixture(samplers, shares)


def test_what_fills_a_batch_must_not_be_used_up():
    with pytest.raises(ValueError, match="fill: expected a last sampler that does not consume"):
        jrb.Mixture((jrb.Uniform(), jrb.Queue()), (0.5, 0.5), fill=True)
    with pytest.raises(TypeError, match="fill"):
        jrb.Mixture((jrb.Queue(), jrb.Uniform()), (0.5, 0.5), fill=1)


def test_where_a_mixture_does_not_fit():
    with pytest.raises(ValueError, match="Lifo: expected anchors that leave in the order"):
        jrb.ReplayBuffer(N, num_envs=2, sampler=ALL, unit=jrb.FrameStack(2))
    buffer = jrb.ReplayBuffer(N, num_envs=2, batch_size=8, sampler=WEIGHED)
    sharded, rows = jrb.Sharded(buffer, shards=2), jnp.zeros((N // 2, 2), jnp.int32)
    state = sharded.extend(sharded.init({"x": jnp.int32(0)}), {"x": rows})
    with pytest.raises(TypeError, match="draw from shards: expected a sampler"):
        sharded.sample(state, jax.random.key(0))
    sharded = jrb.Sharded(dataclasses.replace(buffer, sampler=LIMITED), shards=2)
    state = sharded.extend(sharded.init({"x": jnp.int32(0)}), {"x": rows})
    with pytest.raises(TypeError, match="rebuild: expected a sampler with a method concat_shard"):
        jrb.rebuild(sharded, state, sharded.buffer)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [LIMITED, PLAIN, ONLINE, WEIGHED, ALL, FILLED])
@pytest.mark.parametrize("unit", [jrb.Transition(), jrb.NStep(3, 0.9), jrb.Sequence(2)])
def test_mixtures_keep_the_contracts(sampler, unit):
    done = {"done": jnp.bool_(False), "terminated": jnp.bool_(False), "truncated": jnp.bool_(False)}
    after = {"observation": jnp.zeros(8), "reward": jnp.float32(0), **done}
    example = {"observation": jnp.zeros(8), "action": jnp.zeros(2), "next": after}
    jrb.testing.conform(
        lambda capacity: jrb.ReplayBuffer(capacity, batch_size=8, sampler=sampler, unit=unit),
        example,
    )
