"""Small leaves of items side by side in one array: few gathers and one write for all.

N capacity, W the elements of an item's leaves that lie in one array, T time, E environments,
R = N / E.

Where items have several small leaves of one size of elements, these lie as unsigned integers of
that size, bit for bit, in one array `[N, W]`, or `[E, R, W]` (see `jrb._core.orders`). The rest
lie in columns of their own, in the order of slots. So do rewards and what says where episodes end:
units read these in many rows where they read nothing else, which is two or three times quicker
where they lie close together.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core import columns, rows
from jrb._core.orders import Order
from jrb._util import pytree
from jrb._util.pytree import DType
from jrb._xla import dependencies, gather
from jrb.keys import Keys, path_name, within
from jrb.types import AuxRead, Item, SlotsForLeaf, WritePlan
from jrb.types.messages import PartState

_SMALL = 1024
"""Bytes of the largest leaf of an item that lies beside others."""

_NARROW = 32
"""Bytes of the largest that is read together with others: cutting wider ones apart costs more than
a gather for each (1.3 times the time of a cycle of n-step returns, or of windows)."""

_PIECE = 40
"""Elements that are read together, and a few more. XLA's CPU compiler copies rows of 49 to 75 one
element after the other: a cycle with rows of 63 takes 1.3 to 1.9 times as long."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a leaf is that lies beside others.

    Attributes:
        words: the name of the array, the dtype of its elements.
        start: the leaf's first element in a row of the array.
        shape: of an item's leaf.
        dtype: the leaf's own.
    """

    words: str
    start: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def stop(self) -> int:
        """Behind the leaf's last element."""
        return self.start + math.prod(self.shape)

    @property
    def is_narrow(self) -> bool:
        """Whether it is read together with others."""
        return (self.stop - self.start) * np.dtype(self.words).itemsize <= _NARROW

    def of_rows(self, words: Any, first: int = 0) -> jax.Array:
        """The leaf, `[..., *shape]`, of rows `[..., W]` from their element `first` on."""
        flat = words[..., self.start - first : self.stop - first]
        return _from_words(flat.reshape(*words.shape[:-1], *self.shape), self.dtype)

    def to_rows(self, values: jax.Array) -> jax.Array:
        """The leaf's elements `[..., stop - start]` as they lie in the array."""
        return _to_words(self.flat(values), np.dtype(self.words))

    def flat(self, values: jax.Array) -> jax.Array:
        """The leaf's elements `[..., stop - start]`, of its own dtype."""
        lead = values.shape[: values.ndim - len(self.shape)]
        return values.reshape(*lead, self.stop - self.start)


@dataclasses.dataclass(frozen=True)
class Form:
    """How items of which some leaves lie side by side are put together.

    Attributes:
        structure: of the items.
        entries: for each leaf its place beside others, or the name of its column.
        order: in which rows lie.
    """

    structure: Any
    entries: tuple[Place | str, ...]
    order: Order


class PackedLeaves(pytree.State):
    """Items of which some leaves lie side by side. They can be looked at as if they did not.

    `state["next"]["reward"]`, or `state.next.reward` for items with attributes, is a copy of that
    leaf as an array `[N, ...]`; where it lies in a column of its own, the column.

    Attributes:
        columns: of the leaves that lie alone, by their names.
        arrays: `[N, W]`, or `[E, R, W]`, by the names of their dtypes.
        form: what is where; no array.
    """

    columns: dict[str, Any]
    arrays: dict[str, Any]
    form: Form = pytree.static(default=None)

    @property
    def order(self) -> Order:
        """In which rows lie."""
        return self.form.order

    @property
    def places(self) -> Any:
        """The pytree of the items, with columns, and `Place`s for the leaves beside others."""
        entries = self.form.entries
        found = [it if isinstance(it, Place) else self.columns[it] for it in entries]
        return jax.tree.unflatten(self.form.structure, found)

    def filled(self, places: Any, arrays: dict[str, Any]) -> "PackedLeaves":
        """The same items in other columns and arrays; what `places` has for others is not read."""
        flat = jax.tree.leaves(places, is_leaf=columns.is_column)
        pairs = zip(self.form.entries, flat, strict=True)
        alone = {name: column for name, column in pairs if not isinstance(name, Place)}
        return self.replace(columns=alone, arrays=arrays)

    @property
    def leaves(self) -> Any:
        """All leaves, a pytree like the items."""
        return self._seen(self.places)

    @property
    def widths(self) -> dict[str, int]:
        """W of every array as the places want it, by its name."""
        return _widths(self.places)

    def shown(self) -> Any:
        """The pytree of the items, with columns, and specs for the leaves beside others."""
        if not all(map(pytree.is_array, self.arrays.values())):
            return self  # of a state that was mapped to something else

        def leaf(it: Any) -> Any:
            if not isinstance(it, Place):
                return columns.array(it)
            return jax.ShapeDtypeStruct(self.shape(it), it.dtype)

        return jax.tree.map(leaf, self.places, is_leaf=columns.is_column)

    def shape(self, place: Place) -> tuple[int, ...]:
        """That of a leaf that lies beside others, `[..., N, ...]`."""
        shape = self.arrays[place.words].shape
        return (*shape[: -1 - self.order.axes], self.order.capacity(shape), *place.shape)

    def _seen(self, places: Any) -> Any:
        def leaf(it: Any) -> Any:
            if not isinstance(it, Place):
                return it
            words = self.arrays[it.words][..., it.start : it.stop]
            return it.of_rows(self.order.by_slot(words), it.start)

        return jax.tree.map(leaf, places, is_leaf=columns.is_column)

    def __getitem__(self, name: Any) -> Any:
        return self._seen(self.places[name])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("columns", "arrays", "form", "order", "places"):
            raise AttributeError(name)
        getattr(self.places, name)  # raises where items have no such thing
        return getattr(self.leaves, name)


def places(state: PartState) -> Any:
    """The pytree of the items, with columns or `Place`s for leaves."""
    return state.places if isinstance(state, PackedLeaves) else state


def _arrays(state: PartState) -> dict[str, Any]:
    return state.arrays if isinstance(state, PackedLeaves) else {}


def _with(state: PartState, places: Any, arrays: dict[str, Any]) -> Any:
    """The same items, or their columns, with other arrays."""
    return state.filled(places, arrays) if isinstance(state, PackedLeaves) else places


def _order(state: PartState) -> Order:
    return state.order if isinstance(state, PackedLeaves) else Order()


def room(count: int, spec: Item, keys: Keys, order: Order) -> Any:
    """Zeros for so many items; a plain pytree of columns where no leaves lie side by side."""
    found = _placed(spec, keys)
    if not found:
        return jax.tree.map(functools.partial(columns.room, count), spec)
    names, leaves = pytree.unique_names(spec), jax.tree.leaves(spec)
    alone = {names[n]: columns.room(count, it) for n, it in enumerate(leaves) if n not in found}
    entries = tuple(found.get(n, name) for n, name in enumerate(names))
    wanted = _widths(entries).items()
    arrays = {name: jnp.zeros((*order.lead(count), width), name) for name, width in wanted}
    form = Form(jax.tree.structure(spec), entries, order)
    return PackedLeaves(columns=alone, arrays=arrays, form=form)


def _widths(places: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for it in jax.tree.leaves(places, is_leaf=columns.is_column):
        if isinstance(it, Place):
            found[it.words] = max(it.stop, found.get(it.words, 0))
    return found


def _placed(spec: Item, keys: Keys) -> dict[int, Place]:
    """The places of those leaves that lie beside others, by their numbers."""
    groups: dict[str, list[int]] = {}
    leaves, names = jax.tree.leaves(spec), pytree.leaf_names(spec)
    for number, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        words = None if _is_read_alone(name, keys) else _words_of(leaf.dtype)
        if words is not None and 0 < leaf.size * words.itemsize <= _SMALL:
            groups.setdefault(words.name, []).append(number)
    found = {}
    for words, numbers in groups.items():
        start = 0
        each = [Place(words, 0, tuple(leaves[n].shape), np.dtype(leaves[n].dtype)) for n in numbers]
        pairs = zip(numbers, each, strict=True)
        for number, place in sorted(pairs, key=lambda pair: not pair[1].is_narrow):
            found[number] = dataclasses.replace(place, start=start)
            start = found[number].stop
    return {n: place for n, place in found.items() if len(groups[place.words]) > 1}


def _is_read_alone(name: str, keys: Keys) -> bool:
    roles = (keys.reward, keys.done, keys.terminated, keys.truncated, keys.episode)
    return any(role is not None and within(name, path_name(role)) for role in roles)


def spec(state: PartState) -> Item:
    """One item."""

    def kind(it: Any) -> jax.ShapeDtypeStruct:
        shape = it.shape if isinstance(it, Place) else it.shape[1:]
        return jax.ShapeDtypeStruct(shape, it.dtype)

    return jax.tree.map(kind, places(state), is_leaf=columns.is_column)


def put(state: PartState, write: WritePlan, items: Item) -> tuple[Any, WritePlan]:
    """Returns the state with rows `[T, E, ...]` at the slots of a write, and the write.

    The write waits for these rows (see `rows.in_line`). Gradients stop here.
    """
    found: dict[str, list[tuple[Place, jax.Array]]] = {name: [] for name in _arrays(state)}

    def one(it: Any, new: jax.Array) -> Any:
        nonlocal write
        if not isinstance(it, Place):
            column = columns.put(it, write, columns.packed(new))
            write = rows.in_line(write, columns.array(column))
            return column
        found[it.words].append((it, lax.stop_gradient(new)))
        return it

    left = jax.tree.map(one, places(state), items, is_leaf=columns.is_column)
    arrays = {}
    for name, array in _arrays(state).items():
        arrays[name] = _order(state).put(array, write, _joined(found[name]))
        write = rows.in_line(write, arrays[name])
    return _with(state, left, arrays), write


def _joined(leaves: list[tuple[Place, jax.Array]]) -> jax.Array:
    """The rows `[..., W]` of which these are the leaves.

    Neighbours of one dtype are cast together: XLA's CPU compiler makes a kernel of each operand
    where it joins more than eight.
    """
    leaves = sorted(leaves, key=lambda pair: pair[0].start)
    runs = itertools.groupby(leaves, key=lambda pair: pair[0].dtype)
    words = np.dtype(leaves[0][0].words)
    join = lambda parts: jnp.concatenate(list(parts), axis=-1)
    return join(_to_words(join(place.flat(leaf) for place, leaf in run), words) for _, run in runs)


def get(
    state: PartState, where: SlotsForLeaf, lookups: Sequence[AuxRead]
) -> tuple[Item, list[jax.Array]]:
    """Each leaf at its slots, read just once; a gather for many that are read at the same slots.

    Returns:
        The items, and what is looked up beside them.
    """
    beside = [it.array for it in lookups]
    paths, _ = jax.tree_util.tree_flatten_with_path(places(state), is_leaf=columns.is_column)
    asked = [where(pytree.leaf_name(path)) for path, _ in paths]
    asked += [it.slots for it in lookups]
    unique = list({id(slots): slots for slots in asked}.values())
    number = [[one is slots for one in unique].index(True) for slots in asked]
    arrays, structure = jax.tree.flatten((state, beside))

    def found(times: int, *flat: jax.Array) -> tuple[Item, list[jax.Array]]:
        state, beside = jax.tree.unflatten(structure, flat[: len(arrays)])
        asked = [flat[len(arrays) :][which] for which in number]
        return _read(state, beside, _gathers(state, beside, asked, times))

    few = any(gather.is_few for gather in _gathers(state, beside, asked, 1))
    return gather.scaled_by_vmap(few, found, *arrays, *unique)


def _read(
    state: PartState, beside: list[jax.Array], gathers: list["_Gather"]
) -> tuple[Item, list[jax.Array]]:
    """The leaves, and what is beside them, that some gathers read, together."""
    read = dependencies.materialize(
        lambda: [gather.read() for gather in gathers],
        lambda found: [gather.laid(rows) for gather, rows in zip(gathers, found, strict=True)],
    )
    leaves: dict[int, jax.Array] = {}
    for each, found in zip(gathers, read, strict=True):
        leaves.update(zip(each.entries, each.leaves(found), strict=True))
    structure = jax.tree.structure((places(state), beside), is_leaf=columns.is_column)
    return jax.tree.unflatten(structure, [leaves[number] for number in range(len(leaves))])


@dataclasses.dataclass(frozen=True)
class _Gather:
    """Leaves that one gather reads.

    Attributes:
        array: in which they lie, a column or `[..., W]`.
        slots: of the items, int32 `[...]`.
        order: in which rows lie.
        is_few: whether one thread is to read them (see `jrb._xla.gather`).
        entries: their places, or one column, by the numbers of the leaves.
    """

    array: jax.Array
    slots: jax.Array
    order: Order
    is_few: bool
    entries: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def first(self) -> int:
        """The first element of a row that is read."""
        return min(it.start for it in self.entries.values())

    def read(self) -> Any:
        """The leaves, or few rows of all of them; to be called in `dependencies.materialize`."""
        if any(isinstance(it, Place) for it in self.entries.values()):
            stop = max(it.stop for it in self.entries.values())
            found = self.order.get(self.array, self.slots, self.first, stop)
        else:
            found = gather.items_at(self.array, self.slots)
        return found if self.is_few else self._cut(found)

    def laid(self, found: Any) -> Any:
        """What was read, if it is few rows in a room."""
        return gather.into_scratch(found) if self.is_few else found

    def leaves(self, read: Any) -> list[jax.Array]:
        """The leaves, of what was read and laid."""
        return self._cut(gather.from_scratch(read)) if self.is_few else read

    def _cut(self, found: jax.Array) -> list[jax.Array]:
        return [
            it.of_rows(found, self.first)
            if isinstance(it, Place)
            else columns.unpacked(found, it.dtype)
            for it in self.entries.values()
        ]


def _gathers(
    state: PartState, beside: list[jax.Array], asked: list[jax.Array], times: int
) -> list[_Gather]:
    """The gathers for all entries, each asked for at its slots, so many `times` at once.

    Where rows are few, one for all that lie in an array; else one for narrow leaves that lie close
    together, and one for each of the others.
    """
    found: dict[Any, _Gather] = {}
    entries = jax.tree.leaves((places(state), beside), is_leaf=columns.is_column)
    for number, (it, slots) in enumerate(zip(entries, asked, strict=True)):
        array, alone = _array_of(state, it), not isinstance(it, Place)
        width = array.shape[1:] if alone else array.shape[-1:]
        few = gather.is_few(array, slots, math.prod(width), times)
        key: Any = number
        if not alone and (few or it.is_narrow):
            key = it.words, id(slots), None if few else (it.stop - 1) // _PIECE
        group = found.setdefault(key, _Gather(array, slots, _order(state), few))
        group.entries[number] = it
    return list(found.values())


def _array_of(state: PartState, it: Any) -> jax.Array:
    return _arrays(state)[it.words] if isinstance(it, Place) else columns.array(it)


def edit(state: PartState, slots: jax.Array | None, values: dict[str, jax.Array]) -> Any:
    """Items `[B, ...]` of some leaves at slots, int32 `[B]`, distinct but for N; None for all N."""
    arrays = dict(_arrays(state))

    def one(path: tuple, it: Any) -> Any:
        new = values.get(pytree.leaf_name(path))
        if new is None:
            return it
        if not isinstance(it, Place):
            return columns.edit(it, slots, new)
        words, there = it.to_rows(lax.stop_gradient(new)), slice(it.start, it.stop)
        arrays[it.words] = _order(state).edit(arrays[it.words], slots, there, words)
        return it

    left = jax.tree_util.tree_map_with_path(one, places(state), is_leaf=columns.is_column)
    return _with(state, left, arrays)


def _words_of(dtype: DType) -> np.dtype | None:
    """The elements as which a leaf of this dtype lies beside others; None if it cannot.

    Those of 8 bytes as they are: TPUs have no such integers that take the bits of floats.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    lies = _as_it_lies(dtype)
    return lies if lies.itemsize > 4 else np.dtype(f"uint{8 * lies.itemsize}")


def _as_it_lies(dtype: DType) -> np.dtype:
    return columns.word_dtype(dtype) if columns.is_small(dtype) else np.dtype(dtype)


def _to_words(values: jax.Array, words: np.dtype) -> jax.Array:
    values = columns.packed(values)
    if values.dtype == words:
        return values
    return _cast(values, words)


def _from_words(words: Any, dtype: DType) -> jax.Array:
    lies = _as_it_lies(dtype)
    return columns.unpacked(words if words.dtype == lies else _cast(words, lies), dtype)


def _cast(values: Any, dtype: np.dtype) -> jax.Array:
    """The same bits as another dtype of the same size."""
    if dtype == np.bool_:
        return values != 0
    if values.dtype == np.bool_:
        return values.astype(dtype)
    return lax.bitcast_convert_type(values, dtype)
