"""What `jrb.datasets.Recorder` wrote: folders of chunks, one for each writer."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from jrb.datasets.format import Format, Source
from jrb.datasets.reading.flat import Column, Flat, Table
from jrb.datasets.recording import folders, roles
from jrb.datasets.recording.heads import Leaf
from jrb.datasets.recording.recording import Recording


@dataclasses.dataclass(frozen=True)
class Recorded(Flat):
    """Sets of `jrb.datasets.Recorder`: episodes by writer, of that by environment, in time.

    Facts: `env`, the environment of each episode, and `writer`, the number of its writer in
    `metadata["writers"]`. What was not sealed when the set was opened is not in it.

    Attributes:
        sealed: the folder of each writer, and how many of its chunks count; None for all that are
            there when the set is opened.
    """

    name: ClassVar[str] = "recorded"
    looks_for: ClassVar[str] = "a folder that jrb.datasets.Recorder wrote"

    sealed: tuple[tuple[str, int], ...] | None = None

    def is_own(self, source: str, name: str) -> bool:
        """Returns whether a file is one of a writer's."""
        return folders.is_own(name)

    def matches(self, source: Source) -> bool:
        """Whether a writer has begun there."""
        return isinstance(source, str) and os.path.isdir(source) and folders.is_recording(source)

    def snapshot(self, source: Source) -> Format:
        """The same for the chunks that are there now."""
        return dataclasses.replace(self, sealed=self._sealed(source))

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """The columns."""
        path, sealed = os.path.realpath(source), self._sealed(source)
        yield _table(path, sealed, folders.stamps(path, [name for name, _ in sealed]))

    def _sealed(self, source: Source) -> tuple[tuple[str, int], ...]:
        if self.sealed:
            return self.sealed
        if not self.matches(source):
            raise ValueError(f"{source}: expected {self.looks_for}, got something else.")
        return folders.sealed(source)


@dataclasses.dataclass(frozen=True, eq=False)
class _Steps:
    """A column: a leaf of all steps."""

    recording: Recording
    number: int

    @property
    def leaf(self) -> Leaf:
        return self.recording.head.leaves[self.number]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.leaf.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.leaf.numpy

    def __len__(self) -> int:
        return len(self.recording.terminated)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        return self.recording.read(self.number, start, stop)


@functools.lru_cache(maxsize=4)
def _table(path: str, sealed: tuple[tuple[str, int], ...], stamps: tuple[int, ...]) -> Table:
    """What some chunks hold; they never change, unless somebody puts others in their place."""
    found = Recording(path, sealed)
    names = roles.ted_names(found.head.names, found.head.keys)
    columns: dict[str, Column] = {
        names[leaf.name]: _Steps(found, number)
        for number, leaf in enumerate(found.head.leaves)
        if leaf.name in names
    }
    columns["next/terminated"], columns["next/truncated"] = found.terminated, found.truncated
    return Table(columns, found.ends, found.facts, found.metadata, _notes(found))


def _notes(found: Recording) -> tuple[str, ...]:
    told = list(roles.notes(found.head.names, found.head.keys))
    if found.running:
        told.append(f"{found.running} episodes had not ended when their last chunk was sealed.")
    told += [
        f"'{leaf.name}' holds the words of PRNG keys: "
        f"jax.random.wrap_key_data(words, impl='{leaf.keys}') makes them keys."
        for leaf in found.head.leaves
        if leaf.keys is not None
    ]
    return tuple(told)
