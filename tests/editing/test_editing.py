"""Editing stored items: what changes, what is refused, and what a save writes."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
STORAGES = {
    "device": lambda: jrb.DeviceStorage(),
    "once": lambda: jrb.DeviceStorage(share_next_observations=True, terminal_capacity=8),
    "memmap": lambda: jrb.MemmapStorage(None),
    "spill": lambda: jrb.SpillStorage(None, 4),
    "compressed": lambda: jrb.CompressedStorage(min_bytes=1),
    "memmap once": lambda: jrb.MemmapStorage(share_next_observations=True),
    "spill once": lambda: jrb.SpillStorage(None, 4, share_next_observations=True),
}


def filled(storage="device", length=10, **parts):
    buffer = jrb.ReplayBuffer(8, batch_size=4, storage=STORAGES[storage](), **parts)
    count = jnp.arange(length, dtype=jnp.int32)
    items = {
        "observation": count,
        "half": count.astype(jnp.bfloat16),
        "key": jax.random.split(KEY, length),
        "next": {
            "observation": count + 1,
            "reward": jnp.zeros(length),
            "done": jnp.zeros(length, bool),
        },
    }
    example = jax.tree.map(lambda leaf: leaf[0], items)
    return buffer, buffer.extend(buffer.init(example), items)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_only_what_is_named_changes(storage, compiled):
    buffer, state = filled(storage)
    before = jrb.items(buffer, state)
    slots, _ = buffer.in_order(state)
    edit = jax.jit(buffer.set) if compiled else buffer.set
    at = slots[jnp.array([2, 5, 2])]  # of equal slots, the last one counts
    new = {
        "half": jnp.array([1.5, 2.5, 3.5], jnp.bfloat16),
        "key": jax.random.split(jax.random.key(9), 3),
        "next": {"reward": jnp.array([7.0, 8.0, 9.0])},
    }
    after = jrb.items(buffer, edit(state, at, new))
    want = jax.tree.map(np.array, before)
    for place, number in ((5, 1), (2, 2)):
        want["half"][place], want["next"]["reward"][place] = 1.5 + number, 7.0 + number
        want["key"][place] = jax.random.key_data(new["key"])[number]
    chex.assert_trees_all_equal(after, want)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_everything_is_set_or_mapped(storage, compiled):
    buffer, state = filled(storage)
    maybe = jax.jit if compiled else lambda function: function
    rewards = {"next": {"reward": jnp.arange(8.0)}}
    state = maybe(lambda state: buffer.set(state, ..., rewards))(state)
    slots, _ = buffer.in_order(state)
    assert jrb.items(buffer, state)["next"]["reward"].tolist() == slots.tolist()

    def relabel(items):
        reward = items["observation"].astype(jnp.float32) * 10
        return {"next": {"reward": reward, "observation": items["next"]["observation"] + 100}}

    state = maybe(lambda state: buffer.map(state, relabel, batch_size=3))(state)
    items = jrb.items(buffer, state)
    assert items["observation"].tolist() == list(range(2, 10))
    assert items["next"]["reward"].tolist() == [10.0 * n for n in range(2, 10)]
    assert items["next"]["observation"].tolist() == list(range(103, 111))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_partly_filled_buffer_is_mapped_as_far_as_it_is(storage):
    buffer, state = filled(storage, length=3)
    state = buffer.map(state, lambda items: {"next": {"done": items["observation"] == 1}})
    assert jrb.items(buffer, state)["next"]["done"].tolist() == [False, True, False]
    state = buffer.set(state, jnp.array([5]), {"observation": jnp.array([77], jnp.int32)})
    assert jrb.items(buffer, state)["observation"].tolist() == [0, 1, 2]  # slot 5 is empty


@pytest.mark.parametrize("storage", ["device", "memmap", "spill"])
def test_what_was_overwritten_since_a_draw_is_left_alone(storage):
    buffer, state = filled(storage)
    sample = buffer.sample(state, KEY)
    one = jax.tree.map(lambda leaf: leaf[None], buffer.take(state, jnp.int32(0)))
    for _ in range(8):
        state = buffer.extend(state, one)
    marks = jnp.full(4, -1, jnp.int32)
    assert (
        jrb.items(buffer, buffer.set(state, sample, {"observation": marks}))["observation"]
        == np.asarray(one["observation"])
    ).all()
    fresh = buffer.sample(state, KEY)
    state = buffer.set(state, fresh, {"observation": marks})
    assert (buffer.take(state, fresh.indices)["observation"] == -1).all()


@pytest.mark.parametrize(
    "sampler",
    [jrb.Prioritized(), jrb.Queue(), jrb.WithoutReplacement()],
    ids=lambda s: type(s).__name__,
)
def test_rows_that_leave_as_an_edit_needs_room_are_drawn_no_more(sampler):
    buffer, state = filled("once", sampler=sampler)
    small = dataclasses.replace(
        buffer, storage=jrb.DeviceStorage(share_next_observations=True, terminal_capacity=3)
    )
    state = jrb.rebuild(buffer, state, small)
    changed = small.map(state, lambda items: {"next": {"observation": items["observation"] + 50}})
    held = jrb.items(small, changed)
    assert held["next"]["observation"].tolist() == [n + 50 for n in held["observation"]]
    assert 0 < len(held["observation"]) == int(small.size(changed)) < 8
    sample = small.sample(changed, KEY, 40)
    drawn = set(sample.data["observation"][sample.mask].tolist())
    assert drawn == set(held["observation"].tolist())
    if small.sampler.prioritized:
        assert int((small.priorities(changed) >= 0).sum()) == len(held["observation"])


def test_an_end_that_is_edited_is_seen_at_once():
    buffer, state = filled(unit=jrb.NStep(3, 1.0))
    slots, _ = buffer.in_order(state)
    ends = jnp.array([True, False])
    state = buffer.set(state, slots[jnp.array([3, 4])], {"next": {"done": ends}})
    sample = buffer.sample(state, KEY, 200)
    steps = {}
    for index, count in zip(sample.indices.tolist(), sample.info["steps"].tolist(), strict=True):
        steps[slots.tolist().index(index)] = count
    assert [steps[place] for place in range(8)] == [3, 3, 2, 1, 3, 3, 2, 1]
    assert [each.length for each in jrb.episodes(buffer, state)] == [4, 4]


def test_a_function_is_compiled_once(compilations):
    buffer, state = filled()
    function = lambda items: {"observation": items["observation"] + 1}
    state = buffer.map(state, function)
    with compilations() as count:
        state = buffer.map(state, function)
    assert count() == 0
    assert jrb.items(buffer, state)["observation"].tolist() == list(range(4, 12))


def test_objects_are_replaced():
    buffer, state = jrb.from_items(list("abcd"), storage=jrb.ListStorage(), batch_size=2)
    after = buffer.set(state, jnp.array([1, 3]), ["B", None])
    assert jrb.items(buffer, after) == ["a", "B", "c", None]
    with pytest.raises(jrb.StaleError):
        buffer.set(state, jnp.array([0]), ["x"])
    with pytest.raises(ValueError, match="expected 2 objects, one for each slot, got 1"):
        buffer.set(after, jnp.array([1, 3]), ["B"])


def test_what_cannot_be_edited_is_refused():
    buffer, state = filled()
    slots, reward = jnp.arange(2), jnp.zeros(2)
    refused = [
        (slots, {"next": {"rewards": reward}}, ValueError, r"leaf 'next/rewards'.*'next/reward'"),
        (slots, {"next": {"reward": jnp.zeros(3)}}, ValueError, r"next/reward.*\(2,\)"),
        (slots, {"next": {"reward": slots}}, TypeError, "next/reward.*float32"),
        (jnp.array([8]), {"observation": slots[:1]}, ValueError, r"expected indices in \[0, 8\)"),
        (reward, {"observation": slots}, TypeError, "expected integers or a Sample"),
        (slots[None], {"observation": slots}, ValueError, r"expected slots of shape \(B,\)"),
        (..., {"observation": slots}, ValueError, r"observation.*\(8,\)"),
    ]
    for where, values, kind, message in refused:
        with pytest.raises(kind, match=message):
            buffer.set(state, where, values)
    fixed = dataclasses.replace(buffer, writer=jrb.ReadOnly())
    with pytest.raises(TypeError, match="set: expected a buffer that can be written"):
        fixed.set(state, slots, {"observation": slots})
    ranks, its = jrb.from_items(
        {"r": jnp.arange(3.0), "x": jnp.arange(3)}, writer=jrb.MaxValue("r")
    )
    with pytest.raises(ValueError, match="leaf 'r': expected leaves that MaxValue does not rank"):
        ranks.set(its, slots, {"r": reward})
    ranks.set(its, slots, {"x": slots})
    with pytest.raises(TypeError, match=r"drop: .*got Uniform\. jrb\.Prioritized\(\) can"):
        buffer.drop(state, slots)
    with pytest.raises(TypeError, match="add: priorities: expected a sampler that takes"):
        buffer.add(state, buffer.take(state, jnp.int32(0)), priorities=jnp.float32(1))


def test_everything_that_is_dropped_is_drawn_no_more_whatever_comes_later():
    buffer, state = filled(sampler=jrb.Prioritized(alpha=0.0))
    late = buffer.sample(state, KEY, 100)
    state = buffer.drop(state, jnp.array([0, 1, 2, 3, 3]))
    state = buffer.update_priority(state, late, jnp.full(100, 5.0))
    indices = np.asarray(buffer.sample(state, KEY, 4000).indices)
    assert set(indices.tolist()) == {4, 5, 6, 7}
    assert ((np.bincount(indices)[4:] - 1000) ** 2 / 750).sum() < 20
    state = buffer.drop(state, buffer.sample(state, KEY, 100))
    assert not buffer.can_sample(state)
    with pytest.raises(ValueError, match="expected something to draw"):
        buffer.sample(state, KEY)
    assert not jax.jit(buffer.sample)(state, KEY).mask.any()
    state = buffer.extend(state, jrb.items(buffer, state) | {"key": jax.random.split(KEY, 8)})
    assert buffer.can_sample(state)


MASKED = [jrb.DeviceStorage, jrb.MemmapStorage, lambda: jrb.SpillStorage(None, 4)]


@pytest.mark.parametrize("storage", MASKED, ids=["device", "memmap", "spill"])
def test_a_mask_says_which_slots_are_dropped(storage):
    buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=jrb.Prioritized(), storage=storage())
    methods = jrb.jitted(buffer)
    state = methods.extend(methods.init({"x": 0}), {"x": jnp.arange(6)})
    is_large = lambda state: buffer.take(state, jnp.arange(8))["x"] > 2
    inside = jax.jit(lambda state: buffer.drop(state, is_large(state)))(state)
    flags = np.arange(8) > 2  # slots that hold nothing are skipped
    for after in (inside, buffer.drop(state, flags), buffer.drop(state, flags.tolist())):
        assert buffer.priorities(after).tolist() == [1, 1, 1, -2, -2, -2, -1, -1]
    state = methods.drop(state, flags)
    assert buffer.priorities(state).tolist() == [1, 1, 1, -2, -2, -2, -1, -1]
    assert set(buffer.sample(state, KEY, 50).data["x"].tolist()) <= {0, 1, 2}


def test_objects_and_shards_are_dropped_by_a_mask():
    buffer = jrb.ReplayBuffer(3, sampler=jrb.Prioritized(), storage=jrb.ListStorage())
    state = buffer.drop(buffer.extend(buffer.init(None), ["a", "b", "c"]), [False, True, False])
    assert buffer.priorities(state).tolist() == [1, -2, 1]
    sharded = jrb.Sharded(jrb.ReplayBuffer(8, 2, batch_size=4, sampler=jrb.Prioritized()), 2)
    state = sharded.extend(sharded.init({"x": 0}), {"x": jnp.arange(6).reshape(3, 2)})
    drop = lambda state: sharded.drop(state, sharded.take(state, slots)["x"] % 3 == 1)
    slots = jnp.broadcast_to(jnp.arange(4), (2, 4))
    want = [[1, 1, -2, -1], [-2, 1, 1, -1]]
    assert sharded.priorities(drop(state)).tolist() == want
    assert sharded.priorities(jax.jit(drop)(state)).tolist() == want
    with pytest.raises(ValueError, match=r"drop: mask: expected shape \(2, 4\), got \(8,\)"):
        jax.eval_shape(sharded.drop, state, jnp.ones(8, bool))


@pytest.mark.parametrize("shape", [(), (7,), (9,), (1, 8), (8, 1)])
def test_a_mask_of_another_shape_is_refused_while_tracing(shape):
    buffer, state = filled(sampler=jrb.Prioritized())
    with pytest.raises(ValueError, match=r"drop: mask: expected shape \(8,\), got"):
        jax.eval_shape(buffer.drop, state, jnp.ones(shape, bool))
    with pytest.raises(TypeError, match="update_priority: indices: expected integers"):
        buffer.update_priority(state, jnp.ones(8, bool), jnp.ones(8))


def test_slots_of_n_are_padding_for_drop():
    buffer, state = filled(sampler=jrb.Prioritized())
    slots = jnp.array([8, 2, 8])
    for after in (buffer.drop(state, slots), jax.jit(buffer.drop)(state, slots)):
        assert np.flatnonzero(buffer.priorities(after) == -2).tolist() == [2]


def test_the_next_save_writes_every_edit(tmp_path):
    buffer = jrb.ReplayBuffer(20_000, batch_size=4)
    state = buffer.extend(buffer.init({"x": jnp.zeros(8)}), {"x": jnp.ones((20_000, 8))})
    jrb.save(tmp_path, buffer, state, keep=3)
    one = buffer.set(state, jnp.array([12_345]), {"x": jnp.full((1, 8), 2.0)})
    jrb.save(tmp_path, buffer, one, keep=3)
    other = buffer.set(state, jnp.array([3_210]), {"x": jnp.full((1, 8), 3.0)})
    jrb.save(tmp_path, buffer, other, keep=3)  # another branch with as many edits
    for generation, want in ((1, state), (2, one), (3, other)):
        _, back = jrb.load(tmp_path, generation=generation)
        np.testing.assert_array_equal(back.storage["x"], want.storage["x"])
    assert jrb.checkpoint.verify(tmp_path) == []


@pytest.mark.parametrize(
    "storage", [jrb.MemmapStorage, lambda path: jrb.SpillStorage(path, 4)], ids=["memmap", "spill"]
)
def test_an_edit_of_files_is_not_promised_before_it_is_saved(storage, tmp_path):
    path = tmp_path / "store"
    buffer, state = jrb.from_items(
        {"x": jnp.arange(8.0)}, storage=storage(path), batch_size=8, sampler=jrb.Queue()
    )
    jrb.save(path, buffer, state)
    for number in range(5):  # more edits than the spare rows can hold
        state = buffer.map(state, lambda items: {"x": items["x"] + 1})
        promised, its = jrb.load(path)
        assert jrb.items(promised, its)["x"].tolist() == [n + number // 3 * 3.0 for n in range(8)]
        if number == 2:
            jrb.save(path, buffer, state)
    jrb.save(path, buffer, state)
    assert jrb.items(*jrb.load(path))["x"].tolist() == [n + 5.0 for n in range(8)]
    assert jrb.checkpoint.verify(path) == []
    assert buffer.draw(state, KEY)[1].data["x"].tolist() == [n + 5.0 for n in range(8)]


@pytest.mark.parametrize("storage", ["device", "memmap", "spill"])
def test_ends_that_a_function_edits_batch_by_batch_are_seen(storage):
    buffer, state = filled(storage, unit=jrb.Sequence(2), sampler=jrb.Prioritized())
    odd = lambda items: {"next": {"done": items["observation"] % 3 == 1}}
    state = buffer.map(state, odd, batch_size=3)
    slots, _ = buffer.in_order(state)
    known = np.asarray(buffer.priorities(state, slots))
    ends = jrb.items(buffer, state)["observation"] % 3 == 1
    assert (known >= 0).tolist() == [not end for end in ends[:-1]] + [False]


@pytest.mark.parametrize(
    "storage", [jrb.MemmapStorage(), jrb.SpillStorage(None, device_capacity=4)], ids=repr
)
def test_flags_of_items_on_the_host_are_edited_by_what_is_compiled(storage, compilations):
    unit = jrb.Sequence(2)
    buffer = jrb.ReplayBuffer(12, num_envs=2, batch_size=2, unit=unit, storage=storage)
    rows = {"x": jnp.arange(10).reshape(5, 2), "next": {"done": jnp.zeros((5, 2), bool)}}
    state = buffer.extend(buffer.init({"x": 0, "next": {"done": False}}), rows)
    ends = lambda flag: {"next": {"done": jnp.array([flag, False])}}
    state = buffer.set(state, jnp.array([2, 5]), ends(True))
    with compilations() as count:
        for number in range(4):
            state = buffer.set(state, jnp.array([number, 5]), ends(number % 2 == 0))
            assert int(buffer.size(state)) == 10
    assert count() == 0
    drawn = np.asarray(buffer.sample(state, jax.random.key(0), 99).data["x"])
    assert set(drawn[:, 0].tolist()) == {1, 3, 4, 5, 6, 7}
