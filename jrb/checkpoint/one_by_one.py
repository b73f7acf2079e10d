"""Leaves that lie side by side in memory, each by itself or with those that lie beside it.

N capacity, V the buffers that `vmap` has put side by side, W the elements of a row of an array.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from jrb._core import columns, memory, validate
from jrb._core.orders import Order
from jrb._core.packed import PackedLeaves, Place
from jrb._store import table
from jrb._util import pytree
from jrb._xla import compat
from jrb.state import Buffer, Device
from jrb.storages import DeviceStorage
from jrb.types import Context, Item

L = TypeVar("L")


@pytree.component
class ApartStorage(DeviceStorage):
    """Stands for a `DeviceStorage`: its states have an array for every leaf."""

    def init(self, context: Context, spec: Item) -> Any:
        """Zeros."""
        return jax.tree.map(lambda leaf: columns.room(context.ring.capacity, leaf), spec)


class Words:
    """The bytes of an array, in an order; on the host they are looked at where they lie.

    Attributes:
        width: bytes of a row.
        array: which one, if it is on another device; else None.
    """

    width: int
    array: Any

    def __init__(self, array: Any, order: Order) -> None:
        self.array = None if memory.on_host(array) else array
        self._order, self.width = order, array.shape[-1] * array.dtype.itemsize
        self._capacity = order.capacity(array.shape)
        self._held = memory.view(np.asarray(array)) if memory.on_host(array) else None
        self._read = memory.reader(array)
        self._last: tuple[np.ndarray, np.ndarray] | None = None

    def taken(self, buffer: np.ndarray, slot: np.ndarray, part: slice) -> np.ndarray:
        """Some bytes of rows `[B]`, uint8."""
        place = self._order.places(buffer * self._capacity + slot, self._capacity)
        if self._held is None:
            return np.ascontiguousarray(self._fetched(place)[:, part])
        held = np.frombuffer(self._held, np.uint8).reshape(-1, self.width)
        return np.ascontiguousarray(held[:, part][_index(place)])

    def hashes(self) -> np.ndarray:
        """Four bytes for each row that depend on all of it, uint8 `[V, N, 4]`."""
        found = memory.row_hashes(self.array, self.width)
        places = self._order.places(np.arange(len(found)), self._capacity)
        return found[places].reshape(-1, self._capacity, 4)

    def _fetched(self, place: np.ndarray) -> np.ndarray:
        """Whole rows from another device; those of the last call, which other leaves need too."""
        last = self._last
        if last is not None and np.array_equal(last[0], place):
            return last[1]
        width, found = self.width, np.empty((len(place), self.width), np.uint8)
        as_they_lie = np.argsort(place, kind="stable")
        lying = place[as_they_lie]
        for a, b in table.runs(lying):
            piece = self._read(int(lying[a]) * width, (int(lying[b - 1]) + 1) * width)
            found[as_they_lie[a:b]] = np.frombuffer(piece, np.uint8).reshape(-1, width)
        self._last = place, found
        return found


def _index(place: np.ndarray) -> Any:
    """What cuts rows out at these places: a slice where they follow one another."""
    return slice(place[0], place[-1] + 1) if len(table.runs(place)) == 1 else place


@dataclasses.dataclass(frozen=True)
class SideLeaf:
    """A leaf of all items that lies beside others; it looks like an array `[..., N, ...]`.

    Attributes:
        words: the array that it is in.
        part: the leaf's bytes in a row.
        shape: the batch, N, and that of an item.
        dtype: of its words.
    """

    words: Words
    part: slice
    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.part.stop - self.part.start

    @property
    def whole(self) -> "SideLeaf":
        """All that lies there, as if it were one leaf."""
        return dataclasses.replace(self, part=slice(0, self.words.width))

    def rows(self, buffer: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The bytes of some rows, uint8 `[B, width]`."""
        return self.words.taken(buffer, slots, self.part)


def is_packing(buffer: Buffer) -> bool:
    """Whether leaves may lie side by side in its states."""
    storage = buffer.storage
    if not isinstance(storage, DeviceStorage) or storage.share_next_observations:
        return False
    return type(storage).init is DeviceStorage.init


def apart(buffer: Buffer) -> Any:
    """The same buffer, whose states have an array for every leaf."""
    return dataclasses.replace(buffer, storage=ApartStorage())


def leaves_of(storage: Any) -> Any:
    """The state of a storage with `SideLeaf`s for what lies side by side.

    Raises:
        ValueError: it does not lie there.
    """
    if not isinstance(storage, PackedLeaves):
        return storage
    _check(storage)
    words = {name: Words(array, storage.order) for name, array in storage.arrays.items()}

    def leaf(it: Any) -> Any:
        if not isinstance(it, Place):
            return it
        size, shape = np.dtype(it.words).itemsize, storage.shape(it)
        part = slice(it.start * size, it.stop * size)
        return of_dtype(lambda dtype: SideLeaf(words[it.words], part, shape, dtype), it.dtype)

    return jax.tree.map(leaf, storage.places, is_leaf=columns.is_column)


def _check(storage: PackedLeaves) -> None:
    widths, arrays = storage.widths, storage.arrays
    kinds = {name: (array.dtype.name, array.shape[1:][-1:]) for name, array in arrays.items()}
    if kinds == {name: (name, (width,)) for name, width in widths.items()}:
        return
    found = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    raise ValueError(
        f"save: leaf 'storage/arrays': expected arrays [..., N, W] with W as in {widths}, got "
        f"{found}. Save the state that this very buffer made."
    )


def of_dtype(make: Callable[[Any], L], dtype: Any) -> Any:
    """A column of a dtype, of the words that lie in memory."""
    if not columns.is_small(dtype):
        return make(dtype)
    return columns.Packed(make(columns.word_dtype(dtype)), np.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Target:
    """A leaf of all items where it will lie; it is written to like an array `[V, N, ...]`.

    Attributes:
        array: the bytes of the array that it will be in, uint8 `[V * N, bytes]`, as they lie.
        part: its own in a row.
        spec: one item of it, of the dtype of its words.
        order: how rows lie.
        capacity: N.
    """

    array: np.ndarray
    part: slice
    spec: jax.ShapeDtypeStruct
    order: Order
    capacity: int

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.part.stop - self.part.start

    @property
    def rows(self) -> np.ndarray:
        """Its bytes, uint8 `[V * N, width]`, in the order in which they lie."""
        return self.array[:, self.part]

    @property
    def whole(self) -> "Target":
        """All that will lie there, as if it were one leaf."""
        return dataclasses.replace(self, part=slice(0, self.array.shape[1]))

    @property
    def is_in_order(self) -> bool:
        """Whether rows lie in the order of slots."""
        return self.order.envs is None

    def __setitem__(self, at: tuple[np.ndarray, np.ndarray], items: np.ndarray) -> None:
        buffer, slots = at
        items = np.ascontiguousarray(items, self.spec.dtype)
        self.put(buffer * self.capacity + slots, items.reshape(-1).view(np.uint8))

    def put(self, numbers: np.ndarray, found: np.ndarray) -> None:
        """Bytes of rows by their numbers, v * N + slot."""
        index = _index(self.order.places(numbers, self.capacity))
        self.rows[index] = found.reshape(len(numbers), self.width)

    def fill(self, pieces: Iterable[tuple[int, Any]]) -> None:
        """Puts bytes of whole rows, and at which byte of the leaf they begin."""
        for start, piece in pieces:
            found = np.frombuffer(piece, np.uint8)
            self.put(np.arange(start // self.width, (start + len(found)) // self.width), found)


class Room:
    """Memory on the host for leaves that will lie side by side.

    Args:
        want: the specs of the storage's state, without batch.
        batch: the axes before all arrays.
    """

    def __init__(self, want: PackedLeaves, batch: tuple[int, ...]) -> None:
        self._want, self._batch = want, batch
        self._arrays: dict[str, np.ndarray] = {}
        self._bytes: dict[str, np.ndarray] = {}

    def _array(self, spec: Item, is_blank: bool) -> np.ndarray:
        *lead, width = spec.shape
        shape = (math.prod(self._batch) * math.prod(lead), width)
        return table.aligned(shape, spec.dtype, make=np.zeros if is_blank else np.empty)

    def leaves(self, is_blank: bool) -> list[Target | None]:
        """Each leaf where it will lie; None for those of columns of their own.

        The memory is allocated here: zeros if it is to be blank, which takes longer; else all rows
        have to be written.
        """
        wanted = self._want.arrays.items()
        self._arrays = {name: self._array(spec, is_blank) for name, spec in wanted}
        self._bytes = {name: array.view(np.uint8) for name, array in self._arrays.items()}
        return [self._leaf(it) for it in self._flat()]

    def targets(self, storage: Any, is_blank: bool) -> dict[int, Target]:
        """Those that lie side by side, by the ids of a storage's specs, one for each leaf."""
        pairs = zip(jax.tree.leaves(storage), self.leaves(is_blank), strict=True)
        return {id(leaf): target for leaf, target in pairs if target is not None}

    def _flat(self) -> list[Any]:
        return jax.tree.leaves(self._want.places, is_leaf=columns.is_column)

    def _leaf(self, it: Any) -> Target | None:
        if not isinstance(it, Place):
            return None
        lies = columns.word_dtype(it.dtype) if columns.is_small(it.dtype) else it.dtype
        size, spec = np.dtype(it.words).itemsize, jax.ShapeDtypeStruct(it.shape, lies)
        part = slice(it.start * size, it.stop * size)
        return Target(self._bytes[it.words], part, spec, self._want.order, self._want.shape(it)[0])

    def filled(self, storage: Any, device: Device) -> PackedLeaves:
        """The storage's state, once the leaves are there.

        Args:
            storage: a pytree like the items, with the columns that are their own.
            device: for the arrays.
        """
        arrays = {name: self._placed(name, device) for name in self._want.arrays}
        return self._want.filled(storage, arrays)

    def _placed(self, name: str, device: Device) -> jax.Array:
        self._bytes.pop(name)
        shape = (*self._batch, *self._want.arrays[name].shape)
        return memory.placed(self._arrays.pop(name).reshape(shape), device)


def room_for(buffer: Buffer, spec: Item, batch: tuple[int, ...]) -> Room | None:
    """For the leaves that lie side by side in a buffer's states; None if none do."""
    if not is_packing(buffer):
        return None
    leaves, structure = jax.tree.flatten(spec)
    want = _wanted(buffer, structure, tuple(leaves), compat.is_x64())
    return Room(want, batch) if isinstance(want, PackedLeaves) else None


@functools.lru_cache(maxsize=16)
def _wanted(buffer: Buffer, structure: Any, leaves: tuple, x64: bool) -> Any:
    """The specs of a storage's state, remembered: a program loads the same one again and again."""
    spec = jax.tree.unflatten(structure, leaves)
    return jax.eval_shape(lambda: validate.blank(buffer, spec).storage)
