"""A wide tree of reductions over float32 leaves, in one array.

A node has b children, enough that one row gather reads them all. All levels lie in one array, top
first. The top has T <= b nodes, at b - T to b - 1, behind neutral ones, so that it is a row like
any other; every level begins on a row. The children of node s are b * (s + 1 + T - b) and the b - 1
that follow, on every level, so that one loop body serves all.

A parent is always reduced from its children, from the first to the last, and never adjusted by a
difference: nothing drifts, and a value that goes leaves nothing behind.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util.pytree import PyTree
from jrb._xla import dependencies, gather

BRANCHING = {"cpu": 8}
"""The fastest branching by backend, where it was measured."""

OTHER_BRANCHING = 32
"""For backends that were not measured: three levels fewer to launch at a million leaves."""

_MANY = 1024  # where so many leaves are set at once, ...
_WHOLE = 2  # ... a level of so many nodes for each of them is reduced as a whole
_PAIRS = 4096  # of so many indices, duplicates are found by comparing all pairs
_SHORT = 8  # the ancestors of at most so many neighbours are reduced one by one

_REDUCE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "min": lax.min,
    "max": lax.max,
}
_NEUTRAL = {"sum": 0.0, "min": float("inf"), "max": -float("inf")}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("nodes",),
    meta_fields=("capacity", "branching", "reduction"),
)
@dataclasses.dataclass(frozen=True)
class Tree:
    """N leaves, and over them the levels of their reductions.

    Attributes:
        nodes: float32 `[M]`, all levels, top first, the leaves last.
        capacity: N.
        branching: b, the children of a node.
        reduction: "sum", "min" or "max".
    """

    nodes: jax.Array
    capacity: int
    branching: int
    reduction: str

    @property
    def depth(self) -> int:
        """How many levels lie below the top."""
        depth = 0
        while self.branching ** (depth + 1) < self.capacity:
            depth += 1
        return depth

    @property
    def top(self) -> int:
        """T, the number of nodes without a parent."""
        return self.width(0)

    @property
    def leaf(self) -> int:
        """The node of leaf 0."""
        return self.start(self.depth)

    @property
    def bits(self) -> int:
        """log2 of the branching."""
        return self.branching.bit_length() - 1

    @property
    def shift(self) -> int:
        """B - 1 - T: how far a node lies before the number of the row of its children."""
        return self.branching - 1 - self.top

    def start(self, level: int) -> int:
        """The first node of a level; level 0 is the top."""
        above = self.top * (self.branching**level - 1) // (self.branching - 1)
        return self.branching - self.top + above

    def width(self, level: int) -> int:
        """How many nodes of a level stand over leaves."""
        return -(-self.capacity // self.branching ** (self.depth - level))

    def replace(self, nodes: jax.Array) -> "Tree":
        """The same tree over other nodes."""
        return dataclasses.replace(self, nodes=nodes)


@functools.cache
def _most_leaves(branching: int) -> int:
    """The most leaves of a tree whose nodes, a little over b / (b - 1) a leaf, int32 can number."""
    below = lambda capacity: Tree(jnp.zeros(0), capacity, branching, "sum").leaf + capacity
    few, many = 1, 2**31 - 1
    while few < many:
        middle = (few + many + 1) // 2
        few, many = (middle, many) if below(middle) < 2**31 - branching else (few, middle - 1)
    return few


def init(capacity: int, branching: int | None, reduction: str) -> Tree:
    """A tree whose leaves are all neutral: 0, or an infinity."""
    if branching is None:
        branching = BRANCHING.get(jax.default_backend(), OTHER_BRANCHING)
    if capacity < 1:
        raise ValueError(f"capacity: expected at least 1, got {capacity}.")
    if branching not in (2, 4, 8, 16, 32, 64, 128):
        raise ValueError(
            f"branching: expected a power of two from 2 to 128, got {branching}. "
            "Leave it out for the default of this backend."
        )
    most = _most_leaves(branching)
    if capacity > most:
        raise ValueError(
            f"capacity: expected at most {most}, as a tree of branching {branching} has no more "
            f"nodes than int32 can number, got {capacity}. Use several buffers."
        )
    shape = Tree(jnp.zeros(0, jnp.float32), capacity, branching, reduction)
    padded = -(-capacity // branching) * branching if shape.depth else capacity
    return shape.replace(jnp.full(shape.leaf + padded, _NEUTRAL[reduction], jnp.float32))


def cleared(tree: Tree, token: jax.Array) -> Tree:
    """The tree with all leaves neutral again, in its own memory (see `ordering.overwrite`)."""
    return tree.replace(dependencies.overwrite(tree.nodes, _NEUTRAL[tree.reduction], token))


def columns(rows: jax.Array) -> list[jax.Array]:
    """The columns of rows `[..., b]`, each `[...]`."""
    split = lax.split(rows, (1,) * rows.shape[-1], axis=rows.ndim - 1)
    return [lax.squeeze(column, (-1,)) for column in split]


def running(tree: Tree, rows: jax.Array) -> list[jax.Array]:
    """The reductions of the first 1, 2, ... children of each row `[..., b]`, float32 `[...]`.

    Children are taken one after the other: it is fast, and a node equals the last of these bit for
    bit wherever they are formed again.
    """
    return list(itertools.accumulate(columns(rows), _REDUCE[tree.reduction]))


def reduce_rows(tree: Tree, rows: jax.Array) -> jax.Array:
    """The reduction of each row `[..., b]`, float32 `[...]`."""
    return running(tree, rows)[-1]


def top_row(tree: Tree) -> jax.Array:
    """The top, behind neutral nodes, float32 `[b]`."""
    return tree.nodes[: tree.branching]


def root(tree: Tree) -> jax.Array:
    """The reduction of all leaves, float32 `[]`."""
    return dependencies.read(lambda: reduce_top(tree))


def reduce_top(tree: Tree) -> jax.Array:
    """The same, which may be computed wherever it is used; to be called in `ordering.once`."""
    return reduce_rows(tree, top_row(tree))


def leaves(tree: Tree) -> jax.Array:
    """All leaves, float32 `[N]`; with axes before that, if `vmap` has put some."""
    return tree.nodes[..., tree.leaf : tree.leaf + tree.capacity]


def get(tree: Tree, indices: jax.Array) -> jax.Array:
    """Some leaves, float32 like `indices` (int32, in [0, N))."""
    return read(tree.nodes, (indices + tree.leaf).astype(jnp.uint32))


def lowest(tree: Tree) -> tuple[jax.Array, jax.Array]:
    """The least leaf of a "min" tree, float32 `[]`, and the first place of it, int32 `[]`."""
    least = root(tree)
    row = dependencies.read(lambda: top_row(tree))
    node = jnp.argmin(row).astype(jnp.int32)

    def descend(_: jax.Array, node: jax.Array) -> jax.Array:
        first = (node - tree.shift) << tree.bits
        row = dependencies.read(lambda: lax.dynamic_slice_in_dim(tree.nodes, first, tree.branching))
        return first + jnp.argmin(row).astype(jnp.int32)

    return least, dependencies.loop(tree.depth, descend, node) - tree.leaf


def parent(tree: Tree, node: jax.Array) -> jax.Array:
    """The parent of each node (uint32) below the top."""
    return (node >> np.uint32(tree.bits)) + np.uint32(above_top(tree))


def above_top(tree: Tree) -> int:
    """The number, uint32, of a node whose children would be the top."""
    return tree.shift & 0xFFFFFFFF


def children(tree: Tree, node: jax.Array) -> jax.Array:
    """The first child of each node (uint32) above the leaves."""
    return (node - np.uint32(above_top(tree))) << np.uint32(tree.bits)


def read(array: jax.Array, index: jax.Array) -> jax.Array:
    """`array[index]`, `[N]` at indices `[B]`, none negative, clipped to [0, N), read just once."""

    def found(times: int, array: jax.Array, index: jax.Array) -> jax.Array:
        clipped = lambda: gather.items_at(array, index, mode="clip")
        return gather.read((clipped, gather.is_few(array, index, times=times)))[0]

    return gather.together(gather.is_few(array, index), found, array, index)


def put(
    array: jax.Array, index: jax.Array, values: jax.Array, scatter: Callable = lax.scatter
) -> jax.Array:
    """`array.at[index].set(values)`, `[N]` at indices `[B]`; what lies outside [0, N) is left out.

    Integers of any kind: to convert them first would be a kernel of its own. Indices and values may
    be columns, `[B, 1]`, too (see `column`).
    """
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    drop = lax.GatherScatterMode.FILL_OR_DROP
    return scatter(array, column(index), column(values), dims, mode=drop)


def column(values: jax.Array) -> jax.Array:
    """Values `[B]` as a column, `[B, 1]`: the shape that XLA's gathers and scatters want.

    What else is made of them had better be made of the column: XLA compiles what is used in two
    shapes to two kernels.
    """
    return values.reshape(-1, 1)


def put_in_turns(
    array: jax.Array, index: jax.Array, values: jax.Array, counts: tuple[int, ...]
) -> jax.Array:
    """`put` of the first so many elements, then of the next so many, and so on.

    At once on the CPU, where a scatter goes from the first to the last.
    """
    if len(counts) == 1:
        return put(array, index, values)
    by_turns = functools.partial(put_part_by_part, counts=counts)
    return lax.platform_dependent(array, index, values, cpu=put, default=by_turns)


def put_part_by_part(
    array: jax.Array, index: jax.Array, values: jax.Array, counts: tuple[int, ...]
) -> jax.Array:
    """`put_in_turns`, whatever order a scatter has."""
    parts = zip(lax.split(index, counts), lax.split(values, counts), strict=True)
    return functools.reduce(lambda array, part: put(array, *part), parts, array)


def put_last(array: jax.Array, index: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sets elements; the last one wins where an index stands twice.

    Args:
        array: float32 `[N]`.
        index: uint32 `[B]`; what lies outside [0, N) is left out.
        values: float32 `[B]`.

    Returns:
        The array; and values, float32 `[B]`, of which `put` leaves the same ones at this index in
        any other array: on the CPU, where a scatter goes from the first to the last, the values
        themselves.
    """
    in_order = lambda array, index, values: (put(array, index, values), values)
    return lax.platform_dependent(array, index, values, cpu=in_order, default=put_in_any_order)


def put_in_any_order(
    array: jax.Array, index: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`put_last`, whatever order a scatter has: what stands twice is written twice."""
    if index.size <= _PAIRS:
        last = _last_of_each(index)
    else:
        array, last = _last_by_scatter(array, index)
    found = values.at[last].get(mode="clip")
    return put(array, index, found), found


def _last_of_each(index: jax.Array) -> jax.Array:
    """The last place at which each index stands, int32 `[B]`: of B x B pairs, never stored."""
    place = jnp.arange(index.size, dtype=jnp.int32)
    return jnp.max(jnp.where(index[:, None] == index, place, 0), axis=1, initial=0)


def _last_by_scatter(array: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same; and the array, with these places where the index lies in it."""
    if index.size > 2**24:
        raise ValueError(
            f"indices: expected at most 2^24 in one update, got {index.size}. "
            "Update in several calls."
        )
    place = jnp.arange(index.size, dtype=jnp.float32)
    array = put(array, index, jnp.full_like(place, -1.0))
    array = put(array, index, place, lax.scatter_max)
    return array, read(array, index).astype(jnp.int32)


def set_leaves(
    tree: Tree,
    index: jax.Array,
    values: jax.Array,
    counts: tuple[int, ...] | None = None,
) -> Tree:
    """Sets leaves, and reduces what stands over them.

    Args:
        tree: N leaves.
        index: integers `[B]`; what lies outside [0, N) is left out.
        values: float32 `[B]`, equal where indices are, or of `put_last`.
        counts: the first so many are set before the next so many, and so on; None for all at once.
    """
    index = index.astype(jnp.uint32)  # a negative one is a large number here
    beyond = np.uint32(tree.nodes.size)
    node = jnp.where(index < tree.capacity, index + np.uint32(tree.leaf), beyond)
    nodes = put_in_turns(tree.nodes, node, values, counts or (node.size,))
    return reduce_above(tree.replace(nodes), node)


def reduce_above(tree: Tree, node: jax.Array) -> Tree:
    """Reduces what stands over these leaves, by the numbers of their nodes, uint32 `[B]`.

    Numbers that lie beyond all nodes mean nothing. Where there are many, levels near the top that
    are hardly longer are reduced whole. For few it would gain less than it takes to compile.
    """
    longest = _WHOLE * node.size if node.size >= _MANY else 0
    whole = sum(tree.width(level) <= longest for level in range(tree.depth))
    tree = _reduce_paths(tree, node, tree.depth - whole)
    return functools.reduce(_reduce_level, reversed(range(whole)), tree)


def _reduce_paths(tree: Tree, node: jax.Array, levels: int) -> Tree:
    """Reduces the ancestors of these nodes, uint32 `[B]`, as many levels up."""
    somewhere = np.uint32(tree.leaf)  # for nodes that there are not
    above = parent(tree, jnp.where(node < tree.nodes.size, node, somewhere))

    def climb(_: jax.Array, carry: tuple, rows_at: Callable) -> tuple:
        nodes, above = carry
        rows = rows_at(nodes, children(tree, above))
        nodes = put(nodes, above, reduce_rows(tree, rows))
        # Without the zero, what the nodes were written at would be copied before it is overwritten.
        return nodes, parent(tree, above) + dependencies.zero_after(nodes, jnp.uint32)

    start = (tree.nodes, column(above))
    (nodes, _), _ = gather.loop(levels, climb, start, tree.nodes, node.size, tree.branching)
    return tree.replace(nodes)


def _reduce_level(tree: Tree, level: int) -> Tree:
    """Reduces all nodes of a level that stand over leaves."""
    begin, count, width = tree.start(level), tree.width(level), tree.branching
    first = (begin - tree.shift) * width
    rows = lax.slice_in_dim(tree.nodes, first, first + count * width).reshape(count, width)
    # Not a slice, which `vmap` would make a write to all nodes.
    nodes = jnp.arange(begin, begin + count, dtype=jnp.uint32)
    return tree.replace(put(tree.nodes, nodes, reduce_rows(tree, rows)))


def _reduce_run(tree: Tree, level: int, first: jax.Array, count: int) -> Tree:
    """Reduces `count` nodes of a level, from its node number `first` on."""
    begin = first + tree.start(level)
    children = lax.dynamic_slice_in_dim(
        tree.nodes, (begin - tree.shift) * tree.branching, count * tree.branching
    )
    values = reduce_rows(tree, children.reshape(count, tree.branching))
    return tree.replace(lax.dynamic_update_slice_in_dim(tree.nodes, values, begin, axis=0))


def set_run(tree: Tree, first: jax.Array, values: jax.Array) -> Tree:
    """Sets the leaves `first` (int32 `[]`), `first` + 1, ... to `values`, float32 `[K]`."""
    count, start = values.size, first + tree.leaf
    tree = tree.replace(lax.dynamic_update_slice_in_dim(tree.nodes, values, start, axis=0))
    if count <= _SHORT:
        node = (start + jnp.arange(count, dtype=jnp.int32)).astype(jnp.uint32)
        return _reduce_paths(tree, node, tree.depth)
    for level in reversed(range(tree.depth)):
        count = min((count + tree.branching - 2) // tree.branching + 1, tree.width(level))
        first = jnp.minimum(first >> tree.bits, tree.width(level) - count)
        tree = _reduce_run(tree, level, first, count)
    return tree


def set_all(tree: Tree, values: jax.Array) -> Tree:
    """Sets all N leaves."""
    return set_run(tree, jnp.int32(0), values)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def over(capacity: int, branching: int, reduction: str, values: jax.Array) -> Tree:
    """A tree over these leaves, float32 `[..., N]`; axes before the last are those of `vmap`."""
    make = lambda values: set_all(init(capacity, branching, reduction), values)
    for _ in values.shape[:-1]:
        make = jax.vmap(make)
    return make(values)


def is_tree(thing: PyTree) -> bool:
    """Whether it is a tree: for `jax.tree.map(..., is_leaf=is_tree)`."""
    return isinstance(thing, Tree)
