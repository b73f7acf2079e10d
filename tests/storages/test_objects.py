"""Buffers of Python objects draw the same items as buffers of their numbers."""

import collections
import dataclasses
import threading
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrb

KEY = jax.random.key(5)
THINGS = ["foo", None, {"a": [1]}, {"b": np.zeros((2, 3))}, 4.5, (), b"x", object(), "end"]
SAMPLERS = [
    jrb.Uniform(),
    jrb.Uniform(replacement=False),
    jrb.WithoutReplacement(),
    jrb.Queue(),
    jrb.Lifo(),
    jrb.Prioritized(count_draws=True),
]


def pair(envs=None, **parts):
    """Returns a buffer of objects and one of their numbers on the device, with their states."""
    parts = {"capacity": 6, "num_envs": envs, "batch_size": 4, **parts}
    objects = jrb.ReplayBuffer(storage=jrb.ListStorage(), **parts)
    return objects, objects.init(None), *numbers(**parts)


def numbers(**parts):
    buffer = jrb.ReplayBuffer(**parts)
    return buffer, buffer.init(jnp.int32(0))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_objects_are_drawn_like_their_numbers(sampler):
    objects, shelf, plain, state = pair(sampler=sampler)
    for number, thing in enumerate(THINGS):
        shelf, state = objects.add(shelf, thing), plain.add(state, jnp.int32(number))
        shelf, sample = objects.draw(shelf, jax.random.fold_in(KEY, number))
        state, expected = plain.draw(state, jax.random.fold_in(KEY, number))
        want = [
            THINGS[k] if real else None
            for k, real in zip(expected.data.tolist(), expected.mask.tolist(), strict=True)
        ]
        assert list(map(repr, sample.data)) == list(map(repr, want))
        np.testing.assert_array_equal(sample.indices, expected.indices)
        np.testing.assert_array_equal(sample.weights, expected.weights)
        if sampler.prioritized:
            new = jnp.arange(4.0)
            shelf = objects.update_priority(shelf, sample, new)
            state = plain.update_priority(state, expected, new)
    assert int(objects.size(shelf)) == 6


class Interrupted(list):
    """A list that runs a pending write as soon as an object is read."""

    def __getitem__(self, slot):
        found = super().__getitem__(slot)
        if self.come:
            self.come.pop()()
        return found


@pytest.mark.parametrize("slots", [[0, 1], [1, 0], [5, 1]])
def test_a_write_in_the_middle_of_a_draw_is_noticed(slots):
    buffer = jrb.ReplayBuffer(2 + max(slots), batch_size=2, storage=jrb.ListStorage())
    state = buffer.extend(buffer.init(None), [f"old {n}" for n in range(buffer.capacity)])
    rows = state.storage.rows
    rows.objects = Interrupted(rows.objects)
    rows.objects.come = [lambda: buffer.extend(state, ["new 0", "new 1"])]
    with pytest.raises(jrb.StaleError, match="overwritten since"):
        buffer.take(state, jnp.array(slots))


def test_rows_of_several_environments():
    objects, shelf, plain, state = pair(envs=2)
    rows = [[f"{t}{e}" for e in "ab"] for t in range(5)]
    mask = jnp.array([True, False, True, True, True])
    shelf = objects.extend(shelf, rows, mask)
    state = plain.extend(state, jnp.arange(10, dtype=jnp.int32).reshape(5, 2), mask)
    shelf = objects.add(shelf, ["x", "y"])
    state = plain.add(state, jnp.array([10, 11], jnp.int32))
    names = [name for row in rows for name in row] + ["x", "y"]
    expected = [names[k] for k in plain.take(state, jnp.arange(6)).tolist()]
    assert objects.take(shelf, jnp.arange(6)) == expected


def test_collate_and_transforms():
    upper = lambda words: [word.upper() for word in words]
    buffer = jrb.ReplayBuffer(
        4,
        batch_size=2,
        storage=jrb.ListStorage(collate=lambda objects: sorted(objects)),
        transforms=(upper,),
    )
    state = buffer.extend(buffer.init(None), ["b", "a"])
    assert set(buffer.sample(state, KEY, 16).data) == {"A", "B"}


def test_a_state_that_was_written_to_is_not_written_to_again():
    buffer = jrb.ReplayBuffer(2, batch_size=8, storage=jrb.ListStorage())
    old = buffer.extend(buffer.init(None), ["a", "b"])
    new = buffer.add(old, "c")
    with pytest.raises(ValueError, match="newest state"):
        buffer.add(old, "d")
    with pytest.raises(ValueError, match="overwritten since"):
        buffer.sample(old, KEY)
    assert set(buffer.sample(new, KEY).data) == {"b", "c"}
    empty = buffer.empty(new)
    assert set(buffer.sample(new, KEY).data) == {"b", "c"}
    assert buffer.sample(buffer.add(empty, "e"), KEY).data == ["e"] * 8


def test_what_objects_cannot_do_is_said():
    buffer = jrb.ReplayBuffer(2, batch_size=2, storage=jrb.ListStorage())
    state = buffer.add(buffer.init(None), "a")
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(buffer.sample)(state, KEY)
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda state: buffer.add(state, "b"))(state)
    with pytest.raises(ValueError, match=r"expected jrb\.Transition"):
        jrb.ReplayBuffer(4, storage=jrb.ListStorage(), unit=jrb.NStep(2, 0.9))
    with pytest.raises(ValueError, match="MaxValue"):
        jrb.ReplayBuffer(4, storage=jrb.ListStorage(), writer=jrb.MaxValue("x")).init(None)
    with pytest.raises(TypeError, match="sequence of objects, got str"):
        buffer.extend(state, "abc")
    two = jrb.ReplayBuffer(4, num_envs=2, storage=jrb.ListStorage())
    with pytest.raises(ValueError, match="2 objects in a row"):
        two.add(two.init(None), ["a"])
    with pytest.raises(ValueError, match="something to draw"):
        buffer.sample(buffer.init(None), KEY)


def test_epochs_and_prefetch_take_objects():
    buffer = jrb.ReplayBuffer(8, batch_size=3, storage=jrb.ListStorage())
    state = buffer.extend(buffer.init(None), list("abcdefg"))
    drawn = [item for batch in jrb.epochs(buffer, state, KEY) for item in batch.data if item]
    assert sorted(drawn) == list("abcdefg")
    with jrb.prefetch(buffer, state, KEY) as batches:
        assert set(next(batches).data) <= set("abcdefg")


@pytest.mark.parametrize(
    "thing", [{"b": np.zeros(2), "a": np.float64(1)}, np.arange(3), [1, 2**40]]
)
def test_compiled_methods_keep_an_object_as_it_is(thing):
    objects = jrb.ReplayBuffer(4, batch_size=1, storage=jrb.ListStorage())
    methods = jrb.jitted(objects)
    state = methods.extend(methods.add(objects.init(None), thing), [thing])
    for found in (*objects.take(state, jnp.arange(2)), methods.sample(state, KEY).data[0]):
        assert repr(found) == repr(thing) and type(found) is type(thing)
        assert jax.tree.map(np.result_type, found) == jax.tree.map(np.result_type, thing)


class Pair(NamedTuple):
    image: Any
    name: str = "pair"


@chex.dataclass
class Step:
    image: chex.Array
    count: chex.Array


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any


@dataclasses.dataclass(slots=True)
class Slots:
    image: Any


class Plain:
    def __init__(self, image):
        self.image = image

    def __iter__(self):  # as of named tuples
        yield self.image


def image():
    return np.arange(6.0).reshape(2, 3)


# How an object with an array is made, and how that array is reached.
HOLDERS = {
    "array": (lambda it: it, lambda it: it),
    "a part of an array": (lambda it: it[1:], lambda it: it),
    "dict": (lambda it: {"a": it, 3: "b"}, lambda it: it["a"]),
    "nested": (lambda it: {"a": [({"b": it},)]}, lambda it: it["a"][0][0]["b"]),
    "list": (lambda it: [0, it], lambda it: it[1]),
    "tuple": (lambda it: (it, None), lambda it: it[0]),
    "named tuple": (lambda it: [Pair(it)], lambda it: it[0].image),
    "chex": (lambda it: Step(image=it, count=jnp.ones(2)), lambda it: it.image),
    "frozen": (lambda it: {"x": Frozen({"y": it})}, lambda it: it["x"].image["y"]),
    "slots": (lambda it: Slots(it), lambda it: it.image),
    "plain": (lambda it: Plain([it]), lambda it: it.image[0]),
    "ordered": (lambda it: collections.OrderedDict(z=it, a=1), lambda it: it["z"]),
    "deque": (lambda it: collections.deque([it]), lambda it: it[0]),
    "objects": (lambda it: np.array([it, None], object), lambda it: it[0]),
    "masked": (lambda it: np.ma.array(it), lambda it: it),
    "fields": (lambda it: it.view([("a", float, 3)])[0], lambda it: it["a"]),
}
WAYS_IN = {
    "add": lambda methods, state, thing: methods.add(state, thing),
    "extend": lambda methods, state, thing: methods.extend(state, [thing, thing]),
    "set": lambda methods, state, thing: methods.set(
        methods.add(state, 0), jnp.zeros(1, jnp.int32), [thing]
    ),
    "set, sample": lambda methods, state, thing: methods.set(
        state := methods.add(state, 0), methods.sample(state, KEY), [thing] * 4
    ),
}
WAYS_OUT = {
    "sample": lambda buffer, state: buffer.sample(state, KEY).data,
    "draw": lambda buffer, state: buffer.draw(state, KEY)[1].data,
    "take": lambda buffer, state: buffer.take(state, jnp.zeros(1, jnp.int32)),
    "items": lambda buffer, state: jrb.items(buffer, state),
    "epochs": lambda buffer, state: next(iter(jrb.epochs(buffer, state, KEY))).data,
    "jitted": lambda buffer, state: jrb.jitted(buffer).sample(state, KEY).data,
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_was_given_may_be_changed(holder, way, jitted):
    make, reach = HOLDERS[holder]
    buffer = jrb.ReplayBuffer(4, batch_size=4, storage=jrb.ListStorage())
    given = make(image())
    expected = np.array(reach(given))
    state = WAYS_IN[way](jrb.jitted(buffer) if jitted else buffer, buffer.init(None), given)
    reach(given)[...] = -1
    for found in jrb.items(buffer, state):
        assert type(found) is type(given)
        np.testing.assert_array_equal(reach(found), expected)


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_was_returned_may_be_changed(holder, way):
    make, reach = HOLDERS[holder]
    buffer, state = jrb.from_items([make(image())], batch_size=2, storage=jrb.ListStorage())
    expected = np.array(reach(make(image())))
    one, *others = (reach(each) for each in WAYS_OUT[way](buffer, state) if each is not None)
    one[...] = -1
    for found in (*others, reach(buffer.take(state, jnp.zeros(1, jnp.int32))[0])):
        np.testing.assert_array_equal(found, expected)


def test_lists_dicts_and_attributes_of_objects_may_be_changed():
    thing = {"words": ["a"], "tags": {"x"}, "step": Plain(1), "raw": bytearray(b"a")}
    buffer, state = jrb.from_items([thing], batch_size=1, storage=jrb.ListStorage())
    for each in (thing, buffer.sample(state, KEY).data[0]):
        each["words"].append("b")
        each["tags"].add("y")
        each["step"].image = 2
        each["raw"][:] = b"b"
        each["new"] = 0
    found = buffer.take(state, jnp.zeros(1, jnp.int32))[0]
    assert found.pop("step").image == 1
    assert found == {"words": ["a"], "tags": {"x"}, "raw": b"a"}


def test_objects_of_checkpoints_prefetch_collate_and_rebuild_may_be_changed(tmp_path):
    things = [{"x": image() + k} for k in range(3)]
    storage = jrb.ListStorage(collate=lambda batch: batch[0]["x"])
    buffer, state = jrb.from_items(things, batch_size=1, storage=storage)
    jrb.save(tmp_path / "a", buffer, state)
    jrb.save(tmp_path / "b", buffer, state, items=False)
    kept = jrb.items(buffer, state)
    pairs = [
        (buffer, state),
        jrb.load(tmp_path / "a", buffer),
        jrb.load(tmp_path / "b", buffer, items=kept),
        (buffer, jrb.rebuild(buffer, state, buffer)),
    ]
    for each in (*things, *kept):
        each["x"][...] = -1
    for pair in pairs:
        with jrb.prefetch(*pair, KEY) as batches:
            next(batches).data[...] = -1
        pair[0].sample(pair[1], KEY).data[...] = -1
        for k, found in enumerate(jrb.items(*pair)):
            np.testing.assert_array_equal(found["x"], image() + k)
            found["x"][...] = -1
        assert all((found["x"] >= 0).all() for found in jrb.items(*pair))


def test_parts_of_an_object_that_are_one_stay_one_and_jax_arrays_are_shared():
    shared, array = image(), jnp.arange(3)
    endless = [shared, {"x": shared}, Step(image=array, count=0), array]
    endless.append(endless)
    buffer, state = jrb.from_items([endless], batch_size=1, storage=jrb.ListStorage())
    found = buffer.sample(state, KEY).data[0]
    assert found[0] is found[1]["x"] and found[4] is found
    assert found[2].image is array and found[3] is array


@chex.dataclass
class Node:
    above: Any = None
    below: Any = None


def test_objects_that_refer_to_themselves_are_copied():
    array, root, inner = jnp.ones(2), Node(), []
    root.below, pair = Node(above=root, below=array), (inner,)
    inner.append(pair)
    buffer, state = jrb.from_items([root, pair], batch_size=1, storage=jrb.ListStorage())
    root, pair = jrb.items(buffer, state)
    assert root.below.above is root and root.below.below is array
    assert pair[0][0] is pair


def test_objects_that_are_too_deep_are_refused_without_harm():
    deep = ()
    for _ in range(20_000):
        deep = (deep,)
    buffer = jrb.ReplayBuffer(2, storage=jrb.ListStorage())
    state = buffer.init(None)
    depth = _depth()
    with pytest.raises(TypeError, match=r"copy.deepcopy can copy, got tuple"):
        buffer.add(state, deep)
    assert _depth() == depth  # frames that are gone do not count
    assert int(buffer.size(buffer.add(state, "x"))) == 1


def _depth(number=0):
    try:
        return _depth(number + 1)
    except RecursionError:
        return number


class Constant:
    def __deepcopy__(self, copies):
        return self


def test_objects_that_cannot_be_copied_are_refused_and_nothing_is_written():
    buffer = jrb.ReplayBuffer(4, batch_size=1, storage=jrb.ListStorage())
    state = buffer.add(buffer.init(None), "a")
    with pytest.raises(TypeError, match=r"copy.deepcopy can copy, got dict .*lock.*__deepcopy__"):
        buffer.extend(state, ["b", {"lock": threading.Lock()}])
    constant = Constant()
    state = buffer.extend(state, [constant, {"x": constant}])
    found = jrb.items(buffer, state)
    assert found[0] == "a" and found[1] is constant and found[2]["x"] is constant
