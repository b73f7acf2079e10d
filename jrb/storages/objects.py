"""A storage of Python objects on the host."""

import copy
import gc
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jrb._core import transforming
from jrb._util import pytree
from jrb.keys import Keys
from jrb.ring import Ring
from jrb.state import Device
from jrb.storages.host_rows import HostStorage, HostView, PlainRows
from jrb.types import Context, Item, SlotsForLeaf, WritePlan
from jrb.types.messages import PartState

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, object})
"""The types whose objects cannot be changed; of a bare `object()`, only its identity counts."""
_SHARED = type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType
"""The types of objects that `copy.deepcopy` does not copy, with all that they refer to."""


def object_refusal() -> TypeError:
    """Makes the error for a method that cannot work on Python objects."""
    return TypeError(
        "ListStorage: expected to be called outside jit, vmap and scan, with Python objects. Use "
        "jrb.DeviceStorage() there, with items of arrays."
    )


class ObjectRows(PlainRows):
    """The objects of one buffer, which all its states share; each item is one leaf."""

    _owner: ClassVar[str] = "ListStorage: "
    _content: ClassVar[str] = "objects"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, {})
        self.raw: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct((), object)]
        self.objects: list[Any] = [None] * capacity

    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        """See `PlainRows.write_rows`."""
        for slot, item in zip(slots.tolist(), leaves[0], strict=True):
            self.objects[slot] = item

    def read_rows(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """Returns the objects themselves, which must not be changed."""
        return np.fromiter(map(self.objects.__getitem__, slots.tolist()), object, len(slots))

    def put_items(self, version: int, slots: np.ndarray, items: list[list[Any]]) -> int:
        """Stores rows of objects at slots `[T, E]`; slots of N or more are skipped."""
        # Checked and copied before anything is written, so that the newest state stays as it is.
        self.check_newest(version)
        flat = np.asarray(slots).reshape(-1)
        pairs = zip(flat.tolist(), (item for row in items for item in row), strict=True)
        copies = (_copy_item(item) if slot < self.capacity else None for slot, item in pairs)
        return self.put(version, flat, np.fromiter(copies, object, len(flat)))

    def edit(self, version: int, slots: np.ndarray, values: list[Any]) -> int:
        """Stores other objects at slots `[B]`; slots of N or more are skipped."""
        return self.put_items(version, slots, [values])

    def take(self, version: int, slots: Any) -> list[Any]:
        """Returns copies of the objects at slots of any shape, in one list."""
        return list(map(_copy_item, self.read(version, [np.asarray(slots).reshape(-1)])[0]))


class ObjectsView(HostView):
    """The state of a `ListStorage`."""


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
    keys of plain dicts are not copied; such an array must not be donated. An object that refers to
    an environment or a model copies this too. A class whose objects never change may have a method
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
    state_type: ClassVar[type] = ObjectsView

    def make_rows(self, ring: Ring, spec: Item, keys: Keys) -> ObjectRows:
        """Returns rows without objects."""
        return ObjectRows(ring.capacity)

    def init(self, context: Context, spec: Item) -> ObjectsView:
        """Returns the state of compiled parts."""
        return super().init(context, {})

    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Plans a write; raises TypeError inside `jit`, which takes no objects."""
        if state.words is not None:
            raise object_refusal()
        return super().write(context, state, plan, items)

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Raises TypeError, as `jit` returns no objects."""
        raise object_refusal()

    def sample_items(
        self, state: PartState, slots: jax.Array, mask: jax.Array, device: Device
    ) -> Any:
        """Returns the data of a sample, with None for masked entries."""
        data, is_real = state.rows.take(state.version, slots), np.asarray(mask)
        if not is_real.all():
            data = [item if real else None for item, real in zip(data, is_real, strict=True)]
        return data if self.collate is None else self.collate(data)

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns a state without objects; older states keep theirs."""
        return state.with_rows(ObjectRows(ring.capacity), 0)


def object_rows(buffer: Any, items: Any, method: str) -> list[list[Any]]:
    """Returns T rows of E objects to store.

    `items` has T objects; with `num_envs`, it has T sequences of E.
    """
    if isinstance(items, str | bytes | dict) or not isinstance(items, Sequence):
        raise TypeError(
            f"{method}: expected a sequence of objects, got {type(items).__name__}. Put them in a "
            "list; for a single one there is add."
        )
    rows = [[item] for item in items] if buffer.num_envs is None else list(map(list, items))
    for row in rows:
        if len(row) != buffer.ring.envs:
            raise ValueError(
                f"{method}: expected {buffer.ring.envs} objects in a row, one for each "
                f"environment, got {len(row)}."
            )
    return [[transforming.apply_inverses(buffer.transforms, item) for item in row] for row in rows]


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
    if kind in _ATOMS:
        return value
    if id(value) in copies:
        return copies[id(value)]
    # By hand, as most items are dicts of arrays: half of the time of `deepcopy`.
    if kind is dict:
        copied = copies[id(value)] = {}
        for key, entry in value.items():
            copied[key] = _copy_part(entry, copies)
        return copied
    if kind is list:
        copies[id(value)] = entries = []
        entries.extend(_copy_part(entry, copies) for entry in value)
        return entries
    if kind is np.ndarray and not value.dtype.hasobject:
        copies[id(value)] = array = value.copy("K")
        return array
    if isinstance(value, jax.Array | np.number | np.bool_):
        return value
    # `deepcopy` would copy arrays of JAX, in 60 us each, unless it finds them among the copies.
    copies |= {id(array): array for array in _find_arrays(value)}
    return copy.deepcopy(value, copies)


def _find_arrays(value: Any) -> list[jax.Array]:
    """Returns the arrays of JAX to which a value refers, directly or not; cycles do no harm."""
    arrays, seen, remaining = [], set(), [value]
    while remaining:
        one = remaining.pop()
        if isinstance(one, jax.Array):
            arrays.append(one)
        # An object that copies itself, such as a large model that is shared, is not searched.
        elif not (id(one) in seen or isinstance(one, _SHARED) or hasattr(one, "__deepcopy__")):
            seen.add(id(one))
            remaining += gc.get_referents(one)
    return arrays
