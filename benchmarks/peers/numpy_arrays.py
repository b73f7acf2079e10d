"""A typical hand-written buffer in NumPy: arrays, a cursor, and a vectorised sum-tree."""

from typing import Any

import numpy as np

from .. import items
from .. import setup as wanted
from ..setup import Setup
from .peer import Buffer, Drawn, Peer
from .take import filled


class Tree:
    """A binary sum-tree over N masses, float64, with all levels in one array, root first."""

    def __init__(self, count: int) -> None:
        self._leaves = 1 << (count - 1).bit_length()
        self.nodes = np.zeros(2 * self._leaves)
        self.nodes[self._leaves : self._leaves + count] = 1
        level = self._leaves // 2
        while level:
            self.nodes[level : 2 * level] = self.nodes[2 * level : 4 * level].reshape(-1, 2).sum(1)
            level //= 2

    def set(self, at: np.ndarray, masses: Any) -> None:
        """Sets masses; the last value of a duplicate index wins."""
        nodes = at + self._leaves
        self.nodes[nodes] = masses
        while nodes[0] > 1:
            nodes = nodes >> 1
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Returns the leaves at these cumulative sums."""
        nodes = np.ones(len(sums), np.int64)
        while nodes[0] < self._leaves:
            nodes = 2 * nodes
            left = self.nodes[nodes]
            right = sums >= left
            sums = np.where(right, sums - left, sums)
            nodes = nodes + right
        return nodes - self._leaves


class NumPyArrays(Peer):
    """NumPy arrays on the host; batches stay on the host."""

    name = "NumPy"
    note = "arrays of NumPy and a vectorised sum-tree"
    samplers = ("uniform", "prioritized", "without replacement")
    units = ("transition", "slices")
    most = 10**8

    def full(self, setup: Setup) -> Buffer:
        """A full buffer."""
        made = _Arrays(setup)
        return Buffer(
            state=None,
            add=made.add,
            sample=made.sample,
            update=made.update,
            nbytes=made.nbytes,
            rows=items.leaves,
            read=items.nested,
        )


class _Arrays:
    def __init__(self, setup: Setup) -> None:
        self._setup, self._arrays, self._at = setup, filled(setup), 0
        self._rng, self._tree = np.random.default_rng(0), None
        if setup.prioritized:
            self._tree = Tree(setup.capacity)
        self._order, self._drawn = np.empty(0, np.int64), 0
        self._ahead = np.arange(wanted.LENGTH) * setup.envs

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and the sum-tree."""
        tree = self._tree.nodes.nbytes if self._tree else 0
        return tree + sum(leaf.nbytes for leaf in self._arrays.values())

    def add(self, state: None, rows: dict[str, np.ndarray]) -> None:
        """Adds one row."""
        at, envs = self._at, self._setup.envs
        for name, leaf in rows.items():
            self._arrays[name][at : at + envs] = leaf
        if self._tree:
            self._tree.set(np.arange(at, at + envs), 1.0)
        self._at = (at + envs) % self._setup.capacity

    def sample(self, state: None, key: Any) -> tuple[None, Drawn]:
        """Samples a batch."""
        at = self._anchors()
        if self._setup.unit == "slices":  # offset from the oldest row: no window crosses the cursor
            rows = (at + self._at)[:, None] + self._ahead
            found = {k: leaf[rows % len(leaf)] for k, leaf in self._arrays.items()}
        else:
            found = {k: leaf[at] for k, leaf in self._arrays.items()}
        return None, Drawn(found, at)

    def update(self, state: None, handle: np.ndarray, new: np.ndarray) -> None:
        """Updates priorities."""
        self._tree.set(handle, np.asarray(new) ** 0.6)

    def _anchors(self) -> np.ndarray:
        count, batch = self._setup.capacity, self._setup.batch
        if self._setup.unit == "slices":
            count -= self._setup.envs * (wanted.LENGTH - 1)
        if self._tree:
            strata = (np.arange(batch) + self._rng.random(batch)) / batch
            return self._tree.find(strata * self._tree.nodes[1])
        if self._setup.sampler == "uniform":
            return self._rng.integers(0, count, batch)
        if self._drawn + batch > len(self._order):
            self._order, self._drawn = self._rng.permutation(count), 0
        self._drawn += batch
        return self._order[self._drawn - batch : self._drawn]
