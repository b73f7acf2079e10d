"""A dataset as rows of time, and written to a buffer in pieces of one size.

E environments, T rows of time.
"""

import dataclasses
import itertools
import logging
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb._util import pytree
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.datasets.blocks import Episodes, regrouped
from jrb.datasets.format import Episode, rows_of
from jrb.datasets.progress import track
from jrb.loops import jitted
from jrb.state import BufferState

_PIECE = 8 << 20  # bytes
_BETWEEN = 512 << 20  # bytes between two commits

_log = logging.getLogger("jrb.datasets")

Piece = tuple[Episode, Any, int]
"""Items `[T, ...]` or `[T, E, ...]`; which of them there are, bool `[T]` or `[T, E]`, or None for
all; and how many rows of time they are."""


@dataclasses.dataclass(frozen=True, eq=False)
class Streams:
    """A dataset as rows of time.

    Attributes:
        datasets: of each environment; each episode is in one of them.
        num_envs: E, or None for one stream.
    """

    datasets: tuple[Episodes, ...]
    num_envs: int | None

    @property
    def rows(self) -> int:
        """The steps of the longest stream."""
        return max(dataset.transitions for dataset in self.datasets)

    @property
    def is_even(self) -> bool:
        """True if all streams are of one length."""
        return len({dataset.transitions for dataset in self.datasets}) == 1

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of time."""
        return max(1, pytree.nbytes(self.datasets[0].spec)) * len(self.datasets)

    def pieces(self, start: int) -> Iterator[Piece]:
        """Returns the rows from `start` on."""
        size = max(1, min(_PIECE // self.row_bytes, self.rows - start))
        streams = [regrouped(_after(dataset, start), size) for dataset in self.datasets]
        for blocks in itertools.zip_longest(*streams):
            some = next(block for block in blocks if block is not None)
            nothing = jax.tree.map(lambda leaf: leaf[:0], some)
            parts = [nothing if block is None else block for block in blocks]
            counts = [rows_of(part) for part in parts]
            mask = np.arange(size)[:, None] < counts
            padded = [_padded(part, size) for part in parts]
            if self.num_envs is None:
                items = padded[0]
            else:
                items = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *padded)
            is_whole = self.is_even and mask.all()
            yield items, None if is_whole else mask[:, 0] if self.is_even else mask, max(counts)


def streams(dataset: Episodes, num_envs: int | None) -> Streams:
    """Gives each episode, in their order, to the environment that has the fewest steps so far."""
    if num_envs is None:
        return Streams((dataset,), None)
    steps, numbers = [0] * num_envs, [[] for _ in range(num_envs)]
    for number, length in enumerate(dataset.lengths.tolist()):
        env = steps.index(min(steps))
        steps[env] += length
        numbers[env].append(number)
    return Streams(tuple(dataset.only(dataset.numbers[each]) for each in numbers), num_envs)


def _after(dataset: Episodes, skip: int) -> Iterator[Episode]:
    """Returns the blocks of a dataset without so many of its first steps."""
    ends = np.cumsum(dataset.lengths)
    first = int(np.searchsorted(ends, skip, side="right"))
    skip -= int(ends[first - 1]) if first else 0
    for block in dataset.only(dataset.numbers[first:]).blocks():
        steps = rows_of(block)
        if steps > skip:
            yield jax.tree.map(operator.itemgetter(slice(skip, None)), block) if skip else block
        skip = max(0, skip - steps)


def _padded(block: Episode, rows: int) -> Episode:
    """Returns a block of so many rows, the last of them zeros."""
    count = rows_of(block)
    if count == rows:
        return block
    pad = lambda leaf: np.zeros((rows - count, *leaf.shape[1:]), leaf.dtype)
    return jax.tree.map(lambda leaf: np.concatenate([leaf, pad(leaf)]), block)


def written(
    flow: Streams, buffer: ReplayBuffer, state: BufferState, rows: int, show: bool | None
) -> Iterator[tuple[BufferState, int, bool]]:
    """Writes the rows from this one on to a state, which is donated.

    Warns of rewards that are NaN or infinite, which are kept.

    Yields:
        The state after each piece, how many rows it has, and True if much was written since the
        last time that this was true.
    """
    verbs, last, num_odd, episodes = jitted(buffer), rows, 0, []
    with track(flow.rows, "reading", show) as advance:
        advance(rows)
        for items, mask, count in flow.pieces(rows):
            odd = _nonfinite_rewards(items)
            if odd.any():
                num_odd += int(odd.sum())
                episodes += _episodes_of(flow, odd, rows)
            state = verbs.extend(state, items, mask)
            advance(count)
            rows += count
            is_due = (rows - last) * flow.row_bytes >= _BETWEEN
            last = rows if is_due else last
            yield state, rows, is_due
    if num_odd:
        source = flow.datasets[0].source
        _log.warning(
            "%s: %d rewards are NaN or infinite, the first in episode %d: they are kept as they "
            "are. Dataset.filter leaves such episodes out",
            source if isinstance(source, str) else type(source).__name__,
            num_odd,
            min(episodes),
        )


def _nonfinite_rewards(items: PyTree) -> np.ndarray:
    """Returns the rewards that are NaN or infinite, bool `[T, ...]`."""
    reward = items["next"].get("reward")
    if reward is None or reward.dtype.kind in "biu":
        return np.zeros(0, bool)
    return ~np.isfinite(reward)


def _episodes_of(flow: Streams, odd: np.ndarray, start: int) -> list[int]:
    """Returns the numbers of the source's episodes in which some are set, from row `start` on."""
    numbers: list[int] = []
    for env, dataset in enumerate(flow.datasets):
        column = odd if flow.num_envs is None else odd[:, env]
        rows = start + np.flatnonzero(column.reshape(len(column), -1).any(axis=1))
        places = np.searchsorted(np.cumsum(dataset.lengths), rows, side="right")
        numbers += dataset.numbers[np.unique(places)].tolist()
    return numbers
