"""Rows of time put into arrays over slots, in place.

N capacity, E environments, T time, B batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jrb._xla import compiling, dependencies
from jrb.ring import Clock, Ring
from jrb.types import SlotsForLeaf, WritePlan

_MAX_PAIRS = 512  # indices of which all pairs are compared; more are sorted


def plan_rows(
    ring: Ring, clock: Clock, length: int, mask: jax.Array | None
) -> tuple[Clock, WritePlan]:
    """Plans T rows of time around the ring, one after the other; of more than R, the last R.

    Args:
        ring: its shape.
        clock: where it stands, `[]`, or `[E]` if each environment has its own.
        length: T.
        mask: bool `[T]`, the rows to write, or `[T, E]` with a clock `[E]`; None for all.
    """
    each = clock.cursor.shape
    single = mask is None and length == 1 and not each
    if mask is None:
        written = jnp.ones((length, *each), jnp.bool_)
    else:
        written = jnp.broadcast_to(mask.reshape(length, *[-1] * len(each)), (length, *each))
    if single:  # the slot as it is, so that the write stays a slice without a condition
        passed, starts = jnp.ones(1, jnp.int32), clock.cursor[None] * ring.envs
    else:
        passed = jnp.cumsum(written, axis=0, dtype=jnp.int32)
        kept = written & (passed > passed[-1] - ring.rows)
        starts = ring.row_after(clock.cursor, passed - 1) * ring.envs
        starts = jnp.where(kept, starts, ring.capacity)
    slots = ring.row_slots(starts)
    write = WritePlan(
        starts=slots.reshape(-1) if each else starts,
        slots=slots,
        written=written,
        passed=passed,
        expired=jnp.maximum(clock.count - ring.rows + passed[-1], 0),
        consecutive=single,
    )
    return ring.advance(clock, write.rows), write


def put(array: jax.Array, write: WritePlan, rows: jax.Array) -> jax.Array:
    """Puts rows `[T, E, ...]` at the slots of a write, in an array `[N, ...]`."""
    # A slice for consecutive slots, else a scatter of items without those that `write` drops.
    if write.consecutive:
        return lax.dynamic_update_slice_in_dim(array, rows[0], write.starts[0], axis=0)
    items = rows.reshape(write.slots.size, *rows.shape[2:])
    return array.at[write.slots.reshape(-1)].set(items, mode="drop")


def put_blocks(array: jax.Array, starts: jax.Array, blocks: jax.Array) -> jax.Array:
    """Puts blocks `[K, W, ...]` from `starts`, int32 `[K]`, on; none beyond the array's end."""
    # Tried on the CPU: a loop of slices, with a rule for vmap. No faster for frames of 84 x 84.
    at = starts[:, None] + jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    return array.at[at].set(blocks, mode="drop")


def last_of_equals(ring: Ring, slots: jax.Array) -> jax.Array:
    """Returns slots, int32 `[B]`, with N in place of all but the last one of equal slots."""
    # On the CPU they stay as they are: a scatter goes from the first to the last there.
    return lax.platform_dependent(cpu=lambda: slots, default=lambda: distinct(ring, slots))


def distinct(ring: Ring, slots: jax.Array) -> jax.Array:
    """Returns slots, int32 `[B]`, with N in place of all but the last one of equal slots."""
    if slots.size <= _MAX_PAIRS:
        position = jnp.arange(slots.size, dtype=jnp.int32)
        later = (slots[:, None] == slots) & (position[:, None] < position)
        return jnp.where(later.any(axis=1), ring.capacity, slots)
    order = jnp.argsort(slots, stable=True)
    line = slots[order]
    again = jnp.concatenate([line[1:] == line[:-1], jnp.zeros(1, jnp.bool_)])
    return slots.at[order].set(jnp.where(again, ring.capacity, line))


def by_number(numbers: jax.Array, following: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the slots of items that were numbered as they came, int32 `[N]`, oldest first.

    Args:
        numbers: uint32 `[N]`, modulo 2^32.
        following: uint32 `[]`, the number of the next item.
        count: int32 `[]`, how many slots, from 0 on, hold items; the others come last.
    """
    slot = jnp.arange(numbers.size, dtype=jnp.int32)
    age = jnp.where(slot < count, following - numbers, 0)  # the greatest is the oldest
    return jnp.argsort(~age, stable=True).astype(jnp.int32)


def after(write: WritePlan, token: jax.Array) -> WritePlan:
    """Returns a write whose slots are not known before `token`, an int32 zero."""
    return dataclasses.replace(write, starts=write.starts + token, slots=write.slots + token)


def in_line(write: WritePlan, array: jax.Array) -> WritePlan:
    """Returns a write that waits, in a program for one verb, until `array` was written."""
    # XLA's CPU compiler hands kernels to another thread where more than nine could run at once. To
    # wake it takes longer than they do: adds take 2 to 5 times as long (see `jrb/_xla/README.md`).
    if not (compiling.is_standalone() and array.size):
        return write
    return after(write, dependencies.zero_after(array))


def where_after(where: SlotsForLeaf, token: jax.Array) -> SlotsForLeaf:
    """Returns slots that are not known before `token`; one array for leaves that had one."""
    later: dict[int, tuple[jax.Array, jax.Array]] = {}

    def slots_of(name: str) -> jax.Array:
        slots = where(name)
        return later.setdefault(id(slots), (slots, slots + token))[1]

    return slots_of
