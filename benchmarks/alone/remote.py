"""A buffer served over Ray, compared with Ray alone and TorchRL: adds, draws, small items.

The benchmark starts a small Ray cluster. The compared programs run in turn, round after round. It
reports the best and the median of all rounds, because other programs may load the machine.
"""

import collections
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import ray
from ray import cloudpickle

import jrb
from jrb.remote import Remote, serve

from ..workloads.case import Wanted

FRAME = (84, 84, 4)
BATCH, DEPTH, IN_FLIGHT = 256, 8, 4
FRAMES, SMALL = 200, 2000
"""Timesteps per call."""


def item(frame: bool) -> dict:
    """Returns one transition, with a frame of 28 kB or with four floats."""
    seen = np.zeros(FRAME, np.uint8) if frame else np.zeros(4, np.float32)
    return {
        "observation": seen,
        "action": np.int32(0),
        "next": {"reward": np.float32(0), "done": np.bool_(False)},
    }


def chunk(frame: bool, length: int) -> dict:
    """Returns `length` timesteps of one stream."""
    rng = np.random.default_rng(0)
    make = lambda leaf: rng.integers(0, 2, (length, *np.shape(leaf))).astype(leaf.dtype)
    return jax.tree.map(make, item(frame))


def nbytes(items: Any) -> int:
    """Returns the total bytes of all leaves."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(items))


class Bare:
    """An actor without a buffer, which measures the cost of Ray: it discards all added items.

    `draw` always returns the same batch; `take` gathers random items with NumPy, the least work
    of a buffer.
    """

    def __init__(self) -> None:
        self._batch, self._rng = jax.tree.leaves(chunk(True, BATCH)), np.random.default_rng(0)
        self._items = [np.repeat(leaf, 4000 // BATCH, axis=0) for leaf in self._batch]

    def extend(self, leaves: list[np.ndarray]) -> None:
        """Discards the items."""

    def draw(self) -> list[np.ndarray]:
        """Returns the same batch each time."""
        return self._batch

    def take(self) -> list[np.ndarray]:
        """Returns a batch of random items."""
        rows = self._rng.integers(0, len(self._items[0]), BATCH)
        return [leaf[rows] for leaf in self._items]


class Feeder:
    """An actor that repeatedly sends the same timesteps."""

    def __init__(self, target: Any, stream: int) -> None:
        self._target, self._stream = target, stream

    def run(self, frame: bool, length: int, calls: int) -> float:
        """Returns the seconds until all timesteps are written."""
        items = chunk(frame, length)
        start = time.perf_counter()
        if isinstance(self._target, Remote):
            for _ in range(calls):
                self._target.extend(items, stream=self._stream)
            self._target.wait()
            return time.perf_counter() - start
        under_way, leaves = collections.deque(), jax.tree.leaves(items)
        for _ in range(calls):
            if len(under_way) == IN_FLIGHT:
                ray.get(under_way.popleft())
            under_way.append(self._target.extend.remote(leaves))
        ray.get(list(under_way))
        return time.perf_counter() - start


def feeders(target: Any) -> list[Any]:
    """Starts two feeders of a target."""
    return [ray.remote(num_cpus=0)(Feeder).remote(target, stream) for stream in range(2)]


def fed(those: list[Any], frame: bool, length: int, calls: int) -> float:
    """Returns the timesteps per second of all feeders together."""
    seconds = max(ray.get([feeder.run.remote(frame, length, calls) for feeder in those]))
    return len(those) * length * calls / seconds


def drawn(next_batch: Callable[[], Any], count: int) -> float:
    """Returns the seconds per batch, without the `DEPTH` batches that were drawn ahead."""
    for _ in range(DEPTH):
        next_batch()
    start = time.perf_counter()
    for _ in range(count):
        next_batch()
    return (time.perf_counter() - start) / count


def bare_batches(ask: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that gives the next batch and keeps `DEPTH` calls in flight."""
    line = collections.deque(ask() for _ in range(DEPTH))

    def following() -> Any:
        line.append(ask())
        return jax.device_put(ray.get(line.popleft()))

    return following


def buffer(frame: bool, storage: Any, capacity: int) -> jrb.ReplayBuffer:
    """Returns a prioritized buffer of three-step returns."""
    parts: dict[str, Any] = {"sampler": jrb.Prioritized(), "unit": jrb.NStep(3, 0.99)}
    return jrb.ReplayBuffer(capacity, batch_size=BATCH, storage=storage, **parts)


def frames(storage: Any, rounds: int, calls: int, capacity: int = 20_000) -> list[dict]:
    """Compares adds and draws of frames with Ray alone."""
    bare = ray.remote(num_cpus=0)(Bare).remote()
    size = nbytes(item(True))
    found: dict[str, list[float]] = collections.defaultdict(list)
    name = type(storage).__name__
    with serve(buffer(True, storage, capacity), item(True), streams=2, num_cpus=0) as served:
        ours, theirs = feeders(served), feeders(bare)
        draws = {"draw": functools.partial(next, served.ahead(depth=DEPTH))}
        draws["bare draw"] = bare_batches(bare.draw.remote)
        draws["bare take"] = bare_batches(bare.take.remote)
        for one in (ours, theirs):
            fed(one, True, FRAMES, 4)
        for _ in range(rounds):
            found["adds"].append(fed(ours, True, FRAMES, calls) * size / 1e9)
            found["bare adds"].append(fed(theirs, True, FRAMES, calls) * size / 1e9)
            for kind, following in draws.items():
                found[kind].append(drawn(following, calls) * 1e3)
    return [
        row(f"{name}: adds of frames, 2 feeders, GB/s", found["adds"], found["bare adds"], max),
        row(f"{name}: a batch of {BATCH} frames, ms", found["draw"], found["bare draw"], min),
        row(f"{name}: the same, beside NumPy's take", found["draw"], found["bare take"], min),
    ]


def small(rounds: int, calls: int) -> list[dict]:
    """Compares adds of small items with Ray alone."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    bare = ray.remote(num_cpus=0)(Bare).remote()
    made = buffer(False, jrb.DeviceStorage(), 1_000_000)
    with serve(made, item(False), streams=2, num_cpus=0) as served:
        ours, theirs = feeders(served), feeders(bare)
        for one in (ours, theirs):
            fed(one, False, SMALL, 4)
        for _ in range(rounds):
            found["ours"].append(fed(ours, False, SMALL, calls))
            found["bare"].append(fed(theirs, False, SMALL, calls))
    return [row("small items, 2 feeders, transitions/s", found["ours"], found["bare"], max)]


class TorchFeeder:
    """An actor that repeatedly sends the same timesteps to TorchRL's buffer."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, frame: bool, length: int, calls: int) -> float:
        """Returns the seconds until all timesteps are written; each call blocks until then."""
        items = torch_items(chunk(frame, length))
        start = time.perf_counter()
        for _ in range(calls):
            self._client.extend(items)
        return time.perf_counter() - start


def torch_items(items: dict) -> Any:
    """Converts items to a TensorDict."""
    import torch
    from tensordict import TensorDict

    return TensorDict(jax.tree.map(torch.from_numpy, items), batch_size=len(items["action"]))


def beside_torchrl(rounds: int, calls: int, capacity: int = 20_000) -> list[dict]:
    """Compares adds of frames and blocking uniform draws with RayReplayBuffer."""
    from torchrl.data import LazyTensorStorage, RayReplayBuffer

    found: dict[str, list[float]] = collections.defaultdict(list)
    size, quiet = nbytes(item(True)), {"num_cpus": 0}
    storage = functools.partial(LazyTensorStorage, capacity)
    other = RayReplayBuffer(storage=storage, batch_size=BATCH, remote_config=quiet)
    made = jrb.ReplayBuffer(capacity, batch_size=BATCH)
    try:
        with serve(made, item(True), streams=2, num_cpus=0) as served:
            client = ray.remote(num_cpus=0)(TorchFeeder)
            ours, theirs = feeders(served), [client.remote(other.client()) for _ in range(2)]
            for one in (ours, theirs):
                fed(one, True, FRAMES, 4)
            for _ in range(rounds):
                found["adds"].append(fed(ours, True, FRAMES, calls) * size / 1e9)
                found["their adds"].append(fed(theirs, True, FRAMES, calls) * size / 1e9)
                found["draw"].append(drawn(lambda: served.sample(BATCH), calls) * 1e3)
                found["their draw"].append(drawn(other.sample, calls) * 1e3)
    finally:
        other.shutdown()
    rows = [
        row("uniform: adds of frames, 2 feeders, GB/s", found["adds"], found["their adds"], max),
        row(f"uniform: sample({BATCH}) of frames, ms", found["draw"], found["their draw"], min),
    ]
    return [each | {"beside": "RayReplayBuffer"} for each in rows]


def row(what: str, ours: list[float], bare: list[float], best: Callable) -> dict:
    """Returns one row of the results."""
    ratios = np.array(ours) / np.array(bare)
    return {
        "what": what,
        "best": float(best(ours)),
        "median": float(np.median(ours)),
        "ray_best": float(best(bare)),
        "ray_median": float(np.median(bare)),
        "ratio": float(np.median(ratios)),
    }


def run(wanted: Wanted) -> dict[str, Any]:
    """Returns a row per comparison, and the load of the machine before and after."""
    rounds, calls = wanted.pick((2, 10), (7, 100))
    ray.init(include_dashboard=False, object_store_memory=500_000_000, log_to_driver=False)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
    load = [os.getloadavg()[0]]  # of this benchmark and all other programs
    try:
        rows = frames(jrb.DeviceStorage(), rounds, calls)
        rows += frames(jrb.MemmapStorage(), rounds, calls)
        rows += small(rounds, calls)
        if importlib.util.find_spec("torchrl") is not None:
            rows += beside_torchrl(rounds, calls)
    finally:
        ray.shutdown()
    load.append(os.getloadavg()[0])
    return {"load": load, "rows": rows}
