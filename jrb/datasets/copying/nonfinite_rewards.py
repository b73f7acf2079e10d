"""Rewards that are no finite numbers: kept as they are, and told.

E environments, T rows of time.
"""

import logging

import numpy as np

from jrb._util.pytree import PyTree
from jrb.datasets.copying.filling import Streams

_log = logging.getLogger("jrb.datasets")


class NotFinite:
    """Counts rewards that are NaN or infinite while a dataset is read.

    Args:
        flow: the dataset as rows of time.

    Attributes:
        count: how many there were.
        first: the least number of an episode with one, of the source's; None if there is none.
    """

    count: int
    first: int | None

    def __init__(self, flow: Streams) -> None:
        self._flow, self.count, self.first = flow, 0, None

    def look(self, items: PyTree, start: int) -> None:
        """Looks at items `[T, ...]` or `[T, E, ...]`, zeros where there are none, from this row."""
        reward = items["next"].get("reward")
        if reward is None or reward.dtype.kind in "biu":
            return
        odd = ~np.isfinite(reward)
        if not odd.any():
            return
        self.count += int(odd.sum())
        for env, dataset in enumerate(self._flow.datasets):
            here = odd if self._flow.num_envs is None else odd[:, env]
            rows = start + np.flatnonzero(here.reshape(len(here), -1).any(axis=1))
            places = np.searchsorted(np.cumsum(dataset.lengths), rows, side="right")
            known = [] if self.first is None else [self.first]
            self.first = min([*known, *dataset.numbers[places].tolist()], default=None)

    def tell(self) -> None:
        """Warns, if there were some."""
        if not self.count:
            return
        source = self._flow.datasets[0].source
        where = source if isinstance(source, str) else type(source).__name__
        _log.warning(
            "%s: %d rewards are NaN or infinite, the first in episode %d: they are kept as they "
            "are. Dataset.filter leaves such episodes out",
            where,
            self.count,
            self.first,
        )
