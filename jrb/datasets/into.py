"""From a dataset to a buffer that holds it.

K episodes, N capacity, E environments.
"""

import dataclasses
import os
from typing import Any

import numpy as np

from jrb._core import transforming
from jrb._util import checks
from jrb.buffer import ReplayBuffer
from jrb.datasets import cache, copies
from jrb.datasets.blocks import Episodes
from jrb.datasets.filling import Streams, streams, written
from jrb.migrate import with_storage, writable
from jrb.state import BufferState
from jrb.storages import DeviceStorage, MemmapStorage
from jrb.types import Storage
from jrb.writers import PerEnvironment, ReadOnly, RoundRobin


def filled(
    dataset: Episodes,
    storage: Storage | None,
    num_envs: int | None,
    root: cache.Path | None,
    is_cached: bool,
    show: bool | None,
    parts: dict[str, Any],
) -> tuple[ReplayBuffer, BufferState]:
    """Returns the buffer of all steps of a dataset, and its state; see `Dataset.buffer`.

    Args:
        dataset: with at least one step.
        storage: where the steps go. In files at a path, a copy that is there is opened, or
            continued. None for the device, or with `is_cached` for the files of the copy.
        num_envs: E, or None for one stream.
        root: the folder of copies; None for that of the user.
        is_cached: True to make a copy below `root`, if there is none yet, and to read that.
        show: True for a bar; None where stderr is a terminal.
        parts: of the buffer.
    """
    flow = streams(dataset, num_envs)
    if is_cached:
        return _from_copy(flow, dataset, storage, root, show, parts)
    storage = storage or DeviceStorage()
    buffer = _described(flow, storage, parts)
    if isinstance(storage, MemmapStorage) and storage.path is not None:
        path, digest = os.fspath(storage.path), cache.digest_of_looks(dataset, num_envs)
        return buffer, copies.made(flow, buffer, path, digest, show)
    plain = writable(buffer)
    state = plain.init(dataset.spec)
    for state, _, _ in written(flow, plain, state, 0, show):  # noqa: B007, B020
        pass
    return buffer, state


def _from_copy(
    flow: Streams,
    dataset: Episodes,
    storage: Storage | None,
    root: cache.Path | None,
    show: bool | None,
    parts: dict[str, Any],
) -> tuple[ReplayBuffer, BufferState]:
    """Returns the buffer and its state from a copy in files, which is made if there is none yet."""
    for transform in parts["transforms"]:
        if transforming.method(transform, "inverse"):
            raise ValueError(
                "buffer: cache: expected transforms without an inverse, which changes what is "
                f"stored, got {transform!r}. Leave it out, or name a MemmapStorage with a path."
            )
    path, digest = cache.copy_of(dataset, flow.num_envs, cache.root_of(root))
    buffer = _described(flow, MemmapStorage(path, spare_fraction=0), parts)
    state = copies.opened(buffer, path, digest)
    if state is None:
        with cache.locked(path, wait=True):
            state = copies.made(flow, buffer, path, digest, show)
    if storage is None:
        return buffer, state
    other = dataclasses.replace(buffer, storage=storage)
    return other, with_storage(buffer, state, other)


def _described(flow: Streams, storage: Storage, parts: dict[str, Any]) -> ReplayBuffer:
    if not flow.rows:
        raise ValueError(f"buffer: expected at least one step, got none in {flow.datasets[0]!r}")
    envs = flow.num_envs or 1
    writer = ReadOnly(RoundRobin() if flow.is_even else PerEnvironment())
    given = {"cast": True, **parts, "writer": writer, "storage": storage}
    return ReplayBuffer(flow.rows * envs, flow.num_envs, **given)


def check(num_envs: int | None, parts: dict[str, Any]) -> None:
    """Refuses a number of environments that is none, and parts that are not to be chosen."""
    if num_envs is not None:
        checks.count("num_envs", num_envs)
    for name in ("capacity", "writer"):
        if name in parts:
            raise TypeError(
                f"buffer: {name}: expected none, as the buffer holds all steps and is only read, "
                f"got {parts[name]!r}. For another one there is jrb.rebuild."
            )


def chosen(dataset: Episodes, fraction: float | None, episodes: Any) -> Any:
    """The first part of the episodes, the first so many of them, or those of a slice or numbers."""
    if fraction is not None and episodes is not None:
        raise ValueError(
            "buffer: expected fraction= or episodes=, got both. Leave one of them out."
        )
    if fraction is not None:
        checks.fraction("fraction", fraction)
        return dataset[: max(1, round(fraction * len(dataset)))]
    if episodes is None:
        return dataset
    if isinstance(episodes, slice):
        return dataset[episodes]
    if isinstance(episodes, int | np.integer) and not isinstance(episodes, bool):
        checks.count("episodes", int(episodes), len(dataset))
        return dataset[: int(episodes)]
    return dataset.only(dataset.numbers[_numbers(episodes, len(dataset))])


def _numbers(episodes: Any, count: int) -> np.ndarray:
    numbers = np.asarray(episodes)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise TypeError(
            f"episodes: expected a number, a slice or numbers of episodes, got {episodes!r}."
        )
    if numbers.min() < 0 or numbers.max() >= count:
        raise ValueError(f"episodes: expected numbers below {count}, got {episodes!r}.")
    return numbers
