"""Loads states from stores: checks names and kinds of arrays first, then reads them."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import sum_tree
from jrb._core import eager, memory, steps
from jrb._store.block_store import BlockStore
from jrb._store.blocks import BlockArray, allocate_aligned, is_zero
from jrb._store.files import DamagedError
from jrb._store.threads import run_all
from jrb._util import casting, pytree
from jrb._xla import compat
from jrb._xla.compiling import by_description
from jrb.checkpoint import descriptions, manifest, saving, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.manifest import EXTRA
from jrb.checkpoint.saving import Hook, check_result, sampled_indices
from jrb.migrate import pieces
from jrb.mix import Description, Mix
from jrb.sharding import Sharded
from jrb.state import Buffer, BufferState, Device
from jrb.storages import DeviceStorage, compressed
from jrb.storages.compressed import CompressedRows, CompressedStorage
from jrb.storages.device import next_observation_rows, shared_leaves
from jrb.storages.host_rows import bytes_of
from jrb.storages.memmap import ENTRIES, ITEMS, item_sources
from jrb.types import Item
from jrb.types.messages import PartState, WritePlan

Pieces = Iterable[tuple[np.ndarray, list[np.ndarray]]]
"""Pairs of the indices of rows, and the leaves of the rows' items; see `schema.ItemReader`."""

_MEND = "Pass what jrb.items(buffer, state) gave when it was saved."
_NOWHERE = 2**31 - 1  # a slot that is in no array


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The options of a load about items; see `jrb.checkpoint.load`."""

    decode: Any = None
    items: Item = None
    verify: bool = True
    cast: bool = False

    def check(self, path: str, form: dict[str, Any]) -> None:
        """Raises unless these options fit a checkpoint; `form` is the metadata of its items."""
        name = form.get("encode")
        if name is not None and self.decode is None:
            raise ValueError(
                f"{path}: expected decode=, as the items were encoded by {name}. Pass its inverse: "
                "load(path, decode=...)."
            )
        if name is None and self.decode is not None:
            raise ValueError(
                f"{path}: decode: expected None, as the items were saved without encode=, got "
                f"{saving.function_name(self.decode)}. Leave it out."
            )
        if name is not None and not callable(self.decode):
            raise TypeError(f"{path}: decode: expected a function, got {self.decode!r}.")
        is_needed = form.get("kind") == saving.LEFT_OUT
        if is_needed and self.items is None:
            raise ValueError(
                f"{path}: expected items=, as it was saved with items=False. Pass what "
                "jrb.items(buffer, state) gave then: load(path, items=...)."
            )
        if not is_needed and self.items is not None:
            raise ValueError(f"{path}: items: expected None, as the items are there. Leave it out.")


AS_SAVED = LoadOptions()


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
    checkpoint: OpenedCheckpoint, given: Several, example: Item, device: Any, options: LoadOptions
) -> tuple[Any, Any]:
    """Returns the descriptions and the states of a generation."""
    if given is not None:
        descriptions.check_buffers(given, "load")
    path, meta, kind = checkpoint.path, checkpoint.meta, str(checkpoint.meta.get("kind"))
    if kind not in (manifest.MIX, manifest.SHARDED, manifest.SEVERAL):
        load_to = lambda device: _load_buffer(checkpoint, given, example, device, options)
        return load_with_cast(load_to, path, given is not None, device, options.cast)
    # Find the description of the whole, or a container of the saved form.
    if kind == manifest.SEVERAL:
        names = list(meta["parts"])
        whole: Any = dict.fromkeys(names) if meta["is_dict"] else (None,) * len(names)
    else:
        plain = None if given is None else descriptions.without_mesh(given)
        cls = Mix if kind == manifest.MIX else Sharded
        saved = descriptions.match_description(path, meta["buffer"], plain, cls)
        whole = saved if given is None else given
    # Give each part its own share of the arguments.
    names = list(descriptions.buffers_by_name(whole))
    buffers = items = dict.fromkeys(names)
    examples = dict.fromkeys(names, example)
    if kind == manifest.SEVERAL and example is not None:
        examples = descriptions.match_by_name(whole, example, "load: examples")
    if given is not None:
        part = given.part if isinstance(given, Sharded) else given
        buffers = descriptions.match_by_name(whole, part, "load: buffers")
    if options.items is not None:
        items = descriptions.match_by_name(whole, options.items, "load: items")
    decodes = descriptions.functions_by_name(whole, options.decode, "load: decode functions")

    def load_part(name: str, device: Any) -> tuple[Any, Any]:
        inward = dataclasses.replace(options, decode=decodes[name], items=items[name])
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
        slots = schema.held_slots(saved.buffer, wide.writer)
        items = schema.ItemReader(saved).read(slots)
        state = schema.without_items(saved.buffer, saved.state)
    # Put the narrow items into a state of the narrow specs.
    narrow = lambda leaf: (
        leaf if casting.is_keys(leaf.dtype) else casting.cast_for_jax(leaf, "load")
    )
    spec = jax.tree.map(narrow, saved.spec)
    leaves = jax.tree.leaves(casting.cast_for_jax(items, "load"))
    buffer = schema.choose_target(buffer, given and not schema.is_at(path, buffer))
    parts = split_items(slots, leaves, spec)
    want = schema.blank(buffer, spec)
    state = restore_items(buffer, want, state, spec, parts, device)
    return buffer, state if device is None else jax.device_put(state, device)


def _load_buffer(
    checkpoint: OpenedCheckpoint,
    given: Description | None,
    example: Item,
    device: Device,
    options: LoadOptions,
) -> tuple[Any, Any]:
    path, meta = checkpoint.path, checkpoint.meta
    form, kind = meta.get("form") or {}, meta.get("kind")
    options.check(path, form)
    if kind not in (saving.BUFFER, saving.STORE):
        raise ValueError(f"{path}: expected a checkpoint of a buffer, got one of kind {kind!r}.")
    buffer, spec = schema.match_specs(path, meta, given, example)
    if kind == saving.STORE:
        return _open_storage(checkpoint, buffer, spec, device, options.verify)
    buffer = schema.choose_target(buffer, given is not None)
    # Restore the arrays of the state first, then the items that are not among them.
    want = schema.add_batch_axes(schema.blank(buffer, spec), tuple(meta["batch"]))
    arrays = schema.without_items(buffer, want) if form else want
    state = restore_arrays(path, checkpoint.kinds(), checkpoint.fill, arrays, device)
    if buffer.storage.of_objects:
        storage = _load_objects(checkpoint, buffer, state, options, device)
        return buffer, state.replace(storage=storage)
    if isinstance(buffer.storage, CompressedStorage) and not form:
        return buffer, attach_rows(buffer, state, _load_compressed(checkpoint, buffer, spec), 0)
    # Choose the source of the items.
    if form.get("kind") == saving.LEFT_OUT:
        slots = schema.held_slots(buffer, state.writer)
        parts = _check_given_items(path, form, slots, spec, options.items)
    elif form:
        parts = _decode_pieces(checkpoint, spec, options.decode)
    elif schema.is_on_host(buffer):
        parts = _read_pieces_on_host(checkpoint, spec, buffer.capacity)
    else:
        return buffer, state
    return buffer, restore_items(buffer, want, state, spec, parts, device)


def _load_objects(
    checkpoint: OpenedCheckpoint,
    buffer: Buffer,
    state: BufferState,
    options: LoadOptions,
    device: Device,
) -> Any:
    """Returns the storage's state with the saved objects, or with those that the user has kept."""
    path, form = checkpoint.path, checkpoint.meta["form"]
    if form["kind"] != saving.LEFT_OUT:
        data = checkpoint.store.array_bytes(checkpoint.prefix + saving.OBJECT_ARRAY).data
        slots, objects = descriptions.unpack_objects(path, data, device)
    else:
        slots, objects = schema.held_slots(buffer, state.writer), options.items
        if not isinstance(objects, list | tuple):
            raise TypeError(
                f"{path}: items: expected a list, got {type(objects).__name__}. {_MEND}"
            )
        if len(objects) != len(slots):
            raise ValueError(
                f"{path}: items: expected {len(slots)} objects, got {len(objects)}. {_MEND}"
            )
    view = eager.init(buffer, {}, None).storage
    return view.with_rows(view.rows, view.rows.edit(view.version, slots, list(objects)))


def _load_compressed(checkpoint: OpenedCheckpoint, buffer: Buffer, spec: Item) -> CompressedRows:
    """Returns rows as they were saved, of which those that are compressed stay so."""
    rows = eager.init(buffer, spec, None).storage.rows
    sources, kinds = item_sources(spec, rows.capacity), checkpoint.kinds()
    for number, (name, want) in enumerate(sources.items()):
        kind, is_compressed = kinds.get(name), rows.is_compressed[number]
        if kind is None or (not is_compressed and kind != (want.kind, want.rows * want.width)):
            raise DamagedError(f"{checkpoint.path}: {want.label}: got an array of kind {kind}.")
        if is_compressed:
            compressed.load_frames(checkpoint.store.arrays[checkpoint.prefix + name], rows, number)
        else:
            checkpoint.fill(name, rows.columns[number])
    return rows


# The items of a buffer, in pieces.


def split_items(slots: np.ndarray, leaves: list[np.ndarray], spec: Item) -> Pieces:
    """Yields pieces of some megabytes of items in memory: slots, and their items."""
    for part in pieces(np.arange(len(slots)), pytree.nbytes(spec)):
        yield slots[part], [leaf[part] for leaf in leaves]


def _check_given_items(
    path: str, form: dict[str, Any], slots: np.ndarray, spec: Item, items: Item
) -> Pieces:
    """Checks the items of a user, and returns pieces of them."""
    want = schema.add_batch_axes(schema.host_spec(spec), (len(slots),))
    pytree.check_like(want, items, f"{path}: items", _MEND)
    leaves, sampled = list(map(np.asarray, jax.tree.leaves(items))), sampled_indices(len(slots))
    sums = [zlib.crc32(bytes_of(leaf[sampled], len(sampled)).tobytes()) for leaf in leaves]
    for name, got, expected in zip(pytree.leaf_names(spec), sums, form["sums"], strict=True):
        if got != expected:
            raise ValueError(
                f"{path}: items: leaf '{name}': expected the items that were held, oldest first, "
                f"got others. {_MEND}"
            )
    return split_items(slots, leaves, spec)


def _decode_pieces(checkpoint: OpenedCheckpoint, spec: Item, decode: Hook) -> Pieces:
    """Yields indices of rows and the leaves of their decoded items; skips items of zeros."""
    with descriptions.read_from(checkpoint.path):
        structure = descriptions.decode_structure(checkpoint.meta["form"]["structure"])
    store, name = checkpoint.store, checkpoint.prefix + saving.ENCODED_ARRAY
    array, item_spec, specs = store.arrays[name], schema.host_spec(spec), jax.tree.leaves(structure)
    ends = np.cumsum([pytree.nbytes(leaf) for leaf in specs])
    for block in np.flatnonzero(store.hashes[name]).tolist():
        start, stop = array.spec.rows_of(block, block)
        columns = np.split(array.read_block(block).reshape(stop - start, -1), ends[:-1], axis=1)
        leaves = _leaves_of_bytes(columns, specs)
        items = decode(jax.tree.unflatten(jax.tree.structure(structure), leaves))
        yield np.arange(start, stop), check_result(items, item_spec, stop - start, "decode")


def _leaves_of_bytes(rows: list[np.ndarray], specs: list[Any]) -> list[np.ndarray]:
    """Returns the leaves `[B, ...]` of these specs that have the bytes `rows`."""
    return [
        np.ascontiguousarray(row).view(spec.dtype).reshape(len(row), *spec.shape)
        for row, spec in zip(rows, specs, strict=True)
    ]


def _item_arrays(
    checkpoint: OpenedCheckpoint, spec: Item, capacity: int, are_linked: bool = False
) -> list[BlockArray]:
    """Returns the arrays of the leaves of items; raises unless they are those of the spec."""
    sources = item_sources(spec, capacity, are_linked)
    expected = {name: (source.kind, source.rows * source.width) for name, source in sources.items()}
    kinds = checkpoint.kinds().items()
    got = {name: kind for name, kind in kinds if name.startswith((ITEMS, ENTRIES))}
    if got != expected:
        raise DamagedError(f"{checkpoint.path}: expected the items {expected}, got {got}.")
    return [checkpoint.store.arrays[checkpoint.prefix + name] for name in sources]


def _read_pieces_on_host(checkpoint: OpenedCheckpoint, spec: Item, capacity: int) -> Pieces:
    """Yields slots, up to the last one written, and the checked leaves of their items."""
    arrays = _item_arrays(checkpoint, spec, capacity)
    specs = jax.tree.leaves(schema.host_spec(spec))
    # All arrays have a block that begins at a multiple of their largest block.
    largest = max(array.spec.block for array in arrays)
    step = largest * max(1, schema.PIECE // max(largest * pytree.nbytes(spec), 1))
    reach = max(array.reach for array in arrays)
    for start in range(0, reach, step):
        count = min(step, reach - start)
        rows = [np.empty((count, array.spec.width), np.uint8) for array in arrays]
        fills = [
            functools.partial(array.fill, target, start // array.spec.block)
            for array, target in zip(arrays, rows, strict=True)
        ]
        run_all(fills)
        yield np.arange(start, start + count), _leaves_of_bytes(rows, specs)


# Items that go back into a state.


def restore_items(
    buffer: Buffer, want: Any, state: Any, spec: Item, parts: Pieces, device: Device
) -> Any:
    """Returns the state with the items of all pieces; rows that are in no piece are zeros.

    `want` has the specs of the whole state, and is not used for items on the host.
    """
    if schema.is_on_host(buffer):
        host_rows, version = eager.init(buffer, spec, None).storage.rows, 0
        for slots, leaves in parts:
            # Rows that are not written read as zeros, and take no disk.
            if not all(is_zero(bytes_of(leaf, len(leaf))) for leaf in leaves):
                raws = zip(leaves, host_rows.raw, strict=True)
                words = [leaf.view(raw.dtype) for leaf, raw in raws]
                version = host_rows.put(version, slots, *words)
        return attach_rows(buffer, state, host_rows, version)
    # Arrays of items begin as zeros; all other arrays of the storage were saved, and are kept.
    blank = set(map(id, jax.tree.leaves(buffer.storage.slotted(want.storage))))
    own, raws = iter(jax.tree.leaves(state.storage)), jax.tree.map(casting.raw_spec, want.storage)
    zeros = lambda leaf, raw: casting.wrap_words(jnp.zeros(raw.shape, raw.dtype), leaf.dtype)
    zeros_or_saved = lambda leaf, raw: zeros(leaf, raw) if id(leaf) in blank else next(own)
    storage = jax.tree.map(zeros_or_saved, want.storage, raws)
    # Write the pieces buffer by buffer: `vmap` may have made several.
    specs, structure = jax.tree.flatten(spec)
    for rows, leaves in parts:
        buffers, slots = np.divmod(rows, buffer.capacity)
        for number in np.unique(buffers):
            which = buffers == number
            count = np.count_nonzero(which)
            size = 1 << int(count - 1).bit_length()  # the write is compiled for each size
            padded = np.full(size, _NOWHERE, np.int32)
            padded[:count] = slots[which]
            values = []
            for leaf, one in zip(leaves, specs, strict=True):
                array = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
                array[:count] = leaf[which]
                values.append(casting.wrap_words(jnp.asarray(array), one.dtype))
            items = jax.tree.unflatten(structure, values)
            index = tuple(np.unravel_index(number, want.edits.shape)) if want.edits.ndim else ()
            storage = _put_items(buffer, storage, state.writer, index, jnp.asarray(padded), items)
    storage = storage if device is None else jax.device_put(storage, device)
    return state.replace(storage=storage)


def attach_rows(buffer: Buffer, state: BufferState, rows: Any, version: int) -> Any:
    """Returns the state with rows on the host that are already written as its items."""
    held = functools.partial(buffer.writer.held, buffer.ring, state.writer)
    return state.replace(storage=buffer.storage.attach(buffer.ring, rows, version, held))


@by_description(donated=("storage",))
def _put_items(
    buffer: Buffer,
    storage: Any,
    writer: PartState,
    index: tuple[Any, ...],
    slots: jax.Array,
    items: Item,
) -> Any:
    """Puts items into the storage of one buffer, or of one of those under `vmap`."""
    if index:
        # One buffer is taken out and put back: no storage has to write under `vmap`.
        part, writer = jax.tree.map(lambda leaf: leaf[index], (storage, writer))
        part = _put_items(buffer, part, writer, (), slots, items)
        return jax.tree.map(lambda whole, leaf: whole.at[index].set(leaf), storage, part)
    context = steps.context_of(buffer, writer)
    if not isinstance(buffer.storage, DeviceStorage) or not buffer.storage.share_next_observations:
        # A write of rows of one item, each to a slot of its own; names of leaves may be equal.
        number = jnp.arange(len(slots), dtype=jnp.int32)
        is_written, none = jnp.ones(len(slots), jnp.bool_), jnp.zeros((), jnp.int32)
        plan = WritePlan(slots, slots[:, None], is_written, number + 1, none, consecutive=False)
        rows = jax.tree.map(lambda leaf: leaf[:, None], items)
        return buffer.storage.write(context, storage, plan, rows)[0]
    put = buffer.storage.edit
    values = dict(zip(pytree.leaf_names(items), jax.tree.leaves(items), strict=True))
    # A shared next observation has no row of its own that could be written.
    twins = shared_leaves(buffer.storage.spec(storage), buffer.keys)
    own = {name: leaf for name, leaf in values.items() if name not in twins}
    if twins:
        # Most next observations are those of the next row. The others have rows after the first N.
        source = next_observation_rows(context, storage, jnp.minimum(slots, buffer.capacity - 1))
        has_row = (slots < buffer.capacity) & (source >= buffer.capacity)
        rows = jnp.where(has_row, source, _NOWHERE)
        shared = {observation: values[name] for name, observation in twins.items()}
        storage = put(context, storage, rows, shared)
    return put(context, storage, slots, own)


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
    # Read one array after the other, and move it to its device.
    placed: list[Any] = []
    for name, leaf in leaves.items():
        # Aligned, so that XLA takes this memory on the host without a copy.
        array = allocate_aligned(raws[name].shape, raws[name].dtype)
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


def _open_storage(
    checkpoint: OpenedCheckpoint, buffer: Buffer, spec: Item, device: Device, verify: bool
) -> tuple[Any, Any]:
    """Returns the buffer and its state as they were committed; the first write takes the lock."""
    # The folder may have been moved since.
    if not schema.is_at(checkpoint.path, buffer):
        buffer = dataclasses.replace(buffer, storage=buffer.storage.at(checkpoint.path))
    are_linked = buffer.storage.share_next_observations
    arrays = _item_arrays(checkpoint, spec, buffer.capacity, are_linked)
    if verify:
        blocks = [(array, block) for array in arrays for block in range(array.spec.num_blocks)]
        run_all([functools.partial(array.read_block, block) for array, block in blocks])
    want, path = schema.blank(buffer, spec), checkpoint.path
    state = restore_arrays(path, checkpoint.kinds(), checkpoint.fill, want, device)
    rows = buffer.storage.open_rows(checkpoint.store, buffer.ring, spec, buffer.keys)
    state = attach_rows(buffer, state, rows, 0)
    return buffer, state if device is None else jax.device_put(state, device)


# Parameters and other data of the user.


def load_extra(checkpoint: OpenedCheckpoint, example: Item) -> Any:
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
        _load_extra_leaf(checkpoint, name, kinds[EXTRA + name][0], example)
        for name, example in examples.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(example), leaves)


_SORTS = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}


def _load_extra_leaf(saved: OpenedCheckpoint, name: str, kind: Any, example: Any) -> Any:
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
