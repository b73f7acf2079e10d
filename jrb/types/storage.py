"""The base class of storages."""

import abc
from typing import Any, ClassVar

import jax

from jrb._xla import dependencies
from jrb.ring import Ring
from jrb.types.messages import AuxRead, Context, Item, PartState, SlotsForLeaf, WritePlan


class Storage(abc.ABC):
    """Keeps the items: writes rows to slots, and reads them.

    Attributes:
        is_on_host: True if items are on the host, see `jrb.storages.HostStorage`.
        of_objects: True if items are Python objects instead of arrays.
        unbound: the names of fields on which no state depends, such as a path; a saved buffer may
            be loaded with other values of them.
    """

    is_on_host: ClassVar[bool] = False
    of_objects: ClassVar[bool] = False
    unbound: ClassVar[tuple[str, ...]] = ()

    @property
    def requires_chronological(self) -> bool:
        """True if rows must be written in the order of time."""
        return False

    @abc.abstractmethod
    def init(self, context: Context, spec: Item) -> Any:
        """Returns a state with room for N items of this spec (`jax.ShapeDtypeStruct` leaves)."""

    @abc.abstractmethod
    def spec(self, state: PartState) -> Item:
        """Returns the spec of one item."""

    @abc.abstractmethod
    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes items, leaves `[T, E, ...]`, to the slots of `plan`.

        Returns:
            The state; and `plan`, in which more rows expire if the storage had no room for them.
        """

    @abc.abstractmethod
    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Returns each leaf at the slots `where(name)`, shape `[*where(name).shape, ...]`.

        Use few gathers, in `jrb.authoring.materialize`, so that later writes wait for them.
        """

    def read_with(
        self, context: Context, state: PartState, where: SlotsForLeaf, lookups: list[AuxRead]
    ) -> tuple[Item, list[jax.Array]] | None:
        """Reads items and the arrays of `lookups` together, in one `dependencies.materialize`.

        Returns:
            The items, and the values of each array at its slots. None if the storage cannot do
            this; the engine then reads the arrays first and the items after them.
        """
        return None

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without items; arrays may keep their old values."""
        return dependencies.empty_state(state, token)

    def shares(self, context: Context, state: PartState, names: frozenset[str]) -> bool:
        """Returns True if rows share memory in any of these leaves; such leaves are not edited."""
        return False

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """Returns the state with other values in leaves of held items.

        Args:
            context: the buffer's context.
            state: the storage's state.
            slots: int32 `[B]`, distinct, except that entries of N are skipped; None for all slots.
            values: leaves `[B, ...]` by name, in the stored dtypes.
        """
        raise TypeError(
            f"set: expected a storage with a method edit, got {type(self).__name__}. "
            "See jrb.types.Storage."
        )

    def slotted(self, state: PartState) -> Item:
        """Returns arrays `[N or more, ...]` in which row s < N changes only when slot s is written.

        A checkpoint writes only the changed rows of these arrays, and others in full. By default
        none.
        """
        return ()
