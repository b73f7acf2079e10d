"""Items of flashbax, by the row.

flashbax keeps leaves `[A, T, ...]`: A rows that are added together, T places in time, a ring along
the time axis. Its flat, item and trajectory buffers, prioritised or not, all have this state.
"""

import contextlib
import io
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb.authoring import absolute_path, escaped_errors, require
from jrb.interop.dump import Dump
from jrb.mix import AnyState
from jrb.types import Item

_NO_ITEM = -1.0
_NEEDED = ("experience", "current_index", "is_full")
_METADATA = "metadata.json"


@escaped_errors()
def read_flashbax(
    state: AnyState,
    *,
    priority_exponent: float = 1.0,
    sequence_length: int | None = None,
    squeeze: bool = False,
) -> Dump:
    """Returns the items of a live flashbax state.

    flashbax's A (`add_batch_size`) is E here. The items are timesteps, as they were added:
    flashbax makes pairs and sequences when it samples. To sample these, use
    `unit=jrb.Sequence(length=...)`.

    A priority belongs to the step at which a sequence starts, which is the anchor here. A state
    contains neither the exponent of its priorities nor the length of its sequences.

    Args:
        state: of a trajectory, flat or item buffer, or of one of their prioritised twins. It is
            only read; where JAX computes on the host, the items are views of it.
        priority_exponent: the one that the prioritised buffer was made with, 0.6 by default there.
            With 1 the priorities are those of flashbax already raised to it, which draw the same
            with `jrb.Prioritized(alpha=1.0, eps=0.0)`.
        sequence_length: what flashbax samples: 1 of an item buffer, 2 of a flat one. Then every
            whole sequence has its priority, also one of 0, and a broken one has none. Without it,
            sequences are those of positive priority.
        squeeze: without the environment axis, for a buffer without `num_envs`; needs A = 1.

    Returns:
        Items `[T, E, ...]`, or `[T, ...]` with `squeeze`, with the structure of the experience: the
        rows that were written, in the order of the ring. The info has `cursor`, `full`,
        `num_envs` and `capacity` (A times T); for a prioritised state also `priorities`, float32
        `[T, E]`, -1 where no sequence starts, and `alpha`, `eps` and `max_priority`.

    Raises:
        TypeError: it is no such state; the message names what it lacks.
        ValueError: states under `vmap`, or an argument that does not fit.

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
    envs, length = jax.tree.leaves(state.experience)[0].shape[:2]
    cursor, full = int(state.current_index), bool(state.is_full)
    rows = length if full else cursor
    items = jax.tree.map(lambda leaf: _time_first(leaf)[:rows], state.experience)
    info = {"cursor": cursor, "full": full, "num_envs": envs, "capacity": envs * length}
    if hasattr(state, "sum_tree_state"):
        info |= _priorities(state.sum_tree_state, info, priority_exponent, sequence_length)
    return _squeezed(Dump(items, info)) if squeeze else Dump(items, info)


def _priorities(tree: Any, info: dict[str, Any], exponent: float, sequence: int | None) -> Any:
    """Returns what a sum-tree says of the steps that were written; see `read_flashbax`."""
    envs, length = info["num_envs"], info["capacity"] // info["num_envs"]
    steps = _by_step(tree, envs, length)
    # A sequence is whole if nothing of it was overwritten; what was never written is oldest.
    whole = steps > 0
    if sequence is not None:
        age = (np.arange(length) - info["cursor"]) % length
        whole = (steps >= 0) & (age + sequence <= length)[:, None]
    raised = np.where(whole, steps, 0.0).astype(np.float64)
    root = lambda value: value if exponent == 0 else value ** (1 / exponent)
    priorities = np.where(whole, root(raised), _NO_ITEM).astype(np.float32)
    most = root(float(tree.max_recorded_priority))
    rows = length if info["full"] else info["cursor"]
    return {"priorities": priorities[:rows], "alpha": exponent, "eps": 0.0, "max_priority": most}


def _time_first(leaf: Any) -> Any:
    """Returns a leaf `[A, T, ...]` as `[T, A, ...]`, on the host; keys stay where they are."""
    keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return (leaf if keys else np.asarray(leaf)).swapaxes(0, 1)


def _by_step(tree: Item, envs: int, length: int) -> np.ndarray:
    """Returns the leaves of a sum-tree, float32 `[T, A]`; NaN at steps where no sequence can start.

    There is a leaf for every `period` steps of time, all those of a row beside each other.
    """
    items = tree.capacity // envs
    if not items or length % items:
        raise ValueError(
            f"read_flashbax: expected a sum-tree whose leaves lie at equal distances in {length} "
            f"steps, got {items} leaves for each of {envs} rows."
        )
    nodes = np.asarray(tree.nodes)
    leaves = nodes[nodes.size // 2 :][: items * envs]  # the last level, of a power of two
    steps = np.full((length, envs), np.nan, np.float32)
    steps[:: length // items] = leaves.reshape(envs, items).T
    return steps


def _squeezed(dump: Dump) -> Dump:
    """Returns a dump without the environment axis."""
    envs, info = dump.info["num_envs"], dict(dump.info, num_envs=None)
    if envs != 1:
        raise ValueError(f"squeeze: expected a single row of experience (A = 1), got A = {envs}.")
    if "priorities" in info:
        info["priorities"] = info["priorities"][:, 0]
    return Dump(jax.tree.map(lambda leaf: leaf[:, 0], dump.items), info)


@escaped_errors()
def read_vault(
    path: str | os.PathLike[str],
    *,
    example: Item = None,
    newest: int | None = None,
    squeeze: bool = False,
) -> Dump:
    """Returns the items of a flashbax Vault, in order of time.

    A vault has neither capacity nor priorities, and lacks whatever its writer missed.

    Args:
        path: of the vault's folder with `metadata.json`, `rel_dir/vault_name/vault_uid`.
        example: a pytree of the structure that the experience had; None for nested dicts, which
            is all that a vault remembers.
        newest: how many timesteps at most, the newest ones; None for all.
        squeeze: without the environment axis, for a buffer without `num_envs`; needs A = 1.

    Returns:
        Items `[T, E, ...]`, or `[T, ...]` with `squeeze`, and an info with `cursor`, `full`,
        `num_envs` and `capacity`, which is just enough for these.

    Raises:
        FileNotFoundError: there is no vault.
        ModuleNotFoundError: flashbax or tensorstore is not installed.
    """
    library, path = require("flashbax.vault", "flashbax"), absolute_path(path)
    if not os.path.isfile(os.path.join(path, _METADATA)):
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        raise FileNotFoundError(
            f"{path}: expected a vault, a folder with {_METADATA}, found {names[:5] or 'nothing'}."
        )
    parent, uid = os.path.split(path)
    folder, name = os.path.split(parent)
    with contextlib.redirect_stdout(io.StringIO()):  # flashbax prints
        vault = library.Vault(name, example, rel_dir=folder, vault_uid=uid)
    rows = vault.vault_index if newest is None else min(newest, vault.vault_index)
    items = jax.tree.map(_time_first, vault.read(timesteps=rows).experience)
    envs = jax.tree.leaves(items)[0].shape[1]
    info = {"cursor": rows, "full": False, "num_envs": envs, "capacity": rows * envs}
    return _squeezed(Dump(items, info)) if squeeze else Dump(items, info)
