"""Rows of time around a ring: what all writers do that keep them in their order."""

from typing import Any, ClassVar

import jax

from jrb._core import rows
from jrb.occupancy import Occupancy
from jrb.ring import Clock, Ring
from jrb.types import Item, WritePlan, Writer


class InTurn(Writer):
    """Writes rows one after the other around the ring; a full ring loses its oldest row."""

    generation_is_lap: ClassVar[bool] = True

    def init(self, ring: Ring, spec: Item) -> Clock:
        """A clock at row 0."""
        return ring.start()

    def plan(
        self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None
    ) -> tuple[Clock, WritePlan]:
        """The rows after the cursor. Of more than R rows, the last R are written."""
        return rows.in_turn(ring, state, jax.tree.leaves(items)[0].shape[0], mask)

    def held(self, ring: Ring, state: Clock) -> Occupancy:
        """The last rows, oldest first."""
        return Occupancy.by(ring, state)

    def has_lost(self, ring: Ring, state: Clock) -> jax.Array:
        """Whether the clock passed more rows than are held."""
        return ring.has_lost(state).reshape(-1)

    def generation_of(self, ring: Ring, state: Clock, slots: jax.Array) -> jax.Array:
        """The lap in which each slot was written."""
        return ring.generation(state, slots)

    def evict_oldest(self, ring: Ring, state: Clock, rows: jax.Array) -> Any:
        """The clock with so many rows fewer."""
        return ring.shrunk(state, rows)

    def reset(self, ring: Ring, state: Clock, token: jax.Array) -> Any:
        """Row 0 of a later lap."""
        return ring.emptied(state)
