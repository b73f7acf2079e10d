"""Items that go each to a slot of its own, in no order of time."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jrb._core import rows
from jrb._xla import dependencies
from jrb.occupancy import Occupancy
from jrb.ring import Ring
from jrb.types import WritePlan, Writer
from jrb.types.messages import PartState


class OneByOne(Writer):
    """What all writers do that choose a slot for each item, and number items as they come.

    Their states have `stamps`, uint32 `[N]`, the number of the item in each slot; `count`, int32
    `[]`, how many slots, from 0 on, hold items; and `number`, uint32 `[]`, of the next item.
    """

    is_chronological: ClassVar[bool] = False

    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """The first slots."""
        return Occupancy(first=jnp.zeros((), jnp.int32), count=state.count)

    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """The number of the item."""
        return dependencies.read(lambda: state.stamps.at[slots].get(mode="clip"))

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """By the numbers of the items."""
        return rows.by_number(state.stamps, state.number, state.count), state.count


def write_of(ring: Ring, slots: jax.Array, written: jax.Array) -> WritePlan:
    """The write of items at slots, int32 `[T * E]`, distinct but for N; rows bool `[T]` pass."""
    return WritePlan(
        starts=slots,
        slots=slots.reshape(written.size, ring.envs),
        written=written,
        passed=jnp.zeros(written.size, jnp.int32),
        expired=jnp.zeros((), jnp.int32),
        consecutive=False,
    )
