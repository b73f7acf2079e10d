"""A storage of Python objects on the host."""

import copy
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

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, object})
"""The types whose objects cannot be changed; of a bare `object()`, only its identity counts."""


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
    """Keeps Python objects of any kind, in a list: strings, None, dicts of different shapes.

    It works only outside `jit`; sampler, writer and priorities stay on the device. An item is one
    object; `extend` takes a sequence of T objects or, with `num_envs`, of T sequences of E. All
    states share their objects: an older state can neither be written to nor draw objects that were
    overwritten since.

    Objects are copied when they are written, and again when they are read: the caller may change
    those that were given and those that were returned, with all arrays, lists and attributes in
    them. Copies are those of `copy.deepcopy`, but that arrays of JAX, which cannot be changed, and
    keys of dicts are not copied; such an array must not be donated. An object that refers to an
    environment or a model copies this too. A class whose objects never change may have a method
    `__deepcopy__` that returns `self`: they are then shared.

    The unit must be `jrb.Transition()`. `jrb.save` takes None, numbers, strings,
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
        objects = (item for row in items for item in row)
        pairs = zip(slots.reshape(-1).tolist(), objects, strict=True)
        copies = {slot: _copy_item(item) for slot, item in pairs if slot < len(shelf.objects)}
        shelf.writes += 1
        for slot, item in copies.items():
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
        """Returns copies of the objects at slots of any shape."""
        return list(map(_copy_item, self.stored(state, slots)))

    def stored(self, state: Objects, slots: np.ndarray) -> list[Any]:
        """Returns the objects themselves at slots of any shape, which must not be changed."""
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


def _copy_item(item: Any) -> Any:
    try:
        return _copy_part(item, {})
    except Exception as error:  # whatever the object's class raises
        raise TypeError(
            f"ListStorage: expected an object that copy.deepcopy can copy, got "
            f"{type(item).__name__} ({type(error).__name__}: {error}). Store what it holds; or, if "
            "it never changes, give its class a method __deepcopy__ that returns self."
        ) from error


def _copy_part(value: Any, copies: dict[int, Any]) -> Any:
    """Returns a copy of a value; `copies` has those of its parts so far, as for `copy.deepcopy`."""
    kind = type(value)
    if id(value) in copies:
        return copies[id(value)]
    if kind in _ATOMS or isinstance(value, jax.Array | np.number | np.bool_):
        return value
    # By hand, as most items are dicts of arrays: a third of the time of `deepcopy`.
    if kind is dict or kind is list:
        copied: Any = kind()
        copies[id(value)] = copied
        if kind is list:
            copied.extend(_copy_part(entry, copies) for entry in value)
        else:
            copied.update((key, _copy_part(entry, copies)) for key, entry in value.items())
        return copied
    if kind is not np.ndarray:
        # `deepcopy` would copy arrays of JAX, in 60 us each, unless it finds them among the copies.
        leaves = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, dict))
        copies |= {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
    return copy.deepcopy(value, copies)
