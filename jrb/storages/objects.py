"""Python objects of any kind, on the host."""

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
        # The number of the write that put each there, and of writes.
        self.written: np.ndarray = np.zeros(capacity, np.int64)
        self.writes: int = 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Objects(HostState):
    """The state of a `ListStorage`."""

    shelf: Shelf  # its objects, together with those of older and newer states
    version: int  # the writes that this state knows of

    @property
    def capacity(self) -> int:
        """N."""
        return len(self.shelf.objects)


@pytree.component
class ListStorage(HostStorage):
    """Keeps any Python object as it is, in a list: strings, None, dicts of different shapes.

    It works outside `jit`; sampler, writer and priorities stay on the device. An item is one
    object, `extend` takes a sequence of T of them, and with `num_envs` each row is a sequence of E.
    Unlike those of other storages, states share their objects: an older state, of which something
    was overwritten since, may neither be written to nor draw that. The unit is `jrb.Transition()`.
    `jrb.save` takes None, numbers, strings, bytes, arrays, and lists, tuples and dicts with str
    keys of these, and needs the extra `objects`. Arrays come back as NumPy's or JAX's, which they
    were; where several slots hold one object, each comes back with its own.

    Attributes:
        collate: a function that makes `Sample.data` of a list of B objects; None for the list
            itself. Masked entries of the list are None.

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
        """The part that replaces this storage in jitted parts."""
        return HostStorageProxy()

    def device_state(self, state: Objects) -> None:
        """Returns the state of `device_part`: nothing."""

    def init(self, context: Context, spec: Item) -> Objects:
        """Returns the state of an empty shelf."""
        return self.make(context.ring, spec, None, is_chronological=True)

    def make(self, ring: Ring, spec: Item, device_state: None, is_chronological: bool) -> Objects:
        """Returns the state of an empty shelf."""
        return Objects(shelf=Shelf(ring.capacity), version=0)

    def reset(self, ring: Ring, state: Objects, token: jax.Array) -> Objects:
        """Returns the state of an empty shelf; older states keep theirs."""
        return Objects(shelf=Shelf(ring.capacity), version=0)

    def put(
        self, state: Objects, planned: jax.Array | np.ndarray, items: list[list[Any]]
    ) -> Objects:
        """Puts rows of objects at the slots `[T, E]`, those of N or more left out."""
        shelf, slots = state.shelf, np.asarray(planned)
        # Before anything is written: the newest state stays as it is.
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
        """Puts other objects at slots `[B]`, those of N or more left out."""
        return self.put(state, slots[None], [values])

    def fetch(self, state: Objects, slots: jax.Array, places: Any) -> list[Any]:
        """Returns the objects at slots `[B]`, as `take`."""
        return self.take(state, np.asarray(slots))

    def take(self, state: Objects, slots: np.ndarray) -> list[Any]:
        """Returns the objects at slots of any shape."""
        shelf, slots = state.shelf, slots.reshape(-1)
        objects = list(map(shelf.objects.__getitem__, slots.tolist()))
        # Looked at after the objects were taken: a write that came meanwhile is seen.
        if shelf.writes > state.version and (shelf.written[slots] > state.version).any():
            raise StaleError(
                "ListStorage: expected a state whose objects are still there, got one of which "
                "something was overwritten since. Draw from the state that the last write returned."
            )
        return objects

    # Inside jit there are no objects.

    def spec(self, state: Objects) -> Item:
        """Raises `TypeError`: objects have no shapes."""
        raise refusal()

    def write(
        self, context: Context, state: Objects, plan: WritePlan, items: Item
    ) -> tuple[Objects, WritePlan]:
        """Raises `TypeError`."""
        raise refusal()

    def read(self, context: Context, state: Objects, where: SlotsForLeaf) -> Item:
        """Raises `TypeError`."""
        raise refusal()
