"""Buffers whose items lie on the host, for those who save and load arrays."""

import dataclasses
import functools
import os
from collections.abc import Iterable
from typing import Any, ClassVar, TypeGuard

import jax
import numpy as np
from numpy.typing import DTypeLike

from jrb._core import eager, memory
from jrb._core.host_proxy import HostStorageProxy
from jrb._store import table
from jrb._util import pytree
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import one_by_one
from jrb.mix import Description
from jrb.state import Buffer, BufferState
from jrb.storages import HostArrays
from jrb.storages.host_rows import HostView
from jrb.storages.store_rows import StoreArrays
from jrb.types import Item


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of all items, which looks like an array `[N, ...]`.

    Attributes:
        view: where it is.
        number: of the leaf.
        shape: N, and that of an item.
        dtype: as items have it.
    """

    view: HostView
    number: int
    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def width(self) -> int:
        """Bytes of a row."""
        raw = self.view.rows.raw[self.number]
        return raw.size * raw.dtype.itemsize

    def rows(self, buffer: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The bytes of some rows, uint8 `[B, width]`; of one buffer, 0."""
        return self.view.rows.read_leaf(self.view.version, self.number, slots)


def is_on_host(buffer: Description) -> TypeGuard[Buffer]:
    """Whether a buffer keeps arrays on the host."""
    return isinstance(buffer, ReplayBuffer) and isinstance(buffer.storage, HostArrays)


def on_device(buffer: Buffer) -> Any:
    """The same buffer with its items on the device, each leaf in an array of its own.

    Of objects, the same without them.
    """
    if not eager.on_host(buffer):
        return one_by_one.apart(buffer) if one_by_one.is_packing(buffer) else buffer
    if buffer.storage.of_objects:
        return dataclasses.replace(buffer, storage=ObjectsApart(), transforms=())
    return one_by_one.apart(buffer)


@pytree.component
class ObjectsApart(HostStorageProxy):
    """Stands for a storage of objects, which are looked after elsewhere."""

    of_objects: ClassVar[bool] = True

    def spec(self, state: None) -> Item:
        """Objects have no shapes."""
        return {}


def is_at(path: str, buffer: Description) -> bool:
    """Whether a description names this path as that of its store."""
    if not isinstance(buffer, ReplayBuffer) or not isinstance(buffer.storage, StoreArrays):
        return False
    named = buffer.storage.path
    return named is not None and os.path.realpath(named) == os.path.realpath(path)


def items_of(view: HostView) -> Any:
    """All items, as a pytree of `Leaf`s."""
    specs, structure = jax.tree.flatten(view.rows.spec)

    def leaf(number: int, spec: Item) -> Any:
        make = functools.partial(Leaf, view, number, (view.capacity, *spec.shape))
        return one_by_one.of_dtype(make, spec.dtype)

    return jax.tree.unflatten(structure, [leaf(*each) for each in enumerate(specs)])


def prepared(buffer: Description, given: bool) -> Any:
    """The buffer that a checkpoint is loaded into.

    A store of its own path may still be in use: without a description, the items go to a temporary
    one.
    """
    if given or not is_on_host(buffer):
        return buffer
    return dataclasses.replace(buffer, storage=buffer.storage.elsewhere())


def filled(
    buffer: Buffer, spec: Item, pieces: Iterable[tuple[np.ndarray, list[np.ndarray]]]
) -> HostView:
    """New rows of a buffer, of items that come piece by piece: slots and leaves, or their bytes."""
    view = buffer.storage.view(eager.init(buffer, spec, None).storage)
    rows, version = view.rows, view.version
    for slots, found in pieces:
        if not all(table.is_zero(np.frombuffer(memory.view(leaf), np.uint8)) for leaf in found):
            leaves = [leaf.view(raw.dtype) for leaf, raw in zip(found, rows.raw, strict=True)]
            version = rows.put(version, slots, *leaves)
    return view.after(version)


def attach(buffer: Buffer, state: BufferState, view: HostView) -> Any:
    """The state that knows of rows which are there already."""
    held = functools.partial(buffer.writer.held, buffer.ring, state.writer)
    return state.replace(storage=buffer.storage.attach(buffer.ring, view, held))
