"""A Python loop with environments of gymnasium: act, step, add, sample 256."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..peers import Peer
from ..setup import Setup
from ..timing import Program
from .case import Case, Wanted, beside
from .programs import compiled, priorities


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields loops over 16 CartPole environments, with each peer and without a buffer."""
    for sampler in ("uniform", "prioritized"):
        setup = Setup("cartpole", wanted.pick(10**4, 10**5), 16, 256, sampler)
        case = beside(wanted, f"{sampler}: act, step, add, sample", setup, played)
        case.programs["environments alone"] = lambda setup=setup: alone(setup)
        yield case


class Played:
    """Environments with random actions."""

    def __init__(self, count: int) -> None:
        import gymnasium

        self._envs = gymnasium.make_vec("CartPole-v1", count, vectorization_mode="sync")
        self._seen, _ = self._envs.reset(seed=0)
        self._rng, self._count = np.random.default_rng(0), count

    def step(self) -> dict[str, np.ndarray]:
        """Steps all environments and returns the row."""
        action = self._rng.integers(0, 2, self._count, np.int32)
        before = self._seen
        self._seen, reward, ended, cut, _ = self._envs.step(action)
        return {
            "obs": before,
            "action": action,
            "reward": reward.astype(np.float32),
            "done": ended | cut,
            "next_obs": self._seen,
        }


def alone(setup: Setup) -> Program:
    """Returns 50 steps of the environments without a buffer."""
    envs = Played(setup.envs)

    def call() -> None:
        for _ in range(50):
            envs.step()

    return Program(call, 50)


def played(peer: Peer, setup: Setup) -> Program:
    """Returns steps that add a row, sample a batch, and update its priorities if prioritized."""
    envs, buffer = Played(setup.envs), peer.full(setup)
    state, buffer.state = buffer.state, None
    add, sample, update = compiled(peer, buffer, state)
    errors = jax.jit(priorities) if peer.on_device else _errors(setup)
    ready = buffer.rows if not peer.on_device else lambda rows: rows  # `jit` accepts NumPy arrays
    keys, held = list(jax.random.split(jax.random.key(1), 50)), [state]

    def step(key: Any) -> None:
        state = add(held[0], ready(envs.step()))
        _, drawn = sample(state, key)
        if setup.prioritized:
            state = update(state, drawn.handle, errors(drawn.data))
        held[0] = state
        jax.block_until_ready(drawn.data)

    def call() -> None:
        for key in keys:
            step(key)

    return Program(call, len(keys))


def _errors(setup: Setup) -> Any:
    """Returns fixed errors for peers on the host, where no network computes them."""
    given = np.random.default_rng(0).uniform(0.5, 1.5, setup.batch).astype(np.float32)
    return lambda data: given
