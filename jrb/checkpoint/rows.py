"""A state as rows, one for each slot, and the arrays beside them.

N capacity, V the buffers that `vmap` has put side by side. Slot s of buffer v is row v * N + s.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb._core import memory
from jrb._core.packed import PackedLeaves, RowOrder
from jrb._store import table
from jrb._store.store import Store
from jrb._store.table import Column
from jrb._util import casting
from jrb._util.pytree import Leaf
from jrb.checkpoint import schema
from jrb.checkpoint.schema import HostLeaf, PackedLeaf, Snapshot
from jrb.state import Device

PIECE = 16 << 20
"""Bytes of the rows that are in memory twice at a time."""

BEYOND = "#beyond"
"""Stands behind the name of an array that holds what a leaf has besides its N rows."""


@dataclasses.dataclass(frozen=True)
class OrderedRows:
    """The rows of a packed array that are in another order than that of slots.

    Attributes:
        source: the array, or its bytes on the host, `[V, N, width]` of uint8.
        order: of its rows.
    """

    source: Any
    order: RowOrder


@dataclasses.dataclass(frozen=True)
class StateRows:
    """The leaves of a state that lie in rows.

    Attributes:
        columns: one for each packed array, and one for each leaf with an array of its own.
        sources: of each column on the host `[V, N or more, width]` of uint8, or a `HostLeaf`, or an
            array of another device; or one of these as `OrderedRows`.
        buffers: V.
        capacity: N.
        in_slots: whether rows are slots, so that the writer's stamps tell which are new.
    """

    columns: tuple[Column, ...]
    sources: tuple[Any, ...]
    buffers: int
    capacity: int
    in_slots: bool = True

    @property
    def count(self) -> int:
        """V * N."""
        return self.buffers * self.capacity

    @property
    def width(self) -> int:
        """The bytes of a row in all columns."""
        return max(sum(column.width for column in self.columns), 1)

    def take(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes of rows `[B]` of each column, uint8 `[B, width]`."""
        buffer, slot = np.divmod(rows, self.capacity)
        return [self.take_column(number, buffer, slot) for number in range(len(self.columns))]

    def take_column(self, number: int, buffer: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """Returns rows of one column; slots may be N or more, where the source has them."""
        source, width = self.sources[number], self.columns[number].width
        if isinstance(source, OrderedRows):  # not copied into the order of slots: it may be large
            places = source.order.places(buffer * self.capacity + slot, self.capacity)
            buffer, slot = np.divmod(places, self.capacity)
            source = source.source
        if isinstance(source, HostLeaf):
            return source.rows(slot)
        if isinstance(source, np.ndarray):
            if len(buffer) and buffer[0] == buffer[-1] and len(table.runs(slot)) == 1:
                return source[buffer[0], slot[0] : slot[-1] + 1]  # no copy
            return source[buffer, slot]
        read, length = memory.reader(source), source.size * source.dtype.itemsize // self.buffers
        place = buffer * (length // max(width, 1)) + slot
        order = np.argsort(place, kind="stable")
        rows = np.empty((len(slot), width), np.uint8)
        for a, b in table.runs(place[order]):  # each run is one transfer
            first, last = int(place[order[a]]), int(place[order[b - 1]])
            piece = np.frombuffer(read(first * width, (last + 1) * width), np.uint8)
            rows[order[a:b]] = piece.reshape(-1, width)
        return rows

    def fingerprints(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns bytes that differ if rows do: of rows on the host all, of others a hash."""
        return self._hashed.take(rows)

    @functools.cached_property
    def _hashed(self) -> "StateRows":
        """These rows, with four bytes in place of each row that is on another device."""
        columns, sources = list(self.columns), list(self.sources)
        for number, source in enumerate(sources):
            array = source.source if isinstance(source, OrderedRows) else source
            if not isinstance(array, np.ndarray | HostLeaf):
                hashes = memory.row_hashes(array, columns[number].width)
                hashes = hashes.reshape(self.buffers, -1, 4)
                is_ordered = isinstance(source, OrderedRows)
                sources[number] = OrderedRows(hashes, source.order) if is_ordered else hashes
        return dataclasses.replace(self, sources=tuple(sources))

    def witnesses(self, store: Store, rows: np.ndarray) -> np.ndarray:
        """Returns those of rows with equal fingerprints that might differ all the same: none."""
        return rows[:0]

    def pieces(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Yields some rows, a few megabytes at a time."""
        return in_parts(rows, self.width)


def in_parts(rows: np.ndarray, width: int, size: int = PIECE) -> Iterator[np.ndarray]:
    """Yields rows of `width` bytes each, as many at a time as take about `size` bytes."""
    step = max(1, size // max(width, 1))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def split(saved: Snapshot) -> tuple[StateRows, dict[str, Any], dict[str, list[str]]]:
    """Returns the rows of a state; its other arrays as bytes; and the kinds of these, by name."""
    buffer, axes = saved.plain, len(saved.batch)
    state = schema.with_tree_leaves(saved.state)
    by_slot = set(map(id, jax.tree.leaves(buffer.storage.slotted(state.storage))))
    columns, sources, arrays, kinds = [], [], {}, {}
    packed: dict[str, dict[str, PackedLeaf]] = {}  # by the arrays that they are in
    for name, leaf in schema.by_name(schema.named(state)).items():
        if isinstance(leaf, PackedLeaf):
            packed.setdefault(leaf.array, {})[name] = leaf
        elif id(leaf) not in by_slot or leaf.shape[axes] < buffer.capacity:
            arrays[name], kinds[name] = array_bytes(leaf), list(schema.kind_of(leaf))
        else:
            column, source = column_of(name, leaf, saved.batch)
            columns.append(column)
            sources.append(source)
            if leaf.shape[axes] > buffer.capacity:
                beyond = casting.raw(leaf)[(slice(None),) * axes + (slice(buffer.capacity, None),)]
                arrays[name + BEYOND] = memory.view(np.asarray(beyond))
                kinds[name + BEYOND] = list(schema.kind_of(leaf))
    for array, leaves in packed.items():
        columns.append(packed_column(leaves))
        sources.append(packed_source(state.storage, array, saved.count))
    rows = StateRows(tuple(columns), tuple(sources), saved.count, buffer.capacity)
    return rows, arrays, kinds


def packed_column(leaves: dict[str, PackedLeaf]) -> Column:
    """Returns the column of a packed array, whose rows are like those of the array."""
    in_order = sorted(leaves.items(), key=lambda pair: pair[1].part.start)
    return Column(
        tuple(
            table.Leaf(name, schema.kind_of(leaf), leaf.part.stop - leaf.part.start)
            for name, leaf in in_order
        )
    )


def packed_source(storage: PackedLeaves, array: str, buffers: int) -> Any:
    """Returns what the rows of a packed array are read from."""
    source = storage.arrays[array]
    if memory.on_host(source):
        width = source.shape[-1] * source.dtype.itemsize
        data = np.frombuffer(memory.view(np.asarray(source)), np.uint8)
        source = data.reshape(buffers, -1, width)
    return source if storage.order.envs is None else OrderedRows(source, storage.order)


def array_bytes(leaf: Leaf) -> Any:
    """Returns the bytes of an array, keys as their words."""
    return memory.view(np.asarray(casting.raw(leaf)))


def column_of(name: str, leaf: Any, batch: tuple[int, ...]) -> tuple[Column, Any]:
    """Returns the column of a leaf with an array of its own, and what its rows are read from."""
    kind = schema.kind_of(leaf)
    if isinstance(leaf, HostLeaf):
        return Column.of(name, kind, leaf.width), leaf
    words = casting.raw(leaf)
    length = int(np.prod(words.shape[: len(batch) + 1], dtype=int))
    width = words.size // max(length, 1) * words.dtype.itemsize
    return Column.of(name, kind, width), source_of(words, batch)


def source_of(words: Any, batch: tuple[int, ...]) -> Any:
    """Returns what rows are read from: an array on the host as bytes, any other as it is."""
    return rows_of(np.asarray(words), batch) if memory.on_host(words) else words


def rows_of(array: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
    """Returns the bytes of an array `[*batch, N or more, ...]`, uint8 `[V, N or more, width]`."""
    buffers, length = int(np.prod(batch, dtype=int)), array.shape[len(batch)]
    width = array.size // max(buffers * length, 1) * array.dtype.itemsize
    if not array.size:
        return np.zeros((buffers, length, width), np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(buffers, length, width)


def host_array(spec: Any, make: Any = np.empty) -> np.ndarray:
    """Returns memory on the host for an array of a state, which XLA takes without a copy."""
    raw = casting.raw_spec(spec)
    return table.aligned(raw.shape, raw.dtype, make=make)


def placed(spec: Any, array: np.ndarray, device: Device) -> jax.Array:
    """Returns an array of a state, from one of the host that nobody else uses any more."""
    return casting.wrapped(memory.placed(array, device), spec.dtype)
