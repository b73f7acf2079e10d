"""Formats that keep each episode in an HDF5 group of its own.

K episodes, T steps of one.
"""

import abc
import dataclasses
import itertools
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import h5py
import numpy as np

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.format import Description, Episode, Indexed, Source
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.columns import (
    TERMINATED,
    TRUNCATED,
    Column,
    Table,
    check_lengths,
    check_names_present,
    flag_column,
    is_seen,
    left_out_note,
)
from jrb.datasets.reading.stat_cache import StatCache, file_stamps


@dataclasses.dataclass(frozen=True)
class EpisodeGroup:
    """The group of one episode: its file, its name in there, and the number in that name."""

    path: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


class GroupFormat(Indexed):
    """A format whose files have a group for each episode, with arrays `[T, ...]` of its steps.

    Attributes:
        pattern: of the names of these groups; its first group finds the number.
        parent: the group that they are in.
        needed: the arrays that each of them has.
        names: the leaves in TED of the first parts of names, such as `next/reward` for `rewards`;
            one of them is `next/terminated`.
    """

    pattern: ClassVar[re.Pattern[str]]
    parent: ClassVar[str] = "/"
    needed: ClassVar[tuple[str, ...]]
    names: ClassVar[Mapping[str, str]]

    def files(self, source: Source) -> list[str]:
        """Returns the files of a dataset, in order."""
        return [source]

    @abc.abstractmethod
    def episode_layout(
        self, source: Source, groups: Sequence[EpisodeGroup]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Returns facts, metadata and notes; see `Description`."""

    def leaf_of(self, name: str) -> str:
        """Returns the leaf in TED of an array of a group."""
        first, *parts = name.split("/")
        return "/".join([self.names.get(first, first), *parts])

    def describe(self, source: Source) -> Description:
        """Describes the dataset, from the shapes and the flags of all groups."""
        groups = self._groups(source)
        if not groups:
            raise ValueError(f"{source}: expected {self.looks_for}, got none.")
        facts, metadata, notes = self.episode_layout(source, groups)
        spec, lengths, is_cut, left_out = None, list[int](), list[bool](), set[str]()
        limit = ExpansionLimit(source, self.files(source), self.max_expansion)
        for where, group in opened_groups(groups):
            table, others = self._table(where, group, limit)
            spec = table.spec if spec is None else spec
            if table.spec != spec:
                raise ValueError(
                    f"{where}: expected the leaves of the first episode, {spec}, got {table.spec}."
                )
            lengths.append(int(table.ends[0]))
            is_cut.append(bool(table.is_cut[0]))
            left_out |= others
        if spec is not None and "reward" not in spec["next"]:
            notes += ("There are no rewards in the files.",)
        notes += _gap_notes(groups) + left_out_note(left_out)
        cut = np.array(is_cut)
        return Description(spec, np.array(lengths, np.int64), cut, facts, metadata, notes)

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers."""
        for table in self._tables(source, numbers):
            yield table.rows(0, int(table.ends[0]))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields the rewards of these episodes; reads nothing else of them."""
        for table in self._tables(source, numbers):
            yield table.columns["next/reward"][:]

    def _tables(self, source: Source, numbers: Sequence[int]) -> Iterator[Table]:
        key = (self, file_stamps(self.files(source)))
        groups = _groups_of.get(key, lambda: self._groups(source))
        for where, group in opened_groups([groups[number] for number in numbers]):
            yield self._table(where, group)[0]

    def _groups(self, source: Source) -> list[EpisodeGroup]:
        """Returns the groups of one file after the other, by their numbers, which may have gaps.

        Raises:
            ValueError: a file has none, or two of one number.
        """
        groups: list[EpisodeGroup] = []
        for path in self.files(source):
            with hdf5.opened(path) as file:
                above = hdf5.own(file, self.parent)
                if not isinstance(above, h5py.Group):
                    raise ValueError(f"{path}: expected a group '{self.parent}', got {list(file)}.")
                prefix = str(above.name).rstrip("/")
                matches = {name: self.pattern.fullmatch(name) for name in map(str, above)}
            inside = [
                EpisodeGroup(path, f"{prefix}/{name}", int(match[1]))
                for name, match in matches.items()
                if match
            ]
            if not inside or len({each.number for each in inside}) < len(inside):
                raise ValueError(
                    f"{path}: expected one group or more, each of a number of its own, that are "
                    f"named as {self.pattern.pattern}, got {[each.name for each in inside]}."
                )
            groups += sorted(inside, key=operator.attrgetter("number"))
        return groups

    def _table(
        self, where: EpisodeGroup, group: h5py.Group, limit: ExpansionLimit | None = None
    ) -> tuple[Table, set[str]]:
        """Returns the steps of an episode, and the names of arrays that are not of its steps."""
        every = hdf5.below(group)
        arrays = {name: array for name, array in every.items() if array.is_numeric}
        check_names_present(where, arrays, self.needed)
        steps = len(arrays[self.needed[0]])
        columns: dict[str, Column] = {}
        for name, array in arrays.items():
            leaf = self.leaf_of(name)
            if len(array) == steps or leaf.split("/")[0] in ("observation", "action", "next"):
                columns[leaf] = array
        check_lengths(where, columns)
        if not steps or not any(map(is_seen, columns)):
            raise ValueError(
                f"{where}: expected observations of one step or more, got {steps} steps of "
                f"{list(arrays)}."
            )
        others = {name for name in every if self.leaf_of(name) not in columns}
        if limit is not None:  # before anything is read
            limit.add(declared_nbytes(columns))
        terminated = flag_column(columns[TERMINATED], TERMINATED, where)[:]
        columns |= {TERMINATED: terminated, TRUNCATED: np.zeros_like(terminated)}
        return Table(columns, np.array([steps])), others


_groups_of: StatCache[list[EpisodeGroup]] = StatCache()


def opened_groups(
    groups: Sequence[EpisodeGroup],
) -> Iterator[tuple[EpisodeGroup, h5py.Group]]:
    """Yields open groups; neighbours in one file share its handle.

    Raises:
        ValueError: one is no group of its file.
    """
    for path, neighbours in itertools.groupby(groups, operator.attrgetter("path")):
        with hdf5.opened(path) as file:
            for where in neighbours:
                group = hdf5.own(file, where.name)
                if not isinstance(group, h5py.Group):
                    raise ValueError(f"{where}: expected a group of this file, got none.")
                yield where, group


def _gap_notes(groups: Sequence[EpisodeGroup]) -> tuple[str, ...]:
    """Returns a note on each file in which some numbers are missing."""
    notes = list[str]()
    for path, neighbours in itertools.groupby(groups, operator.attrgetter("path")):
        inside = list(neighbours)
        first, last = inside[0], inside[-1]
        missing = last.number - first.number + 1 - len(inside)
        if missing:
            between = " and ".join(os.path.basename(each.name) for each in (first, last))
            file = os.path.basename(path)
            notes.append(f"{file}: {missing} numbers are missing between {between}.")
    return tuple(notes)
