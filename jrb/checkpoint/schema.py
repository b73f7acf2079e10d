"""States as checkpoints see them: their leaves by name, their specs, and what is said of them.

N capacity, V the buffers that `vmap` has put side by side. A state that is saved, and the specs of
one that is loaded, are seen leaf by leaf: packed arrays by the leaves of items that lie in them,
trees by their leaves, items on the host by `HostLeaf`s. Files have the names of these leaves.
"""

import dataclasses
import datetime
import functools
import importlib
import os
import platform
import re
from typing import Any, ClassVar, TypeGuard

import jax
import jax.core
import jaxlib.version
import numpy as np
from jax.typing import DTypeLike

from jrb import sum_tree
from jrb._core import eager, memory, packed, validate
from jrb._core.host_proxy import HostStorageProxy
from jrb._core.packed import LeafSlice, PackedLeaves
from jrb._util import casting, display, pytree
from jrb._util.pytree import Leaf, PyTree
from jrb._xla import compat
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions
from jrb.mix import Description
from jrb.state import Buffer, BufferState
from jrb.storages import DeviceStorage, HostArrays
from jrb.storages.host_rows import HostView
from jrb.storages.memmap import StoreArrays
from jrb.types import Context, Item, StatefulTransform, Storage
from jrb.types.messages import PartState


class OtherError(ValueError):
    """Another description was given than was saved."""


class WideError(TypeError):
    """Items have leaves of 64 bits, and JAX keeps 32."""


# Leaves.


@dataclasses.dataclass(frozen=True)
class PackedLeaf:
    """A leaf of all items inside a packed array; it has the shape and dtype of a column.

    Attributes:
        array: the name of the packed array.
        part: the leaf's bytes in a row of that.
        shape: `[..., N, ...]`.
        dtype: of its words.
    """

    array: str
    part: slice
    shape: tuple[int, ...]
    dtype: DTypeLike


@dataclasses.dataclass(frozen=True)
class HostLeaf:
    """A leaf of all items on the host, with the shape and dtype of an array `[N, ...]`.

    Attributes:
        view: the rows that it is in.
        number: of the leaf.
        shape: N, and that of an item.
        dtype: as items have it, or of its words.
    """

    view: HostView
    number: int
    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def width(self) -> int:
        """Bytes of a row."""
        raw = self.view.rows.raw[self.number]
        return raw.size * raw.dtype.itemsize

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """Returns the bytes of some rows, uint8 `[B, width]`."""
        return self.view.rows.read_leaf(self.view.version, self.number, slots)


@pytree.component
class UnpackedStorage(DeviceStorage):
    """Stands for a storage on the host: its states have an array for every leaf."""

    def init(self, context: Context, spec: Item) -> Any:
        """Zeros."""
        return jax.tree.map(lambda leaf: packed.zeros_column(context.ring.capacity, leaf), spec)


@pytree.component
class NoItems(HostStorageProxy):
    """Stands for a storage of objects, which are written by themselves."""

    of_objects: ClassVar[bool] = True

    def spec(self, state: None) -> Item:
        """Objects have no shapes."""
        return {}


def named(state: Any) -> Any:
    """Returns a state, or its specs, with a `PackedLeaf` for each leaf of items that is packed."""
    return state.replace(storage=named_storage(state.storage))


def named_storage(storage: Any) -> Any:
    """As `named`, of a storage's state."""
    if not isinstance(storage, PackedLeaves):
        return storage
    if any(array is None for array in storage.arrays.values()):
        return storage  # its items were left out

    def leaf(it: Any) -> Any:
        if not isinstance(it, LeafSlice):
            return it
        size, shape = np.dtype(it.words).itemsize, storage.shape(it)
        part = slice(it.start * size, it.stop * size)
        return _column(lambda dtype: PackedLeaf(it.words, part, shape, dtype), it.dtype)

    return jax.tree.map(leaf, storage.places, is_leaf=packed.is_column)


def _host_leaves(view: HostView) -> Any:
    """Returns all items of a view, as a pytree of `HostLeaf`s."""
    specs, structure = jax.tree.flatten(view.rows.spec)

    def leaf(number: int, spec: jax.ShapeDtypeStruct) -> Any:
        shape = (view.capacity, *spec.shape)
        return _column(lambda dtype: HostLeaf(view, number, shape, dtype), spec.dtype)

    return jax.tree.unflatten(structure, [leaf(*pair) for pair in enumerate(specs)])


def _column(make: Any, dtype: Any) -> Any:
    """Returns a column of a dtype, made from the dtype of its words."""
    if not packed.is_small(dtype):
        return make(dtype)
    return packed.SmallColumn(make(packed.word_dtype(dtype)), np.dtype(dtype))


def by_name(tree: PyTree) -> dict[str, Any]:
    """Returns all leaves by their names."""
    return dict(zip(pytree.unique_names(tree), jax.tree.leaves(tree), strict=True))


def kind_of(leaf: Leaf) -> tuple[str, ...]:
    """Returns dtype and shape as text, which must be equal for rows to be comparable."""
    return (descriptions.dtype_name(leaf.dtype), str(list(leaf.shape)))


def with_tree_leaves(state: PyTree) -> Any:
    """Returns a state, or its specs, with the leaves of every tree in place of all its nodes.

    Nodes depend on the branching, and that on the backend.
    """

    def leaves(part: Any) -> Any:
        if not sum_tree.is_tree(part):
            return part
        if isinstance(part.nodes, jax.ShapeDtypeStruct):
            shape = (*part.nodes.shape[:-1], part.capacity)
            return jax.ShapeDtypeStruct(shape, part.nodes.dtype)
        if memory.on_host(part.nodes):
            part = part.replace(np.asarray(part.nodes))  # so that the leaves are no copy
        return sum_tree.leaf_values(part)

    return jax.tree.map(leaves, state, is_leaf=sum_tree.is_tree)


def with_trees(want: PyTree, state: PyTree) -> Any:
    """Returns the state like the specs `want`, of which `with_tree_leaves` made this one."""

    def whole(spec: Any, part: Any) -> Any:
        if not sum_tree.is_tree(spec):
            return part
        return sum_tree.over(spec.capacity, spec.branching, spec.reduction, part)

    return jax.tree.map(whole, want, state, is_leaf=sum_tree.is_tree)


# Buffers whose items are on the host.


def is_on_host(buffer: Description) -> TypeGuard[Buffer]:
    """Returns whether a buffer keeps arrays on the host."""
    return isinstance(buffer, ReplayBuffer) and isinstance(buffer.storage, HostArrays)


def on_device(buffer: Buffer) -> Any:
    """Returns the buffer with its items on the device; one of objects without them."""
    if not eager.on_host(buffer):
        return buffer
    if buffer.storage.of_objects:
        return dataclasses.replace(buffer, storage=NoItems(), transforms=())
    return dataclasses.replace(buffer, storage=UnpackedStorage())


def is_at(path: str, buffer: Description) -> bool:
    """Returns whether a description names this path as that of its store."""
    if not isinstance(buffer, ReplayBuffer) or not isinstance(buffer.storage, StoreArrays):
        return False
    named = buffer.storage.path
    return named is not None and os.path.realpath(named) == os.path.realpath(path)


def loadable(buffer: Description, given: bool) -> Any:
    """Returns the buffer that a checkpoint is loaded into.

    A store of its own path may still be in use: without a description of the user, the items go to
    a temporary one.
    """
    if given or not is_on_host(buffer):
        return buffer
    return dataclasses.replace(buffer, storage=buffer.storage.elsewhere())


# States that are saved.


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of one buffer, asked and checked before anything is written.

    Attributes:
        buffer: the description.
        state: its state, with `HostLeaf`s for arrays on the host, and None for objects.
        spec: of one item as it is stored; of objects, nothing.
        batch: the axes that `vmap` has put before all leaves.
        stored: the storage's own state.
    """

    buffer: Buffer
    state: BufferState
    spec: Item
    batch: tuple[int, ...]
    stored: PartState = None

    @functools.cached_property
    def plain(self) -> Buffer:
        """The description of such a state, with all items on the device."""
        return on_device(self.buffer)

    @property
    def count(self) -> int:
        """V."""
        return int(np.prod(self.batch, dtype=int))

    @property
    def views(self) -> list[HostView]:
        """The view of its rows on the host, if they are there."""
        return [self.buffer.storage.view(self.stored)] if is_on_host(self.buffer) else []

    def lies_at(self, path: str) -> bool:
        """Returns whether a path is that of the store in which this state has its rows."""
        return any(view.rows.path == os.path.realpath(path) for view in self.views)


def snapshot(buffer: Buffer, state: BufferState) -> Snapshot:
    """Returns what is to be saved of a state, after all checks.

    Raises:
        ValueError, TypeError: it is no state of this buffer; the message names a leaf.
    """
    kept = buffer.storage.state_type if eager.on_host(buffer) else object
    if not isinstance(state, BufferState) or not isinstance(state.storage, kept):
        raise ValueError(
            f"save: expected a state of this buffer, got {type(state).__name__}. The order is "
            "save(path, buffer, state)."
        )
    _check_arrays(state)
    stored, seen = state.storage, state
    if buffer.storage.of_objects:
        seen = state.replace(storage=None)
    elif is_on_host(buffer):
        seen = state.replace(storage=_host_leaves(buffer.storage.view(stored)))
    leaves, structure = jax.tree.flatten(pytree.spec_of(seen, "save"))
    spec, batch = _fitted(on_device(buffer), structure, tuple(leaves), compat.is_x64())
    return Snapshot(buffer, seen, spec, batch, stored)


def _check_arrays(state: BufferState) -> None:
    """Raises unless all leaves of a state that is to be saved are arrays that are there."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        where = f"save: leaf '{pytree.leaf_name(path)}'"
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{where}: expected an array, got a tracer. Save outside jit.")
        if not pytree.is_array(leaf):
            raise TypeError(f"{where}: expected an array, got {type(leaf).__name__}.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{where}: expected an array that is there, got one that was donated. Save the "
                "state that came back."
            )


def blank(buffer: Buffer, spec: Item) -> Any:
    """Returns the specs of the state whose items have this spec."""
    leaves, structure = jax.tree.flatten(spec)
    return _blank(buffer, structure, tuple(leaves), compat.is_x64())


# Both are remembered: a program saves and loads states of the same kind again and again.


@functools.lru_cache(maxsize=16)
def _blank(buffer: Buffer, structure: Any, leaves: tuple, x64: bool) -> Any:
    spec = jax.tree.unflatten(structure, leaves)
    return jax.eval_shape(lambda: validate.blank(on_device(buffer), spec))


@functools.lru_cache(maxsize=16)
def _fitted(
    buffer: Buffer, structure: Any, leaves: tuple[jax.ShapeDtypeStruct, ...], x64: bool
) -> tuple[Item, tuple[int, ...]]:
    """Returns the spec of an item in a state of these specs, and the axes that `vmap` put before.

    Raises:
        ValueError, TypeError: it is no state of this buffer; the message names a leaf.
    """
    specs = jax.tree.unflatten(structure, leaves)
    for axes in range(4):
        strip = lambda leaf, axes=axes: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)
        try:
            spec = buffer.storage.spec(jax.tree.map(strip, specs).storage)
            want = blank(buffer, spec)
        except (TypeError, ValueError, AttributeError, IndexError):
            continue
        batch = leaves[0].shape[:axes]
        if pytree.alike(batched(want, batch), specs):
            return spec, batch
    raise _misfit(buffer, specs)


def _misfit(buffer: Buffer, specs: BufferState) -> Exception:
    """Returns why these are not the specs of a state of this buffer."""
    other = ValueError("save: expected a state of this buffer, got another.")
    try:
        spec = buffer.storage.spec(specs.storage)
    except (AttributeError, IndexError, TypeError, KeyError):
        return other  # as a storage may raise of what is not its own
    try:
        want = blank(buffer, spec)
        mend = "Save the state that this very buffer made."
        pairs = (named(want), named(specs)), (want, specs)  # leaves of items are named first
        for one, two in pairs:
            pytree.check_like(by_name(one), by_name(two), "save", mend)
        validate.check(buffer, specs)
    except (ValueError, TypeError) as error:
        return error
    except (AttributeError, IndexError, KeyError):
        pass  # parts too may raise these of what is not their own
    return other


def batched(tree: Item, batch: tuple[int, ...]) -> Any:
    """Returns these specs with leading axes, each a new object."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*batch, *leaf.shape), leaf.dtype), tree)


# Metadata.


def about(kind: str, saved: Snapshot) -> dict[str, Any]:
    """Returns what a checkpoint says of a state, for JSON."""
    return {
        "kind": kind,
        "buffer": descriptions.encode(saved.buffer),
        "items": descriptions.encode_structure(saved.spec),
        "batch": list(saved.batch),
        "facts": _facts(saved),
    }


def _facts(saved: Snapshot) -> dict[str, Any]:
    buffer, batch, state = saved.buffer, saved.batch, saved.state
    count = lambda writer: buffer.writer.held(buffer.ring, writer).size
    for _ in batch:
        count = jax.vmap(count)
    leaves = jax.tree_util.tree_leaves_with_path(state.writer)
    return facts_of_any() | {
        "description": text_of(buffer),
        "capacity": buffer.capacity,
        "num_envs": buffer.num_envs,
        "size": np.asarray(count(state.writer)).tolist(),
        "writer": {
            jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist()
            for path, leaf in leaves
            if leaf.ndim == len(batch)
        },
    }


def facts_of_any() -> dict[str, Any]:
    """Returns what is written down of any save: its time, and the versions of libraries."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {
        "jrb": importlib.import_module("jrb").__version__,  # which imports this
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    return {"time": now, "versions": versions}


def text_of(buffer: Any) -> str:
    """Returns a description as it is written, functions by their names."""
    return re.sub(r"<(?:function|bound method) (\S+).*?>", r"\1", display.laid_out(buffer))


def fitting(
    path: str, meta: dict[str, Any], given: Description | None, example: Item
) -> tuple[Any, Any]:
    """Returns the description and the specs of the items that a file has, or the given ones.

    Raises:
        DamagedError: those of the file do not go together.
    """
    buffer = matched(path, meta["buffer"], given, ReplayBuffer)
    _check_widths(path, meta["items"])
    if given is not None or example is not None:
        return buffer, stored_spec(meta["items"], buffer, example)
    with descriptions.read_from(path):
        spec = stored_spec(meta["items"], buffer, None)
        blank(buffer, spec)
    return buffer, spec


def _check_widths(path: str, node: descriptions.Json) -> None:
    """Raises `WideError` where items have leaves of 64 bits, which JAX would change."""
    with descriptions.read_from(path):
        spec = _leaf_specs(node) if "unknown" in node else descriptions.decode_structure(node)
    for name, leaf in zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True):
        if leaf != narrow(leaf):
            raise WideError(
                f"{path}: leaf '{name}': expected a dtype that JAX keeps, got {leaf.dtype}. Pass "
                "load(path, cast=True), which converts it, or set jax_enable_x64."
            )


def narrow(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the spec of a leaf in the dtype that JAX keeps."""
    if casting.is_keys(leaf.dtype):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _leaf_specs(node: descriptions.Json) -> list[Any]:
    """Returns the specs of items whose structure no file can hold."""
    return list(map(descriptions.decode_structure, node["leaves"]))


def stored_spec(node: descriptions.Json, buffer: Buffer, example: Item) -> Any:
    """Returns the specs of the stored items; those of an example must be the same."""
    if example is None:
        return pytree.spec_of(descriptions.decode_structure(node), "load")
    given = {}
    if not buffer.storage.of_objects:
        plain = on_device(buffer)
        given = plain.stored(jax.eval_shape(lambda: plain.init(example)))
    mend = "Pass a transition like those that were saved, or leave example= out."
    if "unknown" in node:
        pytree.check_like(_leaf_specs(node), jax.tree.leaves(given), "load: example", mend)
    else:
        pytree.check_like(descriptions.decode_structure(node), given, "load: example", mend)
    return given


def matched(path: str, saved: descriptions.Json, given: Description | None, kind: type) -> Any:
    """Returns the description that was saved, of a kind, or the given one if it is the same.

    Batch size, `min_size`, `cast` and transforms may differ: no state depends on them, but for
    transforms that have a state.
    """
    if given is None:
        return descriptions.decoded(path, saved, kind)
    before, now = descriptions.upgraded(saved), descriptions.encode(given)
    lines = descriptions.differences(binding(before), binding(now))
    if lines:
        raise OtherError(
            f"load: {lines[0]}. Build the buffer as it was saved, leave buffer= out, or change "
            "capacity and num_envs by load(..., capacity=, num_envs=)."
        )
    return given


def binding(node: descriptions.Json) -> descriptions.Json:
    """Returns an encoded description without what no state depends on."""
    if isinstance(node, list):
        return [binding(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    free = {"batch_size", "transforms", "min_size", "cast"}
    if "part" in node:
        part = descriptions.find_class(node["part"])
        if isinstance(part, type) and issubclass(part, Storage | StatefulTransform):
            free |= set(part.unbound)
    kept: dict[str, Any] = {}
    for key, entry in node.items():
        if key == "fields":
            fields = {name: binding(field) for name, field in entry.items() if name not in free}
            kept[key] = fields | _learning(entry)
        elif key not in free:
            kept[key] = binding(entry)
    return kept


def _learning(fields: dict[str, descriptions.Json]) -> descriptions.Json:
    """Returns the encoded transforms up to the last one that has a state, if any has."""
    transforms = fields.get("transforms")
    parts = transforms.get("tuple", []) if isinstance(transforms, dict) else []
    count = 0
    for number, part in enumerate(parts, 1):
        cls = descriptions.find_class(part.get("part", "") if isinstance(part, dict) else "")
        if cls is not None and issubclass(cls, StatefulTransform):
            count = number
    return {"transforms": binding(parts[:count])} if count else {}
