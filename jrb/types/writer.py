"""The contract of writers."""

import abc
from typing import Any, ClassVar

import jax

from jrb.ring import Occupancy, Ring
from jrb.types.messages import Item, MissingMethodError, PartState, WritePlan


class Writer(abc.ABC):
    """Which slots do these rows go to?

    Attributes:
        is_chronological: True if rows lie around the ring in the order in which they came. Units
            that read more than one row require it.
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
        """The state of a writer that wrote nothing. `spec`: of one item, to be checked."""

    @abc.abstractmethod
    def plan(
        self, ring: Ring, state: PartState, items: Item, mask: jax.Array | None
    ) -> tuple[Any, WritePlan]:
        """Slots for rows of time.

        Args:
            ring: the ring's shape.
            state: the writer's state.
            items: what will be written, leaves `[T, E, ...]`.
            mask: bool `[T]`, the rows to write, or `[T, E]` where each environment has a clock;
                None for all.
        """

    @abc.abstractmethod
    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """The slots that hold items."""

    @abc.abstractmethod
    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """uint32 like `slots`: another number as soon as a slot holds another item."""

    @abc.abstractmethod
    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Forgets all slots; no stamp from before is ever current again.

        Args:
            ring: the ring's shape.
            state: the writer's state.
            token: an int32 zero, after which arrays are overwritten (see `jrb._xla.dependencies`).
        """

    def has_lost(self, ring: Ring, state: PartState) -> jax.Array:
        """Whether rows older than those held may be lost, bool `[1]` or `[E]`.

        The oldest row held may then lie within an episode. The default is for writers whose rows
        leave by being overwritten only.
        """
        return self.held(ring, state).rows(ring) == ring.rows

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """All slots, int32 `[N]`, those that hold items first, oldest first; and their number."""
        held = self.held(ring, state)
        place = jax.numpy.arange(ring.capacity, dtype=jax.numpy.int32)
        return held.nth(ring, place), held.size

    def evict_oldest(self, ring: Ring, state: PartState, rows: jax.Array) -> Any:
        """The same without so many of the oldest rows, int32 `[]` or `[E]`.

        Asked where a storage had no room for them.

        Raises:
            MissingMethodError: by default.
        """
        raise MissingMethodError(
            "expected a writer with a method evict_oldest, as the storage may give up its oldest "
            f"rows early, got {type(self).__name__}. See jrb.types.Writer."
        )

    def best(self, ring: Ring, state: PartState, count: int) -> jax.Array:
        """The slots of the `count` items to keep, or of all, int32 `[K]` in the order of slots.

        For writers that keep no order of time; of the others, the newest rows are kept.
        """
        raise TypeError(
            f"load: expected a writer with a method best, as its rows are in no order of time, got "
            f"{type(self).__name__}. See jrb.types.Writer."
        )

    def import_state(self, ring: Ring, state: PartState, old: PartState) -> Any:
        """Takes over what another buffer's writer of this kind knew, after its items were written.

        Args:
            ring: the ring's shape.
            state: the writer's state.
            old: the other writer's state.
        """
        return state

    def in_shard(self, state: PartState, number: jax.Array) -> Any:
        """The state, empty, in the shard of this number, int32 `[]`, of several.

        The default is that all are alike; random choices should not be.
        """
        return state

    def check_edit(self, verb: str, names: frozenset[str]) -> None:
        """Raises if leaves of these names may not be edited; the default is that all may."""
        return

    def writable(self) -> "Writer":
        """A writer with the same states that does not refuse to write."""
        return self
