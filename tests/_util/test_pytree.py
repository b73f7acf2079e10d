"""Copies of states with other fields, and hashes of descriptions."""

import copy
import gc
import pickle
import tracemalloc
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import jrb
from jrb import types


def test_a_state_with_another_field_is_a_state_like_those_made_anew():
    state = jrb.ReplayBuffer(8).init({"x": jnp.zeros(3)})
    other = state.replace(edits=state.edits + 1)
    assert type(other) is type(state) and other.storage is state.storage
    assert int(other.edits) == int(state.edits) + 1
    with pytest.raises(TypeError, match=r"BufferState: expected fields .*'edits'.*, got \['odd'\]"):
        state.replace(odd=1)


def test_a_description_has_nothing_beside_its_fields():
    buffer = jrb.ReplayBuffer(8, batch_size=2, sampler=jrb.Prioritized())
    state = buffer.add(buffer.init({"x": jnp.zeros(3)}), {"x": jnp.ones(3)})
    buffer.sample(state, jax.random.key(0))
    assert hash(jrb.ReplayBuffer(**vars(buffer))) == hash(buffer)


@types.component
class Counted:
    """A component that records each call of `__hash__`."""

    number: int
    seen: ClassVar[list[int]] = []

    def __hash__(self):
        self.seen.append(self.number)
        return self.number


def test_a_description_is_hashed_once_and_forgotten_when_it_is_gone():
    Counted.seen.clear()
    one, other = Counted(7), Counted(7)
    assert hash(one) == hash(one) == hash(other) == 7 and Counted.seen == [7, 7]
    assert {one: "x"}[other] == "x"
    del one, other
    gc.collect()
    tracemalloc.start()
    every = [Counted(number) for number in range(10_000)]
    assert sum(map(hash, every)) == sum(range(10_000))
    del every
    Counted.seen.clear()
    gc.collect()
    assert tracemalloc.get_traced_memory()[0] < 1_500_000
    tracemalloc.stop()
    # A new object at the address of a deleted one must not have its hash.
    assert [hash(Counted(number)) for number in range(100)] == list(range(100))
    assert hash(copy.copy(Counted(5))) == hash(pickle.loads(pickle.dumps(Counted(6)))) - 1
