"""NumPy arrays given to a method, or read from a storage, may be overwritten afterwards."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jrb
from jrb.storages import HostStorage, PlainRows
from jrb.types import component

E, N = 16, 128


def aligned(value: Any, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Returns an array whose alignment lets JAX read it without a copy."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    array = room[start : start + size].view(dtype).reshape(shape)
    array[...] = value
    return array


def spoil(array: np.ndarray) -> None:
    """Overwrites an array with other values."""
    array[...] = ~array if array.dtype == bool else array + 3


@jax.jit
def late(states: Any) -> Any:
    """Returns the same states, computed with a delay."""
    busy = lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ x), jnp.full((400, 400), 1e-3))
    zero = busy[0, 0] * 0

    def same(leaf: jax.Array) -> jax.Array:
        return leaf ^ (zero != 0) if leaf.dtype == bool else leaf + zero.astype(leaf.dtype)

    return jax.tree.map(same, states)


def row(*lead: int) -> dict[str, np.ndarray]:
    return {"x": aligned(2, *lead, E, 50), "r": aligned(2, *lead, E)}


def ones(*lead: int) -> dict[str, jax.Array]:
    return {"x": jnp.ones((*lead, E, 50)), "r": jnp.ones((*lead, E))}


def sample() -> jrb.Sample:
    """Returns a sample of NumPy arrays, as from another process."""
    ones = lambda dtype: aligned(1, E, dtype=dtype)
    return jrb.Sample(
        data=None,
        indices=aligned(np.arange(E), E, dtype=np.int32),
        probabilities=ones(np.float32),
        weights=ones(np.float32),
        mask=ones(bool),
        info={},
        stamp=aligned(0, E, dtype=np.uint32),
    )


CASES: dict[str, tuple[Callable[[Any, Any, Any], Any], Callable[[], Any]]] = {
    "add": (lambda methods, state, it: methods.add(state, it), lambda: row()),
    "extend": (lambda methods, state, it: methods.extend(state, it), lambda: row(1)),
    "extend, mask": (
        lambda methods, state, it: methods.extend(state, ones(2), it),
        lambda: aligned(True, 2, dtype=bool),
    ),
    "add, priorities": (
        lambda methods, state, it: methods.add(state, ones(), priorities=it),
        lambda: aligned(4, E),
    ),
    "update, priorities": (
        lambda methods, state, it: methods.update_priority(state, jnp.arange(E), it),
        lambda: aligned(4, E),
    ),
    "update, slots": (
        lambda methods, state, it: methods.update_priority(state, it, jnp.full(E, 7.0)),
        lambda: aligned(2, E, dtype=np.int32),
    ),
    "drop": (
        lambda methods, state, it: methods.drop(state, it),
        lambda: aligned(2, E, dtype=np.int32),
    ),
    "update, sample": (
        lambda methods, state, it: methods.update_priority(state, it, jnp.full(E, 7.0)),
        lambda: sample(),
    ),
    "alpha": (
        lambda methods, state, it: methods.set_alpha(state, it),
        lambda: aligned(0.5),
    ),
    "set": (
        lambda methods, state, it: methods.set(state, it[0], {"r": it[1]}),
        lambda: (aligned(np.arange(E), E, dtype=np.int32), aligned(9, E)),
    ),
    "set, all": (
        lambda methods, state, it: methods.set(state, ..., {"x": it}),
        lambda: aligned(9, N, 50),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("storage", [jrb.DeviceStorage, jrb.MemmapStorage])
def test_a_method_has_read_what_it_was_given(case: str, jitted: bool, storage: Any) -> None:
    buffer = jrb.ReplayBuffer(N, num_envs=E, sampler=jrb.Prioritized(), storage=storage())
    methods: Any = jrb.jitted(buffer) if jitted else buffer
    call, arguments = CASES[case]

    def outcome(wait: Callable[[Any], Any], then: Callable[[np.ndarray], None]) -> list[Any]:
        state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], ones())), ones(2))
        given = arguments()
        state = call(methods, wait(state), given)
        jax.tree.map(then, given)
        slots, count = buffer.in_order(state)
        return [count, buffer.priorities(state), buffer.take(state, slots[: int(count)])]

    expected, got = outcome(lambda state: state, lambda array: None), outcome(late, spoil)
    chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_shards_have_read_what_they_were_given(jitted: bool) -> None:
    sharded = jrb.Sharded(
        jrb.ReplayBuffer(N, num_envs=E, sampler=jrb.Prioritized()), axis="data", shards=2
    )
    methods: Any = jrb.jitted(sharded) if jitted else sharded
    state = late(sharded.init(jax.tree.map(lambda leaf: leaf[0], ones())))
    given, priorities = row(), aligned(4, E)
    state = methods.add(state, given, priorities=priorities)
    jax.tree.map(spoil, (given, priorities))
    found = sharded.take(state, np.arange(E // 2)[None].repeat(2, axis=0))
    assert set(np.unique(found["x"])) == {2.0}
    raw = np.asarray(sharded.priorities(state))
    assert set(np.unique(raw[raw >= 0])) <= {0.0, 4.0}


@dataclasses.dataclass(frozen=True)
class Slow:
    """A transform with a slow inverse."""

    def __call__(self, data: Any) -> Any:
        return data

    def inverse(self, data: Any) -> Any:
        zero = late(jnp.zeros(()))
        return jax.tree.map(lambda leaf: leaf + zero, data)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_inverses_have_read_what_they_were_given(jitted: bool) -> None:
    buffer = jrb.ReplayBuffer(E, num_envs=E, transforms=(Slow(),))
    methods: Any = jrb.jitted(buffer) if jitted else buffer
    state = buffer.init({"x": jnp.zeros(50)})
    late(jnp.zeros(()))  # compiles `late`
    for _ in range(2):
        given = {"x": aligned(2, E, 50)}
        state = methods.add(state, given)
        jax.tree.map(spoil, given)
        assert set(np.unique(buffer.take(state, np.arange(E))["x"])) == {2.0}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
def test_a_mix_has_read_its_proportions(jitted: bool) -> None:
    part = jrb.ReplayBuffer(N, num_envs=E, sampler=jrb.Uniform())
    mix = jrb.Mix((part, part), (0.5, 0.5), batch_size=64)
    methods: Any = jrb.jitted(mix) if jitted else mix
    states = mix.init(jax.tree.map(lambda leaf: leaf[0], ones()))
    states = late(tuple(part.extend(state, ones(2)) for state in states))
    given = aligned([1.0, 0.0], 2)
    sample = methods.sample(states, jax.random.key(0), proportions=given)
    given[...] = [0.0, 1.0]
    assert not np.asarray(sample.info["source"]).any()


class ViewRows(PlainRows):
    """Rows in NumPy arrays, which are read without a copy where their slots are consecutive."""

    def __init__(self, capacity: int, spec: Any) -> None:
        super().__init__(capacity, spec)
        self.arrays = [aligned(0, capacity, *leaf.shape, dtype=leaf.dtype) for leaf in self.raw]

    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        for array, leaf in zip(self.arrays, leaves, strict=True):
            array[slots] = leaf

    def read_rows(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        is_run = (np.diff(slots) == 1).all()
        return self.arrays[leaf][slice(slots[0], slots[-1] + 1) if is_run else slots]


@component
class ViewStorage(HostStorage):
    """A storage of a user, in `ViewRows`."""

    def make_rows(self, ring: Any, spec: Any, keys: Any) -> ViewRows:
        return ViewRows(ring.capacity, spec)


@pytest.mark.parametrize("storage", [ViewStorage, jrb.MemmapStorage])
@pytest.mark.parametrize("width", [3, 500])
def test_items_that_were_read_stay_though_their_rows_are_overwritten(
    storage: Any, width: int
) -> None:
    items = {"x": np.arange(N * width, dtype=np.float32).reshape(N, width)}
    buffer, state = jrb.from_items(items, batch_size=1, storage=storage())
    taken = [buffer.take(state, np.arange(N)), buffer.take(state, np.arange(1))]
    taken += [jrb.items(buffer, state), buffer.sample(state, jax.random.key(0), N).data]
    before = jax.tree.map(np.array, taken)
    buffer.extend(state, jax.tree.map(lambda leaf: -leaf - 1, items))
    chex.assert_trees_all_equal(taken, before)


@pytest.mark.parametrize("storage", [jrb.DeviceStorage, jrb.MemmapStorage, ViewStorage])
def test_a_buffer_of_items_has_read_them(storage: Any) -> None:
    def given() -> dict[str, np.ndarray]:
        return {"x": aligned(2, 3 * N, 50), "r": aligned(2, 3 * N)}

    jrb.from_items(given(), transforms=(Slow(),), storage=storage())  # compiles it
    items = given()
    pair = jrb.from_items(items, transforms=(Slow(),), storage=storage())
    jax.tree.map(spoil, items)
    chex.assert_trees_all_equal(jrb.items(*pair), given())
