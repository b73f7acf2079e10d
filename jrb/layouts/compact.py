"""The flat layout, which stores every observation once, and the nested one, which has lengths.

Both are the same arrays: the flat layout marks the ends of trajectories, the nested one has the
length of each, and separate trajectories have an entry each.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import casting
from jrb._util.pytree import Leaf, PyTree
from jrb.keys import TED, Keys, path_name
from jrb.layouts.names import Leaves, flatten, nest

_ENDS = "ends"
_LENGTHS, _ENVIRONMENTS = "lengths", "environments"
_LENGTH, _ENVIRONMENT = "length", "environment"
_ROWS = 1024
"""The number of rows that `differ` compares at once."""


def ted_to_flat(
    items: PyTree, keys: Keys = TED, num_envs: int | None = None, cuts: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns transitions in the flat layout, which has observation and next observation as one.

    Args:
        items: a nested dict of NumPy or JAX arrays, `[T, ...]`, or `[T, E, ...]` with `num_envs`.
        keys: the paths of a transition's parts in an item.
        num_envs: the number of environments E; None for no such axis.
        cuts: rows that the next row does not continue, although no flag says so; for example the
            newest row of a ring in the order of its slots.

    Returns:
        A dict with the same names. Rows are sorted by environment, then time; N = T * E. Leaves are
        `[N, ...]`. Leaves of the observation are `[N + K, ...]`: the observations of each of the K
        trajectories, then its last next observation; their next leaves are dropped. `ends`, bool
        `[T]` or `[E, T]`, marks the last rows of trajectories. If most next observations differ
        from the next row's observation, as for n-step returns, both leaves are kept as `[N, ...]`.

    Raises:
        TypeError: `items` is not a dict, or a leaf is no array.
        ValueError: leaves differ in T or E, or one is named `ends`.
    """
    leaves, links = to_flat(flatten(items, "ted_to_flat"), keys, num_envs, cuts)
    if _ENDS in leaves:
        raise ValueError("ted_to_flat: leaf 'ends': the layout uses that name. Rename yours.")
    ends = links.ends if num_envs is not None else links.ends[0]
    return nest({**leaves, _ENDS: ends})


def flat_to_ted(flat: Any, keys: Keys = TED) -> dict[str, Any]:
    """Returns the transitions of a flat layout; the inverse of `ted_to_flat`."""
    leaves = flatten(flat, "flat_to_ted")
    if _ENDS not in leaves:
        raise ValueError(
            f"flat_to_ted: expected a leaf 'ends', got {list(leaves)}. ted_to_flat makes it."
        )
    ends = np.asarray(leaves.pop(_ENDS))
    return nest(from_flat(leaves, ends, keys))


def ted_to_nested(
    items: PyTree, keys: Keys = TED, num_envs: int | None = None, cuts: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns transitions in the nested layout: the flat one, with lengths instead of ends.

    Args:
        items: as in `ted_to_flat`.
        keys: the paths of a transition's parts in an item.
        num_envs: the number of environments E; None for no such axis.
        cuts: as in `ted_to_flat`.

    Returns:
        The arrays of `ted_to_flat`, and `lengths`, int64 `[K]`, the number of rows of each
        trajectory (leaves of a shared observation have one row more). With `num_envs` also
        `environments`, int64 `[K]`, the environment of each trajectory.

    Raises:
        TypeError: `items` is not a dict, or a leaf is no array.
        ValueError: leaves differ in T or E, or one is named `lengths` or `environments`.
    """
    leaves, links = to_flat(flatten(items, "ted_to_nested"), keys, num_envs, cuts)
    _check_free(leaves, (_LENGTHS, _ENVIRONMENTS))
    if not links.ends.size:
        raise ValueError("ted_to_nested: expected at least one row of time, got none.")
    # Trajectories are sorted by environment, then time: each begins where the one before it ends.
    environments, last = np.nonzero(links.ends)
    where = environments * links.ends.shape[1] + last
    nested = {**leaves, _LENGTHS: np.diff(where, prepend=-1)}
    if num_envs is not None:
        nested[_ENVIRONMENTS] = environments
    return nest(nested)


def nested_to_ted(nested: Any, keys: Keys = TED) -> dict[str, Any]:
    """Returns the transitions of a nested layout; the inverse of `ted_to_nested`."""
    leaves = flatten(nested, "nested_to_ted")
    if _LENGTHS not in leaves:
        raise ValueError(
            f"nested_to_ted: expected a leaf 'lengths', got {list(leaves)}. ted_to_nested makes it."
        )
    lengths, environments = np.asarray(leaves.pop(_LENGTHS)), leaves.pop(_ENVIRONMENTS, None)
    return nest(from_flat(leaves, _ends_of_lengths(lengths, environments), keys))


def split(
    items: PyTree, keys: Keys = TED, num_envs: int | None = None, cuts: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Returns a dict for each trajectory, sorted by environment, then time.

    Args:
        items: as in `ted_to_flat`.
        keys: the paths of a transition's parts in an item.
        num_envs: the number of environments E; None for no such axis.
        cuts: as in `ted_to_flat`.

    Returns:
        A list of dicts with leaves `[L, ...]`, or `[L + 1, ...]` of a shared observation; and
        `length`, int64 `[]`, the number of rows L. With `num_envs` also `environment`, int64 `[]`.
    """
    leaves, links = to_flat(flatten(items, "split"), keys, num_envs, cuts)
    _check_free(leaves, (_LENGTH, _ENVIRONMENT))
    trajectories = []
    for environment, length, rows in iter_trajectories(leaves, links.ends):
        rows[_LENGTH] = np.asarray(length, np.int64)
        if num_envs is not None:
            rows[_ENVIRONMENT] = np.asarray(environment, np.int64)
        trajectories.append(nest(rows))
    return trajectories


def combine(trajectories: Iterable[Any], keys: Keys = TED) -> dict[str, Any]:
    """Returns the transitions of separate trajectories; the inverse of `split`."""
    parts = [flatten(trajectory, "combine") for trajectory in trajectories]
    if not parts:
        raise ValueError("combine: expected at least one trajectory, got none.")
    for number, part in enumerate(parts):
        if part.keys() != parts[0].keys() or _LENGTH not in part:
            raise ValueError(
                f"combine: trajectory {number}: expected 'length' and the leaves of the others, "
                f"{list(parts[0])}, got {list(part)}. split makes them."
            )
    # Concatenate the trajectories, and derive the ends from their lengths.
    lengths = np.asarray([int(part.pop(_LENGTH)) for part in parts])
    environments = None
    if _ENVIRONMENT in parts[0]:
        environments = np.asarray([int(part.pop(_ENVIRONMENT)) for part in parts])
    leaves = {}
    for name in parts[0]:
        rows = [part[name] for part in parts]
        join = jnp.concatenate if isinstance(rows[0], jax.Array) else np.concatenate
        leaves[name] = join(rows)
    return nest(from_flat(leaves, _ends_of_lengths(lengths, environments), keys))


def iter_trajectories(leaves: Leaves, ends: np.ndarray) -> Iterator[tuple[int, int, Leaves]]:
    """Yields environment, length and leaves of each trajectory of a flat layout."""
    environments, last = np.nonzero(ends)
    stops = environments * ends.shape[1] + last + 1
    starts = np.concatenate([[0], stops[:-1]])
    for number, (environment, start, stop) in enumerate(
        zip(environments, starts, stops, strict=True)
    ):
        rows = {}
        for name, leaf in leaves.items():
            # A shared observation has one row more in this and each earlier trajectory.
            more = len(leaf) != ends.size
            rows[name] = leaf[start + more * number : stop + more * (number + 1)]
        yield int(environment), int(stop - start), rows


def _ends_of_lengths(lengths: np.ndarray, environments: Any) -> np.ndarray:
    """Returns bool `[T]` or `[E, T]`, True for the last row of each trajectory."""
    ends = np.zeros(lengths.sum(), bool)
    ends[np.cumsum(lengths) - 1] = True
    if environments is None:
        return ends
    # Environments must have equally many rows, so that their ends form an array.
    count = int(np.max(np.asarray(environments), initial=0)) + 1
    rows = np.bincount(np.asarray(environments), weights=lengths, minlength=count)
    if (rows != rows[0]).any() or (np.diff(environments) < 0).any():
        raise ValueError(
            f"environments: expected equally many rows of each, one after the other, got "
            f"{rows.astype(int).tolist()} rows."
        )
    return ends.reshape(count, -1)


def _check_free(leaves: Leaves, names: tuple[str, ...]) -> None:
    for name in names:
        if name in leaves:
            raise ValueError(f"leaf '{name}': the layout uses that name. Rename yours.")


# The flat layout of arrays by name.


@dataclasses.dataclass(frozen=True)
class Chain:
    """The ends of trajectories, and the leaves that need not be stored.

    Attributes:
        ends: bool `[E, T]`, True for the last row of a trajectory.
        shared: a dict from leaves of the next observation to the leaves of the observation whose
            following row they repeat, except at ends.
    """

    ends: np.ndarray
    shared: dict[str, str]


def chain(leaves: Leaves, keys: Keys, cuts: np.ndarray) -> Chain:
    """Returns the ends of trajectories, and the leaves of next observations that can be shared.

    A trajectory ends at flags (done, terminated or truncated), at the environment's last row, at
    cuts, and where a next observation differs from the next row's observation. A leaf that differs
    in most rows, as for n-step returns, is not shared, and marks no ends.

    Args:
        leaves: arrays `[E, T, ...]` by name.
        keys: the paths of a transition's parts in an item.
        cuts: bool `[E, T]`, True for further last rows.
    """
    # Mark the ends that are known without the observations.
    ends = cuts.copy()
    ends[:, -1:] = True
    for flag in (keys.done, keys.terminated, keys.truncated):
        if path_name(flag) in leaves:
            array = np.asarray(leaves[path_name(flag)])
            ends |= array.astype(bool).any(axis=tuple(range(2, array.ndim)))
    # Share leaves of next observations that mostly repeat; where they do not, trajectories end.
    flagged, shared = ends.copy(), {}
    kind = lambda name: (leaves[name].shape, leaves[name].dtype)
    for name in leaves:
        twin = keys.twin(name)
        if twin is None or twin not in leaves or kind(name) != kind(twin):
            continue
        breaks = differ(leaves[twin], leaves[name]) & ~flagged
        if 2 * breaks.sum() <= (~flagged).sum() and ends.size:
            shared[name] = twin
            ends |= breaks
    return Chain(ends=ends, shared=shared)


def differ(before: Any, after: Any) -> np.ndarray:
    """Returns bool `[E, T]`, True if a next observation is not the next row's observation.

    Arrays are compared bit by bit. The last row is False.

    Args:
        before: the observations, `[E, T, ...]`.
        after: the next observations, `[E, T, ...]`.
    """
    envs, length = before.shape[:2]
    is_other = np.zeros((envs, length), bool)

    def row_bytes(leaf: Leaf) -> np.ndarray:
        array = np.ascontiguousarray(casting.raw(leaf))
        width = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        rows = array.view(np.uint8) if width else np.zeros(0, np.uint8)
        return rows.reshape(len(array), width)

    # A comparison takes as much memory as the rows that it compares: take some at a time.
    for env in range(envs):
        for start in range(0, length - 1, _ROWS):
            stop = min(start + _ROWS, length - 1)
            rows = row_bytes(after[env, start:stop]) != row_bytes(before[env, start + 1 : stop + 1])
            is_other[env, start:stop] = rows.any(axis=1)
    return is_other


def _move_envs_first(leaves: Leaves, num_envs: int | None) -> Leaves:
    """Returns the leaves as `[E, T, ...]`; raises if they differ in E or T."""
    if not leaves:
        raise ValueError("expected at least one leaf, got an empty dict.")
    axes, by_env = 1 if num_envs is None else 2, {}
    for name, leaf in leaves.items():
        if len(leaf.shape) < axes or (num_envs is not None and leaf.shape[1] != num_envs):
            shape = "[T, ...]" if num_envs is None else f"[T, {num_envs}, ...]"
            raise ValueError(
                f"leaf '{name}': expected shape {shape}, got {tuple(leaf.shape)}. Time comes "
                "first, then the environments, whose number num_envs says."
            )
        by_env[name] = leaf[None] if num_envs is None else leaf.swapaxes(0, 1)
    first = next(iter(by_env))
    shape = by_env[first].shape[:2]
    for name, leaf in by_env.items():
        if leaf.shape[:2] != shape:
            raise ValueError(
                f"leaf '{name}': expected {shape[1]} rows of time as in '{first}', got "
                f"{leaf.shape[1]}."
            )
    return by_env


def to_flat(
    leaves: Leaves, keys: Keys, num_envs: int | None, cuts: Sequence[int]
) -> tuple[Leaves, Chain]:
    """Returns the flat layout of arrays by name, and the ends and shared leaves."""
    by_env = _move_envs_first(leaves, num_envs)
    shape = next(iter(by_env.values())).shape[:2]
    is_cut = np.zeros(shape, bool)
    for row in cuts:
        if not 0 <= row < shape[1]:
            raise ValueError(f"cuts: expected rows in [0, {shape[1]}), got {row}.")
        is_cut[:, row] = True
    links = chain(by_env, keys, is_cut)
    # Lay the environments end to end; a shared leaf is stored with the leaf whose rows it repeats.
    join = lambda leaf: leaf.reshape(links.ends.size, *leaf.shape[2:])
    ends, flat = links.ends.reshape(-1), {}
    for name, leaf in by_env.items():
        if name in links.shared:
            continue
        flat[name] = leaf = join(leaf)
        after = [other for other, twin in links.shared.items() if twin == name]
        if not after:
            continue
        flat[name] = insert_next(leaf, join(by_env[after[0]]), ends)
    return flat, links


def insert_next(leaf: Leaf, next_leaf: Leaf, ends: np.ndarray) -> Any:
    """Returns `[N + K, ...]`: each row's observation, and after each end the next observation."""
    last, place = np.flatnonzero(ends), places(ends)
    rows = len(ends) + len(last)
    if isinstance(leaf, jax.Array):
        index = np.empty(rows, np.int64)
        index[place] = np.arange(len(ends))
        index[place[last] + 1] = len(ends) + np.arange(len(last))
        return jnp.concatenate([leaf, next_leaf[last]])[index]
    observations = np.empty((rows, *leaf.shape[1:]), leaf.dtype)
    observations[place], observations[place[last] + 1] = leaf, next_leaf[last]
    return observations


def from_flat(leaves: Leaves, ends: np.ndarray, keys: Keys) -> Leaves:
    """Returns transitions by name, given flat arrays and `ends`, bool `[T]` or `[E, T]`."""
    place = places(ends.reshape(-1))
    after, before = path_name(keys.next_observation), path_name(keys.observation)

    def by_time(leaf: Leaf) -> Any:
        """Reshapes a leaf `[N, ...]` to `[T, ...]` or `[T, E, ...]`."""
        if ends.ndim == 1:
            return leaf
        return leaf.reshape(*ends.shape, *leaf.shape[1:]).swapaxes(0, 1)

    out: Leaves = {}
    for name, leaf in leaves.items():
        # A leaf with a row more for each end is an observation that also has the next one.
        next_name = after + name[len(before) :]
        if len(leaf) == ends.size:
            out[name] = by_time(leaf)
        elif len(leaf) == ends.size + ends.sum() and keys.twin(next_name) == name:
            out[name], out[next_name] = by_time(leaf[place]), by_time(leaf[place + 1])
        else:
            raise ValueError(
                f"leaf '{name}': expected {ends.size} rows, one for each entry of 'ends', or for "
                f"an observation {ends.size + ends.sum()}, got {len(leaf)}."
            )
    return out


def places(ends: np.ndarray) -> np.ndarray:
    """Returns the index of each row's observation among the N + K of a flat leaf, int `[N]`."""
    return np.arange(ends.size) + np.cumsum(ends) - ends
