"""A dataset as rows of time, in pieces of one size: what is written to a buffer.

E environments, T rows of time.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb._util import pytree
from jrb.datasets.copying.blocks import Episodes, regrouped
from jrb.datasets.format import Episode, rows_of

_PIECE = 8 << 20  # bytes

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
        """How many there are: the steps of the longest stream."""
        return max(dataset.transitions for dataset in self.datasets)

    @property
    def is_even(self) -> bool:
        """Whether all streams are of one length."""
        return len({dataset.transitions for dataset in self.datasets}) == 1

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of time."""
        return max(1, pytree.nbytes(self.datasets[0].spec)) * len(self.datasets)

    def pieces(self, start: int) -> Iterator[Piece]:
        """The rows from `start` on."""
        size = max(1, min(_PIECE // self.row_bytes, self.rows - start))
        blocks = [regrouped(_after(dataset, start), size) for dataset in self.datasets]
        if self.num_envs is not None:
            yield from self._together(blocks, size)
            return
        for block in blocks[0]:
            count = rows_of(block)
            mask = None if count == size else np.arange(size) < count
            yield _padded(block, size), mask, count

    def _together(self, blocks: list[Iterator[Episode]], size: int) -> Iterator[Piece]:
        """The pieces of all environments side by side."""
        for found in itertools.zip_longest(*blocks):
            some = next(block for block in found if block is not None)
            nothing = jax.tree.map(lambda leaf: leaf[:0], some)
            parts = [nothing if block is None else block for block in found]
            counts = [rows_of(part) for part in parts]
            mask = np.arange(size)[:, None] < counts
            padded = [_padded(part, size) for part in parts]
            items = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *padded)
            whole = None if mask.all() else mask[:, 0]
            yield items, whole if self.is_even else mask, max(counts)


def streams(dataset: Episodes, num_envs: int | None) -> Streams:
    """Each episode, in their order, to the environment that has the fewest steps so far."""
    if num_envs is None:
        return Streams((dataset,), None)
    steps, lanes = [0] * num_envs, [[] for _ in range(num_envs)]
    for number, length in enumerate(dataset.lengths.tolist()):
        lane = steps.index(min(steps))
        steps[lane] += length
        lanes[lane].append(number)
    return Streams(tuple(dataset.only(dataset.numbers[lane]) for lane in lanes), num_envs)


def _after(dataset: Episodes, skip: int) -> Iterator[Episode]:
    """The blocks of a dataset without so many of its first steps."""
    if not skip:
        return dataset.blocks()
    ends = np.cumsum(dataset.lengths)
    first = int(np.searchsorted(ends, skip, side="right"))
    inside = skip - int(ends[first - 1]) if first else skip
    return _without(dataset.only(dataset.numbers[first:]).blocks(), inside)


def _without(blocks: Iterator[Episode], skip: int) -> Iterator[Episode]:
    for block in blocks:
        steps = rows_of(block)
        if steps > skip:
            yield jax.tree.map(operator.itemgetter(slice(skip, None)), block) if skip else block
        skip = max(0, skip - steps)


def _padded(block: Episode, rows: int) -> Episode:
    """A block of so many rows, the last of them zeros."""

    def padded(leaf: np.ndarray) -> np.ndarray:
        if len(leaf) == rows:
            return leaf
        whole = np.zeros((rows, *leaf.shape[1:]), leaf.dtype)
        whole[: len(leaf)] = leaf
        return whole

    return jax.tree.map(padded, block)
