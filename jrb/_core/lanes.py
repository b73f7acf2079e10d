"""Anchors where each environment goes on by itself: queues of them, lane by lane.

N capacity, E environments, R = N / E rows, T time. Within a lane anchors come and go in the order
of time, so that only fronts and ends of queues move. Between lanes there is no order.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb._xla import dependencies
from jrb.occupancy import PerEnvOccupancy, lane_of
from jrb.ring import Ring
from jrb.types import Anchors, AnchorUpdate, Context, WritePlan


class PerEnvAnchorQueues(pytree.State):
    """First-in, first-out rings of slots, one for each environment.

    Attributes:
        slots: int32 `[E, R]`.
        head: int32 `[E]`, where the one that came first stands.
        count: int32 `[E]`, how many there are.
    """

    slots: jax.Array
    head: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()


def are_in(context: Context) -> bool:
    """Whether each environment goes on by itself."""
    return isinstance(context.held, PerEnvOccupancy)


def init(ring: Ring) -> PerEnvAnchorQueues:
    """Empty queues."""
    return PerEnvAnchorQueues(
        slots=jnp.zeros((ring.envs, ring.rows), jnp.int32),
        head=jnp.zeros(ring.envs, jnp.int32),
        count=jnp.zeros(ring.envs, jnp.int32),
    )


def anchors(ring: Ring, queue: PerEnvAnchorQueues) -> Anchors:
    """All that are in the queues, one queue after the other."""
    ends = jnp.cumsum(queue.count, dtype=jnp.int32)

    def nth(places: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        lane = lane_of(ends, places)
        step = jnp.clip(places - (ends - queue.count)[lane], 0, ring.rows - 1)
        slots = _slots(ring, queue, lane, step)
        return slots, jnp.ones(places.shape, jnp.float32)

    return Anchors(count=ends[-1], nth=nth)


def _slots(ring: Ring, queue: PerEnvAnchorQueues, lane: jax.Array, step: jax.Array) -> jax.Array:
    """Those that stand so far behind the heads of some lanes."""
    at = ring.row_after(queue.head[lane], step)
    return dependencies.read(lambda: queue.slots.at[lane, at].get(mode="promise_in_bounds"))


def after_write(
    context: Context,
    queue: PerEnvAnchorQueues,
    write: WritePlan,
    entered: jax.Array,
    slack: int,
    lookback: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[PerEnvAnchorQueues, AnchorUpdate]:
    """As `anchor_queue.after_write`; `entered` is int32 `[T * E * k]`, row by row."""
    ring, (expired, _) = context.ring, write.lengths
    most = min(write.length + slack, ring.rows) if write.bounded else ring.rows
    lane, place = jnp.arange(ring.envs, dtype=jnp.int32)[:, None], jnp.arange(most, dtype=jnp.int32)
    slots = _slots(ring, queue, lane, place)
    needs = context.held.before(ring, slots) - (lookback(slots) if lookback else 0)
    leaves = (place < queue.count[:, None]) & (needs < expired[:, None])
    gone = jnp.sum(leaves, axis=1, dtype=jnp.int32)
    came = jnp.sum(entered < ring.capacity, dtype=jnp.int32)
    before = jnp.cumsum(queue.count, dtype=jnp.int32) - queue.count
    change = AnchorUpdate(
        entered=entered,
        consecutive=False,
        expired=None,
        most=None,
        removed=jnp.where(leaves, slots, ring.capacity).reshape(-1),
        entered_count=came,
        departed_count=jnp.sum(gone, dtype=jnp.int32),
        departed_from=lambda start: jnp.sum(
            leaves & (before[:, None] + place >= start), dtype=jnp.int32
        ),
        reordered=(came + jnp.sum(gone) > 0) & (ring.envs > 1),
    )
    left = queue.replace(head=ring.row_after(queue.head, gone), count=queue.count - gone)
    lanes = jnp.moveaxis(entered.reshape(write.length, ring.envs, -1), 1, 0)
    return _append(ring, left, lanes.reshape(ring.envs, -1)), change


def _append(ring: Ring, queue: PerEnvAnchorQueues, slots: jax.Array) -> PerEnvAnchorQueues:
    """Slots join the ends, int32 `[E, K]`; N where there is none."""
    joins = slots < ring.capacity
    place = queue.count[:, None] + jnp.cumsum(joins, axis=1, dtype=jnp.int32) - 1
    at = jnp.where(joins, ring.row_after(queue.head[:, None], place), ring.rows)
    lane = jnp.arange(ring.envs, dtype=jnp.int32)[:, None]
    return queue.replace(
        slots=queue.slots.at[lane, at].set(slots, mode="drop"),
        count=queue.count + jnp.sum(joins, axis=1, dtype=jnp.int32),
    )


def every_slot(context: Context, write: WritePlan) -> AnchorUpdate:
    """The change where every slot that holds an item is an anchor.

    An item that takes the place of another has its place among the anchors too: only what makes a
    lane longer moves the others.
    """
    ring, held, (left, came) = context.ring, context.held, write.lengths
    grown = jnp.maximum(came - left, 0)
    moves = (ring.envs > 1) | jnp.any(held.first >= ring.envs)
    none = jnp.zeros((), jnp.int32)
    change = AnchorUpdate(
        entered=write.slots.reshape(-1),
        consecutive=False,
        expired=None,
        most=None,
        removed=jnp.zeros(0, jnp.int32),
        entered_count=jnp.sum(grown, dtype=jnp.int32),
        departed_count=none,
        departed_from=lambda start: none,
        reordered=jnp.any(grown > 0) & moves,
    )
    return change if write.bounded else _shortened(context, change, leaving(context, write))


def leaving(context: Context, write: WritePlan) -> jax.Array:
    """The slots of the rows that leave, int32 `[K, E]`, K at most R; N where there is none."""
    ring, (expired, _) = context.ring, write.lengths
    most = min(write.length, ring.rows) if write.bounded else ring.rows
    slots, row = context.held.oldest(ring, most), jnp.arange(most, dtype=jnp.int32)[:, None]
    return jnp.where(row < expired, slots, ring.capacity)


def _shortened(context: Context, change: AnchorUpdate, slots: jax.Array) -> AnchorUpdate:
    """The same where slots, N for none, are left in whose places nothing comes."""
    ring, held = context.ring, context.held
    gone, safe = slots < ring.capacity, jnp.minimum(slots, ring.capacity - 1)
    behind = lambda start: gone & (held.place(ring, safe) >= start)
    return dataclasses.replace(
        change,
        removed=slots.reshape(-1),
        departed_count=jnp.sum(gone, dtype=jnp.int32),
        departed_from=lambda start: jnp.sum(behind(start), dtype=jnp.int32),
        reordered=jnp.any(gone),
    )
