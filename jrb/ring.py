"""Integer arithmetic of the ring: rows of time, slots, generations, and which slots hold items.

N is the capacity, E the number of environments, R = N / E the number of rows. Row r, environment e
is slot r * E + e, so the next slot of the same environment is E further on. The ring consists of S
streams, and slot s belongs to stream s % S: S = 1 if all environments advance together, S = E if
each advances alone, around R slots of its own. Arrays `[S]` broadcast against arrays `[E]`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import display, pytree
from jrb._util.public import PublicNames

__all__ = ["Clock", "Occupancy", "Ring", "first_places", "locate"]
__dir__: PublicNames = lambda: __all__

_FEW = 4096
"""Up to this size, index arrays are NumPy constants, so that XLA folds computations with them."""

_MAX_PAIRS = 512  # up to this many slots, all pairs are compared; more are sorted


class Clock(pytree.State):
    """The write position of a ring, in rows: of all environments, `[]`, or of each, `[E]`.

    Attributes:
        cursor: int32, the row to be written next.
        count: int32, the number of rows held.
        lap: uint32, how often the cursor wrapped around, modulo 2^32.
    """

    cursor: jax.Array = pytree.cursor()
    count: jax.Array
    lap: jax.Array

    def summary(self, ring: "Ring") -> dict[str, str]:
        """Returns the number of items held, for the `repr` of a state."""
        # A traced count has no value to show.
        rows = display.host_values(self.count)
        if rows is None:
            return {}
        return {"held": display.share(np.broadcast_to(rows, ring.envs), ring.capacity)}


@pytree.component
class Ring:
    """The shape of a ring: R rows of time, E environments."""

    rows: int
    envs: int

    @property
    def capacity(self) -> int:
        """N, the number of slots."""
        return self.rows * self.envs

    def start(self, *shape: int) -> Clock:
        """Returns the clock of an empty ring: `start()`, or `start(E)` with one per environment."""
        zero = jnp.zeros(shape, jnp.int32)
        return Clock(cursor=zero, count=jnp.zeros_like(zero), lap=jnp.zeros(shape, jnp.uint32))

    def advance(self, clock: Clock, rows: jax.Array) -> Clock:
        """Returns the clock after `rows` more rows were written, int32 like its fields."""
        # In uint32, where the sum of two int32 does not overflow.
        reached = clock.cursor.astype(jnp.uint32) + rows.astype(jnp.uint32)
        kept = jnp.minimum(rows, self.rows)
        return Clock(
            cursor=lax.rem(reached, np.uint32(self.rows)).astype(jnp.int32),
            count=jnp.minimum(clock.count, self.rows - kept) + kept,
            lap=clock.lap + lax.div(reached, np.uint32(self.rows)),
        )

    def empty(self, clock: Clock) -> Clock:
        """Returns the clock of the emptied ring; no older generation is ever current again."""
        return Clock(
            # Always zero, but XLA does not know that: a constant would not wait for the clock.
            cursor=jnp.minimum(clock.cursor, 0),
            count=jnp.zeros_like(clock.count),
            lap=clock.lap + np.uint32(2),
        )

    def has_lost(self, clock: Clock) -> jax.Array:
        """Returns True if rows older than those held were written, bool like the clock's fields.

        Also returns True for a full ring that was emptied once, as its clock does not tell.
        """
        is_full = clock.count == self.rows
        # `emptied` adds two laps: lap 1 is reached only by a ring that was never emptied.
        never_came_round = ~is_full & (clock.cursor == clock.count) & (clock.lap != 1)
        just_full = is_full & (clock.cursor == 0) & (clock.lap == 1)
        return ~(never_came_round | just_full)

    def row_after(self, row: jax.Array, steps: jax.Array) -> jax.Array:
        """Returns the row (int32) that is `steps` rows, at least 0, further around the ring."""
        reached = row.astype(jnp.uint32) + steps.astype(jnp.uint32)
        return lax.rem(reached, np.uint32(self.rows)).astype(jnp.int32)

    def row_of(self, slots: jax.Array) -> jax.Array:
        """Returns the row (int32) of each slot; also converts a number of slots to rows."""
        return lax.div(slots, np.int32(self.envs))

    def env_of(self, slots: jax.Array) -> jax.Array:
        """Returns the environment (int32) of each slot."""
        return lax.rem(slots, np.int32(self.envs))

    def row_slots(self, starts: jax.Array) -> jax.Array:
        """Returns the slots, int32 `[T, E]`, of rows that begin at `starts`, `[T]` or `[T, E]`.

        The slots of a dropped row, which begins at N, are N.
        """
        starts = starts.reshape(starts.shape[0], -1)
        slots = starts + jnp.arange(self.envs, dtype=jnp.int32)[None, :]
        return jnp.where(starts < self.capacity, slots, self.capacity)

    def slot_after(self, slot: jax.Array, steps: jax.Array | np.ndarray | int) -> jax.Array:
        """Returns the slot (int32) that is `steps` slots, 0 to N, further around the ring."""
        steps = steps if isinstance(steps, jax.Array) else np.asarray(steps)
        reached = slot.astype(jnp.uint32) + steps.astype(np.uint32)
        # In uint32 a negative difference is a large number: the smaller one is in range.
        return lax.min(reached, lax.sub(reached, np.uint32(self.capacity))).astype(jnp.int32)

    def slot_before(self, slot: jax.Array, steps: jax.Array | int) -> jax.Array:
        """Returns the slot (int32) that is `steps` slots, 0 to N, back around the ring."""
        return self.slot_after(slot, self.capacity - steps)

    def rows_near(self, slots: jax.Array, steps: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Returns the slots at given distances in rows from others, and how many laps lie between.

        Args:
            slots: int32 `[B]`.
            steps: int `[L]`, the distances, from 1 - R to R - 1; positive ones lead to later rows.

        Returns:
            The slots, int32 `[B, L]`; and the number of laps by which each was written later than
            the given slot, uint32 `[B, L]`, modulo 2^32.
        """
        slots, steps = slots[:, None], steps[None]
        later = steps >= 0
        near = self.slot_after(slots, np.where(later, steps, steps + self.rows) * self.envs)
        # The ring started over in between if a later row has a smaller slot.
        is_round = jnp.where(later, near < slots, near > slots)
        return near, is_round.astype(jnp.uint32) * np.where(later, 1, 2**32 - 1).astype(np.uint32)

    def oldest_slot(self, clock: Clock) -> jax.Array:
        """Returns the first slot (int32) of the oldest row held."""
        # As in `slot_after`, the smaller number is the one in range.
        row = (clock.cursor - clock.count).astype(jnp.uint32)
        return jnp.minimum(row, lax.add(row, np.uint32(self.rows))).astype(jnp.int32) * self.envs

    def generation(self, clock: Clock, slots: jax.Array) -> jax.Array:
        """Returns the lap (uint32) in which each slot was last written.

        It changes with every overwrite, and no array stores it: rows before the cursor were written
        in this lap, all others in the lap before.
        """
        cursor, lap = clock.cursor, clock.lap
        # Each environment may have its own clock.
        if cursor.ndim:
            env = self.env_of(slots)
            cursor, lap = cursor[env], lap[env]
        ahead = slots >= cursor * self.envs
        return lap - ahead.astype(jnp.uint32)

    def last_of_equals(self, slots: jax.Array) -> jax.Array:
        """Returns slots, int32 `[B]`, for a scatter in which the last of equal slots must win."""
        # Not needed on the CPU: there a scatter writes in order, so the last one wins anyway.
        return lax.platform_dependent(cpu=lambda: slots, default=lambda: self.distinct(slots))

    def times_before(self, slots: jax.Array) -> jax.Array:
        """Returns how often each slot, int32 `[B]` in [0, N], occurs earlier, int32 `[B]`."""
        size, position = slots.size, jnp.arange(slots.size, dtype=jnp.uint32)
        # Slots and positions are sorted as one number where it fits: 3 times as fast on the CPU.
        line = slots.astype(jnp.uint32)
        if (self.capacity + 1) * size <= 2**32:
            line, order = jnp.divmod(lax.sort(line * np.uint32(size) + position), np.uint32(size))
        else:
            line, order = lax.sort((line, position), num_keys=2)
        # Equal slots follow one another in their order: count from the first of them.
        is_again = jnp.concatenate([jnp.zeros(1, jnp.bool_), line[1:] == line[:-1]])
        first = lax.cummax(jnp.where(is_again, np.uint32(0), position))
        return jnp.zeros_like(slots).at[order].set((position - first).astype(jnp.int32))

    def distinct(self, slots: jax.Array) -> jax.Array:
        """Returns slots, int32 `[B]`, in which N replaces each that occurs again later."""
        # Compare all pairs, if these are few.
        if slots.size <= _MAX_PAIRS:
            position = jnp.arange(slots.size, dtype=jnp.int32)
            later = (slots[:, None] == slots) & (position[:, None] < position)
            return jnp.where(later.any(axis=1), self.capacity, slots)
        # A stable sort puts equal slots side by side in their order: all but the last are replaced.
        order = jnp.argsort(slots, stable=True)
        line = slots[order]
        again = jnp.concatenate([line[1:] == line[:-1], jnp.zeros(1, jnp.bool_)])
        return slots.at[order].set(jnp.where(again, self.capacity, line))


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """A run of slots in each stream of the ring, oldest first, such as the slots that hold items.

    The rank of a slot is its position in the order of all slots of the runs. With one stream, this
    is the order of time. With several, stream follows stream, and within a full stream the order
    begins at row 0 of the ring, so that the rank of a slot does not change when it is overwritten.

    Attributes:
        first: int32 `[S]`, the first slot of each run.
        count: int32 `[S]`, the number of slots in each run.
    """

    first: jax.Array
    count: jax.Array

    @classmethod
    def of_clock(cls, ring: Ring, clock: Clock) -> "Occupancy":
        """Returns the slots that hold items according to a clock, `[]` or `[E]`."""
        oldest = ring.oldest_slot(clock)
        if not clock.cursor.ndim:
            return cls(first=oldest[None], count=(clock.count * ring.envs)[None])
        return cls(first=oldest + jnp.arange(ring.envs, dtype=jnp.int32), count=clock.count)

    @property
    def streams(self) -> int:
        """S, the number of runs."""
        return self.first.shape[0]

    @property
    def size(self) -> jax.Array:
        """The number of slots, int32 `[]`."""
        return self.count[0] if self.streams == 1 else jnp.sum(self.count, dtype=jnp.int32)

    def rows(self, ring: Ring) -> jax.Array:
        """Returns the number of rows of each stream, int32 `[S]`."""
        return lax.div(self.count, np.int32(ring.envs // self.streams))

    def next_row(self, ring: Ring) -> jax.Array:
        """Returns the row that follows the newest row of each stream, int32 `[S]`."""
        return ring.row_of(ring.slot_after(self.first, self.count * self.streams))

    def newest(self, ring: Ring) -> jax.Array:
        """Returns the newest slot of each environment, int32 `[E]`; any slot if it has none."""
        # With one stream, the last E slots; with several, the last slot of each.
        width, env = ring.envs // self.streams, np.arange(ring.envs, dtype=np.int32)
        offset = jnp.maximum(self.count - width, 0) + env // self.streams
        return ring.slot_after(self.first, offset * self.streams)

    def oldest(self, ring: Ring, most: int) -> jax.Array:
        """Returns the slots of the first `most` rows, int32 `[most, E]`; N beyond the end."""
        offset = self._offsets_by_row(ring, most)
        steps = offset.clip(max=ring.capacity // self.streams) * self.streams
        return jnp.where(offset < self.count, ring.slot_after(self.first, steps), ring.capacity)

    def from_oldest(self, ring: Ring) -> jax.Array:
        """Returns all slots of the ring, int32 `[R, E]`, from the oldest row on, empty ones too."""
        return ring.slot_after(self.first, self._offsets_by_row(ring, ring.rows) * self.streams)

    def _offsets_by_row(self, ring: Ring, most: int) -> Any:
        """Returns the position in its run of each slot in the first `most` rows, `[most, E]`."""
        width, env = ring.envs // self.streams, np.arange(ring.envs, dtype=np.int32)
        return first_places(most)[:, None] * width + env // self.streams

    def run(self, ring: Ring, most: int) -> jax.Array:
        """Returns the first `most` slots of the only stream, int32 `[most]`; N beyond the end."""
        step = first_places(most)
        slots = ring.slot_after(self.first, step.clip(max=ring.capacity))
        return jnp.where(step < self.count, slots, ring.capacity)

    def holds(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """Returns True for slots that are in a run, bool; all slots must be in [0, N)."""
        return self._offset(ring, slots, self.first) < self._take_by_stream(self.count, slots)

    def before(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """Returns the number of held rows before each slot in its environment, int32."""
        offset = self._offset(ring, slots, self.first)
        return lax.div(offset, np.int32(ring.envs // self.streams))

    def after(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """Returns the number of rows after each slot in its environment; below 0 past the end."""
        behind = self._take_by_stream(self.count, slots) - 1 - self._offset(ring, slots, self.first)
        # Add a whole stream before the division, as `div` rounds negative numbers up to 0.
        width, length = ring.envs // self.streams, ring.capacity // self.streams
        return lax.div(behind + length, np.int32(width)) - ring.rows

    def rank(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """Returns the ranks of slots, int32."""
        if self.streams == 1:
            return self._offset(ring, slots, self.first)
        # The ranks of a stream follow those of all streams before it.
        stream, counts = lax.rem(slots, np.int32(self.streams)), self.count
        offset = self._offset(ring, slots, self._order_start(ring))
        return (jnp.cumsum(counts, dtype=jnp.int32) - counts)[stream] + offset

    def nth(self, ring: Ring, ranks: jax.Array) -> jax.Array:
        """Returns the slots (int32) of these ranks (int32)."""
        if self.streams == 1:
            return ring.slot_after(self.first, ranks)
        stream, offset = locate(self.count, ranks)
        # Ranks beyond the end stay in the ring.
        offset = jnp.clip(offset, 0, ring.capacity // self.streams - 1)
        return ring.slot_after(self._order_start(ring)[stream], offset * self.streams)

    def _order_start(self, ring: Ring) -> jax.Array:
        """Returns the slot with the lowest rank in each stream, int32 `[S]`."""
        # A full stream begins at row 0, any other at its oldest slot.
        is_full = self.count >= ring.capacity // self.streams
        return jnp.where(is_full, lax.rem(self.first, np.int32(self.streams)), self.first)

    def _take_by_stream(self, values: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns the entry of `values`, `[S]`, for the stream of each slot."""
        return values[0] if self.streams == 1 else values[lax.rem(slots, np.int32(self.streams))]

    def _offset(self, ring: Ring, slots: jax.Array, starts: jax.Array) -> jax.Array:
        """Returns the distance of each slot, in slots of its stream, from the stream's `starts`."""
        steps = ring.slot_after(slots, ring.capacity - self._take_by_stream(starts, slots))
        return steps if self.streams == 1 else lax.div(steps, np.int32(self.streams))

    def advance(self, ring: Ring, expired: jax.Array, passed: jax.Array) -> "Occupancy":
        """Returns the runs after `expired` rows left and `passed` rows were added, int32 `[S]`."""
        # A run moves by whole rows, so its first slot stays in the same environment.
        row = ring.row_after(ring.row_of(self.first), expired)
        return Occupancy(
            first=row * ring.envs + ring.env_of(self.first),
            count=self.count + (passed - expired) * (ring.envs // self.streams),
        )

    def empty(self) -> "Occupancy":
        """Returns empty runs that begin at the same slots."""
        return dataclasses.replace(self, count=jnp.zeros_like(self.count))


def locate(counts: jax.Array, ranks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the group of each rank, where ranks count through consecutive groups.

    Args:
        counts: int32 `[G]`, the sizes of the groups.
        ranks: int32 `[B]`.

    Returns:
        The group of each rank and its offset in that group, int32 `[B]`; the last group for ranks
        beyond the end.
    """
    # As many groups end at or before a rank as precede its own.
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    group = jnp.sum(ranks[:, None] >= ends, axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, ends.size - 1)
    return group, ranks - (ends - counts)[group]


def first_places(count: int) -> jax.Array | np.ndarray:
    """Returns 0 to `count` - 1, int32; a NumPy array if small."""
    numbers: Any = np if count <= _FEW else jnp
    return numbers.arange(count, dtype=np.int32)
