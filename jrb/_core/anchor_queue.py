"""The anchors in the order in which they came, for units that choose them.

N capacity, E environments, T time.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core import lanes, rows
from jrb._core.lanes import PerEnvAnchorQueues
from jrb._util import pytree
from jrb._xla import dependencies, scatter
from jrb.occupancy import Occupancy
from jrb.ring import Ring, first_places
from jrb.types import Anchors, AnchorUpdate, Context, WritePlan

_FEW = 64
"""Of so many slots all pairs are compared."""


class AnchorQueue(pytree.State):
    """A first-in, first-out ring of slots.

    Attributes:
        slots: int32 `[N]`.
        head: int32 `[]`, where the one that came first stands.
        count: int32 `[]`, how many there are.
    """

    slots: jax.Array
    head: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()


@dataclasses.dataclass(frozen=True)
class Departed:
    """The anchors that left a queue.

    Attributes:
        count: int32 `[]`.
        from_place: how many of them stood at this place or behind it, int32 `[]`.
        moved: bool `[]`, whether one that stayed stood before one of them.
    """

    count: jax.Array
    from_place: Callable[[jax.Array], jax.Array]
    moved: jax.Array


Queue = AnchorQueue | PerEnvAnchorQueues
"""One queue of all anchors, or one for each environment that goes on by itself."""


def init(context: Context) -> Queue:
    """An empty queue."""
    ring = context.ring
    if lanes.are_in(context):
        return lanes.init(ring)
    return AnchorQueue(
        slots=jnp.zeros(ring.capacity, jnp.int32),
        head=jnp.zeros((), jnp.int32),
        count=jnp.zeros((), jnp.int32),
    )


def anchors(ring: Ring, queue: Queue) -> Anchors:
    """All that are in the queue, in its order."""
    if isinstance(queue, PerEnvAnchorQueues):
        return lanes.anchors(ring, queue)

    def nth(places: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = ring.slot_after(queue.head, places)
        return rows.read(queue.slots, at), jnp.ones(places.shape, jnp.float32)

    return Anchors(count=queue.count, nth=nth)


def look_back(ring: Ring) -> WritePlan:
    """No row, from which `rows_back` counts: the newest one is 0 rows back."""
    return WritePlan(
        starts=jnp.full(1, ring.capacity, jnp.int32),
        slots=jnp.full((1, ring.envs), ring.capacity, jnp.int32),
        written=jnp.ones(1, jnp.bool_),
        passed=jnp.zeros(1, jnp.int32),
        expired=jnp.zeros((), jnp.int32),
        consecutive=False,
    )


def rows_back(context: Context, write: WritePlan, back: jax.Array, which: jax.Array) -> jax.Array:
    """The slots that lie some rows back from each row that is written, if they are still held.

    Args:
        context: of the buffer, before the write.
        write: the rows.
        back: int32 `[K]`, rows back, from 0.
        which: bool `[T, E, K]`.

    Returns:
        int32 `[T * E * K]`, by row; N where there is none.
    """
    ring, held, (expired, _) = context.ring, context.held, write.lengths
    written, passed = (array[:, :, None] for array in write.times)
    cursor, first = held.next_row(ring)[:, None], (expired - held.rows(ring))[:, None]
    row = ring.row_after(cursor, passed - back - 1 + ring.rows)
    slots = row * ring.envs + jnp.arange(ring.envs, dtype=jnp.int32)[:, None]
    here = which & written & (passed - back > first)
    return jnp.where(here, slots, ring.capacity).reshape(-1)


def after_write(
    context: Context,
    queue: Queue,
    write: WritePlan,
    entered: jax.Array,
    slack: int,
    lookback: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Queue, AnchorUpdate]:
    """Those whose rows are not held any more leave, others enter.

    Args:
        context: of the buffer, before the write.
        queue: the queue before.
        write: which rows leave.
        entered: int32 `[K]`, slots that enter, in this order; N where there is none.
        slack: how many rows older than others before them those who leave may be.
        lookback: how many rows before its own each slot needs, from int32 `[B]` to int32 `[B]`;
            None for none.
    """
    if isinstance(queue, PerEnvAnchorQueues):
        return lanes.after_write(context, queue, write, entered, slack, lookback)
    return _after_write(context, queue, write, entered, slack, lookback)


def _after_write(
    context: Context,
    queue: AnchorQueue,
    write: WritePlan,
    entered: jax.Array,
    slack: int,
    lookback: Callable[[jax.Array], jax.Array] | None,
) -> tuple[AnchorQueue, AnchorUpdate]:
    """The same for one queue of all environments."""
    ring, held = context.ring, context.held

    def leaving(slots: jax.Array) -> jax.Array:
        needs = held.before(ring, slots)
        return needs - (lookback(slots) if lookback else 0) < write.expired

    most = min(write.length, ring.rows) * ring.envs
    few = functools.partial(
        remove,
        ring,
        leaving=leaving,
        first=most + slack * ring.envs,
        prefix=slack == 0 or ring.envs == 1,
    )
    if write.bounded:
        queue, left = few(queue)
    else:
        queue, prefix = _remove_prefix(ring, queue, leaving, write, most)
        queue, left = few(queue)
        left = _together(prefix, left)
    change = AnchorUpdate(
        entered=entered,
        consecutive=False,
        expired=Occupancy(
            first=held.first, count=jnp.minimum(write.expired, ring.rows) * ring.envs
        ),
        most=most if write.bounded else None,
        removed=jnp.zeros(0, jnp.int32),
        entered_count=jnp.sum(entered < ring.capacity, dtype=jnp.int32),
        departed_count=left.count,
        departed_from=left.from_place,
        reordered=left.moved,
    )
    return append(ring, queue, entered), change


def append(ring: Ring, queue: AnchorQueue, slots: jax.Array) -> AnchorQueue:
    """Slots join the end, int32 `[K]`; N or more where there is none."""
    slots = scatter.column(slots)
    joins = slots < ring.capacity
    place = queue.count + _joined_upto(joins) - 1
    at = jnp.where(joins, ring.slot_after(queue.head, place), ring.capacity)
    return queue.replace(
        slots=scatter.put(queue.slots, at, slots),
        count=queue.count + jnp.sum(joins, dtype=jnp.int32),
    )


def _joined_upto(joins: jax.Array) -> jax.Array:
    """How many of the first ones join, up to each: int32 `[K, 1]` from bool `[K, 1]`.

    Of few by pairs, never stored: for a running sum XLA compiles two kernels more, and on the CPU
    it adds up pairs as well.
    """
    if joins.size > _FEW:
        return jnp.cumsum(joins, axis=0, dtype=jnp.int32)
    number = np.arange(joins.size)
    upto = jnp.where(number[:, None] >= number, joins.reshape(-1), False)
    return jnp.sum(upto, axis=1, keepdims=True, dtype=jnp.int32)


def remove(
    ring: Ring,
    queue: AnchorQueue,
    leaving: Callable[[jax.Array], jax.Array],
    first: int,
    prefix: bool,
) -> tuple[AnchorQueue, Departed]:
    """Those of the first few who are `leaving` (int32 slots -> bool) leave; the others keep order.

    Args:
        ring: the ring's shape.
        queue: the queue.
        leaving: from slots, int32 `[K]`, to bool `[K]`.
        first: how many from the head may be among them.
        prefix: True if nobody who stays stands before one who leaves.
    """
    place = first_places(min(first, ring.capacity))
    at = ring.slot_after(queue.head, place)
    slots = rows.read(queue.slots, at)
    here = place < queue.count
    leaves = here & leaving(slots)
    count = jnp.sum(leaves, dtype=jnp.int32)
    left = Departed(
        count=count,
        from_place=lambda start: jnp.sum(leaves & (place >= start), dtype=jnp.int32),
        moved=jnp.bool_(False) if prefix else jnp.any(leaves & (place >= count)),
    )
    if not prefix:  # who stays moves up to the end of this part of the queue
        behind = count - jnp.cumsum(leaves, dtype=jnp.int32)
        to = jnp.where(here & ~leaves, ring.slot_after(at, behind), ring.capacity)
        queue = queue.replace(slots=queue.slots.at[to].set(slots, mode="drop"))
    head = ring.slot_after(queue.head, count)
    return queue.replace(head=head, count=queue.count - count), left


def _remove_prefix(
    ring: Ring,
    queue: AnchorQueue,
    leaving: Callable[[jax.Array], jax.Array],
    write: WritePlan,
    chunk: int,
) -> tuple[AnchorQueue, jax.Array]:
    """All who leave before the first who stays; the queue, and their number."""

    def leave(both: tuple[AnchorQueue, jax.Array], most: int) -> tuple[AnchorQueue, jax.Array]:
        queue, count = both
        place = jnp.arange(most, dtype=jnp.int32)
        slots = rows.read(queue.slots, ring.slot_after(queue.head, place))
        stays = (place >= queue.count) | ~leaving(slots)
        gone = jnp.min(jnp.where(stays, place, most))
        head = ring.slot_after(queue.head, gone)
        return queue.replace(head=head, count=queue.count - gone), count + gone

    start = (queue, jnp.zeros_like(queue.count))
    trips = dependencies.at_least(write.expired) * ring.envs // chunk + 1
    return lax.platform_dependent(
        cpu=lambda: dependencies.loop(trips, lambda _, both: leave(both, chunk), start),
        default=lambda: leave(start, ring.capacity),  # all at once: the trips would be unknown
    )


def _together(prefix: jax.Array, rest: Departed) -> Departed:
    """Those who left when a prefix left first, and the rest then."""

    def from_place(start: jax.Array) -> jax.Array:
        behind = rest.from_place(jnp.maximum(start - prefix, 0))
        return jnp.maximum(prefix - start, 0) + behind

    return Departed(count=prefix + rest.count, from_place=from_place, moved=rest.moved)


def waited(queue: Queue) -> jax.Array:
    """An int32 zero that is not known before what the queue waits for (see `ordering`)."""
    return jnp.minimum(jnp.min(queue.head) + jnp.min(queue.count), 0)
