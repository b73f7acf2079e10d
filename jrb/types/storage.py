"""The contracts of storages: on the device, and on the host."""

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
    """Puts rows at slots, gets rows at slots.

    Attributes:
        of_objects: True if items are no arrays, but Python objects.
        unbound: names of fields that say where items are, and not what the buffer does: a
            description may be loaded with others.
    """

    of_objects: ClassVar[bool] = False
    unbound: ClassVar[tuple[str, ...]] = ()

    @property
    def requires_chronological(self) -> bool:
        """True if rows must come in the order of time."""
        return False

    @abc.abstractmethod
    def init(self, context: Context, spec: Item) -> Any:
        """Returns room for N items of this spec (`jax.ShapeDtypeStruct` leaves)."""

    @abc.abstractmethod
    def spec(self, state: PartState) -> Item:
        """Returns the spec of one item."""

    @abc.abstractmethod
    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Puts items, leaves `[T, E, ...]`, at the slots of `plan`.

        Returns:
            The state, and `plan`: the same, or with more rows expired where there was no room.
        """

    @abc.abstractmethod
    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Returns each leaf at its slots, `[*where(name).shape, ...]`.

        Read by few gathers, in `jrb.authoring.materialize`, so that later writes wait for them.
        """

    def read_with(
        self, context: Context, state: PartState, where: SlotsForLeaf, lookups: list[AuxRead]
    ) -> tuple[Item, list[jax.Array]] | None:
        """Reads items and further arrays together, in one `dependencies.materialize`.

        Returns:
            The items, and what is in each array at its slots; None from a storage that cannot, of
            which the items are then read after the rest.
        """
        return None

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without items; their arrays may keep what they hold."""
        return dependencies.emptied(state, token)

    def shares(self, context: Context, state: PartState, names: frozenset[str]) -> bool:
        """Returns True if rows share some of these leaves: then `edit` is not called for them."""
        return False

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """Puts other values into leaves of held items.

        Args:
            context: the buffer's context.
            state: the storage's state.
            slots: int32 `[B]`, distinct but for those of N, which are left out; None for all N.
            values: leaves `[B, ...]` by their names, of their dtypes.
        """
        raise TypeError(
            f"set: expected a storage with a method edit, got {type(self).__name__}. "
            "See jrb.types.Storage."
        )

    def slotted(self, state: PartState) -> Item:
        """Returns arrays `[N or more, ...]` whose row s changes only when slot s is written, s < N.

        A checkpoint looks for changes in these only, and writes others in full: by default, all.
        """
        return ()


# The key of all storages of objects, whose items have no shapes to compare.
_NO_ARRAYS = SpecKey({})


class HostStorage(Storage):
    """A storage that keeps items on the host.

    Outside `jit`, the buffer's methods are host code around jitted parts. In these, `device_part`
    stands for the storage: it plans the writes and reads, and the methods here carry them out.
    Inside `jit`, the buffer calls `write` and `read`, as of any storage.

    Attributes:
        state_type: the class of its states, below `HostState`.
        takes_back: whether a write that something interrupts in `writing` has not happened.
    """

    state_type: ClassVar[type]
    takes_back: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def device_part(self) -> Any:
        """The storage in jitted parts that takes the place of this one, as `HostStorageProxy()`."""

    @abc.abstractmethod
    def device_state(self, state: PartState) -> Any:
        """Returns the state of `device_part`."""

    @abc.abstractmethod
    def make(self, ring: Ring, spec: Item, device_state: PartState, is_chronological: bool) -> Any:
        """Returns the state of an empty storage, to which rows come in the order of time or not."""

    @abc.abstractmethod
    def put(self, state: PartState, planned: Any, items: Item) -> Any:
        """Puts items, leaves `[T, E, ...]` or `[T, ...]`, where the device part has `planned`."""

    def moved(self, state: PartState, planned: Any) -> Any:
        """Returns the state with that of the device part in `planned`; by default there is none.

        Called where `put` was called with a plan that had none yet.
        """
        return state

    @abc.abstractmethod
    def fetch(self, state: PartState, slots: jax.Array, places: Any) -> Item:
        """Returns the items at slots `[B]`; or each leaf where the device part has located it.

        Args:
            state: the storage's state.
            slots: int32 `[B]`, the anchors.
            places: what `device_part.locate` gave, None where all leaves are read at `slots`.
        """

    @abc.abstractmethod
    def take(self, state: PartState, slots: np.ndarray) -> Item:
        """Returns the items at slots of any shape, without unit and transforms."""

    def put_values(
        self, state: PartState, device_state: PartState, slots: np.ndarray, values: Item
    ) -> Any:
        """Edits as `edit` does, outside `jit`.

        Args:
            state: the storage's state.
            device_state: that of the device part, edited already.
            slots: int32 `[B]`, distinct but for those of N, which are left out.
            values: leaves `[B, ...]` by their names; or, of objects, a sequence.
        """
        raise TypeError(
            f"set: expected a storage with a method put_values, got {type(self).__name__}. "
            "See jrb.types.HostStorage."
        )

    def spec_key(self, state: PartState) -> SpecKey:
        """Returns what one slot holds, as a key of dicts; by default it is made at each call."""
        return _NO_ARRAYS if self.of_objects else SpecKey(self.spec(state))

    def names(self, state: PartState) -> tuple[str, ...] | None:
        """Returns the names of the leaves; None where items are read as a whole."""
        return None

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> int:
        """Returns the bytes that `make` allocates, without those of the device part."""
        return 0

    def drawing(self, state: PartState) -> AbstractContextManager[None]:
        """Returns a context in which nothing is overwritten."""
        return nullcontext()

    def writing(self, state: PartState) -> AbstractContextManager[None]:
        """Returns a context after which, if interrupted, this state is the newest again."""
        return nullcontext()
