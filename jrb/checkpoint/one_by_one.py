"""Leaves that lie side by side in memory, one by one: as checkpoints have them.

N capacity, V the buffers that `vmap` has put side by side, W the elements of a row of an array.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from jrb._base import pytree
from jrb._engine import columns, memory, side_by_side
from jrb._engine.side_by_side import Place, SideBySide
from jrb._store import table
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
    """The bytes of an array `[..., N, W]`; on the host they are looked at where they lie."""

    def __init__(self, array: Any) -> None:
        *batch, self._capacity, width = array.shape
        self._width = width * array.dtype.itemsize
        self._shape = (math.prod(batch), self._capacity, self._width)
        self._held = memory.view(np.asarray(array)) if memory.on_host(array) else None
        self._read = memory.reader(array)
        self._last: tuple[np.ndarray, np.ndarray] | None = None

    def taken(self, buffer: np.ndarray, slot: np.ndarray, part: slice) -> np.ndarray:
        """Some bytes of rows `[B]`, uint8."""
        if self._held is None:
            return np.ascontiguousarray(self._fetched(buffer * self._capacity + slot)[:, part])
        held = np.frombuffer(self._held, np.uint8).reshape(self._shape)
        if len(buffer) and buffer[0] == buffer[-1] and len(table.runs(slot)) == 1:
            return np.ascontiguousarray(held[buffer[0], slot[0] : slot[-1] + 1, part])
        return np.ascontiguousarray(held[..., part][buffer, slot])

    def _fetched(self, place: np.ndarray) -> np.ndarray:
        """Whole rows from another device; those of the last call, which other leaves need too."""
        last = self._last
        if last is not None and np.array_equal(last[0], place):
            return last[1]
        width, none = self._width, np.zeros(0, np.uint8)
        ends = [
            (int(place[a]) * width, (int(place[b - 1]) + 1) * width) for a, b in table.runs(place)
        ]
        pieces = [np.frombuffer(self._read(*each), np.uint8) for each in ends]
        found = np.concatenate([none, *pieces]).reshape(len(place), width)
        self._last = place, found
        return found


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

    def rows(self, buffer: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The bytes of some rows, uint8 `[B, width]`."""
        return self.words.taken(buffer, slots, self.part)


def is_packing(buffer: Buffer) -> bool:
    """Whether leaves may lie side by side in its states."""
    storage = buffer.storage
    if not isinstance(storage, DeviceStorage) or storage.once:
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
    if not isinstance(storage, SideBySide):
        return storage
    _check(storage)
    words = {name: Words(array) for name, array in storage.arrays.items()}

    def leaf(it: Any) -> Any:
        if not isinstance(it, Place):
            return it
        array, size = storage.arrays[it.words], np.dtype(it.words).itemsize
        shape, part = array.shape[:-1] + it.shape, slice(it.start * size, it.stop * size)
        return of_dtype(lambda dtype: SideLeaf(words[it.words], part, shape, dtype), it.dtype)

    return jax.tree.map(leaf, storage.places, is_leaf=side_by_side.is_leaf)


def _check(storage: SideBySide) -> None:
    widths, arrays = side_by_side.widths(storage.places), storage.arrays
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


class Room:
    """Memory on the host for leaves that will lie side by side, zeros.

    Args:
        want: the specs of the storage's state, without batch.
        batch: the axes before all arrays.
    """

    def __init__(self, want: SideBySide, batch: tuple[int, ...]) -> None:
        self._places, self._specs, self._batch = want.places, want.arrays, batch
        self._arrays: dict[str, np.ndarray] = {}

    def _zeros(self, spec: Item) -> np.ndarray:
        capacity, width = spec.shape
        array = table.aligned((math.prod(self._batch) * capacity, width), spec.dtype)
        array[:] = 0
        return array

    def leaves(self) -> list[np.ndarray | None]:
        """Each leaf, `[V * N, ...]`, where it will lie; None for those of columns of their own.

        The memory is allocated here.
        """
        self._arrays = {name: self._zeros(spec) for name, spec in self._specs.items()}
        return [self._leaf(it) for it in self._flat()]

    def targets(self, storage: Any) -> dict[int, np.ndarray]:
        """Those that lie side by side, by the ids of a storage's specs, one for each leaf."""
        pairs = zip(jax.tree.leaves(storage), self.leaves(), strict=True)
        return {id(leaf): target for leaf, target in pairs if target is not None}

    def _flat(self) -> list[Any]:
        return jax.tree.leaves(self._places, is_leaf=side_by_side.is_leaf)

    def _leaf(self, it: Any) -> np.ndarray | None:
        if not isinstance(it, Place):
            return None
        lies = columns.word_dtype(it.dtype) if columns.is_small(it.dtype) else it.dtype
        flat = self._arrays[it.words][:, it.start : it.stop].view(lies)
        return flat.reshape(-1, *it.shape)  # cuts the last axis, which needs no copy

    def filled(self, storage: Any, device: Device) -> SideBySide:
        """The storage's state, once the leaves are there.

        Args:
            storage: a pytree like the items, with the columns that are their own.
            device: for the arrays.
        """
        flat = jax.tree.leaves(storage, is_leaf=columns.is_column)
        pairs = zip(self._flat(), flat, strict=True)
        entries = [it if isinstance(it, Place) else column for it, column in pairs]
        structure = jax.tree.structure(self._places, is_leaf=side_by_side.is_leaf)
        arrays = {name: self._placed(name, device) for name in self._specs}
        return SideBySide(places=jax.tree.unflatten(structure, entries), arrays=arrays)

    def _placed(self, name: str, device: Device) -> jax.Array:
        shape = (*self._batch, *self._specs[name].shape)
        return memory.placed(self._arrays.pop(name).reshape(shape), device)


def room_for(buffer: Buffer, spec: Item, batch: tuple[int, ...]) -> Room | None:
    """For the leaves that lie side by side in a buffer's states; None if none do."""
    if not is_packing(buffer):
        return None
    want = jax.eval_shape(lambda: side_by_side.room(buffer.capacity, spec, buffer.keys))
    return Room(want, batch) if isinstance(want, SideBySide) else None


def fill(target: np.ndarray, read: Callable[[None], Any]) -> np.ndarray:
    """A leaf `[V * N, ...]`, filled with what a reader gives in pieces, whole rows each."""
    width = math.prod(target.shape[1:]) * target.dtype.itemsize
    for start, piece in read(None):
        found = np.frombuffer(piece, target.dtype).reshape(-1, *target.shape[1:])
        first = start // width
        target[first : first + len(found)] = found
    return target
