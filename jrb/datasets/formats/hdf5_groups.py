"""Formats that keep each episode in an HDF5 group of its own: RoboSet, robomimic.

K episodes, T steps of one.

References: Bharadhwaj et al., RoboAgent, 2023. Mandlekar et al., What Matters in Learning from
Offline Human Demonstrations, 2021.
"""

import abc
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

from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.columns import (
    TERMINATED,
    TRUNCATED,
    Column,
    DerivedColumn,
    EpisodeFormat,
    Table,
    by_content,
    cached,
    check_lengths,
    check_present,
    flag_column,
    is_seen,
    with_next,
)
from jrb.datasets.reading.names import natural_order

_DONE_NOTE = "The files have one flag, 'done': it is taken for a termination, not for a time-out."
_DONES_NOTE = (
    "The file has one flag, 'dones', for a task that is done and for the end of a demonstration: "
    "it is taken for a termination."
)


@dataclasses.dataclass(frozen=True)
class EpisodeGroup:
    """The group of one episode: its file, its name in there, and the number in that name."""

    path: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


class GroupFormat(EpisodeFormat):
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

    @abc.abstractmethod
    def layout(
        self, source: Source, groups: Sequence[EpisodeGroup]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Returns facts, metadata and notes; see `Description`."""

    def about(
        self, source: Source
    ) -> tuple[int, Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Returns what is known without the arrays, with a note on numbers that are missing."""
        groups = self.groups(source)
        if not groups:
            raise ValueError(f"{source}: expected {self.looks_for}, got none.")
        facts, metadata, notes = self.layout(source, groups)
        for path, neighbours in itertools.groupby(groups, operator.attrgetter("path")):
            inside = list(neighbours)
            first, last = inside[0], inside[-1]
            missing = last.number - first.number + 1 - len(inside)
            if missing:
                between = " and ".join(os.path.basename(each.name) for each in (first, last))
                file = os.path.basename(path)
                notes += (f"{file}: {missing} numbers are missing between {between}.",)
        return len(groups), facts, metadata, notes

    def groups(self, source: Source) -> list[EpisodeGroup]:
        """Returns the groups of one file after the other, by their numbers, which may have gaps.

        Raises:
            ValueError: a file has none, or two of one number.
        """
        files = self.files(source)
        return cached(
            files, self, lambda: [group for path in files for group in self._inside(path)]
        )

    def _inside(self, path: str) -> list[EpisodeGroup]:
        with hdf5.opened(path) as file:
            above = hdf5.own(file, self.parent)
            if not isinstance(above, h5py.Group):
                raise ValueError(f"{path}: expected a group '{self.parent}', got {list(file)}.")
            prefix = str(above.name).rstrip("/")
            matches = [match for match in map(self.pattern.fullmatch, map(str, above)) if match]
        groups = [EpisodeGroup(path, f"{prefix}/{match[0]}", int(match[1])) for match in matches]
        if not groups or len({each.number for each in groups}) < len(groups):
            raise ValueError(
                f"{path}: expected one group or more, each of a number of its own, that are named "
                f"as {self.pattern.pattern}, got {[each.name for each in groups]}."
            )
        return sorted(groups, key=operator.attrgetter("number"))

    def tables(self, source: Source, numbers: Sequence[int]) -> Iterator[tuple[object, Table]]:
        """Yields the tables of episodes, and where each is."""
        groups = self.groups(source)
        for where, group in opened_groups([groups[number] for number in numbers]):
            yield where, self.table(where, hdf5.below(group))

    def table(self, where: object, arrays: Mapping[str, Column]) -> Table:
        """Returns the steps of an episode.

        Raises:
            ValueError: arrays are missing, or are not of one length.
        """
        every, _, _ = by_content(arrays)
        check_present(where, every, self.needed[:1])
        check_present(where, {name.split("/")[0]: None for name in every}, self.needed)
        steps, columns = len(every[self.needed[0]]), dict[str, Column]()
        for name, array in every.items():
            leaf, rows = self.leaf_of(name), len(array)
            head = leaf.split("/")[0]
            is_carried = head in self.carried and rows == steps + 1
            if rows == steps or is_carried or head in ("observation", "action", "next"):
                columns[leaf] = array
        left_out = {name for name in arrays if self.leaf_of(name) not in columns}
        check_lengths(where, {name: leaf for name, leaf in columns.items() if is_seen(name)})
        columns = with_next(columns, steps, self.carried)
        check_lengths(where, columns)
        if not steps or not any(map(is_seen, columns)):
            raise ValueError(
                f"{where}: expected observations of one step or more, got {steps} steps of "
                f"{list(every)}."
            )
        for name in (TERMINATED, TRUNCATED):
            if name in columns:
                columns[name] = flag_column(columns[name], name, where)
            else:
                zeros = lambda start, stop: np.zeros(stop - start, bool)
                columns[name] = DerivedColumn((steps,), np.dtype(bool), zeros)
        return Table(columns, np.array([steps]), left_out=left_out)

    def leaf_of(self, name: str) -> str:
        """Returns the leaf in TED of an array of a group."""
        first, *parts = name.split("/")
        return "/".join([self.names.get(first, first), *parts])


def opened_groups(groups: Sequence[EpisodeGroup]) -> Iterator[tuple[EpisodeGroup, h5py.Group]]:
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

    def layout(
        self, source: Source, groups: Sequence[EpisodeGroup]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Returns the numbers of files and trials."""
        files = self.files(source)
        facts = {
            "seed": np.array([files.index(group.path) for group in groups], np.int64),
            "episode": np.array([group.number for group in groups], np.int64),
        }
        return facts, {"files": [os.path.basename(path) for path in files]}, (_DONE_NOTE,)


@dataclasses.dataclass(frozen=True)
class Robomimic(GroupFormat):
    """One HDF5 file with `data/demo_<k>/{obs, next_obs, actions, rewards, dones, states}`.

    Each demonstration has an attribute `num_samples`; `data` has `env_args`, of which the
    environment was built, as JSON. Rewards may be missing. As facts, `demo` is the number of a
    demonstration, and `mask/<key>`, bool, tells which of them the file lists under this key, such
    as those to train on.
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
        with hdf5.opened(source) as file:
            return any(map(self.pattern.fullmatch, map(str, hdf5.own(file, "data"))))

    def layout(
        self, source: Source, groups: Sequence[EpisodeGroup]
    ) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any], tuple[str, ...]]:
        """Returns the numbers, the masks, and the attributes of the file and of `data`."""
        for where, group in opened_groups(groups):
            count, actions = group.attrs.get("num_samples"), hdf5.own(group, "actions")
            has_rows = isinstance(actions, h5py.Dataset) and actions.shape
            if count is not None and has_rows and len(actions) != count:
                raise ValueError(
                    f"{where}: expected {count} actions by its attribute num_samples, got "
                    f"{len(actions)}."
                )
        facts: dict[str, np.ndarray] = {
            "demo": np.array([each.number for each in groups], np.int64)
        }
        notes = list[str]()
        names = [group.name.split("/")[-1] for group in groups]
        with hdf5.opened(source) as file:
            metadata = {name: hdf5.plain(value) for name, value in file.attrs.items()}
            metadata |= {n: hdf5.plain(value) for n, value in hdf5.own(file, "data").attrs.items()}
            masks = hdf5.own(file, "mask")
            lists = hdf5.below(masks) if isinstance(masks, h5py.Group) else {}
            for key, entry in lists.items():
                listed = [str(hdf5.plain(text)) for text in np.reshape(entry[:], -1)]
                missing = sorted(set(listed) - set(names), key=natural_order)
                if missing:
                    shown = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
                    notes.append(
                        f"mask/{key} lists {len(missing)} demonstrations that are not in the file: "
                        f"{shown}."
                    )
                facts[f"mask/{key}"] = np.isin(names, listed)
        for name, value in metadata.items():
            if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
                with contextlib.suppress(ValueError):  # a text that is no JSON stays
                    metadata[name] = json.loads(value)
        return facts, metadata, (_DONES_NOTE, *notes)
