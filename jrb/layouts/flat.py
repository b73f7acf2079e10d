"""Flat: every observation once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util.pytree import Leaf, PyTree
from jrb.keys import TED, Keys, path_name
from jrb.layouts.chain import Chain, chain
from jrb.layouts.names import Leaves, flatten, nest

_ENDS = "ends"


def ted_to_flat(
    items: PyTree, keys: Keys = TED, num_envs: int | None = None, cuts: Sequence[int] = ()
) -> dict[str, Any]:
    """Observations once: those of each trajectory in a row, and behind them its last next one.

    Args:
        items: a nested dict of NumPy or JAX arrays, `[T, ...]`, or `[T, E, ...]` with `num_envs`.
        keys: how they are keyed.
        num_envs: E, or None for no axis of environments.
        cuts: rows after which time does not go on though no flag says so, such as the newest row
            of a ring in the order of its slots.

    Returns:
        A dict with the same names. With N = T * E, environment after environment, and K
        trajectories: leaves `[N, ...]`; leaves of the observation `[N + K, ...]` in place of those
        and of their next ones; and `ends`, bool `[T]` or `[E, T]`, the last rows of trajectories.
        Where most next observations are not the next row's, as for returns of n steps, both stay.

    Raises:
        TypeError: no dict, or a leaf that is no array.
        ValueError: leaves of unequal T or E, or one that is called `ends`.
    """
    leaves, links = to_flat(flatten(items, "ted_to_flat"), keys, num_envs, cuts)
    if _ENDS in leaves:
        raise ValueError("ted_to_flat: leaf 'ends': the layout uses that name. Rename yours.")
    ends = links.ends if num_envs is not None else links.ends[0]
    return nest({**leaves, _ENDS: ends})


def flat_to_ted(flat: Any, keys: Keys = TED) -> dict[str, Any]:
    """Returns the transitions that `ted_to_flat` took."""
    leaves = flatten(flat, "flat_to_ted")
    if _ENDS not in leaves:
        raise ValueError(
            f"flat_to_ted: expected a leaf 'ends', got {list(leaves)}. ted_to_flat makes it."
        )
    ends = np.asarray(leaves.pop(_ENDS))
    return nest(from_flat(leaves, ends, keys))


def to_flat(
    leaves: Leaves, keys: Keys, num_envs: int | None, cuts: Sequence[int]
) -> tuple[Leaves, Chain]:
    """Returns the flat layout of arrays by name, and where trajectories end."""
    leaves = {name: _by_env(name, leaf, num_envs) for name, leaf in leaves.items()}
    shape = _lead(leaves)
    links = chain(leaves, keys, _cuts(cuts, shape))
    join = lambda leaf: leaf.reshape(links.ends.size, *leaf.shape[2:])
    ends = links.ends.reshape(-1)
    flat = {}
    for name, leaf in leaves.items():
        if name in links.shared:
            continue
        after = [other for other, twin in links.shared.items() if twin == name]
        leaf = join(leaf)
        flat[name] = _interleaved(leaf, join(leaves[after[0]]), ends) if after else leaf
    return flat, links


def from_flat(leaves: Leaves, ends: np.ndarray, keys: Keys) -> Leaves:
    """Returns the transitions of flat arrays by name; `ends` is bool `[T]` or `[E, T]`."""
    place = places(ends.reshape(-1))
    after, before = path_name(keys.next_observation), path_name(keys.observation)
    out = {}
    for name, leaf in leaves.items():
        if len(leaf) == ends.size:
            out[name] = _by_time(leaf, ends.shape)
        elif len(leaf) == ends.size + ends.sum() and keys.twin(after + name[len(before) :]) == name:
            out[name] = _by_time(leaf[place], ends.shape)
            out[after + name[len(before) :]] = _by_time(leaf[place + 1], ends.shape)
        else:
            raise ValueError(
                f"leaf '{name}': expected {ends.size} rows, one for each entry of 'ends', or for "
                f"an observation {ends.size + ends.sum()}, got {len(leaf)}."
            )
    return out


def places(ends: np.ndarray) -> np.ndarray:
    """Where each row's observation stands among those of N rows and K ends, int `[N]`."""
    return np.arange(ends.size) + np.cumsum(ends) - ends


def _interleaved(before: Any, after: Any, ends: np.ndarray) -> Any:
    """Observations `[N + K, ...]`: each row's, and behind the last of a trajectory its next one."""
    last = np.flatnonzero(ends)
    index = np.empty(len(ends) + len(last), np.int64)
    place = places(ends)
    index[place] = np.arange(len(ends))
    index[place[last] + 1] = len(ends) + np.arange(len(last))
    if isinstance(before, jax.Array):
        return jnp.concatenate([before, after[last]])[index]
    out = np.empty((len(index), *before.shape[1:]), before.dtype)
    out[place], out[place[last] + 1] = before, after[last]
    return out


def _by_env(name: str, leaf: Leaf, num_envs: int | None) -> Any:
    """From `[T, ...]` or `[T, E, ...]` to `[E, T, ...]`."""
    axes = 1 if num_envs is None else 2
    if len(leaf.shape) < axes or (num_envs is not None and leaf.shape[1] != num_envs):
        wanted = "[T, ...]" if num_envs is None else f"[T, {num_envs}, ...]"
        raise ValueError(
            f"leaf '{name}': expected shape {wanted}, got {tuple(leaf.shape)}. Time comes first, "
            "then the environments, whose number num_envs says."
        )
    return leaf[None] if num_envs is None else leaf.swapaxes(0, 1)


def _by_time(leaf: Leaf, shape: tuple[int, ...]) -> Any:
    """From `[N, ...]` to `[T, ...]` or, for a shape (E, T), to `[T, E, ...]`."""
    if len(shape) == 1:
        return leaf
    return leaf.reshape(*shape, *leaf.shape[1:]).swapaxes(0, 1)


def _lead(leaves: Leaves) -> tuple[int, int]:
    if not leaves:
        raise ValueError("expected at least one leaf, got an empty dict.")
    first = next(iter(leaves))
    shape = leaves[first].shape[:2]
    for name, leaf in leaves.items():
        if leaf.shape[:2] != shape:
            raise ValueError(
                f"leaf '{name}': expected {shape[1]} rows of time as in '{first}', got "
                f"{leaf.shape[1]}."
            )
    return shape


def _cuts(rows: Sequence[int], shape: tuple[int, int]) -> np.ndarray:
    cuts = np.zeros(shape, bool)
    for row in rows:
        if not 0 <= row < shape[1]:
            raise ValueError(f"cuts: expected rows in [0, {shape[1]}), got {row}.")
        cuts[:, row] = True
    return cuts
