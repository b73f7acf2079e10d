"""`rebuild` for another description keeps the newest rows and their priorities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)


STEP = {"x": 0, "next": {"done": False}}


def steps(length):
    return {"x": jnp.arange(length), "next": {"done": jnp.zeros(length, bool)}}


def filled(length=9, envs=2, **parts):
    """Returns a buffer and a wrapped-around state; each item has its own number."""
    buffer = jrb.ReplayBuffer(6 * envs, envs, batch_size=4, **parts)
    ids = np.arange(length * envs, dtype=np.int32).reshape(length, envs)
    items = {
        "observation": ids,
        "next": {"observation": ids + envs, "reward": ids.astype(np.float32), "done": ids % 7 == 6},
    }
    example = jax.tree.map(lambda leaf: leaf[0, 0], items)
    return buffer, buffer.extend(buffer.init(example), items)


PARTS = [
    {"sampler": jrb.Uniform()},
    {"sampler": jrb.Prioritized(alpha=0.3)},
    {"sampler": jrb.Queue(), "writer": jrb.BlockWhenFull()},
    {"unit": jrb.NStep(3, 0.9, strict=True)},
    {"unit": jrb.Sequence(2)},
    {"unit": jrb.FrameStack(2)},
    {"storage": jrb.DeviceStorage(share_next_observations=True)},
    {"writer": jrb.ReadOnly()},
    {"writer": jrb.Reservoir(3), "unit": jrb.Transition()},
    {"writer": jrb.MaxValue(("next", "reward")), "unit": jrb.Transition()},
]


CASES = [(change, [6, 20][number % 2]) for number, change in enumerate(PARTS)]
CASES += [(change, 12) for change in PARTS[1::2]]


@pytest.mark.parametrize(("change", "capacity"), CASES, ids=str)
def test_the_newest_items_stay_with_their_priorities(change, capacity):
    old, state = filled(unit=jrb.NStep(2, 0.9), sampler=jrb.Prioritized())
    held, _ = old.in_order(state)
    state = old.update_priority(state, held, jnp.arange(12.0))
    new = dataclasses.replace(old, capacity=capacity, **change)
    back = jrb.rebuild(old, state, new)
    count = min(capacity, 12)
    want = np.arange(18)[-count:]
    assert jrb.items(new, back)["observation"].tolist() == want.tolist()
    assert int(new.size(back)) == count
    if new.sampler.prioritized:
        got = np.asarray(new.priorities(back, new.in_order(back)[0][:count]))
        kept = got >= 0
        np.testing.assert_array_equal(got[kept], np.arange(12.0)[-count:][kept])
        assert kept.any()
    sample = new.sample(back, KEY)
    assert sample.mask.any()
    assert float(old.size(state)) == 12  # the old state is unchanged


@pytest.mark.parametrize("envs", [None, 1, 3, 4])
def test_streams_are_dealt_out_anew(envs):
    old, state = filled(unit=jrb.Sequence(2))
    new = jrb.ReplayBuffer(12, envs, batch_size=50, unit=jrb.Sequence(2))
    back = jrb.rebuild(old, state, new)
    sample = new.sample(back, KEY)
    pairs = np.asarray(sample.data["observation"])
    assert (pairs[:, 1] - pairs[:, 0] == 2).all()  # consecutive rows of one old environment
    assert sorted(jrb.items(new, back)["observation"].tolist()) == list(range(6, 18))


def test_what_was_dropped_stays_so_and_what_waits_keeps_what_it_was_given():
    unit = jrb.NStep(3, 0.9, strict=True)
    buffer = jrb.ReplayBuffer(8, batch_size=2, unit=unit, sampler=jrb.Prioritized())
    item = {"next": {"reward": jnp.zeros(5), "done": jnp.zeros(5, bool)}}
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], item))
    state = buffer.extend(state, item, priorities=jnp.arange(1.0, 6.0))
    state = buffer.drop(state, jnp.array([1]))
    new = dataclasses.replace(buffer, capacity=20)
    back = jrb.rebuild(buffer, state, new)
    assert new.priorities(back)[:5].tolist() == [1.0, -2.0, 3.0, -1.0, -1.0]
    back = new.add(back, jax.tree.map(lambda leaf: leaf[0], item))
    assert new.priorities(back)[:5].tolist() == [1.0, -2.0, 3.0, 4.0, -1.0]


def test_what_was_dropped_and_is_no_anchor_any_more_enters_like_others():
    flags, whole = jnp.zeros(7, bool), jrb.Sequence(2)
    items = {"next": {"reward": jnp.zeros(7), "done": flags}}
    old, state = jrb.from_items(items, unit=whole, sampler=jrb.Prioritized(), batch_size=2)
    state = old.drop(state, jnp.array([1, 3]))
    new = dataclasses.replace(old, unit=jrb.Sequence(2, stride=3))
    back = jrb.rebuild(old, state, new)
    assert new.priorities(back).tolist() == [1.0, -1.0, -1.0, -2.0, -1.0, -1.0, -1.0]
    # An episode that ends earlier shifts the anchors.
    back = new.set(back, jnp.array([0]), {"next": {"done": jnp.array([True])}})
    assert new.priorities(back).tolist() == [-1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0]


def test_stacks_whose_first_frames_may_be_gone_are_not_drawn():
    old, state = filled()
    new = dataclasses.replace(old, unit=jrb.FrameStack(3), batch_size=64)
    sample = new.sample(jrb.rebuild(old, state, new), KEY)
    stacks = {tuple(stack) for stack in np.asarray(sample.data["observation"]).tolist()}
    assert {(8, 8, 8), (8, 8, 10), (8, 10, 12), (7, 9, 11)} <= stacks  # 6 ends an episode
    assert not stacks & {(6, 6, 6), (7, 7, 7), (7, 7, 9)}


def test_a_reservoir_goes_on_counting_unless_it_has_room():
    data = {"x": jnp.arange(500)}
    old, state = jrb.from_items(data, capacity=50, writer=jrb.Reservoir(1))
    for capacity, came in ((50, 500), (20, 500), (60, 50)):
        new = dataclasses.replace(old, capacity=capacity)
        back = jrb.rebuild(old, state, new)
        assert int(back.writer.came) == came
        assert set(jrb.items(new, back)["x"].tolist()) <= set(jrb.items(old, state)["x"].tolist())
        more = new.extend(back, {"x": jnp.full(20, -1)})
        assert int(new.size(more)) == min(capacity, 70)


def test_a_queue_goes_on_and_another_sampler_begins():
    old, state = filled(sampler=jrb.Queue())
    state, _ = old.draw(state, KEY)
    new = dataclasses.replace(old, capacity=20)
    back = jrb.rebuild(old, state, new)
    assert new.draw(back, KEY)[1].data["observation"].tolist() == [10, 11, 12, 13]
    first = dataclasses.replace(old, sampler=jrb.Uniform())
    back = jrb.rebuild(first, state.replace(sampler={}), new)
    assert new.draw(back, KEY)[1].data["observation"].tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("kind", [jrb.Queue, jrb.Lifo])
def test_all_is_pending_after_another_unit(kind):
    """Rows that were no anchors before, as their windows had no end, are not lost."""
    old = jrb.ReplayBuffer(8, batch_size=4, unit=jrb.Sequence(3), sampler=kind())
    state = old.extend(old.init(STEP), steps(4))
    state, first = old.draw(state, KEY)
    assert first.mask.tolist() == [[True] * 3, [True] * 3, [False] * 3, [False] * 3]
    new = dataclasses.replace(old, unit=jrb.Transition())
    batch = new.draw(jrb.rebuild(old, state, new), KEY)[1]
    assert sorted(batch.data["x"][batch.mask].tolist()) == [0, 1, 2, 3]


def test_a_mixture_with_a_queue_keeps_priorities_after_another_unit():
    sampler = jrb.Mixture((jrb.Prioritized(), jrb.Queue()), (0.5, 0.5))
    old = jrb.ReplayBuffer(8, batch_size=4, unit=jrb.Sequence(1), sampler=sampler)
    state = old.extend(old.init(STEP), steps(4))
    state = old.update_priority(state, jnp.arange(2), jnp.array([3.0, 5.0]))
    new = dataclasses.replace(old, unit=jrb.Transition())
    after = jrb.rebuild(old, state, new)
    assert new.priorities(after)[:4].tolist() == [3, 5, 1, 1]
    assert int(new.draw(after, KEY)[1].mask.sum()) == 4


def test_what_cannot_carry_over_is_refused():
    old, state = filled(sampler=jrb.Queue(), unit=jrb.FrameStack(2))
    with pytest.raises(ValueError, match=r"num_envs:.*FrameStack.*rows from behind the seams"):
        jrb.rebuild(old, state, dataclasses.replace(old, num_envs=3))
    plain = dataclasses.replace(old, num_envs=3, unit=jrb.Transition())
    with pytest.raises(ValueError, match=r"num_envs:.*Queue, whose order would be lost"):
        jrb.rebuild(old, state, plain)
    with pytest.raises(TypeError, match="rebuild: expected items of arrays on both sides"):
        jrb.rebuild(old, state, jrb.ReplayBuffer(4, storage=jrb.ListStorage()))
    mix = jrb.Mix((old,), (1.0,), 4)
    with pytest.raises(TypeError, match="rebuild: expected single buffers, got Mix"):
        jrb.rebuild(mix, (state,), old)
    many = jax.vmap(lambda _: state)(jnp.arange(2))
    with pytest.raises(TypeError, match="outside jit, got a traced one"):
        jax.eval_shape(lambda it: jrb.rebuild(old, it, old), state)
    with pytest.raises(TypeError, match="states under vmap"):
        jrb.rebuild(old, many, old)
    bare, its = jrb.from_items(jnp.arange(4.0))
    with pytest.raises(ValueError, match="done: expected a leaf"):
        jrb.rebuild(bare, its, dataclasses.replace(bare, unit=jrb.Sequence(2)))
    ranks, its = jrb.from_items({"r": jnp.array([1.0, jnp.nan])})
    with pytest.raises(ValueError, match="MaxValue takes, got 1 that it refuses"):
        jrb.rebuild(ranks, its, dataclasses.replace(ranks, writer=jrb.MaxValue("r")))
