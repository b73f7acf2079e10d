"""Calls of functions on the host from jitted code."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

_WIDE = ("int64", "uint64", "float64", "complex128")


def call_on_host(function: Callable[..., Any], shapes: Any, *arguments: jax.Array) -> Any:
    """Calls `function` on the host with NumPy arrays; calls happen in program order.

    Numbers of 64 bits are passed as words of 32 bits. XLA may call from a thread of its own, where
    a `with jax.enable_x64(True)` is not in force, as JAX keeps this setting per thread: JAX would
    silently narrow the arguments there, and refuse the results.

    Args:
        function: takes NumPy arrays, and returns a pytree of arrays like `shapes`.
        shapes: a pytree of `jax.ShapeDtypeStruct`s for the results; None if there are none.
        arguments: arrays of any shape that are passed to `function`.
    """
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arguments]
    outs, structure = jax.tree.flatten(shapes)

    def call(*words: Any) -> list[np.ndarray]:
        flat = (np.ascontiguousarray(leaf).reshape(-1) for leaf in words)
        pairs = zip(flat, specs, strict=True)
        arrays = [leaf.view(spec.dtype).reshape(spec.shape) for leaf, spec in pairs]
        results = []
        for leaf in map(np.asarray, jax.tree.leaves(function(*arrays))):
            if leaf.dtype.name in _WIDE:  # does on the host what `_cut` does on the device
                shape = (*leaf.shape, *(2, 2)[: 1 + np.iscomplexobj(leaf)])
                leaf = np.ascontiguousarray(leaf).reshape(-1).view(np.uint32).reshape(shape)
            results.append(leaf)
        return results

    cut = [_cut(leaf) for leaf in arguments]
    sent = jax.eval_shape(lambda: [_cut(jnp.zeros(out.shape, out.dtype)) for out in outs])
    received = io_callback(call, sent, *cut, ordered=True)
    return jax.tree.unflatten(structure, map(_merged, received, outs))


def _cut(array: jax.Array) -> jax.Array:
    """Returns numbers of 64 bits as uint32 `[..., 2]`, complex ones `[..., 2, 2]`."""
    if array.dtype.name not in _WIDE:
        return array
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    return lax.bitcast_convert_type(array, jnp.uint32)


def _merged(words: jax.Array, spec: Any) -> jax.Array:
    """Returns the array like `spec` whose words `_cut` has made."""
    if spec.dtype.name not in _WIDE:
        return words
    if not jnp.issubdtype(spec.dtype, jnp.complexfloating):
        return lax.bitcast_convert_type(words, spec.dtype)
    parts = lax.bitcast_convert_type(words, jnp.float64)
    return lax.complex(parts[..., 0], parts[..., 1])
