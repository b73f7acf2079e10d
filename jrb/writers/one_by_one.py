"""Items that go each to a slot of its own, in no order of time."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jrb._base import ordering
from jrb._engine import rows
from jrb.held import Held
from jrb.ring import Ring
from jrb.types import Write, Writer
from jrb.types.messages import PartState


class OneByOne(Writer):
    """What all writers do that choose a slot for each item, and number items as they come.

    Their states have `stamps`, uint32 `[N]`, the number of the item in each slot; `count`, int32
    `[]`, how many slots, from 0 on, hold items; and `number`, uint32 `[]`, of the next item.
    """

    in_time: ClassVar[bool] = False

    def held(self, ring: Ring, state: PartState) -> Held:
        """The first slots."""
        return Held(first=jnp.zeros((), jnp.int32), count=state.count)

    def stamp(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """The number of the item."""
        return ordering.read(lambda: state.stamps.at[slots].get(mode="clip"))

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """By the numbers of the items."""
        return rows.by_number(state.stamps, state.number, state.count), state.count


def write_of(ring: Ring, slots: jax.Array, written: jax.Array) -> Write:
    """The write of items at slots, int32 `[T * E]`, distinct but for N; rows bool `[T]` pass."""
    return Write(
        starts=slots,
        slots=slots.reshape(written.size, ring.envs),
        written=written,
        passed=jnp.zeros(written.size, jnp.int32),
        expired=jnp.zeros((), jnp.int32),
        consecutive=False,
    )
