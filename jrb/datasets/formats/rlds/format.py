"""RLDS: episodes that some code yields, dicts whose `steps` have one observation more than actions.

`steps` has `observation, action, reward, discount, is_first, is_last, is_terminal`, as arrays or as
an iterable of single steps; beside it lies what is known of the episode. TensorFlow is not needed:
what has a method `numpy` is asked for its array. T steps of an episode.

Reference: Ramos et al., RLDS: an Ecosystem to Generate, Share and Use Datasets in Reinforcement
Learning, 2021.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jrb._util import checks
from jrb.datasets.format import Description, Episode, Format, Source, spec_of
from jrb.datasets.formats.rlds.steps import Read, held, is_episode, read
from jrb.datasets.reading.columns import left_out_note
from jrb.layouts.names import Leaves

_NO_TERMINAL = "No step says 'is_terminal': all episodes are taken for truncated ones."


class Episodes:
    """Episodes that can be gone through again and again, and are refused if they change.

    Args:
        source: a sequence of episodes, or anything else that can be gone through again; a function
            that returns an iterator; or an iterator, which is taken into memory.
        keeps_last: see `steps.read`.
    """

    def __init__(self, source: Any, keeps_last: bool) -> None:
        self._keeps_last = keeps_last
        self._source = list(map(held, source)) if isinstance(source, Iterator) else source
        self._spec: Any = None
        self._lengths: list[int] | None = None

    def __iter__(self) -> Iterator[Read]:
        count = 0
        for number, episode in enumerate(_begun(self._source)):
            yield self._checked(number, read(number, episode, self._keeps_last))
            count += 1
        if self._lengths is not None and count != len(self._lengths):
            raise _changed(f"{len(self._lengths)} episodes", count)

    def pick(self, numbers: Sequence[int]) -> Iterator[Read]:
        """The episodes of these numbers; of a sequence, without going through the others."""
        for number in numbers:
            yield self._checked(number, read(number, self._source[number], self._keeps_last))

    @property
    def is_sequence(self) -> bool:
        """Whether `pick` finds them."""
        return isinstance(self._source, Sequence)

    def keep(self, lengths: list[int]) -> None:
        """From now on, refuses others than episodes of these lengths."""
        self._lengths = lengths

    def _checked(self, number: int, found: Read) -> Read:
        spec = spec_of(found.items)
        self._spec = spec if self._spec is None else self._spec
        if spec != self._spec:
            raise ValueError(
                f"episode {number}: expected the leaves of the others, {self._spec}, got {spec}."
            )
        kept = [found.steps] if self._lengths is None else self._lengths[number : number + 1]
        if kept != [found.steps]:
            raise _changed(f"episode {number} with {kept} steps", found.steps)
        return found


@dataclasses.dataclass(frozen=True)
class RLDS(Format):
    """Episodes of RLDS.

    To be described, all of them are gone through once. `discount` and what else the steps have is
    kept under its own name, numbers that lie beside the steps are facts.

    Attributes:
        last: what happens to the last step (`is_last`) of an episode. By RLDS it has an observation
            alone, and what else it has is padding: "drop" takes the observation as the next one of
            the step before. "keep" takes it as a step with its action and reward, as
            rlds_dataset_builder and Open X-Embodiment write it; its next observation is in no file
            (`next/valid` is False). A note tells where "drop" leaves out more than zeros.
    """

    name: ClassVar[str] = "rlds"
    looks_for: ClassVar[str] = (
        "a sequence or an iterator of dicts with 'steps', or a function that returns an iterator"
    )

    last: str = "drop"

    def __post_init__(self) -> None:
        checks.choice("last", self.last, ("drop", "keep"))

    def matches(self, source: Source) -> bool:
        """Whether the first episode has steps; of an iterator, which would lose it, its type."""
        if isinstance(source, Iterator):
            return True
        if isinstance(source, str | bytes | Mapping) or not (
            callable(source) or isinstance(source, Iterable)
        ):
            return False
        return is_episode(next(iter(_begun(source)), None))

    def snapshot(self, source: Source) -> "Pinned":
        """The kind of these episodes, which takes those of an iterator into memory."""
        return Pinned(told=self._of(source), last=self.last)

    def describe(self, source: Source) -> Description:
        """What there is, by going through all of it."""
        episodes = self._of(source)
        told = [_glance(found) for found in episodes]
        if not told:
            raise ValueError("rlds: expected one episode or more, got none.")
        specs, lengths, cuts, facts, left_out, dropped, is_told = zip(*told, strict=True)
        episodes.keep(list(lengths))
        common = set(facts[0]).intersection(*facts)
        lacking = set().union(*facts, *left_out) - common
        notes = left_out_note(lacking) + (_NO_TERMINAL,) * (not all(is_told))
        notes += _dropped_note(dropped)
        return Description(
            specs[0],
            np.array(lengths, np.int64),
            np.array(cuts, bool) if any(cuts) else None,
            {name: np.array([each[name] for each in facts]) for name in sorted(common)},
            notes=notes,
        )

    def episodes(self, source: Source) -> Iterator[Episode]:
        """All episodes."""
        for found in self._of(source):
            yield found.items

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The episodes of these numbers; of what is no sequence, by going through all."""
        episodes = self._of(source)
        if not episodes.is_sequence:
            yield from super().pick(source, numbers)
            return
        for found in episodes.pick(numbers):
            yield found.items

    def _of(self, source: Source) -> Episodes:
        return Episodes(source, self.last == "keep")


@dataclasses.dataclass(frozen=True, eq=False)
class Pinned(RLDS):
    """Episodes of RLDS that are told, whatever the source has become.

    Attributes:
        told: the episodes.
    """

    told: Episodes = dataclasses.field(kw_only=True)

    def snapshot(self, source: Source) -> "Pinned":
        """The same."""
        return self

    def _of(self, source: Source) -> Episodes:
        return self.told


def _glance(found: Read) -> tuple[Any, int, bool, Leaves, set[str], set[str], bool]:
    """What is kept of an episode that was read to describe it."""
    spec = spec_of(found.items)
    return spec, found.steps, found.is_cut, *found[2:]


def _dropped_note(dropped: Sequence[set[str]]) -> tuple[str, ...]:
    """Returns a sentence on last steps that are left out and hold more than zeros."""
    count, names = sum(map(bool, dropped)), ", ".join(sorted(set().union(*dropped)))
    return (
        f"The last steps of {count} of {len(dropped)} episodes are left out, though they are not "
        f"zero in {names}. Open with last='keep' if these are steps of their own.",
    ) * (count > 0)


def _begun(source: Any) -> Iterable[Any]:
    return source if isinstance(source, Iterable) else source()


def _changed(expected: str, got: Any) -> ValueError:
    return ValueError(
        f"rlds: expected the same episodes each time, {expected}, got {got}. Let the source not "
        "shuffle, or give an iterator of it, which is taken into memory."
    )
