"""Steps in blocks, and what there is to be known of a dataset by those who go through it.

K episodes, T steps of one.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import jax
import numpy as np

from jrb.datasets.format import Episode, Format, Source, rows_of


class Episodes(Protocol):
    """Episodes in files, as `jrb.datasets.Dataset` has them."""

    @property
    def source(self) -> Source:
        """Where they lie."""
        ...

    @property
    def format(self) -> Format:
        """In which layout."""
        ...

    @property
    def numbers(self) -> np.ndarray:
        """Which of the source's episodes these are, int64 `[K]`."""
        ...

    @property
    def final(self) -> str:
        """What happens to a last step whose next observation lacks."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """The steps of each episode, int64 `[K]`."""
        ...

    @property
    def transitions(self) -> int:
        """How many steps there are, over all episodes."""
        ...

    @property
    def spec(self) -> Any:
        """One step: a nested dict of `jax.ShapeDtypeStruct`."""
        ...

    @property
    def facts(self) -> Mapping[str, np.ndarray]:
        """What is known of each, arrays `[K]` by name."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the files say of themselves."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know."""
        ...

    def only(self, numbers: np.ndarray) -> Self:
        """These of the source's episodes."""
        ...

    def blocks(self) -> Iterator[Episode]:
        """All steps in order, in blocks `[T, ...]` as the files are best read."""
        ...

    def steps(self, rows: int | None = None) -> Iterator[Episode]:
        """All steps in order, so many at a time."""
        ...

    def __iter__(self) -> Iterator[Episode]:
        """Them, one after the other."""
        ...

    def __len__(self) -> int:
        """K."""
        ...

    def __getitem__(self, index: slice, /) -> Any:
        """A slice of them."""
        ...


def regrouped(blocks: Iterator[Episode], rows: int) -> Iterator[Episode]:
    """The same steps in blocks of `rows`; the last may be shorter."""
    parts: list[Episode] = []
    held = 0
    for block in blocks:
        steps, start = rows_of(block), 0
        while held + steps - start >= rows:
            stop = start + rows - held
            parts.append(jax.tree.map(operator.itemgetter(slice(start, stop)), block))
            yield joined(parts)
            parts, held, start = [], 0, stop
        if start < steps:
            parts.append(jax.tree.map(operator.itemgetter(slice(start, steps)), block))
            held += steps - start
    if parts:
        yield joined(parts)


def joined(parts: Sequence[Episode]) -> Episode:
    """Blocks of steps, one after the other, as one."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
