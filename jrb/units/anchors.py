"""A queue of the slots that a unit chose as anchors.

N capacity, E environments, R = N / E rows, S streams (see `jrb.ring`), T time.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import pytree
from jrb._xla import dependencies, gather
from jrb.ring import Ring, first_places, locate
from jrb.types import Anchors, AnchorUpdate, Context, WritePlan

T = TypeVar("T")


class AnchorQueue(pytree.State):
    """First-in, first-out rings of slots, one per stream. With one stream, `[S]` is `[]`.

    Attributes:
        slots: int32 `[N]`, the slots; those of stream s are in the part from s * N / S on.
        head: int32 `[S]`, the offset of the oldest anchor in the part of its stream.
        count: int32 `[S]`, the number of anchors.
    """

    slots: jax.Array
    head: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()

    def read(self, ring: Ring, offset: Any) -> tuple[jax.Array, jax.Array]:
        """Returns `positions(ring, offset)`, and the slots there."""
        at = self.positions(ring, offset)
        return at, gather.read(self.slots, at)

    def positions(self, ring: Ring, offset: Any) -> jax.Array:
        """Returns positions in `slots`, `[K]` or `[K, S]`, at offsets from the heads."""
        # With one stream, the ring of slots is the ring of the buffer, from slot 0 on.
        if not self.head.ndim:
            return ring.slot_after(self.head, offset)
        # With several, each is a ring of R slots in its own part.
        part = np.arange(ring.envs, dtype=np.int32) * ring.rows
        return ring.row_after(self.head, offset) + part

    def without_first(self, ring: Ring, number: jax.Array) -> "AnchorQueue":
        """Returns the queue without `number` of the oldest anchors of each stream."""
        # The part of a stream in `slots` is as long as the ring has rows.
        after = ring.row_after if self.head.ndim else ring.slot_after
        return self.replace(head=after(self.head, number), count=self.count - number)


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
            # The caller masks ranks beyond the last anchor, which must stay in a stream's part.
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
        # True, as `rows_back` masks rows that are not written; no row has passed the cursor.
        written=jnp.ones(1, jnp.bool_),
        passed=jnp.zeros(1, jnp.int32),
        expired=jnp.zeros((), jnp.int32),
        consecutive=False,
    )


def rows_back(context: Context, plan: WritePlan, back: jax.Array, which: jax.Array) -> jax.Array:
    """Returns the slots of rows that come some rows before each written row, if they are held.

    Args:
        context: the buffer's context, before the write.
        plan: the plan of the write.
        back: int32 `[K]` or `[T, E, K]`, how many rows before, from 0.
        which: bool `[T, E, K]`, True for the slots to return.

    Returns:
        int32 `[T * E * K]`, row by row; N for slots that are not to be returned or not held.
    """
    ring, held, expired = context.ring, context.held, plan.expired_by_clock
    written, passed = plan.written_by_clock[..., None], plan.passed_by_clock[..., None]
    cursor, first = held.next_row(ring)[:, None], (expired - held.rows(ring))[:, None]
    # The rows of this call follow the cursor.
    row = ring.row_after(cursor, passed - back - 1 + ring.rows)
    slots = row * ring.envs + jnp.arange(ring.envs, dtype=jnp.int32)[:, None]
    # Rows up to `first`, relative to the cursor, are not held after the call.
    is_held = which & written & (passed - back > first)
    return jnp.where(is_held, slots, ring.capacity).reshape(-1)


def after_write(
    context: Context,
    queue: AnchorQueue,
    plan: WritePlan,
    entered: jax.Array,
    slack: int,
    lookback: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[AnchorQueue, AnchorUpdate]:
    """Removes the anchors whose rows are no longer held, and appends new ones.

    Args:
        context: the buffer's context, before the write.
        queue: the queue before the write.
        plan: the plan of the write, which says how many rows expire.
        entered: int32 `[T * E * k]`, the slots that enter, in this order; N for padding.
        slack: the number of rows by which an anchor may be older than one before it in the queue.
        lookback: a function from slots, int32 `[...]`, to the number of rows that each needs before
            it; None if they need none.
    """
    ring, held, is_one = context.ring, context.held, context.held.streams == 1
    # With one stream, `[]` stands for `[S]`.
    expired = plan.expired_by_clock[0] if is_one else plan.expired_by_clock

    def is_expired(slots: jax.Array) -> jax.Array:
        return held.before(ring, slots) - (lookback(slots) if lookback else 0) < expired

    queue, departed, departed_from, reordered = _remove_expired(
        ring, queue, plan, expired, is_expired, slack
    )
    entered_count = jnp.sum(entered < ring.capacity, dtype=jnp.int32)
    departed_count = jnp.sum(departed, dtype=jnp.int32)
    update = AnchorUpdate(
        entered=entered,
        entered_count=entered_count,
        departed_count=departed_count,
        departed_from=departed_from,
        # The ranks of streams follow each other, so any change of one moves those behind it.
        reordered=reordered if is_one else entered_count + departed_count > 0,
        **AnchorUpdate.departures(context, plan),
    )
    return _append_anchors(ring, queue, plan.length, entered), update


def _remove_expired(
    ring: Ring,
    queue: AnchorQueue,
    plan: WritePlan,
    expired: jax.Array,
    is_expired: Callable[[jax.Array], jax.Array],
    slack: int,
) -> tuple[AnchorQueue, jax.Array, Callable[[jax.Array], jax.Array], jax.Array]:
    """Removes the anchors for which `is_expired` is True, after a write by which rows expire.

    Returns:
        The queue without them; their number, int32 `[S]`; the function `departed_from` of an
        `AnchorUpdate`; and True if anchors that stay changed their order, bool `[]`.
    """
    counts, is_one = queue.count, not queue.head.ndim
    width, room = (ring.envs, ring.capacity) if is_one else (1, ring.rows)
    most = min(plan.length, ring.rows) * width
    # If any number of rows may expire, remove all anchors before the first one that stays.
    if not plan.bounded:
        queue = _remove_prefix(ring, queue, is_expired, jnp.max(expired) * width, most, room)
    passed_over = counts - queue.count
    # A bounded write expires at most `most` anchors. With `slack`, they may follow younger ones.
    offset = first_places(min(most + slack * width, room))
    offset = offset if is_one else offset[:, None]
    at, slots = queue.read(ring, offset)
    exists = offset < queue.count
    leaving = exists & is_expired(slots)
    count = jnp.sum(leaving, axis=0, dtype=jnp.int32)
    start = 0 if is_one else jnp.cumsum(counts) - counts  # the rank of each stream's first anchor
    rank = start + passed_over + offset

    def departed_from(from_rank: jax.Array) -> jax.Array:
        of_prefix = jnp.clip(start + passed_over - from_rank, 0, passed_over)
        behind = jnp.sum(leaving & (rank >= from_rank), dtype=jnp.int32)
        return behind if plan.bounded else behind + jnp.sum(of_prefix, dtype=jnp.int32)

    reordered = jnp.bool_(False)
    # In one stream of several environments, anchors that waited for later rows stand behind younger
    # ones of other environments; in all other cases only a prefix of the queue leaves.
    if slack and width > 1:
        reordered = jnp.any(leaving & (offset >= count))
        # Anchors that stay move to the end of this part, each by the number behind it that leave.
        behind = count - jnp.cumsum(leaving, dtype=jnp.int32)
        to = jnp.where(exists & ~leaving, ring.slot_after(at, behind), ring.capacity)
        queue = queue.replace(slots=queue.slots.at[to].set(slots, mode="drop"))
    return queue.without_first(ring, count), passed_over + count, departed_from, reordered


def _remove_prefix(
    ring: Ring,
    queue: AnchorQueue,
    is_expired: Callable[[jax.Array], jax.Array],
    most_expired: jax.Array,
    size: int,
    room: int,
) -> AnchorQueue:
    """Removes all anchors before the first one that stays, `size` at a time."""

    def remove_some(queue: AnchorQueue, size: int) -> AnchorQueue:
        offset = jnp.arange(size, dtype=jnp.int32)
        # A prefix leaves, as long as the offset of the first that stays.
        offset = offset[:, None] if queue.head.ndim else offset
        _, slots = queue.read(ring, offset)
        stays = (offset >= queue.count) | ~is_expired(slots)
        return queue.without_first(ring, jnp.min(jnp.where(stays, offset, size), axis=0))

    return in_passes(remove_some, queue, most_expired, size, size, room)


def _append_anchors(ring: Ring, queue: AnchorQueue, length: int, entered: jax.Array) -> AnchorQueue:
    """Appends the anchors that enter with `length` rows to the queues of their streams."""
    # Several anchors may enter with one row; those of an environment keep their order.
    if queue.head.ndim:
        by_env = entered.reshape(length, ring.envs, -1)
        entered = jnp.moveaxis(by_env, 1, 2).reshape(-1, ring.envs)
    # A column, in one shape for all kernels.
    entered = entered.reshape(entered.shape[0], -1)
    # The running count of real slots gives each its position; padding goes nowhere.
    is_real = entered < ring.capacity
    offset = queue.count + jnp.cumsum(is_real, axis=0, dtype=jnp.int32) - 1
    at = jnp.where(is_real, queue.positions(ring, offset), ring.capacity)
    added = jnp.sum(is_real, axis=0, dtype=jnp.int32).reshape(queue.count.shape)
    return queue.replace(slots=gather.put(queue.slots, at, entered), count=queue.count + added)


def in_passes(
    step: Callable[[T, int], T], carry: T, most: jax.Array, each: int, size: int, room: int
) -> T:
    """Applies `step(carry, size)`, which removes up to `each` entries, until `most` are removed.

    On the CPU in a loop. Elsewhere in one step of size `room`, as the number of trips is unknown.
    """
    trips = dependencies.max_over_batch(most) // each + 1
    return lax.platform_dependent(
        cpu=lambda: dependencies.loop(trips, lambda _, carry: step(carry, size), carry),
        default=lambda: step(carry, room),
    )
