"""Functions that deal a dataset's episodes to environments, and write them to a buffer.

E environments. A row holds one step of every environment.
"""

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb.authoring import tree_nbytes
from jrb.buffer import ReplayBuffer
from jrb.datasets.format import Episode, count_steps, regroup_steps, slice_steps
from jrb.datasets.output import track_progress
from jrb.loops import jitted
from jrb.state import BufferState

_PIECE = 8 << 20  # the maximum bytes of a piece that is written at once
_BETWEEN = 512 << 20  # bytes between two commits

_log = logging.getLogger("jrb.datasets")


@dataclasses.dataclass(frozen=True, eq=False)
class Streams:
    """A dataset whose episodes are dealt to environments; each has a stream of steps."""

    datasets: tuple[Any, ...]  # the episodes of each environment
    num_envs: int | None  # E; None for a single stream without an axis of environments
    rows: int  # the number of steps of the longest stream
    is_even: bool  # True if all streams have the same length
    row_bytes: int  # the bytes of one step of all environments


def deal_episodes(dataset: Any, num_envs: int | None) -> Streams:
    """Deals episodes in order, each to the environment that has the fewest steps so far."""
    steps, numbers = [0] * (num_envs or 1), [[] for _ in range(num_envs or 1)]
    for number, length in enumerate(dataset.lengths.tolist()):
        env = steps.index(min(steps))
        steps[env] += length
        numbers[env].append(number)
    datasets = tuple(dataset.only(dataset.numbers[each]) for each in numbers)
    row_bytes = max(1, tree_nbytes(dataset.spec)) * len(steps)
    return Streams(datasets, num_envs, max(steps), len(set(steps)) == 1, row_bytes)


def write_streams(
    flow: Streams, buffer: ReplayBuffer, state: BufferState, rows: int, show: bool | None
) -> Iterator[tuple[BufferState, int, bool]]:
    """Writes the rows of `flow` from the row `rows` on to a state, which is donated.

    Yields, after each piece, the state, the number of rows written, and True if a commit is due.
    Rewards that are NaN or infinite are kept; a warning is logged.
    """
    methods, last, num_nonfinite, first_episode = jitted(buffer), rows, 0, np.inf
    with track_progress(flow.rows, "reading", show) as advance:
        advance(rows)
        for items, mask, count in _pieces(flow, rows):
            # Count rewards that are not finite, and find the first episode that has one.
            for reward in jax.tree.leaves(items["next"].get("reward", ())):
                if reward.dtype.kind in "biu":
                    continue
                is_nonfinite = ~np.isfinite(reward)
                num_nonfinite += int(is_nonfinite.sum())
                # The lengths of a stream's episodes say which of them has a row.
                for env, dataset in enumerate(flow.datasets):
                    column = is_nonfinite if flow.num_envs is None else is_nonfinite[:, env]
                    steps = rows + np.flatnonzero(column.reshape(len(column), -1).any(axis=1))
                    places = np.searchsorted(np.cumsum(dataset.lengths), steps, side="right")
                    first_episode = min([first_episode, *dataset.numbers[places].tolist()])
            # Write the piece, and report whether enough was written for a commit.
            state = methods.extend(state, items, mask)
            advance(count)
            rows += count
            is_due = (rows - last) * flow.row_bytes >= _BETWEEN
            last = rows if is_due else last
            yield state, rows, is_due
    # One warning for the whole dataset, not one for each piece.
    if num_nonfinite:
        source = flow.datasets[0].source
        _log.warning(
            "%s: %d rewards are NaN or infinite, the first in episode %d: they are kept as they "
            "are. Dataset.where(predicate=...) leaves such episodes out",
            source if isinstance(source, str) else type(source).__name__,
            num_nonfinite,
            first_episode,
        )


def _pieces(flow: Streams, start: int) -> Iterator[tuple[Episode, Any, int]]:
    """Yields items, mask and row count of equally long pieces, from the row `start` on.

    All pieces have one length, so that one compiled program writes them. Items are zero, and the
    mask is False, where a stream has ended. Full pieces of equally long streams have no mask.
    """
    # Cut each stream into blocks of one size, and take them from all streams in step.
    size = max(1, min(_PIECE // flow.row_bytes, flow.rows - start))
    parts = [regroup_steps(_blocks_after(dataset, start), size) for dataset in flow.datasets]
    for blocks in itertools.zip_longest(*parts):
        counts = [0 if block is None else count_steps(block) for block in blocks]
        some = blocks[int(np.argmax(counts))]
        # Fill rows `[size, E, ...]`, which stay zero where a stream has no more steps.
        lead = (size, len(blocks))
        items = jax.tree.map(lambda x, s=lead: np.zeros((*s, *x.shape[1:]), x.dtype), some)
        for env, block in enumerate(blocks):
            if block is not None:
                put = lambda target, leaf, env=env: np.copyto(target[: len(leaf), env], leaf)
                jax.tree.map(put, items, block)
        # Equally long streams end in the same row, so they need a mask of rows only, or none.
        mask = np.arange(size)[:, None] < counts
        if flow.is_even:
            mask = None if mask.all() else mask[:, 0]
        if flow.num_envs is None:
            items = slice_steps(items, (slice(None), 0))
        yield items, mask, max(counts)


def _blocks_after(dataset: Any, skip: int) -> Iterator[Episode]:
    """Yields the blocks of a dataset without its first `skip` steps."""
    # Skip whole episodes by their number, and the first steps of the next one by reading them.
    ends = np.cumsum(dataset.lengths)
    first = int(np.searchsorted(ends, skip, side="right"))
    skip -= int(ends[first - 1]) if first else 0
    for block in dataset.only(dataset.numbers[first:]).blocks():
        steps = count_steps(block)
        if steps > skip:
            yield slice_steps(block, slice(skip, None))
        skip = max(0, skip - steps)
