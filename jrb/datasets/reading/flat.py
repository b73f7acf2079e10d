"""Layouts that keep all steps of all episodes one after the other: what they have in common.

K episodes, T steps over all of them.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jrb.datasets.format import Description, Episode, Indexed, Source, spec_of
from jrb.layouts.names import nest

_BLOCK = 8 << 20  # bytes
_SEEN, _AFTER = "observation", "next/observation"


class Column(Protocol):
    """One leaf of all steps: an array, or something on the disk that is read by slices."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        ...

    @property
    def dtype(self) -> Any:
        """NumPy's."""
        ...

    def __len__(self) -> int:
        """T."""
        ...

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """These rows `[rows, ...]`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What such files hold.

    Attributes:
        columns: by the name of the leaf in TED (`observation/image`, `next/reward`), each
            `[T, ...]`. Without `next/observation`, that is the observation of the next step.
        ends: int64 `[K]`, the number of steps up to the end of each episode.
        facts: as in `Description`.
        metadata: as in `Description`.
        notes: as in `Description`.
    """

    columns: Mapping[str, Column]
    ends: np.ndarray
    facts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def starts(self) -> np.ndarray:
        """int64 `[K]`, the number of steps before each episode."""
        return self.ends - np.diff(self.ends, prepend=0)

    @property
    def has_next(self) -> bool:
        """Whether the next observations are there."""
        return any(name.split("/")[:2] == ["next", "observation"] for name in self.columns)

    @property
    def spec(self) -> Any:
        """Of one step, in TED."""
        leaves = dict(self.columns)
        if not self.has_next:
            leaves |= {"next/" + name: self.columns[name] for name in self._seen}
        return spec_of(nest(leaves))

    @property
    def terminated(self) -> np.ndarray:
        """Bool `[K]`: whether the last step of each episode says so."""
        flags = self.columns["next/terminated"][:]
        found = np.zeros(len(self.ends), bool)
        is_there = self.ends > self.starts
        found[is_there] = flags[self.ends[is_there] - 1]
        return found

    @property
    def _seen(self) -> list[str]:
        return [name for name in self.columns if name.split("/")[0] == _SEEN]

    def bounds(self, number: int) -> tuple[int, int]:
        """Where an episode begins and ends."""
        return int(self.ends[number - 1]) if number else 0, int(self.ends[number])

    def rows(self, start: int, stop: int) -> Episode:
        """The steps from `start` to `stop`, in TED."""
        reach = min(stop + 1, int(self.ends[-1]))
        leaves: dict[str, np.ndarray] = {}
        for name, column in self.columns.items():
            if name.split("/")[0] != _SEEN or self.has_next:
                found = column[start:stop]
                leaves[name] = found.copy() if isinstance(column, np.ndarray) else found
                continue
            seen = column[start:reach]
            leaves[name], leaves["next/" + name] = (
                seen[: stop - start],
                self._after(seen, start, stop),
            )
        return nest(leaves)

    def _after(self, seen: np.ndarray, start: int, stop: int) -> np.ndarray:
        """The observations after these steps; zeros after the last step of an episode."""
        after = np.zeros((stop - start, *seen.shape[1:]), seen.dtype)
        after[: len(seen) - 1] = seen[1:]
        first, last = np.searchsorted(self.ends, [start + 1, stop + 1])
        after[self.ends[first:last] - 1 - start] = 0
        return after


class Flat(Indexed):
    """A format whose files are a `Table`."""

    @abc.abstractmethod
    def table(self, source: Source) -> contextlib.AbstractContextManager[Table]:
        """What the files hold, while they are open."""

    def describe(self, source: Source) -> Description:
        """What there is, from the shapes and the ends of episodes."""
        with self.table(source) as table:
            lengths = np.diff(table.ends, prepend=0).astype(np.int64)
            cut = None if table.has_next else ~self._terminated(table)
            return Description(table.spec, lengths, cut, table.facts, table.metadata, table.notes)

    def _terminated(self, table: Table) -> np.ndarray:
        """Bool `[K]`: whether the last step of each episode says so."""
        return table.terminated

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The episodes of these numbers."""
        with self.table(source) as table:
            for number in numbers:
                yield table.rows(*table.bounds(number))

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The same steps, those of episodes that lie side by side together."""
        with self.table(source) as table:
            columns = table.columns.values()
            width = sum(int(np.prod(c.shape[1:])) * np.dtype(c.dtype).itemsize for c in columns)
            step = max(1, _BLOCK // max(width, 1))
            for start, stop in _runs(map(table.bounds, numbers)):
                for place in range(start, stop, step):
                    yield table.rows(place, min(place + step, stop))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The rewards of these episodes, without the rest of them."""
        with self.table(source) as table:
            column = table.columns["next/reward"]
            for number in numbers:
                yield column[slice(*table.bounds(number))]


def _runs(bounds: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where episodes that lie side by side begin and end together."""
    start, stop = next(bounds, (0, 0))
    for first, last in bounds:
        if first != stop:
            yield start, stop
            start = first
        stop = last
    if stop > start:
        yield start, stop


def ends_of(over: np.ndarray) -> np.ndarray:
    """int64 `[K]`, where episodes end, by the flags `[T]` of steps; the last step ends one too."""
    ends = np.flatnonzero(over) + 1
    if len(over) and (not len(ends) or ends[-1] != len(over)):
        ends = np.append(ends, len(over))
    return ends.astype(np.int64)


def needed(source: Source, found: Iterable[str], names: Iterable[str]) -> None:
    """Refuses files that lack a column.

    Raises:
        ValueError: the message names the one that lacks, and those that are there.
    """
    there = list(found)
    for name in names:
        if name not in there:
            raise ValueError(f"{source}: expected an array '{name}', got {there}.")


def left_out_note(names: Iterable[str]) -> tuple[str, ...]:
    """The sentence that tells what was left out; none if nothing was."""
    left_out = ", ".join(f"'{name}'" for name in sorted(names))
    return (f"Left out, as no arrays of numbers for each step: {left_out}.",) * bool(left_out)


def check_lengths(source: Source, columns: Mapping[str, Column]) -> None:
    """Refuses columns of several lengths.

    Raises:
        ValueError: the message names the columns and their lengths.
    """
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{source}: expected arrays of one length, got {lengths}.")
