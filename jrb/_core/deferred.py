"""What stands for a storage on the host in the jitted parts of a verb."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jrb._util import pytree
from jrb.types import Context, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Something for each leaf, mostly the same for many of them.

    Attributes:
        found: what there is, each once.
        index: of each leaf.
    """

    found: list[Any]
    index: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def each(self, make: Callable[[Any], Any]) -> list[Any]:
        """What `make` gives of what there is, once for each, for all leaves."""
        made = [make(one) for one in self.found]
        return [made[index] for index in self.index]


def places(where: list[jax.Array], locate: Callable[[jax.Array], Any]) -> Places:
    """What is to be known of the slots at which leaves are read."""
    unique = {id(slots): slots for slots in where}
    order = list(unique)
    return Places(
        found=[locate(slots) for slots in unique.values()],
        index=tuple(order.index(id(slots)) for slots in where),
    )


class DeviceProxy(Storage):
    """Says where it would write, and reads what it is given.

    `write` returns its plan in place of a state, `read` the state itself: what was fetched.
    """

    @abc.abstractmethod
    def locate(self, context: Context, state: PartState, where: list[jax.Array]) -> Places:
        """Where each leaf is read, from the slots at which it is."""

    @abc.abstractmethod
    def planned(self, plan: Any) -> tuple[jax.Array, Any]:
        """What `write` returned, as the slots, int32 `[T, E]`, and the state."""

    def slots_of(self, plan: Any) -> Any:
        """The same plan without a state."""
        return plan

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """The state itself."""
        return state


@pytree.component
class HostStorageProxy(DeviceProxy):
    """Has nothing on the device."""

    def init(self, context: Context, spec: Item) -> None:
        """Without a state."""

    def spec(self, state: PartState) -> Item:
        """Not known."""
        return state

    def write(
        self, context: Context, state: PartState, write: WritePlan, items: Item
    ) -> tuple[jax.Array, WritePlan]:
        """The slots, int32 `[T, E]`."""
        return write.slots, write

    def planned(self, plan: jax.Array) -> tuple[jax.Array, None]:
        """The slots."""
        return plan, None

    def edit(
        self, context: Context, state: PartState, slots: jax.Array | None, values: Item
    ) -> Any:
        """Nothing is there."""
        return state

    def locate(self, context: Context, state: PartState, where: list[jax.Array]) -> Places:
        """The slots."""
        return places(where, lambda slots: slots)

    def reset(self, ring: Any, state: PartState, token: jax.Array) -> Any:
        """Without a state."""
        return state
