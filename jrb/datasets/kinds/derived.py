"""Columns that are made of others while these are read.

K episodes, T steps over all of them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jrb.datasets.kinds.flat import Column


@dataclasses.dataclass(frozen=True, eq=False)
class Flags:
    """A flag of each step, computed from others; False everywhere if there is nothing to compute.

    Attributes:
        steps: T.
        function: from the columns' values to flags.
        columns: `[T]` each, of zeros and ones.
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
        return self.function(*(column[start:stop].astype(bool) for column in self.columns))


@dataclasses.dataclass(frozen=True, eq=False)
class Shaped:
    """A column whose rows have another shape.

    Attributes:
        column: `[T, ...]`.
        row: the shape of a row.
    """

    column: Column
    row: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T, ...]`."""
        return (len(self.column), *self.row)

    @property
    def dtype(self) -> np.dtype:
        """The column's."""
        return self.column.dtype

    def __len__(self) -> int:
        """T."""
        return len(self.column)

    def __getitem__(self, part: slice) -> np.ndarray:
        """These rows."""
        found = self.column[part]
        return found.reshape(len(found), *self.row)


@dataclasses.dataclass(frozen=True, eq=False)
class Numbered:
    """A column of each step's episode, refused where it is not what the ends of episodes tell.

    Attributes:
        column: `[T]`, integers.
        ends: int64 `[K]`, the number of steps up to the end of each episode.
        source: what it is of, for errors.
    """

    column: Column
    ends: np.ndarray
    source: str

    @property
    def shape(self) -> tuple[int, ...]:
        """`[T]`."""
        return self.column.shape

    @property
    def dtype(self) -> np.dtype:
        """The column's."""
        return self.column.dtype

    def __len__(self) -> int:
        """T."""
        return len(self.column)

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
