"""Rows of time of several environments, under their owner's names, as episodes in TED.

R rows, E environments, K episodes, T steps of all of them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jrb._util.pytree import PyTree
from jrb.datasets.format import Source
from jrb.datasets.reading.flags import both
from jrb.datasets.reading.flat import Table
from jrb.datasets.reading.mapping import ted_names
from jrb.keys import Keys, path_name, within

_DONE, _TERMINATED, _TRUNCATED = "next/done", "next/terminated", "next/truncated"

Take = Callable[[np.ndarray], np.ndarray]
"""The rows `[B, ...]` of a leaf, of these numbers, int64 `[B]`: row * E + environment."""


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """One leaf of all rows.

    Attributes:
        spec: of one item.
        take: reads rows.
    """

    spec: PyTree
    take: Take


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows in the order of episodes.

    Attributes:
        order: int64 `[T]`, the numbers of rows.
        ends: int64 `[K]`, the number of steps up to the end of each episode.
        environment: int64 `[K]`, whose it is.
        running: bool `[K]`, whether it has not ended.
        cut: bool `[K]`, whether its beginning may be lost.
    """

    order: np.ndarray
    ends: np.ndarray
    environment: np.ndarray
    running: np.ndarray
    cut: np.ndarray

    @property
    def complete(self) -> np.ndarray:
        """Bool `[K]`, as `jrb.read.Episode.complete`."""
        return ~self.running & ~self.cut


def in_episodes(numbers: np.ndarray, over: np.ndarray, here: np.ndarray, lost: np.ndarray) -> Rows:
    """The episodes in the order in which they began, and then of environments.

    Args:
        numbers: int `[R, E]`, of rows, oldest first.
        over: bool `[R, E]`, which of them end an episode.
        here: bool `[R, E]`, which of them count; those of one environment lie side by side.
        lost: bool `[E]`, whether older rows may be lost.
    """
    found = []
    for env in range(numbers.shape[1]):
        held = np.flatnonzero(here[:, env])
        pieces = np.split(held, np.flatnonzero(over[held, env]) + 1)
        found += [(int(piece[0]), env, int(piece[-1]) + 1) for piece in pieces if len(piece)]
    found.sort()
    parts = [numbers[start:stop, env] for start, env, stop in found]
    return Rows(
        np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64),
        np.cumsum([len(part) for part in parts], dtype=np.int64),
        np.array([env for _, env, _ in found], np.int64),
        np.array([not over[stop - 1, env] for _, env, stop in found], bool),
        np.array([lost[env] and not here[:start, env].any() for start, env, _ in found], bool),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _InOrder:
    """A leaf of all steps, episode after episode."""

    leaf: Leaf
    order: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        return len(self.order), *self.leaf.spec.shape

    @property
    def dtype(self) -> Any:
        """That of the items."""
        return self.leaf.spec.dtype

    def __len__(self) -> int:
        """T."""
        return len(self.order)

    def __getitem__(self, part: slice) -> np.ndarray:
        """These steps `[rows, ...]`."""
        return self.leaf.take(self.order[part])


def table(source: Source, leaves: Mapping[str, Leaf], keys: Keys, rows: Rows) -> Table:
    """The steps under TED's names.

    Raises:
        ValueError: no reward, or two leaves of one name.
    """
    names = in_ted(source, leaves, keys)
    if not any(within(name, path_name(keys.reward)) for name in leaves):
        raise ValueError(
            f"{source}: reward: expected a leaf at '{path_name(keys.reward)}', got items with the "
            f"leaves {list(leaves)}. Name the right one with keys=jrb.Keys(reward=...)."
        )
    columns: dict[str, Any] = {
        names[name]: _InOrder(leaf, rows.order) for name, leaf in leaves.items()
    }
    flags, notes = _flags(columns)
    facts = {"environment": rows.environment, "complete": rows.complete}
    facts |= {"running": rows.running, "cut": rows.cut}
    columns.pop(_DONE, None)
    return Table(columns | flags, rows.ends, facts, notes=notes)


def in_ted(source: Source, names: Iterable[str], keys: Keys) -> dict[str, str]:
    """TED's names of leaves, by their own; others stay as they are."""
    found = ted_names(names, keys)
    taken = list(found.values())
    for name, new in found.items():
        parts = new.split("/")
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if taken.count(new) > 1 or above & set(taken):
            raise ValueError(
                f"{source}: leaf '{name}': expected a place of its own in TED, got '{new}', where "
                f"another lies, of {list(found)}. Name what they are with keys=jrb.Keys(...)."
            )
    return found


def _flags(columns: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Terminated and truncated, bool `[T]`; and what is to be said of them."""
    done, terminated, truncated = (
        is_set(columns[name][:]) if name in columns else None
        for name in (_DONE, _TERMINATED, _TRUNCATED)
    )
    notes = ()
    if terminated is None and truncated is None and done is not None:
        notes = ("Only done flags are stored: what is done counts as terminated.",)
    steps = len(next(iter(columns.values())))
    terminated, truncated = both(steps, done, terminated, truncated)
    return {_TERMINATED: terminated, _TRUNCATED: truncated}, notes


def is_set(flags: np.ndarray) -> np.ndarray:
    """Flags of any dtype, `[T]` or `[T, 1]`, as bool `[T]`."""
    return (flags != 0).reshape(len(flags))
