"""Formats with one HDF5 group per episode: RoboSet and robomimic.

K episodes, T steps of one episode.

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
from jrb.datasets.reading.names import check, natural_order, to_ted, usual_leaf
from jrb.datasets.reading.tabular import DONE, FLAGS, TERMINATED, Column, EpisodeTables, Table


@dataclasses.dataclass(frozen=True)
class EpisodeGroup:
    """The HDF5 group of one episode: file, group name, number in the name, index of the file."""

    path: str
    name: str
    number: int
    file: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


class GroupFormat(tabular.EpisodeFormat):
    """A format whose files have one group per episode, with arrays `[T, ...]` of its steps.

    Attributes:
        pattern: a regular expression for the groups' names; its first group matches the number.
        parent: the name of the HDF5 group that contains the episodes' groups.
        needed: the arrays or groups of arrays that each episode must have; the first is an array
            of T rows.
        own: the names of arrays and groups that the format prescribes; see `to_ted`.
        carried: the first parts of leaves that may have T + 1 rows, such as `observation`.
        fact_groups: the paths of groups outside of the episodes whose arrays the facts report.
    """

    pattern: ClassVar[re.Pattern[str]]
    parent: ClassVar[str] = "/"
    needed: ClassVar[tuple[str, ...]]
    own: ClassVar[tuple[str, ...]]
    carried: ClassVar[tuple[str, ...]] = ()
    fact_groups: ClassVar[tuple[str, ...]] = ()

    def groups(self, source: Source) -> list[EpisodeGroup]:
        """Returns the groups of one file after the other, each file's sorted by their numbers."""
        files = self.files(source)
        read = lambda: [group for file in enumerate(files) for group in self.groups_in(*file)]
        groups = tabular.read_once(files, self, read)
        check(groups, source, self.looks_for, "none")
        return groups

    def groups_in(self, file_number: int, path: str) -> list[EpisodeGroup]:
        """Returns the groups of a file, sorted; raises if it has none, or two of one number."""
        with hdf5.open_file(path) as file:
            # Find the groups by their names alone; their arrays are opened when they are read.
            above = hdf5.open_entry(file, self.parent)
            check(isinstance(above, h5py.Group), path, f"a group '{self.parent}'", list(file))
            prefix = str(above.name).rstrip("/")
            matches = [match for match in map(self.pattern.fullmatch, map(str, above)) if match]
        numbers = {f"{prefix}/{match[0]}": int(match[1]) for match in matches}
        groups = [EpisodeGroup(path, name, k, file_number) for name, k in numbers.items()]
        # `Trial1` and `Trial01` would have one number.
        is_right = 0 < len(groups) == len({each.number for each in groups})
        expected = f"groups, each of a number of its own, that are named as {self.pattern.pattern}"
        check(is_right, path, expected, [each.name for each in groups])
        return sorted(groups, key=operator.attrgetter("number"))

    def tables(self, source: Source, numbers: Sequence[int] | None) -> EpisodeTables:
        """Yields the group and the table of each episode in `numbers`; None for all."""
        groups = self.groups(source)
        selection = groups if numbers is None else [groups[number] for number in numbers]
        first: tuple[object, list[str]] | None = None
        for where, group in open_groups(selection):
            flags = [name for name in map(str, group) if usual_leaf(name, "/") in FLAGS]
            first = first or (where, flags)
            # Without a flag that others have, an episode would end in another way.
            tabular.check_present(where, flags, first[1])
            tabular.check_present(first[0], first[1], flags)
            # Facts are read once, by `describe`, and not with each episode.
            table = self.table(where, hdf5.columns_below(group))
            facts = self.facts(source, where) if numbers is None else {}
            yield where, dataclasses.replace(table, facts=facts)

    def facts(self, source: Source, where: EpisodeGroup) -> dict[str, Any]:
        """Returns an episode's facts by name, each a single value; by default none."""
        return {}

    def table(self, where: object, arrays: Mapping[str, Column]) -> Table:
        """Returns the table of an episode; raises if arrays are missing or differ in length."""
        # The episode must have all that the format prescribes.
        numbers, _, _ = tabular.sort_arrays(arrays)
        tabular.check_present(where, numbers, self.needed[:1])
        heads = dict.fromkeys(name.split("/")[0] for name in numbers)
        tabular.check_present(where, heads, self.needed)
        # Name the arrays as in TED, and leave out those of other lengths.
        leaves = to_ted(numbers, None, where, self.own, "/")
        columns, _ = tabular.step_columns(where, numbers, leaves, self.carried)
        steps = len(numbers[self.needed[0]])
        left_out = {name for name in arrays if leaves.get(name) not in columns}
        lengths = {n: len(column) for n, column in columns.items() if tabular.is_seen(n)}
        check(len({*lengths.values()}) < 2, where, "arrays of one length", lengths)
        got = f"{steps} steps of {list(numbers)}"
        check(steps and lengths, where, "observations of one step or more", got)
        # Divide arrays with a row more, and derive the flags.
        columns = tabular.with_next(columns, steps, self.carried)
        ends = np.array([steps])
        flag_columns = tabular.with_flags(columns, ends, where)
        done = repr(next((name for name in numbers if leaves[name] == DONE), DONE))
        notes = tabular.flag_notes(columns, flag_columns[TERMINATED], done)
        return Table(flag_columns, ends, notes=notes, left_out=left_out)

    def file_notes(self, source: Source) -> tuple[str, ...]:
        """Returns notes on gaps in the numbers of groups, and on arrays to which no group leads."""
        notes, outside = list[str](), set[str]()
        for path, neighbours in itertools.groupby(self.groups(source), lambda each: each.path):
            groups = list(neighbours)
            # A gap in the numbers may be a demonstration that was removed, or lost.
            if missing := groups[-1].number - groups[0].number - len(groups) + 1:
                between = " and ".join(os.path.basename(groups[k].name) for k in (0, -1))
                file = os.path.basename(path)
                notes.append(f"{file}: {missing} numbers are missing between {between}.")
            # Report arrays to which neither a group of an episode nor one of facts leads.
            if hdf5.is_hdf5(path):
                names = {*self.fact_groups, *(each.name for each in groups)}
                outside |= hdf5.names_outside(path, names)
        return (*notes, *tabular.note_left_out(outside))


def open_groups(groups: Sequence[EpisodeGroup]) -> Iterator[tuple[EpisodeGroup, h5py.Group]]:
    """Yields each group with its open HDF5 group; opens a file once for consecutive groups."""
    for path, neighbours in itertools.groupby(groups, operator.attrgetter("path")):
        with hdf5.open_file(path) as file:
            for where in neighbours:
                group = hdf5.open_entry(file, where.name)
                check(isinstance(group, h5py.Group), where, "a group of this file", "none")
                yield where, group


@dataclasses.dataclass(frozen=True)
class RoboSet(GroupFormat):
    """HDF5 files with `Trial<N>/{observations, actions, rewards, done, env_infos, ...}`.

    All arrays have the trial's length. `done` may be missing; trials are then taken for truncated.
    The facts are `seed`, the index of the file, and `episode`,
    the trial's number. Files are read in the order of their names, trials by their numbers.
    """

    name: ClassVar[str] = "roboset"
    looks_for: ClassVar[str] = "an HDF5 file with groups Trial<N>, or a folder of such"
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"Trial(\d+)")
    needed: ClassVar[tuple[str, ...]] = ("actions", "rewards")
    own: ClassVar[tuple[str, ...]] = (*needed, "observations", "done", "env_infos")

    def is_own(self, source: str, name: str) -> bool:
        """Returns True if the file `name` in the folder `source` is an HDF5 file."""
        return "/" not in name and hdf5.is_hdf5(os.path.join(source, name))

    def matches(self, source: Source) -> bool:
        """Returns True if the first file has groups of trials."""
        files = self.files(source)
        names = hdf5.top_level(files[0]) if files else {}
        return any(self.pattern.fullmatch(name) and names[name] for name in names)

    def files(self, source: Source) -> list[str]:
        """Returns the source if it is an HDF5 file, or the HDF5 files in a folder."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return [source] if hdf5.is_hdf5(source) else []
        names = sorted(os.listdir(source), key=natural_order)
        paths = [os.path.join(source, name) for name in names]
        # A damaged file is kept, so that opening it raises an error.
        return [path for path in paths if hdf5.is_hdf5(path) or path.endswith((".h5", ".hdf5"))]

    def facts(self, source: Source, where: EpisodeGroup) -> dict[str, Any]:
        """Returns `seed`, the index of the file, and `episode`, the number of the trial."""
        return {"seed": where.file, "episode": where.number}

    def about(self, source: Source) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Returns the names of the files as metadata, and notes."""
        names = [os.path.basename(path) for path in self.files(source)]
        return {"files": names}, self.file_notes(source)


@dataclasses.dataclass(frozen=True)
class Robomimic(GroupFormat):
    """One HDF5 file with `data/demo_<k>/{obs, next_obs, actions, rewards, dones, states}`.

    The metadata have `env_args`, the arguments of the environment, from JSON. Rewards and `dones`
    may be missing, as in files of Isaac Lab: the end of a demonstration without flags is taken for
    truncated, as nothing says that its value is 0. The facts are `demo`, the number of a
    demonstration, and `mask/<key>`, bool, True if the file lists it under this key, such as
    `train`.
    """

    name: ClassVar[str] = "robomimic"
    looks_for: ClassVar[str] = "an HDF5 file with groups data/demo_<k>"
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"demo_(\d+)")
    parent: ClassVar[str] = "data"
    needed: ClassVar[tuple[str, ...]] = ("actions",)
    own: ClassVar[tuple[str, ...]] = (*needed, "obs", "next_obs", "rewards", "dones")
    fact_groups: ClassVar[tuple[str, ...]] = ("/mask",)

    def files(self, source: Source) -> list[str]:
        """Returns the source, which is one file."""
        return [source]

    def matches(self, source: Source) -> bool:
        """Returns True if the file has groups of demonstrations."""
        if not hdf5.top_level(source).get("data"):
            return False
        with hdf5.open_file(source) as file:
            return any(map(self.pattern.fullmatch, map(str, hdf5.open_entry(file, "data"))))

    def facts(self, source: Source, where: EpisodeGroup) -> dict[str, Any]:
        """Returns `demo`, the number, and `mask/<key>`, True for each list that has it."""
        name = where.name.split("/")[-1]
        masks = {f"mask/{key}": name in names for key, names in self._masks(source).items()}
        return {"demo": where.number, **masks}

    def about(self, source: Source) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Returns the attributes of the file and of `data` as metadata, and notes."""
        groups, notes = self.groups(source), list[str]()
        metadata: dict[str, Any] = {}
        with hdf5.open_file(source) as file:
            for name, value in {**file.attrs, **hdf5.open_entry(file, "data").attrs}.items():
                metadata[name] = hdf5.to_python(value)
        # Some attributes are JSON in a text.
        for name, value in metadata.items():
            if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
                with contextlib.suppress(ValueError):  # a text that is not JSON stays a text
                    metadata[name] = json.loads(value)
        # A list may name demonstrations that the file lacks.
        for key, names in self._masks(source).items():
            missing_names = names - {group.name.split("/")[-1] for group in groups}
            if missing_names:
                first = sorted(missing_names, key=natural_order)[:3]
                first += ["..."] * (len(missing_names) > 3)
                lists = f"mask/{key} lists {len(missing_names)} names that no demonstration has"
                notes.append(f"{lists}: {', '.join(first)}.")
        return metadata, (*notes, *self.file_notes(source))

    def _masks(self, source: Source) -> dict[str, set[str]]:
        """Returns the file's lists of demonstrations: a set of names for each key."""

        def read() -> dict[str, set[str]]:
            with hdf5.open_file(source) as file:
                masks = hdf5.open_entry(file, "mask")
                lists = hdf5.columns_below(masks) if isinstance(masks, h5py.Group) else {}
                limit = ExpansionLimit(source, [source], self.max_expansion)
                limit.add(declared_nbytes(lists))
                texts_of = {key: np.reshape(entry[:], -1) for key, entry in lists.items()}
            to_text = lambda text: str(hdf5.to_python(text))
            return {key: set(map(to_text, texts)) for key, texts in texts_of.items()}

        return tabular.read_once([source], ("masks", self.max_expansion), read)
