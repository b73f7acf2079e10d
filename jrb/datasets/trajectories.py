"""Items in one row, as padded episodes, and back.

T rows of time, K trajectories, L the length of the longest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import pytree
from jrb._util.pytree import ArrayLike, PyTree
from jrb.keys import TED, Keys


def split_trajectories(
    items: PyTree, *, keys: Keys = TED, length: int | None = None
) -> tuple[Any, Any, Any]:
    """The trajectories in some items, each in a row of its own.

    One ends where a flag says so (done, terminated or truncated, whichever there are), before
    another number of `keys.episode` if that is named, and with the last item. `join_trajectories`
    undoes this.

    Args:
        items: a pytree of NumPy or JAX arrays `[T, ...]`, in the order of time; outside `jit`, as
            what they hold tells the shapes.
        keys: where the flags lie.
        length: L; None for that of the longest trajectory.

    Returns:
        A pytree of arrays `[K, L, ...]`, zeros behind the end of each trajectory; the mask, bool
        `[K, L]`, True for items; and bool `[K]`, which of them go on after the last item, as none
        of its flags says that it is over. JAX arrays, if the items are, else NumPy's.

    Raises:
        ValueError: no flags, leaves of unequal length, or trajectories longer than `length`.

    Example:
        >>> import numpy as np
        >>> from jrb.datasets import join_trajectories, split_trajectories
        >>> items = {"x": np.arange(5), "next": {"done": np.array([0, 1, 0, 0, 0]) > 0}}
        >>> padded, mask, running = split_trajectories(items)
        >>> padded["x"].tolist(), mask.sum(1).tolist(), running.tolist()
        ([[0, 1, 0], [2, 3, 4]], [2, 3], [False, True])
        >>> join_trajectories(padded, mask)["x"].tolist()
        [0, 1, 2, 3, 4]
    """
    steps = _length(items, "split_trajectories")
    over = _over(items, keys, steps)
    stops = _stops(over)
    starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
    longest = int((stops - starts).max(initial=0))
    if length is not None and length < longest:
        raise ValueError(f"length: expected at least {longest}, the longest one, got {length}.")
    place = starts[:, None] + np.arange(longest if length is None else length)
    mask = place < stops[:, None]
    index = np.minimum(place, max(steps - 1, 0))
    running = (stops == steps) & ~over[-1:].any()
    xp = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(items)) else np
    padded = jax.tree.map(lambda leaf: _blanked(leaf[index], mask), items)
    return padded, xp.asarray(mask), xp.asarray(running)


def join_trajectories(padded: PyTree, mask: ArrayLike | None) -> Any:
    """Padded trajectories one after the other: what `split_trajectories` was given.

    Args:
        padded: a pytree of arrays `[K, L, ...]`.
        mask: bool `[K, L]`, True for items.

    Returns:
        Arrays `[T, ...]`, T of which the mask is True.

    Raises:
        ValueError: a leaf that does not begin with `[K, L]`.
        TypeError: a mask that is not bool.
    """
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask: expected dtype bool, got {mask.dtype}. Compare, do not cast.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(padded):
        if leaf.shape[: mask.ndim] != mask.shape or mask.ndim != 2:
            raise ValueError(
                f"join_trajectories: leaf '{pytree.leaf_name(path)}': expected a shape from "
                f"{mask.shape} on, as the mask has, [K, L], got {leaf.shape}."
            )
    index = np.nonzero(mask)
    return jax.tree.map(lambda leaf: leaf[index], padded)


def lengths(items: PyTree, *, keys: Keys = TED) -> np.ndarray:
    """int64 `[K]`, the steps of each trajectory in some items `[T, ...]`; see the split."""
    return np.diff(_stops(_over(items, keys, _length(items, "lengths"))), prepend=0)


def returns(items: PyTree, *, keys: Keys = TED) -> Any:
    """float64 `[K, ...]`, the sum of the rewards of each trajectory in some items `[T, ...]`.

    A pytree of them where the reward has several leaves, such as one for each agent.

    Example:
        >>> import numpy as np
        >>> from jrb.datasets import trajectories
        >>> after = {"reward": np.arange(5.0), "done": np.array([0, 1, 0, 0, 0]) > 0}
        >>> trajectories.returns({"next": after}).tolist()
        [1.0, 9.0]
    """
    stops = _stops(_over(items, keys, _length(items, "returns")))

    def summed(rewards: Any) -> np.ndarray:
        rewards = np.asarray(rewards)
        parts = np.split(rewards, stops[:-1]) if len(stops) else []
        found = [part.sum(axis=0, dtype=np.float64) for part in parts]
        return np.array(found, np.float64).reshape(len(found), *rewards.shape[1:])

    return jax.tree.map(summed, keys.get(items, "reward"))


def _length(items: PyTree, who: str) -> int:
    """T, the same for all leaves."""
    shapes = {
        pytree.leaf_name(path): np.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(items)
    }
    found = {shape[:1] for shape in shapes.values()}
    if len(found) != 1 or found == {()}:
        raise ValueError(
            f"{who}: expected leaves [T, ...] of one length, time first, got shapes {shapes}."
        )
    return found.pop()[0]


def _over(items: PyTree, keys: Keys, steps: int) -> np.ndarray:
    """Which items end a trajectory, bool `[T]`; the last one only if it says so."""
    flags = keys.flags(items)
    if not flags and keys.episode is None:
        raise ValueError(
            "done: expected a leaf such as 'next/done', got items with the leaves "
            f"{pytree.leaf_names(items)}. Name the right ones with keys=jrb.Keys(done=...)."
        )
    for name, flag in flags.items():
        if flag.shape not in ((steps,), (steps, 1)):
            raise ValueError(
                f"done: leaf '{name}': expected shape ({steps},) or ({steps}, 1), got "
                f"{flag.shape}. Split each environment by itself."
            )
    is_set = lambda flag: np.asarray(flag).reshape(steps) != 0
    over = keys.ends(items, is_set) if flags else np.zeros(steps, bool)
    if keys.episode is not None:
        number = np.asarray(keys.get(items, "episode")).reshape(steps, -1)
        over[:-1] |= (number[1:] != number[:-1]).any(axis=1)
    return over


def _stops(over: np.ndarray) -> np.ndarray:
    """int64 `[K]`, the items up to the end of each trajectory; the last item ends one too."""
    ends = np.flatnonzero(over) + 1
    if len(over) and ends[-1:].tolist() != [len(over)]:
        ends = np.append(ends, len(over))
    return ends.astype(np.int64)


def _blanked(leaf: Any, mask: np.ndarray) -> Any:
    """An array `[K, L, ...]` with zeros where the mask is False; all other bits stay."""
    if not isinstance(leaf, jax.Array):
        leaf[~mask] = np.zeros((), leaf.dtype)
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf  # keys have no zeros
    shown = jnp.asarray(mask).reshape(*mask.shape, *(1,) * (leaf.ndim - 2))
    return jnp.where(shown, leaf, jnp.zeros((), leaf.dtype))
