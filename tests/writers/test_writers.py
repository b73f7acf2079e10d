"""Writers that keep the best, or nothing new."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(0)
EXAMPLE = {"id": jnp.int32(0), "rank": jnp.float32(0)}


class Best:
    """The N best in plain Python: a dict from slot to (rank, id)."""

    def __init__(self, capacity):
        self.capacity, self.held = capacity, {}

    def add(self, rank, number):
        if np.isnan(rank):
            return
        if len(self.held) < self.capacity:
            self.held[len(self.held)] = (rank, number)
            return
        worst = min(self.held, key=lambda slot: (self.held[slot][0], slot))
        if rank > self.held[worst][0]:
            self.held[worst] = (rank, number)


ranks = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([np.nan, np.inf, -np.inf]))


@pytest.mark.parametrize(("capacity", "envs"), [(1, 1), (7, 1), (12, 3)])
@hypothesis.given(calls=st.lists(st.lists(ranks, min_size=6, max_size=6), max_size=6))
@hypothesis.settings(max_examples=25)
def test_the_best_stay(capacity, envs, calls):
    writer = jrb.MaxValue("rank")
    buffer = jrb.ReplayBuffer(capacity, num_envs=envs, batch_size=2, writer=writer)
    state, model = buffer.init(EXAMPLE), Best(capacity)
    for number, call in enumerate(calls):
        ids = np.arange(6, dtype=np.int32) + 6 * number
        items = {"id": ids, "rank": np.array(call, np.float32)}
        mask = np.arange(6 // envs) % 3 != 1
        state = buffer.extend(
            state, jax.tree.map(lambda x: x.reshape(6 // envs, envs), items), mask
        )
        for place, (rank, number_) in enumerate(zip(call, ids, strict=True)):
            if mask[place // envs]:
                model.add(rank, int(number_))
    assert int(buffer.size(state)) == len(model.held)
    got = buffer.take(state, jnp.arange(int(buffer.size(state)), dtype=jnp.int32))
    for slot, (rank, number) in model.held.items():
        assert (float(got["rank"][slot]), int(got["id"][slot])) == (rank, number)


def test_a_late_priority_is_not_for_the_item_that_took_the_place():
    buffer = jrb.ReplayBuffer(
        2, batch_size=2, writer=jrb.MaxValue("rank"), sampler=jrb.Prioritized()
    )
    items = lambda *ranks: {"id": np.arange(len(ranks), dtype=np.int32), "rank": np.float32(ranks)}
    state = buffer.extend(buffer.init(EXAMPLE), items(1, 2))
    late = buffer.sample(state, KEY)
    state = buffer.extend(state, items(5, 6))
    state = buffer.update_priority(state, late, jnp.full(2, 9.0))
    np.testing.assert_array_equal(state.sampler.raw, [1.0, 1.0])


def test_ranks_of_several_numbers_are_added_up():
    buffer = jrb.ReplayBuffer(1, batch_size=1, writer=jrb.MaxValue(("next", "reward")))
    item = lambda *reward: {"next": {"reward": jnp.array(reward)}}
    state = buffer.add(buffer.init(item(0.0, 0.0)), item(1.0, 2.0))
    state = buffer.add(state, item(2.0, 0.5))
    assert buffer.take(state, jnp.array([0]))["next"]["reward"].tolist() == [[1.0, 2.0]]


def test_a_rank_that_is_missing_or_inexact_is_refused():
    make = lambda: jrb.ReplayBuffer(4, writer=jrb.MaxValue(("next", "rank")))
    with pytest.raises(ValueError, match=r"'next/rank'.*'next/reward'"):
        make().init({"next": {"reward": jnp.float32(0)}})
    with pytest.raises(TypeError, match="float32 holds exactly, got int32"):
        make().init({"next": {"rank": jnp.int32(0)}})


@pytest.mark.parametrize("part", [jrb.NStep(2, 0.9), jrb.Sequence(2), jrb.FrameStack(2)])
def test_what_needs_time_needs_a_writer_that_keeps_it(part):
    with pytest.raises(ValueError, match="in the order of time, got MaxValue"):
        jrb.ReplayBuffer(4, writer=jrb.MaxValue("rank"), unit=part)


def test_a_queue_of_the_best_makes_no_sense():
    with pytest.raises(ValueError, match="in the order of time, got MaxValue"):
        jrb.ReplayBuffer(4, writer=jrb.MaxValue("rank"), sampler=jrb.Queue())


def test_an_immutable_buffer_is_drawn_from_and_not_written():
    buffer = jrb.ReplayBuffer(4, batch_size=2, sampler=jrb.Prioritized())
    state = buffer.add(buffer.init(EXAMPLE), EXAMPLE)
    fixed = dataclasses.replace(buffer, writer=jrb.Immutable())
    sample = fixed.sample(state, KEY)
    assert sample.mask.all()
    fixed.update_priority(state, sample, jnp.ones(2))
    for verb in ("add", "empty"):
        with pytest.raises(TypeError, match=rf"{verb}: expected a buffer that can be written"):
            getattr(fixed, verb)(state, *[EXAMPLE] * (verb == "add"))
