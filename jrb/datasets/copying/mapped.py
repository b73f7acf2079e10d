"""What calls a function with a block of steps, or an episode, and gathers what it returns.

T steps.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jrb._util import casting, pytree
from jrb._util.pytree import PyTree
from jrb.datasets.format import Episode
from jrb.layouts.names import Leaves, flatten

Function = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """An item that was not mapped: its place in the block, and why."""

    place: int
    error: Exception


Result = Leaves | Failure | None
"""The leaves of a block by name; None for an episode that is left out."""

Call = Callable[[Function, Episode], Result]


def mapped(function: Function, block: Episode) -> Result:
    """A block of steps, one by one through a function."""
    found: list[Leaves] = []
    for row in range(length_of(block)):
        try:
            found.append(_flat(function(jax.tree.map(operator.itemgetter(row), block))))
            check_like(found[0], found[-1])
        except Exception as error:
            return Failure(row, error)
    return {name: np.stack([each[name] for each in found]) for name in found[0]}


def mapped_episode(function: Function, episode: Episode) -> Result:
    """An episode through a function; None if it returns that."""
    try:
        result = function(episode)
        if result is None:
            return None
        leaves = _flat(result)
        lengths = {name: leaf.shape[0] if leaf.ndim else None for name, leaf in leaves.items()}
        if len(set(lengths.values())) != 1 or lengths[next(iter(lengths))] in (None, 0):
            raise ValueError(
                "expected arrays [T, ...] of one length, at least 1, or None to leave the episode "
                f"out, got lengths {lengths}."
            )
        return leaves
    except Exception as error:
        return Failure(0, error)


def _flat(item: PyTree) -> Leaves:
    """The arrays of what a function returned, by name."""
    leaves = flatten(jax.tree.map(np.asarray, item), "function")
    for name, leaf in leaves.items():
        if leaf.dtype.kind in "OSUMm" or leaf.dtype.fields is not None:
            raise TypeError(
                f"leaf '{name}': expected numbers, got dtype {leaf.dtype}. Encode it, or leave it "
                "out."
            )
    return leaves


class Compiled:
    """Blocks of steps through a function of JAX, all in the shape of the first.

    Raises:
        TypeError: steps with numbers of 64 bits, which JAX would make ones of 32.
    """

    def __init__(self, function: Function, cast: bool, spec: PyTree, rows: int) -> None:
        self._function, self._rows, self._cast = jax.jit(jax.vmap(function)), rows, cast
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
            if not cast and not casting.is_kept(np.zeros((), leaf.dtype)):
                raise TypeError(
                    f"preprocess: leaf '{pytree.leaf_name(path)}': expected a dtype that JAX "
                    f"keeps, got {leaf.dtype}. Pass cast=True, or set jax_enable_x64."
                )

    def __call__(self, function: Function, block: Episode) -> Result:
        """A block; what is missing to its full length repeats its last step."""
        count = length_of(block)
        index = np.minimum(np.arange(self._rows), count - 1)
        try:
            whole = block if count == self._rows else jax.tree.map(lambda x: x[index], block)
            whole = casting.kept(whole, "preprocess") if self._cast else whole
            leaves = _flat(self._function(whole))
            return {name: leaf[:count] for name, leaf in leaves.items()}
        except Exception as error:
            return Failure(0, error)


def length_of(block: Episode) -> int:
    """T."""
    return len(block["next"]["done"])


def check_like(first: Leaves, leaves: Leaves) -> None:
    """Raises unless two steps have the same leaves, shapes and dtypes."""
    if first.keys() != leaves.keys():
        raise ValueError(f"expected the leaves {sorted(first)}, as before, got {sorted(leaves)}.")
    for name, leaf in leaves.items():
        want = first[name]
        if want.shape != leaf.shape or want.dtype != leaf.dtype:
            raise ValueError(
                f"leaf '{name}': expected {want.dtype}{list(want.shape)}, as before, got "
                f"{leaf.dtype}{list(leaf.shape)}."
            )
