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

Reference: Schaul et al., 2016, "Prioritized experience replay", appendix B.2.1.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import checks
from jrb._util import tree as trees
from jrb._util.arguments import entry
from jrb._util.tree import Tree
from jrb._xla import dependencies, gather, random_bits

_REDRAW = 2048  # among so many nodes, a float32 is too coarse to go on with what is left of it


def init(capacity: int, branching: int | None = None) -> Tree:
    """A tree of `capacity` leaves of mass 0.

    Args:
        capacity: N, at least 1.
        branching: the children of a node, a power of two from 2 to 128; None for the fastest on
            this backend.

    Raises:
        TypeError: a capacity that is no integer.
        ValueError: a capacity or branching out of range.
    """
    checks.count("capacity", capacity)
    return trees.init(capacity, branching, "sum")


@jax.jit
@entry
def total(tree: Tree) -> jax.Array:
    """The sum of all masses, float32 `[]`."""
    return trees.root(tree)


def get(tree: Tree, indices: jax.Array) -> jax.Array:
    """The masses of these leaves, float32 like `indices`: integers `[...]`, in [0, N).

    Raises:
        TypeError: indices that are no integers.
        ValueError: one that is out of range (only outside `jit`; inside, it is clipped).
    """
    indices = checks.indices("sum_tree.get", indices)
    checks.in_range("sum_tree.get", indices, tree.capacity)
    return _get(tree, indices)


@jax.jit
@entry
def _get(tree: Tree, indices: jax.Array) -> jax.Array:
    return trees.get(tree, indices.reshape(-1)).reshape(indices.shape)


@jax.jit
@entry
def leaves(tree: Tree) -> jax.Array:
    """All masses, float32 `[N]`."""
    return trees.leaves(tree)


def bounded(tree: Tree, masses: jax.Array, positive: jax.Array | None = None) -> jax.Array:
    """Masses, none so large that the sum of N of them is beyond 2^125, nor too small to be drawn.

    A larger sum would be finite still, but not its inverse, which a compiler may divide by. What is
    positive but below 2^-126 counts as 0 in arithmetic: it becomes 2^-126.

    Args:
        tree: N leaves.
        masses: at least 0.
        positive: which of them are not 0; None for those that have a bit set.
    """
    positive = is_positive(masses) if positive is None else positive
    masses = jnp.where(positive, jnp.maximum(masses, SMALLEST), masses)
    return jnp.minimum(masses, 2.0**125 / tree.capacity)


def is_positive(numbers: jax.Array) -> jax.Array:
    """Which float32 are above 0, also those below 2^-126, which comparisons may take for 0."""
    return lax.bitcast_convert_type(numbers, jnp.int32) > 0


SMALLEST = float(np.finfo(np.float32).tiny)
"""2^-126, the least number that arithmetic keeps."""


def update(tree: Tree, indices: jax.Array, masses: jax.Array) -> Tree:
    """Sets leaves; the last one wins where an index stands twice.

    Args:
        tree: N leaves. It may be donated.
        indices: integers `[B]`. Those outside [0, N) are left out.
        masses: real numbers `[B]`, used as float32. Those that are negative, NaN or infinite are
            left out: the leaf stays as it was. Those whose sum could be infinite are lowered, and
            positive ones that arithmetic would take for 0 are raised (see `bounded`).

    Returns:
        The new tree. The cost grows with B and log N.

    Raises:
        TypeError: indices that are no integers, or masses that are no real numbers.
        ValueError: arrays that are not of one shape `[B]`.
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
@entry
def _update(tree: Tree, indices: jax.Array, masses: jax.Array) -> Tree:
    good = (indices >= 0) & (indices < tree.capacity) & (masses >= 0) & jnp.isfinite(masses)
    node = indices.astype(jnp.uint32) + np.uint32(tree.leaf)
    node = jnp.where(good, node, np.uint32(tree.nodes.size))
    nodes, _ = trees.put_last(tree.nodes, node, bounded(tree, masses))
    return trees.reduce_above(tree.replace(nodes), node)


def find(tree: Tree, mass: jax.Array) -> jax.Array:
    """The leaves at these points of the line on which all masses lie end to end.

    Args:
        tree: N leaves.
        mass: real numbers `[...]`, used as float32, in [0, total). Points beyond either end get the
            nearest leaf of positive mass.

    Returns:
        int32 like `mass`: the first i with `mass` below the sum of the leaves 0 to i. A leaf of
        mass 0 is never found, unless all are: then it is leaf 0.

    Raises:
        TypeError: points that are no real numbers.
    """
    mass = checks.real_numbers("sum_tree.find: mass", mass)
    return _find(tree, mass.reshape(-1)).reshape(mass.shape)


@jax.jit
@entry
def _find(tree: Tree, mass: jax.Array) -> jax.Array:
    found, _ = _descend(tree, jnp.where(mass > 0, mass, 0.0), None)
    return jnp.where(total(tree) > 0, found, 0)


def sample(tree: Tree, key: jax.Array, batch_size: int, stratified: bool = True) -> jax.Array:
    """Draws leaves in proportion to their mass, with replacement.

    Args:
        tree: N leaves.
        key: a PRNG key. It is consumed.
        batch_size: B.
        stratified: one draw from each of B equal parts of the total, which lowers the variance;
            else B independent draws. Among 2^14 leaves and more, a part ends somewhere in a node of
            1 / 2048 of the leaves or less: there a draw may fall into its neighbour, which keeps
            the probability of every leaf exact.

    Returns:
        int32 `[B]`. If no leaf has mass, all are equally likely.

    Raises:
        TypeError, ValueError: no key, or no positive batch size.
    """
    checks.key(key)
    checks.count("batch_size", batch_size)
    checks.flag("stratified", stratified)
    return _sample(tree, key, int(batch_size), stratified)


@functools.partial(jax.jit, static_argnames=("batch_size", "stratified"))
@entry
def _sample(tree: Tree, key: jax.Array, batch_size: int, stratified: bool) -> jax.Array:
    words, indices, _, mass = draw(tree, key, batch_size, stratified)
    anywhere = random_bits.below(jnp.int32(tree.capacity), *words)
    return jnp.where(mass > 0, indices, anywhere)


def draw(
    tree: Tree, key: jax.Array, batch_size: int, stratified: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Draws leaves, and tells what it drew them by.

    Args:
        tree: N leaves.
        key: a PRNG key. It is consumed.
        batch_size: B.
        stratified: as for `sample`.

    Returns:
        The random bits, uint32 `[2, B]`; the leaves, int32 `[B]`; their masses, float32 `[B]`; the
        total, float32 `[]`. If that is 0, the leaves and their masses mean nothing.
    """
    words, mass = dependencies.once(
        lambda: (
            random_bits.bits(key, (2, batch_size)),
            lax.optimization_barrier(trees.reduce_top(tree)),
        )
    )
    first, again = random_bits.unit_interval(words)
    if stratified:
        first = (first + jnp.arange(first.size, dtype=jnp.float32)) / first.size
        # XLA would divide the total by the size instead, which is 0 where the total is small.
        first = jnp.minimum(first, 1.0)
    return words, *_descend(tree, first * mass, again), mass


def _descend(tree: Tree, mass: jax.Array, again: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """From the top to the leaves: which child does the mass fall in, and what is left of it there?

    Args:
        tree: N leaves.
        mass: float32 `[B]`.
        again: float32 `[B]` in [0, 1), fresh random numbers. A float32 cannot address 10^7 leaves,
            so one level draws its place inside the node anew, which leaves every probability as it
            is. None to follow `mass` to the end.

    Returns:
        The leaves, int32 `[B]`, and their masses, float32 `[B]`.
    """
    fresh = next((level for level in range(tree.depth) if tree.width(level) >= _REDRAW), None)

    def step(_: jax.Array, joined: jax.Array, rows_at: Callable) -> jax.Array:
        mass, node = _parted(joined)
        first = trees.children(tree, node)
        rows = rows_at(tree.nodes, first)
        if again is not None and fresh is not None:
            # Not by the number of the step: XLA copies that at each one which uses it.
            here = node - np.uint32(tree.start(fresh)) < tree.start(fresh + 1) - tree.start(fresh)
            mass = jnp.where(here, again * trees.reduce_rows(tree, rows), mass)
        child, mass = _pick(tree, rows, mass)
        return _joined(mass, first + child)

    root = jnp.full(mass.shape, trees.above_top(tree), jnp.uint32)
    found, rows = gather.loop(
        tree.depth + 1, step, _joined(mass, root), tree.nodes, mass.size, tree.branching
    )
    _, node = _parted(found)
    leaf = (node - np.uint32(tree.leaf)).astype(jnp.int32)
    mass = _child_of(rows, node & np.uint32(tree.branching - 1))
    return lax.optimization_barrier((leaf, mass))  # read once, and before what is written later


def _joined(mass: jax.Array, node: jax.Array) -> jax.Array:
    """Float32 and uint32 as one complex64.

    XLA's CPU compiler computes two results in two passes, in each of which it sums the rows anew;
    the two halves of one result it computes in one.
    """
    return lax.complex(mass, lax.bitcast_convert_type(node, jnp.float32))


def _parted(joined: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The float32 and the uint32 that were joined, bit for bit."""
    return lax.real(joined), lax.bitcast_convert_type(lax.imag(joined), jnp.uint32)


def _child_of(rows: jax.Array, child: jax.Array) -> jax.Array:
    """`rows[i, child[i]]`, of `[B, b]`: column by column, as XLA sums rows slowly."""
    columns = trees.columns(rows)
    found = columns[0]
    for number, column in enumerate(columns[1:], 1):
        found = lax.select(child == number, column, found)
    return found


def _pick(tree: Tree, rows: jax.Array, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The child that `mass` falls in, uint32 `[B]`, and the mass left in it.

    Rounding can leave a mass that reaches the sum of the row: it gets the last child that adds to
    the sum, so that a child of mass 0 is never picked.
    """
    sums = trees.running(tree, rows)
    child = jnp.zeros(mass.shape, jnp.uint32)
    below = jnp.zeros_like(mass)
    for upto in sums[:-1]:
        # By `lax`, as so many operators take longer to trace than all else of a draw.
        further = lax.bitwise_and(lax.ge(mass, upto), lax.lt(upto, sums[-1]))
        child = lax.add(child, lax.convert_element_type(further, jnp.uint32))
        below = lax.select(further, upto, below)
    return child, mass - below
