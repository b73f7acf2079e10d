"""Conversions of arrays: casts of items, PRNG keys as words, and copies of users' arrays.

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
_SCALARS = (np.number, np.bool_)
_NO_NUMBERS = frozenset("OSUMmVc")  # NumPy's letters for non-numbers, such as texts and times
_KEPT = frozenset(map(np.dtype, ("?", *"bBhHiIefF", jnp.bfloat16)))  # JAX keeps these dtypes
_MAYBE_CHANGED = pytree.WIDE | _NO_NUMBERS
_NUMBER = bool | int | float | complex
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def read_items(items: PyTree, what: str, cast: bool = False) -> Any:
    """Returns items whose leaves are numbers, or arrays in the machine's byte order.

    With `cast`, NumPy's arrays get dtypes that JAX keeps. Raises for a list of numbers, as JAX
    would make each number a leaf.
    """
    # Most items need no conversion, and this runs at every call.
    if not all(map(_is_plain, jax.tree.leaves(items))):
        # A list that has a number, or another list, is one leaf.
        is_numbers = lambda it: (
            isinstance(it, list) and any(isinstance(entry, _NUMBER | list) for entry in it)
        )
        name = lambda path: f"{what}: leaf '{pytree.leaf_name(path)}'"
        convert = lambda path, leaf: _as_array(name(path), leaf)
        items = jax.tree_util.tree_map_with_path(convert, items, is_leaf=is_numbers)
    return cast_for_jax(items, what) if cast else items


def fit_items(
    spec: PyTree,
    items: PyTree,
    what: str,
    mend: str,
    lead: tuple[int, ...] = (),
    cast: bool = False,
) -> Any:
    """Returns items with the structure and dtypes of `spec`, and its shapes after `lead`.

    With `cast`, dtypes are converted where that is safe. Raises for all else that differs; `what`
    and `mend` begin and end the message.
    """
    if cast:
        items = _cast_to_spec(spec, items, what)
    pytree.check_like(spec, items, what, mend, lead, casts=cast)
    return items


def _is_plain(leaf: Leaf) -> bool:
    """Returns True if a leaf can stay as it is; it must be quick, as it runs at every call."""
    if type(leaf) is np.ndarray:
        return leaf.dtype.isnative
    # NumPy's float64 and complex128 are Python numbers too, and lists of them must be refused.
    is_scalar = isinstance(leaf, _SCALARS) and leaf.dtype in _KEPT
    return is_scalar or isinstance(leaf, jax.Array)


def _as_array(where: str, leaf: Leaf) -> Any:
    if np.ma.is_masked(leaf):
        raise ValueError(f"{where}: expected values everywhere, got a masked array. Fill it.")
    # Convert arrays of other libraries, whose classes may raise anything.
    if not _is_plain(leaf) and hasattr(leaf, "__array__"):
        try:
            leaf = np.asarray(leaf)
        except Exception as error:
            kind = type(leaf).__name__
            raise TypeError(f"{where}: expected an array, got {kind}: {error}") from error
    if not (pytree.is_array(leaf) or isinstance(leaf, _NUMBER)):
        raise pytree.no_array(where, leaf)
    # JAX takes only the byte order of the machine.
    if not isinstance(leaf, np.ndarray) or leaf.dtype.isnative:
        return leaf
    return leaf.astype(leaf.dtype.newbyteorder("="))


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


def accept_items(items: PyTree, what: str, cast: bool) -> Any:
    """Returns items with dtypes that `jit` keeps, else raises; NumPy's arrays are copied."""
    # Copy the leaves, if all are arrays with dtypes that JAX keeps. This is done in one pass:
    # between two compiled calls, each look at a leaf costs 1 us.
    leaves, structure = jax.tree.flatten(items)
    copies = []
    for leaf in leaves:
        is_scalar = isinstance(leaf, _SCALARS)
        if is_scalar or type(leaf) is np.ndarray:
            if leaf.dtype not in _KEPT:
                break
            copies.append(leaf if is_scalar else leaf.copy())
        elif isinstance(leaf, jax.Array):
            copies.append(leaf)
        else:
            break
    else:
        return structure.unflatten(copies)
    # Else convert them. A spec raises where `jit` would, or where it would change a dtype.
    items = read_items(items, what)
    if not all(map(is_kept, jax.tree.leaves(items))):
        items = cast_for_jax(items, what) if cast else items
        pytree.spec_of(items, what)
    return copy_arrays(items)


def _cast_to_spec(spec: PyTree, items: PyTree, what: str) -> Any:
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


def copy_arrays(tree: PyTree) -> Any:
    """Copies NumPy arrays, as the caller may write to them as soon as a method has returned."""
    # JAX reads a NumPy array in place, and sometimes only after a call has returned: by then, an
    # environment may have written its next observation there.
    return jax.tree.map(copy_array, tree)


def copy_array(leaf: Leaf) -> Any:
    """Returns a copy of a NumPy array, and anything else unchanged."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


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
