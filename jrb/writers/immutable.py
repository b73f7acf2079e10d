"""A buffer that is only read."""

from typing import ClassVar, NoReturn

import jax

from jrb import pytree
from jrb.keys import Keys
from jrb.ring import Clock, Held, Ring
from jrb.types import Item
from jrb.writers.round_robin import RoundRobin

_RING = RoundRobin()


@pytree.component
class Immutable:
    """Refuses writes: for a dataset that was loaded.

    Fill a buffer, then draw from its state with a description that has this writer:

        buffer = dataclasses.replace(buffer, writer=jrb.Immutable())
    """

    in_time: ClassVar[bool] = True

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Clock:
        """As `RoundRobin`."""
        return _RING.init(ring, spec, keys)

    def plan(
        self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None, keys: Keys
    ) -> NoReturn:
        """Raises."""
        raise _refusal("add")

    def held(self, ring: Ring, state: Clock) -> Held:
        """As `RoundRobin`."""
        return _RING.held(ring, state)

    def stamp(self, ring: Ring, state: Clock, slots: jax.Array) -> jax.Array:
        """As `RoundRobin`."""
        return _RING.stamp(ring, state, slots)

    def shrink(self, ring: Ring, state: Clock, rows: jax.Array) -> NoReturn:
        """Raises."""
        raise _refusal("add")

    def reset(self, ring: Ring, state: Clock, token: jax.Array) -> NoReturn:
        """Raises."""
        raise _refusal("empty")

    def hold(self, state: Clock, token: jax.Array) -> Clock:
        """The same: nothing is written."""
        del token
        return state


def _refusal(verb: str) -> TypeError:
    return TypeError(
        f"{verb}: expected a buffer that can be written, got one with writer=Immutable(). "
        "Write with a description that has writer=jrb.RoundRobin()."
    )
