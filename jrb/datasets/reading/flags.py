"""Where episodes end, by the columns that steps have.

K episodes, T steps over all of them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jrb.datasets.reading.derived import Flag
from jrb.datasets.reading.flat import Column, Table, ends_of
from jrb.datasets.reading.stat_cache import Remembered, stamps

_TERMINATED, _TRUNCATED, _DONE = "next/terminated", "next/truncated", "next/done"
_EPISODE = "episode"
_TEXTS = (
    "Texts tell episodes apart: the leaf 'episode' has numbers in the order of appearance, "
    "facts['episode'] has the texts."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Flags:
    """Where episodes end. The arrays may be those of other tables too: they are only read.

    Attributes:
        terminated: bool `[T]`.
        truncated: bool `[T]`.
        ends: int64 `[K]`, as in `flat.Table`.
        facts: the numbers of episodes, where there are some.
        notes: as in `Description`.
        codes: int64 `[T]`, numbers in place of texts that tell episodes apart; None without texts.
    """

    terminated: np.ndarray
    truncated: np.ndarray
    ends: np.ndarray
    facts: dict[str, np.ndarray]
    notes: tuple[str, ...]
    codes: np.ndarray | None = None

    def table(
        self,
        columns: Mapping[str, Column],
        notes: tuple[str, ...] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> Table:
        """The columns with these flags in place of their own."""
        found = {name: column for name, column in columns.items() if name != _DONE}
        found |= {_TERMINATED: self.terminated, _TRUNCATED: self.truncated}
        found |= {} if self.codes is None else {_EPISODE: self.codes}
        return Table(found, self.ends, self.facts, metadata or {}, (*self.notes, *notes))


def remembered_flags(
    files: Iterable[str], told: Mapping[str, Any], read: Callable[[], Flags]
) -> Flags:
    """Where episodes end, read once as long as files are as they were.

    Args:
        files: where the columns lie.
        told: what they are taken for: the leaves that their names stand for, or options.
        read: reads all flags there are.
    """
    return _known.get((stamps(files), tuple(sorted(told.items()))), read)


_known: Remembered[Flags] = Remembered()


def read_flags(columns: Mapping[str, Column], source: Any) -> Flags:
    """Where episodes end, by the leaves of TED that there are.

    By `next/terminated`, `next/truncated`, `next/done`, and before a step that has another number
    in `episode` than the one before it. Done without terminated is taken for that.

    Raises:
        ValueError: there is none of them, flags are not 0 and 1, or steps of an episode lie apart.
    """
    names = [name for name in (_TERMINATED, _TRUNCATED, _DONE) if name in columns]
    given = {name: Flag(columns[name], name, source)[:] for name in names}
    if not given and _EPISODE not in columns:
        raise ValueError(
            f"{source}: expected something that tells where episodes end (done, terminated, "
            f"truncated or episode), got {sorted(columns)}. Name it with mapping=."
        )
    steps = len(next(iter(columns.values())))
    order = (_DONE, _TERMINATED, _TRUNCATED)
    terminated, truncated = both(steps, *(given.get(name) for name in order))
    numbers = _numbers(columns, source)
    ends = ends_of(terminated | truncated | _changes(numbers, steps))
    facts = {} if numbers is None else {_EPISODE: numbers[ends - 1]}
    notes = _notes(given)
    if numbers is None or numbers.dtype.kind in "biufc":
        return Flags(terminated, truncated, ends, facts, notes)
    # The steps of an episode lie side by side, so that texts change where episodes do.
    changes = _changes(numbers, steps)
    codes = np.cumsum(changes, dtype=np.int64) - changes
    return Flags(terminated, truncated, ends, facts, (*notes, _TEXTS), codes)


def both(
    steps: int,
    done: np.ndarray | None,
    terminated: np.ndarray | None,
    truncated: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Terminated and truncated, bool `[T]` each, by the flags that there are.

    Done without terminated is taken for that, unless it is truncated; with it, and without
    truncated, for the latter.
    """
    done = np.zeros(steps, bool) if done is None else done
    truncated = np.zeros(steps, bool) if truncated is None else truncated
    terminated = done & ~truncated if terminated is None else terminated
    return terminated, truncated | (done & ~terminated)


def _notes(given: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    if not given:
        return ("No flags tell how episodes ended: all are taken for truncated.",)
    if _DONE in given and _TERMINATED not in given:
        other = ", unless they are truncated" if _TRUNCATED in given else ""
        return (f"Steps that are done are taken for terminated{other}.",)
    return ()


def _numbers(columns: Mapping[str, Column], source: object) -> np.ndarray | None:
    """The number of each step's episode."""
    if _EPISODE not in columns:
        return None
    found = columns[_EPISODE][:]
    if found.size != len(found):
        raise ValueError(
            f"{source}: 'episode': expected a number for each step, got {list(found.shape)}."
        )
    found = found.reshape(-1)
    runs = found[_changes(found, len(found))]
    kinds, counts = np.unique(runs, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"{source}: 'episode': expected the steps of an episode side by side, got those of "
            f"{kinds[counts > 1][:5].tolist()} apart. Sort the rows by episode and time."
        )
    return found


def _changes(numbers: np.ndarray | None, steps: int) -> np.ndarray:
    """Bool `[T]`: the last steps of stretches of one number."""
    found = np.zeros(steps, bool)
    if numbers is not None:
        found[:-1] = numbers[1:] != numbers[:-1]
        found[-1:] = True
    return found
