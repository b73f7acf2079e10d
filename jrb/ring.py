"""Integer arithmetic of the ring: rows of time, slots, ages, generations.

N is the capacity, E the number of environments, R = N / E the number of rows. Row r, environment e
is slot r * E + e, so the successor of a slot is E further on. Either all environments advance
together, or each of them by itself, in its own lane of R slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import display, pytree
from jrb._xla import dependencies


class Clock(pytree.State):
    """Where a ring stands, in rows of time: all environments, `[]`, or each of them, `[E]`.

    Attributes:
        cursor: int32, the row to be written next.
        count: int32, the rows held.
        lap: uint32, how often the cursor came round, modulo 2^32.
    """

    cursor: jax.Array = pytree.cursor()
    count: jax.Array
    lap: jax.Array

    def summary(self, ring: "Ring") -> dict[str, str]:
        """How many items are held."""
        rows = display.known(self.count)
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
        """The clock of a ring that was never written; with E for `shape`, one for each lane."""
        zero = jnp.zeros(shape, jnp.int32)
        return Clock(cursor=zero, count=jnp.zeros_like(zero), lap=jnp.zeros(shape, jnp.uint32))

    def advance(self, clock: Clock, rows: jax.Array) -> Clock:
        """The clock after `rows` more rows were written, int32 like its fields, at least 0."""
        reached = clock.cursor.astype(jnp.uint32) + rows.astype(jnp.uint32)
        kept = jnp.minimum(rows, self.rows)
        return Clock(
            cursor=lax.rem(reached, np.uint32(self.rows)).astype(jnp.int32),
            count=jnp.minimum(clock.count, self.rows - kept) + kept,
            lap=clock.lap + lax.div(reached, np.uint32(self.rows)),
        )

    def shrunk(self, clock: Clock, rows: jax.Array) -> Clock:
        """The clock without its oldest `rows` (int32 like its fields) rows."""
        return clock.replace(count=jnp.maximum(clock.count - rows, 0))

    def emptied(self, clock: Clock) -> Clock:
        """The clock of the emptied ring; no older generation is ever current again.

        What the cursor waited for, it waits for still (see `jrb._xla.dependencies`).
        """
        return Clock(
            cursor=jnp.zeros_like(clock.cursor) + dependencies.token(clock.cursor),
            count=jnp.zeros_like(clock.count),
            lap=clock.lap + np.uint32(2),
        )

    def has_lost(self, clock: Clock) -> jax.Array:
        """Whether rows older than those held were written, bool like the clock's fields.

        Of a ring that was emptied and is full, nobody knows: it counts as one that lost some.
        """
        is_full = clock.count == self.rows
        never_came_round = ~is_full & (clock.cursor == clock.count) & (clock.lap != 1)
        just_full = is_full & (clock.cursor == 0) & (clock.lap == 1)
        return ~(never_came_round | just_full)

    def row_after(self, row: jax.Array, steps: jax.Array) -> jax.Array:
        """The row (int32) that lies `steps` rows, at least 0, further around the ring."""
        reached = row.astype(jnp.uint32) + steps.astype(jnp.uint32)
        return lax.rem(reached, np.uint32(self.rows)).astype(jnp.int32)

    def row_of(self, slots: jax.Array) -> jax.Array:
        """The row (int32) of each slot; or how many rows so many slots are. None is negative."""
        return lax.div(slots, np.int32(self.envs))

    def env_of(self, slots: jax.Array) -> jax.Array:
        """The environment (int32) of each slot; none is negative."""
        return lax.rem(slots, np.int32(self.envs))

    def row_slots(self, starts: jax.Array) -> jax.Array:
        """The slots (int32 `[T, E]`) of the rows that begin at `starts`; N where a start is N."""
        starts = starts[:, None]
        slots = starts + jnp.arange(self.envs, dtype=jnp.int32)[None, :]
        return jnp.where(starts < self.capacity, slots, self.capacity)

    def slot_after(self, slot: jax.Array, steps: jax.Array | np.ndarray | int) -> jax.Array:
        """The slot (int32) that lies `steps` slots, 0 to N, further around the ring."""
        steps = steps if isinstance(steps, jax.Array) else np.asarray(steps)
        reached = slot.astype(jnp.uint32) + steps.astype(np.uint32)
        # What would be negative is a large number here, so that the smaller one is in range.
        return lax.min(reached, lax.sub(reached, np.uint32(self.capacity))).astype(jnp.int32)

    def slot_before(self, slot: jax.Array, steps: jax.Array | int) -> jax.Array:
        """The slot (int32) that lies `steps` slots, 0 to N, back around the ring."""
        return self.slot_after(slot, self.capacity - steps)

    def rows_near(self, slots: jax.Array, steps: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """The slots that lie some rows of time from others, and in which lap they are written.

        Args:
            slots: int32 `[B]`.
            steps: int `[L]`, how many rows later, from 1 - R to R - 1.

        Returns:
            int32 `[B, L]`; and uint32 `[B, L]`, modulo 2^32, by how many laps later.
        """
        slots, steps = slots[:, None], steps[None]
        later = steps >= 0
        near = self.slot_after(slots, np.where(later, steps, steps + self.rows) * self.envs)
        is_round = jnp.where(later, near < slots, near > slots)
        return near, is_round.astype(jnp.uint32) * np.where(later, 1, 2**32 - 1).astype(np.uint32)

    def oldest_slot(self, clock: Clock) -> jax.Array:
        """The first slot (int32) of the oldest row held."""
        row = (clock.cursor - clock.count).astype(jnp.uint32)
        return jnp.minimum(row, lax.add(row, np.uint32(self.rows))).astype(jnp.int32) * self.envs

    def generation(self, clock: Clock, slots: jax.Array) -> jax.Array:
        """The lap (uint32) in which each slot was last written.

        It changes with every overwrite, without an array to keep it: rows before the cursor were
        written in this lap, the others in the one before.
        """
        cursor, lap = clock.cursor, clock.lap
        if cursor.ndim:
            lane = self.env_of(slots)
            cursor, lap = cursor[lane], lap[lane]
        ahead = slots >= cursor * self.envs
        return lap - ahead.astype(jnp.uint32)


def first_places(count: int) -> jax.Array | np.ndarray:
    """0 to `count` - 1, int32; if they are few, a constant: what is made of it may be one too."""
    numbers: Any = np if count <= _FEW else jnp
    return numbers.arange(count, dtype=np.int32)


_FEW = 4096
