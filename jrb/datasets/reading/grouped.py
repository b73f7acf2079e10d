"""Layouts that keep each episode in an HDF5 group of its own: what they have in common.

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

from jrb._util import expansion
from jrb._util.pytree import PyTree
from jrb.datasets.format import Description, Episode, Indexed, Source
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.derived import Flag
from jrb.datasets.reading.flat import Column, Table, check_lengths, left_out_note, needed
from jrb.datasets.reading.stat_cache import Remembered, stamps

_OVER = "next/terminated"
_STRICT = ("observation", "action", "next")

NO_REWARDS = "There are no rewards in the files."


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an episode lies.

    Attributes:
        path: of the file.
        group: its name in there.
        number: the one in that name.
    """

    path: str
    group: str
    number: int


class Grouped(Indexed):
    """A format whose files have a group for each episode, with arrays `[T, ...]` of its steps.

    Attributes:
        needed: the arrays that every group has.
        names: what the first parts of names stand for in TED, such as `next/reward` for `rewards`.
    """

    needed: ClassVar[tuple[str, ...]]
    names: ClassVar[Mapping[str, str]]

    def files(self, source: Source) -> list[str]:
        """Where they lie."""
        return [source]

    @abc.abstractmethod
    def places(self, source: Source) -> list[Place]:
        """Where the episodes lie, in their order; `places_in` finds those of a file."""

    def leaf_of(self, name: str) -> str:
        """The leaf in TED of an array of a group, by the first of its parts."""
        first, *rest = name.split("/")
        return "/".join([self.names.get(first, first), *rest])

    @abc.abstractmethod
    def episode_layout(
        self, source: Source, places: Sequence[Place]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Facts, metadata and notes; see `Description`."""

    def describe(self, source: Source) -> Description:
        """What there is, from the shapes and the flags of all groups."""
        places = self.places(source)
        if not places:
            raise ValueError(f"{source}: expected {self.looks_for}, got none.")
        facts, metadata, notes = self.episode_layout(source, places)
        first: Any = None
        lengths, cuts, left_out = [], [], set[str]()
        limit = expansion.Limit(source, self.files(source), self.max_expansion)
        for group, place in _groups(places):
            table, others = self._table(group, place, limit)
            first = table.spec if first is None else first
            _check_same(place, table.spec, first)
            lengths.append(int(table.ends[0]))
            cuts.append(not table.has_next and not table.terminated[0])
            left_out |= others
        has_rewards = first is not None and "reward" in first["next"]
        notes += () if has_rewards else (NO_REWARDS,)
        notes += left_out_note(left_out)
        return Description(
            first, np.array(lengths, np.int64), np.array(cuts), facts, metadata, notes
        )

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The episodes of these numbers."""
        for table in self._tables(source, numbers):
            yield table.rows(0, int(table.ends[0]))

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The rewards of these episodes, without the rest of them."""
        for table in self._tables(source, numbers):
            yield table.columns["next/reward"][:]

    def _tables(self, source: Source, numbers: Sequence[int]) -> Iterator[Table]:
        key = (self, stamps(self.files(source)))
        places = _known.get(key, lambda: self.places(source))
        for group, place in _groups([places[number] for number in numbers]):
            yield self._table(group, place)[0]

    def _table(
        self, group: h5py.Group, place: Place, limit: expansion.Limit | None = None
    ) -> tuple[Table, set[str]]:
        """The steps of an episode, and the names of what is no array of them."""
        where = f"{place.path}: {place.group}"
        every = hdf5.below(group)
        found = {name: leaf for name, leaf in every.items() if leaf.is_numeric}
        needed(where, found, self.needed)
        steps = len(found[self.needed[0]])
        columns: dict[str, Column] = {
            self.leaf_of(name): leaf
            for name, leaf in found.items()
            if len(leaf) == steps or self.leaf_of(name).split("/")[0] in _STRICT
        }
        check_lengths(where, columns)
        if not steps or not any(name.split("/")[0] == "observation" for name in columns):
            raise ValueError(
                f"{where}: expected observations of one step or more, got {steps} steps of "
                f"{list(found)}."
            )
        if limit is not None:
            limit.add(expansion.nbytes(columns))
        over = Flag(columns[_OVER], _OVER, where)[:]
        flags = {_OVER: over, "next/truncated": np.zeros_like(over)}
        others = {name for name in every if self.leaf_of(name) not in columns}
        return Table(columns | flags, np.array([steps])), others


_known: Remembered[list[Place]] = Remembered()


def places_in(path: str, group: h5py.Group, pattern: re.Pattern[str]) -> list[Place]:
    """The groups of a file whose names are of a pattern, by the number that its first group finds.

    Raises:
        ValueError: none, or two of one number.
    """
    names = {name: pattern.fullmatch(name) for name in map(str, group)}
    above = str(group.name).rstrip("/")
    found = [
        Place(path, f"{above}/{name}", int(match[1])) for name, match in names.items() if match
    ]
    found.sort(key=operator.attrgetter("number"))
    numbers = [place.number for place in found]
    if not found or len(set(numbers)) != len(numbers):
        raise ValueError(
            f"{path}: expected one group or more, each of a number of its own, that are named as "
            f"{pattern.pattern}, got {[place.group for place in found]}."
        )
    return found


def gap_notes(places: Sequence[Place]) -> tuple[str, ...]:
    """Returns a sentence for each file in which some numbers are missing."""
    notes = []
    for path, group in itertools.groupby(places, operator.attrgetter("path")):
        inside = list(group)
        first, last = inside[0], inside[-1]
        missing = last.number - first.number + 1 - len(inside)
        between = " and ".join(os.path.basename(place.group) for place in (first, last))
        file = os.path.basename(path)
        notes += [f"{file}: {missing} numbers are missing between {between}."] * (missing > 0)
    return tuple(notes)


def _groups(places: Sequence[Place]) -> Iterator[tuple[h5py.Group, Place]]:
    """The groups, each file opened once for those of it that follow each other."""
    for path, inside in itertools.groupby(places, operator.attrgetter("path")):
        with hdf5.opened(path) as file:
            for place in inside:
                yield group_at(file, place), place


def group_at(file: h5py.File, place: Place) -> h5py.Group:
    """The group of an episode.

    Raises:
        ValueError: it is none, or lies elsewhere.
    """
    group = hdf5.own(file, place.group)
    if not isinstance(group, h5py.Group):
        raise ValueError(f"{place.path}: {place.group}: expected a group of this file, got none.")
    return group


def _check_same(place: Place, spec: PyTree, first: Any) -> None:
    """Refuses an episode of other leaves than the first one."""
    if spec != first:
        raise ValueError(
            f"{place.path}: {place.group}: expected the leaves of the first episode, {first}, got "
            f"{spec}."
        )
