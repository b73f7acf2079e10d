"""Transforms of the structure of data: which entries there are, and what they are called.

They work on nested dicts: data of other classes have the entries that their class says.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb.keys import Path, find, lookup, path_name
from jrb.transforms.leaves import Paths, check_paths
from jrb.types import Item, Transform, TransformContext


@pytree.component
class Select(Transform):
    """Keeps the entries at these paths, and drops all others."""

    paths: Paths

    def __post_init__(self) -> None:
        check_paths("Select", self.paths)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, with fewer entries."""
        out: Any = {}
        for path in self.paths:
            out = with_leaf(out, path, find(data, path, "Select"), "Select")
        return out


@pytree.component
class Exclude(Transform):
    """Drops the entries at these paths."""

    paths: Paths

    def __post_init__(self) -> None:
        check_paths("Exclude", self.paths)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, with fewer entries."""
        for path in self.paths:
            find(data, path, "Exclude")
            data = _without(data, _names(path), "Exclude")
        return data


@pytree.component
class Rename(Transform):
    """Moves entries from one path to another.

    Attributes:
        pairs: from and to, such as `((("next", "observation"), "next_obs"),)`.
    """

    pairs: tuple[tuple[Path, Path], ...]

    def __post_init__(self) -> None:
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.pairs):
            raise TypeError(
                f"Rename: pairs: expected a tuple of pairs, got {self.pairs!r}. "
                "Write ((path, path),)."
            )

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, with the entries elsewhere."""
        moved = [(to, find(data, path, "Rename")) for path, to in self.pairs]
        for path, _ in self.pairs:
            data = _without(data, _names(path), "Rename")
        for to, entry in moved:
            data = with_leaf(data, to, entry, "Rename")
        return data


@pytree.component
class Concatenate(Transform):
    """Joins leaves along an axis, such as the parts of an observation.

    Attributes:
        paths: the leaves, in order.
        to: where the result is put.
        axis: along which, counted from the end.
        keep: whether the leaves stay too.
    """

    paths: Paths
    to: Path
    axis: int = -1
    keep: bool = False

    def __post_init__(self) -> None:
        check_paths("Concatenate", self.paths)
        if self.axis >= 0:
            raise ValueError(f"Concatenate: axis: expected a negative number, got {self.axis}.")

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data, with one leaf for several."""
        leaves = [find(data, path, "Concatenate") for path in self.paths]
        for path, leaf in zip(self.paths, leaves, strict=True):
            if not isinstance(leaf, jax.Array) or leaf.dtype != leaves[0].dtype:
                raise TypeError(
                    f"Concatenate: '{path_name(path)}': expected a leaf of dtype "
                    f"{getattr(leaves[0], 'dtype', None)}, got {getattr(leaf, 'dtype', leaf)}. "
                    "Use Cast before."
                )
            like = (leaves[0].ndim, *_without_axis(leaves[0], self.axis))
            if leaf.ndim + self.axis < 1 or (leaf.ndim, *_without_axis(leaf, self.axis)) != like:
                raise ValueError(
                    f"Concatenate: '{path_name(path)}': expected a shape like {leaves[0].shape} "
                    f"but for axis {self.axis}, which is not that of the batch, got {leaf.shape}."
                )
        joined = jnp.concatenate(leaves, axis=self.axis)
        for path in () if self.keep else self.paths:
            data = _without(data, _names(path), "Concatenate")
        return with_leaf(data, self.to, joined, "Concatenate")


def _without_axis(leaf: jax.Array, axis: int) -> tuple[int, ...]:
    return (*leaf.shape[:axis], *leaf.shape[axis:][1:])


def with_leaf(data: Item, path: Path, entry: Any, what: str) -> Any:
    """The data with an entry put at a path, whose dicts are made where they are missing.

    Raises:
        TypeError: something on the way is no dict.
        ValueError: something is there already.
    """
    if lookup(data, path) is not None:
        raise ValueError(f"{what}: expected nothing at '{path_name(path)}', got an entry.")
    return _with(data, _names(path), entry, what)


def _with(data: Item, names: tuple[str, ...], entry: Any, what: str) -> Any:
    if not pytree.is_mapping(data):
        raise TypeError(f"{what}: expected nested dicts, got {type(data).__name__}.")
    first, *rest = names
    inner = _with(data.get(first, {}), tuple(rest), entry, what) if rest else entry
    return {**data, first: inner}


def _without(data: Item, names: tuple[str, ...], what: str) -> Any:
    if not pytree.is_mapping(data):
        raise TypeError(f"{what}: expected nested dicts, got {type(data).__name__}.")
    first, *rest = names
    inner = _without(data[first], tuple(rest), what) if rest else {}
    kept = {name: entry for name, entry in data.items() if name != first}
    return {**kept, first: inner} if inner else kept


def _names(path: Path) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path
