"""Loops in Python: compiled methods, warnings of copies, NumPy's dtypes, no recompilation."""

import operator
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests import seams

KEY = jax.random.key(0)
EXAMPLE = {
    "observation": jnp.zeros(3),
    "action": jnp.int32(0),
    "next": {"observation": jnp.zeros(3), "reward": jnp.float32(0), "done": jnp.bool_(False)},
}


def row(number, *lead):
    fill = lambda leaf: np.full((*lead, *leaf.shape), number).astype(leaf.dtype)
    filled = jax.tree.map(fill, EXAMPLE)
    filled["next"]["done"][...] = False
    return filled


PARTS = [
    {},
    {"sampler": jrb.Prioritized(), "unit": jrb.NStep(2, 0.9)},
    {"sampler": jrb.Queue()},
    {"sampler": jrb.WithoutReplacement(), "unit": jrb.Sequence(2)},
    {"storage": jrb.MemmapStorage()},
]


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS, ids=repr)
def test_compiled_methods_do_what_the_buffer_does(parts):
    buffer = jrb.ReplayBuffer(20, num_envs=2, batch_size=4, **parts)
    methods, (mine, state) = jrb.jitted(buffer), (buffer.init(EXAMPLE), buffer.init(EXAMPLE))
    for number in range(4):
        mine = methods.extend(mine, row(number, 2, 2))
        mine = methods.add(mine, row(number, 2), mask=number != 1)
        state = buffer.extend(state, row(number, 2, 2))
        state = buffer.add(state, row(number, 2), mask=number != 1)
    mine, one = methods.draw(mine, KEY)
    state, other = buffer.draw(state, KEY)
    chex.assert_trees_all_equal(one.data, other.data)
    if buffer.sampler.prioritized:
        mine = methods.update_priority(mine, one, jnp.arange(4.0))
        state = buffer.update_priority(state, other, jnp.arange(4.0))
        mine, state = methods.set_alpha(mine, 0.3), buffer.set_alpha(state, 0.3)
    mine, state = methods.truncate(mine), buffer.truncate(state)
    one, other = methods.sample(mine, KEY, 3), buffer.sample(state, KEY, 3)
    np.testing.assert_array_equal(one.indices, other.indices)
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-6)
    assert int(methods.size(mine)) == int(buffer.size(state))
    assert bool(methods.can_sample(mine)) == bool(buffer.can_sample(state))
    jax.tree.map(
        np.testing.assert_array_equal,
        methods.take(mine, one.indices),
        buffer.take(state, other.indices),
    )
    assert int(methods.size(methods.empty(mine))) == 0


def test_what_is_given_is_donated_and_what_is_read_is_not():
    buffer = jrb.ReplayBuffer(2000, batch_size=4, sampler=jrb.Prioritized())
    methods = jrb.jitted(buffer)
    state = methods.init({"x": jnp.zeros(256)})
    where = state.storage["x"].unsafe_buffer_pointer()
    for number in range(3):
        old, state = state, methods.add(state, {"x": np.full(256, number, np.float32)})
        assert old.storage["x"].is_deleted()
    sample = methods.sample(state, KEY)
    state = methods.update_priority(state, sample, np.ones(4))
    state, _ = methods.draw(state, KEY)
    assert state.storage["x"].unsafe_buffer_pointer() == where
    assert sample.data["x"].shape == (4, 256)


ONES = np.ones(4, np.float32)
MOVES = {
    "update_priority": lambda methods, state, sample: methods.update_priority(state, sample, ONES),
    "drop": lambda methods, state, sample: methods.drop(state, sample),
    "set_alpha": lambda methods, state, sample: methods.set_alpha(state, 0.3),
    "draw": lambda methods, state, sample: methods.draw(state, KEY)[0],
}
GIVEN_SAMPLES = {
    "update_priority": MOVES["update_priority"],
    "drop": MOVES["drop"],
    "set": lambda methods, state, sample: methods.set(state, sample, {"action": jnp.arange(4)}),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_the_sampler_passes_nothing_else(name):
    methods = jrb.jitted(jrb.ReplayBuffer(20, batch_size=4, sampler=jrb.Prioritized()))
    old = methods.extend(methods.init(EXAMPLE), row(1, 4))
    new = MOVES[name](methods, old, methods.sample(old, KEY))
    assert new.ring == old.ring
    rest = lambda state: jax.tree.leaves(state.replace(sampler=None))
    assert all(kept is leaf for kept, leaf in zip(rest(old), rest(new), strict=True))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.sampler))


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", GIVEN_SAMPLES)
def test_inside_jit_writes_wait_for_the_items_that_compiled_methods_were_given(name):
    def step(buffer, state, total, key):
        methods = jrb.jitted(buffer)
        sample = methods.sample(state, key)
        state = GIVEN_SAMPLES[name](methods, state, sample)
        return methods.add(state, jrb.testing.rows(EXAMPLE, total)), jrb.testing.consumed(sample)

    make = lambda capacity: jrb.ReplayBuffer(capacity, batch_size=4, sampler=jrb.Prioritized())
    assert jrb.testing.growth(make, EXAMPLE, step) < 0.01


@pytest.mark.slow
def test_inside_jit_writes_wait_for_the_items_that_a_compiled_mix_was_given():
    def step(mix, states, total, key):
        methods, rows = jrb.jitted(mix), jrb.testing.rows(EXAMPLE, total)
        sample = methods.sample(states, key)
        states = methods.update_priority(states, sample, ONES)
        added = [jrb.jitted(one).add(of, rows) for one, of in zip(mix.buffers, states, strict=True)]
        return tuple(added), jrb.testing.consumed(sample)

    part = lambda capacity: jrb.ReplayBuffer(capacity, sampler=jrb.Prioritized())
    make = lambda capacity: jrb.Mix((part(capacity), part(capacity)), (0.5, 0.5), batch_size=4)
    assert jrb.testing.growth(make, EXAMPLE, step) < 0.01


def test_compiled_methods_of_equal_buffers_trace_once(compilations):
    methods = jrb.jitted(jrb.ReplayBuffer(20, batch_size=4))
    state = methods.add(methods.init(EXAMPLE), row(0))
    methods.sample(state, jax.random.key(9))
    with compilations() as count:
        for number in range(3):
            methods = jrb.jitted(jrb.ReplayBuffer(20, batch_size=4))
            state = methods.add(state, row(number))
            methods.sample(state, jax.random.key(number))
    assert count() == 0


def test_from_nothing_compiled_methods_draw_nothing():
    methods = jrb.jitted(jrb.ReplayBuffer(20, batch_size=4))
    sample = methods.sample(methods.init(EXAMPLE), KEY)
    assert not sample.mask.any()
    assert not sample.weights.any()
    with pytest.raises(TypeError, match="expected a ReplayBuffer or a Mix"):
        jrb.jitted(3)


@pytest.mark.slow
def test_compiled_methods_of_a_mix():
    one = jrb.ReplayBuffer(20, sampler=jrb.Prioritized())
    other = jrb.ReplayBuffer(10)
    mix = jrb.Mix((one, other), (0.5, 0.5), batch_size=4)
    states = one.add(one.init(EXAMPLE), row(1)), other.add(other.init(EXAMPLE), row(2))
    methods = jrb.jitted(mix)
    want = mix.sample(states, KEY)
    got = methods.sample(states, KEY)
    np.testing.assert_array_equal(got.data["action"], want.data["action"])
    states, sample = methods.draw(states, KEY, proportions=jnp.array([0.25, 0.75]))
    states = methods.update_priority(states, sample, jnp.full(4, 5.0))
    assert float(states[0].sampler.raw[0]) == 5.0
    assert methods.size(states).tolist() == [1, 1]


# Copies.


@pytest.mark.parametrize("storage", [jrb.DeviceStorage(), jrb.SpillStorage(None, 5000)])
def test_a_large_copy_is_told_once(storage):
    buffer = jrb.ReplayBuffer(5000, batch_size=2, storage=storage)
    state = buffer.init({"x": jnp.zeros(64)})
    with pytest.warns(
        jrb.CopyWarning, match=r"copies the whole buffer, 1\.3 MB.*jrb\.jitted"
    ) as told:
        state = buffer.add(state, {"x": jnp.ones(64)})
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = buffer.add(state, {"x": jnp.ones(64)})
        jrb.jitted(jrb.ReplayBuffer(5000, batch_size=3, storage=storage)).add(
            state, {"x": jnp.ones(64)}
        )


@pytest.mark.slow
def test_a_large_copy_of_shards_is_told_and_what_leaves_items_alone_copies_none():
    buffer = jrb.ReplayBuffer(5002, num_envs=2, batch_size=2, sampler=jrb.Prioritized())
    sharded = jrb.Sharded(buffer, shards=2)
    state = sharded.init({"x": jnp.zeros(64)})
    with pytest.warns(jrb.CopyWarning, match="copies the whole buffer") as told:
        state = sharded.add(state, {"x": jnp.ones((2, 64))})
    assert told[0].filename == __file__
    items = state.storage["x"].unsafe_buffer_pointer()
    state, batch = sharded.draw(state, KEY)
    state = sharded.update_priority(state, batch, jnp.ones(2))
    state = sharded.drop(sharded.truncate(sharded.set_alpha(state, 0.5)), batch)
    assert state.storage["x"].unsafe_buffer_pointer() == items
    assert not sharded.can_sample(state)


def test_what_copies_little_or_nothing_is_silent():
    small = jrb.ReplayBuffer(100, batch_size=2)
    small.add(small.init({"x": jnp.zeros(64)}), {"x": jnp.ones(64)})
    large = jrb.ReplayBuffer(6000, batch_size=2)
    state = jax.jit(large.add)(large.init({"x": jnp.zeros(64)}), {"x": jnp.ones(64)})
    large.draw(state, KEY)
    hosted = jrb.ReplayBuffer(7000, batch_size=2, storage=jrb.MemmapStorage())
    hosted.add(hosted.init({"x": jnp.zeros(64)}), {"x": jnp.ones(64)})


# Dtypes that JAX would change.

STEP = {"observation": np.zeros(2), "action": np.int64(3), "reward": np.float64(0.5), "end": False}


@pytest.mark.parametrize("make", [lambda buffer: buffer, jrb.jitted], ids=["eager", "jitted"])
def test_wide_dtypes_are_one_error_everywhere(make):
    buffer = jrb.ReplayBuffer(10, batch_size=2)
    with pytest.raises(TypeError, match=r"leaf 'action': .* int64, .*cast=True"):
        make(buffer).init(STEP)
    state = buffer.init(jax.tree.map(jnp.asarray, STEP))
    with pytest.raises(TypeError, match=r"leaf 'action': .* int64, .*cast=True"):
        make(buffer).add(state, STEP)
    many = jax.tree.map(lambda leaf: np.stack([leaf] * 3), STEP)
    with pytest.raises(TypeError, match=r"leaf 'action': .* int64, .*cast=True"):
        make(buffer).extend(state, many)
    with pytest.raises(TypeError, match=r"set: leaf 'reward'.*float64"):
        make(buffer).set(state, np.array([0], np.int32), {"reward": np.zeros(1)})
    with pytest.raises(TypeError, match=r"set: leaf 'action'.*int64"):
        make(buffer).set(state, ..., {"action": np.zeros(10, np.int64)})


@pytest.mark.parametrize("make", [lambda buffer: buffer, jrb.jitted], ids=["eager", "jitted"])
def test_wide_dtypes_are_converted_where_asked_for(make):
    buffer = jrb.ReplayBuffer(10, batch_size=2, cast=True)
    methods = make(buffer)
    state = methods.init(STEP)
    assert {name: str(leaf.dtype) for name, leaf in buffer.item_spec(state).items()} == {
        "observation": "float32",
        "action": "int32",
        "reward": "float32",
        "end": "bool",
    }
    state = methods.add(state, STEP)
    state = methods.add(state, STEP | {"reward": 2, "observation": np.ones(2, np.float16)})
    state = methods.extend(state, jax.tree.map(lambda leaf: np.stack([leaf] * 3), STEP))
    items = buffer.take(state, jnp.arange(5))
    assert items["reward"].tolist() == [0.5, 2.0, 0.5, 0.5, 0.5]
    assert items["action"].tolist() == [3] * 5
    with pytest.raises(ValueError, match=r"'action': expected integers that int32 holds"):
        methods.add(state, STEP | {"action": np.int64(2**40)})
    with pytest.raises(TypeError, match=r"'end': expected dtype bool, got float32"):
        methods.add(state, STEP | {"end": np.float64(0)})


@pytest.mark.parametrize("make", [lambda buffer: buffer, jrb.jitted], ids=["eager", "jitted"])
def test_integers_go_into_no_smaller_dtype(make):
    buffer = jrb.ReplayBuffer(10, batch_size=2, cast=True)
    state = buffer.init({"x": jnp.uint8(0)})
    with pytest.raises(TypeError, match="'x': expected dtype uint8, got int32"):
        make(buffer).add(state, {"x": np.int64(3)})


# Nothing is compiled twice.

UNITS = [jrb.Transition(), jrb.NStep(2, 0.9, strict=True), jrb.Sequence(2), jrb.FrameStack(2)]
SAMPLERS = [
    jrb.Uniform(),
    jrb.Uniform(replacement=False),
    jrb.Lifo(),
    jrb.Newest(0.5),
    jrb.Prioritized(max_draws=50),
]
COMPOSITIONS = [
    {"unit": UNITS[1], "sampler": jrb.Prioritized()},
    {"unit": UNITS[2], "sampler": jrb.WithoutReplacement()},
    {"unit": UNITS[3], "sampler": jrb.Queue()},
]
COMPOSITIONS += [{"sampler": sampler} for sampler in SAMPLERS]
COMPOSITIONS += [
    {"writer": jrb.MaxValue(("next", "reward"))},
    {"storage": jrb.DeviceStorage(share_next_observations=True)},
    {"storage": jrb.MemmapStorage()},
    {"storage": jrb.SpillStorage(None, 16)},
    {"storage": jrb.CompressedStorage(min_bytes=1)},
    {"transforms": (jrb.transforms.Scale(2.0),)},
    {"min_size": 2, "cast": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("parts", COMPOSITIONS, ids=repr)
def test_no_eager_method_compiles_at_its_second_call(parts, compilations):
    buffer = jrb.ReplayBuffer(16, num_envs=2, batch_size=2, **parts)
    state = buffer.extend(buffer.init(EXAMPLE), row(1, 6, 2))

    def once(number, state):
        key = jax.random.fold_in(KEY, number)
        state = buffer.add(buffer.extend(state, row(number, 3, 2)), row(number, 2))
        state = buffer.add(state, row(number, 2), mask=np.bool_(True))
        state, sample = buffer.draw(state, key)
        sample = buffer.sample(state, key)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, sample, np.ones(2, np.float32))
            buffer.sample(buffer.set_alpha(state, 0.5), key, beta=0.4)
        buffer.take(state, np.array([0, 1]))
        bool(buffer.can_sample(state)), int(buffer.size(state))
        buffer.truncate(state), buffer.truncate(state, np.array([True, False]))
        return state

    state = once(1, once(0, state))
    with compilations() as count:
        once(2, state)
    assert count() == 0


def test_an_eager_draw_is_one_program_that_copies_nothing_of_the_state(compilations):
    buffer = jrb.ReplayBuffer(23, batch_size=2, sampler=jrb.Prioritized())
    empty = buffer.init(EXAMPLE)
    state = buffer.extend(empty, row(1, 6))
    with compilations() as count:
        buffer.sample(state, KEY)
    assert count() == 1
    with pytest.raises(ValueError, match="expected something to draw"):
        buffer.sample(empty, KEY)
    drawn, _ = buffer.draw(state, KEY)
    assert all(map(operator.is_, jax.tree.leaves(drawn.storage), jax.tree.leaves(state.storage)))


@pytest.mark.slow
def test_no_method_of_a_mix_compiles_at_its_second_call(compilations):
    one = jrb.ReplayBuffer(20, sampler=jrb.Prioritized())
    other = jrb.ReplayBuffer(10)
    mix = jrb.Mix((one, other), (1.0, 0.0), batch_size=4)
    states = one.add(one.init(EXAMPLE), row(1)), other.init(EXAMPLE)

    def once(number, states):
        key = jax.random.fold_in(KEY, number)
        states, sample = mix.draw(states, key)
        mix.sample(states, key, proportions=np.array([1.0, 0.0], np.float32))
        mix.sample(states, key, beta=0.5)
        return mix.update_priority(states, sample, np.ones(4, np.float32))

    states = once(1, once(0, states))
    with compilations() as count:
        once(2, states)
    assert count() == 0


def test_an_eager_transform_sees_a_value_that_changes():
    scale = {"by": 2.0}
    change = lambda data: {"x": data["x"] * jnp.float32(scale["by"])}
    transforms = (jrb.transforms.Scale(10.0, paths=("x",)), change)
    for storage in (jrb.DeviceStorage(), jrb.MemmapStorage()):
        buffer = jrb.ReplayBuffer(4, batch_size=1, transforms=transforms, storage=storage)
        state = buffer.add(buffer.init({"x": jnp.float32(0)}), {"x": jnp.float32(1)})
        for by in (2.0, 3.0):
            scale["by"] = by
            assert buffer.sample(state, KEY).data["x"].tolist() == [10 * by]


@pytest.mark.parametrize("parts", PARTS[:2])
def test_states_that_were_donated_are_told_of(parts):
    buffer = jrb.ReplayBuffer(8, batch_size=2, **parts)
    methods = jrb.jitted(buffer)
    old = methods.extend(methods.init(EXAMPLE), row(1, 4))
    new = methods.add(old, row(2))
    for of in (methods, buffer):
        calls = [lambda of=of: of.add(old, row(3)), lambda of=of: of.sample(old, KEY)]
        calls += [lambda of=of: of.draw(old, KEY), lambda of=of: of.empty(old)]
        for call in calls:
            with pytest.raises(ValueError, match=r"donated, .*Go on with the state that came back"):
                call()
    assert int(methods.size(new)) == 5


@pytest.mark.slow
def test_every_method_tells_of_a_state_that_was_donated():
    buffer = jrb.ReplayBuffer(8, batch_size=2, sampler=jrb.Prioritized())
    methods = jrb.jitted(buffer)
    old = methods.extend(methods.init(EXAMPLE), row(1, 4))
    sample, slots, ones = methods.sample(old, KEY), jnp.arange(2), jnp.ones(2)
    methods.add(old, row(2))
    reads = {"take": (slots,), "size": (), "can_sample": (), "in_order": (), "newest": (1,)}
    reads |= {"priorities": (), "sample": (KEY,), "draw": (KEY,)}
    writes = {"add": (row(3),), "extend": (row(3, 2),), "update_priority": (sample, ones)}
    keep = lambda items: {"action": items["action"]}
    writes |= {"set": (slots, keep(row(1, 2))), "map": (keep,)}
    writes |= {"drop": (slots,), "truncate": (), "empty": (), "set_alpha": (0.5,)}
    for of in (methods, buffer):
        for name, arguments in (reads | writes).items():
            with pytest.raises(jrb.DonatedError, match="that were donated"):
                getattr(of, name)(old, *arguments)


@pytest.mark.parametrize("leaf", [np.datetime64("2020"), np.str_("a"), np.array(["a"]), b"a"])
@pytest.mark.parametrize("cast", [False, True])
def test_what_is_no_number_is_named_with_its_leaf(leaf, cast):
    buffer = jrb.ReplayBuffer(8, cast=cast)
    methods = jrb.jitted(buffer)
    with pytest.raises(TypeError, match=r"add: leaf 'x': expected (numbers|an array), got"):
        methods.add(methods.init({"x": jnp.float32(0)}), {"x": leaf})


def test_a_program_may_have_no_devices_on_the_host(monkeypatch):
    def count(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu.")
        return 1

    buffer = jrb.ReplayBuffer(4)
    state = buffer.init({"x": 0})
    monkeypatch.setattr(jax, "device_count", count)
    with seams.devices_counted_anew():
        assert int(buffer.size(buffer.add(state, {"x": 1}))) == 1


# Arguments of other types and ranges.

STORAGES = [jrb.DeviceStorage, jrb.MemmapStorage]


@pytest.mark.parametrize("storage", STORAGES)
def test_slots_beyond_int32_are_none_of_the_buffer(storage):
    buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=jrb.Prioritized(), storage=storage())
    methods = jrb.jitted(buffer)
    state = methods.extend(buffer.init({"x": 0}), {"x": jnp.arange(8)})
    state = methods.update_priority(state, np.array([2**32 + 1, 2]), np.array([5.0, 7.0]))
    state = methods.update_priority(state, [3, 2**40], [9.0, 5.0])
    assert buffer.priorities(state).tolist() == [1, 1, 7, 9, 1, 1, 1, 1]


def test_compiled_methods_of_items_on_the_host_check_what_the_buffer_checks():
    buffer = jrb.ReplayBuffer(8, sampler=jrb.Prioritized(), storage=jrb.MemmapStorage())
    methods = jrb.jitted(buffer)
    state = methods.extend(buffer.init({"x": 0}), {"x": jnp.arange(8)})
    for slots in (jnp.array([99]), [-1], np.array([2**32 + 1])):
        with pytest.raises(ValueError, match=r"drop: expected indices in \[0, 8\)"):
            methods.drop(state, slots)
    with pytest.raises(ValueError, match="alpha"):
        methods.set_alpha(state, -1.0)
    with pytest.raises(TypeError, match="expected real numbers"):
        methods.update_priority(state, [0], np.array([True]))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_batch_size_that_is_no_integer_is_told(storage):
    buffer = jrb.ReplayBuffer(8, batch_size=4, storage=storage())
    methods = jrb.jitted(buffer)
    state = methods.extend(buffer.init({"x": 0}), {"x": jnp.arange(8)})
    mixed = jrb.jitted(jrb.Mix((buffer, buffer), (0.5, 0.5), batch_size=4))
    for wrong in (np.array(2), jnp.int32(2), 2.0):
        with pytest.raises(TypeError, match="batch_size: expected an integer"):
            methods.sample(state, KEY, wrong)
        with pytest.raises(TypeError, match="batch_size: expected an integer"):
            mixed.sample((state, state), KEY, wrong)
    assert methods.sample(state, KEY, np.int64(2)).indices.shape == (2,)


def test_a_size_that_was_read_outlives_the_state():
    buffer = jrb.ReplayBuffer(8, writer=jrb.Reservoir(0), sampler=jrb.Prioritized())
    state = buffer.add(buffer.init({"x": 0}), {"x": 1})
    size, priorities = buffer.size(state), buffer.priorities(state)
    jrb.jitted(buffer).add(state, {"x": jnp.int32(1)})
    assert (int(size), float(priorities[0])) == (1, 1.0)


@pytest.mark.filterwarnings("ignore::jrb.PriorityWarning")
@pytest.mark.parametrize("storage", STORAGES)
def test_priorities_are_the_same_numbers_everywhere(storage):
    buffer = jrb.ReplayBuffer(8, sampler=jrb.Prioritized(), storage=storage())
    given = np.array([1, 2**40, 7], np.uint64)
    for methods in (buffer, jrb.jitted(buffer)):
        state = methods.extend(buffer.init({"x": 0}), {"x": jnp.arange(3)}, priorities=given)
        assert buffer.priorities(state).tolist()[:3] == [1.0, 2.0**40, 7.0]
        state = methods.update_priority(state, jnp.arange(3), np.array([1e300, 3, 4]))
        assert buffer.priorities(state).tolist()[:3] == [1.0, 3.0, 4.0]
        state = methods.update_priority(state, jnp.arange(3), given)
        assert buffer.priorities(state).tolist()[:3] == [1.0, 2.0**40, 7.0]
        for wrong in (np.array(["a"]), np.array([1], "m8[s]"), np.array([1j])):
            with pytest.raises(TypeError, match="expected real numbers"):
                methods.update_priority(state, jnp.arange(1), wrong)


def test_a_missing_argument_is_named_with_the_method():
    methods = jrb.jitted(jrb.ReplayBuffer(4, batch_size=1))
    state = methods.init({"x": 0.0})
    with pytest.raises(TypeError, match=r"Jitted\.sample\(\) missing .* 'key'"):
        methods.sample(state)
    with pytest.raises(TypeError, match=r"Jitted\.newest\(\) missing .* 'n'"):
        methods.newest(state)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sample", "draw"])
@pytest.mark.parametrize("storage", [None, "host"])
def test_a_seed_gives_what_its_key_gives(method, storage):
    parts = {} if storage is None else {"storage": jrb.MemmapStorage()}
    buffer = jrb.ReplayBuffer(64, batch_size=8, sampler=jrb.Prioritized(), **parts)
    methods = jrb.jitted(buffer)
    batches = []
    for key in (7, np.uint32(7), np.int64(7), np.int8(7), jnp.int32(7), jax.random.key(7)):
        state = methods.extend(methods.init({"x": 0}), {"x": jnp.arange(50)})
        result = getattr(methods, method)(state, key, beta=0.5)
        batches.append(result[-1] if method == "draw" else result)
    for batch in batches[:-1]:
        assert batch.indices.tolist() == batches[-1].indices.tolist()
    state = methods.extend(methods.init({"x": 0}), {"x": jnp.arange(50)})
    assert methods.sample(state, 8).indices.tolist() != batches[0].indices.tolist()


def test_a_seed_for_a_mix():
    buffer = jrb.ReplayBuffer(64, batch_size=8)
    mix = jrb.Mix((buffer, buffer), (0.5, 0.5), batch_size=8)
    states = tuple(buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(50)}) for _ in range(2))
    methods = jrb.jitted(mix)
    one, other = methods.sample(states, 7), methods.sample(states, jax.random.key(7))
    assert one.data["x"].tolist() == other.data["x"].tolist()


@pytest.mark.parametrize("seed", [3 * 10**9, 2**32 - 1, np.uint64(2**31)])
def test_large_seeds_give_what_their_keys_give(seed):
    buffer = jrb.ReplayBuffer(64, batch_size=8)
    methods = jrb.jitted(buffer)
    state = methods.extend(methods.init({"x": 0}), {"x": jnp.arange(50)})
    key = jax.random.key(np.uint32(seed))
    assert (
        methods.sample(state, seed).indices.tolist() == methods.sample(state, key).indices.tolist()
    )


@pytest.mark.parametrize("seed", [-1, 2**32, np.int8(-1), np.uint64(2**40)])
def test_seeds_out_of_range_are_refused(seed):
    buffer = jrb.ReplayBuffer(8, batch_size=2)
    methods = jrb.jitted(buffer)
    state = methods.add(methods.init({"x": 0}), {"x": 1})
    with pytest.raises(ValueError, match=r"key: expected a key, or a seed from 0 to 2\*\*32 - 1"):
        methods.sample(state, seed)


def test_other_seeds_do_not_compile_anew():
    buffer = jrb.ReplayBuffer(8, batch_size=2)
    methods = jrb.jitted(buffer)
    state = methods.add(methods.init({"x": 0}), {"x": 1})
    methods.sample(state, 0)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        records = []
        patch.setattr("logging.Logger.handle", lambda self, record: records.append(record))
        for seed in (*range(5), 2**31, 2**32 - 1, np.int64(6), np.uint8(7)):
            methods.sample(state, seed)
    assert not [record for record in records if "Compiling" in record.getMessage()]
