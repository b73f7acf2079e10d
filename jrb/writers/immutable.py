"""A buffer that is only read."""

from typing import NoReturn

import jax

from jrb._base import pytree
from jrb.ring import Clock, Held, Ring
from jrb.types import Item, Writer
from jrb.writers.round_robin import RoundRobin

_RING = RoundRobin()


@pytree.component
class Immutable(Writer):
    """Refuses writes: for a dataset that was loaded.

    Fill a buffer, then draw from its state with a description that has this writer:

        buffer = dataclasses.replace(buffer, writer=jrb.Immutable())
    """

    def init(self, ring: Ring, spec: Item) -> Clock:
        """As `RoundRobin`."""
        return _RING.init(ring, spec)

    def plan(self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None) -> NoReturn:
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

    def writable(self) -> RoundRobin:
        """What fills a buffer that is then only read."""
        return _RING


def _refusal(verb: str) -> TypeError:
    return TypeError(
        f"{verb}: expected a buffer that can be written, got one with writer=Immutable(). "
        "Write with a description that has writer=jrb.RoundRobin()."
    )
