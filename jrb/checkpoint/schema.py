"""States in the form in which they are saved: leaves by name, their specs, and rows.

N capacity, V the number of buffers in a state under `vmap`. A packed array is saved by the names of
the leaves of items in it, a sum-tree as its leaves, and an item's leaf on the host as a `HostLeaf`.
Slot s of buffer v is row v * N + s of a checkpoint.
"""

import contextlib
import dataclasses
import datetime
import functools
import importlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeGuard

import jax
import jax.core
import jaxlib.version
import numpy as np
from jax.typing import DTypeLike

from jrb import sum_tree
from jrb._core import eager, memory, packed, validate
from jrb._core.host_proxy import HostStorageProxy
from jrb._core.packed import LeafSlice, PackedLeaves, RowOrder
from jrb._store import table
from jrb._store.store import Store
from jrb._store.table import Column
from jrb._util import casting, display, pytree
from jrb._util.pytree import Leaf, PyTree
from jrb._xla import compat
from jrb._xla.compiling import kept_by_description
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions
from jrb.mix import Description
from jrb.state import Buffer, BufferState
from jrb.storages import DeviceStorage, HostArrays
from jrb.storages.host_rows import HostView
from jrb.storages.memmap import StoreArrays
from jrb.types import Context, Item
from jrb.types.messages import PartState

PIECE = 16 << 20
"""The bytes of rows that are copied at a time."""

BEYOND = "#beyond"
"""The suffix of the name of an array that has the rows of a leaf beyond the first N."""


# Leaves.


@dataclasses.dataclass(frozen=True)
class PackedLeaf:
    """A leaf of items that is stored in a packed array, as the bytes `part` of each row."""

    array: str
    part: slice
    shape: tuple[int, ...]
    dtype: DTypeLike


@dataclasses.dataclass(frozen=True)
class HostLeaf:
    """A leaf `[N, ...]` of items on the host; `number` is its index in a view of the rows."""

    view: HostView
    number: int
    shape: tuple[int, ...]
    dtype: DTypeLike

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """Returns the bytes of some rows, uint8 `[B, width]`."""
        return self.view.rows.read_leaf(self.view.version, self.number, slots)


def named(state: Any) -> Any:
    """Returns a state, or its specs, with a `PackedLeaf` in place of each packed leaf of items."""
    storage = state.storage
    if not isinstance(storage, PackedLeaves):
        return state
    if any(array is None for array in storage.arrays.values()):
        return state  # the items were left out

    def leaf(it: Any) -> Any:
        if not isinstance(it, LeafSlice):
            return it
        size, shape = np.dtype(it.words).itemsize, storage.shape(it)
        part = slice(it.start * size, it.stop * size)
        return _column(lambda dtype: PackedLeaf(it.words, part, shape, dtype), it.dtype)

    return state.replace(storage=jax.tree.map(leaf, storage.places, is_leaf=packed.is_column))


def _column(make: Any, dtype: Any) -> Any:
    """Returns `make(dtype)`; for a small dtype, a `SmallColumn` made of its words' dtype."""
    if not packed.is_small(dtype):
        return make(dtype)
    return packed.SmallColumn(make(packed.word_dtype(dtype)), np.dtype(dtype))


def by_name(tree: PyTree) -> dict[str, Any]:
    """Returns all leaves by their names."""
    return dict(zip(pytree.unique_names(tree), jax.tree.leaves(tree), strict=True))


def kind_of(leaf: Leaf) -> tuple[str, ...]:
    """Returns dtype and shape as text, which must be equal for rows to be comparable."""
    return (descriptions.dtype_name(leaf.dtype), str(list(leaf.shape)))


def with_tree_leaves(state: PyTree) -> Any:
    """Returns a state, or its specs, with each sum-tree replaced by the array of its leaves.

    Inner nodes are not saved: they depend on the branching, and that depends on the backend.
    """

    def leaves(part: Any) -> Any:
        if not sum_tree.is_tree(part):
            return part
        if isinstance(part.nodes, jax.ShapeDtypeStruct):
            # A spec has no nodes to select: compute the shape of the leaves.
            shape = (*part.nodes.shape[:-1], part.capacity)
            return jax.ShapeDtypeStruct(shape, part.nodes.dtype)
        if memory.on_host(part.nodes):
            part = part.replace(np.asarray(part.nodes))  # so that the leaves are no copy
        return sum_tree.leaf_values(part)

    return jax.tree.map(leaves, state, is_leaf=sum_tree.is_tree)


def with_trees(want: PyTree, state: PyTree) -> Any:
    """Returns a state like the specs `want`, from the output of `with_tree_leaves`."""

    def whole(spec: Any, part: Any) -> Any:
        if not sum_tree.is_tree(spec):
            return part
        # The nodes above are computed again, with the branching of this backend.
        return sum_tree.over(spec.capacity, spec.branching, spec.reduction, part)

    return jax.tree.map(whole, want, state, is_leaf=sum_tree.is_tree)


# Buffers whose items are on the host.


@pytree.component
class UnpackedStorage(DeviceStorage):
    """Stands for a storage on the host, to load its states with an array for every leaf."""

    def init(self, context: Context, spec: Item) -> Any:
        """Returns a column of zeros for each leaf."""
        return jax.tree.map(lambda leaf: packed.zeros_column(context.ring.capacity, leaf), spec)


@pytree.component
class NoItems(HostStorageProxy):
    """Stands for a storage of objects, which are saved separately from the state."""

    of_objects: ClassVar[bool] = True

    def spec(self, state: None) -> Item:
        """Returns no specs, as objects have no shapes."""
        return {}


def is_on_host(buffer: Description) -> TypeGuard[Buffer]:
    """Returns True if a buffer keeps items of arrays on the host."""
    return isinstance(buffer, ReplayBuffer) and isinstance(buffer.storage, HostArrays)


def on_device(buffer: Buffer) -> Any:
    """Returns the description with items on the device; for objects, without items."""
    if not eager.on_host(buffer):
        return buffer
    if buffer.storage.of_objects:
        return dataclasses.replace(buffer, storage=NoItems(), transforms=())
    return dataclasses.replace(buffer, storage=UnpackedStorage())


def is_at(path: str, buffer: Description) -> bool:
    """Returns True if the storage of a description has its store at this path."""
    if not isinstance(buffer, ReplayBuffer) or not isinstance(buffer.storage, StoreArrays):
        return False
    own = buffer.storage.path
    return own is not None and os.path.realpath(own) == os.path.realpath(path)


def loadable(buffer: Description, given: bool) -> Any:
    """Returns the description that a checkpoint is loaded into.

    Unless the user has given it, items on the host go to a temporary store, as the store at the
    saved description's path may be in use.
    """
    if given or not is_on_host(buffer):
        return buffer
    return dataclasses.replace(buffer, storage=buffer.storage.elsewhere())


# States that are saved.


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of one buffer, checked before anything is written.

    Attributes:
        buffer: the description.
        state: its state, with `HostLeaf`s for arrays on the host, and None for objects.
        spec: the specs of a stored item; empty for objects.
        batch: the shape of the leading axes that `vmap` has added to all leaves.
        stored: the storage's own state.
    """

    buffer: Buffer
    state: BufferState
    spec: Item
    batch: tuple[int, ...]
    stored: PartState = None

    @functools.cached_property
    def plain(self) -> Buffer:
        """The description with all items on the device."""
        return on_device(self.buffer)

    @property
    def count(self) -> int:
        """V, the number of buffers."""
        return int(np.prod(self.batch, dtype=int))

    @property
    def views(self) -> list[HostView]:
        """The view of its rows on the host, in a list; empty if items are elsewhere."""
        return [self.buffer.storage.view(self.stored)] if is_on_host(self.buffer) else []

    def lies_at(self, path: str) -> bool:
        """Returns True if this state has its rows in the store at a path."""
        return any(view.rows.path == os.path.realpath(path) for view in self.views)


def snapshot(buffer: Buffer, state: BufferState) -> Snapshot:
    """Returns the snapshot of a state that will be saved, after all checks."""
    kept = buffer.storage.state_type if eager.on_host(buffer) else object
    if not isinstance(state, BufferState) or not isinstance(state.storage, kept):
        raise ValueError(
            f"save: expected a state of this buffer, got {type(state).__name__}. The order is "
            "save(path, buffer, state)."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        where = f"save: leaf '{pytree.leaf_name(path)}'"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{where}: expected an array, got a tracer. Save outside jit.")
        if not pytree.is_array(leaf):
            raise TypeError(f"{where}: expected an array, got {type(leaf).__name__}.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{where}: expected an array that is there, got one that was donated. Save the "
                "state that came back."
            )
    stored, seen = state.storage, state
    if buffer.storage.of_objects:
        seen = state.replace(storage=None)
    elif is_on_host(buffer):
        view = buffer.storage.view(stored)
        specs, structure = jax.tree.flatten(view.rows.spec)

        def host_leaf(number: int, spec: jax.ShapeDtypeStruct) -> Any:
            shape = (view.capacity, *spec.shape)
            return _column(lambda dtype: HostLeaf(view, number, shape, dtype), spec.dtype)

        leaves = [host_leaf(number, spec) for number, spec in enumerate(specs)]
        seen = state.replace(storage=jax.tree.unflatten(structure, leaves))
    spec, batch = _fitted(on_device(buffer), pytree.spec_of(seen, "save"))
    return Snapshot(buffer, seen, spec, batch, stored)


def blank(buffer: Buffer, spec: Item) -> Any:
    """Returns the specs of a state of the buffer, whose items have the specs `spec`."""
    leaves, structure = jax.tree.flatten(spec)
    return _blanks(buffer)(structure, tuple(leaves), compat.is_x64())


@kept_by_description  # a program loads states of the same kind again and again
def _blanks(buffer: Buffer) -> Callable[..., Any]:
    @functools.lru_cache(maxsize=16)
    def blanks(structure: Any, leaves: tuple, x64: bool) -> Any:
        spec = jax.tree.unflatten(structure, leaves)
        return jax.eval_shape(lambda: validate.blank(on_device(buffer), spec))

    return blanks


def _fitted(buffer: Buffer, specs: BufferState) -> tuple[Item, tuple[int, ...]]:
    """Returns the specs of an item in a state, and the shape of the axes that `vmap` has added."""
    # `vmap` may have put axes before all leaves. The storage knows the shape of an item only
    # without them, so try none, one, two and three.
    leaves = jax.tree.leaves(specs)
    for axes in range(4):
        strip = lambda leaf, axes=axes: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)
        single, batch = jax.tree.map(strip, specs), leaves[0].shape[:axes]
        try:
            validate.check(buffer, single)  # mostly cached, as methods have checked the state
            spec = buffer.storage.spec(single.storage)
        except (TypeError, ValueError, AttributeError, LookupError):
            continue
        if all(leaf.shape[:axes] == batch for leaf in leaves):
            return spec, batch
    other = ValueError("save: expected a state of this buffer, got another.")
    try:
        spec = buffer.storage.spec(specs.storage)
    except (AttributeError, IndexError, TypeError, KeyError):
        raise other from None  # a storage may raise these for the state of another one
    try:
        want = blank(buffer, spec)
        mend = "Save the state that this very buffer made."
        for one, two in ((named(want), named(specs)), (want, specs)):  # leaves of items come first
            pytree.check_like(by_name(one), by_name(two), "save", mend)
        validate.check(buffer, specs)
    except (AttributeError, IndexError, KeyError):
        pass  # parts too may raise these for a state that is not theirs
    raise other


def batched(tree: Item, batch: tuple[int, ...]) -> Any:
    """Returns these specs with leading axes, each a new object."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*batch, *leaf.shape), leaf.dtype), tree)


def about(kind: str, saved: Snapshot) -> dict[str, Any]:
    """Returns the metadata of a state in a checkpoint, for JSON."""
    buffer, state = saved.buffer, saved.state
    count = lambda writer: buffer.writer.held(buffer.ring, writer).size
    for _ in saved.batch:
        count = jax.vmap(count)
    leaves = jax.tree_util.tree_leaves_with_path(state.writer)
    facts = {
        "description": text_of(buffer),
        "capacity": buffer.capacity,
        "num_envs": buffer.num_envs,
        "size": np.asarray(count(state.writer)).tolist(),
        "writer": {
            jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist()
            for path, leaf in leaves
            if leaf.ndim == len(saved.batch)
        },
    }
    return {
        "kind": kind,
        "buffer": descriptions.encode(buffer),
        "items": descriptions.encode_structure(saved.spec),
        "batch": list(saved.batch),
        "facts": facts_of_any() | facts,
    }


def facts_of_any() -> dict[str, Any]:
    """Returns the time of a save, and the versions of libraries."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {
        "jrb": importlib.import_module("jrb").__version__,  # which imports this
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    return {"time": now, "versions": versions}


def text_of(buffer: Any) -> str:
    """Returns a description as code, with functions as their names."""
    # Python shows functions with their addresses, which differ from program to program.
    return re.sub(r"<(?:function|bound method) (\S+).*?>", r"\1", display.laid_out(buffer))


# Rows that are saved.


@dataclasses.dataclass(frozen=True)
class StateRows:
    """The arrays of a state that are saved row by row, each as a column.

    The source of a column is a uint8 array `[V, N or more, width]` on the host, a `HostLeaf`, or an
    array on another device.
    """

    columns: tuple[Column, ...]
    sources: tuple[Any, ...]
    orders: tuple[RowOrder, ...]  # of the rows of each source
    buffers: int  # V
    capacity: int  # N

    @property
    def count(self) -> int:
        """V * N, the number of rows."""
        return self.buffers * self.capacity

    @property
    def width(self) -> int:
        """The bytes of a row in all columns."""
        return max(sum(column.width for column in self.columns), 1)

    def take(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the bytes of rows `[B]` of each column, uint8 `[B, width]`."""
        buffer, slot = np.divmod(rows, self.capacity)
        return [self._take_column(number, buffer, slot) for number in range(len(self.columns))]

    def _take_column(self, number: int, buffer: np.ndarray, slot: np.ndarray) -> np.ndarray:
        source, width = self.sources[number], self.columns[number].width
        order = self.orders[number]
        if order.envs is not None:  # not copied into the order of slots: it may be large
            places = order.places(buffer * self.capacity + slot, self.capacity)
            buffer, slot = np.divmod(places, self.capacity)
        if isinstance(source, HostLeaf):
            return source.rows(slot)
        if isinstance(source, np.ndarray):
            if len(buffer) and buffer[0] == buffer[-1] and len(table.runs(slot)) == 1:
                return source[buffer[0], slot[0] : slot[-1] + 1]  # no copy
            return source[buffer, slot]
        read, length = memory.reader(source), source.size * source.dtype.itemsize // self.buffers
        # The row in the whole array, whose buffers may have more rows than N each.
        place = buffer * (length // max(width, 1)) + slot
        # Rows that follow each other on the device come in one transfer.
        ascending = np.argsort(place, kind="stable")
        rows = np.empty((len(slot), width), np.uint8)
        for a, b in table.runs(place[ascending]):
            first, last = int(place[ascending[a]]), int(place[ascending[b - 1]])
            piece = np.frombuffer(read(first * width, (last + 1) * width), np.uint8)
            rows[ascending[a:b]] = piece.reshape(-1, width)
        return rows

    def fingerprints(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns bytes by which rows are compared: all bytes on the host, else a hash."""
        return self._hashed.take(rows)

    @functools.cached_property
    def _hashed(self) -> "StateRows":
        """These rows, with a hash of four bytes in place of each row on another device."""
        sources = list(self.sources)
        for number, source in enumerate(sources):
            if not isinstance(source, np.ndarray | HostLeaf):
                hashes = memory.row_hashes(source, self.columns[number].width)
                sources[number] = hashes.reshape(self.buffers, -1, 4)
        return dataclasses.replace(self, sources=tuple(sources))

    def witnesses(self, store: Store, rows: np.ndarray) -> np.ndarray:
        """Returns rows that must be compared despite equal fingerprints: here none."""
        return rows[:0]


def in_parts(rows: np.ndarray, width: int, size: int | None = None) -> Iterator[np.ndarray]:
    """Yields parts of `rows`, each for about `size` bytes; a row has `width` bytes."""
    step = max(1, (PIECE if size is None else size) // max(width, 1))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def split(saved: Snapshot) -> tuple[StateRows, dict[str, Any], dict[str, list[str]]]:
    """Returns the rows of a state; its other arrays as bytes; and the kinds of these, by name."""
    buffer, axes = saved.plain, len(saved.batch)
    state = with_tree_leaves(saved.state)
    # Only arrays whose rows are slots are compared row by row; all others are written each time.
    by_slot = set(map(id, jax.tree.leaves(buffer.storage.slotted(state.storage))))
    entries: list[tuple[Column, Any, RowOrder]] = []
    arrays, kinds = {}, {}
    by_array: dict[str, dict[str, PackedLeaf]] = {}  # packed leaves, by array and name
    for name, leaf in by_name(named(state)).items():
        kind = kind_of(leaf)
        if isinstance(leaf, PackedLeaf):
            by_array.setdefault(leaf.array, {})[name] = leaf
        elif id(leaf) not in by_slot or leaf.shape[axes] < buffer.capacity:
            arrays[name], kinds[name] = array_bytes(leaf), list(kind)
        elif isinstance(leaf, HostLeaf):
            raw = leaf.view.rows.raw[leaf.number]
            entries.append((Column.of(name, kind, raw.size * raw.dtype.itemsize), leaf, RowOrder()))
        else:
            words = casting.raw(leaf)
            length = int(np.prod(words.shape[: axes + 1], dtype=int))
            width = words.size // max(length, 1) * words.dtype.itemsize
            entries.append((Column.of(name, kind, width), _source(words, saved, width), RowOrder()))
            if leaf.shape[axes] > buffer.capacity:
                # Rows that are no slots, such as the pool of shared observations, are written each
                # time.
                behind = (slice(None),) * axes + (slice(buffer.capacity, None),)
                arrays[name + BEYOND] = memory.view(np.asarray(words[behind]))
                kinds[name + BEYOND] = list(kind)
    for name, leaves in by_array.items():
        array = state.storage.arrays[name]
        source = _source(array, saved, array.shape[-1] * array.dtype.itemsize)
        entries.append((packed_column(leaves), source, state.storage.order))
    state_columns, sources, orders = zip(*entries, strict=True) if entries else ((), (), ())
    return StateRows(state_columns, sources, orders, saved.count, buffer.capacity), arrays, kinds


def _source(array: Any, saved: Snapshot, width: int) -> Any:
    """Returns an array on the host as bytes, uint8 `[V, N or more, width]`; any other as it is."""
    if not memory.on_host(array):
        return array
    data = np.frombuffer(memory.view(np.asarray(array)), np.uint8)
    if not data.size:  # rows of no bytes
        return np.zeros((saved.count, array.shape[len(saved.batch)], 0), np.uint8)
    return data.reshape(saved.count, -1, width)


def packed_column(leaves: dict[str, PackedLeaf]) -> Column:
    """Returns the column for a packed array, with its leaves in the order of the array's rows."""
    in_order = sorted(leaves.items(), key=lambda pair: pair[1].part.start)
    width = lambda leaf: leaf.part.stop - leaf.part.start
    return Column(tuple(table.Leaf(name, kind_of(it), width(it)) for name, it in in_order))


def array_bytes(leaf: Leaf) -> Any:
    """Returns the bytes of an array, keys as their words."""
    return memory.view(np.asarray(casting.raw(leaf)))


# What a file says of a buffer, and the items that it holds.


class WideError(TypeError):
    """The saved items have dtypes of 64 bits, but JAX keeps only 32."""


def fitting(
    path: str, meta: dict[str, Any], given: Description | None, example: Item
) -> tuple[Any, Any]:
    """Returns the description and item specs of a file; the user's own if these match them."""
    buffer, node = descriptions.matched(path, meta["buffer"], given, ReplayBuffer), meta["items"]
    with descriptions.read_from(path):
        # If no file can hold the structure, only leaves were saved: the example has the structure.
        is_unknown = "unknown" in node
        parts = node["leaves"] if is_unknown else [node]
        specs = [descriptions.decode_structure(part) for part in parts]
        spec = specs if is_unknown else specs[0]
        by_leaf = by_name(spec)
    for name, leaf in by_leaf.items():
        # Without x64, JAX would narrow them silently.
        is_key = casting.is_keys(leaf.dtype)
        if not is_key and leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
            raise WideError(
                f"{path}: leaf '{name}': expected a dtype that JAX keeps, got {leaf.dtype}. Call "
                "load(path, cast=True), which converts it, or set jax_enable_x64."
            )
    if example is None:
        with contextlib.nullcontext() if given is not None else descriptions.read_from(path):
            spec = pytree.spec_of(descriptions.decode_structure(node), "load")
            if given is None:
                blank(buffer, spec)
        return buffer, spec
    stored = {}
    if not buffer.storage.of_objects:
        plain = on_device(buffer)
        stored = plain.stored(jax.eval_shape(lambda: plain.init(example)))
    mend = "Pass a transition like those that were saved, or leave example= out."
    other = jax.tree.leaves(stored) if is_unknown else stored
    pytree.check_like(spec, other, "load: example", mend)
    return buffer, stored
