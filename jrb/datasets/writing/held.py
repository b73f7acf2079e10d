"""What is written: the episodes of a buffer or of a dataset, one after the other.

T steps of an episode.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb._base import pytree
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.keys import TED, Keys, path_name, within
from jrb.layouts.names import Leaves
from jrb.read import episodes
from jrb.state import BufferState

_ROLES = ("observation", "action", "next_observation", "reward", "terminated", "truncated")
_VALID = "next/valid"


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """An episode: trees of NumPy arrays `[T, ...]`, T at least 1.

    Attributes:
        observation: what was seen before each action.
        action: what was done.
        after: what was seen after each action.
        reward: `[T, ...]`.
        terminated: bool `[T]`.
        truncated: bool `[T]`, True in the last step unless it terminated.
        rest: all else that there is for each step, by name, but for `done`.
        facts: what is known of the episode.
        left_out: how many steps are left out at its end, as their next observation is not known.
    """

    observation: Any
    action: Any
    after: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    rest: Leaves
    facts: dict[str, Any]
    left_out: int = 0


def episodes_of(
    who: str, source: ReplayBuffer | Dataset, state: BufferState | None
) -> Iterator[Held]:
    """The episodes of a buffer and its state, or of a dataset.

    Those of a buffer have the facts `environment`, `complete` (it had ended) and `cut` (its
    beginning may be overwritten).

    Args:
        who: asks, for the error's first words.
        source: the description, or a dataset.
        state: that of the buffer; None with a dataset.

    Raises:
        TypeError: something else.
        ValueError: items without observation, action, next observation, reward, terminated or
            truncated, or whose writer keeps no order of time.
    """
    if isinstance(source, Dataset) and state is None:
        known = source.facts
        for number, items in enumerate(source):
            yield from _split(items, TED, {name: fact[number] for name, fact in known.items()})
        return
    if not isinstance(source, ReplayBuffer) or state is None:
        raise TypeError(
            f"{who}: expected a ReplayBuffer and its state, or a Dataset, got "
            f"{type(source).__name__} and {type(state).__name__}."
        )
    for role in _ROLES:
        source.keys.get(source.stored(state), role)
    for each in episodes(source, state):
        facts = {"environment": each.environment, "complete": each.complete, "cut": each.cut}
        yield from _split(each.items, source.keys, facts)


def _split(items: Any, keys: Keys, facts: dict[str, Any]) -> Iterator[Held]:
    """The parts of an episode; nothing if no step is left of it."""
    found = {role: keys.get(items, role) for role in _ROLES}
    rest = _rest(items, keys)
    valid = np.asarray(rest.pop(_VALID, True), bool)
    steps = _valid_steps(valid, len(found["reward"]))
    if not steps:
        return
    found, rest = jax.tree.map(lambda leaf: leaf[:steps], (found, rest))
    for name in ("terminated", "truncated"):
        if found[name].dtype != bool or found[name].ndim != 1:
            raise ValueError(
                f"leaf '{path_name(getattr(keys, name))}': expected one bool for each step, got "
                f"{found[name].dtype} of shape {found[name].shape[1:]}."
            )
    truncated = found["truncated"].copy()
    truncated[-1] |= ~found["terminated"][-1]
    yield Held(
        found["observation"],
        found["action"],
        found["next_observation"],
        found["reward"],
        found["terminated"],
        truncated,
        rest,
        facts,
        left_out=int(np.sum(~valid)),
    )


def _valid_steps(valid: np.ndarray, steps: int) -> int:
    """How many steps have next observations: all, or all but the last."""
    if valid.all():
        return steps
    if not valid[:-1].all():
        raise ValueError(
            f"leaf '{_VALID}': expected False in the last step of an episode only, got it in steps "
            f"{np.flatnonzero(~valid)[:5].tolist()} of {steps}."
        )
    return steps - 1


def _rest(items: Any, keys: Keys) -> Leaves:
    """The leaves that play no part, by name."""
    known = [path_name(getattr(keys, role)) for role in (*_ROLES, "done")]
    return {
        pytree.leaf_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(items)
        if not any(within(pytree.leaf_name(path), name) for name in known)
    }
