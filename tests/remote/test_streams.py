"""Learners draw what actors send, and each stream stays separate."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.remote import serve
from tests.remote.rows import EXAMPLE, buffer, equal, returned, reward, rows
from tests.samplers import weights


@pytest.fixture(scope="module")
def remote(cluster):
    """Eight streams with room for 64 timesteps each, of which every test uses its own."""
    with serve(buffer(8 * 64), EXAMPLE, streams=8, num_cpus=0) as remote:
        yield remote


def test_no_two_sums_of_rewards_are_equal():
    starts = [
        (lane, time, steps) for lane in range(8) for time in range(200) for steps in (1, 2, 3)
    ]
    sums = [float(reward(lane, time + np.arange(n)).sum()) for lane, time, n in starts]
    assert len(set(sums)) == len(sums)


def of_stream(sample, stream):
    """Returns the timesteps, slots and returns of one stream."""
    lane, time = np.asarray(sample.data["id"]).T
    mine = lane == stream
    rewards = np.asarray(sample.data["next"]["reward"])
    return time[mine], np.asarray(sample.indices)[mine], rewards[mine]


@pytest.mark.parametrize(
    ("storage", "envs"),
    [(jrb.DeviceStorage(), (2,)), (jrb.MemmapStorage(), ())],
    ids=["device, vectors", "memmap"],
)
def test_streams_come_out_as_they_were_sent(cluster, workers, storage, envs):
    width = envs[0] if envs else 1
    made = buffer(96 * width, storage=storage, num_envs=envs[0] if envs else None)
    counts = {0: 40, 3: 11}  # of which the first comes round in its ring of 24
    with serve(made, EXAMPLE, streams=4, num_cpus=0) as remote:
        cluster.get([w.work.remote(remote, s) for w, s in zip(workers, counts, strict=True)])
        for first, count in ((0, 10), (10, 30)):
            calls = zip(workers, counts.values(), strict=True)
            cluster.get([w.send.remote(first, min(count, n - first), 5, envs) for w, n in calls])
        assert remote.stats()["received"] == sum(counts.values()) * width
        assert remote.size() == (24 + 11) * width
        sample = remote.sample(1000)
    assert len(np.unique(sample.indices)) == (24 + 11) * width
    lanes, times = np.asarray(sample.data["id"]).T
    np.testing.assert_array_equal(np.asarray(sample.indices) % (4 * width), lanes)
    for place, (lane, time) in enumerate(zip(lanes.tolist(), times.tolist(), strict=True)):
        stream, env = divmod(lane, width)
        at = (0, env)[: 1 + len(envs)]
        for name, leaf in rows(stream, time, 1, envs)["observation"].items():
            equal(np.asarray(sample.data["observation"][name])[place], leaf[at])
        expected = returned(lane, time, counts[stream] - 1)
        here = float(sample.data["next"]["reward"][place]), int(sample.info["steps"][place])
        assert here == expected
        assert time >= counts[stream] - 24


def test_a_context_reaches_the_sampler(cluster):
    sampler = jrb.Weighted(weights.fresh, leaves=(("next", "reward"),))
    made = buffer(96, sampler=sampler, unit=jrb.Transition())
    with serve(made, EXAMPLE, streams=2, num_cpus=0) as remote:
        with pytest.raises(ValueError, match="a buffer of size 0"):
            remote.sample(context=np.float32(0))
        for stream in range(2):
            remote.extend(rows(stream, 0, 40), stream=stream)
        remote.wait()
        least = lambda sample: int(np.asarray(sample.data["next"]["reward"]).min())
        for lane, time in ((0, 5), (1, 30)):
            bound = reward(np.int32(lane), np.int32(time))
            assert bound <= least(remote.sample(500, context=jnp.asarray(bound))) < bound + 100
        assert least(remote.sample(500)) < 100
        # A function gives the context of each batch; all are requested with one call.
        batches = remote.ahead(500, 4, context=lambda number: reward(np.int32(1), number))
        for number in range(6):
            assert least(next(batches)) >= reward(np.int32(1), number)
        with pytest.raises(ValueError, match="no anchor with a weight above 0"):
            remote.sample(context=np.float32(np.inf))


def test_a_context_that_nothing_uses_is_refused(remote):
    for call in (remote.sample, remote.ahead):
        with pytest.raises(TypeError, match="context: expected None, as Prioritized does not use"):
            call(context=jnp.int32(0))


def test_draws_are_those_of_a_buffer_in_this_process(cluster):
    local = buffer(96, num_envs=4, writer=jrb.PerEnvironment())
    state, root = local.init(EXAMPLE), jax.random.fold_in(jax.random.key(5), 0)
    with serve(buffer(96), EXAMPLE, streams=4, seed=5, num_cpus=0) as remote:
        for stream, first, count in [(0, 0, 9), (2, 0, 5), (0, 9, 30), (1, 0, 1), (3, 0, 11)]:
            chunk, given = rows(stream, first, count), np.arange(1.0, count + 1)
            remote.extend(chunk, stream=stream, priorities=given)
            mask = np.broadcast_to(np.arange(4) == stream, (count, 4))
            wide = lambda leaf: np.repeat(leaf[:, None], 4, axis=1)
            state = local.extend(state, jax.tree.map(wide, chunk), mask, wide(given))
        batches = remote.ahead(depth=4)
        for number in range(3):
            mine, its = local.sample(state, jax.random.fold_in(root, number)), next(batches)
            equal([mine.data, mine.indices, mine.mask], [its.data, its.indices, its.mask])
            np.testing.assert_allclose(mine.weights, its.weights, rtol=1e-5)
        remote.update_priority(its, jnp.full(16, 50.0))
        state = local.update_priority(state, mine, jnp.full(16, 50.0))
        for _ in range(4):
            last = next(batches)  # the first of them were under way already
        masses = np.maximum(local.priorities(state), 0)
        expected = masses[np.asarray(last.indices)] / masses.sum()
        np.testing.assert_allclose(last.probabilities, expected, rtol=1e-5)


def test_a_mask_leaves_timesteps_out(remote):
    mask = np.array([True, False, True, True, False, True])
    remote.extend(rows(0, 0, 6), stream=0, mask=mask)
    remote.update_priority(remote.sample(1), np.ones(1))
    assert set(of_stream(remote.sample(600), 0)[0]) == {0, 2, 3, 5}


def test_lengths_of_many_kinds_are_written_alike(remote):
    first = 0
    for count in (1, 2, 3, 5, 6, 7, 9):
        remote.extend(rows(1, first, count), stream=1)
        first += count
    times, slots, rewards = of_stream(remote.sample(1500), 1)
    assert set(times) == set(range(first)) and len(set(slots)) == first
    for time, its in zip(times.tolist(), rewards.tolist(), strict=True):
        assert its == returned(1, time, first - 1)[0]


def test_a_copy_sends_for_itself_and_does_not_end_the_servers(remote):
    with pickle.loads(pickle.dumps(remote)) as copy:
        remote.extend(rows(2, 0, 5), stream=2)
        remote.wait()
        copy.extend(rows(2, 5, 5), stream=2)
    times, _, rewards = of_stream(remote.sample(1500), 2)
    assert set(times) == set(range(10))
    for time, its in zip(times.tolist(), rewards.tolist(), strict=True):
        last = 4 if time < 5 else 9  # nobody knows that the one goes on from the other
        assert its == returned(2, time, last)[0]
    assert remote.stats()["lost"] == 0


def test_late_priorities_leave_what_was_overwritten_alone(remote):
    remote.extend(rows(3, 0, 64), stream=3)
    remote.extend(rows(4, 0, 64), stream=4)
    old = remote.sample(600)
    remote.extend(rows(3, 64, 64), stream=3)
    remote.update_priority(old, jnp.full(600, 9.0))
    remote.wait()
    new = remote.sample(1500)
    high = np.asarray(new.probabilities) > 2 * np.asarray(new.probabilities).min()
    slots = np.asarray(new.indices)
    expected = np.isin(slots, old.indices) & (slots % 8 != 3)
    assert (slots % 8 == 3).any() and expected.any()
    np.testing.assert_array_equal(high, expected)


def test_batches_ahead_wait_for_the_first_items(cluster, workers):
    with serve(buffer(96, min_size=8), EXAMPLE, streams=1, num_cpus=0) as remote:
        cluster.get(workers[0].work.remote(remote))
        batch = workers[0].following.remote()
        assert not remote.can_sample()
        with pytest.raises(
            ValueError, match=r"something to draw, got .* size 0 where min_size is 8"
        ):
            remote.sample()
        remote.extend(rows(0, 0, 4), stream=0)
        before = remote.stats()["draws"]
        while remote.stats()["draws"] < before + 4:
            pass  # the iterator asks again, two batches at a time, only after a draw without items
        assert not remote.can_sample() and not cluster.wait([batch], timeout=0)[0]
        remote.extend(rows(0, 4, 4), stream=0)
        assert cluster.get(batch).shape == (16, 2) and remote.can_sample()


def test_wide_numbers_stay_exact_where_jax_would_narrow_them(cluster):
    numbers = 2**41 + np.arange(6)
    items = {"int": numbers, "float": numbers + 0.1}
    description = jrb.ReplayBuffer(2 * len(numbers), batch_size=4)
    for shards in (1, 2):
        with jax.enable_x64(True):
            example = {"int": np.int64(0), "float": np.float64(0)}
            remote = serve(description, example, streams=2, shards=shards, num_cpus=0)
        with remote:  # this thread does without
            for stream in range(2):
                remote.extend(items, stream=stream)
            remote.wait()
            for batch in (remote.sample(), next(remote.ahead())):
                at = np.asarray(batch.data["int"]) - numbers[0]
                np.testing.assert_array_equal(np.asarray(batch.data["float"]), items["float"][at])
                assert batch.data["float"].dtype == np.float64
