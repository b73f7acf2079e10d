"""Tests of `convert` in `jrb.rebuild` and `jrb.load`: old replays with new items."""

import dataclasses
import importlib
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.authoring import enable_x64

ITEM = {
    "observation": jnp.zeros(3),
    "next": {"observation": jnp.zeros(3), "reward": 0.0, "done": False},
}
PRIORITIZED = {"sampler": jrb.Prioritized(), "unit": jrb.NStep(3, discount=0.9)}
DATA = pathlib.Path(__file__).parents[1] / "data"
BUFFERS = {
    "prioritized": PRIORITIZED,
    "epochs": {"sampler": jrb.WithoutReplacement(), "unit": jrb.Sequence(3)},
    "lanes": {"num_envs": 2, "writer": jrb.PerEnvironment(), **PRIORITIZED},
    "best": {"writer": jrb.MaxValue(("next", "reward")), "sampler": jrb.Prioritized()},
    "reservoir": {"writer": jrb.Reservoir(1), "num_envs": 2},
    "queue": {"sampler": jrb.Queue(), "writer": jrb.BlockWhenFull()},
    "shared": {"storage": jrb.DeviceStorage(share_next_observations=True, terminal_capacity=12)},
    "memmap": {"storage": jrb.MemmapStorage(None), **PRIORITIZED},
    "on disk once": {"storage": jrb.MemmapStorage(share_next_observations=True), **PRIORITIZED},
    "spill": {"storage": jrb.SpillStorage(None, device_capacity=8), "unit": jrb.FrameStack(2)},
    "compressed": {"storage": jrb.CompressedStorage(min_bytes=1), "unit": jrb.FrameStack(2)},
    "moments": {"transforms": (jrb.transforms.RunningNormalize(),), **PRIORITIZED},
}


def cost(item):
    return {**item, "cost": jnp.sum(item["observation"]) + item["next"]["reward"]}


def doubled(item):
    """Adds a leaf that is exact, of one item or of many."""
    return {**item, "double": 2 * item["observation"]}


def rows(seed, *lead):
    rng = np.random.default_rng(seed)
    observation = rng.normal(size=(*lead, 3)).astype(np.float32)
    following = np.roll(observation, -1, axis=0)
    reward = rng.normal(size=lead).astype(np.float32)
    step = {"observation": following, "reward": reward, "done": rng.random(lead) < 0.2}
    return {"observation": observation, "next": step}


def filled(parts, rounds=5):
    """Returns a buffer whose ring has wrapped in the middle, and its state."""
    buffer = jrb.ReplayBuffer(24, batch_size=6, **parts)
    state, key = buffer.init(ITEM), jax.random.key(5)
    envs = buffer.num_envs
    for number in range(rounds):
        for row in range(7):
            item = rows(10 * number + row, *(() if envs is None else (envs,)))
            mask = None
            if isinstance(buffer.writer, jrb.PerEnvironment):
                mask = jnp.array([True, row % 3 > 0])
            if bool(buffer.can_add(state)):
                state = buffer.add(state, item, mask)
        state, sample = buffer.draw(state, jax.random.fold_in(key, number))
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, sample, jnp.arange(1.0, 7.0))
    return buffer, state


def assert_continues(buffer, state, converted, after, steps=4):
    """Checks that both states draw the same, with the further leaf, now and after more writes."""
    for number in range(steps):
        state, one = buffer.draw(state, jax.random.key(number))
        after, two = converted.draw(after, jax.random.key(number))
        extra = two.data.pop("cost")
        chex.assert_trees_all_equal(one.data, two.data)
        for name in ("indices", "weights", "mask", "stamp"):
            chex.assert_trees_all_equal(vars(one)[name], vars(two)[name])
        if type(buffer.unit) in (jrb.Transition,):
            want = one.data["observation"].sum(-1) + one.data["next"]["reward"]
            np.testing.assert_allclose(extra, want, rtol=1e-5, atol=1e-5)
        envs = () if buffer.num_envs is None else (buffer.num_envs,)
        item = rows(100 + number, *envs)
        new = {**item, "cost": item["observation"].sum(-1) + item["next"]["reward"]}
        if bool(buffer.can_add(state)):
            state, after = buffer.add(state, item), converted.add(after, new)
            size = buffer.size(state)
            assert converted.size(after) == size


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUFFERS))
def test_rebuild_keeps_slots_and_draws(name):
    buffer, state = filled(BUFFERS[name])
    after = jrb.rebuild(buffer, state, buffer, convert=cost)
    items, converted = jrb.items(buffer, state), jrb.items(buffer, after)
    made = converted.pop("cost")
    chex.assert_trees_all_equal(items, converted)
    want = items["observation"].sum(-1) + items["next"]["reward"]
    np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-5)
    if buffer.sampler.prioritized:
        chex.assert_trees_all_equal(buffer.priorities(state), buffer.priorities(after))
    assert_continues(buffer, state, buffer, after)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["memmap", *(pytest.param(it, marks=pytest.mark.slow) for it in ("prioritized", "lanes"))],
)
def test_load_converts_what_was_saved(name, tmp_path):
    buffer, state = filled(BUFFERS[name])
    jrb.save(tmp_path / "replay", buffer, state)
    loaded, after = jrb.load(tmp_path / "replay", convert=cost)
    assert_continues(buffer, state, loaded, after)


@pytest.mark.slow
def test_load_from_hdf5_with_another_batch_size(tmp_path):
    buffer, state = filled(PRIORITIZED)
    jrb.save(tmp_path / "replay.h5", buffer, state, layout="h5")
    given = dataclasses.replace(buffer, batch_size=9)
    loaded, after = jrb.load(tmp_path / "replay.h5", given, convert=cost)
    assert loaded == given
    sample = given.sample(after, jax.random.key(1))
    expected = given.sample(state, jax.random.key(1))
    chex.assert_trees_all_equal(sample.indices, expected.indices)


@pytest.mark.slow
def test_a_store_is_converted_to_another_path(tmp_path):
    old = jrb.MemmapStorage(tmp_path / "old")
    buffer, state = filled({"storage": old, **PRIORITIZED})
    jrb.save(tmp_path / "old", buffer, state)
    expected = buffer.sample(state, jax.random.key(3))
    with pytest.raises(ValueError, match="another path"):
        jrb.load(tmp_path / "old", buffer, convert=cost)
    new = dataclasses.replace(buffer, storage=jrb.MemmapStorage(tmp_path / "new"))
    loaded, after = jrb.load(tmp_path / "old", new, convert=cost)
    sample = loaded.sample(after, jax.random.key(3))
    chex.assert_trees_all_equal(sample.indices, expected.indices)
    jrb.save(tmp_path / "new", loaded, after)
    again, restored = jrb.load(tmp_path / "new")
    chex.assert_trees_all_equal(again.sample(restored, jax.random.key(3)), sample)


@pytest.mark.slow
def test_several_buffers(tmp_path):
    one, first = filled(PRIORITIZED)
    two, second = filled({"num_envs": 2})
    buffers, states = {"a": one, "b": two}, {"a": first, "b": second}
    jrb.save(tmp_path / "dict", buffers, states)
    loaded, after = jrb.load(tmp_path / "dict", convert={"a": cost, "b": lambda item: item})
    assert_continues(one, first, loaded["a"], after["a"])
    chex.assert_trees_all_equal(jrb.items(two, second), jrb.items(loaded["b"], after["b"]))
    mix = jrb.Mix((one, one), (0.5, 0.5), batch_size=8)
    jrb.save(tmp_path / "mix", mix, (first, first))
    loaded, after = jrb.load(tmp_path / "mix", convert=cost)
    assert_continues(one, first, loaded.buffers[1], after[1])
    with pytest.raises(ValueError, match="convert functions"):
        jrb.load(tmp_path / "dict", convert={"a": cost})


@pytest.mark.slow
def test_shards(tmp_path):
    sharded = jrb.Sharded(jrb.ReplayBuffer(24, num_envs=2, batch_size=4, **PRIORITIZED), shards=2)
    state = sharded.init(ITEM)
    for number in range(17):
        state = sharded.add(state, rows(number, 2))
    jrb.save(tmp_path / "shards", sharded, state)
    loaded, after = jrb.load(tmp_path / "shards", convert=cost)
    key = jax.random.key(2)
    one, two = sharded.sample(state, key), loaded.sample(after, key)
    two.data.pop("cost")
    chex.assert_trees_all_equal(one.data, two.data)
    fewer = jrb.rebuild(sharded, state, sharded.buffer, convert=cost)
    assert jrb.items(sharded.buffer, fewer)["cost"].shape == (24,)


def test_objects_are_converted_by_python(tmp_path):
    buffer = jrb.ReplayBuffer(5, batch_size=4, storage=jrb.ListStorage())
    state = buffer.extend(buffer.init(None), [{"n": number} for number in range(8)])
    after = jrb.rebuild(buffer, state, buffer, convert=lambda thing: {**thing, "old": True})
    assert jrb.items(buffer, after) == [{"n": n, "old": True} for n in range(3, 8)]
    drawn, again = (buffer.sample(each, jax.random.key(0)).data for each in (state, after))
    assert [thing["n"] for thing in drawn] == [thing["n"] for thing in again]


@pytest.mark.slow
def test_changed_ends_rebuild_the_unit():
    buffer, state = filled({"unit": jrb.Sequence(3), "sampler": jrb.Prioritized()})

    def endless(item):
        return {**item, "next": {**item["next"], "done": jnp.zeros((), bool)}}

    after = jrb.rebuild(buffer, state, buffer, convert=endless)
    sample = buffer.sample(after, jax.random.key(0), 256)
    assert not sample.data["next"]["done"].any()
    anchors = int((buffer.priorities(after) >= 0).sum())
    assert anchors > int((buffer.priorities(state) >= 0).sum())


def test_ranks_that_change_are_ranked_again():
    buffer, state = filled(BUFFERS["best"])

    def opposite(item):
        return {**item, "next": {**item["next"], "reward": -item["next"]["reward"]}}

    after = jrb.rebuild(buffer, state, buffer, convert=opposite)
    lowest = float(jrb.items(buffer, after)["next"]["reward"].min())
    worse = {**ITEM, "next": {**ITEM["next"], "reward": np.float32(lowest - 1)}}
    chex.assert_trees_all_equal(
        jrb.items(buffer, buffer.add(after, worse)), jrb.items(buffer, after)
    )


@pytest.mark.slow
def test_another_capacity_keeps_priorities():
    buffer, state = filled({"sampler": jrb.Prioritized()})
    smaller = dataclasses.replace(buffer, capacity=10)
    after = jrb.rebuild(buffer, state, smaller, convert=cost)
    old = np.asarray(buffer.priorities(state))[np.asarray(buffer.in_order(state)[0])][-10:]
    np.testing.assert_array_equal(smaller.priorities(after), old)


def test_what_cannot_be_converted_raises():
    buffer, state = filled(PRIORITIZED)
    with pytest.raises(TypeError, match="convert: expected a function of one stored item, got 3"):
        jrb.rebuild(buffer, state, buffer, convert=3)
    with pytest.raises((TypeError, ValueError), match="next/done"):
        jrb.rebuild(buffer, state, buffer, convert=lambda item: {"x": item["observation"]})
    with pytest.raises(TypeError, match="no leaf"):
        jrb.rebuild(buffer, state, buffer, convert=lambda item: {})
    with pytest.raises(TypeError, match="convert: leaf 'note': expected"):
        jrb.rebuild(buffer, state, buffer, convert=lambda item: {**item, "note": "text"})


def test_items_of_64_bits_are_narrowed_and_then_converted(tmp_path):
    with enable_x64():
        wide = {"observation": np.arange(12.0).reshape(4, 3)}
        wide["next"] = {"reward": np.arange(4.0), "done": np.zeros(4, bool)}
        jrb.save(tmp_path / "wide", *jrb.from_items(wide, batch_size=2))
    with pytest.raises(TypeError, match=r"expected a dtype that JAX keeps, got float64.*cast=True"):
        jrb.load(tmp_path / "wide", convert=cost)
    buffer, state = jrb.load(tmp_path / "wide", cast=True, convert=cost)
    items = jrb.items(buffer, state)
    np.testing.assert_allclose(items["cost"], wide["observation"].sum(1) + np.arange(4))
    assert items["observation"].dtype == np.float32


def test_a_buffer_that_requires_a_mask_goes_on_with_what_another_saved(tmp_path):
    storage = jrb.MemmapStorage(tmp_path / "rows")
    buffer = jrb.ReplayBuffer(8, batch_size=2, storage=storage)
    state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(5)})
    jrb.save(tmp_path / "rows", buffer, state)
    masked = dataclasses.replace(buffer, requires_mask=True)
    loaded, after = jrb.load(tmp_path / "rows", masked)  # in place: nothing is converted
    assert loaded == masked
    with pytest.raises(TypeError, match="mask: expected one flag"):
        loaded.add(after, {"x": jnp.int32(5)})
    after = loaded.add(after, {"x": jnp.int32(5)}, mask=jnp.bool_(True))
    assert jrb.items(loaded, after)["x"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prioritized", "lanes", "best", "queue", "moments"])
def test_what_orbax_restored_is_converted(name, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    orbax = importlib.import_module("jrb.checkpoint.orbax")
    buffer, state = filled(BUFFERS[name])
    expected = jrb.rebuild(buffer, state, buffer, convert=cost)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(buffer=orbax.BufferSave(buffer, state)))
        manager.wait_until_finished()
        how = ocp.args.Composite(buffer=orbax.BufferRestore())
        restored, back = manager.restore(1, args=how).buffer
    after = jrb.rebuild(restored, back, restored, convert=cost)
    chex.assert_trees_all_equal(after, expected)
    loaded, again = jrb.load(tmp_path / "1" / "buffer" / "jrb", convert=cost)
    assert loaded == restored == buffer
    chex.assert_trees_all_equal(again, expected)
    assert_continues(buffer, state, restored, after)


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize("capacity", ["as it was", "smaller"])
@pytest.mark.parametrize("name", ["per_default_1d_wrapped", "default_2d_partial"])
def test_a_dump_is_converted_before_or_after_it_became_a_state(name, capacity):
    dump = jrb.checkpoint.read_torchrl(DATA / "torchrl" / name, squeeze=True)
    envs = dump.info["num_envs"]
    buffer = jrb.ReplayBuffer(dump.info["capacity"], envs, batch_size=8, cast=True, **PRIORITIZED)
    new = buffer
    if capacity == "smaller":
        new = dataclasses.replace(buffer, capacity=10 * (envs or 1))
    after = jrb.rebuild(buffer, dump.into(buffer), new, convert=doubled)
    expected = dump._replace(items=doubled(dump.items)).into(new)
    chex.assert_trees_all_equal(jrb.items(new, after), jrb.items(new, expected))
    chex.assert_trees_all_equal(new.priorities(after), new.priorities(expected))
    item = jax.tree.map(lambda leaf: leaf[0], doubled(dump.items))
    for number in range(3):
        one, two = (new.draw(each, jax.random.key(number)) for each in (after, expected))
        chex.assert_trees_all_equal(one[1], two[1])
        after, expected = new.add(one[0], item), new.add(two[0], item)


@pytest.mark.slow
@pytest.mark.parametrize("files", [False, True], ids=["device", "files"])
def test_the_buffer_of_a_dataset_is_converted(files, tmp_path):
    dataset = jrb.datasets.open(DATA / "minari" / "cartpole-v0")
    old, new = (jrb.MemmapStorage(tmp_path / n) if files else None for n in ("old", "new"))
    parts = {"batch_size": 8, "unit": jrb.NStep(3, discount=0.9)}
    buffer, state = dataset.buffer(episodes=3, storage=old, **parts)
    target = buffer if new is None else dataclasses.replace(buffer, storage=new)
    growing = dataclasses.replace(
        target, capacity=2 * buffer.capacity, writer=jrb.RoundRobin(), storage=jrb.DeviceStorage()
    )
    items = doubled(jrb.items(buffer, state))
    for each in (target, growing):  # as it was, and one that goes on
        after = jrb.rebuild(buffer, state, each, convert=doubled)
        chex.assert_trees_all_equal(jrb.items(each, after), items)
        sample = each.sample(after, jax.random.key(0))
        extra = sample.data.pop("double")
        chex.assert_trees_all_equal(extra, 2 * sample.data["observation"])
        expected = buffer.sample(state, jax.random.key(0))
        chex.assert_trees_all_equal(sample.data, expected.data)
    after = growing.add(after, jax.tree.map(lambda leaf: leaf[0], items))
    assert growing.size(after) == len(items["double"]) + 1
