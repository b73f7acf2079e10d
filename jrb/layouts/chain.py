"""Where a next observation is the next row's observation, and where it is not."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util.pytree import Leaf
from jrb.keys import Keys, path_name
from jrb.layouts.names import Leaves

_ROWS = 1024  # that are compared at once


@dataclasses.dataclass(frozen=True)
class Chain:
    """How transitions hang together.

    Attributes:
        ends: bool `[E, T]`, the last rows of trajectories.
        shared: from leaves of the next observation to those of the observation that hold all their
            rows but the last ones of trajectories.
    """

    ends: np.ndarray
    shared: dict[str, str]


def chain(leaves: Leaves, keys: Keys, cuts: np.ndarray) -> Chain:
    """Finds out.

    A trajectory ends where a flag says so (done, terminated or truncated, whichever there are),
    where the environment's rows end, where it is cut, and where a next observation is not the next
    row's observation. If that is so in most rows, as for returns of n steps, then the leaf is not
    shared, and tells nothing about ends.

    Args:
        leaves: arrays `[E, T, ...]`.
        keys: how they are keyed.
        cuts: bool `[E, T]`, further last rows.
    """
    ends = cuts.copy()
    ends[:, -1:] = True
    for flag in (keys.done, keys.terminated, keys.truncated):
        if path_name(flag) in leaves:
            array = np.asarray(leaves[path_name(flag)])
            ends |= array.astype(bool).any(axis=tuple(range(2, array.ndim)))
    flagged, shared = ends.copy(), {}
    for name, twin in pairs(leaves, keys).items():
        breaks = differ(leaves[twin], leaves[name]) & ~flagged
        if 2 * breaks.sum() <= (~flagged).sum() and ends.size:
            shared[name] = twin
            ends |= breaks
    return Chain(ends=ends, shared=shared)


def pairs(leaves: Leaves, keys: Keys) -> dict[str, str]:
    """From leaves of the next observation to those of the observation of the same kind."""
    found = {name: keys.twin(name) for name in leaves}
    kind = lambda name: (leaves[name].shape, leaves[name].dtype)
    return {
        name: twin for name, twin in found.items() if twin in leaves and kind(name) == kind(twin)
    }


def differ(before: Any, after: Any) -> np.ndarray:
    """Finds the next observations that differ, in any bit, from the observation of the next row.

    Args:
        before: the observations, `[E, T, ...]`.
        after: the next observations, likewise.

    Returns:
        Bool `[E, T]`, False for the last row.
    """
    envs, length = before.shape[:2]
    found = np.zeros((envs, length), bool)
    for env in range(envs):
        for start in range(0, length - 1, _ROWS):
            stop = min(start + _ROWS, length - 1)
            rows = _bytes(after[env, start:stop]) != _bytes(before[env, start + 1 : stop + 1])
            found[env, start:stop] = rows.any(axis=1)
    return found


def _bytes(leaf: Leaf) -> np.ndarray:
    """The bytes of each row, uint8 `[T, bytes]`."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(leaf)
    width = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    return array.view(np.uint8).reshape(len(array), width) if width else np.zeros((len(array), 0))
