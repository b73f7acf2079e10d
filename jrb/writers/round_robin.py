"""The ring: each row takes the place of the oldest one."""

from typing import ClassVar

import jax

from jrb import pytree, rows
from jrb.keys import Keys
from jrb.ring import Clock, Held, Ring
from jrb.types import Item, Write


@pytree.component
class RoundRobin:
    """Writes rows of time one after the other around the ring; a full ring loses its oldest row."""

    in_time: ClassVar[bool] = True

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Clock:
        """A clock at row 0."""
        del spec, keys
        return ring.start()

    def plan(
        self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None, keys: Keys
    ) -> tuple[Clock, Write]:
        """The rows after the cursor. Of more than R rows, the last R are written."""
        del keys
        return rows.in_turn(ring, state, jax.tree.leaves(items)[0].shape[0], mask)

    def held(self, ring: Ring, state: Clock) -> Held:
        """The last rows, oldest first."""
        return Held(first=ring.oldest_slot(state), count=state.count * ring.envs)

    def stamp(self, ring: Ring, state: Clock, slots: jax.Array) -> jax.Array:
        """The lap in which each slot was written."""
        return ring.generation(state, slots)

    def shrink(self, ring: Ring, state: Clock, rows: jax.Array) -> Clock:
        """The clock with so many rows fewer."""
        return ring.shrunk(state, rows)

    def reset(self, ring: Ring, state: Clock, token: jax.Array) -> Clock:
        """Row 0 of a later lap."""
        del token
        return ring.emptied(state)

    def hold(self, state: Clock, token: jax.Array) -> Clock:
        """The same clock, its cursor not known before the token."""
        return state.replace(cursor=state.cursor + token)  # pyright: ignore
