"""Tables of columns with one row per step, and the base classes of formats that have them.

K episodes, T steps over all of them.
"""

import abc
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.format import Description, Episode, Indexed, Source, spec_of
from jrb.datasets.reading.names import FIELDS, MASK_NAMES, ROLES, check
from jrb.keys import within
from jrb.layouts.names import nest

TERMINATED, TRUNCATED, DONE, EPISODE = "next/terminated", "next/truncated", "next/done", "episode"
VALID, FLAGS = "next/valid", (DONE, TERMINATED, TRUNCATED)
DONE_NOTE = "Only done flags are stored: what is done counts as terminated."
_BLOCK = 8 << 20  # bytes of all columns that `blocks` reads at a time
_TEXTS = (
    "Texts tell episodes apart: the leaf 'episode' has numbers in the order of appearance, "
    "facts['episode'] has the texts."
)

Column = Any
"""A leaf of all steps `[T, ...]`: an array, or an object with shape, dtype, length and slices."""


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedColumn:
    """A column that is computed when it is read."""

    shape: tuple[int, ...]  # `[T, ...]`
    dtype: Any
    read: Callable[[int, int], np.ndarray]  # returns the rows from `start` to `stop`
    is_shared: bool = False  # True if another column reads the same data

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        return self.read(start, max(start, stop))


def flag_column(column: Column, name: str, source: object) -> DerivedColumn:
    """Returns the bool column `[T]` of a column `[T]` or `[T, 1]` of 0 and 1 in any dtype."""
    where, row = f"{source}: '{name}'", list(column.shape[1:])
    check(np.prod(row, dtype=np.int64) == 1, where, "a flag for each step", row)

    def read(start: int, stop: int) -> np.ndarray:
        flags = column[start:stop].reshape(-1)
        check(np.isin(flags, (0, 1)).all(), where, "flags of 0 and 1", "others")
        return flags.astype(bool)

    return DerivedColumn((len(column),), np.dtype(bool), read)


def with_flags(
    columns: Mapping[str, Column], ends: np.ndarray, source: object
) -> dict[str, Column]:
    """Returns columns with terminated and truncated, computed from all flags when they are read.

    `ends`, int64 `[K]`, are the ends of episodes; see `combine_flags`.
    """
    flags = {name: flag_column(columns[name], name, source) for name in FLAGS if name in columns}
    masks = [columns[name] for name in bootstrap_masks(columns)]

    def read(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        # Read the same rows of all flags and masks, and combine them.
        stored = [flags[name][start:stop] if name in flags else None for name in FLAGS]
        may_end = np.isin(np.arange(start, stop), ends - 1)
        values = [mask[start:stop].reshape(-1) for mask in masks]
        return combine_flags(stop - start, *stored, masks=values, may_end=may_end)

    # Both columns are computed from all flags; `done` itself is not kept.
    steps, dtype = (len(next(iter(columns.values()))),), np.dtype(bool)
    column = lambda which: DerivedColumn(steps, dtype, lambda a, b: read(a, b)[which])
    others = {name: each for name, each in columns.items() if name != DONE}
    return {**others, TERMINATED: column(0), TRUNCATED: column(1)}


def bootstrap_masks(columns: Mapping[str, Column]) -> list[str]:
    """Returns the names of columns of one number for each step that are bootstrap masks."""
    # A mask may be at the top or below `next`, but has one number for each step.
    masks = {n: each for n, each in columns.items() if n.removeprefix("next/") in MASK_NAMES}
    is_one = lambda mask: np.dtype(mask.dtype).kind in "biuf" and math.prod(mask.shape[1:]) == 1
    return [name for name, mask in masks.items() if is_one(mask)]


def flag_notes(
    columns: Mapping[str, Column], terminated: Any = None, done: str = f"'{DONE}'"
) -> tuple[str, ...]:
    """Returns notes on how flags and masks are understood; `done` is the file's name of done.

    Given `terminated` as it was understood, reads all masks, to find those that contradict it.
    """
    # Choose the note by the flags and masks that the files have, as `combine_flags` treats them.
    flags, masks = {*FLAGS} & columns.keys(), bootstrap_masks(columns)
    both = " that is both terminated and truncated" * (TRUNCATED in flags)
    other = ", unless they are truncated" * (TRUNCATED in flags)
    names, notes = " and ".join(map(repr, masks)), list[str]()
    if masks and flags - {TRUNCATED}:
        notes.append(f"An end{both} is taken for truncated where {names} is above 0.")
    elif masks:
        notes.append(f"Ends where {names} is 0 are taken for terminated{other}.")
    elif not flags:
        notes.append("No flags tell how episodes ended: all are taken for truncated.")
    elif DONE in flags and TERMINATED not in flags:
        rule = f"are taken for terminated{other}, also at a time limit."
        notes.append(f"Steps that are done ({done}) {rule}")
    # A mask that contradicts the flags may mean something else.
    for name in masks:
        if terminated is not None and (is_set(columns[name][:]) == terminated[:]).any():
            differ = "is 0 at steps that did not terminate, or not 0 at steps that did"
            notes.append(f"{name!r} {differ}: there it is a leaf, and changes no flag.")
    return tuple(notes)


def rows_at(column: Column, rows: np.ndarray) -> DerivedColumn:
    """Returns the column of another column's rows at the positions `rows`, int64 `[T]`."""

    def read(start: int, stop: int) -> np.ndarray:
        # One slice for each run of neighbours, so that the rows between runs are not read.
        positions = rows[start:stop]
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        parts = [column[int(run[0]) : int(run[-1]) + 1] for run in runs if len(run)]
        return np.concatenate(parts) if len(parts) > 1 else [*parts, column[0:0]][0]

    return DerivedColumn((len(rows), *column.shape[1:]), column.dtype, read)


def with_next(columns: Mapping[str, Column], steps: int, heads: Sequence[str]) -> dict[str, Column]:
    """Returns an episode's columns, where a column with T + 1 rows below `heads` becomes two.

    One has the first T rows, the other, under `next/`, the last T. Both share one read.
    """
    leaves: dict[str, Column] = {}
    for name, column in columns.items():
        leaves[name] = column
        # Read the column once for both leaves. The copies can be written to.
        if len(column) == steps + 1 and name.split("/")[0] in heads:
            whole, shape = functools.cache(lambda c=column: c[:]), (steps, *column.shape[1:])
            for lag, leaf in enumerate((name, f"next/{name}")):
                read = lambda a, b, lag=lag, whole=whole: whole()[a + lag : b + lag].copy()
                leaves[leaf] = DerivedColumn(shape, column.dtype, read, is_shared=bool(lag))
    return leaves


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The contents of files with one row per step.

    Columns `[T, ...]` have the names of leaves in TED (`observation/image`, `next/reward`). If
    there is no `next/observation`, the next row's observation stands in for it.
    """

    columns: Mapping[str, Column]
    ends: np.ndarray  # int64 `[K]`, the row after the last step of each episode
    # The next three are as in `Description`.
    facts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: Iterable[str] = ()  # the names of arrays that are not read
    cut: np.ndarray | None = None  # as in `Description`; None to derive it from the flags

    @property
    def has_next(self) -> bool:
        """True if the table has columns of next observations."""
        return any(name.split("/")[:2] == ["next", "observation"] for name in self.columns)

    @property
    def spec(self) -> Any:
        """The spec of one step, in TED."""
        leaves = dict(self.columns)
        if not self.has_next:
            leaves |= {"next/" + name: leaves[name] for name in self.columns if is_seen(name)}
        return spec_of(nest(leaves))

    @property
    def is_cut(self) -> np.ndarray | None:
        """Bool `[K]`, True if the last step has no next observation; None if all have one."""
        if self.cut is not None or self.has_next:
            return self.cut
        # An episode is cut unless its last step terminated; one without steps has no such step.
        has_steps = np.diff(self.ends, prepend=0) > 0
        is_cut = np.ones(len(self.ends), bool)
        is_cut[has_steps] = ~self.columns[TERMINATED][:][self.ends[has_steps] - 1]
        return is_cut

    def bounds(self, number: int) -> tuple[int, int]:
        """Returns the first row of an episode, and the row after its last."""
        return int(self.ends[number - 1]) if number else 0, int(self.ends[number])

    def rewards(self, start: int, stop: int) -> Any:
        """Reads the rewards of the rows `start` to `stop`, and nothing else."""
        names = [name for name in self.columns if within(name, "next/reward")]
        return nest({name: self.columns[name][start:stop] for name in names})["next"]["reward"]

    def rows(self, start: int, stop: int) -> Episode:
        """Reads the rows `start` to `stop` as steps in TED."""
        leaves: dict[str, np.ndarray] = {}
        has_next, beyond = self.has_next, min(stop + 1, int(self.ends[-1]))
        first, last = np.searchsorted(self.ends, [start + 1, stop + 1])
        for name, column in self.columns.items():
            # Observations need their next rows too, unless the table has next observations.
            if has_next or not is_seen(name):
                rows = column[start:stop]
                # Users may write to what they get, which must not change a column in memory.
                leaves[name] = rows.copy() if isinstance(column, np.ndarray) else rows
                continue
            rows = column[start:beyond]
            after = np.zeros((stop - start, *rows.shape[1:]), rows.dtype)
            after[: len(rows) - 1] = rows[1:]
            after[self.ends[first:last] - 1 - start] = 0  # the next row is of another episode
            leaves[name], leaves["next/" + name] = rows[: stop - start], after
        return nest(leaves)


def is_seen(name: str) -> bool:
    """Returns True for the name of the observation or of a leaf below it."""
    return name.split("/")[0] == "observation"


class TableFormat(Indexed):
    """A format whose files have one row per step; subclasses define `matches` and `table`."""

    @abc.abstractmethod
    def table(self, source: Source) -> contextlib.AbstractContextManager[Table]:
        """Opens the files of a dataset as a table."""

    def describe(self, source: Source) -> Description:
        """Returns the facts about the dataset, from its columns' shapes and the episodes' ends."""
        with self.table(source) as table:
            lengths = np.diff(table.ends, prepend=0).astype(np.int64)
            notes = (*table.notes, *note_left_out(table.left_out))
            facts, metadata = table.facts, table.metadata
            return Description(table.spec, lengths, table.is_cut, facts, metadata, notes)

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes at the indices `numbers`."""
        with self.table(source) as table:
            for number in numbers:
                yield table.rows(*table.bounds(number))

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the steps of these episodes in blocks; neighbours in the files share blocks."""
        with self.table(source) as table:
            # Join neighbours, to read them together, and divide ranges longer than a block.
            steps, ranges = int(table.ends[-1]) if len(table.ends) else 0, list[tuple[int, int]]()
            rows = max(1, _BLOCK * steps // max(1, declared_nbytes(table.columns)))
            for start, stop in map(table.bounds, numbers):
                follows = bool(ranges) and ranges[-1][1] == start
                ranges.append((ranges.pop()[0] if follows else start, stop))
            for start, stop in ranges:
                for row in range(start, stop, rows):
                    yield table.rows(row, min(row + rows, stop))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[Any]:
        """Yields the rewards of these episodes; reads nothing else of them."""
        with self.table(source) as table:
            for number in numbers:
                yield table.rewards(*table.bounds(number))


EpisodeTables = Iterator[tuple[object, Table]]
"""Pairs of an episode's place for error messages, such as its file, and its table."""


class EpisodeFormat(Indexed):
    """A format in which each episode is a `Table` of its own, with a single value per fact."""

    def files(self, source: Source) -> list[str]:
        """Returns the files of a dataset in order; by default none, for sources in memory."""
        return []

    @abc.abstractmethod
    def tables(self, source: Source, numbers: Sequence[int] | None) -> EpisodeTables:
        """Yields the place and the table of each episode in `numbers`; None for all."""

    def about(self, source: Source) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Returns the dataset's metadata and notes; see `Description`."""
        return {}, ()

    def describe(self, source: Source) -> Description:
        """Returns the facts about the dataset, from the shapes and flags of all episodes."""
        spec, lengths, is_cut = None, list[int](), list[bool]()
        every_facts, left_out, table_notes = list[Mapping[str, Any]](), set[str](), set[str]()
        limit = ExpansionLimit(source, self.files(source), self.max_expansion)
        for where, table in self.tables(source, None):
            # Checked before anything is read; columns that share data count once.
            columns = table.columns.items()
            unshared = {name: c for name, c in columns if not getattr(c, "is_shared", True)}
            limit.add(declared_nbytes(unshared))
            spec = table.spec if spec is None else spec
            check(table.spec == spec, where, f"the leaves of the first episode, {spec}", table.spec)
            lengths.append(int(table.ends[0]))
            # Collect what the description says of each episode.
            is_cut.append(table.is_cut is not None and bool(table.is_cut[0]))
            every_facts.append(table.facts)
            left_out, table_notes = left_out | {*table.left_out}, table_notes | {*table.notes}
        check(spec is not None, source, self.looks_for, "no episode")
        # Make each fact an array, of objects if values have several types or some are missing.
        facts = dict[str, np.ndarray]()
        for name in dict.fromkeys(name for each in every_facts for name in each):
            values = [each.get(name) for each in every_facts]
            kinds = {type(value) for value in values}
            is_plain = len(kinds) == 1 and kinds < {int, float, bool, str, np.ndarray}
            facts[name] = np.array(values) if is_plain else np.fromiter(values, object, len(values))
        # Add metadata and notes on the whole dataset.
        metadata, notes = self.about(source)
        if spec is not None and "reward" not in spec["next"]:
            table_notes.add("There are no rewards in the files.")
        notes = (*sorted(table_notes), *notes, *note_left_out(left_out))
        cut = np.array(is_cut, bool) if any(is_cut) else None
        return Description(spec, np.array(lengths, np.int64), cut, facts, metadata, notes)

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes at the indices `numbers`."""
        for _, table in self.tables(source, numbers):
            yield table.rows(0, int(table.ends[0]))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[Any]:
        """Yields the rewards of these episodes; reads nothing else of them."""
        for _, table in self.tables(source, numbers):
            yield table.rewards(0, int(table.ends[0]))


@functools.lru_cache(maxsize=16)
def _results(key: Hashable) -> list[Any]:
    """Returns the list that caches the result for a key; it is empty at first."""
    return []


def read_once(files: Iterable[str], key: Hashable, compute: Callable[[], Any]) -> Any:
    """Returns `compute()`, cached for `key` until one of the files changes."""
    # A file that changes gets another inode, time or size, and the entry another key.
    stats = ((path, os.stat(path)) for path in files if os.path.exists(path))
    stamps = [(path, stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats]
    results = _results((key, *stamps))
    if not results:
        results.append(compute())
    return results[0]


def table_of(
    source: object,
    columns: Mapping[str, Column],
    *,
    files: Sequence[str] = (),
    key: Hashable = None,
    **description: Any,
) -> Table:
    """Returns the table of columns; reads all flags to find the ends of episodes.

    An episode ends at flags (`next/terminated`, `next/truncated`, `next/done`; see
    `combine_flags`), and where the value of `episode` changes. The ends are cached until `files`
    change; `key` holds the options on which they depend.
    """
    # Read the flags once for unchanged files, and add them to the other columns.
    read = functools.partial(_read_ends, columns, source)
    # All tables of these files share the cached arrays, so they must not be written to.
    flags, ends, facts, notes = read_once(files, key, read) if files else read()
    steps = {name: each for name, each in columns.items() if name != DONE} | flags
    notes += description.pop("notes", ())
    return Table(steps, ends, facts, notes=notes, **description)


def _read_ends(
    columns: Mapping[str, Column], source: object
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray], tuple[str, ...]]:
    """Reads the flags and `episode`; returns these columns, the ends, facts and notes."""
    check(
        not columns.keys().isdisjoint((*FLAGS, EPISODE)),
        source,
        "a column that tells where episodes end (done, terminated, truncated or episode)",
        f"{sorted(columns)}. Name it with mapping=",
    )
    # Episodes end where their number changes; without numbers, any step may be the end of one.
    steps = len(next(iter(columns.values())))
    numbers, changes, may_end = np.zeros(0), np.zeros(steps, bool), np.arange(steps)
    if EPISODE in columns:
        numbers, changes = _episode_changes(columns[EPISODE][:], f"{source}: 'episode'")
        may_end = np.flatnonzero(changes)
    if TRUNCATED in columns and bootstrap_masks(columns):
        # A flag of time-outs that is set nowhere says nothing, while a mask may imply some.
        is_used = flag_column(columns[TRUNCATED], TRUNCATED, source)[:].any()
        columns = {name: each for name, each in columns.items() if is_used or name != TRUNCATED}
    # Read all flags, and find the ends.
    flag_columns = with_flags(columns, may_end + 1, source)
    flags = {name: flag_columns[name][:] for name in (TERMINATED, TRUNCATED)}
    notes = flag_notes(columns, flags[TERMINATED])
    ends = ends_of(flags[TERMINATED] | flags[TRUNCATED] | changes)
    facts = {EPISODE: numbers[ends - 1]} if EPISODE in columns else {}
    # A leaf holds no texts, but numbers in their place.
    if numbers.dtype.kind not in "biufc":
        flags[EPISODE] = np.cumsum(changes, dtype=np.int64) - changes
        notes += (_TEXTS,)
    return flags, ends, facts, notes


def _episode_changes(numbers: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers of episodes `[T]`, and bool `[T]`, True for the last step of each."""
    check(numbers.size == len(numbers), where, "a number for each step", list(numbers.shape))
    numbers = numbers.reshape(-1)
    # Compare neighbours. A number that comes back later would belong to two episodes.
    changes = np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)]
    values, counts = np.unique(numbers[changes], return_counts=True)
    got = f"those of {values[counts > 1][:5].tolist()} apart. Sort the rows by episode and time"
    check((counts < 2).all(), where, "the steps of an episode side by side", got)
    return numbers, changes


def combine_flags(
    steps: int,
    done: np.ndarray | None,
    terminated: np.ndarray | None,
    truncated: np.ndarray | None,
    *,
    masks: Sequence[np.ndarray] = (),
    may_end: np.ndarray | bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns terminated and truncated, bool `[T]` each, from the flags that exist.

    Without terminated, steps that are done and not truncated count as terminated; with it, steps
    that are done and not terminated count as truncated. Bootstrap masks, numbers `[T]`, then turn
    terminated to truncated where all of them are above 0, and at most 1 as discounts are; if
    truncated exists too, only at steps that are both. With neither done nor terminated, steps that
    `may_end` an episode, bool `[T]`, count as terminated where one of the masks is 0.
    """
    # Find the steps where one of the masks is 0, and those where all of them say that a value
    # follows.
    never = np.zeros(steps, bool)
    is_zero = np.any([mask == 0 for mask in masks], axis=0) | never
    has_next = np.all([(mask > 0) & (mask <= 1) for mask in masks], axis=0) & bool(masks)
    # Masks turn ends to truncated, but with a flag of truncation only where it says so too.
    is_late = has_next & (True if truncated is None else truncated)
    truncated = never if truncated is None else truncated
    # Without terminated, derive it from done, or from the masks if there is no done either.
    is_end = (may_end & is_zero if done is None else done) & ~truncated
    is_over = is_end if terminated is None else terminated
    is_late &= is_over
    done = never if done is None else done
    return is_over & ~is_late, truncated | is_late | (done & ~is_over)


def merge_flags(leaves: Mapping[str, Column], steps: int) -> dict[str, Column]:
    """Returns the leaves of T steps, with terminated and truncated in place of all stored flags."""
    flags = {name: is_set(leaves[name][:]) for name in FLAGS if name in leaves}
    terminated, truncated = combine_flags(steps, *map(flags.get, FLAGS))
    others = {name: leaf for name, leaf in leaves.items() if name not in flags}
    return others | {TERMINATED: terminated, TRUNCATED: truncated}


def is_set(flags: np.ndarray) -> np.ndarray:
    """Returns flags of any dtype, `[T]` or `[T, 1]`, as bool `[T]`."""
    return (flags != 0).reshape(len(flags))


def ends_of(is_end: np.ndarray) -> np.ndarray:
    """Returns the ends of episodes, int64 `[K]`, given flags `[T]`; the last step ends one too."""
    last = [len(is_end)] if len(is_end) else []
    return np.unique(np.append(np.flatnonzero(is_end) + 1, last)).astype(np.int64)


def sort_arrays(
    arrays: Mapping[str, Column],
) -> tuple[dict[str, Column], dict[str, Column], set[str]]:
    """Returns the numeric arrays, the arrays of texts `[T]`, and the names of all others."""
    numbers, texts = dict[str, Column](), dict[str, Column]()
    for name, array in arrays.items():
        # Members of an archive that are no arrays are None; single values belong to no step.
        if array is None or not array.shape:
            continue
        kind = np.dtype(array.dtype).kind
        if kind in "biufc":
            numbers[name] = array
        elif kind in "US" or h5py.check_string_dtype(array.dtype) is not None:
            texts |= {name: array} if len(array.shape) == 1 else {}
    return numbers, texts, arrays.keys() - numbers.keys() - texts.keys()


def check_present(source: object, present: Iterable[str], names: Iterable[str]) -> None:
    """Raises if one of `names` is not `present`."""
    for name in names:
        check(name in present, source, f"an array '{name}'", list(present))


def check_roles_present(source: object, leaves: Mapping[str, str], roles: Sequence[str]) -> None:
    """Raises if one of the `roles`, such as "action", has none of the `leaves` in TED."""
    for role in roles:
        is_there = any(leaf.split("/")[0] == role for leaf in leaves.values())
        cure = f"Tell which it is: mapping={{<its name>: '{role}'}}"
        check(is_there, source, f"an array for '{role}'", f"{sorted(leaves)}. {cure}")


def step_columns(
    source: object,
    arrays: Mapping[str, Column],
    leaves: Mapping[str, str],
    carried: Sequence[str] = (),
) -> tuple[dict[str, Column], set[str]]:
    """Returns the arrays of all steps by their leaves, and the names of arrays of other lengths.

    Leaves below one of `carried` may have a row more. Raises if parts of a transition do not fit.
    """
    # Parts of the transition, and no other arrays of a step, have to agree.
    roles = [ROLES[field] for field in FIELDS]
    parts = [name for name, leaf in leaves.items() if any(within(leaf, role) for role in roles)]
    lengths = {name: len(arrays[name]) for name in parts}
    num_spare = {name: int(leaf.split("/")[0] in carried) for name, leaf in leaves.items()}
    # The shortest array of the transition gives the number of steps; some may have one row more.
    steps = min((length for name, length in lengths.items() if not num_spare[name]), default=0)
    odd = {name for name in leaves if len(arrays[name]) not in (steps, steps + num_spare[name])}
    check(odd.isdisjoint(lengths), source, "arrays of one length", lengths)
    return {leaf: arrays[name] for name, leaf in leaves.items() if name not in odd}, odd


def note_left_out(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the note on the arrays that were left out, or no note if there are none."""
    left_out = ", ".join(f"'{name}'" for name in sorted(names))
    return (f"Left out, as no arrays of numbers for each step: {left_out}.",) * bool(left_out)
