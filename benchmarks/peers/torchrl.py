"""TorchRL: TensorDict buffers over a LazyTensorStorage."""

from typing import Any

import numpy as np

from .. import items
from .. import setup as wanted
from ..setup import Setup
from .peer import Buffer, Drawn, Peer


class TorchRL(Peer):
    """A buffer of CPU tensors."""

    name = "TorchRL"
    packages = {"torchrl": "torchrl"}
    note = "LazyTensorStorage on the CPU"
    samplers = ("uniform", "prioritized", "without replacement")
    units = ("transition", "slices")

    def can(self, setup: Setup) -> bool:
        """Limits windows to one environment and 10^5 items: each draw scans all done flags."""
        few = setup.envs == 1 and setup.n <= 10**5 and not setup.prioritized
        return super().can(setup) and (few or setup.unit == "transition")

    def full(self, setup: Setup) -> Buffer:
        """A full buffer."""
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        def rows(given: items.Items) -> Any:
            tensor = lambda leaf: torch.from_numpy(np.ascontiguousarray(leaf))
            flat = {name: tensor(leaf) for name, leaf in items.leaves(given).items()}
            return TensorDict(items.nested(flat), batch_size=len(next(iter(flat.values()))))

        storage = LazyTensorStorage(setup.capacity)
        size = setup.batch * (wanted.LENGTH if setup.unit == "slices" else 1)
        sampler = _sampler(setup)
        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=size, priority_key="td_error"
        )
        for piece in setup.pieces():
            flat = {k: v.reshape(-1, *v.shape[2:]) for k, v in items.leaves(piece).items()}
            buffer.extend(rows(items.nested(flat)))

        def add(state: None, row: Any) -> None:
            buffer.extend(row)

        def sample(state: None, key: Any) -> tuple[None, Drawn]:
            found = buffer.sample()
            return None, Drawn(found, found["index"] if setup.prioritized else ())

        def update(state: None, handle: Any, new: np.ndarray) -> None:
            buffer.update_priority(handle, torch.from_numpy(new))

        return Buffer(
            state=None,
            add=add,
            sample=sample,
            update=update,
            nbytes=sum(leaf.numel() * leaf.element_size() for leaf in _leaves(storage._storage)),
            rows=rows,
            read=lambda data: _read(setup, data),
        )


def _sampler(setup: Setup) -> Any:
    from torchrl.data.replay_buffers import samplers

    if setup.unit == "slices":
        return samplers.SliceSampler(slice_len=wanted.LENGTH, end_key="done", strict_length=True)
    if setup.prioritized:
        return samplers.PrioritizedSampler(setup.capacity, alpha=0.6, beta=0.4)
    if setup.sampler == "uniform":
        return samplers.RandomSampler()
    return samplers.SamplerWithoutReplacement()


def _leaves(stored: Any) -> Any:
    return stored.values(include_nested=True, leaves_only=True)


def _read(setup: Setup, data: Any) -> items.Items:
    example = items.leaves(items.example(setup.items))
    found = {name: data[tuple(name.split("/"))].numpy() for name in example}
    if setup.unit == "slices":
        found = {k: v.reshape(setup.batch, wanted.LENGTH, *v.shape[1:]) for k, v in found.items()}
    return items.nested(found)
