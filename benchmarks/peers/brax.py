"""brax: the uniform queue of `brax.training.replay_buffers`."""

from typing import Any

import jax
import numpy as np

from .. import items
from ..setup import Setup
from .peer import Buffer, Drawn, Peer

_ROLLED = 400 << 20


class Brax(Peer):
    """Pure functions of a state that stores items as rows of one array of one dtype."""

    name = "brax"
    packages = {"brax": "brax"}
    on_device = True
    note = "a full queue is rolled as a whole by each add"
    kinds = ("vector", "nested", "number")
    most = 10**6

    def steps(self, setup: Setup, asked: int) -> int:
        """Limits the steps so that they roll about 400 MB, to at least 3 steps."""
        rolled = setup.capacity * items.width(setup.items)
        return int(np.clip(_ROLLED // rolled, 3, max(3, asked)))

    def full(self, setup: Setup) -> Buffer:
        """A full buffer."""
        from brax.training import replay_buffers

        example = items.example(setup.items)
        queue = replay_buffers.UniformSamplingQueue(setup.capacity, example, setup.batch)
        state = queue.init(jax.random.key(0))
        insert = jax.jit(queue.insert_internal, donate_argnums=0)
        for piece in setup.pieces():
            state = insert(
                state, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), piece)
            )

        def sample(state: Any, key: jax.Array) -> tuple[Any, Drawn]:
            return None, Drawn(queue.sample_internal(state.replace(key=key))[1])

        return Buffer(
            state=state,
            add=queue.insert_internal,
            sample=sample,
            nbytes=state.data.nbytes,
            rows=jax.device_put,
            read=lambda data: jax.tree.map(np.asarray, data),
        )
