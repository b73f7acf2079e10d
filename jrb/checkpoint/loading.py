"""Reads a state from a store: names and kinds of leaves are checked first, then rows and arrays."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import migrate, read
from jrb._core import eager, memory
from jrb._core.packed import PackedLeaves
from jrb._store import generation, opening
from jrb._store.errors import DamagedError, LostWarning
from jrb._store.generation import Generation, Location
from jrb._store.store import Store
from jrb._util import casting
from jrb._util.pytree import PyTree
from jrb._xla import compat
from jrb.checkpoint import external_items, hooks, manifest, objects, rows, schema
from jrb.checkpoint.hooks import Inward
from jrb.checkpoint.rows import BEYOND
from jrb.checkpoint.saving import BUFFER, STORE
from jrb.checkpoint.schema import PackedLeaf, WideError
from jrb.mix import Description
from jrb.state import Buffer, BufferState, Device
from jrb.storages import host_rows
from jrb.storages.memmap import StoreRows, columns
from jrb.types import Item


@dataclasses.dataclass(frozen=True)
class OpenedCheckpoint:
    """A generation of a checkpoint that is loaded.

    Attributes:
        path: of its folder, as it was named.
        generation: which one.
        promised: of a part, says which of its generations the whole names now; None if there is no
            whole.
    """

    path: str
    generation: Generation
    promised: Callable[[], int | None] | None = None

    @functools.cached_property
    def store(self) -> Store:
        """Its rows, none of which was looked at.

        Raises:
            FileNotFoundError: nothing was saved there.
            DamagedError: a file is not what was written.
        """
        store = opening.store_of(self.generation)
        store.promised = self.promised
        return store

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """What is said of the state, checked."""
        return manifest.meta_of(self.generation)

    @property
    def form(self) -> dict[str, Any]:
        """What is said of items that are not in rows of the state's own leaves; else nothing."""
        return self.meta.get("form") or {}

    def part(self, name: str) -> "OpenedCheckpoint":
        """Returns that of one of several buffers."""
        one = manifest.part(self.path, self.generation, name)

        def promised() -> int | None:
            folder = opening.folder_at(self.path)
            newest = generation.last(folder) if self.promised is None else self.promised()
            return None if newest is None else manifest.known(folder, newest).get(name)

        return OpenedCheckpoint(manifest.path_of(self.path, name), one, promised)


def load(
    opened: OpenedCheckpoint,
    given: Description | None,
    example: Item,
    device: Device,
    back: Inward,
) -> tuple[Any, Any]:
    """Returns the description and the state of a generation of one buffer."""
    load_to = lambda device: _load(opened, given, example, device, back)
    return narrowed(load_to, opened.path, given is not None, device, back.cast)


def _load(
    opened: OpenedCheckpoint,
    given: Description | None,
    example: Item,
    device: Device,
    back: Inward,
) -> tuple[Any, Any]:
    store, kind = opened.store, opened.meta.get("kind")
    back.check(opened.path, opened.form)
    if kind not in (BUFFER, STORE):
        raise ValueError(
            f"{opened.path}: expected a checkpoint of a buffer, got one of kind {kind!r}."
        )
    buffer, spec = schema.fitting(opened.path, opened.meta, given, example)
    if kind == STORE:
        return _reopened(opened, buffer, spec, device, back.verify)
    buffer = schema.loadable(buffer, given is not None)
    want = schema.batched(schema.blank(buffer, spec), tuple(opened.meta["batch"]))
    on_host, is_external = schema.is_on_host(buffer), bool(opened.form)
    opening.check(store, rows=on_host or is_external)  # else they are checked when read
    if is_external:
        seen = external_items.without(schema.on_device(buffer), want)
        state = _restored(opened, seen, device, has_rows=False)
        return buffer, _with_external(opened, buffer, want, state, spec, device, back)
    state = _restored(opened, want, device, is_attached=on_host)
    if on_host:
        view = external_items.filled(buffer, spec, _all_rows(store))
        state = external_items.attach(buffer, state, view)
    return buffer, state


def _all_rows(store: Store) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields all slots up to the last one written, and their rows, a few megabytes at a time."""
    width = sum(column.width for column in store.table.columns)
    for slots in rows.in_parts(np.arange(store.reach), width):
        yield slots, store.take(store.version, [slots] * len(store.table.columns))


def _with_external(
    opened: OpenedCheckpoint,
    buffer: Buffer,
    want: BufferState,
    state: BufferState,
    spec: Item,
    device: Device,
    back: Inward,
) -> BufferState:
    """Returns the state with its items, which are not in rows of its own leaves."""
    path, store, form = opened.path, opened.store, opened.form
    if form["kind"] == hooks.KIND:
        pieces = hooks.decoded(path, store, opened.generation, form, spec, back.decode)
    elif form["kind"] != external_items.KIND:
        storage = objects.restored(path, store, opened.generation, form, buffer, device)
        return state.replace(storage=storage)
    else:
        slots = external_items.in_order(buffer, state.writer)
        if buffer.storage.of_objects:
            return state.replace(storage=objects.given(path, form, slots, buffer, back.items))
        pieces = external_items.given(path, form, slots, spec, back.items)
    if schema.is_on_host(buffer):
        view = external_items.filled(buffer, spec, pieces)
        return external_items.attach(buffer, state, view)
    return external_items.joined(buffer, want, state, spec, pieces, device)


# A state of its leaves.


def _restored(
    opened: OpenedCheckpoint,
    want: BufferState,
    device: Device,
    has_rows: bool = True,
    is_attached: bool = False,
) -> BufferState:
    """Returns the state of these specs, as it was saved; its arrays on a device.

    Args:
        opened: what has it.
        want: what it must be.
        device: for its arrays.
        has_rows: whether some of its leaves lie in rows; else it has only the arrays.
        is_attached: whether these are left out, as they stay in the store.

    Raises:
        DamagedError: there are other leaves; or they are not what was written.
    """
    specs, storage = schema.with_tree_leaves(want), want.storage
    named = schema.named(specs)
    buffers = int(np.prod(want.edits.shape, dtype=int))
    made: dict[int, Any] = {}
    packed: dict[str, dict[str, PackedLeaf]] = {}
    places = _places(opened, named, has_rows)
    for name, leaf in schema.by_name(named).items():
        if isinstance(leaf, PackedLeaf):
            packed.setdefault(leaf.array, {})[name] = leaf
        elif is_attached and places[name] is not None:
            made[id(leaf)] = np.zeros(0, np.uint8)
        else:
            reader = _reader(opened, name, places[name], buffers)
            made[id(leaf)] = memory.restored(leaf, reader, device)
    if isinstance(storage, PackedLeaves) and packed:
        arrays = _packed_arrays(opened, storage, packed, places, buffers)
        for name, spec in storage.arrays.items():
            made[id(spec)] = rows.placed(spec, arrays.pop(name), device)
    return schema.with_trees(want, jax.tree.map(lambda leaf: made[id(leaf)], specs))


def _packed_arrays(
    opened: OpenedCheckpoint,
    storage: PackedLeaves,
    packed: dict[str, dict[str, PackedLeaf]],
    places: dict[str, Location | None],
    buffers: int,
) -> dict[str, np.ndarray]:
    """Returns the packed arrays of a storage, filled where they stay: no leaf is copied.

    Columns in which the same leaves lie in the same way are read straight into the arrays. Leaves
    of any other checkpoint are cut in one by one.
    """
    arrays, whole = {}, {}
    store, order = opened.store, storage.order
    for array, leaves in packed.items():
        arrays[array] = rows.host_array(storage.arrays[array])
        target = arrays[array].reshape(-1, arrays[array].shape[-1]).view(np.uint8)
        capacity = len(target) // buffers
        own = [(leaf.name, leaf.width) for leaf in rows.packed_column(leaves).leaves]
        location = places[next(iter(leaves))]
        column = () if location is None else store.table.columns[location.column].leaves
        if location is not None and [(leaf.name, leaf.width) for leaf in column] == own:
            if order.envs is None:
                whole[location.column] = target
                continue
            every = slice(0, target.shape[1])
            parts = [(every, _in_pieces(store, location.column, every))]
        else:
            read = lambda name: _reader(opened, name, places[name], buffers)(None)
            parts = [(leaf.part, read(name)) for name, leaf in leaves.items()]
        for part, pieces in parts:
            width = part.stop - part.start
            for start, piece in pieces:
                data = np.frombuffer(piece, np.uint8).reshape(-1, width)
                numbers = np.arange(start // width, start // width + len(data))
                target[order.places(numbers, capacity), part] = data
    if whole:
        store.read_columns(whole)
    return arrays


def _places(opened: OpenedCheckpoint, named: PyTree, has_rows: bool) -> dict[str, Location | None]:
    """Returns in which column each leaf of a state lies; None for those that are arrays.

    Raises:
        DamagedError: there are other leaves, or of another dtype or shape.
    """
    path, arrays = opened.path, opened.generation.arrays
    in_rows = opened.generation.leaves if has_rows else {}
    names = {name for name in (*in_rows, *arrays) if not name.startswith(".")}
    names = {name for name in names if not name.endswith(BEYOND)}
    wanted, slots = schema.by_name(named), opened.generation.body["table"]["slots"]
    odd = sorted(wanted.keys() ^ names)
    if odd:
        raise DamagedError(
            f"{path}: leaf '{odd[0]}': expected the leaves {list(wanted)}, got {sorted(names)}."
        )
    for name, leaf in wanted.items():
        location = in_rows.get(name)
        kind = tuple(arrays[name]["kind"]) if location is None else location.leaf.kind
        inner = casting.raw_spec(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        size = inner.size * inner.dtype.itemsize
        array = name if location is None else name + BEYOND
        saved = arrays[array]["size"] if array in arrays else 0
        saved += 0 if location is None else location.leaf.width * slots
        if kind != schema.kind_of(leaf) or saved != size:
            raise DamagedError(
                f"{path}: leaf '{name}': expected {schema.kind_of(leaf)} of {size} bytes, got "
                f"{kind} of {saved} bytes."
            )
    return {name: in_rows.get(name) for name in wanted}


def _reader(
    opened: OpenedCheckpoint, name: str, location: Location | None, buffers: int
) -> Callable[[memoryview | None], Any]:
    """Returns what fills a memoryview with a leaf's bytes; or, from None, yields them in pieces."""
    store, saved = opened.store, opened.generation
    is_long = name + BEYOND in saved.arrays

    def fill(target: memoryview) -> None:
        if location is None:
            saved.read(name, target)
        elif len(store.table.columns[location.column].leaves) == 1:
            beyond = saved.array(name + BEYOND, np.uint8) if is_long else None
            _fill(store, location.column, buffers, beyond, np.asarray(target, np.uint8))
        else:
            for start, piece in _in_pieces(store, location.column, location.part):
                target[start : start + len(piece)] = piece

    def pieces() -> Iterator[tuple[int, Any]]:
        if location is not None and not is_long:
            yield from _in_pieces(store, location.column, location.part)
            return
        size = saved.arrays[name if location is None else name + BEYOND]["size"]
        size += 0 if location is None else store.slots * location.leaf.width
        target = bytearray(size)
        fill(memoryview(target))
        yield 0, target

    return lambda target: pieces() if target is None else fill(target)


def _in_pieces(store: Store, column: int, part: slice) -> Iterator[tuple[int, Any]]:
    """Yields a part of the rows of a column, after a look at all of them."""
    store.sums.check_column(column)
    width = part.stop - part.start
    for slots in rows.in_parts(np.arange(store.slots), width, memory.PIECE):
        piece = store.take_column(store.version, column, slots, part)
        yield int(slots[0]) * width, piece.reshape(-1).data


def _fill(store: Store, column: int, buffers: int, beyond: Any, target: np.ndarray) -> None:
    """Fills the target with the bytes of a column, checked, and those beyond its rows, if any."""
    width = store.table.columns[column].width
    if beyond is None:
        store.read_columns({column: target.reshape(store.slots, width)})
        return
    inner, capacity = np.zeros((store.slots, width), np.uint8), store.slots // buffers
    store.read_columns({column: inner})
    view = target.reshape(buffers, -1, width)
    view[:, :capacity] = inner.reshape(buffers, capacity, width)
    view[:, capacity:] = beyond.reshape(buffers, -1, width)


# From the path of a storage.


def _reopened(
    opened: OpenedCheckpoint, buffer: Buffer, spec: Item, device: Device, verify: bool
) -> tuple[Any, Any]:
    """Returns the buffer and its state as they were committed; the first write takes the lock."""
    store = opened.store
    if not schema.is_at(opened.path, buffer):
        buffer = dataclasses.replace(buffer, storage=buffer.storage.at(opened.path))
    _check_columns(buffer, spec, opened)
    want = schema.blank(buffer, spec).replace(storage=None)
    if verify:
        opening.check(store, rows=True)
    state = _restored(opened, want, device, has_rows=False)
    if len(store.lost):
        state = _without_lost(opened, buffer, spec, state)
    view = host_rows.view(StoreRows(store, spec, buffer.writer.is_chronological), store.version)
    state = external_items.attach(buffer, state, view)
    return buffer, state if device is None else jax.device_put(state, device)


def _without_lost(
    opened: OpenedCheckpoint, buffer: Buffer, spec: Item, state: BufferState
) -> BufferState:
    """Returns the state without the oldest rows, of which some are gone."""
    store, ring = opened.store, buffer.ring
    held = buffer.writer.held(ring, state.writer)
    is_held = np.asarray(held.holds(ring, jnp.asarray(store.lost, jnp.int32)))
    lost = jnp.asarray(store.lost[is_held])
    if not lost.size:
        return state
    counts = np.zeros(ring.envs, np.int32)
    np.maximum.at(counts, np.asarray(lost % ring.envs), np.asarray(held.before(ring, lost)) + 1)
    if not buffer.writer.per_env:
        counts = np.full_like(counts, counts.max())
    warnings.warn(
        f"{opened.path}: {counts.sum()} of the {int(held.size)} items that generation "
        f"{store.generation} had are gone, the oldest ones: more was written after it than there "
        "is room for beside the ring, and not saved. Save more often, or make the storage with a "
        "larger spare_fraction=.",
        LostWarning,
        stacklevel=2,
    )
    count = counts if buffer.writer.per_env else counts[0]
    return eager.expire(migrate.writable(buffer), state, spec, count)


def _check_columns(buffer: Buffer, spec: Item, opened: OpenedCheckpoint) -> None:
    """Raises unless the rows are those of the description."""
    slots, want, stored = opened.store.slots, columns(spec), opened.generation.columns
    wanted = [(leaf.name, leaf.width) for column in want for leaf in column.leaves]
    got = [(leaf.name, leaf.width) for column in stored for leaf in column.leaves]
    if slots != buffer.capacity or len(stored) != len(want) or got != wanted:
        raise DamagedError(
            f"{opened.path}: expected {buffer.capacity} rows of {[name for name, _ in wanted]}, "
            f"found {slots} of {[name for name, _ in got]}."
        )


# Items of 64 bits, for programs in which JAX keeps 32.


def narrowed(
    load: Callable[[Device], tuple[Any, Any]], path: str, given: bool, device: Device, cast: bool
) -> tuple[Any, Any]:
    """Returns what is loaded; with `cast` its items are converted where JAX would not keep them.

    Args:
        load: loads a buffer and its state to a device.
        path: where they are.
        given: whether the description is one of the user.
        device: where they go.
        cast: whether items are converted, as by `jrb.ReplayBuffer(cast=True)`.
    """
    try:
        return load(device)
    except WideError:
        if not cast:
            raise
    # No other part of a state depends on the dtypes of items.
    with compat.enable_x64():
        buffer, wide = load(None)
        if not isinstance(wide, BufferState) or wide.edits.ndim:
            raise TypeError(f"{path}: cast: expected a single state, got states under vmap.")
        saved = schema.snapshot(buffer, wide)
        items, slots = read.items(buffer, wide), external_items.in_order(saved.plain, wide.writer)
        state = external_items.without(saved.plain, saved.state)
    spec = jax.tree.map(schema.narrow, saved.spec)
    leaves = jax.tree.leaves(casting.kept(items, "load"))
    buffer = schema.loadable(buffer, given and not schema.is_at(path, buffer))
    pieces = external_items.pieces_of(slots, leaves, spec)
    if schema.is_on_host(buffer):
        view = external_items.filled(buffer, spec, pieces)
        return buffer, external_items.attach(buffer, state, view)
    want = schema.blank(buffer, spec)
    return buffer, external_items.joined(buffer, want, state, spec, pieces, device)
