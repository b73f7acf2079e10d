"""An episode in the parts that Minari knows. T steps of it."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jrb._base import pytree
from jrb._base.pytree import PyTree
from jrb.datasets.writing.pieces import VALID
from jrb.datasets.writing.source import Held
from jrb.keys import Keys, path_name, within
from jrb.layouts.names import Leaves

ROLES = ("observation", "action", "next_observation", "reward", "terminated", "truncated")


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """An episode: trees of NumPy arrays `[T, ...]`, T at least 1.

    Attributes:
        observation: what was seen before each action.
        action: what was done.
        after: what was seen after each action.
        reward: `[T, ...]`.
        terminated: bool `[T]`.
        truncated: bool `[T]`, True in the last step unless it terminated.
        rest: all else that there is for each step, by name, but for `done`.
        held: the episode.
        left_out: how many steps are left out at its end, as their next observation is not known.
    """

    observation: Any
    action: Any
    after: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    rest: Leaves
    held: Held
    left_out: int = 0


def parts_of(held: Held, keys: Keys) -> Parts | None:
    """The parts of an episode; None if no step is left of it.

    Raises:
        ValueError: flags that are none, or next observations that lack amid it.
    """
    items = held.items
    found = {role: keys.get(items, role) for role in ROLES}
    rest = _rest(items, keys)
    valid = np.asarray(rest.pop(VALID, True), bool)
    steps = _valid_steps(valid, len(found["reward"]))
    if not steps:
        return None
    found, rest = jax.tree.map(lambda leaf: leaf[:steps], (found, rest))
    for name in ("terminated", "truncated"):
        if found[name].dtype != bool or found[name].ndim != 1:
            raise ValueError(
                f"leaf '{path_name(getattr(keys, name))}': expected one bool for each step, got "
                f"{found[name].dtype} of shape {found[name].shape[1:]}."
            )
    truncated = found["truncated"].copy()
    truncated[-1] |= ~found["terminated"][-1]
    return Parts(
        found["observation"],
        found["action"],
        found["next_observation"],
        found["reward"],
        found["terminated"],
        truncated,
        rest,
        held,
        left_out=int(np.sum(~valid)),
    )


def _valid_steps(valid: np.ndarray, steps: int) -> int:
    """How many steps have next observations: all, or all but the last."""
    if valid.all():
        return steps
    if not valid[:-1].all():
        raise ValueError(
            f"leaf '{VALID}': expected False in the last step of an episode only, got it in steps "
            f"{np.flatnonzero(~valid)[:5].tolist()} of {steps}."
        )
    return steps - 1


def _rest(items: PyTree, keys: Keys) -> Leaves:
    """The leaves that play no part, by name."""
    known = [path_name(getattr(keys, role)) for role in (*ROLES, "done")]
    return {
        pytree.leaf_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(items)
        if not any(within(pytree.leaf_name(path), name) for name in known)
    }
