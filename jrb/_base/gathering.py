"""Reads of few rows from a large array, which XLA's CPU compiler is to leave to one thread.

It spreads a gather over threads where the array is large, however little is read of it, and to wake
a thread takes 2 to 5 us. Not so where what is read is written into a slice of a small array, the
room, at a place that the compiler does not know, and the room is a result: of `ordering.read`, or
of a step of a loop. Taken out of the room within it, the rows would be gathered there after all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jrb._base import ordering, prng_keys

_LARGE = 1 << 19
"""Bytes of an array from which on XLA spreads a gather."""

_FEW = 8 << 10
"""Bytes that one thread has read before another one would be awake."""

_HUGE = 1 << 26
"""Bytes of an array that lies in no cache: from there on one thread waits for each row, ..."""

_FEW_OF_HUGE = 64
"""... and has read so many before another one would be awake."""


def is_few(array: jax.Array, slots: jax.Array, width: int = 1) -> bool:
    """Whether rows of so many elements, at slots of an array, had better be read by one thread."""
    if not slots.ndim or prng_keys.is_keys(array.dtype):
        return False
    size = array.dtype.itemsize
    whole, found = array.size * size, slots.size * width * size
    near = whole < _HUGE or slots.size <= _FEW_OF_HUGE
    return near and whole >= _LARGE and 0 < found <= _FEW


def room_for(array: jax.Array, *shape: int) -> jax.Array:
    """Room for rows `[B, ...]` of this shape, and one row more.

    It is of the array's dtype, and on the mesh on which that lies.
    """
    element = array[(0,) * array.ndim]
    return jnp.zeros_like(jnp.broadcast_to(element, (shape[0] + 1, *shape[1:])))


def put(room: jax.Array, rows: jax.Array) -> jax.Array:
    """The room with these rows, `[B, ...]`, in it."""
    at = ordering.opaque(0)
    return lax.dynamic_update_slice(room, rows, (at, *[jnp.zeros_like(at)] * (rows.ndim - 1)))


def in_room(rows: jax.Array) -> jax.Array:
    """A room with these rows in it."""
    return put(room_for(rows, *rows.shape), rows)


def rows_in(room: jax.Array) -> jax.Array:
    """The rows that were put there, `[B, ...]`."""
    return room[:-1]


def read(*gathers: tuple[Callable[[], jax.Array], bool]) -> list[jax.Array]:
    """What each of some functions gathers, read just once (see `ordering.read`).

    Args:
        gathers: functions, each with whether it gathers few rows.
    """
    found = ordering.read(lambda: [in_room(get()) if few else get() for get, few in gathers])
    return [rows_in(it) if few else it for it, (_, few) in zip(found, gathers, strict=True)]
