"""Dumps that TorchRL's replay buffers load, written without TorchRL.

N capacity, E environments, T rows of time, K ends of trajectories. A dump is a folder with the
tensors of the storage, one headerless file each, beside JSON that tells their names, shapes and
dtypes.
"""

import json
import os
import tempfile
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import memory
from jrb._store import files
from jrb._util import checks, pytree
from jrb._util.pytree import Leaf
from jrb._util.wording import escaped_errors
from jrb.buffer import ReplayBuffer
from jrb.interop import torchrl_files as dump
from jrb.layouts import chain, flat, names
from jrb.layouts.names import Leaves
from jrb.migrate import pieces
from jrb.samplers import Prioritized
from jrb.state import BufferState

_RESERVED = ("shape", "device", "_type", *dump.ABOUT)
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_NON_TENSOR = "<class 'tensordict.tensorclass.NonTensorData'>"
_NOTHING = float(np.finfo(np.float32).max)  # the leaf of an empty slot in the tree of minima


class Rows(NamedTuple):
    """Which rows of the ring are written, and where they go.

    Attributes:
        order: int64, the rows of the ring in the order of the dump's storage.
        cursor: the row of the storage that would be written next.
        written: how many rows were ever written.
        full: whether all rows hold items.
    """

    order: np.ndarray
    cursor: int
    written: int
    full: bool


@escaped_errors()
def write_torchrl(
    path: str | os.PathLike[str], buffer: ReplayBuffer, state: BufferState, layout: str = "default"
) -> None:
    """Writes a folder that a TorchRL buffer of the same capacity takes by `loads(path)`.

    The items are written as they are. TorchRL's collectors give rewards and flags a trailing axis
    of size 1, and flags at the root too: where a TorchRL buffer is to go on with such data, store
    them so. With E environments the storage has the axes (T, E), for `ndim=2`. The priorities of a
    `Prioritized` sampler go along; other samplers leave nothing.

    Args:
        path: of a folder, which is not there yet or is empty.
        buffer: the description; its items are nested dicts.
        state: its state. It is only read.
        layout: "default" for what TorchRL's tensor storages load unless told otherwise, or "flat"
            for its `FlatStorageCheckpointer`, which has each observation once, and which gives
            flags at the root back as zeros.

    Raises:
        TypeError: the items are no nested dicts.
        ValueError: the folder is not empty, TorchRL has no such dtype, or the layout cannot hold
            the items exactly.
    """
    if layout not in ("default", "flat"):
        raise ValueError(f"layout: expected 'default' or 'flat', got {layout!r}.")
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(
            f"write_torchrl: expected a ReplayBuffer, got {type(buffer).__name__}. The order is "
            "write_torchrl(path, buffer, state)."
        )
    target = os.path.realpath(files.absolute(path))
    _check_target(target)
    rows = _rows(buffer, state)
    leaves = _gathered(buffer, state, rows)
    files.make_folder(os.path.dirname(target))
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target), prefix=".jrb-") as beside:
        folder = os.path.join(beside, "dump")
        _write(folder, buffer, state, leaves, rows, layout)
        files.replace(folder, target)


def _check_target(target: str) -> None:
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise ValueError(
            f"{target}: expected nothing there, or an empty folder, found something else. Write to "
            "another path."
        )


def _rows(buffer: ReplayBuffer, state: BufferState) -> Rows:
    """In a full ring every row keeps its place; others begin with the oldest one."""
    ring = buffer.ring
    checks.together("write_torchrl", buffer.writer)
    held = buffer.writer.held(ring, state.writer)
    first, count = int(held.first[0]) // ring.envs, int(held.size) // ring.envs
    if int(held.size) % ring.envs:
        raise ValueError(
            f"write_torchrl: expected items of all {ring.envs} environments in every row, got "
            f"{int(held.size)} items. TorchRL counts whole rows: fill the buffer first."
        )
    if count == ring.rows:
        lap = int(getattr(state.writer, "lap", 1))
        return Rows(np.arange(count), first, max(lap, 1) * count + first, True)
    return Rows((first + np.arange(count)) % ring.rows, count, count, False)


def _gathered(buffer: ReplayBuffer, state: BufferState, rows: Rows) -> Leaves:
    """The items `[T, ...]` or `[T, E, ...]` of the whole capacity, zeros where nothing is."""
    ring, spec = buffer.ring, buffer.stored(state)
    lead = (ring.rows,) if buffer.num_envs is None else (ring.rows, ring.envs)
    out = {}
    for name, leaf in names.flatten(spec, "write_torchrl").items():
        _check_leaf(name, leaf)
        out[name] = np.zeros((*lead, *leaf.shape), leaf.dtype)
    start = 0
    for piece in pieces(rows.order, pytree.nbytes(spec) * ring.envs):
        slots = _slots(buffer, piece).astype(np.int32).reshape(len(piece), *lead[1:])
        items = buffer.take(state, jnp.asarray(slots))
        for name, leaf in names.flatten(items, "write_torchrl").items():
            out[name][start : start + len(piece)] = jax.device_get(leaf)
        start += len(piece)
    return out


def _slots(buffer: ReplayBuffer, rows: np.ndarray) -> np.ndarray:
    """The slots of rows of the ring, `[T, E]`."""
    return rows[:, None] * buffer.ring.envs + np.arange(buffer.ring.envs)


def _check_leaf(name: str, leaf: Leaf) -> None:
    if str(leaf.dtype) not in dump.DTYPES:
        raise ValueError(
            f"leaf '{name}': expected a dtype that TorchRL has, got {leaf.dtype}. Store it as "
            "another one, keys as jax.random.key_data."
        )
    for key in name.split("/"):
        if key in _RESERVED:
            raise ValueError(f"leaf '{name}': TorchRL's files use the name '{key}'. Rename yours.")


def _write(
    folder: str,
    buffer: ReplayBuffer,
    state: BufferState,
    leaves: Leaves,
    rows: Rows,
    layout: str,
) -> None:
    ring = buffer.ring
    shape = (ring.rows,) if buffer.num_envs is None else (ring.rows, ring.envs)
    storage = os.path.join(folder, "storage")
    if layout == "flat":
        leaves, about = _flat(leaves, shape, rows)
        _write_tensors(storage, names.nest(leaves), (), about)
    else:
        _write_tensors(storage, names.nest(leaves), shape, {})
    about = {"metadata": {}, "is_pytree": False, "len": len(rows.order) * ring.envs}
    _write_json(about, storage, "storage_metadata.json")
    about = {"cursor": rows.cursor, "write_count": rows.written}
    _write_json(about, folder, "writer", "metadata.json")
    about = {"batch_size": buffer.batch_size, "consume_after_n_samples": None}
    _write_json(about, folder, "buffer_metadata.json")
    if isinstance(buffer.sampler, Prioritized):
        _write_priorities(os.path.join(folder, "sampler"), buffer, state, rows)


def _write_tensors(
    folder: str, items: dict[str, Any], shape: tuple[int, ...], about: dict[str, Any]
) -> None:
    """A dict of arrays as a folder; `about` holds further entries that are no tensors."""
    files.make_folder(folder)
    meta: dict[str, Any] = {name: {"type": "NonTensorData"} for name in about}
    for name, value in about.items():
        entry = {"_type": _NON_TENSOR, "data": value, "_is_non_tensor": True, "_metadata": None}
        _write_json(entry, folder, name, "meta.json")
    for key, entry in items.items():
        if isinstance(entry, dict):
            _write_tensors(os.path.join(folder, dump.file_name(key)), entry, shape, {})
            meta[key] = {"type": "TensorDict"}
            continue
        dtype = f"torch.{entry.dtype}"
        meta[key] = {
            "device": "cpu",
            "shape": list(entry.shape),
            "dtype": dtype,
            "is_nested": False,
        }
        if entry.size:
            path = os.path.join(folder, f"{dump.file_name(key)}.memmap")
            files.write_new(path, [memory.view(entry)])
    _write_json({**meta, "shape": list(shape), "device": "cpu", "_type": _TENSORDICT}, folder)


def _write_json(about: dict[str, Any], *path: str) -> None:
    """JSON at a path, by default as `meta.json` in a folder."""
    path = path if len(path) > 1 else (*path, "meta.json")
    files.make_folder(os.path.join(*path[:-1]))
    files.write_new(os.path.join(*path), [json.dumps(about).encode()])


def _write_priorities(folder: str, buffer: ReplayBuffer, state: BufferState, rows: Rows) -> None:
    """The leaves of both trees in the order of the storage, float64 `[N]`."""
    slots = _slots(buffer, rows.order).reshape(-1)
    raw = np.full(buffer.capacity, -1.0)
    raw[: len(slots)] = np.asarray(state.sampler.raw, np.float64)[slots]
    sampler = cast(Prioritized, buffer.sampler)
    alpha, eps = float(state.sampler.alpha), sampler.eps
    masses = np.where(raw < 0, 0.0, (np.maximum(raw, 0.0) + eps) ** alpha)
    about = {
        "_alpha": alpha,
        "_beta": float(sampler.beta),
        "_eps": float(eps),
        "_max_priority": [float(state.sampler.highest), float(np.argmax(raw))],
        "_max_capacity": float(buffer.capacity),
        "_schema_version": 1,
    }
    _write_json(about, folder, "sampler_metadata.json")
    for name, tree in (("sumtree", masses), ("mintree", np.where(raw < 0, _NOTHING, masses))):
        files.write_new(os.path.join(folder, f"{name}.memmap"), [memory.view(tree)])


def _flat(leaves: Leaves, shape: tuple[int, ...], rows: Rows) -> tuple[Leaves, dict[str, Any]]:
    """Every observation once: leaves `[N, ...]`, those of the next row `[N + K, ...]`.

    Args:
        leaves: `[T, ...]` or `[T, E, ...]`.
        shape: (T,) or (T, E).
        rows: which of them hold items.
    """
    _check_flags(leaves)
    turn = rows.cursor if rows.full else 0
    leaves = {name: _by_env(leaf, len(shape), turn) for name, leaf in leaves.items()}
    ends = _ends(leaves["next/done"], rows)
    out = {}
    for name, leaf in leaves.items():
        if not name.startswith("next/"):
            after = leaves.get("next/" + name)
            out[name] = _joined(leaf) if after is None else _shared(name, leaf, after, ends, rows)
    for name in ("reward", *dump.FLAGS):
        if f"next/{name}" in leaves:
            out[name] = _joined(leaves[f"next/{name}"])
    shift = rows.cursor or -shape[0]  # TorchRL cannot turn by 0, nor by T, but by -T
    about = {"is_full": rows.full, "shift": shift, "_storage_shape": list(shape)}
    return out, about


def _check_flags(leaves: Leaves) -> None:
    """Raises unless the layout can tell what the leaves are."""
    once = ("next/reward", *(f"next/{flag}" for flag in dump.FLAGS))
    if "next/done" not in leaves:
        raise _refusal("next/done", "the ends of trajectories there", f"only {list(leaves)}")
    for name in leaves:
        if name.startswith("next/") and name not in once and name[5:] not in leaves:
            raise _refusal(name, f"an observation '{name[5:]}' that it continues", "none")
    if "reward" in leaves:
        raise _refusal("reward", "rewards at 'next/reward' alone", "some at the root")
    for flag in dump.FLAGS:
        if flag in leaves and (f"next/{flag}" not in leaves or leaves[flag].any()):
            raise _refusal(flag, "zeros that go with those of 'next'", "others")


def _refusal(name: str, expected: str, got: str) -> ValueError:
    return ValueError(
        f"leaf '{name}': layout='flat' expects {expected}, got {got}. Use layout='default', which "
        "holds any items."
    )


def _by_env(leaf: np.ndarray, axes: int, turn: int) -> np.ndarray:
    """From `[T, ...]` or `[T, E, ...]` to `[E, T, ...]`, row `turn` first."""
    leaf = leaf[None] if axes == 1 else leaf.swapaxes(0, 1)
    return np.roll(leaf, -turn, axis=1) if turn else leaf


def _joined(leaf: np.ndarray) -> np.ndarray:
    """From `[E, T, ...]` to `[N, ...]`."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _ends(done: np.ndarray, rows: Rows) -> np.ndarray:
    """The last rows of trajectories, bool `[E, T]`, with the newest row."""
    if done.size != done.shape[0] * done.shape[1] or not len(rows.order):
        what = f"{done.size} in {len(rows.order)} rows"
        raise _refusal("next/done", "one flag for each item, and at least one item", what)
    ends = done.reshape(done.shape[:2]).astype(bool)
    ends[:, len(rows.order) - 1] = True
    return ends


def _shared(
    name: str, before: np.ndarray, after: np.ndarray, ends: np.ndarray, rows: Rows
) -> np.ndarray:
    """Observations `[E, T, ...]` as `[N + K, ...]`, behind an end's its next one."""
    if name in dump.FLAGS:
        return _joined(after)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        what = f"{before.dtype}{before.shape[2:]} and {after.dtype}{after.shape[2:]}"
        raise _refusal("next/" + name, f"the dtype and shape of '{name}'", what)
    held = len(rows.order)
    breaks = chain.differ(before[:, :held], after[:, :held]) & ~ends[:, :held]
    if breaks.any():
        env, row = np.argwhere(breaks)[0]
        what = f"another after row {row} (oldest first) of environment {env}, which is not done"
        raise _refusal("next/" + name, f"the next row's '{name}'", what)
    ends = ends.reshape(-1)
    place = flat.places(ends)
    out = np.zeros((len(ends) + ends.sum(), *before.shape[2:]), before.dtype)
    out[place], out[place[ends] + 1] = _joined(before), _joined(after)[ends]
    return out
