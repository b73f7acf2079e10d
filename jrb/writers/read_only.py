"""A buffer that is only read."""

from typing import Any, ClassVar, NoReturn

import jax

from jrb._util import pytree
from jrb._util.pytree import ArrayLike
from jrb.ring import Occupancy, Ring
from jrb.types import Item, WritePlan, Writer
from jrb.types.messages import PartState
from jrb.types.parts import check_part
from jrb.writers.ring import RoundRobin


@pytree.component
class ReadOnly(Writer):
    """Refuses writes: for a dataset that was loaded.

    Fill a buffer, then draw from its state with a description that has this writer:

        buffer = dataclasses.replace(buffer, writer=jrb.ReadOnly())

    Attributes:
        writer: the writer that filled the buffer.
    """

    writes: ClassVar[bool] = False

    writer: Writer = RoundRobin()

    def __post_init__(self) -> None:
        check_part("writer", self.writer)
        for name in ("is_chronological", "per_env"):
            object.__setattr__(self, name, getattr(self.writer, name))

    def init(self, ring: Ring, spec: Item) -> Any:
        """That of the writer it was filled by."""
        return self.writer.init(ring, spec)

    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """What was written."""
        return self.writer.held(ring, state)

    def has_lost(self, ring: Ring, state: PartState) -> jax.Array:
        """As the writer it was filled by."""
        return self.writer.has_lost(ring, state)

    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """Those of the writer it was filled by."""
        return self.writer.generation_of(ring, state, slots)

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """All slots, in the order in which they were written."""
        return self.writer.in_order(ring, state)

    def best(self, ring: Ring, state: PartState, count: int) -> jax.Array:
        """As the writer it was filled by."""
        return self.writer.best(ring, state, count)

    def import_state(self, ring: Ring, state: PartState, old: PartState) -> Any:
        """As the writer it was filled by."""
        return self.writer.import_state(ring, state, old)

    def plan(
        self, ring: Ring, state: PartState, items: Item, mask: ArrayLike | None
    ) -> tuple[Any, WritePlan]:
        """Raises."""
        raise _refusal("add")

    def evict_oldest(self, ring: Ring, state: PartState, rows: jax.Array) -> NoReturn:
        """Raises."""
        raise _refusal("add")

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> NoReturn:
        """Raises."""
        raise _refusal("empty")

    def check_edit(self, verb: str, names: frozenset[str]) -> NoReturn:
        """Raises."""
        raise _refusal(verb)

    def writable(self) -> Writer:
        """What fills a buffer that is then only read."""
        return self.writer


def _refusal(verb: str) -> TypeError:
    return TypeError(
        f"{verb}: expected a buffer that can be written, got one with writer=ReadOnly(). "
        "Write with a description that has the writer that filled it, jrb.RoundRobin() mostly."
    )
