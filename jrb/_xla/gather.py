"""Gathers and scatters of rows of an array. N entries, B indices.

**Gathers** of few rows from a large array should run on one thread. XLA's CPU compiler spreads a
gather over threads if the array is large, however few rows are read, and to wake a thread takes 2
to 5 us in a loop, 40 to 90 us in a separate call. It uses one thread if the rows are written into a
slice of a small array, the scratch, at a position that the compiler cannot know, and the scratch is
a result of `dependencies.materialize` or of a loop's step. The rows must leave the scratch only
after that: otherwise XLA gathers them without it. `tests/_xla/test_gather.py` guards this.

**Scatters** should have the same result on every backend. XLA writes from the first index to the
last on the CPU, and in any order elsewhere. If an index may occur twice with different values,
`put_in_turns` and `put_last` define which one wins. `tests/test_sum_tree.py` compares both ways.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jrb._xla import compat, compiling, dependencies

T = TypeVar("T")

# XLA spreads gathers over threads from arrays of this many bytes on.
_LARGE = 1 << 19
# An array of this many bytes is in no cache, and one thread waits for memory at each row.
_HUGE = 1 << 26
# The bytes that could be read in the time that it takes to find a row.
_OF_A_ROW = 8
# The most indices of which all pairs are compared to find duplicates.
_MAX_PAIRS = 4096


def is_few(array: jax.Array, slots: jax.Array, width: int = 1, times: int = 1) -> bool:
    """Returns True if one thread reads rows of an array more quickly than several would.

    Args:
        array: the array to read from.
        slots: the slots of the rows, `[...]`.
        width: the number of elements of a row.
        times: how many such reads are made at once (see `scaled_by_vmap`).
    """
    if not slots.ndim or jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return False
    size, count, limits = array.dtype.itemsize, slots.size * times, compiling.current_limits()
    whole, nbytes = array.size * size, count * (width * size + _OF_A_ROW)
    # Many rows far apart wait for memory, which several threads do at the same time.
    is_near = whole < _HUGE or count <= limits.rows
    # Gathers from a smaller array run on one thread anyway.
    return is_near and whole >= _LARGE and 0 < nbytes <= limits.nbytes


def scaled_by_vmap(is_few: bool, read: Callable[..., T], *arrays: jax.Array) -> T:
    """Returns `read(times, *arrays)`, where `times` is how many such reads are made at once."""
    # `times` is 1, or under `vmap` the product of all batch sizes: rows that are few for one buffer
    # are many for 64 of them. If rows are many for one buffer, `vmap` makes no difference.
    return _read_times(read, 1)(*arrays) if is_few else read(1, *arrays)


def _read_times(read: Callable[..., T], times: int) -> Callable[..., T]:
    run = jax.custom_batching.custom_vmap(functools.partial(read, times))

    @run.def_vmap
    def run_all(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[T, Any]:
        axes = [0 if is_batched else None for is_batched in batched]

        def read_all(times: int, *arrays: jax.Array) -> T:
            return jax.vmap(functools.partial(read, times), axes, axis_size=size)(*arrays)

        # The batched read has such a rule again: a further `vmap` multiplies `times` once more.
        result = _read_times(read_all, times * size)(*arrays)
        return result, jax.tree.map(lambda _: True, result)

    return run


def scratch(array: jax.Array, *shape: int) -> jax.Array:
    """Returns a scratch for rows `[B, ...]` of this shape, and one more, in the array's dtype."""
    # Made of an element of the array, it is on the same mesh, and depends on the array. This is
    # array[0, 0, ...], which takes longer to trace. The further row keeps XLA from simplifying the
    # write of all others away.
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
    element = lax.squeeze(first, range(array.ndim))
    return jnp.broadcast_to(element, (shape[0] + 1, *shape[1:]))


def _put_rows(room: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes rows into a scratch, at position 0, which XLA's CPU compiler does not know."""
    # Unsigned: for a signed start JAX adds code that checks if it counts from the end.
    start = dependencies.opaque(0, jnp.uint32)
    return _put_slice(room, rows, (start, *[jnp.zeros_like(start)] * (rows.ndim - 1)))


_put_slice = jax.custom_batching.custom_vmap(
    lambda room, rows, starts: lax.dynamic_update_slice(room, rows, starts)
)


@_put_slice.def_vmap
def _put_slices(
    size: int, batched: list[Any], room: jax.Array, rows: jax.Array, starts: tuple[jax.Array, ...]
) -> tuple[jax.Array, bool]:
    # One slice with one more axis. JAX's own rule is a scatter, as if the positions could differ.
    room = room if batched[0] else jnp.broadcast_to(room, (size, *room.shape))
    rows = rows if batched[1] else jnp.broadcast_to(rows, (size, *rows.shape))
    return _put_slice(room, rows, (jnp.zeros_like(starts[0]), *starts)), True


def loop(
    trips: int,
    step: Callable[[jax.Array, T, Callable[[jax.Array, jax.Array], jax.Array]], T],
    carry: T,
    array: jax.Array,
    count: int,
    width: int,
) -> tuple[T, jax.Array]:
    """Runs steps, each of which reads rows of an array once.

    On the CPU it is a loop with the scratch in its carry. Elsewhere the steps are unrolled, as each
    turn of a loop would launch kernels of its own.

    Args:
        trips: the number of steps.
        step: `(number, carry, rows_at) -> carry`; `rows_at(array, first)` reads rows `[B, W]`.
        carry: the carry of the first step.
        array: an array `[N]` like those that are read.
        count: B, the rows of one read.
        width: W, the elements of a row.

    Returns:
        The carry; and the rows that the last step read.
    """

    def run(hold: Callable, unroll: int | None, carry: T) -> tuple[T, jax.Array]:
        def turn(number: jax.Array, both: tuple[T, jax.Array]) -> tuple[T, jax.Array]:
            carry, room = both
            # `rows_at` leaves the new scratch here, for the carry of the next turn.
            rooms: list[jax.Array] = []

            def rows_at(array: jax.Array, first: jax.Array) -> jax.Array:
                # The rows pass through the carried scratch, which has a further row: XLA fuses the
                # gather into the write.
                rooms.append(hold(room, rows_from(array, first, width)))
                return rooms[0][:-1]

            return step(number, carry, rows_at), rooms[0]

        start = carry, scratch(array, count, width)
        carry, room = dependencies.loop(trips, turn, start, unroll)
        return carry, room[:-1]

    def hold_in_new(room: jax.Array, rows: jax.Array) -> jax.Array:
        # Other backends get a new scratch in each step, which XLA optimizes away.
        one_more = [(0, 1, 0)] + [(0, 0, 0)] * (rows.ndim - 1)
        return lax.pad(rows, jnp.zeros((), rows.dtype), one_more)

    return lax.platform_dependent(
        carry,
        cpu=functools.partial(run, _put_rows, None),
        default=functools.partial(run, hold_in_new, max(1, trips)),
    )


def rows_from(array: jax.Array, first: jax.Array, width: int) -> jax.Array:
    """Returns the rows `[B, W]` of an array `[N]` that begin at `first`, uint32 `[B]` or `[B, 1]`.

    A row that would reach beyond the end of the array begins earlier.
    """
    return lax.gather(
        array,
        first.reshape(-1, 1),
        lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,)),
        (width,),
        mode="clip",
    )


def items_at(array: jax.Array, *index: jax.Array, mode: str = "promise_in_bounds") -> jax.Array:
    """Returns `array.at[index].get(mode=mode)`, by `lax`, which is traced in a third of the time.

    Args:
        array: `[N, M, ..., *item]`: an axis for each index, and any others.
        index: integers `[...]` of one shape, none negative; one array for each of the first axes.
        mode: the mode of `lax.gather` for indices that are out of range.

    Returns:
        `[..., *item]`.
    """
    # Each position in the indices becomes one gathered item: the indexed axes are collapsed, and
    # those of an item follow the axes of the indices.
    count, lead = len(index), index[0].ndim
    axes, item = tuple(range(count)), array.shape[count:]
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(lead, lead + len(item))),
        collapsed_slice_dims=axes,
        start_index_map=axes,
    )
    columns = [lax.expand_dims(one.astype(compat.INDEX), (lead,)) for one in index]
    places = lax.concatenate(columns, lead)
    return lax.gather(array, places, dims, (*[1] * count, *item), mode=mode)


Gather = tuple[Callable[[], jax.Array], bool, Callable[[jax.Array], Any]]
"""A function that gathers rows; True if these are few; and a function that is applied to them."""


def read_each(gathers: list[Gather]) -> list[Any]:
    """Runs gathers, each exactly once; returns the rows of each, its function applied to them."""
    gather_all = lambda: [read() if few else change(read()) for read, few, change in gathers]

    def hold_few(results: list[Any]) -> list[Any]:
        blank = lambda rows: jnp.zeros_like(scratch(rows, *rows.shape))
        pairs = zip(results, gathers, strict=True)
        return [_put_rows(blank(rows), rows) if few else rows for rows, (_, few, _) in pairs]

    # Few rows leave their scratch only out here, so their function is applied to them here too.
    pairs = zip(dependencies.materialize(gather_all, hold_few), gathers, strict=True)
    return [change(rows[:-1]) if is_few else rows for rows, (_, is_few, change) in pairs]


def read_items(*pairs: tuple[jax.Array, jax.Array], mode: str = "promise_in_bounds") -> list[Any]:
    """Returns `array[slots]` for each pair, int32 slots `[...]`, all read exactly once together."""

    def gathers_of(times: int, *flat: jax.Array) -> list[Gather]:
        return [
            (
                functools.partial(items_at, array, at, mode=mode),
                is_few(array, at, math.prod(array.shape[1:]), times),
                lambda rows: rows,
            )
            for array, at in zip(flat[::2], flat[1::2], strict=True)
        ]

    # Arrays and slots alternate in `flat`.
    flat = list(itertools.chain(*pairs))
    any_few = any(few for _, few, _ in gathers_of(1, *flat))
    return scaled_by_vmap(any_few, lambda *args: read_each(gathers_of(*args)), *flat)


def read_at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `array[index]`, read once: `[N]` at indices `[B]`, which are clipped to [0, N)."""
    return read_items((array, index), mode="clip")[0]


def read(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns whole items at slots, int32 `[...]`, all in range, read exactly once."""
    return read_items((array, slots))[0]


def column(values: jax.Array) -> jax.Array:
    """Returns values `[B]` as a column, `[B, 1]`: the shape that XLA's gathers and scatters use."""
    # Compute what depends on them from the column too: XLA compiles two kernels for an array that
    # is used in two shapes.
    return values.reshape(-1, 1)


def put(
    array: jax.Array, index: jax.Array, values: jax.Array, scatter: Callable = lax.scatter
) -> jax.Array:
    """Returns `array.at[index].set(values)`: `[N]` at indices `[B]`; those outside are dropped."""
    # Indices are integers of any dtype, as a conversion would be a kernel of its own; they and the
    # values may be columns, `[B, 1]`.
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return scatter(array, column(index), column(values), dims, mode=drop)


def put_in_turns(
    array: jax.Array, index: jax.Array, values: jax.Array, counts: tuple[int, ...]
) -> jax.Array:
    """Calls `put` for the first `counts[0]` elements, then for the next `counts[1]`, and so on."""
    if len(counts) == 1:
        return put(array, index, values)
    by_turns = functools.partial(put_part_by_part, counts=counts)
    return lax.platform_dependent(array, index, values, cpu=put, default=by_turns)


def put_part_by_part(
    array: jax.Array, index: jax.Array, values: jax.Array, counts: tuple[int, ...]
) -> jax.Array:
    """Implements `put_in_turns` where scatters write in any order: one scatter per count."""
    parts = zip(lax.split(index, counts), lax.split(values, counts), strict=True)
    return functools.reduce(lambda array, part: put(array, *part), parts, array)


def put_last(array: jax.Array, index: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sets elements; if an index occurs twice, the last value wins.

    Args:
        array: float32 `[N]`.
        index: uint32 `[B]`; indices outside [0, N) are dropped.
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
    """Implements `put_last` for any order of writes: all duplicates write the last one's value."""
    # Find the last position in the batch at which each index occurs.
    position = jnp.arange(index.size, dtype=jnp.int32)
    if index.size <= _MAX_PAIRS:
        # XLA reduces the B x B pairs as it compares them, and never stores them.
        last = jnp.max(jnp.where(index[:, None] == index, position, 0), axis=1, initial=0)
    elif index.size > 2**24:  # the greatest position that float32 holds
        raise ValueError(
            f"indices: expected at most 2^24 in one update, got {index.size}. "
            "Update in several calls."
        )
    else:
        # Scatter the positions into the array itself, which takes no memory of size N.
        array = put(array, index, jnp.full(index.shape, -1.0, jnp.float32))
        array = put(array, index, position.astype(jnp.float32), lax.scatter_max)
        last = read_at(array, index).astype(jnp.int32)
    # Every duplicate writes the same value, so the order does not matter.
    last_values = values.at[last].get(mode="clip")
    return put(array, index, last_values), last_values
