"""Items of a buffer of several environments, under their owner's names, as episodes in TED.

R rows of time, E environments, K episodes, T steps of all of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jrb.datasets.reading.columns import DONE, TERMINATED, TRUNCATED, Column, Table, combined_flags
from jrb.datasets.reading.mapping import ted_names
from jrb.keys import Keys, path_name, within


def episode_order(
    rows: np.ndarray, is_end: np.ndarray, has_lost: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Returns the order of rows, the ends of episodes, and facts about them.

    Episodes are in the order in which they began, and then of environments.

    Args:
        rows: int `[R, E]`, positions of the rows, oldest first.
        is_end: bool `[R, E]`, which of them end an episode.
        has_lost: bool `[E]`, whether rows older than these may be lost.

    Returns:
        int64 `[T]`, int64 `[K]`, and arrays `[K]`: `environment`, `complete`, `running`, `cut`, as
        those of `jrb.read.Episode`.
    """
    count, envs = rows.shape
    ranges = []
    for env in range(envs):
        stops = np.unique(np.append(np.flatnonzero(is_end[:, env]) + 1, count)) if count else []
        starts = [0, *stops[:-1]]
        ranges += [(int(a), env, int(b)) for a, b in zip(starts, stops, strict=False)]
    ranges.sort()
    order = [rows[start:stop, env] for start, env, stop in ranges]
    running = np.array([not is_end[stop - 1, env] for _, env, stop in ranges], bool)
    cut = np.array([start == 0 and bool(has_lost[env]) for start, env, _ in ranges], bool)
    facts = {
        "environment": np.array([env for _, env, _ in ranges], np.int64),
        "complete": ~running & ~cut,
        "running": running,
        "cut": cut,
    }
    ends = np.cumsum([len(part) for part in order], dtype=np.int64)
    return np.concatenate([np.zeros(0, np.int64), *order]).astype(np.int64), ends, facts


def table_in_ted(
    source: Any,
    columns: Mapping[str, Column],
    keys: Keys,
    ends: np.ndarray,
    facts: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
) -> Table:
    """Returns the table of columns that have the names of a buffer's leaves.

    Raises:
        ValueError: no reward, or two leaves of one name.
    """
    names = leaves_in_ted(source, columns, keys)
    steps: dict[str, Column] = {names[name]: column for name, column in columns.items()}
    flags = {
        name: is_set(steps[name][:]) for name in (DONE, TERMINATED, TRUNCATED) if name in steps
    }
    count = int(ends[-1]) if len(ends) else 0
    terminated, truncated = combined_flags(count, *map(flags.get, (DONE, TERMINATED, TRUNCATED)))
    steps.pop(DONE, None)
    steps |= {TERMINATED: terminated, TRUNCATED: truncated}
    return Table(steps, ends, facts, metadata, flag_notes(flags))


def flag_notes(flags: Iterable[str]) -> tuple[str, ...]:
    """Returns the note on flags of ends, by the names of those that are stored."""
    note = "Only done flags are stored: what is done counts as terminated."
    return (note,) * ({*flags} & {DONE, TERMINATED, TRUNCATED} == {DONE})


def leaves_in_ted(source: Any, names: Iterable[str], keys: Keys) -> dict[str, str]:
    """Returns TED's names of the leaves of a buffer; those without a role keep theirs.

    Raises:
        ValueError: no reward, or two leaves of one name.
    """
    names = list(names)
    if not any(within(name, path_name(keys.reward)) for name in names):
        raise ValueError(
            f"{source}: reward: expected a leaf at '{path_name(keys.reward)}', got items with the "
            f"leaves {names}. Name the right one with keys=jrb.Keys(reward=...)."
        )
    leaves = ted_names(names, keys)
    every = list(leaves.values())
    for name, leaf in leaves.items():
        parts = leaf.split("/")
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if every.count(leaf) > 1 or above & set(every):
            raise ValueError(
                f"{source}: leaf '{name}': expected a place of its own in TED, got '{leaf}', where "
                f"another lies, of {names}. Name what they are with keys=jrb.Keys(...)."
            )
    return leaves


def is_set(flags: np.ndarray) -> np.ndarray:
    """Returns flags of any dtype, `[T]` or `[T, 1]`, as bool `[T]`."""
    return (flags != 0).reshape(len(flags))
