"""What is written: the episodes of a buffer or of a dataset, one after the other.

K episodes, T steps of one.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb import read
from jrb._util import prng_keys, pytree
from jrb._util.pytree import PyTree
from jrb.buffer import ReplayBuffer
from jrb.datasets.dataset import Dataset
from jrb.datasets.reading.mapping import ted_names
from jrb.keys import TED, Keys
from jrb.layouts.names import Leaves
from jrb.state import BufferState

_PIECE = 32 << 20  # bytes of items that are read at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """An episode.

    Attributes:
        items: a tree of NumPy arrays `[T, ...]`, as they are stored.
        names: the leaf in TED of each leaf of them.
        facts: what is known of it. Of a buffer's, `environment`, `complete` (as
            `jrb.read.Episode`), `running` (it had not ended) and `cut` (its beginning may be lost).
    """

    items: PyTree
    names: dict[str, str]
    facts: dict[str, Any]

    @property
    def leaves(self) -> Leaves:
        """The arrays by their names in TED."""
        found = jax.tree_util.tree_leaves_with_path(self.items)
        return {self.names[pytree.leaf_name(path)]: leaf for path, leaf in found}

    @property
    def is_running(self) -> bool:
        """Whether it had not ended."""
        return bool(self.facts.get("running", self.facts.get("is_running", False)))

    @property
    def is_cut(self) -> bool:
        """Whether its beginning may be lost."""
        return bool(self.facts.get("cut", self.facts.get("is_cut", False)))


class Source:
    """The episodes of a buffer and its state, or of a dataset; those without a step are left out.

    Iterated, it reads some megabytes at a time.

    Args:
        who: asks, for the first words of errors.
        source: the description, or a dataset.
        state: that of the buffer; None with a dataset.
        roles: fields of `jrb.Keys` that items have to have.

    Attributes:
        keys: where the parts of a transition lie.
        spec: of one step, PRNG keys as such.
        names: the leaf in TED of each leaf of items.
        lengths: int64 `[K]`.

    Raises:
        TypeError: something else.
        ValueError: a writer that keeps no order of time, or items without flags or what is needed.
    """

    keys: Keys
    spec: PyTree
    names: dict[str, str]
    facts: list[dict[str, Any]]
    lengths: np.ndarray

    def __init__(
        self,
        who: str,
        source: ReplayBuffer | Dataset,
        state: BufferState | None,
        roles: tuple[str, ...] = (),
    ) -> None:
        if isinstance(source, Dataset) and state is None:
            _check(source.spec, TED, roles)
            self._of: _OfDataset | _OfBuffer = _OfDataset(source)
        elif isinstance(source, ReplayBuffer) and state is not None:
            _check(source.stored(state), source.keys, roles)
            self._of = _OfBuffer(source, state)
        else:
            raise TypeError(
                f"{who}: expected a ReplayBuffer and its state, or a Dataset, got "
                f"{type(source).__name__} and {type(state).__name__}."
            )
        self.keys, self.spec, self.facts = self._of.keys, self._of.spec, self._of.facts
        self.lengths = self._of.lengths
        self.names = ted_names(pytree.leaf_names(self.spec), self.keys)

    def __len__(self) -> int:
        """K."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[Held]:
        for items, facts in zip(self._of.items(), self.facts, strict=True):
            yield Held(items, self.names, facts)

    @property
    def leaves(self) -> dict[str, Any]:
        """The specs of leaves of one step by their names in TED, PRNG keys as their words."""
        found = jax.tree_util.tree_leaves_with_path(self.spec)
        return {
            self.names[pytree.leaf_name(path)]: prng_keys.raw_spec(leaf) for path, leaf in found
        }


def _check(spec: PyTree, keys: Keys, roles: tuple[str, ...]) -> None:
    for role in roles:
        keys.get(spec, role)


class _OfDataset:
    """The episodes of a dataset."""

    def __init__(self, dataset: Dataset) -> None:
        known = dataset.facts
        facts = [
            {name: fact[number] for name, fact in known.items()} for number in range(len(dataset))
        ]
        kept = dataset.lengths > 0
        self._dataset = dataset.only(dataset.numbers[kept])
        self.keys, self.spec, self.lengths = TED, dataset.spec, dataset.lengths[kept]
        self.facts = [facts[number] for number in np.flatnonzero(kept)]

    def items(self) -> Iterator[Any]:
        return iter(self._dataset)


class _OfBuffer:
    """The episodes that a buffer holds, of which several are read at once.

    One alone would be compiled for each length.
    """

    def __init__(self, buffer: ReplayBuffer, state: BufferState) -> None:
        self._buffer, self._state = buffer, state
        self._episodes = read.episodes(buffer, state)
        self.keys, self.spec = buffer.keys, buffer.stored(state)
        self.lengths = np.array([len(each) for each in self._episodes], np.int64)
        self.facts: list[dict[str, Any]] = [
            {
                "environment": each.environment,
                "complete": each.complete,
                "running": not each.ended,
                "cut": each.cut,
            }
            for each in self._episodes
        ]

    def items(self) -> Iterator[Any]:
        for group in self._groups():
            slots = np.concatenate([each.slots for each in group])
            found = read.taken(self._buffer, self._state, slots)
            start = 0
            for each in group:
                part = slice(start, start + len(each))
                yield jax.tree.map(lambda leaf, part=part: leaf[part], found)
                start += len(each)

    def _groups(self) -> Iterator[list[read.Episode]]:
        """Episodes that are read together, some megabytes if they are not longer."""
        most = _PIECE // max(pytree.nbytes(self.spec), 1)
        group: list[read.Episode] = []
        held = 0
        for each in self._episodes:
            if group and held + len(each) > most:
                yield group
                group, held = [], 0
            group.append(each)
            held += len(each)
        if group:
            yield group
