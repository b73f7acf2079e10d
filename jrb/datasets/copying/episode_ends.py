"""What a dataset adds to what a format reads: where episodes end, and which next observations lack.

K episodes, T steps.
"""

from collections.abc import Iterator

import jax
import numpy as np

from jrb.datasets.format import Episode, native, rows_of


class Ends:
    """Where episodes end that are read one after the other.

    Args:
        lengths: int64 `[K]`, as they are in the files.
        cut: bool `[K]`: see `Description.cut`.
        is_marked: whether `next/valid` tells of steps whose next observation lacks.
        is_dropped: whether such steps are left out.
    """

    def __init__(
        self, lengths: np.ndarray, cut: np.ndarray, is_marked: bool, is_dropped: bool
    ) -> None:
        self._is_marked, self._is_dropped = is_marked, is_dropped
        self._stops = np.cumsum(lengths)
        last = (self._stops - 1)[lengths > 0]
        cut = cut[lengths > 0]
        self._lacking = last[cut]
        self._over = last - cut if is_dropped else last  # the step before ends it then
        self._over = np.unique(self._over)

    def put(self, blocks: Iterator[Episode], each: bool) -> Iterator[Episode]:
        """The blocks with `next/done`, and with `next/valid` or without the steps that lack it.

        Args:
            blocks: as they are read.
            each: whether each of them is one episode.

        Raises:
            ValueError: there are more steps, or fewer, than the lengths tell.
        """
        place = 0
        for block in self._counted(blocks, each):
            steps = rows_of(block)
            over, lacking = (_within(all_, place, steps) for all_ in (self._over, self._lacking))
            here = jax.tree.map(lambda leaf: leaf.astype(native(leaf.dtype), copy=False), block)
            yield self._put(here, over, lacking)
            place += steps

    def _counted(self, blocks: Iterator[Episode], each: bool) -> Iterator[Episode]:
        """The same blocks, refused where they have other steps than when lengths were looked up."""
        steps, every = 0, int(self._stops[-1]) if len(self._stops) else 0
        wanted = self._stops.tolist() if each else None
        for number, block in enumerate(_found(blocks)):
            steps += rows_of(block)
            if steps > every or (wanted is not None and steps != wanted[number]):
                raise _changed(every, steps, number if each else None)
            yield block
        if steps != every:
            raise _changed(every, steps, None)

    def _put(self, block: Episode, ends: np.ndarray, lacking: np.ndarray) -> Episode:
        """A block in which episodes end at these places, and next observations lack at those."""
        after = block["next"]
        terminated = np.asarray(after["terminated"], bool)
        truncated = np.array(after["truncated"], bool)
        truncated[ends] |= ~terminated[ends]
        found = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        valid = np.ones(len(terminated), bool)
        valid[lacking] = False
        if self._is_marked:
            found["valid"] = valid
        whole = {**block, "next": {**after, **found}}
        if self._is_dropped and len(lacking):
            return jax.tree.map(lambda leaf: leaf[valid], whole)
        return whole


def _found(blocks: Iterator[Episode]) -> Iterator[Episode]:
    """The same blocks; an episode that is not there any more is refused as they are."""
    try:
        yield from blocks
    except IndexError as error:
        raise ValueError(
            "expected the episodes that there were when the dataset was opened, got fewer: the "
            "files were changed since. Open it again."
        ) from error


def _changed(wanted: int, found: int, episode: int | None) -> ValueError:
    where = "" if episode is None else f" up to episode {episode}"
    return ValueError(
        f"expected {wanted} steps in all, as when the dataset was opened, got {found}{where}: the "
        "files were changed since. Open it again."
    )


def _within(places: np.ndarray, start: int, steps: int) -> np.ndarray:
    """Those of sorted places that lie in a block, counted from its start."""
    first, last = np.searchsorted(places, [start, start + steps])
    return places[first:last] - start
