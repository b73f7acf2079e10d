"""Formats that keep each episode in an HDF5 group of its own: RoboSet, robomimic.

K episodes, T steps of one.

References: Bharadhwaj et al., RoboAgent, 2023. Mandlekar et al., What Matters in Learning from
Offline Human Demonstrations, 2021.
"""

import contextlib
import dataclasses
import itertools
import json
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import h5py
import numpy as np

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5, tabular
from jrb.datasets.reading.names import check, natural_order
from jrb.datasets.reading.tabular import TERMINATED, TRUNCATED, Column, EpisodeTables, Table

_DONE_NOTE = "The files have one flag, 'done': it is taken for a termination, not for a time-out."
_DONES_NOTE = (
    "The file has one flag, 'dones', for a task that is done and for the end of a demonstration: "
    "it is taken for a termination."
)


@dataclasses.dataclass(frozen=True)
class EpisodeGroup:
    """The group of one episode: its file, its name in there, and the numbers of both."""

    path: str
    name: str
    number: int
    file: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


class GroupFormat(tabular.EpisodeFormat):
    """A format whose files have a group for each episode, with arrays `[T, ...]` of its steps.

    Attributes:
        pattern: of the names of these groups; its first group finds the number.
        parent: the group that they are in.
        needed: the first parts of names of arrays that each of them has; the first one, an array
            itself, has T rows.
        names: the leaves in TED of the first parts of names, such as `next/reward` for `rewards`;
            one of them is `next/terminated`.
        carried: the first parts of leaves that may have a row more than there are steps.
    """

    pattern: ClassVar[re.Pattern[str]]
    parent: ClassVar[str] = "/"
    needed: ClassVar[tuple[str, ...]]
    names: ClassVar[Mapping[str, str]]
    carried: ClassVar[tuple[str, ...]] = ()

    def groups(self, source: Source) -> list[EpisodeGroup]:
        """Returns the groups of one file after the other, by their numbers, which may have gaps."""
        files = self.files(source)
        inside = lambda: [group for file in enumerate(files) for group in self.groups_in(*file)]
        groups = tabular.cached(files, self, inside)
        check(groups, source, self.looks_for, "none")
        return groups

    def groups_in(self, file_number: int, path: str) -> list[EpisodeGroup]:
        """Returns the groups of a file; refuses one without any, or with two of one number."""
        with hdf5.open_file(path) as file:
            above = hdf5.own(file, self.parent)
            check(isinstance(above, h5py.Group), path, f"a group '{self.parent}'", list(file))
            prefix = str(above.name).rstrip("/")
            matches = [match for match in map(self.pattern.fullmatch, map(str, above)) if match]
        numbers = {f"{prefix}/{match[0]}": int(match[1]) for match in matches}
        groups = [EpisodeGroup(path, name, k, file_number) for name, k in numbers.items()]
        is_right = 0 < len(groups) == len({each.number for each in groups})
        expected = f"groups, each of a number of its own, that are named as {self.pattern.pattern}"
        check(is_right, path, expected, [each.name for each in groups])
        return sorted(groups, key=operator.attrgetter("number"))

    def tables(self, source: Source, numbers: Sequence[int] | None) -> EpisodeTables:
        """Yields the tables of episodes, and where each is."""
        groups = self.groups(source)
        chosen = groups if numbers is None else [groups[number] for number in numbers]
        for where, group in open_groups(chosen):
            table = self.table(where, hdf5.below(group))
            facts = self.facts(source, where) if numbers is None else {}
            yield where, dataclasses.replace(table, facts=facts)

    def facts(self, source: Source, where: EpisodeGroup) -> dict[str, Any]:
        """Returns single facts of an episode by name."""
        return {}

    def table(self, where: object, arrays: Mapping[str, Column]) -> Table:
        """Returns the steps of an episode; refuses one that lacks arrays, or rows of them."""
        every, _, _ = tabular.by_content(arrays)
        tabular.check_present(where, every, self.needed[:1])
        heads = dict.fromkeys(name.split("/")[0] for name in every)
        tabular.check_present(where, heads, self.needed)
        steps, columns = len(every[self.needed[0]]), dict[str, Column]()
        for name, array in every.items():
            leaf, rows = self.leaf_of(name), len(array)
            head = leaf.split("/")[0]
            is_carried = head in self.carried and rows == steps + 1
            if rows == steps or is_carried or head in ("observation", "action", "next"):
                columns[leaf] = array
        left_out = {name for name in arrays if self.leaf_of(name) not in columns}
        seen = {name: column for name, column in columns.items() if tabular.is_seen(name)}
        tabular.check_lengths(where, seen)
        columns = tabular.with_next(columns, steps, self.carried)
        tabular.check_lengths(where, columns)
        got = f"{steps} steps of {list(every)}"
        check(steps and seen, where, "observations of one step or more", got)
        columns.setdefault(TRUNCATED, np.zeros(steps, bool))
        for name in (TERMINATED, TRUNCATED):
            columns[name] = tabular.flag_column(columns[name], name, where)
        return Table(columns, np.array([steps]), left_out=left_out)

    def leaf_of(self, name: str) -> str:
        """Returns the leaf in TED of an array of a group."""
        first, *parts = name.split("/")
        return "/".join([self.names.get(first, first), *parts])


def open_groups(groups: Sequence[EpisodeGroup]) -> Iterator[tuple[EpisodeGroup, h5py.Group]]:
    """Yields open groups; neighbours in one file share its handle."""
    for path, neighbours in itertools.groupby(groups, operator.attrgetter("path")):
        with hdf5.open_file(path) as file:
            for where in neighbours:
                group = hdf5.own(file, where.name)
                check(isinstance(group, h5py.Group), where, "a group of this file", "none")
                yield where, group


def gap_notes(groups: Sequence[EpisodeGroup]) -> tuple[str, ...]:
    """Returns a note on each file in which some numbers are missing."""
    notes = list[str]()
    for path, neighbours in itertools.groupby(groups, operator.attrgetter("path")):
        first, *others = neighbours
        last = others[-1] if others else first
        if missing := last.number - first.number - len(others):
            between = " and ".join(os.path.basename(each.name) for each in (first, last))
            file = os.path.basename(path)
            notes.append(f"{file}: {missing} numbers are missing between {between}.")
    return tuple(notes)


@dataclasses.dataclass(frozen=True)
class RoboSet(GroupFormat):
    """HDF5 files with `Trial<N>/{observations, actions, rewards, done, env_infos, ...}`.

    All arrays have the trial's length. As facts, `seed` counts the files, and `episode` is the
    trial's number. Files are in the order of their names, numbers in them by their values.
    """

    name: ClassVar[str] = "roboset"
    looks_for: ClassVar[str] = "an HDF5 file with groups Trial<N>, or a folder of such"
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"Trial(\d+)")
    needed: ClassVar[tuple[str, ...]] = ("actions", "rewards", "done")
    names: ClassVar[Mapping[str, str]] = {
        "observations": "observation",
        "actions": "action",
        "rewards": "next/reward",
        "done": "next/terminated",
        "env_infos": "info",
    }

    def is_own(self, source: str, name: str) -> bool:
        """Returns True if a file is one of those with trials."""
        return "/" not in name and hdf5.is_hdf5(os.path.join(source, name))

    def matches(self, source: Source) -> bool:
        """Returns True if there are trials in the first of the files."""
        files = self.files(source)
        names = hdf5.top(files[0]) if files else {}
        return any(self.pattern.fullmatch(name) and names[name] for name in names)

    def files(self, source: Source) -> list[str]:
        """Returns one HDF5 file, or those in a folder."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return [source] if hdf5.is_hdf5(source) else []
        names = sorted(os.listdir(source), key=natural_order)
        paths = [os.path.join(source, name) for name in names]
        # A damaged file is kept, so that it is refused when it is opened.
        return [path for path in paths if hdf5.is_hdf5(path) or path.endswith((".h5", ".hdf5"))]

    def facts(self, source: Source, where: EpisodeGroup) -> dict[str, Any]:
        """Returns the numbers of the file and of the trial."""
        return {"seed": where.file, "episode": where.number}

    def about(self, source: Source) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Returns the names of the files, and notes."""
        names = [os.path.basename(path) for path in self.files(source)]
        return {"files": names}, (_DONE_NOTE, *gap_notes(self.groups(source)))


@dataclasses.dataclass(frozen=True)
class Robomimic(GroupFormat):
    """One HDF5 file with `data/demo_<k>/{obs, next_obs, actions, rewards, dones, states}`.

    `data` has `env_args`, of which the environment was built, as JSON. Rewards may be missing. As
    facts, `demo` is the number of a demonstration, and `mask/<key>`, bool, tells which of them the
    file lists under this key, such as those to train on.
    """

    name: ClassVar[str] = "robomimic"
    looks_for: ClassVar[str] = "an HDF5 file with groups data/demo_<k>"
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"demo_(\d+)")
    parent: ClassVar[str] = "data"
    needed: ClassVar[tuple[str, ...]] = ("actions", "dones")
    names: ClassVar[Mapping[str, str]] = {
        "obs": "observation",
        "next_obs": "next/observation",
        "actions": "action",
        "rewards": "next/reward",
        "dones": "next/terminated",
    }

    def files(self, source: Source) -> list[str]:
        """Returns the file."""
        return [source]

    def matches(self, source: Source) -> bool:
        """Returns True if there are demonstrations."""
        if not hdf5.top(source).get("data"):
            return False
        with hdf5.open_file(source) as file:
            return any(map(self.pattern.fullmatch, map(str, hdf5.own(file, "data"))))

    def facts(self, source: Source, where: EpisodeGroup) -> dict[str, Any]:
        """Returns the number, and in which lists a demonstration is."""
        name = where.name.split("/")[-1]
        masks = {f"mask/{key}": name in names for key, names in self._masks(source).items()}
        return {"demo": where.number, **masks}

    def about(self, source: Source) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Returns the attributes of the file and of `data`, and notes."""
        groups, notes = self.groups(source), list[str]()
        with hdf5.open_file(source) as file:
            attributes = {**file.attrs, **hdf5.own(file, "data").attrs}
        metadata: dict[str, Any] = {name: hdf5.plain(value) for name, value in attributes.items()}
        for name, value in metadata.items():
            if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
                with contextlib.suppress(ValueError):  # a text that is no JSON stays
                    metadata[name] = json.loads(value)
        for key, names in self._masks(source).items():
            missing = names - {group.name.split("/")[-1] for group in groups}
            if missing:
                shown = sorted(missing, key=natural_order)[:3] + ["..."] * (len(missing) > 3)
                lists = f"mask/{key} lists {len(missing)} demonstrations that are not in the file"
                notes.append(f"{lists}: {', '.join(shown)}.")
        return metadata, (_DONES_NOTE, *notes, *gap_notes(groups))

    def _masks(self, source: Source) -> dict[str, set[str]]:
        """Returns the names of demonstrations that are listed, by key."""

        def read() -> dict[str, set[str]]:
            with hdf5.open_file(source) as file:
                masks = hdf5.own(file, "mask")
                lists = hdf5.below(masks) if isinstance(masks, h5py.Group) else {}
                limit = ExpansionLimit(source, [source], self.max_expansion)
                limit.add(declared_nbytes(lists))
                every = {key: np.reshape(entry[:], -1) for key, entry in lists.items()}
            return {key: {str(hdf5.plain(text)) for text in texts} for key, texts in every.items()}

        return tabular.cached([source], ("masks", self.max_expansion), read)
