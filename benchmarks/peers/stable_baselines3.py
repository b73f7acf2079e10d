"""Stable-Baselines3: `ReplayBuffer` and `DictReplayBuffer`."""

from typing import Any

import numpy as np

from .. import items
from ..setup import Setup
from .peer import Buffer, Drawn, Peer


class StableBaselines3(Peer):
    """A buffer of arrays on the host, whose batches are CPU tensors."""

    name = "SB3"
    packages = {"stable_baselines3": "stable-baselines3"}
    note = "Stable-Baselines3; without optimize_memory_usage unless observations are stored once"
    kinds = ("vector", "episodic", "nested", "frames", "cartpole")
    once = True

    def full(self, setup: Setup) -> Buffer:
        """A full buffer."""
        buffer = _made(setup)
        infos: list[dict] = [{}] * setup.envs

        def add(state: None, rows: Any) -> None:
            buffer.add(
                rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["done"], infos
            )

        for piece in setup.pieces():
            flat = items.leaves(piece)
            for row in range(len(flat["reward"])):
                add(None, items.nested({name: leaf[row] for name, leaf in flat.items()}))
        arrays = _arrays(vars(buffer))
        return Buffer(
            state=None,
            add=add,
            sample=lambda state, key: (None, Drawn(buffer.sample(setup.batch))),
            nbytes=sum(leaf.nbytes for leaf in arrays),
            read=lambda data: _read(setup, data),
        )


def _made(setup: Setup) -> Any:
    from gymnasium import spaces
    from stable_baselines3.common import buffers

    def space(leaf: Any) -> Any:
        if isinstance(leaf, dict):
            return spaces.Dict({name: space(inner) for name, inner in leaf.items()})
        low, high = (0, 255) if leaf.dtype == np.uint8 else (-np.inf, np.inf)
        return spaces.Box(low, high, np.shape(leaf), leaf.dtype)

    example = items.example(setup.items)
    kind = buffers.DictReplayBuffer if isinstance(example["obs"], dict) else buffers.ReplayBuffer
    action = example["action"]
    actions = spaces.Discrete(4) if action.dtype == np.int32 else space(action)
    return kind(
        setup.capacity,
        space(example["obs"]),
        actions,
        device="cpu",
        n_envs=setup.envs,
        optimize_memory_usage=setup.once,
        handle_timeout_termination=not setup.once,
    )


def _arrays(fields: dict[str, Any]) -> list[np.ndarray]:
    found = [leaf for leaf in fields.values() if isinstance(leaf, np.ndarray)]
    inner = [leaf for each in fields.values() if isinstance(each, dict) for leaf in each.values()]
    return found + [leaf for leaf in inner if isinstance(leaf, np.ndarray)]


def _read(setup: Setup, data: Any) -> items.Items:
    example = items.example(setup.items)
    seen = lambda obs: (
        {k: v.numpy() for k, v in obs.items()} if isinstance(obs, dict) else obs.numpy()
    )
    flat = lambda name, leaf: leaf.numpy().reshape(-1, *np.shape(example[name]))
    return {
        "obs": seen(data.observations),
        "action": flat("action", data.actions).astype(example["action"].dtype),
        "reward": flat("reward", data.rewards),
        "done": flat("done", data.dones).astype(example["done"].dtype),
        "next_obs": seen(data.next_observations),
    }
