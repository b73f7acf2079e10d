"""The base class of formats, and functions on steps. K episodes, T steps of an episode."""

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

It has `observation`, `action`, `next: {observation, reward, terminated, truncated}`, and all other
arrays that the files have for every step, under their own names. `reward` is missing if the files
have none.
"""

Source = Any
"""The path of a file or folder, or an object that a format reads, such as a list of episodes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """The facts about a dataset before its steps are read.

    Attributes:
        spec: one step in TED, a nested dict of `jax.ShapeDtypeStruct` in the files' dtypes.
        lengths: the number of steps of each episode, int64 `[K]`.
        cut: bool `[K]`, True for episodes that did not terminate and lack the observation after
            their last step, which is read as zeros. None if the files have all observations.
        facts: facts about each episode, arrays `[K]` by name, such as `seed` and `id`.
        metadata: facts about the whole dataset, such as environment, author and spaces.
        notes: sentences for users about data that was lost or left out, and about assumptions.
    """

    spec: Any
    lengths: np.ndarray
    cut: np.ndarray | None = None
    facts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Format(abc.ABC):
    """The base class of file formats. A subclass is a frozen dataclass with its options as fields.

    A subclass must define `matches`, `describe` and `episodes`. It may define `pick` to find an
    episode without reading those before it, `blocks` to read many steps at once, and `rewards` to
    read nothing else.

    Attributes:
        name: the name for `jrb.datasets.open(path, format=...)`.
        looks_for: the files that match, in words, for the error when no format matches.
        max_expansion: the largest ratio of the size of arrays in memory to that of their files.
            Arrays above 32 MiB that exceed it are refused before memory is allocated.
        own_files: a regular expression for the names, relative to a dataset's folder, of the files
            that belong to the format; by default none. `jrb.datasets.delete` removes no others.
    """

    name: ClassVar[str]
    looks_for: ClassVar[str]
    own_files: ClassVar[str] = r"(?!)"

    max_expansion: float = dataclasses.field(default=MAX_EXPANSION, repr=False, kw_only=True)

    def is_own(self, source: str, name: str) -> bool:
        """Returns True if the file `name`, relative to the folder `source`, is the format's own."""
        return re.fullmatch(self.own_files, name) is not None

    @abc.abstractmethod
    def matches(self, source: Source) -> bool:
        """Returns True if the source has this format; looks at names and shapes only."""

    def snapshot(self, source: Source) -> "Format":
        """Returns a format that reads only what the source holds now; by default, itself.

        Formats whose files can change while they are open override it.

        Raises:
            ValueError: the source is damaged.
        """
        return self

    @abc.abstractmethod
    def describe(self, source: Source) -> Description:
        """Returns the facts about the source, without reading large arrays."""

    @abc.abstractmethod
    def episodes(self, source: Source) -> Iterator[Episode]:
        """Yields all episodes in order, as many as `describe` gives lengths for."""

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes at the indices `numbers`; by default, reads all before them too."""
        place, episodes = 0, iter(())
        for number in numbers:
            # Begin again if this episode comes before the place that the iterator has reached.
            if number < place or place == 0:
                place, episodes = 0, self.episodes(source)
            # Read past the episodes between, as only subclasses know how to skip them.
            for _ in range(number - place):
                next(episodes)
            place = number + 1
            yield next(episodes)

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the steps of these episodes in blocks that may join or divide episodes."""
        return self.pick(source, numbers)

    def rewards(self, source: Source, numbers: Sequence[int]) -> Iterator[Any]:
        """Yields the rewards of each of these episodes, `[T]`, or a dict of them by agent."""
        for episode in self.pick(source, numbers):
            yield episode["next"]["reward"]


class Indexed(Format):
    """A format that finds each episode by its index; subclasses define `pick`, not `episodes`."""

    def episodes(self, source: Source) -> Iterator[Episode]:
        """Yields all episodes."""
        return self.pick(source, range(len(self.describe(source).lengths)))

    @abc.abstractmethod
    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes at the indices `numbers`, in that order."""


def count_steps(block: Episode) -> int:
    """Returns the number of steps of an episode, or of a block of steps."""
    return len(jax.tree.leaves(block)[0])


def slice_steps(block: Episode, part: Any) -> Episode:
    """Returns the steps of a block at a slice, a mask or an index."""
    return jax.tree.map(operator.itemgetter(part), block)


def regroup_steps(blocks: Iterator[Episode], rows: int) -> Iterator[Episode]:
    """Yields the steps of `blocks` in blocks of `rows` steps; the last may be shorter."""
    join = lambda parts: jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    parts: list[Episode] = []
    count = 0
    for block in blocks:
        # Cut the block where a block of `rows` steps becomes full.
        steps, start = count_steps(block), 0
        while start < steps:
            stop = min(steps, start + rows - count)
            parts.append(slice_steps(block, slice(start, stop)))
            count, start = count + stop - start, stop
            if count == rows:
                yield join(parts)
                parts, count = [], 0
    if parts:
        yield join(parts)


def spec_of(arrays: Any) -> Any:
    """Returns the spec of one step of arrays `[T, ...]`, or of objects with such shapes."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape[1:]), native_dtype(leaf.dtype)),
        arrays,
        # Columns are no pytrees, but have a shape and a dtype as arrays have.
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )


def native_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns a dtype with this machine's byte order."""
    # The scalar type of a dtype has no byte order, and stands for the native one.
    return np.dtype(np.dtype(dtype).type)
