"""Splits items in order of time into padded trajectories, and joins these again.

T items, K trajectories, L steps of the longest trajectory.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb.authoring import leaf_name, leaf_names
from jrb.datasets.reading.names import check
from jrb.keys import TED, Keys


def split_trajectories(
    items: Any, *, keys: Keys = TED, length: int | None = None
) -> tuple[Any, Any, Any]:
    """Returns the trajectories of consecutive items as padded rows, with a mask.

    A trajectory ends at a flag (done, terminated or truncated), where the episode number at
    `keys.episode` changes (if given), and at the last item. `join_trajectories` is the inverse.

    Args:
        items: a pytree of NumPy or JAX arrays `[T, ...]` in order of time. Call outside `jit`: the
            shapes of the result depend on the flags.
        keys: the paths of the flags in an item.
        length: the padded length L; None for the length of the longest trajectory.

    Returns:
        A pytree of arrays `[K, L, ...]`, zero after the end of each trajectory; a mask, bool
        `[K, L]`, True for items; and bool `[K]`, True for a last trajectory that no flag ends.
        All are JAX arrays if the items are, else NumPy arrays.

    Raises:
        ValueError: the items have no flags or leaves of unequal length, or a trajectory is longer
            than `length`.

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
    is_end, stops = _ends(items, keys, "split_trajectories")
    # Find the bounds of the trajectories, and check that the longest one fits.
    starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
    longest = int((stops - starts).max(initial=0))
    is_enough = length is None or length >= longest
    check(is_enough, "length", f"at least {longest}, the longest one", length)
    # Index the items `[K, L]`; padding repeats an item here and is zeroed below.
    place = starts[:, None] + np.arange(longest if length is None else length)
    mask, index = place < stops[:, None], np.minimum(place, max(len(is_end) - 1, 0))
    # Only the last trajectory can lack a flag.
    is_running = (stops == len(is_end)) & ~is_end[-1:].any()

    def pad(leaf: Any) -> Any:
        leaf = leaf[index]
        # NumPy leaves are fresh copies after indexing, so they can be zeroed in place.
        if not isinstance(leaf, jax.Array):
            leaf[~mask] = np.zeros((), leaf.dtype)
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf  # PRNG keys have no zero, so their padding is not zeroed
        is_item = jnp.asarray(mask).reshape(*mask.shape, *(1,) * (leaf.ndim - 2))
        return jnp.where(is_item, leaf, jnp.zeros((), leaf.dtype))

    # Masks are JAX arrays if one leaf is, so that they can be used together.
    xp = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(items)) else np
    return jax.tree.map(pad, items), xp.asarray(mask), xp.asarray(is_running)


def join_trajectories(padded: Any, mask: Any) -> Any:
    """Returns the items `[T, ...]` of padded trajectories; the inverse of `split_trajectories`.

    Args:
        padded: a pytree of arrays `[K, L, ...]`.
        mask: bool `[K, L]`, True for items.

    Raises:
        ValueError: the shape of a leaf does not begin with `[K, L]`.
        TypeError: the mask is not bool.
    """
    mask = np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"mask: expected dtype bool, got {mask.dtype}. Compare, do not cast.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(padded):
        is_right, where = mask.ndim == 2 and leaf.shape[:2] == mask.shape, leaf_name(path)
        expected = f"a shape from {mask.shape} on, as the mask has, [K, L]"
        check(is_right, f"join_trajectories: leaf '{where}'", expected, leaf.shape)
    # The indices come row by row, and thus in order of time.
    index = np.nonzero(mask)
    return jax.tree.map(lambda leaf: leaf[index], padded)


def lengths(items: Any, *, keys: Keys = TED) -> np.ndarray:
    """Returns the length of each trajectory that `split_trajectories` finds, int64 `[K]`."""
    return np.diff(_ends(items, keys, "lengths")[1], prepend=0)


def returns(items: Any, *, keys: Keys = TED) -> Any:
    """Returns the sum of the rewards of each trajectory in items `[T, ...]`, float64 `[K, ...]`.

    If the reward has several leaves, such as one for each agent, returns a pytree of such sums.

    Example:
        >>> import numpy as np
        >>> from jrb.datasets import trajectories
        >>> after = {"reward": np.arange(5.0), "done": np.array([0, 1, 0, 0, 0]) > 0}
        >>> trajectories.returns({"next": after}).tolist()
        [1.0, 9.0]
    """
    _, stops = _ends(items, keys, "returns")

    def sum_episodes(rewards: Any) -> np.ndarray:
        rewards = np.asarray(rewards)
        parts = np.split(rewards, stops[:-1]) if len(stops) else []
        sums = [part.sum(axis=0, dtype=np.float64) for part in parts]
        return np.array(sums, np.float64).reshape(len(sums), *rewards.shape[1:])

    return jax.tree.map(sum_episodes, keys.get(items, "reward"))


def _ends(items: Any, keys: Keys, who: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns bool `[T]`, True for items marked as last, and the end of each trajectory `[K]`."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    shapes = {leaf_name(path): np.shape(leaf) for path, leaf in leaves}
    # All leaves need a first axis of the same length.
    leads = {shape[:1] for shape in shapes.values()}
    is_right = len(leads) == 1 and leads != {()}
    check(is_right, who, "leaves [T, ...] of one length, time first", f"shapes {shapes}")
    ((steps,),) = leads
    flags = keys.flags(items)
    got = f"items with the leaves {leaf_names(items)}. Name the right ones with "
    got += "keys=jrb.Keys(done=...)"
    check(flags or keys.episode is not None, "done", "a leaf such as 'next/done'", got)
    # A flag with an axis of environments would mix their steps.
    for name, flag in flags.items():
        expected = f"shape ({steps},) or ({steps}, 1)"
        is_right, got = flag.shape in ((steps,), (steps, 1)), f"{flag.shape}. Split each "
        check(is_right, f"done: leaf '{name}'", expected, f"{got}environment by itself")
    # An item ends a trajectory by a flag, or if the next item has another episode number.
    is_set = lambda flag: np.asarray(flag).reshape(steps) != 0
    is_end = keys.ends(items, is_set) if flags else np.zeros(steps, bool)
    if keys.episode is not None:
        number = np.asarray(keys.get(items, "episode")).reshape(steps, -1)
        is_end[:-1] |= (number[1:] != number[:-1]).any(axis=1)
    # The last item ends one in any case, but is not marked in `over`.
    is_last = np.arange(1, steps + 1) == steps
    return is_end, (np.flatnonzero(is_end | is_last) + 1).astype(np.int64)
