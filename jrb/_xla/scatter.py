"""Scatters whose result is the same on every backend. N entries, B indices.

XLA's scatter writes from the first index to the last on the CPU, and in any order elsewhere. Where
an index may stand twice with different values, `put_in_turns` and `put_last` say which one wins.
`tests/test_sum_tree.py` compares both ways.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jrb._xla import gather

_PAIRS = 4096  # up to so many indices, duplicates are found by comparing all pairs


def column(values: jax.Array) -> jax.Array:
    """Returns values `[B]` as a column, `[B, 1]`: the shape that XLA's gathers and scatters use.

    Compute what depends on them from the column too: XLA compiles two kernels for an array that is
    used in two shapes.
    """
    return values.reshape(-1, 1)


def put(
    array: jax.Array, index: jax.Array, values: jax.Array, scatter: Callable = lax.scatter
) -> jax.Array:
    """Returns `array.at[index].set(values)`: `[N]` at indices `[B]`; those outside are dropped.

    Indices are integers of any dtype, as a conversion would be a kernel of its own; they and the
    values may be columns, `[B, 1]`.
    """
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return scatter(array, column(index), column(values), dims, mode=drop)


def put_in_turns(
    array: jax.Array, index: jax.Array, values: jax.Array, counts: tuple[int, ...]
) -> jax.Array:
    """`put` of the first `counts[0]` elements, then of the next `counts[1]`, and so on."""
    if len(counts) == 1:
        return put(array, index, values)
    by_turns = functools.partial(put_part_by_part, counts=counts)
    return lax.platform_dependent(array, index, values, cpu=put, default=by_turns)


def put_part_by_part(
    array: jax.Array, index: jax.Array, values: jax.Array, counts: tuple[int, ...]
) -> jax.Array:
    """`put_in_turns` as one scatter for each count, for any order of writes."""
    parts = zip(lax.split(index, counts), lax.split(values, counts), strict=True)
    return functools.reduce(lambda array, part: put(array, *part), parts, array)


def put_last(array: jax.Array, index: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sets elements; the last value wins where an index stands twice.

    Args:
        array: float32 `[N]`.
        index: uint32 `[B]`; others than [0, N) are dropped.
        values: float32 `[B]`.

    Returns:
        The array; and values, float32 `[B]`, with which `put` at this index sets the same elements
        of any other array.
    """
    in_order = lambda array, index, values: (put(array, index, values), values)
    return lax.platform_dependent(array, index, values, cpu=in_order, default=put_in_any_order)


def put_in_any_order(
    array: jax.Array, index: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`put_last` for any order of writes: each duplicate writes the value of the last one."""
    position = jnp.arange(index.size, dtype=jnp.int32)
    if index.size <= _PAIRS:  # the B x B pairs are reduced as they are compared, never stored
        last = jnp.max(jnp.where(index[:, None] == index, position, 0), axis=1, initial=0)
    elif index.size > 2**24:  # the greatest position that float32 holds
        raise ValueError(
            f"indices: expected at most 2^24 in one update, got {index.size}. "
            "Update in several calls."
        )
    else:  # positions in the batch, scattered into the array itself: no memory of size N
        array = put(array, index, jnp.full(index.shape, -1.0, jnp.float32))
        array = put(array, index, position.astype(jnp.float32), lax.scatter_max)
        last = gather.read_at(array, index).astype(jnp.int32)
    last_values = values.at[last].get(mode="clip")
    return put(array, index, last_values), last_values
