"""Reads the items of flashbax's states and vaults.

flashbax keeps leaves `[A, T, ...]`: A streams (its `add_batch_size`), and a ring of T time steps.
All its buffers, flat, item or trajectory, prioritised or not, have such a state.
"""

import contextlib
import io
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb.authoring import absolute_path, escape_errors, require
from jrb.interop.dump import Dump
from jrb.mix import AnyState
from jrb.types import Item

_NO_ITEM = -1.0
_NEEDED = ("experience", "current_index", "is_full")
_METADATA = "metadata.json"


@escape_errors()
def read_flashbax(
    state: AnyState,
    *,
    priority_exponent: float = 1.0,
    sequence_length: int | None = None,
    squeeze: bool = False,
) -> Dump:
    """Returns the items of a flashbax state in memory.

    flashbax's A (`add_batch_size`) is E here. The items are timesteps as they were added, since
    flashbax forms pairs and sequences only when it samples. Use `unit=jrb.Sequence(length=...)` to
    sample these.

    A priority belongs to the first step of a sequence, which is the anchor in jrb. A state has
    neither the exponent of its priorities nor the length of its sequences; give them as arguments.

    Args:
        state: the state of a trajectory, flat or item buffer, prioritised or not. It is only
            read; on the CPU backend the items are views of it.
        priority_exponent: the exponent of the prioritised buffer, by default 0.6 in flashbax. With
            1, the priorities returned are flashbax's powers, which give the same distribution with
            `jrb.Prioritized(alpha=1.0, eps=0.0)`.
        sequence_length: the length of the sequences that flashbax samples: 1 for item buffers, 2
            for flat ones. All complete sequences then have a priority, even 0, and others have
            none. If None, sequences of priority 0 count as having none.
        squeeze: True to drop the environment axis, for a buffer without `num_envs`; needs A = 1.

    Returns:
        The written rows in the order of the ring, with the structure of the experience: items
        `[T, E, ...]`, or `[T, ...]` with `squeeze`. `info` has `cursor`, `full`, `num_envs` and
        `capacity` (A times T); for a prioritised state also `priorities`, float32 `[T, E]`, -1 at
        steps where no sequence starts, `alpha`, `eps` and `max_priority`.

    Raises:
        TypeError: `state` is no such state; the message names the missing field.
        ValueError: `state` has axes of `vmap`, or an argument does not fit.

    Example:
        >>> import types, jax.numpy as jnp, jrb, jrb.checkpoint
        >>> state = types.SimpleNamespace(  # in place of a state of flashbax
        ...     experience={"x": jnp.arange(8).reshape(2, 4)}, current_index=3, is_full=False
        ... )
        >>> dump = jrb.checkpoint.read_flashbax(state)
        >>> dump.items["x"].shape
        (3, 2)
        >>> buffer = jrb.ReplayBuffer(capacity=dump.info["capacity"], num_envs=2)
        >>> int(buffer.size(dump.into(buffer)))
        6
    """
    # Check the state and the arguments.
    missing = [name for name in _NEEDED if not hasattr(state, name)]
    if missing:
        raise TypeError(
            "read_flashbax: expected the state of a flashbax trajectory, flat or item buffer, got "
            f"{type(state).__name__}, which has no {missing[0]!r}."
        )
    if jnp.ndim(state.current_index):
        raise ValueError(
            "read_flashbax: expected a single state, got states under vmap, current_index of shape "
            f"{jnp.shape(state.current_index)}. Take them one by one: "
            "jax.tree.map(lambda leaf: leaf[number], state)."
        )
    if not 0 <= priority_exponent <= 1:
        raise ValueError(
            f"priority_exponent: expected a number in [0, 1], got {priority_exponent!r}."
        )
    if sequence_length is not None and sequence_length < 1:
        raise ValueError(f"sequence_length: expected at least 1, got {sequence_length!r}.")
    # Read the written rows; those of a ring that is not full end at its cursor.
    envs, length = jax.tree.leaves(state.experience)[0].shape[:2]
    cursor, full = int(state.current_index), bool(state.is_full)
    rows = length if full else cursor
    items = jax.tree.map(lambda leaf: _move_time_first(leaf)[:rows], state.experience)
    info = {"cursor": cursor, "full": full, "num_envs": envs, "capacity": envs * length}
    if hasattr(state, "sum_tree_state"):
        info |= _read_priorities(state.sum_tree_state, info, priority_exponent, sequence_length)
    return _make_dump(items, info, squeeze)


def _read_priorities(tree: Any, info: dict[str, Any], exponent: float, sequence: int | None) -> Any:
    """Returns the priorities of the written steps in a sum-tree, for the info of a dump."""
    envs, length = info["num_envs"], info["capacity"] // info["num_envs"]
    steps = _leaves_by_step(tree, envs, length)
    # A sequence is complete if it ends by the newest step; unwritten steps count as oldest.
    whole = steps > 0
    if sequence is not None:
        age = (np.arange(length) - info["cursor"]) % length
        whole = (steps >= 0) & (age + sequence <= length)[:, None]
    # flashbax stores powers of priorities: take their roots.
    raised = np.where(whole, steps, 0.0).astype(np.float64)
    root = lambda value: value if exponent == 0 else value ** (1 / exponent)
    priorities = np.where(whole, root(raised), _NO_ITEM).astype(np.float32)
    most = root(float(tree.max_recorded_priority))
    rows = length if info["full"] else info["cursor"]
    return {"priorities": priorities[:rows], "alpha": exponent, "eps": 0.0, "max_priority": most}


def _move_time_first(leaf: Any) -> Any:
    """Returns a leaf `[A, T, ...]` as `[T, A, ...]` in NumPy; PRNG keys stay JAX arrays."""
    keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return (leaf if keys else np.asarray(leaf)).swapaxes(0, 1)


def _leaves_by_step(tree: Item, envs: int, length: int) -> np.ndarray:
    """Returns a sum-tree's leaves by step, float32 `[T, A]`; NaN where no sequence may start.

    The tree has a leaf for every `period`-th step, stream after stream.
    """
    items = tree.capacity // envs
    if not items or length % items:
        raise ValueError(
            f"read_flashbax: expected a sum-tree whose leaves lie at equal distances in {length} "
            f"steps, got {items} leaves for each of {envs} rows."
        )
    # The last level has a power of two nodes, of which the first are leaves in use.
    nodes = np.asarray(tree.nodes)
    leaves = nodes[nodes.size // 2 :][: items * envs]
    steps = np.full((length, envs), np.nan, np.float32)
    steps[:: length // items] = leaves.reshape(envs, items).T
    return steps


def _make_dump(items: Item, info: dict[str, Any], squeeze: bool) -> Dump:
    """Returns a dump; if `squeeze`, without the environment axis."""
    if not squeeze:
        return Dump(items, info)
    if (envs := info["num_envs"]) != 1:
        raise ValueError(f"squeeze: expected a single row of experience (A = 1), got A = {envs}.")
    if "priorities" in info:
        info["priorities"] = info["priorities"][:, 0]
    return Dump(jax.tree.map(lambda leaf: leaf[:, 0], items), info | {"num_envs": None})


@escape_errors()
def read_vault(
    path: str | os.PathLike[str],
    *,
    example: Item = None,
    newest: int | None = None,
    squeeze: bool = False,
) -> Dump:
    """Returns the items of a flashbax Vault, in order of time.

    A vault has no capacity and no priorities, and lacks steps that were overwritten between writes.

    Args:
        path: the vault's folder with `metadata.json`, `rel_dir/vault_name/vault_uid`.
        example: a pytree with the structure of the experience; None for nested dicts, because a
            vault does not store the structure.
        newest: the maximum number of timesteps, the newest ones; None for all.
        squeeze: True to drop the environment axis, for a buffer without `num_envs`; needs A = 1.

    Returns:
        Items `[T, E, ...]`, or `[T, ...]` with `squeeze`. `info` has `cursor`, `full`, `num_envs`
        and `capacity`, which is the number of these items.

    Raises:
        FileNotFoundError: the path is not a vault.
        ModuleNotFoundError: flashbax or tensorstore is not installed.
    """
    library, path = require("flashbax.vault", "flashbax"), absolute_path(path)
    if not os.path.isfile(os.path.join(path, _METADATA)):
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        raise FileNotFoundError(
            f"{path}: expected a vault, a folder with {_METADATA}, found {names[:5] or 'nothing'}."
        )
    # Open the vault by the parts of its path, and hide what flashbax prints meanwhile.
    parent, uid = os.path.split(path)
    folder, name = os.path.split(parent)
    with contextlib.redirect_stdout(io.StringIO()):
        vault = library.Vault(name, example, rel_dir=folder, vault_uid=uid)
    # A vault is no ring: its rows are in order of time.
    rows = vault.vault_index if newest is None else min(newest, vault.vault_index)
    items = jax.tree.map(_move_time_first, vault.read(timesteps=rows).experience)
    envs = jax.tree.leaves(items)[0].shape[1]
    info = {"cursor": rows, "full": False, "num_envs": envs, "capacity": rows * envs}
    return _make_dump(items, info, squeeze)
