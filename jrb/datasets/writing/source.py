"""The episodes of a buffer or of a dataset, one after the other, as writers of files need them.

K episodes, T steps of one.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jrb import read
from jrb._util import prng_keys, pytree
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.reading.columns import combined_flags
from jrb.datasets.reading.mapping import ted_names
from jrb.datasets.reading.names import check_names
from jrb.keys import TED, within
from jrb.layouts import chain
from jrb.layouts.names import Leaves
from jrb.state import BufferState

FLAGS = ("next/done", "next/terminated", "next/truncated")
VALID = "next/valid"

_PIECE = 32 << 20  # bytes of items that are read at a time


class Piece(NamedTuple):
    """An episode with both flags.

    Attributes:
        leaves: arrays `[T, ...]` by their names in TED, without flags and `next/valid`.
        terminated: bool `[T]`.
        truncated: bool `[T]`; the last step of an episode that did not terminate is.
        has_last: False if the observation after the last step is not there, though it is needed.
    """

    leaves: Leaves
    terminated: np.ndarray
    truncated: np.ndarray
    has_last: bool


@dataclasses.dataclass(frozen=True, eq=False)
class SourceEpisode:
    """An episode.

    Attributes:
        items: a tree of NumPy arrays `[T, ...]`, as they are stored.
        names: the leaf in TED of each leaf of them.
        facts: of the dataset. Of a buffer's episode, `environment`, `complete` (as
            `jrb.read.Episode`), `running` (it had not ended) and `cut` (its beginning may be lost).
    """

    items: PyTree
    names: dict[str, str]
    facts: dict[str, Any]

    @property
    def leaves(self) -> Leaves:
        """The arrays by their names in TED."""
        leaves = jax.tree_util.tree_leaves_with_path(self.items)
        return {self.names[pytree.leaf_name(path)]: leaf for path, leaf in leaves}

    @property
    def is_running(self) -> bool:
        """True if the episode had not ended."""
        return bool(self.facts.get("running", self.facts.get("is_running", False)))

    @property
    def is_cut(self) -> bool:
        """True if the beginning of the episode may be lost."""
        return bool(self.facts.get("cut", self.facts.get("is_cut", False)))

    def piece(self) -> Piece:
        """Returns the episode with both flags; done is terminated unless it says truncated."""
        leaves = self.leaves
        steps = len(next(iter(leaves.values())))
        flag = lambda name: (leaves.pop(name) != 0).reshape(steps) if name in leaves else None
        done, terminated, truncated = map(flag, FLAGS)
        terminated, truncated = combined_flags(steps, done, terminated, truncated)
        truncated[-1] |= ~terminated[-1]
        valid = flag(VALID)
        has_last = valid is None or bool((valid | terminated).all())
        return Piece(leaves, terminated, truncated, has_last)


class Source:
    """The episodes of a buffer and its state, or of a dataset; those without a step are left out.

    Iterated, it reads some megabytes at a time.

    Args:
        who: asks, for the first words of errors.
        source: the description, or a dataset.
        state: that of the buffer; None with a dataset.
        roles: fields of `jrb.Keys` that items have to have.

    Attributes:
        spec: of one step, PRNG keys as such.
        names: the leaf in TED of each leaf of items.
        lengths: int64 `[K]`.

    Raises:
        TypeError: something else.
        ValueError: a writer that keeps no order of time, or items without flags or what is needed.
    """

    def __init__(
        self,
        who: str,
        source: ReplayBuffer | Dataset,
        state: BufferState | None,
        roles: tuple[str, ...] = (),
    ) -> None:
        self._who = who
        if isinstance(source, Dataset) and state is None:
            keys, self.spec = TED, source.spec
            kept = source.only(source.numbers[source.lengths > 0])
            self.lengths, self._items, facts = kept.lengths, lambda: iter(kept), kept.facts
            self._facts = [
                {name: fact[number] for name, fact in facts.items()} for number in range(len(kept))
            ]
        elif isinstance(source, ReplayBuffer) and state is not None:
            keys, self.spec = source.keys, source.stored(state)
        else:
            raise TypeError(
                f"{who}: expected a ReplayBuffer and its state, or a Dataset, got "
                f"{type(source).__name__} and {type(state).__name__}."
            )
        for role in roles:
            keys.get(self.spec, role)
        if isinstance(source, ReplayBuffer) and state is not None:
            episodes = read.episodes(source, state)
            self.lengths = np.array([len(each) for each in episodes], np.int64)
            self._items = lambda: _items_of(source, state, list(episodes))
            self._facts = [_facts_of(each) for each in episodes]
        self.names = ted_names(pytree.leaf_names(self.spec), keys)

    def __len__(self) -> int:
        """K."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[SourceEpisode]:
        for items, facts in zip(self._items(), self._facts, strict=True):
            yield SourceEpisode(items, self.names, facts)

    @property
    def leaves(self) -> dict[str, Any]:
        """The specs of leaves of one step by their names in TED, PRNG keys as their words."""
        leaves = jax.tree_util.tree_leaves_with_path(self.spec)
        return {
            self.names[pytree.leaf_name(path)]: prng_keys.raw_spec(leaf) for path, leaf in leaves
        }

    def check(self) -> None:
        """Refuses items that files of arrays cannot hold.

        Raises:
            ValueError: two leaves would have one name, or there is no observation, action or next
                observation.
        """
        check_names(self._who, self.names.values())
        for role in ("observation", "action", "next/observation"):
            if not any(within(name, role) for name in self.names.values()):
                raise ValueError(
                    f"{self._who}: expected items with '{role}', got leaves {list(self.names)}. "
                    "Name them with keys=jrb.Keys(...)."
                )


def _facts_of(episode: read.Episode) -> dict[str, Any]:
    return {
        "environment": episode.environment,
        "complete": episode.complete,
        "running": not episode.ended,
        "cut": episode.cut,
    }


def _items_of(
    buffer: ReplayBuffer, state: BufferState, episodes: list[read.Episode]
) -> Iterator[Any]:
    """Returns the items of episodes, of which several are read at once.

    One alone would be compiled for each length.
    """
    most = _PIECE // max(pytree.nbytes(buffer.stored(state)), 1)
    start = 0
    while start < len(episodes):
        stop, held = start + 1, len(episodes[start])
        while stop < len(episodes) and held + len(episodes[stop]) <= most:
            held += len(episodes[stop])
            stop += 1
        group = episodes[start:stop]
        items = read.taken(buffer, state, np.concatenate([each.slots for each in group]))
        bounds = np.cumsum([0, *map(len, group)])
        for first, last in itertools.pairwise(bounds):
            part = slice(int(first), int(last))
            yield jax.tree.map(lambda leaf, part=part: leaf[part], items)
        start = stop


def first_break(where: str, name: str, before: np.ndarray, after: np.ndarray) -> int | None:
    """Returns the first step after which the next step has something else than `after` says.

    Args:
        where: for the first words of errors.
        name: of the leaf.
        before: what each step has, `[T, ...]`.
        after: what comes after each step, `[T, ...]`.

    Raises:
        ValueError: both have other dtypes or shapes.
    """
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        raise ValueError(
            f"{where}: leaf 'next/{name}': expected rows like those before the action, "
            f"{before.dtype} of shape {before.shape[1:]}, got {after.dtype} of {after.shape[1:]}."
        )
    breaks = np.flatnonzero(chain.differ(before[None], after[None])[0])
    return int(breaks[0]) if len(breaks) else None
