"""Storages on the host beside NumPy, TorchRL and the device; and a loop with prefetch.

`python -m benchmarks.host` (extra `bench`; with torchrl installed, it is measured too) fills stores
of 7 GB: give `--folder` on the disk to be measured. What is compared runs in turn, in one
process; the ratios are medians of the ratios of each round.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table

import jrb
from benchmarks import report

FRAME = (84, 84)
HAS_TORCHRL = importlib.util.find_spec("torchrl") is not None
Programs = dict[str, Callable[[int], Any]]


def in_turn(programs: Programs, rounds: int, title: str) -> dict[str, list[float]]:
    """Microseconds of every program in every round; the first ones are not counted."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    warm = max(rounds // 20, 3)
    for number in rich.progress.track(range(rounds + warm), title):
        for name, program in programs.items():
            start = time.perf_counter()
            program(number)
            if number >= warm:
                times[name].append((time.perf_counter() - start) * 1e6)
    return times


def row(times: dict[str, list[float]], what: str, ours: str, other: str) -> dict:
    """One comparison."""
    one, two = np.array(times[ours]), np.array(times[other])
    return {
        "what": what,
        "ours_us": float(np.median(one)),
        "other_us": float(np.median(two)),
        "ratio": float(np.median(one / two)),
    }


@contextlib.contextmanager
def peak_memory(found: dict[str, int]) -> Iterator[None]:
    """The most memory of this process, without the page cache, sampled every few milliseconds."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            with open("/proc/self/status") as file:
                lines = [line.split() for line in file if line.startswith("RssAnon")]
            found["bytes"] = max(found.get("bytes", 0), int(lines[0][1]) * 1024)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def keys_of(count: int) -> list[jax.Array]:
    """Keys that are there already."""
    return jax.block_until_ready(list(jax.random.split(jax.random.key(0), count)))


def filled(storage: Any, capacity: int, batch_size: int) -> tuple[Any, Any]:
    """A full buffer of frames."""
    buffer = jrb.ReplayBuffer(capacity, batch_size=batch_size, storage=storage)
    state = buffer.init({"o": jax.ShapeDtypeStruct(FRAME, jnp.uint8)})
    part = np.random.default_rng(0).integers(0, 255, (2000, *FRAME), np.uint8)
    extend = buffer.extend
    if isinstance(storage, jrb.DeviceStorage):
        extend = jax.jit(extend, donate_argnums=0)
    for start in rich.progress.track(range(0, capacity, len(part)), "filling"):
        state = extend(state, {"o": part[: capacity - start]})
    return buffer, state


def touched(rows: np.ndarray) -> None:
    """Makes every page of a mapping known to this process."""
    flat = rows.reshape(len(rows), -1)
    for start in range(0, len(flat), 10_000):
        flat[start : start + 10_000, ::2000].sum()


def torchrl_frames(capacity: int, batch_size: int, folder: str) -> Callable[[int], Any]:
    """A full TorchRL buffer of frames on the disk."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=batch_size)
    part = torch.randint(0, 255, (2000, *FRAME), dtype=torch.uint8)
    for start in rich.progress.track(range(0, capacity, len(part)), "filling TorchRL's"):
        part_ = part[: capacity - start]
        buffer.extend(TensorDict({"o": part_}, batch_size=len(part_)))
    touched(storage._storage["o"].numpy())
    return lambda number: buffer.sample()


def frames(capacity: int, rounds: int, folder: str) -> tuple[list[dict], dict[str, int]]:
    """Draws of 256 frames from files; the memory that filling took; and a loop with prefetch."""
    path, memory = os.path.join(folder, "frames"), {}
    with peak_memory(memory):
        buffer, state = filled(jrb.MemmapStorage(path), capacity, 256)
    os.sync()
    plain = np.memmap(os.path.join(path, "rows", "o.bin"), np.uint8, "r", shape=(capacity, *FRAME))
    plain = np.asarray(plain)
    touched(plain)
    touched(state.storage.rows.store.table.rows[0])
    rng, keys = np.random.default_rng(1), keys_of(rounds + rounds // 20 + 3)
    jitted = jax.jit(buffer.sample)

    def numpy_take(number: int) -> None:
        rows = np.take(plain, rng.integers(0, capacity, 256), axis=0)
        jax.block_until_ready(jax.device_put(rows))

    ours: Programs = {
        "jrb": lambda number: jax.block_until_ready(buffer.sample(state, keys[number])),
        "jrb in jit": lambda number: jax.block_until_ready(jitted(state, keys[number])),
    }
    plain_take = "NumPy's take and device_put"
    others: Programs = {plain_take: numpy_take}
    if HAS_TORCHRL:
        others["TorchRL's memmap"] = torchrl_frames(capacity, 256, os.path.join(folder, "torchrl"))
        os.sync()
    rows = []
    for one, other in [("jrb", name) for name in others] + [("jrb in jit", plain_take)]:
        pair = {other: others[other], one: ours[one]}
        times = in_turn(pair, rounds, f"{one}, {other}")
        rows.append(row(times, f"memmap, {one}, over {other}", one, other))
    rows.append(prefetch(buffer, state, max(rounds // 40, 5)))
    return rows, memory


def ten_milliseconds() -> Callable[[jax.Array], jax.Array]:
    """A jitted function of a batch that takes 10 ms on one core."""

    def work(data: jax.Array, count: jax.Array) -> jax.Array:
        seed = data[0, 0, 0].astype(jnp.float32)
        return jax.lax.fori_loop(0, count, lambda _, x: jnp.sin(x) + 1e-3, seed)

    run, blank, count = jax.jit(work), jnp.zeros((256, *FRAME), jnp.uint8), 1000
    jax.block_until_ready(run(blank, count))
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(run(blank, count))
        count = int(count * 0.01 / (time.perf_counter() - start))
    return lambda data: run(data, count)


def prefetch(buffer: Any, state: Any, rounds: int) -> dict:
    """The loop "draw, 10 ms of compute" with prefetch over the compute alone, 50 steps a round."""
    compute, batches = ten_milliseconds(), jrb.prefetch(buffer, state, jax.random.key(0))
    blank = jnp.zeros((256, *FRAME), jnp.uint8)

    def alone(number: int) -> None:
        for _ in range(50):
            jax.block_until_ready(compute(blank))

    def ahead(number: int) -> None:
        for _ in range(50):
            jax.block_until_ready(compute(next(batches).data["o"]))

    with batches:
        times = in_turn({"alone": alone, "ahead": ahead}, rounds, "prefetch")
    return row(times, "50 x (draw, 10 ms) with prefetch over the compute", "ahead", "alone")


def spill(capacity: int, rounds: int) -> list[dict]:
    """Draws of which 90 % are hot, over those of a buffer on the device."""
    hot, other = filled(jrb.SpillStorage(None, capacity * 9 // 10), capacity, 256)
    device, state = filled(jrb.DeviceStorage(), capacity, 256)
    keys, jitted = keys_of(rounds + rounds // 20 + 3), jax.jit(device.sample)
    touched(other.storage.view.rows.store.table.rows[0])
    programs: Programs = {
        "spill": lambda number: jax.block_until_ready(hot.sample(other, keys[number])),
        "device": lambda number: jax.block_until_ready(device.sample(state, keys[number])),
        "device in jit": lambda number: jax.block_until_ready(jitted(state, keys[number])),
    }
    times = in_turn(programs, rounds, "spill")
    return [
        row(times, "spill, 90 % hot, over the device", "spill", "device"),
        row(times, "spill, 90 % hot, over the device in jit", "spill", "device in jit"),
    ]


SHAPES: dict[str, Any] = {
    "tensor": (3, 4),
    "dict": {"a": (3, 4), "b": (3,), "c": ()},
    "nested": {"a": (3, 4), "next": {"a": (3, 4), "reward": (), "done": ()}},
}
ITEMS = 100_000


def rfc_data(kind: str) -> Any:
    """The items of TorchRL's own benchmark, on the host."""
    rng = np.random.default_rng(0)
    make = lambda shape: rng.standard_normal((ITEMS, *shape)).astype(np.float32)
    return jax.tree.map(make, SHAPES[kind], is_leaf=lambda x: isinstance(x, tuple))


def rfc_jrb(kind: str, storage: str, rounds: int) -> Callable[[int], Any]:
    """Our draws of 128."""
    data, keys = rfc_data(kind), keys_of(rounds + rounds // 20 + 3)
    stack = lambda items: jax.tree.map(lambda *leaves: np.stack(leaves), *items)
    made = {
        "list": lambda: jrb.ListStorage(collate=stack),
        "device": jrb.DeviceStorage,
        "memmap": jrb.MemmapStorage,
    }[storage]()
    buffer = jrb.ReplayBuffer(ITEMS, batch_size=128, storage=made)
    items: Any = data
    if storage == "list":
        items = [jax.tree.map(lambda leaf: leaf[n], data) for n in range(ITEMS)]
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], data))
    state = buffer.extend(state, items)
    sample = jax.jit(buffer.sample) if storage == "device" else buffer.sample
    return lambda number: jax.block_until_ready(sample(state, keys[number]))


def rfc_torchrl(kind: str, storage: str) -> Callable[[int], Any]:
    """TorchRL's draws of 128."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        ListStorage,
        ReplayBuffer,
        TensorDictReplayBuffer,
    )

    data = jax.tree.map(torch.from_numpy, rfc_data(kind))
    made = {"list": ListStorage, "device": LazyTensorStorage, "memmap": LazyMemmapStorage}
    if kind == "tensor":
        buffer: Any = ReplayBuffer(storage=made[storage](ITEMS), batch_size=128)
        if storage == "list":
            buffer = ReplayBuffer(
                storage=ListStorage(ITEMS), batch_size=128, collate_fn=torch.stack
            )
            data = list(data)
    else:
        buffer = TensorDictReplayBuffer(storage=made[storage](ITEMS), batch_size=128)
        data = TensorDict(data, batch_size=ITEMS)
    buffer.extend(data)
    return lambda number: buffer.sample()


def rfc(draws: int) -> list[dict]:
    """TorchRL's own benchmark, on both."""
    found = []
    for storage in ("list", "device", "memmap"):
        for kind in SHAPES:
            programs: Programs = {"jrb": rfc_jrb(kind, storage, draws)}
            if HAS_TORCHRL:
                programs["TorchRL"] = rfc_torchrl(kind, storage)
            times = in_turn(programs, draws, f"{storage}, {kind}")
            other = "TorchRL" if HAS_TORCHRL else "jrb"
            found.append(row(times, f"128 of 100,000, {storage}, {kind}", "jrb", other))
    return found


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a hundredth of the rows")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--draws", type=int, default=10_000, help="of TorchRL's benchmark")
    parser.add_argument("--only", default="frames,spill,rfc")
    parser.add_argument("--json", default="benchmarks/results/host.json")
    parser.add_argument("--folder", default=None, help="on the disk to be measured")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, memory, scale = [], {}, 100 if options.quick else 1
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if "frames" in options.only:
            rows, memory = frames(10**6 // scale, options.rounds, folder)
        if "spill" in options.only:
            rows += spill(10**5 // scale, options.rounds)
        if "rfc" in options.only:
            rows += rfc(options.draws)
    table = rich.table.Table(title="microseconds, medians")
    for head in ("", "jrb", "other", "ratio"):
        table.add_column(head, justify="right" if head else "left")
    for line in rows:
        cells = (f"{line['ours_us']:.0f}", f"{line['other_us']:.0f}", f"{line['ratio']:.2f}")
        table.add_row(line["what"], *cells)
    console = rich.console.Console()
    console.print(table)
    if memory:
        console.print(f"filling: at most {memory['bytes'] / 1e6:.0f} MB beside the page cache")
    with open(options.json, "w") as out:
        found = {"machine": report.machine(), "filling_bytes": memory.get("bytes"), "rows": rows}
        json.dump(found, out, indent=2)


if __name__ == "__main__":
    main()
