"""Episodes with both flags, and with their last observation or without, as D4RL and RLDS have them.

T steps of an episode.
"""

from typing import NamedTuple

import numpy as np

from jrb.datasets.reading.columns import combined_flags
from jrb.datasets.reading.names import check_names
from jrb.datasets.writing.source import Held, Source
from jrb.keys import within
from jrb.layouts.names import Leaves

FLAGS = ("next/done", "next/terminated", "next/truncated")
VALID = "next/valid"


class Piece(NamedTuple):
    """An episode.

    Attributes:
        leaves: arrays `[T, ...]` by their names in TED, without flags and `next/valid`.
        terminated: bool `[T]`.
        truncated: bool `[T]`; the last step of an episode that did not terminate is.
        has_last: whether the observation after the last step is there, if it is wanted.
    """

    leaves: Leaves
    terminated: np.ndarray
    truncated: np.ndarray
    has_last: bool


def piece_of(held: Held) -> Piece:
    """The parts of an episode; done is terminated if nothing tells that it is truncated."""
    leaves = held.leaves
    steps = len(next(iter(leaves.values())))
    done, terminated, truncated = (_flag(leaves.pop(name, None), steps) for name in FLAGS)
    terminated, truncated = combined_flags(steps, done, terminated, truncated)
    truncated[-1] |= ~terminated[-1]
    valid = _flag(leaves.pop(VALID, None), steps)
    is_whole = valid is None or bool((valid | terminated).all())
    return Piece(leaves, terminated, truncated, is_whole)


def _flag(leaf: np.ndarray | None, steps: int) -> np.ndarray | None:
    return None if leaf is None else leaf.astype(bool).reshape(steps)


def check_source(source: Source, who: str) -> None:
    """Refuses items that these layouts cannot hold.

    Raises:
        ValueError: two would have one name, or there is no observation, action or next observation.
    """
    names = source.names
    check_names(who, names.values())
    for role in ("observation", "action", "next/observation"):
        if not any(within(name, role) for name in names.values()):
            raise ValueError(
                f"{who}: expected items with '{role}', got leaves {list(names)}. Name them with "
                "keys=jrb.Keys(...)."
            )
