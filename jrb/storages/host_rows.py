"""The base classes of storages of arrays on the host, outside and inside jitted code."""

import abc
import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core.host_proxy import HostStorageProxy, UniqueSlots
from jrb._store.errors import StaleError
from jrb._util import casting, pytree
from jrb._util.pytree import SpecKey
from jrb._xla import callbacks, compat, dependencies
from jrb.ring import Occupancy, Ring
from jrb.state import Device
from jrb.types import Context, HostState, HostStorage, Item, SlotsForLeaf, WritePlan
from jrb.types.messages import PartState

Version = Any
"""A number that grows with each write: uint32 `[2]` of JAX or NumPy, its high and low word."""

VERSION = jax.ShapeDtypeStruct((2,), jnp.uint32)

_SMALL = 1 << 17  # a gather of fewer bytes may make another copy, which takes no time that matters


class HostRows(abc.ABC):
    """The rows of one buffer, which all its states share.

    Each write makes a new version, uint32 `[2]`, which belongs to the state that the write returns.

    Attributes:
        capacity: N, the number of slots.
        spec: the spec of one item, `jax.ShapeDtypeStruct`s.
        spec_key: the spec as a hashable key.
        names: the names of the leaves.
        raw: the specs of the leaves as they are stored on the host, PRNG keys as their words.
        path: the folder that these rows are in, to which a save is a commit; None if there is none.
    """

    path: str | None = None

    def __init__(self, capacity: int, spec: Item) -> None:
        self.capacity: int = capacity
        self.spec: Item = spec
        self.spec_key: SpecKey = SpecKey(spec)
        self.names: tuple[str, ...] = tuple(pytree.leaf_names(spec))
        # Keys have no bytes that NumPy knows; their words do.
        self.raw: list[jax.ShapeDtypeStruct] = list(map(casting.raw_spec, jax.tree.leaves(spec)))

    def __reduce__(self) -> Any:
        raise TypeError(
            "A state whose rows are on the host: expected to be saved by jrb.save, not to be "
            "pickled or copied."
        )

    @abc.abstractmethod
    def put(
        self,
        version: Version,
        slots: np.ndarray,
        *leaves: Any,
        patient: bool = False,
    ) -> np.ndarray:
        """Writes all leaves, `[T, E, ...]`, at slots `[T, E]`, and returns the next version.

        Args:
            version: the version of the state; raises `StaleError` unless it is the newest.
            slots: integers `[T, E]`; those of N or more are skipped.
            leaves: in the order of the items' leaves, PRNG keys as their words.
            patient: if True, waits for draws that are under way.
        """

    @abc.abstractmethod
    def read_leaf(self, version: Version, leaf: int, slots: np.ndarray) -> np.ndarray:
        """Returns leaf number `leaf` at slots `[B]` as bytes, uint8 `[B, width]`, never a view.

        Raises `StaleError` if a row there was overwritten after this version.
        """

    def read(self, version: Version, slots: list[np.ndarray]) -> list[np.ndarray]:
        """Returns each leaf at its own slots, as `read_leaf` does."""
        return [self.read_leaf(version, leaf, at) for leaf, at in enumerate(slots)]

    @abc.abstractmethod
    def check_newest(self, version: Version) -> None:
        """Raises `StaleError` unless `version` is the newest."""

    @property
    def reach(self) -> int:
        """The slot from which on no slot was ever written; rows there are zeros."""
        return self.capacity

    def drawing(self) -> AbstractContextManager[None]:
        """Returns a context in which other threads overwrite nothing."""
        return contextlib.nullcontext()

    def writing(self, version: Version) -> AbstractContextManager[None]:
        """Returns a context for a write; if interrupted, `version` is the newest again."""
        return contextlib.nullcontext()

    def edit(
        self, version: Version, slots: np.ndarray, names: tuple[str, ...], *leaves: Any
    ) -> np.ndarray:
        """Writes some leaves `[B, ...]`, by name, at slots `[B]`, and returns the next version.

        If a slot occurs twice, its last values count.
        """
        self.check_newest(version)
        flat, which = _distinct(slots, self.capacity)
        at = flat[which]
        # A put writes whole rows: read all leaves, change some, and write all again.
        rows = self.take(version, [at] * len(self.names))
        for name, leaf in zip(names, leaves, strict=True):
            number = self.names.index(name)
            rows[number] = np.asarray(leaf).reshape(len(flat), *self.raw[number].shape)[which]
        return self.put(version, at, *rows, patient=True)

    def take(self, version: Version, slots: list[Any]) -> list[np.ndarray]:
        """Returns each leaf at its own array of slots, of any shape; zeros at slots of -1."""
        # Mostly, all leaves have the same array of slots, which is then checked once.
        flat = {id(at): np.asarray(at).reshape(-1) for at in slots}
        blank = {key: bool(at.size) and at.item(at.argmin()) < 0 for key, at in flat.items()}
        some = {key: at[at >= 0] if blank[key] else at for key, at in flat.items()}
        rows = self.read(version, [some[id(at)] for at in slots])
        leaves = []
        for row_bytes, spec, at in zip(rows, self.raw, slots, strict=True):
            if blank[id(at)]:
                every = np.zeros((at.size, row_bytes.shape[1]), np.uint8)
                every[flat[id(at)] >= 0] = row_bytes
                row_bytes = every
            leaves.append(row_bytes.view(spec.dtype).reshape((*at.shape, *spec.shape)))
        return leaves

    def fetch(
        self, version: Version, slots: list[Any], device: Device = None, is_draw: bool = False
    ) -> Item:
        """Returns the items at slots of any shape, on a device; None for the default one."""
        leaves = self.take(version, slots)
        # Small arrays get to the default device five times as fast as arguments of a compiled
        # function. It is compiled for each shape, of which draws have few, and copies large arrays.
        if is_draw and device is None and all(leaf.nbytes < _SMALL for leaf in leaves):
            return _handed_over(leaves, spec=self.spec_key)
        return self.items(jax.device_put(leaves, device))

    def call(self, version: jax.Array, slots: list[jax.Array]) -> list[jax.Array]:
        """Returns the leaves as `take` does, called from jitted code."""
        # Each array of slots is copied to the host once, however many leaves are read at it.
        unique = UniqueSlots.of(slots, lambda at: at)
        shapes = [
            jax.ShapeDtypeStruct((*at.shape, *spec.shape), spec.dtype)
            for at, spec in zip(slots, self.raw, strict=True)
        ]

        def fetch(version: Version, *arrays: np.ndarray) -> list[np.ndarray]:
            located = UniqueSlots(list(map(np.asarray, arrays)), unique.index)
            return self.take(version, located.each(lambda at: at))

        return call(fetch, shapes, version, *unique.values)

    def items(self, leaves: list[Any]) -> Item:
        """Returns the items made of these leaves, with PRNG keys wrapped again."""
        return _items(leaves, self.spec)


def _items(leaves: list[Any], spec: Item) -> Item:
    specs, structure = jax.tree.flatten(spec)
    wrap = lambda leaf, spec: casting.wrapped(leaf, spec.dtype)
    return jax.tree.unflatten(structure, map(wrap, leaves, specs))


@functools.partial(jax.jit, static_argnames="spec")
def _handed_over(leaves: list[jax.Array], spec: SpecKey) -> Item:
    return _items(leaves, spec.spec)


def _distinct(slots: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns flat slots, int64 `[B]`, and the positions in them of distinct slots below N.

    For equal slots, it is the position of the last.
    """
    flat = np.asarray(slots).reshape(-1).astype(np.int64)
    # The first index in the reversed array is the last in the array itself.
    distinct, last = np.unique(flat[::-1], return_index=True)
    return flat, (len(flat) - 1 - last)[distinct < capacity]


class PlainRows(HostRows):
    """Rows that a subclass keeps anywhere, by its methods `write_rows` and `read_rows`.

    The number of each slot's last write is stored, to refuse reads of newer rows by old states.
    """

    def __init__(self, capacity: int, spec: Item) -> None:
        super().__init__(capacity, spec)
        self._newest, self._written = 0, np.zeros(capacity, np.int64)

    @abc.abstractmethod
    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Writes leaves `[B, ...]`, of the specs in `raw`, at distinct slots, int64 `[B]`."""

    @abc.abstractmethod
    def read_rows(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """Returns leaf number `leaf` at slots, integers `[B]`, in any order and repeated."""

    def put(
        self,
        version: Version,
        slots: np.ndarray,
        *leaves: Any,
        patient: bool = False,
    ) -> np.ndarray:
        """See `HostRows.put`; of several rows for one slot, the last is written."""
        self.check_newest(version)
        flat, which = _distinct(slots, self.capacity)
        rows = [
            np.asarray(leaf).reshape(len(flat), *spec.shape)[which]
            for leaf, spec in zip(leaves, self.raw, strict=True)
        ]
        # Set before the rows are written: if that fails, readers see that they may have changed.
        self._newest += 1
        self._written[flat[which]] = self._newest
        self.write_rows(flat[which], rows)
        return words(self._newest)

    def read_leaf(self, version: Version, leaf: int, slots: np.ndarray) -> np.ndarray:
        """See `HostRows.read_leaf`."""
        # A row that was written after the reader's version holds another item by now.
        if (self._written[slots] > number(version)).any():
            raise _stale("whose rows are still there, got one of which something was overwritten")
        # A copy: a subclass may return a view of rows that it overwrites later.
        return bytes_of(np.array(self.read_rows(leaf, slots)), len(slots))

    def check_newest(self, version: Version) -> None:
        """See `HostRows.check_newest`."""
        if number(version) != self._newest:
            raise _stale("that is the newest, got one that has been written to before")


def _stale(text: str) -> StaleError:
    return StaleError(
        f"expected a state {text}. States share their rows: go on with the state that the last "
        "write returned."
    )


class HostView(pytree.State, HostState):
    """The part of a state that refers to rows on the host."""

    # uint32 [2], the number of the write that made it, high and low word.
    version: jax.Array = pytree.cursor()
    rows: HostRows = pytree.static(default=None)  # shared by all states of the buffer

    @property
    def capacity(self) -> int:
        """N, the number of slots."""
        return self.rows.capacity

    @property
    def host_bytes(self) -> int:
        """The number of bytes of all rows, on the disk or in memory of the host."""
        return self.rows.capacity * pytree.nbytes(self.rows.spec)

    def after(self, version: Version) -> "HostView":
        """Returns the view of the state after a write."""
        return self.replace(version=_on_device(version))


@functools.partial(jax.jit, inline=True)
def _on_device(version: Version) -> jax.Array:
    """Returns its argument as an array of JAX, in a fifth of the time of `jnp.asarray`."""
    return version


def view(rows: HostRows, version: int = 0) -> HostView:
    """Returns the view of `rows` for the state whose version has this number."""
    return HostView(version=jnp.asarray(words(version)), rows=rows)


def number(version: Version) -> int:
    """Returns the number of a write, from its words."""
    high, low = np.asarray(version).tolist()
    return high << 32 | low


def words(version: int) -> np.ndarray:
    """Returns the words of a number, uint32 `[2]`."""
    # Two words, as JAX has no uint64 unless x64 is on; 32 bits would wrap after 4e9 writes.
    return np.array([version >> 32, version & 0xFFFFFFFF], np.uint32)


def bytes_of(leaf: np.ndarray, count: int) -> np.ndarray:
    """Returns rows as bytes, uint8 `[B, width]`."""
    if not leaf.size:
        return np.zeros((count, 0), np.uint8)
    return np.ascontiguousarray(leaf).reshape(count, -1).view(np.uint8)


def call(function: Callable[..., Any], shapes: Any, *args: Any) -> Any:
    """Calls a function of NumPy arrays from jitted code, in order; `TypeError` under `vmap`."""
    return callbacks.call_on_host(function, shapes, *map(_single, args))


# JAX's own error for an ordered callback under `vmap` does not say what to do instead.
@jax.custom_batching.custom_vmap
def _single(argument: jax.Array) -> jax.Array:
    return argument


@_single.def_vmap
def _refuse(size: int, batched: Any, argument: jax.Array) -> Any:
    raise TypeError(
        f"vmap: expected a storage on the device, got one on the host for {size} buffers or draws "
        "at once, whose rows lie in one place. Use one buffer with num_envs=E in place of E "
        "buffers, a larger batch in place of several draws, or jrb.DeviceStorage()."
    )


class HostArrays(HostStorage):
    """A storage of items in rows on the host, which the method `make_rows` makes."""

    state_type: ClassVar[type] = HostView

    @abc.abstractmethod
    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> HostRows:
        """Returns rows full of zeros.

        Args:
            ring: the ring's shape.
            spec: the spec of one item.
            is_chronological: True if rows will be written in the order of time.
        """

    @property
    def device_part(self) -> Any:
        """The storage that replaces this one in jitted parts."""
        return HostStorageProxy()

    def device_state(self, state: PartState) -> Any:
        """Returns None, as `device_part` has no state."""
        return None

    def view(self, state: PartState) -> HostView:
        """Returns the part of a state that refers to rows on the host."""
        return state

    def combine(self, view: HostView, device_state: PartState) -> Any:
        """Returns the state made of a view of rows and of the device part's state."""
        return view

    def init(self, context: Context, spec: Item) -> Any:
        """Returns the state of rows full of zeros."""
        device_state = self.device_part.init(context, spec)
        return self.make(context.ring, spec, device_state, is_chronological=True)

    def make(self, ring: Ring, spec: Item, device_state: PartState, is_chronological: bool) -> Any:
        """Returns the state of new rows, made by `make_rows`."""
        return self.combine(view(self.make_rows(ring, spec, is_chronological)), device_state)

    def elsewhere(self) -> Self:
        """Returns a storage for other rows, which must not be at the path of these."""
        return self

    def attach(self, ring: Ring, view: HostView, held: Callable[[], Occupancy]) -> Any:
        """Returns the state of existing rows; `held()` returns the slots that hold items."""
        return view

    def spec(self, state: PartState) -> Item:
        """Returns the spec of an item."""
        return self.view(state).rows.spec

    def spec_key(self, state: PartState) -> SpecKey:
        """Returns the spec as a hashable key, which is made once."""
        return self.view(state).rows.spec_key

    def names(self, state: PartState) -> tuple[str, ...] | None:
        """Returns the names of the leaves."""
        return self.view(state).rows.names

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> dict[str, int]:
        """Returns the bytes of the rows, in memory of the host, and of the version."""
        return {"host": ring.capacity * pytree.nbytes(spec), "device": pytree.nbytes(VERSION)}

    # Outside jit.

    def drawing(self, state: PartState) -> AbstractContextManager[None]:
        """Returns a context in which nothing is overwritten."""
        return self.view(state).rows.drawing()

    def writing(self, state: PartState) -> AbstractContextManager[None]:
        """Returns a context for a write; if interrupted, `state` is the newest again."""
        view = self.view(state)
        return view.rows.writing(view.version)

    def put(self, state: PartState, planned: Any, items: Item) -> Any:
        """Writes items, leaves `[T, E, ...]` or `[T, ...]`, to the planned slots."""
        view, leaves = self.view(state), map(casting.raw, jax.tree.leaves(items))
        slots, device_state = planned
        version = view.rows.put(view.version, slots, *leaves, patient=True)
        return self.combine(view.after(version), device_state)

    def moved(self, state: PartState, planned: Any) -> Any:
        """Returns the state with the device part's state from `planned`."""
        return self.combine(self.view(state), planned[1])

    def put_values(
        self, state: PartState, device_state: PartState, slots: np.ndarray, values: Item
    ) -> Any:
        """Writes new values of some leaves, and keeps all other leaves."""
        view, leaves = self.view(state), map(casting.raw, values.values())
        version = view.rows.edit(view.version, slots, tuple(values), *leaves)
        return self.combine(view.after(version), device_state)

    def fetch(self, state: PartState, slots: jax.Array, places: Any) -> Item:
        """Returns the items: all leaves at `slots`, or each at its own slots in `places`."""
        view = self.view(state)
        at = [np.asarray(slots)] * len(view.rows.raw) if places is None else places.each(np.asarray)
        device = slots.sharding if compat.is_committed(slots) else None
        return view.rows.fetch(view.version, at, device, is_draw=True)

    def take(self, state: PartState, slots: np.ndarray) -> Item:
        """Returns the items at slots of any shape."""
        view = self.view(state)
        return view.rows.fetch(view.version, [slots] * len(view.rows.names))

    # Inside jit.

    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes to the device part and, by a callback, to the host."""
        view, before = self.view(state), self.device_state(state)
        (slots, device_state), plan = self.device_part.write(context, before, plan, items)
        leaves = [lax.stop_gradient(casting.raw(leaf)) for leaf in jax.tree.leaves(items)]
        version = call(view.rows.put, VERSION, view.version, slots, *leaves)
        return self.combine(view.after(version), device_state), plan

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """Edits rows in the device part and, by a callback, on the host."""
        if slots is None:
            slots = jnp.arange(context.ring.capacity, dtype=jnp.int32)
        view, names = self.view(state), tuple(values)
        device_state = self.device_part.edit(context, self.device_state(state), slots, values)
        edit = lambda version, slots, *leaves: view.rows.edit(version, slots, names, *leaves)
        leaves = [lax.stop_gradient(casting.raw(leaf)) for leaf in values.values()]
        version = call(edit, VERSION, view.version, slots, *leaves)
        return self.combine(view.after(version), device_state)

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Reads items by a callback to the host."""
        view = self.view(state)
        return view.rows.items(view.rows.call(view.version, list(map(where, view.rows.names))))

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state of the same rows, whose values are not read again."""
        return dependencies.delay_writes_until(state, token)
