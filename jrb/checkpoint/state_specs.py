"""What a state must look like, told from the description and the items alone."""

import functools
from typing import Any

import jax
import numpy as np

from jrb import sum_tree
from jrb._core import memory, validate
from jrb._util import pytree
from jrb._util.pytree import Leaf, PyTree
from jrb._xla import compat
from jrb.checkpoint import host_items
from jrb.state import Buffer, BufferState
from jrb.types import Item


def blank(buffer: Buffer, spec: Item) -> Any:
    """The specs of the state whose items have this spec."""
    leaves, structure = jax.tree.flatten(spec)
    return _blank(buffer, structure, tuple(leaves), compat.is_x64())


@functools.lru_cache(maxsize=16)
def _blank(buffer: Buffer, structure: Any, leaves: tuple, x64: bool) -> Any:
    """The same, remembered: a program saves the same state again and again."""
    spec = jax.tree.unflatten(structure, leaves)
    return jax.eval_shape(lambda: validate.blank(host_items.on_device(buffer), spec))


def packed(state: PyTree) -> Any:
    """A state, or its specs, with the leaves of every tree in place of all its nodes.

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


def unpacked(want: PyTree, state: PyTree) -> Any:
    """The state, like the specs `want`, of which `packed` made this."""

    def whole(spec: Item, part: Any) -> Any:
        if not sum_tree.is_tree(spec):
            return part
        return sum_tree.over(spec.capacity, spec.branching, spec.reduction, part)

    return jax.tree.map(whole, want, state, is_leaf=sum_tree.is_tree)


def batched(tree: Item, batch: tuple[int, ...]) -> Any:
    """The same specs with leading axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*batch, *leaf.shape), leaf.dtype), tree)


def fitted(buffer: Buffer, state: BufferState) -> tuple[Item, tuple[int, ...]]:
    """The spec of an item in a state that is to be saved, and the axes that `vmap` has put before.

    Args:
        buffer: the description, all items on the device, each leaf in an array of its own.
        state: has to be one of it.

    Raises:
        ValueError, TypeError: it is not; the message names a leaf.
    """
    leaves, structure = jax.tree.flatten(pytree.spec_of(state, "save"))
    return _fitted(buffer, structure, tuple(leaves), compat.is_x64())


@functools.lru_cache(maxsize=16)
def _fitted(
    buffer: Buffer, structure: Any, leaves: tuple[jax.ShapeDtypeStruct, ...], x64: bool
) -> tuple[Item, tuple[int, ...]]:
    """The same, remembered where nothing was raised."""
    specs = jax.tree.unflatten(structure, leaves)
    for axes in range(4):
        strip = lambda leaf, axes=axes: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)
        inner = jax.tree.map(strip, specs)
        try:
            spec = buffer.storage.spec(inner.storage)
            want = blank(buffer, spec)
        except (TypeError, ValueError, AttributeError, IndexError):
            continue
        batch = leaves[0].shape[:axes]
        if pytree.alike(batched(want, batch), specs):
            return spec, batch
    raise _misfit(buffer, specs)


def _misfit(buffer: Buffer, specs: BufferState) -> Exception:
    """Why these are not the specs of a state of this buffer."""
    other = ValueError("save: expected a state of this buffer, got another.")
    try:
        spec = buffer.storage.spec(specs.storage)
    except (AttributeError, IndexError, TypeError):
        return other  # as a storage may raise of what is not its own
    try:
        want = blank(buffer, spec)
        mend = "Save the state that this very buffer made."
        pytree.check_like(by_name(want), by_name(specs), "save", mend)
        validate.check(buffer, specs)
    except (ValueError, TypeError) as error:
        return error
    except (AttributeError, IndexError):
        pass  # the same of parts
    return other


def by_name(tree: PyTree) -> dict[str, Leaf]:
    """All leaves by these names."""
    return dict(zip(pytree.unique_names(tree), jax.tree.leaves(tree), strict=True))
