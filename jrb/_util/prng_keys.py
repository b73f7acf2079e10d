"""Arrays of PRNG keys as their words, which can be stored, and back."""

from typing import Any

import jax
import jax.numpy as jnp

from jrb._util.pytree import DType, Leaf, PyTree

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def raw(leaf: Leaf) -> Any:
    """Returns the array itself, or the words of an array of keys."""
    return jax.random.key_data(leaf) if is_keys(leaf.dtype) else leaf


def raw_spec(spec: PyTree) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of `raw`."""
    if is_keys(spec.dtype):
        return jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def wrapped(words: Any, dtype: DType) -> Any:
    """Returns the array of this dtype that has these words."""
    if not is_keys(dtype):
        return words
    return jax.random.wrap_key_data(words, impl=implementation(dtype))


def is_keys(dtype: DType) -> bool:
    """Returns if this is the dtype of typed keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def implementation(dtype: DType) -> str:
    """Returns the name of the implementation of keys of this dtype, one that JAX brings."""
    for name in _IMPLEMENTATIONS:
        if dtype_of(name) == dtype:
            return name
    raise TypeError(f"expected keys of {', '.join(_IMPLEMENTATIONS)}, got {dtype}.")


def dtype_of(name: str) -> Any:
    """Returns the dtype of keys of an implementation; raises `KeyError` for another name."""
    if name not in _IMPLEMENTATIONS:
        raise KeyError(name)
    return jax.random.key(0, impl=name).dtype
