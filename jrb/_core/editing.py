"""Edits items in place (`set`, `map`), and updates the unit and the sampler to match.

N capacity, E environments, R = N / E rows, B batch. Called by `jrb._core.eager`, inside `jit` and
outside. An edit of leaves that mark ends of episodes rebuilds the unit from all rows; so does an
edit of observations that several rows share.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import draw_limits, steps
from jrb._core.steps import context_of
from jrb._util import casting, pytree
from jrb._xla import compiling, dependencies
from jrb._xla.compiling import by_description
from jrb.keys import episode_changes, path_name
from jrb.ring import Occupancy, Ring
from jrb.state import Buffer, BufferState, Sample
from jrb.types import Context, Item, SlotsForLeaf, WritePlan

Values = dict[str, jax.Array]
"""A dict from the names of leaves to their new values, `[B, ...]`."""

# An odd number without a pattern, from the golden ratio.
_ODD = np.uint32(0x9E3779B1)


def _slots_to_edit(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array
) -> tuple[BufferState, jax.Array]:
    """Returns the state and the slots to edit, int32 `[B]`; N for empty or overwritten slots."""
    ring = buffer.ring
    if isinstance(where, Sample):
        # Writes to the returned state wait for the reads of the sample.
        state, slots, is_held = steps.target_slots(buffer, state, where)
    else:
        slots, held = where, buffer.writer.held(ring, state.writer)
        inside = (slots >= 0) & (slots < ring.capacity)
        is_held = inside & held.holds(ring, jnp.where(inside, slots, 0))
    return state, jnp.where(is_held, slots, ring.capacity)


@by_description()
def plan_edit(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array, values: Values
) -> BufferState:
    """Returns the edited state of compiled parts, with the slots that the host has to edit."""
    _, slots = _slots_to_edit(buffer, state, where)
    return _edit_items(buffer, state, slots, values)


@by_description()
def edit(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array | None, values: Values
) -> BufferState:
    """Sets leaves of the items at `where`; None means all slots, with values `[N, ...]`."""
    context, slots = context_of(buffer, state.writer), None
    if where is not None:
        state, slots = _slots_to_edit(buffer, state, where)
        # Accelerators scatter in any order, so only the last of equal slots is kept.
        slots = buffer.ring.last_of_equals(slots)
    if buffer.storage.shares(context, state.storage, frozenset(values)):
        return _rewrite_all_rows(buffer, context, state, slots, values)
    # Ends without a flag are known only to the unit: read them before the flags change.
    before = cuts(buffer, state) if flags(buffer, state) & set(values) else None
    state = _edit_items(buffer, state, slots, values)
    return state if before is None else with_ends(buffer, state, before)


@by_description("function", "batch_size")
def rewrite(
    buffer: Buffer, state: BufferState, function: Callable[[Item], Values], batch_size: int
) -> BufferState:
    """Replaces leaves of all held items by those that `function` returns for B items at a time."""
    context = context_of(buffer, state.writer)
    ring, held, capacity = context.ring, context.held, buffer.capacity
    # The loop covers all N ranks: the number of held items is not known at compile time.
    trips = -(-capacity // batch_size)

    def compute_values(number: jax.Array, state: BufferState) -> tuple[jax.Array, Values]:
        # Entries beyond the held items read some slot, and write to slot N, which is dropped.
        rank = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        slots = held.nth(ring, jnp.minimum(rank, capacity - 1))
        values = compiling.unify_arguments(function(steps.take(buffer, state, slots)))
        return jnp.where(rank < held.size, slots, capacity), values

    names = frozenset(jax.eval_shape(compute_values, 0, state)[1])
    if buffer.storage.shares(context, state.storage, names):
        # All rows are written again at once, so compute the values of all batches first.
        slots, values = jax.lax.map(lambda number: compute_values(number, state), jnp.arange(trips))
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        return _rewrite_all_rows(buffer, context, state, flat(slots), jax.tree.map(flat, values))
    before = cuts(buffer, state) if flags(buffer, state) & set(names) else None

    def edit_batch(number: jax.Array, state: BufferState) -> BufferState:
        slots, values = compute_values(number, state)
        # The write waits for the reads; otherwise XLA could copy the storage in each turn.
        token = dependencies.zero_depending_on(values)
        return _edit_items(buffer, state, slots, values, token)

    state = dependencies.loop(trips, edit_batch, state)
    return state if before is None else with_ends(buffer, state, before)


def _edit_items(
    buffer: Buffer, state: BufferState, slots: jax.Array | None, values: Values, token: Any = 0
) -> BufferState:
    """Edits items once `token` is known, and changes `state.edits`, so that a save notices it."""
    context = context_of(buffer, state.writer)
    later = None if slots is None else slots + token
    storage = buffer.storage.edit(context, state.storage, later, values)
    return state.replace(storage=storage, edits=_hash_edit(state, slots, values))


def _hash_edit(state: BufferState, slots: jax.Array | None, values: Values) -> jax.Array:
    """Returns the next `state.edits`: a hash of all edits so far, which saves compare."""
    # The 1 makes a difference even if all slots and values are 0.
    edits = state.edits * _ODD + np.uint32(1)
    for leaf in [*values.values()] if slots is None else [slots, *values.values()]:
        words = jax.random.key_data(leaf) if casting.is_keys(leaf.dtype) else leaf
        total = jnp.uint32(0)
        if words.size:
            # Hash some bits of the first element of each row, with its position.
            first = words.reshape(words.shape[0], -1)[:, 0]
            bits = jax.vmap(dependencies.some_bits)(first[:, None]).astype(jnp.uint32)
            position = jnp.arange(1, first.size + 1, dtype=jnp.uint32)
            total = jnp.sum(position * bits * _ODD, dtype=jnp.uint32)
        edits = edits * _ODD + total
    return edits


# Ends of episodes.


def flags(buffer: Buffer, state: BufferState) -> set[str]:
    """Returns the names of leaves that mark ends of episodes; none if the unit ignores ends."""
    if buffer.unit.one_row:
        return set()
    number = buffer.keys.episode
    names = set() if number is None else {path_name(number)}
    return names | set(buffer.keys.flags(buffer.storage.spec(state.storage)))


def _all_rows(ring: Ring, held: Occupancy) -> WritePlan:
    """Returns the plan of a write of all rows that are held, oldest first."""
    slots, num_rows = held.oldest(ring, ring.rows), held.rows(ring)
    # The plan has all R rows, as their number is static; those beyond the held ones are masked.
    written = jnp.arange(ring.rows, dtype=jnp.int32)[:, None] < num_rows
    # If environments have clocks of their own, each has its own number of rows.
    each = held.streams > 1
    written = written if each else written[:, 0]
    return WritePlan(
        starts=slots.reshape(-1) if each else slots[:, 0],
        slots=slots,
        written=written,
        passed=jnp.cumsum(written, axis=0, dtype=jnp.int32),
        expired=jnp.zeros(written.shape[1:], jnp.int32),
        consecutive=False,
    )


def slots_by_name(context: Context, names: Iterable[str] | None) -> SlotsForLeaf:
    """Returns the slots at which the leaves in `names` are read completely, and others not at all.

    These are all slots, `[R, E]`, oldest row first, or no slots, `[R, E, 0]`; None for all leaves.
    """
    slots = context.held.from_oldest(context.ring)
    none = slots[:, :, None][:, :, :0]
    return lambda name: slots if names is None or name in names else none


@by_description("names")
def locate_leaves(buffer: Buffer, state: BufferState, names: frozenset[str]) -> Any:
    """Returns where a storage on the host reads all slots `[R, E]` of some leaves."""
    context, storage = context_of(buffer, state.writer), buffer.storage
    return storage.locate(context, state.storage, slots_by_name(context, names))


@by_description()
def cuts(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns which rows end an episode although no flag says so, bool `[R, E]`."""
    context = context_of(buffer, state.writer)
    slots = context.held.from_oldest(context.ring)
    names, over = flags(buffer, state), buffer.unit.is_episode_end(context, state.unit, slots)
    items = buffer.storage.read(context, state.storage, slots_by_name(context, names))
    return over & ~flagged_ends(buffer, context, items) if names else over


def flagged_ends(buffer: Buffer, context: Context, items: Item) -> jax.Array:
    """Returns which rows of `items`, leaves `[R, E, ...]`, end an episode by their flags."""
    every = _all_rows(context.ring, context.held)
    if buffer.keys.episode is not None:
        # A row whose successor has another episode number ends an episode. Nothing precedes the
        # oldest row, so it is compared with itself.
        first = buffer.keys.get(items, "episode")[0].reshape(-1)
        changes = episode_changes(items, buffer.keys, every.written_by_clock, first)
        every = dataclasses.replace(every, cuts=changes[0])
    return every.episode_ends(context.keys, items)


@by_description()
def with_ends(buffer: Buffer, state: BufferState, cuts: jax.Array) -> BufferState:
    """Rebuilds unit and sampler from the new flags, and from ends without a flag, `cuts`."""
    context = context_of(buffer, state.writer)
    where = slots_by_name(context, flags(buffer, state))
    items = buffer.storage.read(context, state.storage, where)
    plan = _all_rows(context.ring, context.held)
    return _rebuild_index(buffer, context, state, items, cuts, plan)


def _rebuild_index(
    buffer: Buffer,
    context: Context,
    state: BufferState,
    items: Item,
    cuts: jax.Array,
    plan: WritePlan,
) -> BufferState:
    """Rebuilds unit and sampler from all rows; `context` is from before the edit.

    `items` has at least the flags, leaves `[R, E, ...]`, oldest row first. `cuts`, bool `[R, E]`,
    are ends of episodes without a flag. `plan` is `_all_rows`, perhaps without the oldest rows.
    """
    ring, unit = context.ring, buffer.unit
    token = dependencies.zero_depending_on((items, cuts))
    # The oldest row may be in the middle of an episode, whose first rows are gone.
    before = unit.episode_step(state.unit, context.held.from_oldest(ring)[0])
    # Everything is written again into an emptied unit, in the memory of the old one.
    blank = unit.reset(ring, state.unit, token)
    if before is not None:
        blank = unit.init_mid_episode(blank, jnp.where(context.held.rows(ring) > 0, before, 0))
    if state.numbers is not None:
        changes = episode_changes(items, buffer.keys, plan.written_by_clock, state.numbers)
        cuts, state = cuts | changes[0], state.replace(numbers=changes[2])
    plan = dataclasses.replace(plan, cuts=cuts)
    empty = dataclasses.replace(context, held=context.held.empty())
    after, change = unit.on_write(empty, blank, plan, items)
    old = unit.anchors(context, state.unit)
    new = unit.anchors(context_of(buffer, state.writer), after)
    state = state.replace(unit=after)
    # If every held slot is an anchor before and after, the anchors are the same.
    if old.all_held and new.all_held and plan.bounded:
        return state
    sampler = buffer.sampler.rebuild_index(ring, state.sampler, change.entered, old, new)
    if buffer.sampler.max_draws is not None:
        is_anchor = jnp.zeros(ring.capacity, jnp.bool_).at[change.entered].set(True, mode="drop")
        sampler = draw_limits.rebuild(buffer, sampler, is_anchor)
    return state.replace(sampler=sampler)


def _rewrite_all_rows(
    buffer: Buffer, context: Context, state: BufferState, slots: jax.Array | None, values: Values
) -> BufferState:
    """Edits observations that several rows share: reads, edits and rewrites all rows."""
    ring = context.ring
    slots = jnp.arange(ring.capacity, dtype=jnp.int32) if slots is None else slots
    safe = jnp.minimum(slots, ring.capacity - 1)
    # The items are read oldest first, so the item of a slot is at the rank of the slot.
    at = jnp.where(slots < ring.capacity, context.held.rank(ring, safe), ring.capacity)
    items = buffer.storage.read(context, state.storage, slots_by_name(context, None))
    before = jnp.zeros((ring.rows, ring.envs), jnp.bool_)
    if not buffer.unit.one_row:
        before = cuts(buffer, state)

    def set_values(path: tuple, leaf: jax.Array) -> jax.Array:
        new = values.get(pytree.leaf_name(path))
        if new is None:
            return leaf
        flat = leaf.reshape(ring.capacity, *leaf.shape[2:])
        return flat.at[at].set(new, mode="drop").reshape(leaf.shape)

    items = jax.tree_util.tree_map_with_path(set_values, items)
    # Write them into the emptied storage, once all have been read. It may then have no room for
    # some of the oldest rows.
    blank = buffer.storage.reset(ring, state.storage, dependencies.zero_depending_on(items))
    empty = dataclasses.replace(context, held=context.held.empty())
    storage, plan = buffer.storage.write(empty, blank, _all_rows(ring, context.held), items)
    writer = buffer.writer.evict_oldest(ring, state.writer, plan.expired)
    state = state.replace(storage=storage, writer=writer, edits=_hash_edit(state, slots, values))
    return _rebuild_index(buffer, context, state, items, before, plan)
