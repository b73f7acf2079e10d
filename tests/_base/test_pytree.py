"""States, as they are made from others."""

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
