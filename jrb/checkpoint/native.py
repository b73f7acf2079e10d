"""Checkpoints as a folder: a manifest, and blocks of raw bytes (see `jrb.disk.store`)."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jrb import outside, prng, pytree
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import describe, hosted, memory, template
from jrb.disk import manifest, reading, store
from jrb.disk.blocks import Source
from jrb.disk.errors import DamagedError
from jrb.disk.manifest import Body

KIND = "buffer"


class Pending:
    """A save that knows what it will write, and holds the lock.

    Args:
        path: of the checkpoint.
        buffer: the description.
        state: its state.
        copy: whether what will be written is copied now, so that the state may change.
    """

    def __init__(self, path: str, buffer: Any, state: Any, copy: bool) -> None:
        spec, batch = template.read_off(buffer, state)
        plain, arrays = hosted.exported(buffer, state)
        self.meta = {
            "kind": KIND,
            "buffer": describe.encode(buffer),
            "items": describe.encode_structure(spec),
            "batch": list(batch),
        }
        self.saving = store.Saving(path)
        try:
            self.sources = sources(plain, arrays, batch, self.saving.previous, self.meta)
            self.tasks = self.saving.plan(self.sources)
            if copy:
                self._copy()
        except BaseException:
            self.saving.close()
            raise

    def _copy(self) -> None:
        for task in self.tasks:
            task.data = [
                bytes(self.sources[part.leaf].read(part.start, part.stop)) for part in task.parts
            ]
        self.sources = [_forgotten(source) for source in self.sources]

    def finish(self, keep: int) -> None:
        """Writes, and gives the lock back."""
        try:
            self.saving.commit(self.meta, self.sources, self.tasks, keep)
        finally:
            self.saving.close()
            self.sources, self.tasks = [], []


def _forgotten(source: Source) -> Source:
    """A source that does not hold on to its array."""
    small = source.size <= manifest.INLINE
    data = bytes(source.read(0, source.size)) if small else b""
    return Source(source.name, source.kind, source.size, lambda start, stop: data[start:stop])


def sources(
    buffer: Any,
    state: Any,
    batch: tuple[int, ...],
    previous: Body | None,
    meta: dict[str, Any] | None = None,
) -> list[Source]:
    """The arrays of a state; and of each, what may have changed since the last save."""
    by_slot, fresh = set(), None
    if _tells_what_is_new(buffer, batch):
        by_slot = {id(leaf) for leaf in jax.tree.leaves(buffer.storage.slotted(state.storage))}
        fresh = _fresh_slots(buffer, state, previous, meta)
    found, state = [], template.packed(state)
    for name, leaf in zip(template.leaf_names(state), jax.tree.leaves(state), strict=True):
        here = isinstance(leaf, hosted.Leaf)
        words, spans, edge = leaf.raw if here else prng.raw(leaf), None, 0
        told = id(leaf) in by_slot and (here or memory.on_host(words))
        if told and fresh is not None:
            spans, edge = _spans(words, buffer.capacity, *fresh)
        size, kind = words.size * words.dtype.itemsize, tuple(template.kind(leaf))
        read = leaf.read if here else memory.reader(words)
        found.append(Source(name, kind, size, read, told, spans, edge))
    return found


def _tells_what_is_new(buffer: Any, batch: tuple[int, ...]) -> bool:
    """Whether the parts say which slots were written since an earlier state."""
    if batch or not isinstance(buffer, ReplayBuffer):
        return False
    return hasattr(buffer.writer, "written_since") and hasattr(buffer.storage, "slotted")


def _fresh_slots(
    buffer: Any, state: Any, previous: Body | None, meta: dict[str, Any] | None
) -> tuple[int, int] | None:
    """The first slot written since the last save, and how many were; None if nobody knows."""
    if previous is None or meta is None:
        return None
    if _binding(previous["meta"].get("buffer")) != _binding(meta["buffer"]):
        return None
    names = template.leaf_names({"writer": state.writer})
    known = {leaf["name"]: leaf for leaf in previous["leaves"]}
    now, structure = jax.tree.flatten(state.writer)
    try:
        then = [
            np.frombuffer(bytes.fromhex(known[name]["bytes"]), leaf.dtype).reshape(leaf.shape)
            for name, leaf in zip(names, now, strict=True)
        ]
    except (KeyError, ValueError):
        return None
    ring = buffer.ring
    row, count = buffer.writer.written_since(
        ring, jax.tree.unflatten(structure, then), state.writer
    )
    return row * ring.envs, count * ring.envs


def _spans(
    leaf: Any, capacity: int, first: int, count: int
) -> tuple[list[tuple[int, int]] | None, int]:
    """The bytes of the slots that were written, and of all rows beyond the ring; and the first."""
    if not leaf.shape or leaf.shape[0] < capacity:
        return None, 0
    width = leaf.size // leaf.shape[0] * leaf.dtype.itemsize
    end = min(first + count, capacity)
    rows = [(first, end), (0, first + count - end), (capacity, leaf.shape[0])]
    spans = [(start * width, stop * width) for start, stop in rows if start < stop]
    return spans, first * width


def save(path: str, buffer: Any, state: Any, keep: int) -> None:
    """Saves now; see `jrb.checkpoint.save`."""
    with hosted.reading(buffer, state):
        Pending(path, buffer, state, copy=False).finish(keep)


def load(path: str, buffer: Any, example: Any, device: Any) -> tuple[Any, Any]:
    """Loads the newest generation; see `jrb.checkpoint.load`."""
    return reading.snapshot(path, functools.partial(restored, path, buffer, example, device))


def restored(path: str, buffer: Any, example: Any, device: Any, body: Body) -> tuple[Any, Any]:
    """The buffer and its state, from a manifest."""
    meta, given = body["meta"], buffer is not None
    if meta.get("kind") != KIND:
        raise ValueError(
            f"{path}: expected a checkpoint of a buffer, got one of kind {meta.get('kind')!r}."
        )
    try:
        buffer = hosted.prepared(matched(meta["buffer"], buffer), given)
        spec = stored_spec(meta["items"], buffer, example)
        want = template.batched(template.blank(buffer, spec), tuple(meta["batch"]))
    except KeyError as error:
        raise DamagedError(f"{path}: expected a description, got one with {error!r}.") from error
    packed = template.packed(want)
    leaves = matched_leaves(path, body, packed)
    reading.check_sizes(path, body)
    places = hosted.sinks(buffer, spec, packed)
    arrays = [
        memory.restored(kind, reader(path, leaf), device)
        if sink is None
        else sink(reader(path, leaf)(None))
        for (kind, leaf), sink in zip(
            leaves, map(hosted.sink, jax.tree.leaves(places)), strict=True
        )
    ]
    state = template.unpacked(want, jax.tree.unflatten(jax.tree.structure(packed), arrays))
    return buffer, hosted.attached(buffer, state, places)


def reader(path: str, leaf: manifest.Leaf) -> Callable[[memoryview | None], Any]:
    """Fills a memoryview with an array's bytes; or, from None, gives them in pieces."""

    def read(target: memoryview | None) -> Any:
        if target is None:
            return reading.read_pieces(path, leaf, memory.PIECE)
        return reading.read_leaf(path, leaf, target)

    return read


def matched(saved: describe.Json, buffer: Any) -> Any:
    """The description that was saved, or the one that was given if it is the same.

    Batch size, `min_size`, `cast` and transforms may differ: no state depends on them.
    """
    if buffer is None:
        buffer = describe.decode(saved)
        template.check_buffer(buffer, "load")
        return buffer
    template.check_buffer(buffer, "load")
    lines = describe.differences(_binding(saved), _binding(describe.encode(buffer)))
    if lines:
        raise ValueError(
            f"load: {lines[0]}. Build the buffer as it was saved, leave buffer= out, or change "
            "capacity and num_envs by load(..., capacity=, num_envs=)."
        )
    return buffer


def _binding(node: describe.Json) -> describe.Json:
    """An encoded description without what no state depends on."""
    if isinstance(node, list):
        return [_binding(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    free = {"batch_size", "transforms", "min_size", "cast"}
    if "part" in node:
        free |= set(getattr(describe.find_class(node["part"]), "unbound", ()))
    return {
        key: {name: _binding(field) for name, field in entry.items() if name not in free}
        if key == "fields"
        else _binding(entry)
        for key, entry in node.items()
        if key not in free
    }


def stored_spec(node: describe.Json, buffer: Any, example: Any) -> Any:
    """The specs of the stored items; those of an example must be the same."""
    if example is None:
        return pytree.spec_of(describe.decode_structure(node), "load")
    if not isinstance(buffer, ReplayBuffer):
        given = tuple(_stored(part, example) for part in buffer.buffers)
    else:
        given = _stored(buffer, example)
    if "unknown" in node:
        saved = [describe.decode_structure(leaf) for leaf in node["leaves"]]
        pytree.check_like(saved, jax.tree.leaves(given), "load: example", _MEND)
    else:
        pytree.check_like(describe.decode_structure(node), given, "load: example", _MEND)
    return given


def _stored(buffer: Any, example: Any) -> Any:
    plain = outside.on_device(buffer)
    return plain.stored(jax.eval_shape(lambda: plain.init(example)))


_MEND = "Pass a transition like those that were saved, or leave example= out."


def matched_leaves(path: str, body: Body, want: Any) -> list[tuple[Any, manifest.Leaf]]:
    """The entry of each leaf of the state, which must be of its dtype and shape."""
    found = {leaf["name"]: leaf for leaf in body["leaves"]}
    names = template.leaf_names(want)
    odd = sorted(set(names) ^ set(found))
    if odd:
        raise DamagedError(
            f"{path}: leaf '{odd[0]}': expected the leaves {names}, got {list(found)}."
        )
    pairs = []
    for name, spec in zip(names, jax.tree.leaves(want), strict=True):
        inner = prng.raw_spec(spec)
        size = inner.size * inner.dtype.itemsize
        kind, leaf = template.kind(spec), found[name]
        if leaf["kind"] != kind or leaf["size"] != size:
            raise ValueError(
                f"{path}: leaf '{name}': expected {kind} of {size} bytes, got {leaf['kind']} of "
                f"{leaf['size']}. Another jrb, or another setting of jax_enable_x64, wrote it."
            )
        pairs.append((spec, leaf))
    return pairs


def verify(path: str) -> list[str]:
    """All that is wrong; see `jrb.checkpoint.verify`."""
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path}: expected a checkpoint, found no folder there.")
    return reading.damages(path)
