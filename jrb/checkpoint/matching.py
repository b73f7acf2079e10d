"""What a checkpoint says of a buffer, and whether that is what is wanted."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb._core import memory
from jrb._store.errors import DamagedError
from jrb._store.generation import Location
from jrb._util import prng_keys, pytree
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import (
    descriptions,
    facts,
    host_items,
    members,
    rows,
    state_specs,
)
from jrb.checkpoint.one_by_one import Room
from jrb.checkpoint.opened import Opened
from jrb.checkpoint.snapshots import Snapshot
from jrb.mix import Description
from jrb.state import Buffer, BufferState, Device
from jrb.types import Item, StatefulTransform, Storage


class OtherError(ValueError):
    """Another description was given than was saved."""


class WideError(TypeError):
    """Items have leaves of 64 bits, and JAX keeps 32."""


def about(kind: str, saved: Snapshot) -> dict[str, Any]:
    """What a checkpoint says of a state."""
    return {
        "kind": kind,
        "buffer": descriptions.encode(saved.buffer),
        "items": descriptions.encode_structure(saved.spec),
        "batch": list(saved.batch),
        "facts": facts.of(saved),
    }


def described(
    opened: Opened, kind: str, given: Description | None, example: Item
) -> tuple[Any, Any]:
    """The description, that was saved or given, and the specs of its items."""
    path, meta = opened.path, opened.meta
    if meta.get("kind") != kind:
        raise ValueError(
            f"{path}: expected a checkpoint of a buffer, got one of kind {meta.get('kind')!r}."
        )
    return fitting(path, meta, given, example)


def restored(
    opened: Opened,
    want: BufferState,
    device: Device,
    has_rows: bool = True,
    is_attached: bool = False,
    room: Room | None = None,
) -> BufferState:
    """The state of these specs, as it was saved; its arrays on a device.

    Args:
        opened: what has it.
        want: what it must be.
        device: for its arrays.
        has_rows: whether some of its leaves lie in rows; else it has only the arrays.
        is_attached: whether these are left out, as the state will know where they lie.
        room: for leaves that will lie side by side.

    Raises:
        DamagedError: there are other leaves; or they are not what was written.
        ValueError: they are of another dtype or shape.
    """
    packed = state_specs.packed(want)
    places, leaves = _places(opened, packed, has_rows), []
    buffers = int(np.prod(want.edits.shape, dtype=int))
    targets, together = {} if room is None else room.targets(want.storage, is_blank=False), []
    for leaf, (name, location) in zip(jax.tree.leaves(packed), places, strict=True):
        read = rows.reader(opened, name, location, buffers)
        if is_attached and location is not None:
            leaves.append(np.zeros(0, np.uint8))
        elif id(leaf) in targets:
            leaves.append(targets[id(leaf)])
            together.append((targets[id(leaf)], name, location))
        else:
            leaves.append(memory.restored(leaf, read, device))
    rows.fill(opened, together, buffers)
    state = state_specs.unpacked(want, jax.tree.unflatten(jax.tree.structure(packed), leaves))
    if room is None:
        return state
    return state.replace(storage=room.filled(state.storage, device))


def _places(opened: Opened, packed: PyTree, has_rows: bool) -> list[tuple[str, Location | None]]:
    """The name of each leaf of a state, and where it lies if it is in a column."""
    path, arrays = opened.path, opened.generation.arrays
    in_rows = opened.generation.leaves if has_rows else {}
    there = {name for name in (*in_rows, *arrays) if not name.startswith(".")}
    there = {name for name in there if not name.endswith(rows.BEYOND)}
    wanted, found = state_specs.by_name(packed), []
    slots = opened.generation.body["table"]["slots"]
    odd = sorted(wanted.keys() ^ there)
    if odd:
        raise DamagedError(
            f"{path}: leaf '{odd[0]}': expected the leaves {list(wanted)}, got {sorted(there)}."
        )
    for name, leaf in wanted.items():
        location = in_rows.get(name)
        kind = tuple(arrays[name]["kind"]) if location is None else location.leaf.kind
        inner = prng_keys.raw_spec(leaf)
        size = inner.size * inner.dtype.itemsize
        array = name if location is None else name + rows.BEYOND
        saved = arrays[array]["size"] if array in arrays else 0
        saved += 0 if location is None else location.leaf.width * slots
        if kind != rows.kind_of(leaf) or saved != size:
            raise DamagedError(
                f"{path}: leaf '{name}': expected {rows.kind_of(leaf)} of {size} bytes, got {kind} "
                f"of {saved} bytes."
            )
        found.append((name, location))
    return found


def fitting(
    path: str, meta: dict[str, Any], given: Description | None, example: Item
) -> tuple[Any, Any]:
    """The description and the specs of the items that a file has, or the given ones.

    Raises:
        DamagedError: those of the file do not go together.
    """
    buffer = matched(path, meta["buffer"], given, ReplayBuffer)
    _check_widths(path, meta["items"])
    if given is not None or example is not None:
        return buffer, stored_spec(meta["items"], buffer, example)
    with descriptions.read_from(path):
        spec = stored_spec(meta["items"], buffer, None)
        state_specs.blank(buffer, spec)
    return buffer, spec


def _check_widths(path: str, node: descriptions.Json) -> None:
    """Raises `WideError` where items have leaves of 64 bits, which JAX would change."""
    with descriptions.read_from(path):
        whole = "unknown" not in node
        spec = descriptions.decode_structure(node) if whole else list(_leaves(node))
    for name, leaf in zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True):
        if leaf != narrow(leaf):
            raise WideError(
                f"{path}: leaf '{name}': expected a dtype that JAX keeps, got {leaf.dtype}. Pass "
                "load(path, cast=True), which converts it, or set jax_enable_x64."
            )


def narrow(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The spec of a leaf in the dtype that JAX keeps."""
    if prng_keys.is_keys(leaf.dtype):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _leaves(node: descriptions.Json) -> Iterator[Any]:
    """The specs of items whose structure no file can hold."""
    return map(descriptions.decode_structure, node["leaves"])


def matched(path: str, saved: descriptions.Json, given: Description | None, kind: type) -> Any:
    """The description that was saved, of a kind, or the one that was given if it is the same.

    Batch size, `min_size`, `cast` and transforms may differ: no state depends on them, but for
    transforms that have a state.
    """
    if given is None:
        return descriptions.decoded(path, saved, kind)
    members.check(given, "load")
    before, now = descriptions.upgraded(saved), descriptions.encode(given)
    lines = descriptions.differences(binding(before), binding(now))
    if lines:
        raise OtherError(
            f"load: {lines[0]}. Build the buffer as it was saved, leave buffer= out, or change "
            "capacity and num_envs by load(..., capacity=, num_envs=)."
        )
    return given


def binding(node: descriptions.Json) -> descriptions.Json:
    """An encoded description without what no state depends on."""
    if isinstance(node, list):
        return [binding(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    free = {"batch_size", "transforms", "min_size", "cast"}
    if "part" in node:
        part = descriptions.find_class(node["part"])
        if isinstance(part, type) and issubclass(part, Storage | StatefulTransform):
            free |= set(part.unbound)
    return {
        key: {name: binding(field) for name, field in entry.items() if name not in free}
        | _learning(entry)
        if key == "fields"
        else binding(entry)
        for key, entry in node.items()
        if key not in free
    }


def _learning(fields: dict[str, descriptions.Json]) -> descriptions.Json:
    """The encoded transforms up to the last one that has a state, if any has."""
    tuples = fields.get("transforms")
    parts = tuples.get("tuple", []) if isinstance(tuples, dict) else []
    names = [part.get("part", "") if isinstance(part, dict) else "" for part in parts]
    classes = list(map(descriptions.find_class, names))
    learning = [
        number
        for number, found in enumerate(classes, 1)
        if found is not None and issubclass(found, StatefulTransform)
    ]
    return {"transforms": binding(parts[: learning[-1]])} if learning else {}


def stored_spec(node: descriptions.Json, buffer: Buffer, example: Item) -> Any:
    """The specs of the stored items; those of an example must be the same."""
    if example is None:
        return pytree.spec_of(descriptions.decode_structure(node), "load")
    given = {} if buffer.storage.of_objects else _stored(buffer, example)
    if "unknown" in node:
        pytree.check_like(list(_leaves(node)), jax.tree.leaves(given), "load: example", _MEND)
    else:
        pytree.check_like(descriptions.decode_structure(node), given, "load: example", _MEND)
    return given


def _stored(buffer: Buffer, example: Item) -> Any:
    plain = host_items.on_device(buffer)
    return plain.stored(jax.eval_shape(lambda: plain.init(example)))


_MEND = "Pass a transition like those that were saved, or leave example= out."
