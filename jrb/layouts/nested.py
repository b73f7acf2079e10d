"""The nested layout, which has the length of each trajectory, and separate trajectories."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util.pytree import PyTree
from jrb.keys import TED, Keys
from jrb.layouts.flat import from_flat, to_flat
from jrb.layouts.names import Leaves, flatten, nest

_LENGTHS, _ENVIRONMENTS = "lengths", "environments"
_LENGTH, _ENVIRONMENT = "length", "environment"


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
