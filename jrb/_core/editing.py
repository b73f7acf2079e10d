"""Items that are edited in place, and what parts learn of it.

N capacity, E environments, R = N / E rows, B batch. Called by `jrb._core.eager`, inside `jit`
and outside.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import episode_ends, rows, steps
from jrb._core.steps import context_of
from jrb._util import pytree
from jrb._xla import compiling, dependencies
from jrb._xla.compiling import by_description
from jrb.keys import path_name
from jrb.ring import Occupancy, Ring
from jrb.state import Buffer, BufferState, Sample
from jrb.types import Context, Item, WritePlan

Values = dict[str, jax.Array]
"""From names of leaves to what they become, `[B, ...]`."""


def editable_slots(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array
) -> tuple[BufferState, jax.Array]:
    """Returns slots to edit, int32 `[B]`; N where nothing is held, or something else by now.

    Writes to the state that comes with them wait for what the sample was read from.
    """
    ring = buffer.ring
    if isinstance(where, Sample):
        state, slots, ok = steps.target_slots(buffer, state, where)
    else:
        slots, held = where, buffer.writer.held(ring, state.writer)
        inside = (slots >= 0) & (slots < ring.capacity)
        safe = jnp.where(inside, slots, 0)
        ok = inside & (held.holds(ring, safe))
    return state, jnp.where(ok, slots, ring.capacity)


@by_description()
def edit_outside(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array, values: Values
) -> tuple[jax.Array, BufferState]:
    """Returns the slots to edit on the host, and the state without these items."""
    _, slots = editable_slots(buffer, state, where)
    context = context_of(buffer, state.writer)
    storage = buffer.storage.edit(context, state.storage, slots, values)
    return slots, _edited(state.replace(storage=storage), slots, values)


@by_description()
def edit(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array | None, values: Values
) -> BufferState:
    """Sets leaves of held items; of all slots, `[N, ...]`, where `where` is None."""
    context = context_of(buffer, state.writer)
    slots = None
    if where is not None:
        state, slots = editable_slots(buffer, state, where)
        slots = rows.last_of_equals(buffer.ring, slots)
    if buffer.storage.shares(context, state.storage, frozenset(values)):
        return _written_anew(buffer, context, state, slots, values)
    before = cuts(buffer, state) if changes_ends(buffer, state, values) else None
    storage = buffer.storage.edit(context, state.storage, slots, values)
    state = _edited(state.replace(storage=storage), slots, values)
    return state if before is None else with_ends(buffer, state, before)


def _edited(state: BufferState, slots: jax.Array | None, values: Values) -> BufferState:
    """Returns the state that says that items were edited.

    The number tells one history of edits from another, so that a save knows when to compare.
    """
    mixed = state.edits * _ODD + np.uint32(1)
    for leaf in [*values.values()] if slots is None else [slots, *values.values()]:
        mixed = mixed * _ODD + jnp.sum(_first_words(leaf) * _ODD, dtype=jnp.uint32)
    return state.replace(edits=mixed)


_ODD = np.uint32(0x9E3779B1)  # of no pattern: the golden ratio's


def _first_words(leaf: jax.Array) -> jax.Array:
    """Returns some bits of the first element of each row `[B, ...]`, uint32 `[B]`."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not leaf.size:
        return jnp.zeros(leaf.shape[:1], jnp.uint32)
    first = leaf.reshape(leaf.shape[0], -1)[:, 0]
    place = jnp.arange(1, first.size + 1, dtype=jnp.uint32)
    return place * jax.vmap(dependencies.some_bits)(first[:, None]).astype(jnp.uint32)


def flags(buffer: Buffer, state: BufferState) -> set[str]:
    """Returns the leaves by which a unit tells ends of episodes; none if it asks for none."""
    if buffer.unit.one_row:
        return set()
    number = buffer.keys.episode
    names = set() if number is None else {path_name(number)}
    return names | set(buffer.keys.flags(buffer.storage.spec(state.storage)))


def changes_ends(buffer: Buffer, state: BufferState, values: Iterable[str]) -> bool:
    """Returns if there are leaves among `values`, names, that tell the unit ends of episodes."""
    return bool(flags(buffer, state) & set(values))


def all_rows(ring: Ring, held: Occupancy) -> WritePlan:
    """Returns the plan of a write of all rows that are held, oldest first."""
    slots, rows_held = held.oldest(ring, ring.rows), held.rows(ring)
    here = jnp.arange(ring.rows, dtype=jnp.int32)[:, None] < rows_held
    each = held.streams > 1
    here = here if each else here[:, 0]
    return WritePlan(
        starts=slots.reshape(-1) if each else slots[:, 0],
        slots=slots,
        written=here,
        passed=jnp.cumsum(here, axis=0, dtype=jnp.int32),
        expired=jnp.zeros(here.shape[1:], jnp.int32),
        consecutive=False,
    )


def leaves_of(buffer: Buffer, context: Context, state: BufferState, names: set[str] | None) -> Item:
    """Reads leaves of all slots, `[R, E, ...]`, from the oldest row on; others are empty."""
    slots = context.held.from_oldest(context.ring)
    none = slots[:, :, None][:, :, :0]
    where = lambda name: slots if names is None or name in names else none
    return buffer.storage.read(context, state.storage, where)


@by_description("names", "wanted")
def places_of(
    buffer: Buffer, state: BufferState, names: tuple[str, ...], wanted: frozenset[str]
) -> tuple[jax.Array, Any]:
    """Returns all slots `[R, E]`, and where leaves of these names are read on the host."""
    context = context_of(buffer, state.writer)
    slots = context.held.from_oldest(context.ring)
    where = [slots if name in wanted else slots[:, :, None][:, :, :0] for name in names]
    return slots, buffer.storage.locate(context, state.storage, where)


@by_description()
def cuts(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns the rows after which time does not go on though no flag says so, bool `[R, E]`."""
    context = context_of(buffer, state.writer)
    slots = context.held.from_oldest(context.ring)
    names, over = flags(buffer, state), buffer.unit.is_episode_end(context, state.unit, slots)
    items = leaves_of(buffer, context, state, names)
    return over & ~flagged_ends(buffer, context, items) if names else over


def flagged_ends(buffer: Buffer, context: Context, items: Item) -> jax.Array:
    """Returns the rows that end an episode by their flags; of leaves `[R, E, ...]`."""
    every = all_rows(context.ring, context.held)
    if buffer.keys.episode is not None:
        first = buffer.keys.get(items, "episode")[0].reshape(-1)
        found = episode_ends.changes(items, buffer.keys, every.times[0], first)
        every = dataclasses.replace(every, cuts=found[0])
    return episode_ends.ending(context, every, items)


@by_description()
def with_ends(buffer: Buffer, state: BufferState, cuts: jax.Array) -> BufferState:
    """Rebuilds unit and sampler from the ends that the flags tell now, and cuts."""
    context = context_of(buffer, state.writer)
    items = leaves_of(buffer, context, state, flags(buffer, state))
    return rebuild_index(buffer, context, state, items, cuts, all_rows(context.ring, context.held))


def rebuild_index(
    buffer: Buffer,
    context: Context,
    state: BufferState,
    items: Item,
    cuts: jax.Array,
    write: WritePlan,
) -> BufferState:
    """Rebuilds unit and sampler from all rows.

    Args:
        buffer: the description.
        context: of the buffer before the edit.
        state: with the edited items.
        items: at least their flags, leaves `[R, E, ...]`, oldest row first.
        cuts: bool `[R, E]`, after which of them time does not go on, whatever their flags say.
        write: `all_rows`, perhaps without some of the oldest.
    """
    ring, unit = context.ring, buffer.unit
    token = dependencies.zero_depending_on((items, cuts))
    before = unit.episode_step(state.unit, context.held.from_oldest(ring)[0])
    blank = unit.reset(ring, state.unit, token)
    if before is not None:
        blank = unit.init_mid_episode(blank, jnp.where(context.held.rows(ring) > 0, before, 0))
    if state.numbers is not None:
        found = episode_ends.changes(items, buffer.keys, write.times[0], state.numbers)
        cuts, state = cuts | found[0], state.replace(numbers=found[2])
    write = dataclasses.replace(write, cuts=cuts)
    after, change = unit.on_write(_emptied(context), blank, write, items)
    old = unit.anchors(context, state.unit)
    new = unit.anchors(context_of(buffer, state.writer), after)
    state = state.replace(unit=after)
    if old.all_held and new.all_held and write.bounded:
        return state  # the same slots as before
    sampler = buffer.sampler.rebuild_index(ring, state.sampler, change.entered, old, new)
    return state.replace(sampler=sampler)


def _emptied(context: Context) -> Context:
    """Returns the context before anything was written, in a ring that begins where it does."""
    return dataclasses.replace(context, held=context.held.emptied())


def _written_anew(
    buffer: Buffer, context: Context, state: BufferState, slots: jax.Array | None, values: Values
) -> BufferState:
    """Edits what several rows share: all is read, edited and written again."""
    ring = context.ring
    slots = jnp.arange(ring.capacity, dtype=jnp.int32) if slots is None else slots
    safe = jnp.minimum(slots, ring.capacity - 1)
    at = jnp.where(slots < ring.capacity, context.held.rank(ring, safe), ring.capacity)
    items = leaves_of(buffer, context, state, None)
    before = jnp.zeros((ring.rows, ring.envs), jnp.bool_)
    if not buffer.unit.one_row:
        before = cuts(buffer, state)

    def changed(path: tuple, leaf: jax.Array) -> jax.Array:
        new = values.get(pytree.leaf_name(path))
        if new is None:
            return leaf
        flat = leaf.reshape(ring.capacity, *leaf.shape[2:])
        return flat.at[at].set(new, mode="drop").reshape(leaf.shape)

    items = jax.tree_util.tree_map_with_path(changed, items)
    blank = buffer.storage.reset(ring, state.storage, dependencies.zero_depending_on(items))
    every = all_rows(ring, context.held)
    storage, write = buffer.storage.write(_emptied(context), blank, every, items)
    writer = buffer.writer.evict_oldest(ring, state.writer, write.expired)
    state = _edited(state.replace(storage=storage, writer=writer), slots, values)
    return rebuild_index(buffer, context, state, items, before, write)


@by_description("function", "batch_size")
def rewrite(
    buffer: Buffer, state: BufferState, function: Callable[[Item], Values], batch_size: int
) -> BufferState:
    """Puts a function from B items to `Values` over all that is held."""
    context = context_of(buffer, state.writer)
    ring, held, capacity = context.ring, context.held, buffer.capacity
    trips = -(-capacity // batch_size)

    def new(number: jax.Array, state: BufferState) -> tuple[jax.Array, Values]:
        place = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        slots = held.nth(ring, jnp.minimum(place, capacity - 1))
        values = compiling.admitted(function(steps.take(buffer, state, slots)))
        return jnp.where(place < held.size, slots, capacity), values

    names = frozenset(jax.eval_shape(new, 0, state)[1])
    if buffer.storage.shares(context, state.storage, names):
        slots, values = jax.lax.map(lambda number: new(number, state), jnp.arange(trips))
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        return _written_anew(buffer, context, state, flat(slots), jax.tree.map(flat, values))
    before = cuts(buffer, state) if changes_ends(buffer, state, names) else None

    def chunk(number: jax.Array, state: BufferState) -> BufferState:
        slots, values = new(number, state)
        later = slots + dependencies.zero_depending_on(values)
        storage = buffer.storage.edit(context, state.storage, later, values)
        return _edited(state.replace(storage=storage), slots, values)

    state = dependencies.loop(trips, chunk, state)
    return state if before is None else with_ends(buffer, state, before)
