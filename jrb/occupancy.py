"""What is held: runs of slots around the ring.

N capacity, E environments, R = N / E rows. Either all environments have as many rows (`Occupancy`),
or each has a run of its own (`PerEnvOccupancy`). What is asked of them is the same.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jrb.ring import Clock, Ring, first_places


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """A run of slots around the ring, such as those that hold items, oldest first.

    Attributes:
        first: int32 `[]`.
        count: int32 `[]`.
    """

    first: jax.Array
    count: jax.Array

    @classmethod
    def by(cls, ring: Ring, clock: Clock) -> "Occupancy":
        """What is held by a clock."""
        return cls(first=ring.oldest_slot(clock), count=clock.count * ring.envs)

    @property
    def size(self) -> jax.Array:
        """How many slots there are, int32 `[]`."""
        return self.count

    def rows(self, ring: Ring) -> jax.Array:
        """The rows of each environment, int32 `[1]` where all have as many, else `[E]`."""
        return ring.row_of(self.count)[None]

    def next_row(self, ring: Ring) -> jax.Array:
        """The row behind them, int32 `[1]` or `[E]`."""
        return ring.row_of(ring.slot_after(self.first, self.count))[None]

    def place(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """How many slots (int32) lie between the first one and these."""
        return ring.slot_after(slots, ring.capacity - self.first)

    def nth(self, ring: Ring, places: jax.Array) -> jax.Array:
        """The slots (int32) at these places."""
        return ring.slot_after(self.first, places)

    def holds(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """Which of these slots, all in range, are among them, bool."""
        return self.place(ring, slots) < self.count

    def run(self, ring: Ring, most: int) -> jax.Array:
        """The first `most` slots, int32 `[most]`; N beyond the end."""
        step = first_places(most)
        slots = ring.slot_after(self.first, step.clip(max=ring.capacity))
        return jnp.where(step < self.count, slots, ring.capacity)

    def before(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """How many rows of its environment come before each slot, int32."""
        return ring.row_of(self.place(ring, slots))

    def after(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """How many rows of its environment come after each slot, int32; negative beyond the end."""
        behind = self.count - 1 - self.place(ring, slots)
        return ring.row_of(behind + ring.capacity) - ring.rows  # `row_of` takes nothing negative

    def newest(self, ring: Ring) -> jax.Array:
        """The newest slot of each environment, int32 `[E]`; any where there is none."""
        row = ring.slot_after(self.first, jnp.maximum(self.count - ring.envs, 0))
        return row + jnp.arange(ring.envs, dtype=jnp.int32)

    def from_oldest(self, ring: Ring) -> jax.Array:
        """All slots of the ring from the oldest row on, int32 `[R, E]`, also those behind it."""
        row = jnp.arange(ring.rows, dtype=jnp.int32) * ring.envs
        return ring.slot_after(self.first, row)[:, None] + jnp.arange(ring.envs, dtype=jnp.int32)

    def oldest(self, ring: Ring, most: int) -> jax.Array:
        """The slots of the first `most` rows, int32 `[most, E]`; N beyond the end."""
        return self.run(ring, most * ring.envs).reshape(most, ring.envs)

    def moved(self, ring: Ring, left: jax.Array, came: jax.Array) -> "Occupancy":
        """The same when some rows, int32 `[1]` or `[E]`, left at its front and others came."""
        first = ring.row_after(ring.row_of(self.first), left[0]) * ring.envs
        return Occupancy(first=first, count=self.count + (came - left)[0] * ring.envs)

    def emptied(self) -> "Occupancy":
        """Nothing, at the same place."""
        return dataclasses.replace(self, count=jnp.zeros_like(self.count))


@dataclasses.dataclass(frozen=True)
class PerEnvOccupancy(Occupancy):
    """What is held where each environment has a run of its own.

    The places of slots go lane by lane. Within its lane a slot keeps its place for as long as rows
    leave by being overwritten only.

    Attributes:
        first: int32 `[E]`, the oldest slot of each environment.
        count: int32 `[E]`, its rows.
    """

    @classmethod
    def by(cls, ring: Ring, clock: Clock) -> "PerEnvOccupancy":
        """What is held by a clock of each environment."""
        env = jnp.arange(ring.envs, dtype=jnp.int32)
        return cls(first=ring.oldest_slot(clock) + env, count=clock.count)

    @property
    def size(self) -> jax.Array:
        """How many slots there are, int32 `[]`."""
        return jnp.sum(self.count, dtype=jnp.int32)

    def rows(self, ring: Ring) -> jax.Array:
        """The rows of each environment, int32 `[E]`."""
        return self.count

    def next_row(self, ring: Ring) -> jax.Array:
        """The row behind them, int32 `[E]`."""
        return ring.row_after(ring.row_of(self.first), self.count)

    def place(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """How many slots (int32) come before these."""
        lane = ring.env_of(slots)
        turned = ring.slot_after(slots - lane, ring.capacity - self._turn(ring)[lane])
        before = (jnp.cumsum(self.count, dtype=jnp.int32) - self.count)[lane]
        return before + ring.row_of(turned)

    def nth(self, ring: Ring, places: jax.Array) -> jax.Array:
        """The slots (int32) at these places."""
        ends = jnp.cumsum(self.count, dtype=jnp.int32)
        lane = lane_of(ends, places)
        step = jnp.clip(places - (ends - self.count)[lane], 0, ring.rows - 1)
        return ring.slot_after(self._turn(ring)[lane], step * ring.envs) + lane

    def _turn(self, ring: Ring) -> jax.Array:
        """The first slot of the row at which the places of a lane begin, int32 `[E]`."""
        row = self.first - ring.env_of(self.first)
        return jnp.where(self.count < ring.rows, row, 0)

    def holds(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """Which of these slots, all in range, are among them, bool."""
        return self.before(ring, slots) < self.count[ring.env_of(slots)]

    def before(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """How many rows of its environment come before each slot, int32."""
        first = self.first[ring.env_of(slots)]
        return ring.row_of(ring.slot_after(slots, ring.capacity - first))

    def after(self, ring: Ring, slots: jax.Array) -> jax.Array:
        """How many rows of its environment come after each slot, int32; negative beyond the end."""
        return self.count[ring.env_of(slots)] - 1 - self.before(ring, slots)

    def newest(self, ring: Ring) -> jax.Array:
        """The newest slot of each environment, int32 `[E]`; any where there is none."""
        return ring.slot_after(self.first, jnp.maximum(self.count - 1, 0) * ring.envs)

    def from_oldest(self, ring: Ring) -> jax.Array:
        """All slots of the ring from the oldest of each lane on, int32 `[R, E]`."""
        row = jnp.arange(ring.rows, dtype=jnp.int32)[:, None]
        return ring.slot_after(self.first, row * ring.envs)

    def oldest(self, ring: Ring, most: int) -> jax.Array:
        """The slots of the first `most` rows of each lane, int32 `[most, E]`; N beyond the end."""
        row = jnp.arange(most, dtype=jnp.int32)[:, None]
        slots = ring.slot_after(self.first, jnp.minimum(row, ring.rows) * ring.envs)
        return jnp.where(row < self.count, slots, ring.capacity)

    def moved(self, ring: Ring, left: jax.Array, came: jax.Array) -> "PerEnvOccupancy":
        """The same when some rows, int32 `[E]`, left at its front and others came."""
        row = ring.row_after(ring.row_of(self.first), left)
        first = row * ring.envs + ring.env_of(self.first)
        return PerEnvOccupancy(first=first, count=self.count + came - left)


def lane_of(ends: jax.Array, places: jax.Array) -> jax.Array:
    """In which lane each place (int32 `[B]`) is, int32 `[B]`, by where lanes end, int32 `[E]`."""
    lane = jnp.sum(places[:, None] >= ends, axis=1, dtype=jnp.int32)
    return jnp.minimum(lane, ends.size - 1)
