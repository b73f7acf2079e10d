"""The episodes of a buffer, in TED, on their way into files.

L steps of an episode.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrb._base import pytree
from jrb.buffer import ReplayBuffer
from jrb.datasets.reading.mapping import ROLES
from jrb.datasets.reading.names import check_names
from jrb.keys import Keys, path_name, within
from jrb.layouts.names import Leaves
from jrb.read import Episode

_FLAGS = ("done", "terminated", "truncated")
_VALID = "next/valid"


class Piece(NamedTuple):
    """An episode, as far as a buffer holds it.

    Attributes:
        leaves: arrays `[L, ...]` by their names in TED, without flags and `next/valid`.
        terminated: bool `[L]`.
        truncated: bool `[L]`; the last step of an episode that did not terminate is.
        has_last: whether the observation after the last step is there, if it is wanted.
        source: what it was read from.
    """

    leaves: Leaves
    terminated: np.ndarray
    truncated: np.ndarray
    has_last: bool
    source: Episode


def pieces(buffer: ReplayBuffer, found: Sequence[Episode]) -> Iterator[Piece]:
    """Reads episodes one by one."""
    return (_piece(buffer.keys, each) for each in found)


def names_in(buffer: ReplayBuffer, spec: Any, who: str) -> dict[str, str]:
    """The leaf in TED of each leaf of items.

    Raises:
        ValueError: two would have one name, or there is no observation, action or next observation.
    """
    names = {name: _name(name, buffer.keys) for name in pytree.leaf_names(spec)}
    check_names(who, names.values())
    for role in ("observation", "action", "next/observation"):
        if not any(within(name, role) for name in names.values()):
            raise ValueError(
                f"{who}: expected items with '{role}', got leaves {list(names)}. Name them with "
                "keys=jrb.Keys(...)."
            )
    return names


def _name(name: str, keys: Keys) -> str:
    """The name in TED of a leaf of an item."""
    for role, leaf in ROLES.items():
        path = getattr(keys, role)
        if path is not None and within(name, path_name(path)):
            return leaf + name[len(path_name(path)) :]
    return name


def _piece(keys: Keys, each: Episode) -> Piece:
    leaves = {
        _name(pytree.leaf_name(path), keys): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(each.items)
    }
    found = {name: leaves.pop(f"next/{name}", None) for name in _FLAGS}
    terminated, truncated = _both(found, each.length)
    truncated[-1] |= ~terminated[-1]
    valid = leaves.pop(_VALID, np.ones(each.length, bool)).astype(bool).reshape(each.length)
    return Piece(leaves, terminated, truncated, bool((valid | terminated).all()), each)


def _both(found: dict[str, Any], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Both flags, bool `[L]`; done is terminated if nothing tells that it is truncated."""
    flags = {
        name: leaf.astype(bool).reshape(steps) for name, leaf in found.items() if leaf is not None
    }
    none = np.zeros(steps, bool)
    done, truncated = flags.get("done", none), flags.get("truncated", none)
    terminated = flags.get("terminated", done & ~truncated)
    return terminated, truncated | (done & ~terminated)
