"""Packed leaves of any shapes and dtypes are read back bit for bit as they were written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jrb
from jrb import authoring
from jrb._core import packed
from jrb._core.packed import PackedLeaves
from jrb.authoring import casting

pytestmark = pytest.mark.slow

SHAPES = [(), (), (1,), (3,), (2, 3), (9,), (0, 3), (300,), (20, 20)]
DTYPES = [
    *["float32", "int32", "uint32", "bool", "uint8", "int8", "float16", "int16", "complex64"],
    *["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "key"],
]
SMALL = {
    "float16": "uint16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}
WIDE = ["float64", "int64", "uint64"]
N, E = 12, 3
UNITS = {"time": jrb.Transition(), "environments": jrb.Sequence(1, cross_episodes=True)}
LAYOUTS = list(UNITS)


def leaf_of(rng, shape, dtype):
    """Returns random bits, including NaNs, -0.0 and denormals; keys as uint32 words."""
    if dtype == "key":
        return leaf_of(rng, (*shape, 2), "uint32")
    dtype = jnp.dtype(dtype)
    if dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int4", "uint4"):
        return rng.integers(0, 8, shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def random_spec(rng, dtypes):
    """Returns a spec of five to twelve leaves, some of them nested."""
    found = {"next": {}}
    for number in range(rng.integers(5, 13)):
        kind = SHAPES[rng.integers(len(SHAPES))], dtypes[rng.integers(len(dtypes))]
        inner = found["next"] if number % 3 == 0 else found
        inner[str(number)] = kind
    return found


def is_kind(it):
    return isinstance(it, tuple)


def items_of(rng, spec, *lead):
    make = lambda kind: leaf_of(rng, (*lead, *kind[0]), kind[1])
    return jax.tree.map(make, spec, is_leaf=is_kind)


def of(spec, function, *trees):
    """Maps a function over the (shape, dtype) leaves of a spec and the leaves of trees."""
    return jax.tree.map(function, spec, *trees, is_leaf=is_kind)


def given(spec, items):
    """Returns items in the form that a buffer takes, with words wrapped as keys."""
    wrap = lambda kind, leaf: jax.random.wrap_key_data(leaf) if kind[1] == "key" else leaf
    return of(spec, wrap, items)


def raw(leaf):
    return np.asarray(leaf).tobytes()


def assert_same(got, want):
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want), strict=True)
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        assert (one.shape, one.dtype) == (other.shape, other.dtype), path
        assert raw(one) == raw(other), path


def seen(leaves):
    words = lambda leaf: np.asarray(casting.raw(leaf))
    return jax.tree.map(words, leaves, is_leaf=packed.is_column)


class Model:
    """A model of the slots in NumPy."""

    def __init__(self, spec):
        zeros = lambda leaf: np.zeros((N, *leaf.shape), leaf.dtype)
        self.leaves = jax.tree.map(zeros, items_of(np.random.default_rng(0), spec))
        self.row = 0

    def add(self, row, written=True):
        if written:
            self.set(np.arange(E) + self.row * E, row)
            self.row = (self.row + 1) % (N // E)

    def set(self, slots, values):
        def put(whole, new):
            whole[slots] = new

        def walk(whole, new):
            for name, value in new.items():
                (walk if isinstance(value, dict) else put)(whole[name], value)

        walk(self.leaves, values)

    def take(self, slots):
        return jax.tree.map(lambda leaf: leaf[slots], self.leaves)


def one_of(rng, buffer, state, model, spec):
    """Makes one random edit or write to the state and to the model."""
    which = rng.integers(6)
    if which == 0:
        row = items_of(rng, spec, E)
        model.add(row)
        return buffer.add(state, given(spec, row))
    if which in (1, 2):
        rows, mask = items_of(rng, spec, 2, E), rng.integers(0, 2, 2).astype(bool)
        mask = mask if which == 1 else np.ones(2, bool)
        for t in range(2):
            model.add(jax.tree.map(lambda leaf: leaf[t], rows), mask[t])  # noqa: B023
        return buffer.extend(state, given(spec, rows), mask=mask if which == 1 else None)
    if which == 3:
        slots, values = rng.permutation(N)[:4], items_of(rng, spec, 4)
        some = {name: spec[name] for name in list(spec)[:: rng.integers(1, 3)]}
        values = {name: values[name] for name in some}
        model.set(slots, values)
        return buffer.set(state, jnp.asarray(slots, jnp.int32), given(some, values))
    if which == 4:
        some = {"next": spec["next"]}
        values = items_of(rng, some, N)
        model.set(np.arange(N), values)
        return buffer.set(state, ..., given(some, values))
    some = {name: spec[name] for name in list(spec)[:: rng.integers(1, 3)]}
    constants = items_of(rng, some, 1)
    model.set(np.arange(N), mapped(some, constants, model.take(np.arange(N))))
    wrapped = given(some, constants)
    change = lambda items: mapped(some, wrapped, items)
    return buffer.map(state, change, batch_size=int(rng.integers(1, N + 1)))


def mapped(spec, constants, items):
    """Reverses the first axis of items' leaves; scalars become constants."""

    def one(kind, constant, leaf):
        constant, leaf = bits(kind, constant), bits(kind, leaf)
        new = leaf[:, ::-1] if kind[0] else constant[np.zeros(len(leaf), int)]
        return new.view(kind[1]) if kind[1] in SMALL else new

    return of(spec, one, constants, {name: items[name] for name in spec})


def bits(kind, leaf):
    """Views small floats as integers, because XLA changes the bits of their NaNs."""
    return leaf.view(SMALL[kind[1]]) if kind[1] in SMALL else leaf


def run(seed, dtypes, path, layout="time"):
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, dtypes)
    buffer = jrb.ReplayBuffer(N, num_envs=E, batch_size=4, unit=UNITS[layout])
    state, model = buffer.init(given(spec, items_of(rng, spec))), Model(spec)
    full = items_of(rng, spec, N // E, E)
    state = buffer.extend(state, given(spec, full))
    for t in range(N // E):
        model.add(jax.tree.map(lambda leaf: leaf[t], full))  # noqa: B023
    assert_same(seen(state.storage["next"]), model.leaves["next"])
    for _ in range(6):
        state = one_of(rng, buffer, state, model, spec)
        slots = rng.integers(0, N, (2, 5))
        assert_same(seen(buffer.take(state, jnp.asarray(slots, jnp.int32))), model.take(slots))
    assert_same(seen(getattr(state.storage, "leaves", state.storage)), model.leaves)
    sample = buffer.sample(state, jax.random.key(seed))
    data = sample.data
    if layout == "environments":
        data = jax.tree.map(lambda leaf: leaf[:, 0], data)
    assert_same(seen(data), model.take(np.asarray(sample.indices)))
    jrb.save(path, buffer, state)
    back = jrb.load(path)[1]
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_same(seen(back), seen(state))
    larger, rebuilt = jrb.load(path, capacity=2 * N)
    held = np.asarray(buffer.in_order(state)[0])
    found = np.asarray(larger.in_order(rebuilt)[0])[:N]
    assert_same(seen(larger.take(rebuilt, jnp.asarray(found))), model.take(held))
    return state


@pytest.mark.parametrize(("seed", "layout"), list(enumerate(3 * LAYOUTS)))
def test_every_leaf_comes_back_bit_for_bit(seed, layout, tmp_path):
    run(seed, DTYPES, tmp_path, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_of_eight_bytes_too(layout, tmp_path):
    with authoring.enable_x64():
        state = run(11, [*WIDE, *DTYPES[:5]], tmp_path, layout)
    assert isinstance(state.storage, PackedLeaves)


ITEM = {
    "observation": jnp.zeros(17),
    "next": {"observation": jnp.zeros(17), "reward": jnp.zeros(()), "done": jnp.zeros((), bool)},
    "count": jnp.zeros((), jnp.int32),
    "frame": jnp.zeros((40, 40), jnp.uint8),
    "key": jax.random.key(0),
    "none": jnp.zeros((0, 2)),
}


def test_small_leaves_of_one_size_lie_together_and_no_others():
    storage = jrb.ReplayBuffer(8).init(ITEM).storage
    assert {name: array.shape for name, array in storage.arrays.items()} == {"uint32": (8, 35)}
    alone = {"next/done", "next/reward", "frame", "key", "none"}
    assert set(storage.columns) == alone
    assert storage["next"]["done"].dtype == bool
    assert storage["observation"].shape == (8, 17)
    assert set(storage.keys()) == set(ITEM)
    assert "count" in storage and "other" not in storage
    with pytest.raises(KeyError):
        storage["other"]
    with pytest.raises(AttributeError):
        _ = storage.observation


def test_items_without_neighbours_are_a_plain_pytree():
    buffer = jrb.ReplayBuffer(8)
    assert buffer.init(jnp.zeros(3)).storage.shape == (8, 3)
    assert type(buffer.init({"x": jnp.zeros(3), "y": jnp.zeros(2, bool)}).storage) is dict


def test_a_draw_and_an_add_take_as_many_gathers_and_writes_for_many_leaves_as_for_few():
    def counts(leaves):
        buffer = jrb.ReplayBuffer(64, num_envs=4, batch_size=8)
        item = {str(number): jnp.zeros(2) for number in range(leaves)}
        state = jax.eval_shape(lambda: buffer.init(item))
        rows = jax.eval_shape(lambda: jax.tree.map(lambda leaf: jnp.zeros((4, 2)), item))
        key = jax.eval_shape(lambda: jax.random.key(0))
        add, sample = (
            jax.make_jaxpr(buffer.add)(state, rows),
            jax.make_jaxpr(buffer.sample)(state, key),
        )
        return str(add).count("dynamic_update_slice"), str(sample).count("gather[")

    assert counts(3) == counts(19)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_vmap_each_buffer_has_its_own(layout):
    rng = np.random.default_rng(5)
    buffer = jrb.ReplayBuffer(N, num_envs=E, batch_size=4, unit=UNITS[layout])
    spec = {"x": ((3,), "float32"), "y": ((), "int32"), "z": ((2,), "uint8"), "w": ((), "bool")}
    example = jax.tree.map(lambda kind: jnp.zeros(kind[0], kind[1]), spec, is_leaf=is_kind)
    states = jax.vmap(lambda _: buffer.init(example))(jnp.arange(2))
    models = [Model(spec), Model(spec)]
    for _ in range(6):
        rows = items_of(rng, spec, 2, E)
        states = jax.jit(jax.vmap(buffer.add))(states, rows)
        for number, model in enumerate(models):
            model.add(jax.tree.map(lambda leaf: leaf[number], rows))  # noqa: B023
    slots = jnp.asarray(rng.integers(0, N, (2, 7)), jnp.int32)
    found = jax.vmap(buffer.take)(states, slots)
    for number, model in enumerate(models):
        one = lambda leaf: leaf[number]  # noqa: B023
        assert_same(jax.tree.map(one, found), model.take(np.asarray(slots[number])))
        assert_same(seen(jax.tree.map(one, states.storage.leaves)), model.leaves)
    shown = jax.tree.map(lambda it: it.shape, states.storage.shown())
    assert shown == {"x": (2, N, 3), "y": (2, N), "z": (2, N, 2), "w": (2, N)}


CUTS = [("time", ("data",)), ("time", (None, "data")), ("environments", (None, "data"))]


@pytest.mark.parametrize(("layout", "cut"), CUTS)
def test_arrays_that_are_cut_over_devices_hold_the_same(layout, cut):
    buffer = jrb.ReplayBuffer(16, num_envs=2, batch_size=4, unit=UNITS[layout])
    example = {"x": jnp.zeros(5), "y": jnp.zeros((), jnp.int32), "z": jnp.zeros(2)}
    state = buffer.init(example)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    place = lambda leaf: NamedSharding(mesh, P(*cut) if leaf.ndim > 1 else P())
    where = jax.tree.map(place, state)
    states = [state, jax.device_put(state, where), buffer.init(example, device=where)]
    assert states[1].storage.arrays["uint32"].sharding.spec == P(*cut)
    rng = np.random.default_rng(0)
    rows = jax.tree.map(lambda x: rng.random((9, 2, *x.shape)).astype(x.dtype), example)
    states = [buffer.extend(one, rows) for one in states]
    states = [buffer.map(one, lambda items: {"z": -items["z"]}) for one in states]
    batches = [buffer.sample(one, jax.random.key(0)).data for one in states]
    for one, batch in zip(states[1:], batches[1:], strict=True):
        assert_same(seen(one), seen(states[0]))
        assert_same(seen(batch), seen(batches[0]))
