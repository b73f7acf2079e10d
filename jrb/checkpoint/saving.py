"""Writes states into stores: the rows that are new or changed, and all other arrays.

Several buffers are parts, each a checkpoint of its own, to which a common generation refers:

```
generation-000000000003       the number and a digest of the generation of each part
train/generation-000000000005 the part `train`, a checkpoint like any other; parts of a mix, and
                              of a sharded buffer, are named 0, 1, ...
demo/...
```

The parts are written first, and keep the generations that older common ones refer to: so the newest
common generation is complete, whatever happens. Of several processes, each writes its own shards;
the first one writes the common generation when all have written theirs.
"""

import abc
import contextlib
import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jrb._core import memory
from jrb._store import generation, opening, table
from jrb._store.errors import DamagedError
from jrb._store.generation import Generation
from jrb._store.store import Store
from jrb._store.threads import share
from jrb._util import casting, pytree
from jrb._util.pytree import Leaf
from jrb._xla import compat
from jrb._xla.compiling import by_description
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, external_items, manifest, objects, schema
from jrb.checkpoint.descriptions import Several
from jrb.checkpoint.external_items import EncodedRows, Outward
from jrb.checkpoint.manifest import EXTRA
from jrb.checkpoint.schema import Snapshot, StateRows
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.state import Buffer
from jrb.storages import host_rows
from jrb.storages.host_rows import HostView
from jrb.storages.memmap import StoreRows
from jrb.types import Item
from jrb.types.messages import PartState

BUFFER, STORE = "buffer", "store"
"""The kinds of checkpoints of one buffer: with rows of its own, or with those of its storage."""

_DIGEST = ".digest"  # the array with a checksum of each block of rows, by which edits are found
_AT_ONCE = 4  # parts are saved by this many times the usual threads, as they wait for the disk


# What a user saves in one generation with a buffer: parameters, keys, the number of a step.


@dataclasses.dataclass(frozen=True)
class ExtraData:
    """Further data of the user in a generation: metadata for JSON, and arrays by name."""

    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)


def extra_data(extra: Item, copy: bool) -> ExtraData:
    """Converts a pytree of arrays and numbers, or None; `copy` is True if these may change."""
    if extra is None:
        return ExtraData()
    kinds, arrays = {}, {}
    for name, leaf in schema.by_name(extra).items():
        array = extra_array(name, leaf)
        kinds[EXTRA + name] = list(schema.kind_of(array))
        raw = casting.raw(array)
        if isinstance(raw, jax.Array) and not (raw.is_fully_addressable or raw.is_fully_replicated):
            raw = multihost_utils.process_allgather(raw, tiled=True)  # which all processes call
        data = schema.array_bytes(raw)
        arrays[EXTRA + name] = bytes(data) if copy else data
    return ExtraData({"extra": list(kinds)}, kinds, arrays)


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
        """Returns True if a part has its rows in the folder to which this save would write it."""
        parts = self.parts.items()
        return any(part.lies_at(manifest.path_of(path, name)) for name, part in parts)


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
    """Returns a context during which no other thread overwrites rows."""
    with contextlib.ExitStack() as stack:
        for view in saved.views:
            stack.enter_context(view.rows.drawing())
            # Raises for an older state, of whose rows some may be overwritten already.
            view.rows.check_newest(view.version)
        yield


# Saves.


def job(path: str, saved: AnySnapshot, extra: ExtraData, out: Outward) -> "Job":
    """Returns the job that saves one buffer or several, after all checks."""
    if not isinstance(saved, Snapshot):
        return GroupJob(path, saved, extra, out)
    return CommitJob(saved, extra) if saved.lies_at(path) else SaveJob(path, saved, extra, out)


class Job(abc.ABC):
    """A save that has passed all checks; used as a context, it releases its locks at the end.

    Attributes:
        store: the store to write to; None before `open`, and if this process writes only parts.
    """

    store: Any = None
    _path: str = ""  # a store is made here if there is none

    def check_free(self) -> None:
        """Raises `ValueError` if files of other programs are in the way; writes nothing."""
        if self._path:
            opening.check_free(self._path)

    @abc.abstractmethod
    def open(self, copy: bool) -> None:
        """Takes the lock and finds what to write; `copy` is True if the state may change later."""

    @abc.abstractmethod
    def write(self, keep: int | None = None) -> int:
        """Writes the state, and returns the number of the new generation."""

    def finish(self, keep: int) -> int:
        """Writes the state, releases the lock, and returns the number of the generation."""
        with self:
            return self.write(keep)

    def expire(self, kept: set[int]) -> None:
        """Removes all generations except `kept`."""
        self.store.expire(kept)

    def close(self) -> None:
        """Releases the lock, if it is held."""
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SaveJob(Job):
    """A save of one buffer to a path that is not that of its own storage."""

    def __init__(self, path: str, saved: Snapshot, extra: ExtraData, out: Outward) -> None:
        form, self._item_rows, self._item_arrays = _external(saved, out)
        if form is not None:  # the items are not in rows of the state's own leaves
            state = external_items.without(saved.plain, saved.state)
            saved = dataclasses.replace(saved, state=state)
        self._path, self._extra, self._saved = path, extra, saved
        self._meta = {**schema.about(BUFFER, saved), "form": form, **extra.meta}
        self._kinds: dict[str, Any] = {}
        self._arrays: dict[str, Any] = {}
        self._pieces: Any = []

    def open(self, copy: bool) -> None:
        """See `Job.open`."""
        last = self._last()
        rows, arrays, kinds = schema.split(self._saved)
        rows = rows if self._item_rows is None else self._item_rows
        store = opening.to_save(self._path, rows.columns, rows.count)
        self.store: Any = store
        try:
            # Rows cannot be compared with a new table, or with a generation saved in between.
            if last is not None and (store.is_new_table() or store.generation != last.number):
                last = None
            reach = rows.count  # rows from here on were never written, in memory or in the store
            if rows.count and self._saved.views:
                reach = min(reach, max(store.reach, *(v.rows.reach for v in self._saved.views)))
            sums = _digest(rows, store.sums.block, reach)
            changed = _changed(store, rows, last, self._saved, sums, reach)
            # A generator: rows of the state are copied to the host while the save writes.
            pieces = _pieces(store, rows, changed)
            if copy:
                pieces = [(slots, list(map(np.array, columns))) for slots, columns in pieces]
                arrays = {name: bytes(array) for name, array in arrays.items()}
            own = {**self._item_arrays, _DIGEST: sums.tobytes()}
            self._kinds = kinds | {name: [] for name in own} | self._extra.kinds
            self._pieces, self._arrays = pieces, {**arrays, **own, **self._extra.arrays}
        except BaseException:
            self.close()
            raise

    def _last(self) -> Generation | None:
        """Returns the generation whose rows this save need not write again; None for none."""
        try:
            last = generation.newest(opening.folder_at(self._path))
            meta = last.meta
        except (DamagedError, FileNotFoundError):
            return None
        # With another description or form, equal bytes could mean something else. Batch size and
        # the like are not compared, so that a change of these does not cause a full save.
        before = descriptions.binding(descriptions.with_defaults(meta.get("buffer")))
        is_same = before == descriptions.binding(self._meta["buffer"])
        return last if is_same and meta.get("form") == self._meta["form"] else None

    def write(self, keep: int | None = None) -> int:
        """See `Job.write`."""
        # Rows go to free places, so the last generation stays valid until the commit refers to the
        # new ones: a crash before that leaves the old checkpoint.
        store = self.store
        for slots, columns in self._pieces:
            store.put(store.version, slots, columns, expiring=False)
        return store.commit(store.version, self._meta, self._kinds, self._arrays, keep)

    def close(self) -> None:
        """Releases the lock, and the memory of the copies that were to be written."""
        super().close()
        self._pieces, self._arrays = [], {}


class CommitJob(Job):
    """A save to the path of the state's own storage: its rows only have to be committed."""

    def __init__(self, saved: Snapshot, extra: ExtraData) -> None:
        (view,) = saved.views
        self._saved, self._extra, self._version = saved, extra, host_rows.number(view.version)
        self.store: Any = cast(StoreRows, view.rows).store  # only `StoreRows` have a path

    def open(self, copy: bool) -> None:
        """Takes the lock, which a state that was only loaded does not have yet."""
        self.store.own()

    def write(self, keep: int | None = None) -> int:
        """Commits all writes as the newest generation, and returns its number."""
        _, arrays, kinds = schema.split(self._saved)
        meta, extra = schema.about(STORE, self._saved), self._extra
        parts = meta | extra.meta, kinds | extra.kinds, arrays | extra.arrays
        return self.store.commit(self._version, *parts, keep)

    def close(self) -> None:
        """Does nothing: the state keeps the lock."""


class GroupJob(Job):
    """A save of several buffers, or of the shards of one.

    Its own store has the common generations, which refer to those of the parts.
    """

    def __init__(self, path: str, saved: SnapshotGroup, extra: ExtraData, out: Outward) -> None:
        buffer, facts = saved.buffer, schema.facts_of_any()
        encodes = descriptions.hook_for_each(buffer, out.encode, "save: encode functions")
        self.parts: dict[str, Job] = {}
        for name, part in saved.parts.items():
            outward = Outward(encodes[name], out.items)
            self.parts[name] = job(manifest.path_of(path, name), part, ExtraData(), outward)
        names, self._group = list(self.parts), ProcessGroup()
        if isinstance(buffer, Sharded):  # whose shards may be in several processes
            names, self._group = buffer.names(), processes()
        if isinstance(buffer, Mix | Sharded):
            kind = manifest.MIX if isinstance(buffer, Mix) else manifest.SHARDED
            facts |= {"description": schema.text_of(buffer)}
            encoded = descriptions.encode(descriptions.without_mesh(buffer))
            about = {"kind": kind, "buffer": encoded}
        else:
            form = lambda cls: {"dict": names} if issubclass(cls, dict) else {"tuple": len(names)}
            forms = {"buffer": form(type(buffer)), "state": form(saved.kind)}
            about = {"kind": manifest.SEVERAL, "forms": forms}
        self._path, self._extra = path, extra
        self._meta = {**about, "facts": facts, **extra.meta}
        self._folders = list(map(manifest.folder_name, names))

    def check_free(self) -> None:
        """Raises `ValueError` if files of other programs are in the way, also of any part."""
        opening.check_free(self._path, self._folders)
        for part in self.parts.values():
            part.check_free()

    def open(self, copy: bool) -> None:
        """See `Job.open`."""
        # All parts are checked first: otherwise some would be left in a folder of other files.
        self._group.all_gather_json(self.check_free)

        def work() -> None:
            if self._group.number == 0:
                self.store = opening.to_save(self._path, (), 0, self._folders)
            begin = compat.with_settings(lambda part: part.open(copy))
            share(begin, self.parts.values(), most=_AT_ONCE)

        try:
            self._group.all_gather_json(work)
        except BaseException:
            self.close()
            raise

    def write(self, keep: int | None = None) -> int:
        """Writes the parts, and then a common generation, whose number is returned."""
        numbers: dict[str, list[Any]] = {}
        # The common generation is written only when the parts of all processes are on the disk.
        for of_process in self._group.all_gather_json(self._write_parts):
            numbers |= of_process

        def write_whole() -> int:
            if self._group.number != 0:
                return 0
            meta = {**self._meta, "parts": dict(sorted(numbers.items()))}
            store, extra = self.store, self._extra
            return store.commit(store.version, meta, extra.kinds, extra.arrays, keep)

        return max(self._group.all_gather_json(write_whole))

    def _write_parts(self) -> dict[str, list[Any]]:
        """Writes the parts of this process; returns the generation of each, number and identity.

        The identity distinguishes a part of this save from one of another save that is copied here.
        """
        written: dict[str, list[Any]] = {}

        def write(name: str) -> None:
            # Keeps older generations of the part: older common generations refer to them.
            number = self.parts[name].write()
            folder = self.parts[name].store.folder
            written[name] = [number, Generation(folder, number).identity]

        # `write` may read items through JAX, for `encode`, so its threads need JAX's settings.
        share(compat.with_settings(write), self.parts, most=_AT_ONCE)
        return written

    def finish(self, keep: int) -> int:
        """Writes all, releases the locks, and returns the number of the common generation."""
        with self:
            number = self.write(keep)
            # Only now, as the old common generations referred to old generations of the parts.
            self._expire_parts()
            return number

    def expire(self, kept: set[int]) -> None:
        """Removes all common generations except `kept`, and what only they refer to."""
        expire = lambda: self.store.expire(kept) if self._group.number == 0 else None
        self._group.all_gather_json(expire)
        self._expire_parts()

    def _expire_parts(self) -> None:
        folder = opening.folder_at(self._path)
        kept: dict[str, set[int]] = {name: set() for name in self.parts}
        for number in generation.numbers(folder):
            for name, one in manifest.readable_generations(folder, number).items():
                kept.setdefault(name, set()).add(one)
        share(lambda name: self.parts[name].expire(kept[name]), self.parts, most=_AT_ONCE)

    def close(self) -> None:
        """Releases all locks."""
        for part in self.parts.values():  # works even if only some were opened
            part.close()
        super().close()


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
            self.leave(f"{place}/{self.number}", json.dumps({"error": repr(error)}))
            raise
        self.leave(f"{place}/{self.number}", json.dumps({"result": result}))
        messages = [json.loads(self.fetch(f"{place}/{number}")) for number in range(self.count)]
        for number, message in enumerate(messages):
            if "error" in message:
                raise OSError(
                    f"save: process {number} of {self.count} failed: {message['error']}. What was "
                    "saved before is still there."
                )
        return [message["result"] for message in messages]


_saves = itertools.count()  # a name for each save, the same in all processes


def processes() -> ProcessGroup:
    """Returns all processes of this program, for one save."""
    service = compat.coordination()
    return ProcessGroup() if service is None else ProcessGroup(*service, f"jrb/save/{next(_saves)}")


# Items that are not in rows of the state's own leaves.


def _external(
    saved: Snapshot, out: Outward
) -> tuple[dict[str, Any] | None, StateRows | None, dict[str, Any]]:
    """Returns metadata, rows and further arrays of items that are encoded, left out, or objects.

    Metadata and rows are None for all other items, which are rows of the state's leaves.
    """
    nothing = StateRows((), (), (), 0, 1)
    if not out.items:
        return external_items.kept_form(saved), nothing, {}
    if saved.buffer.storage.of_objects:
        if out.encode is not None:
            raise TypeError(
                "encode: expected items of arrays, got a ListStorage, whose objects are written as "
                "they are. Leave it out."
            )
        return objects.FORM, nothing, objects.arrays_of(saved)
    if out.encode is None:
        return None, None, {}
    rows = external_items.encoded(saved, out.encode)
    return rows.form, rows, rows.arrays


# Which rows are written.


def _digest(rows: StateRows, block: int, count: int) -> np.ndarray:
    """Returns checksums of blocks of the first `count` rows in memory, uint32; 0 for later blocks.

    They are computed for each save, as edits by hand leave no other trace. Arrays on a device are
    hashed there, since a transfer of 10 GB to the host takes seconds.
    """
    sums = np.zeros(-(-rows.count // block), np.uint32)

    def add(number: int) -> None:
        which = np.arange(number * block, min((number + 1) * block, count))
        for column in rows.fingerprints(which):
            sums[number] = zlib.crc32(memory.view(column), int(sums[number]))

    numbers = range(-(-count // block))
    if isinstance(rows, EncodedRows):  # JAX reads their items, under the settings of this thread
        for number in numbers:
            add(number)
    else:
        share(add, numbers)
    return sums


def _changed(
    store: Store,
    rows: StateRows,
    last: Generation | None,
    saved: Snapshot,
    sums: np.ndarray,
    reach: int,
) -> np.ndarray:
    """Returns the rows that are missing or different in the last generation, int64, in order."""
    every, state = np.arange(reach), saved.state
    before = None if last is None else _as_saved(last, state)
    if not reach or last is None or before is None:
        return every
    count, axes = saved.plain.capacity, len(saved.batch)
    if saved.views:  # a power of two, so that few programs are compiled as the rows grow
        count = min(count, 1 << len(every).bit_length())
    stamps = lambda writer: np.asarray(_stamps(saved.plain, axes, count, writer)).reshape(-1)
    # The writer's stamps show which rows are new, if the state continues the one that was saved.
    # Other rows are compared with the store if the digest of their block has changed; if a method
    # has edited items, all of them are.
    is_new = (stamps(before["writer"]) != stamps(state.writer))[: len(every)]
    suspects = ~is_new
    if (before["edits"] == np.asarray(state.edits)).all():
        is_like = np.zeros(len(sums), np.bool_)
        with contextlib.suppress(DamagedError):
            old = last.array(_DIGEST, np.uint32)
            is_like = old == sums if len(old) == len(sums) else is_like
        suspects &= ~is_like[every // store.sums.block]
    which = np.flatnonzero(suspects)
    # Equal digests of items do not show if the `encode` function has changed: compare a few rows.
    if _differ(store, rows, rows.witnesses(store, np.flatnonzero(~is_new & ~suspects))).any():
        return every
    return np.union1d(every[is_new], which[_differ(store, rows, which)])


def _differ(store: Store, rows: StateRows, which: np.ndarray) -> np.ndarray:
    """Returns which of the rows `which` differ from those in the store, bool like `which`."""
    flags = [np.zeros(0, np.bool_)]
    for piece in schema.in_parts(which, rows.width):
        # Byte by byte, so that NaN is equal to itself and 0.0 differs from -0.0.
        stored = store.take(store.version, [piece] * len(rows.columns))
        differs = np.zeros(len(piece), np.bool_)
        for one, other in zip(rows.take(piece), stored, strict=True):
            differs |= (one != other).any(axis=1)
        flags.append(differs)
    return np.concatenate(flags)


def _as_saved(last: Generation, state: Any) -> Any:
    """Returns the saved state of the writer, and `edits`; None if dtypes or shapes differ."""
    parts = {"writer": state.writer, "edits": state.edits}
    entries, leaves = last.arrays, []
    for name, leaf in schema.by_name(parts).items():
        # They were saved by another version or writer, whose stamps cannot be compared.
        if name not in entries or entries[name]["kind"] != list(schema.kind_of(leaf)):
            return None
        try:
            leaves.append(last.array(name, leaf.dtype).reshape(leaf.shape))
        except (DamagedError, ValueError):
            return None
    return jax.tree.unflatten(jax.tree.structure(parts), leaves)


@by_description("axes", "count")
def _stamps(buffer: Buffer, axes: int, count: int, writer: PartState) -> jax.Array:
    """Returns the writer's stamps of the first `count` slots, uint32 `[V, count]`."""
    slots = jnp.arange(count, dtype=jnp.int32)
    stamp = lambda writer: buffer.writer.generation_of(buffer.ring, writer, slots)
    for _ in range(axes):
        stamp = jax.vmap(stamp)
    return stamp(writer)


def _pieces(
    store: Store, rows: StateRows, which: np.ndarray
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields pieces: indices of rows, and their bytes; skips zeros that were never written."""
    for piece in schema.in_parts(which, rows.width):
        columns = rows.take(piece)
        if not store.is_blank(piece) or not all(map(table.is_zero, columns)):
            yield piece, columns
