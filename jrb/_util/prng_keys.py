"""Arrays of PRNG keys as their words, which can be stored, and back."""

from typing import Any

import jax
import jax.numpy as jnp

from jrb._util.pytree import DType, Leaf, PyTree

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def raw(leaf: Leaf) -> Any:
    """The array itself, or the words of an array of keys."""
    return jax.random.key_data(leaf) if is_keys(leaf.dtype) else leaf


def raw_spec(spec: PyTree) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `raw`."""
    if is_keys(spec.dtype):
        return jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def wrapped(words: Any, dtype: DType) -> Any:
    """The array of this dtype that `raw` makes these words of."""
    if not is_keys(dtype):
        return words
    return jax.random.wrap_key_data(words, impl=implementation(dtype))


def is_keys(dtype: DType) -> bool:
    """Whether this is the dtype of typed keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def implementation(dtype: DType) -> str:
    """The name of what made keys of this dtype.

    Raises:
        TypeError: an implementation that JAX does not bring.
    """
    for name in _IMPLEMENTATIONS:
        if dtype_of(name) == dtype:
            return name
    raise TypeError(f"expected keys of {', '.join(_IMPLEMENTATIONS)}, got {dtype}.")


def dtype_of(name: str) -> Any:
    """The dtype of keys of an implementation.

    Raises:
        KeyError: there is none of that name.
    """
    if name not in _IMPLEMENTATIONS:
        raise KeyError(name)
    return jax.random.key(0, impl=name).dtype
