"""Writers that keep the best items, a random subset, or the items they have."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.authoring import context_of

KEY = jax.random.key(0)
EXAMPLE = {"id": jnp.int32(0), "rank": jnp.float32(0)}


class Best:
    """A model of the N best items: a dict from slot to (rank, id)."""

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


@pytest.mark.slow
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
    fixed = dataclasses.replace(buffer, writer=jrb.ReadOnly())
    sample = fixed.sample(state, KEY)
    assert sample.mask.all()
    fixed.update_priority(state, sample, jnp.ones(2))
    for method in ("add", "empty"):
        with pytest.raises(TypeError, match=rf"{method}: expected a buffer that can be written"):
            getattr(fixed, method)(state, *[EXAMPLE] * (method == "add"))


# Reservoirs.


@pytest.mark.slow
def test_a_reservoir_holds_every_item_with_the_same_probability():
    buffer = jrb.ReplayBuffer(20, writer=jrb.Reservoir(3))
    empty = buffer.init({"id": jnp.int32(0)})

    def held(seed):
        state = empty.replace(writer=empty.writer.replace(seed=seed))
        return buffer.extend(state, {"id": jnp.arange(100)}).storage["id"]

    seeds = jax.random.bits(KEY, (5000, 2), jnp.uint32)
    found = np.asarray(jax.vmap(held)(seeds))
    assert all(len(set(one)) == 20 for one in found[:50].tolist())
    counts = np.bincount(found.ravel(), minlength=100)
    # Each count is of 5000 draws of probability 1/5; the counts of one state add up to 20.
    statistic = ((counts - 1000) ** 2 / 800).sum() * 99 / 100
    assert 55 < statistic < 160
    pairs = np.mean([{0, 99} <= set(one) for one in found.tolist()])
    assert abs(pairs - 0.2 * 19 / 99) < 0.012


@pytest.mark.slow
@pytest.mark.parametrize("envs", [None, 2])
def test_a_reservoir_does_not_depend_on_calls_and_masks_are_as_if_nothing_came(envs):
    writer = jrb.Reservoir(jax.random.key(5))
    buffer = jrb.ReplayBuffer(8, num_envs=envs, batch_size=4, writer=writer)
    lead = () if envs is None else (envs,)
    rows = {"id": jnp.arange(60 * (envs or 1)).reshape(60, *lead)}
    example = {"id": jnp.int32(0)}
    whole = buffer.extend(buffer.init(example), rows)
    single = buffer.init(example)
    add = jax.jit(buffer.add)
    for row in range(60):
        single = add(single, {"id": rows["id"][row]})
        single = add(single, {"id": rows["id"][row] * 0 - 1}, mask=jnp.bool_(False))
    np.testing.assert_array_equal(single.storage["id"], whole.storage["id"])
    order = jrb.items(buffer, whole)["id"]
    assert (np.diff(order) > 0).all()
    assert set(order.tolist()) == set(whole.storage["id"].tolist())
    sample = buffer.sample(whole, KEY)
    gone = buffer.extend(whole, {"id": -jnp.ones((400, *lead), jnp.int32)})
    late = buffer.set(gone, sample, {"id": sample.data["id"]})
    np.testing.assert_array_equal(late.storage["id"], gone.storage["id"])


def test_a_reservoir_that_was_emptied_begins_anew():
    buffer = jrb.ReplayBuffer(5, batch_size=4, writer=jrb.Reservoir(1))
    state = buffer.extend(buffer.init({"id": jnp.int32(0)}), {"id": jnp.arange(50)})
    state = buffer.extend(buffer.empty(state), {"id": jnp.arange(5)})
    assert sorted(state.storage["id"].tolist()) == [0, 1, 2, 3, 4]


def test_a_key_of_a_reservoir_is_checked():
    with pytest.raises(TypeError, match="Reservoir: key: expected a PRNG key or an integer"):
        jrb.Reservoir("reward")
    same = jrb.Reservoir(jax.random.key(1)), jrb.Reservoir(jax.random.key(1))
    assert same[0] == same[1] != jrb.Reservoir(jax.random.key(2))


# Buffers that fill up.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "envs"),
    [
        (jrb.Transition(), 1),
        (jrb.Transition(), 3),
        (jrb.NStep(2, 0.9, strict=True), 2),
        (jrb.Sequence(2, burn_in=1), 2),
        (jrb.FrameStack(2, paths=("id",)), 2),
    ],
)
def test_a_queue_that_refuses_loses_nothing(unit, envs):
    """Every added item is drawn once and in order, even if the queue was full meanwhile."""
    buffers = [
        jrb.ReplayBuffer(rows * envs, envs, 3, jrb.Queue(), unit, writer)
        for rows, writer in ((6, jrb.BlockWhenFull()), (200, jrb.RoundRobin()))
    ]
    example = {"id": jnp.int32(0), "next": {"reward": jnp.float32(0), "done": False}}
    small, large = (buffer.init(example) for buffer in buffers)
    add, plain = jax.jit(buffers[0].add), jax.jit(buffers[1].add)
    draw, rng = jax.jit(buffers[0].draw), np.random.default_rng(0)
    number, drawn, refused = 0, [], 0
    for _ in range(150):
        if rng.random() < 0.6:
            ids = jnp.arange(number, number + envs, dtype=jnp.int32)
            done = jnp.asarray(rng.random(envs) < 0.2)
            row = {"id": ids, "next": {"reward": jnp.zeros(envs), "done": done}}
            if buffers[0].can_add(small):
                small, large, number = add(small, row), plain(large, row), number + envs
            else:
                before = small
                with pytest.raises(ValueError, match="for which there is room, got 1"):
                    buffers[0].add(small, row)
                small, refused = add(small, row), refused + 1
                assert int(buffers[0].size(small)) == int(buffers[0].size(before))
        else:
            small, sample = draw(small, KEY)
            drawn.append((sample.data, sample.mask))
    assert refused
    want = []
    while buffers[1].can_sample(large):
        large, sample = buffers[1].draw(large, KEY)
        want.append((sample.data, sample.mask))

    def ids(parts):
        masks = [np.asarray(mask).reshape(3, -1).any(1) for _, mask in parts]
        rows = [np.asarray(data["id"])[keep] for (data, _), keep in zip(parts, masks, strict=True)]
        return np.concatenate([row.reshape(len(row), -1) for row in rows if len(row)])

    got = ids(drawn)
    assert len(got) > 30
    np.testing.assert_array_equal(got, ids(want)[: len(got)])


def test_rows_that_nobody_can_draw_are_not_overwritten_either():
    unit = jrb.Sequence(3)
    buffer = jrb.ReplayBuffer(6, batch_size=2, unit=unit, writer=jrb.BlockWhenFull())
    done = jnp.array([True, True, True, False, False, False])
    items = {"id": jnp.arange(6), "next": {"done": done}}
    state = buffer.extend(buffer.init({"id": 0, "next": {"done": False}}), items)
    assert int(unit.anchors(context_of(buffer, state.writer), state.unit).count) == 1
    assert not buffer.can_add(state)


def test_a_full_buffer_refuses_until_it_is_emptied():
    buffer = jrb.ReplayBuffer(3, batch_size=1, writer=jrb.BlockWhenFull())
    state = buffer.extend(buffer.init({"id": 0}), {"id": jnp.arange(2)})
    assert buffer.can_add(state)
    with pytest.raises(ValueError, match=r"at most 1 rows.*got 2"):
        buffer.extend(state, {"id": jnp.arange(2)})
    more = jax.jit(buffer.extend)(state, {"id": jnp.array([5, 6])})
    assert jrb.items(buffer, more)["id"].tolist() == [0, 1, 5]
    masked = buffer.extend(state, {"id": jnp.array([5, 6])}, jnp.array([False, True]))
    assert jrb.items(buffer, masked)["id"].tolist() == [0, 1, 6]
    assert not buffer.can_add(masked)
    assert buffer.can_add(buffer.empty(masked))
    fixed = dataclasses.replace(buffer, writer=jrb.ReadOnly())
    assert not fixed.can_add(state)
    assert dataclasses.replace(buffer, writer=jrb.RoundRobin()).can_add(masked)
