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
from collections.abc import Iterator
from typing import Any

from jrb._store import generation, opening
from jrb._store.errors import DamagedError
from jrb._store.store import Store
from jrb._store.threads import share
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, loading, manifest, process_group, schema
from jrb.checkpoint.extra import ExtraData
from jrb.checkpoint.hooks import Inward, Outward
from jrb.checkpoint.loading import OpenedCheckpoint
from jrb.checkpoint.saving import CommitJob, SaveJob
from jrb.checkpoint.schema import Snapshot
from jrb.mix import AnyState, Mix
from jrb.sharding import Sharded
from jrb.state import Device
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
    return _entries(buffer.buffers if isinstance(buffer, Mix) else buffer)


def _entries(thing: dict[str, Any] | tuple[Any, ...]) -> dict[str, Any]:
    """Returns the entries of a dict or a tuple, by name."""
    if isinstance(thing, dict):
        return thing
    names = descriptions.fields_of(type(thing)) or map(str, range(len(thing)))
    return dict(zip(names, thing, strict=True))


def for_each(buffer: Any, thing: Any, what: str) -> dict[str, Any]:
    """Returns what belongs to each of some buffers, by its name.

    Args:
        buffer: a Mix, a dict or a tuple of buffers.
        thing: a tuple for a Mix; else a dict with the same names, or a tuple of that length.
        what: what it is, for the error.

    Raises:
        ValueError: it is of another form, or has other names.
    """
    if isinstance(buffer, Sharded):
        return dict.fromkeys(each(buffer), thing)
    names, form = list(each(buffer)), dict if isinstance(buffer, dict) else tuple
    text = type(thing).__name__
    if isinstance(thing, form):
        entries = _entries(tuple(thing) if isinstance(buffer, Mix) else thing)
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


def _outward_for_each(buffer: Several, out: Outward) -> dict[str, Outward]:
    encodes = _hook_for_each(buffer, out.encode, "save: encode functions")
    return {name: Outward(encode, out.items) for name, encode in encodes.items()}


def _inward_for_each(buffer: Several, back: Inward) -> dict[str, Inward]:
    decodes = _hook_for_each(buffer, back.decode, "load: decode functions")
    items: dict[str, Any] = dict.fromkeys(decodes)
    if back.items is not None:
        items = for_each(buffer, back.items, "load: items")
    return {
        name: dataclasses.replace(back, decode=decodes[name], items=items[name]) for name in decodes
    }


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
    """Returns what is to be saved, after all checks.

    Raises:
        ValueError, TypeError: it is no description, or no state of it; the message names a leaf.
    """
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
    """A time during which no other thread overwrites rows.

    Raises:
        StaleError: a state is not the newest one of its store.
    """
    with contextlib.ExitStack() as stack:
        for view in saved.views:
            stack.enter_context(view.rows.drawing())
            view.rows.check_newest(view.version)
        yield


# Saving.


def job(path: str, saved: AnySnapshot, extra: ExtraData, out: Outward) -> "AnyJob":
    """Returns a save of one buffer or of several, after all checks."""
    if not isinstance(saved, Snapshot):
        return GroupJob(path, saved, extra, out)
    return CommitJob(saved, extra) if saved.lies_at(path) else SaveJob(path, saved, extra, out)


class GroupJob:
    """As `SaveJob`, for several buffers, or the shards of one."""

    parts: "dict[str, AnyJob]"
    path: str
    extra: ExtraData
    meta: dict[str, Any]

    def __init__(self, path: str, saved: SnapshotGroup, extra: ExtraData, out: Outward) -> None:
        outward = _outward_for_each(saved.buffer, out)
        self.parts = {
            name: job(manifest.path_of(path, name), part, ExtraData(), outward[name])
            for name, part in saved.parts.items()
        }
        self.path, self.extra = path, extra
        self.meta = _about(saved) | extra.meta
        is_sharded = isinstance(saved.buffer, Sharded)  # also over other processes
        self._group: process_group.ProcessGroup = (
            process_group.of_program() if is_sharded else process_group.SingleProcess()
        )
        names = saved.buffer.names() if is_sharded else self.parts
        self._folders = list(map(manifest.folder_name, names))
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The store of the generations that name those of the parts."""
        if self._store is None:
            raise ValueError("expected a save that was opened.")
        return self._store

    def open(self, copy: bool) -> None:
        """See `SaveJob.open`."""

        def work() -> None:
            if self._group.is_leader:
                self._store = opening.to_save(self.path, (), 0, self._folders)
            share(lambda part: part.open(copy), self.parts.values(), most=_AT_ONCE)

        try:
            self._group.all_gather_json(work)
        except BaseException:
            self.close()
            raise

    def write(self, keep: int | None = None) -> int:
        """Writes, the parts first, and returns the number of the generation."""
        numbers: dict[str, list[Any]] = {}
        for of_process in self._group.all_gather_json(self._write_parts):
            numbers |= of_process

        def write_whole() -> int:
            if not self._group.is_leader:
                return 0
            meta = {**self.meta, "parts": dict(sorted(numbers.items()))}
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

        share(write, self.parts, most=_AT_ONCE)
        return written

    def finish(self, keep: int) -> int:
        """Writes, gives the locks back, and returns the number of the generation."""
        try:
            number = self.write(keep)
            self._expire_parts()
            return number
        finally:
            self.close()

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
        expire = lambda: self.store.expire(kept) if self._group.is_leader else None
        self._group.all_gather_json(expire)
        self._expire_parts()

    def _expire_parts(self) -> None:
        folder = opening.folder_at(self.path)
        kept: dict[str, set[int]] = {name: set() for name in self.parts}
        for number in generation.numbers(folder):
            for name, one in manifest.known(folder, number).items():
                kept.setdefault(name, set()).add(one)
        share(lambda name: self.parts[name].expire(kept[name]), self.parts, most=_AT_ONCE)

    def close(self) -> None:
        """Gives the locks back."""
        for part in self.parts.values():
            part.close()
        if self._store is not None:
            self._store.close()


AnyJob = SaveJob | CommitJob | GroupJob
"""A save that is to be finished."""


def _about(saved: SnapshotGroup) -> dict[str, Any]:
    """Returns what a generation says of several buffers."""
    buffer, facts = saved.buffer, schema.facts_of_any()
    if isinstance(buffer, Mix | Sharded):
        kind = manifest.MIX if isinstance(buffer, Mix) else manifest.SHARDED
        described = descriptions.encode(_without_mesh(buffer))
        facts |= {"description": schema.text_of(buffer)}
        return {"kind": kind, "buffer": described, "facts": facts}
    kinds, names = {"buffer": type(buffer), "state": saved.kind}, list(saved.parts)
    forms = {what: _form_of(kind, names) for what, kind in kinds.items()}
    return {"kind": manifest.SEVERAL, "forms": forms, "facts": facts}


def _without_mesh(buffer: Any) -> Any:
    """Returns the description without meshes, which no file can hold."""
    if isinstance(buffer, Sharded):
        return dataclasses.replace(buffer, mesh=None)
    if not isinstance(buffer, Mix):
        return buffer
    return dataclasses.replace(buffer, buffers=tuple(map(_without_mesh, buffer.buffers)))


def _form_of(kind: type, names: list[str]) -> descriptions.Json:
    """Returns what a dict or tuple with these names is, for JSON."""
    if issubclass(kind, dict):
        return {"dict": names}
    fields = descriptions.fields_of(kind)
    if fields is None:
        return {"tuple": len(names)}
    return {"class": descriptions.name_of(kind), "fields": list(fields)}


def _names_of(form: Any, most: int) -> set[str]:
    """Returns the names in what `_form_of` described; of a tuple at most one more than `most`."""
    if "tuple" in form:
        return set(map(str, range(min(form["tuple"], most + 1))))
    return set(form["dict"] if "dict" in form else form["fields"])


def _formed(form: Any, parts: dict[str, Any], given: Any) -> Any:
    """Returns the dict or tuple that `_form_of` described, of these entries.

    Args:
        form: what it was.
        parts: by name.
        given: one of the same kind, or None.

    Raises:
        UnknownError: a class that the program has not defined.
    """
    if "dict" in form:
        return {name: parts[name] for name in form["dict"]}
    if "tuple" in form:
        return tuple(parts[str(number)] for number in range(form["tuple"]))
    fields = form["fields"]
    is_like = lambda cls: list(descriptions.fields_of(cls) or ()) == fields
    cls: Any = descriptions.find_class(form["class"])
    cls = cls if is_like(cls) else type(given)
    if not is_like(cls):
        raise descriptions.UnknownError(
            f"load: expected the class {form['class']} with the fields {fields}, in which the "
            "buffers were. Import its module first, or pass load(path, buffer=...)."
        )
    return cls(**{name: parts[name] for name in fields})


# Loading.


def load(
    opened: OpenedCheckpoint, given: Several, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    """Returns the descriptions and the states of a generation."""
    if given is not None:
        check(given, "load")
    kinds = {manifest.MIX: _load_mix, manifest.SHARDED: _load_shards, manifest.SEVERAL: _load_dict}
    load_kind = kinds.get(str(opened.meta.get("kind")), loading.load)
    return load_kind(opened, given, example, device, back)


def _described(opened: OpenedCheckpoint, given: Several, kind: type) -> Any:
    """Returns the description that was saved, or the one that was given if it is the same."""
    plain = None if given is None else _without_mesh(given)
    saved = schema.matched(opened.path, opened.meta["buffer"], plain, kind)
    return saved if given is None else given


def _load_mix(
    opened: OpenedCheckpoint, given: Several, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    mix, names = _described(opened, given, Mix), list(manifest.generations(opened.generation))
    if names != list(each(mix)):
        raise DamagedError(f"{opened.path}: expected {len(mix.buffers)} parts, got {names}.")
    buffers = dict.fromkeys(names) if given is None else each(mix)
    examples, inward = dict.fromkeys(names, example), _inward_for_each(mix, back)
    parts = _load_parts(opened, names, buffers, examples, device, inward)
    buffers, states = zip(*parts.values(), strict=True)
    return dataclasses.replace(mix, buffers=buffers), states


def _load_shards(
    opened: OpenedCheckpoint, given: Several, example: Item, device: Any, back: Inward
) -> tuple[Any, Any]:
    """Loads the shards that belong to this process, each by itself."""
    sharded = _described(opened, given, Sharded)
    names, known = list(manifest.generations(opened.generation)), sharded.names()
    if names != known:
        raise DamagedError(f"{opened.path}: expected {len(known)} shards, got {names}.")
    sharded = sharded.on_mesh(device)
    inward, states = _inward_for_each(sharded, back), {}
    part = None if given is None else given.part
    for place, group in sharded.layout.groups().items():
        for number in group:
            name = known[number]
            buffer, states[number] = load(opened.part(name), part, example, place, inward[name])
            if buffer.storage != sharded.buffer.storage:
                raise DamagedError(f"{opened.path}: part '{name}': expected the whole's storage.")
    return sharded, sharded.join(states)


def _load_dict(
    opened: OpenedCheckpoint, given: Several, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    numbers, forms = manifest.generations(opened.generation), opened.meta["forms"]
    for form in forms.values():
        if _names_of(form, len(numbers)) != set(numbers):
            raise DamagedError(f"{opened.path}: expected the parts {list(numbers)}, got {form}.")
    like = _formed(forms["buffer"], dict.fromkeys(numbers), given)
    names = list(each(like))
    none = dict.fromkeys(names)
    buffers = none if given is None else for_each(like, given, "load: buffers")
    examples = none if example is None else for_each(like, example, "load: examples")
    inward = _inward_for_each(like, back)
    parts = _load_parts(opened, names, buffers, examples, device, inward)
    whole = _formed(forms["buffer"], {name: parts[name][0] for name in names}, given)
    return whole, _formed(forms["state"], {name: parts[name][1] for name in names}, given)


def _load_parts(
    opened: OpenedCheckpoint,
    names: list[str],
    buffers: dict[str, Any],
    examples: dict[str, Item],
    device: Device,
    back: dict[str, Inward],
) -> dict[str, tuple[Any, Any]]:
    """Returns each buffer and its state."""
    return {
        name: load(opened.part(name), buffers[name], examples[name], device, back[name])
        for name in names
    }
