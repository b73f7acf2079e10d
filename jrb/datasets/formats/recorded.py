"""The format of recordings by `jrb.datasets.Recorder`: Parquet files with one row per step.

T steps, K episodes, E environments.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.checkpoint import DamagedError
from jrb.datasets.format import Format, Source
from jrb.datasets.reading import arrow, tabular
from jrb.datasets.reading.names import check
from jrb.datasets.reading.tabular import TERMINATED, TRUNCATED, VALID, DerivedColumn, Table
from jrb.datasets.recording import parts
from jrb.datasets.recording.parts import ENV, EPISODE, RecordedLeaf


@dataclasses.dataclass(frozen=True)
class Recorded(tabular.TableFormat):
    """Datasets of `jrb.datasets.Recorder`, ordered by writer, then environment, then time.

    The facts of an episode are `env`, its environment, and `writer`, the index of its writer in
    `metadata["writers"]`. Items that were not sealed when the dataset was opened are not in it.

    Attributes:
        sealed: the name of each writer, with the number of its parts to read; None for all parts
            that exist when the dataset is opened.
    """

    name: ClassVar[str] = "recorded"
    looks_for: ClassVar[str] = "a folder that jrb.datasets.Recorder wrote"
    own_files: ClassVar[str] = parts.OWN

    sealed: tuple[tuple[str, int], ...] | None = None

    def matches(self, source: Source) -> bool:
        """Returns True if the source is a folder with a part of a recording."""
        return isinstance(source, str) and os.path.isdir(source) and parts.is_recording(source)

    def snapshot(self, source: Source) -> Format:
        """Returns a format that reads only the parts that exist now."""
        return dataclasses.replace(self, sealed=self._count_parts(source))

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the parts as one table."""
        sealed = self._count_parts(source)
        paths = [
            os.path.join(os.path.realpath(source), parts.part_name(writer, number))
            for writer, count in sealed
            for number in range(count)
        ]
        key = (self.max_expansion, sealed)
        yield tabular.read_once(
            paths, key, lambda: _table(source, paths, sealed, self.max_expansion)
        )

    def _count_parts(self, source: Source) -> tuple[tuple[str, int], ...]:
        if self.sealed:
            return self.sealed
        check(self.matches(source), source, self.looks_for, "something else")
        return tuple(parts.part_counts(source).items())


class RecordedColumn(arrow.ArrowColumn):
    """A column of all parts, with the shape and dtype of its leaf in their schema."""

    def __init__(self, files: arrow.ArrowFiles, leaf: RecordedLeaf, column: str) -> None:
        super().__init__(files, (column,))
        self._leaf = leaf

    @functools.cached_property
    def _example(self) -> np.ndarray:
        return np.zeros((1, *self._leaf.shape), self._leaf.numpy)

    def _values(self, piece: Any) -> np.ndarray:
        kind = self._leaf.column_type
        self._check(piece.type == kind, str(kind), str(piece.type))
        self._check(piece.null_count == 0, "values everywhere", "a null")
        return self._leaf.decode(piece)


def _table(
    source: str, paths: list[str], sealed: tuple[tuple[str, int], ...], max_expansion: float
) -> Table:
    """Returns the table of all steps in the parts at `paths`."""
    # Read the schema of each writer's first part; all must have the same leaves.
    begins = np.cumsum([0, *(count for _, count in sealed)])
    schemas = [parts.schema_of(paths[begin]) for begin in begins[:-1]]
    for (name, _), schema in zip(sealed, schemas, strict=True):
        parts.check_same_leaves(source, schemas[0], name, schema)
    # Read the recorder's own columns, but for the steps' numbers, which the order implies.
    files, own = arrow.ArrowFiles(paths), dict[str, Any]()
    for name in (EPISODE, ENV, TERMINATED, TRUNCATED):
        own[name] = RecordedColumn(files, RecordedLeaf(name, parts.TYPES[name], ()), name)
    limit = ExpansionLimit(source, paths, max_expansion)
    limit.add(declared_nbytes(own))
    own = {name: column[:] for name, column in own.items()}
    # Sort the rows by writer and environment. The sort is stable, so streams keep their order.
    of_part = np.repeat(np.arange(len(sealed)), np.diff(begins))
    writer = np.repeat(of_part, np.diff(files.starts))
    order = np.lexsort((own[ENV], writer))
    columns = _leaf_columns(files, schemas[0].leaves, order)
    limit.add(declared_nbytes(columns))
    columns |= {name: own[name][order] for name in (TERMINATED, TRUNCATED)}
    # Episodes end where their number changes, or the stream.
    episode, env, writer = own[EPISODE][order], own[ENV][order].astype(np.int64), writer[order]
    is_last = lambda *keys: sum(np.diff(key, append=key[-1:] + 1) != 0 for key in keys) > 0
    ends = np.flatnonzero(is_last(episode, env, writer)) + 1
    metadata = {name: value for schema in schemas for name, value in schema.metadata.items()}
    notes = tuple(dict.fromkeys(note for schema in schemas for note in schema.notes))
    # `Dataset.preprocess` writes all episodes at once, with their facts.
    facts = schemas[0].facts
    if facts is not None and len(schemas) == 1:
        if any(len(fact) != len(ends) for fact in facts.values()):
            raise DamagedError(f"{source}: expected facts of {len(ends)} episodes, got others.")
        return Table(columns, ends, facts, metadata, notes, cut=_pop_cut(source, columns, ends))
    # Recorders may have been closed amid an episode of an environment.
    last = np.flatnonzero(is_last(env, writer))
    if num_running := int((~(columns[TERMINATED] | columns[TRUNCATED])[last]).sum()):
        notes += (f"{num_running} episodes had not ended when their last part was sealed.",)
    metadata["writers"] = [name for name, _ in sealed]
    facts = {"env": env[ends - 1], "writer": writer[ends - 1]}
    return Table(columns, ends, facts, metadata, notes)


def _leaf_columns(
    files: arrow.ArrowFiles, leaves: tuple[RecordedLeaf, ...], order: np.ndarray
) -> dict[str, Any]:
    """Returns the columns of all leaves by name, with their rows in the given order."""
    columns: dict[str, Any] = {}
    for leaf in leaves:
        column = RecordedColumn(files, leaf, leaf.column)
        # A leaf of size 0 has no column.
        zeros = lambda start, stop, leaf=leaf: np.zeros((stop - start, *leaf.shape), leaf.numpy)
        empty = DerivedColumn((len(order), *leaf.shape), leaf.numpy, zeros)
        columns[leaf.name] = tabular.rows_at(column, order) if leaf.width else empty
    return columns


def _pop_cut(source: str, columns: dict[str, Any], ends: np.ndarray) -> np.ndarray | None:
    """Takes `next/valid` from columns, if there; returns which episodes lack a next observation."""
    if VALID not in columns:
        return None
    # `Dataset` adds the leaf again, from this result.
    valid = tabular.is_set(columns.pop(VALID)[:])
    where, expected = f"{source}: leaf '{VALID}'", "True but for last steps of episodes"
    check(np.delete(valid, ends - 1).all(), where, expected, "others")
    return ~valid[ends - 1] & ~columns[TERMINATED][ends - 1]
