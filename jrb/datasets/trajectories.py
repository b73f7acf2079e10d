"""Items in one row, as padded episodes, and back.

T rows of time, K trajectories, L the length of the longest.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb.authoring import leaf_name, leaf_names
from jrb.keys import TED, Keys


def split_trajectories(
    items: Any, *, keys: Keys = TED, length: int | None = None
) -> tuple[Any, Any, Any]:
    """Returns the trajectories in some items, each padded in a row of its own.

    A trajectory ends at a flag (done, terminated or truncated), before another number of
    `keys.episode` if that is named, and with the last item. `join_trajectories` undoes this.

    Args:
        items: a pytree of NumPy or JAX arrays `[T, ...]`, in the order of time; outside `jit`, as
            the shapes depend on the flags.
        keys: where the flags are.
        length: L; None for that of the longest trajectory.

    Returns:
        A pytree of arrays `[K, L, ...]`, zeros after the end of each trajectory; the mask, bool
        `[K, L]`, True for items; and bool `[K]`, True for the last one if no flag ends it. JAX
        arrays, if the items are, else NumPy's.

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
    over, stops = _ends(items, keys, "split_trajectories")
    starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
    longest = int((stops - starts).max(initial=0))
    if length is not None and length < longest:
        raise ValueError(f"length: expected at least {longest}, the longest one, got {length}.")
    place = starts[:, None] + np.arange(longest if length is None else length)
    mask, index = place < stops[:, None], np.minimum(place, max(len(over) - 1, 0))
    running = (stops == len(over)) & ~over[-1:].any()

    def padded(leaf: Any) -> Any:
        leaf = leaf[index]
        if not isinstance(leaf, jax.Array):
            leaf[~mask] = np.zeros((), leaf.dtype)
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf  # keys have no zeros
        shown = jnp.asarray(mask).reshape(*mask.shape, *(1,) * (leaf.ndim - 2))
        return jnp.where(shown, leaf, jnp.zeros((), leaf.dtype))

    xp = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(items)) else np
    return jax.tree.map(padded, items), xp.asarray(mask), xp.asarray(running)


def join_trajectories(padded: Any, mask: Any) -> Any:
    """Returns padded trajectories one after the other, as `split_trajectories` was given them.

    Args:
        padded: a pytree of arrays `[K, L, ...]`.
        mask: bool `[K, L]`, True for items.

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
                f"join_trajectories: leaf '{leaf_name(path)}': expected a shape from "
                f"{mask.shape} on, as the mask has, [K, L], got {leaf.shape}."
            )
    index = np.nonzero(mask)
    return jax.tree.map(lambda leaf: leaf[index], padded)


def lengths(items: Any, *, keys: Keys = TED) -> np.ndarray:
    """Returns int64 `[K]`, the steps of each trajectory in items `[T, ...]`; see the split."""
    return np.diff(_ends(items, keys, "lengths")[1], prepend=0)


def returns(items: Any, *, keys: Keys = TED) -> Any:
    """Returns float64 `[K, ...]`, the sum of the rewards of each trajectory in items `[T, ...]`.

    A pytree of them where the reward has several leaves, such as one for each agent.

    Example:
        >>> import numpy as np
        >>> from jrb.datasets import trajectories
        >>> after = {"reward": np.arange(5.0), "done": np.array([0, 1, 0, 0, 0]) > 0}
        >>> trajectories.returns({"next": after}).tolist()
        [1.0, 9.0]
    """
    _, stops = _ends(items, keys, "returns")

    def summed(rewards: Any) -> np.ndarray:
        rewards = np.asarray(rewards)
        parts = np.split(rewards, stops[:-1]) if len(stops) else []
        sums = [part.sum(axis=0, dtype=np.float64) for part in parts]
        return np.array(sums, np.float64).reshape(len(sums), *rewards.shape[1:])

    return jax.tree.map(summed, keys.get(items, "reward"))


def _ends(items: Any, keys: Keys, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the items that end a trajectory, bool `[T]`, the last only if it says so.

    And int64 `[K]`, the number of items up to the end of each, where the last item ends one too.
    """
    leaves = jax.tree_util.tree_leaves_with_path(items)
    shapes = {leaf_name(path): np.shape(leaf) for path, leaf in leaves}
    leads = {shape[:1] for shape in shapes.values()}
    if len(leads) != 1 or leads == {()}:
        raise ValueError(
            f"{who}: expected leaves [T, ...] of one length, time first, got shapes {shapes}."
        )
    ((steps,),) = leads
    flags = keys.flags(items)
    if not flags and keys.episode is None:
        raise ValueError(
            "done: expected a leaf such as 'next/done', got items with the leaves "
            f"{leaf_names(items)}. Name the right ones with keys=jrb.Keys(done=...)."
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
    is_last = np.arange(1, steps + 1) == steps
    return over, (np.flatnonzero(over | is_last) + 1).astype(np.int64)
