"""Recordings of `jrb.datasets.Recorder`: Parquet files with one row per step.

T steps, K episodes, G groups of rows, E environments.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from jrb.authoring import ExpansionLimit, declared_nbytes, require
from jrb.checkpoint import DamagedError
from jrb.datasets.format import Description, Format, Source
from jrb.datasets.reading.arrow import refused, starts_of
from jrb.datasets.reading.columns import Table, TableFormat
from jrb.datasets.reading.stat_cache import file_stamps
from jrb.datasets.reading.vectorized import is_set
from jrb.datasets.recording import parts
from jrb.datasets.recording.parts import ENV, EPISODE, TERMINATED, TRUNCATED, RecordedLeaf

_OPEN = 32  # files
_VALID = "next/valid"


@dataclasses.dataclass(frozen=True)
class Recorded(TableFormat):
    """Datasets of `jrb.datasets.Recorder`: episodes by writer, then by environment, then by time.

    Facts: `env`, the environment of each episode, and `writer`, the number of its writer in
    `metadata["writers"]`. Items that were not sealed when the dataset was opened are not in it.

    Attributes:
        sealed: the name of each writer, and the number of its parts that count; None for all that
            are there when the dataset is opened.
    """

    name: ClassVar[str] = "recorded"
    looks_for: ClassVar[str] = "a folder that jrb.datasets.Recorder wrote"

    sealed: tuple[tuple[str, int], ...] | None = None

    def is_own(self, source: str, name: str) -> bool:
        """Returns True for the files of recorders."""
        return parts.is_own(name)

    def matches(self, source: Source) -> bool:
        """Returns True if a recorder has begun in the folder."""
        return isinstance(source, str) and os.path.isdir(source) and parts.is_recording(source)

    def snapshot(self, source: Source) -> Format:
        """Returns the format for the parts that are there now."""
        return dataclasses.replace(self, sealed=self._sealed(source))

    def describe(self, source: Source) -> Description:
        """Returns what there is; steps whose next observation is not there end episodes."""
        description, (table, valid) = super().describe(source), self._opened(source)
        if valid is None:
            return description
        last = table.ends - 1
        if not np.delete(valid, last).all():
            raise ValueError(
                f"{source}: leaf '{_VALID}': expected True but for last steps of episodes, got "
                "others."
            )
        return dataclasses.replace(
            description, cut=~valid[last] & ~table.columns[TERMINATED][:][last]
        )

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Yields the columns."""
        yield self._opened(source)[0]

    def _opened(self, source: Source) -> tuple[Table, np.ndarray | None]:
        path, sealed = os.path.realpath(source), self._sealed(source)
        names = [parts.part_name(w, number) for w, count in sealed for number in range(count)]
        identity = file_stamps([os.path.join(path, name) for name in names])
        return _opened(path, sealed, identity, self.max_expansion)

    def _sealed(self, source: Source) -> tuple[tuple[str, int], ...]:
        if self.sealed:
            return self.sealed
        if not self.matches(source):
            raise ValueError(f"{source}: expected {self.looks_for}, got something else.")
        return tuple(parts.part_counts(source).items())


class _Rows:
    """The rows of all parts, a group at a time.

    Args:
        paths: of the parts.
        schema: of Arrow, which all parts have.

    Attributes:
        starts: int64 `[G + 1]`, the number of rows before each group, and of all.
    """

    def __init__(self, paths: list[str], schema: Any) -> None:
        self._paths, self._schema = paths, schema
        self._groups: list[tuple[int, int]] = []  # a part, and a group in it
        counts: list[int] = []
        self._open = functools.lru_cache(maxsize=_OPEN)(self._opened)
        for number, path in enumerate(paths):
            with refused(path):
                about = self._open(number).metadata
            groups = range(about.num_row_groups)
            self._groups += [(number, group) for group in groups]
            counts += [about.row_group(group).num_rows for group in groups]
        self.starts = starts_of(counts)

    def _opened(self, number: int) -> Any:
        parquet, path = require("pyarrow.parquet", "datasets"), self._paths[number]
        file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        if not file.schema_arrow.equals(self._schema):
            raise ValueError(
                f"{path}: expected the columns {self._schema.names}, as in the first part, got "
                f"{file.schema_arrow.names}."
            )
        return file

    def read(self, leaf: RecordedLeaf, column_name: str, group: int) -> np.ndarray:
        """Returns a column, which holds a leaf, in a group of rows."""
        number, inside = self._groups[group]
        with refused(self._paths[number]):
            table = self._open(number).read_row_group(inside, [column_name], use_threads=False)
            column = table.column(column_name).combine_chunks()
            column.validate(full=True)
        rows = int(self.starts[group + 1] - self.starts[group])
        if len(column) != rows or column.null_count:
            raise ValueError(
                f"{self._paths[number]}: column '{column_name}': expected {rows} values in group "
                f"{inside}, got {len(column) - column.null_count}."
            )
        return leaf.decode(column)

    def read_all(self, name: str) -> np.ndarray:
        """Returns a column of single numbers of all rows."""
        leaf = RecordedLeaf(name, parts.TYPES[name], ())
        pieces = [self.read(leaf, name, group) for group in range(len(self._groups))]
        return np.concatenate([np.zeros(0, leaf.numpy), *pieces])

    def writer_of(self, writers: np.ndarray) -> np.ndarray:
        """Returns the writer of each row, from those of parts."""
        numbers = [writers[part] for part, _ in self._groups]
        return np.repeat(np.array(numbers, np.int64), np.diff(self.starts))


class _RecordedColumn:
    """A leaf of all steps, episode after episode.

    Args:
        rows: of all parts.
        leaf: of the items.
        order: int64 `[T]`, the row of each step.
    """

    def __init__(self, rows: _Rows, leaf: RecordedLeaf, order: np.ndarray) -> None:
        self._rows, self._leaf, self._order = rows, leaf, order
        self._read = functools.lru_cache(maxsize=4)(functools.partial(rows.read, leaf, leaf.column))

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        return (len(self), *self._leaf.shape)

    @property
    def dtype(self) -> np.dtype:
        """NumPy's dtype."""
        return self._leaf.numpy

    def __len__(self) -> int:
        """T."""
        return len(self._order)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns these steps `[n, ...]`, an array of their own."""
        rows = self._order[part]
        steps = np.zeros((len(rows), *self._leaf.shape), self.dtype)
        groups = np.searchsorted(self._rows.starts, rows, side="right") - 1
        bounds = np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
        for start, stop in itertools.pairwise(bounds) if self._leaf.width else ():
            group = int(groups[start])
            steps[start:stop] = self._read(group)[rows[start:stop] - self._rows.starts[group]]
        return steps


@functools.lru_cache(maxsize=4)
def _opened(
    path: str, sealed: tuple[tuple[str, int], ...], identity: Any, max_expansion: float
) -> tuple[Table, np.ndarray | None]:
    """Returns all steps, and for datasets that were written as a whole `next/valid`, bool `[T]`.

    Args:
        path: of the recording.
        sealed: the writers, and how many of their parts count.
        identity: tells the files from others that are put in their place.
        max_expansion: see `Format`.
    """
    schemas = [parts.schema_of(os.path.join(path, parts.part_name(w, 0))) for w, _ in sealed]
    paths, writers = [], []
    for number, ((name, count), schema) in enumerate(zip(sealed, schemas, strict=True)):
        parts.check_same_leaves(path, schemas[0], name, schema)
        paths += [os.path.join(path, parts.part_name(name, part)) for part in range(count)]
        writers += [number] * count
    rows = _Rows(paths, schemas[0].arrow)
    env, writer = rows.read_all(ENV).astype(np.int64), rows.writer_of(np.array(writers))
    order = np.lexsort((env, writer))  # stable: the rows of a stream stay in the order of time
    columns: dict[str, Any] = {
        leaf.name: _RecordedColumn(rows, leaf, order) for leaf in schemas[0].leaves
    }
    ExpansionLimit(path, paths, max_expansion).add(declared_nbytes(columns))
    columns |= {name: rows.read_all(name)[order] for name in (TERMINATED, TRUNCATED)}
    episode, env, writer = rows.read_all(EPISODE)[order], env[order], writer[order]
    is_last = lambda *keys: sum(np.diff(key, append=key[-1:] + 1) != 0 for key in keys) > 0
    ends = np.flatnonzero(is_last(episode, env, writer)) + 1
    metadata = {name: value for schema in schemas for name, value in schema.metadata.items()}
    notes = tuple(dict.fromkeys(note for schema in schemas for note in schema.notes))
    if (facts := schemas[0].facts) is not None and len(schemas) == 1:
        if any(len(fact) != len(ends) for fact in facts.values()):
            raise DamagedError(f"{path}: expected facts of {len(ends)} episodes, got others.")
        valid = columns.pop(_VALID, None)
        valid = None if valid is None else is_set(valid[:])
        return Table(columns, ends, facts, metadata, notes), valid
    last = np.flatnonzero(is_last(env, writer))
    if num_running := int((~(columns[TERMINATED] | columns[TRUNCATED])[last]).sum()):
        notes += (f"{num_running} episodes had not ended when their last part was sealed.",)
    metadata["writers"] = [name for name, _ in sealed]
    facts = {"env": env[ends - 1], "writer": writer[ends - 1]}
    return Table(columns, ends, facts, metadata, notes), None
