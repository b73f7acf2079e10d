"""A storage of Python objects on the host."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from jrb._core.eager import refusal
from jrb._core.host_proxy import HostStorageProxy
from jrb._store.errors import StaleError
from jrb._util import pytree
from jrb.ring import Ring
from jrb.types import Context, HostState, HostStorage, Item, SlotsForLeaf, WritePlan


class Shelf:
    """The objects of one buffer, which all its states share."""

    def __init__(self, capacity: int) -> None:
        self.objects: list[Any] = [None] * capacity
        # The number of the write that stored each object, and the number of all writes.
        self.written: np.ndarray = np.zeros(capacity, np.int64)
        self.writes: int = 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Objects(HostState):
    """The state of a `ListStorage`."""

    shelf: Shelf  # the objects of all states of the buffer
    version: int  # the number of writes up to this state

    @property
    def capacity(self) -> int:
        """N, the number of slots."""
        return len(self.shelf.objects)


@pytree.component
class ListStorage(HostStorage):
    """Keeps any Python object as it is, in a list: strings, None, dicts of different shapes.

    It works only outside `jit`; sampler, writer and priorities stay on the device. An item is one
    object; `extend` takes a sequence of T objects or, with `num_envs`, of T sequences of E. All
    states share their objects: an older state can neither be written to nor draw objects that were
    overwritten since. The unit must be `jrb.Transition()`. `jrb.save` takes None, numbers, strings,
    bytes, arrays, and lists, tuples and dicts with str keys of these, and needs the extra
    `objects`. Arrays are loaded as they were, NumPy's or JAX's; an object in several slots becomes
    several.

    Attributes:
        collate: a function from a list of B objects to `Sample.data`; None for the list itself.
            Masked entries of the list are None.

    Example:
        >>> import jax, jrb
        >>> buffer = jrb.ReplayBuffer(3, batch_size=2, storage=jrb.ListStorage())
        >>> state = buffer.add(buffer.init(None), "foo")
        >>> buffer.sample(state, jax.random.key(0)).data
        ['foo', 'foo']
    """

    collate: Callable[[list[Any]], Any] | None = None
    of_objects: ClassVar[bool] = True
    unbound: ClassVar[tuple[str, ...]] = ("collate",)
    state_type: ClassVar[type] = Objects

    @property
    def device_part(self) -> HostStorageProxy:
        """The storage that replaces this one in jitted parts."""
        return HostStorageProxy()

    def device_state(self, state: Objects) -> None:
        """Returns None, as `device_part` has no state."""

    def init(self, context: Context, spec: Item) -> Objects:
        """Returns a state without objects."""
        return self.make(context.ring, spec, None, is_chronological=True)

    def make(self, ring: Ring, spec: Item, device_state: None, is_chronological: bool) -> Objects:
        """Returns a state without objects."""
        return Objects(shelf=Shelf(ring.capacity), version=0)

    def reset(self, ring: Ring, state: Objects, token: jax.Array) -> Objects:
        """Returns a state without objects; older states keep theirs."""
        return Objects(shelf=Shelf(ring.capacity), version=0)

    def put(self, state: Objects, planned: tuple[Any, None], items: list[list[Any]]) -> Objects:
        """Stores rows of objects at slots `[T, E]`; slots of N or more are skipped."""
        shelf, slots = state.shelf, np.asarray(planned[0])
        # Checked before anything is written, so that the newest state stays as it is.
        if state.version != shelf.writes:
            raise StaleError(
                "ListStorage: expected the newest state, got one that has been written to before. "
                "States share their objects: go on with the state that the last write returned."
            )
        shelf.writes += 1
        objects = [item for row in items for item in row]
        for item, slot in zip(objects, slots.reshape(-1).tolist(), strict=True):
            if slot < len(shelf.objects):
                shelf.written[slot] = shelf.writes  # first: a thread that reads checks it last
                shelf.objects[slot] = item
        return Objects(shelf=shelf, version=shelf.writes)

    def put_values(
        self, state: Objects, device_state: None, slots: np.ndarray, values: list[Any]
    ) -> Objects:
        """Stores other objects at slots `[B]`; slots of N or more are skipped."""
        return self.put(state, (slots[None], None), [values])

    def fetch(self, state: Objects, slots: jax.Array, places: Any) -> list[Any]:
        """Returns the objects at slots `[B]`."""
        return self.take(state, np.asarray(slots))

    def take(self, state: Objects, slots: np.ndarray) -> list[Any]:
        """Returns the objects at slots of any shape."""
        shelf, slots = state.shelf, slots.reshape(-1)
        objects = list(map(shelf.objects.__getitem__, slots.tolist()))
        # Checked after the objects were read, so that a write in between is noticed.
        if shelf.writes > state.version and (shelf.written[slots] > state.version).any():
            raise StaleError(
                "ListStorage: expected a state whose objects are still there, got one of which "
                "something was overwritten since. Draw from the state that the last write returned."
            )
        return objects

    # Inside jit there are no objects.

    def spec(self, state: Objects) -> Item:
        """Raises TypeError, as objects have no shapes."""
        raise refusal()

    def write(
        self, context: Context, state: Objects, plan: WritePlan, items: Item
    ) -> tuple[Objects, WritePlan]:
        """Raises TypeError, as `jit` takes no objects."""
        raise refusal()

    def read(self, context: Context, state: Objects, where: SlotsForLeaf) -> Item:
        """Raises TypeError, as `jit` returns no objects."""
        raise refusal()
