"""Blocks of consecutive steps, and where episodes end in them.

K episodes, T steps.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jrb.datasets.format import Episode, native, rows_of

Episodes = Any
"""A `jrb.datasets.Dataset`, for modules that its own module imports."""


def regrouped(blocks: Iterator[Episode], rows: int) -> Iterator[Episode]:
    """Returns the same steps in blocks of `rows`; the last may be shorter."""
    parts: list[Episode] = []
    held = 0
    for block in blocks:
        steps, start = rows_of(block), 0
        while held + steps - start >= rows:
            stop = start + rows - held
            parts.append(jax.tree.map(operator.itemgetter(slice(start, stop)), block))
            yield concatenated(parts)
            parts, held, start = [], 0, stop
        if start < steps:
            parts.append(jax.tree.map(operator.itemgetter(slice(start, steps)), block))
            held += steps - start
    if parts:
        yield concatenated(parts)


def concatenated(parts: Sequence[Episode]) -> Episode:
    """Returns blocks of steps, one after the other, as one."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


class Ends:
    """Adds to blocks where episodes end, and which next observations are not there.

    Args:
        lengths: int64 `[K]`, the steps of each episode in the files.
        cut: bool `[K]`: see `Description.cut`.
        is_marked: True to add `next/valid`, False for steps whose next observation is not there.
        is_dropped: True to leave these steps out.
    """

    def __init__(
        self, lengths: np.ndarray, cut: np.ndarray, is_marked: bool, is_dropped: bool
    ) -> None:
        self._is_marked, self._is_dropped = is_marked, is_dropped
        self._stops = np.cumsum(lengths)
        last, cut = (self._stops - 1)[lengths > 0], cut[lengths > 0]
        self._lacking = last[cut]
        self._over = np.unique(last - cut if is_dropped else last)

    def put(self, blocks: Iterator[Episode], each: bool) -> Iterator[Episode]:
        """Returns the blocks with `next/done`, and `next/valid` or without the steps that lack it.

        Args:
            blocks: as they are read.
            each: True if each of them is one episode.

        Raises:
            ValueError: there are other steps than when the lengths were looked up.
        """
        done, total = 0, int(self._stops[-1]) if len(self._stops) else 0
        number = 0
        try:
            for number, block in enumerate(blocks):
                start, done = done, done + rows_of(block)
                if done > total or (each and done != self._stops[number]):
                    raise _changed(total, done, f" up to episode {number}" if each else "")
                yield self._put(block, start, done)
        except IndexError as error:
            raise _changed(total, done, f", and no episode {number + 1}") from error
        if done != total:
            raise _changed(total, done, "")

    def _put(self, block: Episode, start: int, stop: int) -> Episode:
        """Returns a block, which holds the steps from `start` to `stop`."""
        ends, lacking = (
            places[slice(*np.searchsorted(places, [start, stop]))] - start
            for places in (self._over, self._lacking)
        )
        block = jax.tree.map(lambda leaf: leaf.astype(native(leaf.dtype), copy=False), block)
        after = block["next"]
        terminated = np.asarray(after["terminated"], bool)
        truncated = np.array(after["truncated"], bool)
        truncated[ends] |= ~terminated[ends]
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        valid = np.ones(stop - start, bool)
        valid[lacking] = False
        if self._is_marked:
            flags["valid"] = valid
        block = {**block, "next": {**after, **flags}}
        if self._is_dropped and len(lacking):
            return jax.tree.map(lambda leaf: leaf[valid], block)
        return block


def _changed(total: int, steps: int, where: str) -> ValueError:
    return ValueError(
        f"expected {total} steps in all, as when the dataset was opened, got {steps}{where}: the "
        "files were changed since. Open it again."
    )
