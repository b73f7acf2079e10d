"""One thread reads and writes few rows, with the same results."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jrb
from jrb import testing
from jrb._xla import compiling, dependencies, gather
from tests.devices import test_devices as devices
from tests.test_sum_tree import floats, same_bits

N, E = 2**17, 4  # N: the least number of 4-byte elements that XLA splits over threads
EXAMPLE = {
    "observation": jnp.zeros(5),
    "small": jnp.zeros(3, jnp.uint8),
    "half": jnp.zeros(4, jnp.bfloat16),
    "action": jnp.int32(0),
    "frame": jnp.zeros((20, 20), jnp.uint8),
    "next": {
        "observation": jnp.zeros(5),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}


def numbers(dtype, *shape):
    return jnp.arange(np.prod(shape), dtype=jnp.int32).astype(dtype).reshape(shape)


def is_spread(function, *args):
    return "outer_dimension_partitions" in jax.jit(function).lower(*args).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "uint32", "bfloat16", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("lead", [(), (1,), (16,), (4, 3), (0,)])
def test_rows_are_those_of_the_array(dtype, shape, lead):
    array = numbers(dtype, N, *shape)
    slots = jax.random.randint(jax.random.key(0), lead, 0, N)
    read = jax.jit(gather.read)(array, slots)
    assert read.dtype == array.dtype
    assert np.array_equal(read, array[slots])


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_items_are_those_that_numpy_finds(axes, lead):
    array, places = numbers("int32", 5, 4, 3, 2), np.random.default_rng(axes)
    index = [places.integers(0, size, lead, np.uint32) for size in array.shape[:axes]]
    found = gather.items_at(array, *map(jnp.asarray, index))
    assert np.array_equal(found, np.asarray(array)[tuple(index)])


def test_an_item_beyond_the_end_is_the_last_one_if_so_wanted():
    at = jnp.array([0, 4, 5, 2**31 - 1], jnp.uint32)
    assert gather.items_at(jnp.arange(5), at, mode="clip").tolist() == [0, 4, 4, 4]


def test_each_agent_reads_its_own():
    arrays, slots = numbers("float32", 3, N), jnp.array([[0, 5], [N - 1, 7], [7, 7]])
    read = jax.jit(jax.vmap(gather.read))(arrays, slots)
    assert np.array_equal(read, np.take_along_axis(np.asarray(arrays), np.asarray(slots), 1))


def test_few_rows_are_read_by_one_thread():
    array, slots = jnp.zeros((N, 8)), jnp.arange(16, dtype=jnp.int32)
    if not is_spread(gather.items_at, array, slots):
        pytest.skip("nothing is spread where there is one thread, and on other devices")
    assert not is_spread(gather.read, array, slots)


def test_many_rows_and_small_arrays_are_read_as_they_are():
    slots = lambda count: jnp.zeros(count, jnp.int32)
    assert gather.is_few(jnp.zeros(N), slots(16))
    assert not gather.is_few(jnp.zeros(N - 1), slots(16))
    assert not gather.is_few(jnp.zeros((N, 8)), slots(1024), 8)
    assert not gather.is_few(jax.random.split(jax.random.key(0), N), slots(16))
    huge = jax.ShapeDtypeStruct((2**24,), jnp.float32)
    assert gather.is_few(huge, slots(64))
    assert not gather.is_few(huge, slots(65))


def test_more_is_few_for_a_call_by_itself():
    width, huge = 40, jax.ShapeDtypeStruct((2**20, 40), jnp.float32)
    array, slots = jax.ShapeDtypeStruct((N, width), jnp.float32), jnp.zeros(512, jnp.int32)
    few = lambda array, count: gather.is_few(array, slots[:count], width)
    alone = compiling.standalone_program(few)
    assert few(array, 128) and alone(array, 256) and not few(array, 256)
    assert few(huge, 64) and alone(huge, 256) and not few(huge, 65)
    assert not alone(array, 512) and not alone(huge, 512)
    assert not few(array, 256), "that was for the other function alone"


def test_a_draw_is_compiled_anew_for_a_call_by_itself():
    buffer = jrb.ReplayBuffer(N, batch_size=256)
    state = jax.eval_shape(lambda: buffer.init({"observation": jnp.zeros(40)}))
    key = jax.random.key(0)
    if not is_spread(buffer.sample, state, key):
        pytest.skip("nothing is spread where there is one thread, and on other devices")
    draws = lambda *args: buffer.draw(*args)[1]
    for method in (buffer.sample, draws):
        assert not is_spread(compiling.standalone_program(method), state, key)
        assert is_spread(method, state, key), "not what was traced for the other"


def test_a_compiled_draw_inside_another_function_may_be_part_of_a_loop():
    buffer = jrb.ReplayBuffer(N, batch_size=256)
    state = buffer.init({"observation": jnp.zeros(40)})
    state = jrb.jitted(buffer).add(state, {"observation": jnp.ones(40)})
    mix = jrb.Mix((buffer,), (1.0,), batch_size=256)
    keys = jax.random.split(jax.random.key(0), 2)
    loops = {
        "passed": lambda methods: (
            lambda state: lax.map(lambda key: methods.sample(state, key), keys)
        ),
        "closed over": lambda methods: (
            lambda _: lax.map(lambda key: methods.sample(state, key), keys)
        ),
    }
    if not is_spread(loops["passed"](buffer), state):
        pytest.skip("nothing is spread where there is one thread, and on other devices")
    jrb.jitted(buffer).sample(state, keys[0])
    assert all(is_spread(loop(jrb.jitted(buffer)), state) for loop in loops.values())
    for states in ((state,), [state]):
        loop = lambda states: lax.map(lambda key: jrb.jitted(mix).sample(states, key), keys)
        assert is_spread(loop, states)


def test_shards_are_compiled_anew_for_a_call_by_itself():
    buffer = jrb.Sharded(jrb.ReplayBuffer(2 * N, num_envs=2, batch_size=256), shards=2)
    state = jax.eval_shape(lambda: buffer.init({"observation": jnp.zeros(40)}))
    rooms = lambda method: str(jax.make_jaxpr(method)(state, jax.random.key(0))).count(
        "dynamic_update_slice"
    )
    plain = rooms(buffer.sample)
    assert rooms(compiling.standalone_program(buffer.sample)) > plain == rooms(buffer.sample)


def test_rows_that_are_few_for_one_are_many_for_all():
    arrays, slots = jnp.zeros((64, N, 8)), jnp.zeros((64, 16), jnp.int32)
    many = jax.vmap(
        lambda array, slots: dependencies.materialize(lambda: gather.items_at(array, slots))
    )
    if not is_spread(many, arrays, slots):
        pytest.skip("nothing is spread there with one thread, elsewhere, and by older compilers")
    assert not is_spread(jax.vmap(gather.read), arrays[:2], slots[:2])
    assert is_spread(jax.vmap(gather.read), arrays, slots)
    assert is_spread(jax.vmap(gather.read, in_axes=(None, 0)), arrays[0], slots)
    assert is_spread(jax.vmap(gather.read, in_axes=(0, None)), arrays, slots[0])


def test_how_many_reads_are_made_together():
    def read(times, x, y):
        return {"sum": x + y, "times": jnp.int32(times)}

    both = lambda x, y: gather.scaled_by_vmap(True, read, x, y)
    x, y = jnp.arange(6).reshape(2, 3), jnp.arange(3)
    assert int(both(x[0, 0], y[0])["times"]) == 1
    found = jax.jit(jax.vmap(jax.vmap(both), in_axes=(0, None)))(x, y)
    assert np.array_equal(found["sum"], x + y)
    assert np.array_equal(found["times"], np.full((2, 3), 6))
    found = jax.vmap(both, in_axes=(None, 0))(x, y)
    assert np.array_equal(found["sum"], x[None] + y[:, None, None])
    assert found["times"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
def test_all_read_their_own_whether_few_or_many(lead, axes, monkeypatch):
    array, slots = numbers("float32", *lead, N // 16, 2), numbers("int32", *lead, 5) * 7
    if axes[0] is None:
        array = array[(0,) * len(lead)]
    if axes[1] is None:
        slots = slots[(0,) * len(lead)]
    run = gather.read
    for _ in lead:
        run = jax.vmap(run, in_axes=axes)
    plain = run(array, slots)
    monkeypatch.setattr(gather, "_LARGE", 0)
    for few in (0, 1 << 10, 1 << 30):
        again = compiling.with_limits(compiling.SerialLimits(few, few), run)
        assert np.array_equal(jax.jit(again)(array, slots), plain)


@pytest.mark.parametrize("sampler", [jrb.Uniform(), jrb.Prioritized()], ids=repr)
def test_a_draw_is_made_by_one_thread(sampler):
    buffer = jrb.ReplayBuffer(N, batch_size=16, sampler=sampler)
    example = {"observation": jnp.zeros(6), "action": jnp.zeros(2)}
    state = jax.eval_shape(lambda: buffer.init(example))
    assert not is_spread(buffer.sample, state, jax.random.key(0))


PARTS = {
    "uniform": {},
    "prioritized": {"sampler": jrb.Prioritized(count_draws=True)},
    "epochs": {"sampler": jrb.WithoutReplacement()},
    "n-step": {"unit": jrb.NStep(3, 0.9), "sampler": jrb.Prioritized()},
    "windows": {"unit": jrb.Sequence(4, burn_in=2, partial="pad")},
    "windows across": {"unit": jrb.Sequence(4, cross_episodes=True, stride=3)},
    "episodes": {"unit": jrb.Sequence(3, sample_by="episodes")},
    "stacks": {"unit": jrb.FrameStack(3), "sampler": jrb.Queue()},
    "once": {"storage": jrb.DeviceStorage(share_next_observations=True)},
    "best": {"writer": jrb.MaxValue(("next", "reward"))},
}


def story(parts):
    """Returns the samples of a buffer while its ring wraps, and its final state."""
    step, state = told_by(parts)
    return jax.lax.scan(step, state, jnp.arange(5))


def stories(parts):
    """Returns the samples and final states of three buffers under `vmap`."""
    step, state = told_by(parts)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)
    return jax.lax.scan(jax.vmap(step), states, jnp.arange(15).reshape(5, 3))


def told_by(parts):
    """Returns a step that adds and draws, as a function of its number, and the initial state."""
    buffer = jrb.ReplayBuffer(64, num_envs=E, batch_size=8, **parts)

    def step(state, number):
        items = testing.rows(EXAMPLE, number.astype(jnp.float32), 7, E)
        done = (jnp.arange(7)[:, None] + jnp.arange(E) + number) % 5 == 0
        state = buffer.extend(state, items | {"next": items["next"] | {"done": done}})
        state, sample = buffer.draw(state, jax.random.key(number))
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, sample, 1.0 + jnp.arange(8.0))
        return state, sample

    return step, buffer.init(EXAMPLE)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", PARTS)
def test_draws_are_the_same_however_they_are_read(name, monkeypatch):
    told = plain(story(PARTS[name]))
    assert told == changed(monkeypatch, gather, "_LARGE", 0, lambda: plain(story(PARTS[name])))


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("tell", [story, stories])
def test_draws_are_the_same_as_elsewhere_than_on_the_cpu(name, tell, monkeypatch):
    elsewhere = lambda *args, default, **platforms: default(*args)
    here, again = plain(tell(PARTS[name])), lambda: plain(tell(PARTS[name]))
    assert here == changed(monkeypatch, jax.lax, "platform_dependent", elsewhere, again)


def changed(monkeypatch, module, name, value, tell):
    """Calls `tell` while a module has another value."""
    jax.clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, value)
        told = tell()
    jax.clear_caches()
    return told


def plain(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("count", [1, 300, 1 << 12, (1 << 12) + 1])
def test_the_last_duplicate_wins_where_a_scatter_has_no_order(count):
    rng = np.random.default_rng(8)
    indices = rng.integers(0, 1005, count).astype(np.uint32)
    values, expected = floats(rng.random(count)), np.full(1000, 2, np.float32)
    for index, value in zip(indices, values, strict=True):
        if index < 1000:
            expected[index] = value
    out, found = jax.jit(gather.put_in_any_order)(jnp.full(1000, 2.0), indices, values)
    assert same_bits(out, expected)
    inside = indices < 1000
    assert same_bits(np.asarray(found)[inside], expected[indices[inside]])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("put", [gather.put_in_turns, gather.put_part_by_part])
def test_what_is_put_in_a_later_turn_stays(put, columns):
    rng = np.random.default_rng(9)
    counts, expected = (40, 1, 30), np.full(50, 2, np.float32)
    indices = rng.integers(0, 55, sum(counts)).astype(np.int32)
    values = floats(np.repeat(rng.random(3), counts))  # the values of one turn are equal
    for index, value in zip(indices, values, strict=True):
        if index < 50:
            expected[index] = value
    shaped = [gather.column(each) if columns else each for each in (indices, values)]
    assert same_bits(jax.jit(put, static_argnums=3)(jnp.full(50, 2.0), *shaped, counts), expected)


# A write called from Python wakes no thread.

FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


def kernels(text):
    """Returns the kernels of a CPU program, each with the kernels that it waits for."""
    found, known = {}, {}
    for line in text[text.index("\nENTRY") :].splitlines()[2:]:
        if " = " not in line:
            continue
        name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
        operands = re.findall(r"%[\w.-]+", rest.split("), ")[0])
        needed = set().union(*(known[operand] for operand in operands if operand in known))
        is_free = re.search(r" ([a-z-]+)\(", f" {rest}")[1] in FREE
        known[name] = needed if is_free else {name}
        if not is_free:
            found[name] = needed
    return found


def is_handed_over(text):
    """Returns True if XLA's CPU client hands kernels to another thread.

    It does so when more than eight kernels are ready besides the next one.
    """
    waiting = dict(kernels(text))
    ready = [name for name, needed in waiting.items() if not needed]
    while ready:
        done = ready.pop(0)
        if len(ready) > 8:
            return True
        before = {name for name, needed in waiting.items() if not needed}
        waiting = {name: needed - {done} for name, needed in waiting.items()}
        ready += [name for name, needed in waiting.items() if not needed and name not in before]
    return False


MANY = {str(number): jnp.zeros(number + 1) for number in range(9)}


MANY |= {**devices.EXAMPLE, "frame": jnp.zeros((40, 40)), "number": jnp.int32(0)}


WRITES = [
    ("add", 1, "prioritized", "transition", devices.EXAMPLE),
    ("add", 4, "uniform", "windows", devices.EXAMPLE),
    ("add", 1, "uniform", "stacks", devices.EXAMPLE),
    ("add", 1, "prioritized", "stacks", devices.EXAMPLE),
    ("add", 4, "prioritized", "n-step", MANY),
    ("extend", 4, "uniform", "n-step", MANY),
]


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is about the CPU's threads")
@pytest.mark.parametrize(("method", "envs", "sampler", "unit", "example"), WRITES)
def test_a_write_that_python_calls_wakes_no_thread(method, envs, sampler, unit, example):
    parts = {"sampler": devices.SAMPLERS[sampler], "unit": devices.UNITS[unit]}
    buffer, lead = jrb.ReplayBuffer(2**14, num_envs=envs, **parts), (2, envs)[method == "add" :]
    rows = jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), example)
    write = jax.jit(compiling.standalone_program(getattr(buffer, method)), donate_argnums=0)
    as_users_do = {"xla_cpu_use_fusion_emitters": True}  # `conftest` turns it off
    compiled = write.lower(buffer.init(example), rows).compile(as_users_do)
    assert not is_handed_over(compiled.as_text())
