"""The contract of writers."""

import abc
from typing import Any, ClassVar

import jax

from jrb.ring import Occupancy, Ring
from jrb.types.messages import Item, MissingMethodError, PartState, WritePlan


class Writer(abc.ABC):
    """Decides to which slots rows go.

    Attributes:
        is_chronological: True if rows follow one another around the ring in the order of time.
            Units that read more than one row require it.
        writes: False if the writer refuses every write.
        blocks_when_full: if True, the buffer masks out rows that would overwrite an item that was
            not drawn yet.
        per_env: True if each environment has a ring of its own; masks may then be `[T, E]`.
        generation_is_lap: True if the generation of a slot is the number of laps of the ring, so
            that the next row has the same, or one more where the ring starts over.
    """

    is_chronological: ClassVar[bool] = True
    writes: ClassVar[bool] = True
    blocks_when_full: ClassVar[bool] = False
    per_env: ClassVar[bool] = False
    generation_is_lap: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, ring: Ring, spec: Item) -> Any:
        """Returns the state before any write; `spec` is of one item, to be checked."""

    @abc.abstractmethod
    def plan(
        self, ring: Ring, state: PartState, items: Item, mask: jax.Array | None
    ) -> tuple[Any, WritePlan]:
        """Plans the slots of rows of time.

        Args:
            ring: the ring's shape.
            state: the writer's state.
            items: what will be written, leaves `[T, E, ...]`.
            mask: bool `[T]`, the rows to write, or `[T, E]` where each environment has a clock;
                None for all.
        """

    @abc.abstractmethod
    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """Returns the slots that hold items."""

    @abc.abstractmethod
    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """Returns uint32 like `slots`: another number as soon as a slot holds another item."""

    @abc.abstractmethod
    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without items; no stamp from before is ever current again.

        Arrays are overwritten after the token, an int32 zero (see `jrb._xla.dependencies`).
        """

    def has_lost(self, ring: Ring, state: PartState) -> jax.Array:
        """Returns True where rows older than those held may be lost, bool `[1]` or `[E]`.

        The oldest row held may then be within an episode. The default is for writers whose rows
        leave by being overwritten only.
        """
        return self.held(ring, state).rows(ring) == ring.rows

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """Returns all slots, int32 `[N]`, those with items first, oldest first; and how many."""
        # Ranks go from the oldest item on; those beyond the number held are slots without items.
        held = self.held(ring, state)
        ranks = jax.numpy.arange(ring.capacity, dtype=jax.numpy.int32)
        return held.nth(ring, ranks), held.size

    def evict_oldest(self, ring: Ring, state: PartState, rows: jax.Array) -> Any:
        """Returns the state without `rows` of the oldest rows, int32 `[]` or `[E]`.

        Called where a storage had no room for them. By default raises MissingMethodError.
        """
        raise MissingMethodError(
            "expected a writer with a method evict_oldest, as the storage may give up its oldest "
            f"rows early, got {type(self).__name__}. See jrb.types.Writer."
        )

    def best(self, ring: Ring, state: PartState, count: int) -> jax.Array:
        """Returns the slots of the `count` items to keep, or of all, int32 `[K]`, ascending.

        For writers that keep no order of time; of the others, the newest rows are kept.
        """
        raise TypeError(
            f"load: expected a writer with a method best, as its rows are in no order of time, got "
            f"{type(self).__name__}. See jrb.types.Writer."
        )

    def import_state(self, ring: Ring, state: PartState, old: PartState) -> Any:
        """Returns the state with what another writer of this kind knew of the items."""
        return state

    def in_shard(self, state: PartState, number: jax.Array) -> Any:
        """Returns the state, empty, in the shard of this number, int32 `[]`, of several.

        By default all are alike; random choices should not be.
        """
        return state

    def check_edit(self, verb: str, names: frozenset[str]) -> None:
        """Raises if leaves of these names may not be edited; by default all may."""
        return

    def writable(self) -> "Writer":
        """Returns a writer with the same states that does not refuse to write."""
        return self
