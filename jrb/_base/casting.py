"""The one rule for items of other dtypes than the buffer's: refused, or converted where asked for.

Outside `jit` NumPy makes float64 and int64, which JAX would change without a word. A buffer refuses
them; with `cast=True` it converts what it is given to the dtypes that it stores, within a kind
(floats to floats) or from a lesser kind to a greater one (bool, integer, float, complex).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._base import owned, pytree
from jrb._base.pytree import DType, Leaf, PyTree

_NUMPY = (np.ndarray, np.generic)
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def kept(items: PyTree, what: str) -> Any:
    """Items whose NumPy leaves have dtypes that JAX keeps, the same values but for rounding.

    Raises:
        ValueError: an integer that the smaller dtype cannot hold.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _kept(path, leaf, what), items)


def is_kept(leaf: Leaf) -> bool:
    """Whether JAX leaves the dtype of a leaf as it is; quick, as it is asked at every call."""
    if not isinstance(leaf, _NUMPY) or leaf.dtype.char not in pytree.WIDE:
        return True
    return jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype


def accepted(items: PyTree, what: str, cast: bool) -> Any:
    """Items for `jit`, which would change some dtypes of NumPy without a word.

    Returns:
        Items, NumPy's arrays copied (see `jrb._base.owned`).

    Raises:
        TypeError: there is one of these, and nobody asked to cast them.
    """
    leaves, structure = jax.tree.flatten(items)
    if not all(map(is_kept, leaves)):
        if not cast:
            pytree.spec_of(items, what)  # raises
        return owned.copied(kept(items, what))
    return structure.unflatten(map(owned.copy, leaves))


def _kept(path: Any, leaf: Leaf, what: str) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    if is_kept(leaf):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.dtype.kind in "iu" and leaf.size:
        bounds = np.iinfo(dtype)
        if leaf.min() < bounds.min or leaf.max() > bounds.max:
            raise ValueError(
                f"{what}: leaf '{pytree.leaf_name(path)}': expected integers that {dtype} holds, "
                f"got some from {leaf.min()} to {leaf.max()}. Set jax_enable_x64, or encode them."
            )
    return leaf.astype(dtype)


def to_spec(spec: PyTree, items: PyTree, what: str) -> Any:
    """Items in the dtypes of a spec of the same structure; what is no such kind stays as it is.

    Integers do not go into a smaller dtype: inside `jit` nobody knows whether they fit.

    Args:
        spec: a pytree of `jax.ShapeDtypeStruct`s.
        items: leaves of any shapes.
        what: who asks, for an error's first words.

    Raises:
        ValueError: another structure.
    """
    pytree.check_structure(spec, items, what, "Only dtypes are converted.")
    return jax.tree.map(_converted, spec, items)


def _converted(spec: PyTree, leaf: Leaf) -> Any:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if dtype == spec.dtype or not _goes_into(dtype, spec.dtype):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.astype(spec.dtype)  # on the host, so that this needs no device
    return jnp.asarray(leaf).astype(spec.dtype)


def _goes_into(dtype: DType, target: Any) -> bool:
    """Whether a dtype is of the kind of another, or of a lesser one; integers must all fit."""
    if any(jnp.issubdtype(each, jax.dtypes.extended) for each in (dtype, target)):
        return False
    rank = lambda dtype: next(n for n, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))
    if rank(dtype) == rank(target) and jnp.issubdtype(target, jnp.integer):
        return np.can_cast(dtype, target)
    return rank(dtype) <= rank(target)
