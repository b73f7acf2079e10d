"""Positions of rows within episodes, and a table of episodes to draw from.

N capacity, E environments, R = N / E rows, T time, B batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import pytree
from jrb._xla import dependencies, gather, random_bits
from jrb.ring import Ring, locate
from jrb.types import Anchors, AnchorUpdate, Context, WritePlan
from jrb.units import anchors as anchor_queue

_STARTS = 1  # the number that `random_bits.fold` gets for starts within episodes


def lengths(
    before: jax.Array, done: jax.Array, plan: WritePlan, most: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the length of the episode up to each row, inclusive, and after the call.

    Args:
        before: int32 `[E]`, the number of rows of the running episode before the call.
        done: bool `[T, E]`, True for rows that end an episode.
        plan: the plan of the write.
        most: the largest length that is returned.

    Returns:
        int32 `[T, E]`, undefined for rows that are not written; and int32 `[E]`, the next `before`.
    """
    written, passed = plan.written_by_clock, plan.passed_by_clock
    start = jnp.broadcast_to(-before, done.shape[1:])
    # The number of rows at the last end up to each row; negative if that was before the call.
    ends = lax.cummax(jnp.where(done & written, passed, start), axis=0)
    starts = jnp.concatenate([start[None], ends[:-1]]) if len(done) > 1 else start[None]
    return jnp.minimum(passed - starts, most), jnp.minimum(passed[-1] - ends[-1], most)


def mark_newest(context: Context, ended: jax.Array, which: jax.Array) -> jax.Array:
    """Returns `ended`, bool `[N]`, set also at the newest row of each environment in `which`."""
    ring, held = context.ring, context.held
    newest = jnp.where(which & (held.rows(ring) > 0), held.newest(ring), ring.capacity)
    return ended.at[newest].set(True, mode="drop")


def steps_ahead(
    context: Context, ended: jax.Array | None, slots: jax.Array, most: int
) -> jax.Array:
    """Returns the number of rows from each slot, inclusive, to the end of its episode.

    Args:
        context: the buffer's context.
        ended: bool `[N]`, True for slots that end an episode; None to cross ends.
        slots: int32 `[B]`.
        most: the largest number that is returned.

    Returns:
        int32 `[B]`, from 1 to `most`.
    """
    ring, newest = context.ring, context.held.after(context.ring, slots)
    # Windows that cross episodes end at the newest row only.
    if ended is None:
        return jnp.clip(newest + 1, 1, most)
    # The flag of the last of `most` rows is not read: the count ends there in any case.
    step = jnp.arange(most - 1, dtype=jnp.int32)
    at = ring.slot_after(slots[:, None], jnp.minimum(step, ring.rows - 1) * ring.envs)
    is_last = gather.read(ended, at)
    # Flags beyond the newest row are of rows that were overwritten: `newest` cuts them off.
    first = jnp.min(jnp.where(is_last, step, most - 1), axis=1, initial=most - 1)
    return jnp.maximum(jnp.minimum(first, newest) + 1, 1)


def steps_back(context: Context, ended: jax.Array | None, slots: jax.Array, most: int) -> jax.Array:
    """Returns how many rows of the same episode are held before each slot, int32 `[B]`, 0 to most.

    Arguments are those of `steps_ahead`.
    """
    ring, oldest = context.ring, context.held.before(context.ring, slots)
    # Windows that cross episodes begin at the oldest row only.
    if ended is None:
        return jnp.minimum(oldest, most)
    # Read the flags of the `most` rows before each slot; the nearest end is not in the episode.
    step = jnp.arange(most, dtype=jnp.int32)
    at = ring.slot_before(slots[:, None], jnp.minimum(step + 1, ring.rows) * ring.envs)
    is_last = gather.read(ended, at)
    first = jnp.min(jnp.where(is_last, step, most), axis=1, initial=most)
    return jnp.minimum(first, oldest)


class EpisodeTable(pytree.State):
    """The episodes with at least `enough` held rows, of each environment from old to new.

    All functions on a table take the same `enough`. Every episode in the table is an anchor; or, if
    `whole`, only complete episodes whose first row is held. The table has room for M episodes of
    each environment. A time is the number of a row in its environment, counted from the first row
    written, modulo 2^32.

    Attributes:
        first: uint32 `[M, E]`, the time of the episode's first row.
        last: uint32 `[M, E]`, the time of its last row; undefined for the running one.
        head: int32 `[E]`, the position of the oldest episode.
        count: int32 `[E]`, the number of episodes, including the running one.
        length: int32 `[E]`, the number of rows of the running episode, at most `enough + 1`.
        now: uint32 `[E]`, the time of the next row.
    """

    first: jax.Array
    last: jax.Array
    head: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()
    length: jax.Array = pytree.tally()
    now: jax.Array

    @property
    def running(self) -> tuple[jax.Array, jax.Array]:
        """The index in `first` and `last` of the newest episode of each environment."""
        room, envs = self.first.shape
        return (self.head + self.count - 1) % room, jnp.arange(envs, dtype=jnp.int32)

    def num_anchors(self, whole: bool) -> jax.Array:
        """Returns the number of episodes that are anchors, int32 `[E]`."""
        if not whole:
            return self.count
        return jnp.maximum(self.count - (self.length > 0).astype(jnp.int32), 0)


def init(ring: Ring, enough: int) -> EpisodeTable:
    """Returns a table without episodes; `enough` is the least length of an episode in it."""
    zeros = lambda dtype, *shape: jnp.zeros((*shape, ring.envs), dtype)
    # 2 more, for episodes of which a part is held, at both ends of the ring.
    room = ring.rows // enough + 2
    return EpisodeTable(
        first=zeros(jnp.uint32, room),
        last=zeros(jnp.uint32, room),
        head=zeros(jnp.int32),
        count=zeros(jnp.int32),
        length=zeros(jnp.int32),
        now=zeros(jnp.uint32),
    )


def after_write(
    context: Context,
    table: EpisodeTable,
    plan: WritePlan,
    done: jax.Array,
    enough: int,
    length: jax.Array | None = None,
) -> tuple[EpisodeTable, AnchorUpdate, jax.Array]:
    """Updates the table by a write: episodes grow, begin, end, and leave if too few rows are held.

    Args:
        context: the buffer's context, before the write.
        table: the table before the write.
        plan: the plan of the write.
        done: bool `[T, E]`, True for rows that end an episode.
        enough: as for `init`.
        length: if whole episodes are anchors, the length of the episode up to each row, int32
            `[T, E]`, exact up to R; None if every episode in the table is an anchor.

    Returns:
        The table after the write; the update of the anchors; and the position in the table of each
        row's episode, int32 `[T, E]`.
    """
    ring, expired, added = context.ring, plan.expired_by_clock, plan.rows_by_clock
    written, whole = plan.written_by_clock, length is not None
    after, number, position = _add_rows(ring, table, plan, written, added, done, enough)
    # Remove the episodes of which the write has overwritten too many rows.
    rows_held = context.held.rows(ring) + added - expired
    after = _remove_lost(ring, after, rows_held, plan, enough, whole)
    # A running episode counts as at most R + 1 rows long: ages never overflow.
    at, most = after.running, np.uint32(ring.rows + 1)
    first = dependencies.materialize(lambda: after.first[at])
    first = jnp.where(after.now - first > most, after.now - most, first)
    after = after.replace(first=after.first.at[at].set(first))
    # Whole episodes become anchors when they end, others when they are long enough.
    arrived = jnp.sum(done & written, axis=0, dtype=jnp.int32) if whole else number[-1]
    update = _describe_update(context, plan, table, after, arrived, done, length)
    if whole:
        # The rows that expire, of which none is an anchor any more.
        update = dataclasses.replace(update, **AnchorUpdate.departures(context, plan))
    return after, update, position


def _add_rows(
    ring: Ring,
    table: EpisodeTable,
    plan: WritePlan,
    written: jax.Array,
    added: jax.Array,
    done: jax.Array,
    enough: int,
) -> tuple[EpisodeTable, jax.Array, jax.Array]:
    """Adds the rows of a write to the table; `written` and `added` are those of its plan, by clock.

    Returns:
        The table; the number of episodes that entered it up to each row, int32 `[T, E]`; and the
        position in the table of each row's episode, int32 `[T, E]`.
    """
    passed = plan.passed_by_clock
    # An episode enters the table with the row that makes it long enough, so just once.
    size, running = lengths(table.length, done, plan, enough + 1)
    enters = written & (size == enough)
    number = jnp.cumsum(enters, axis=0, dtype=jnp.int32)
    room, env = table.first.shape[0], jnp.arange(ring.envs, dtype=jnp.int32)
    # Rows before the first episode that enters in this call belong to the running one.
    position = (table.head + table.count - 1 + number) % room
    time = table.now + passed.astype(jnp.uint32) - 1

    def put(array: jax.Array, which: jax.Array, value: jax.Array) -> jax.Array:
        # Of more episodes than there is room for, the last ones are stored.
        is_stored = which & (number > number[-1] - room)
        return array.at[jnp.where(is_stored, position, room), env].set(value, mode="drop")

    # More episodes may enter in a call than the table has room for: the oldest ones leave it.
    count = table.count + number[-1]
    surplus = jnp.maximum(count - room, 0)
    after = EpisodeTable(
        first=put(table.first, enters, time - np.uint32(enough - 1)),
        last=put(table.last, written & done & (size >= enough), jnp.broadcast_to(time, done.shape)),
        head=(table.head + surplus) % room,
        count=count - surplus,
        length=running,
        now=table.now + added.astype(jnp.uint32),
    )
    return after, number, position


def truncate(
    context: Context,
    table: EpisodeTable,
    which: jax.Array,
    enough: int,
    length: jax.Array | None = None,
) -> tuple[EpisodeTable, AnchorUpdate | None]:
    """Ends the running episodes of environments `which`, bool `[E]`, at the newest row.

    If whole episodes are anchors, `length`, int32 `[E]`, is the number of rows of the running ones.
    """
    at, env = table.running
    at = jnp.where(which & (table.length >= enough), at, table.first.shape[0])
    last = table.last.at[at, env].set(table.now - 1, mode="drop")
    after = table.replace(last=last, length=jnp.where(which, 0, table.length))
    if length is None:
        return after, None
    # Episodes that run become whole ones, if all of their rows are held.
    ring, now, runs = context.ring, anchor_queue.no_rows(context.ring), which & (table.length > 0)
    after = _remove_lost(ring, after, context.held.rows(ring), now, enough, whole=True)
    arrived = runs.astype(jnp.int32)
    return after, _describe_update(context, now, table, after, arrived, runs[None], length[None])


def _describe_update(
    context: Context,
    plan: WritePlan,
    before: EpisodeTable,
    after: EpisodeTable,
    arrived: jax.Array,
    ends: jax.Array,
    length: jax.Array | None,
) -> AnchorUpdate:
    """Returns the update by which `arrived` episodes, int32 `[E]`, became anchors.

    `ends`, bool `[T, E]`, is True for rows that end an episode. It has slots only if whole episodes
    are anchors, whose `length` is then that of `after_write`.
    """
    whole, entered = length is not None, jnp.zeros(0, jnp.int32)
    departed = before.num_anchors(whole) + arrived - after.num_anchors(whole)
    count, arrived = (jnp.sum(number, dtype=jnp.int32) for number in (departed, arrived))
    # A whole episode enters by its first row, if that is held.
    if length is not None:
        back = jnp.maximum(length - 1, 0)[..., None]
        entered = anchor_queue.rows_back(context, plan, back, ends[..., None])
    return AnchorUpdate(
        entered=entered,
        entered_count=arrived,
        departed_count=count,
        departed_from=lambda rank: jnp.maximum(count - rank, 0),
        reordered=(arrived + count > 0) & (context.ring.envs > 1),
    )


def _remove_lost(
    ring: Ring,
    table: EpisodeTable,
    rows_held: jax.Array,
    plan: WritePlan,
    enough: int,
    whole: bool,
) -> EpisodeTable:
    """Removes episodes with less than `enough` of their rows among the last `rows_held`.

    If `whole`, removes those that are not held completely. A running episode always stays.
    """
    room, env = table.first.shape[0], jnp.arange(ring.envs, dtype=jnp.int32)

    def drop_oldest(table: EpisodeTable, most: int) -> EpisodeTable:
        offset = jnp.arange(most, dtype=jnp.int32)[:, None]
        # A whole episode is lost with its first row, others if less than `enough` rows are held.
        edge = table.first if whole else table.last
        edge = dependencies.materialize(lambda: edge[(table.head + offset) % room, env])
        # The running episode stays, as its `last` is not set yet.
        runs = (offset == table.count - 1) & (table.length >= enough)
        age = table.now - 1 - edge
        is_lost = (offset < table.count) & ~runs & (age + enough > rows_held.astype(jnp.uint32))
        lost = jnp.sum(is_lost, axis=0, dtype=jnp.int32)
        return table.replace(head=(table.head + lost) % room, count=table.count - lost)

    # Rows of a bounded write displace no more than these episodes.
    few = min(plan.length, ring.rows) // enough + 2
    if plan.bounded:
        return drop_oldest(table, few)
    # In the rows that other writes may expire, episodes are removed `few` at a time.
    expired, each = jnp.max(plan.expired), max(1, (few - 2) * enough)
    return anchor_queue.in_passes(drop_oldest, table, expired, each, few, room)


def anchors(context: Context, table: EpisodeTable, enough: int, whole: bool = False) -> Anchors:
    """Returns anchors whose ranks are episodes; each rank stands for some row of its episode.

    It is a random row from which at least `enough` rows are left; or the first row, if `whole`.
    """
    ring, held = context.ring, context.held
    counts = jnp.where(held.rows(ring) < enough, 0, table.num_anchors(whole))
    total, newest = jnp.sum(counts, dtype=jnp.int32), held.newest(ring)

    def nth(ranks: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The episode of each rank, and its extent.
        env, index = locate(counts, ranks)
        at = (table.head[env] + index) % table.first.shape[0]
        age, num_rows = extent(context, table, env, at, enough)
        # Draw one of the rows from which at least `enough` rows are left.
        starts = jnp.ones_like(age) if whole else jnp.maximum(num_rows - (enough - 1), 1)
        words = random_bits.words(random_bits.fold(key, _STARTS), ranks.size)
        # Count the rows from the newest one back to the drawn start.
        back = age + num_rows - 1 - random_bits.below(starts, *words)
        slots = ring.slot_before(newest[env], back * ring.envs)
        return jnp.where(ranks < total, slots, newest[0]), 1 / starts.astype(jnp.float32)

    return Anchors(count=total, nth=nth)


def extent(
    context: Context, table: EpisodeTable, env: jax.Array, at: jax.Array, enough: int
) -> tuple[jax.Array, jax.Array]:
    """Returns how many rows ago an episode ended, and how many of its rows are held, int32 `[B]`.

    Args:
        context: the buffer's context.
        table: the episodes.
        env: int32 `[B]`, the environment of the episode.
        at: int32 `[B]`, the position of the episode in the table.
        enough: as for `init`.
    """
    rows_held = jnp.broadcast_to(context.held.rows(context.ring), table.head.shape)[env]
    first, last = dependencies.materialize(lambda: (table.first[at, env], table.last[at, env]))
    # The running episode ends, for now, with the newest row.
    is_running = (at == table.running[0][env]) & (table.length[env] >= enough)
    newest = table.now[env] - 1
    last = jnp.where(is_running, newest, last)
    # Of the oldest episode, the first rows may be overwritten.
    age = (newest - last).astype(jnp.int32)
    return age, jnp.minimum((last - first + 1).astype(jnp.int32), rows_held - age)


def lengths_from(context: Context, table: Any, slots: jax.Array) -> jax.Array:
    """Returns the lengths of whole episodes whose first rows are at slots, int32 `[B]`.

    `table` is an `EpisodeTable` of all episodes, however short (`enough` is 1). Slots that are no
    first rows give some number of at least 1.
    """
    ring, room = context.ring, table.first.shape[0]
    env, back = ring.env_of(slots), context.held.after(ring, slots)
    newest, head = table.now[env] - 1, table.head[env]

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        at = (head + middle) % room
        first = dependencies.materialize(lambda: table.first[at, env])
        begins_later = newest - first < back.astype(jnp.uint32)
        return jnp.where(begins_later, low, middle), jnp.where(begins_later, middle - 1, high)

    # Episodes are in the order of time: search for the last that begins no later than the slot.
    bounds = jnp.zeros_like(back), jnp.maximum(table.count[env] - 1, 0)
    index, _ = dependencies.loop(room.bit_length(), halve, bounds)
    return jnp.maximum(extent(context, table, env, (head + index) % room, 1)[1], 1)
