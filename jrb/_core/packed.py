"""The arrays in which items are stored: small leaves packed into few arrays, others in columns.

N capacity, W the elements of the leaves in one packed array, T time, E environments, R = N / E.

With one array per leaf, a draw would need a gather for each leaf, and an add a write for each. So
small leaves with elements of one size are stored, bit for bit, as unsigned integers in one array
`[N, W]`, or `[E, R, W]` (see `RowOrder`). Each other leaf has a column `[N, ...]` in the order of
slots. Rewards and end-of-episode flags always have columns: units read them alone, in many rows,
which takes a half or a third of the time if their values are adjacent. `jrb/_xla/README.md` has the
measurements.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import pytree
from jrb._util.pytree import DType, PyTree
from jrb._xla import gather
from jrb.keys import path_name, within
from jrb.types import AuxRead, Context, Item, SlotsForLeaf, WritePlan
from jrb.types.messages import PartState

# The largest leaf of an item that is packed.
_MAX_BYTES = 1024
# The largest leaf that shares a gather; to split larger ones off the gathered rows costs more.
_NARROW_BYTES = 32
# About how many elements one gather reads of a row. XLA's CPU compiler copies rows of 49 to 75 one
# element at a time: an add and a sample with rows of 63 take 1.3 to 1.9 times as long.
_PIECE = 40

# Small dtypes. XLA's CPU compiler computes on floats of 8 bits, bfloat16, and integers of fewer
# than 8 bits in wider types: a write to one row passes over the whole array, and signalling NaNs
# become quiet. So they are stored as integers of at least 8 bits, with the same bits.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SmallColumn:
    """A column of a small dtype, stored as integers. It can be indexed like an array of the dtype.

    Attributes:
        words: integers `[N, ...]` with the bits of the values.
        dtype: the dtype of the leaf; static.
    """

    words: Any
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape

    def __getitem__(self, index: Any) -> jax.Array:
        return from_words(self.words[index], self.dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(from_words(self.words, self.dtype)).__array__(*args, **kwargs)


Column = Any
"""An array, or a `SmallColumn`."""


def is_column(thing: Any) -> bool:
    """Returns True for a `SmallColumn`; for use in `jax.tree.map(..., is_leaf=is_column)`."""
    return isinstance(thing, SmallColumn)


def is_small(dtype: DType) -> bool:
    """Returns True if XLA's CPU compiler computes on values of this dtype in a wider one."""
    # NumPy's code 2 is for dtypes that another library has registered.
    is_extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return not is_extended and np.dtype(dtype).isbuiltin == 2


def word_dtype(dtype: DType) -> np.dtype:
    """Returns the dtype of the array that stores values of this dtype; PRNG keys have none."""
    if not is_small(dtype):
        return np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(f"uint{max(8, jnp.finfo(dtype).bits)}")
    return np.dtype("uint8" if jnp.issubdtype(dtype, jnp.unsignedinteger) else "int8")


def to_words(values: PyTree) -> Any:
    """Returns the array that stores these values: of a small dtype, their bits as integers."""
    if not is_small(values.dtype):
        return values
    values = jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.floating):
        bits = jnp.dtype(f"uint{jnp.finfo(values.dtype).bits}")
        values = lax.bitcast_convert_type(values, bits)
    return values.astype(word_dtype(values.dtype)) if is_small(values.dtype) else values


def from_words(words: Any, dtype: DType) -> jax.Array:
    """Returns the values of this dtype that an array stores; the inverse of `to_words`."""
    if not is_small(dtype):
        return words
    if not jnp.issubdtype(dtype, jnp.floating):
        return words.astype(dtype)
    bits = jnp.dtype(f"uint{jnp.finfo(dtype).bits}")
    return lax.bitcast_convert_type(words.astype(bits), dtype)


def zeros_column(count: int, spec: Item) -> Column:
    """Returns a column of zeros for `count` items of a leaf with this spec."""
    shape = (count, *spec.shape)
    if not is_small(spec.dtype):
        return jnp.zeros(shape, spec.dtype)
    return SmallColumn(words=jnp.zeros(shape, word_dtype(spec.dtype)), dtype=np.dtype(spec.dtype))


def stored_array(column: Column) -> jax.Array:
    return column.words if isinstance(column, SmallColumn) else column


def with_array(column: Column, array: Any) -> Column:
    return dataclasses.replace(column, words=array) if is_column(column) else array


def put_column(column: Column, plan: WritePlan, words: jax.Array) -> Column:
    """Writes rows `[T, E, ...]`, given as stored words, at the slots of a plan."""
    return with_array(column, plan.put(stored_array(column), lax.stop_gradient(words)))


def put_blocks(array: jax.Array, starts: jax.Array, blocks: jax.Array) -> jax.Array:
    """Writes block k of `[K, W, ...]` to W rows from `starts[k]` on; drops rows past the end."""
    # Tried on the CPU: a loop of slices, with a rule for vmap. No faster for frames of 84 x 84.
    at = starts[:, None] + jnp.arange(blocks.shape[1], dtype=jnp.int32)[None]
    return array.at[at].set(blocks, mode="drop")


def edit_column(column: Column, slots: jax.Array | None, values: jax.Array) -> Column:
    """Writes values `[B, ...]` at distinct slots, int32 `[B]`; drops slot N. None: all slots."""
    words, whole = lax.stop_gradient(to_words(values)), stored_array(column)
    # Values for all slots replace the array, unless it has further rows.
    if slots is None and words.shape == whole.shape:
        return with_array(column, words)
    slots = jnp.arange(len(words), dtype=jnp.int32) if slots is None else slots
    return with_array(column, whole.at[slots].set(words, mode="drop"))


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """The order of the rows of a packed array: by slot, or grouped by environment.

    Slot s is row s // E of environment s % E. Successive rows of an environment are E rows apart in
    an array by slot, and adjacent in an array grouped by environment. Only this class knows the
    order; all other code identifies rows by their slots.

    Attributes:
        envs: E, for arrays `[E, R, W]` grouped by environment; None for arrays `[N, W]` by slot.
    """

    envs: int | None = None

    @property
    def axes(self) -> int:
        return 1 if self.envs is None else 2

    def places(self, numbers: np.ndarray, capacity: int) -> np.ndarray:
        """Returns positions of rows in the array; row number v * N + s is slot s of buffer v."""
        if self.envs is None:
            return numbers
        buffer, slots = np.divmod(numbers, capacity)
        row, env = np.divmod(slots, self.envs)
        return buffer * capacity + env * (capacity // self.envs) + row

    def by_slot(self, words: Any) -> Any:
        """Returns all rows in the order of slots, `[..., N, W]`."""
        if self.envs is None:
            return words
        *batch, envs, num_rows, width = words.shape
        return words.swapaxes(-3, -2).reshape(*batch, envs * num_rows, width)

    def index(self, slots: jax.Array) -> tuple[jax.Array, ...]:
        """Returns index arrays for slots of at least 0; slot N gives an index out of range."""
        # Unsigned, so that XLA adds no code for negative indices.
        slots = slots.astype(jnp.uint32)
        if self.envs is None:
            return (slots,)
        return lax.rem(slots, np.uint32(self.envs)), lax.div(slots, np.uint32(self.envs))

    def put(self, array: jax.Array, plan: WritePlan, words: jax.Array) -> jax.Array:
        """Puts rows `[T, E, W]` at the slots of a write (see `WritePlan.put`)."""
        if plan.consecutive:
            # One row of time is a block: a slice write is twice as quick as a scatter. The index is
            # signed, as JAX 0.5 under `vmap` writes nothing if it is unsigned.
            start = self.index(plan.starts[0])[-1].astype(jnp.int32)
            block = words[0] if self.envs is None else words[0][:, None]
            return lax.dynamic_update_slice_in_dim(array, block, start, axis=self.axes - 1)
        words = words.reshape(-1, words.shape[-1])
        return self.edit(array, plan.slots.reshape(-1), slice(None), words)

    def edit(
        self, array: jax.Array, slots: jax.Array | None, part: slice, words: jax.Array
    ) -> jax.Array:
        """Sets elements `part` of the rows at slots, int32 `[B]`; drops slot N. None: all rows."""
        if slots is not None:
            return array.at[(*self.index(slots), part)].set(words, mode="drop")
        if self.envs is not None:
            words = words.reshape(-1, self.envs, words.shape[-1]).swapaxes(0, 1)
        return array.at[..., part].set(words)

    def get(self, array: jax.Array, slots: jax.Array, start: int, stop: int) -> jax.Array:
        """Returns elements start to stop of the rows at slots `[...]`, which must be in range.

        Called in `gather.read_each`, which runs it exactly once.
        """
        at, axes = self.index(slots), tuple(range(self.axes))
        if stop - start == array.shape[-1]:
            return gather.items_at(array, *at)
        # Gather slices of rows: the last number of each index is the first element.
        dims = lax.GatherDimensionNumbers(
            offset_dims=(slots.ndim,), collapsed_slice_dims=axes, start_index_map=(*axes, len(axes))
        )
        index = jnp.stack([*at, jnp.full_like(at[0], start)], axis=-1)
        sizes = (*(1 for _ in axes), stop - start)
        return lax.gather(array, index, dims, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@dataclasses.dataclass(frozen=True)
class LeafSlice:
    """The position of a leaf in the rows of a packed array.

    Attributes:
        words: the name of the array, which is the dtype of its elements.
        start: the index of the leaf's first element in a row.
        shape: the shape of the leaf in one item.
        dtype: the dtype of the leaf.
    """

    words: str
    start: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def is_narrow(self) -> bool:
        """True if the leaf is so small that it shares a gather with others."""
        return math.prod(self.shape) * np.dtype(self.words).itemsize <= _NARROW_BYTES

    def of_rows(self, words: Any, first: int = 0) -> jax.Array:
        """Returns the leaf, `[..., *shape]`; `words` has the elements of rows from `first` on."""
        flat = words[..., self.start - first : self.stop - first]
        flat = flat.reshape(*words.shape[:-1], *self.shape)
        return from_words(_cast(flat, word_dtype(self.dtype)), self.dtype)

    def flat(self, values: jax.Array) -> jax.Array:
        """Returns the leaf's elements `[..., stop - start]`, of its own dtype."""
        lead = values.shape[: values.ndim - len(self.shape)]
        return values.reshape(*lead, self.stop - self.start)


def _cast(values: Any, dtype: DType) -> jax.Array:
    """Returns the same bits as another dtype of that size; bool becomes 0 and 1, and back."""
    if values.dtype == dtype:
        return values
    # JAX does not bitcast bool.
    if dtype == np.bool_:
        return values != 0
    if values.dtype == np.bool_:
        return values.astype(dtype)
    return lax.bitcast_convert_type(values, dtype)


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """The layout of items in packed arrays and columns.

    Attributes:
        structure: the tree structure of an item.
        entries: for each leaf its slice of a packed array, or the name of its column.
        order: the order of rows in packed arrays.
    """

    structure: Any
    entries: tuple[LeafSlice | str, ...]
    order: RowOrder


class PackedLeaves(pytree.State):
    """The items of a buffer, with small leaves in packed arrays. Leaves can be read by name.

    `state["next"]["reward"]`, or `state.next.reward` for items with attributes, is a copy of that
    leaf as an array `[N, ...]`, or the column of a leaf that is not packed.

    Attributes:
        columns: the columns of leaves that are not packed, by leaf name.
        arrays: the packed arrays, `[N, W]` or `[E, R, W]`, by dtype name.
        layout: the positions of all leaves; static.
    """

    columns: dict[str, Any]
    arrays: dict[str, Any]
    layout: PackedLayout = pytree.static(default=None)

    @property
    def order(self) -> RowOrder:
        return self.layout.order

    @property
    def places(self) -> Any:
        """A pytree like an item, with the `LeafSlice` of each packed leaf, or the leaf's column."""
        entries = self.layout.entries
        each = [it if isinstance(it, LeafSlice) else self.columns[it] for it in entries]
        return jax.tree.unflatten(self.layout.structure, each)

    @property
    def leaves(self) -> Any:
        """All leaves as arrays `[N, ...]`, in a pytree like an item."""
        return self._unpack_leaves(self.places)

    def _unpack_leaves(self, places: Any) -> Any:
        def leaf(it: Any) -> Any:
            if not isinstance(it, LeafSlice):
                return it
            words = self.arrays[it.words][..., it.start : it.stop]
            return it.of_rows(self.order.by_slot(words), it.start)

        return jax.tree.map(leaf, places, is_leaf=is_column)

    def shown(self) -> Any:
        """Returns a pytree like an item, with a spec for each packed leaf, or the leaf's column."""
        # A state that was mapped to something else, or whose dicts were changed, has no such form.
        names = {it.words if isinstance(it, LeafSlice) else it for it in self.layout.entries}
        are_arrays = all(map(pytree.is_array, self.arrays.values()))
        if not are_arrays or names - self.arrays.keys() - self.columns.keys():
            return self

        def leaf(it: Any) -> Any:
            if not isinstance(it, LeafSlice):
                return stored_array(it)
            return jax.ShapeDtypeStruct(self.shape(it), it.dtype)

        return jax.tree.map(leaf, self.places, is_leaf=is_column)

    def shape(self, place: LeafSlice) -> tuple[int, ...]:
        """Returns the shape of a packed leaf, `[..., N, ...]`."""
        shape, axes = self.arrays[place.words].shape, self.order.axes
        return (*shape[: -1 - axes], math.prod(shape[-1 - axes : -1]), *place.shape)

    def __getitem__(self, name: Any) -> Any:
        return self._unpack_leaves(self.places[name])

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __getattr__(self, name: str) -> Any:
        # A field that is missing while an object is being made must not lead here again.
        if name.startswith("_") or name in ("columns", "arrays", "layout", "order", "places"):
            raise AttributeError(name)
        # Raise if items have no such attribute, before all leaves are read.
        getattr(self.places, name)
        return getattr(self.leaves, name)


def zeros(count: int, spec: Item, context: Context, order: RowOrder) -> Any:
    """Returns arrays of zeros for `count` items; a plain pytree of columns if no leaf is packed."""
    leaves, names = jax.tree.leaves(spec), pytree.unique_names(spec)
    # Group the indices of leaves that are packed by the dtype of their words.
    groups: dict[str, list[int]] = {}
    keys = context.keys
    roles = (keys.reward, keys.done, keys.terminated, keys.truncated, keys.episode)
    roles += context.read_alone
    for number, (name, leaf) in enumerate(zip(pytree.leaf_names(spec), leaves, strict=True)):
        is_read_alone = any(role is not None and within(name, path_name(role)) for role in roles)
        if is_read_alone or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            continue
        words = word_dtype(leaf.dtype)
        # TPUs cannot bitcast floats of 8 bytes to integers: leaves of these share an array only
        # with others of their own dtype.
        if words.itemsize <= 4:
            words = np.dtype(f"uint{8 * words.itemsize}")
        if 0 < leaf.size * words.itemsize <= _MAX_BYTES:
            groups.setdefault(words.name, []).append(number)
    # Every leaf gets a column, or a slice of its group's array unless it is alone in the group.
    entries: list[LeafSlice | str] = list(names)
    arrays = {}
    for words, numbers in groups.items():
        if len(numbers) == 1:
            continue
        slices = [
            LeafSlice(words, 0, tuple(leaves[n].shape), np.dtype(leaves[n].dtype)) for n in numbers
        ]
        start = 0
        pairs = zip(numbers, slices, strict=True)
        # Narrow leaves come first, next to each other, so that they can share gathers.
        for number, place in sorted(pairs, key=lambda pair: not pair[1].is_narrow):
            entries[number] = place = dataclasses.replace(place, start=start)
            start = place.stop
        lead = (count,) if order.envs is None else (order.envs, count // order.envs)
        arrays[words] = jnp.zeros((*lead, start), words)
    if not arrays:
        return jax.tree.map(functools.partial(zeros_column, count), spec)
    pairs = zip(entries, leaves, strict=True)
    columns = {it: zeros_column(count, leaf) for it, leaf in pairs if isinstance(it, str)}
    layout = PackedLayout(jax.tree.structure(spec), tuple(entries), order)
    return PackedLeaves(columns=columns, arrays=arrays, layout=layout)


def _entries(state: PartState) -> tuple[list[str], list[Any], Any]:
    """Returns the names of all leaves, their columns or slices, and the tree structure of these."""
    tree = state.places if isinstance(state, PackedLeaves) else state
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_column)
    return [pytree.leaf_name(path) for path, _ in pairs], [it for _, it in pairs], structure


def _with_entries(state: PartState, entries: list[Any], arrays: dict[str, Any]) -> Any:
    """Returns the state with these arrays, and the columns among `entries`, one entry per leaf."""
    if not isinstance(state, PackedLeaves):
        return jax.tree.unflatten(jax.tree.structure(state, is_leaf=is_column), entries)
    pairs = zip(state.layout.entries, entries, strict=True)
    columns = {name: column for name, column in pairs if isinstance(name, str)}
    return state.replace(columns=columns, arrays=arrays)


def spec(state: PartState) -> Item:
    """Returns the specs of an item, without a leading axis."""
    _, entries, structure = _entries(state)
    shapes = [it.shape if isinstance(it, LeafSlice) else it.shape[1:] for it in entries]
    pairs = zip(shapes, entries, strict=True)
    specs = [jax.ShapeDtypeStruct(shape, it.dtype) for shape, it in pairs]
    return jax.tree.unflatten(structure, specs)


def put(state: PartState, plan: WritePlan, items: Item) -> tuple[Any, WritePlan]:
    """Writes rows `[T, E, ...]` at the slots of a plan; returns the new state, and the plan."""
    # Further writes by the returned plan wait for these (`WritePlan.in_line`). Gradients stop here.
    _, entries, _ = _entries(state)
    parts: dict[str, list[tuple[LeafSlice, jax.Array]]] = {}
    after = []
    # Write the columns, and collect the leaves of each packed array.
    for it, new in zip(entries, jax.tree.leaves(items), strict=True):
        if isinstance(it, LeafSlice):
            parts.setdefault(it.words, []).append((it, lax.stop_gradient(new)))
        else:
            it = put_column(it, plan, to_words(new))
            plan = plan.in_line(stored_array(it))
        after.append(it)
    arrays = {}
    join = lambda parts: jnp.concatenate(list(parts), axis=-1)
    for name, leaves in parts.items():
        # Concatenated in the order of their positions, the leaves are whole rows of the array.
        leaves.sort(key=lambda pair: pair[0].start)
        # Neighbours of one dtype are cast together: XLA's CPU compiler makes a kernel for each
        # operand of a concatenation of more than eight.
        runs = itertools.groupby(leaves, key=lambda pair: pair[0].dtype)
        flat = (join(it.flat(leaf) for it, leaf in run) for _, run in runs)
        words = join(_cast(to_words(values), np.dtype(name)) for values in flat)
        arrays[name] = state.order.put(state.arrays[name], plan, words)
        plan = plan.in_line(arrays[name])
    return _with_entries(state, after, arrays), plan


def edit(state: PartState, slots: jax.Array | None, values: dict[str, jax.Array]) -> Any:
    """Writes values `[B, ...]` of some leaves at distinct slots, int32 `[B]`; drops slot N."""
    # `slots` is None for all slots in order; `values` are by leaf name.
    names, entries, _ = _entries(state)
    arrays = dict(state.arrays) if isinstance(state, PackedLeaves) else {}
    for number, (name, it) in enumerate(zip(names, entries, strict=True)):
        if name not in values:
            continue
        if isinstance(it, LeafSlice):
            flat = it.flat(lax.stop_gradient(values[name]))
            words = _cast(to_words(flat), np.dtype(it.words))
            part = slice(it.start, it.stop)
            arrays[it.words] = state.order.edit(arrays[it.words], slots, part, words)
        else:
            entries[number] = edit_column(it, slots, values[name])
    return _with_entries(state, entries, arrays)


def get(
    state: PartState, where: SlotsForLeaf, lookups: Sequence[AuxRead]
) -> tuple[Item, list[jax.Array]]:
    """Reads each leaf at its slots exactly once; packed leaves with the same slots share gathers.

    Returns:
        The items, and the values of the lookups.
    """
    names, _, structure_of_items = _entries(state)
    slots = [*map(where, names), *(it.slots for it in lookups)]
    # Many leaves share one array of slots, which is passed on once.
    unique = {id(each): each for each in slots}
    index = {key: number for number, key in enumerate(unique)}
    arrays, structure = jax.tree.flatten((state, [it.array for it in lookups]))

    def read(times: int, *flat: jax.Array) -> tuple[Item, list[jax.Array]]:
        state, extra = jax.tree.unflatten(structure, flat[: len(arrays)])
        each = [flat[len(arrays) + index[id(it)]] for it in slots]
        numbers, gathers = _gathers(state, extra, each, times)
        results = dict(zip(numbers, itertools.chain(*gather.read_each(gathers)), strict=True))
        # The gathers read leaves in an order of their own: bring them back to that of the items.
        ordered = [results[number] for number in range(len(results))]
        count = len(ordered) - len(extra)
        return jax.tree.unflatten(structure_of_items, ordered[:count]), ordered[count:]

    # How many reads `vmap` makes at once is known only inside `read`. That number matters only if
    # a single read has few rows.
    _, gathers = _gathers(state, [it.array for it in lookups], slots, 1)
    few = any(is_few for _, is_few, _ in gathers)
    return gather.scaled_by_vmap(few, read, *arrays, *unique.values())


def _gathers(
    state: PartState, extra: list[jax.Array], slots: list[jax.Array], times: int
) -> tuple[list[int], list[gather.Gather]]:
    """Returns the order in which the gathers read the leaves, as indices, and the gathers."""
    # Arrays in `extra` count as further leaves. `times` is how many such reads are made at once.
    # Each group of leaves is read by one gather: its array, its slots, whether these are few, and
    # the leaves by index.
    groups: dict[Any, tuple[jax.Array, jax.Array, bool, dict[int, Any]]] = {}
    entries = [*_entries(state)[1], *extra]
    for number, (it, at) in enumerate(zip(entries, slots, strict=True)):
        is_packed = isinstance(it, LeafSlice)
        array = state.arrays[it.words] if is_packed else stored_array(it)
        width = array.shape[-1] if is_packed else math.prod(array.shape[1:])
        is_few = gather.is_few(array, at, width, times)
        key: Any = number
        # For few rows, one gather reads all leaves of a packed array. For many, narrow leaves that
        # are close together share a gather, and each other leaf has its own.
        if is_packed and (is_few or it.is_narrow):
            key = it.words, id(at), None if is_few else (it.stop - 1) // _PIECE
        groups.setdefault(key, (array, at, is_few, {}))[3][number] = it

    def gather_of(array: jax.Array, at: jax.Array, is_few: bool, each: list[Any]) -> gather.Gather:
        if not isinstance(each[0], LeafSlice):
            get = functools.partial(gather.items_at, array, at)
            return get, is_few, lambda rows: [from_words(rows, each[0].dtype)]
        # Elements between the leaves are read too, as one gather is quicker than several.
        first, stop = min(it.start for it in each), max(it.stop for it in each)
        get = functools.partial(state.order.get, array, at, first, stop)
        return get, is_few, lambda rows: [it.of_rows(rows, first) for it in each]

    gathers = [
        gather_of(array, at, is_few, [*leaves.values()])
        for array, at, is_few, leaves in groups.values()
    ]
    return [number for *_, leaves in groups.values() for number in leaves], gathers
