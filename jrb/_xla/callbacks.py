"""Calls of functions on the host from jitted code, and arrays from the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

_WIDE = ("int64", "uint64", "float64", "complex128")
_SMALL = 1 << 17  # of fewer bytes, another copy takes no time that matters


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
        # View the words as arrays of the arguments' dtypes.
        flat = (np.ascontiguousarray(leaf).reshape(-1) for leaf in words)
        pairs = zip(flat, specs, strict=True)
        arrays = [leaf.view(spec.dtype).reshape(spec.shape) for leaf, spec in pairs]
        results = []
        for leaf in map(np.asarray, jax.tree.leaves(function(*arrays))):
            # Split wide results on the host as `_split_wide` splits arguments on the device.
            if leaf.dtype.name in _WIDE:
                shape = (*leaf.shape, *(2, 2)[: 1 + np.iscomplexobj(leaf)])
                leaf = np.ascontiguousarray(leaf).reshape(-1).view(np.uint32).reshape(shape)
            results.append(leaf)
        return results

    words = [_split_wide(leaf) for leaf in arguments]
    out_words = jax.eval_shape(lambda: [_split_wide(jnp.zeros(it.shape, it.dtype)) for it in outs])
    # Ordered, since a function that reads what another one writes must be called after it.
    results = io_callback(call, out_words, *words, ordered=True)
    leaves = []
    for leaf, spec in zip(results, outs, strict=True):
        # Join the words of wide results, as the inverse of `_split_wide`.
        if spec.dtype.name in _WIDE and jnp.issubdtype(spec.dtype, jnp.complexfloating):
            parts = lax.bitcast_convert_type(leaf, jnp.float64)
            leaf = lax.complex(parts[..., 0], parts[..., 1])
        elif spec.dtype.name in _WIDE:
            leaf = lax.bitcast_convert_type(leaf, spec.dtype)
        leaves.append(leaf)
    return jax.tree.unflatten(structure, leaves)


def _split_wide(array: jax.Array) -> jax.Array:
    """Returns numbers of 64 bits as uint32 `[..., 2]`, complex ones `[..., 2, 2]`."""
    if array.dtype.name not in _WIDE:
        return array
    # `lax` does not bitcast complex numbers, so split them into their parts first.
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    return lax.bitcast_convert_type(array, jnp.uint32)


def to_device(arrays: Any, device: Any) -> Any:
    """Returns arrays of NumPy as arguments of a compiled function; None is the default device."""
    # Small arrays get to the default device five times as fast as arguments of the function, which
    # copies large ones.
    if device is None and all(leaf.nbytes < _SMALL for leaf in jax.tree.leaves(arrays)):
        return arrays
    return jax.device_put(arrays, device)
