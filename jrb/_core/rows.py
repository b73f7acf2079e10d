"""Rows of time put into arrays over slots, and got from them, in place.

N capacity, E environments, T time.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._xla import dependencies, gather
from jrb.ring import Clock, Ring
from jrb.types import SlotsForLeaf, WritePlan


def in_turn(
    ring: Ring, clock: Clock, length: int, mask: jax.Array | None
) -> tuple[Clock, WritePlan]:
    """T rows written one after the other around a ring; of more than R, the last R.

    Args:
        ring: its shape.
        clock: where it stands.
        length: T.
        mask: bool `[T]`, the rows to write; None for all.
    """
    single = mask is None and length == 1
    written = jnp.ones(length, jnp.bool_) if mask is None else mask
    if single:
        passed, starts = jnp.ones(1, jnp.int32), clock.cursor[None] * ring.envs
    else:
        passed = jnp.cumsum(written, dtype=jnp.int32)
        kept = written & (passed > passed[-1] - ring.rows)
        starts = ring.row_after(clock.cursor, passed - 1) * ring.envs
        starts = jnp.where(kept, starts, ring.capacity)
    write = WritePlan(
        starts=starts,
        slots=ring.row_slots(starts),
        written=written,
        passed=passed,
        expired=jnp.maximum(clock.count - ring.rows + passed[-1], 0),
        consecutive=single,
    )
    return ring.advance(clock, write.rows), write


def in_lanes(
    ring: Ring, clocks: Clock, length: int, mask: jax.Array | None
) -> tuple[Clock, WritePlan]:
    """The same for each environment by itself; the mask may be bool `[T, E]`."""
    shape = (length, ring.envs)
    written = jnp.ones(shape, jnp.bool_)
    if mask is not None:
        written = jnp.broadcast_to(mask.reshape(length, -1), shape)
    passed = jnp.cumsum(written, axis=0, dtype=jnp.int32)
    kept = written & (passed > passed[-1] - ring.rows)
    slots = ring.row_after(clocks.cursor, passed - 1) * ring.envs
    slots = slots + jnp.arange(ring.envs, dtype=jnp.int32)
    slots = jnp.where(kept, slots, ring.capacity)
    write = WritePlan(
        starts=slots.reshape(-1),
        slots=slots,
        written=written,
        passed=passed,
        expired=jnp.maximum(clocks.count - ring.rows + passed[-1], 0),
        consecutive=False,
    )
    return ring.advance(clocks, write.rows), write


def put(array: jax.Array, write: WritePlan, rows: jax.Array) -> jax.Array:
    """Rows `[T, E, ...]` at the slots of a write, in an array `[N, ...]`.

    A slice for consecutive slots, else a scatter of items; what `write` drops is left out.
    """
    if write.consecutive:
        return lax.dynamic_update_slice_in_dim(array, rows[0], write.starts[0], axis=0)
    return _put_items(array, write.slots, rows)


def put_blocks(array: jax.Array, starts: jax.Array, blocks: jax.Array) -> jax.Array:
    """Blocks `[K, W, ...]` from `starts` (int32 `[K]`) on, in an array of any length, in order.

    None where the start lies beyond the end. By slices on the CPU, where large rows cost less so.
    """

    def scatter() -> jax.Array:
        at = starts[:, None] + jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
        return array.at[at].set(blocks, mode="drop")

    one_by_one = lambda: _put_one_by_one(array, starts, blocks)
    return lax.platform_dependent(cpu=one_by_one, default=scatter)


def move(array: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Rows of an array copied to other places of it, int32 `[K]` to int32 `[K]`.

    None where the target lies beyond the end. No target may be a source.
    """
    scatter = lambda: array.at[targets].set(get(array, sources), mode="drop")
    return lax.platform_dependent(
        cpu=lambda: _move_one_by_one(array, sources, targets), default=scatter
    )


def last_of_equals(ring: Ring, slots: jax.Array) -> jax.Array:
    """The slots, int32 `[B]`; of those that stand twice, N in place of all but the last one.

    Not so on the CPU, where a scatter goes from the first to the last in any case.
    """
    return lax.platform_dependent(cpu=lambda: slots, default=lambda: distinct(ring, slots))


def distinct(ring: Ring, slots: jax.Array) -> jax.Array:
    """The same on every backend."""
    if slots.size <= _FEW:
        place = jnp.arange(slots.size, dtype=jnp.int32)
        later = (slots[:, None] == slots) & (place[:, None] < place)
        return jnp.where(later.any(axis=1), ring.capacity, slots)
    order = jnp.argsort(slots, stable=True)
    line = slots[order]
    again = jnp.concatenate([line[1:] == line[:-1], jnp.zeros(1, jnp.bool_)])
    return slots.at[order].set(jnp.where(again, ring.capacity, line))


_FEW = 512


def by_number(numbers: jax.Array, following: jax.Array, count: jax.Array) -> jax.Array:
    """The slots of items that were numbered as they came, int32 `[N]`, oldest first.

    Args:
        numbers: uint32 `[N]`, modulo 2^32.
        following: uint32 `[]`, the number of the next item.
        count: int32 `[]`, how many slots, from 0 on, hold items; the others come last.
    """
    place = jnp.arange(numbers.size, dtype=jnp.int32)
    age = jnp.where(place < count, following - numbers, 0)  # the greatest is the oldest
    return jnp.argsort(~age, stable=True).astype(jnp.int32)


def after(write: WritePlan, token: jax.Array) -> WritePlan:
    """The same write, whose slots are not known before `token`, an int32 zero."""
    return dataclasses.replace(write, starts=write.starts + token, slots=write.slots + token)


def in_line(write: WritePlan, array: jax.Array) -> WritePlan:
    """The same write; in a program for it alone, one to be made after `array` was written.

    XLA's CPU compiler hands kernels to another thread where more than nine could run at once, and
    to wake it takes longer than they do.
    """
    if not (gather.is_by_itself() and array.size):
        return write
    return after(write, dependencies.zero_after(array))


def where_after(where: SlotsForLeaf, token: jax.Array) -> SlotsForLeaf:
    """The same slots, not known before `token`; one array for leaves that had one."""
    known: dict[int, tuple[jax.Array, jax.Array]] = {}

    def later(name: str) -> jax.Array:
        slots = where(name)
        return known.setdefault(id(slots), (slots, slots + token))[1]

    return later


def get(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Whole items at slots, int32 `[...]`, all in range; to be called in `ordering.read`."""
    return gather.items_at(array, slots)


def get_runs(array: jax.Array, slots: jax.Array) -> jax.Array:
    """`get` of single elements, `[N, ...]`, at slots `[B, L]` that follow one another in a ring.

    On the CPU a run is read at once, in less than half the time of its elements. Elsewhere that was
    not measured, and programs of several devices would first bring the array together.
    """
    return lax.platform_dependent(
        array, slots, cpu=_get_slices if slots.shape[1] > 1 else get, default=get
    )


def _get_slices(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Runs that go on at slot 0 come from a copy of the last and the first L - 1 elements."""
    length, first = slots.shape[1], slots[:, 0]
    flat, wraps = array.reshape(-1), array.size - length + 1
    seam = jnp.concatenate([flat[wraps:], flat[: length - 1]])
    whole = gather.rows_from(flat, first.astype(jnp.uint32), length)
    cut = gather.rows_from(seam, (first - wraps).astype(jnp.uint32), length)
    found = jnp.where((first < wraps)[:, None], whole, cut)
    return found.reshape(*slots.shape, *array.shape[1:])


def read(array: jax.Array, slots: jax.Array) -> jax.Array:
    """Whole items at slots, int32 `[...]`, all in range, read just once."""
    return read_each((array, slots))[0]


def read_each(*pairs: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    """`read` of several arrays, each at its slots, together."""

    def few(times: int, *flat: jax.Array) -> list[bool]:
        pairs = zip(flat[::2], flat[1::2], strict=True)
        width = lambda array: math.prod(array.shape[1:])
        return [gather.is_few(array, at, width(array), times) for array, at in pairs]

    def found(times: int, *flat: jax.Array) -> list[jax.Array]:
        gets = map(functools.partial, itertools.repeat(get), flat[::2], flat[1::2])
        return gather.read(*zip(gets, few(times, *flat), strict=True))

    flat = list(itertools.chain(*pairs))
    return gather.together(any(few(1, *flat)), found, *flat)


def _put_items(leaf: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows `[T, E, ...]` at slots, int32 `[T, E]`; those of N are left out."""
    items = rows.reshape(slots.size, *rows.shape[2:])
    return leaf.at[slots.reshape(-1)].set(items, mode="drop")


@jax.custom_batching.custom_vmap
def _put_one_by_one(leaf: jax.Array, starts: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows `[T, E, ...]` at the slots from `starts` (int32 `[T]`) on, by slices; none where N."""
    kept = (starts < leaf.shape[0]).astype(jnp.int32)

    def put(t: jax.Array, leaf: jax.Array) -> jax.Array:
        write = lambda _, leaf: lax.dynamic_update_slice_in_dim(leaf, rows[t], starts[t], axis=0)
        return dependencies.loop(kept[t], write, leaf)  # once, or not at all

    return dependencies.loop(rows.shape[0], put, leaf)


@jax.custom_batching.custom_vmap
def _move_one_by_one(leaf: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    kept = (targets < leaf.shape[0]).astype(jnp.int32)

    def move(k: jax.Array, leaf: jax.Array) -> jax.Array:
        def one(_: jax.Array, leaf: jax.Array) -> jax.Array:
            row = lax.dynamic_slice_in_dim(leaf, sources[k], 1, axis=0)
            return lax.dynamic_update_slice_in_dim(leaf, row, targets[k], axis=0)

        return dependencies.loop(kept[k], one, leaf)

    return dependencies.loop(targets.size, move, leaf)


@_move_one_by_one.def_vmap
def _move_many(
    size: int, batched: list, leaf: jax.Array, sources: jax.Array, targets: jax.Array
) -> Any:
    """Many buffers are one long one."""
    leaf, sources, targets = _batched(size, batched, leaf, sources, targets)
    flat, sources, targets = _flat(size, leaf, sources, targets)
    return _move_one_by_one(flat, sources, targets).reshape(leaf.shape), True


@_put_one_by_one.def_vmap
def _put_many(size: int, batched: list, leaf: jax.Array, starts: jax.Array, rows: jax.Array) -> Any:
    """Many buffers are one long one: a slice at an index of a batch would become a scatter."""
    leaf, starts, rows = _batched(size, batched, leaf, starts, rows)
    flat, starts = _flat(size, leaf, starts)
    flat = _put_one_by_one(flat, starts, rows.reshape(starts.size, *rows.shape[2:]))
    return flat.reshape(leaf.shape), True


def _batched(size: int, batched: list, *arrays: jax.Array) -> list[jax.Array]:
    """All arrays with an axis for the buffers."""
    return [
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip(arrays, batched, strict=True)
    ]


def _flat(size: int, leaf: jax.Array, *indices: jax.Array) -> list[jax.Array]:
    """The array of all buffers in a row, and indices into it; those beyond its end stay so."""
    length = leaf.shape[1]
    if size * length >= 2**31:
        raise ValueError(
            f"vmap: expected {leaf.dtype} leaves of fewer than 2^31 slots, got {size} buffers "
            f"of {length}. Use fewer buffers, or a dtype that NumPy has."
        )
    first = jnp.arange(size, dtype=jnp.int32)[:, None] * length
    inside = [jnp.where(at < length, at + first, size * length).reshape(-1) for at in indices]
    return [leaf.reshape(size * length, *leaf.shape[2:]), *inside]
