"""The stand-in for a storage on the host in the jitted parts of a verb."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax

from jrb._core import transforming
from jrb._util import pytree
from jrb.state import Buffer, BufferState
from jrb.types import Context, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UniqueSlots:
    """The slots at which each leaf is read. Mostly, many leaves are read at the same ones.

    Attributes:
        values: what `locate` gave, once for each array of slots.
        index: for each leaf, the number of its entry in `values`.
    """

    values: list[Any]
    index: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, slots: list[jax.Array], locate: Callable[[jax.Array], Any]) -> Self:
        """Calls `locate` once for each of the arrays, of which one may stand for many leaves."""
        unique = {id(array): array for array in slots}
        numbers = {key: number for number, key in enumerate(unique)}
        index = tuple(numbers[id(array)] for array in slots)
        return cls([locate(array) for array in unique.values()], index)

    def each(self, function: Callable[[Any], Any]) -> list[Any]:
        """Returns `function` of the value of each leaf, called once for each value."""
        results = [function(value) for value in self.values]
        return [results[number] for number in self.index]


class DeviceProxy(Storage):
    """Says where it would write, and reads what it is given.

    `write` returns its plan in place of a state. `read` returns the state itself: what was fetched.
    """

    @abc.abstractmethod
    def locate(self, context: Context, state: PartState, where: list[jax.Array]) -> UniqueSlots:
        """Returns where each leaf is read, from the slots at which it is."""

    @abc.abstractmethod
    def planned(self, plan: Any) -> tuple[jax.Array, Any]:
        """Splits what `write` returned into the slots, int32 `[T, E]`, and the state."""

    def slots_of(self, plan: Any) -> Any:
        return plan

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        return state


@pytree.component
class HostStorageProxy(DeviceProxy):
    """The stand-in for a storage that has nothing on the device: it returns the slots it is given.

    Its state is None, or what was fetched from the host.
    """

    def init(self, context: Context, spec: Item) -> None:
        """Returns no state."""

    def spec(self, state: PartState) -> Item:
        return state

    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[jax.Array, WritePlan]:
        return plan.slots, plan

    def planned(self, plan: jax.Array) -> tuple[jax.Array, None]:
        return plan, None

    def edit(
        self, context: Context, state: PartState, slots: jax.Array | None, values: Item
    ) -> Any:
        return state

    def locate(self, context: Context, state: PartState, where: list[jax.Array]) -> UniqueSlots:
        """Returns the slots."""
        return UniqueSlots.of(where, lambda slots: slots)

    def reset(self, ring: Any, state: PartState, token: jax.Array) -> Any:
        return state


@functools.lru_cache(maxsize=64)
def for_device(buffer: Buffer) -> Any:
    """Returns the buffer as its jitted parts know it, without items that are on the host."""
    storage = buffer.storage
    transforms = () if storage.of_objects else buffer.transforms
    return dataclasses.replace(buffer, storage=storage.device_part, transforms=transforms)


def on_device(buffer: Buffer, state: BufferState) -> Any:
    """Returns a state as jitted parts know it."""
    return state.replace(storage=buffer.storage.device_state(state.storage))


@functools.lru_cache(maxsize=64)
def without_items(buffer: Buffer) -> Any:
    """Returns the buffer for verbs that leave items as they are: returned, they would be copied."""
    learning = tuple(transforming.learning(buffer.transforms))
    return dataclasses.replace(buffer, storage=HostStorageProxy(), transforms=learning)
