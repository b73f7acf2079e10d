"""States in the form in which they are saved: named arrays, and what a file says of them.

N capacity. Each leaf of a state is an array, named by its path, such as `sampler/raw`; a sum-tree
is saved as its leaves. Items on the host have an array for each leaf, `items/observation`.
"""

import contextlib
import dataclasses
import datetime
import functools
import importlib
import math
import os
import platform
import re
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from jrb import sum_tree
from jrb._core import memory, packed, steps, validate
from jrb._core.packed import LeafSlice, PackedLeaves
from jrb._store.block_store import Source
from jrb._store.blocks import BLOCK
from jrb._store.commits import SmallArray
from jrb._util import casting, display, pytree
from jrb._util.pytree import Leaf, PyTree
from jrb._xla import compat
from jrb._xla.compiling import kept_by_description
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions
from jrb.mix import Description
from jrb.state import Buffer, BufferState
from jrb.storages import DeviceStorage
from jrb.storages.host_rows import HostView
from jrb.storages.memmap import StoreArrays
from jrb.types import Item
from jrb.types.messages import PartState

PIECE = 16 << 20
"""The bytes of rows that are copied at a time."""

SMALL = 1 << 16
"""The most bytes of an array that each generation holds itself, and that each save writes."""


# Leaves as named arrays.


def by_name(tree: PyTree) -> dict[str, Any]:
    """Returns all leaves by their names."""
    return dict(zip(pytree.unique_names(tree), jax.tree.leaves(tree), strict=True))


def kind_of(leaf: Leaf) -> tuple[str, ...]:
    """Returns dtype and shape as text, which must be equal for rows to be comparable."""
    return (descriptions.dtype_name(leaf.dtype), str(list(leaf.shape)))


def with_tree_leaves(state: PyTree) -> Any:
    """Returns a state, or its specs, with each sum-tree replaced by the array of its leaves.

    Inner nodes are not saved: they depend on the branching, and that depends on the backend.
    """

    def leaves(part: Any) -> Any:
        if not sum_tree.is_tree(part):
            return part
        if isinstance(part.nodes, jax.ShapeDtypeStruct):
            # A spec has no nodes to select: compute the shape of the leaves.
            shape = (*part.nodes.shape[:-1], part.capacity)
            return jax.ShapeDtypeStruct(shape, part.nodes.dtype)
        if memory.on_host(part.nodes):
            part = part.replace(np.asarray(part.nodes))  # so that the leaves are no copy
        return sum_tree.leaf_values(part)

    return jax.tree.map(leaves, state, is_leaf=sum_tree.is_tree)


def sources_of(tree: PyTree, prefix: str = "") -> tuple[dict[str, Source], dict[str, SmallArray]]:
    """Returns the large arrays of a state in named form, and copies of the small ones."""
    large, small, leaf_labels = {}, {}, labels(tree)
    leaves = by_name(with_tree_leaves(tree))
    # The JAX array that has the values of each leaf: it never changes, unlike arrays of NumPy.
    parts = jax.tree.leaves(tree, is_leaf=sum_tree.is_tree)
    owners = [part.nodes if sum_tree.is_tree(part) else part for part in parts]
    for (name, leaf), owner in zip(leaves.items(), owners, strict=True):
        words, kind = casting.raw(leaf), kind_of(leaf)
        if words.size * words.dtype.itemsize <= SMALL:
            small[prefix + name] = SmallArray(list(kind), np.asarray(words).tobytes())
        else:
            source = array_source(words, kind, leaf_labels.get(name, name))
            owner = owner if isinstance(owner, jax.Array) else None
            large[prefix + name] = dataclasses.replace(source, owner=owner)
    return large, small


def array_source(words: Any, kind: tuple[str, ...], label: str) -> Source:
    """Returns the source of an array of numbers, of JAX, NumPy, or a `memory.Part`."""
    # A row is what the fewest leading axes leave that fits into a block.
    axes, width = 1, math.prod(words.shape[1:]) * words.dtype.itemsize
    while width > BLOCK and axes < words.ndim:
        width //= words.shape[axes]
        axes += 1
    rows, read = math.prod(words.shape[:axes]), memory.reader(words)

    def read_rows(start: int, stop: int) -> np.ndarray:
        data = np.frombuffer(read(start * width, stop * width), np.uint8)
        return data.reshape(stop - start, width)

    hashes = None if memory.on_host(words) else functools.partial(memory.block_hashes, words)
    return Source(list(kind), f"leaf '{label}'", rows, width, read_rows, hashes=hashes)


def labels(state: Any) -> dict[str, str]:
    """Returns the names of leaves in messages that are not those of arrays: of packed items."""
    storage = getattr(state, "storage", None)
    if not isinstance(storage, PackedLeaves):
        return {}
    pairs = jax.tree_util.tree_leaves_with_path(storage.places, is_leaf=packed.is_column)
    names: dict[str, list[str]] = {}
    for path, place in pairs:
        if isinstance(place, LeafSlice):
            name = f"storage/{pytree.leaf_name(path)}"
            names.setdefault(f"storage/arrays/{place.words}", []).append(name)
    return {array: "', leaf '".join(each) for array, each in names.items()}


# Buffers whose items are on the host.


def is_on_host(buffer: Description) -> TypeGuard[Buffer]:
    """Returns True if a buffer keeps items of arrays on the host."""
    is_buffer = isinstance(buffer, ReplayBuffer)
    return is_buffer and buffer.storage.is_on_host and not buffer.storage.of_objects


def is_at(path: str, buffer: Description) -> bool:
    """Returns True if the storage of a description has its store at this path."""
    if not isinstance(buffer, ReplayBuffer) or not isinstance(buffer.storage, StoreArrays):
        return False
    own = buffer.storage.path
    return own is not None and os.path.realpath(own) == os.path.realpath(path)


def choose_target(buffer: Description, given: bool) -> Any:
    """Returns the description that a checkpoint is loaded into.

    Unless the user has given it, items on the host go to a temporary store, as the store at the
    saved description's path may be in use.
    """
    if given or not is_on_host(buffer):
        return buffer
    return dataclasses.replace(buffer, storage=buffer.storage.elsewhere())


# States that are saved.


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of one buffer, checked before anything is written.

    Attributes:
        buffer: the description.
        state: its state, with None in place of items on the host.
        spec: the specs of a stored item; empty for objects.
        batch: the shape of the leading axes that `vmap` has added to all leaves.
        stored: the storage's own state.
    """

    buffer: Buffer
    state: BufferState
    spec: Item
    batch: tuple[int, ...]
    stored: PartState = None

    @property
    def views(self) -> list[HostView]:
        """The view of its rows on the host, in a list; empty if items are elsewhere."""
        return [self.stored] if is_on_host(self.buffer) else []

    def lies_at(self, path: str) -> bool:
        """Returns True if this state has its rows in the store at a path."""
        return any(view.rows.path == os.path.realpath(path) for view in self.views)


def snapshot(buffer: Buffer, state: BufferState) -> Snapshot:
    """Returns the snapshot of a state that will be saved, after all checks."""
    kept = buffer.storage.state_type if validate.on_host(buffer) else object
    if not isinstance(state, BufferState) or not isinstance(state.storage, kept):
        raise ValueError(
            f"save: expected a state of this buffer, got {type(state).__name__}. The order is "
            "save(path, buffer, state)."
        )
    # All leaves must be arrays that are still there.
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
    half = validate.for_device(buffer, state)
    spec, batch = _find_item_spec(buffer, pytree.spec_of(half, "save"))
    plain = state.replace(storage=None) if validate.on_host(buffer) else state
    return Snapshot(buffer, plain, spec, batch, state.storage)


# Items of a state, as arrays of NumPy.


def host_spec(spec: Item) -> Any:
    """Returns the specs of an item as it is on the host: keys as their words."""
    return jax.tree.map(casting.raw_spec, spec)


def without_items(buffer: Buffer, state: Any) -> Any:
    """Returns the state, or its specs, with None in place of all arrays of items."""
    items = set(map(id, jax.tree.leaves(buffer.storage.slotted(state.storage))))
    storage = jax.tree.map(lambda leaf: None if id(leaf) in items else leaf, state.storage)
    return state.replace(storage=storage)


def held_slots(buffer: Buffer, writer: PartState) -> np.ndarray:
    """Returns the slots that hold items, oldest first."""
    slots, count = steps.in_order(buffer, writer)
    return np.asarray(slots)[: int(count)]


class ItemReader:
    """Reads the items of a state to the host.

    Attributes:
        spec: the specs of one item on the host.
    """

    spec: Any

    def __init__(self, saved: Snapshot) -> None:
        self.spec = jax.tree.map(casting.raw_spec, saved.spec)
        self._saved = saved
        self._state: tuple[int, Any] = -1, None

    def read(self, rows: np.ndarray) -> Any:
        """Returns the items of rows `[K]`; rows of several buffers must be ordered by buffer."""
        # Row v * N + s is slot s of buffer v.
        buffers, slots = np.divmod(rows, self._saved.buffer.capacity)
        numbers = np.unique(buffers) if len(rows) else [0]
        parts = [self._read_leaves(int(number), slots[buffers == number]) for number in numbers]
        leaves = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.spec), list(leaves))

    def _read_leaves(self, number: int, slots: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of the items at some slots of buffer `number`."""
        for view in self._saved.views:
            return view.rows.read(view.version, [slots] * len(view.rows.raw))
        axes, state = len(self._saved.batch), self._state  # other threads may replace it

        def of_buffer(leaf: Any) -> Any:
            leaf = leaf.array[leaf.index] if isinstance(leaf, memory.Part) else jnp.asarray(leaf)
            return leaf.reshape(-1, *leaf.shape[axes:])[number] if axes else leaf

        if state[0] != number:
            state = self._state = number, jax.tree.map(of_buffer, self._saved.state)
        # The read is compiled for each length: take powers of two.
        padded = np.zeros(1 << max(len(slots) - 1, 0).bit_length(), np.int32)
        padded[: len(slots)] = slots
        items = steps.take(self._saved.buffer, state[1], jnp.asarray(padded))
        return [np.asarray(casting.raw(leaf))[: len(slots)] for leaf in jax.tree.leaves(items)]


# Specs of states.


def blank(buffer: Buffer, spec: Item) -> Any:
    """Returns the specs of a state of the buffer, whose items have the specs `spec`.

    Items on the host, which are saved separately, are left out.
    """
    leaves, structure = jax.tree.flatten(spec)
    return _blanks(buffer)(structure, tuple(leaves), compat.is_x64())


@kept_by_description  # a program loads states of the same kind again and again
def _blanks(buffer: Buffer) -> Callable[..., Any]:
    @functools.lru_cache(maxsize=16)
    def blanks(structure: Any, leaves: tuple, x64: bool) -> Any:
        spec = jax.tree.unflatten(structure, leaves)
        state = jax.eval_shape(lambda: validate.blank(buffer, spec))
        return state.replace(storage=None) if validate.on_host(buffer) else state

    return blanks


def _find_item_spec(buffer: Buffer, specs: BufferState) -> tuple[Item, tuple[int, ...]]:
    """Returns the specs of an item in a state, and the shape of the axes that `vmap` has added."""
    # `vmap` may have put axes before all leaves. The storage knows the shape of an item only
    # without them, so try none, one, two and three.
    leaves = jax.tree.leaves(specs)
    for axes in range(4):
        strip = lambda leaf, axes=axes: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)
        single, batch = jax.tree.map(strip, specs), leaves[0].shape[:axes]
        try:
            validate.check(buffer, single)  # mostly cached, as methods have checked the state
            spec = buffer.storage.spec(single.storage)
        except (TypeError, ValueError, AttributeError, LookupError):
            continue
        if all(leaf.shape[:axes] == batch for leaf in leaves):
            return spec, batch
    # It does not fit: find the leaf that differs, for the message.
    other = ValueError("save: expected a state of this buffer, got another.")
    try:
        spec = buffer.storage.spec(specs.storage)
    except (AttributeError, IndexError, TypeError, KeyError):
        raise other from None  # a storage may raise these for the state of another one
    try:
        want = blank(buffer, spec)
        mend = "Save the state that this very buffer made."
        without = specs.replace(storage=want.storage) if want.storage is None else specs
        # Compare the leaves of items under their own names first, and then all arrays.
        for one, two in ((_show_items(want), _show_items(without)), (want, without)):
            pytree.check_like(by_name(one), by_name(two), "save", mend)
        validate.check(buffer, specs)
    except (AttributeError, IndexError, KeyError):
        pass  # parts too may raise these for a state that is not theirs
    raise other


def _show_items(state: Any) -> dict[str, Any]:
    """Returns the specs of the leaves of items, `[N, ...]`, as in `storage/observation`."""
    storage = state.storage
    return {"storage": storage.shown() if isinstance(storage, PackedLeaves) else storage}


def add_batch_axes(tree: Item, batch: tuple[int, ...]) -> Any:
    """Returns these specs with leading axes, each a new object."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*batch, *leaf.shape), leaf.dtype), tree)


def describe_state(kind: str, saved: Snapshot) -> dict[str, Any]:
    """Returns the metadata of a state in a checkpoint, for JSON."""
    buffer, state = saved.buffer, saved.state
    count = lambda writer: buffer.writer.held(buffer.ring, writer).size
    for _ in saved.batch:
        count = jax.vmap(count)
    leaves = jax.tree_util.tree_leaves_with_path(state.writer)
    facts = facts_of(buffer) | {
        "capacity": buffer.capacity,
        "num_envs": buffer.num_envs,
        "size": np.asarray(count(state.writer)).tolist(),
        "writer": {
            jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist()
            for path, leaf in leaves
            if leaf.ndim == len(saved.batch)
        },
    }
    return {
        "kind": kind,
        "buffer": descriptions.encode(buffer),
        "items": descriptions.encode_structure(saved.spec),
        "batch": list(saved.batch),
        "facts": facts,
    }


def facts_of(buffer: Any = None) -> dict[str, Any]:
    """Returns the time of a save, the versions of libraries, and the description as code."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {
        "jrb": importlib.import_module("jrb").__version__,  # which imports this
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    facts: dict[str, Any] = {"time": now, "versions": versions}
    if buffer is not None:
        # Python shows functions with their addresses, which differ from program to program.
        code = re.sub(r"<(?:function|bound method) (\S+).*?>", r"\1", display.format_code(buffer))
        facts["description"] = code
    return facts


# What a file says of a buffer, and the items that it holds.


class WideError(TypeError):
    """The saved items have dtypes of 64 bits, but JAX keeps only 32."""


def match_specs(
    path: str, meta: dict[str, Any], given: Description | None, example: Item
) -> tuple[Any, Any]:
    """Returns the description and item specs of a file; the user's own if these match them."""
    buffer, node = (
        descriptions.match_description(path, meta["buffer"], given, ReplayBuffer),
        meta["items"],
    )
    with descriptions.read_from(path):
        # If no file can hold the structure, only leaves were saved: the example has the structure.
        is_unknown = "unknown" in node
        parts = node["leaves"] if is_unknown else [node]
        specs = [descriptions.decode_structure(part) for part in parts]
        spec = specs if is_unknown else specs[0]
        by_leaf = by_name(spec)
    for name, leaf in by_leaf.items():
        # Without x64, JAX would narrow them silently.
        is_key = casting.is_keys(leaf.dtype)
        if not is_key and leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
            raise WideError(
                f"{path}: leaf '{name}': expected a dtype that JAX keeps, got {leaf.dtype}. Call "
                "load(path, cast=True), which converts it, or set jax_enable_x64."
            )
    if example is None:
        with contextlib.nullcontext() if given is not None else descriptions.read_from(path):
            spec = pytree.spec_of(descriptions.decode_structure(node), "load")
            if given is None:
                blank(buffer, spec)
        return buffer, spec
    stored = {}
    if not buffer.storage.of_objects:
        # Inverse transforms are applied to the example; where its items are makes no difference.
        plain = dataclasses.replace(buffer, storage=DeviceStorage())
        plain = plain if validate.on_host(buffer) else buffer
        stored = plain.item_spec(jax.eval_shape(lambda: plain.init(example)))
    mend = "Pass a transition like those that were saved, or leave example= out."
    other = jax.tree.leaves(stored) if is_unknown else stored
    pytree.check_like(spec, other, "load: example", mend)
    return buffer, stored
