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

from jrb._core import columns, memory, steps
from jrb._core.steps import context_of
from jrb._util import prng_keys, pytree
from jrb._util.pytree import Leaf, PyTree
from jrb.checkpoint import host_items, one_by_one, rows
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Snapshot
from jrb.state import Buffer, Device
from jrb.storages import DeviceStorage, shared_next
from jrb.types import Item
from jrb.types.messages import PartState

KIND = "apart"

_WITNESSES = 64
"""How many items are looked at to tell them from others."""

Pieces = Iterable[tuple[np.ndarray, list[np.ndarray]]]
"""Numbers of rows, and leaves of their items."""


def on_host(spec: Item) -> Any:
    """The specs of an item as it is on the host: keys as their words."""
    return jax.tree.map(prng_keys.raw_spec, spec)


def without(buffer: Buffer, state: Any) -> Any:
    """The state, or its specs, with None for the leaves in which items are."""
    items = set(map(id, jax.tree.leaves(buffer.storage.slotted(state.storage))))
    gone = lambda leaf: None if id(leaf) in items else leaf
    return state.replace(storage=jax.tree.map(gone, state.storage))


@dataclasses.dataclass(frozen=True)
class Items:
    """The items of a state.

    Attributes:
        spec: of one, on the host.
        held: the rows in which they are.
        number: for each leaf, that of its column.
        elsewhere: for each leaf, whether it is not in the row of its slot, but in that of `source`.
        source: int `[V, N]`, where next observations are that are stored once; None if none is.
    """

    spec: PyTree
    held: rows.Rows
    number: tuple[int, ...]
    elsewhere: tuple[bool, ...]
    source: np.ndarray | None

    @property
    def count(self) -> int:
        """V * N."""
        return self.held.count

    def take(self, rows: np.ndarray) -> Any:
        """The items of rows `[K]`."""
        buffer, slot = np.divmod(rows, self.held.capacity)
        found, specs = [], jax.tree.leaves(self.spec)
        for spec, number, elsewhere in zip(specs, self.number, self.elsewhere, strict=True):
            there = slot if not elsewhere or self.source is None else self.source[buffer, slot]
            raw = np.ascontiguousarray(self.held.taken(number, buffer, there))
            found.append(raw.view(spec.dtype).reshape(len(rows), *spec.shape))
        return jax.tree.unflatten(jax.tree.structure(self.spec), found)


def of(saved: Snapshot, what: str) -> Items:
    """The items of a state.

    Raises:
        TypeError: nobody knows where they are.
    """
    buffer, batch, spec = saved.plain, saved.batch, saved.spec
    count = int(np.prod(batch, dtype=int))
    leaves = jax.tree.leaves(buffer.storage.slotted(saved.state.storage))
    names, twins = pytree.leaf_names(spec), _twins(buffer, spec)
    _check(buffer, leaves, spec, batch, what)
    numbers = [names.index(twins.get(name, name)) for name in names]
    made = [
        rows.column_of(name, leaf, batch, count) for name, leaf in zip(names, leaves, strict=True)
    ]
    made_of = tuple(column for column, _ in made)
    held = rows.Rows(made_of, tuple(array for _, array in made), count, buffer.capacity)
    source = _source(buffer, batch, saved.state) if twins else None
    return Items(on_host(spec), held, tuple(numbers), tuple(n in twins for n in names), source)


def _twins(buffer: Buffer, spec: Item) -> dict[str, str]:
    """From leaves that are stored in the rows of others to those."""
    storage = buffer.storage
    is_once = isinstance(storage, DeviceStorage) and storage.share_next_observations
    return shared_next.pairs(spec, buffer.keys) if is_once else {}


def _check(
    buffer: Buffer, leaves: list[Any], spec: Item, batch: tuple[int, ...], what: str
) -> None:
    """Raises unless the storage keeps each leaf of items in an array of its own, row by row."""
    wanted, twins = pytree.leaf_names(spec), _twins(buffer, spec)
    fits = len(leaves) == len(wanted)
    for name, leaf, one in zip(wanted, leaves, jax.tree.leaves(spec), strict=False):
        raw, inner = prng_keys.raw_spec(leaf), prng_keys.raw_spec(one)
        same = raw.shape[len(batch) + 1 :] == inner.shape
        fits &= same and (name in twins or leaf.shape[len(batch)] >= buffer.capacity)
        fits &= raw.dtype.itemsize == inner.dtype.itemsize
    if not fits:
        raise TypeError(
            f"{what}: expected a storage that keeps every leaf of the items in an array `[N, ...]`,"
            f" which its method `slotted` tells, got {type(buffer.storage).__name__}. Save without."
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sources(buffer: Buffer, axes: int, writer: PartState, storage: Any) -> jax.Array:
    slots = jnp.arange(buffer.capacity, dtype=jnp.int32)
    source = lambda writer, storage: shared_next.source(context_of(buffer, writer), storage, slots)
    for _ in range(axes):
        source = jax.vmap(source)
    return source(writer, storage)


def _source(buffer: Buffer, batch: tuple[int, ...], state: Any) -> np.ndarray:
    """In which row the next observations of every slot are, int `[V, N]`."""
    storage = state.storage.replace(items=None)
    found = np.asarray(_sources(buffer, len(batch), state.writer, storage))
    return found.reshape(-1, buffer.capacity)


def bytes_of(leaf: Leaf) -> np.ndarray:
    """Rows as bytes, uint8 `[K, width]`."""
    array = np.ascontiguousarray(leaf)
    if not array.size:
        return np.zeros((len(array), 0), np.uint8)
    return array.reshape(len(array), -1).view(np.uint8)


def _words(leaf: Leaf) -> Any:
    """Rows as they lie in the state's memory."""
    return np.asarray(columns.packed(leaf)) if columns.is_small(leaf.dtype) else leaf


def joined(
    buffer: Buffer, want: Any, state: Any, spec: Item, pieces: Pieces, device: Device
) -> Any:
    """The state with its items.

    Args:
        buffer: whose states have their items on the device.
        want: the specs of the whole state, an array for each leaf of the items.
        state: without them.
        spec: of an item.
        pieces: the items; rows that do not come are zeros.
        device: for the arrays.
    """
    batch = want.edits.shape
    count = int(np.prod(batch, dtype=int))
    plain, room = host_items.on_device(buffer), one_by_one.room_for(buffer, spec, batch)
    slotted = jax.tree.leaves(plain.storage.slotted(want.storage))
    _check(plain, slotted, spec, batch, "load")
    targets = {} if room is None else room.targets(want.storage, is_blank=True)
    own = {id(leaf): _zeros(leaf) for leaf in slotted if id(leaf) not in targets}
    lined = {at: array.reshape(count, *array.shape[len(batch) :]) for at, array in own.items()}
    into = targets | lined
    _put(plain, batch, state, spec, [into[id(leaf)] for leaf in slotted], pieces)
    made = {
        id(leaf): memory.restored(leaf, _reader(own[id(leaf)]), device)
        if id(leaf) in own
        else targets[id(leaf)]
        for leaf in slotted
    }
    rest = iter(jax.tree.leaves(state.storage))
    whole = lambda leaf: made[id(leaf)] if id(leaf) in made else next(rest)
    storage = jax.tree.map(whole, want.storage)
    return state.replace(storage=storage if room is None else room.filled(storage, device))


def _zeros(leaf: Leaf) -> np.ndarray:
    """Where a leaf goes that has a column of its own."""
    raw = prng_keys.raw_spec(leaf)
    return np.zeros(raw.shape, raw.dtype)


def _put(
    buffer: Buffer,
    batch: tuple[int, ...],
    state: Any,
    spec: Item,
    arrays: list[Any],
    pieces: Pieces,
) -> None:
    """Puts items where the storage keeps them, what is written to like `[V, N or more, ...]`."""
    names, twins = pytree.leaf_names(spec), _twins(buffer, spec)
    source = _source(buffer, batch, state) if twins else None
    for which, leaves in pieces:
        at = np.divmod(which, buffer.capacity)
        for number, (name, leaf) in enumerate(zip(names, map(_words, leaves), strict=True)):
            if name not in twins:
                arrays[number][at] = leaf
            elif source is not None:
                there = source[at]
                far = there >= buffer.capacity  # else it is the next row's observation
                arrays[names.index(twins[name])][at[0][far], there[far]] = leaf[far]


def _reader(array: np.ndarray) -> Any:
    """Hands over the bytes of an array (see `jrb._core.memory.restored`)."""
    whole = memory.view(array)

    def read(target: memoryview | None) -> Any:
        if target is not None:
            target[:] = whole
            return None
        starts = range(0, len(whole), memory.PIECE)
        return ((start, whole[start : start + memory.PIECE]) for start in starts)

    return read


# Items that the user keeps.


def in_order(buffer: Buffer, writer: PartState) -> np.ndarray:
    """The slots that hold items, oldest first."""
    slots, count = steps.in_order(buffer.writer, buffer.ring, writer)
    return np.asarray(slots)[: int(count)]


def form_of(saved: Snapshot) -> dict[str, Any]:
    """What a generation says of items that it does not have: how many, and sums of some."""
    if saved.batch:
        raise TypeError(
            "items: expected a single state with items=False, got states under vmap. Save them one "
            "by one, or with their items."
        )
    slots = in_order(saved.plain, saved.state.writer)
    if saved.plain.storage.of_objects:
        return {"kind": KIND, "count": len(slots)}
    found = of(saved, "items").take(slots[_witnesses(len(slots))])
    return {"kind": KIND, "count": len(slots), "sums": _sums(jax.tree.leaves(found))}


def _witnesses(count: int) -> np.ndarray:
    """Which of K items are looked at."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, _WITNESSES)).astype(np.int64))


def _sums(leaves: list[Any]) -> list[int]:
    return [zlib.crc32(bytes_of(_words(leaf)).tobytes()) for leaf in leaves]


def brought(
    opened: Opened, slots: np.ndarray, spec: Item, items: Item
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Slots, and the items of a user for them.

    Raises:
        TypeError, ValueError: they are not those that were held.
    """
    path, form = opened.path, opened.form
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((form["count"], *leaf.shape), leaf.dtype), on_host(spec)
    )
    mend = "Pass what jrb.items(buffer, state) gave when it was saved."
    pytree.check_like(wanted, items, f"{path}: items", mend)
    leaves = list(map(np.asarray, jax.tree.leaves(items)))
    few = _witnesses(len(slots))
    sums = _sums([leaf[few] for leaf in leaves])
    for name, found, saved in zip(pytree.leaf_names(spec), sums, form["sums"], strict=True):
        if found != saved:
            raise ValueError(
                f"{path}: items: leaf '{name}': expected the items that were held, oldest first, "
                f"got others. {mend}"
            )
    return (
        (slots[part], [leaf[part] for leaf in leaves])
        for part in rows.in_parts(np.arange(len(slots)), pytree.nbytes(spec))
    )
