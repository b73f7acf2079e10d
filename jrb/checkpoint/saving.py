"""Writes the named arrays of states into stores, and commits what differs from the last save.

The arrays of several buffers, of the parts of a mix and of the shards of a sharded buffer are in
one generation; their names begin with that of the part, such as `train/sampler/raw`. Of several
processes, each writes the arrays of its own shards; the first one writes the generation when all
have told their tables of blocks.
"""

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import jax
import jax.core
import numpy as np
from jax.experimental import multihost_utils

from jrb._store.block_store import BlockStore, Source
from jrb._store.blocks import checksum_of, is_zero, rows_per_block
from jrb._store.commits import SmallArray
from jrb._util import casting, pytree
from jrb._util.pytree import Leaf
from jrb._xla import compat
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, manifest, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.manifest import EXTRA
from jrb.checkpoint.schema import ItemReader, Snapshot
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.state import BufferState
from jrb.storages import compressed
from jrb.storages.compressed import CompressedRows
from jrb.storages.host_rows import HostView, bytes_of
from jrb.storages.memmap import StoreRows, item_sources
from jrb.types import Item

BUFFER, STORE = "buffer", "store"
"""The kinds of checkpoints of one buffer: with items of its own, or with those of its storage."""

LEFT_OUT, ENCODED = "apart", "encoded"
"""The kinds of items that were left out of a checkpoint, or that a function has encoded."""

OBJECTS = {"kind": "objects", "format": "msgpack"}
"""The metadata of items that are objects."""
OBJECT_ARRAY, ENCODED_ARRAY = ".objects", "items/encoded"
"""The names of the arrays in which objects and encoded items are saved."""

Hook = Callable[[Any], Any]
"""A function of K items, arrays `[K, ...]`, such as `encode`."""


@dataclasses.dataclass(frozen=True)
class ItemOptions:
    """The options of a save about items; see `jrb.checkpoint.save`."""

    encode: Any = None
    items: bool = True


def function_name(function: Any) -> str:
    """Returns the name of a function, or of the one that `functools.partial` wraps."""
    # The arguments of a partial may be anything, and are not compared.
    while isinstance(function, functools.partial):
        function = function.func
    return descriptions.name_of(function)


# What a user saves in one generation with a buffer: parameters, keys, the number of a step.


def extra_arrays(extra: Item) -> dict[str, Any] | None:
    """Returns the arrays of a pytree of arrays and numbers, by name; None for None."""
    if extra is None:
        return None
    arrays = {}
    for name, leaf in schema.by_name(extra).items():
        array = extra_array(name, leaf)
        raw = casting.raw(array)
        if isinstance(raw, jax.Array) and not (raw.is_fully_addressable or raw.is_fully_replicated):
            raw = multihost_utils.process_allgather(raw, tiled=True)  # which all processes call
            array = casting.wrap_words(raw, array.dtype)
        arrays[EXTRA + name] = array
    return arrays


def extra_array(name: str, leaf: Leaf) -> Any:
    """Returns a leaf as an array; raises if it is neither an array of numbers nor a number."""
    array: Any = np.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf
    if isinstance(array, jax.core.Tracer) or not pytree.is_array(array):
        raise TypeError(
            f"save: extra: leaf '{name}': expected an array or a number, got "
            f"{type(leaf).__name__}. Encode it, or leave it out."
        )
    if not casting.is_keys(array.dtype) and np.dtype(array.dtype).kind in "OSUMm":
        raise TypeError(f"save: extra: leaf '{name}': expected numbers, got dtype {array.dtype}.")
    return array


@contextlib.contextmanager
def delay_writes(views: list[HostView]) -> Iterator[None]:
    """Returns a context for a save, for which writes of other threads wait for a while.

    Raises `StaleError` for an older state, of whose rows some may be overwritten already. A write
    that does not wait is noticed when its rows are read, or by the commit.
    """
    with contextlib.ExitStack() as stack:
        for view in views:
            # Wait for the device before the turn is taken, which a callback of it may need.
            version = view.version
            # No write is under way while the save enters: it would keep the turn, and wait for it.
            with view.rows.turn:
                stack.enter_context(view.rows.drawing())
                view.rows.check_newest(version)
        yield


# The items of a buffer.


def _sources_on_host(saved: Snapshot) -> dict[str, Source]:
    """Returns the arrays of items on the host, by name."""
    (view,) = saved.views
    rows, sources = view.rows, {}

    def read(number: int, start: int, stop: int) -> np.ndarray:
        leaf = rows.read(view.version, [np.arange(start, stop)], number)[0]
        return bytes_of(leaf, stop - start)

    for number, (name, source) in enumerate(item_sources(saved.spec, rows.capacity).items()):
        read_leaf = functools.partial(read, number)
        sources[name] = dataclasses.replace(source, read=read_leaf, reach=rows.reach)
        if isinstance(rows, CompressedRows) and rows.is_compressed[number]:
            sources[name] = compressed.frame_source(rows, view.version, number, source.label)
    return sources


def encode_items(saved: Snapshot, encode: Hook) -> tuple[dict[str, Any], Source]:
    """Returns the metadata of encoded items, and one array whose rows are their bytes.

    The checksums of blocks as they were before `encode` are the hashes of the array, by which the
    store finds the blocks that changed: only these are encoded. Blocks of zeros, such as slots that
    were never written, have the hash 0. They are not encoded, and a load skips them.
    """
    if not callable(encode):
        raise TypeError(f"encode: expected a function, got {encode!r}.")
    # Choose blocks whose rows are small enough before and after the encoding.
    items, num_rows = ItemReader(saved), math.prod(saved.batch) * saved.buffer.capacity
    form, structure, width = _describe_encoding(encode, items.spec)
    block = rows_per_block(num_rows, max(pytree.nbytes(items.spec), width))
    reach = saved.views[0].rows.reach if saved.views else num_rows
    turn = threading.Lock()

    def read_block(start: int) -> tuple[Any, np.ndarray]:
        rows = items.read(np.arange(start, min(start + block, num_rows)))
        return rows, _row_bytes(jax.tree.leaves(rows)).reshape(-1)

    def hash_blocks(size: int) -> np.ndarray:
        hashes = np.zeros(-(-num_rows // block), np.uint64)
        for number, start in enumerate(range(0, reach, block)):
            _, data = read_block(start)
            hashes[number] = 0 if is_zero(data) else checksum_of(data) or 1
        return hashes

    @compat.with_settings
    def encode_blocks(first: int, target: np.ndarray) -> None:
        for start in range(0, len(target), block):
            rows, data = read_block(first + start)
            if not is_zero(data):
                part = target[start : start + block]
                part[:] = _row_bytes(check_result(encode(rows), structure, len(part), "encode"))

    def read(start: int, stop: int) -> np.ndarray:
        target = np.zeros((stop - start, width), np.uint8)
        with turn:  # the function of a user is called by one thread at a time
            encode_blocks(start, target)
        return target

    # With another form or other items, it is another array, all of whose blocks are written.
    kind = ["uint8", str([num_rows, width]), form, descriptions.encode_structure(saved.spec)]
    label = "the encoded items"
    return form, Source(kind, label, num_rows, width, read, reach, hash_blocks, None, block)


def _describe_encoding(encode: Hook, spec: Any) -> tuple[dict[str, Any], Any, int]:
    """Returns the metadata of items that a function encodes, their specs and bytes.

    Its result for an item of zeros shows the shapes and dtypes of all results.
    """
    # Encode one item of zeros, and check the result.
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
    # Describe the structure of results, which must be one that a file can hold.
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
    form = {"kind": ENCODED, "encode": function_name(encode), "structure": node}
    return form | {"blank": zlib.crc32(blank)}, structure, len(blank)


def check_result(output: Any, specs: Any, count: int, who: str) -> list[np.ndarray]:
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


def _row_bytes(leaves: list[np.ndarray]) -> np.ndarray:
    """Returns the bytes of all leaves of each row, uint8 `[K, width]`."""
    return np.concatenate([bytes_of(leaf, len(leaf)) for leaf in leaves], axis=1)


def describe_left_out(saved: Snapshot) -> dict[str, Any]:
    """Returns the metadata of items that are left out: how many, and checksums of some."""
    if saved.batch:
        raise TypeError(
            "items: expected a single state with items=False, got states under vmap. Save them one "
            "by one, or with their items."
        )
    # In the order of `jrb.items`, whose result the user will pass to `load`.
    slots = schema.held_slots(saved.buffer, saved.state.writer)
    form: dict[str, Any] = {"kind": LEFT_OUT, "count": len(slots)}
    if not saved.buffer.storage.of_objects:
        leaves = jax.tree.leaves(ItemReader(saved).read(slots[sampled_indices(len(slots))]))
        form["sums"] = [zlib.crc32(bytes_of(leaf, len(leaf)).tobytes()) for leaf in leaves]
    return form


def sampled_indices(count: int) -> np.ndarray:
    """Returns the indices of those of K items whose checksums are saved, at most 64."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, 64)).astype(np.int64))


# Saves.


class SaveJob:
    """A save that has passed all checks; used as a context, it releases its locks at the end.

    Args:
        path: the absolute path of a folder.
        buffer: the description, or several.
        state: its state, or theirs.
        extra: a pytree of further data of the user; None for none.
        out: the options about items.
        method: the name of the calling method, for error messages.

    Attributes:
        views: the views of all rows on the host.
        is_commit: True if the path is that of the state's own storage, whose rows are there.
    """

    def __init__(
        self,
        path: str,
        buffer: Several,
        state: AnyState,
        extra: Item = None,
        out: ItemOptions = ItemOptions(),
        method: str = "save",
    ) -> None:
        descriptions.check_buffers(buffer, method)
        self.views: list[HostView] = []
        self._path, self._own, self._version = path, None, 0
        self._large: dict[str, Source] = {}
        self._small: dict[str, SmallArray] = {}
        self._meta = self._add(buffer, state, out, "")
        self.is_commit: bool = self._own is not None
        arrays = extra_arrays(extra)
        self._group = ProcessGroup.of_program() if isinstance(buffer, Sharded) else ProcessGroup()
        if arrays is not None:
            self._meta["extra"] = list(arrays)
            if self._group.number == 0:
                self._add_arrays(arrays)
        self._store: BlockStore | None = None
        self._write: Callable[[], None] | None = None

    def _add(self, buffer: Several, state: Any, out: ItemOptions, prefix: str) -> dict[str, Any]:
        """Adds the arrays of a state, whose names begin with a prefix; returns its metadata."""
        if isinstance(buffer, ReplayBuffer):
            return self._add_buffer(buffer, state, out, prefix)
        if isinstance(buffer, Sharded):
            names = buffer.names()
            states = {names[number]: one for number, one in buffer.split(state).items()}
        else:
            states = descriptions.match_by_name(buffer, state, "save: states")
        # Add each part under its own prefix.
        encodes = descriptions.functions_by_name(buffer, out.encode, "save: encode functions")
        buffers = descriptions.buffers_by_name(buffer)
        parts = {
            name: self._add(
                buffers[name],
                one,
                ItemOptions(encodes[name], out.items),
                manifest.prefix_of(prefix, name),
            )
            for name, one in states.items()
        }
        if not isinstance(buffer, Mix | Sharded):
            meta = {"kind": manifest.SEVERAL, "is_dict": isinstance(buffer, dict)}
            return meta | {"facts": schema.facts_of(), "parts": parts}
        encoded = descriptions.encode(descriptions.without_mesh(buffer))
        kind = manifest.MIX if isinstance(buffer, Mix) else manifest.SHARDED
        facts = schema.facts_of(buffer)
        return {"kind": kind, "buffer": encoded, "facts": facts, "parts": parts}

    def _add_buffer(
        self, buffer: ReplayBuffer, state: BufferState, out: ItemOptions, prefix: str
    ) -> dict[str, Any]:
        saved = schema.snapshot(buffer, state)
        self.views += saved.views
        if not prefix and saved.lies_at(self._path):
            return self._add_own_storage(saved, out)
        form, items = None, {}
        if not out.items:
            form = describe_left_out(saved)
        elif buffer.storage.of_objects:
            if out.encode is not None:
                raise TypeError(
                    "encode: expected items of arrays, got a ListStorage, whose objects are "
                    "written as they are. Leave it out."
                )
            form, slots = OBJECTS, schema.held_slots(buffer, saved.state.writer)
            (objects,) = saved.stored.rows.read(saved.stored.version, [slots])
            data = descriptions.pack_objects(slots, objects, buffer.capacity)
            self._add_arrays({OBJECT_ARRAY: np.frombuffer(data, np.uint8)}, prefix)
        elif out.encode is not None:
            form, items[ENCODED_ARRAY] = encode_items(saved, out.encode)
        elif saved.views:
            items = _sources_on_host(saved)
        self._large |= {prefix + name: source for name, source in items.items()}
        arrays = saved.state if form is None else schema.without_items(buffer, saved.state)
        self._add_arrays(arrays, prefix)
        return schema.describe_state(BUFFER, saved) | {"form": form}

    def _add_own_storage(self, saved: Snapshot, out: ItemOptions) -> dict[str, Any]:
        """Adds a state whose rows are in the files at the path already; returns its metadata."""
        if out != ItemOptions():
            raise ValueError(
                "encode, items: expected none for the path of the storage itself, whose rows "
                "are there already, as they are. Save to another path."
            )
        (view,) = saved.views
        self._own = cast(StoreRows, view.rows)
        self._version = view.version
        self._add_arrays(saved.state)
        return schema.describe_state(STORE, saved) | {"form": None}

    def _add_arrays(self, tree: Any, prefix: str = "") -> None:
        large, small = schema.sources_of(tree, prefix)
        self._large |= large
        self._small |= small

    def open(self, copy: bool) -> None:
        """Takes the lock and finds what to write; `copy` is True if the state may change later."""
        is_leader, all_do = self._group.number == 0, self._group.all_gather_json

        def take_lock() -> None:
            if self._own is not None:
                self._store = self._own.store
                self._store.begin_save(self)
            elif is_leader:
                self._store = BlockStore.open_to_save(self._path)

        try:
            all_do(take_lock)
            all_do(lambda: self._put(copy))
        except BaseException:
            self.close()
            raise

    def _put(self, copy: bool) -> None:
        """Writes the arrays of this process that have changed, or copies them."""
        store = self._store = self._store or BlockStore.join(self._path)
        kept = [] if self._own is None else self._own.shared.names
        self._write = store.put(self._large, copy, kept)
        self._large = {}  # so that the state can be donated

    def finish(self, keep: int) -> int:
        """Writes the state, releases the lock, and returns the number of the generation."""
        store, write, is_leader = cast(Any, self._store), self._write, self._group.number == 0

        def write_arrays() -> Any:
            if write is not None:
                write()
            if is_leader:
                return None
            small = {
                name: [it.kind, base64.b85encode(it.data).decode()]
                for name, it in self._small.items()
            }
            return {"tables": store.tables(), "small": small, "parts": self._meta["parts"]}

        def commit() -> int:
            if not is_leader:
                return 0
            # Join what the other processes have written to what this one has.
            tables: dict[str, Any] = {}
            for report in filter(None, reports):
                tables |= report["tables"]
                self._meta["parts"] |= report["parts"]
                for name, (kind, data) in report["small"].items():
                    self._small[name] = SmallArray(kind, base64.b85decode(data))
            if self._own is None:
                return store.commit(self._meta, self._small, keep, tables)
            # The rows are in the files already: they must be those of this state until the end.
            with store.turn:
                self._own.shared.prepare_commit(self._version)
                return store.commit(self._meta, self._small, keep, tables)

        with self:
            # The generation is written only when the arrays of all processes are on the disk.
            reports = self._group.all_gather_json(write_arrays)
            number = max(self._group.all_gather_json(commit))
            if not is_leader:
                store.truncate_files()
            return number

    def close(self) -> None:
        """Releases the lock, unless it is that of the state's own storage, and all copies."""
        if self._store is not None and self._own is None:
            self._store.close()
        elif self._store is not None:
            self._store.end_save(self)
        self._write, self._small = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Processes of a program that save one state together.


@dataclasses.dataclass
class ProcessGroup:
    """Processes that do the same steps in the same order, and exchange messages.

    The messages go through JAX's coordination service and not through devices. So processes can
    exchange them in a thread during a training, and are informed if one of them has died.

    Attributes:
        number: the index of this process.
        count: the number of processes.
        leave: a function `(name, message)` that posts a message; each name can be used once.
        fetch: a function that waits for the message of a name, and returns it.
        name: the prefix of all message names, equal in all processes and different for each save.
    """

    number: int = 0
    count: int = 1
    leave: Callable[[str, str], Any] | None = None
    fetch: Callable[[str], str] | None = None
    name: str = ""
    _step: int = 0

    @classmethod
    def of_program(cls) -> Self:
        """Returns all processes of this program, for one save."""
        service = compat.coordination()
        return cls() if service is None else cls(*service, f"jrb/save/{next(_saves)}")

    def all_gather_json(self, work: Callable[[], Any]) -> list[Any]:
        """Calls `work`; returns the results of all processes, for JSON, when all have done it."""
        if self.leave is None or self.fetch is None:
            return [work()]
        self._step += 1
        place = f"{self.name}/{self._step}"
        try:
            result = work()
        except BaseException as error:
            self._send(place, {"error": repr(error)})
            raise
        self._send(place, {"result": result})
        messages = [self._receive(place, number) for number in range(self.count)]
        for number, message in enumerate(messages):
            if "error" in message:
                raise OSError(
                    f"save: process {number} of {self.count} failed: {message['error']}. What was "
                    "saved before is still there."
                )
        return [message["result"] for message in messages]

    def _send(self, place: str, message: dict[str, Any]) -> None:
        """Posts a message in pieces: tables of blocks may be too long for the service."""
        text = json.dumps(message)
        pieces = [text[at : at + _LONGEST_MESSAGE] for at in range(0, len(text), _LONGEST_MESSAGE)]
        send: Any = self.leave
        for number, piece in enumerate(pieces):
            send(f"{place}/{self.number}/{number}", f"{len(pieces)}:{piece}")

    def _receive(self, place: str, process: int) -> dict[str, Any]:
        fetch: Any = self.fetch
        count, _, text = fetch(f"{place}/{process}/0").partition(":")
        for number in range(1, int(count)):
            text += fetch(f"{place}/{process}/{number}").partition(":")[2]
        return json.loads(text)


_LONGEST_MESSAGE = 1 << 20  # characters; gRPC refuses messages of more than 4 MB
_saves = itertools.count()  # a name for each save, the same in all processes
