"""The items of a state, apart from all else in it: taken out on the host, and put back.

K items, N capacity, V the buffers that `vmap` has put side by side. Slot s of buffer v is row
v * N + s. Items are NumPy arrays `[K, ...]` in their own structure and dtypes, keys as their words,
wherever and however the storage keeps them.
"""

import dataclasses
import functools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import eager, memory, packed, steps
from jrb._core.packed import RowOrder
from jrb._core.steps import context_of
from jrb._store import table
from jrb._store.table import Column
from jrb._util import casting, pytree
from jrb._util.pytree import Leaf
from jrb.checkpoint import rows, schema
from jrb.checkpoint.rows import StateRows
from jrb.checkpoint.schema import PackedLeaf, Snapshot
from jrb.state import Buffer, BufferState, Device
from jrb.storages import DeviceStorage
from jrb.storages.device import next_observation_rows, shared_leaves
from jrb.storages.host_rows import HostView
from jrb.types import Item
from jrb.types.messages import PartState

KIND = "apart"
"""The kind of items that were left out of a checkpoint."""

MEND = "Pass what jrb.items(buffer, state) gave when it was saved."

_BY_SLOT = RowOrder()
_WITNESSES = 64  # items that are compared to tell them from others

Pieces = Iterable[tuple[np.ndarray, list[np.ndarray]]]
"""Numbers of rows, and leaves of their items."""


def host_spec(spec: Item) -> Any:
    """Returns the specs of an item as it is on the host: keys as their words."""
    return jax.tree.map(casting.raw_spec, spec)


def without(buffer: Buffer, state: Any) -> Any:
    """Returns the state, or its specs, with None for the leaves in which items are."""
    items = set(map(id, jax.tree.leaves(buffer.storage.slotted(state.storage))))
    storage = jax.tree.map(lambda leaf: None if id(leaf) in items else leaf, state.storage)
    return state.replace(storage=storage)


@dataclasses.dataclass(frozen=True)
class Items:
    """The items of a state.

    Attributes:
        spec: of one, on the host.
        rows: in which they are.
        leaves: for each leaf the number of its column, and its bytes in a row of that.
        shared: for each leaf, whether it is not in the row of its slot, but in that of `source`.
        source: int `[V, N]`, the rows of next observations that are stored once; None without any.
    """

    spec: Any
    rows: StateRows
    leaves: tuple[tuple[int, slice], ...]
    shared: tuple[bool, ...]
    source: np.ndarray | None

    def take(self, which: np.ndarray) -> Any:
        """Returns the items of rows `[K]`."""
        buffer, slot = np.divmod(which, self.rows.capacity)
        columns: dict[tuple[int, bool], np.ndarray] = {}  # each is read once
        leaves, specs = [], jax.tree.leaves(self.spec)
        for spec, (number, part), shared in zip(specs, self.leaves, self.shared, strict=True):
            if (number, shared) not in columns:
                at = slot if not shared or self.source is None else self.source[buffer, slot]
                columns[number, shared] = self.rows.take_column(number, buffer, at)
            raw = np.ascontiguousarray(columns[number, shared][:, part])
            leaves.append(raw.view(spec.dtype).reshape(len(which), *spec.shape))
        return jax.tree.unflatten(jax.tree.structure(self.spec), leaves)


def of(saved: Snapshot, what: str) -> Items:
    """Returns the items of a state.

    Raises:
        TypeError: nobody knows where they are.
    """
    buffer, batch, spec = saved.plain, saved.batch, saved.spec
    storage = buffer.storage.slotted(saved.state.storage)
    leaves = jax.tree.leaves(schema.named_storage(storage))
    names, twins = pytree.leaf_names(spec), _twins(buffer, spec)
    _check(buffer, leaves, spec, batch, what)
    columns_of, sources, places, packed = [], [], [], {}
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, PackedLeaf):
            column, source = rows.column_of(name, leaf, batch)
            part = slice(0, column.width)
        elif leaf.array in packed:
            places.append((packed[leaf.array], leaf.part))
            continue
        else:
            array, part = storage.arrays[leaf.array], leaf.part
            packed[leaf.array] = len(columns_of)
            column = Column.of(name, (), array.shape[-1] * array.dtype.itemsize)
            source = rows.packed_source(storage, leaf.array, saved.count)
        places.append((len(columns_of), part))
        columns_of.append(column)
        sources.append(source)
    of_names = dict(zip(names, places, strict=True))
    state_rows = StateRows(tuple(columns_of), tuple(sources), saved.count, buffer.capacity)
    return Items(
        host_spec(spec),
        state_rows,
        tuple(of_names[twins.get(name, name)] for name in names),
        tuple(name in twins for name in names),
        _source(buffer, batch, saved.state) if twins else None,
    )


def _twins(buffer: Buffer, spec: Item) -> dict[str, str]:
    """Returns which leaves are stored in the rows of which others, by their names."""
    storage = buffer.storage
    is_once = isinstance(storage, DeviceStorage) and storage.share_next_observations
    return shared_leaves(spec, buffer.keys) if is_once else {}


def _check(
    buffer: Buffer, leaves: list[Any], spec: Item, batch: tuple[int, ...], what: str
) -> None:
    """Raises unless the storage keeps each leaf of items row by row."""
    names, twins = pytree.leaf_names(spec), _twins(buffer, spec)
    fits = len(leaves) == len(names)
    for name, leaf, one in zip(names, leaves, jax.tree.leaves(spec), strict=False):
        raw, inner = casting.raw_spec(leaf), casting.raw_spec(one)
        fits &= raw.shape[len(batch) + 1 :] == inner.shape
        fits &= name in twins or leaf.shape[len(batch)] >= buffer.capacity
        fits &= raw.dtype.itemsize == inner.dtype.itemsize
    if not fits:
        raise TypeError(
            f"{what}: expected a storage that keeps every leaf of the items in an array `[N, ...]`,"
            f" which its method `slotted` tells, got {type(buffer.storage).__name__}. Save without."
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sources(buffer: Buffer, axes: int, writer: PartState, storage: Any) -> jax.Array:
    slots = jnp.arange(buffer.capacity, dtype=jnp.int32)
    source = lambda writer, storage: next_observation_rows(
        context_of(buffer, writer), storage, slots
    )
    for _ in range(axes):
        source = jax.vmap(source)
    return source(writer, storage)


def _source(buffer: Buffer, batch: tuple[int, ...], state: Any) -> np.ndarray:
    """Returns in which row the next observations of every slot are, int `[V, N]`."""
    storage = state.storage.replace(items=None)
    source = np.asarray(_sources(buffer, len(batch), state.writer, storage))
    return source.reshape(-1, buffer.capacity)


def bytes_of(leaf: Leaf) -> np.ndarray:
    """Returns rows as bytes, uint8 `[K, width]`."""
    array = np.ascontiguousarray(leaf)
    if not array.size:
        return np.zeros((len(array), 0), np.uint8)
    return array.reshape(len(array), -1).view(np.uint8)


def _words(leaf: Leaf) -> Any:
    """Returns rows as they lie in the state's memory."""
    return np.asarray(packed.to_words(leaf)) if packed.is_small(leaf.dtype) else leaf


# Back into a state.


def filled(buffer: Buffer, spec: Item, pieces: Pieces) -> HostView:
    """Returns new rows on the host, of items that come piece by piece."""
    view = buffer.storage.view(eager.init(buffer, spec, None).storage)
    host_rows, version = view.rows, view.version
    for slots, leaves in pieces:
        if not all(table.is_zero(np.frombuffer(memory.view(leaf), np.uint8)) for leaf in leaves):
            words = [leaf.view(raw.dtype) for leaf, raw in zip(leaves, host_rows.raw, strict=True)]
            version = host_rows.put(version, slots, *words)
    return view.after(version)


def attach(buffer: Buffer, state: BufferState, view: HostView) -> Any:
    """Returns the state with rows on the host that are there already."""
    held = functools.partial(buffer.writer.held, buffer.ring, state.writer)
    return state.replace(storage=buffer.storage.attach(buffer.ring, view, held))


def joined(
    buffer: Buffer, want: Any, state: Any, spec: Item, pieces: Pieces, device: Device
) -> Any:
    """Returns the state with its items.

    Args:
        buffer: whose states have their items on the device.
        want: the specs of the whole state.
        state: without the items.
        spec: of an item.
        pieces: the items; rows that do not come are zeros.
        device: for the arrays.
    """
    batch = want.edits.shape
    slotted = buffer.storage.slotted(want.storage)
    named = jax.tree.leaves(schema.named_storage(slotted))
    _check(buffer, named, spec, batch, "load")
    arrays = {id(leaf): rows.host_array(leaf, np.zeros) for leaf in jax.tree.leaves(slotted)}
    count = int(np.prod(batch, dtype=int))
    targets = []
    for leaf in named:
        if isinstance(leaf, PackedLeaf):
            array = arrays[id(slotted.arrays[leaf.array])]
            data = array.reshape(count, -1, array.shape[-1]).view(np.uint8)
            targets.append((data[..., leaf.part], slotted.order))
        else:
            targets.append((rows.rows_of(arrays[id(leaf)], batch), _BY_SLOT))
    _put(buffer, batch, state, spec, targets, pieces)
    own = iter(jax.tree.leaves(state.storage))
    place = lambda leaf: (
        rows.placed(leaf, arrays.pop(id(leaf)), device) if id(leaf) in arrays else next(own)
    )
    return state.replace(storage=jax.tree.map(place, want.storage))


def _put(
    buffer: Buffer,
    batch: tuple[int, ...],
    state: Any,
    spec: Item,
    targets: list[tuple[np.ndarray, RowOrder]],
    pieces: Pieces,
) -> None:
    """Puts items into the bytes of the storage's arrays, uint8 `[V, N or more, width]`."""
    names, twins = pytree.leaf_names(spec), _twins(buffer, spec)
    source = _source(buffer, batch, state) if twins else None
    capacity = buffer.capacity
    for which, leaves in pieces:
        at = np.divmod(which, capacity)
        for number, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            data = bytes_of(_words(leaf))
            if name not in twins:
                target, order = targets[number]
                target[np.divmod(order.places(which, capacity), capacity)] = data
            elif source is not None:
                rows_of = source[at]
                is_own = rows_of >= capacity  # else it is the next row's observation
                target, _ = targets[names.index(twins[name])]
                target[at[0][is_own], rows_of[is_own]] = data[is_own]


# Items that the user keeps.


def in_order(buffer: Buffer, writer: PartState) -> np.ndarray:
    """Returns the slots that hold items, oldest first."""
    slots, count = steps.in_order(buffer.writer, buffer.ring, writer)
    return np.asarray(slots)[: int(count)]


def form_of(saved: Snapshot) -> dict[str, Any]:
    """Returns what a generation says of items that it lacks: how many, and checksums of some."""
    if saved.batch:
        raise TypeError(
            "items: expected a single state with items=False, got states under vmap. Save them one "
            "by one, or with their items."
        )
    slots = in_order(saved.plain, saved.state.writer)
    if saved.plain.storage.of_objects:
        return {"kind": KIND, "count": len(slots)}
    items = of(saved, "items").take(slots[_witnesses(len(slots))])
    return {"kind": KIND, "count": len(slots), "sums": _sums(jax.tree.leaves(items))}


def _witnesses(count: int) -> np.ndarray:
    """Returns which of K items are compared."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, _WITNESSES)).astype(np.int64))


def _sums(leaves: list[Any]) -> list[int]:
    return [zlib.crc32(bytes_of(_words(leaf)).tobytes()) for leaf in leaves]


def given(
    path: str, form: dict[str, Any], slots: np.ndarray, spec: Item, items: Item
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Returns slots, and the items of a user for them.

    Raises:
        TypeError, ValueError: they are not those that were held.
    """
    count = form["count"]
    want = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), host_spec(spec)
    )
    pytree.check_like(want, items, f"{path}: items", MEND)
    leaves = list(map(np.asarray, jax.tree.leaves(items)))
    few = _witnesses(len(slots))
    sums = _sums([leaf[few] for leaf in leaves])
    for name, got, saved in zip(pytree.leaf_names(spec), sums, form["sums"], strict=True):
        if got != saved:
            raise ValueError(
                f"{path}: items: leaf '{name}': expected the items that were held, oldest first, "
                f"got others. {MEND}"
            )
    return pieces_of(slots, leaves, spec)


def pieces_of(
    slots: np.ndarray, leaves: list[Any], spec: Item
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Returns slots and items `[K, ...]` for them, some megabytes at a time."""
    return (
        (slots[part], [leaf[part] for leaf in leaves])
        for part in rows.in_parts(np.arange(len(slots)), pytree.nbytes(spec))
    )
