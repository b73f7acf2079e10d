"""Running statistics include every written row, and nothing else."""

import dataclasses
import functools
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jrb
from jrb import testing
from jrb import transforms as tr
from jrb.transforms.running import Moments

pytestmark = pytest.mark.slow

BOTH = (tr.RunningNormalize(), tr.RunningRewardScale(0.9))
PLAIN = {"clip": None, "eps": 1e-8}


def example(size=3):
    seen = jax.ShapeDtypeStruct((size,), jnp.float32)
    after = {"observation": seen, "reward": np.float32(0), "done": np.bool_(False)}
    return {"observation": seen, "action": np.int32(0), "next": after}


def rows(rng, *lead, size=3):
    draw = lambda: (5 + 3 * rng.normal(size=(*lead, size))).astype(np.float32)
    after = {
        "observation": draw(),
        "reward": rng.normal(size=lead).astype(np.float32) + np.float32(0.5),
        "done": rng.random(lead) < 0.2,
    }
    action = rng.integers(0, 4, lead).astype(np.int32)
    return {"observation": draw(), "action": action, "next": after}


def cut(items, *at):
    return jax.tree.map(lambda leaf: leaf[at], items)


class Model:
    """Lists of all written observations and returns, in float64."""

    def __init__(self, envs, discount=0.9):
        self.discount, self.running = discount, np.zeros(envs)
        self.seen, self.returns = [], []

    def write(self, items, mask):
        for row, is_written in zip(range(len(mask)), mask, strict=True):
            if not is_written:
                continue
            one = cut(items, row)
            self.seen.extend(one["observation"].astype(np.float64))
            self.running = self.running * self.discount + one["next"]["reward"]
            self.returns.extend(self.running)
            self.running = np.where(one["next"]["done"], 0.0, self.running)

    def check(self, state):
        seen, scale = state.transforms
        seen = seen["observation"]
        assert int(seen.count) == int(scale.moments.count) == len(self.seen)
        if not self.seen:
            return
        np.testing.assert_allclose(seen.mean, np.mean(self.seen, axis=0), rtol=1e-5)
        np.testing.assert_allclose(seen.var, np.var(self.seen, axis=0), rtol=1e-4, atol=1e-6)
        var = np.var(self.returns)
        np.testing.assert_allclose(scale.moments.var, var, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(scale.running, self.running, rtol=1e-5, atol=1e-6)

    def normalized(self, observation):
        seen = np.asarray(self.seen)
        return (observation - seen.mean(axis=0)) / np.sqrt(seen.var(axis=0) + 1e-8)


@functools.cache
def buffer_of(envs, rows_, unit=None):
    transforms = tr.RunningNormalize(**PLAIN), tr.RunningRewardScale(0.9, **PLAIN)
    unit = jrb.Transition() if unit is None else unit
    return jrb.ReplayBuffer(
        envs * rows_, num_envs=envs, batch_size=16, unit=unit, transforms=transforms
    )


WRITES = st.lists(st.tuples(st.sampled_from([1, 2, 5]), st.integers(0, 2**32 - 1)), max_size=6)


@given(st.sampled_from([1, 3]), WRITES)
def test_statistics_are_those_of_all_rows_that_were_written(envs, writes):
    buffer, model = buffer_of(envs, 4), Model(envs)
    methods = jrb.jitted(buffer)
    state = methods.init(example())
    for length, seed in writes:
        rng = np.random.default_rng(seed)
        items, mask = rows(rng, length, envs), rng.random(length) < 0.7
        if seed % 3 == 0:
            mask = np.ones(length, bool)
        if seed % 2:
            for row in range(length):
                state = methods.add(state, cut(items, row), jnp.asarray(mask[row]))
        else:
            state = methods.extend(state, items, jnp.asarray(mask))
        model.write(items, mask)
        if seed % 5 == 0:
            which = rng.random(envs) < 0.5
            state = methods.truncate(state, jnp.asarray(which))
            model.running = np.where(which, 0.0, model.running)
        if seed % 7 == 0:
            state = methods.empty(state)
    model.check(state)


@pytest.mark.parametrize(
    "unit", [jrb.Transition(), jrb.NStep(2, 0.9), jrb.Sequence(2), jrb.FrameStack(2)], ids=repr
)
def test_what_is_drawn_is_normalized_by_the_newest_statistics(unit):
    buffer = buffer_of(2, 8, unit)
    raw = dataclasses.replace(buffer, transforms=())
    items, mask = rows(np.random.default_rng(0), 20, 2), np.ones(20, bool)
    state, other = buffer.init(example()), raw.init(example())
    state, other = buffer.extend(state, items), raw.extend(other, items)
    model, key = Model(2), jax.random.key(0)
    model.write(items, mask)
    batch, plain = buffer.sample(state, key), raw.sample(other, key)
    np.testing.assert_array_equal(batch.indices, plain.indices)
    for get in (lambda data: data["observation"], lambda data: data["next"]["observation"]):
        want = model.normalized(np.asarray(get(plain.data), np.float64))
        np.testing.assert_allclose(get(batch.data), want, rtol=1e-4, atol=1e-5)
    want = np.asarray(plain.data["next"]["reward"]) / np.std(model.returns)
    np.testing.assert_allclose(batch.data["next"]["reward"], want, rtol=1e-4)
    np.testing.assert_array_equal(batch.data["action"], plain.data["action"])
    held = lambda buffer, state: jrb.items(buffer, state)["observation"]
    np.testing.assert_array_equal(held(buffer, state), held(raw, other))
    one = items["observation"][3, 1]
    np.testing.assert_allclose(
        tr.normalized(buffer, state, one), model.normalized(one), rtol=1e-4, atol=1e-5
    )


def test_many_rows_in_calls_of_all_sizes_are_as_exact_as_their_numbers():
    rng = np.random.default_rng(1)
    numbers = ([1e5, 1e3] + rng.normal(size=(100_000, 2)) * [1.0, 30.0]).astype(np.float32)
    buffer = jrb.ReplayBuffer(100, transforms=(tr.RunningNormalize(),))
    state = buffer.init({"observation": numbers[0]})
    extend = jax.jit(buffer.extend)
    for piece in (*np.split(numbers[:60_000], 3), *np.split(numbers[60_000:], 400)):
        state = extend(state, {"observation": piece})
    found = state.transforms[0]["observation"]
    wide = numbers.astype(np.float64)
    mean = np.asarray(found.mean, np.float64) + np.asarray(found.mean_rest)
    np.testing.assert_allclose(mean, wide.mean(axis=0), rtol=6e-8)  # half a step of float32
    np.testing.assert_allclose(found.var, wide.var(axis=0), rtol=3e-4)


def test_a_hundred_million_rows_are_still_moved_by_single_ones():
    known = Moments.start((), jnp.float32).replace(
        count=jnp.uint32(10**8), mean=jnp.float32(100), var=jnp.float32(4)
    )
    one = lambda known, x: (known.extend(x[None], jnp.ones(1, jnp.bool_)), None)
    new = np.random.default_rng(2).normal(200, 10, 200_000).astype(np.float32)
    found, _ = jax.jit(lambda known, new: jax.lax.scan(one, known, new))(known, new)
    count, wide = 10**8 + len(new), new.astype(np.float64)
    mean = (10**8 * 100 + wide.sum()) / count
    square = (10**8 * (4 + 100.0**2) + (wide**2).sum()) / count
    np.testing.assert_allclose(found.mean - 100, mean - 100, rtol=1e-4)
    np.testing.assert_allclose(found.var - 4, square - mean**2 - 4, rtol=1e-4)


def test_the_count_ends_somewhere_and_the_mean_goes_on():
    known = Moments.start((), jnp.float32).replace(count=jnp.uint32(2**31), mean=jnp.float32(1))
    found = known.extend(jnp.full(1000, 5.0), jnp.ones(1000, jnp.bool_))
    assert int(found.count) == 2**31
    assert found.mean > 1


def test_masked_rows_and_what_is_not_finite_leave_everything_as_it_is():
    buffer = buffer_of(2, 4)
    items = rows(np.random.default_rng(3), 3, 2)
    state = buffer.extend(buffer.init(example()), items)
    broken = jax.tree.map(
        lambda leaf: np.full_like(leaf, np.nan) if leaf.dtype == np.float32 else leaf, items
    )
    broken["next"]["done"] = np.zeros_like(items["next"]["done"])
    masked = buffer.extend(state, broken, jnp.zeros(3, jnp.bool_))
    written = buffer.extend(state, broken)
    for other, left_out in ((masked, 0), (written, 6)):
        seen, scale = other.transforms
        assert int(seen["observation"].left_out) == int(scale.moments.left_out) == left_out
        none = {"left_out": state.transforms[0]["observation"].left_out}
        same = {"observation": seen["observation"].replace(**none)}
        same = (same, scale.replace(moments=scale.moments.replace(**none)))
        chex.assert_trees_all_equal(same, state.transforms)
    one = jax.tree.map(np.copy, items)
    one["observation"][1, 0, 2] = np.inf
    found = buffer.extend(state, one).transforms[0]["observation"]
    assert int(found.count) == 6 + 5
    assert bool(jnp.isfinite(found.mean).all() & jnp.isfinite(found.var).all())


def test_several_seeds_under_vmap_are_several_buffers():
    buffer, rng = buffer_of(2, 4), np.random.default_rng(4)
    items, mask = rows(rng, 3, 5, 2), jnp.asarray(rng.random((3, 5)) < 0.6)
    one = buffer.init(example())
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), one)
    many = jax.jit(jax.vmap(buffer.extend))(many, items, mask)
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = jax.vmap(buffer.sample)(many, keys)
    seen = jax.vmap(functools.partial(tr.normalized, buffer))(many, items["observation"][:, 0])
    for number in range(3):
        alone = buffer.extend(one, cut(items, number), mask[number])
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, cut(many.transforms, number), alone.transforms)
        batch = buffer.sample(alone, keys[number])
        jax.tree.map(close, cut(drawn.data, number), batch.data)
        close(seen[number], tr.normalized(buffer, alone, items["observation"][number, 0]))


def test_each_environment_counts_for_itself_where_the_mask_says_so():
    buffer = jrb.ReplayBuffer(8, num_envs=2, writer=jrb.PerEnvironment(), transforms=BOTH)
    items = rows(np.random.default_rng(5), 3, 2)
    mask = np.array([[True, False], [True, True], [False, True]])
    seen, scale = buffer.extend(buffer.init(example()), items, jnp.asarray(mask)).transforms
    want = items["observation"][mask]
    np.testing.assert_allclose(seen["observation"].mean, want.mean(axis=0), rtol=1e-5)
    alone = [Model(1), Model(1)]
    for env, model in enumerate(alone):
        model.write(jax.tree.map(lambda leaf, env=env: leaf[:, [env]], items), mask[:, env])
    running = np.concatenate([model.running for model in alone])
    np.testing.assert_allclose(scale.running, running, rtol=1e-5)
    returns = [each for model in alone for each in model.returns]
    np.testing.assert_allclose(scale.moments.var, np.var(returns), rtol=1e-4)


def test_a_transform_learns_from_what_those_before_it_make():
    images = np.random.default_rng(6).integers(0, 256, (9, 4, 4, 3)).astype(np.uint8)
    buffer = jrb.ReplayBuffer(
        9, batch_size=9, transforms=(tr.ToFloat(), tr.RunningNormalize(clip=None), lambda x: x)
    )
    state = buffer.extend(buffer.init({"observation": images[0]}), {"observation": images})
    found = state.transforms[0]["observation"]
    np.testing.assert_allclose(found.mean, images.mean(axis=0) / 255, rtol=1e-4)
    data = buffer.sample(state, jax.random.key(0), 4096).data["observation"]
    np.testing.assert_allclose(data.std(), 1.0, rtol=0.05)


def test_clip_center_and_paths():
    items = {"a": np.float32([0, 1, 2]), "observation": np.int32([[1], [2], [30]])}
    one = cut(items, 0)
    running = tr.RunningNormalize((("a",), "observation"), center=False, clip=1.5)
    buffer = jrb.ReplayBuffer(3, batch_size=64, transforms=(running,))
    state = buffer.extend(buffer.init(one), items)
    data = buffer.sample(state, jax.random.key(0)).data
    want = np.minimum(items["a"] / items["a"].std(), 1.5)
    np.testing.assert_allclose(np.unique(data["a"]), want, rtol=1e-6)
    assert data["observation"].dtype == jnp.float32
    before = tr.normalized(buffer, buffer.init(one), items["observation"])
    np.testing.assert_array_equal(before, [[1], [1.5], [1.5]])


@pytest.mark.parametrize("layout", ["native", "h5"])
def test_statistics_are_saved_and_loaded(layout, tmp_path):
    buffer, rng = buffer_of(2, 4), np.random.default_rng(7)
    state = buffer.extend(buffer.init(example()), rows(rng, 7, 2))
    path = os.path.join(tmp_path, "kept" + (".h5" if layout == "h5" else ""))
    jrb.save(path, buffer, state, layout=layout)
    again, back = jrb.load(path)
    assert again == buffer
    chex.assert_trees_all_equal(back.transforms, state.transforms)
    more = rows(rng, 2, 2)
    one, other = buffer.extend(state, more), again.extend(back, more)
    chex.assert_trees_all_equal(one.transforms, other.transforms)
    other = dataclasses.replace(
        buffer, capacity=6, transforms=(tr.Cast("float32"), *buffer.transforms[::-1])
    )
    moved = jrb.load(path, buffer=other)[1]
    chex.assert_trees_all_equal(moved.transforms, state.transforms[::-1])
    fewer = jrb.load(path, buffer=dataclasses.replace(buffer, transforms=()))[1]
    assert fewer.transforms == ()
    clipped = dataclasses.replace(buffer.transforms[0], clip=1.0, center=False)
    same = (clipped, buffer.transforms[1], tr.Cast("float32"))
    found, back = jrb.load(path, buffer=dataclasses.replace(buffer, transforms=same))
    assert found.transforms == same
    chex.assert_trees_all_equal(back, state)


def test_a_rebuilt_buffer_goes_on_with_what_the_old_one_had_learned():
    buffer, items = buffer_of(2, 4), rows(np.random.default_rng(8), 9, 2)
    state = buffer.extend(buffer.init(example()), items)
    narrow = dataclasses.replace(buffer, num_envs=1)
    made = jrb.rebuild(buffer, state, narrow)
    seen, scale = made.transforms
    chex.assert_trees_all_equal(seen, state.transforms[0])
    chex.assert_trees_all_equal(scale.moments, state.transforms[1].moments)
    assert scale.running.shape == (1,)
    best = dataclasses.replace(buffer, writer=jrb.MaxValue(("next", "reward")))
    ranked = jrb.rebuild(buffer, state, best)
    ranked = best.extend(ranked, items)
    assert int(ranked.transforms[0]["observation"].count) == 36
    plain = dataclasses.replace(buffer, transforms=())
    learned = jrb.rebuild(plain, state.replace(transforms=()), buffer)
    held = jrb.items(buffer, state)["observation"]
    found = learned.transforms[0]["observation"]
    np.testing.assert_allclose(found.mean, held.reshape(-1, 3).mean(axis=0), rtol=1e-5)
    learned = jrb.rebuild(plain, state.replace(transforms=()), best)
    assert int(best.extend(learned, items).transforms[1].moments.count) == 8 + 18


@pytest.mark.parametrize("kind", ["memmap", "spill"])
def test_storages_on_the_host_learn_alike(kind, tmp_path):
    path = str(tmp_path / "store")
    storage = jrb.MemmapStorage(path) if kind == "memmap" else jrb.SpillStorage(path, 4)
    plain = buffer_of(2, 4, jrb.NStep(2, 0.9))
    buffer, rng = dataclasses.replace(plain, storage=storage), np.random.default_rng(9)
    state, other = buffer.init(example()), plain.init(example())
    for length, compiled in ((3, False), (2, True), (4, False)):
        extend = jax.jit(buffer.extend) if compiled else buffer.extend
        items = rows(rng, length, 2)
        state, other = extend(state, items), plain.extend(other, items)
    key, close = jax.random.key(0), functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, state.transforms, other.transforms)
    data, want = buffer.sample(state, key).data, plain.sample(other, key).data
    jax.tree.map(functools.partial(close, atol=1e-6), data, want)
    jrb.save(path, buffer, state)
    back = jrb.load(path)[1]
    chex.assert_trees_all_equal(back.transforms, state.transforms)
    truncated = buffer.truncate(state)
    assert not truncated.transforms[1].running.any()


@pytest.mark.devices
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs a JAX with jax.shard_map")
@pytest.mark.parametrize("own", [True, False], ids=["own states", "one state for all"])
def test_devices_learn_each_for_itself(own):
    buffer, count = buffer_of(2, 4), jax.device_count()
    items, one = rows(np.random.default_rng(10), count, 3, 2), buffer.init(example())
    step = lambda state, items: buffer.extend(state, items).transforms
    want = jax.vmap(step, (None, 0))(one, items)

    def on_one(state, items):
        state = cut(state, 0) if own else state
        return jax.tree.map(lambda leaf: leaf[None], step(state, cut(items, 0)))

    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec("data")
    specs = (part if own else jax.sharding.PartitionSpec(), part)
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), one) if own else one
    found = jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=part))(state, items)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found, want)


@pytest.mark.slow
def test_buffers_that_learn_keep_the_contracts():
    make = lambda capacity: jrb.ReplayBuffer(
        capacity, num_envs=2, batch_size=8, transforms=BOTH, sampler=jrb.Prioritized()
    )
    testing.check_description(make)
    testing.check_saved(make, example(16))
    testing.check_memory(make(64), example(16))
    testing.check_compiled(make(64), example(16))
    testing.check_empty(make(64), example(16))
    testing.check_in_place(make, example(16))


def test_refusals():
    with pytest.raises(ValueError, match="cannot look into its objects"):
        jrb.ReplayBuffer(4, storage=jrb.ListStorage(), transforms=BOTH)
    with pytest.raises(ValueError, match="expected descriptions before RunningNormalize"):
        jrb.ReplayBuffer(4, transforms=(lambda data: data, BOTH[0]))
    with pytest.raises(ValueError, match="expected something at 'observation'"):
        jrb.ReplayBuffer(4, transforms=BOTH).init({"x": 0.0})
    with pytest.raises(TypeError, match="leaf 'observation': expected real numbers"):
        jrb.ReplayBuffer(4, transforms=BOTH[:1]).init({"observation": jax.random.key(0)})
    for wrong in ({"clip": 0}, {"eps": -1.0}, {"clip": float("nan")}):
        with pytest.raises(ValueError, match=r"(clip|eps): expected a number above 0"):
            tr.RunningNormalize(**wrong)
    buffer, plain = jrb.ReplayBuffer(4, transforms=BOTH), jrb.ReplayBuffer(4)
    row = rows(np.random.default_rng(0))
    with pytest.raises(TypeError, match="whose transforms is RunningNormalize and RunningReward"):
        buffer.add(plain.init(example()), row)
    with pytest.raises(TypeError, match="whose transforms is without a state"):
        plain.add(buffer.init(example()), row)
    with pytest.raises(ValueError, match="RunningNormalize"):
        tr.normalized(plain, plain.init(example()), jnp.zeros(3))
