"""Checkpoints of several buffers: one for each of them, and a generation that names theirs.

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

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jrb._store import generation, opening
from jrb._store.errors import DamagedError
from jrb._store.threads import share
from jrb._xla import compat
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, loading, manifest, schema
from jrb.checkpoint.external_items import Inward, Outward
from jrb.checkpoint.loading import OpenedCheckpoint
from jrb.checkpoint.saving import CommitJob, ExtraData, Job, SaveJob
from jrb.checkpoint.schema import Snapshot
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.storages.host_rows import HostView
from jrb.types import Item

Several = Any
"""A `ReplayBuffer`, a `Mix`, a `Sharded`, or a dict or tuple of them."""

_AT_ONCE = 4
"""Times as many threads as otherwise for parts, which wait for the disk one beside the other."""

_LONGEST = 200  # bytes of the name of a folder


# Several buffers by their names.


def check(buffer: Several, verb: str) -> None:
    """Raises unless it is a description that can be saved, or some of them."""
    if isinstance(buffer, ReplayBuffer | Mix | Sharded):
        return
    if not isinstance(buffer, dict | tuple) or not buffer:
        order = "(path, buffer)" if verb == "load" else "(path, buffer, state)"
        raise TypeError(
            f"{verb}: expected a ReplayBuffer, a Mix, or a dict or tuple of them, or a Sharded, "
            f"got {type(buffer).__name__}. The order is {verb}{order}."
        )
    for name, part in each(buffer).items():
        if not isinstance(name, str):
            raise TypeError(f"{verb}: expected names of buffers, got the key {name!r}.")
        check(part, verb)
    folders = {name: manifest.folder_name(name) for name in each(buffer)}
    lower = [folder.lower() for folder in folders.values()]
    for name, folder in folders.items():
        if len(folder) > _LONGEST or lower.count(folder.lower()) > 1:
            raise ValueError(
                f"save: buffer {name[:80]!r}: expected a name of at most {_LONGEST} bytes that no "
                "other has in small letters, as it becomes that of a folder. Rename it."
            )


def each(buffer: Several) -> dict[str, Any]:
    """Returns the buffers of a Mix, a dict or a tuple, or the shards of a Sharded, by name."""
    if isinstance(buffer, Sharded):
        return dict.fromkeys(buffer.names(), buffer.part)
    entries = buffer.buffers if isinstance(buffer, Mix) else buffer
    if isinstance(entries, dict):
        return entries
    return {str(number): entry for number, entry in enumerate(entries)}


def for_each(buffer: Several, thing: Any, what: str) -> dict[str, Any]:
    """Returns what belongs to each of some buffers, by its name.

    Args:
        buffer: a Mix, a dict or a tuple of buffers; of a Sharded, one thing is for all shards.
        thing: a tuple for a Mix; else a dict with the same names, or a tuple of that length.
        what: what it is, for the error.
    """
    if isinstance(buffer, Sharded):
        return dict.fromkeys(each(buffer), thing)
    names, form = list(each(buffer)), dict if isinstance(buffer, dict) else tuple
    text = type(thing).__name__
    if isinstance(thing, form):
        entries = each(thing)
        if entries.keys() == set(names):
            return {name: entries[name] for name in names}
        text = f"those of {list(entries)}"
    raise ValueError(
        f"{what}: expected a {form.__name__} of {len(names)} {what.split()[-1]}, one for each of "
        f"{names}, got {text}."
    )


def _hook_for_each(buffer: Several, hook: Any, what: str) -> dict[str, Any]:
    """Returns the function for each buffer: one for all, or those of a dict."""
    if isinstance(hook, dict):
        return for_each(each(buffer), hook, what)
    return dict.fromkeys(each(buffer), hook)


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
    check(buffer, verb)
    if isinstance(buffer, ReplayBuffer):
        return schema.snapshot(buffer, state)
    if isinstance(buffer, Sharded):
        names = buffer.names()
        states = {names[number]: one for number, one in buffer.split(state).items()}
    else:
        states = for_each(buffer, state, "save: states")
    buffers = each(buffer)
    parts = {name: snapshot(buffers[name], one, verb) for name, one in states.items()}
    return SnapshotGroup(buffer, type(state), parts)


@contextlib.contextmanager
def reading(saved: AnySnapshot) -> Iterator[None]:
    """A time during which no other thread overwrites rows."""
    with contextlib.ExitStack() as stack:
        for view in saved.views:
            stack.enter_context(view.rows.drawing())
            view.rows.check_newest(view.version)
        yield


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


_saves = itertools.count()


def processes() -> ProcessGroup:
    """Returns all processes of this program, for one save."""
    service = compat.coordination()
    return ProcessGroup() if service is None else ProcessGroup(*service, f"jrb/save/{next(_saves)}")


# Saving.


def job(path: str, saved: AnySnapshot, extra: ExtraData, out: Outward) -> Job:
    """Returns a save of one buffer or of several, after all checks."""
    if not isinstance(saved, Snapshot):
        return GroupJob(path, saved, extra, out)
    return CommitJob(saved, extra) if saved.lies_at(path) else SaveJob(path, saved, extra, out)


class GroupJob(Job):
    """A save of several buffers, or of the shards of one.

    Its own store is that of the generations that name those of the parts.
    """

    parts: dict[str, Job]
    path: str
    extra: ExtraData
    meta: dict[str, Any]

    def __init__(self, path: str, saved: SnapshotGroup, extra: ExtraData, out: Outward) -> None:
        buffer, facts = saved.buffer, schema.facts_of_any()
        encodes = _hook_for_each(buffer, out.encode, "save: encode functions")
        self.parts = {}
        for name, part in saved.parts.items():
            outward = Outward(encodes[name], out.items)
            self.parts[name] = job(manifest.path_of(path, name), part, ExtraData(), outward)
        names = list(self.parts)
        self._group = ProcessGroup()
        if isinstance(buffer, Sharded):  # also over other processes
            names, self._group = buffer.names(), processes()
        if isinstance(buffer, Mix | Sharded):
            kind = manifest.MIX if isinstance(buffer, Mix) else manifest.SHARDED
            facts |= {"description": schema.text_of(buffer)}
            about = {"kind": kind, "buffer": descriptions.encode(_without_mesh(buffer))}
        else:
            form = lambda cls: {"dict": names} if issubclass(cls, dict) else {"tuple": len(names)}
            forms = {"buffer": form(type(buffer)), "state": form(saved.kind)}
            about = {"kind": manifest.SEVERAL, "forms": forms}
        self.path, self.extra = path, extra
        self.meta = {**about, "facts": facts, **extra.meta}
        self._folders = list(map(manifest.folder_name, names))

    def open(self, copy: bool) -> None:
        """See `Job.open`."""

        def work() -> None:
            if self._group.number == 0:
                self._store = opening.to_save(self.path, (), 0, self._folders)
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
            meta = {**self.meta, "parts": dict(sorted(numbers.items()))}
            # The identities tell a part of this save from one of another that was copied there.
            store, extra = self.store, self.extra
            return store.commit(store.version, meta, extra.kinds, extra.arrays, keep)

        return max(self._group.all_gather_json(write_whole))

    def _write_parts(self) -> dict[str, list[Any]]:
        """Returns number and identity of each part that is in this process, after writing it."""
        written: dict[str, list[Any]] = {}

        def write(name: str) -> None:
            number = self.parts[name].write()
            folder = self.parts[name].store.folder
            written[name] = [number, generation.Generation(folder, number).identity]

        # It may call functions of the user, whose items JAX takes out of arrays.
        share(compat.with_settings(write), self.parts, most=_AT_ONCE)
        return written

    def finish(self, keep: int) -> int:
        """Writes, gives the locks back, and returns the number of the generation."""
        try:
            number = self.write(keep)
            # Only now: older generations of the whole name these of the parts.
            self._expire_parts()
            return number
        finally:
            self.close()

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
        expire = lambda: self.store.expire(kept) if self._group.number == 0 else None
        self._group.all_gather_json(expire)
        self._expire_parts()

    def _expire_parts(self) -> None:
        folder = opening.folder_at(self.path)
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


def _without_mesh(buffer: Any) -> Any:
    """Returns the description without meshes, which no file can hold."""
    if isinstance(buffer, Sharded):
        return dataclasses.replace(buffer, mesh=None)
    if not isinstance(buffer, Mix):
        return buffer
    return dataclasses.replace(buffer, buffers=tuple(map(_without_mesh, buffer.buffers)))


# Loading.


def load(
    checkpoint: OpenedCheckpoint, given: Several, example: Item, device: Any, back: Inward
) -> tuple[Any, Any]:
    """Returns the descriptions and the states of a generation."""
    if given is not None:
        check(given, "load")
    path, meta, kind = checkpoint.path, checkpoint.meta, str(checkpoint.meta.get("kind"))
    if kind not in (manifest.MIX, manifest.SHARDED, manifest.SEVERAL):
        return loading.load(checkpoint, given, example, device, back)
    names = list(manifest.generations(checkpoint.generation))
    buffers = examples = dict.fromkeys(names)
    if kind == manifest.SEVERAL:
        whole = _shaped(path, meta["forms"]["buffer"], dict.fromkeys(names))
        _shaped(path, meta["forms"]["state"], dict.fromkeys(names))
        buffers = buffers if given is None else for_each(whole, given, "load: buffers")
        examples = examples if example is None else for_each(whole, example, "load: examples")
    else:
        cls = Mix if kind == manifest.MIX else Sharded
        plain = None if given is None else _without_mesh(given)
        saved = descriptions.matched(path, meta["buffer"], plain, cls)
        whole = saved if given is None else given
        if names != list(each(whole)):
            raise DamagedError(f"{path}: expected the parts {list(each(whole))}, got {names}.")
        buffers = buffers if given is None else each(given)
        examples = dict.fromkeys(names, example)
    decodes = _hook_for_each(whole, back.decode, "load: decode functions")
    items: dict[str, Any] = dict.fromkeys(decodes)
    if back.items is not None:
        items = for_each(whole, back.items, "load: items")

    def load_part(name: str, device: Any) -> tuple[Any, Any]:
        inward = dataclasses.replace(back, decode=decodes[name], items=items[name])
        return load(checkpoint.part(name), buffers[name], examples[name], device, inward)

    if isinstance(whole, Sharded):
        whole, states = whole.on_mesh(device), {}
        for place, numbers in whole.layout.groups().items():  # the shards of this process
            for number in numbers:
                buffer, states[number] = load_part(names[number], place)
                if buffer.storage != whole.buffer.storage:
                    raise DamagedError(
                        f"{path}: part '{names[number]}': expected the whole's storage."
                    )
        return whole, whole.join(states)
    parts = {name: load_part(name, device) for name in each(whole)}
    loaded = {name: part[0] for name, part in parts.items()}
    states = {name: part[1] for name, part in parts.items()}
    if isinstance(whole, Mix):
        return dataclasses.replace(whole, buffers=tuple(loaded.values())), tuple(states.values())
    forms = meta["forms"]
    return _shaped(path, forms["buffer"], loaded), _shaped(path, forms["state"], states)


def _shaped(path: str, form: Any, parts: dict[str, Any]) -> Any:
    """Returns the dict or tuple that a generation says, of these entries."""
    numbered = map(str, range(min(form.get("tuple", 0), len(parts) + 1)))
    names = form.get("dict") or form.get("fields") or list(numbered)
    if set(names) != parts.keys():
        raise DamagedError(f"{path}: expected the parts {list(parts)}, got {form}.")
    return {n: parts[n] for n in names} if "dict" in form else tuple(parts[n] for n in names)
