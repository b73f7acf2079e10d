"""Reads stay before later writes, and values that are evaluated once are no constants."""

import jax
import jax.numpy as jnp
import pytest

from jrb._xla import dependencies
from tests.in_place.test_in_place import draw_add, growth


@pytest.mark.parametrize("dtype", ["float32", "bool", "uint8", "int32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 64), (32, 64, 17)])
def test_what_is_never_returned_is_no_constant_of_the_program(shape, dtype):
    """A constant would be made outside the branch, and copied when the other branch is taken."""
    compute = lambda: dependencies.evaluate_once(lambda: jnp.ones(shape, dtype))
    program = jax.make_jaxpr(compute)()
    assert [constant.shape for constant in program.consts if jnp.size(constant) > 1] == []
    found = jax.jit(compute)()
    assert found.dtype == dtype
    assert jnp.array_equal(found, jnp.ones(shape, dtype))


@pytest.mark.slow
def test_the_tie_of_draw_is_what_keeps_draw_then_add_in_place(monkeypatch):
    monkeypatch.setattr(dependencies, "zero_depending_on", lambda reads: jnp.int32(0))
    jax.clear_caches()
    some = ("uniform", "epochs", "queue", "prioritized")
    grown = {name: growth(name, draw_add) for name in some}
    jax.clear_caches()
    assert min(grown.values()) > 0.5, grown


def test_a_read_is_not_repeated_after_a_write():
    def step(array, i):
        value = dependencies.materialize(lambda: array[i])
        array = array.at[i + dependencies.zero_depending_on(value)].set(value + 1)
        return array, jnp.sin(value) + jnp.cos(value)

    def temporaries(size):
        arguments = jnp.zeros(size), jnp.arange(8)
        loop = lambda array, i: jax.lax.scan(lambda a, _: step(a, i), array, None, 3)
        compiled = jax.jit(loop, donate_argnums=0).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2**16) - temporaries(2**12) < 1000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool", "complex64", "int4"])
def test_a_token_is_zero_whatever_was_read(dtype):
    for value in (0, 1, -1, 3):
        leaf = jnp.full((2, 3), value).astype(dtype)
        assert int(jax.jit(dependencies.zero_depending_on)((leaf, jnp.zeros((0, 2))))) == 0
    assert int(dependencies.zero_depending_on(jax.random.split(jax.random.key(1), 3))) == 0
