"""Writes dumps that TorchRL's replay buffers can load, without TorchRL.

N capacity, E environments, T rows, K ends of trajectories. A dump is a folder with the tensors of
the storage, one headerless file each, and JSON with their names, shapes and dtypes.
"""

import json
import math
import os
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core.validate import check_outside_jit
from jrb.authoring import (
    Folder,
    absolute_path,
    check_links,
    checks,
    escape_errors,
    make_folder,
    tree_nbytes,
)
from jrb.buffer import ReplayBuffer
from jrb.interop.torchrl import ABOUT, DTYPES, FLAGS, file_name
from jrb.layouts import compact, names
from jrb.layouts.names import Leaves
from jrb.migrate import pieces
from jrb.samplers import Prioritized
from jrb.state import BufferState

_RESERVED = ("shape", "device", "_type", *ABOUT)
_ONCE = [f"next/{name}" for name in ("reward", *FLAGS)]
_TENSORDICT = "<class 'tensordict._td.TensorDict'>"
_NON_TENSOR = "<class 'tensordict.tensorclass.NonTensorData'>"
_NOTHING = float(np.finfo(np.float32).max)
"""The leaf of an empty slot in the tree of minima."""


class DumpRows(NamedTuple):
    """The rows of the ring that hold items, and the state of the dump's writer."""

    order: np.ndarray  # the ring's rows in the order of the dump's storage
    cursor: int  # the row of the storage to be written next
    written: int  # the number of rows ever written, overwritten ones included
    full: bool  # True if all rows hold items


@escape_errors()
def write_torchrl(
    path: str | os.PathLike[str], buffer: ReplayBuffer, state: BufferState, layout: str = "default"
) -> None:
    """Writes a dump that a TorchRL replay buffer of the same capacity loads by `loads(path)`.

    The items are written as they are. TorchRL's collectors give rewards and flags a trailing axis
    of size 1, and put flags also at the root: if a TorchRL buffer shall add collectors' data, store
    items in this form. With E environments the storage has the axes (T, E), for `ndim=2`. The
    priorities of a `Prioritized` sampler are written too, but no state of other samplers.

    Args:
        path: the path of a new or empty folder.
        buffer: the buffer; its items must be nested dicts.
        state: the buffer's state. It is only read.
        layout: "default", which TorchRL's tensor storages load by default; or "flat", that of its
            `FlatStorageCheckpointer`, which stores each observation once, and restores flags at
            the root as zeros.

    Raises:
        TypeError: the items are not nested dicts.
        ValueError: the folder is not empty, TorchRL lacks a leaf's dtype, or the layout cannot
            represent the items exactly.
    """
    if layout not in ("default", "flat"):
        raise ValueError(f"layout: expected 'default' or 'flat', got {layout!r}.")
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(
            f"write_torchrl: expected a ReplayBuffer, got {type(buffer).__name__}. The order is "
            "write_torchrl(path, buffer, state)."
        )
    check_outside_jit("write_torchrl", state)
    target = _check_target(path)
    # Read the items and bring them into the layout, before anything is written.
    rows, ring = _rows_to_write(buffer, state), buffer.ring
    leaves = _read_items(buffer, state, rows)
    shape = (ring.rows,) if buffer.num_envs is None else (ring.rows, ring.envs)
    about: dict[str, Any] = {}
    if layout == "flat":
        (leaves, about), shape = _to_flat(leaves, shape, rows), ()
    # Write a folder next to the target, and move it there once it is complete.
    parent = os.path.dirname(target)
    make_folder(parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".jrb-") as temporary:
        folder = Folder(temporary)
        _write_tensors(folder, "dump/storage", names.nest(leaves), shape, about)
        storage = {"metadata": {}, "is_pytree": False, "len": len(rows.order) * ring.envs}
        _write_json(folder, "dump/storage/storage_metadata.json", storage)
        writer = {"cursor": rows.cursor, "write_count": rows.written}
        _write_json(folder, "dump/writer/metadata.json", writer)
        metadata = {"batch_size": buffer.batch_size, "consume_after_n_samples": None}
        _write_json(folder, "dump/buffer_metadata.json", metadata)
        if isinstance(buffer.sampler, Prioritized):
            _write_priorities(folder, buffer, state, rows)
        os.replace(os.path.join(temporary, "dump"), target)
        Folder(parent).sync()


def _check_target(path: str | os.PathLike[str]) -> str:
    """Returns the real path of a new or empty folder; raises if there is anything else."""
    target = absolute_path(path)
    check_links(target)
    target = os.path.realpath(target)
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise ValueError(
            f"{target}: expected nothing there, or an empty folder, found something else. Write to "
            "another path."
        )
    return target


def _rows_to_write(buffer: ReplayBuffer, state: BufferState) -> DumpRows:
    """Returns the rows to write: all in their order if the ring is full, else oldest first."""
    ring = buffer.ring
    checks.shared_clock("write_torchrl", buffer.writer)
    held = buffer.writer.held(ring, state.writer)
    first, count = int(held.first[0]) // ring.envs, int(held.size) // ring.envs
    if int(held.size) % ring.envs:
        raise ValueError(
            f"write_torchrl: expected items of all {ring.envs} environments in every row, got "
            f"{int(held.size)} items. TorchRL counts whole rows: fill the buffer first."
        )
    if count == ring.rows:
        lap = int(getattr(state.writer, "lap", 1))
        return DumpRows(np.arange(count), first, max(lap, 1) * count + first, True)
    return DumpRows((first + np.arange(count)) % ring.rows, count, count, False)


def _slots(buffer: ReplayBuffer, rows: np.ndarray) -> np.ndarray:
    """Returns the slots of rows of the ring, `[T, E]`."""
    return rows[:, None] * buffer.ring.envs + np.arange(buffer.ring.envs)


def _read_items(buffer: ReplayBuffer, state: BufferState, rows: DumpRows) -> Leaves:
    """Reads items `[T, ...]` or `[T, E, ...]` of the full capacity, zeros in empty rows."""
    # Allocate the leaves; raise for those that TorchRL cannot have.
    ring, spec = buffer.ring, buffer.item_spec(state)
    lead = (ring.rows,) if buffer.num_envs is None else (ring.rows, ring.envs)
    leaves: Leaves = {}
    for name, leaf in names.flatten(spec, "write_torchrl").items():
        if str(leaf.dtype) not in DTYPES:
            raise ValueError(
                f"leaf '{name}': expected a dtype that TorchRL has, got {leaf.dtype}. Store it as "
                "another one, keys as jax.random.key_data."
            )
        for key in {*_RESERVED}.intersection(name.split("/")):
            raise ValueError(f"leaf '{name}': TorchRL's files use the name '{key}'. Rename yours.")
        leaves[name] = np.zeros((*lead, *leaf.shape), leaf.dtype)
    # Copy the rows in pieces, which bounds the memory on the device.
    start = 0
    for piece in pieces(rows.order, tree_nbytes(spec) * ring.envs):
        slots = _slots(buffer, piece).astype(np.int32).reshape(len(piece), *lead[1:])
        items = buffer.take(state, jnp.asarray(slots))
        for name, leaf in names.flatten(items, "write_torchrl").items():
            leaves[name][start : start + len(piece)] = jax.device_get(leaf)
        start += len(piece)
    return leaves


def _write_tensors(
    folder: Folder, name: str, items: dict[str, Any], shape: tuple[int, ...], about: dict[str, Any]
) -> None:
    """Writes a nested dict of arrays as a folder; `about` has entries that are not tensors."""
    folder.make(name)
    meta: dict[str, Any] = {key: {"type": "NonTensorData"} for key in about}
    # Entries that are not tensors have a folder each; dicts are folders, and arrays files.
    for key, value in about.items():
        entry = {"_type": _NON_TENSOR, "data": value, "_is_non_tensor": True, "_metadata": None}
        _write_json(folder, f"{name}/{key}/meta.json", entry)
    for key, entry in items.items():
        file = f"{name}/{file_name(key)}"
        if isinstance(entry, dict):
            _write_tensors(folder, file, entry, shape, {})
            meta[key] = {"type": "TensorDict"}
            continue
        dtype, size = f"torch.{entry.dtype}", list(entry.shape)
        meta[key] = {"device": "cpu", "shape": size, "dtype": dtype, "is_nested": False}
        if entry.size:
            folder.write_new(f"{file}.memmap", [_bytes(entry)])
    meta |= {"shape": list(shape), "device": "cpu", "_type": _TENSORDICT}
    _write_json(folder, f"{name}/meta.json", meta)


def _bytes(array: np.ndarray) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _write_json(folder: Folder, name: str, value: dict[str, Any]) -> None:
    folder.make(os.path.dirname(name))
    folder.write_new(name, [json.dumps(value).encode()])


def _write_priorities(
    folder: Folder, buffer: ReplayBuffer, state: BufferState, rows: DumpRows
) -> None:
    """Writes a prioritized sampler: the leaves of its sum and min trees, float64 `[N]`."""
    # Bring the priorities into the order of the storage; slots beyond it have none.
    sampler: Any = buffer.sampler
    slots = _slots(buffer, rows.order).reshape(-1)
    raw = np.full(buffer.capacity, -1.0)
    raw[: len(slots)] = np.asarray(buffer.priorities(state), np.float64)[slots]
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
    _write_json(folder, "dump/sampler/sampler_metadata.json", about)
    minima = np.where(raw < 0, _NOTHING, masses)
    folder.write_new("dump/sampler/sumtree.memmap", [_bytes(masses)])
    folder.write_new("dump/sampler/mintree.memmap", [_bytes(minima)])


def _to_flat(
    leaves: Leaves, shape: tuple[int, ...], rows: DumpRows
) -> tuple[Leaves, dict[str, Any]]:
    """Returns the flat layout: leaves `[N, ...]`, and shared observations `[N + K, ...]`."""
    _check_names(leaves)
    # Reshape to `[E, T, ...]`, with the oldest row first.
    turn, count = rows.cursor if rows.full else 0, len(rows.order)
    by_env: Leaves = {}
    for name, leaf in leaves.items():
        leaf = leaf[None] if len(shape) == 1 else leaf.swapaxes(0, 1)
        by_env[name] = np.roll(leaf, -turn, axis=1) if turn else leaf
    # Find the ends of trajectories; the newest row ends one too.
    done = by_env["next/done"]
    is_right, got = count and done.size == math.prod(shape), f"{done.size} in {count} rows"
    _check_flat(is_right, "next/done", "one flag for each item, and at least one item", got)
    ends = done.reshape(done.shape[:2]).astype(bool)
    ends[:, count - 1] = True
    # Lay the environments end to end, and store shared observations once.
    flatten = lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
    out: Leaves = {}
    for name, leaf in by_env.items():
        after = by_env.get("next/" + name)
        if not name.startswith("next/") and name not in FLAGS:
            out[name] = (
                flatten(leaf)
                if after is None
                else _share_observations(name, leaf, after, ends, count)
            )
    for name in _ONCE:
        if name in by_env:
            out[name[5:]] = flatten(by_env[name])
    # TorchRL fails for shifts of 0 and T, but not for -T.
    shift = rows.cursor or -shape[0]
    return out, {"is_full": rows.full, "shift": shift, "_storage_shape": list(shape)}


def _check_names(leaves: Leaves) -> None:
    """Raises unless the flat layout has a name for every leaf."""
    # It has rewards and flags of `next` alone, and other leaves of `next` need a twin at the root.
    has_done, got = "next/done" in leaves, f"only {list(leaves)}"
    _check_flat(has_done, "next/done", "the ends of trajectories there", got)
    for name in leaves:
        is_known = not name.startswith("next/") or name in _ONCE or name[5:] in leaves
        _check_flat(is_known, name, f"an observation '{name[5:]}' that it continues", "none")
    is_free = "reward" not in leaves
    _check_flat(is_free, "reward", "rewards at 'next/reward' alone", "some at the root")
    for flag in leaves.keys() & {*FLAGS}:
        is_zero = f"next/{flag}" in leaves and not leaves[flag].any()
        _check_flat(is_zero, flag, "zeros that go with those of 'next'", "others")


def _check_flat(is_right: object, name: str, expected: str, got: str) -> None:
    """Raises `ValueError` unless `is_right`: the flat layout cannot hold such items."""
    if not is_right:
        raise ValueError(
            f"leaf '{name}': layout='flat' expects {expected}, got {got}. Use layout='default', "
            "which holds any items."
        )


def _share_observations(
    name: str, before: np.ndarray, after: np.ndarray, ends: np.ndarray, count: int
) -> np.ndarray:
    """Returns observations `[N + K, ...]`: each row's, and after each end its next observation."""
    is_same = (before.shape, before.dtype) == (after.shape, after.dtype)
    got = f"{before.dtype}{before.shape[2:]} and {after.dtype}{after.shape[2:]}"
    _check_flat(is_same, "next/" + name, f"the dtype and shape of '{name}'", got)
    # A next observation must be the next row's observation, except at ends.
    breaks = compact.differ(before[:, :count], after[:, :count]) & ~ends[:, :count]
    for env, row in np.argwhere(breaks)[:1]:
        got = f"another after row {row} (oldest first) of environment {env}, which is not done"
        _check_flat(False, "next/" + name, f"the next row's '{name}'", got)
    shape = before.shape[2:]
    rows, next_rows = before.reshape(-1, *shape), after.reshape(-1, *shape)
    return compact.insert_next(rows, next_rows, ends.reshape(-1))
