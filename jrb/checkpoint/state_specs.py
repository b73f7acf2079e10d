"""What a state must look like, told from the description and the items alone."""

import dataclasses
import functools
from typing import Any

import jax
import jax.core
import numpy as np

from jrb._base import pytree, versions
from jrb._base import tree as trees
from jrb._base.pytree import PyTree
from jrb._engine import dispatch, memory, state_check
from jrb.checkpoint import descriptions, host_items
from jrb.mix import AnyState
from jrb.state import Buffer
from jrb.types import Item


def check_arrays(state: AnyState) -> None:
    """Raises unless all leaves of a state are arrays that are there."""
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
    """The specs of the state whose items have this spec."""
    leaves, structure = jax.tree.flatten(spec)
    return _blank(buffer, structure, tuple(leaves), versions.is_x64())


@functools.lru_cache(maxsize=16)
def _blank(buffer: Buffer, structure: Any, leaves: tuple, x64: bool) -> Any:
    """The same, remembered: a program saves the same state again and again."""
    spec = jax.tree.unflatten(structure, leaves)
    return jax.eval_shape(lambda: state_check.blank(host_items.on_device(buffer), spec))


def packed(state: AnyState) -> Any:
    """A state, or its specs, with the leaves of every tree in place of all its nodes.

    Nodes depend on the branching, and that on the backend.
    """

    def leaves(part: Any) -> Any:
        if not trees.is_tree(part):
            return part
        if isinstance(part.nodes, jax.ShapeDtypeStruct):
            shape = (*part.nodes.shape[:-1], part.capacity)
            return jax.ShapeDtypeStruct(shape, part.nodes.dtype)
        if memory.on_host(part.nodes):
            part = part.replace(np.asarray(part.nodes))  # so that the leaves are no copy
        return trees.leaves(part)

    return jax.tree.map(leaves, state, is_leaf=trees.is_tree)


def unpacked(want: PyTree, state: AnyState) -> Any:
    """The state, like the specs `want`, of which `packed` made this."""

    def whole(spec: Item, part: Any) -> Any:
        if not trees.is_tree(spec):
            return part
        return trees.over(spec.capacity, spec.branching, spec.reduction, part)

    return jax.tree.map(whole, want, state, is_leaf=trees.is_tree)


def batched(tree: Item, batch: tuple[int, ...]) -> Any:
    """The same specs with leading axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*batch, *leaf.shape), leaf.dtype), tree)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A state as it is saved, after all checks.

    Attributes:
        buffer: the description, as if its items were on the device.
        state: its state, with `host_items.Leaf`s for items that are not, and
            `one_by_one.SideLeaf`s for leaves that lie side by side.
        spec: of one item as it is stored; of objects, nothing.
        batch: the axes that `vmap` has put before all leaves.
    """

    buffer: Any
    state: AnyState
    spec: Item
    batch: tuple[int, ...]


def snapshot(buffer: Buffer, state: AnyState) -> Snapshot:
    """A state that is to be saved.

    Raises:
        ValueError, TypeError: it is no state of this buffer; the message names a leaf.
    """
    given = buffer, state
    if not dispatch.on_host(buffer):
        check_arrays(state)
    buffer, state = host_items.exported(buffer, state)
    check_arrays(state)
    specs = pytree.spec_of(state, "save")
    for axes in range(4):
        strip = lambda leaf, axes=axes: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)
        inner = jax.tree.map(strip, specs)
        try:
            spec = buffer.storage.spec(inner.storage)
            want = blank(buffer, spec)
        except (TypeError, ValueError, AttributeError, IndexError):
            continue
        batch = jax.tree.leaves(specs)[0].shape[:axes]
        if _same(batched(want, batch), specs):
            return Snapshot(buffer, state, spec, batch)
    raise _of_another(buffer, specs, *given)


def _of_another(plain: Buffer, specs: Item, buffer: Buffer, state: AnyState) -> Exception:
    """Why it is no state of this buffer, given both also as they are saved."""
    try:
        want = blank(plain, plain.storage.spec(specs.storage))
        mend = "Save the state that this very buffer made."
        pytree.check_like(_plain(want), _plain(specs), "save", mend)
        dispatch.check_state(buffer, state)
    except (AttributeError, IndexError):
        return ValueError(
            f"save: expected a state of this buffer, got {type(state).__name__}. The order is "
            "save(path, buffer, state)."
        )
    except (ValueError, TypeError) as error:
        return error
    return ValueError("save: expected a state of this buffer, got another.")


def _plain(tree: Item) -> Any:
    """The tree as leaves by name, without what is static in it."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def _same(one: PyTree, other: PyTree) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    kind = lambda leaf: (leaf.shape, leaf.dtype)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(kind(a) == kind(b) for a, b in pairs)


def leaf_names(tree: Item) -> list[str]:
    """The names of all leaves, each once."""
    names: dict[str, None] = {}
    for name in pytree.leaf_names(tree):
        unique, number = name, 1
        while unique in names:
            number += 1
            unique = f"{name}#{number}"
        names[unique] = None
    return list(names)


def kind(spec: Item) -> list:
    """Dtype and shape for a manifest."""
    return [descriptions.dtype_name(spec.dtype), list(spec.shape)]
