"""Anchors of units: all slots that hold items, or a queue of slots that a unit chose.

N capacity, E environments, R = N / E rows, S streams (see `jrb.ring`), T time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import pytree
from jrb._xla import dependencies, gather, scatter
from jrb.ring import Occupancy, Ring, first_places, locate
from jrb.types import Anchors, AnchorUpdate, Context, WritePlan

T = TypeVar("T")

_FEW = 64
"""Of so many slots all pairs are compared."""


def all_held(context: Context) -> Anchors:
    """Returns every slot that holds an item, oldest first, as anchors."""
    ring, held = context.ring, context.held

    def nth(ranks: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return held.nth(ring, ranks), jnp.ones(ranks.shape, jnp.float32)

    return Anchors(count=held.size, nth=nth, all_held=True)


def every_slot(context: Context, write: WritePlan) -> AnchorUpdate:
    """Returns the update by a write if every slot that holds an item is an anchor."""
    ring, held, (expired, passed) = context.ring, context.held, write.lengths
    entered = write.slots.reshape(-1)
    leaving = departures(context, write) if not write.bounded else _no_departures()
    if held.streams == 1:
        count = expired[0] * ring.envs
        overwritten = jnp.maximum(held.rows(ring) + passed - ring.rows, 0)[0]
        early = expired[0] > overwritten  # ranks then move, though no slot is written
        return AnchorUpdate(
            entered=entered,
            consecutive=write.consecutive,
            **leaving,
            entered_count=passed[0] * ring.envs,
            departed_count=count,
            departed_from=lambda rank: jnp.maximum(count - rank, 0),
            reordered=jnp.bool_(False) if write.bounded else early,
        )
    # An item that takes the place of another has its rank, too (see `Occupancy`): only what makes a
    # stream longer moves the ranks of others, and only rows that are not overwritten depart.
    grown = jnp.maximum(passed - expired, 0)
    removed = leaving["removed"]
    gone, safe = removed < ring.capacity, jnp.minimum(removed, ring.capacity - 1)
    at_or_behind = lambda rank: gone & (held.rank(ring, safe) >= rank)
    return AnchorUpdate(
        entered=entered,
        consecutive=False,
        **leaving,
        entered_count=jnp.sum(grown, dtype=jnp.int32),
        departed_count=jnp.sum(gone, dtype=jnp.int32),
        departed_from=lambda rank: jnp.sum(at_or_behind(rank), dtype=jnp.int32),
        reordered=jnp.any(grown > 0) if write.bounded else jnp.any(gone),
    )


def _no_departures() -> dict[str, Any]:
    return {"expired": None, "most": None, "removed": jnp.zeros(0, jnp.int32)}


def departures(context: Context, write: WritePlan) -> dict[str, Any]:
    """Returns the fields of an `AnchorUpdate` for rows that leave: a run of slots, or each slot."""
    ring, held, (expired, _) = context.ring, context.held, write.lengths
    most = min(write.length, ring.rows) if write.bounded else ring.rows
    if held.streams > 1:
        row = jnp.arange(most, dtype=jnp.int32)[:, None]
        slots = jnp.where(row < expired, held.oldest(ring, most), ring.capacity)
        return _no_departures() | {"removed": slots.reshape(-1)}
    run = Occupancy(first=held.first, count=jnp.minimum(expired, ring.rows) * ring.envs)
    return _no_departures() | {"expired": run, "most": most * ring.envs if write.bounded else None}


class AnchorQueue(pytree.State):
    """First-in, first-out rings of slots, one per stream. With one stream, `[]` stands for `[S]`.

    Attributes:
        slots: int32 `[N]`; stream s has the part from s * N / S on.
        head: int32 `[S]`, the offset of the oldest anchor in its part.
        count: int32 `[S]`, the number of anchors.
    """

    slots: jax.Array
    head: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()

    def positions(self, ring: Ring, offset: Any) -> jax.Array:
        """Positions in `slots`, `[K]` or `[K, S]`, at offsets `[K]` or `[K, S]` behind heads."""
        if not self.head.ndim:
            return ring.slot_after(self.head, offset)
        part = np.arange(ring.envs, dtype=np.int32) * ring.rows
        return ring.row_after(self.head, offset) + part

    def without_first(self, ring: Ring, number: jax.Array) -> "AnchorQueue":
        """Returns the queue without so many of the oldest anchors of each stream."""
        after = ring.row_after if self.head.ndim else ring.slot_after
        return self.replace(head=after(self.head, number), count=self.count - number)


@dataclasses.dataclass(frozen=True)
class Departed:
    """The anchors that left a queue: their number, how many had a rank or a later one, `[]`."""

    count: jax.Array
    from_rank: Callable[[jax.Array], jax.Array]
    reordered: jax.Array


def init(context: Context) -> AnchorQueue:
    """Returns an empty queue."""
    ring, shape = context.ring, () if context.held.streams == 1 else (context.held.streams,)
    return AnchorQueue(
        slots=jnp.zeros(ring.capacity, jnp.int32),
        head=jnp.zeros(shape, jnp.int32),
        count=jnp.zeros(shape, jnp.int32),
    )


def anchors(ring: Ring, queue: AnchorQueue) -> Anchors:
    """Returns the anchors of a queue, oldest first, stream by stream."""

    def nth(ranks: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        if queue.head.ndim:
            stream, offset = locate(queue.count, ranks)
            offset = jnp.clip(offset, 0, ring.rows - 1)
            at = stream * ring.rows + ring.row_after(queue.head[stream], offset)
        else:
            at = ring.slot_after(queue.head, ranks)
        return gather.read(queue.slots, at), jnp.ones(ranks.shape, jnp.float32)

    return Anchors(count=jnp.sum(queue.count, dtype=jnp.int32), nth=nth)


def no_rows(ring: Ring) -> WritePlan:
    """Returns the plan of a write without rows: `rows_back` then counts from the newest row."""
    return WritePlan(
        starts=jnp.full(1, ring.capacity, jnp.int32),
        slots=jnp.full((1, ring.envs), ring.capacity, jnp.int32),
        written=jnp.ones(1, jnp.bool_),
        passed=jnp.zeros(1, jnp.int32),
        expired=jnp.zeros((), jnp.int32),
        consecutive=False,
    )


def rows_back(context: Context, write: WritePlan, back: jax.Array, which: jax.Array) -> jax.Array:
    """Returns the slots some rows back from each row that is written, if they are still held.

    Args:
        context: of the buffer, before the write.
        write: the rows.
        back: int32 `[K]` or `[T, E, K]`, rows back, from 0.
        which: bool `[T, E, K]`.

    Returns:
        int32 `[T * E * K]`, by row; N where there is none.
    """
    ring, held, (expired, _) = context.ring, context.held, write.lengths
    written, passed = (array[:, :, None] for array in write.times)
    cursor, first = held.next_row(ring)[:, None], (expired - held.rows(ring))[:, None]
    row = ring.row_after(cursor, passed - back - 1 + ring.rows)
    slots = row * ring.envs + jnp.arange(ring.envs, dtype=jnp.int32)[:, None]
    is_held = which & written & (passed - back > first)
    return jnp.where(is_held, slots, ring.capacity).reshape(-1)


def after_write(
    context: Context,
    queue: AnchorQueue,
    write: WritePlan,
    entered: jax.Array,
    slack: int,
    lookback: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[AnchorQueue, AnchorUpdate]:
    """Removes the anchors whose rows are not held any more, and appends new ones.

    Args:
        context: of the buffer, before the write.
        queue: the queue before.
        write: which rows leave.
        entered: int32 `[T * E * k]`, slots that enter, in this order; N for padding.
        slack: by how many rows an anchor may be older than one before it in the queue.
        lookback: from slots, int32 `[...]`, to how many rows before it each of them needs; None if
            they need none.
    """
    ring, held = context.ring, context.held
    one, width = held.streams == 1, ring.envs // held.streams
    expired = write.lengths[0][0] if one else write.lengths[0]

    def leaves(slots: jax.Array) -> jax.Array:
        return held.before(ring, slots) - (lookback(slots) if lookback else 0) < expired

    # In one stream of several environments, anchors that waited for later rows stand behind younger
    # ones of other environments; in all other cases only a prefix of the queue leaves.
    is_prefix = slack == 0 or width == 1
    most = min(write.length, ring.rows) * width
    before = None
    if not write.bounded:
        queue, before = _remove_prefix(ring, queue, leaves, jnp.max(expired) * width, most)
    queue, departed = remove(ring, queue, leaves, most + slack * width, is_prefix)
    if before is not None:
        departed = _joined(before, departed)
    entered_count = jnp.sum(entered < ring.capacity, dtype=jnp.int32)
    update = AnchorUpdate(
        entered=entered,
        consecutive=False,
        **departures(context, write),
        entered_count=entered_count,
        departed_count=departed.count,
        departed_from=departed.from_rank,
        reordered=departed.reordered if one else entered_count + departed.count > 0,
    )
    if not one:
        by_env = entered.reshape(write.length, ring.envs, -1)
        entered = jnp.moveaxis(by_env, 1, 2).reshape(-1, ring.envs)
    return append(ring, queue, entered), update


def append(ring: Ring, queue: AnchorQueue, slots: jax.Array) -> AnchorQueue:
    """Returns the queue with slots behind its end, int32 `[K]` or `[K, S]`; N for padding."""
    slots = slots.reshape(slots.shape[0], -1)  # a column, in one shape for all kernels
    joins = slots < ring.capacity
    offset = queue.count + _running_count(joins) - 1
    at = jnp.where(joins, queue.positions(ring, offset), ring.capacity)
    return queue.replace(
        slots=scatter.put(queue.slots, at, slots),
        count=queue.count + jnp.sum(joins, axis=0, dtype=jnp.int32).reshape(queue.count.shape),
    )


def _running_count(joins: jax.Array) -> jax.Array:
    """How many of the first ones join, up to each: int32 `[K, S]` from bool `[K, S]`.

    Of few by pairs, never stored: for a running sum XLA compiles two kernels more, and on the CPU
    it adds up pairs as well.
    """
    if joins.size > _FEW or joins.shape[1] > 1:
        return jnp.cumsum(joins, axis=0, dtype=jnp.int32)
    number = np.arange(joins.size)
    upto = jnp.where(number[:, None] >= number, joins.reshape(-1), False)
    return jnp.sum(upto, axis=1, keepdims=True, dtype=jnp.int32)


def remove(
    ring: Ring,
    queue: AnchorQueue,
    leaves: Callable[[jax.Array], jax.Array],
    first: int,
    is_prefix: bool,
) -> tuple[AnchorQueue, Departed]:
    """Removes those of the first few of each stream that leave; the others keep their order.

    Args:
        ring: the ring's shape.
        queue: the queue.
        leaves: from slots, int32 `[...]`, to bool `[...]`.
        first: how many from each head may be among them.
        is_prefix: True if no anchor that stays is before one that leaves.
    """
    per_env = queue.head.ndim > 0
    offset = first_places(min(first, ring.rows if per_env else ring.capacity))
    offset = offset[:, None] if per_env else offset
    at = queue.positions(ring, offset)
    slots = gather.read(queue.slots, at)
    exists = offset < queue.count
    leaving = exists & leaves(slots)
    count = jnp.sum(leaving, axis=0, dtype=jnp.int32)
    rank = offset + jnp.cumsum(queue.count) - queue.count if per_env else offset
    departed = Departed(
        count=jnp.sum(count, dtype=jnp.int32),
        from_rank=lambda start: jnp.sum(leaving & (rank >= start), dtype=jnp.int32),
        reordered=jnp.bool_(False) if is_prefix else jnp.any(leaving & (offset >= count)),
    )
    if not is_prefix:  # those that stay move up to the end of this part of the queue
        behind = count - jnp.cumsum(leaving, dtype=jnp.int32)
        to = jnp.where(exists & ~leaving, ring.slot_after(at, behind), ring.capacity)
        queue = queue.replace(slots=queue.slots.at[to].set(slots, mode="drop"))
    return queue.without_first(ring, count), departed


def _remove_prefix(
    ring: Ring,
    queue: AnchorQueue,
    leaves: Callable[[jax.Array], jax.Array],
    most: jax.Array,
    chunk: int,
) -> tuple[AnchorQueue, Departed]:
    """Removes all anchors of each stream before the first one that stays; at most `most`."""
    counts = queue.count

    def pass_over(queue: AnchorQueue, size: int) -> AnchorQueue:
        offset = jnp.arange(size, dtype=jnp.int32)
        offset = offset[:, None] if queue.head.ndim else offset
        slots = gather.read(queue.slots, queue.positions(ring, offset))
        stays = (offset >= queue.count) | ~leaves(slots)
        return queue.without_first(ring, jnp.min(jnp.where(stays, offset, size), axis=0))

    room = ring.rows if queue.head.ndim else ring.capacity
    queue = in_passes(pass_over, queue, most, chunk, chunk, room)
    gone = counts - queue.count
    start = jnp.cumsum(counts) - counts if counts.ndim else 0
    departed = Departed(
        count=jnp.sum(gone, dtype=jnp.int32),
        from_rank=lambda rank: jnp.sum(jnp.clip(start + gone - rank, 0, gone), dtype=jnp.int32),
        reordered=jnp.bool_(False),
    )
    return queue, departed


def in_passes(
    step: Callable[[T, int], T], carry: T, most: jax.Array, each: int, size: int, room: int
) -> T:
    """Applies `step(carry, size)`, of which one removes `each`, until `most` are removed.

    In a loop on the CPU. Elsewhere in one step of size `room`, as the number of trips is unknown.
    """
    trips = dependencies.max_over_batch(most) // each + 1
    return lax.platform_dependent(
        cpu=lambda: dependencies.loop(trips, lambda _, carry: step(carry, size), carry),
        default=lambda: step(carry, room),
    )


def _joined(before: Departed, after: Departed) -> Departed:
    """All that left one stream when a prefix left first; in several, nothing leaves after it."""

    def from_rank(rank: jax.Array) -> jax.Array:
        return before.from_rank(rank) + after.from_rank(jnp.maximum(rank - before.count, 0))

    return Departed(before.count + after.count, from_rank, after.reordered)


def waited(queue: AnchorQueue) -> jax.Array:
    """Returns an int32 zero that depends on all reads that the queue waits for."""
    return jnp.minimum(jnp.min(queue.head) + jnp.min(queue.count), 0)
