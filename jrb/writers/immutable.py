"""A buffer that is only read."""

from typing import ClassVar, NoReturn

import jax

from jrb._base import pytree
from jrb.ring import Clock, Ring
from jrb.types import Item
from jrb.writers.in_turn import InTurn
from jrb.writers.round_robin import RoundRobin


@pytree.component
class Immutable(InTurn):
    """Refuses writes: for a dataset that was loaded.

    Fill a buffer, then draw from its state with a description that has this writer:

        buffer = dataclasses.replace(buffer, writer=jrb.Immutable())
    """

    writes: ClassVar[bool] = False

    def plan(self, ring: Ring, state: Clock, items: Item, mask: jax.Array | None) -> NoReturn:
        """Raises."""
        raise _refusal("add")

    def shrink(self, ring: Ring, state: Clock, rows: jax.Array) -> NoReturn:
        """Raises."""
        raise _refusal("add")

    def reset(self, ring: Ring, state: Clock, token: jax.Array) -> NoReturn:
        """Raises."""
        raise _refusal("empty")

    def check_edit(self, verb: str, names: frozenset[str]) -> NoReturn:
        """Raises."""
        raise _refusal(verb)

    def writable(self) -> RoundRobin:
        """What fills a buffer that is then only read."""
        return RoundRobin()


def _refusal(verb: str) -> TypeError:
    return TypeError(
        f"{verb}: expected a buffer that can be written, got one with writer=Immutable(). "
        "Write with a description that has writer=jrb.RoundRobin()."
    )
