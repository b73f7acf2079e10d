"""The description of a benchmarked buffer for all peers, and the items that fill it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import items
from .items import Items

LENGTH, STACK, STEPS, DISCOUNT = 64, 4, 3, 0.99
"""Rows of a window, frames of a stack, rows of an n-step return, and its discount."""
WINDOWS = ("slices", "episodes", "padded")
_PIECE = 32 << 20


@dataclasses.dataclass(frozen=True)
class Setup:
    """A buffer of N items from E environments, and batches of B.

    Attributes:
        items: the kind of the items, from `items.KINDS`.
        n: N, rounded down to a multiple of E.
        envs: E, the number of items added at a time.
        batch: B.
        sampler: "uniform", "prioritized", or "without replacement".
        unit: "transition", "n-step", "stack", or one of `WINDOWS`.
        once: if True, store each observation once; only peers that can do so take part.
    """

    items: str = "vector"
    n: int = 100_000
    envs: int = 64
    batch: int = 256
    sampler: str = "uniform"
    unit: str = "transition"
    once: bool = False

    @property
    def prioritized(self) -> bool:
        """True if priorities are updated."""
        return self.sampler == "prioritized"

    @property
    def capacity(self) -> int:
        """N, rounded down to a multiple of E."""
        return self.n // self.envs * self.envs

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the facts that a table shows of the setup."""
        words = items.WORDS[self.items]
        return {"items": words, "N": self.n, "E": self.envs, "B": self.batch}

    def rows(self, first: int, count: int) -> Items:
        """Returns `count` rows from row `first` on, leaves `[count, E, ...]`."""
        numbers = np.arange(first * self.envs, (first + count) * self.envs)
        return items.rows(self.items, numbers.reshape(count, self.envs), self.envs)

    def pieces(self) -> Iterator[Items]:
        """Yields the items that fill the buffer, leaves `[T, E, ...]`, up to 32 MB at a time."""
        total = self.capacity // self.envs
        most = max(1, _PIECE // (items.width(self.items) * self.envs))
        for first in range(0, total, most):
            yield self.rows(first, min(most, total - first))

    def fresh(self, count: int) -> list[Items]:
        """Returns `count` rows to add to the full buffer, each with leaves `[E, ...]`."""
        found = self.rows(self.capacity // self.envs, count)
        return [
            _mapped(lambda leaf, at=at: np.ascontiguousarray(leaf[at]), found)
            for at in range(count)
        ]


def _mapped(function: Any, tree: Items) -> Items:
    return items.nested({path: function(leaf) for path, leaf in items.leaves(tree).items()})
