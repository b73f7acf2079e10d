"""The base class of all formats, and functions on blocks of steps.

K episodes, T steps of one.
"""

import abc
import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from numpy.typing import DTypeLike

from jrb.authoring import MAX_EXPANSION

Episode = dict[str, Any]
"""An episode in TED: a nested dict of NumPy arrays `[T, ...]`.

`observation`, `action`, `next: {observation, reward, terminated, truncated}`, and whatever else the
files have for every step, under its own name. Without `reward` where the files have none.
"""

Source = Any
"""The path of a file or a folder, as a string; or what some formats take in place of one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """The facts about a dataset before its steps are read.

    Attributes:
        spec: of one step, in TED: a nested dict of `jax.ShapeDtypeStruct`, in the files' dtypes.
        lengths: int64 `[K]`, the steps of each episode.
        cut: bool `[K]`, True if the observation after the last step is needed and in no file, as
            the episode did not terminate. Then it is zeros. None if the files have all of them.
        facts: about each episode, arrays `[K]` by name, such as `seed` and `id`.
        metadata: what the files say of themselves: environment, author, spaces.
        notes: sentences for readers of the data: what was lost, left out or assumed.
    """

    spec: Any
    lengths: np.ndarray
    cut: np.ndarray | None = None
    facts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Format(abc.ABC):
    """A layout of files. A subclass is a frozen dataclass, whose fields are the options it has.

    Three methods are enough. With `pick` an episode is found without reading those before it, with
    `blocks` whole stretches are read at once, and with `rewards` nothing but these.

    Attributes:
        name: what `jrb.datasets.open(path, format=...)` calls it.
        looks_for: what it matches, for the error where no format does.
        max_expansion: the largest ratio of the size of arrays in memory to that of their files.
            Arrays above 32 MiB that exceed it are refused before memory is allocated.
        own_files: a regular expression for the names of the files in a folder that are the
            layout's, below the folder; by default of none. Nothing else is ever removed.
    """

    name: ClassVar[str]
    looks_for: ClassVar[str]
    own_files: ClassVar[str] = r"(?!)"

    max_expansion: float = dataclasses.field(default=MAX_EXPANSION, repr=False, kw_only=True)

    def is_own(self, source: str, name: str) -> bool:
        """Returns whether a file is the layout's, by its name below the folder of the source."""
        return re.fullmatch(self.own_files, name) is not None

    @abc.abstractmethod
    def matches(self, source: Source) -> bool:
        """Returns True if this is of the format; looks at names and shapes only."""

    def snapshot(self, source: Source) -> "Format":
        """Returns the format for the files of now, where they may change; by default, itself.

        Raises:
            ValueError: it is damaged.
        """
        return self

    @abc.abstractmethod
    def describe(self, source: Source) -> Description:
        """Returns the facts about the source; reads nothing large."""

    @abc.abstractmethod
    def episodes(self, source: Source) -> Iterator[Episode]:
        """Yields all episodes, as many as `describe` says."""

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers, in their order; by default, reads all."""
        place, episodes = 0, iter(())
        for number in numbers:
            if number < place or place == 0:
                place, episodes = 0, self.episodes(source)
            for _ in range(number - place):
                next(episodes)
            place = number + 1
            yield next(episodes)

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the steps of these episodes in blocks that may hold several."""
        return self.pick(source, numbers)

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[Any]:
        """Yields the rewards `[T]` of these episodes; nested dicts of them for several agents."""
        for episode in self.pick(source, numbers):
            yield episode["next"]["reward"]


class Indexed(Format):
    """A format whose files say where each episode is: `pick` in place of `episodes`."""

    def episodes(self, source: Source) -> Iterator[Episode]:
        """Yields all episodes."""
        return self.pick(source, range(len(self.describe(source).lengths)))

    @abc.abstractmethod
    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers, in their order."""


def rows_of(block: Episode) -> int:
    """Returns the number of steps of an episode, or of a block of steps."""
    return len(jax.tree.leaves(block)[0])


def sliced(block: Episode, part: Any) -> Episode:
    """Returns some steps of a block: those of a slice, a mask or an index."""
    return jax.tree.map(operator.itemgetter(part), block)


def regrouped(blocks: Iterator[Episode], rows: int) -> Iterator[Episode]:
    """Yields the same steps in blocks of `rows`; the last may be shorter."""
    join = lambda parts: jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    parts: list[Episode] = []
    count = 0
    for block in blocks:
        steps, start = rows_of(block), 0
        while start < steps:
            stop = min(steps, start + rows - count)
            parts.append(sliced(block, slice(start, stop)))
            count, start = count + stop - start, stop
            if count == rows:
                yield join(parts)
                parts, count = [], 0
    if parts:
        yield join(parts)


def spec_of(arrays: Any) -> Any:
    """Returns the spec of one step, from arrays `[T, ...]` or what has shapes and dtypes."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape[1:]), native(leaf.dtype)),
        arrays,
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )


def native(dtype: DTypeLike) -> np.dtype:
    """Returns a dtype in this machine's order of bytes."""
    return np.dtype(np.dtype(dtype).type)
