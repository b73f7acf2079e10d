"""Observations stored once: a next observation is the next row's observation, unless it differs.

N capacity, E environments, M room for last observations.

An array of observations has N + M + E rows: the ring; a pool of next observations that are not the
next row's observation; and the next observations of the newest row, whose next row is not there
yet. When a row arrives, its observations are compared, bit by bit, with those kept for the row
before; where they differ, what was kept goes to the pool. No flag is asked: this holds for
termination, truncation, automatic resets, and data that was put together. The pool is first in,
first out. Where it has no room, the oldest rows leave, up to the one whose entry is needed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb import columns, order, pytree, rows
from jrb.keys import Keys, path_name
from jrb.ring import Held, Ring
from jrb.types import Item, Where, Write


@pytree.state
class Shared:
    """Items whose next observations are shared with their successors.

    Attributes:
        items: as in a plain storage; observations have N + M + E rows, next observations none.
        pointer: int32 `[N]`, where in the pool a slot's next observation is; -1 for nowhere.
        owner: int32 `[M]`, the slot that each entry of the pool is for.
        head: int32 `[]`, the oldest entry.
        count: int32 `[]`, the entries.
    """

    items: Item
    pointer: jax.Array
    owner: jax.Array
    head: jax.Array
    count: jax.Array


def pairs(spec: Item, keys: Keys) -> dict[str, str]:
    """From leaves of the next observation to those of the observation that hold their rows."""
    named = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
    found = {name: keys.twin(name) for name in named}
    return {
        name: other
        for name, other in found.items()
        if other in named and named[name] == named[other]
    }


def init(ring: Ring, spec: Item, keys: Keys, room: int) -> Shared:
    """No items. Raises if there is nothing to share."""
    shared = pairs(spec, keys)
    if not shared:
        raise ValueError(
            f"DeviceStorage: once: expected leaves at '{path_name(keys.next_observation)}' like "
            f"those at '{path_name(keys.observation)}', got an item with the leaves "
            f"{pytree.leaf_names(spec)}. Name them with keys=jrb.Keys(...)."
        )

    def zeros(path: tuple, leaf: Any) -> jax.Array:
        name = pytree.leaf_name(path)
        more = room + ring.envs if name in shared.values() else 0
        return columns.room(0 if name in shared else ring.capacity + more, leaf)

    return Shared(
        items=jax.tree_util.tree_map_with_path(zeros, spec),
        pointer=jnp.full(ring.capacity, -1, jnp.int32),
        owner=jnp.zeros(room, jnp.int32),
        head=jnp.zeros((), jnp.int32),
        count=jnp.zeros((), jnp.int32),
    )


def read(ring: Ring, state: Shared, held: Held, where: Where, shared: dict[str, str]) -> Item:
    """One gather per leaf: next observations from the array of the observations."""
    named = columns.named(state.items)
    sources: dict[int, jax.Array] = {}

    def source(slots: jax.Array) -> jax.Array:
        if id(slots) not in sources:
            sources[id(slots)] = _source(ring, state, held, slots)
        return sources[id(slots)]

    at = {name: where(name) for name in named}
    at = {name: source(slots) if name in shared else slots for name, slots in at.items()}

    def get(path: tuple, column: columns.Column) -> jax.Array:
        del column
        name = pytree.leaf_name(path)
        return columns.get(named[shared.get(name, name)], at[name])

    every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=columns.is_column)
    return order.once(lambda: every(get, state.items))


def _source(ring: Ring, state: Shared, held: Held, slots: jax.Array) -> jax.Array:
    """The row of the arrays of observations that holds the next observation of each slot."""
    pointer = order.once(lambda: rows.get(state.pointer, slots))
    newest = ring.place(held, slots) >= held.count - ring.envs
    tail = ring.capacity + state.owner.size + slots % ring.envs
    later = jnp.where(pointer < 0, ring.slot_after(slots, ring.envs), ring.capacity + pointer)
    return jnp.where(newest, tail, later)


def write(
    ring: Ring, state: Shared, held: Held, write: Write, items: Item, shared: dict[str, str]
) -> tuple[Shared, Write]:
    """One row after the other; all else at once."""
    new = {name: columns.packed(leaf) for name, leaf in columns.named(items).items()}
    old = columns.named(state.items)
    kept = {name: columns.array(old[name]) for name in shared.values()}
    step = lambda t, carry: _write_row(ring, held, write, new, shared, t, carry)
    carry = (kept, state, held.count // ring.envs)
    if write.written.size == 1:
        kept, state, rows_held = step(0, carry)
    else:
        kept, state, rows_held = order.loop(write.written.size, step, carry)
    gone = held.count // ring.envs + write.rows - rows_held

    def put(path: tuple, column: columns.Column) -> columns.Column:
        name = pytree.leaf_name(path)
        if name in kept:
            return columns.with_array(column, kept[name])
        return column if name in shared else columns.put(column, write, new[name])

    items = jax.tree_util.tree_map_with_path(put, state.items, is_leaf=columns.is_column)
    state = state.replace(items=items)  # pyright: ignore
    return state, _shortened(ring, held, write, gone)


def _shortened(ring: Ring, held: Held, write: Write, gone: jax.Array) -> Write:
    """The write after which so many of the oldest rows are not held."""
    stays = held.count // ring.envs + write.passed > gone
    drop = lambda slots, stays: jnp.where(stays, slots, ring.capacity)
    return Write(
        starts=drop(write.starts, stays),
        slots=drop(write.slots, stays[:, None]),
        written=write.written,
        passed=write.passed,
        gone=gone,
        consecutive=write.consecutive,
        bounded=False,
    )


def _write_row(
    ring: Ring,
    held: Held,
    write: Write,
    new: dict[str, jax.Array],
    shared: dict[str, str],
    t: Any,
    carry: tuple[dict[str, jax.Array], Shared, jax.Array],
) -> tuple[dict[str, jax.Array], Shared, jax.Array]:
    """Row t: settles the row before it, makes room in the pool, and is written."""
    kept, state, rows_held = carry
    room, envs, capacity = state.owner.size, ring.envs, ring.capacity
    end = capacity + room + envs  # beyond all rows
    now, written = write.passed[t], write.written[t]
    cursor = ring.slot_after(held.first, held.count) // envs  # of the first row of the call
    waited = jnp.minimum(state.head, 0)  # zero, not known before what was read (see `order`)
    start = (cursor + now - 1) % ring.rows * envs
    before = ring.slot_before(start, envs) + jnp.arange(envs, dtype=jnp.int32)
    known = written & (rows_held > 0)
    tail = capacity + room + jnp.arange(envs, dtype=jnp.int32)
    differs = known & order.once(
        lambda: jnp.any(
            jnp.stack([_differ(kept[name][capacity + room :], new[name][t]) for name in kept]),
            axis=0,
        )
    )
    state, rows_held = _make_room(ring, state, start, rows_held, written, differs)
    place = state.count + jnp.cumsum(differs, dtype=jnp.int32) - 1
    entry = (state.head + place) % room
    kept = {
        name: _put_row(
            kept[name],
            tail,
            jnp.where(differs, capacity + entry, end) + waited,
            jnp.where(written, start, end) + waited,
            new[name][t],
            jnp.where(written, capacity + room, end) + waited,
            new[after][t],
        )
        for after, name in shared.items()
    }
    state = state.replace(  # pyright: ignore
        pointer=state.pointer.at[jnp.where(known, before, capacity) + waited].set(
            jnp.where(differs, entry, -1), mode="drop"
        ),
        owner=state.owner.at[jnp.where(differs, entry, room) + waited].set(before, mode="drop"),
        count=state.count + jnp.sum(differs, dtype=jnp.int32),
    )
    return kept, state, rows_held + written.astype(jnp.int32)


def _put_row(
    array: jax.Array,
    tail: jax.Array,
    entries: jax.Array,
    start: jax.Array,
    here: jax.Array,
    last: jax.Array,
    after: jax.Array,
) -> jax.Array:
    """Last observations into the pool, observations into the ring, the next ones behind it."""
    stop = lax.stop_gradient
    array = rows.move(array, tail, entries)
    array = rows.put_blocks(array, start[None], stop(here)[None])
    return rows.put_blocks(array, last[None], stop(after)[None])


def _make_room(
    ring: Ring,
    state: Shared,
    start: jax.Array,
    rows_held: jax.Array,
    written: jax.Array,
    differs: jax.Array,
) -> tuple[Shared, jax.Array]:
    """Rows leave that the new one overwrites, or whose entries it needs; and so do entries.

    Args:
        ring: the ring's shape.
        state: before the row.
        start: int32 `[]`, the slot of the new row.
        rows_held: int32 `[]`, before the row.
        written: bool `[]`, whether there is a new row.
        differs: bool `[E]`, what it needs.

    Returns:
        The state, and how many rows are still held.
    """
    room = state.owner.size
    first = jnp.arange(min(3 * ring.envs, room), dtype=jnp.int32)
    owners = order.once(lambda: rows.get(state.owner, (state.head + first) % room))
    # How many rows older than the new one an owner is, 1 to R.
    age = (start - owners - 1 + ring.capacity) % ring.capacity // ring.envs + 1
    entries = first < state.count
    most = jnp.where(written, ring.rows - 1, ring.rows)  # rows beside the new one
    needed = state.count + jnp.sum(differs, dtype=jnp.int32) - room
    wanted = jnp.min(jnp.where(entries & (first < needed), age - 1, ring.rows))
    kept = jnp.minimum(jnp.minimum(rows_held, most), wanted)
    leaves = jnp.sum(entries & (age > kept), dtype=jnp.int32)
    head = (state.head + leaves) % room
    return state.replace(head=head, count=state.count - leaves), kept  # pyright: ignore


def _differ(one: jax.Array, other: jax.Array) -> jax.Array:
    """Which rows `[E, ...]` differ in any bit, bool `[E]`."""
    one, other = _integers(one), _integers(other)
    return jnp.any((one != other).reshape(one.shape[0], -1), axis=1)


def _integers(leaf: jax.Array) -> jax.Array:
    """The bits of a leaf as numbers that are equal only to themselves."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.stack([_integers(leaf.real), _integers(leaf.imag)], axis=-1)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        width = jnp.finfo(leaf.dtype).bits
        return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}"))
    return leaf
