"""A sum-tree: set many masses at once, draw many leaves in proportion to their mass.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from jrb import sum_tree
    >>> tree = sum_tree.init(5)
    >>> tree = sum_tree.update(tree, jnp.array([0, 3]), jnp.array([1.0, 3.0]))
    >>> float(sum_tree.total(tree))
    4.0
    >>> sum_tree.find(tree, jnp.array([0.5, 1.0, 3.9])).tolist()
    [0, 3, 3]

Layout: each node has b children, which one gather of a row reads. All levels are in one array, the
top level first. It has T <= b nodes, at b - T to b - 1 after neutral nodes, so that it is a row of
b nodes like any other; every level begins at a row. The children of node s are
b * (s + 1 + T - b) and the b - 1 that follow, on every level, so that one loop body serves all.

A parent is always computed from its children, from the first to the last, and never adjusted by a
difference: errors do not accumulate, and a mass that is removed leaves no remainder.

`init`, `total`, `leaves`, `get`, `update`, `find` and `sample` are for users. All other functions
are for samplers and writers, and run inside `jit`.

Reference: Schaul et al., 2016, "Prioritized experience replay", appendix B.2.1.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import checks
from jrb._util.public import PublicNames
from jrb._util.pytree import PyTree
from jrb._xla import dependencies, gather, random_bits
from jrb._xla.compiling import with_unified_arguments

__all__ = [
    "LARGEST",
    "SMALLEST",
    "Tree",
    "clear",
    "draw",
    "find",
    "get",
    "init",
    "is_positive",
    "is_tree",
    "leaf_values",
    "leaves",
    "limit_masses",
    "lowest",
    "neutral",
    "over",
    "reduce_rows",
    "root",
    "sample",
    "set_all",
    "set_leaves",
    "set_run",
    "sum_before",
    "total",
    "update",
]
__dir__: PublicNames = lambda: __all__

SMALLEST = float(np.finfo(np.float32).tiny)
"""2^-126, the least positive float32 that XLA does not flush to 0."""
LARGEST = float(np.finfo(np.float32).max)
"""The neutral element of minima: an infinity would stop programs under `jax_debug_infs`."""

_BRANCHING = {"cpu": 8}  # the fastest by backend, where it was measured
_OTHER_BRANCHING = 32  # elsewhere: three levels fewer to launch at a million leaves

_REDRAW = 2048  # nodes of a level from which on float32 is too coarse to follow a mass
_MANY = 1024  # leaves of an update from which on short levels are reduced whole
_SHORT = 8  # up to this many neighbouring leaves, their ancestors are reduced one by one

_REDUCE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"sum": lax.add, "min": lax.min}
_REDUCE["max"] = lax.max
_NEUTRAL = {"sum": 0.0, "min": LARGEST, "max": 0.0}  # leaves are at least 0


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("nodes",),
    meta_fields=("capacity", "branching", "reduction"),
)
@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree of N leaves, and the levels of their reductions above them.

    Attributes:
        nodes: float32 `[M]`, all levels, top first, the leaves last.
        capacity: N, the number of leaves.
        branching: b, the number of children of a node.
        reduction: "sum", "min" or "max".
    """

    nodes: jax.Array
    capacity: int
    branching: int
    reduction: str

    @property
    def depth(self) -> int:
        """The number of levels below the top."""
        depth = 0
        while self.branching ** (depth + 1) < self.capacity:
            depth += 1
        return depth

    @property
    def leaf(self) -> int:
        """The index of the node that is leaf 0."""
        return self.start(self.depth)

    @property
    def bits(self) -> int:
        """log2 of the branching."""
        return self.branching.bit_length() - 1

    @property
    def above_top(self) -> int:
        """The number, uint32, of a node whose children would be the top: b - 1 - T."""
        return (self.branching - 1 - self.width(0)) & 0xFFFFFFFF

    def parent(self, node: jax.Array) -> jax.Array:
        """Returns the parent of each node (uint32) below the top."""
        return (node >> np.uint32(self.bits)) + np.uint32(self.above_top)

    def children(self, node: jax.Array) -> jax.Array:
        """Returns the first child of each node (uint32) above the leaves."""
        return (node - np.uint32(self.above_top)) << np.uint32(self.bits)

    def start(self, level: int) -> int:
        """Returns the first node of a level; level 0 is the top."""
        top = self.width(0)
        return self.branching - top + top * (self.branching**level - 1) // (self.branching - 1)

    def width(self, level: int) -> int:
        """Returns the number of nodes of a level that have leaves below them."""
        return -(-self.capacity // self.branching ** (self.depth - level))

    def replace(self, nodes: jax.Array) -> "Tree":
        """Returns a tree of the same shape with other nodes."""
        return dataclasses.replace(self, nodes=nodes)


def init(capacity: int, branching: int | None = None) -> Tree:
    """Returns a tree of `capacity` leaves of mass 0.

    Args:
        capacity: N, at least 1.
        branching: the number of children of a node, a power of two from 2 to 128; None for the
            fastest on this backend.

    Raises:
        TypeError: `capacity` is not an integer.
        ValueError: `capacity` or `branching` is out of range.
    """
    checks.count("capacity", capacity)
    return neutral(capacity, "sum", branching)


@jax.jit
@with_unified_arguments
def total(tree: Tree) -> jax.Array:
    """Returns the sum of all masses, float32 `[]`."""
    return root(tree)


@jax.jit
@with_unified_arguments
def leaves(tree: Tree) -> jax.Array:
    """Returns all masses, float32 `[N]`."""
    return leaf_values(tree)


def get(tree: Tree, indices: jax.Array) -> jax.Array:
    """Returns the masses of these leaves, float32 like `indices`: integers `[...]`, in [0, N).

    Raises:
        TypeError: the indices are not integers.
        ValueError: an index is out of range (only outside `jit`; inside, it is clipped).
    """
    indices = checks.indices("sum_tree.get", indices)
    checks.in_range("sum_tree.get", indices, tree.capacity)
    node = (indices.reshape(-1) + tree.leaf).astype(jnp.uint32)
    return gather.read_at(tree.nodes, node).reshape(indices.shape)


def update(tree: Tree, indices: jax.Array, masses: jax.Array) -> Tree:
    """Sets the masses of leaves; if an index occurs twice, its last mass counts.

    Args:
        tree: N leaves; it may be donated.
        indices: integers `[B]`; those outside [0, N) are ignored.
        masses: real numbers `[B]`, used as float32. If one is negative, NaN or infinite, the leaf
            keeps its old mass. Those whose sum could be infinite are lowered, and positive ones
            that arithmetic would take for 0 are raised (see `limit_masses`).

    Returns:
        The new tree. The cost grows with B and log N.

    Raises:
        TypeError: the indices are not integers, or the masses are not real numbers.
        ValueError: the arrays do not have one shape `[B]`.
    """
    indices = checks.indices("sum_tree.update", indices)
    masses = checks.real_numbers("sum_tree.update: masses", masses)
    if indices.ndim != 1 or masses.shape != indices.shape:
        raise ValueError(
            f"sum_tree.update: expected indices and masses of one shape (B,), got {indices.shape} "
            f"and {masses.shape}. Put a single one in a list."
        )
    return _update(tree, indices, masses)


@jax.jit
@with_unified_arguments
def _update(tree: Tree, indices: jax.Array, masses: jax.Array) -> Tree:
    # Refused masses, and indices out of range, go to a node that does not exist.
    good = (indices >= 0) & (indices < tree.capacity) & (masses >= 0) & jnp.isfinite(masses)
    node = indices.astype(jnp.uint32) + np.uint32(tree.leaf)
    node = jnp.where(good, node, np.uint32(tree.nodes.size))
    nodes, _ = gather.put_last(tree.nodes, node, limit_masses(tree, masses))
    return _reduce_ancestors(tree.replace(nodes), node)


def find(tree: Tree, mass: jax.Array) -> jax.Array:
    """Returns the leaves at points of a line on which the masses of all leaves follow one another.

    Args:
        tree: N leaves.
        mass: real numbers `[...]`, used as float32, in [0, total): the points. Those beyond an end
            get the nearest leaf of positive mass.

    Returns:
        int32 like `mass`: the first i with `mass` below the sum of the leaves 0 to i. A leaf of
        mass 0 is never returned, unless all have mass 0: then leaf 0 is.

    Raises:
        TypeError: `mass` is not real numbers.
    """
    mass = checks.real_numbers("sum_tree.find: mass", mass)
    return _find(tree, mass.reshape(-1)).reshape(mass.shape)


@jax.jit
@with_unified_arguments
def _find(tree: Tree, mass: jax.Array) -> jax.Array:
    # NaN and negative points count as 0; without mass, leaf 0 is returned.
    indices, _ = _descend(tree, jnp.where(mass > 0, mass, 0.0), None)
    return jnp.where(total(tree) > 0, indices, 0)


def sample(tree: Tree, key: jax.Array, batch_size: int, stratified: bool = True) -> jax.Array:
    """Draws leaves in proportion to their mass, with replacement.

    Args:
        tree: N leaves.
        key: a PRNG key. It is consumed.
        batch_size: B.
        stratified: if True, one draw from each of B equal parts of the total mass, which lowers the
            variance; else B independent draws. With 2^14 leaves or more, a part can end inside a
            node of up to 1 / 2048 of the leaves: there a draw may fall into the next part. The
            probability of every leaf stays exact.

    Returns:
        int32 `[B]`, the drawn leaves. If no leaf has mass, all are equally likely.

    Raises:
        TypeError, ValueError: `key` is not a PRNG key, or `batch_size` is not positive.
    """
    random_bits.check_key(key)
    checks.count("batch_size", batch_size)
    checks.flag("stratified", stratified)
    return _sample(tree, key, int(batch_size), stratified)


@functools.partial(jax.jit, static_argnames=("batch_size", "stratified"))
@with_unified_arguments
def _sample(tree: Tree, key: jax.Array, batch_size: int, stratified: bool) -> jax.Array:
    words, indices, _, mass = draw(tree, key, batch_size, stratified)
    # Without mass, all leaves are equally likely.
    anywhere = random_bits.below(jnp.int32(tree.capacity), *words)
    return jnp.where(mass > 0, indices, anywhere)


def draw(
    tree: Tree, key: jax.Array, batch_size: int, stratified: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Draws leaves as `sample` does; returns also their masses and the random bits.

    Returns:
        The random bits, uint32 `[2, B]`; the leaves, int32 `[B]`; their masses, float32 `[B]`; the
        total, float32 `[]`. If the total is 0, leaves and masses have no meaning.
    """
    # The random bits, and the total mass.
    words, mass = dependencies.evaluate_once(
        lambda: (
            random_bits.bits(key, (2, batch_size)),
            lax.optimization_barrier(reduce_rows(tree, tree.nodes[: tree.branching])),
        )
    )
    first, again = random_bits.unit_interval(words)
    # Each draw falls into another of B equal parts of the mass.
    if stratified:
        first = (first + jnp.arange(first.size, dtype=jnp.float32)) / first.size
        # XLA would divide the total by the size instead, which is 0 where the total is small.
        first = jnp.minimum(first, 1.0)
    return words, *_descend(tree, first * mass, again), mass


def limit_masses(tree: Tree, masses: jax.Array, positive: jax.Array | None = None) -> jax.Array:
    """Returns masses limited so that N of them add up to at most 2^125, and none is lost as 0.

    A larger sum would be finite, but its inverse is flushed to 0, and a compiler may use the
    inverse to divide. Arithmetic takes a positive mass below 2^-126 for 0, so it is raised to that.

    Args:
        tree: N leaves.
        masses: at least 0.
        positive: bool, True for masses above 0; None to find them by their bits.
    """
    positive = is_positive(masses) if positive is None else positive
    masses = jnp.where(positive, jnp.maximum(masses, SMALLEST), masses)
    return jnp.minimum(masses, 2.0**125 / tree.capacity)


def is_positive(numbers: jax.Array) -> jax.Array:
    """Returns True for float32 above 0, even below 2^-126, which comparisons may take for 0."""
    return lax.bitcast_convert_type(numbers, jnp.int32) > 0


def neutral(capacity: int, reduction: str, branching: int | None = None) -> Tree:
    """Returns a tree with neutral leaves: 0 for "sum" and "max", `LARGEST` for "min"."""
    if branching is None:
        branching = _BRANCHING.get(jax.default_backend(), _OTHER_BRANCHING)
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
    # The last row is whole, so that the gather of a node's children stays in the array.
    padded = -(-capacity // branching) * branching if shape.depth else capacity
    return shape.replace(jnp.full(shape.leaf + padded, _NEUTRAL[reduction], jnp.float32))


@functools.cache
def _most_leaves(branching: int) -> int:
    """Returns the greatest number of leaves for which int32 can number all nodes."""
    nodes = lambda capacity: Tree(jnp.zeros(0), capacity, branching, "sum").leaf + capacity
    # A binary search, as the number of levels depends on the number of leaves.
    few, many = 1, 2**31 - 1
    while few < many:
        middle = (few + many + 1) // 2
        few, many = (middle, many) if nodes(middle) < 2**31 - branching else (few, middle - 1)
    return few


def clear(tree: Tree, token: jax.Array) -> Tree:
    """Returns the tree with neutral leaves, written in place once `token` is known."""
    return tree.replace(dependencies.overwrite(tree.nodes, _NEUTRAL[tree.reduction], token))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def over(capacity: int, branching: int, reduction: str, values: jax.Array) -> Tree:
    """Returns a tree with these leaves, float32 `[..., N]`; other axes are as under `vmap`."""
    make = lambda values: set_all(neutral(capacity, reduction, branching), values)
    for _ in values.shape[:-1]:
        make = jax.vmap(make)
    return make(values)


def is_tree(thing: PyTree) -> bool:
    """Returns True for trees: for `jax.tree.map(..., is_leaf=is_tree)`."""
    return isinstance(thing, Tree)


def root(tree: Tree) -> jax.Array:
    """Returns the reduction of all leaves, float32 `[]`."""
    return dependencies.materialize(lambda: reduce_rows(tree, tree.nodes[: tree.branching]))


def leaf_values(tree: Tree) -> jax.Array:
    """Returns all leaves, float32 `[N]`, or `[..., N]` for trees that `vmap` made."""
    return tree.nodes[..., tree.leaf : tree.leaf + tree.capacity]


def lowest(tree: Tree) -> tuple[jax.Array, jax.Array]:
    """Returns the least leaf of a "min" tree, float32 `[]`, and its first index, int32 `[]`."""
    # Follow the first of the least children from the top to a leaf.
    least = root(tree)
    row = dependencies.materialize(lambda: tree.nodes[: tree.branching])
    node = jnp.argmin(row).astype(jnp.int32)

    def descend(_: jax.Array, node: jax.Array) -> jax.Array:
        first = tree.children(node.astype(jnp.uint32)).astype(jnp.int32)
        row = dependencies.materialize(
            lambda: lax.dynamic_slice_in_dim(tree.nodes, first, tree.branching)
        )
        return first + jnp.argmin(row).astype(jnp.int32)

    return least, dependencies.loop(tree.depth, descend, node) - tree.leaf


def sum_before(tree: Tree, index: jax.Array) -> jax.Array:
    """Returns the sum of the leaves before `index`, int32 `[]` in [0, N), float32 `[]`."""

    def climb(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Add the siblings before a node, then go on to its parent. Every level begins at a row.
        node, before = carry
        child = node & np.uint32(tree.branching - 1)
        row = gather.rows_from(tree.nodes, (node - child)[None], tree.branching)[0]
        is_before = jnp.arange(tree.branching, dtype=jnp.uint32) < child
        return tree.parent(node), before + jnp.sum(jnp.where(is_before, row, 0.0))

    start = (index + tree.leaf).astype(jnp.uint32), jnp.zeros((), jnp.float32)
    return dependencies.materialize(lambda: dependencies.loop(tree.depth + 1, climb, start)[1])


def set_leaves(
    tree: Tree, index: jax.Array, values: jax.Array, counts: tuple[int, ...] | None = None
) -> Tree:
    """Sets leaves and computes their ancestors again.

    Args:
        tree: N leaves.
        index: integers `[B]`; those outside [0, N) are ignored.
        values: float32 `[B]`; equal at equal indices, or from `gather.put_last`.
        counts: the sizes of groups of elements, each set before the next; None for one group.
    """
    # As uint32, a negative index is a large number, which is ignored.
    index = index.astype(jnp.uint32)
    beyond = np.uint32(tree.nodes.size)
    node = jnp.where(index < tree.capacity, index + np.uint32(tree.leaf), beyond)
    nodes = gather.put_in_turns(tree.nodes, node, values, counts or (node.size,))
    return _reduce_ancestors(tree.replace(nodes), node)


def set_run(tree: Tree, first: jax.Array, values: jax.Array) -> Tree:
    """Sets the leaves `first` (int32 `[]`), `first` + 1, ... to `values`, float32 `[K]`."""
    count, start = values.size, first + tree.leaf
    # Neighbours are one slice, which takes well under 1 us; a scatter would be a kernel more.
    tree = tree.replace(lax.dynamic_update_slice_in_dim(tree.nodes, values, start, axis=0))
    if count <= _SHORT:
        node = (start + jnp.arange(count, dtype=jnp.int32)).astype(jnp.uint32)
        return _reduce_ancestors(tree, node)
    # Reduce the parents of the run on each level, which are a slice and need no scatter.
    for level in reversed(range(tree.depth)):
        count = min((count + tree.branching - 2) // tree.branching + 1, tree.width(level))
        # At the end of a level, the slice begins earlier: it must not reach beyond.
        first = jnp.minimum(first >> tree.bits, tree.width(level) - count)
        begin = first + tree.start(level)
        below = tree.children(begin.astype(jnp.uint32)).astype(jnp.int32)
        rows = lax.dynamic_slice_in_dim(tree.nodes, below, count * tree.branching)
        rows = rows.reshape(count, tree.branching)
        nodes = lax.dynamic_update_slice_in_dim(tree.nodes, reduce_rows(tree, rows), begin, axis=0)
        tree = tree.replace(nodes)
    return tree


def set_all(tree: Tree, values: jax.Array) -> Tree:
    """Sets all N leaves."""
    return set_run(tree, jnp.int32(0), values)


def _split_columns(rows: jax.Array) -> list[jax.Array]:
    """Returns the columns of rows `[..., b]`, each `[...]`."""
    split = lax.split(rows, (1,) * rows.shape[-1], axis=rows.ndim - 1)
    return [lax.squeeze(column, (-1,)) for column in split]


def reduce_rows(tree: Tree, rows: jax.Array) -> jax.Array:
    """Returns the reduction of each row `[..., b]`, float32 `[...]`."""
    # Children are added one by one: `cumsum` and dot products are slower, and in this order a node
    # has the same bits wherever it is computed again.
    return functools.reduce(_REDUCE[tree.reduction], _split_columns(rows))


def _reduce_ancestors(tree: Tree, node: jax.Array) -> Tree:
    """Computes again the ancestors of leaves at nodes, uint32 `[B]`; ignores nodes out of range."""
    # For many leaves, levels near the top that are hardly longer are reduced whole: 1.6 times as
    # fast for 4096 of a million. For few leaves, compiling this would cost more than it gains.
    longest = 2 * node.size if node.size >= _MANY else 0
    whole = sum(tree.width(level) <= longest for level in range(tree.depth))
    # Leaves that do not exist are replaced by leaf 0, whose ancestors get the values they have.
    anywhere = np.uint32(tree.leaf)
    above = tree.parent(jnp.where(node < tree.nodes.size, node, anywhere))

    def climb(_: jax.Array, carry: tuple, rows_at: Callable) -> tuple:
        nodes, above = carry
        rows = rows_at(nodes, tree.children(above))
        # Leaves with one parent write it more than once, each time the same sum.
        nodes = gather.put(nodes, above, reduce_rows(tree, rows))
        # Without the zero, the indices of this write would be copied before they are overwritten.
        return nodes, tree.parent(above) + dependencies.zero_after(nodes, jnp.uint32)

    start = (tree.nodes, gather.column(above))
    (nodes, _), _ = gather.loop(
        tree.depth - whole, climb, start, tree.nodes, node.size, tree.branching
    )
    # The short levels near the top.
    for level in reversed(range(whole)):
        begin, end = tree.start(level), tree.start(level) + tree.width(level)
        below = (begin - tree.branching + 1 + tree.width(0)) * tree.branching
        rows = lax.slice_in_dim(nodes, below, below + (end - begin) * tree.branching)
        values = reduce_rows(tree, rows.reshape(end - begin, tree.branching))
        # Not a slice, which `vmap` would make a write to all nodes.
        nodes = gather.put(nodes, jnp.arange(begin, end, dtype=jnp.uint32), values)
    return tree.replace(nodes)


def _descend(tree: Tree, mass: jax.Array, again: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Follows each mass from the top to a leaf: at each node, to the child that contains it.

    Args:
        tree: N leaves.
        mass: float32 `[B]`, points in [0, total).
        again: fresh random numbers, float32 `[B]` in [0, 1). A float32 cannot address 10^7 leaves,
            so one level draws its position inside the node again, which keeps every probability.
            None to follow `mass` to the end.

    Returns:
        The leaves, int32 `[B]`, and their masses, float32 `[B]`.
    """
    # The first level too long for a float32 to address: there, positions are drawn again.
    fresh = next((level for level in range(tree.depth) if tree.width(level) >= _REDRAW), None)

    def step(_: jax.Array, packed: jax.Array, rows_at: Callable) -> jax.Array:
        mass, above = lax.real(packed), lax.bitcast_convert_type(lax.imag(packed), jnp.uint32)
        first = above << np.uint32(tree.bits)  # as `children`
        # The sums of the first 1, 2, ... children of each row, added up as by `reduce_rows`.
        children = _split_columns(rows_at(tree.nodes, first))
        sums = list(itertools.accumulate(children, _REDUCE[tree.reduction]))
        if again is not None and fresh is not None:
            # Not by the number of the step, which XLA would copy at each step that uses it.
            start, end = (tree.start(level) - tree.above_top for level in (fresh, fresh + 1))
            is_fresh = above - np.uint32(start & 0xFFFFFFFF) < end - start
            mass = jnp.where(is_fresh, again * sums[-1], mass)
        # Count the children that end before the mass, and keep the sum up to the last of them.
        child, below = jnp.zeros(mass.shape, jnp.uint32), jnp.zeros_like(mass)
        for upto in sums[:-1]:
            # Rounding can leave a mass that reaches the sum of the row: it gets the last child that
            # adds to the sum, never one of mass 0. This many operators would trace slowly.
            further = lax.bitwise_and(lax.ge(mass, upto), lax.lt(upto, sums[-1]))
            child = lax.add(child, lax.convert_element_type(further, jnp.uint32))
            below = lax.select(further, upto, below)
        return pack(mass - below, first + child - np.uint32(tree.above_top))

    # Mass and node as one complex64: XLA's CPU compiler computes two results in two passes, each of
    # which sums the rows, but the two halves of one result in one pass.
    pack = lambda mass, node: lax.complex(mass, lax.bitcast_convert_type(node, jnp.float32))
    # Nodes are counted from a virtual one above the top, whose children are the top, so that one
    # step serves all levels. It is 0 in every tree: other small integers are denormal floats here,
    # and XLA's CPU compiler takes such constants of two trees in one program for the same number.
    packed = pack(mass, jnp.zeros(mass.shape, jnp.uint32))
    packed, rows = gather.loop(tree.depth + 1, step, packed, tree.nodes, mass.size, tree.branching)
    node = lax.bitcast_convert_type(lax.imag(packed), jnp.uint32) + np.uint32(tree.above_top)
    leaf = (node - np.uint32(tree.leaf)).astype(jnp.int32)
    child = node & np.uint32(tree.branching - 1)
    # Select the mass column by column, as XLA sums rows slowly.
    leaf_mass, *columns = _split_columns(rows)
    for number, column in enumerate(columns, 1):
        leaf_mass = lax.select(child == number, column, leaf_mass)
    # Read once, and before later writes.
    return lax.optimization_barrier((leaf, leaf_mass))
