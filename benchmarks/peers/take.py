"""The least work of a buffer in NumPy: write rows, `take`, and `device_put`."""

import itertools
from typing import Any

import jax
import numpy as np

from .. import items
from ..setup import Setup
from .limit import given
from .peer import Buffer, Drawn, Peer


class Take(Peer):
    """Plain NumPy arrays, whose batches are put on the device."""

    name = "NumPy take"
    note = "rows written, `take` with indices given, and `device_put`"
    samplers = ("uniform",)
    most = 10**8

    def full(self, setup: Setup) -> Buffer:
        """Returns arrays that hold all items, by path."""
        arrays = filled(setup)
        turns, places = (
            itertools.cycle(given(setup)),
            itertools.cycle(range(0, setup.capacity, setup.envs)),
        )

        def add(state: None, rows: dict[str, np.ndarray]) -> None:
            at = next(places)
            for name, leaf in rows.items():
                arrays[name][at : at + setup.envs] = leaf

        def sample(state: None, key: Any) -> tuple[None, Drawn]:
            at = next(turns)
            return None, Drawn(jax.device_put({k: leaf.take(at, 0) for k, leaf in arrays.items()}))

        return Buffer(
            state=None,
            add=add,
            sample=sample,
            nbytes=sum(leaf.nbytes for leaf in arrays.values()),
            rows=items.leaves,
            read=lambda data: items.nested(jax.tree.map(np.asarray, data)),
        )


def filled(setup: Setup) -> dict[str, np.ndarray]:
    """Returns all items, leaves `[N, ...]` by path."""
    example = items.leaves(items.example(setup.items))
    blank = lambda leaf: np.zeros((setup.capacity, *np.shape(leaf)), leaf.dtype)
    arrays, first = {name: blank(leaf) for name, leaf in example.items()}, 0
    for piece in setup.pieces():
        for name, leaf in items.leaves(piece).items():
            flat = leaf.reshape(-1, *leaf.shape[2:])
            arrays[name][first : first + len(flat)] = flat
        first += len(flat)
    return arrays
