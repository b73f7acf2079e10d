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

import dataclasses
from typing import Any

from jrb import _saved
from jrb._store import generation, opening
from jrb._store.errors import DamagedError
from jrb._store.store import Store
from jrb._store.threads import share
from jrb.checkpoint import (
    commits,
    crew,
    descriptions,
    facts,
    matching,
    members,
    native,
)
from jrb.checkpoint.beside import Beside
from jrb.checkpoint.hooks import Inward, Outward
from jrb.checkpoint.members import Several
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Snapshot, Source, Together
from jrb.mix import Mix
from jrb.sharding import Sharded
from jrb.sharding import states as shard_states
from jrb.state import Device
from jrb.types import Item

_AT_ONCE = 4
"""Times as many threads as otherwise for parts, which wait for the disk one beside the other."""


def pending(path: str, saved: Source, extra: Beside, out: Outward) -> "AnyPending":
    """A save of one buffer or of several, after all checks."""
    if not isinstance(saved, Snapshot):
        return Pending(path, saved, extra, out)
    if saved.lies_at(path):
        return commits.Pending(saved, extra)
    return native.Pending(path, saved, extra, out)


class Pending:
    """As `native.Pending`, for several buffers, or the shards of one."""

    parts: "dict[str, AnyPending]"
    path: str
    extra: Beside
    meta: dict[str, Any]

    def __init__(self, path: str, saved: Together, extra: Beside, out: Outward) -> None:
        outward = out.of_each(saved.buffer)
        self.parts = {
            name: pending(_saved.path_of(path, name), part, Beside(), outward[name])
            for name, part in saved.parts.items()
        }
        self.path, self.extra = path, extra
        self.meta = _about(saved) | {"facts": facts.of_several(saved.buffer)} | extra.meta
        whole = isinstance(saved.buffer, Sharded)  # also the shards of other processes
        self.crew: crew.ProcessGroup = crew.of_program() if whole else crew.SingleProcess()
        self._folders = [
            _saved.folder_name(name)
            for name in (shard_states.names(saved.buffer) if whole else self.parts)
        ]
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """Of the generations that name those of the parts."""
        if self._store is None:
            raise ValueError("expected a save that was opened.")
        return self._store

    def open(self, copy: bool) -> None:
        """See `native.Pending.open`."""

        def opened() -> None:
            if self.crew.leads:
                self._store = opening.to_save(self.path, (), 0, self._folders)
            share(lambda part: part.open(copy), self.parts.values(), most=_AT_ONCE)

        try:
            self.crew.together(opened)
        except BaseException:
            self.close()
            raise

    def write(self, keep: int | None = None) -> int:
        """Writes, the parts first; the number of the generation."""
        told = self.crew.together(self._parts_written)
        written = {name: entry for each in told for name, entry in each.items()}
        whole = lambda: self._written(written, keep) if self.crew.leads else 0
        return max(self.crew.together(whole))

    def _parts_written(self) -> dict[str, list[Any]]:
        """Number and identity of each part that is here, written by itself."""
        written: dict[str, list[Any]] = {}

        def write(name: str) -> None:
            number = self.parts[name].write()
            folder = self.parts[name].store.folder
            written[name] = [number, generation.Generation(folder, number).identity]

        share(write, self.parts, most=_AT_ONCE)
        return written

    def _written(self, written: dict[str, list[Any]], keep: int | None) -> int:
        """The generation of the whole, for which the parts have theirs."""
        store, extra = self.store, self.extra
        meta = {**self.meta, "parts": dict(sorted(written.items()))}
        return store.commit(store.version, meta, extra.kinds, extra.arrays, keep)

    def finish(self, keep: int) -> int:
        """Writes, and gives the locks back; the number of the generation."""
        try:
            number = self.write(keep)
            self._expire_parts()
            return number
        finally:
            self.close()

    def expire(self, kept: set[int]) -> None:
        """Removes the generations that need not stay."""
        self.crew.together(lambda: self.store.expire(kept) if self.crew.leads else None)
        self._expire_parts()

    def _expire_parts(self) -> None:
        folder = opening.folder_at(self.path)
        kept: dict[str, set[int]] = {name: set() for name in self.parts}
        for number in generation.numbers(folder):
            for name, one in _saved.known(folder, number).items():
                kept.setdefault(name, set()).add(one)
        share(lambda name: self.parts[name].expire(kept[name]), self.parts, most=_AT_ONCE)

    def close(self) -> None:
        """Gives the locks back."""
        for part in self.parts.values():
            part.close()
        if self._store is not None:
            self._store.close()


AnyPending = native.Pending | commits.Pending | Pending
"""A save that is to be finished."""


def _about(saved: Together) -> dict[str, Any]:
    """What a generation says of several buffers."""
    buffer = saved.buffer
    if isinstance(buffer, Mix | Sharded):
        kind = _saved.MIX if isinstance(buffer, Mix) else _saved.SHARDED
        return {"kind": kind, "buffer": descriptions.encode(_unbound(buffer))}
    kinds = {"buffer": type(buffer), "state": saved.kind}
    forms = {what: members.form_of(kind, list(saved.parts)) for what, kind in kinds.items()}
    return {"kind": _saved.SEVERAL, "forms": forms}


def _unbound(buffer: Any) -> Any:
    """The description without meshes, of which no file knows."""
    if not isinstance(buffer, Mix):
        return shard_states.without_mesh(buffer)
    return dataclasses.replace(buffer, buffers=tuple(map(_unbound, buffer.buffers)))


def load(
    opened: Opened, given: Several, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    """The descriptions and the states of a generation."""
    kinds = {_saved.MIX: _mixed, _saved.SHARDED: _sharded, _saved.SEVERAL: _several}
    read = kinds.get(str(opened.meta.get("kind")), native.load)
    return read(opened, given, example, device, back)


def _mixed(
    opened: Opened, mix: Several, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    given, mix, numbers = mix is not None, _described(opened, mix), opened.parts
    if list(numbers) != list(members.each(mix)):
        raise DamagedError(
            f"{opened.path}: expected {len(mix.buffers)} parts, got {list(numbers)}."
        )
    buffers = members.each(mix) if given else dict.fromkeys(numbers)
    examples = dict.fromkeys(numbers, example)
    found = _parts(opened, buffers, examples, device, back.of_each(mix))
    parts, states = zip(*found.values(), strict=True)
    return dataclasses.replace(mix, buffers=parts), states


def _described(opened: Opened, given: Several) -> Any:
    """The description that was saved, or the one that was given if it is the same."""
    kind = Mix if opened.meta["kind"] == _saved.MIX else Sharded
    plain = None if given is None else _unbound(given)
    found = matching.matched(opened.path, opened.meta["buffer"], plain, kind)
    return found if given is None else given


def _sharded(
    opened: Opened, given: Several, example: Item, device: Any, back: Inward
) -> tuple[Any, Any]:
    """The shards that belong to this process, each read by itself."""
    found = _described(opened, given)
    numbers, known = opened.parts, shard_states.names(found)
    if list(numbers) != known:
        raise DamagedError(f"{opened.path}: expected {len(known)} shards, got {list(numbers)}.")
    sharded = shard_states.on_mesh(found, device)
    inward, states = back.of_each(sharded), {}
    part = None if given is None else given.part
    for place, group in sharded.layout.groups().items():
        for number in group:
            name = known[number]
            found, states[number] = load(opened.part(name), part, example, place, inward[name])
            if found.storage != sharded.buffer.storage:
                raise DamagedError(f"{opened.path}: part '{name}': expected the whole's storage.")
    return sharded, shard_states.join(sharded, states)


def _several(
    opened: Opened, given: Several, example: Item, device: Device, back: Inward
) -> tuple[Any, Any]:
    numbers, forms = opened.parts, opened.meta["forms"]
    for form in forms.values():
        if members.names_of(form, len(numbers)) != set(numbers):
            raise DamagedError(f"{opened.path}: expected the parts {list(numbers)}, got {form}.")
    like = members.formed(forms["buffer"], dict.fromkeys(numbers), given)
    names = list(members.each(like))
    none = dict.fromkeys(names)
    buffers = none if given is None else members.of_each(like, given, "load: buffers")
    examples = none if example is None else members.of_each(like, example, "load: examples")
    found = _parts(opened, buffers, examples, device, back.of_each(like))
    parts = {name: found[name][0] for name in names}
    states = {name: found[name][1] for name in names}
    whole = members.formed(forms["buffer"], parts, given)
    return whole, members.formed(forms["state"], states, given)


def _parts(
    opened: Opened,
    buffers: dict[str, Any],
    examples: dict[str, Item],
    device: Device,
    back: dict[str, Inward],
) -> dict[str, tuple[Any, Any]]:
    """Each buffer and its state."""
    return {
        name: load(opened.part(name), buffers[name], examples[name], device, back[name])
        for name in opened.parts
    }
