"""Environments that are written independently, against one buffer per environment."""

import dataclasses
import functools
import gc
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.authoring import context_of
from jrb.types import Draw, Sampler, component

pytestmark = pytest.mark.slow

E, R, T, STEPS, PROGRAMS = 3, 5, 2, 25, 60
N = E * R
EXAMPLE = {
    "observation": jnp.int32(0),
    "next": {"observation": jnp.int32(0), "reward": jnp.float32(0), "done": False},
}
CHANCE = jnp.array([0.9, 0.5, 0.15])  # of a step of each environment
UNITS = {
    "n-step": jrb.NStep(3, 0.9),
    "strict n-step": jrb.NStep(3, 0.9, strict=True),
    "windows as long as the ring": jrb.Sequence(R),
    "padded windows of a period": jrb.Sequence(3, burn_in=1, stride=2, partial="pad"),
    "windows of a period across ends": jrb.Sequence(2, stride=3, cross_episodes=True),
    "whole episodes": jrb.Sequence(3, sample_by="whole_episodes"),
    "stacked windows": jrb.FrameStack(2, unit=jrb.Sequence(2)),
    "stacked strict n-step": jrb.FrameStack(3, unit=jrb.NStep(2, 0.9, strict=True)),
    "hindsight": jrb.Hindsight(
        lambda achieved, goal: jnp.float32(achieved == goal),
        "final",
        ratio=1.0,
        achieved=("next", "observation"),
        goal=("observation",),
        next_goal=None,
    ),
}


WITHOUT_SET = ("padded windows of a period", "stacked windows", "stacked strict n-step")


def program(key):
    """Returns a random program: the methods and their arguments, `[STEPS, ...]`."""
    keys = jax.random.split(key, 6)
    shape = (STEPS, T, E)
    number = jnp.arange(STEPS * T * E, dtype=jnp.int32).reshape(shape)
    return {
        "method": jax.random.choice(
            keys[0], 6, (STEPS,), p=jnp.array([0.5, 0.2, 0.1, 0.1, 0.08, 0.02])
        ),
        "items": {
            "observation": number,
            "next": {
                "observation": number + 1,
                "reward": number.astype(jnp.float32),
                "done": jax.random.bernoulli(keys[1], 0.2, shape),
            },
        },
        "mask": jax.random.bernoulli(keys[2], CHANCE, shape),
        "row": jax.random.randint(keys[3], (STEPS, E), 0, R),
        "flag": jax.random.bernoulli(keys[4], 0.5, (STEPS, E)),
        "priority": jax.random.uniform(keys[5], shape),
    }


def methods(buffer, given, slots, leave_out):
    """Returns the methods of a step of a program, without one of them, to save compile time."""
    part = functools.partial(jax.tree.map, lambda leaf: leaf[0])
    flag = {"next": {"done": given["flag"].reshape(slots.shape)}}
    methods = [
        lambda state: buffer.extend(state, given["items"], given["mask"], given["priority"]),
        lambda state: buffer.add(state, part(given["items"]), given["mask"][0]),
        lambda state: buffer.truncate(state, given["flag"]),
        lambda state: buffer.set(state, slots, flag),
        lambda state: buffer.update_priority(
            state, slots, given["priority"][0].reshape(slots.shape)
        ),
        buffer.empty,
    ]
    if not buffer.sampler.prioritized:
        methods[0] = lambda state: buffer.extend(state, given["items"], given["mask"])
        methods[4] = lambda state: state
    if buffer.unit.one_row:
        methods[3] = lambda state: state
    methods[leave_out] = lambda state: state
    return methods


@component
class EverySlot(Sampler):
    """Draws each slot once, in order."""

    def draw(self, ring, state, anchors, key, batch_size, beta=None):
        ones = jnp.ones(batch_size)
        slots = jnp.arange(batch_size, dtype=jnp.int32)
        return state, Draw(slots=slots, probabilities=ones, weights=ones, mask=ones > 0)


def seen(buffer, state):
    """Returns all observable values of a state by slot, `[N]`, and the number of anchors."""
    context = context_of(buffer, state.writer)
    anchors = buffer.unit.anchors(context, state.unit)
    place = jnp.arange(buffer.capacity, dtype=jnp.int32)
    slots, _ = anchors.nth(jnp.minimum(place, jnp.maximum(anchors.count - 1, 0)), jax.random.key(0))
    there = jnp.zeros(buffer.capacity, bool)
    there = there.at[jnp.where(place < anchors.count, slots, N)].set(True, mode="drop")
    reader = dataclasses.replace(buffer, sampler=EverySlot())
    batch = reader.sample(state.replace(sampler={}), jax.random.key(0), batch_size=buffer.capacity)
    data, info = batch.data, batch.info
    held = context.held.holds(buffer.ring, place)
    found = {"there": there, "held": held, "data": data, "info": info}
    if buffer.sampler.prioritized:
        found["priorities"] = buffer.sampler.priorities(state.sampler)
        found["highest"] = jnp.broadcast_to(state.sampler.highest, place.shape)
    return found, anchors.count


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
def test_lanes_are_a_buffer_for_each_environment(name):
    sampler = jrb.Uniform() if name == "hindsight" else jrb.Prioritized(new_priority=0.5)
    parts = {"unit": UNITS[name], "sampler": sampler}
    lanes = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment(), **parts)
    alone, left_out = jrb.ReplayBuffer(R, **parts), 3 if name in WITHOUT_SET else 1

    def together(state, given):
        slots = given["row"] * E + jnp.arange(E, dtype=jnp.int32)
        state = jax.lax.switch(given["method"], methods(lanes, given, slots, left_out), state)
        return state, seen(lanes, state)

    def each(states, given):
        def one(state, env):
            mine = {key: jax.tree.map(lambda leaf: leaf[..., env], given[key]) for key in own}
            slots = mine["row"][None]
            return jax.lax.switch(given["method"], methods(alone, mine, slots, left_out), state)

        states = jax.vmap(one)(states, jnp.arange(E))
        return states, jax.vmap(functools.partial(seen, alone))(states)

    own = ["items", "mask", "row", "flag", "priority"]
    given = jax.vmap(program)(jax.random.split(jax.random.key(1), PROGRAMS))
    run = lambda step, state: jax.jit(jax.vmap(lambda given: jax.lax.scan(step, state, given)[1]))
    begun = jax.tree.map(lambda leaf: jnp.stack([leaf] * E), alone.init(EXAMPLE))
    found, count = run(together, lanes.init(EXAMPLE))(given)
    wanted, counts = run(each, begun)(given)
    np.testing.assert_array_equal(count, counts.sum(-1))
    there = np.swapaxes(wanted["there"], -1, -2).reshape((*count.shape, N))
    held = np.swapaxes(wanted["held"], -1, -2).reshape((*count.shape, N))
    assert there.any() and (~there).any()
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        other = np.moveaxis(other, 2, 3).reshape(one.shape)  # [P, S, E, R] -> [P, S, R * E]
        which = there if "data" in str(path) or "info" in str(path) else np.ones_like(held)
        np.testing.assert_array_equal(np.asarray(one)[which], other[which], err_msg=str(path))


def filled(buffer, lengths, envs=E):
    """Returns a state after `lengths[e]` steps of environment e: items 100 e, 100 e + 1, ..."""
    most = max(lengths)
    number = jnp.arange(most, dtype=jnp.int32)[:, None] + 100 * jnp.arange(envs, dtype=jnp.int32)
    done = jnp.broadcast_to(jnp.arange(most)[:, None] % 4 == 3, number.shape)
    items = {
        "observation": number,
        "next": {"observation": number + 1, "reward": number.astype(jnp.float32), "done": done},
    }
    mask = jnp.arange(most)[:, None] < jnp.array(lengths) if len(set(lengths)) > 1 else None
    return buffer.extend(buffer.init(EXAMPLE), items, mask)


def test_episodes_of_lanes_are_those_of_a_buffer_for_each_environment():
    unit, lengths = jrb.Sequence(2, sample_by="episodes"), [7, 3, 1]
    buffer = jrb.ReplayBuffer(
        N, num_envs=E, unit=unit, writer=jrb.PerEnvironment(), batch_size=2000
    )
    state = filled(buffer, lengths)
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    assert int(anchors.count) == 3  # 2 episodes of environment 0, 1 of environment 1
    drawn = buffer.sample(state, jax.random.key(3)).data["observation"]
    share = np.mean(drawn[:, 0] == 2)
    assert abs(share - 1 / 3) < 0.05

    alone, found = jrb.ReplayBuffer(R, num_envs=1, unit=unit, batch_size=2000), set()
    for env, length in enumerate(lengths):
        one = filled(alone, [length], envs=1)
        assert bool(alone.can_sample(one)) == (length > 1)
        if length > 1:
            windows = alone.sample(one, jax.random.key(env)).data["observation"] + 100 * env
            found |= {tuple(window) for window in windows.tolist()}
    assert found == {(2, 3), (4, 5), (5, 6), (100, 101), (101, 102)}
    assert found == {tuple(window) for window in drawn.tolist()}


def test_draws_are_uniform_over_all_that_is_held():
    buffer = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment(), batch_size=20_000)
    state = filled(buffer, [1, 8, 3])
    drawn = np.asarray(buffer.sample(state, jax.random.key(0)).data["observation"])
    found, counts = np.unique(drawn, return_counts=True)
    assert found.tolist() == [0, 103, 104, 105, 106, 107, 200, 201, 202]
    mean = len(drawn) / len(found)
    assert ((counts - mean) ** 2 / mean).sum() < 26  # 8 degrees of freedom, p = 0.001


@pytest.mark.parametrize("cut", [1, 2, 5, 14])
def test_lanes_do_not_depend_on_how_rows_are_cut_into_calls(cut):
    buffer = jrb.ReplayBuffer(
        N,
        num_envs=E,
        writer=jrb.PerEnvironment(),
        sampler=jrb.Prioritized(),
        unit=jrb.NStep(2, 0.9),
    )
    given = program(jax.random.key(5))
    flat = lambda leaf: leaf.reshape(-1, E)[:28]
    items, mask = jax.tree.map(flat, given["items"]), flat(given["mask"])
    whole = buffer.extend(buffer.init(EXAMPLE), items, mask)
    state = buffer.init(EXAMPLE)
    for start in range(0, 28, cut):
        part = slice(start, start + cut)
        some = jax.tree.map(operator.itemgetter(part), items)
        state = buffer.extend(state, some, mask[part])
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_epoch_goes_on_while_full_lanes_are_written():
    buffer = jrb.ReplayBuffer(
        N, num_envs=E, writer=jrb.PerEnvironment(), sampler=jrb.WithoutReplacement(), batch_size=4
    )
    state, draw, slots = filled(buffer, [9, 6, 7]), jax.jit(buffer.draw), []
    for step in range(4):
        state, sample = draw(state, jax.random.key(step))
        slots += np.asarray(sample.indices)[np.asarray(sample.mask)].tolist()
        items = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (E,)), EXAMPLE)
        state = buffer.add(state, items, jnp.arange(E) == step % E)
    assert sorted(slots) == list(range(N))


def test_what_is_held_is_read_out_lane_by_lane():
    buffer = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment())
    state = filled(buffer, [7, 2, 0])
    assert int(buffer.size(state)) == 7
    assert jrb.items(buffer, state)["observation"].tolist() == [2, 3, 4, 5, 100, 6, 101]
    slots, there = buffer.newest(state, 3)
    found = np.where(there, buffer.take(state, jnp.where(there, slots, 0))["observation"], -1)
    assert found.tolist() == [[4, -1, -1], [5, 100, -1], [6, 101, -1]]
    episodes = jrb.episodes(buffer, state)
    told = [(each.environment, each.items["observation"].tolist(), each.cut) for each in episodes]
    assert told == [(0, [2, 3], True), (1, [100, 101], False), (0, [4, 5, 6], False)]
    assert jrb.stats(buffer, state)["episodes"] == 3
    with pytest.raises(ValueError, match=r"nothing is held|are held"):
        buffer.take(state, jnp.array([2]))


def test_masks_and_parts_that_do_not_fit_are_refused():
    items = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (E,)), EXAMPLE)
    together = jrb.ReplayBuffer(N, num_envs=E)
    with pytest.raises(ValueError, match=r"add: mask: expected shape \(\), as RoundRobin writes"):
        together.add(together.init(EXAMPLE), items, jnp.ones(E, bool))
    lanes = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment())
    state = lanes.init(EXAMPLE)
    with pytest.raises(ValueError, match=r"add: mask: expected shape \(\), got \(2,\)"):
        lanes.add(state, items, jnp.ones(2, bool))
    with pytest.raises(TypeError, match="mask: expected dtype bool"):
        lanes.add(state, items, jnp.ones(E))
    assert int(lanes.size(lanes.add(state, items, jnp.bool_(False)))) == 0
    for parts in (
        {"sampler": jrb.Queue()},
        {"sampler": jrb.Lifo()},
        {"sampler": jrb.Newest(0.5)},
        {"storage": jrb.DeviceStorage(share_next_observations=True)},
        {"storage": jrb.SpillStorage(None, device_capacity=E)},
    ):
        with pytest.raises(ValueError, match="expected a writer of all environments together"):
            jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment(), **parts)


def test_a_single_environment_may_have_a_lane():
    buffer = jrb.ReplayBuffer(4, writer=jrb.PerEnvironment(), batch_size=2)
    state = buffer.init(EXAMPLE)
    for step in range(6):
        state = buffer.add(
            state, {**EXAMPLE, "observation": jnp.int32(step)}, mask=jnp.bool_(step != 3)
        )
    assert jrb.items(buffer, state)["observation"].tolist() == [1, 2, 4, 5]


def test_objects_lie_in_lanes_too():
    buffer = jrb.ReplayBuffer(4, num_envs=2, writer=jrb.PerEnvironment(), storage=jrb.ListStorage())
    state = buffer.add(buffer.init(None), ["a", "b"])
    state = buffer.extend(
        state, [["c", "d"], ["e", "f"]], jnp.array([[True, False], [True, False]])
    )
    assert jrb.items(buffer, state) == ["c", "e", "b"]


STORAGES = {
    "device": lambda path: jrb.DeviceStorage(),
    "host": lambda path: jrb.MemmapStorage(path),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_lanes_are_saved_and_loaded(storage, tmp_path):
    parts = {"sampler": jrb.Prioritized(), "unit": jrb.Sequence(2), "batch_size": 8}
    storage = STORAGES[storage](tmp_path / "store")
    buffer = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment(), storage=storage, **parts)
    state, path = filled(buffer, [4, 2, 0]), tmp_path / "saved"
    items = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (E,)), EXAMPLE)
    for step in range(8):
        jrb.save(path, buffer, state)
        _, loaded = jrb.load(path)
        one, other = (buffer.sample(each, jax.random.key(step)) for each in (state, loaded))
        for leaf, same in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(leaf, same)
        state = buffer.add(state, items, jnp.arange(E) <= step % E)
    with pytest.raises(ValueError, match="layout='h5'"):
        jrb.save(tmp_path / "file.h5", buffer, state, layout="h5")
    with pytest.raises(ValueError, match="write_torchrl: expected a writer of all environments"):
        jrb.checkpoint.write_torchrl(tmp_path / "dump", buffer, state)


def test_a_store_that_was_written_on_is_as_it_was_saved(tmp_path):
    example = {"number": jnp.int32(0), "frame": jnp.zeros(2**15)}  # two rows in a block
    storage = jrb.MemmapStorage(tmp_path / "store")
    buffer = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment(), storage=storage)
    env, state = jnp.arange(E, dtype=jnp.int32), buffer.init(example)

    def row(step):
        frame = jnp.broadcast_to(jnp.float32(step), (E, 2**15))
        return {"number": 100 * env + step, "frame": frame}

    for step in range(R + 3):
        state = buffer.add(state, row(step))
    jrb.save(storage.path, buffer, state)
    for step in range(20):  # three rounds of an environment, and some of another
        state = buffer.add(state, row(step + R + 3), env == (0 if step < 16 else 1))
    del state
    gc.collect()
    _, found = jrb.load(storage.path)
    rest = jrb.items(buffer, found)
    assert sorted(rest["number"].tolist()) == [
        100 * e + step for e in range(E) for step in range(3, R + 3)
    ]
    np.testing.assert_array_equal(rest["frame"][:, 7], rest["number"] % 100)
    found = buffer.add(found, row(R + 3), env == 1)
    jrb.save(storage.path, buffer, found)
    assert jrb.checkpoint.verify(storage.path) == []
    assert jrb.items(buffer, jrb.load(storage.path)[1])["number"].tolist().count(103 + R) == 1


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [(3, [7, 2, 0]), (3, [5, 5, 5]), (5, [1, 9, 4]), (8, [7, 2, 0]), (8, [1, 9, 4])],
)
def test_lanes_are_rebuilt_larger_and_smaller(lengths, rows):
    parts = {"sampler": jrb.Prioritized(), "unit": jrb.NStep(2, 0.9)}
    old = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment(), **parts)
    state = filled(old, lengths)
    slots, count = old.in_order(state)
    slots = slots[: int(count)]
    state = old.update_priority(state, slots, jnp.arange(1.0, int(count) + 1))
    new = jrb.ReplayBuffer(rows * E, num_envs=E, writer=jrb.PerEnvironment(), **parts)
    made = jrb.rebuild(old, state, new)
    for env, length in enumerate(lengths):
        kept = list(range(100 * env + max(0, length - min(rows, R)), 100 * env + length))
        lane = [n for n in jrb.items(new, made)["observation"].tolist() if n // 100 == env]
        assert lane == kept
    known = dict(zip(jrb.items(old, state)["observation"].tolist(), range(1, 99), strict=False))
    order, count = new.in_order(made)
    priorities = new.priorities(made, order[: int(count)]).tolist()
    assert priorities == [known[n] for n in jrb.items(new, made)["observation"].tolist()]


def test_lanes_become_rows_of_all_environments_and_come_from_them():
    lanes = jrb.ReplayBuffer(N, num_envs=E, writer=jrb.PerEnvironment(), unit=jrb.NStep(2, 0.9))
    state = filled(lanes, [7, 3, 1])  # holds the last 5, 3 and 1 of them
    together = jrb.ReplayBuffer(N, num_envs=E, unit=jrb.NStep(2, 0.9))
    made = jrb.rebuild(lanes, state, together)
    assert sorted(jrb.items(together, made)["observation"].tolist()) == [
        *range(2, 7), 100, 101, 102, 200
    ]  # fmt: skip
    lines = [each.items["observation"].tolist() for each in jrb.episodes(together, made)]
    assert sorted(lines) == [[2, 3], [4], [5, 6], [100], [101, 102], [200]]
    back = jrb.rebuild(together, made, lanes)
    assert sorted(jrb.items(lanes, back)["observation"].tolist()) == sorted(
        jrb.items(together, made)["observation"].tolist()
    )
    alone = jrb.ReplayBuffer(4, unit=jrb.NStep(2, 0.9))
    assert int(alone.size(jrb.rebuild(lanes, state, alone))) == 3  # the newest row
