"""Conversions of arrays: casts of items, and PRNG keys as words.

NumPy code makes float64 and int64, which JAX would narrow silently. A buffer refuses items with
other dtypes than it stores. With `cast=True` it converts them, within a kind (floats to floats) or
from a lesser kind to a greater one. The kinds are, from the least to the greatest, bool, integer,
float and complex.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import pytree
from jrb._util.pytree import DType, Leaf, PyTree

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")  # of keys
_NO_NUMBERS = frozenset("OSUMmVc")  # NumPy's letters for non-numbers, such as texts and times
_MAYBE_CHANGED = pytree.WIDE | _NO_NUMBERS
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def cast_for_jax(items: PyTree, what: str) -> Any:
    """Returns items with NumPy leaves cast to dtypes that JAX keeps; values may be rounded."""

    def convert(path: Any, leaf: Leaf) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, pytree.kept_dtype(leaf.dtype))
        if is_kept(leaf) or leaf.dtype.char in _NO_NUMBERS:
            return leaf
        return _cast(path, leaf, pytree.kept_dtype(leaf.dtype), what)

    return jax.tree_util.tree_map_with_path(convert, items)


def is_kept(leaf: Leaf) -> bool:
    """Returns True if JAX keeps a leaf's dtype; it must be quick, as it runs at every call."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.char not in _MAYBE_CHANGED:
        return True
    if leaf.dtype.char in _NO_NUMBERS:
        return False
    return pytree.kept_dtype(leaf.dtype) == leaf.dtype


def cast_to_spec(spec: PyTree, items: PyTree, what: str) -> Any:
    """Returns items with each leaf cast to the dtype in `spec`, unless that is of a lesser kind.

    Integers are not cast to a smaller dtype: inside `jit` it is not known whether they fit.
    """
    pytree.check_structure(spec, items, what, "Only dtypes are converted.")

    def convert(path: Any, spec: PyTree, leaf: Leaf) -> Any:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if dtype == spec.dtype or not _goes_into(dtype, spec.dtype):
            return leaf
        # Cast NumPy's arrays on the host, which needs no device.
        if isinstance(leaf, np.ndarray | np.generic):
            return _cast(path, leaf, spec.dtype, what)
        return jnp.asarray(leaf).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(convert, spec, items)


def _goes_into(dtype: DType, target: Any) -> bool:
    """Returns True if a dtype is of the target's kind or a lesser one; all integers must fit."""
    if any(jnp.issubdtype(each, jax.dtypes.extended) for each in (dtype, target)):
        return False
    # NumPy takes spans of time for integers.
    if dtype.kind == "m":
        return False
    # Compare the ranks of both dtypes among the kinds; a dtype of no numbers comes last.
    is_kind = lambda dtype: [jnp.issubdtype(dtype, kind) for kind in _KINDS]
    rank = lambda dtype: [*is_kind(dtype), True].index(True)
    if rank(dtype) == rank(target) and jnp.issubdtype(target, jnp.integer):
        return np.can_cast(dtype, target)
    return rank(dtype) <= rank(target)


def _cast(path: Any, leaf: Leaf, dtype: DType, what: str) -> Any:
    """Returns a NumPy array in another dtype; raises if a finite value does not fit into it."""
    with np.errstate(over="ignore"):
        result = leaf.astype(dtype)
    # Find the values that do not fit: integers out of range, or numbers that became infinite.
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer and leaf.size:
        bounds = np.iinfo(dtype)
        fits = (leaf >= bounds.min) & (leaf <= bounds.max)
    else:
        fits = np.isfinite(result) | ~np.isfinite(leaf)
    if not np.all(fits):
        kind, misfits = "integers" if is_integer else "numbers", np.asarray(leaf)[~fits]
        raise ValueError(
            f"{what}: leaf '{pytree.leaf_name(path)}': expected {kind} that {dtype} holds, got "
            f"some from {misfits.min()} to {misfits.max()}. Set jax_enable_x64, or encode them."
        )
    return result


# PRNG keys are stored as their words.


def raw(leaf: Leaf) -> Any:
    """Returns the array itself, or the words of an array of keys."""
    return jax.random.key_data(leaf) if is_keys(leaf.dtype) else leaf


def raw_spec(spec: PyTree) -> jax.ShapeDtypeStruct:
    """Returns the spec of `raw` of an array with this spec."""
    if is_keys(spec.dtype):
        return jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def wrap_words(words: Any, dtype: DType) -> Any:
    """Returns the keys of this dtype with these words; of other dtypes, the words unchanged."""
    if not is_keys(dtype):
        return words
    return jax.random.wrap_key_data(words, impl=implementation(dtype))


def is_keys(dtype: DType) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def implementation(dtype: DType) -> str:
    """Returns the name of the PRNG of keys of this dtype; raises if it is none of JAX's own."""
    for name in _IMPLEMENTATIONS:
        if dtype_of(name) == dtype:
            return name
    raise TypeError(f"expected keys of {', '.join(_IMPLEMENTATIONS)}, got {dtype}.")


def dtype_of(name: str) -> Any:
    """Returns the dtype of keys of an implementation; raises `KeyError` for another name."""
    if name not in _IMPLEMENTATIONS:
        raise KeyError(name)
    return jax.random.key(0, impl=name).dtype
