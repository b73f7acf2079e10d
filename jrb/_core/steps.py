"""The verbs as compiled steps: how the parts of a buffer work together.

Called by `jrb._core.eager`, inside `jit` and outside.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jrb._core import counting, episodes, rows, transforming
from jrb._core.compiling import by_description
from jrb._xla import dependencies, gather
from jrb.ring import Ring
from jrb.state import Buffer, BufferState, Sample, origin_of
from jrb.types import (
    Anchors,
    Context,
    Draw,
    IncomingPriorities,
    Item,
    PrioritizedSampler,
    ReadPlan,
    ShardedSampler,
    ShardStats,
    TransformContext,
    WritePlan,
    Writer,
)
from jrb.types.messages import PartState
from jrb.types.sampler import missing_method


def context_of(buffer: Buffer, writer: PartState) -> Context:
    """What the parts may know while the writer's state is this one."""
    reads_windows = buffer.unit.row_steps is not None
    held = buffer.writer.held(buffer.ring, writer)
    return Context(buffer.ring, buffer.keys, held, reads_windows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def in_order(writer: Writer, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
    """All slots, int32 `[N]`, those that hold items first, oldest first; and their number."""
    return writer.in_order(ring, state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def holds(writer: Writer, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
    """Which of these slots, int32 `[K]`, hold items, bool `[K]`."""
    return writer.held(ring, state).holds(ring, slots)


@by_description()
def write(
    buffer: Buffer,
    state: BufferState,
    items: Item,
    mask: jax.Array | None,
    cuts: jax.Array | None = None,
    priorities: jax.Array | None = None,
) -> BufferState:
    """Writes items, leaves `[T, E, ...]` or `[T, ...]`, with priorities, float32 `[T, E]`.

    Time does not go on after the items that `cuts`, bool `[T, E]`, names, though their own done
    flags do not say so.
    """
    if buffer.num_envs is None:
        items = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 1), items)
    ring, context = buffer.ring, context_of(buffer, state.writer)
    if buffer.writer.blocks_when_full:
        mask = _with_room(buffer, state, jax.tree.leaves(items)[0].shape[0], mask)
    writer, write = buffer.writer.plan(ring, state.writer, items, mask)
    storage, write = buffer.storage.write(context, state.storage, write, items)
    if not write.bounded:
        rows_held = context.held.rows(ring).reshape(write.expired.shape)
        left = write.expired - jnp.maximum(rows_held + write.rows - ring.rows, 0)
        writer = buffer.writer.evict_oldest(ring, writer, left)
    state = state.replace(storage=storage, sampler=counting.written(state.sampler, write))
    if state.numbers is not None:
        found = episodes.changes(items, buffer.keys, write.times[0], state.numbers)
        within, ended, numbers = found
        any_held = context.held.rows(ring) > 0
        state = _truncated(buffer, context, state, ended & any_held)
        state, cuts = state.replace(numbers=numbers), within if cuts is None else within | cuts
    write = dataclasses.replace(write, cuts=cuts)
    learned = transforming.learned(buffer.transforms, state.transforms, context, items, write)
    state = state.replace(transforms=learned)
    incoming = _incoming(buffer, write, items, priorities)
    return _learned(buffer, context, state, writer, write, items, incoming)


@by_description()
@gather.by_itself
def planned(buffer: Buffer, state: BufferState, items: Item, *rest: jax.Array | None) -> Any:
    """Where `write` writes to a storage on the host; the compiler leaves the rest of it out."""
    return buffer.storage.slots_of(write(buffer, state, items, *rest).storage)


@by_description(donated=("state",))
@gather.by_itself
def write_in_place(
    buffer: Buffer, state: BufferState, items: Item, *rest: jax.Array | None
) -> BufferState:
    """`write`, to a state that is donated."""
    return write(buffer, state, items, *rest)


def _with_room(
    buffer: Buffer, state: BufferState, length: int, mask: jax.Array | None
) -> jax.Array:
    """The mask, bool `[T]`, without rows for which others would have to go."""
    written = jnp.ones(length, jnp.bool_) if mask is None else mask
    return written & (jnp.cumsum(written, dtype=jnp.int32) <= room(buffer, state))


@by_description()
def room(buffer: Buffer, state: BufferState) -> jax.Array:
    """How many rows may be written before one goes that may not be lost, int32 `[]`."""
    ring, unit, context = buffer.ring, buffer.unit, context_of(buffer, state.writer)
    anchors, held = unit.anchors(context, state.unit), context.held
    free = ring.rows - held.rows(ring)[0]
    pending = buffer.sampler.num_pending(state.sampler, anchors)
    if pending is None:
        return free
    first = anchors.count - pending
    at = jnp.clip(jnp.stack([first, first - 1]), 0, jnp.maximum(anchors.count - 1, 0))
    slots, _ = anchors.nth(at, jax.random.key(0))
    row = held.before(ring, slots)
    read = jnp.where(
        first < anchors.count, row[0], row[1] + 1
    )  # rows before the first pending anchor
    done = jnp.where(anchors.count > 0, read - unit.lookback - (unit.max_entry_delay or 0), 0)
    return free + jnp.maximum(done, 0)


@by_description()
def has_pending(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns True if some anchors of an order that must be kept were not drawn yet, bool `[]`."""
    sampler = buffer.sampler
    anchors = buffer.unit.anchors(context_of(buffer, state.writer), state.unit)
    pending = sampler.num_pending(state.sampler, anchors)
    if pending is None and sampler.consumes and sampler.in_order:
        raise missing_method(sampler, "num_pending", "rebuild")
    return jnp.bool_(False) if pending is None else pending > 0


def can_write(buffer: Buffer, state: BufferState) -> jax.Array:
    """Whether a row would be written, bool `[]`."""
    if buffer.writer.blocks_when_full:
        return room(buffer, state) > 0
    return jnp.bool_(buffer.writer.writes)


def _incoming(
    buffer: Buffer, write: WritePlan, items: Item, priorities: jax.Array | None
) -> IncomingPriorities:
    """The priorities that were passed, or that the items bring along."""
    sampler = buffer.sampler
    brought = (
        sampler.priorities_from_items(items) if isinstance(sampler, PrioritizedSampler) else None
    )
    if priorities is not None and brought is not None:
        raise ValueError(
            "priorities: expected none beside those that the items bring along, as the sampler has "
            "priority_key. Leave one of them out."
        )
    incoming = brought if priorities is None else priorities
    return IncomingPriorities(
        slots=write.slots.reshape(-1),
        row_mask=write.times[0],
        priorities=None if incoming is None else incoming.astype(jnp.float32).reshape(-1),
        first_slot=write.starts[0] if write.consecutive else None,
    )


def _learned(
    buffer: Buffer,
    context: Context,
    state: BufferState,
    writer: PartState,
    write: WritePlan,
    items: Item,
    incoming: IncomingPriorities | None = None,
) -> BufferState:
    """The state in which unit and sampler know of a write; `context` is from before."""
    unit, change = buffer.unit.on_write(context, state.unit, write, items)
    change = dataclasses.replace(change, incoming=incoming)
    anchors = buffer.unit.anchors(context_of(buffer, writer), unit)
    sampler = buffer.sampler.on_write(buffer.ring, state.sampler, change, anchors)
    return state.replace(writer=writer, sampler=sampler, unit=unit)


@by_description()
def expire(buffer: Buffer, state: BufferState, items: Item, rows: jax.Array) -> BufferState:
    """The state without so many of the oldest rows, int32 `[]`, in lanes `[E]`.

    Its items are not looked at; `items` is a row that is not written, leaves `[1, E, ...]`.
    """
    ring, context = buffer.ring, context_of(buffer, state.writer)
    writer, write = buffer.writer.plan(ring, state.writer, items, jnp.zeros(1, jnp.bool_))
    write = dataclasses.replace(write, expired=rows, bounded=False)
    writer = buffer.writer.evict_oldest(ring, writer, rows)
    return _learned(buffer, context, state, writer, write, items)


@by_description("batch_size")
def draw(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
) -> tuple[BufferState, Sample]:
    """Sampler, unit, storage, unit, transforms."""
    sampler, chosen = _choose(buffer, state, key, batch_size, beta)
    sample = _finish(buffer, state, chosen, key)
    return wait(buffer, state.replace(sampler=sampler), sample), sample


def sample(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
    moves: bool,
) -> tuple[Any, Sample]:
    """The same for outside `jit`, where all arrays that it returned would be copied.

    Returns:
        The sampler's state if it `moves`, or None; and the sample.
    """
    sampler, chosen = _choose(buffer, state, key, batch_size, beta)
    return sampler if moves else None, _finish(buffer, state, chosen, key)


def _choose(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
) -> tuple[Any, Draw]:
    """The sampler's part."""
    context = context_of(buffer, state.writer)
    anchors = buffer.unit.anchors(context, state.unit)
    drawn = buffer.sampler.draw(buffer.ring, state.sampler, anchors, key, batch_size, beta)
    if buffer.min_size is not None:
        drawn = if_enough(context.held.size >= buffer.min_size, state.sampler, *drawn)
    return counting.drawn(*drawn)


def choose_among(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
) -> tuple[Any, Draw, ShardStats | None, jax.Array]:
    """The sampler's part in one of several shards.

    Returns:
        Its state, in which nothing is counted yet; what it drew; what it says to the others; and
        how many items are held.
    """
    ring, context = buffer.ring, context_of(buffer, state.writer)
    anchors = buffer.unit.anchors(context, state.unit)
    stats = shard_stats(buffer, state, anchors)
    drawn = buffer.sampler.draw(ring, state.sampler, anchors, key, batch_size, beta)
    return *drawn, stats, context.held.size


def shard_stats(buffer: Buffer, state: BufferState, anchors: Anchors) -> ShardStats | None:
    """Returns what the sampler reports to other shards; None from one that uses anchors up."""
    sampler = buffer.sampler
    if isinstance(sampler, ShardedSampler):
        return sampler.stats(buffer.ring, state.sampler, anchors)
    if sampler.consumes:
        return None
    raise missing_method(sampler, "stats and exponent", "draw from shards", "ShardedSampler")


def finish_draw(
    buffer: Buffer, state: BufferState, sampler: PartState, draw: Draw, key: jax.Array
) -> tuple[BufferState, Sample]:
    """The rest of it: the state after the draw, and the sample."""
    sampler, draw = counting.drawn(sampler, draw)
    sample = _finish(buffer, state, draw, key)
    return wait(buffer, state.replace(sampler=sampler), sample), sample


def if_enough(
    enough: jax.Array, before: PartState, after: PartState, draw: Draw
) -> tuple[Any, Draw]:
    """A draw, or nothing and the sampler as it was while not `enough`, bool `[]`, is held."""
    keep = lambda new, old: new if new is old else jnp.where(enough, new, old)
    some = lambda leaf: jnp.where(enough, leaf, jnp.zeros_like(leaf))
    draw = Draw(
        slots=draw.slots,
        probabilities=some(draw.probabilities),
        weights=some(draw.weights),
        mask=some(draw.mask),
    )
    return jax.tree.map(keep, after, before), draw


def _look(
    buffer: Buffer, state: BufferState, slots: jax.Array, mask: jax.Array, key: jax.Array
) -> tuple[Context, ReadPlan]:
    """What the unit wants to read."""
    context = context_of(buffer, state.writer)
    return context, buffer.unit.plan_read(context, state.unit, slots, mask, key)


def _finish(buffer: Buffer, state: BufferState, draw: Draw, key: jax.Array) -> Sample:
    """Storage, unit and transforms."""
    context, plan_read = _look(buffer, state, draw.slots, draw.mask, key)
    data, info = _read_at(buffer, state, context, plan_read, key)
    fields = _fields(buffer, state, draw, plan_read.mask, info)
    return Sample(data=data, origin=origin_of(buffer), **fields)


def _read_at(
    buffer: Buffer, state: BufferState, context: Context, plan_read: ReadPlan, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Data and info of a sample."""
    raw, told = _read_with(buffer, state, context, plan_read)
    data, info = buffer.unit.reduce(raw, plan_read, buffer.keys)
    info = {**info, **told}
    batch = TransformContext(key, plan_read.mask, buffer.keys, ends=info.get("is_last"))
    data = transforming.outward(buffer.transforms, data, batch, states=state.transforms)
    return data, info


def _read_with(
    buffer: Buffer, state: BufferState, context: Context, plan_read: ReadPlan
) -> tuple[Item, dict[str, jax.Array]]:
    """Items as they are stored, and what is looked up for `info`."""
    storage, lookups = buffer.storage, list(plan_read.aux_reads.values())
    found = storage.read_with(context, state.storage, plan_read.where, lookups) if lookups else None
    if found is None:
        there = _looked_up(plan_read)
        where = (
            rows.where_after(plan_read.where, dependencies.token(there))
            if there
            else plan_read.where
        )
        found = storage.read(context, state.storage, where), there
    return found[0], _told(plan_read, found[1])


def _looked_up(plan_read: ReadPlan) -> list[jax.Array]:
    """What is in the arrays that are looked up, read by itself."""
    return rows.read_each(*((it.array, it.slots) for it in plan_read.aux_reads.values()))


def _told(plan_read: ReadPlan, found: list[jax.Array]) -> dict[str, jax.Array]:
    """What `info` tells of what was looked up."""
    pairs = zip(plan_read.aux_reads.items(), found, strict=True)
    return {name: it.postprocess(there) for (name, it), there in pairs}


def _fields(
    buffer: Buffer, state: BufferState, draw: Draw, mask: jax.Array, info: Any
) -> dict[str, Any]:
    """The fields of a sample but its data."""
    info = info if draw.draws is None else {**info, "draws": draw.draws}
    return {
        "indices": draw.slots,
        "probabilities": draw.probabilities,
        "weights": draw.weights,
        "mask": mask,
        "info": info,
        "stamp": buffer.writer.generation_of(buffer.ring, state.writer, draw.slots),
    }


def choose(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    beta: jax.Array | float | None,
    names: tuple[str, ...] | None,
    moves: bool,
) -> tuple[Any, dict[str, Any], tuple[jax.Array, Any] | None]:
    """The first half of a draw from a storage on the host.

    Returns:
        The sampler's state if it `moves`, or None; the fields of the sample but data; and what
        `finish` and the storage need to know: which anchors were drawn, and the places at which the
        leaves with these names are read. None for the last without names, where they are all read
        at the anchors.
    """
    sampler, drawn = _choose(buffer, state, key, batch_size, beta)
    context, plan_read = _look(buffer, state, drawn.slots, drawn.mask, key)
    info = {**plan_read.info, **_told(plan_read, _looked_up(plan_read))}
    sample = _fields(buffer, state, drawn, plan_read.mask, info)
    if names is None:
        return sampler if moves else None, sample, None
    where = [plan_read.where(name) for name in names]
    places = buffer.storage.locate(context, state.storage, where)
    return sampler if moves else None, sample, (drawn.mask, places)


@by_description("batch_size")
def ready(buffer: Buffer, state: BufferState, batch_size: int | None) -> jax.Array:
    """Whether a draw gives at least one item, bool `[]`."""
    context = context_of(buffer, state.writer)
    anchors = buffer.unit.anchors(context, state.unit)
    found = buffer.sampler.ready(state.sampler, anchors, batch_size)
    return found if buffer.min_size is None else found & (context.held.size >= buffer.min_size)


@by_description()
def finish(
    buffer: Buffer, state: BufferState, slots: jax.Array, mask: jax.Array, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """The second half, with a storage that reads what was fetched: data and info of the sample."""
    context, plan_read = _look(buffer, state, slots, mask, key)
    return _read_at(buffer, state, context, plan_read, key)


def wait(buffer: Buffer, state: BufferState, sample: Sample) -> BufferState:
    """The same state, in which later writes wait for what the sample was read from."""
    return _after(state, dependencies.token((_read(buffer, sample), sample.mask)))


def _after(state: BufferState, token: jax.Array) -> BufferState:
    """The same state, from which no place to write is known before the token."""
    parts = dependencies.after((state.storage, state.writer, state.unit), token)
    return state.replace(storage=parts[0], writer=parts[1], unit=parts[2])


@by_description()
def update(
    buffer: Buffer,
    state: BufferState,
    sample: Sample | jax.Array,
    priorities: jax.Array,
) -> BufferState:
    """New priorities for anchors that still hold what was drawn."""
    if isinstance(sample, Sample):
        state, slots, ok = still_there(buffer, state, sample)
        if priorities.ndim > 1:
            priorities = buffer.unit.reduce_priorities(priorities, sample.mask)
    else:
        slots, ok = sample, jnp.ones(sample.shape, jnp.bool_)
    sampler: Any = buffer.sampler
    sampler = sampler.update(buffer.ring, state.sampler, slots, priorities, ok)
    return state.replace(sampler=sampler)


def still_there(
    buffer: Buffer, state: BufferState, sample: Sample
) -> tuple[BufferState, jax.Array, jax.Array]:
    """The state, in which writes wait for the sample; its slots, and which hold what was drawn."""
    current = buffer.writer.generation_of(buffer.ring, state.writer, sample.indices) == sample.stamp
    drawn = sample.mask.reshape(sample.mask.shape[0], -1).any(axis=1)
    ok = current & drawn
    token = dependencies.token((_read(buffer, sample), ok))
    return _after(state, token), sample.indices + token, ok


@by_description()
def drop(buffer: Buffer, state: BufferState, where: Sample | jax.Array) -> BufferState:
    """The state in which some anchors are drawn no more."""
    if isinstance(where, Sample):
        state, slots, ok = still_there(buffer, state, where)
    else:
        slots, ok = where, jnp.ones(where.shape, jnp.bool_)
    sampler: Any = buffer.sampler
    sampler = sampler.drop(buffer.ring, state.sampler, slots, ok)
    return state.replace(sampler=sampler)


def _read(buffer: Buffer, sample: Sample) -> Any:
    """What a later write must wait for, beside the mask.

    Left out is what nothing is to compute if nobody wants it: probabilities and weights, as the
    indices wait for what a sampler reads; and `info`, of units whose data wait for all it is read
    from.
    """
    info = sample.info.get("draws") if buffer.unit.info_follows_data else sample.info
    return sample.data, sample.indices, info, sample.stamp


@by_description()
def truncate(buffer: Buffer, state: BufferState, which: jax.Array) -> BufferState:
    """Some environments, bool `[E]`, begin anew after the newest row."""
    return _truncated(buffer, context_of(buffer, state.writer), state, which)


def _truncated(
    buffer: Buffer, context: Context, state: BufferState, which: jax.Array
) -> BufferState:
    """The same, for a context that is known."""
    unit, change = buffer.unit.truncate(context, state.unit, which)
    begun = transforming.truncated(buffer.transforms, state.transforms, which)
    state = state.replace(unit=unit, transforms=begun)
    if change is None:
        return state
    anchors = buffer.unit.anchors(context, unit)
    sampler = buffer.sampler.on_write(buffer.ring, state.sampler, change, anchors)
    return state.replace(sampler=sampler)


@by_description()
def take(buffer: Buffer, state: BufferState, indices: jax.Array) -> Item:
    """The items at slots."""
    context = context_of(buffer, state.writer)
    return buffer.storage.read(context, state.storage, lambda name: indices)


@by_description()
def empty(buffer: Buffer, state: BufferState) -> BufferState:
    """The state without its items."""
    ring, token = buffer.ring, dependencies.token(state.writer)
    return state.replace(
        storage=buffer.storage.reset(ring, state.storage, token),
        writer=buffer.writer.reset(ring, state.writer, token),
        sampler=buffer.sampler.reset(ring, state.sampler, token),
        unit=buffer.unit.reset(ring, state.unit, token),
    )
