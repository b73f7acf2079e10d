"""Buffers of Python objects draw the same items as buffers of their numbers."""

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
        assert all(got is thing for got, thing in zip(sample.data, want, strict=True))
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
    shelf = state.storage.shelf
    shelf.objects = Interrupted(shelf.objects)
    shelf.objects.come = [lambda: buffer.extend(state, ["new 0", "new 1"])]
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
    assert all(found is thing for found in objects.take(state, jnp.arange(2)))
    assert methods.sample(state, KEY).data[0] is thing
