"""RLDS: episodes of `steps`, from memory or from any iterator. T steps of an episode.

An episode is a dict with `steps`: a dict of arrays `[T, ...]`, or dicts of one step each. A value
with a method `numpy` is asked for its array, so no TensorFlow is needed.

Reference: Ramos et al., RLDS: an Ecosystem to Generate, Share and Use Datasets in Reinforcement
Learning, 2021.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jrb.authoring import checks
from jrb.datasets.format import Description, Episode, Format, Source, shifted, spec_of
from jrb.datasets.reading.columns import (
    TERMINATED,
    TRUNCATED,
    check_lengths,
    check_names_present,
    is_seen,
    left_out_note,
)
from jrb.datasets.reading.names import check_names
from jrb.layouts.names import nest

_FIRST, _LAST, _TERMINAL = _FLAGS = ("is_first", "is_last", "is_terminal")
_NO_TERMINAL = "No step says 'is_terminal': all episodes are taken for truncated ones."

Leaves = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class RLDSEpisode:
    """One episode that was read.

    Attributes:
        items: in TED.
        is_cut: see `Description.cut`.
        facts: single numbers beside the steps, by name.
        left_out: the names of values that are no arrays of numbers.
        dropped: the names of leaves of a last step that is not read, though they are not zero.
        has_terminal: True if its steps have the flag `is_terminal`.
    """

    items: Episode
    is_cut: bool
    facts: Leaves
    left_out: set[str]
    dropped: set[str]
    has_terminal: bool

    @property
    def steps(self) -> int:
        """T."""
        return len(self.items["next"]["terminated"])


class RLDSEpisodes:
    """Episodes that can be read again and again, and are refused if they change.

    Args:
        source: a sequence of episodes, or another iterable that can be started again; a function
            that returns an iterator; or an iterator, which is taken into memory.
        keeps_last: True to read the last step with its action and reward.
    """

    def __init__(self, source: Any, keeps_last: bool) -> None:
        self._keeps_last = keeps_last
        self._source = list(map(_in_memory, source)) if isinstance(source, Iterator) else source
        self._spec: Any = None
        self._lengths: list[int] | None = None

    @property
    def is_sequence(self) -> bool:
        """True if `pick` finds an episode without reading the others."""
        return isinstance(self._source, Sequence)

    def __iter__(self) -> Iterator[RLDSEpisode]:
        count = 0
        for number, episode in enumerate(_started(self._source)):
            yield self._read(number, episode)
            count += 1
        if self._lengths is not None and count != len(self._lengths):
            raise _changed(f"{len(self._lengths)} episodes", count)

    def pick(self, numbers: Sequence[int]) -> Iterator[RLDSEpisode]:
        """Yields the episodes of these numbers, of a sequence."""
        for number in numbers:
            yield self._read(number, self._source[number])

    def expect(self, lengths: list[int]) -> None:
        """Refuses episodes of other lengths from now on."""
        self._lengths = lengths

    def _read(self, number: int, source: Any) -> RLDSEpisode:
        episode = _read(f"episode {number}", source, self._keeps_last)
        spec = spec_of(episode.items)
        self._spec = spec if self._spec is None else self._spec
        if spec != self._spec:
            raise ValueError(
                f"episode {number}: expected the leaves of the others, {self._spec}, got {spec}."
            )
        if self._lengths is not None:
            length = self._lengths[number : number + 1]
            if length != [episode.steps]:
                raise _changed(f"episode {number} with {length} steps", episode.steps)
        return episode


@dataclasses.dataclass(frozen=True)
class RLDS(Format):
    """Episodes of RLDS.

    To be described, all of them are read once. `discount` and other leaves of steps are kept under
    their own names, numbers beside the steps are facts.

    Attributes:
        last: the treatment of the last step (`is_last`) of an episode. By RLDS it has an
            observation alone, and the rest of it is padding: "drop" takes the observation as the
            next one of the step before. "keep" takes it as a step with its action and reward, as
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
        """Returns whether the first episode has steps; an iterator would lose it, so all match."""
        if isinstance(source, Iterator):
            return True
        if isinstance(source, str | bytes | Mapping) or not (
            callable(source) or isinstance(source, Iterable)
        ):
            return False
        return _is_episode(next(iter(_started(source)), None))

    def snapshot(self, source: Source) -> "RLDS":
        """Returns the format of these episodes; those of an iterator are taken into memory."""
        snapshot = dataclasses.replace(self)
        vars(snapshot)["_snapshot"] = self._episodes(source)
        return snapshot

    def describe(self, source: Source) -> Description:
        """Describes the dataset; reads all of it."""
        episodes, specs, every = self._episodes(source), [], []
        for episode in episodes:
            specs.append(spec_of(episode.items))
            items = {"next": {"terminated": episode.items["next"]["terminated"]}}
            every.append(dataclasses.replace(episode, items=items))  # without what is large
        if not every:
            raise ValueError("rlds: expected one episode or more, got none.")
        lengths = [episode.steps for episode in every]
        episodes.expect(lengths)
        common = set(every[0].facts).intersection(*(episode.facts for episode in every))
        names = set().union(*(episode.left_out | episode.facts.keys() for episode in every))
        has_terminal = all(episode.has_terminal for episode in every)
        is_cut = np.array([episode.is_cut for episode in every], bool)
        notes = left_out_note(names - common) + (_NO_TERMINAL,) * (not has_terminal)
        return Description(
            specs[0],
            np.array(lengths, np.int64),
            is_cut if is_cut.any() else None,
            {name: np.array([each.facts[name] for each in every]) for name in sorted(common)},
            notes=notes + _dropped_note([episode.dropped for episode in every]),
        )

    def episodes(self, source: Source) -> Iterator[Episode]:
        """Yields all episodes."""
        for episode in self._episodes(source):
            yield episode.items

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers; reads all, unless the source is a sequence."""
        episodes = self._episodes(source)
        if not episodes.is_sequence:
            yield from super().pick(source, numbers)
            return
        for episode in episodes.pick(numbers):
            yield episode.items

    def _episodes(self, source: Source) -> RLDSEpisodes:
        return vars(self).get("_snapshot") or RLDSEpisodes(source, self.last == "keep")


def _dropped_note(dropped: Sequence[set[str]]) -> tuple[str, ...]:
    """Returns the note on last steps that are left out and hold more than zeros."""
    count, names = sum(map(bool, dropped)), ", ".join(sorted(set().union(*dropped)))
    return (
        f"The last steps of {count} of {len(dropped)} episodes are left out, though they are not "
        f"zero in {names}. Open with last='keep' if these are steps of their own.",
    ) * (count > 0)


def _started(source: Any) -> Iterable[Any]:
    return source if isinstance(source, Iterable) else source()


def _changed(expected: str, got: Any) -> ValueError:
    return ValueError(
        f"rlds: expected the same episodes each time, {expected}, got {got}. Let the source not "
        "shuffle, or give an iterator of it, which is taken into memory."
    )


def _is_episode(episode: Any) -> bool:
    return isinstance(episode, Mapping) and "steps" in episode


def _in_memory(episode: Any) -> Any:
    """Returns the episode with steps that can be read again."""
    if not _is_episode(episode) or not isinstance(episode["steps"], Iterator):
        return episode
    return {**episode, "steps": list(episode["steps"])}


def _read(where: str, episode: Any, keeps_last: bool) -> RLDSEpisode:
    """Reads an episode.

    Raises:
        ValueError: it is none, or has no step; arrays of several lengths, or flags amid it.
    """
    if not _is_episode(episode):
        raise ValueError(
            f"{where}: expected a dict with 'steps', got {type(episode).__name__}"
            f"{' with ' + str(list(episode)) if isinstance(episode, Mapping) else ''}."
        )
    leaves, left_out = _arrays(where, episode["steps"])
    check_names_present(where, leaves, [_LAST])
    check_lengths(where, leaves)
    _check_flags(where, leaves)
    besides = dict(_flat({name: each for name, each in episode.items() if name != "steps"}))
    facts = {name: each for name, each in besides.items() if _is_numeric(each) and not each.shape}
    left_out |= besides.keys() - facts.keys()
    drops = (_ends_with(leaves, _LAST) or _ends_with(leaves, _TERMINAL)) and not keeps_last
    own = {name for name in leaves if name not in (*_FLAGS, "discount") and not is_seen(name)}
    dropped = {name for name in own if drops and np.any(leaves[name][-1:])}
    items = _to_ted(where, leaves, len(leaves[_LAST]) - drops)
    return RLDSEpisode(items, not drops, facts, left_out, dropped, _TERMINAL in leaves)


def _to_ted(where: str, leaves: Leaves, steps: int) -> Episode:
    """Converts arrays `[T + 1, ...]`, or `[T, ...]` without a last observation."""
    if steps < 1 or not any(map(is_seen, leaves)):
        raise ValueError(
            f"{where}: expected observations of one step or more, and one after the last, got "
            f"{steps} steps of {list(leaves)}. Leave it out."
        )
    entries = list[tuple[str, np.ndarray]]()
    for name, leaf in leaves.items():
        if name not in _FLAGS:
            entries.append(("next/reward" if name == "reward" else name, leaf[:steps]))
        if is_seen(name):
            entries.append((f"next/{name}", shifted(leaf, steps)))
    terminated, truncated = np.zeros(steps, bool), np.zeros(steps, bool)
    terminated[-1] = _ends_with(leaves, _TERMINAL)
    truncated[-1] = _ends_with(leaves, _LAST) and not terminated[-1]
    entries += [(TERMINATED, terminated), (TRUNCATED, truncated)]
    check_names(where, [name for name, _ in entries])
    return nest(dict(entries))


def _ends_with(leaves: Leaves, flag: str) -> bool:
    """Returns whether a flag of the last step is there and true."""
    return flag in leaves and bool(leaves[flag][-1:].any())


def _check_flags(where: str, leaves: Leaves) -> None:
    """Refuses steps after the last one, and a second first one."""
    for name in _FLAGS:
        flag = leaves.get(name, np.zeros(1, bool))
        if flag.ndim != 1:
            raise ValueError(f"{where}: '{name}': expected one flag a step, got {flag.shape}.")
        inner = flag[1:] if name == _FIRST else flag[:-1]
        if inner.any():
            raise ValueError(
                f"{where}: '{name}': expected it of the {name.removeprefix('is_')} step alone, got "
                f"it of step {int(np.flatnonzero(inner)[0]) + (name == _FIRST)} of {len(flag)}."
            )


def _arrays(where: str, steps: Any) -> tuple[Leaves, set[str]]:
    """Returns the arrays of all steps by name, and the names of values that are no numbers."""
    if isinstance(steps, Iterator):
        raise ValueError(
            f"{where}: 'steps': expected what can be gone through again, got an iterator. Make it "
            "a list, or give an iterator of episodes, which is taken into memory."
        )
    if isinstance(steps, Mapping):
        every = dict(_flat(steps))
    else:
        rows = [dict(_flat(step)) for step in steps]
        if not rows:
            raise ValueError(f"{where}: expected one step or more, got none.")
        shapes = [{name: leaf.shape for name, leaf in row.items()} for row in rows]
        for number, row in enumerate(shapes):
            if row != shapes[0]:
                raise ValueError(
                    f"{where}: step {number}: expected the shapes of the first, {shapes[0]}, got "
                    f"{row}."
                )
        every = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    leaves = {name: leaf for name, leaf in every.items() if _is_numeric(leaf) and leaf.shape}
    return leaves, every.keys() - leaves.keys()


def _flat(entry: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and array of each leaf of nested dicts."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
            continue
        try:
            yield f"{prefix}{name}", np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        except ValueError:  # lists of several lengths
            yield f"{prefix}{name}", np.empty((), object)


def _is_numeric(array: np.ndarray) -> bool:
    return array.dtype == bool or jnp.issubdtype(array.dtype, np.number)
