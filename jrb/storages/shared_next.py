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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._core import columns, rows
from jrb._util import pytree
from jrb._util.pytree import Leaf
from jrb._xla import dependencies, gather
from jrb.keys import Keys, path_name
from jrb.ring import Ring
from jrb.types import AuxRead, Context, Item, SlotsForLeaf, WritePlan


class Shared(pytree.State):
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
    head: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()


def pairs(spec: Item, keys: Keys) -> dict[str, str]:
    """From leaves of the next observation to those of the observation that hold their rows."""
    named = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
    found = {name: keys.twin(name) for name in named}
    return {
        name: other
        for name, other in found.items()
        if other in named and named[name] == named[other]
    }


def is_shared(context: Context, state: Shared, names: frozenset[str]) -> bool:
    """Whether any of these leaves is an observation that is stored once."""
    found = pairs(columns.spec(state.items), context.keys)
    return bool(names & {*found.keys(), *found.values()})


def init(context: Context, spec: Item, room: int) -> Shared:
    """No items. Raises if there is nothing to share."""
    ring, keys = context.ring, context.keys
    shared = pairs(spec, keys)
    if not shared:
        raise ValueError(
            "DeviceStorage: share_next_observations: expected leaves at "
            f"'{path_name(keys.next_observation)}' like those at '{path_name(keys.observation)}', "
            f"got an item with the leaves {pytree.leaf_names(spec)}. Name them with "
            "keys=jrb.Keys(...)."
        )

    def zeros(path: tuple, leaf: Leaf) -> jax.Array:
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


def read(
    context: Context, state: Shared, where: SlotsForLeaf, lookups: Sequence[AuxRead]
) -> tuple[Item, list[jax.Array]]:
    """One gather per leaf: next observations from the array of the observations.

    Returns:
        The items, and what is looked up beside them.
    """
    shared = pairs(columns.spec(state.items), context.keys)
    named = columns.named(state.items)
    sources: dict[int, jax.Array] = {}

    def found(slots: jax.Array) -> jax.Array:
        if id(slots) not in sources:
            sources[id(slots)] = source(context, state, slots)
        return sources[id(slots)]

    at = {name: where(name) for name in named}
    at = {name: found(slots) if name in shared else slots for name, slots in at.items()}

    def get(path: tuple, column: columns.Column) -> jax.Array:
        name = pytree.leaf_name(path)
        return columns.get(named[shared.get(name, name)], at[name])

    every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=columns.is_column)
    beside = lambda: [gather.items_at(it.array, it.slots) for it in lookups]
    return dependencies.materialize(lambda: (every(get, state.items), beside()))


def source(context: Context, state: Shared, slots: jax.Array) -> jax.Array:
    """The row of the arrays of observations that holds the next observation of each slot."""
    ring, held = context.ring, context.held
    pointer = gather.read(state.pointer, slots)
    newest = held.after(ring, slots) <= 0
    tail = ring.capacity + state.owner.size + ring.env_of(slots)
    later = jnp.where(pointer < 0, ring.slot_after(slots, ring.envs), ring.capacity + pointer)
    return jnp.where(newest, tail, later)


def write(
    context: Context, state: Shared, write: WritePlan, items: Item
) -> tuple[Shared, WritePlan]:
    """One row after the other; all else at once."""
    shared = pairs(columns.spec(state.items), context.keys)
    new = {name: columns.packed(leaf) for name, leaf in columns.named(items).items()}
    old = columns.named(state.items)
    both = {name: (after, new[name], new[after]) for after, name in shared.items()}
    before = context.held.rows(context.ring)[0]
    carry = ({name: columns.array(old[name]) for name in both}, state, before)
    step = lambda t, carry: _write_row(context, write, both, t, carry)
    if write.written.size == 1:
        kept, state, rows_held = step(0, carry)
    else:
        kept, state, rows_held = dependencies.loop(write.written.size, step, carry)

    def put(path: tuple, column: columns.Column) -> columns.Column:
        name = pytree.leaf_name(path)
        if name in kept:
            return columns.with_array(column, kept[name])
        return column if name in shared else columns.put(column, write, new[name])

    items = jax.tree_util.tree_map_with_path(put, state.items, is_leaf=columns.is_column)
    return state.replace(items=items), _shortened(context, write, before + write.rows - rows_held)


def _shortened(context: Context, write: WritePlan, expired: jax.Array) -> WritePlan:
    """The write after which so many of the oldest rows are not held."""
    ring = context.ring
    stays = context.held.rows(ring)[0] + write.passed > expired
    drop = lambda slots, stays: jnp.where(stays, slots, ring.capacity)
    return WritePlan(
        starts=drop(write.starts, stays),
        slots=drop(write.slots, stays[:, None]),
        written=write.written,
        passed=write.passed,
        expired=expired,
        consecutive=write.consecutive,
        bounded=False,
    )


def _write_row(context: Context, write: WritePlan, both: Any, t: Any, carry: Any) -> Any:
    """Row t: settles the row before it, makes room in the pool, and is written.

    What was kept as the next observation of the row before is compared with the observation that
    has come. Where they are the same, it may go: the row that is written now holds it. Else it
    moves from the tail to the pool, before the tail gets the next observation of the new row.

    Args:
        context: of the buffer, before the call.
        write: the rows of the call.
        both: from the name of an observation to the name of the next one, and their rows
            `[T, E, ...]`.
        t: int32 `[]`.
        carry: the arrays of observations by name, the state, and how many rows are held.
    """
    kept, state, rows_held = carry
    ring, room, written = context.ring, state.owner.size, write.written[t]
    envs = jnp.arange(ring.envs, dtype=jnp.int32)
    tail, end = ring.capacity + room, ring.capacity + room + ring.envs  # nothing lies at the end
    waited = jnp.minimum(state.head, 0)  # zero, not known before what was read (see `ordering`)
    start, before = _slots(context, write, t)
    known = written & (rows_held > 0)
    differs = known & _any_differs([(kept[name][tail:], both[name][1][t]) for name in both])
    state, rows_held = _make_room(ring, state, start, rows_held, written, differs)
    place = state.count + jnp.cumsum(differs, dtype=jnp.int32) - 1
    entry = (state.head + place) % room
    moved = jnp.where(differs, ring.capacity + entry, end) + waited
    here = jnp.where(written, start, end) + waited
    behind = jnp.where(written, tail, end) + waited
    kept = {
        name: _put_row(kept[name], tail + envs, moved, here, one[t], behind, after[t])
        for name, (_, one, after) in both.items()
    }
    state = _settled(
        state, jnp.where(known, before, ring.capacity) + waited, before, entry, differs
    )
    return kept, state, rows_held + written.astype(jnp.int32)


def _slots(context: Context, write: WritePlan, t: Any) -> tuple[jax.Array, jax.Array]:
    """The slot at which row t begins, int32 `[]`, and those of the row before it, int32 `[E]`."""
    ring, held = context.ring, context.held
    cursor = held.next_row(ring)[0]  # of the first row of the call
    start = ring.row_after(cursor, write.passed[t] - 1 + ring.rows) * ring.envs
    return start, ring.slot_before(start, ring.envs) + jnp.arange(ring.envs, dtype=jnp.int32)


def _any_differs(pairs: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """For which environments any of these pairs of rows `[E, ...]` differs, bool `[E]`."""
    differ = lambda: jnp.any(jnp.stack([_differ(*pair) for pair in pairs]), axis=0)
    return dependencies.materialize(differ)


def _settled(
    state: Shared, known: jax.Array, before: jax.Array, entry: jax.Array, differs: jax.Array
) -> Shared:
    """The state in which the row before says where its next observations are.

    Args:
        state: with room for those that differ.
        known: int32 `[E]`, its slots, N where there is none.
        before: int32 `[E]`, its slots.
        entry: int32 `[E]`, their places in the pool.
        differs: bool `[E]`, which are there.
    """
    room, waited = state.owner.size, jnp.minimum(state.head, 0)
    owned = jnp.where(differs, entry, room) + waited
    return state.replace(
        pointer=state.pointer.at[known].set(jnp.where(differs, entry, -1), mode="drop"),
        owner=state.owner.at[owned].set(before, mode="drop"),
        count=state.count + jnp.sum(differs, dtype=jnp.int32),
    )


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
    owners = gather.read(state.owner, (state.head + first) % room)
    # How many rows older than the new one an owner is, 1 to R.
    age = (start - owners - 1 + ring.capacity) % ring.capacity // ring.envs + 1
    entries = first < state.count
    most = jnp.where(written, ring.rows - 1, ring.rows)  # rows beside the new one
    needed = state.count + jnp.sum(differs, dtype=jnp.int32) - room
    wanted = jnp.min(jnp.where(entries & (first < needed), age - 1, ring.rows))
    kept = jnp.minimum(jnp.minimum(rows_held, most), wanted)
    leaves = jnp.sum(entries & (age > kept), dtype=jnp.int32)
    head = (state.head + leaves) % room
    return state.replace(head=head, count=state.count - leaves), kept


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
