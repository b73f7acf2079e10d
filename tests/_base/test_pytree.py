"""States, as they are made from others."""

import jax
import jax.numpy as jnp
import pytest

import jrb


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
