"""The base class of writers."""

import abc
from typing import Any, ClassVar

import jax

from jrb.ring import Occupancy, Ring
from jrb.types.messages import Item, MissingMethodError, PartState, WritePlan


class Writer(abc.ABC):
    """Chooses the slots to which rows are written.

    Attributes:
        is_chronological: True if rows are written around the ring in the order of time. Units that
            read more than one row require it.
        writes: False if the writer refuses every write.
        blocks_when_full: if True, the buffer masks out rows that would overwrite an item that was
            not drawn yet.
        per_env: True if each environment has a ring of its own; masks may then be `[T, E]`.
        generation_is_lap: True if the generation of a slot is the lap of the ring in which it was
            written: the next row has the same generation, or one more where the ring starts over.
    """

    is_chronological: ClassVar[bool] = True
    writes: ClassVar[bool] = True
    blocks_when_full: ClassVar[bool] = False
    per_env: ClassVar[bool] = False
    generation_is_lap: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, ring: Ring, spec: Item) -> Any:
        """Returns the state before any write; raises if the spec of an item does not fit."""

    @abc.abstractmethod
    def plan(
        self, ring: Ring, state: PartState, items: Item, mask: jax.Array | None
    ) -> tuple[Any, WritePlan]:
        """Returns the state after a write of T rows, and the slots of these rows.

        Args:
            ring: the ring's shape.
            state: the writer's state.
            items: the items to write, leaves `[T, E, ...]`.
            mask: bool `[T]`, True for rows to write, or `[T, E]` if `per_env`; None for all.
        """

    @abc.abstractmethod
    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """Returns the slots that hold items."""

    @abc.abstractmethod
    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """Returns the generation of each slot, uint32; it changes with the item in the slot."""

    @abc.abstractmethod
    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without items, in which no earlier generation is ever current again.

        Arrays are overwritten after `token`, an int32 zero (see `jrb._xla.dependencies`).
        """

    def has_lost(self, ring: Ring, state: PartState) -> jax.Array:
        """Returns True if rows older than those held may have been lost, bool `[1]` or `[E]`.

        The oldest row held may then be inside an episode. The default fits writers whose rows leave
        only by being overwritten.
        """
        return self.held(ring, state).rows(ring) == ring.rows

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """Returns all slots, int32 `[N]`, those with items first, oldest first; and their count."""
        # Ranks go from the oldest item on; those beyond the number held are slots without items.
        held = self.held(ring, state)
        ranks = jax.numpy.arange(ring.capacity, dtype=jax.numpy.int32)
        return held.nth(ring, ranks), held.size

    def evict_oldest(self, ring: Ring, state: PartState, rows: jax.Array) -> Any:
        """Returns the state without the oldest rows; `rows`, int32 `[]` or `[E]`, is their number.

        Called if a storage had no room for them. By default raises MissingMethodError.
        """
        raise MissingMethodError(
            "expected a writer with a method evict_oldest, as the storage may give up its oldest "
            f"rows early, got {type(self).__name__}. See jrb.types.Writer."
        )

    def best(self, ring: Ring, state: PartState, count: int) -> jax.Array:
        """Returns the slots of the `count` items to keep, or of all if fewer, int32, ascending.

        Called if a smaller buffer takes over the items and the writer is not chronological;
        otherwise the newest rows are kept.
        """
        raise TypeError(
            f"load: expected a writer with a method best, as its rows are in no order of time, got "
            f"{type(self).__name__}. See jrb.types.Writer."
        )

    def import_state(self, ring: Ring, state: PartState, old: PartState) -> Any:
        """Takes over what `old`, a state of the same kind of writer, knew; by default nothing."""
        return state

    def in_shard(self, state: PartState, number: jax.Array) -> Any:
        """Returns the empty state of shard `number`, int32 `[]`, from the empty state of any shard.

        By default the states are equal; writers that choose at random must make them differ.
        """
        return state

    def check_edit(self, method: str, names: frozenset[str]) -> None:
        """Raises if leaves with these names must not be edited; by default all may be."""
        return

    def writable(self) -> "Writer":
        """Returns a writer with the same states that accepts writes."""
        return self
