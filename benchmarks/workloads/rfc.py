"""`sample` of 128 of 100,000 items in a Python loop, as TorchRL benchmarks its own buffers."""

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import backend

import jrb

from ..timing import Program
from .case import Case, Wanted
from .host import draws

SHAPES: dict[str, Any] = {
    "tensor": (3, 4),
    "dict": {"a": (3, 4), "b": (3,), "c": ()},
    "nested dict": {"a": (3, 4), "next": {"a": (3, 4), "reward": (), "done": ()}},
}
STORAGES = {"list": "ListStorage", "device": "LazyTensorStorage", "memmap": "LazyMemmapStorage"}
B = 128


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields kinds of items and storages; on the CPU also with synchronous dispatch."""
    count, known = wanted.pick(10**4, 10**5), {peer.name for peer in wanted.peers}
    modes = {"JAX's default": contextlib.nullcontext}
    if jax.default_backend() == "cpu":
        modes["synchronous"] = synchronous
    for mode, within in modes.items():
        for storage, theirs in STORAGES.items():
            for kind in SHAPES:
                programs = {
                    "jrb": lambda k=kind, s=storage: ours(k, s, count),
                    "bare NumPy or JAX": lambda k=kind, s=storage: BARE[s](data(k, count), count),
                }
                if "TorchRL" in known:
                    programs["TorchRL"] = lambda k=kind, s=theirs: torchrl(k, s, count)
                facts = {"storage": storage, "items": kind, "dispatch": mode, "N": count, "B": B}
                weight = wanted.pick(40, 667)
                yield Case("sample", facts, programs, weight=weight, within=within)


@contextlib.contextmanager
def synchronous() -> Iterator[None]:
    """Makes JAX compute in the calling thread; existing arrays are lost on entry and on exit."""
    _dispatched(False)
    try:
        yield
    finally:
        _dispatched(True)


def _dispatched(ahead: bool) -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", ahead)
    jax.clear_caches()
    backend.clear_backends()


def data(kind: str, count: int) -> Any:
    """Returns random items on the host."""
    rng = np.random.default_rng(0)
    make = lambda shape: rng.standard_normal((count, *shape)).astype(np.float32)
    return jax.tree.map(make, SHAPES[kind], is_leaf=lambda x: isinstance(x, tuple))


def ours(kind: str, storage: str, count: int) -> Program:
    """Returns draws of jrb."""
    rows = data(kind, count)
    made: Any = {
        "list": lambda: jrb.ListStorage(collate=stack),
        "device": jrb.DeviceStorage,
        "memmap": jrb.MemmapStorage,
    }[storage]()
    buffer = jrb.ReplayBuffer(count, batch_size=B, storage=made)
    items: Any = rows
    if storage == "list":
        items = listed(rows, count)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    state = buffer.extend(state, items)
    sample = jax.jit(buffer.sample) if storage == "device" else buffer.sample
    return draws(lambda key: sample(state, key))


def gathered(rows: Any, count: int) -> Program:
    """Returns draws of random slots and a gather per leaf, in one jitted call."""

    def sample(key: jax.Array, rows: Any) -> Any:
        slots = jax.random.randint(key, (B,), 0, count)
        return jax.tree.map(lambda leaf: leaf[slots], rows)

    compiled, held = jax.jit(sample), jax.device_put(rows)
    return draws(lambda key: compiled(key, held))


def taken(rows: Any, count: int) -> Program:
    """Returns draws by NumPy: `take` of each leaf from a file, put on the device in one call."""
    leaves, structure = jax.tree.flatten(rows)
    files, rng = [_mapped(leaf) for leaf in leaves], np.random.default_rng(1)

    def sample(key: jax.Array) -> Any:
        slots = rng.integers(0, count, B)
        found = [leaf.take(slots, 0, None, "clip") for leaf in files]
        return jax.device_put(jax.tree.unflatten(structure, found))

    return draws(sample)


def _mapped(leaf: np.ndarray) -> np.ndarray:
    """Copies a leaf to a mapped temporary file, which exists as long as the mapping."""
    with tempfile.TemporaryFile() as file:
        file.truncate(leaf.nbytes)
        lying = np.memmap(file, leaf.dtype, "r+", shape=leaf.shape)
    lying[...] = leaf
    return np.asarray(lying)


def stacked(rows: Any, count: int) -> Program:
    """Returns draws from a list of items, with random slots and stacks by NumPy."""
    items, rng = listed(rows, count), np.random.default_rng(1)

    def sample(key: jax.Array) -> Any:
        return stack([items[slot] for slot in rng.integers(0, count, B).tolist()])

    return draws(sample)


def listed(rows: Any, count: int) -> list[Any]:
    """Returns the items as a list."""
    return [jax.tree.map(lambda leaf, n=n: leaf[n], rows) for n in range(count)]


def stack(items: list[Any]) -> Any:
    """Stacks items leaf by leaf; `np.stack` takes nearly twice as long."""
    return jax.tree.map(lambda *leaves: np.array(leaves), *items)


BARE = {"list": stacked, "device": gathered, "memmap": taken}
"""The least work of a draw from each storage."""


def torchrl(kind: str, storage: str, count: int) -> Program:
    """Returns draws of TorchRL; tensors in a list are stacked by torch."""
    import torch
    import torchrl.data
    from tensordict import TensorDict

    rows = jax.tree.map(torch.from_numpy, data(kind, count))
    made = getattr(torchrl.data, storage)(count)
    if kind == "tensor":
        listed = storage == "ListStorage"
        more = {"collate_fn": torch.stack} if listed else {}
        buffer: Any = torchrl.data.ReplayBuffer(storage=made, batch_size=B, **more)
        buffer.extend(list(rows) if listed else rows)
    else:
        buffer = torchrl.data.TensorDictReplayBuffer(storage=made, batch_size=B)
        buffer.extend(TensorDict(rows, batch_size=count))
    return draws(lambda key: buffer.sample())
