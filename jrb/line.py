"""A line of slots: the anchors in the order in which they came, for units that choose them.

N capacity, E environments, T time.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jrb import order, pytree, rows
from jrb.ring import Held, Ring
from jrb.types import Anchors, Change, Write


@pytree.state
class Line:
    """A first-in, first-out ring of slots.

    Attributes:
        slots: int32 `[N]`.
        head: int32 `[]`, where the one that came first stands.
        count: int32 `[]`, how many there are.
    """

    slots: jax.Array
    head: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Left:
    """Who left a line.

    Attributes:
        count: int32 `[]`.
        from_place: how many of them stood at this place or behind it, int32 `[]`.
        moved: bool `[]`, whether somebody who stayed stood before one of them.
    """

    count: jax.Array
    from_place: Callable[[jax.Array], jax.Array]
    moved: jax.Array


def init(ring: Ring) -> Line:
    """Nobody."""
    return Line(
        slots=jnp.zeros(ring.capacity, jnp.int32),
        head=jnp.zeros((), jnp.int32),
        count=jnp.zeros((), jnp.int32),
    )


def anchors(ring: Ring, line: Line) -> Anchors:
    """Everybody, in the order of the line."""

    def nth(places: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        at = ring.slot_after(line.head, places)
        return order.once(lambda: rows.get(line.slots, at)), jnp.ones(places.shape, jnp.float32)

    return Anchors(count=line.count, nth=nth)


def look_back(ring: Ring) -> Write:
    """No row, from which `rows_back` counts: the newest one is 0 rows back."""
    return Write(
        starts=jnp.full(1, ring.capacity, jnp.int32),
        slots=jnp.full((1, ring.envs), ring.capacity, jnp.int32),
        written=jnp.ones(1, jnp.bool_),
        passed=jnp.zeros(1, jnp.int32),
        gone=jnp.zeros((), jnp.int32),
        consecutive=False,
    )


def rows_back(ring: Ring, held: Held, write: Write, back: jax.Array, which: jax.Array) -> jax.Array:
    """The slots that lie some rows back from each row that is written, if they are still held.

    Args:
        ring: the ring's shape.
        held: the slots that held items before the write.
        write: the rows.
        back: int32 `[K]`, rows back, from 0.
        which: bool `[T, E, K]`.

    Returns:
        int32 `[T * E * K]`, by row; N where there is none.
    """
    passed = write.passed[:, None, None] - back
    rows_held, cursor = held.count // ring.envs, ring.slot_after(held.first, held.count)
    slots = (cursor // ring.envs + passed - 1) % ring.rows * ring.envs
    slots = slots + jnp.arange(ring.envs, dtype=jnp.int32)[:, None]
    here = which & write.written[:, None, None] & (rows_held + passed > write.gone)
    return jnp.where(here, slots, ring.capacity).reshape(-1)


def after_write(
    ring: Ring,
    line: Line,
    held: Held,
    write: Write,
    entered: jax.Array,
    slack: int,
    reach: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Line, Change]:
    """Those whose rows are not held any more leave, others enter.

    Args:
        ring: the ring's shape.
        line: the line before.
        held: the slots that held items before.
        write: which rows leave.
        entered: int32 `[K]`, slots that enter, in this order; N where there is none.
        slack: how many rows older than others before them those who leave may be.
        reach: how many rows before its own each slot needs, from int32 `[B]` to int32 `[B]`; None
            for none.
    """

    def leaving(slots: jax.Array) -> jax.Array:
        needs = ring.place(held, slots) // ring.envs
        return needs - (reach(slots) if reach else 0) < write.gone

    most = min(write.written.size, ring.rows) * ring.envs
    few = functools.partial(
        remove,
        ring,
        leaving=leaving,
        first=most + slack * ring.envs,
        prefix=slack == 0 or ring.envs == 1,
    )
    if write.bounded:
        line, left = few(line)
    else:
        line, prefix = _remove_prefix(ring, line, leaving, write, most)
        line, left = few(line)
        left = _together(prefix, left)
    change = Change(
        entered=entered,
        consecutive=False,
        gone=Held(first=held.first, count=jnp.minimum(write.gone, ring.rows) * ring.envs),
        most=most if write.bounded else None,
        cut=jnp.zeros(0, jnp.int32),
        entered_count=jnp.sum(entered < ring.capacity, dtype=jnp.int32),
        left_count=left.count,
        left_from=left.from_place,
        moved=left.moved,
    )
    return append(ring, line, entered), change


def append(ring: Ring, line: Line, slots: jax.Array) -> Line:
    """Slots join the end, int32 `[K]`; N or more where there is none."""
    joins = slots < ring.capacity
    place = line.count + jnp.cumsum(joins, dtype=jnp.int32) - 1
    at = jnp.where(joins, ring.slot_after(line.head, place), ring.capacity)
    return line.replace(  # pyright: ignore
        slots=line.slots.at[at].set(slots, mode="drop"),
        count=line.count + jnp.sum(joins, dtype=jnp.int32),
    )


def remove(
    ring: Ring, line: Line, leaving: Callable[[jax.Array], jax.Array], first: int, prefix: bool
) -> tuple[Line, Left]:
    """Those of the first few who are `leaving` (int32 slots -> bool) leave; the others keep order.

    Args:
        ring: the ring's shape.
        line: the line.
        leaving: from slots, int32 `[K]`, to bool `[K]`.
        first: how many from the head may be among them.
        prefix: True if nobody who stays stands before one who leaves.
    """
    place = jnp.arange(min(first, ring.capacity), dtype=jnp.int32)
    at = ring.slot_after(line.head, place)
    slots = order.once(lambda: rows.get(line.slots, at))
    here = place < line.count
    leaves = here & leaving(slots)
    count = jnp.sum(leaves, dtype=jnp.int32)
    left = Left(
        count=count,
        from_place=lambda start: jnp.sum(leaves & (place >= start), dtype=jnp.int32),
        moved=jnp.bool_(False) if prefix else jnp.any(leaves & (place >= count)),
    )
    if not prefix:  # who stays moves up to the end of this part of the line
        behind = count - jnp.cumsum(leaves, dtype=jnp.int32)
        to = jnp.where(here & ~leaves, ring.slot_after(at, behind), ring.capacity)
        line = line.replace(slots=line.slots.at[to].set(slots, mode="drop"))  # pyright: ignore
    head = ring.slot_after(line.head, count)
    return line.replace(head=head, count=line.count - count), left  # pyright: ignore


def _remove_prefix(
    ring: Ring, line: Line, leaving: Callable[[jax.Array], jax.Array], write: Write, chunk: int
) -> tuple[Line, jax.Array]:
    """All who leave before the first who stays; the line, and their number."""

    def leave(both: tuple[Line, jax.Array], most: int) -> tuple[Line, jax.Array]:
        line, count = both
        place = jnp.arange(most, dtype=jnp.int32)
        slots = order.once(lambda: rows.get(line.slots, ring.slot_after(line.head, place)))
        stays = (place >= line.count) | ~leaving(slots)
        gone = jnp.min(jnp.where(stays, place, most))
        head = ring.slot_after(line.head, gone)
        return line.replace(head=head, count=line.count - gone), count + gone  # pyright: ignore

    start = (line, jnp.zeros_like(line.count))
    trips = order.at_least(write.gone) * ring.envs // chunk + 1
    return lax.platform_dependent(
        cpu=lambda: order.loop(trips, lambda _, both: leave(both, chunk), start),
        default=lambda: leave(start, ring.capacity),  # all at once: the trips would be unknown
    )


def _together(prefix: jax.Array, rest: Left) -> Left:
    """Those who left when a prefix left first, and the rest then."""

    def from_place(start: jax.Array) -> jax.Array:
        behind = rest.from_place(jnp.maximum(start - prefix, 0))
        return jnp.maximum(prefix - start, 0) + behind

    return Left(count=prefix + rest.count, from_place=from_place, moved=rest.moved)


def reset(line: Line, token: jax.Array) -> Line:
    """Nobody, known after the token, and after whatever the line waited for."""
    return line.replace(  # pyright: ignore
        head=jnp.minimum(line.head, 0) + token, count=jnp.minimum(line.count, 0)
    )


def waited(line: Line) -> jax.Array:
    """An int32 zero that is not known before what the line waits for (see `jrb.order`)."""
    return jnp.minimum(line.head, 0) + jnp.minimum(line.count, 0)


def hold(line: Line, token: jax.Array) -> Line:
    """The same line, in which no place to write is known before the token."""
    return line.replace(head=line.head + token)  # pyright: ignore
