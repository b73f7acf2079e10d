"""Columns that are made of others while these are read.

K episodes, T steps over all of them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jrb.datasets.reading.flat import Column


@dataclasses.dataclass(frozen=True, eq=False)
class Flags:
    """A flag of each step, computed from others; False everywhere if there is nothing to compute.

    Attributes:
        steps: T.
        function: from the columns' values to flags.
        columns: bool `[T]` each.
    """

    steps: int
    function: Callable[..., np.ndarray] | None = None
    columns: tuple[Column, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T]`."""
        return (self.steps,)

    @property
    def dtype(self) -> np.dtype:
        """Bool."""
        return np.dtype(bool)

    def __len__(self) -> int:
        """T."""
        return self.steps

    def __getitem__(self, part: slice) -> np.ndarray:
        """These flags."""
        start, stop, _ = part.indices(self.steps)
        if self.function is None:
            return np.zeros(stop - start, bool)
        return self.function(*(column[start:stop] for column in self.columns))


@dataclasses.dataclass(frozen=True, eq=False)
class _Over:
    """A column with the rows of another."""

    column: Column

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        return self.column.shape

    @property
    def dtype(self) -> np.dtype:
        """NumPy's."""
        return self.column.dtype

    def __len__(self) -> int:
        """T."""
        return len(self.column)


@dataclasses.dataclass(frozen=True, eq=False)
class Flag(_Over):
    """A column of zeros and ones, of any dtype, as flags.

    Attributes:
        column: `[T]` or `[T, 1]`.
        name: what it is called, for errors.
        source: what it is of, for errors.

    Raises:
        ValueError: it has more than one value for each step.
    """

    name: str
    source: str

    def __post_init__(self) -> None:
        if np.prod(self.column.shape[1:], dtype=np.int64) != 1:
            raise ValueError(
                f"{self.source}: '{self.name}': expected a flag for each step, got "
                f"{list(self.column.shape[1:])}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T]`."""
        return (len(self.column),)

    @property
    def dtype(self) -> np.dtype:
        """Bool."""
        return np.dtype(bool)

    def __getitem__(self, part: slice) -> np.ndarray:
        """These flags.

        Raises:
            ValueError: a value is neither 0 nor 1.
        """
        found = self.column[part].reshape(-1)
        if not np.isin(found, (0, 1)).all():
            raise ValueError(
                f"{self.source}: '{self.name}': expected flags of 0 and 1, got others."
            )
        return found.astype(bool)


@dataclasses.dataclass(frozen=True, eq=False)
class Shaped(_Over):
    """A column whose rows have another shape.

    Attributes:
        column: `[T, ...]`.
        row: the shape of a row.
    """

    row: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        return (len(self.column), *self.row)

    def __getitem__(self, part: slice) -> np.ndarray:
        """These rows."""
        found = self.column[part]
        return found.reshape(len(found), *self.row)


@dataclasses.dataclass(frozen=True, eq=False)
class Part(_Over):
    """Some rows of a column.

    Attributes:
        column: more rows than these.
        first: the first of them.
        rows: T.
    """

    first: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        return (self.rows, *self.column.shape[1:])

    def __len__(self) -> int:
        """T."""
        return self.rows

    def __getitem__(self, part: slice) -> np.ndarray:
        """These rows."""
        start, stop, _ = part.indices(self.rows)
        return self.column[self.first + start : self.first + stop]


@dataclasses.dataclass(frozen=True, eq=False)
class Numbered(_Over):
    """A column of each step's episode, refused where it is not what the ends of episodes tell.

    Attributes:
        column: `[T]`, integers.
        ends: int64 `[K]`, the number of steps up to the end of each episode.
        source: what it is of, for errors.
    """

    ends: np.ndarray
    source: str

    def __getitem__(self, part: slice) -> np.ndarray:
        """These numbers.

        Raises:
            ValueError: steps are of other episodes.
        """
        start, stop, _ = part.indices(len(self))
        found = self.column[start:stop]
        wanted = np.searchsorted(self.ends, np.arange(start, stop), side="right")
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            raise ValueError(
                f"{self.source}: row {start + wrong[0]}: expected a step of episode "
                f"{wanted[wrong[0]]}, as lengths tell, got one of {found[wrong[0]]}."
            )
        return found
