"""The index of a chunk: where episodes end and begin in it.

E environments, n items of a chunk.
"""

import numpy as np

from jrb.datasets.recording import roles
from jrb.datasets.recording.chunks import Index
from jrb.datasets.recording.heads import Head
from jrb.keys import path_name

Last = tuple[np.ndarray, np.ndarray]
"""The number of the episode of each environment's last item, `[E]`, and whether there is one, bool
`[E]`."""


def indexed(
    head: Head,
    columns: list[np.ndarray],
    counts: np.ndarray,
    begins: np.ndarray,
    last: Last | None,
) -> tuple[Index, Last | None]:
    """The index of a chunk.

    Args:
        head: of the writer.
        columns: `[n, ...]`, environment by environment.
        counts: int64 `[E]`, the items of each.
        begins: places of items that begin an episode because the writer was told so.
        last: of the items before the chunk.

    Returns:
        The index, and the last numbers after the chunk.
    """
    names = head.names
    flags = roles.flags(lambda name: columns[names.index(name)], names, head.keys)
    terminated, truncated, ends = map(np.flatnonzero, flags)
    starts = begins.astype(np.int64)
    if head.keys.episode is not None:
        ids = columns[names.index(path_name(head.keys.episode))].reshape(-1)
        changes, last = _changes(ids, counts, last)
        starts = np.union1d(starts, changes)
    return Index(counts, ends, terminated, truncated, starts), last


def _changes(ids: np.ndarray, counts: np.ndarray, last: Last | None) -> tuple[np.ndarray, Last]:
    """Places of items whose episode has another number than the one before, and the last numbers.

    Args:
        ids: the numbers `[n]`, environment by environment.
        counts: int64 `[E]`, the items of each.
        last: of the items before these items.
    """
    there = np.flatnonzero(counts)
    after = np.cumsum(counts)[there]
    first = after - counts[there]
    numbers, seen = np.zeros(len(counts), ids.dtype), np.zeros(len(counts), bool)
    if last is not None:
        numbers, seen = last[0].copy(), last[1].copy()
    before, known = np.roll(ids, 1), np.ones(len(ids), bool)
    before[first], known[first] = numbers[there], seen[there]
    numbers[there], seen[there] = ids[after - 1], True
    return np.flatnonzero(known & (before != ids)), (numbers, seen)
