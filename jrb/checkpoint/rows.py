"""A state as what lies in rows, slot by slot, and the arrays that do not.

N capacity, V the buffers that `vmap` has put side by side. Slot s of buffer v is row v * N + s.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import memory
from jrb._store import table
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation, Location
from jrb._store.store import Store
from jrb._store.table import Column
from jrb._store.threads import share
from jrb._util import prng_keys
from jrb._util.pytree import Leaf
from jrb.checkpoint import descriptions, host_items, state_specs
from jrb.checkpoint.one_by_one import SideLeaf, Target
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Snapshot
from jrb.state import Buffer
from jrb.types.messages import PartState

PIECE = 16 << 20
"""Bytes of the rows that are on their way at a time."""

DIGEST = ".digest"
"""The name of the array with a checksum of each block of rows, by which hand edits are found."""

BEYOND = "#beyond"
"""Stands behind the name of an array that holds what a leaf has besides its N rows."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The leaves of a state that lie in rows.

    Attributes:
        columns: of leaves that lie side by side in memory one, of each other its own.
        arrays: what is in each, on the host `[V, N or more, width]` of uint8, or a
            `host_items.Leaf` or `SideLeaf`, or an array of another device.
        buffers: V.
        capacity: N.
        in_slots: whether they are slots, so that the writer's stamps tell which are new.
    """

    columns: tuple[Column, ...]
    arrays: tuple[Any, ...]
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
        """The bytes of rows `[B]` of each column, uint8 `[B, width]`."""
        buffer, slot = np.divmod(rows, self.capacity)
        return [self.taken(number, buffer, slot) for number in range(len(self.columns))]

    def taken(self, number: int, buffer: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """The same of one column; slots may be N or more, where the array has them."""
        column, array = self.columns[number], self.arrays[number]
        if isinstance(array, host_items.Leaf | SideLeaf):
            return array.rows(buffer, slot)
        if isinstance(array, np.ndarray):
            in_line = len(buffer) > 0 and buffer[0] == buffer[-1] and len(table.runs(slot)) == 1
            if in_line:
                return array[buffer[0], slot[0] : slot[-1] + 1]
            return array[buffer, slot]
        return self._fetched(column, array, buffer, slot)

    def _fetched(
        self, column: Column, leaf: jax.Array, buffer: np.ndarray, slot: np.ndarray
    ) -> np.ndarray:
        """The same from another device."""
        read, length = memory.reader(leaf), leaf.size * leaf.dtype.itemsize // self.buffers
        place = buffer * (length // max(column.width, 1)) + slot
        found = [
            np.frombuffer(
                read(int(place[a]) * column.width, (int(place[b - 1]) + 1) * column.width), np.uint8
            )
            for a, b in table.runs(place)
        ]
        none = np.zeros(0, np.uint8)
        return np.concatenate([none, *found]).reshape(len(slot), column.width)

    def fingerprints(self, rows: np.ndarray) -> list[np.ndarray]:
        """Bytes that differ if rows `[B]` do: of rows on the host all, of others four each."""
        return self._hashed.take(rows)

    @functools.cached_property
    def _hashed(self) -> "Rows":
        """These rows, with a hash in place of each row that is on another device."""

        def hashed(column: Column, array: Any) -> Any:
            if isinstance(array, SideLeaf):
                return array if array.words.array is None else array.words.hashes()
            if isinstance(array, np.ndarray | host_items.Leaf):
                return array
            return memory.row_hashes(array, column.width).reshape(self.buffers, -1, 4)

        arrays = map(hashed, self.columns, self.arrays)
        return dataclasses.replace(self, arrays=tuple(arrays))

    def witnesses(self, store: Store, rows: np.ndarray) -> np.ndarray:
        """Those of some rows with the same fingerprints that might be another now: none."""
        return rows[:0]

    def pieces(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Some rows, a few megabytes at a time."""
        return in_parts(rows, self.width)


def in_parts(rows: np.ndarray, width: int, size: int = PIECE) -> Iterator[np.ndarray]:
    """Some rows, of `width` bytes each, so many at a time as take about `size` bytes."""
    step = max(1, size // max(width, 1))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def split(saved: Snapshot) -> tuple[Rows, dict[str, Any], dict[str, list[str]]]:
    """The rows of a state; its other arrays as bytes; what must be known to read each of these."""
    buffer, batch, state = saved.plain, saved.batch, state_specs.packed(saved.state)
    by_slot = set(map(id, jax.tree.leaves(buffer.storage.slotted(state.storage))))
    buffers, columns, held, arrays, kinds = int(np.prod(batch, dtype=int)), [], [], {}, {}
    beside: dict[int, dict[str, SideLeaf]] = {}  # by the arrays that they are in
    for name, leaf in state_specs.by_name(state).items():
        if id(leaf) not in by_slot or leaf.shape[len(batch)] < buffer.capacity:
            arrays[name], kinds[name] = array_bytes(leaf), list(kind_of(leaf))
            continue
        if isinstance(leaf, SideLeaf):
            beside.setdefault(id(leaf.words), {})[name] = leaf
            continue
        column, array = column_of(name, leaf, batch, buffers)
        columns.append(column)
        held.append(array)
        if leaf.shape[len(batch)] > buffer.capacity:
            arrays[name + BEYOND] = _beyond(leaf, len(batch), buffer.capacity)
            kinds[name + BEYOND] = list(kind_of(leaf))
    columns += map(_side_by_side, beside.values())
    held += [next(iter(leaves.values())).whole for leaves in beside.values()]
    return Rows(tuple(columns), tuple(held), buffers, buffer.capacity), arrays, kinds


def _side_by_side(leaves: dict[str, SideLeaf]) -> Column:
    """The column of an array, like whose rows its own are."""
    in_order = sorted(leaves.items(), key=lambda pair: pair[1].part.start)
    return Column(tuple(table.Leaf(name, kind_of(it), it.width) for name, it in in_order))


def array_bytes(leaf: Leaf) -> Any:
    """The bytes of an array, keys as their words."""
    return memory.view(np.asarray(prng_keys.raw(leaf)))


def column_of(name: str, leaf: Leaf, batch: tuple[int, ...], buffers: int) -> tuple[Column, Any]:
    """The column of a leaf, and what its rows are read from."""
    kind = kind_of(leaf)
    if isinstance(leaf, host_items.Leaf | SideLeaf):
        return Column.of(name, kind, leaf.width), leaf
    words = prng_keys.raw(leaf)
    length = words.shape[len(batch)]
    width = words.size // max(buffers * length, 1) * words.dtype.itemsize
    if memory.on_host(words):
        words = np.frombuffer(memory.view(np.asarray(words)), np.uint8)
        words = words.reshape(buffers, length, width)
    return Column.of(name, kind, width), words


def _beyond(leaf: Leaf, axes: int, capacity: int) -> Any:
    """The bytes of a leaf beyond its N rows."""
    after = (slice(None),) * axes + (slice(capacity, None),)
    return memory.view(np.asarray(prng_keys.raw(leaf)[after]))


def kind_of(leaf: Leaf) -> tuple[str, ...]:
    """What must be the same for rows to be comparable: dtype and shape."""
    return (descriptions.dtype_name(leaf.dtype), str(list(leaf.shape)))


def reach(store: Store, rows: Rows, saved: Snapshot) -> int:
    """Returns the number of rows behind which none was ever written, in memory or in the store."""
    if not rows.in_slots or not saved.views:
        return rows.count
    return min(rows.count, max(store.reach, *(view.rows.reach for view in saved.views)))


def digest(rows: Rows, block: int, count: int) -> np.ndarray:
    """The checksums of blocks of the first `count` rows as they are in memory, uint32; 0 behind.

    They are made anew for each save: hand edits leave no other trace. Device arrays are hashed
    where they are, since to bring 10 GB to the host takes seconds.
    """
    sums = np.zeros(-(-rows.count // block), np.uint32)

    def add(number: int) -> None:
        which = np.arange(number * block, min((number + 1) * block, count))
        for found in rows.fingerprints(which):
            sums[number] = zlib.crc32(memory.view(found), int(sums[number]))

    share(add, range(-(-count // block)))
    return sums


def changed(
    store: Store, rows: Rows, last: Generation | None, saved: Snapshot, sums: np.ndarray
) -> np.ndarray:
    """The rows that the last generation of a store has not, or has otherwise; int64, in order.

    The writer's stamps tell which are new, if the state goes on from the one that was saved. All
    others are compared with the store where the `digest` of their block is another, and
    everywhere if items were edited by a verb, or are not in slots.
    """
    every, state = np.arange(reach(store, rows, saved)), saved.state
    if not rows.in_slots:
        return every if last is None else every[_differ(store, rows, every)]
    then = None if last is None else _as_saved(last, {"writer": state.writer, "edits": state.edits})
    if last is None or then is None:
        return every
    count, axes = saved.plain.capacity, len(saved.batch)
    if saved.views:  # a power of two, so that little is compiled while it grows
        count = min(count, 1 << len(every).bit_length())
    stamps = lambda writer: np.asarray(_stamps(saved.plain, axes, count, writer)).reshape(-1)
    new = (stamps(then["writer"]) != stamps(state.writer))[: len(every)]
    suspects = ~new
    if (then["edits"] == np.asarray(state.edits)).all():
        suspects &= (_digest_of(last, sums) != sums)[every // store.sums.block]
    which = np.flatnonzero(suspects)
    if _differ(store, rows, rows.witnesses(store, np.flatnonzero(~new & ~suspects))).any():
        return every
    return np.union1d(every[new], which[_differ(store, rows, which)])


def _digest_of(last: Generation, like: np.ndarray) -> np.ndarray:
    """The digest of a generation; where it has none, one that differs everywhere."""
    with contextlib.suppress(DamagedError):
        found = last.array(DIGEST, np.uint32)
        if len(found) == len(like):
            return found
    return ~like


def _differ(store: Store, rows: Rows, which: np.ndarray) -> np.ndarray:
    """Which of some rows are not what the store has, bool like `which`."""
    found = [np.zeros(0, np.bool_)]
    for piece in rows.pieces(which):
        there = store.take(store.version, [piece] * len(rows.columns))
        differs = np.zeros(len(piece), np.bool_)
        for one, other in zip(rows.take(piece), there, strict=True):
            differs |= (one != other).any(axis=1)
        found.append(differs)
    return np.concatenate(found)


def _as_saved(last: Generation, parts: dict[str, Any]) -> Any:
    """Parts of a state as they were saved; None if they were of another kind."""
    entries, found = last.arrays, []
    for name, leaf in state_specs.by_name(parts).items():
        if name not in entries or entries[name]["kind"] != list(kind_of(leaf)):
            return None
        try:
            found.append(last.array(name, leaf.dtype).reshape(leaf.shape))
        except (DamagedError, ValueError):
            return None
    return jax.tree.unflatten(jax.tree.structure(parts), found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _stamps(buffer: Buffer, axes: int, count: int, writer: PartState) -> jax.Array:
    """The stamps of the first slots, uint32 `[V, count]`."""
    slots = jnp.arange(count, dtype=jnp.int32)
    stamp = lambda writer: buffer.writer.generation_of(buffer.ring, writer, slots)
    for _ in range(axes):
        stamp = jax.vmap(stamp)
    return stamp(writer)


def pieces(
    store: Store, rows: Rows, which: np.ndarray
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Rows and their bytes; those of zeros that were never written are left out."""
    for piece in rows.pieces(which):
        found = rows.take(piece)
        if not store.is_blank(piece) or not all(map(table.is_zero, found)):
            yield piece, found


def ranges(store: Store) -> Iterator[np.ndarray]:
    """All slots of a store up to the last one written, a few megabytes at a time."""
    return in_parts(np.arange(store.reach), sum(column.width for column in store.table.columns))


def reader(
    opened: Opened, name: str, location: Location | None, buffers: int
) -> Callable[[memoryview | None], Any]:
    """Fills a memoryview with a leaf's bytes; or, from None, gives them in pieces."""
    store, saved = opened.store, opened.generation
    beyond = name + BEYOND in saved.arrays

    def fill(target: memoryview) -> None:
        if location is None:
            saved.read(name, target)
        elif len(store.table.columns[location.column].leaves) == 1:
            rest = saved.array(name + BEYOND, np.uint8) if beyond else None
            read(store, location.column, buffers, rest, target)
        else:
            for start, piece in _in_pieces(store, location.column, location.part):
                target[start : start + len(piece)] = piece

    def whole() -> Iterator[tuple[int, Any]]:
        size = saved.arrays[name if location is None else name + BEYOND]["size"]
        if location is not None:
            size += store.slots * location.leaf.width
        target = bytearray(size)
        fill(memoryview(target))
        yield 0, target

    def read_to(target: memoryview | None) -> Any:
        if target is not None:
            return fill(target)
        return (
            whole()
            if location is None or beyond
            else _in_pieces(store, location.column, location.part)
        )

    return read_to


def fill(opened: Opened, targets: list[tuple[Target, str, Location | None]], buffers: int) -> None:
    """Fills leaves that will lie side by side, of V buffers, each from where it lies.

    Columns whose leaves lie side by side in the same way come straight to where they belong.
    """
    store = opened.store
    together, others = {}, []
    for column, its in _by_column(targets).items():
        whole = None if column is None else _whole(store.table.columns[column], its)
        if whole is None or column is None:
            others += its
        elif whole.is_in_order:
            together[column] = whole.rows
        else:
            whole.fill(_in_pieces(store, column, whole.part))
    if together:
        store.read_columns(together)
    for target, name, location in others:
        target.fill(reader(opened, name, location, buffers)(None))


def _by_column(targets: list[Any]) -> dict[int | None, list[Any]]:
    found: dict[int | None, list[Any]] = {}
    for target, name, location in targets:
        found.setdefault(location and location.column, []).append((target, name, location))
    return found


def _whole(column: Column, targets: list[Any]) -> Target | None:
    """The whole rows of an array, if leaves lie side by side in it as in a column."""
    first = targets[0][0]
    alike = all(it.array is first.array and it.part == location.part for it, _, location in targets)
    is_all = len(targets) == len(column.leaves) and column.width == first.whole.width
    return first.whole if alike and is_all else None


def _in_pieces(store: Store, column: int, part: slice) -> Iterator[tuple[int, Any]]:
    """A part of the rows of a column, after a look at all of them."""
    store.sums.check_column(column)
    width = part.stop - part.start
    for slots in in_parts(np.arange(store.slots), width, memory.PIECE):
        found = store.take_column(store.version, column, slots, part)
        yield int(slots[0]) * width, found.reshape(-1).data


def read(store: Store, number: int, buffers: int, beyond: Any, target: memoryview) -> None:
    """Fills the target with the bytes of a column, checked.

    Args:
        store: where its rows are.
        number: of the column.
        buffers: V.
        beyond: the bytes beyond its rows; None if there are none.
        target: as many bytes as the leaf has.
    """
    width = store.table.columns[number].width
    whole = np.asarray(target, np.uint8)
    if beyond is None:
        store.read_columns({number: whole.reshape(store.slots, width)})
        return
    inner, capacity = np.zeros((store.slots, width), np.uint8), store.slots // buffers
    store.read_columns({number: inner})
    view = whole.reshape(buffers, -1, width)
    view[:, :capacity] = inner.reshape(buffers, capacity, width)
    view[:, capacity:] = np.frombuffer(beyond, np.uint8).reshape(buffers, -1, width)
