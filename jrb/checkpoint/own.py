"""Stores whose rows are written in place: a save to their own path, and a load of it."""

import dataclasses
import os
from typing import Any

import jax

from jrb import expected, outside
from jrb.checkpoint import describe, hosted, memory, native, template
from jrb.disk import manifest, opening, reading
from jrb.disk.errors import DamagedError
from jrb.disk.manifest import Body
from jrb.storages.host import Host, columns, number

KIND = "store"


def is_own(path: str, buffer: Any, state: Any) -> bool:
    """Whether a path is that of the store in which this state has its rows."""
    if not hosted.is_hosted(buffer):
        return False
    return hosted.of(buffer, state).host.live.path == os.path.realpath(path)


def save(buffer: Any, state: Any) -> None:
    """Makes what was written the newest generation."""
    spec, _ = template.read_off(buffer, state)
    meta = {
        "kind": KIND,
        "buffer": describe.encode(buffer),
        "items": describe.encode_structure(spec),
    }
    mine = hosted.of(buffer, state)
    bare, rest = outside.bare(buffer), state.replace(storage=None)
    sources = native.sources(bare, rest, (), None)
    mine.host.live.commit(number(mine.version), meta, sources)


def restored(path: str, buffer: Any, example: Any, device: Any, body: Body) -> tuple[Any, Any]:
    """The buffer and its state as they were committed; the first write takes the lock."""
    meta = body["meta"]
    if not meta:
        raise FileNotFoundError(
            f"{path}: expected a store with something saved, found one to which nothing was. "
            "jrb.save(path, buffer, state) does that."
        )
    try:
        buffer = _at(native.matched(meta["buffer"], buffer), path)
        spec = native.stored_spec(meta["items"], buffer, example)
    except KeyError as error:
        raise DamagedError(f"{path}: expected a description, got one with {error!r}.") from error
    _check_columns(path, buffer, spec, body)
    want = jax.eval_shape(lambda: expected.blank(outside.on_device(buffer), spec))
    want = want.replace(storage=None)  # pyright: ignore
    packed = template.packed(want)
    pairs = native.matched_leaves(path, body, packed)
    reading.check_sizes(path, body)
    live = opening.reopen(path, body)
    arrays = [memory.restored(spec, native.reader(path, leaf), device) for spec, leaf in pairs]
    state = template.unpacked(want, jax.tree.unflatten(jax.tree.structure(packed), arrays))
    state = hosted.attach(buffer, state, Host(live, spec))
    return buffer, state if device is None else jax.device_put(state, device)


def _at(buffer: Any, path: str) -> Any:
    """The description, with the path at which the store is found."""
    named = buffer.storage.path
    if named is not None and os.path.realpath(named) == os.path.realpath(path):
        return buffer
    return dataclasses.replace(buffer, storage=dataclasses.replace(buffer.storage, path=path))


def _check_columns(path: str, buffer: Any, spec: Any, body: Body) -> None:
    """Raises unless the rows are those of the description."""
    entry, want = body["table"], columns(spec)
    found = [(column["name"], column["width"]) for column in entry["columns"]]
    if entry["capacity"] != buffer.capacity or found != [(c.name, c.width) for c in want]:
        raise DamagedError(
            f"{path}: expected {buffer.capacity} rows of {[c.name for c in want]}, found "
            f"{entry['capacity']} of {[name for name, _ in found]}."
        )


def damages(path: str) -> list[str]:
    """All that is wrong with the rows, a line each; nothing for other checkpoints."""
    while True:
        try:
            body = manifest.read(path)
            if not body["meta"] or "table" not in body:
                return []
            found = opening.damages(path, body)
            if not found or manifest.read(path)["generation"] == body["generation"]:
                return found
        except DamagedError:
            return []  # said by others
