"""Loads states from stores: checks names and kinds of arrays first, then reads them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import sum_tree
from jrb._core import memory
from jrb._store.block_store import BlockStore
from jrb._store.blocks import BlockArray, aligned
from jrb._store.files import DamagedError
from jrb._store.threads import run_all
from jrb._util import casting, pytree
from jrb._xla import compat
from jrb.checkpoint import descriptions, external_items, manifest, saving, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.external_items import Inward, Pieces
from jrb.checkpoint.manifest import EXTRA
from jrb.mix import Description, Mix
from jrb.sharding import Sharded
from jrb.state import Buffer, BufferState, Device
from jrb.storages import host_rows
from jrb.storages.memmap import ITEMS, item_sources
from jrb.types import Item


@dataclasses.dataclass(frozen=True)
class OpenedCheckpoint:
    """A generation that is being loaded, or a part of it.

    Attributes:
        path: the path of its folder, as the user gave it.
        store: the opened generation.
        meta: the metadata of the state.
        prefix: the beginning of the names of its arrays.
    """

    path: str
    store: BlockStore
    meta: dict[str, Any]
    prefix: str = ""

    def part(self, name: str) -> "OpenedCheckpoint":
        """Returns one of several buffers."""
        prefix = manifest.prefix_of(self.prefix, name)
        return OpenedCheckpoint(self.path, self.store, self.meta["parts"][name], prefix)

    def kinds(self) -> dict[str, tuple[Any, int]]:
        """Returns the kind and the bytes of each of its arrays, by name without the prefix."""
        small, large = self.store.small.items(), self.store.arrays.items()
        kinds = {name: (it.kind, len(it.data)) for name, it in small}
        kinds |= {name: (it.spec.kind, it.spec.rows * it.spec.width) for name, it in large}
        own = {name: kind for name, kind in kinds.items() if name.startswith(self.prefix)}
        return {name.removeprefix(self.prefix): kind for name, kind in own.items()}

    def fill(self, name: str, target: np.ndarray) -> None:
        """Fills an array of the same number of bytes with the saved ones, and checks them."""
        name, data = self.prefix + name, memory.view(target)
        if not len(data):
            return
        if name in self.store.small:
            data[:] = self.store.small[name].data
        else:
            width = self.store.arrays[name].spec.width
            self.store.read({name: np.frombuffer(data, np.uint8).reshape(-1, width)})


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
        return load_with_cast(load_to, path, given is not None, device, back.cast)
    if kind == manifest.SEVERAL:
        names = list(meta["parts"])
        whole: Any = dict.fromkeys(names) if meta["is_dict"] else (None,) * len(names)
    else:
        plain = None if given is None else descriptions.without_mesh(given)
        cls = Mix if kind == manifest.MIX else Sharded
        saved = descriptions.matched(path, meta["buffer"], plain, cls)
        whole = saved if given is None else given
    names = list(descriptions.each(whole))
    buffers = items = dict.fromkeys(names)
    examples = dict.fromkeys(names, example)
    if kind == manifest.SEVERAL and example is not None:
        examples = descriptions.for_each(whole, example, "load: examples")
    if given is not None:
        part = given.part if isinstance(given, Sharded) else given
        buffers = descriptions.for_each(whole, part, "load: buffers")
    if back.items is not None:
        items = descriptions.for_each(whole, back.items, "load: items")
    decodes = descriptions.hook_for_each(whole, back.decode, "load: decode functions")

    def load_part(name: str, device: Any) -> tuple[Any, Any]:
        inward = dataclasses.replace(back, decode=decodes[name], items=items[name])
        return load(checkpoint.part(name), buffers[name], examples[name], device, inward)

    if not isinstance(whole, Sharded):
        return descriptions.combine(whole, {name: load_part(name, device) for name in names})
    # Each process loads its own shards, each to its place on the mesh.
    whole, states = whole.on_mesh(device), {}
    for place, numbers in whole.layout.groups().items():
        for number in numbers:
            _, states[number] = load_part(names[number], place)
    return whole, whole.join(states)


# One buffer.


def load_with_cast(
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
        slots = external_items.in_order(saved.buffer, wide.writer)
        items = external_items.Items(saved).take(slots)
        state = external_items.without(saved.buffer, saved.state)
    narrow = lambda leaf: (
        leaf if casting.is_keys(leaf.dtype) else casting.cast_for_jax(leaf, "load")
    )
    spec = jax.tree.map(narrow, saved.spec)
    leaves = jax.tree.leaves(casting.cast_for_jax(items, "load"))
    buffer = schema.loadable(buffer, given and not schema.is_at(path, buffer))
    pieces = external_items.pieces_of(slots, leaves, spec)
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
    path, meta = checkpoint.path, checkpoint.meta
    form, kind = meta.get("form") or {}, meta.get("kind")
    back.check(path, form)
    if kind not in (saving.BUFFER, saving.STORE):
        raise ValueError(f"{path}: expected a checkpoint of a buffer, got one of kind {kind!r}.")
    buffer, spec = schema.fitting(path, meta, given, example)
    if kind == saving.STORE:
        return _reopened(checkpoint, buffer, spec, device, back.verify)
    buffer = schema.loadable(buffer, given is not None)
    want = schema.batched(schema.blank(buffer, spec), tuple(meta["batch"]))
    arrays = external_items.without(buffer, want) if form else want
    state = restore_arrays(path, checkpoint.kinds(), checkpoint.fill, arrays, device)
    is_kept = form.get("kind") == external_items.KEPT
    slots = external_items.in_order(buffer, state.writer) if is_kept else None
    if buffer.storage.of_objects:
        data = None
        if slots is None:
            data = checkpoint.store.array_bytes(
                checkpoint.prefix + external_items.OBJECT_ARRAY
            ).data
        storage = external_items.restored_objects(path, data, buffer, slots, back.items, device)
        return buffer, state.replace(storage=storage)
    pieces: Pieces
    if slots is not None:
        pieces = external_items.kept_pieces(path, form, slots, spec, back.items)
    elif form:
        store, prefix = checkpoint.store, checkpoint.prefix
        pieces = external_items.decoded(path, store, prefix, form, spec, back.decode)
    elif schema.is_on_host(buffer):
        pieces = _item_pieces(_item_arrays(checkpoint, spec, buffer.capacity), spec)
    else:
        return buffer, state
    return buffer, external_items.restored(buffer, want, state, spec, pieces, device)


def _item_arrays(checkpoint: OpenedCheckpoint, spec: Item, capacity: int) -> list[BlockArray]:
    """Returns the arrays of the leaves of items; raises unless they are those of the spec."""
    sources = item_sources(spec, capacity)
    expected = {name: (source.kind, source.rows * source.width) for name, source in sources.items()}
    got = {name: kind for name, kind in checkpoint.kinds().items() if name.startswith(ITEMS)}
    if got != expected:
        raise DamagedError(f"{checkpoint.path}: expected the items {expected}, got {got}.")
    return [checkpoint.store.arrays[checkpoint.prefix + name] for name in sources]


def _item_pieces(arrays: list[BlockArray], spec: Item) -> Pieces:
    """Yields slots, up to the last one written, and the checked leaves of their items."""
    specs = jax.tree.leaves(external_items.host_spec(spec))
    # All arrays have a block that begins at a multiple of their largest block.
    largest = max(array.spec.block for array in arrays)
    step = largest * max(1, schema.PIECE // max(largest * pytree.nbytes(spec), 1))
    reach = max(array.reach for array in arrays)
    for start in range(0, reach, step):
        count = min(step, reach - start)
        rows = [np.empty((count, array.spec.width), np.uint8) for array in arrays]
        run_all(
            [
                functools.partial(array.fill, target, start // array.spec.block)
                for array, target in zip(arrays, rows, strict=True)
            ]
        )
        yield np.arange(start, start + count), external_items.viewed(rows, specs)


# A state of its arrays.


def restore_arrays(
    path: str,
    kinds: dict[str, tuple[Any, int]],
    fill: Callable[[str, np.ndarray], None],
    want: BufferState,
    device: Device,
) -> BufferState:
    """Returns the saved state of the specs `want`, with its arrays on a device.

    Args:
        path: for messages.
        kinds: the kind and the bytes of each saved array, by name.
        fill: fills an array of the same number of bytes with the saved one of a name.
        want: the specs of the state.
        device: a device or a sharding.
    """
    # Files have no nodes of trees, which depend on the backend.
    specs = schema.with_tree_leaves(want)
    leaves, labels = schema.by_name(specs), schema.labels(want)
    # All arrays are compared with the leaves before memory is allocated for any.
    names = {name for name in kinds if not name.startswith((".", ITEMS))}
    odd = sorted(leaves.keys() ^ names)
    if odd:
        raise DamagedError(
            f"{path}: leaf '{odd[0]}': expected the leaves {list(leaves)}, got {sorted(names)}."
        )
    raws = {name: casting.raw_spec(leaf) for name, leaf in leaves.items()}
    for name, leaf in leaves.items():
        size, (kind, saved) = raws[name].size * raws[name].dtype.itemsize, kinds[name]
        if tuple(kind) != schema.kind_of(leaf) or saved != size:
            raise DamagedError(
                f"{path}: leaf '{labels.get(name, name)}': expected {schema.kind_of(leaf)} of "
                f"{size} bytes, got {kind} of {saved} bytes."
            )
    placed: list[Any] = []
    for name, leaf in leaves.items():
        # Aligned, so that XLA takes this memory on the host without a copy.
        array = aligned(raws[name].shape, raws[name].dtype)
        fill(name, array)
        placed.append(casting.wrap_words(memory.put_on_device(array, device), leaf.dtype))
    state = jax.tree.unflatten(jax.tree.structure(specs), placed)

    def with_nodes(spec: Any, part: Any) -> Any:
        if not sum_tree.is_tree(spec):
            return part
        # The nodes above are computed again, with the branching of this backend.
        return sum_tree.over(spec.capacity, spec.branching, spec.reduction, part)

    return jax.tree.map(with_nodes, want, state, is_leaf=sum_tree.is_tree)


# From the path of a storage.


def _reopened(
    checkpoint: OpenedCheckpoint, buffer: Buffer, spec: Item, device: Device, verify: bool
) -> tuple[Any, Any]:
    """Returns the buffer and its state as they were committed; the first write takes the lock."""
    # The folder may have been moved since.
    if not schema.is_at(checkpoint.path, buffer):
        buffer = dataclasses.replace(buffer, storage=buffer.storage.at(checkpoint.path))
    arrays = _item_arrays(checkpoint, spec, buffer.capacity)
    if verify:
        blocks = [(array, block) for array in arrays for block in range(array.spec.num_blocks)]
        run_all([functools.partial(array.read_block, block) for array, block in blocks])
    want, path = schema.blank(buffer, spec), checkpoint.path
    state = restore_arrays(path, checkpoint.kinds(), checkpoint.fill, want, device)
    view = host_rows.view(buffer.storage.open_rows(checkpoint.store, buffer.capacity, spec))
    state = external_items.attach(buffer, state, view)
    return buffer, state if device is None else jax.device_put(state, device)


# Parameters and other data of the user.


def extra(checkpoint: OpenedCheckpoint, example: Item) -> Any:
    """Returns the saved `extra`, each leaf as a number or an array like that of the example."""
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
    kinds = checkpoint.kinds()
    leaves = [
        _extra_leaf(checkpoint, name, kinds[EXTRA + name][0], example)
        for name, example in examples.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(example), leaves)


_SORTS = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}


def _extra_leaf(saved: OpenedCheckpoint, name: str, kind: Any, example: Any) -> Any:
    """Returns a Python number, a NumPy array, or a JAX array on the device of the example."""
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
    array = np.empty(raw.shape, raw.dtype)
    saved.fill(EXTRA + name, array)
    if sort is not None:
        return type(example)(array.item())
    if isinstance(example, np.ndarray | np.generic):
        return array if isinstance(example, np.ndarray) else array[()]
    device = example.sharding if compat.is_committed(example) else None
    return jax.device_put(casting.wrap_words(jnp.asarray(array), spec.dtype), device)
