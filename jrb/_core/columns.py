"""The arrays in which items lie, one for each leaf, `[N, ...]`.

XLA's CPU compiler computes on floats of 8 bits, bfloat16, and integers of fewer than 8 bits in
wider types: a write to one row passes over the whole array, and signalling NaNs become quiet. So
leaves of these dtypes lie in memory as integers of at least 8 bits, with the same bits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core import rows
from jrb._util import pytree
from jrb._util.pytree import DType, PyTree
from jrb._xla import gather
from jrb.types import Item, WritePlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A column of a small dtype. It can be looked at like the array that it stands for.

    Attributes:
        words: `[N, ...]`, integers.
        dtype: the leaf's own; no array.
    """

    words: Any
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array."""
        return self.words.shape

    def __getitem__(self, index: Any) -> jax.Array:
        return unpacked(self.words[index], self.dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(unpacked(self.words, self.dtype)).__array__(*args, **kwargs)


Column = Any
"""An array, or a `Packed` one."""


def is_column(thing: PyTree) -> bool:
    """Whether it is a packed column: for `jax.tree.map(..., is_leaf=is_column)`."""
    return isinstance(thing, Packed)


def room(count: int, spec: Item) -> Column:
    """Zeros for so many items of a leaf."""
    shape = (count, *spec.shape)
    if not is_small(spec.dtype):
        return jnp.zeros(shape, spec.dtype)
    return Packed(words=jnp.zeros(shape, word_dtype(spec.dtype)), dtype=np.dtype(spec.dtype))


def spec(columns: PyTree) -> Item:
    """One item of a tree of columns."""
    kind = lambda column: jax.ShapeDtypeStruct(column.shape[1:], column.dtype)
    return jax.tree.map(kind, columns, is_leaf=is_column)


def named(columns: PyTree) -> dict[str, Column]:
    """The columns of a tree by the names of their leaves."""
    found = jax.tree_util.tree_leaves_with_path(columns, is_leaf=is_column)
    return {pytree.leaf_name(path): column for path, column in found}


def array(column: Column) -> jax.Array:
    """What lies in memory."""
    return column.words if isinstance(column, Packed) else column


def with_array(column: Column, array: Any) -> Column:
    """The same column with something else in memory."""
    return dataclasses.replace(column, words=array) if isinstance(column, Packed) else array


def put(column: Column, write: WritePlan, words: jax.Array) -> Column:
    """Rows `[T, E, ...]`, packed, at the slots of a write. Gradients stop here."""
    return with_array(column, rows.put(array(column), write, lax.stop_gradient(words)))


def edit(column: Column, slots: jax.Array | None, values: jax.Array) -> Column:
    """Items `[B, ...]` at slots, int32 `[B]`, distinct but for N; or, for None, at all of N."""
    words = lax.stop_gradient(packed(values))
    whole = array(column)
    if slots is None and words.shape == whole.shape:
        return with_array(column, words)
    slots = jnp.arange(len(words), dtype=jnp.int32) if slots is None else slots
    return with_array(column, whole.at[slots].set(words, mode="drop"))


def get(column: Column, slots: jax.Array) -> jax.Array:
    """Returns items at slots `[...]`, all in range; to be called in `dependencies.materialize`."""
    return unpacked(gather.items_at(array(column), slots), column.dtype)


def is_small(dtype: DType) -> bool:
    """Whether XLA's CPU compiler computes on such a dtype in a wider one."""
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return not extended and np.dtype(dtype).isbuiltin == 2  # one that was added to NumPy's own


def word_dtype(dtype: DType) -> np.dtype:
    """The integers that stand for a small dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(f"uint{max(8, jnp.finfo(dtype).bits)}")
    return np.dtype("uint8" if jnp.issubdtype(dtype, jnp.unsignedinteger) else "int8")


def packed(values: PyTree) -> jax.Array:
    """An array as it lies in memory."""
    if not is_small(values.dtype):
        return values
    values = jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.floating):
        bits = jnp.dtype(f"uint{jnp.finfo(values.dtype).bits}")
        values = lax.bitcast_convert_type(values, bits)
    return values.astype(word_dtype(values.dtype)) if is_small(values.dtype) else values


def unpacked(words: Any, dtype: DType) -> jax.Array:
    """An array of this dtype, from what lies in memory."""
    if not is_small(dtype):
        return words
    if not jnp.issubdtype(dtype, jnp.floating):
        return words.astype(dtype)
    bits = jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
    return lax.bitcast_convert_type(words.astype(bits), dtype)
