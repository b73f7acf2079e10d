"""Where the parts of items that were recorded stand in TED."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrb.datasets.reading import mapping
from jrb.keys import Keys, path_name, within

FLAGS = ("terminated", "truncated", "done")
_RESERVED = tuple(f"next/{flag}" for flag in FLAGS)
_ROLES = ("observation", "action", "reward", "next_observation")


def ted_names(names: Sequence[str], keys: Keys) -> dict[str, str]:
    """From the names of leaves to those in TED; flags, of which TED has its own, are left out.

    Raises:
        ValueError: there is no reward, two leaves would have one name, or a flag is no leaf.
    """
    flags = flag_names(names, keys)
    others = [name for name in names if name not in flags.values()]
    found = mapping.ted_names(others, keys, _ROLES)
    if path_name(keys.reward) not in names:
        raise ValueError(
            f"reward: expected a leaf at '{path_name(keys.reward)}', got items with the leaves "
            f"{list(names)}. Name the right one with keys=jrb.Keys(reward=...)."
        )
    _check_apart(found)
    return found


def flag_names(names: Sequence[str], keys: Keys) -> dict[str, str]:
    """From `terminated`, `truncated` and `done`, where there is one, to the name of its leaf."""
    paths = {flag: path_name(getattr(keys, flag)) for flag in FLAGS}
    return {flag: path for flag, path in paths.items() if path in names}


def _check_apart(found: dict[str, str]) -> None:
    """Raises unless each name in TED is that of one leaf, and none is that of a flag."""
    taken: dict[str, str] = dict.fromkeys(_RESERVED, "a flag")
    for leaf, name in found.items():
        for other, owner in taken.items():
            if within(name, other) or within(other, name):
                raise ValueError(
                    f"leaf '{leaf}': expected a place of its own in TED, got '{name}', where "
                    f"{owner} stands ('{other}'). Rename it, or name all parts with "
                    "keys=jrb.Keys(...)."
                )
        taken[name] = f"the leaf '{leaf}'"


def flags(
    column: Callable[[str], np.ndarray], names: Sequence[str], keys: Keys
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the flags of n items say; one of any dtype is set where it is not 0.

    An episode ends where any of them is set. Without a flag of termination that is where `done` is
    and `truncated` is not.

    Args:
        column: from the name of a leaf to its array `[n]` or `[n, 1]`.
        names: of all leaves.
        keys: how the items are keyed.

    Returns:
        Whether an item terminated, was truncated, and ends an episode, bool `[n]` each; scalars
        where there are no flags.
    """
    found = {
        flag: (column(name) != 0).reshape(-1) for flag, name in flag_names(names, keys).items()
    }
    none: Any = np.zeros((), bool)
    over = np.asarray(sum(found.values(), none), bool)
    terminated = found.get("terminated")
    if terminated is None:
        terminated = over & ~found.get("truncated", none)
    truncated = found.get("truncated")
    return terminated, over & ~terminated if truncated is None else truncated, over


def notes(names: Sequence[str], keys: Keys) -> tuple[str, ...]:
    """What a reader has to know of the flags, a sentence each."""
    found = flag_names(names, keys)
    if not found:
        return ("The items have no flags: episodes end where the recorder was told so.",)
    if "terminated" in found:
        return ()
    name = found.get("done")
    if name is None:
        return ("The items have no flag of termination: every episode counts as truncated.",)
    return (f"The items have no flag of termination: '{name}' stands for it, unless truncated.",)
