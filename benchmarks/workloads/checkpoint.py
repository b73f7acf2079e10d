"""Checkpoints of frames, compared with plain files of bytes, Orbax, and flashbax's Vault."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrb

from ..timing import Program
from .case import Case, Wanted
from .resident import Peak

FRAME = (84, 84, 4)
PART = 32 << 20
DISK = "the disk"
"""Name of the baseline: the same bytes in plain files, with as many syncs and no checksums."""


def frames(count: int, seed: int) -> Any:
    """Returns transitions with random frames, which no file system can compress."""
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


class Saved:
    """A full prioritized buffer, and the folders to which the programs save it."""

    def __init__(self, rows: int, folder: str) -> None:
        self.rows, self.folder = rows, folder
        self.buffer = jrb.ReplayBuffer(rows, batch_size=256, sampler=jrb.Prioritized())
        state = self.buffer.init(jax.tree.map(lambda leaf: leaf[0], frames(1, 0)))
        self._extend = jax.jit(self.buffer.extend, donate_argnums=0)
        for seed in range(16):
            state = self._extend(state, frames(rows // 16, seed))
        self.state = jax.block_until_ready(state)
        self.arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)]

    def path(self, name: str) -> str:
        """Returns the folder of one program."""
        return os.path.join(self.folder, name)

    def removed(self, name: str) -> None:
        """Removes the files of the previous round."""
        shutil.rmtree(self.path(name), ignore_errors=True)

    def a_little(self) -> Any:
        """Returns the state after a hundredth of its rows were overwritten."""
        few = frames(max(1, self.rows // 100), 99)
        return jax.block_until_ready(self._extend(jax.tree.map(jnp.copy, self.state), few))


def cases(wanted: Wanted) -> Iterator[Case]:
    """Yields cases that save and load a gigabyte, and that save again with few new rows."""
    rows, held = wanted.pick(176, 17_600), []
    size = {"rows": rows, "bytes each": 2 * int(np.prod(FRAME)) + 9}

    def here() -> Saved:
        if not held:
            held.append(Saved(rows, wanted.folder))
        return held[0]

    names = {peer.name for peer in wanted.peers}
    saves: dict[str, Any] = {"jrb": lambda: ours_save(here()), DISK: lambda: plain_save(here())}
    loads: dict[str, Any] = {"jrb": lambda: ours_load(here()), DISK: lambda: plain_load(here())}
    saves["Orbax"], loads["Orbax"] = lambda: orbax(here())[0], lambda: orbax(here())[1]
    if "flashbax" in names:
        saves["Vault"], loads["Vault"] = lambda: vault(here())[0], lambda: vault(here())[1]
    yield Case("save", size, saves, weight=0.5)
    yield Case("load", size, loads, weight=0.5)
    again = {
        "jrb": lambda: ours_save(here()),
        "jrb, 1 % new": lambda: ours_again(here(), True),
        "jrb, nothing new": lambda: ours_again(here(), False),
    }
    yield Case("commit", size, again, weight=0.5)


def ours_save(saved: Saved) -> Program:
    """Returns a save into an empty folder."""
    path = saved.path("ours")
    save = lambda: jrb.save(path, saved.buffer, saved.state)
    with Peak() as peak:
        save()
    return Program(save, before=lambda: saved.removed("ours"), facts={"extra_bytes": peak.extra})


def ours_load(saved: Saved) -> Program:
    """Returns a load of a checkpoint that is saved beforehand."""
    path, held = saved.path("ours-loaded"), []
    jrb.save(path, saved.buffer, saved.state)

    def load() -> None:
        held[:] = [jax.block_until_ready(jrb.load(path)[1])]

    with Peak() as peak:
        load()
    extra = peak.extra - sum(array.nbytes for array in saved.arrays)
    return Program(load, before=held.clear, facts={"extra_bytes": max(0, extra)})


def ours_again(saved: Saved, new: bool) -> Program:
    """Returns a save over an earlier one; a hundredth of the rows is new if `new`, else none."""
    name = f"ours-{new}"
    other = saved.a_little() if new else saved.state

    def before() -> None:
        saved.removed(name)
        jrb.save(saved.path(name), saved.buffer, saved.state)

    return Program(lambda: jrb.save(saved.path(name), saved.buffer, other), before=before)


def plain_save(saved: Saved) -> Program:
    """Returns a write of all arrays to files of at most `PART` bytes.

    It syncs each file once and the folder three times.
    """
    folder = saved.path("plain")

    def before() -> None:
        saved.removed("plain")
        os.mkdir(folder)

    return Program(lambda: _written(folder, saved.arrays), before=before)


def plain_load(saved: Saved) -> Program:
    """Returns a read of these files into newly allocated memory."""
    folder = saved.path("plain-loaded")
    os.makedirs(folder, exist_ok=True)
    _written(folder, saved.arrays)

    def load() -> None:
        targets = [np.empty_like(array) for array in saved.arrays]
        for number, part in enumerate(_parts(targets)):
            file = os.open(os.path.join(folder, f"{number:06d}"), os.O_RDONLY)
            os.preadv(file, [part], 0)
            os.close(file)

    return Program(load)


def _written(folder: str, arrays: list[np.ndarray]) -> None:
    for number, part in enumerate(_parts(arrays)):
        file = os.open(os.path.join(folder, f"{number:06d}"), os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, part, 0)
        os.fsync(file)
        os.close(file)
    for _ in range(3):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _parts(arrays: list[np.ndarray]) -> Iterator[memoryview]:
    """Yields the memory of arrays in parts of at most `PART` bytes."""
    for array in arrays:
        view = memoryview(array.reshape(-1).view(np.uint8))
        for start in range(0, len(view), PART):
            yield view[start : start + PART]


def orbax(saved: Saved) -> tuple[Program, Program]:
    """Returns a save and a load by Orbax."""
    import orbax.checkpoint as ocp

    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved.state)
    restore = ocp.checkpoint_utils.construct_restore_args(target)
    path = saved.path("orbax")
    save = lambda: saver.save(path, saved.state, force=True)
    save()
    load = lambda: jax.block_until_ready(saver.restore(path, item=target, restore_args=restore))
    return Program(save), Program(load)


def vault(saved: Saved) -> tuple[Program, Program]:
    """Returns a save and a load by flashbax's Vault, of a buffer with as many frames."""
    from flashbax.vault import Vault

    state, folder = _trajectories(saved.rows), saved.folder
    number, names = iter(range(10**6)), [""]

    def before() -> None:
        if names[0]:
            saved.removed(names[0])
        names[0] = f"vault{next(number)}-{id(names)}"

    def save() -> None:
        made = Vault(names[0], experience_structure=state.experience, rel_dir=folder)
        made.write(state)

    def load() -> None:
        uid = os.listdir(os.path.join(folder, names[0]))[0]
        jax.block_until_ready(Vault(names[0], rel_dir=folder, vault_uid=uid).read())

    before()
    save()
    return Program(save, before=before), Program(load)


def _trajectories(rows: int) -> Any:
    """Returns a flashbax buffer with as many frames, one row short of full.

    A Vault takes a full buffer for an empty one.
    """
    import flashbax

    sizes = {"add_batch_size": 1, "sample_batch_size": 1, "sample_sequence_length": 1}
    buffer = flashbax.make_trajectory_buffer(
        **sizes, period=1, min_length_time_axis=1, max_length_time_axis=rows + 1
    )
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], frames(1, 0)))
    add: Callable = jax.jit(buffer.add, donate_argnums=0)
    for seed in range(16):
        state = add(state, jax.tree.map(lambda leaf: leaf[None], frames(rows // 16, seed)))
    return state
