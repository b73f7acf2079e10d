"""Regression tests of single faults."""

import dataclasses
import re

import chex
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb import sum_tree, testing, types
from jrb.checkpoint import schema
from jrb.types import component

pytestmark = pytest.mark.slow

KEY = jax.random.key(0)


def step(number=0.0, done=False):
    return {
        "observation": jnp.float32(number),
        "next": {"observation": jnp.float32(number + 0.5), "reward": 1.0, "done": done},
    }


# Custom units and parts.


@component
class Wrapped(types.Unit):
    """A unit that delegates to another unit."""

    inner: jrb.NStep = jrb.NStep(10, 1.0, strict=True)
    max_entry_delay = property(lambda self: self.inner.max_entry_delay)
    lookback = property(lambda self: self.inner.lookback)

    def check(self, *args):
        return self.inner.check(*args)

    def init(self, *args):
        return self.inner.init(*args)

    def on_write(self, *args):
        return self.inner.on_write(*args)

    def truncate(self, *args):
        return self.inner.truncate(*args)

    def is_episode_end(self, *args):
        return self.inner.is_episode_end(*args)

    def anchors(self, *args):
        return self.inner.anchors(*args)

    def plan_read(self, *args):
        return self.inner.plan_read(*args)

    def reduce(self, *args):
        return self.inner.reduce(*args)

    def reset(self, *args):
        return self.inner.reset(*args)


def stacked(unit):
    """Returns the number of anchors and a sample of a wrapped-around ring of stacks over `unit`."""
    buffer = jrb.ReplayBuffer(
        60,
        num_envs=3,
        batch_size=60,
        unit=jrb.FrameStack(2, unit=unit),
        sampler=jrb.Uniform(replacement=False),
    )
    rng, state = np.random.default_rng(0), buffer.init(step())
    add = jax.jit(buffer.add)
    for number in range(150):
        rows = {
            "observation": jnp.full(3, float(number)),
            "next": {
                "observation": jnp.full(3, number + 0.5),
                "reward": jnp.ones(3),
                "done": rng.random(3) < 0.15,
            },
        }
        state = add(state, rows)
    return int(state.unit.queue.count), buffer.sample(state, KEY)


def test_a_unit_that_says_how_far_its_anchors_lag_can_be_stacked():
    inner = jrb.NStep(10, 1.0, strict=True)
    count, sample = stacked(Wrapped())
    want, other = stacked(inner)
    assert count == want <= 60
    np.testing.assert_array_equal(sample.indices, other.indices)
    np.testing.assert_array_equal(sample.mask, other.mask)


def test_a_unit_whose_anchors_are_no_rows_cannot_be_stacked():
    with pytest.raises(ValueError, match="anchors are rows"):
        jrb.ReplayBuffer(60, unit=jrb.FrameStack(2, unit=jrb.Sequence(2, sample_by="episodes")))


@pytest.mark.parametrize("kind", ["sampler", "unit", "writer", "storage"])
def test_a_part_that_lacks_a_method_is_refused_by_name(kind):
    @component
    class Half:
        def init(self, *args):
            return {}

    method = {"sampler": "draw", "unit": "on_write", "writer": "plan", "storage": "write"}[kind]
    base = getattr(types, kind.capitalize())
    with pytest.raises(TypeError, match=f"{kind}: .*jrb.types.{base.__name__}.*without .*{method}"):
        jrb.ReplayBuffer(10, **{kind: Half()})
    below = component(type("Below", (base,), {"init": Half.init}))
    with pytest.raises(TypeError, match=f"abstract.*{method}"):
        below()


# Truncation.


def test_nothing_crosses_a_truncation():
    buffer = jrb.ReplayBuffer(20, num_envs=2, batch_size=64, unit=jrb.NStep(3, 1.0))
    pair = lambda number: jax.tree.map(
        lambda leaf: jnp.stack([jnp.asarray(leaf)] * 2), step(number)
    )
    state = buffer.init(step())
    for number in range(4):
        state = buffer.add(state, pair(float(number)))
    state = buffer.truncate(state, np.array([True, False]))
    for number in range(4, 8):
        state = buffer.add(state, pair(float(number)))
    sample = buffer.sample(state, KEY)
    steps = dict(zip(sample.indices.tolist(), sample.info["steps"].tolist(), strict=True))
    assert {slot: steps[slot] for slot in (2, 4, 6, 8)} == {2: 3, 4: 2, 6: 1, 8: 3}
    assert {slot: steps[slot] for slot in (3, 5, 7, 9)} == {3: 3, 5: 3, 7: 3, 9: 3}
    assert not np.asarray(buffer.take(state, jnp.arange(16))["next"]["done"]).any()


@pytest.mark.parametrize("capacity", [None, 16])
def test_a_truncation_is_saved_and_survives_another_capacity(capacity, tmp_path):
    for unit in (
        jrb.NStep(3, 1.0),
        jrb.Sequence(3),
        jrb.FrameStack(2, unit=jrb.Sequence(2)),
        jrb.FrameStack(3),
    ):
        buffer = jrb.ReplayBuffer(
            12, batch_size=12, unit=unit, sampler=jrb.Uniform(replacement=False)
        )
        state = buffer.init(step())
        for number in range(4):
            state = buffer.add(state, step(float(number)))
        state = buffer.truncate(state)
        path = tmp_path / type(unit).__name__ / str(len(repr(unit)))
        jrb.save(path, buffer, state)
        other, loaded = jrb.load(path, capacity=capacity)
        for number in range(4, 8):
            item = step(float(number))
            state, loaded = buffer.add(state, item), other.add(loaded, item)
        kept = lambda sample: sorted(sample.indices[sample.mask.reshape(12, -1)[:, 0]].tolist())
        want, got = buffer.sample(state, KEY, 12), other.sample(loaded, KEY, 12)
        assert kept(got) == kept(want)
        rows = lambda sample: {
            int(slot): np.asarray(sample.data["observation"][b]).tolist()
            for b, slot in enumerate(sample.indices)
            if sample.mask.reshape(12, -1)[b, 0]
        }
        assert rows(got) == rows(want)


def test_what_truncate_is_given_by_mistake():
    buffer = jrb.ReplayBuffer(20, num_envs=2, unit=jrb.NStep(3, 1.0))
    state = buffer.init(step())
    with pytest.raises(TypeError, match="mask: expected dtype bool"):
        buffer.truncate(state, jnp.array([1, 0]))
    with pytest.raises(ValueError, match=r"mask: expected shape \(\), got \(3,\)"):
        buffer.truncate(state, jnp.array([True, False, True]))
    assert int(buffer.size(buffer.truncate(state))) == 0


# Hindsight.

GOAL = {
    "observation": {"desired_goal": jnp.zeros(1)},
    "next": {
        "observation": {"achieved_goal": jnp.zeros(1), "desired_goal": jnp.zeros(1)},
        "reward": jnp.zeros(1),
        "terminated": jnp.float32(0),
        "truncated": jnp.bool_(False),
        "done": jnp.zeros(1, jnp.uint8),
    },
}


def test_relabeled_successes_terminate_where_that_is_asked_for():
    reached = lambda achieved, goal: jnp.abs(achieved[0] - goal[0]) < 0.5
    reward = lambda achieved, goal: -jnp.abs(achieved[0] - goal[0])
    unit = jrb.Hindsight(reward, strategy="final", ratio=1.0, terminated=reached)
    buffer = jrb.ReplayBuffer(5, unit=unit, batch_size=5, sampler=jrb.Uniform(replacement=False))
    number = jnp.arange(5.0)[:, None]
    goal = jnp.full((5, 1), 9.0)
    rows = {
        "observation": {"desired_goal": goal},
        "next": {
            "observation": {"achieved_goal": number, "desired_goal": goal},
            "reward": -jnp.abs(number - goal),
            "terminated": jnp.zeros(5),
            "truncated": jnp.arange(5) == 2,
            "done": (jnp.arange(5) == 2).astype(jnp.uint8)[:, None],
        },
    }
    sample = buffer.sample(buffer.extend(buffer.init(GOAL), rows), KEY)
    slot = np.argsort(sample.indices)
    after = jax.tree.map(lambda leaf: np.asarray(leaf)[slot], sample.data["next"])
    assert after["reward"][:, 0].tolist() == [-2, -1, 0, -1, 0]
    assert after["terminated"].tolist() == [0, 0, 1, 0, 1]
    assert after["done"][:, 0].tolist() == [0, 0, 1, 0, 1]
    assert after["truncated"].tolist() == [False, False, True, False, False]
    assert [leaf.dtype for leaf in (after["terminated"], after["done"])] == [np.float32, np.uint8]
    plain = jrb.ReplayBuffer(5, unit=dataclasses.replace(unit, terminated=None), batch_size=5)
    other = plain.sample(plain.extend(plain.init(GOAL), rows), KEY)
    assert not np.asarray(other.data["next"]["terminated"]).any()


# Small dtypes.


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float16", "float32"]
)
@pytest.mark.parametrize("storage", [jrb.DeviceStorage(), jrb.SpillStorage(None, 4)], ids=repr)
def test_every_bit_pattern_comes_back(dtype, storage):
    width = jnp.dtype(dtype).itemsize
    bits = np.arange(256, dtype=np.uint8)
    if width == 2:
        bits = np.concatenate([bits.astype(np.uint16) << 8 | low for low in (0, 1, 0x40, 0x81)])
    if width == 4:
        bits = np.array([0x7F800001, 0xFF800001, 0x7FC00001, 1, 0x80000001], np.uint32)
    items = {"x": jnp.asarray(bits.view(jnp.dtype(dtype)))}
    buffer = jrb.ReplayBuffer(2 * len(bits), num_envs=2, batch_size=64, storage=storage)
    both = {"x": jnp.asarray(np.stack([bits, bits], axis=1).view(jnp.dtype(dtype)))}
    state = jax.jit(buffer.extend)(buffer.init({"x": items["x"][0]}), both)
    one = {"x": both["x"][3]}
    state = jax.jit(buffer.add)(state, one)
    taken = np.asarray(buffer.take(state, jnp.arange(2 * len(bits)))["x"]).view(bits.dtype)
    want = np.repeat(bits, 2)
    want[:2] = bits[3]
    np.testing.assert_array_equal(taken, want)
    sample = buffer.sample(state, KEY)
    drawn = np.asarray(sample.data["x"]).view(bits.dtype)
    np.testing.assert_array_equal(drawn, want[np.asarray(sample.indices)])


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2"])
def test_integers_of_a_few_bits_come_back(dtype):
    limits = jnp.iinfo(dtype)
    values = np.arange(int(limits.min), int(limits.max) + 1)
    buffer = jrb.ReplayBuffer(len(values), batch_size=8)
    state = buffer.extend(
        buffer.init({"x": jnp.zeros((), dtype)}), {"x": jnp.asarray(values).astype(dtype)}
    )
    assert buffer.take(state, jnp.arange(len(values)))["x"].astype(int).tolist() == values.tolist()
    assert buffer.sample(state, KEY).data["x"].dtype == jnp.dtype(dtype)


def test_a_packed_column_can_be_looked_at():
    buffer = jrb.ReplayBuffer(4, batch_size=2)
    state = buffer.add(buffer.init({"x": jnp.zeros(3, "bfloat16")}), {"x": jnp.ones(3, "bfloat16")})
    column = state.storage["x"]
    assert (column.shape, str(column.dtype)) == ((4, 3), "bfloat16")
    assert np.asarray(column)[0].tolist() == column[0].tolist() == [1, 1, 1]
    assert "storage/x" in repr(state)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int4", "float32", "bool"])
@pytest.mark.parametrize("storage", [jrb.DeviceStorage(), jrb.MemmapStorage()], ids=repr)
def test_leaves_of_no_size_are_leaves(dtype, storage):
    example = {"none": jnp.zeros((0, 2), dtype), "x": jnp.float32(0)}
    buffer = jrb.ReplayBuffer(4, num_envs=2, batch_size=2, storage=storage)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), example)
    state = buffer.add(buffer.init(example), both)
    state = buffer.extend(state, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), both))
    assert buffer.sample(state, KEY).data["none"].shape == (2, 0, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e4m3fn"])
def test_a_write_of_a_small_dtype_is_not_a_pass_over_the_ring(dtype):
    """The memory that a write of one row needs and accesses does not grow with the ring."""

    def moved(capacity):
        buffer = jrb.ReplayBuffer(capacity, batch_size=2)
        state, item = buffer.init({"x": jnp.zeros(16, dtype)}), {"x": jnp.ones(16, dtype)}
        compiled = jax.jit(buffer.add, donate_argnums=0).lower(state, item).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        return temporary + compiled.cost_analysis()["bytes accessed"]

    assert moved(2**10) == moved(2**14) < 10_000


# Priorities and trees.


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_a_denormal_priority_has_its_power_for_mass(alpha):
    sampler = jrb.Prioritized(alpha=alpha, eps=0.0)
    buffer = jrb.ReplayBuffer(6, batch_size=64, sampler=sampler)
    state = buffer.extend(buffer.init({"x": jnp.float32(0)}), {"x": jnp.arange(6.0)})
    raw = np.array([1e-40, 1e-45, 5e-39, 0.0, 2e-38, 3.0], np.float32)
    state = buffer.update_priority(state, jnp.arange(6), raw)
    want = raw.astype(np.float64) ** alpha
    for its in (state, buffer.set_alpha(state, alpha)):
        masses = np.asarray(sum_tree.leaves(its.sampler.masses))
        np.testing.assert_allclose(masses, want, rtol=3e-5, atol=1.2e-38)
        assert (masses > 0).tolist() == (want > 1.2e-38).tolist()
    with pytest.raises(ValueError, match="eps: expected 0, or at least"):
        jrb.Prioritized(eps=1e-40)


@pytest.mark.parametrize(("branching", "most"), [(8, 1_840_700_000), (32, 2_078_000_000)])
def test_trees_whose_nodes_int32_cannot_number_are_refused(branching, most):
    with pytest.raises(ValueError, match=r"capacity: expected at most \d+, as a tree") as refused:
        sum_tree.init(2**31 - 1, branching=branching)
    limit = int(re.search(r"at most (\d+)", str(refused.value))[1])
    assert most < limit < 2**31
    shape = sum_tree.Tree(jnp.zeros(0), limit, branching, "sum")
    assert shape.leaf + limit < 2**31
    buffer = jrb.ReplayBuffer(2**31 - 64, sampler=jrb.Prioritized())
    with pytest.raises(ValueError, match="capacity: expected at most"):
        buffer.nbytes({"x": jnp.int8(0)})


def test_a_checkpoint_does_not_depend_on_the_branching(monkeypatch, tmp_path):
    sampler = jrb.Prioritized(normalize="buffer")
    buffer = jrb.ReplayBuffer(300, batch_size=16, sampler=sampler)
    state = buffer.extend(buffer.init(step()), testing.rows(step(), jnp.float32(1), 200))
    state = buffer.update_priority(state, jnp.arange(50), jnp.arange(50.0))
    paths = [tmp_path / layout for layout in ("native", "h5")]
    for path in paths:
        jrb.save(path, buffer, state, layout=path.name)
        chex.assert_trees_all_equal(jrb.load(path)[1], state)
    monkeypatch.setitem(sum_tree._BRANCHING, jax.default_backend(), 32)
    schema._blanks(buffer).cache_clear()
    jax.clear_caches()
    for path in paths:
        other, loaded = jrb.load(path)
        assert loaded.sampler.masses.branching == 32
        for part in ("masses", "smallest"):
            leaves = [sum_tree.leaves(getattr(its.sampler, part)) for its in (loaded, state)]
            np.testing.assert_array_equal(*leaves)
        np.testing.assert_allclose(
            sum_tree.total(loaded.sampler.masses), sum_tree.total(state.sampler.masses), rtol=1e-5
        )
        assert other.sample(loaded, KEY).mask.all()
    schema._blanks(buffer).cache_clear()
    jax.clear_caches()


def test_a_sum_tree_checks_what_it_is_given():
    leaves = sum_tree.update(sum_tree.init(5), [0, 3], [1, 3])
    assert sum_tree.get(leaves, [[0], [3]]).tolist() == [[1.0], [3.0]]
    assert float(sum_tree.get(leaves, 3)) == 3.0
    assert int(sum_tree.find(leaves, 2.5)) == 3
    assert sum_tree.find(leaves, [0, 3.9]).tolist() == [0, 3]
    assert sum_tree.update(leaves, [7, -1], [5.0, 5.0]).nodes.tolist() == leaves.nodes.tolist()
    with pytest.raises(ValueError, match=r"expected indices in \[0, 5\), got 5"):
        sum_tree.get(leaves, [1, 5])
    with pytest.raises(ValueError, match=r"one shape \(B,\), got \(\) and \(\)"):
        sum_tree.update(leaves, 3, 1.0)
    with pytest.raises(ValueError, match=r"got \(2,\) and \(3,\)"):
        sum_tree.update(leaves, [1, 2], [1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="expected integers"):
        sum_tree.get(leaves, [0.5])
    with pytest.raises(TypeError, match="masses: expected real numbers"):
        sum_tree.update(leaves, [1], [True])
    with pytest.raises(TypeError, match="expected a PRNG key"):
        sum_tree.sample(leaves, 3, 2)
    with pytest.raises(ValueError, match="batch_size: expected at least 1"):
        sum_tree.sample(leaves, KEY, 0)


# Sizes, empty slots and dtypes.


@pytest.mark.parametrize(
    "sampler",
    [jrb.Uniform(), jrb.Prioritized(), jrb.Queue(), jrb.WithoutReplacement()],
    ids=repr,
)
def test_nothing_is_drawn_below_min_size(sampler):
    buffer = jrb.ReplayBuffer(8, batch_size=2, sampler=sampler, min_size=3)
    state, draw = buffer.init(step()), jax.jit(buffer.draw)
    for number in range(3):
        assert not buffer.can_sample(state)
        with pytest.raises(ValueError, match="min_size is 3"):
            buffer.sample(state, KEY)
        state, sample = draw(state, KEY)
        assert not sample.mask.any()
        assert not sample.weights.any()
        state = buffer.add(state, step(float(number)))
    assert buffer.can_sample(state)
    state, sample = buffer.draw(state, KEY)
    assert sample.mask.all()
    if isinstance(sampler, jrb.Queue):
        assert sample.data["observation"].tolist() == [0, 1]


def test_what_min_size_and_rounded_are_given_by_mistake():
    with pytest.raises(ValueError, match="min_size: expected from 1 to 8, got 9"):
        jrb.ReplayBuffer(8, min_size=9)
    with pytest.raises(TypeError, match="cast: expected True or False"):
        jrb.ReplayBuffer(8, cast=1)
    assert jrb.ReplayBuffer.rounded(1_000_000, 1024, batch_size=2).capacity == 976 * 1024
    assert jrb.ReplayBuffer.rounded(10).capacity == 10
    with pytest.raises(ValueError, match="at least num_envs = 16, got 10"):
        jrb.ReplayBuffer.rounded(10, num_envs=16)
    with pytest.raises(ValueError, match="nearest are 8 or 12"):
        jrb.ReplayBuffer(10, num_envs=4)


def test_slots_that_hold_nothing_are_not_taken():
    buffer = jrb.ReplayBuffer(8, batch_size=2)
    state = buffer.add(buffer.init(step()), step(3.0))
    assert buffer.take(state, [0])["observation"].tolist() == [3.0]
    for wrong in ([1], [0, 7]):
        with pytest.raises(ValueError, match="which holds none: 1 are held, as in_order tells"):
            buffer.take(state, wrong)
    with pytest.raises(ValueError, match="holds none"):
        buffer.take(buffer.empty(state), 0)
    assert jax.jit(buffer.take)(state, jnp.array([5]))["observation"].tolist() == [0.0]


def test_dtypes_that_equal_those_of_numpy_are_these(tmp_path):
    """HDF5 makes dtype objects that equal NumPy's but are not the same objects."""
    with h5py.File(tmp_path / "file", "w") as file:
        file["x"] = np.arange(6, dtype=np.float32)
        dtype = file["x"].dtype
    assert dtype == np.float32
    assert dtype is not np.dtype(np.float32)
    state = jrb.ReplayBuffer(37).init({"x": jax.ShapeDtypeStruct((), dtype)})
    assert isinstance(state.storage["x"], jax.Array)
    assert state.storage["x"].dtype == np.float32
