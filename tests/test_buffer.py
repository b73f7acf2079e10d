"""The methods of a buffer, compared with a plain Python model and one by one."""

import collections
import dataclasses
import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from jrb.authoring import enable_x64
from tests import reference

KEY = jax.random.key(0)


def number(values):
    """Returns items that hold their number in two dtypes."""
    values = np.asarray(values, np.int32)
    return {"id": values, "next": {"reward": values.astype(np.float32) / np.float32(8)}}


@functools.lru_cache
def jitted(rows, envs, length):
    """Returns a buffer and its compiled methods, cached; calls of `extend` have `length` rows."""
    buffer = jrb.ReplayBuffer(rows * (envs or 1), num_envs=envs, batch_size=64)
    return buffer, jax.jit(buffer.extend), jax.jit(buffer.add), jax.jit(buffer.sample)


commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.just(None)),
        st.tuples(st.just("masked add"), st.booleans()),
        st.tuples(st.just("extend"), st.just(None)),
        st.tuples(st.just("masked extend"), st.lists(st.booleans(), min_size=5, max_size=5)),
        st.tuples(st.just("empty"), st.just(None)),
    ),
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "envs"), [(1, None), (3, None), (7, 2), (1, 3), (4, 1)])
@hypothesis.given(commands=commands)
@hypothesis.settings(max_examples=25)
def test_random_streams_agree_with_the_model(rows, envs, commands):
    buffer, extend, add, sample = jitted(rows, envs, 5)
    lead = () if envs is None else (envs,)
    state, model = buffer.init(number(0)), reference.Ring(rows, envs or 1)
    fresh = 0
    for method, mask in commands:
        count = (5 if "extend" in method else 1) * (envs or 1)
        ids = np.arange(fresh, fresh + count, dtype=np.int32)
        fresh += count
        if method == "empty":
            state = buffer.empty(state)
            model.empty()
        elif "extend" in method:
            flags = None if mask is None else np.array(mask)
            state = extend(state, number(ids.reshape(5, *lead)), flags)
            model.extend(ids.reshape(5, -1).tolist(), mask)
        else:
            state = add(state, number(ids.reshape(lead)), mask)
            model.add(ids.tolist(), mask is None or mask)
        held = model.held()
        assert int(buffer.size(state)) == len(held)
        stored = np.asarray(buffer.take(state, np.array(sorted(held), np.int32))["id"])
        assert dict(zip(sorted(held), stored.tolist(), strict=True)) == held
        batch = sample(state, KEY)
        assert bool(buffer.can_sample(state)) == bool(held) == bool(batch.mask.all())
        if held:
            drawn = dict(zip(batch.indices.tolist(), batch.data["id"].tolist(), strict=True))
            assert drawn.items() <= held.items()
            np.testing.assert_array_equal(
                batch.data["next"]["reward"], batch.data["id"].astype(np.float32) / 8
            )


@pytest.mark.parametrize("sampler", [jrb.Prioritized(), jrb.Queue(), jrb.WithoutReplacement()])
@pytest.mark.parametrize("cuts", [(20,), (1,) * 20, (7, 13), (3, 1, 9, 7)])
def test_how_rows_are_cut_into_calls_does_not_matter(sampler, cuts):
    buffer = jrb.ReplayBuffer(capacity=12, num_envs=2, batch_size=4, sampler=sampler)
    items = number(np.arange(40).reshape(20, 2))
    whole = buffer.extend(buffer.init(number(0)), items)
    state, first = buffer.init(number(0)), 0
    for count in cuts:
        part = jax.tree.map(lambda leaf, a=first, b=count: leaf[a : a + b], items)
        state = buffer.extend(state, part)
        first += count
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_masked_rows_are_as_if_they_were_not_there():
    buffer = jrb.ReplayBuffer(capacity=6, batch_size=4, sampler=jrb.Prioritized())
    items, mask = number(np.arange(15)), np.arange(15) % 3 != 1
    got = jax.jit(buffer.extend)(buffer.init(number(0)), items, mask)
    want = buffer.extend(buffer.init(number(0)), jax.tree.map(lambda leaf: leaf[mask], items))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_masked_add_under_vmap_writes_only_where_the_mask_holds():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2)
    state = jax.vmap(lambda _: buffer.init(number(0)))(jnp.arange(3))
    write = jax.jit(jax.vmap(buffer.add))
    state = write(state, number([7, 8, 9]), jnp.array([True, False, True]))
    assert jax.vmap(buffer.size)(state).tolist() == [1, 0, 1]
    assert state.storage["id"][:, 0].tolist() == [7, 0, 9]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_a_draw_leaves_the_containers_of_items_as_they_are(kind):
    buffer = jrb.ReplayBuffer(8, batch_size=2)
    state = buffer.init(kind(z=jnp.zeros(2), a=(jnp.zeros(()),)))
    state = buffer.extend(state, kind(z=jnp.ones((3, 2)), a=(jnp.ones(3),)))
    after, sample = jax.jit(buffer.draw)(state, jax.random.key(0))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert type(sample.data) is kind


def test_extending_by_no_rows_changes_nothing():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2)
    state = buffer.add(buffer.init(number(0)), number(1))
    assert int(buffer.size(buffer.extend(state, number(np.zeros(0))))) == 1


EXACT = {
    "bool": np.array([True, False]),
    "uint8": np.array([0, 255], np.uint8),
    "int8": np.array([-128, 127], np.int8),
    "int32": np.array([-(2**31), 2**31 - 1], np.int32),
    "float16": np.array([65504, 6e-8], np.float16),
    "bfloat16": jnp.array([3.0e38, 1e-40], jnp.bfloat16),
    "float8_e4m3fn": jnp.array([448.0, 0.0019], jnp.float8_e4m3fn),
    "float8_e5m2": jnp.array([57344.0, 1.5e-5], jnp.float8_e5m2),
    "int4": jnp.array([-8, 7], jnp.int4),
    "float32": np.array([np.nan, -0.0], np.float32),
    "complex64": np.array([1j, np.inf], np.complex64),
    "empty": np.zeros((0, 3), np.float32),
}


def bits_of(array):
    return np.asarray(array).view(np.uint8) if np.asarray(array).size else np.asarray(array)


@pytest.mark.slow
def test_every_dtype_comes_back_bit_for_bit():
    buffer = jrb.ReplayBuffer(capacity=6, num_envs=2, batch_size=8)
    stack = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 2), EXACT)
    state = jax.jit(buffer.add)(buffer.init(EXACT), stack)
    state = jax.jit(buffer.extend)(state, jax.tree.map(lambda leaf: leaf[None], stack))
    masked = jax.jit(buffer.add)(state, stack, jnp.bool_(True))
    for drawn in (buffer.sample(state, KEY).data, buffer.sample(masked, KEY).data):
        for name, leaf in EXACT.items():
            assert drawn[name].dtype == leaf.dtype, name
            for row in drawn[name]:
                np.testing.assert_array_equal(bits_of(row), bits_of(leaf), err_msg=name)


def test_int64_comes_back_under_x64():
    with enable_x64():
        item = {"x": np.array([2**63 - 1, -(2**63)]), "y": np.float64(1 / 3)}
        buffer = jrb.ReplayBuffer(capacity=3, batch_size=2, sampler=jrb.Prioritized())
        state = jax.jit(buffer.add)(buffer.init(item), item)
        sample = jax.jit(buffer.sample)(state, jax.random.key(0))
        state = jax.jit(buffer.update_priority)(state, sample, jnp.ones(2))
        assert sample.data["x"].dtype == np.int64
        assert sample.indices.dtype == np.int32
        assert sample.weights.dtype == np.float32
        np.testing.assert_array_equal(sample.data["x"][0], item["x"])
        assert sample.data["y"][0] == item["y"]


def test_typed_keys_come_back():
    for impl in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(5, impl=impl), 4)
        buffer = jrb.ReplayBuffer(capacity=4, batch_size=8)
        state = jax.jit(buffer.extend)(buffer.init({"key": keys[0]}), {"key": keys})
        sample = buffer.sample(state, KEY)
        assert sample.data["key"].dtype == keys.dtype
        want = jax.random.key_data(keys)[sample.indices]
        np.testing.assert_array_equal(jax.random.key_data(sample.data["key"]), want)


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "item",
    [np.float32(3), (np.int32(1), np.float32(2)), Pair(np.int32(1), {"z": np.ones(2, bool)})],
    ids=["array", "tuple", "namedtuple"],
)
def test_items_of_any_structure(item):
    buffer = jrb.ReplayBuffer(capacity=3, batch_size=2)
    data = buffer.sample(buffer.add(buffer.init(item), item), KEY).data
    assert jax.tree.structure(data) == jax.tree.structure(item)


def test_the_batch_size_of_a_call_wins():
    buffer = jrb.ReplayBuffer(capacity=3, batch_size=2)
    state = buffer.add(buffer.init(number(0)), number(1))
    assert buffer.sample(state, KEY, batch_size=5).data["id"].shape == (5,)
    assert buffer.sample(state, KEY).data["id"].shape == (2,)


def test_sample_leaves_the_state_alone_and_draw_consumes():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2, sampler=jrb.Queue())
    state = buffer.extend(buffer.init(number(0)), number([1, 2, 3]))
    assert buffer.sample(state, KEY).data["id"].tolist() == [1, 2]
    assert buffer.sample(state, KEY).data["id"].tolist() == [1, 2]
    state, sample = buffer.draw(state, KEY)
    assert sample.data["id"].tolist() == [1, 2]
    assert buffer.sample(state, KEY).mask.tolist() == [True, False]


def test_transforms_run_in_order_on_the_way_out():
    transforms = (lambda data: {"x": data["x"] * 2.0}, lambda data: {"x": data["x"] + 1.0})
    buffer = jrb.ReplayBuffer(capacity=3, batch_size=2, transforms=transforms)
    state = buffer.add(buffer.init({"x": jnp.float32(0)}), {"x": jnp.float32(5)})
    assert buffer.sample(state, KEY).data["x"].tolist() == [11.0, 11.0]
    assert buffer.take(state, jnp.array([0]))["x"].tolist() == [5.0]


class Bytes:
    """Stores numbers in [0, 1] as bytes."""

    def __call__(self, data):
        return {"x": data["x"].astype(jnp.float32) / 255}

    def inverse(self, item):
        return {"x": jnp.round(item["x"] * 255).astype(jnp.uint8)}


@pytest.mark.parametrize("envs", [None, 2])
def test_a_transform_with_an_inverse_decides_what_is_stored(envs):
    buffer = jrb.ReplayBuffer(capacity=4, num_envs=envs, batch_size=2, transforms=(Bytes(),))
    lead = () if envs is None else (envs,)
    state = buffer.init({"x": jnp.zeros(3)})
    state = buffer.add(state, {"x": jnp.ones((*lead, 3))})
    state = buffer.extend(state, {"x": jnp.ones((1, *lead, 3))})
    assert state.storage["x"].dtype == jnp.uint8
    assert buffer.sample(state, KEY).data["x"].tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match="leaf 'x'"):
        buffer.add(state, {"x": jnp.ones((*lead, 4))})


def test_nbytes_needs_no_memory():
    example = {"obs": jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)}
    buffer = jrb.ReplayBuffer(capacity=10**9, batch_size=2)
    assert buffer.nbytes(example) == 10**9 * 84 * 84 * 4 + 16


def test_counters_survive_their_limits():
    buffer = jrb.ReplayBuffer(capacity=3, batch_size=64, sampler=jrb.Prioritized())
    state = buffer.extend(buffer.init(number(0)), number([1, 2, 3]))
    clock = state.writer.replace(lap=jnp.uint32(2**32 - 1))
    state = state.replace(writer=clock)
    late = buffer.sample(state, KEY)
    for value in range(4, 12):
        state = buffer.add(state, number(value))
        drawn = set(buffer.sample(state, KEY).data["id"].tolist())
        assert drawn == {value - 2, value - 1, value}
    after = buffer.update_priority(state, late, jnp.full(64, 9.0))
    assert after.sampler.raw.tolist() == state.sampler.raw.tolist()


def test_a_late_update_leaves_overwritten_slots_alone():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=64, sampler=jrb.Prioritized())
    state = buffer.extend(buffer.init(number(0)), number([1, 2, 3, 4]))
    sample = buffer.sample(state, KEY)
    assert set(sample.indices.tolist()) == {0, 1, 2, 3}
    state = buffer.add(state, number(5))
    state = buffer.update_priority(state, sample, jnp.full(64, 9.0))
    assert state.sampler.raw.tolist() == [1.0, 9.0, 9.0, 9.0]


def test_a_late_update_revives_nothing_after_empty():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=64, sampler=jrb.Prioritized())
    state = buffer.extend(buffer.init(number(0)), number([1, 2, 3, 4]))
    sample = buffer.sample(state, KEY)
    state = buffer.empty(state)
    state = buffer.update_priority(state, sample, jnp.full(64, 9.0))
    assert float(jrb.sum_tree.total(state.sampler.masses)) == 0.0
    state = buffer.extend(state, number([5, 6]))
    state = buffer.update_priority(state, sample, jnp.full(64, 9.0))
    assert state.sampler.raw.tolist() == [1.0, 1.0, -1.0, -1.0]


def test_a_state_can_be_donated_again_and_again():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2, sampler=jrb.Prioritized())
    add = jax.jit(buffer.add, donate_argnums=0)
    draw = jax.jit(buffer.draw, donate_argnums=0)
    state = buffer.init(number(0))
    for value in range(6):
        state = add(state, number(value))
        state, sample = draw(state, KEY)
        state = jax.jit(buffer.update_priority, donate_argnums=0)(state, sample, jnp.ones(2))
        state = jax.jit(buffer.empty, donate_argnums=0)(state) if value == 3 else state
    assert int(buffer.size(state)) == 2


def test_a_buffer_is_made_on_a_device_and_its_samples_are_brought_elsewhere():
    here, there = jax.devices()[:2]
    buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=jrb.Prioritized())
    for device in (there, jax.sharding.SingleDeviceSharding(there)):
        state = buffer.init({"id": 0}, device=device)
        add = jax.jit(buffer.add, donate_argnums=0)
        for number in range(3):
            state = add(state, {"id": jnp.asarray(number)})
        assert all(leaf.devices() == {there} for leaf in jax.tree.leaves(state))
        sample = buffer.sample(state, KEY)
        assert sample.data["id"].devices() == {there}
        assert jax.device_put(sample, here).data["id"].devices() == {here}


def test_a_buffer_lives_on_the_device_that_is_current():
    with jax.default_device(jax.devices()[1]):
        buffer = jrb.ReplayBuffer(capacity=4, batch_size=2)
        state = buffer.add(buffer.init(number(0)), number(1))
        assert buffer.sample(state, KEY).data["id"].devices() == {jax.devices()[1]}


def test_a_closed_over_empty_state_does_not_raise_inside_jit():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2)
    state = buffer.init(number(0))
    assert not jax.jit(lambda key: buffer.sample(state, key))(KEY).mask.any()


def test_the_state_shows_itself():
    buffer = jrb.ReplayBuffer(capacity=1000, batch_size=2, sampler=jrb.Prioritized())
    state = buffer.add(buffer.init(number(0)), number(1))
    assert "storage/next/reward" in repr(state)
    assert "float32[1000]" in repr(state)
    assert "<table>" in state._repr_html_()
    assert "writer/count" in str(jax.eval_shape(lambda: buffer.init(number(0))))


def test_numpy_integers_describe_the_same_buffer():
    with enable_x64():
        sizes = {"capacity": np.int64(8), "num_envs": np.int16(2), "batch_size": np.int64(2)}
        buffer = jrb.ReplayBuffer(sampler=jrb.Queue(), **sizes)
        assert buffer == jrb.ReplayBuffer(8, num_envs=2, batch_size=2, sampler=jrb.Queue())
        state = buffer.add(buffer.init(number(0)), number([1, 2]))
        state, _ = buffer.draw(state, KEY, batch_size=np.int64(1))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.sampler)} == {jnp.dtype("int32")}


@pytest.mark.parametrize(
    "parts",
    [
        {"unit": jrb.Sequence(np.int64(2), burn_in=np.uint8(1), stride=np.int8(1))},
        {"unit": jrb.FrameStack(np.uint32(2), paths=("x",))},
        {"unit": jrb.NStep(np.uint8(2), np.float32(0.5), strict=True)},
        {"unit": jrb.Packed(np.int64(4), np.int64(2))},
        {"sampler": jrb.Grouped("key", np.int64(3), np.int64(2))},
        {"sampler": jrb.Prioritized(alpha=np.float64(0.5), max_draws=np.int64(9))},
    ],
)
def test_numpy_numbers_in_parts_are_those_of_python(parts):
    item = {"x": np.ones(2, np.float32), "key": np.int32(0)}
    item["next"] = {"reward": np.float32(1), "done": np.bool_(False)}
    with enable_x64():
        buffer = jrb.ReplayBuffer(16, batch_size=4, **parts)
        state = buffer.init(item)
        for number in range(6):
            item["next"]["done"] = np.bool_(number % 3 == 2)
            state = buffer.add(state, item)
        sample = buffer.sample(state, KEY)
    assert sample.weights.dtype == sample.probabilities.dtype == np.float32
    assert sample.mask.any()
    part = next(iter(parts.values()))
    values = [getattr(part, field.name) for field in dataclasses.fields(part)]
    assert not any(isinstance(value, np.generic) for value in values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_stop_at_the_buffer(dtype):
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2)
    state = buffer.init(jnp.zeros(3, dtype))

    def loss(weight):
        after = buffer.add(state, (weight * jnp.ones(3)).astype(dtype))
        return weight * jnp.sum(buffer.sample(after, KEY).data.astype(jnp.float32))

    assert float(jax.jit(jax.grad(loss))(2.0)) == 12.0


def test_a_masked_row_is_dropped_at_the_largest_capacities():
    ring = jrb.ring.Ring(715_827_882, 3)
    slots = ring.row_slots(jnp.array([ring.capacity], jnp.int32))
    assert slots.tolist() == [[ring.capacity] * 3]


def test_states_that_hold_no_arrays_still_show_themselves():
    buffer = jrb.ReplayBuffer(capacity=4, batch_size=2)
    state = buffer.init(number(0))
    assert "int" in repr(jax.tree.map(lambda leaf: 0, state))
    jax.jit(buffer.add, donate_argnums=0)(state, number(1))
    assert "donated" in repr(state)


def test_outside_jit_a_draw_and_an_update_do_not_return_the_items():
    buffer = jrb.ReplayBuffer(4096, batch_size=8, sampler=jrb.Prioritized())
    state = buffer.init({"x": jnp.zeros(256)})
    state = jrb.jitted(buffer).add(state, {"x": jnp.ones(256)})
    where = state.storage["x"].unsafe_buffer_pointer()
    after, sample = buffer.draw(state, jax.random.key(0))
    assert after.storage["x"].unsafe_buffer_pointer() == where
    after = buffer.update_priority(after, sample, jnp.ones(8))
    assert after.storage["x"].unsafe_buffer_pointer() == where
    assert buffer.empty(after).storage["x"].unsafe_buffer_pointer() == where


def test_a_description_reads_as_it_is_written():
    plain = jrb.ReplayBuffer(10)
    assert repr(plain) == "ReplayBuffer(capacity=10)"
    unit = jrb.FrameStack(4, unit=jrb.NStep(3, 0.9))
    buffer = jrb.ReplayBuffer(20, 2, batch_size=4, unit=unit, sampler=jrb.Prioritized(beta=0.5))
    lines = repr(buffer).splitlines()
    assert lines[0] == "ReplayBuffer("
    assert "    sampler=Prioritized(beta=0.5)," in lines
    assert eval(repr(buffer), {**vars(jrb)}) == buffer
    assert eval(repr(unit), {**vars(jrb)}) == unit
    page = buffer._repr_html_()
    assert "<b>Prioritized</b>" in page and "stratified" not in page


def test_states_and_samples_say_what_is_in_them_wherever_they_are():
    buffer = jrb.ReplayBuffer(6, 2, batch_size=3, sampler=jrb.Prioritized(), unit=jrb.NStep(2, 0.9))
    item = {"x": jnp.int32(0), "next": {"reward": jnp.float32(0), "done": jnp.bool_(False)}}
    state = buffer.init(item)
    assert "held: 0 of 6 (0 %)" in repr(state)
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), item)
    state = buffer.add(state, {**rows, "next": {**rows["next"], "done": jnp.array([True, False])}})
    told = repr(state)
    assert "held: 2 of 6 (33 %)" in told
    assert "ends of episodes: 1" in told
    assert "priorities: mean 1, from 1 to 1" in told
    assert "<summary>leaves</summary>" in state._repr_html_()
    sample = buffer.sample(state, jax.random.key(0))
    assert "real entries: 3 of 3 (100 %)" in repr(sample)
    assert "data/next/reward" in sample._repr_html_()
    seen = []
    jax.jit(lambda *things: seen.extend(map(repr, things)))(state, sample)
    many = jax.tree.map(lambda leaf: leaf[None], (state, sample))
    jax.vmap(lambda *things: seen.extend(map(repr, things)))(*many)
    seen += [repr(jax.tree.map(lambda leaf: None, thing)) for thing in (state, sample)]
    seen += [repr(jax.tree.map(lambda leaf: 0, thing)) for thing in (state, sample)]
    assert all(text.startswith(("BufferState", "Sample")) for text in seen)
    assert "states under vmap: 1" in repr(many[0])
    lanes = jrb.ReplayBuffer(20, 4, writer=jrb.PerEnvironment())
    some = lanes.add(
        lanes.init(item),
        jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), item),
        jnp.array([True, False, True, True]),
    )
    assert "held: 3 of 20 (15 %)" in repr(some)


@pytest.mark.parametrize("unit", [jrb.Transition(), jrb.Sequence(1, cross_episodes=True)])
def test_many_buffers_are_written_like_each_of_them(unit):
    buffer = jrb.ReplayBuffer(6, num_envs=2, unit=unit)
    states = [buffer.init({"x": jnp.zeros(3), "y": 0.0})] * 2
    many = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for number in range(4):
        rows = [
            {"x": jnp.full((2, 3), k + number), "y": jnp.full(2, -k - number)} for k in (1.0, 9.0)
        ]
        states = [buffer.add(state, row) for state, row in zip(states, rows, strict=True)]
        many = jax.vmap(buffer.add)(many, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))
    each = [buffer.take(state, jnp.arange(6)) for state in states]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    found = jax.vmap(buffer.take, in_axes=(0, None))(many, jnp.arange(6))
    chex.assert_trees_all_equal(found, expected)
