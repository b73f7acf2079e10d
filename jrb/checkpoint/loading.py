"""Loads states from stores: checks names and kinds of leaves first, then rows and arrays."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import migrate
from jrb._core import eager, memory
from jrb._core.packed import RowOrder
from jrb._store import generation, opening, table
from jrb._store.errors import DamagedError, LostWarning
from jrb._store.generation import Generation, Location
from jrb._store.store import Store
from jrb._util import casting, pytree
from jrb._xla import compat
from jrb.checkpoint import descriptions, external_items, manifest, objects, saving, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.external_items import Inward, Pieces
from jrb.checkpoint.manifest import EXTRA
from jrb.checkpoint.schema import BEYOND, PackedLeaf
from jrb.mix import Description, Mix
from jrb.sharding import Sharded
from jrb.state import Buffer, BufferState, Device
from jrb.storages import host_rows
from jrb.storages.memmap import StoreRows, columns
from jrb.types import Item


@dataclasses.dataclass(frozen=True)
class OpenedCheckpoint:
    """A generation of a checkpoint that is being loaded.

    Attributes:
        path: the path of its folder, as the user gave it.
        generation: the open generation.
        promised: for a part, a function that returns the number of the part's generation to which
            the newest common generation refers; None if it is not a part.
    """

    path: str
    generation: Generation
    promised: Callable[[], int | None] | None = None

    @functools.cached_property
    def store(self) -> Store:
        """The store of its rows, of which none has been read."""
        store = opening.store_of(self.generation)
        store.promised = self.promised
        return store

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """The metadata of the state."""
        return self.generation.meta

    def part(self, name: str) -> "OpenedCheckpoint":
        """Returns the opened checkpoint of a part, which is one of several buffers."""
        one = manifest.part(self.path, self.generation, name)

        def promised() -> int | None:
            # Looked up at each call, as there may be a newer common generation by then.
            folder = opening.folder_at(self.path)
            newest = generation.last(folder) if self.promised is None else self.promised()
            named = {} if newest is None else manifest.readable_generations(folder, newest)
            return named.get(name)

        return OpenedCheckpoint(manifest.path_of(self.path, name), one, promised)


# Several buffers, and the shards of one.


def load(
    checkpoint: OpenedCheckpoint, given: Several, example: Item, device: Any, back: Inward
) -> tuple[Any, Any]:
    """Returns the descriptions and the states of a generation."""
    if given is not None:
        descriptions.check(given, "load")
    path, meta, kind = checkpoint.path, checkpoint.meta, str(checkpoint.meta.get("kind"))
    if kind not in (manifest.MIX, manifest.SHARDED, manifest.SEVERAL):
        load_to = lambda device: _load(checkpoint, given, example, device, back)
        return narrowed(load_to, path, given is not None, device, back.cast)
    # Each part is loaded from the generation that the common one refers to, not from its newest.
    names = list(manifest.generations(checkpoint.generation))
    buffers = examples = dict.fromkeys(names)
    if kind == manifest.SEVERAL:
        whole = _shaped(meta["forms"]["buffer"], dict.fromkeys(names))
        if given is not None:
            buffers = descriptions.for_each(whole, given, "load: buffers")
        if example is not None:
            examples = descriptions.for_each(whole, example, "load: examples")
    else:
        plain = None if given is None else descriptions.without_mesh(given)
        cls = Mix if kind == manifest.MIX else Sharded
        saved = descriptions.matched(path, meta["buffer"], plain, cls)
        whole = saved if given is None else given
        buffers = buffers if given is None else descriptions.each(given)
        examples = dict.fromkeys(names, example)
    decodes = descriptions.hook_for_each(whole, back.decode, "load: decode functions")
    items: dict[str, Any] = dict.fromkeys(decodes)
    if back.items is not None:
        items = descriptions.for_each(whole, back.items, "load: items")

    def load_part(name: str, device: Any) -> tuple[Any, Any]:
        inward = dataclasses.replace(back, decode=decodes[name], items=items[name])
        return load(checkpoint.part(name), buffers[name], examples[name], device, inward)

    if isinstance(whole, Sharded):
        # Each process loads its own shards, each to its place on the mesh.
        whole, states = whole.on_mesh(device), {}
        for place, numbers in whole.layout.groups().items():
            for number in numbers:
                _, states[number] = load_part(names[number], place)
        return whole, whole.join(states)
    parts = {name: load_part(name, device) for name in descriptions.each(whole)}
    loaded = {name: part[0] for name, part in parts.items()}
    states = {name: part[1] for name, part in parts.items()}
    if isinstance(whole, Mix):
        return dataclasses.replace(whole, buffers=tuple(loaded.values())), tuple(states.values())
    forms = meta["forms"]
    return _shaped(forms["buffer"], loaded), _shaped(forms["state"], states)


def _shaped(form: Any, parts: dict[str, Any]) -> Any:
    """Returns the parts in a dict or a tuple, as the metadata `form` says."""
    names = form.get("dict") or form.get("fields") or list(map(str, range(form["tuple"])))
    in_order = {name: parts[name] for name in names}
    return in_order if "dict" in form else tuple(in_order.values())


# One buffer.


def narrowed(
    load: Callable[[Device], tuple[Any, Any]], path: str, given: bool, device: Device, cast: bool
) -> tuple[Any, Any]:
    """Loads a buffer and its state; with `cast`, converts items that JAX would not keep."""
    try:
        return load(device)
    except schema.WideError:
        if not cast:
            raise
    # No other part of a state depends on the items' dtypes: load with x64, and replace only items.
    with compat.enable_x64():
        buffer, wide = load(None)
        if not isinstance(wide, BufferState) or wide.edits.ndim:
            raise TypeError(f"{path}: cast: expected a single state, got states under vmap.")
        saved = schema.snapshot(buffer, wide)
        slots = external_items.in_order(saved.plain, wide.writer)
        items = external_items.Items(saved).take(slots)
        state = external_items.without(saved.plain, saved.state)
    narrow = lambda leaf: leaf if casting.is_keys(leaf.dtype) else casting.kept(leaf, "load")
    spec = jax.tree.map(narrow, saved.spec)
    leaves = jax.tree.leaves(casting.kept(items, "load"))
    buffer = schema.loadable(buffer, given and not schema.is_at(path, buffer))
    parts = schema.in_parts(np.arange(len(slots)), pytree.nbytes(spec))
    pieces = ((slots[part], [leaf[part] for leaf in leaves]) for part in parts)
    want = schema.blank(buffer, spec)
    state = external_items.restored(buffer, want, state, spec, pieces, device)
    return buffer, state if device is None else jax.device_put(state, device)


def _load(
    checkpoint: OpenedCheckpoint,
    given: Description | None,
    example: Item,
    device: Device,
    back: Inward,
) -> tuple[Any, Any]:
    """Returns the description and the state of one buffer."""
    path, store, meta = checkpoint.path, checkpoint.store, checkpoint.meta
    form, kind = meta.get("form") or {}, meta.get("kind")
    back.check(path, form)
    if kind not in (saving.BUFFER, saving.STORE):
        raise ValueError(f"{path}: expected a checkpoint of a buffer, got one of kind {kind!r}.")
    buffer, spec = schema.fitting(path, meta, given, example)
    is_kept = form.get("kind") == external_items.KEPT
    if kind == saving.STORE:
        return _reopened(checkpoint, buffer, spec, device, back.verify)
    buffer = schema.loadable(buffer, given is not None)
    want = schema.batched(schema.blank(buffer, spec), tuple(meta["batch"]))
    on_host = schema.is_on_host(buffer)
    opening.check(store, rows=on_host or bool(form))  # else they are checked when read
    pieces: Pieces
    if form:
        seen = external_items.without(schema.on_device(buffer), want)
        state = _restored(checkpoint, seen, device, in_rows=False)
        slots = external_items.in_order(buffer, state.writer) if is_kept else None
        if buffer.storage.of_objects:
            saved = checkpoint.generation
            storage = objects.restored(path, saved, buffer, slots, back.items, device)
            return buffer, state.replace(storage=storage)
        if slots is not None:
            pieces = external_items.kept_pieces(path, form, slots, spec, back.items)
        else:
            saved = checkpoint.generation
            pieces = external_items.decoded(path, store, saved, form, spec, back.decode)
    else:
        state = _restored(checkpoint, want, device, with_rows=not on_host)
        if not on_host:
            return buffer, state
        pieces = _all_rows(store, spec)  # copied unchanged, except zeros that were never written
    return buffer, external_items.restored(buffer, want, state, spec, pieces, device)


def _all_rows(store: Store, spec: Item) -> Pieces:
    """Yields all slots up to the last one written, and their items, a few megabytes at a time."""
    specs = jax.tree.leaves(external_items.host_spec(spec))
    width = sum(column.width for column in store.table.columns)
    for slots in schema.in_parts(np.arange(store.reach), width):
        rows = store.take(store.version, [slots] * len(store.table.columns))
        yield slots, external_items.viewed(rows, specs)


# A state of its leaves.


def _restored(
    checkpoint: OpenedCheckpoint,
    want: BufferState,
    device: Device,
    in_rows: bool = True,
    with_rows: bool = True,
) -> BufferState:
    """Returns the saved state of the specs `want`, with its arrays on a device.

    With `in_rows=False`, none of its leaves is saved in rows; with `with_rows=False`, leaves that
    are in rows are left empty.
    """
    # Files have no nodes of trees and no packed arrays, which depend on backend and version.
    specs = schema.with_tree_leaves(want)
    leaves = schema.by_name(schema.named(specs))
    places = _places(checkpoint, leaves, in_rows)
    inside: dict[int, tuple[Any, dict[str, Any]]] = {}  # arrays, and the leaves that are in them
    for name, leaf in leaves.items():
        spec = specs.storage.arrays[leaf.array] if isinstance(leaf, PackedLeaf) else leaf
        inside.setdefault(id(spec), (spec, {}))[1][name] = leaf
    placed: dict[int, Any] = {}
    for spec, its in inside.values():
        raw, (first, *_) = casting.raw_spec(spec), its
        if places[first] is not None and not with_rows:
            placed[id(spec)] = np.zeros(0, np.uint8)
            continue
        # Aligned, so that XLA takes this memory on the host without a copy.
        array = table.aligned(raw.shape, raw.dtype)
        if array.size:
            order = specs.storage.order if isinstance(its[first], PackedLeaf) else RowOrder()
            _fill(checkpoint, array, its, places, order, int(np.prod(want.edits.shape, dtype=int)))
        placed[id(spec)] = casting.wrapped(memory.placed(array, device), spec.dtype)
    return schema.with_trees(want, jax.tree.map(lambda leaf: placed[id(leaf)], specs))


def _places(
    checkpoint: OpenedCheckpoint, leaves: dict[str, Any], in_rows: bool
) -> dict[str, Location | None]:
    """Returns the location of each leaf in the rows; None for leaves that are saved as arrays."""
    path, arrays = checkpoint.path, checkpoint.generation.arrays
    locations = checkpoint.generation.leaves if in_rows else {}
    names = {name for name in (*locations, *arrays) if not name.startswith(".")}
    names = {name for name in names if not name.endswith(BEYOND)}
    # Both a leaf that is missing, and a leaf that the state does not have, are errors.
    odd = sorted(leaves.keys() ^ names)
    if odd:
        raise DamagedError(
            f"{path}: leaf '{odd[0]}': expected the leaves {list(leaves)}, got {sorted(names)}."
        )
    for name, leaf in leaves.items():
        location = locations.get(name)
        kind = tuple(arrays[name]["kind"]) if location is None else location.leaf.kind
        raw = casting.raw_spec(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        size = raw.size * raw.dtype.itemsize
        array = name if location is None else name + BEYOND
        saved = arrays[array]["size"] if array in arrays else 0
        saved += 0 if location is None else location.leaf.width * checkpoint.store.slots
        if kind != schema.kind_of(leaf) or saved != size:
            raise DamagedError(
                f"{path}: leaf '{name}': expected {schema.kind_of(leaf)} of {size} bytes, got "
                f"{kind} of {saved} bytes."
            )
    return {name: locations.get(name) for name in leaves}


def _fill(
    checkpoint: OpenedCheckpoint,
    array: np.ndarray,
    leaves: dict[str, Any],
    places: dict[str, Location | None],
    order: RowOrder,
    buffers: int,
) -> None:
    """Fills an array with the saved bytes of its leaf, or of the leaves that are packed in it."""
    store, saved = checkpoint.store, checkpoint.generation
    first, location = next((name, places[name]) for name in leaves)
    if location is None:
        saved.read(first, memory.view(array))
        return
    is_packed = isinstance(leaves[first], PackedLeaf)
    own = schema.packed_column(leaves).leaves if is_packed else (location.leaf,)
    width = sum(leaf.width for leaf in own)
    target = np.frombuffer(memory.view(array), np.uint8).reshape(buffers, -1, width)
    capacity = store.slots // buffers
    if first + BEYOND in saved.arrays:  # more rows than there are slots
        target[:, capacity:] = saved.array(first + BEYOND, np.uint8).reshape(buffers, -1, width)
    column = store.table.columns[location.column].leaves
    # If file and array have the same leaves in each row, the file is read directly into the array.
    is_alike = [(leaf.name, leaf.width) for leaf in column] == [(it.name, it.width) for it in own]
    if is_alike and order.envs is None and capacity == target.shape[1]:
        store.read_columns({location.column: target.reshape(store.slots, width)})
        return
    # Otherwise the leaves were packed differently when they were saved: copy them one by one.
    for name, leaf in leaves.items():
        part, location = leaf.part if is_packed else slice(0, width), places[name]
        if location is None:
            raise DamagedError(f"{checkpoint.path}: leaf '{name}': expected rows, got an array.")
        store.sums.check_column(location.column)
        for slots in schema.in_parts(np.arange(store.slots), part.stop - part.start, memory.PIECE):
            piece = store.take_column(store.version, location.column, slots, location.part)
            target[(*np.divmod(order.places(slots, capacity), capacity), part)] = piece


# From the path of a storage.


def _reopened(
    checkpoint: OpenedCheckpoint, buffer: Buffer, spec: Item, device: Device, verify: bool
) -> tuple[Any, Any]:
    """Returns the buffer and its state as they were committed; the first write takes the lock."""
    store = checkpoint.store
    # The folder may have been moved since.
    if not schema.is_at(checkpoint.path, buffer):
        buffer = dataclasses.replace(buffer, storage=buffer.storage.at(checkpoint.path))
    slots, want, stored = store.slots, columns(spec), checkpoint.generation.columns
    expected = [(leaf.name, leaf.width) for column in want for leaf in column.leaves]
    got = [(leaf.name, leaf.width) for column in stored for leaf in column.leaves]
    if slots != buffer.capacity or len(stored) != len(want) or got != expected:
        raise DamagedError(
            f"{checkpoint.path}: expected {buffer.capacity} rows of "
            f"{[name for name, _ in expected]}, found {slots} of {[name for name, _ in got]}."
        )
    if verify:
        opening.check(store, rows=True)
    specs = schema.blank(buffer, spec).replace(storage=None)
    state = _restored(checkpoint, specs, device, in_rows=False)
    state = _without_lost(checkpoint, buffer, spec, state) if len(store.lost) else state
    view = host_rows.view(StoreRows(store, spec, buffer.writer.is_chronological), store.version)
    state = external_items.attach(buffer, state, view)
    return buffer, state if device is None else jax.device_put(state, device)


def _without_lost(
    checkpoint: OpenedCheckpoint, buffer: Buffer, spec: Item, state: BufferState
) -> BufferState:
    """Returns the state without its oldest rows, up to the newest one that is lost."""
    store, ring = checkpoint.store, buffer.ring
    held = buffer.writer.held(ring, state.writer)
    is_held = np.asarray(held.holds(ring, jnp.asarray(store.lost, jnp.int32)))
    lost = jnp.asarray(store.lost[is_held])
    if not lost.size:
        return state
    counts = np.zeros(ring.envs, np.int32)
    # In each environment, all rows up to the newest lost one are removed, as rings have no gaps.
    np.maximum.at(counts, np.asarray(lost % ring.envs), np.asarray(held.before(ring, lost)) + 1)
    if not buffer.writer.per_env:
        # One clock for all: rows leave for all environments together.
        counts = np.full_like(counts, counts.max())
    warnings.warn(
        f"{checkpoint.path}: {counts.sum()} of the {int(held.size)} items that generation "
        f"{store.generation} had are gone, the oldest ones: more was written after it than there "
        "is room for beside the ring, and not saved. Save more often, or make the storage with a "
        "larger spare_fraction=.",
        LostWarning,
        stacklevel=2,
    )
    count = counts if buffer.writer.per_env else counts[0]
    return eager.expire(migrate.writable(buffer), state, spec, count)


# Parameters and other data of the user.


def extra(checkpoint: OpenedCheckpoint, example: Item) -> Any:
    """Returns the saved `extra`, each leaf as a number or an array like that of the example."""
    opening.check_saved(checkpoint.generation)
    path, names = checkpoint.path, checkpoint.meta.get("extra")
    if names is None:
        raise ValueError(
            f"{path}: extra: expected a checkpoint that was saved with extra=, got one without."
        )
    examples = schema.by_name(example)
    odd = sorted(set(names) ^ {EXTRA + name for name in examples})
    if odd:
        saved = [name.removeprefix(EXTRA) for name in names]
        raise ValueError(
            f"{path}: extra: leaf '{odd[0].removeprefix(EXTRA)}': expected the leaves {saved}, "
            f"got an example with {list(examples)}."
        )
    leaves = [_extra_leaf(checkpoint.generation, *each) for each in examples.items()]
    return jax.tree.unflatten(jax.tree.structure(example), leaves)


_SORTS = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}


def _extra_leaf(saved: Generation, name: str, example: Any) -> Any:
    """Returns a Python number, a NumPy array, or a JAX array on the device of the example."""
    kind = saved.arrays[EXTRA + name]["kind"]
    is_spec = isinstance(example, jax.ShapeDtypeStruct)
    spec: Any = example if is_spec else saving.extra_array(name, example)
    sort = next((sort for type_, sort in _SORTS.items() if isinstance(example, type_)), None)
    if sort is not None and kind[1:] == ["[]"]:
        # Another width is accepted: a count of steps that went through `jit` has 32 bits.
        with descriptions.read_from(saved.path):
            of_saved = descriptions.dtype_of(kind[0])
        spec = np.zeros((), of_saved) if jnp.issubdtype(of_saved, sort) else spec
    if kind != list(schema.kind_of(spec)):
        raise ValueError(
            f"{saved.path}: extra: leaf '{name}': expected {kind} as it was saved, got "
            f"an example of {list(schema.kind_of(spec))}."
        )
    raw = casting.raw_spec(spec)
    array = saved.array(EXTRA + name, raw.dtype).reshape(raw.shape)
    if sort is not None:
        return type(example)(array.item())
    if isinstance(example, np.ndarray | np.generic):
        return array if isinstance(example, np.ndarray) else array[()]
    device = example.sharding if compat.is_committed(example) else None
    return jax.device_put(casting.wrapped(jnp.asarray(array), spec.dtype), device)
