"""Reads the data of plots from a state, only the leaves that are needed, and bins them.

N capacity, E environments, K the maximum of stored rows of an environment.
"""

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb.authoring import context_of, leaf_name
from jrb.buffer import ReplayBuffer, check_single
from jrb.keys import leaves_at
from jrb.samplers import Prioritized
from jrb.state import Buffer, BufferState
from jrb.types import Item


def check_state(buffer: ReplayBuffer, state: BufferState, who: str) -> None:
    """Raises unless `state` is a single state of `buffer`, outside `jit`, and not donated."""
    check_single(buffer, who)
    if isinstance(state, BufferState):
        check_concrete(state, f"{who}: state")
        lead = jnp.shape(state.edits)
        if lead:
            raise ValueError(
                f"{who}: state: expected a single state, got {' x '.join(map(str, lead))} of them "
                "under vmap. Pick one with jax.tree.map(lambda x: x[0], state)."
            )
    try:
        buffer.size(state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{who}: state: {error}") from None


def check_concrete(tree: Any, what: str) -> None:
    """Raises if an array is traced or donated; the message begins with `what`."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{what}: expected arrays with values, got traced ones. Draw the picture outside "
                "jit, of what the jitted function returns."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"{what}: expected arrays with values, got donated ones. Pass what the function "
                "returned to which they were donated."
            )


def stored_slots(buffer: ReplayBuffer, state: BufferState) -> tuple[np.ndarray, np.ndarray]:
    """Returns slots in order of time, int32 `[K, E]`, and a mask of those that hold items.

    The last row has the newest item of each environment. If the writer is not chronological, all
    items are in one column, `[K, 1]`, in the order of `ReplayBuffer.in_order`.
    """
    if not buffer.writer.is_chronological:
        slots, size = buffer.in_order(state)
        column = np.asarray(slots)[: int(size), None]
        return column, np.ones(column.shape, bool)
    # Environments may hold different numbers of rows: the mask is False before their oldest row.
    rows = int(buffer.writer.held(buffer.ring, state.writer).rows(buffer.ring).max())
    slots, stored = map(np.asarray, buffer.newest(state, max(rows, 1)))
    return slots.reshape(-1, buffer.ring.envs), stored.reshape(-1, buffer.ring.envs)


def masses_of(buffer: ReplayBuffer, state: BufferState, raw: np.ndarray) -> np.ndarray:
    """Returns the masses of priorities `[N]`, to which draws are proportional; 0 for no anchor."""
    masses = np.maximum(raw, 0).astype(np.float64)
    if isinstance(buffer.sampler, Prioritized):
        masses = (masses + buffer.sampler.eps) ** float(state.sampler.alpha)
    return np.where(raw < 0, 0.0, masses)


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by name."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def read_leaves(
    buffer: ReplayBuffer, state: BufferState, slots: np.ndarray, names: set[str]
) -> dict[str, np.ndarray]:
    """Reads the leaves with these names at slots, int32 `[...]`, and no other leaves."""
    if not names:
        return {}
    items = leaves_by_name(_read_named(buffer, state, jnp.asarray(slots), tuple(sorted(names))))
    values = {name: np.asarray(items[name]) for name in sorted(names)}
    # NumPy and matplotlib cannot compute with some of JAX's dtypes, such as bfloat16.
    return {
        name: leaf if leaf.dtype.kind in "biuf" else leaf.astype(np.float32)
        for name, leaf in values.items()
    }


@functools.partial(jax.jit, static_argnames="names")
def _read_named(
    buffer: Buffer, state: BufferState, slots: jax.Array, names: tuple[str, ...]
) -> Item:
    # Leaves with other names are read at no slot.
    where = lambda name: slots if name in names else slots[..., None][..., :0]
    return buffer.storage.read(context_of(buffer, state.writer), state.storage, where)


def read_rewards(buffer: ReplayBuffer, state: BufferState, slots: np.ndarray) -> np.ndarray | None:
    """Reads the rewards at slots `[K, E]`, real `[K, E, parts]`; None if items have none."""
    if buffer.storage.of_objects:
        return None
    spec = leaves_at(buffer.item_spec(state), buffer.keys.reward)
    names = {name for name, leaf in spec.items() if is_real(leaf.dtype) and leaf.size}
    parts = list(read_leaves(buffer, state, slots, names).values())
    if not parts:
        return None
    # Several leaves are rewards of several agents; a single leaf is not copied.
    parts = [part.reshape(*slots.shape, -1) for part in parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1, dtype=np.float32)


def is_real(dtype: Any) -> bool:
    """Returns True if a dtype is of real numbers or bool."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


# Means, bounds and histograms of parts of an array.


def edges(count: int, most: int) -> np.ndarray:
    """Returns the borders of at most `most` bins of about equal size, int `[bins + 1]`."""
    bins = max(1, min(count, most))
    return np.arange(bins + 1) * count // bins


def even_edges(count: int, most: int) -> np.ndarray:
    """Returns borders of at most `most` equal bins, int `[bins + 1]`; the last may be smaller."""
    return np.append(np.arange(0, count, -(-count // most)), count)


def block_means(values: np.ndarray, columns: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Returns the means of the finite values in blocks of a 2D array; NaN for blocks without any.

    `columns` and `lines` are the borders of the blocks.
    """
    finite = np.isfinite(values)
    # Add up columns first, then lines: sums and numbers of finite values.
    sums = np.add.reduceat(np.where(finite, values, 0), columns[:-1], 1, np.float64)
    counts = np.add.reduceat(finite, columns[:-1], 1, np.float64)
    sums, counts = (np.add.reduceat(part, lines[:-1], 0) for part in (sums, counts))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def mean_and_bounds(
    values: np.ndarray, borders: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the mean, least and greatest of the finite values in each bin of a 1D array."""
    finite = np.where(np.isfinite(values), values, np.nan)
    mean = block_means(finite[None], borders, np.arange(2))[0]
    return mean, np.fmin.reduceat(finite, borders[:-1]), np.fmax.reduceat(finite, borders[:-1])


def histogram(values: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Returns the number of values in each bin; the first and last bins are unbounded."""
    # Compare in the dtype of the values, whose greatest number a border may exceed.
    kind = values.dtype if values.dtype.kind == "f" else np.float64
    with np.errstate(over="ignore"):
        inner = borders[1:-1].astype(kind)
    place = np.searchsorted(inner, values, side="right")
    return np.bincount(place, minlength=len(borders) - 1)


def bins(values: np.ndarray, most: int = 60) -> tuple[np.ndarray, bool]:
    """Returns the borders of bins for values, and True if they are spaced logarithmically.

    That is the case if no value is negative, and the greatest exceeds 30 times the median.
    """
    low, high = float(values.min()), float(values.max())
    # Equal values are the middle one of three bins.
    if low == high:
        wide = 0.5 if low == 0 or 1 <= abs(low) < 1000 else abs(low) / 2
        return np.linspace(low - wide, high + wide, 4), False
    # Logarithmic bins cover six decades at most; the median of a part of the values is enough.
    if low >= 0:
        some = values[:: max(1, len(values) // 100_000)]
        some = some[some > 0]
        middle = float(np.median(some)) if some.size else high
        if high / middle > 30:
            least = max(float(np.min(values, where=values > 0, initial=high)), high * 1e-6)
            return np.geomspace(least, high, most + 1), True
    # Few integers have a bin each.
    if np.issubdtype(values.dtype, np.integer) and high - low < most:
        return np.arange(int(low), int(high) + 2) - 0.5, False
    return np.linspace(low, high, most + 1), False
