"""Checkpoints of a gigabyte of frames: against plain files, Orbax, and flashbax's Vault.

    python -m benchmarks.checkpoint [--quick] [--json FILE]

Each round saves and loads with every program in turn. "plain" writes and reads the same bytes, file
after file, with as many files and syncs as a save of ours, and checks nothing. Ratios are medians
over rounds; of ours over the other's throughput, so above 1 ours is faster.
"""

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import flashbax as fbx
import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table
from flashbax.vault import Vault

import jrb
from benchmarks import report

FRAME = (84, 84, 4)
PART = 32 << 20


def frames(count: int, seed: int) -> Any:
    """Transitions with frames that no file system could make smaller."""
    bits = lambda key: jax.random.bits(key, (count, *FRAME), jnp.uint8)
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "observation": bits(one),
        "action": jnp.arange(count, dtype=jnp.int32),
        "next": {
            "observation": bits(two),
            "reward": jnp.ones(count, jnp.float32),
            "done": jnp.arange(count) % 200 == 199,
        },
    }


def filled(rows: int) -> tuple[jrb.ReplayBuffer, Any]:
    """A full buffer with priorities."""
    buffer = jrb.ReplayBuffer(rows, batch_size=256, sampler=jrb.Prioritized())
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], frames(1, 0)))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    part = rows // 16
    for seed in range(16):
        state = extend(state, frames(part, seed))
    return buffer, jax.block_until_ready(state)


def plain_write(folder: str, arrays: list[np.ndarray]) -> None:
    """The bytes of arrays in files of at most `PART` bytes, each synced, and the folder twice."""
    for number, part in enumerate(parts(arrays)):
        file = os.open(os.path.join(folder, f"{number:06d}"), os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, part, 0)
        os.fsync(file)
        os.close(file)
    for _ in range(3):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def plain_read(folder: str, arrays: list[np.ndarray]) -> None:
    """The same, back into fresh memory."""
    targets = [np.empty_like(array) for array in arrays]
    for number, part in enumerate(parts(targets)):
        file = os.open(os.path.join(folder, f"{number:06d}"), os.O_RDONLY)
        os.preadv(file, [part], 0)
        os.close(file)


def parts(arrays: list[np.ndarray]) -> Iterator[memoryview]:
    """The memory of arrays, cut."""
    for array in arrays:
        view = memoryview(array.reshape(-1).view(np.uint8))
        for start in range(0, len(view), PART):
            yield view[start : start + PART]


class Peak:
    """The resident memory that a block of code needed on top of what there was."""

    def __enter__(self) -> "Peak":
        self.before = self.most = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, resident())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = self.most - self.before


def resident() -> int:
    """Bytes of memory that the process holds, files that are mapped left out."""
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def timed(times: dict[str, list[float]], name: str) -> Iterator[None]:
    """Notes how long something took, in seconds."""
    start = time.perf_counter()
    yield
    times.setdefault(name, []).append(time.perf_counter() - start)


def orbax_pair(folder: str, state: Any) -> tuple[Callable, Callable]:
    """Orbax's own way to save and to load."""
    import orbax.checkpoint as ocp

    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    restore = ocp.checkpoint_utils.construct_restore_args(target)
    path = os.path.join(folder, "orbax")
    save = lambda: saver.save(path, state, force=True)
    return save, lambda: saver.restore(path, item=target, restore_args=restore)


def vault_pair(folder: str, rows: int) -> tuple[Callable, Callable]:
    """Flashbax's Vault, of a buffer with the same frames."""
    buffer = fbx.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=1,
        sample_sequence_length=1,
        period=1,
        min_length_time_axis=1,
        max_length_time_axis=rows + 1,  # a Vault takes a full ring for an empty one
    )
    one = jax.tree.map(lambda leaf: leaf[0], frames(1, 0))
    state = buffer.init(one)
    part = rows // 16
    add = jax.jit(buffer.add, donate_argnums=0)
    for seed in range(16):
        state = add(state, jax.tree.map(lambda leaf: leaf[None], frames(part, seed)))
    number = iter(range(10**6))
    names: list[str] = []

    def save() -> None:
        for name in names:
            shutil.rmtree(os.path.join(folder, name))
        names[:] = [f"vault{next(number)}"]
        vault = Vault(names[0], experience_structure=state.experience, rel_dir=folder)
        vault.write(state)

    def load() -> Any:
        uid = os.listdir(os.path.join(folder, names[0]))[0]
        return Vault(names[0], rel_dir=folder, vault_uid=uid).read()

    return save, load


def measure(rows: int, rounds: int, folder: str) -> dict:
    """Seconds of every program and round, and the memory that ours needed."""
    buffer, state = filled(rows)
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    size = sum(array.nbytes for array in arrays)
    others = {"orbax": orbax_pair(folder, state)}
    times: dict[str, list[float]] = {}
    extras: dict[str, list[int]] = {"save": [], "load": []}
    few = frames(rows // 100, 99)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    names = {"vault": vault_pair(folder, rows)}
    for number in rich.progress.track(range(rounds + 1), "rounds"):
        ours, plain = os.path.join(folder, "ours"), os.path.join(folder, "plain")
        for path in (ours, plain):
            shutil.rmtree(path, ignore_errors=True)
        os.mkdir(plain)
        with timed(times, "plain write"):
            plain_write(plain, arrays)
        with Peak() as peak, timed(times, "save"):
            jrb.save(ours, buffer, state)
        extras["save"].append(peak.extra)
        with Peak() as peak:
            loaded = jax.block_until_ready(jrb.load(ours)[1])
        extras["load"].append(peak.extra - size)
        for _ in range(2):  # in turn, and the first of each for the system to find the memory
            del loaded
            with timed(times, "load"):
                loaded = jax.block_until_ready(jrb.load(ours)[1])
            with timed(times, "plain read"):
                plain_read(plain, arrays)
        loaded = jax.block_until_ready(extend(loaded, few))
        with timed(times, "incremental"):
            jrb.save(ours, buffer, loaded)
        with timed(times, "nothing new"):
            jrb.save(ours, buffer, loaded)
        del loaded
        for name, (save, load) in {**others, **names}.items():
            with timed(times, f"{name} save"):
                save()
            with timed(times, f"{name} load"):
                jax.block_until_ready(load())
        if not number:
            times, extras = {}, {"save": [], "load": []}
    return {"bytes": size, "seconds": times, "extra_bytes": extras}


def rows_of(found: dict) -> list[dict]:
    """What is compared."""
    rounds = len(found["seconds"]["save"])
    seconds = {name: np.array(values) for name, values in found["seconds"].items()}
    seconds = {name: values.reshape(rounds, -1)[:, -1] for name, values in seconds.items()}
    pairs = [
        ("save over plain write", "plain write", "save"),
        ("load over plain read", "plain read", "load"),
        ("save over Orbax", "orbax save", "save"),
        ("load over Orbax", "orbax load", "load"),
        ("save over Vault", "vault save", "save"),
        ("load over Vault", "vault load", "load"),
        ("full save over one with 1 % new rows", "save", "incremental"),
        ("full save over one with nothing new", "save", "nothing new"),
    ]
    return [
        {
            "what": name,
            "ours_s": float(np.median(seconds[ours])),
            "other_s": float(np.median(seconds[other])),
            "ratio": float(np.median(seconds[other] / seconds[ours])),
        }
        for name, other, ours in pairs
    ]


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="benchmarks/results/checkpoint.json")
    parser.add_argument("--folder", default=None, help="on the disk to be measured")
    options = parser.parse_args()
    rows = 1_760 if options.quick else 17_600
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(rows, options.rounds, folder)
    table = rich.table.Table(title=f"{found['bytes'] / 1e9:.2f} GB, seconds, medians")
    for head in ("", "ours", "other", "ratio"):
        table.add_column(head, justify="right" if head else "left")
    for row in rows_of(found):
        table.add_row(
            row["what"], f"{row['ours_s']:.3f}", f"{row['other_s']:.3f}", f"{row['ratio']:.2f}"
        )
    console = rich.console.Console()
    console.print(table)
    for verb, extra in found["extra_bytes"].items():
        console.print(f"{verb}: at most {max(extra) / 1e6:.0f} MB of memory beside the state")
    with open(options.json, "w") as out:
        json.dump({"machine": report.machine(), **found, "rows": rows_of(found)}, out, indent=2)


if __name__ == "__main__":
    main()
