"""What `ordering` promises of the programs that it makes."""

import jax
import jax.numpy as jnp
import pytest

from jrb._xla import dependencies


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint8", "int32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 64), (32, 64, 17)])
def test_what_is_never_returned_is_no_constant_of_the_program(shape, dtype):
    """It would be made outside the branch, and copied whenever the other branch is taken."""
    compute = lambda: dependencies.evaluate_once(lambda: jnp.ones(shape, dtype))
    program = jax.make_jaxpr(compute)()
    assert [constant.shape for constant in program.consts if jnp.size(constant) > 1] == []
    found = jax.jit(compute)()
    assert found.dtype == dtype
    assert jnp.array_equal(found, jnp.ones(shape, dtype))
