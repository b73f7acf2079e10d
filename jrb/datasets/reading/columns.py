"""Steps of all episodes as columns, one row a step, and the formats that are read this way.

K episodes, T steps over all of them.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jrb.datasets.format import Description, Episode, Indexed, Source, spec_of
from jrb.datasets.reading.stat_cache import StatCache, file_stamps
from jrb.layouts.names import nest

TERMINATED, TRUNCATED, DONE, EPISODE = "next/terminated", "next/truncated", "next/done", "episode"
_BLOCK = 8 << 20  # bytes of all columns that `blocks` reads at a time
_TEXTS = (
    "Texts tell episodes apart: the leaf 'episode' has numbers in the order of appearance, "
    "facts['episode'] has the texts."
)


class Column(Protocol):
    """One leaf of all steps: an array, or data on the disk that are read by slices."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        ...

    @property
    def dtype(self) -> Any:
        """A dtype of NumPy."""
        ...

    def __len__(self) -> int:
        """T."""
        ...

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """The rows of a slice, `[rows, ...]`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedColumn:
    """A column that is computed when it is read.

    Attributes:
        shape: `[T, ...]`.
        dtype: of the values.
        read: a function from the first row and the row after the last one to values `[rows, ...]`.
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[int, int], np.ndarray]

    def __len__(self) -> int:
        """T."""
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """The rows of a slice."""
        start, stop, _ = rows.indices(len(self))
        return self.read(start, max(start, stop))


def flag_column(column: Column, name: str, source: object) -> DerivedColumn:
    """Returns a column `[T]` or `[T, 1]` of zeros and ones, of any dtype, as bool `[T]`.

    Raises:
        ValueError: it has more than one value for each step; when it is read, a value is neither 0
            nor 1.
    """
    where = f"{source}: '{name}'"
    if np.prod(column.shape[1:], dtype=np.int64) != 1:
        raise ValueError(f"{where}: expected a flag for each step, got {list(column.shape[1:])}.")

    def read(start: int, stop: int) -> np.ndarray:
        flags = column[start:stop].reshape(-1)
        if not np.isin(flags, (0, 1)).all():
            raise ValueError(f"{where}: expected flags of 0 and 1, got others.")
        return flags.astype(bool)

    return DerivedColumn((len(column),), np.dtype(bool), read)


def rows_at(column: Column, rows: np.ndarray) -> DerivedColumn:
    """Returns the rows of a column at rising positions, int64 `[T]`."""

    def read(start: int, stop: int) -> np.ndarray:
        if start == stop:
            return column[0:0]
        positions = rows[start:stop]
        return column[int(positions[0]) : int(positions[-1]) + 1][positions - positions[0]]

    return DerivedColumn((len(rows), *column.shape[1:]), column.dtype, read)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The contents of files with a row for each step.

    Attributes:
        columns: by the name of the leaf in TED (`observation/image`, `next/reward`), each
            `[T, ...]`. Without `next/observation`, that is the observation of the next row.
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
        """True if the next observations are columns of their own."""
        return any(name.split("/")[:2] == ["next", "observation"] for name in self.columns)

    @property
    def spec(self) -> Any:
        """The spec of one step, in TED."""
        leaves = dict(self.columns)
        if not self.has_next:
            leaves |= {"next/" + name: leaves[name] for name in self.columns if is_seen(name)}
        return spec_of(nest(leaves))

    @property
    def is_cut(self) -> np.ndarray:
        """Bool `[K]`: the last step did not terminate, and lacks its next observation."""
        last = self.ends[self.ends > self.starts] - 1
        is_cut = np.ones(len(self.ends), bool)
        is_cut[self.ends > self.starts] = ~self.columns[TERMINATED][:][last]
        return is_cut & (not self.has_next)

    def bounds(self, number: int) -> tuple[int, int]:
        """Returns where an episode begins and ends."""
        return int(self.ends[number - 1]) if number else 0, int(self.ends[number])

    def rows(self, start: int, stop: int) -> Episode:
        """Reads the steps from `start` to `stop`, in TED."""
        leaves: dict[str, np.ndarray] = {}
        has_next, beyond = self.has_next, min(stop + 1, int(self.ends[-1]))
        for name, column in self.columns.items():
            if has_next or not is_seen(name):
                rows = column[start:stop]
                # A column in memory is read again for other episodes, so nobody may write to it.
                leaves[name] = rows.copy() if isinstance(column, np.ndarray) else rows
                continue
            rows = column[start:beyond]
            leaves[name] = rows[: stop - start]
            leaves["next/" + name] = self._next_rows(rows, start, stop)
        return nest(leaves)

    def _next_rows(self, rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Returns the rows after those of these steps; zeros after the last step of an episode."""
        after = np.zeros((stop - start, *rows.shape[1:]), rows.dtype)
        after[: len(rows) - 1] = rows[1:]
        first, last = np.searchsorted(self.ends, [start + 1, stop + 1])
        after[self.ends[first:last] - 1 - start] = 0
        return after


def is_seen(name: str) -> bool:
    """Returns whether a leaf is of the observation."""
    return name.split("/")[0] == "observation"


class TableFormat(Indexed):
    """A format whose files have a row for each step: `table` in place of the other methods."""

    @abc.abstractmethod
    def table(self, source: Source) -> contextlib.AbstractContextManager[Table]:
        """Opens the files."""

    def describe(self, source: Source) -> Description:
        """Describes the dataset, from the shapes of columns and the ends of episodes."""
        with self.table(source) as table:
            lengths = np.diff(table.ends, prepend=0).astype(np.int64)
            cut = None if table.has_next else table.is_cut
            return Description(table.spec, lengths, cut, table.facts, table.metadata, table.notes)

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers."""
        with self.table(source) as table:
            for number in numbers:
                yield table.rows(*table.bounds(number))

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the same steps in blocks; episodes that are neighbours are read together."""
        with self.table(source) as table:
            widths = (np.prod(column.shape[1:]) for column in table.columns.values())
            sizes = (np.dtype(column.dtype).itemsize for column in table.columns.values())
            width = sum(int(width) * size for width, size in zip(widths, sizes, strict=True))
            step = max(1, _BLOCK // max(width, 1))
            for start, stop in _merged_ranges(map(table.bounds, numbers)):
                for row in range(start, stop, step):
                    yield table.rows(row, min(row + step, stop))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the rewards of these episodes; reads nothing else of them."""
        with self.table(source) as table:
            column = table.columns["next/reward"]
            for number in numbers:
                yield column[slice(*table.bounds(number))]


def _merged_ranges(bounds: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields ranges of rows, those that follow each other as one."""
    start, stop = next(bounds, (0, 0))
    for first, last in bounds:
        if first != stop:
            yield start, stop
            start = first
        stop = last
    if stop > start:
        yield start, stop


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeEnds:
    """The ends of episodes. Tables share the arrays, so they are only read.

    Attributes:
        terminated: bool `[T]`.
        truncated: bool `[T]`.
        ends: int64 `[K]`, as in `Table`.
        facts: the numbers of episodes, if there are any.
        notes: as in `Description`.
        codes: int64 `[T]`, numbers in place of texts that tell episodes apart; None without texts.
    """

    terminated: np.ndarray
    truncated: np.ndarray
    ends: np.ndarray
    facts: dict[str, np.ndarray]
    notes: tuple[str, ...]
    codes: np.ndarray | None = None


_episode_ends: StatCache[EpisodeEnds] = StatCache()


def table_of(
    source: object,
    columns: Mapping[str, Column],
    *,
    files: Sequence[str] = (),
    cache_key: Hashable = None,
    notes: tuple[str, ...] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Table:
    """Returns the table of columns, after reading all flags that tell where episodes end.

    Args:
        source: the dataset, for messages.
        columns: by leaf of TED; see `read_ends`.
        files: where the flags lie; while these stay the same, flags are read once. Without files
            nothing is remembered.
        cache_key: options on which the flags depend, such as the names of their columns.
        notes: further notes.
        metadata: as in `Description`.

    Raises:
        ValueError: see `read_ends`.
    """
    if files:
        key = (file_stamps(files), cache_key)
        ends = _episode_ends.get(key, lambda: read_ends(columns, source))
    else:
        ends = read_ends(columns, source)
    steps: dict[str, Column] = {name: each for name, each in columns.items() if name != DONE}
    steps |= {TERMINATED: ends.terminated, TRUNCATED: ends.truncated}
    steps |= {} if ends.codes is None else {EPISODE: ends.codes}
    return Table(steps, ends.ends, ends.facts, metadata or {}, (*ends.notes, *notes))


def read_ends(columns: Mapping[str, Column], source: object) -> EpisodeEnds:
    """Reads where episodes end: at flags, and before a step with another number in `episode`.

    The flags are `next/terminated`, `next/truncated` and `next/done`; see `combined_flags`.

    Raises:
        ValueError: there is none of them, flags are not 0 and 1, or the steps of an episode are not
            next to each other.
    """
    names = [name for name in (DONE, TERMINATED, TRUNCATED) if name in columns]
    if not names and EPISODE not in columns:
        raise ValueError(
            f"{source}: expected a column that tells where episodes end (done, terminated, "
            f"truncated or episode), got {sorted(columns)}. Name it with mapping=."
        )
    flags = {name: flag_column(columns[name], name, source)[:] for name in names}
    steps = len(next(iter(columns.values())))
    terminated, truncated = combined_flags(steps, *map(flags.get, (DONE, TERMINATED, TRUNCATED)))
    notes: tuple[str, ...] = ()
    if not flags:
        notes = ("No flags tell how episodes ended: all are taken for truncated.",)
    elif DONE in flags and TERMINATED not in flags:
        other = ", unless they are truncated" if TRUNCATED in flags else ""
        notes = (f"Steps that are done are taken for terminated{other}.",)
    if EPISODE not in columns:
        return EpisodeEnds(terminated, truncated, ends_of(terminated | truncated), {}, notes)
    numbers, changes = _episode_numbers(columns[EPISODE], source)
    ends = ends_of(terminated | truncated | changes)
    facts = {EPISODE: numbers[ends - 1]}
    if numbers.dtype.kind in "biufc":
        return EpisodeEnds(terminated, truncated, ends, facts, notes)
    codes = np.cumsum(changes, dtype=np.int64) - changes
    return EpisodeEnds(terminated, truncated, ends, facts, (*notes, _TEXTS), codes)


def combined_flags(
    steps: int,
    done: np.ndarray | None,
    terminated: np.ndarray | None,
    truncated: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns terminated and truncated, bool `[T]` each, from the flags that exist.

    Without terminated, steps that are done and not truncated count as terminated; with it, steps
    that are done and not terminated count as truncated.
    """
    done = np.zeros(steps, bool) if done is None else done
    truncated = np.zeros(steps, bool) if truncated is None else truncated
    terminated = done & ~truncated if terminated is None else terminated
    return terminated, truncated | (done & ~terminated)


def _episode_numbers(column: Column, source: object) -> tuple[np.ndarray, np.ndarray]:
    """Reads the number of each step's episode `[T]`, and flags of the last steps of each number."""
    numbers = column[:]
    if numbers.size != len(numbers):
        raise ValueError(
            f"{source}: 'episode': expected a number for each step, got {list(numbers.shape)}."
        )
    numbers = numbers.reshape(-1)
    changes = np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)]
    values, counts = np.unique(numbers[changes], return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"{source}: 'episode': expected the steps of an episode side by side, got those of "
            f"{values[counts > 1][:5].tolist()} apart. Sort the rows by episode and time."
        )
    return numbers, changes


def ends_of(is_end: np.ndarray) -> np.ndarray:
    """Returns int64 `[K]`, where episodes end, by flags `[T]`; the last step ends one too."""
    ends = np.flatnonzero(is_end) + 1
    if len(is_end) and (not len(ends) or ends[-1] != len(is_end)):
        ends = np.append(ends, len(is_end))
    return ends.astype(np.int64)


def check_names_present(source: object, present: Iterable[str], names: Iterable[str]) -> None:
    """Refuses files that lack an array."""
    present = list(present)
    for name in names:
        if name not in present:
            raise ValueError(f"{source}: expected an array '{name}', got {present}.")


def check_roles_present(
    source: object, columns: Iterable[str], names: Iterable[str], roles: Sequence[str]
) -> None:
    """Refuses columns by leaf of which none is an observation or an action."""
    for role in roles:
        if not any(name.split("/")[0] == role for name in columns):
            raise ValueError(
                f"{source}: expected an array for '{role}', got {sorted(names)}. Tell which it is: "
                f"mapping={{<its name>: '{role}'}}."
            )


def check_lengths(source: object, columns: Mapping[str, Column]) -> None:
    """Refuses columns of several lengths."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{source}: expected arrays of one length, got {lengths}.")


def left_out_note(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the note on arrays that were left out; none if all were read."""
    left_out = ", ".join(f"'{name}'" for name in sorted(names))
    return (f"Left out, as no arrays of numbers for each step: {left_out}.",) * bool(left_out)
