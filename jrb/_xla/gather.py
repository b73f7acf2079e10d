"""Reads of few rows from a large array, which XLA's CPU compiler is to leave to one thread.

It spreads a gather over threads where the array is large, however little is read of it, and to
wake a thread takes 2 to 5 us in a loop, 40 to 90 in a call by itself. Not so where what is read
is written into a slice of a small array, the room, at a place that the compiler does not know,
and the room is a result: of `dependencies.read`, or of a step of a loop. Taken out of the room
within it, the rows would be gathered there after all.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import prng_keys
from jrb._xla import compat, dependencies

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_LARGE = 1 << 19
"""Bytes of an array from which on XLA spreads a gather."""

_OF_A_ROW = 8
"""To find a row takes as long as to read so many bytes."""

_HUGE = 1 << 26
"""Bytes of an array that lies in no cache: from there on one thread waits for each row."""


class Few(NamedTuple):
    """The most that one thread has read before another one would be awake.

    Attributes:
        nbytes: of any array.
        rows: of one that lies in no cache.
    """

    nbytes: int
    rows: int


IN_A_LOOP = Few(nbytes=24 << 10, rows=64)
BY_ITSELF = Few(nbytes=48 << 10, rows=256)

_few = contextvars.ContextVar("few", default=IN_A_LOOP)


def few_now() -> Few:
    """What is few for the function that is being traced: mostly it is part of a loop, or larger.

    A `jax.jit` that is called for both kinds of functions has to be told this as a static argument:
    it would go on with whichever it traced first.
    """
    return _few.get()


def traced_for(few: Few, function: F) -> F:
    """The same function, for which this is few while it is traced."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        before = _few.set(few)
        try:
            return function(*args, **kwargs)
        finally:
            _few.reset(before)

    return cast(F, traced)


def by_itself(function: F) -> F:
    """The same function, to be compiled as one that Python calls for a verb alone."""
    return traced_for(BY_ITSELF, function)


def is_by_itself() -> bool:
    """Returns True where the function that is being traced is one that Python calls alone."""
    return few_now() == BY_ITSELF


def is_few(array: jax.Array, slots: jax.Array, width: int = 1, times: int = 1) -> bool:
    """Whether rows of so many elements, at slots of an array, had better be read by one thread.

    Args:
        array: that is read.
        slots: of the rows, `[...]`.
        width: of a row, in elements.
        times: how many such reads are made at once (see `together`).
    """
    if not slots.ndim or prng_keys.is_keys(array.dtype):
        return False
    size, count, most = array.dtype.itemsize, slots.size * times, few_now()
    whole, found = array.size * size, count * (width * size + _OF_A_ROW)
    near = whole < _HUGE or count <= most.rows
    return near and whole >= _LARGE and 0 < found <= most.nbytes


def together(is_few: bool, read: Callable[..., T], *arrays: jax.Array) -> T:
    """`read(times, *arrays)`, with the number of such reads that are made at once.

    That is 1, and under `vmap` the size of its axis, or the product of all: rows that are few for
    one buffer are many for 64 of them. Where rows are not even few for one, nobody asks.
    """
    return _read_times(read, 1)(*arrays) if is_few else read(1, *arrays)


def _read_times(read: Callable[..., T], times: int) -> Callable[..., T]:
    run = jax.custom_batching.custom_vmap(functools.partial(read, times))

    @run.def_vmap
    def run_all(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[T, Any]:
        axes = [0 if is_batched else None for is_batched in batched]
        read_all = lambda times, *arrays: jax.vmap(
            functools.partial(read, times), axes, axis_size=size
        )(*arrays)
        found = _read_times(read_all, times * size)(*arrays)
        return found, jax.tree.map(lambda _: True, found)

    return run


def room_for(array: jax.Array, *shape: int) -> jax.Array:
    """Room for rows `[B, ...]` of this shape, and one row more.

    It is of the array's dtype, on the mesh on which that lies, and not known before that is.
    """
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
    element = lax.squeeze(first, range(array.ndim))  # as array[0, ...], which takes long to trace
    return jnp.broadcast_to(element, (shape[0] + 1, *shape[1:]))


def put(room: jax.Array, rows: jax.Array) -> jax.Array:
    """The room with these rows, `[B, ...]`, in it."""
    at = dependencies.opaque(
        0, jnp.uint32
    )  # of a signed one JAX asks whether it counts from the end
    return _put_slice(room, rows, (at, *[jnp.zeros_like(at)] * (rows.ndim - 1)))


@jax.custom_batching.custom_vmap
def _put_slice(room: jax.Array, rows: jax.Array, starts: tuple[jax.Array, ...]) -> jax.Array:
    return lax.dynamic_update_slice(room, rows, starts)


@_put_slice.def_vmap
def _put_slices(
    size: int,
    batched: list[Any],
    room: jax.Array,
    rows: jax.Array,
    starts: tuple[jax.Array, ...],
) -> tuple[jax.Array, bool]:
    """One axis more, from its beginning on; JAX would scatter, as if each place were another."""
    whole = lambda leaf, is_batched: (
        leaf if is_batched else jnp.broadcast_to(leaf, (size, *leaf.shape))
    )
    starts = (jnp.zeros_like(starts[0]), *starts)
    return _put_slice(whole(room, batched[0]), whole(rows, batched[1]), starts), True


def in_room(rows: jax.Array) -> jax.Array:
    """A room with these rows in it."""
    return put(jnp.zeros_like(room_for(rows, *rows.shape)), rows)


def loop(
    trips: int,
    step: Callable[[jax.Array, T, Callable[[jax.Array, jax.Array], jax.Array]], T],
    carry: T,
    array: jax.Array,
    count: int,
    width: int,
) -> tuple[T, jax.Array]:
    """Steps, each of which reads rows of an array once.

    Args:
        trips: how many steps.
        step: `(number, carry, rows_at) -> carry`; `rows_at(array, first)` reads rows `[B, W]`.
        carry: what the first step begins with.
        array: one like those that are read, `[N]`.
        count: B.
        width: W.

    Returns:
        The carry; and the rows that the last step read.

    On the CPU a loop, with the room in its carry. Elsewhere, where each turn of a loop would be
    kernels of its own, the steps one after the other.
    """

    def run(hold: Callable, unroll: int | None, carry: T) -> tuple[T, jax.Array]:
        def turn(number: jax.Array, both: tuple[T, jax.Array]) -> tuple[T, jax.Array]:
            carry, room = both
            read: list[jax.Array] = []

            def rows_at(array: jax.Array, first: jax.Array) -> jax.Array:
                read.append(hold(room, rows_from(array, first, width)))
                return rows_in(read[0])

            return step(number, carry, rows_at), read[0]

        start = carry, room_for(array, count, width)
        carry, room = dependencies.loop(trips, turn, start, unroll)
        return carry, rows_in(room)

    return lax.platform_dependent(
        carry,
        cpu=functools.partial(run, put, None),
        default=functools.partial(run, _put_in_new, max(1, trips)),
    )


def _put_in_new(room: jax.Array, rows: jax.Array) -> jax.Array:
    """A new room with these rows in it; XLA sees through it, and none is left."""
    return lax.pad(rows, jnp.zeros((), rows.dtype), [(0, 1, 0)] + [(0, 0, 0)] * (rows.ndim - 1))


def rows_from(array: jax.Array, first: jax.Array, width: int) -> jax.Array:
    """The rows `[B, W]` of an array `[N]` that begin at `first`, uint32 `[B]` or `[B, 1]`.

    A row that would reach over the end begins earlier.
    """
    return lax.gather(
        array,
        first.reshape(-1, 1),
        lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,)),
        (width,),
        mode="clip",
    )


def items_at(array: jax.Array, *index: jax.Array, mode: str = "promise_in_bounds") -> jax.Array:
    """`array.at[index].get(mode=mode)`, by `lax`, which is traced in a third of the time.

    Args:
        array: `[N, M, ..., *rest]`: an axis for each index, and any others.
        index: integers `[...]` of one shape, none negative; one array for each of the first axes.
        mode: what becomes of indices that are out of range.

    Returns:
        `[..., *rest]`.
    """
    count, lead = len(index), index[0].ndim
    axes, rest = tuple(range(count)), array.shape[count:]
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(lead, lead + len(rest))),
        collapsed_slice_dims=axes,
        start_index_map=axes,
    )
    columns = [lax.expand_dims(one.astype(compat.INDEX), (lead,)) for one in index]
    places = lax.concatenate(columns, lead)
    return lax.gather(array, places, dims, (*[1] * count, *rest), mode=mode)


def rows_in(room: jax.Array) -> jax.Array:
    """The rows that were put there, `[B, ...]`."""
    return room[:-1]


def read(*gathers: tuple[Callable[[], jax.Array], bool]) -> list[jax.Array]:
    """What each of some functions gathers, read just once (see `dependencies.read`).

    Args:
        gathers: functions, each with whether it gathers few rows.
    """
    few = [is_few for _, is_few in gathers]

    def changed(change: Callable, rows: list[jax.Array]) -> list[jax.Array]:
        return [change(it) if is_few else it for it, is_few in zip(rows, few, strict=True)]

    found = dependencies.read(
        lambda: [get() for get, _ in gathers], lambda it: changed(in_room, it)
    )
    return changed(rows_in, found)


def read_at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `array[index]`, read once: `[N]` at indices `[B]`, which are clipped to [0, N)."""

    def found(times: int, array: jax.Array, index: jax.Array) -> jax.Array:
        clipped = lambda: items_at(array, index, mode="clip")
        return read((clipped, is_few(array, index, times=times)))[0]

    return together(is_few(array, index), found, array, index)
