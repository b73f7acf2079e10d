"""The ring: each row takes the place of the oldest one."""

import jax
import jax.numpy as jnp

from jrb import pytree
from jrb.ring import Clock, Ring
from jrb.types import Held, Item, Write


@pytree.component
class RoundRobin:
    """Writes rows of time one after the other around the ring; a full ring loses its oldest row."""

    def init(self, ring: Ring) -> Clock:
        """A clock at row 0."""
        return ring.start()

    def plan(
        self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None
    ) -> tuple[Clock, Write]:
        """The rows after the cursor. Of more than R rows, the last R are written."""
        length = jax.tree.leaves(items)[0].shape[0]
        if mask is None and length == 1:
            starts, rows = state.cursor[None] * ring.envs, jnp.int32(1)
        else:
            written = jnp.ones(length, jnp.bool_) if mask is None else mask
            passed = jnp.cumsum(written, dtype=jnp.int32)
            rows = passed[-1]
            kept = written & (passed > rows - ring.rows)
            starts = ring.row_after(state.cursor, passed - 1) * ring.envs
            starts = jnp.where(kept, starts, ring.capacity)
        write = Write(
            starts=starts,
            slots=ring.row_slots(starts),
            rows=rows,
            consecutive=mask is None and length == 1,
        )
        return ring.advance(state, rows), write

    def held(self, ring: Ring, state: Clock) -> Held:
        """The last rows, oldest first."""
        return Held(first=ring.oldest_slot(state), count=state.count * ring.envs)

    def stamp(self, ring: Ring, state: Clock, slots: jax.Array) -> jax.Array:
        """The lap in which each slot was written."""
        return ring.generation(state, slots)

    def reset(self, ring: Ring, state: Clock) -> Clock:
        """Row 0 of a later lap."""
        return ring.emptied(state)

    def hold(self, state: Clock, token: jax.Array) -> Clock:
        """The same clock, its cursor not known before the token."""
        return state.replace(cursor=state.cursor + token)  # pyright: ignore
