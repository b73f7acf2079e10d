"""Transforms that select, drop, rename and join entries of data.

They work on nested dicts only, as containers of other classes have fixed entries.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb.keys import Path, find, path_name
from jrb.transforms.leaves import Paths, check_paths, insert_leaf
from jrb.types import Item, Transform, TransformContext


@pytree.component
class Select(Transform):
    """Keeps the entries at these paths, and drops all other_axes."""

    paths: Paths

    def __post_init__(self) -> None:
        check_paths("Select", self.paths)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with fewer entries."""
        out: Any = {}
        for path in self.paths:
            out = insert_leaf(out, path, find(data, path, "Select"), "Select")
        return out


@pytree.component
class Exclude(Transform):
    """Drops the entries at these paths."""

    paths: Paths

    def __post_init__(self) -> None:
        check_paths("Exclude", self.paths)

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with fewer entries."""
        for path in self.paths:
            find(data, path, "Exclude")
            data = _remove_entry(data, path, "Exclude")
        return data


@pytree.component
class Rename(Transform):
    """Moves entries from one path to another.

    Attributes:
        pairs: old and new paths, such as `((("next", "observation"), "next_obs"),)`.
    """

    pairs: tuple[tuple[Path, Path], ...]

    def __post_init__(self) -> None:
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.pairs):
            raise TypeError(
                f"Rename: pairs: expected a tuple of pairs, got {self.pairs!r}. "
                "Write ((path, path),)."
            )

    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the data with the entries at their new paths."""
        # Find all entries before any is moved, so that two can swap their paths.
        entries = [(to, find(data, path, "Rename")) for path, to in self.pairs]
        for path, _ in self.pairs:
            data = _remove_entry(data, path, "Rename")
        for to, entry in entries:
            data = insert_leaf(data, to, entry, "Rename")
        return data


@pytree.component
class Concatenate(Transform):
    """Joins leaves along an axis, such as the parts of an observation.

    Attributes:
        paths: the paths of the leaves that are joined, in order.
        to: the path of the result.
        axis: the axis along which they are joined, a negative number: -1 is the last one.
        keep: if True, the joined leaves stay in the data too.
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
        """Returns the data with the joined leaf."""
        leaves = [find(data, path, "Concatenate") for path in self.paths]
        # All must be like the first one, but for the length of the axis.
        first = leaves[0]
        other_axes = lambda leaf: (*leaf.shape[: self.axis], 0, *leaf.shape[self.axis :][1:])
        for path, leaf in zip(self.paths, leaves, strict=True):
            if not isinstance(leaf, jax.Array) or leaf.dtype != first.dtype:
                raise TypeError(
                    f"Concatenate: '{path_name(path)}': expected a leaf of dtype "
                    f"{getattr(first, 'dtype', None)}, got {getattr(leaf, 'dtype', leaf)}. "
                    "Use Cast before."
                )
            is_batch_axis = leaf.ndim + self.axis < 1
            if is_batch_axis or leaf.ndim != first.ndim or other_axes(leaf) != other_axes(first):
                raise ValueError(
                    f"Concatenate: '{path_name(path)}': expected a shape like {first.shape} "
                    f"but for axis {self.axis}, which is not that of the batch, got {leaf.shape}."
                )
        if not self.keep:
            for path in self.paths:
                data = _remove_entry(data, path, "Concatenate")
        return insert_leaf(data, self.to, jnp.concatenate(leaves, axis=self.axis), "Concatenate")


def _remove_entry(data: Item, path: Path, what: str) -> Any:
    """Returns the data without an entry, and without dicts that are empty then."""

    def remove(data: Any, first: str, *deeper: str) -> Any:
        if not isinstance(data, Mapping):
            raise TypeError(f"{what}: expected nested dicts, got {type(data).__name__}.")
        # An empty dict marks a remove entry: it is left out, as are dicts that become empty.
        inner = remove(data[first], *deeper) if deeper else {}
        kept = {name: entry for name, entry in data.items() if name != first}
        return {**kept, first: inner} if inner else kept

    return remove(data, *((path,) if isinstance(path, str) else path))
