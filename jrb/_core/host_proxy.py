"""Stand-ins for storages on the host, used in the compiled parts of a method."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax

from jrb._core import transforming
from jrb._util import pytree
from jrb._xla.compiling import kept_by_description
from jrb.state import Buffer, BufferState
from jrb.types import Context, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UniqueSlots:
    """The positions at which leaves are read, stored once for leaves that share their slots.

    Attributes:
        values: the result of `locate` for each distinct array of slots.
        index: for each leaf, the index of its entry in `values`.
    """

    values: list[Any]
    index: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, slots: list[jax.Array], locate: Callable[[jax.Array], Any]) -> Self:
        """Calls `locate` once for each distinct array in `slots`, which has one array per leaf."""
        unique = {id(array): array for array in slots}
        numbers = {key: number for number, key in enumerate(unique)}
        index = tuple(numbers[id(array)] for array in slots)
        return cls([locate(array) for array in unique.values()], index)

    def each(self, function: Callable[[Any], Any]) -> list[Any]:
        """Returns `function(value)` for each leaf, with one call per distinct value."""
        results = [function(value) for value in self.values]
        return [results[number] for number in self.index]


class DeviceProxy(Storage):
    """Stands for a storage on the host in compiled code, which cannot reach the host's rows.

    `write` returns a plan in place of a state: the slots, int32 `[T, E]`, and the proxy's state.
    `read` returns its state: the fetched items.
    """

    only_plans: ClassVar[bool] = True

    @abc.abstractmethod
    def locate(self, context: Context, state: PartState, where: list[jax.Array]) -> UniqueSlots:
        """Returns the positions at which each leaf is read; `where` has the slots of each leaf."""

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        return state


@pytree.component
class HostStorageProxy(DeviceProxy):
    """Stands for a storage that keeps nothing on the device: positions are slots, as given.

    Its state is None, or the items that were fetched from the host.
    """

    def init(self, context: Context, spec: Item) -> None:
        """Returns no state."""

    def spec(self, state: PartState) -> Item:
        return state

    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[tuple[jax.Array, None], WritePlan]:
        return (plan.slots, None), plan

    def edit(
        self, context: Context, state: PartState, slots: jax.Array | None, values: Item
    ) -> Any:
        return state

    def locate(self, context: Context, state: PartState, where: list[jax.Array]) -> UniqueSlots:
        """Returns the slots."""
        return UniqueSlots.of(where, lambda slots: slots)

    def reset(self, ring: Any, state: PartState, token: jax.Array) -> Any:
        return state


@kept_by_description
def for_device(buffer: Buffer) -> Any:
    """Returns the description for compiled parts: `storage.device_part` replaces the storage."""
    storage = buffer.storage
    transforms = () if storage.of_objects else buffer.transforms
    return dataclasses.replace(buffer, storage=storage.device_part, transforms=transforms)


def on_device(buffer: Buffer, state: BufferState) -> Any:
    """Returns the state for compiled parts: `storage.device_state` replaces the items."""
    return state.replace(storage=buffer.storage.device_state(state.storage))


@kept_by_description
def without_items(buffer: Buffer) -> Any:
    """Returns the description for methods that leave items alone: as results, these are copied."""
    learning = tuple(transforming.learning(buffer.transforms))
    return dataclasses.replace(buffer, storage=HostStorageProxy(), transforms=learning)
