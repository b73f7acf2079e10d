"""The methods of a buffer as compiled steps: how the parts of a buffer work together.

`jrb._core.eager` calls them outside `jit`. Inside `jit` they are traced into the user's program.
B batch, T time, E environments, N capacity.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb import sum_tree
from jrb._core import draw_limits, transforming
from jrb._util import pytree
from jrb._xla import dependencies, gather, random_bits
from jrb._xla.compiling import by_description, kept_by_description, standalone_program
from jrb.keys import Path, episode_changes, leaves_at, path_name
from jrb.state import Buffer, BufferState, Sample
from jrb.types import (
    AnchorUpdate,
    Context,
    Draw,
    HostState,
    IncomingItems,
    Item,
    OrderedSampler,
    PrioritizedSampler,
    ShardedSampler,
    ShardStats,
    SlotsForLeaf,
    TransformContext,
    WritePlan,
)
from jrb.types.messages import Anchors, DrawInputs, PartState, SlotFacts
from jrb.types.sampler import missing_method

_ORDER = 5  # the number that `random_bits.fold` gets for the order of anchors of one draw


def context_of(buffer: Buffer, writer: PartState) -> Context:
    """Returns the `Context` of a buffer whose writer has this state."""
    held = buffer.writer.held(buffer.ring, writer)
    read_alone = buffer.sampler.reads or ()
    return Context(buffer.ring, buffer.keys, held, _reads_windows(buffer.unit), read_alone)


# Cached, as units of users may compute `row_steps`, and each step needs a context.
_reads_windows = functools.lru_cache(maxsize=64)(lambda unit: unit.row_steps is not None)


@by_description()
def in_order(buffer: Buffer, writer: PartState) -> tuple[jax.Array, jax.Array]:
    """Returns all slots, int32 `[N]`, held ones first, oldest to newest; and the number held."""
    return buffer.writer.in_order(buffer.ring, writer)


@by_description()
def holds(buffer: Buffer, writer: PartState, slots: jax.Array) -> jax.Array:
    """Returns which of some slots, int32 `[K]`, hold items, bool `[K]`."""
    return buffer.writer.held(buffer.ring, writer).holds(buffer.ring, slots)


# Writes.


def invert(buffer: Buffer, items: Item, num_axes: int) -> Item:
    """Returns items, leaves `[T, E, ...]`, after the inverses of all transforms, to be stored."""
    # Inverses take a single item.
    inverse = functools.partial(transforming.apply_inverses, buffer.transforms)
    for _ in range(num_axes):
        inverse = jax.vmap(inverse)
    return inverse(items)


invert_compiled = by_description("num_axes")(invert)


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
        state: its state.
        items: leaves `[T, E, ...]`, or `[T, ...]` without `num_envs`.
        mask: bool `[T]` or `[T, E]`, the rows or items to write; None writes all.
        cuts: bool `[T, E]`, items that end an episode whatever their flags say.
        priorities: float32 `[T, E]`; None for the sampler's default for new items.
    """
    if buffer.sampler.row_by_row and jax.tree.leaves(items)[0].shape[0] > 1:
        return _write_row_by_row(buffer, state, items, mask, cuts, priorities)
    if buffer.num_envs is None:
        items = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 1), items)
    ring, context = buffer.ring, context_of(buffer, state.writer)
    # Every part gets this one plan, so that they cannot disagree about slots or order.
    state, writer, plan = _put_items(buffer, context, state, items, mask)
    if state.numbers is not None:
        # Items carry the number of their episode: another number ends the one before.
        changes, ended, numbers = episode_changes(
            items, buffer.keys, plan.written_by_clock, state.numbers
        )
        state = _end_episodes(buffer, context, state, ended & (context.held.rows(ring) > 0))
        state, cuts = state.replace(numbers=numbers), changes if cuts is None else changes | cuts
    # From here on, units and transforms also see ends of episodes that have no flag.
    plan = dataclasses.replace(plan, cuts=cuts)
    if state.transforms:
        learned = transforming.learn_from_write(
            buffer.transforms, state.transforms, context, items, plan
        )
        state = state.replace(transforms=learned)
    incoming = IncomingItems(
        slots=plan.slots.reshape(-1),
        row_mask=plan.written_by_clock,
        priorities=None if priorities is None else priorities.astype(jnp.float32).reshape(-1),
        first_slot=plan.starts[0] if plan.consecutive else None,
        leaves={
            name: leaf.reshape(plan.slots.size, *leaf.shape[2:])
            for name, leaf in leaves_read(buffer, items, buffer.sampler.reads_written).items()
        },
    )
    # Update unit and sampler.
    unit, change = buffer.unit.on_write(context, state.unit, plan, items)
    change = dataclasses.replace(change, incoming=incoming)
    # `change` counts departed anchors in the order before the write; the sampler gets it with the
    # anchors from after the write.
    state = state.replace(writer=writer, unit=unit)
    return _update_sampler(buffer, context_of(buffer, writer), state, change)


def _put_items(
    buffer: Buffer, context: Context, state: BufferState, items: Item, mask: jax.Array | None
) -> tuple[BufferState, PartState, WritePlan]:
    """Puts items into the storage; returns the state, the writer's next state, and the plan.

    Arguments are those of `write`, with leaves `[T, E, ...]`; `context` is from before the write.
    """
    ring = buffer.ring
    if buffer.writer.blocks_when_full:
        # Rows that would overwrite an item that was not drawn yet are masked out.
        length = jax.tree.leaves(items)[0].shape[0]
        mask = jnp.ones(length, jnp.bool_) if mask is None else mask
        mask = mask & (jnp.cumsum(mask, dtype=jnp.int32) <= room(buffer, state))
    writer, plan = buffer.writer.plan(ring, state.writer, items, mask)
    storage, plan = buffer.storage.write(context, state.storage, plan, items)
    if not plan.bounded:
        # The storage dropped more of the oldest rows than the writer had planned.
        num_rows = context.held.rows(ring).reshape(plan.expired.shape)
        extra = plan.expired - jnp.maximum(num_rows + plan.rows - ring.rows, 0)
        writer = buffer.writer.evict_oldest(ring, writer, extra)
    if buffer.sampler.count_draws:
        # New items were drawn 0 times.
        draws = plan.put(state.sampler.draws, jnp.zeros(plan.slots.shape, jnp.int32))
        state = state.replace(sampler=state.sampler.replace(draws=draws))
    return state.replace(storage=storage), writer, plan


write_in_place = by_description(donated=("state",))(standalone_program(write))


def _write_row_by_row(buffer: Buffer, state: BufferState, *arguments: Any) -> BufferState:
    """Writes T rows, the `arguments` of `write`, as T calls would (see `Sampler.row_by_row`)."""

    def write_row(state: BufferState, row: tuple) -> tuple[BufferState, Any]:
        after = write(buffer, state, *jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), row))
        if not isinstance(after.storage, HostState):
            return after, None
        # Slots that the host has still to write.
        return after.replace(storage=after.storage.replace(planned=None)), after.storage.planned

    after, slots = lax.scan(write_row, state, arguments)
    if slots is not None:
        # The host writes all rows later. Some may have the slot of an earlier row.
        slots = slots.reshape(-1, slots.shape[-1])
        after = after.replace(storage=after.storage.replace(planned=slots))
    return after


def _update_sampler(
    buffer: Buffer, context: Context, state: BufferState, change: AnchorUpdate
) -> BufferState:
    """Returns the state after its sampler saw which anchors entered and departed."""
    # A sampler whose state has no arrays keeps no account of anchors.
    if not jax.tree.leaves(state.sampler):
        return state
    anchors = buffer.unit.anchors(context, state.unit)
    sampler = buffer.sampler.on_write(buffer.ring, state.sampler, change, anchors)
    if buffer.sampler.max_draws is not None:
        sampler = draw_limits.update_anchors(buffer, sampler, change)
    return state.replace(sampler=sampler)


@by_description()
def room(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns how many rows can be written, int32 `[]`, until an undrawn item is overwritten."""
    ring, unit, context = buffer.ring, buffer.unit, context_of(buffer, state.writer)
    anchors, held = unit.anchors(context, state.unit), context.held
    free = ring.rows - held.rows(ring)[0]
    sampler = buffer.sampler
    pending = None
    if isinstance(sampler, OrderedSampler):
        pending = sampler.num_pending(state.sampler, anchors)
    if pending is None and sampler.max_draws is None:
        return free
    # Find the rows of the first undrawn anchor, and of the last drawn one.
    first = anchors.count - (0 if pending is None else pending)
    ranks = jnp.clip(jnp.stack([first, first - 1]), 0, jnp.maximum(anchors.count - 1, 0))
    slots, _ = anchors.nth(ranks, jax.random.key(0))
    is_pending = first < anchors.count
    # With `max_draws`, the first one is the oldest that has draws left.
    if sampler.max_draws is not None:
        undrawn = draw_limits.drawable_anchors(state.sampler, anchors, held.first[0])
        is_pending = undrawn.count > 0
        slots = slots.at[0].set(undrawn.nth(jnp.zeros(1, jnp.int32), jax.random.key(0))[0][0])
    row = held.before(ring, slots)
    # The rows before the first undrawn anchor; if all were drawn, up to the last anchor.
    drawn_rows = jnp.where(is_pending, row[0], row[1] + 1)
    # The unit reads `lookback` rows before an anchor. One that enters later may be older by
    # `max_entry_delay` rows.
    free_rows = drawn_rows - unit.lookback - (unit.max_entry_delay or 0)
    return free + jnp.maximum(jnp.where(anchors.count > 0, free_rows, 0), 0)


@by_description()
def has_pending(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns True, bool `[]`, if an ordered sampler has anchors that were not drawn yet."""
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
    buffer: Buffer, state: BufferState, key: jax.Array, batch_size: int, inputs: DrawInputs
) -> tuple[BufferState, Sample]:
    """Draws inside another compiled function: writes to the new state wait for the reads."""
    sampler, sample = draw(buffer, state, key, batch_size, inputs)
    return wait(buffer, state.replace(sampler=sampler), sample), sample


def draw(
    buffer: Buffer,
    state: BufferState,
    key: jax.Array,
    batch_size: int,
    inputs: DrawInputs,
    *,
    read: bool = True,
) -> tuple[PartState, Any]:
    """Draws anchors and reads their items; every kind of draw is made of these functions.

    Items on the host are read between `draw(read=False)` and `assemble`. A shard calls `choose`,
    and then, once it knows the probabilities of its anchors among those of all shards,
    `count_draw` and `assemble` (see `jrb.sharding.joint`).

    Returns:
        The sampler's state; and a `Sample`, or with `read=False` the `Draw` to `assemble` it from.
    """
    sampler, chosen = choose(buffer, state, key, batch_size, inputs)
    if buffer.min_size is not None:
        enough = context_of(buffer, state.writer).held.size >= buffer.min_size
        sampler, chosen = mask_unless(enough, state.sampler, sampler, chosen)
    # Masked entries are not counted, so the count comes after `min_size` has masked all.
    sampler, chosen = count_draw(buffer, sampler, chosen)
    return sampler, assemble(buffer, state, chosen, key) if read else chosen


def choose(
    buffer: Buffer, state: BufferState, key: jax.Array, batch_size: int, inputs: DrawInputs
) -> tuple[Any, Draw]:
    """Returns the sampler's state after a draw, and the anchors that it drew.

    They are arrays `[B]`; or `[B M]` if an entry of the batch has M anchors.
    """
    anchors = anchors_to_draw(buffer, state, inputs.context)
    ring, unit, sampler = buffer.ring, buffer.unit, buffer.sampler
    count = batch_size * unit.anchors_per_entry
    after, drawn = sampler.draw(ring, state.sampler, anchors, key, count, inputs.beta)
    if sampler.max_draws is not None:
        # Later writes to the tree that counts anchors wait for this read.
        token = dependencies.zero_depending_on(anchors.count)
        drawn = drawn.replace(slots=drawn.slots + token)
    if unit.anchors_per_entry == 1:
        return after, drawn
    # In a random order, as stratified draws ascend, and some of the last ones are left out. Those
    # of a group stay together, and those of a sampler with an order of its own keep it.
    if drawn.group is None and (sampler.max_draws is not None or not sampler.consumes):
        bits = random_bits.bits(random_bits.fold(key, _ORDER), drawn.mask.shape)
        order = jnp.argsort(bits)
        drawn = jax.tree.map(lambda leaf: leaf[order], drawn)
    if sampler.max_draws is not None:
        # Entries of items that have no draws left take no room.
        drawn = _mask_used_up(buffer, after, drawn)[0]
    # The sampler takes back the anchors for which the unit has no room.
    context = context_of(buffer, state.writer)
    mask = drawn.mask
    drawn, kept = unit.arrange(context, state.unit, drawn)
    has_weights = isinstance(sampler, ShardedSampler | PrioritizedSampler)
    if has_weights and sampler.normalize == "batch":
        # The largest weight may be that of an anchor that was left out.
        drawn = drawn.normalize_weights()
    return sampler.put_back(after, mask, kept), drawn


def drawable_anchors(buffer: Buffer, state: BufferState) -> Anchors:
    """Returns the anchors that may be drawn: with `max_draws`, those that have draws left."""
    context = context_of(buffer, state.writer)
    anchors = buffer.unit.anchors(context, state.unit)
    if buffer.sampler.max_draws is None:
        return anchors
    # The order of time costs another read of the tree.
    oldest = context.held.first[0] if isinstance(buffer.sampler, OrderedSampler) else None
    return draw_limits.drawable_anchors(state.sampler, anchors, oldest)


def anchors_to_draw(buffer: Buffer, state: BufferState, user_context: Any) -> Anchors:
    """Returns the anchors, with the facts about all slots that the sampler reads.

    `user_context` is what was passed to the draw as `context`.
    """
    anchors, paths = drawable_anchors(buffer, state), buffer.sampler.reads
    if paths is None:
        return anchors
    context = context_of(buffer, state.writer)
    names = leaves_read(buffer, buffer.storage.spec(state.storage), paths).keys()
    # Read these leaves at all slots, and others nowhere.
    slots = jnp.arange(buffer.capacity, dtype=jnp.int32)
    where = lambda name: slots if name in names else slots[:0]
    leaves = leaves_read(buffer, buffer.storage.read(context, state.storage, where), paths)
    age = context.held.after(context.ring, slots) if buffer.writer.is_chronological else None
    is_drawable = None
    if buffer.sampler.max_draws is not None:
        is_drawable = sum_tree.leaf_values(state.sampler.drawable) > 0
    facts = SlotFacts(leaves, age, user_context, is_drawable)
    return dataclasses.replace(anchors, facts=facts)


def leaves_read(buffer: Buffer, items: Item, paths: tuple[Path, ...]) -> dict[str, Any]:
    """Returns the leaves of items at the paths that the sampler reads, by name, or raises."""
    leaves: dict[str, Any] = {}
    for path in paths:
        leaves_of_path = leaves_at(items, path)
        if not leaves_of_path:
            raise ValueError(
                f"{type(buffer.sampler).__name__}: expected paths in an item, which has the leaves "
                f"{pytree.leaf_names(items)}, got '{path_name(path)}'."
            )
        leaves |= leaves_of_path
    return leaves


def shard_stats(buffer: Buffer, state: BufferState, user_context: Any = None) -> ShardStats | None:
    """Returns the sampler's statistics for other shards; None if its draws use anchors up."""
    sampler = buffer.sampler
    if isinstance(sampler, ShardedSampler):
        anchors = anchors_to_draw(buffer, state, user_context)
        return sampler.stats(buffer.ring, state.sampler, anchors)
    if sampler.consumes and not sampler.prioritized:
        return None
    raise missing_method(sampler, "stats and exponent", "draw from shards", "ShardedSampler")


def mask_unless(
    enough: jax.Array, before: PartState, after: PartState, draw: Draw
) -> tuple[Any, Draw]:
    """Returns sampler state and draw; unless `enough`, the old state and a fully masked draw."""
    # Leaves that the draw left alone need no select.
    keep = lambda new, old: new if new is old else jnp.where(enough, new, old)
    return jax.tree.map(keep, after, before), draw.keep_where(enough)


def count_draw(buffer: Buffer, sampler: PartState, draw: Draw) -> tuple[Any, Draw]:
    """Counts a draw if the sampler counts; `Draw.draws` is then set to the counts before it."""
    if not buffer.sampler.count_draws:
        return sampler, draw
    if buffer.sampler.max_draws is None:
        before = _counts_of(sampler, draw)
    else:
        draw, before, is_last = _mask_used_up(buffer, sampler, draw)
        sampler = draw_limits.exclude(buffer, sampler, draw.slots, is_last)
    return count_draws(sampler, draw.slots, draw.mask, before), draw.replace(draws=before)


def _counts_of(sampler: Any, draw: Draw) -> jax.Array:
    """Returns how often each anchor of a draw was drawn before, int32 `[B]`; 0 where masked."""
    return jnp.where(draw.mask, gather.read_at(sampler.draws, draw.slots), 0)


def _mask_used_up(buffer: Buffer, sampler: Any, draw: Draw) -> tuple[Draw, jax.Array, jax.Array]:
    """Masks entries of items that have no draws left after the entries before them.

    Returns the draw, the counts before it, and True for entries that take the last draw.
    """
    most: Any = buffer.sampler.max_draws
    before = _counts_of(sampler, draw)
    real = jnp.where(draw.mask, draw.slots, buffer.capacity)
    uses = before + 1 + buffer.ring.times_before(real)
    is_last = draw.mask & (uses == most)
    draw = draw.keep_where(uses <= most)
    return draw, jnp.where(draw.mask, before, 0), is_last


def count_draws(sampler: PartState, slots: jax.Array, mask: jax.Array, before: jax.Array) -> Any:
    """Returns the sampler's state with one more draw of each slot for which `mask` is True.

    Args:
        sampler: the sampler's state, with counts.
        slots: int32 `[B]`, the slots that were drawn.
        mask: bool `[B]`, False for entries that do not count.
        before: int32 `[B]`, the counts of these slots before the draw.
    """
    draws = sampler.draws
    # Near 2^31 a count stays as it is. Entries that do not count add to slot N, which is dropped.
    counts = mask & (before < 2**31 - 1 - slots.size)
    at = jnp.where(counts, slots, draws.size) + dependencies.zero_depending_on(before)
    one = jnp.ones(slots.shape, jnp.int32)
    return sampler.replace(draws=gather.put(draws, at, one, lax.scatter_add))


def recount(before: PartState, after: PartState, sample: Sample, mask: jax.Array) -> Any:
    """Returns the state `after` a draw, counting only anchors in `mask`, bool like `indices`."""
    flat = (it.reshape(-1) for it in (sample.indices, mask, sample.info["draws"]))
    return after.replace(draws=count_draws(before, *flat).draws)


def assemble(
    buffer: Buffer, state: BufferState, draw: Draw, key: jax.Array, *, read: bool = True
) -> Sample:
    """Makes a sample of the anchors of a draw: plan the reads, read, reduce, transform.

    Args:
        buffer: the description.
        state: the state that was drawn from.
        draw: the anchors that were drawn.
        key: the key of the draw.
        read: False to leave `data` None; the caller puts in the stored items later.
    """
    context, storage = context_of(buffer, state.writer), buffer.storage
    plan = buffer.unit.plan_read(context, state.unit, draw.slots, draw.mask, key)
    lookups, data, info = list(plan.aux_reads.values()), None, plan.info
    read_lookups = lambda: gather.read_items(*((it.array, it.slots) for it in lookups))
    if not read:
        values = read_lookups() if lookups else []
    else:
        # Read items and lookups, together if the storage can.
        both = storage.read_with(context, state.storage, plan.where, lookups) if lookups else None
        if both is not None:
            items, values = both
        elif lookups:
            # Items are read after the lookups, so that to wait for the items is to wait for both.
            values = read_lookups()
            where = _delay_reads_until(plan.where, dependencies.zero_depending_on(values))
            items = storage.read(context, state.storage, where)
        else:
            items, values = storage.read(context, state.storage, plan.where), []
        data, info = buffer.unit.reduce(items, plan, buffer.keys)
    pairs = zip(plan.aux_reads.items(), values, strict=True)
    info = {**info, **{name: lookup.postprocess(value) for (name, lookup), value in pairs}}
    if read and buffer.transforms:
        batch = TransformContext(key, plan.mask, buffer.keys, ends=info.get("is_last"))
        data = transforming.apply_transforms(
            buffer.transforms, data, batch, states=state.transforms
        )
    # One axis for entries, and one for the anchors of each, if there are several.
    if (per_entry := buffer.unit.anchors_per_entry) > 1:
        draw = jax.tree.map(lambda leaf: leaf.reshape(-1, per_entry), draw)
    about = {"draws": draw.draws, "sampler": draw.sampler, "group": draw.group}
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


@kept_by_description
def origin_of(buffer: Buffer) -> str:
    """Returns the `origin` of samples, such as "ReplayBuffer(capacity=64) 5f0a6c9d81e2".

    Equal descriptions have equal origins, in every process and after pickling. Functions are
    compared by their names: all lambdas that one function makes are equal.
    """
    # Leave out the fields that affect neither the content of a slot nor which slots are drawn.
    left_out = ("batch_size", "transforms", "storage", "min_size", "cast", "requires_mask")
    names = [field.name for field in dataclasses.fields(buffer) if field.name not in left_out]
    values = tuple(getattr(buffer, name) for name in names)
    # Use a digest, as the text of a description may have thousands of characters.
    digest = hashlib.blake2b(pytree.stable_text(values).encode(), digest_size=6).hexdigest()
    pairs = zip(names, values, strict=True)
    sizes = ", ".join(f"{name}={value}" for name, value in pairs if type(value) is int)
    return f"{pytree.public_class(buffer)}({sizes}) {digest}"


def _delay_reads_until(where: SlotsForLeaf, token: jax.Array) -> SlotsForLeaf:
    """Returns slots that depend on `token`; leaves that shared an array still share one."""
    # By the `id` of an array, which is kept too, so that no other gets this `id`. Leaves that share
    # slots share gathers.
    later: dict[int, tuple[jax.Array, jax.Array]] = {}

    def slots_of(name: str) -> jax.Array:
        slots = where(name)
        return later.setdefault(id(slots), (slots, slots + token))[1]

    return slots_of


def locate(buffer: Buffer, state: BufferState, draw: Draw, key: jax.Array) -> Any:
    """Returns where a storage on the host reads the leaves of a draw."""
    context, storage = context_of(buffer, state.writer), buffer.storage
    plan = buffer.unit.plan_read(context, state.unit, draw.slots, draw.mask, key)
    return storage.locate(context, state.storage, plan.where)


@by_description()
def num_anchors(buffer: Buffer, state: BufferState) -> jax.Array:
    """Returns the number of anchors that may be drawn, int32 `[]`."""
    return drawable_anchors(buffer, state).count


@by_description("batch_size")
def ready(buffer: Buffer, state: BufferState, batch_size: int | None) -> jax.Array:
    anchors = drawable_anchors(buffer, state)
    count = None if batch_size is None else batch_size * buffer.unit.anchors_per_entry
    is_ready = buffer.sampler.ready(state.sampler, anchors, count)
    if buffer.min_size is None:
        return is_ready
    return is_ready & (context_of(buffer, state.writer).held.size >= buffer.min_size)


def wait(buffer: Buffer, state: BufferState, sample: Sample) -> BufferState:
    """Returns the state such that later writes to it wait for the reads of the sample."""
    return _delay_writes(state, sample, sample.mask)[0]


def _delay_writes(
    state: BufferState, sample: Sample, mask: jax.Array
) -> tuple[BufferState, jax.Array]:
    """Returns a state whose later writes wait for a sample's reads; and a zero that does so too."""
    # Probabilities and weights are left out, so that they are not computed if they are not used.
    # The indices depend on the sampler's reads already.
    reads = sample.data, sample.indices, sample.info, sample.stamp, mask
    token = dependencies.zero_depending_on(reads)
    parts = dependencies.delay_writes_until((state.storage, state.writer, state.unit), token)
    return state.replace(storage=parts[0], writer=parts[1], unit=parts[2]), token


def has_item(sample: Sample) -> jax.Array:
    """Returns which anchors of a sample have an item, or any step of one, bool like `indices`."""
    entries = sample.mask.reshape(sample.mask.shape[0], -1).any(axis=1)
    # Of several anchors in an entry, those that it does not have are of weight 0.
    return entries if sample.indices.ndim == 1 else entries[:, None] & (sample.weights > 0)


# Changes of the sampler, and of ends.


@by_description()
def update(
    buffer: Buffer, state: BufferState, sample: Sample | jax.Array, priorities: jax.Array
) -> BufferState:
    state, slots, mask = target_slots(buffer, state, sample)
    if isinstance(sample, Sample) and priorities.shape != sample.indices.shape:
        priorities = buffer.unit.reduce_priorities(priorities, sample.mask)
    priorities = priorities.reshape(-1)
    sampler: Any = buffer.sampler  # with priorities, as the buffer has checked
    sampler = sampler.update(buffer.ring, state.sampler, slots, priorities, mask)
    return state.replace(sampler=sampler)


@by_description()
def drop(buffer: Buffer, state: BufferState, where: Sample | jax.Array) -> BufferState:
    state, slots, mask = target_slots(buffer, state, where)
    return state.replace(sampler=draw_limits.exclude(buffer, state.sampler, slots, mask))


def target_slots(
    buffer: Buffer, state: BufferState, where: Sample | jax.Array
) -> tuple[BufferState, jax.Array, jax.Array]:
    """Returns the state, the slots `[B]`, and which of them still hold the drawn items, `[B]`.

    If an entry of a sample has M anchors, their slots are `[B M]`.
    `where` is a sample, slots, or a mask of all slots, bool `[N]`.
    """
    if not isinstance(where, Sample) and where.dtype == jnp.bool_:
        # The slots are constants: writes to them would not wait for earlier draws. The writer's
        # state does.
        token = dependencies.zero_depending_on(state.writer)
        return state, jnp.arange(where.size, dtype=jnp.int32) + token, where
    if not isinstance(where, Sample):
        return state, where, jnp.ones(where.shape, jnp.bool_)
    # A slot that was overwritten, or emptied, since has another generation than the stamp.
    generation = buffer.writer.generation_of(buffer.ring, state.writer, where.indices)
    mask = (generation == where.stamp) & has_item(where)
    # Writes to the returned state, and at the returned slots, wait for the reads of the sample.
    state, token = _delay_writes(state, where, mask)
    return state, (where.indices + token).reshape(-1), mask.reshape(-1)


@by_description()
def truncate(buffer: Buffer, state: BufferState, which: jax.Array) -> BufferState:
    """Ends the running episodes of some environments, bool `[E]`, at their newest rows."""
    return _end_episodes(buffer, context_of(buffer, state.writer), state, which)


def _end_episodes(
    buffer: Buffer, context: Context, state: BufferState, which: jax.Array
) -> BufferState:
    unit, change = buffer.unit.truncate(context, state.unit, which)
    state = state.replace(unit=unit)
    if state.transforms:
        learners = transforming.stateful_transforms(buffer.transforms)
        pairs = zip(learners, state.transforms, strict=True)
        state = state.replace(transforms=tuple(it.truncate(own, which) for it, own in pairs))
    # Without a change, no anchor enters or departs.
    return state if change is None else _update_sampler(buffer, context, state, change)


@by_description()
def take(buffer: Buffer, state: BufferState, indices: jax.Array) -> Item:
    context = context_of(buffer, state.writer)
    return buffer.storage.read(context, state.storage, lambda name: indices)


@by_description()
def empty(buffer: Buffer, state: BufferState) -> BufferState:
    # The token depends on the state itself. Constants do not depend on earlier reads: XLA would
    # write them before these, into a copy.
    ring, token = buffer.ring, dependencies.zero_depending_on(state.writer)
    storage = (
        state.storage if state.storage is None else buffer.storage.reset(ring, state.storage, token)
    )
    sampler = buffer.sampler.reset(ring, state.sampler, token)
    if buffer.sampler.max_draws is not None:
        sampler = sampler.replace(drawable=sum_tree.clear(sampler.drawable, token))
    return state.replace(
        storage=storage,
        writer=buffer.writer.reset(ring, state.writer, token),
        sampler=sampler,
        unit=buffer.unit.reset(ring, state.unit, token),
    )
