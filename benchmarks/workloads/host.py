"""Storages on the host: samples of 256 frames from files, with prefetch, or from memory."""

import glob
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrb

from ..timing import Program
from .case import Case, Wanted
from .resident import Peak

FRAME = (84, 84)
B = 256


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields cases of frames in files, a loop with prefetch, and a spilled ring."""
    capacity, known = wanted.pick(10**4, 10**6), {peer.name for peer in wanted.peers}
    spilled, held = wanted.pick(2000, 10**5), {}

    def files() -> Any:
        if "files" not in held:
            held["files"] = Files(capacity, wanted.folder)
        return held["files"]

    size = {"N": capacity, "B": B}
    programs = {
        "jrb": lambda: files().program(jitted=False),
        "jrb in jit": lambda: files().program(jitted=True),
        "NumPy take": lambda: files().take(),
    }
    if "TorchRL" in known:
        programs["TorchRL"] = lambda: torchrl(capacity, os.path.join(wanted.folder, "torchrl"))
    yield Case("frames in files", size, programs, weight=wanted.pick(4, 40))
    loop = {"jrb": lambda: prefetched(files()), "the compute alone": lambda: computed()}
    yield Case("50 x (draw, 10 ms) with prefetch", size, loop, weight=wanted.pick(0.5, 1))
    ring = {
        "jrb": lambda: drawn(jrb.SpillStorage(None, spilled * 9 // 10), spilled, False),
        "on the device": lambda: drawn(jrb.DeviceStorage(), spilled, False),
        "on the device, in jit": lambda: drawn(jrb.DeviceStorage(), spilled, True),
    }
    yield Case("a spilled ring, 90 % hot", {"N": spilled, "B": B}, ring, weight=wanted.pick(4, 40))


def filled(storage: Any, capacity: int) -> tuple[Any, Any]:
    """Returns a full buffer of frames and its state."""
    buffer = jrb.ReplayBuffer(capacity, batch_size=B, storage=storage)
    state = buffer.init({"o": jax.ShapeDtypeStruct(FRAME, jnp.uint8)})
    part = np.random.default_rng(0).integers(0, 255, (2000, *FRAME), np.uint8)
    extend = buffer.extend
    if isinstance(storage, jrb.DeviceStorage):
        extend = jax.jit(extend, donate_argnums=0)
    for start in range(0, capacity, len(part)):
        state = extend(state, {"o": part[: capacity - start]})
    return buffer, state


def touched(rows: np.ndarray) -> None:
    """Reads from every page of a mapping, so that draws cause no page faults."""
    flat = rows.reshape(len(rows), -1)
    for start in range(0, len(flat), 10_000):
        flat[start : start + 10_000, ::2000].sum()


def draws(sample: Any, facts: dict[str, Any] | None = None) -> Program:
    """Returns a program of one draw, with keys made beforehand."""
    keys = jax.block_until_ready(list(jax.random.split(jax.random.key(0), 256)))
    turn = iter(range(10**9))
    call = lambda: jax.block_until_ready(sample(keys[next(turn) % 256]))
    for _ in range(3):
        call()
    return Program(call, facts=facts or {})


class Files:
    """A full buffer in files, and the same files mapped by NumPy."""

    def __init__(self, capacity: int, folder: str) -> None:
        path, self.capacity = os.path.join(folder, "frames"), capacity
        with Peak() as peak:
            self.buffer, self.state = filled(jrb.MemmapStorage(path), capacity)
        os.sync()
        self.filling = peak.extra
        # In the first round of the ring, the rows of a file are in the order of slots.
        (file,) = glob.glob(os.path.join(path, "arrays", "items.o-*.bin"))
        self.plain = np.asarray(np.memmap(file, np.uint8, "r", shape=(capacity, *FRAME)))
        touched(self.plain)

    def program(self, jitted: bool) -> Program:
        """Returns draws of jrb; their facts hold the memory that filling took beyond the files."""
        sample = jax.jit(self.buffer.sample) if jitted else self.buffer.sample
        return draws(lambda key: sample(self.state, key), {"filling_bytes": self.filling})

    def take(self) -> Program:
        """Returns draws by NumPy, put on the device."""
        rng = np.random.default_rng(1)

        def sample(key: Any) -> Any:
            return jax.device_put(np.take(self.plain, rng.integers(0, self.capacity, B), axis=0))

        return draws(sample)


def torchrl(capacity: int, folder: str) -> Program:
    """Returns draws from a full TorchRL buffer of frames on the disk."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=B)
    part = torch.randint(0, 255, (2000, *FRAME), dtype=torch.uint8)
    for start in range(0, capacity, len(part)):
        some = part[: capacity - start]
        buffer.extend(TensorDict({"o": some}, batch_size=len(some)))
    touched(storage._storage["o"].numpy())
    os.sync()
    return draws(lambda key: buffer.sample())


def ten_milliseconds() -> Any:
    """Returns a jitted function of a batch that takes 10 ms on one core."""
    import time

    def work(data: jax.Array, count: jax.Array) -> jax.Array:
        seed = data[0, 0, 0].astype(jnp.float32)
        return jax.lax.fori_loop(0, count, lambda _, x: jnp.sin(x) + 1e-3, seed)

    run, blank, count = jax.jit(work), jnp.zeros((B, *FRAME), jnp.uint8), 1000
    jax.block_until_ready(run(blank, count))
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(run(blank, count))
        count = int(count * 0.01 / (time.perf_counter() - start))
    return lambda data: run(data, count)


def computed() -> Program:
    """Returns the compute of 50 steps, without draws."""
    compute, blank = ten_milliseconds(), jnp.zeros((B, *FRAME), jnp.uint8)

    def call() -> None:
        for _ in range(50):
            jax.block_until_ready(compute(blank))

    return Program(call)


def prefetched(files: Files) -> Program:
    """Returns 50 steps with batches prefetched from files."""
    compute = ten_milliseconds()
    batches = jrb.prefetch(files.buffer, files.state, jax.random.key(0))

    def call() -> None:
        for _ in range(50):
            jax.block_until_ready(compute(next(batches).data["o"]))

    return Program(call)


def drawn(storage: Any, capacity: int, jitted: bool) -> Program:
    """Returns draws from a full buffer with this storage."""
    buffer, state = filled(storage, capacity)
    sample = jax.jit(buffer.sample) if jitted else buffer.sample
    return draws(lambda key: sample(state, key))
