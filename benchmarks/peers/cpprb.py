"""cpprb: ring buffers and sum-trees in C++, with NumPy around them."""

from typing import Any

import numpy as np

from .. import items
from ..setup import Setup
from .peer import Buffer, Drawn, Peer


class Cpprb(Peer):
    """A buffer of named arrays on the host."""

    name = "cpprb"
    packages = {"cpprb": "cpprb"}
    samplers = ("uniform", "prioritized")

    def full(self, setup: Setup) -> Buffer:
        """A full buffer."""
        import cpprb

        example = items.leaves(items.example(setup.items))
        spec = {k: {"shape": np.shape(v) or 1, "dtype": v.dtype} for k, v in example.items()}
        if setup.prioritized:
            buffer = cpprb.PrioritizedReplayBuffer(setup.capacity, spec, alpha=0.6)
        else:
            buffer = cpprb.ReplayBuffer(setup.capacity, spec)
        for piece in setup.pieces():
            leaves = items.leaves(piece)
            buffer.add(**{k: v.reshape(-1, *v.shape[2:]) for k, v in leaves.items()})

        def add(state: None, rows: dict[str, np.ndarray]) -> None:
            buffer.add(**rows)

        def sample(state: None, key: Any) -> tuple[None, Drawn]:
            found = buffer.sample(setup.batch, **({"beta": 0.4} if setup.prioritized else {}))
            return None, Drawn(found, found.get("indexes", ()))

        def update(state: None, handle: Any, new: np.ndarray) -> None:
            buffer.update_priorities(handle, new)

        shaped = lambda name, leaf: leaf.reshape(len(leaf), *np.shape(example[name]))
        bytes_ = setup.capacity * items.width(setup.items)
        trees = 2 * 2 * 4 * (1 << (setup.capacity - 1).bit_length()) if setup.prioritized else 0
        return Buffer(
            state=None,
            add=add,
            sample=sample,
            update=update,
            nbytes=bytes_ + trees,  # a sum-tree and a min-tree of float32
            rows=items.leaves,
            read=lambda data: items.nested({k: shaped(k, data[k]) for k in example}),
        )
