"""The base classes of storages: for items on the device, and for items on the host."""

import abc
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import jax
import numpy as np

from jrb._util.pytree import SpecKey
from jrb._xla import dependencies
from jrb.ring import Ring
from jrb.types.messages import AuxRead, Context, Item, PartState, SlotsForLeaf, WritePlan


class Storage(abc.ABC):
    """Keeps the items: writes rows to slots, and reads them.

    Attributes:
        of_objects: True if items are Python objects instead of arrays.
        only_plans: True for the `device_part` of a storage on the host, whose `write` returns the
            slots, int32 `[T, E]`, and its state.
        unbound: the names of fields on which no state depends, such as a path; a saved buffer may
            be loaded with other values of them.
    """

    of_objects: ClassVar[bool] = False
    only_plans: ClassVar[bool] = False
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
        return dependencies.emptied(state, token)

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


# The key of all storages of objects, whose items have no shapes to compare.
_NO_ARRAYS = SpecKey({})


class HostStorage(Storage):
    """A storage that keeps items on the host.

    Outside `jit`, the buffer's methods are host code around jitted parts. In the jitted parts,
    `device_part` takes the place of this storage: it plans writes and reads, and the methods here
    carry them out. Inside `jit`, the buffer calls `write` and `read`, as of any storage.

    Attributes:
        state_type: the class of the storage's states, a subclass of `HostState`.
        takes_back: True if a write that is interrupted inside `writing` is undone.
    """

    state_type: ClassVar[type]
    takes_back: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def device_part(self) -> Any:
        """The storage that replaces this one in jitted parts, such as `HostStorageProxy()`."""

    @abc.abstractmethod
    def device_state(self, state: PartState) -> Any:
        """Returns the state of `device_part`."""

    @abc.abstractmethod
    def make(self, ring: Ring, spec: Item, device_state: PartState, is_chronological: bool) -> Any:
        """Creates an empty storage; `is_chronological` is True if rows will be in order of time."""

    @abc.abstractmethod
    def put(self, state: PartState, planned: Any, items: Item) -> Any:
        """Writes items, leaves `[T, E, ...]` or `[T, ...]`, as `planned` by `device_part.write`."""

    def moved(self, state: PartState, planned: Any) -> Any:
        """Returns the state with the device part's state from `planned`; by default it has none.

        Called after `put` if the plan given to `put` did not contain that state yet.
        """
        return state

    @abc.abstractmethod
    def fetch(self, state: PartState, slots: jax.Array, places: Any) -> Item:
        """Returns the items at `slots`; or each leaf at its own slots, given by `places`.

        Args:
            state: the storage's state.
            slots: int32 `[B]`, the anchors.
            places: the result of `device_part.locate`; None if all leaves are read at `slots`.
        """

    @abc.abstractmethod
    def take(self, state: PartState, slots: np.ndarray) -> Item:
        """Returns the stored items at slots of any shape, without unit and transforms."""

    def put_values(
        self, state: PartState, device_state: PartState, slots: np.ndarray, values: Item
    ) -> Any:
        """Returns the edited state, as `edit` does, outside `jit`.

        Args:
            state: the storage's state.
            device_state: the state of the device part, in which the edit is done already.
            slots: int32 `[B]`, distinct, except that entries of N are skipped.
            values: leaves `[B, ...]` by name; for a storage of objects, a sequence of B objects.
        """
        raise TypeError(
            f"set: expected a storage with a method put_values, got {type(self).__name__}. "
            "See jrb.types.HostStorage."
        )

    def spec_key(self, state: PartState) -> SpecKey:
        """Returns the spec of one item as a hashable key; by default computed at each call."""
        return _NO_ARRAYS if self.of_objects else SpecKey(self.spec(state))

    def names(self, state: PartState) -> tuple[str, ...] | None:
        """Returns the names of the leaves; None if items can only be read with all their leaves."""
        return None

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> dict[str, int]:
        """Returns the bytes that `make` allocates, by "device", "host" and "files".

        Without those of the device part; by default none.
        """
        return {}

    def drawing(self, state: PartState) -> AbstractContextManager[None]:
        """Returns a context for reads, inside which no slot is overwritten."""
        return nullcontext()

    def writing(self, state: PartState) -> AbstractContextManager[None]:
        """Returns a context for a write; if interrupted, `state` is the newest one again."""
        return nullcontext()
