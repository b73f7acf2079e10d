"""Dopamine: the replay memory of its JAX agents, with an accumulator that passes items on."""

from typing import Any

import numpy as np

from .. import items
from ..setup import Setup
from .peer import Buffer, Drawn, Peer


class Through:
    """An accumulator for items that are already complete transitions."""

    def accumulate(self, transition: Any) -> list[Any]:
        """Returns the transition in a list."""
        return [transition]

    def clear(self) -> None:
        """Does nothing: the accumulator has no state."""


class Dopamine(Peer):
    """A buffer that stores items as Python objects in a dict, added one by one."""

    name = "Dopamine"
    packages = {"dopamine": "dopamine-rl", "snappy": "python-snappy", "gin": "gin-config"}
    note = "items are Python objects, added one by one; without compression"
    kinds = ("vector", "episodic", "frames", "cartpole")
    samplers = ("uniform", "prioritized")
    most = 10**5

    def full(self, setup: Setup) -> Buffer:
        """A full buffer."""
        buffer, element = _made(setup)
        priority: dict[str, float] = {"priority": 1.0} if setup.prioritized else {}

        def add(state: None, rows: Any) -> None:
            for at in range(setup.envs):
                buffer.add(element(rows, at), **priority)

        def sample(state: None, key: Any) -> tuple[None, Drawn]:
            found, told = buffer.sample(with_sample_metadata=True, size=setup.batch)
            return None, Drawn(found, told.keys)

        def update(state: None, handle: Any, new: np.ndarray) -> None:
            buffer.update(handle, priorities=np.asarray(new, np.float64))

        for piece in setup.pieces():
            for row in range(len(piece["reward"])):
                add(None, {name: np.copy(leaf[row]) for name, leaf in piece.items()})
        return Buffer(
            state=None,
            add=add,
            sample=sample,
            update=update,
            rows=lambda rows: {name: np.copy(leaf) for name, leaf in rows.items()},
            read=_read,
        )


def _made(setup: Setup) -> tuple[Any, Any]:
    """Returns an empty buffer, and a function from rows and an index to an item."""
    from dopamine.jax.replay_memory import elements, replay_buffer, samplers

    sampler = samplers.UniformSamplingDistribution(0)
    if setup.prioritized:
        sampler = samplers.PrioritizedSamplingDistribution(
            0, priority_exponent=0.6, max_capacity=setup.capacity
        )
    buffer = replay_buffer.ReplayBuffer(
        Through(), sampler, batch_size=setup.batch, max_capacity=setup.capacity, compress=False
    )
    names = ("obs", "action", "reward", "next_obs", "done", "done")
    return buffer, lambda rows, at: elements.ReplayElement(*(rows[name][at] for name in names))


def _read(data: Any) -> items.Items:
    return {
        "obs": data.state,
        "action": data.action,
        "reward": data.reward,
        "done": data.is_terminal,
        "next_obs": data.next_state,
    }
