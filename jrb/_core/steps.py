"""The methods of a buffer as compiled steps: how the parts of a buffer work together.

`jrb._core.eager` calls them outside `jit`. Inside `jit` they are traced into the user's program.
B batch, T time, E environments, N capacity.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._core import transforming
from jrb._xla import dependencies, gather
from jrb._xla.compiling import by_description
from jrb.keys import episode_changes
from jrb.ring import Ring
from jrb.state import Buffer, BufferState, Sample, origin_of
from jrb.types import (
    Context,
    Draw,
    DrawCounts,
    IncomingPriorities,
    Item,
    OrderedSampler,
    ShardedSampler,
    ShardStats,
    SlotsForLeaf,
    TransformContext,
    Unit,
    WritePlan,
    Writer,
)
from jrb.types.messages import PartState, put_rows
from jrb.types.sampler import missing_method


def context_of(buffer: Buffer, writer: PartState) -> Context:
    """Returns what the parts may know of a buffer whose writer has this state."""
    held = buffer.writer.held(buffer.ring, writer)
    return Context(buffer.ring, buffer.keys, held, _reads_windows(buffer.unit))


@functools.lru_cache(maxsize=1024)
def _reads_windows(unit: Unit) -> bool:
    return unit.row_steps is not None


@functools.partial(jax.jit, static_argnums=(0, 1))
def in_order(writer: Writer, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
    """Returns all slots, int32 `[N]`, those with items first, oldest first; and their number."""
    return writer.in_order(ring, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def holds(writer: Writer, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
    """Returns for slots, int32 `[K]`, if they hold items, bool `[K]`."""
    return writer.held(ring, state).holds(ring, slots)


# Writes.


@by_description()
def write(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    cuts: jax.Array | None = None,
    priorities: jax.Array | None = None,
) -> BufferState:
    """Writes items: plan the slots, put the rows there, update unit and sampler.

    Args:
        buffer: the description.
        state: a state of it.
        items: leaves `[T, E, ...]`, or `[T, ...]` without `num_envs`.
        mask: bool `[T]` or `[T, E]`; None writes all.
        cuts: bool `[T, E]`, items after which time does not go on, whatever their flags say.
        priorities: float32 `[T, E]`; None for those of new items.
    """
    if buffer.num_envs is None:
        items = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 1), items)
    ring, context = buffer.ring, context_of(buffer, state.writer)
    if buffer.writer.blocks_when_full:
        # Rows for which an item would have to go that was not drawn yet are masked out.
        length = jax.tree.leaves(items)[0].shape[0]
        mask = jnp.ones(length, jnp.bool_) if mask is None else mask
        mask = mask & (jnp.cumsum(mask, dtype=jnp.int32) <= room(buffer, state))
    # Every part gets this one plan, so that they cannot disagree about slots or order.
    writer, plan = buffer.writer.plan(ring, state.writer, items, mask)
    storage, plan = buffer.storage.write(context, state.storage, plan, items)
    if not plan.bounded:
        # The storage let more of the oldest rows go than the writer had planned.
        num_rows = context.held.rows(ring).reshape(plan.expired.shape)
        extra = plan.expired - jnp.maximum(num_rows + plan.rows - ring.rows, 0)
        writer = buffer.writer.evict_oldest(ring, writer, extra)
    state = state.replace(storage=storage)
    if isinstance(state.sampler, DrawCounts) and state.sampler.draws is not None:
        none = jnp.zeros(plan.slots.shape, jnp.int32)  # new items were drawn 0 times
        draws = put_rows(state.sampler.draws, plan, none)
        state = state.replace(sampler=state.sampler.replace(draws=draws))
    if state.numbers is not None:
        # Items carry the number of their episode: another number ends the one before.
        changes, ended, numbers = episode_changes(
            items, buffer.keys, plan.written_by_clock, state.numbers
        )
        state = _truncated(buffer, context, state, ended & (context.held.rows(ring) > 0))
        state, cuts = state.replace(numbers=numbers), changes if cuts is None else changes | cuts
    # From here on, units and transforms also see the ends that no flag tells of.
    plan = dataclasses.replace(plan, cuts=cuts)
    if state.transforms:
        learned = transforming.learned(buffer.transforms, state.transforms, context, items, plan)
        state = state.replace(transforms=learned)
    incoming = IncomingPriorities(
        slots=plan.slots.reshape(-1),
        row_mask=plan.written_by_clock,
        priorities=None if priorities is None else priorities.astype(jnp.float32).reshape(-1),
        first_slot=plan.starts[0] if plan.consecutive else None,
    )
    return _indexed(buffer, context, state, writer, plan, items, incoming)


def _indexed(
    buffer: Buffer,
    context: Context,
    state: BufferState,
    writer: PartState,
    plan: WritePlan,
    items: Item,
    incoming: IncomingPriorities | None = None,
) -> BufferState:
    """Updates unit and sampler after a write; `context` is from before it, `writer` from after."""
    unit, change = buffer.unit.on_write(context, state.unit, plan, items)
    change = dataclasses.replace(change, incoming=incoming)
    # What departed is counted in the order before the write, the anchors are those after it.
    anchors = buffer.unit.anchors(context_of(buffer, writer), unit)
    sampler = buffer.sampler.on_write(buffer.ring, state.sampler, change, anchors)
    return state.replace(writer=writer, sampler=sampler, unit=unit)


@by_description()
def expire(buffer: Buffer, state: BufferState, items: Item, num_rows: jax.Array) -> BufferState:
    """Removes the oldest rows, int32 `[]`, or `[E]` where each environment has its own clock.

    Args:
        buffer: the description.
        state: its items are not looked at.
        items: a row that is not written, leaves `[1, E, ...]`.
        num_rows: how many.
    """
    ring, context = buffer.ring, context_of(buffer, state.writer)
    # The plan of a row that is masked: nothing is written, and the rows that leave are put in.
    writer, plan = buffer.writer.plan(ring, state.writer, items, jnp.zeros(1, jnp.bool_))
    plan = dataclasses.replace(plan, expired=num_rows, bounded=False)
    writer = buffer.writer.evict_oldest(ring, writer, num_rows)
    return _indexed(buffer, context, state, writer, plan, items)


@by_description()
def room(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns how many rows can be written before an item goes that was not drawn, int32 `[]`."""
    ring, unit, context = buffer.ring, buffer.unit, context_of(buffer, state.writer)
    anchors, held = unit.anchors(context, state.unit), context.held
    free = ring.rows - held.rows(ring)[0]
    sampler = buffer.sampler
    pending = None
    if isinstance(sampler, OrderedSampler):
        pending = sampler.num_pending(state.sampler, anchors)
    if pending is None:
        return free
    first = anchors.count - pending
    ranks = jnp.clip(jnp.stack([first, first - 1]), 0, jnp.maximum(anchors.count - 1, 0))
    slots, _ = anchors.nth(ranks, jax.random.key(0))
    row = held.before(ring, slots)
    # The rows before the first anchor that was not drawn; of all that were, up to the last one.
    drawn_rows = jnp.where(first < anchors.count, row[0], row[1] + 1)
    free_rows = drawn_rows - unit.lookback - (unit.max_entry_delay or 0)
    return free + jnp.maximum(jnp.where(anchors.count > 0, free_rows, 0), 0)


@by_description()
def has_pending(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns True if some anchors of an order that must be kept were not drawn yet, bool `[]`."""
    sampler = buffer.sampler
    if not isinstance(sampler, OrderedSampler):
        return jnp.bool_(False)
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    pending = sampler.num_pending(state.sampler, anchors)
    return jnp.bool_(False) if pending is None else pending > 0


def can_write(buffer: Buffer, state: BufferState) -> jax.Array:
    if buffer.writer.blocks_when_full:
        return room(buffer, state) > 0
    return jnp.bool_(buffer.writer.writes)


# Draws.


@by_description("batch_size")
def draw_inside(
    buffer: Buffer, state: BufferState, key: jax.Array, batch_size: int, beta: Any
) -> tuple[BufferState, Sample]:
    """Draws inside another compiled function: writes to the new state wait for the reads."""
    sampler, sample = draw(buffer, state, key, batch_size, beta)
    return wait(buffer, state.replace(sampler=sampler), sample), sample


def draw(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: Any,
    *,
    read: bool = True,
) -> tuple[PartState, Any]:
    """Draws anchors, and reads their items: the one way of all draws.

    Items on the host are read between `draw(read=False)` and `assemble`. Of several shards, each
    calls `choose`, and then `counted` and `assemble`, when it knows how likely its anchors were
    among those of all (see `jrb.sharding.joint`).

    Returns:
        The sampler's state; and a `Sample`, or without `read` the `Draw` to `assemble` it from.
    """
    sampler, chosen = choose(buffer, state, key, batch_size, beta)
    if buffer.min_size is not None:
        enough = context_of(buffer, state.writer).held.size >= buffer.min_size
        sampler, chosen = if_enough(enough, state.sampler, sampler, chosen)
    # Masked entries are not counted, so the count comes after `min_size` has masked all.
    sampler, chosen = counted(buffer, sampler, chosen)
    return sampler, assemble(buffer, state, chosen, key) if read else chosen


def choose(
    buffer: Buffer, state: BufferState, key: jax.Array, batch_size: int, beta: Any
) -> tuple[Any, Draw]:
    """Returns the sampler's state after a draw, and the anchors that it drew."""
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    return buffer.sampler.draw(buffer.ring, state.sampler, anchors, key, batch_size, beta)


def shard_stats(buffer: Buffer, state: BufferState) -> ShardStats | None:
    """Returns what the sampler reports to other shards; None from one that uses anchors up."""
    sampler = buffer.sampler
    if isinstance(sampler, ShardedSampler):
        anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
        return sampler.stats(buffer.ring, state.sampler, anchors)
    if sampler.consumes and not sampler.prioritized:
        return None
    raise missing_method(sampler, "stats and exponent", "draw from shards", "ShardedSampler")


def if_enough(
    enough: jax.Array, before: PartState, after: PartState, draw: Draw
) -> tuple[Any, Draw]:
    """Returns a draw; a masked one, and the sampler as it was, unless `enough`, bool `[]`."""
    keep = lambda new, old: new if new is old else jnp.where(enough, new, old)
    some = lambda leaf: jnp.where(enough, leaf, jnp.zeros_like(leaf))
    draw = draw.replace(
        probabilities=some(draw.probabilities), weights=some(draw.weights), mask=some(draw.mask)
    )
    return jax.tree.map(keep, after, before), draw


def counted(buffer: Buffer, sampler: PartState, draw: Draw) -> tuple[Any, Draw]:
    """Counts a draw, where the sampler is asked to; the draw then has the counts before it."""
    if not isinstance(sampler, DrawCounts) or sampler.draws is None:
        return sampler, draw
    slots = jnp.where(draw.mask, draw.slots, 0)
    before = jnp.where(draw.mask, gather.read(sampler.draws, slots), 0)
    return count_draws(sampler, draw.slots, draw.mask, before), draw.replace(draws=before)


def count_draws(sampler: PartState, slots: jax.Array, mask: jax.Array, before: jax.Array) -> Any:
    """Returns the sampler's state in which slots, int32 `[B]`, are counted where `mask`.

    Args:
        sampler: a state with counts; one without is returned as it is.
        slots: that were drawn.
        mask: bool `[B]`.
        before: int32 `[B]`, the counts before the draw.
    """
    if not isinstance(sampler, DrawCounts) or sampler.draws is None:
        return sampler
    draws = sampler.draws
    counts = mask & (before < 2**31 - 1 - slots.size)  # near 2^31 a count stays as it is
    at = jnp.where(counts, slots, draws.size) + dependencies.zero_depending_on(before)
    one = jnp.ones(slots.shape, jnp.int32)
    return sampler.replace(draws=gather.put(draws, at, one, lax.scatter_add))


def recount(before: PartState, after: PartState, sample: Sample, mask: jax.Array) -> Any:
    """Returns the sampler's state after a draw of which only some, bool `[B]`, are in a sample."""
    if not isinstance(before, DrawCounts) or before.draws is None:
        return after
    counts = count_draws(before, sample.indices, mask, sample.info["draws"])
    return after.replace(draws=counts.draws)


def assemble(
    buffer: Buffer, state: BufferState, draw: Draw, key: jax.Array, *, read: bool = True
) -> Sample:
    """Makes a sample of the anchors of a draw: plan the reads, read, reduce, transform.

    Args:
        buffer: the description.
        state: the state that was drawn from. For items on the host, its storage is what was
            fetched, which `HostStorageProxy.read` returns as it is.
        draw: the anchors.
        key: of the draw.
        read: False for a sample whose `data` is None and is put in later, as it is stored.
    """
    context, storage = context_of(buffer, state.writer), buffer.storage
    plan = buffer.unit.plan_read(context, state.unit, draw.slots, draw.mask, key)
    lookups, data, info = list(plan.aux_reads.values()), None, plan.info
    read_lookups = lambda: gather.read_items(*((it.array, it.slots) for it in lookups))
    if not read:
        values = read_lookups() if lookups else []
    else:
        both = storage.read_with(context, state.storage, plan.where, lookups) if lookups else None
        if both is not None:
            items, values = both
        elif lookups:
            # Read one after the other, so that whoever waits for the items waits for the rest too.
            values = read_lookups()
            where = _where_after(plan.where, dependencies.zero_depending_on(values))
            items = storage.read(context, state.storage, where)
        else:
            items, values = storage.read(context, state.storage, plan.where), []
        data, info = buffer.unit.reduce(items, plan, buffer.keys)
    pairs = zip(plan.aux_reads.items(), values, strict=True)
    info = {**info, **{name: lookup.postprocess(value) for (name, lookup), value in pairs}}
    if read and buffer.transforms:
        batch = TransformContext(key, plan.mask, buffer.keys, ends=info.get("is_last"))
        data = transforming.outward(buffer.transforms, data, batch, states=state.transforms)
    about = {"draws": draw.draws, "sampler": draw.sampler}
    return Sample(
        data=data,
        indices=draw.slots,
        probabilities=draw.probabilities,
        weights=draw.weights,
        mask=plan.mask,
        info=info | {name: value for name, value in about.items() if value is not None},
        stamp=buffer.writer.generation_of(buffer.ring, state.writer, draw.slots),
        origin=origin_of(buffer),
    )


def _where_after(where: SlotsForLeaf, token: jax.Array) -> SlotsForLeaf:
    """Returns slots that are not known before `token`; one array for leaves that had one."""
    later: dict[int, tuple[jax.Array, jax.Array]] = {}

    def slots_of(name: str) -> jax.Array:
        slots = where(name)
        return later.setdefault(id(slots), (slots, slots + token))[1]

    return slots_of


def locate(
    buffer: Buffer, state: BufferState, draw: Draw, key: jax.Array, names: tuple[str, ...]
) -> Any:
    """Returns where leaves with these names are read from a storage on the host."""
    context = context_of(buffer, state.writer)
    plan = buffer.unit.plan_read(context, state.unit, draw.slots, draw.mask, key)
    return buffer.storage.locate(context, state.storage, [plan.where(name) for name in names])


@by_description("batch_size")
def ready(buffer: Buffer, state: BufferState, batch_size: int | None) -> jax.Array:
    context = context_of(buffer, state.writer)
    anchors = buffer.unit.anchors(context, state.unit)
    is_ready = buffer.sampler.ready(state.sampler, anchors, batch_size)
    if buffer.min_size is None:
        return is_ready
    return is_ready & (context.held.size >= buffer.min_size)


def wait(buffer: Buffer, state: BufferState, sample: Sample) -> BufferState:
    """Returns the state, to which later writes wait for what the sample was read from."""
    return _after(state, _zero_after_reads(sample, sample.mask))


def _after(state: BufferState, token: jax.Array) -> BufferState:
    """Returns the state, in which no slot to write to is known before the token."""
    parts = dependencies.delay_writes_until((state.storage, state.writer, state.unit), token)
    return state.replace(storage=parts[0], writer=parts[1], unit=parts[2])


def _zero_after_reads(sample: Sample, mask: jax.Array) -> jax.Array:
    """Returns zero, not known before what a later write must wait for."""
    # Without probabilities and weights: unused, they need not be computed then, and the indices
    # wait for the reads of a sampler.
    reads = sample.data, sample.indices, sample.info, sample.stamp, mask
    return dependencies.zero_depending_on(reads)


# Changes of the sampler, and of ends.


@by_description()
def update(
    buffer: Buffer, state: BufferState, sample: Sample | jax.Array, priorities: jax.Array
) -> BufferState:
    state, slots, mask = target_slots(buffer, state, sample)
    if isinstance(sample, Sample) and priorities.ndim > 1:
        priorities = buffer.unit.reduce_priorities(priorities, sample.mask)
    sampler: Any = buffer.sampler  # with priorities, as the buffer has checked
    sampler = sampler.update(buffer.ring, state.sampler, slots, priorities, mask)
    return state.replace(sampler=sampler)


@by_description()
def drop(buffer: Buffer, state: BufferState, where: Sample | jax.Array) -> BufferState:
    state, slots, mask = target_slots(buffer, state, where)
    sampler: Any = buffer.sampler  # with priorities, as the buffer has checked
    sampler = sampler.drop(buffer.ring, state.sampler, slots, mask)
    return state.replace(sampler=sampler)


def target_slots(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array
) -> tuple[BufferState, jax.Array, jax.Array]:
    """Returns the slots of a sample, `[B]`, and which still hold what was drawn; or bare slots."""
    # Writes to the state that comes with them wait for what the sample was read from.
    if not isinstance(where, Sample):
        return state, where, jnp.ones(where.shape, jnp.bool_)
    # A slot that was overwritten, or emptied, since has another generation than the stamp.
    generation = buffer.writer.generation_of(buffer.ring, state.writer, where.indices)
    mask = (generation == where.stamp) & where.mask.reshape(where.mask.shape[0], -1).any(axis=1)
    token = _zero_after_reads(where, mask)
    return _after(state, token), where.indices + token, mask


@by_description()
def truncate(buffer: Buffer, state: BufferState, which: jax.Array) -> BufferState:
    """Lets nothing of some environments, bool `[E]`, go on after the newest row."""
    return _truncated(buffer, context_of(buffer, state.writer), state, which)


def _truncated(
    buffer: Buffer, context: Context, state: BufferState, which: jax.Array
) -> BufferState:
    unit, change = buffer.unit.truncate(context, state.unit, which)
    state = state.replace(unit=unit)
    if state.transforms:
        pairs = zip(transforming.learning(buffer.transforms), state.transforms, strict=True)
        state = state.replace(transforms=tuple(it.truncate(own, which) for it, own in pairs))
    if change is None:
        return state
    anchors = buffer.unit.anchors(context, unit)
    sampler = buffer.sampler.on_write(buffer.ring, state.sampler, change, anchors)
    return state.replace(sampler=sampler)


@by_description()
def take(buffer: Buffer, state: BufferState, indices: jax.Array) -> Item:
    context = context_of(buffer, state.writer)
    return buffer.storage.read(context, state.storage, lambda name: indices)


@by_description()
def empty(buffer: Buffer, state: BufferState) -> BufferState:
    # A token from the state itself: constants are known before earlier reads, and would be written
    # before these, into a copy.
    ring, token = buffer.ring, dependencies.zero_depending_on(state.writer)
    return state.replace(
        storage=buffer.storage.reset(ring, state.storage, token),
        writer=buffer.writer.reset(ring, state.writer, token),
        sampler=buffer.sampler.reset(ring, state.sampler, token),
        unit=buffer.unit.reset(ring, state.unit, token),
    )
