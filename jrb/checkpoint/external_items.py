"""Items that are not saved as arrays of the state, but encoded by a function, left out, or objects.

K items, N capacity, V the number of buffers in a state under `vmap`. Slot s of buffer v is row
v * N + s. Items here are NumPy arrays `[K, ...]` in their own structure and dtypes, keys as their
words, wherever and however the storage keeps them.
"""

import contextlib
import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core import eager, memory, steps
from jrb._store.block_store import BlockStore, Source
from jrb._store.blocks import checksum_of, is_zero, rows_per_block
from jrb._store.files import DamagedError
from jrb._util import casting, pytree, wording
from jrb._xla import compat
from jrb._xla.compiling import by_description
from jrb.checkpoint import descriptions, schema
from jrb.checkpoint.schema import Snapshot
from jrb.state import Buffer, BufferState, Device
from jrb.storages import DeviceStorage
from jrb.storages.device import next_observation_rows, shared_leaves
from jrb.storages.host_rows import bytes_of
from jrb.types import Item
from jrb.types.messages import PartState, WritePlan

KEPT = "apart"
"""The kind of items that were left out of a checkpoint."""
ENCODED = "encoded"
"""The kind of items that a function has encoded."""

OBJECTS = {"kind": "objects", "format": "msgpack"}
"""The metadata of items that are objects."""
OBJECT_ARRAY = ".objects"
"""The name of the array in which objects are saved."""

MEND = "Pass what jrb.items(buffer, state) gave when it was saved."

Hook = Callable[[Any], Any]
Pieces = Iterable[tuple[np.ndarray, list[np.ndarray]]]
"""Pairs of the indices of rows, and the leaves of the rows' items."""

ARRAY = "items/encoded"
"""The name of the array in which encoded items are saved."""

_NOWHERE = 2**31 - 1  # a slot that is in no array


@dataclasses.dataclass(frozen=True)
class Outward:
    """The options of a save about items; see `jrb.checkpoint.save`."""

    encode: Any = None
    items: bool = True


PLAIN = Outward()
"""Items are written as they are."""


@dataclasses.dataclass(frozen=True)
class Inward:
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
                f"{_name_of(self.decode)}. Leave it out."
            )
        if name is not None and not callable(self.decode):
            raise TypeError(f"{path}: decode: expected a function, got {self.decode!r}.")
        is_needed = form.get("kind") == KEPT
        if is_needed and self.items is None:
            raise ValueError(
                f"{path}: expected items=, as it was saved with items=False. Pass what "
                "jrb.items(buffer, state) gave then: load(path, items=...)."
            )
        if not is_needed and self.items is not None:
            raise ValueError(f"{path}: items: expected None, as the items are there. Leave it out.")


AS_SAVED = Inward()


def _name_of(hook: Any) -> str:
    # The arguments of a partial may be anything, and are not compared.
    while isinstance(hook, functools.partial):
        hook = hook.func
    return descriptions.name_of(hook)


# Out of a state.


def host_spec(spec: Item) -> Any:
    """Returns the specs of an item as it is on the host: keys as their words."""
    return jax.tree.map(casting.raw_spec, spec)


def without(buffer: Buffer, state: Any) -> Any:
    """Returns the state, or its specs, with None in place of all arrays of items."""
    items = set(map(id, jax.tree.leaves(buffer.storage.slotted(state.storage))))
    storage = jax.tree.map(lambda leaf: None if id(leaf) in items else leaf, state.storage)
    return state.replace(storage=storage)


class Items:
    """Reads the items of a state to the host.

    Attributes:
        spec: the specs of one item on the host.
    """

    spec: Any

    def __init__(self, saved: Snapshot) -> None:
        self.spec = host_spec(saved.spec)
        self._saved = saved
        self._state: tuple[int, Any] = -1, None

    def take(self, rows: np.ndarray) -> Any:
        """Returns the items of rows `[K]`; rows of several buffers must be ordered by buffer."""
        # Row v * N + s is slot s of buffer v.
        buffers, slots = np.divmod(rows, self._saved.buffer.capacity)
        numbers = np.unique(buffers) if len(rows) else [0]
        parts = [self._leaves(int(number), slots[buffers == number]) for number in numbers]
        leaves = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.spec), list(leaves))

    def _leaves(self, number: int, slots: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of the items at some slots of buffer `number`."""
        for view in self._saved.views:
            return view.rows.take(view.version, [slots] * len(view.rows.raw))
        axes, state = len(self._saved.batch), self._state  # other threads may replace it

        def of_buffer(leaf: Any) -> Any:
            leaf = leaf.array[leaf.index] if isinstance(leaf, memory.Part) else jnp.asarray(leaf)
            return leaf.reshape(-1, *leaf.shape[axes:])[number] if axes else leaf

        if state[0] != number:
            state = self._state = number, jax.tree.map(of_buffer, self._saved.state)
        # The read is compiled for each length: take powers of two.
        padded = np.zeros(1 << max(len(slots) - 1, 0).bit_length(), np.int32)
        padded[: len(slots)] = slots
        items = steps.take(self._saved.buffer, state[1], jnp.asarray(padded))
        return [np.asarray(casting.raw(leaf))[: len(slots)] for leaf in jax.tree.leaves(items)]


def encode_items(saved: Snapshot, encode: Hook) -> tuple[dict[str, Any], Source]:
    """Returns the metadata of encoded items, and one array whose rows are their bytes.

    The checksums of blocks as they were before `encode` are the hashes of the array, by which the
    store finds the blocks that changed: only these are encoded. Blocks of zeros, such as slots that
    were never written, have the hash 0. They are not encoded, and `decoded` skips them.
    """
    if not callable(encode):
        raise TypeError(f"encode: expected a function, got {encode!r}.")
    items, num_rows = Items(saved), saved.count * saved.buffer.capacity
    form, structure, width = _form_of(encode, items.spec)
    block = rows_per_block(num_rows, max(pytree.nbytes(items.spec), width))
    reach = saved.views[0].rows.reach if saved.views else num_rows
    turn = threading.Lock()

    def take_block(start: int) -> tuple[Any, np.ndarray]:
        rows = items.take(np.arange(start, min(start + block, num_rows)))
        return rows, _row_bytes(jax.tree.leaves(rows)).reshape(-1)

    def hash_blocks(size: int) -> np.ndarray:
        hashes = np.zeros(-(-num_rows // block), np.uint64)
        for number, start in enumerate(range(0, reach, block)):
            _, data = take_block(start)
            hashes[number] = 0 if is_zero(data) else checksum_of(data) or 1
        return hashes

    @compat.with_settings
    def encode_blocks(first: int, target: np.ndarray) -> None:
        for start in range(0, len(target), block):
            rows, data = take_block(first + start)
            if not is_zero(data):
                part = target[start : start + block]
                part[:] = _row_bytes(_checked(encode(rows), structure, len(part), "encode"))

    def read(start: int, stop: int) -> np.ndarray:
        target = np.zeros((stop - start, width), np.uint8)
        with turn:  # the function of a user is called by one thread at a time
            encode_blocks(start, target)
        return target

    # With another form or other items, the array is another one, which is written anew.
    kind = ["uint8", str([num_rows, width]), form, descriptions.encode_structure(saved.spec)]
    label = "the encoded items"
    return form, Source(kind, label, num_rows, width, read, reach, hash_blocks, None, block)


def _form_of(encode: Hook, spec: Any) -> tuple[dict[str, Any], Any, int]:
    """Returns the metadata of items that a function encodes, their specs and bytes.

    Its result for an item of zeros shows the shapes and dtypes of all results.
    """
    zeros = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), spec)
    output = jax.tree.map(np.asarray, encode(zeros))
    if not jax.tree.leaves(output):
        raise ValueError("encode: expected arrays, got none. To leave items out, pass items=False.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(output):
        where = f"encode: leaf '{pytree.leaf_name(path)}'"
        if leaf.dtype.kind in "OSUMm" or leaf.dtype.fields is not None or not leaf.dtype.isnative:
            raise TypeError(f"{where}: expected an array of numbers, got dtype {leaf.dtype}.")
        if leaf.shape[:1] != (1,):
            raise ValueError(
                f"{where}: expected one row for each of K items, got shape {leaf.shape} for one."
            )
    structure = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), output)
    if not pytree.nbytes(structure):
        raise ValueError("encode: expected arrays with elements, got empty ones.")
    node = descriptions.encode_structure(structure)
    if "unknown" in node:
        raise ValueError(
            "encode: expected arrays in dicts, lists, tuples, or classes that this program has "
            f"defined, got {jax.tree.structure(structure)}."
        )
    blank = _row_bytes(jax.tree.leaves(output)).tobytes()
    form = {"kind": ENCODED, "encode": _name_of(encode), "structure": node}
    return form | {"blank": zlib.crc32(blank)}, structure, len(blank)


def _checked(output: Any, specs: Any, count: int, who: str) -> list[np.ndarray]:
    """Returns the leaves of a function's result; raises unless they are `count` rows of `specs`."""
    mend = "It has to give a row for each item, in the same structure each time."
    pytree.check_structure(specs, output, who, mend)
    arrays = list(map(np.asarray, jax.tree.leaves(output)))
    for (path, spec), array in zip(jax.tree_util.tree_leaves_with_path(specs), arrays, strict=True):
        where, shape = f"{who}: leaf '{pytree.leaf_name(path)}'", (count, *spec.shape)
        if array.shape != shape:
            raise ValueError(f"{where}: expected shape {shape}, got {array.shape}. {mend}")
        if array.dtype != spec.dtype:
            raise TypeError(f"{where}: expected dtype {spec.dtype}, got {array.dtype}. {mend}")
    return arrays


def in_parts(rows: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yields parts of `rows`, each of about `schema.PIECE` bytes; a row has `width` bytes."""
    step = max(1, schema.PIECE // max(width, 1))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def pieces_of(slots: np.ndarray, leaves: list[np.ndarray], spec: Item) -> Pieces:
    """Yields pieces of some megabytes of items in memory: slots, and their items."""
    for part in in_parts(np.arange(len(slots)), pytree.nbytes(spec)):
        yield slots[part], [leaf[part] for leaf in leaves]


def _bytes(leaves: list[np.ndarray]) -> list[np.ndarray]:
    return [bytes_of(leaf, len(leaf)) for leaf in leaves]


def _row_bytes(leaves: list[np.ndarray]) -> np.ndarray:
    """Returns the bytes of all leaves of each row, uint8 `[K, width]`."""
    return np.concatenate(_bytes(leaves), axis=1)


def viewed(rows: list[np.ndarray], specs: list[Any]) -> list[np.ndarray]:
    """Returns the leaves `[B, ...]` of these specs that have the bytes `rows`."""
    return [
        np.ascontiguousarray(row).view(spec.dtype).reshape(len(row), *spec.shape)
        for row, spec in zip(rows, specs, strict=True)
    ]


def decoded(
    path: str, store: BlockStore, prefix: str, form: dict[str, Any], spec: Item, decode: Hook
) -> Pieces:
    """Yields indices of rows and the leaves of their decoded items; skips items of zeros."""
    with descriptions.read_from(path):
        structure = descriptions.decode_structure(form["structure"])
    specs, item_spec = jax.tree.leaves(structure), host_spec(spec)
    array, hashes = store.arrays[prefix + ARRAY], store.hashes[prefix + ARRAY]
    ends = np.cumsum([pytree.nbytes(leaf) for leaf in specs])
    for block in np.flatnonzero(hashes).tolist():
        start, stop = array.spec.rows_of(block, block)
        columns = np.split(array.read_block(block).reshape(stop - start, -1), ends[:-1], axis=1)
        leaves = jax.tree.unflatten(jax.tree.structure(structure), viewed(columns, specs))
        yield np.arange(start, stop), _checked(decode(leaves), item_spec, stop - start, "decode")


# Back into a state.


def restored(
    buffer: Buffer, want: Any, state: Any, spec: Item, pieces: Pieces, device: Device
) -> Any:
    """Returns the state with the items of all pieces; rows that are in no piece are zeros.

    `want` has the specs of the whole state, and is not used for items on the host.
    """
    if schema.is_on_host(buffer):
        view = buffer.storage.view(eager.init(buffer, spec, None).storage)
        host_rows, version = view.rows, view.version
        for slots, leaves in pieces:
            # Rows that are not written read as zeros, and take no disk.
            if not all(map(is_zero, _bytes(leaves))):
                raws = zip(leaves, host_rows.raw, strict=True)
                words = [leaf.view(raw.dtype) for leaf, raw in raws]
                version = host_rows.put(version, slots, *words)
        return attach(buffer, state, view.after(version))
    # Arrays of items begin as zeros; all other arrays of the storage were saved, and are kept.
    blank = set(map(id, jax.tree.leaves(buffer.storage.slotted(want.storage))))
    own, raws = iter(jax.tree.leaves(state.storage)), jax.tree.map(casting.raw_spec, want.storage)
    zeros = lambda leaf, raw: casting.wrap_words(jnp.zeros(raw.shape, raw.dtype), leaf.dtype)
    zeros_or_saved = lambda leaf, raw: zeros(leaf, raw) if id(leaf) in blank else next(own)
    storage = jax.tree.map(zeros_or_saved, want.storage, raws)
    specs, structure = jax.tree.flatten(spec)
    for rows, leaves in pieces:
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
            storage = _put(buffer, storage, state.writer, index, jnp.asarray(padded), items)
    storage = storage if device is None else jax.device_put(storage, device)
    return state.replace(storage=storage)


def attach(buffer: Buffer, state: BufferState, view: Any) -> Any:
    """Returns the state with `view`, rows on the host that are already written, as its items."""
    held = functools.partial(buffer.writer.held, buffer.ring, state.writer)
    return state.replace(storage=buffer.storage.attach(buffer.ring, view, held))


@by_description(donated=("storage",))
def _put(
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
        part = _put(buffer, part, writer, (), slots, items)
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


# Items that the user keeps.


def in_order(buffer: Buffer, writer: PartState) -> np.ndarray:
    """Returns the slots that hold items, oldest first."""
    slots, count = steps.in_order(buffer, writer)
    return np.asarray(slots)[: int(count)]


def kept_form(saved: Snapshot) -> dict[str, Any]:
    """Returns the metadata of items that are left out: how many, and checksums of some."""
    if saved.batch:
        raise TypeError(
            "items: expected a single state with items=False, got states under vmap. Save them one "
            "by one, or with their items."
        )
    # In the order of `jrb.items`, whose result the user will pass to `load`.
    slots = in_order(saved.buffer, saved.state.writer)
    form: dict[str, Any] = {"kind": KEPT, "count": len(slots)}
    if not saved.buffer.storage.of_objects:
        form["sums"] = _sums(jax.tree.leaves(Items(saved).take(slots[_witnesses(len(slots))])))
    return form


def _witnesses(count: int) -> np.ndarray:
    """Returns the indices of those of K items that are compared, at most 64."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, 64)).astype(np.int64))


def _sums(leaves: list[np.ndarray]) -> list[int]:
    return [zlib.crc32(leaf.tobytes()) for leaf in _bytes(leaves)]


def kept_pieces(
    path: str, form: dict[str, Any], slots: np.ndarray, spec: Item, items: Item
) -> Pieces:
    """Checks the items of a user, and returns pieces of them."""
    names = pytree.leaf_names(spec)
    want = schema.batched(host_spec(spec), (len(slots),))
    pytree.check_like(want, items, f"{path}: items", MEND)
    leaves = list(map(np.asarray, jax.tree.leaves(items)))
    sums = _sums([leaf[_witnesses(len(slots))] for leaf in leaves])
    for name, got, expected in zip(names, sums, form["sums"], strict=True):
        if got != expected:
            raise ValueError(
                f"{path}: items: leaf '{name}': expected the items that were held, oldest first, "
                f"got others. {MEND}"
            )
    return pieces_of(slots, leaves, spec)


# Objects of a `ListStorage`, by msgpack: JSON's types, bytes, tuples and arrays, but no code. Each
# save writes all of them: a list with a blob for each slot, empty for a slot without an object.

_TUPLE, _NUMPY, _SCALAR, _JAX = range(4)  # msgpack's extension types


def packed_objects(saved: Snapshot) -> bytes:
    """Returns the objects of a state as one array of bytes."""
    buffer, slots = saved.buffer, in_order(saved.buffer, saved.state.writer)
    blobs = [b""] * buffer.capacity
    values = saved.stored.rows.stored(saved.stored.version, slots)
    for slot, value in zip(slots.tolist(), values, strict=True):
        where = f"the object in slot {slot}"
        try:
            blobs[slot] = _pack(_packable(value, where))
        except (RecursionError, ValueError) as error:  # msgpack's own limit is a ValueError
            raise ValueError(
                f"save: {where}: expected lists and dicts that end, got one that holds itself, or "
                "is too deep."
            ) from error
    return _pack(blobs)


def _packable(value: Any, where: str) -> Any:
    """Returns an object of msgpack's own types, with extension types for tuples and arrays."""
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    # The range of msgpack; `type` and not `isinstance`, as a subclass would come back as an int.
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _packed_array(value, where)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        entries = [_packable(one, f"{where}[{n}]") for n, one in enumerate(value)]
        return entries if type(value) is list else _extension(_TUPLE, entries)
    odd = [key for key in value if type(key) is not str] if type(value) is dict else []
    if type(value) is dict and not odd:
        return {key: _packable(one, f"{where}[{key!r}]") for key, one in value.items()}
    name = descriptions.name_of(type(value)).replace(":", ".")
    why = f" with the key {odd[0]!r}" if odd else ""
    why = " of more than 64 bits" if type(value) is int else why
    raise TypeError(
        f"save: {where}: expected None, numbers, str, bytes, lists, tuples, dicts with str keys, "
        f"or arrays, got {name}{why}. Store it as one of these."
    )


def _packed_array(value: Any, where: str) -> Any:
    dtype = value.dtype
    is_key = casting.is_keys(dtype)
    is_own = is_key or dtype.kind in "biufcSUMm"  # saved as the dtype's name or code
    if not is_own:
        with contextlib.suppress(descriptions.UnknownError):
            is_own = descriptions.dtype_of(descriptions.dtype_name(dtype)) == dtype
    is_array = isinstance(value, jax.Array | np.generic) or type(value) is np.ndarray
    if not is_own or not is_array or isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"save: {where}: expected an array of numbers, got a {type(value).__name__} of "
            f"dtype {dtype}. Store its fields, or np.asarray of it."
        )
    kind = _JAX if isinstance(value, jax.Array) else _SCALAR
    kind = _NUMPY if isinstance(value, np.ndarray) else kind
    # Times and strings have a unit or a length in their code, which their name lacks.
    by_code = not is_key and dtype.kind in "SUMm"
    name = dtype.str if by_code else descriptions.dtype_name(dtype)
    raw = np.asarray(casting.raw(value))
    return _extension(kind, [name, list(value.shape), raw.tobytes()])


def _extension(kind: int, value: list[Any]) -> Any:
    return wording.require("msgpack", "objects").ExtType(kind, _pack(value))


def _pack(value: Any) -> bytes:
    return wording.require("msgpack", "objects").packb(value, unicode_errors="surrogatepass")


def restored_objects(
    path: str,
    data: Any,
    buffer: Buffer,
    slots: np.ndarray | None,
    items: Any,
    device: Device,
) -> Any:
    """Returns the storage's state with the saved objects, or with `items` at the given slots."""
    if slots is None:
        slots, objects = _saved_objects(path, data, device)
    else:
        objects, mend = items, MEND
        if not isinstance(items, list | tuple):
            raise TypeError(f"{path}: items: expected a list, got {type(items).__name__}. {mend}")
        if len(items) != len(slots):
            raise ValueError(
                f"{path}: items: expected {len(slots)} objects, got {len(items)}. {mend}"
            )
    view = eager.init(buffer, {}, None).storage
    return view.after(view.rows.edit(view.version, slots, list(objects)))


def _saved_objects(path: str, data: Any, device: Device) -> tuple[np.ndarray, list[Any]]:
    """Returns the slots that have objects, and the objects."""
    try:
        blobs = _unpack(data, device)
        # No object packs to an empty blob: None has a byte.
        slots = np.array([slot for slot, blob in enumerate(blobs) if blob], np.int64)
        return slots, [_unpack(blobs[slot], device) for slot in slots]
    except (ValueError, RecursionError) as error:  # all errors of msgpack are below ValueError
        raise DamagedError(f"{path}: expected objects, got {error!r}.") from error


def _unpack(data: Any, device: Device) -> Any:
    def extension(kind: int, inner: Any) -> Any:
        value = _unpack(inner, device)
        if kind == _TUPLE:
            return tuple(value)
        name, shape, data = value
        return _restored_array(kind, name, shape, data, device)

    msgpack = wording.require("msgpack", "objects")
    return msgpack.unpackb(data, ext_hook=extension, unicode_errors="surrogatepass")


def _restored_array(
    kind: int, name: str, shape: list[int], data: bytes, device: Device
) -> np.ndarray | np.generic | jax.Array:
    dtype = np.dtype(name) if name[1:2] in (*"SUMm",) else descriptions.dtype_of(name)
    spec = casting.raw_spec(jax.ShapeDtypeStruct(tuple(shape), dtype))
    # A bytearray, so that the array can be written to, as the one that was saved.
    raw = np.frombuffer(bytearray(data), spec.dtype) if data else np.zeros(0, spec.dtype)
    raw = raw.reshape(spec.shape)
    if kind != _JAX:
        return raw[()] if kind == _SCALAR else raw
    array = jnp.asarray(raw)
    if array.dtype != raw.dtype:
        raise TypeError(
            f"load: expected a program that keeps {raw.dtype}, as an object was saved in one, "
            "got one that does not. Set jax_enable_x64."
        )
    array = casting.wrap_words(array, dtype)
    return array if device is None else jax.device_put(array, device)
