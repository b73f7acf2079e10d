"""Writes states into stores: the rows that are new or changed, and all other arrays.

Of several buffers, each is written as a checkpoint of its own, below a generation of the whole:

```
generation-000000000003       which generation of each part belongs to it, and a digest of that
train/generation-000000000005 a buffer of that name, a checkpoint like any other; of a mix, and of
                              a sharded buffer, 0, 1, ...
demo/...
```

The parts are written first, and keep what the older generations of the whole name: whatever
happens, the newest generation of the whole is whole. Of several processes each writes the shards
that it has; the first one writes the generation of the whole, when all have.
"""

import abc
import contextlib
import dataclasses
import functools
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
_AT_ONCE = 4  # times as many threads as otherwise for parts, which wait for the disk


# What a user saves in one generation with a buffer: parameters, keys, the number of a step.


@dataclasses.dataclass(frozen=True)
class ExtraData:
    """Data of the user in a generation: its metadata for JSON; by name, kinds and bytes."""

    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    kinds: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)


def extra_data(extra: Item, copy: bool) -> ExtraData:
    """Returns a pytree of arrays and numbers, None for nothing; `copy`, if it may change."""
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
        buffer: the description, or all of them.
        kind: the class of what the states were in.
        parts: by name; of shards, those of this process.
    """

    buffer: Several
    kind: type
    parts: "dict[str, AnySnapshot]"

    @property
    def views(self) -> list[HostView]:
        """The views of all rows on the host."""
        return [view for part in self.parts.values() for view in part.views]

    def lies_at(self, path: str) -> bool:
        """Returns whether a state has its rows where it would be saved below a path."""
        parts = self.parts.items()
        return any(part.lies_at(manifest.path_of(path, name)) for name, part in parts)


AnySnapshot = Snapshot | SnapshotGroup


def snapshot(buffer: Several, state: AnyState, verb: str = "save") -> AnySnapshot:
    """Returns a state for saving, after all checks."""
    descriptions.check(buffer, verb)
    if isinstance(buffer, ReplayBuffer):
        return schema.snapshot(buffer, state)
    if isinstance(buffer, Sharded):
        names = buffer.names()
        states = {names[number]: one for number, one in buffer.split(state).items()}
    else:
        states = descriptions.for_each(buffer, state, "save: states")
    buffers = descriptions.each(buffer)
    parts = {name: snapshot(buffers[name], one, verb) for name, one in states.items()}
    return SnapshotGroup(buffer, type(state), parts)


@contextlib.contextmanager
def reading(saved: AnySnapshot) -> Iterator[None]:
    """A time during which no other thread overwrites rows."""
    with contextlib.ExitStack() as stack:
        for view in saved.views:
            stack.enter_context(view.rows.drawing())
            # Else it is an older state, of whose rows some may be overwritten already.
            view.rows.check_newest(view.version)
        yield


# Saves.


def job(path: str, saved: AnySnapshot, extra: ExtraData, out: Outward) -> "Job":
    """Returns a save of one buffer or of several, after all checks."""
    if not isinstance(saved, Snapshot):
        return GroupJob(path, saved, extra, out)
    return CommitJob(saved, extra) if saved.lies_at(path) else SaveJob(path, saved, extra, out)


class Job(abc.ABC):
    """A save, after all checks; as a context, it gives its locks back when it is left.

    Attributes:
        store: that is written to; None until the save is opened, and of a process that writes only
            parts.
    """

    store: Any = None
    _path: str = ""  # where a store is made if there is none

    def check_free(self) -> None:
        """Raises if files of others would be in the way; nothing was written."""
        if self._path:
            opening.check_free(self._path)

    @abc.abstractmethod
    def open(self, copy: bool) -> None:
        """Takes the lock, and finds out what will be written; `copy`, if the state may change."""

    @abc.abstractmethod
    def write(self, keep: int | None = None) -> int:
        """Writes, and returns the number of the generation."""

    def finish(self, keep: int) -> int:
        """Writes, gives the lock back, and returns the number of the generation."""
        with self:
            return self.write(keep)

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
        self.store.expire(kept)

    def close(self) -> None:
        """Gives the lock back; also where it was given back before."""
        if self.store is not None:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SaveJob(Job):
    """A save of one buffer to a store of its own."""

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
            # Rows of another table, or of a generation that came in between, say nothing.
            if last is not None and (store.is_new_table() or store.generation != last.number):
                last = None
            reach = rows.count  # no row from there on was ever written, in memory or in the store
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
        """Returns the generation that this save may go on from."""
        try:
            last = generation.newest(opening.folder_at(self._path))
            meta = manifest.meta_of(last)
        except (DamagedError, FileNotFoundError):
            return None
        # Of another description or form, bytes could be equal by chance and mean something else.
        # Batch size and the like are left out: changing them does not make a save a full one.
        before = descriptions.binding(descriptions.upgraded(meta.get("buffer")))
        is_same = before == descriptions.binding(self._meta["buffer"])
        return last if is_same and meta.get("form") == self._meta["form"] else None

    def write(self, keep: int | None = None) -> int:
        """See `Job.write`."""
        # Rows go to free places, so the last generation stays whole until the commit names the new
        # ones: a crash before that leaves the old checkpoint.
        store = self.store
        for slots, columns in self._pieces:
            store.put(store.version, slots, columns, expiring=False)
        return store.commit(store.version, self._meta, self._kinds, self._arrays, keep)

    def close(self) -> None:
        """Gives the lock back, and lets go of what was to be written."""
        super().close()
        self._pieces, self._arrays = [], {}


class CommitJob(Job):
    """A save to the path of the state's own storage: its rows are there, and are only promised."""

    def __init__(self, saved: Snapshot, extra: ExtraData) -> None:
        (view,) = saved.views
        self._saved, self._extra, self._version = saved, extra, host_rows.number(view.version)
        self.store: Any = cast(StoreRows, view.rows).store  # no other rows are at a path

    def open(self, copy: bool) -> None:
        """Takes the lock, if the state was only loaded until now."""
        self.store.own()

    def write(self, keep: int | None = None) -> int:
        """Makes what was written the newest generation, and returns its number."""
        _, arrays, kinds = schema.split(self._saved)
        meta, extra = schema.about(STORE, self._saved), self._extra
        parts = meta | extra.meta, kinds | extra.kinds, arrays | extra.arrays
        return self.store.commit(self._version, *parts, keep)

    def close(self) -> None:
        """Does nothing: the state keeps the lock."""


class GroupJob(Job):
    """A save of several buffers, or of the shards of one.

    Its own store is that of the generations that name those of the parts.
    """

    def __init__(self, path: str, saved: SnapshotGroup, extra: ExtraData, out: Outward) -> None:
        buffer, facts = saved.buffer, schema.facts_of_any()
        encodes = descriptions.hook_for_each(buffer, out.encode, "save: encode functions")
        self.parts: dict[str, Job] = {}
        for name, part in saved.parts.items():
            outward = Outward(encodes[name], out.items)
            self.parts[name] = job(manifest.path_of(path, name), part, ExtraData(), outward)
        names, self._group = list(self.parts), ProcessGroup()
        if isinstance(buffer, Sharded):  # also over other processes
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
        """Raises if files of others would be in the way, also of any part."""
        opening.check_free(self._path, self._folders)
        for part in self.parts.values():
            part.check_free()

    def open(self, copy: bool) -> None:
        """See `Job.open`."""
        # First of all parts, or the others would be left in a folder of somebody else.
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
        """Writes, the parts first, and returns the number of the generation."""
        numbers: dict[str, list[Any]] = {}
        # No process names a part in the whole before all parts are on the disk.
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
        """Writes the parts that are in this process; returns the number and identity of each.

        The identities tell a part of this save from one of another that was copied there.
        """
        written: dict[str, list[Any]] = {}

        def write(name: str) -> None:
            # Without expiring older generations: those of the whole still name them.
            number = self.parts[name].write()
            folder = self.parts[name].store.folder
            written[name] = [number, Generation(folder, number).identity]

        # It may call functions of the user, whose items JAX takes out of arrays.
        share(compat.with_settings(write), self.parts, most=_AT_ONCE)
        return written

    def finish(self, keep: int) -> int:
        """Writes, gives the locks back, and returns the number of the generation."""
        with self:
            number = self.write(keep)
            # Only now: older generations of the whole name these of the parts.
            self._expire_parts()
            return number

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
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
        """Gives the locks back."""
        for part in self.parts.values():  # also where only some were opened
            part.close()
        super().close()


# Processes of a program that save one state together.


@dataclasses.dataclass
class ProcessGroup:
    """Processes that leave messages for each other, and all do the same in the same order.

    The messages go through JAX's own coordination service, not through devices: so processes may
    do it in a thread, beside a training, and hear when one of them has died.

    Attributes:
        number: of this one.
        count: how many there are.
        leave: leaves a message under a name, once.
        fetch: waits for the message of a name.
        name: of what they do together; the same in all of them, and used once.
    """

    number: int = 0
    count: int = 1
    leave: Callable[[str, str], Any] | None = None
    fetch: Callable[[str], str] | None = None
    name: str = ""
    _step: int = 0

    def all_gather_json(self, work: Callable[[], Any]) -> list[Any]:
        """Returns what the work of each process gave, for JSON, when all have done it."""
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
    """Returns what a generation says of such items, their rows, and their other arrays.

    None and None for all other items.
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
    """Returns checksums of blocks of the first `count` rows in memory, uint32; 0 behind them.

    They are computed for each save: hand edits leave no other trace. Arrays of a device are hashed
    there, since to bring 10 GB to the host takes seconds.
    """
    sums = np.zeros(-(-rows.count // block), np.uint32)

    def add(number: int) -> None:
        which = np.arange(number * block, min((number + 1) * block, count))
        for column in rows.fingerprints(which):
            sums[number] = zlib.crc32(memory.view(column), int(sums[number]))

    numbers = range(-(-count // block))
    if isinstance(rows, EncodedRows):  # which JAX takes out, with the settings of this thread
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
    """Returns the rows that the last generation lacks or has otherwise, int64, in order."""
    every, state = np.arange(reach), saved.state
    before = None if last is None else _as_saved(last, state)
    if not reach or last is None or before is None:
        return every
    count, axes = saved.plain.capacity, len(saved.batch)
    if saved.views:  # a power of two, so that little is compiled while it grows
        count = min(count, 1 << len(every).bit_length())
    stamps = lambda writer: np.asarray(_stamps(saved.plain, axes, count, writer)).reshape(-1)
    # The writer's stamps tell which are new, if the state continues the one that was saved. All
    # others are compared with the store where the digest of their block is another, or everywhere
    # if a verb has edited items.
    is_new = (stamps(before["writer"]) != stamps(state.writer))[: len(every)]
    suspects = ~is_new
    if (before["edits"] == np.asarray(state.edits)).all():
        is_like = np.zeros(len(sums), np.bool_)
        with contextlib.suppress(DamagedError):
            old = last.array(_DIGEST, np.uint32)
            is_like = old == sums if len(old) == len(sums) else is_like
        suspects &= ~is_like[every // store.sums.block]
    which = np.flatnonzero(suspects)
    # Equal digests of items do not tell whether a function over them has changed: try a few.
    if _differ(store, rows, rows.witnesses(store, np.flatnonzero(~is_new & ~suspects))).any():
        return every
    return np.union1d(every[is_new], which[_differ(store, rows, which)])


def _differ(store: Store, rows: StateRows, which: np.ndarray) -> np.ndarray:
    """Returns which of some rows are not what the store has, bool like `which`."""
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
    """Returns the writer's state and the edits that were saved; None if of other kinds."""
    parts = {"writer": state.writer, "edits": state.edits}
    entries, leaves = last.arrays, []
    for name, leaf in schema.by_name(parts).items():
        # Saved by another version or writer: stamps then say nothing.
        if name not in entries or entries[name]["kind"] != list(schema.kind_of(leaf)):
            return None
        try:
            leaves.append(last.array(name, leaf.dtype).reshape(leaf.shape))
        except (DamagedError, ValueError):
            return None
    return jax.tree.unflatten(jax.tree.structure(parts), leaves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _stamps(buffer: Buffer, axes: int, count: int, writer: PartState) -> jax.Array:
    """Returns the stamps of the first slots, uint32 `[V, count]`."""
    slots = jnp.arange(count, dtype=jnp.int32)
    stamp = lambda writer: buffer.writer.generation_of(buffer.ring, writer, slots)
    for _ in range(axes):
        stamp = jax.vmap(stamp)
    return stamp(writer)


def _pieces(
    store: Store, rows: StateRows, which: np.ndarray
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yields rows and their bytes; zeros that were never written are left out."""
    for piece in schema.in_parts(which, rows.width):
        columns = rows.take(piece)
        if not store.is_blank(piece) or not all(map(table.is_zero, columns)):
            yield piece, columns
