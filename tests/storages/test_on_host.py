"""Storages on the host return the same bits as a buffer on the device."""

import copy
import errno
import functools
import gc
import pathlib
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb
from tests import seams

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
EXAMPLE = {
    "observation": jnp.zeros(3, jnp.bfloat16),
    "action": jnp.int32(0),
    "key": jax.random.key(0),
    "next": {
        "observation": jnp.zeros(3, jnp.bfloat16),
        "reward": jnp.float32(0),
        "done": jnp.bool_(False),
    },
}
UNITS = {
    "transition": jrb.Transition(),
    "n-step": jrb.NStep(3, 0.9),
    "sequence": jrb.Sequence(3, burn_in=1, partial="pad"),
    "stack": jrb.FrameStack(2, unit=jrb.NStep(2, 0.9)),
}
STORAGES = {
    "memmap": lambda: jrb.MemmapStorage(),
    "spill": lambda: jrb.SpillStorage(None, 6),
    "spill all": lambda: jrb.SpillStorage(None, 600),
    "compressed": lambda: jrb.CompressedStorage(min_bytes=1),
    "once": lambda: jrb.MemmapStorage(share_next_observations=True),
    "spill once": lambda: jrb.SpillStorage(None, 6, share_next_observations=True),
}


def steps(number, time, envs):
    """Returns rows, unique to each `number`."""
    lead = (time,) if envs is None else (time, envs)
    count = number * 1000 + np.arange(np.prod(lead)).reshape(lead)
    observation = np.stack([count, count % 7, -count], -1)
    return {
        "observation": jnp.asarray(observation, jnp.bfloat16),
        "action": jnp.asarray(count, jnp.int32),
        "key": jax.vmap(jax.random.key)(count.reshape(-1)).reshape(lead),
        "next": {
            "observation": jnp.asarray(observation + 1, jnp.bfloat16),
            "reward": jnp.asarray(count % 5, jnp.float32),
            "done": jnp.asarray(count % 6 == 5),
        },
    }


same = functools.partial(chex.assert_trees_all_equal, strict=True)


CASES = [
    ("memmap", "transition", None),
    ("memmap", "sequence", 2),
    ("spill", "stack", 2),
    ("spill all", "n-step", 2),
    ("compressed", "stack", 2),
    ("once", "sequence", 2),
    ("spill once", "transition", 2),
]


@pytest.fixture
def in_place(monkeypatch):
    seams.write_small_states_in_place(monkeypatch)


@pytest.mark.parametrize("methods", [lambda buffer: buffer, jrb.jitted], ids=["eager", "jitted"])
@pytest.mark.parametrize(("storage", "unit", "envs"), CASES)
def test_draws_are_those_of_the_device(storage, unit, envs, methods, in_place):
    parts = {"capacity": 12, "num_envs": envs, "batch_size": 16, "unit": UNITS[unit]}
    parts["sampler"] = jrb.Prioritized()
    plain = jrb.ReplayBuffer(**parts)
    other = methods(jrb.ReplayBuffer(storage=STORAGES[storage](), **parts))
    state, hosted = plain.init(EXAMPLE), other.init(EXAMPLE)
    for number, time in enumerate([1, 4, 1, 4, 4, 20, 1]):
        rows = steps(number, time, envs)
        mask = jnp.arange(time) % 3 != 2 if time == 4 else None
        state, hosted = plain.extend(state, rows, mask), other.extend(hosted, rows, mask)
        if not bool(plain.can_sample(state)):
            continue
        key = jax.random.fold_in(KEY, number)
        state, expected = plain.draw(state, key)
        hosted, found = other.draw(hosted, key)
        same(expected, found)
        state = plain.update_priority(state, expected, jnp.arange(16.0))
        hosted = other.update_priority(hosted, found, jnp.arange(16.0))
    every = jnp.arange(12).reshape(3, 4)
    same(plain.take(state, every), other.take(hosted, every))
    state, hosted = plain.empty(state), other.empty(hosted)
    rows = steps(9, 4, envs)
    state, hosted = plain.extend(state, rows), other.extend(hosted, rows)
    same(plain.sample(state, KEY), other.sample(hosted, KEY))


WRITERS = {
    "round robin": jrb.RoundRobin(),
    "until full": jrb.BlockWhenFull(),
    "lanes": jrb.PerEnvironment(),
    "reservoir": jrb.Reservoir(0),
    "best": jrb.MaxValue("x"),
}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("storage", "writer"),  # objects have no ranks
    [("memmap", writer) for writer in WRITERS]
    + [("list", writer) for writer in WRITERS if writer != "best"],
)
def test_compiled_methods_write_in_place_what_the_others_write(storage, writer, in_place):
    made = jrb.MemmapStorage if storage == "memmap" else jrb.ListStorage
    parts = {"sampler": jrb.Prioritized(), "writer": WRITERS[writer], "batch_size": 8}
    buffers = [jrb.ReplayBuffer(12, num_envs=2, storage=made(), **parts) for _ in range(2)]
    methods = [buffers[0], jrb.jitted(buffers[1])]
    states = [buffer.init({"x": jnp.float32(0)}) for buffer in buffers]
    for number in range(9):
        values = np.random.default_rng(number).random(2).astype(np.float32)
        item = {"x": values} if storage == "memmap" else [float(value) for value in values]
        mask = np.array([True, number % 3 > 0]) if writer == "lanes" else None
        old = states[1]
        if not buffers[0].can_add(states[0]):
            break
        adds = [each.add(state, item, mask) for each, state in zip(methods, states, strict=True)]
        gone = [leaf.is_deleted() for leaf in jax.tree.leaves(old.sampler)]
        assert set(gone) == {storage == "memmap"}  # a write to a list cannot be undone
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((states[0], adds)))
        size = methods[1].size(adds[1])
        one, other = [each.sample(state, KEY) for each, state in zip(methods, adds, strict=True)]
        same(jax.tree.map(jnp.asarray, one), jax.tree.map(jnp.asarray, other))
        states = [
            each.drop(each.update_priority(state, one, jnp.arange(8.0)), one.indices[:1])
            for each, state in zip(methods, adds, strict=True)
        ]
        same(states[0].replace(storage=None), states[1].replace(storage=None))
        assert int(size) == int(buffers[0].size(states[0]))  # outlives the donated state
    for method in (buffers[1].priorities, methods[1].priorities):
        with pytest.raises(ValueError, match="donated"):
            method(adds[1])
    with pytest.raises(ValueError, match="donated"):
        methods[1].update_priority(adds[1], one, jnp.arange(8.0))


@pytest.mark.parametrize(
    ("storage", "unit"),
    [("memmap", "stack"), ("spill", "sequence"), ("compressed", "n-step"), ("once", "n-step")],
)
def test_draws_inside_jit_are_those_of_the_device(storage, unit):
    parts = {"capacity": 12, "num_envs": 2, "batch_size": 8, "unit": UNITS[unit]}
    parts["sampler"] = jrb.Prioritized()
    rows = steps(1, 24, 2)

    def train(buffer):
        @functools.partial(jax.jit, donate_argnums=0)
        def run(state, rows):
            def step(state, inputs):
                number, row = inputs
                state = buffer.add(state, row, number % 4 != 3)
                sample = buffer.sample(state, jax.random.fold_in(KEY, number))
                state = buffer.update_priority(state, sample, jnp.arange(8.0))
                state, drawn = buffer.draw(state, jax.random.fold_in(KEY, 100 + number))
                return state, (sample, drawn)

            return jax.lax.scan(step, state, (jnp.arange(24), rows))

        state, samples = run(buffer.init(EXAMPLE), rows)
        return samples, jax.jit(buffer.take)(state, jnp.arange(12)), buffer.sample(state, KEY)

    other = jrb.ReplayBuffer(storage=STORAGES[storage](), **parts)
    same(train(jrb.ReplayBuffer(**parts)), train(other))


def pair(storage=None, **parts):
    """Returns a buffer on the host, with items of two numbers, and its state."""
    storage = jrb.MemmapStorage() if storage is None else storage
    parts = {"capacity": 8, "batch_size": 16, "storage": storage, **parts}
    buffer = jrb.ReplayBuffer(**parts)
    return buffer, buffer.init({"x": jnp.zeros(2)})


def numbered(*numbers):
    return {"x": jnp.stack([jnp.array([n, -n], jnp.float32) for n in numbers])}


BOTH = [lambda path=None: jrb.MemmapStorage(path), lambda path=None: jrb.SpillStorage(path, 2)]
ALL = [*BOTH, STORAGES["compressed"]]


@pytest.mark.parametrize("storage", ALL)
def test_a_stale_state_is_refused(storage):
    buffer, state = pair(storage())
    state = buffer.extend(state, numbered(*range(8)))
    newer = buffer.extend(state, numbered(8, 9))
    with pytest.raises(jrb.StaleError, match="overwritten since"):
        buffer.sample(state, KEY, 64)
    with pytest.raises(jrb.StaleError, match="newest state"):
        buffer.add(state, {"x": jnp.zeros(2)})
    with pytest.raises(jrb.StaleError, match="overwritten since"):
        buffer.take(state, jnp.arange(8))
    np.testing.assert_array_equal(buffer.take(state, jnp.arange(2, 8))["x"][:, 0], range(2, 8))
    np.testing.assert_array_equal(buffer.take(newer, jnp.arange(4))["x"][:, 0], [8, 9, 2, 3])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"StaleError.*overwritten since"):
        jax.block_until_ready(jax.jit(buffer.sample, static_argnums=2)(state, KEY, 64))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"StaleError.*newest state"):
        jax.block_until_ready(jax.jit(buffer.add)(state, {"x": jnp.zeros(2)}))
    assert buffer.sample(newer, KEY).data["x"].shape == (16, 2)


@pytest.mark.parametrize("storage", ALL)
def test_vmap_is_refused_with_what_to_do(storage):
    buffer, state = pair(storage())
    state = buffer.add(state, {"x": jnp.zeros(2)})
    keys = jax.random.split(KEY, 3)
    with pytest.raises(TypeError, match=r"num_envs=E in place of E"):
        jax.vmap(buffer.sample, (None, 0))(state, keys)
    with pytest.raises(TypeError, match=r"larger batch"):
        jax.vmap(buffer.add, (None, 0))(state, {"x": jnp.zeros((3, 2))})
    with pytest.raises(TypeError, match=r"init.*outside jit"):
        jax.vmap(lambda x: buffer.init({"x": x}))(jnp.zeros((3, 2)))
    with pytest.raises(TypeError, match=r"init.*outside jit"):
        jax.jit(lambda: buffer.init({"x": jnp.zeros(2)}))()


def test_what_is_constant_inside_jit_works_too():
    buffer, state = pair()
    state = buffer.extend(state, numbered(*range(5)))
    expected = buffer.sample(state, KEY)
    same(expected, jax.jit(lambda: buffer.sample(state, KEY))())
    same(jax.jit(lambda: buffer.take(state, jnp.arange(3)))(), buffer.take(state, jnp.arange(3)))
    state = jax.jit(lambda: buffer.extend(state, numbered(7)))()
    np.testing.assert_array_equal(buffer.take(state, jnp.array([5]))["x"], [[7, -7]])


def test_a_condition_inside_jit():
    buffer, state = pair()
    add = lambda state: buffer.add(state, {"x": jnp.ones(2)})
    step = jax.jit(lambda state, on: jax.lax.cond(on, add, lambda state: state, state))
    for on in (True, False, True, True):
        state = step(state, on)
    assert int(buffer.size(state)) == 3
    np.testing.assert_array_equal(buffer.take(state, jnp.arange(3))["x"][:, 0], [1, 1, 1])


@pytest.mark.parametrize("storage", BOTH)
def test_a_second_call_does_not_trace_again(storage):
    buffer, state = pair(storage())
    chex.clear_trace_counter()  # it counts by source, for all parameters together

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, item):
        return buffer.add(state, item)

    for number in range(5):
        state = step(state, {"x": jnp.full(2, number, jnp.float32)})


@pytest.mark.parametrize("storage", BOTH)
def test_memory_is_known_before(storage, tmp_path):
    buffer = jrb.ReplayBuffer(
        capacity=12, num_envs=2, sampler=jrb.Prioritized(), storage=storage(tmp_path / "store")
    )
    told = buffer.nbytes(EXAMPLE)
    assert not (tmp_path / "store").exists()
    state = buffer.extend(buffer.init(EXAMPLE), steps(0, 6, 2))
    jrb.save(tmp_path / "store", buffer, state)
    files = sum(file.stat().st_size for file in (tmp_path / "store/arrays").iterdir())
    assert files > sum(leaf.size * leaf.dtype.itemsize for leaf in _raw(plain_items()))
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.dtype != KEY.dtype)
    keys = sum(
        jax.random.key_data(leaf).nbytes
        for leaf in jax.tree.leaves(state)
        if leaf.dtype == KEY.dtype
    )
    assert told == files + arrays + keys
    assert buffer.nbytes(EXAMPLE, "device") == arrays + keys
    assert buffer.nbytes(EXAMPLE, "files") == files and buffer.nbytes(EXAMPLE, "host") == 0
    mix = jrb.Mix((buffer, jrb.ReplayBuffer(4)), (0.5, 0.5))
    assert mix.nbytes(EXAMPLE, "files") == files < mix.nbytes(EXAMPLE) - arrays
    with pytest.raises(ValueError, match=r"nbytes: where: expected one of .*'files', got 'disk'"):
        buffer.nbytes(EXAMPLE, "disk")


def plain_items():
    return jrb.ReplayBuffer(capacity=12).init(EXAMPLE).storage


def _raw(tree):
    return [
        jax.random.key_data(leaf) if leaf.dtype == KEY.dtype else leaf
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("rounds", [1, 2])
def test_room_that_is_reserved_stays_reserved(rounds, tmp_path):
    path = None if rounds == 1 else tmp_path / "store"
    buffer, state = pair(jrb.MemmapStorage(path, prealloc=True), capacity=100_000)
    folder = pathlib.Path(state.storage.rows.store.path)
    on_disk = lambda: sum(512 * file.stat().st_blocks for file in folder.glob("arrays/*"))
    reserved = rounds * buffer.nbytes({"x": jnp.zeros(2)}, "files")
    assert on_disk() >= reserved
    for number in range(3):
        state = buffer.extend(state, numbered(*range(number, number + 9)))
        if path is not None:
            jrb.save(path, buffer, state)
        assert on_disk() >= reserved
    if path is not None:
        del state
        buffer, state = jrb.load(path)
        jrb.save(path, buffer, buffer.add(state, {"x": jnp.zeros(2)}))
        assert on_disk() >= reserved


def test_temporary_folders_go_with_the_last_state():
    buffer, state = pair()
    folder = pathlib.Path(state.storage.rows.store.path)
    other = buffer.add(state, {"x": jnp.zeros(2)})
    del state
    gc.collect()
    assert folder.exists()
    del other
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("writer", [jrb.MaxValue("x"), jrb.RoundRobin()])
def test_writers(writer):
    parts = {"capacity": 4, "batch_size": 8, "writer": writer}
    plain = jrb.ReplayBuffer(**parts)
    other = jrb.ReplayBuffer(storage=jrb.MemmapStorage(), **parts)
    state, hosted = plain.init({"x": 0.0}), other.init({"x": 0.0})
    for numbers in ([3, 1], [4, 1, 5], [9, 2, 6, 5, 3, 5]):
        rows = {"x": jnp.array(numbers, jnp.float32)}
        state, hosted = plain.extend(state, rows), other.extend(hosted, rows)
        same(plain.sample(state, KEY), other.sample(hosted, KEY))


def test_what_spills_must_come_in_the_order_of_time():
    with pytest.raises(ValueError, match="order of time"):
        jrb.ReplayBuffer(8, writer=jrb.MaxValue("x"), storage=jrb.SpillStorage(None, 2))
    buffer = jrb.ReplayBuffer(8, num_envs=4, storage=jrb.SpillStorage(None, 6))
    with pytest.raises(ValueError, match=r"device_capacity: expected a multiple of num_envs = 4"):
        buffer.init({"x": 0.0})


@pytest.mark.parametrize("wrong", [7, ("a",), 0.5])
def test_a_path_is_a_path(wrong):
    with pytest.raises(TypeError, match="path: expected a path"):
        jrb.MemmapStorage(wrong)


def test_items_of_any_kind():
    odd = {"a/b": 0.0, "a": {"b": 1.0}, "..": jnp.int8(0), ".": 2.0, "items": 3.0, "%": 4.0}
    odd = jax.tree.map(jnp.asarray, odd | {"": jnp.zeros((0, 3)), "lock": {"x": 5.0}})
    for example in (jnp.zeros(3), jnp.float32(0), odd):
        plain, other = jrb.ReplayBuffer(4), jrb.ReplayBuffer(4, storage=jrb.MemmapStorage())
        state, hosted = plain.init(example), other.init(example)
        rows = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1, leaf + 2]), example)
        for _ in range(2):
            state, hosted = plain.extend(state, rows), other.extend(hosted, rows)
        same(plain.sample(state, KEY, 8), other.sample(hosted, KEY, 8))


def test_numpy_items_and_transforms():
    twice = lambda data: {"x": data["x"] * 2}
    buffer, state = pair(transforms=(twice,))
    state = buffer.extend(state, {"x": np.ones((3, 2), np.float32)})
    state = buffer.add(state, {"x": np.ones(2, np.float32)})
    np.testing.assert_array_equal(buffer.sample(state, KEY).data["x"], np.full((16, 2), 2.0))


def test_wrong_items_are_refused_and_nothing_is_written():
    buffer, state = pair()
    with pytest.raises(ValueError, match="leaf 'x': expected shape"):
        buffer.add(state, {"x": jnp.zeros(3)})
    with pytest.raises(TypeError, match="leaf 'x': expected dtype"):
        buffer.add(state, {"x": jnp.zeros(2, jnp.int32)})
    with pytest.raises(ValueError, match="expected something to draw"):
        buffer.sample(state, KEY)
    state = buffer.add(state, {"x": jnp.ones(2)})
    assert int(buffer.size(state)) == 1


def test_a_mix_of_device_and_host():
    example = {"x": jnp.zeros(2)}
    replay = jrb.ReplayBuffer(8, sampler=jrb.Prioritized())
    demos = jrb.ReplayBuffer(8, storage=jrb.MemmapStorage())
    mix = jrb.Mix((demos, replay), (0.5, 0.5), batch_size=8)
    one, other = mix.init(example)
    states = demos.extend(one, numbered(1, 2)), replay.extend(other, numbered(3, 4))
    sample = mix.sample(states, KEY)
    assert set(np.asarray(sample.data["x"][:4, 0])) <= {1, 2}
    assert set(np.asarray(sample.data["x"][4:, 0])) <= {3, 4}
    states = mix.update_priority(states, sample, jnp.ones(8))
    same(mix.sample(states, KEY).indices, jax.jit(mix.sample)(states, KEY).indices)


@pytest.mark.parametrize("storage", BOTH)
def test_prefetch_and_epochs(storage):
    buffer, state = pair(storage())
    state = buffer.extend(state, numbered(*range(8)))
    with jrb.prefetch(buffer, state, KEY) as batches:
        for number in range(5):
            same(next(batches), buffer.sample(state, jax.random.fold_in(KEY, number)))
    seen = [
        int(x)
        for batch in jrb.epochs(buffer, state, KEY, 3)
        for x in batch.data["x"][batch.mask, 0]
    ]
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("storage", BOTH)
def test_a_draw_of_a_state_that_is_traced_in_part(storage):
    buffer, state = pair(storage())
    state = buffer.extend(state, numbered(*range(8)))
    drawn = jax.jit(lambda kept: buffer.sample(state.replace(storage=kept), KEY))(state.storage)
    same(drawn, jax.jit(buffer.sample)(state, KEY))


@pytest.mark.parametrize("storage", BOTH)
def test_threads_extend_and_sample_at_once(storage):
    buffer, state = pair(storage(), capacity=64)
    newest = [buffer.extend(state, numbered(*range(64)))]
    drawn, errors, over = [0], [], threading.Event()

    def draw(seed):
        number = 0
        while not over.is_set() and not errors:
            number += 1
            try:
                sample = buffer.sample(newest[0], jax.random.fold_in(jax.random.key(seed), number))
            except jrb.StaleError:
                continue  # a write came between the state and the draw
            except BaseException as error:
                errors.append(error)
                return
            x, slots = np.asarray(sample.data["x"]), np.asarray(sample.indices)
            if not np.array_equal(x[:, 0], -x[:, 1]) or (x[:, 0] % 64 != slots).any():
                errors.append(x)
            drawn[0] += 1

    workers = [threading.Thread(target=draw, args=(seed,)) for seed in range(2)]
    for worker in workers:
        worker.start()
    for start in range(64, 64 + 3000 * 16, 16):
        newest[0] = buffer.extend(newest[0], numbered(*range(start, start + 16)))
        if drawn[0] > 30 or errors:
            break
    over.set()
    for worker in workers:
        worker.join()
    assert not errors
    assert drawn[0] > 30


def test_prefetch_draws_again_where_rows_went_meanwhile():
    buffer, state = pair()
    old = buffer.extend(state, numbered(*range(8)))
    new = buffer.extend(old, numbered(*range(8, 16)))
    states = iter([old, new, new, new])
    with jrb.prefetch(buffer, lambda: next(states), KEY, depth=1) as batches:
        same(next(batches), buffer.sample(new, jax.random.fold_in(KEY, 0)))
    with jrb.prefetch(buffer, lambda: old, KEY) as batches, pytest.raises(jrb.StaleError):
        next(batches)


@pytest.mark.faults
@pytest.mark.parametrize("storage", BOTH)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), MemoryError(), KeyboardInterrupt()]
)
@pytest.mark.parametrize("methods", [lambda buffer: buffer, jrb.jitted], ids=["eager", "jitted"])
def test_a_write_that_failed_has_not_happened(storage, error, methods, in_place):
    buffer, state = pair(storage())
    state = buffer.extend(state, numbered(*range(8)))

    def strike(operation, *rest):
        raise error

    with seams.hooked(strike), pytest.raises(type(error)):
        methods(buffer).add(state, {"x": jnp.ones(2)})
    np.testing.assert_array_equal(buffer.take(state, jnp.arange(8))["x"][:, 0], range(8))
    state = buffer.add(state, {"x": jnp.full(2, 9.0)})
    np.testing.assert_array_equal(
        buffer.take(state, jnp.arange(8))["x"][:, 0], [9, 1, 2, 3, 4, 5, 6, 7]
    )


def test_another_device():
    devices = jax.devices()
    buffer = jrb.ReplayBuffer(8, batch_size=4, storage=jrb.MemmapStorage())
    state = buffer.init({"x": jnp.zeros(2)}, device=devices[-1])
    state = buffer.extend(state, jax.device_put(numbered(1, 2), devices[-1]))
    assert buffer.sample(state, KEY).data["x"].devices() == {devices[-1]}


def test_states_of_other_buffers_are_told_apart():
    memmap, hosted = pair()
    spill, spilled = pair(jrb.SpillStorage(None, 2))
    plain = jrb.ReplayBuffer(8, batch_size=4)
    state = plain.extend(plain.init({"x": jnp.zeros(2)}), numbered(1, 2))
    hosted = memmap.extend(hosted, numbered(1, 2))
    for buffer, other in ((memmap, state), (memmap, spilled), (spill, hosted), (plain, hosted)):
        with pytest.raises(TypeError, match="expected a state of this buffer"):
            buffer.sample(other, KEY)
        with pytest.raises(TypeError, match="expected a state of this buffer"):
            buffer.add(other, {"x": jnp.zeros(2)})
    with pytest.raises(ValueError, match="of capacity 16, got one of capacity 8"):
        jrb.ReplayBuffer(16, storage=jrb.MemmapStorage()).add(hosted, {"x": jnp.zeros(2)})


def test_states_are_not_pickled():
    _, state = pair()
    with pytest.raises(TypeError, match=r"saved by jrb\.save"):
        copy.deepcopy(state)


@pytest.mark.parametrize(
    "example", [{"a": 0, "a.bin": {"b": 0}}, {"x" * 300: 0}], ids=["folder", "long"]
)
def test_names_that_files_cannot_have_are_those_of_leaves_all_the_same(example, tmp_path):
    buffer = jrb.ReplayBuffer(4, storage=jrb.MemmapStorage(tmp_path / "store"))
    rows = jax.tree.map(lambda leaf: jnp.arange(3) + leaf, example)
    state = buffer.extend(buffer.init(example), rows)
    jrb.save(tmp_path / "store", buffer, state)
    del state
    loaded, state = jrb.load(tmp_path / "store")
    same(loaded.take(state, jnp.arange(3)), rows)


def test_an_empty_path_is_refused():
    with pytest.raises(ValueError, match="path: expected a path"):
        jrb.MemmapStorage("")


@pytest.mark.parametrize("make", BOTH)
def test_leaves_of_no_elements_are_drawn_too(make):
    item = {"x": jnp.zeros(2), "none": jnp.zeros((0, 3))}
    buffer = jrb.ReplayBuffer(12, batch_size=4, storage=make())
    state = buffer.init(item)
    for number in range(8):
        state = buffer.add(state, item | {"x": jnp.full(2, float(number))})
    data = buffer.sample(state, jax.random.key(0)).data
    assert data["none"].shape == (4, 0, 3) and data["x"].shape == (4, 2)


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_an_old_state_draws_what_its_cache_has(transform):
    buffer = jrb.ReplayBuffer(8, batch_size=4, storage=jrb.SpillStorage(None, 8))
    state = buffer.extend(buffer.init({"x": 0}), {"x": np.arange(8, dtype=np.int32)})
    expected = transform(buffer.sample)(state, KEY).data["x"].tolist()
    buffer.extend(state, {"x": np.arange(90, 98, dtype=np.int32)})
    assert transform(buffer.sample)(state, KEY).data["x"].tolist() == expected
