"""The base classes of storages of arrays on the host, outside and inside jitted code."""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._store.files import StaleError
from jrb._util import casting, pytree
from jrb._util.pytree import SpecKey
from jrb._xla import callbacks, dependencies
from jrb.ring import Occupancy, Ring
from jrb.state import Device
from jrb.types import Context, HostState, Item, SlotsForLeaf, Storage, WritePlan
from jrb.types.messages import PartState

Version = Any
"""A number that grows with each write: uint32 `[2]` of JAX or NumPy, its high and low word."""

VERSION = jax.ShapeDtypeStruct((2,), jnp.uint32)

_SMALL = 1 << 17  # of fewer bytes, another copy takes no time that matters


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


class RowsSpec:
    """The shape of rows on the host; states of compiled parts have it in place of the rows.

    Attributes:
        capacity: N, the number of slots.
        spec: the spec of one item, `jax.ShapeDtypeStruct`s; for objects an empty pytree.
        names: the names of the leaves.
        raw: the specs of the leaves as they are stored on the host, PRNG keys as their words.
    """

    def __init__(self, capacity: int, spec: Item) -> None:
        self.capacity: int = capacity
        self.spec: Item = spec
        self.names: tuple[str, ...] = tuple(pytree.leaf_names(spec))
        # Keys have no bytes that NumPy knows; their words do.
        self.raw: list[jax.ShapeDtypeStruct] = list(map(casting.raw_spec, jax.tree.leaves(spec)))
        self._key: tuple[int, SpecKey] = capacity, SpecKey(spec)

    def __eq__(self, other: object) -> bool:
        return type(other) is RowsSpec and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def items(self, leaves: list[Any]) -> Item:
        """Returns the items made of these leaves, with PRNG keys wrapped again."""
        specs, structure = jax.tree.flatten(self.spec)
        wrap = lambda leaf, spec: casting.wrap_words(leaf, spec.dtype)
        return jax.tree.unflatten(structure, map(wrap, leaves, specs))


class HostRows(RowsSpec, abc.ABC):
    """The rows of one buffer, which all its states share.

    Each write makes a new version, uint32 `[2]`, which belongs to the state that the write returns.

    Attributes:
        outline: the shape of these rows.
        path: the folder that these rows are in, to which a save is a commit; None if there is none.
        takes_back: True if a write that is interrupted inside `writing` is undone.
        turn: a context that a write holds, for rows to which several threads may write.
    """

    path: str | None = None
    takes_back: ClassVar[bool] = False
    turn: AbstractContextManager[Any] = contextlib.nullcontext()

    def __init__(self, capacity: int, spec: Item) -> None:
        super().__init__(capacity, spec)
        self.outline: RowsSpec = RowsSpec(capacity, spec)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

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
        """Returns a context of a read, for which writes of other threads wait for a while.

        A read of what was overwritten after all raises `StaleError`.
        """
        return contextlib.nullcontext()

    def writing(self, version: Version) -> AbstractContextManager[None]:
        """Returns a context for a write; if interrupted, `version` is the newest again."""
        return contextlib.nullcontext()

    def put_items(self, version: Version, slots: np.ndarray, items: Item) -> np.ndarray:
        """Writes items, leaves `[T, E, ...]` or `[T, ...]`, once draws under way are over."""
        return self.put(version, slots, *map(casting.raw, jax.tree.leaves(items)), patient=True)

    def edit(self, version: Version, slots: np.ndarray, values: Any) -> np.ndarray:
        """Writes leaves `[B, ...]`, by name, at slots `[B]`, and returns the next version.

        If a slot occurs twice, its last values count.
        """
        self.check_newest(version)
        flat, which = _distinct(slots, self.capacity)
        at = flat[which]
        # A put writes whole rows: read all leaves, change some, and write all again.
        rows = self.take(version, [at] * len(self.names))
        for name, leaf in values.items():
            number = self.names.index(name)
            leaf = np.asarray(casting.raw(leaf))
            rows[number] = leaf.reshape(len(flat), *self.raw[number].shape)[which]
        return self.put(version, at, *rows, patient=True)

    def take(self, version: Version, slots: list[Any]) -> list[np.ndarray]:
        """Returns each leaf at its own array of slots, of any shape."""
        rows = self.read(version, [np.asarray(at).reshape(-1) for at in slots])
        return [
            row_bytes.view(spec.dtype).reshape((*np.shape(at), *spec.shape))
            for row_bytes, spec, at in zip(rows, self.raw, slots, strict=True)
        ]

    def to_device(self, fetched: Any, device: Device) -> Any:
        """Returns arrays of NumPy as arguments of a compiled function on a device.

        None stands for the default one.
        """
        # Small arrays get to the default device five times as fast as arguments of the function,
        # which copies large ones.
        if device is None and all(leaf.nbytes < _SMALL for leaf in jax.tree.leaves(fetched)):
            return fetched
        return jax.device_put(fetched, device)

    def fetch(
        self, version: Version, slots: Any, device: Device = None, is_draw: bool = False
    ) -> Any:
        """Returns the items at slots of any shape, on a device; None for the default one."""
        leaves = self.take(version, [np.asarray(slots)] * len(self.names))
        arguments = self.to_device(leaves, device) if is_draw else jax.device_put(leaves, device)
        # Compiled for each shape, of which draws have few.
        return (_make_items if arguments is leaves else RowsSpec.items)(self.outline, arguments)


_make_items = jax.jit(RowsSpec.items, static_argnums=0)


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
    """The part of a state that refers to rows on the host.

    In compiled parts of a method outside `jit`, it has the outline of the rows in their place.
    """

    # uint32 [2], high and low word of a number that later writes do not make smaller; None in
    # compiled parts.
    version: jax.Array | None = pytree.cursor()
    rows: Any = pytree.static(default=None)  # shared by all states of the buffer
    planned: Any = None  # the slots that the host will write, after a compiled plan of a write
    fetched: Any = None  # the rows that the host has read, before the compiled rest of a read

    @property
    def capacity(self) -> int:
        """N, the number of slots."""
        return self.rows.capacity

    @property
    def host_bytes(self) -> int:
        """The number of bytes of all rows, on the disk or in memory of the host."""
        return self.rows.capacity * pytree.nbytes(self.rows.spec)

    def after(self, version: Version) -> Self:
        """Returns the view of the state after a write."""
        return self.replace(version=_on_device(version))

    def without_rows(self, fetched: Any = None) -> Self:
        """Returns the view for compiled parts, with rows that were fetched."""
        return self.replace(version=None, rows=self.rows.outline, fetched=fetched)

    def put(self, slots: jax.Array, items: Item) -> Self:
        """Writes items, leaves `[T, E, ...]`, at slots `[T, E]`."""
        if self.version is None:
            return self.replace(planned=slots)
        leaves = [lax.stop_gradient(casting.raw(leaf)) for leaf in jax.tree.leaves(items)]
        return self.after(call(self.rows.put, VERSION, self.version, slots, *leaves))

    def edit(self, slots: jax.Array, values: dict[str, jax.Array]) -> Self:
        """Writes some leaves `[B, ...]`, by name, at slots `[B]`."""
        if self.version is None:
            return self.replace(planned=slots)
        edit, names = self.rows.edit, tuple(values)
        edit_leaves = lambda version, slots, *leaves: edit(
            version, slots, dict(zip(names, leaves, strict=True))
        )
        leaves = [lax.stop_gradient(casting.raw(leaf)) for leaf in values.values()]
        return self.after(call(edit_leaves, VERSION, self.version, slots, *leaves))


@functools.partial(jax.jit, inline=True)
def _on_device(version: Version) -> jax.Array:
    """Returns its argument as an array of JAX, in a fifth of the time of `jnp.asarray`."""
    return version


def view(rows: HostRows, version: int = 0) -> HostView:
    """Returns the view of `rows` for the state whose version has this number."""
    return HostView(version=jnp.asarray(words(version)), rows=rows)


def number(version: Version) -> int:
    """Returns the number of a version, from its words."""
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


class HostStorage(Storage):
    """A storage whose items are on the host, in rows that the method `make_rows` makes.

    Each method has three stages: a compiled plan of the slots, the reads and writes of the host,
    and the compiled rest. Inside `jit`, the host is called back by the methods of `HostView`.
    Outside, the compiled parts get states with a `RowsSpec` in place of the rows: writes then only
    plan their slots, reads take what was fetched, and `jrb._core.host_calls` calls the host in
    between.

    Attributes:
        state_type: the class of the storage's states.
        assembles: True if items are made of what was fetched and of other arrays of the state.
    """

    is_on_host: ClassVar[bool] = True
    state_type: ClassVar[type] = HostView
    assembles: ClassVar[bool] = False

    @abc.abstractmethod
    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> HostRows:
        """Returns rows full of zeros.

        Args:
            ring: the ring's shape.
            spec: the spec of one item.
            is_chronological: True if rows will be written in the order of time.
        """

    def view(self, state: PartState) -> HostView:
        """Returns the part of a state that refers to rows on the host."""
        return state

    def with_view(self, state: PartState, view: HostView) -> Any:
        """Returns the state with another view."""
        return view

    def init(self, context: Context, spec: Item) -> Any:
        """Returns the state of compiled parts; `jrb._core.eager.init` gives it rows."""
        return HostView(version=None, rows=RowsSpec(context.ring.capacity, spec))

    def without_plan(self, state: PartState) -> tuple[Any, jax.Array | None]:
        """Returns the state, and the slots that the host has still to write."""
        view = self.view(state)
        return self.with_view(state, view.replace(planned=None)), view.planned

    def with_plan(self, state: PartState, slots: jax.Array) -> Any:
        """Returns the state with slots that the host has still to write."""
        return self.with_view(state, self.view(state).replace(planned=slots))

    def spec(self, state: PartState) -> Item:
        """Returns the spec of an item."""
        return self.view(state).rows.spec

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> dict[str, int]:
        """Returns the bytes of the rows, in memory of the host, and of the version."""
        return {"host": ring.capacity * pytree.nbytes(spec), "device": pytree.nbytes(VERSION)}

    def write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """Writes rows to the host, or plans to."""
        return self.with_view(state, self.view(state).put(plan.slots, items)), plan

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """Edits rows on the host, or plans to."""
        slots = jnp.arange(context.ring.capacity, dtype=jnp.int32) if slots is None else slots
        return self.with_view(state, self.view(state).edit(slots, values))

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """Reads items by a callback to the host, or makes them of what was fetched."""
        view, located = self.view(state), self.locate(context, state, where)
        fetched = view.fetched
        if fetched is None:
            arrays, structure = jax.tree.flatten(located)
            fetch = lambda version, *arrays: self.fetch(
                view.replace(version=version), jax.tree.unflatten(structure, arrays), is_static=True
            )
            shapes = self.fetched_shapes(view.rows, located)
            fetched = call(fetch, shapes, view.version, *arrays)
        return self.assemble(context, state, located, fetched)

    # The stages of a read.

    def locate(self, context: Context, state: PartState, where: SlotsForLeaf) -> UniqueSlots:
        """Returns the slots at which the host reads the leaves: compiled."""
        return UniqueSlots.of(list(map(where, self.view(state).rows.names)), lambda slots: slots)

    def fetch(self, view: HostView, located: Any, is_static: bool = False) -> Any:
        """Returns the rows at located slots, arrays of NumPy.

        With `is_static`, they have the shapes of `fetched_shapes`.
        """
        return view.rows.take(view.version, located.each(np.asarray))

    def fetched_shapes(self, rows: RowsSpec, located: Any) -> Any:
        """Returns the shapes of what `fetch` returns, inside `jit`."""
        return [
            jax.ShapeDtypeStruct((*at.shape, *spec.shape), spec.dtype)
            for at, spec in zip(located.each(lambda at: at), rows.raw, strict=True)
        ]

    def assemble(self, context: Context, state: PartState, located: Any, fetched: Any) -> Item:
        """Returns the items made of rows that were fetched: compiled."""
        return self.view(state).rows.items(fetched)

    def collate_items(self, data: Any, mask: jax.Array) -> Any:
        """Returns the data of a sample of single items, outside `jit`."""
        return data

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state of the same rows, whose values are not read again."""
        return dependencies.delay_writes_until(state, token)


class HostArrays(HostStorage):
    """A storage of arrays on the host, in rows that the method `make_rows` makes."""

    def elsewhere(self) -> Self:
        """Returns a storage for other rows, which must not be at the path of these."""
        return self

    def attach(self, ring: Ring, view: HostView, held: Callable[[], Occupancy]) -> Any:
        """Returns the state of existing rows; `held()` returns the slots that hold items."""
        return view
