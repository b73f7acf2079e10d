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
from jrb.checkpoint import descriptions, external_items, manifest, objects, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.external_items import Outward
from jrb.checkpoint.manifest import EXTRA
from jrb.checkpoint.schema import Snapshot
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
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


# States that are saved.


@dataclasses.dataclass(frozen=True)
class SnapshotGroup:
    """The states of several buffers, or of the shards of one.

    Attributes:
        buffer: the `Sharded` or `Mix`, or a dict or tuple of descriptions.
        kind: the class of the container of the states, such as dict.
        parts: the snapshot of each state, by name; for shards, only those of this process.
    """

    buffer: Several
    kind: type
    parts: "dict[str, AnySnapshot]"

    @property
    def views(self) -> list[HostView]:
        """The views of all rows on the host."""
        return [view for part in self.parts.values() for view in part.views]

    def lies_at(self, path: str) -> bool:
        """Returns False: no storage keeps the items of several buffers."""
        return False


AnySnapshot = Snapshot | SnapshotGroup


def snapshot(buffer: Several, state: AnyState, method: str = "save") -> AnySnapshot:
    """Returns the snapshot of a state that will be saved, after all checks."""
    descriptions.check(buffer, method)
    if isinstance(buffer, ReplayBuffer):
        return schema.snapshot(buffer, state)
    if isinstance(buffer, Sharded):
        names = buffer.names()
        states = {names[number]: one for number, one in buffer.split(state).items()}
    else:
        states = descriptions.for_each(buffer, state, "save: states")
    buffers = descriptions.each(buffer)
    parts = {name: snapshot(buffers[name], one, method) for name, one in states.items()}
    return SnapshotGroup(buffer, type(state), parts)


@contextlib.contextmanager
def reading(saved: AnySnapshot) -> Iterator[None]:
    """Returns a context for a save, for which writes of other threads wait for a while.

    Raises `StaleError` for an older state, of whose rows some may be overwritten already. A write
    that does not wait is noticed when its rows are read, or by the commit.
    """
    with contextlib.ExitStack() as stack:
        for view in saved.views:
            # Wait for the device before the turn is taken, which a callback of it may need.
            version = np.asarray(view.version)
            # No write is under way while the save enters: it would keep the turn, and wait for it.
            with view.rows.turn:
                stack.enter_context(view.rows.drawing())
                view.rows.check_newest(version)
        yield


# Saves.


class PartSave:
    """The arrays and the metadata of one buffer in a generation, after all checks.

    Attributes:
        meta: JSON, the metadata.
    """

    def __init__(self, prefix: str, saved: Snapshot, out: Outward, is_own: bool) -> None:
        buffer, state, form = saved.buffer, saved.state, None
        self._prefix = prefix
        self._large: dict[str, Source] = {}
        small: dict[str, SmallArray] = {}
        if not out.items:
            form = external_items.kept_form(saved)
        elif buffer.storage.of_objects:
            if out.encode is not None:
                raise TypeError(
                    "encode: expected items of arrays, got a ListStorage, whose objects are "
                    "written as they are. Leave it out."
                )
            form = objects.FORM
            data = np.frombuffer(objects.packed_objects(saved), np.uint8)
            self._large, small = schema.sources_of({objects.ARRAY: data})
        elif out.encode is not None:
            form, source = external_items.encode_items(saved, out.encode)
            self._large = {external_items.ARRAY: source}
        elif saved.views and not is_own:
            self._large = _host_sources(saved)
        if form is not None:
            state = external_items.without(buffer, state)
        self._state, self._small = state, small
        about = schema.about(STORE if is_own else BUFFER, saved)
        self.meta: dict[str, Any] = {**about, "form": form}

    def sources(self) -> tuple[dict[str, Source], dict[str, SmallArray]]:
        """Returns the large and the small arrays of the state, by name."""
        large, small = schema.sources_of(self._state)
        named = lambda arrays: {self._prefix + name: it for name, it in arrays.items()}
        return named(large | self._large), named(small | self._small)


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


class SaveJob:
    """A save that has passed all checks; used as a context, it releases its locks at the end."""

    def __init__(
        self, path: str, saved: AnySnapshot, extra: dict[str, Any] | None, out: Outward
    ) -> None:
        self._path, self._extra = path, extra
        # A save to the path of the state's own storage: its rows only have to be committed.
        self._own, self._version = None, 0
        if saved.lies_at(path):
            (view,) = saved.views
            self._own = cast(StoreRows, view.rows)
            self._version = host_rows.number(view.version)
        self._group = processes() if isinstance(saved.buffer, Sharded) else ProcessGroup()
        self._parts: list[PartSave] = []
        self._meta = self._add(saved, out, "")
        if extra is not None:
            self._meta["extra"] = list(extra)
        self._store: BlockStore | None = None
        self._small: dict[str, SmallArray] = {}
        self._writes: list[Callable[[], None]] = []

    def _add(self, saved: AnySnapshot, out: Outward, prefix: str) -> dict[str, Any]:
        """Adds the parts of a snapshot to those of this save, and returns its metadata."""
        if isinstance(saved, Snapshot):
            self._parts.append(PartSave(prefix, saved, out, self._own is not None))
            return self._parts[-1].meta
        buffer, facts = saved.buffer, schema.facts_of_any()
        encodes = descriptions.hook_for_each(buffer, out.encode, "save: encode functions")
        parts = {
            name: self._add(
                part, Outward(encodes[name], out.items), manifest.prefix_of(prefix, name)
            )
            for name, part in saved.parts.items()
        }
        if isinstance(buffer, Mix | Sharded):
            kind = manifest.MIX if isinstance(buffer, Mix) else manifest.SHARDED
            facts |= {"description": schema.text_of(buffer)}
            encoded = descriptions.encode(descriptions.without_mesh(buffer))
            return {"kind": kind, "buffer": encoded, "facts": facts, "parts": parts}
        names = list(parts)
        form = lambda cls: {"dict": names} if issubclass(cls, dict) else {"tuple": len(names)}
        forms = {"buffer": form(type(buffer)), "state": form(saved.kind)}
        return {"kind": manifest.SEVERAL, "forms": forms, "facts": facts, "parts": parts}

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
        sources = [part.sources() for part in self._parts]
        if self._extra is not None and self._group.number == 0:
            sources.append(schema.sources_of(self._extra))
        large = {name: it for large, _ in sources for name, it in large.items()}
        small = {name: it for _, small in sources for name, it in small.items()}
        kept = [] if self._own is None else self._own.shared.names
        self._writes.append(store.put(large, copy, kept))
        # Small arrays are views of the state, which may be donated before they are written.
        held = lambda it: SmallArray(it.kind, bytes(it.data)) if copy else it
        self._small = {name: held(it) for name, it in small.items()}

    def finish(self, keep: int) -> int:
        """Writes the state, releases the lock, and returns the number of the generation."""
        with self:
            return self._write(keep)

    def _write(self, keep: int) -> int:
        store: Any = self._store

        def write_arrays() -> Any:
            for write in self._writes:
                write()
            if self._group.number == 0:
                return None
            small = {
                name: [it.kind, base64.b85encode(it.data).decode()]
                for name, it in self._small.items()
            }
            return {"tables": store.tables(), "small": small, "parts": self._meta["parts"]}

        def commit() -> int:
            if self._group.number != 0:
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

        # The generation is written only when the arrays of all processes are on the disk.
        reports = self._group.all_gather_json(write_arrays)
        number = max(self._group.all_gather_json(commit))
        if self._group.number != 0:
            store.cut_off()
        return number

    def close(self) -> None:
        """Releases the lock, unless it is that of the state's own storage, and all copies."""
        if self._store is not None and self._own is None:
            self._store.close()
        self._writes, self._small = [], {}

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
