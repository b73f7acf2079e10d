"""Writes the named arrays of states into stores, and commits what differs from the last save.

The arrays of several buffers, of the parts of a mix and of the shards of a sharded buffer are in
one generation; their names begin with that of the part, such as `train/sampler/raw`. Of several
processes, each writes the arrays of its own shards; the first one writes the generation when all
have told their tables of blocks.
"""

import base64
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import jax
import jax.core
import numpy as np
from jax.experimental import multihost_utils

from jrb._store import block_store
from jrb._store.block_store import BlockStore, Source
from jrb._store.commits import SmallArray
from jrb._util import casting, pytree
from jrb._util.pytree import Leaf
from jrb._xla import compat
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, external_items, manifest, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.external_items import PLAIN, Outward
from jrb.checkpoint.manifest import EXTRA
from jrb.checkpoint.schema import Snapshot
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.state import BufferState
from jrb.storages import host_rows
from jrb.storages.host_rows import HostView, bytes_of
from jrb.storages.memmap import StoreRows, item_sources
from jrb.types import Item

BUFFER, STORE = "buffer", "store"
"""The kinds of checkpoints of one buffer: with items of its own, or with those of its storage."""


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
def reading(views: list[HostView]) -> Iterator[None]:
    """Returns a context for a save, for which writes of other threads wait for a while.

    Raises `StaleError` for an older state, of whose rows some may be overwritten already. A write
    that does not wait is noticed when its rows are read, or by the commit.
    """
    with contextlib.ExitStack() as stack:
        for view in views:
            # Wait for the device before the turn is taken, which a callback of it may need.
            version = np.asarray(view.version)
            # No write is under way while the save enters: it would keep the turn, and wait for it.
            with view.rows.turn:
                stack.enter_context(view.rows.drawing())
                view.rows.check_newest(version)
        yield


def _host_sources(saved: Snapshot) -> dict[str, Source]:
    """Returns the arrays of items on the host, by name."""
    (view,) = saved.views
    rows, sources = view.rows, {}
    specs = item_sources(saved.spec, rows.capacity).items()
    for number, (name, source) in enumerate(specs):

        def read(start: int, stop: int, number: int = number) -> np.ndarray:
            leaf = rows.read_leaf(view.version, number, np.arange(start, stop))
            return bytes_of(leaf, stop - start)

        sources[name] = dataclasses.replace(source, read=read, reach=rows.reach)
    return sources


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
        out: Outward = PLAIN,
        method: str = "save",
    ) -> None:
        descriptions.check(buffer, method)
        self.views: list[HostView] = []
        self._path, self._own, self._version = path, None, 0
        self._large: dict[str, Source] = {}
        self._small: dict[str, SmallArray] = {}
        self._meta = self._add(buffer, state, out, "")
        self.is_commit: bool = self._own is not None
        arrays = extra_arrays(extra)
        self._group = processes() if isinstance(buffer, Sharded) else ProcessGroup()
        if arrays is not None:
            self._meta["extra"] = list(arrays)
            if self._group.number == 0:
                self._add_arrays(arrays)
        self._store: BlockStore | None = None
        self._write: Callable[[], None] | None = None

    def _add(self, buffer: Several, state: Any, out: Outward, prefix: str) -> dict[str, Any]:
        """Adds the arrays of a state, whose names begin with a prefix; returns its metadata."""
        if isinstance(buffer, ReplayBuffer):
            return self._add_buffer(buffer, state, out, prefix)
        if isinstance(buffer, Sharded):
            names = buffer.names()
            states = {names[number]: one for number, one in buffer.split(state).items()}
        else:
            states = descriptions.for_each(buffer, state, "save: states")
        encodes = descriptions.hook_for_each(buffer, out.encode, "save: encode functions")
        buffers = descriptions.each(buffer)
        parts = {
            name: self._add(
                buffers[name],
                one,
                Outward(encodes[name], out.items),
                manifest.prefix_of(prefix, name),
            )
            for name, one in states.items()
        }
        meta: dict[str, Any] = {"facts": schema.facts_of_any(), "parts": parts}
        if not isinstance(buffer, Mix | Sharded):
            return {"kind": manifest.SEVERAL, "is_dict": isinstance(buffer, dict)} | meta
        meta["facts"]["description"] = schema.text_of(buffer)
        encoded = descriptions.encode(descriptions.without_mesh(buffer))
        kind = manifest.MIX if isinstance(buffer, Mix) else manifest.SHARDED
        return {"kind": kind, "buffer": encoded} | meta

    def _add_buffer(
        self, buffer: ReplayBuffer, state: BufferState, out: Outward, prefix: str
    ) -> dict[str, Any]:
        """Adds the arrays of the state of one buffer; returns its metadata."""
        saved, form = schema.snapshot(buffer, state), None
        is_own, items = not prefix and saved.lies_at(self._path), {}
        self.views += saved.views
        if is_own:
            (view,) = saved.views
            self._own = cast(StoreRows, view.rows)
            self._version = host_rows.number(view.version)
            if out != PLAIN:
                raise ValueError(
                    "encode, items: expected none for the path of the storage itself, whose rows "
                    "are there already, as they are. Save to another path."
                )
        elif not out.items:
            form = external_items.kept_form(saved)
        elif buffer.storage.of_objects:
            if out.encode is not None:
                raise TypeError(
                    "encode: expected items of arrays, got a ListStorage, whose objects are "
                    "written as they are. Leave it out."
                )
            form = external_items.OBJECTS
            data = np.frombuffer(external_items.packed_objects(saved), np.uint8)
            self._add_arrays({external_items.OBJECT_ARRAY: data}, prefix)
        elif out.encode is not None:
            form, source = external_items.encode_items(saved, out.encode)
            items = {external_items.ARRAY: source}
        elif saved.views:
            items = _host_sources(saved)
        self._large |= {prefix + name: source for name, source in items.items()}
        arrays = saved.state if form is None else external_items.without(buffer, saved.state)
        self._add_arrays(arrays, prefix)
        return schema.about(STORE if is_own else BUFFER, saved) | {"form": form}

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
                self._store.own()
            elif is_leader:
                block_store.check_free(self._path)
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
        if copy:
            # Small arrays are views of the state, which may be donated before they are written.
            for name, it in self._small.items():
                self._small[name] = SmallArray(it.kind, bytes(it.data))

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
                store.cut_off()
            return number

    def close(self) -> None:
        """Releases the lock, unless it is that of the state's own storage, and all copies."""
        if self._store is not None and self._own is None:
            self._store.close()
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
        """Waits for the message of a process, and returns it."""
        fetch: Any = self.fetch
        count, _, text = fetch(f"{place}/{process}/0").partition(":")
        for number in range(1, int(count)):
            text += fetch(f"{place}/{process}/{number}").partition(":")[2]
        return json.loads(text)


_LONGEST_MESSAGE = 1 << 20  # characters; gRPC refuses messages of more than 4 MB
_saves = itertools.count()  # a name for each save, the same in all processes


def processes() -> ProcessGroup:
    """Returns all processes of this program, for one save."""
    service = compat.coordination()
    return ProcessGroup() if service is None else ProcessGroup(*service, f"jrb/save/{next(_saves)}")
