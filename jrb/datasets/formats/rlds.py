"""The format of RLDS: episodes in memory or from an iterator. T steps of one episode.

An episode is a dict with `steps`: a dict of arrays `[T, ...]`, or a sequence of dicts, one for each
step. Values with a method `numpy` are converted by it, so TensorFlow is not needed.

Reference: Ramos et al., RLDS: an Ecosystem to Generate, Share and Use Datasets in Reinforcement
Learning, 2021.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jrb.authoring import checks
from jrb.datasets.format import Source
from jrb.datasets.reading import tabular
from jrb.datasets.reading.names import check, check_names, usual_leaf
from jrb.datasets.reading.tabular import TERMINATED, TRUNCATED, EpisodeTables, Table, is_seen
from jrb.keys import within

_FIRST, _LAST, _TERMINAL = _FLAGS = ("is_first", "is_last", "is_terminal")
_NO_TERMINAL = "No step says 'is_terminal'."

Leaves = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class RLDS(tabular.EpisodeFormat):
    """Episodes of RLDS.

    Opening reads all episodes once. `discount` and other leaves of steps keep their names; numbers
    of an episode outside its steps become facts. Without `is_terminal`, an episode terminated if
    its last `discount` or mask is 0.

    Attributes:
        last: the treatment of the last step (`is_last`) of an episode. In RLDS only its observation
            counts, and its other leaves are padding: "drop" uses it only as the next observation
            of the step before. rlds_dataset_builder and Open X-Embodiment write a full step:
            "keep" keeps it, without a next observation (`next/valid` is False). A note says if
            "drop" leaves out values other than zero.
    """

    name: ClassVar[str] = "rlds"
    looks_for: ClassVar[str] = (
        "a sequence or an iterator of dicts with 'steps', or a function that returns an iterator"
    )

    last: str = "drop"

    def __post_init__(self) -> None:
        checks.choice("last", self.last, ("drop", "keep"))

    def matches(self, source: Source) -> bool:
        """Returns True if the first episode has steps; always for iterators, which lose it."""
        if isinstance(source, Iterator):
            return True
        if isinstance(source, str | bytes | Mapping) or not (
            callable(source) or isinstance(source, Iterable)
        ):
            return False
        every: Any = source
        episodes = iter(every if isinstance(every, Iterable) else every())
        return _is_episode(next(episodes, None))

    def snapshot(self, source: Source) -> "RLDS":
        """Returns a format for this source; reads the episodes of an iterator into memory."""
        snapshot = dataclasses.replace(self)
        if isinstance(source, Iterator):
            # An iterator can be read once, and so can one of an episode's steps.
            vars(snapshot)["_episodes"] = [
                {**each, "steps": list(each["steps"])}
                if _is_episode(each) and isinstance(each["steps"], Iterator)
                else each
                for each in source
            ]
        return snapshot

    def tables(self, source: Source, numbers: Sequence[int] | None) -> EpisodeTables:
        """Yields the place and the table of each episode in `numbers`; None for all.

        Unless the source is a sequence, it is iterated from the start.
        """
        every, count, episodes = vars(self).get("_episodes", source), 0, iter(())
        for number in itertools.count() if numbers is None else numbers:
            # Sequences are indexed. Others are iterated on, or from the start to go back.
            if isinstance(every, Sequence) and numbers is not None:
                episodes, count = iter(every[number : number + 1]), number
            elif number < count or not count:
                count, episodes = 0, iter(every if isinstance(every, Iterable) else every())
            for episode in itertools.islice(episodes, number - count, None):
                where = f"episode {number}"
                yield where, _table(where, episode, self.last == "keep")
                break
            else:
                if numbers is None:
                    return
                cure = "Let the source not shuffle, or give an iterator of it"
                expected = f"the same episodes each time, with number {number}"
                check(False, "rlds", expected, f"fewer. {cure}, which is taken into memory")
            count = number + 1


def _is_episode(episode: Any) -> bool:
    return isinstance(episode, Mapping) and "steps" in episode


def _table(where: str, episode: Any, keeps_last: bool) -> Table:
    """Returns the table of an episode; raises if its arrays differ in length."""
    leaves, facts, left_out = _numeric_leaves(where, episode)
    _check_flags(where, leaves)
    # In RLDS, a step that is last or terminal has only an observation of use. Find the leaves that
    # are lost with it.
    is_last, is_terminal = (
        name in leaves and bool(leaves[name][-1:].any()) for name in (_LAST, _TERMINAL)
    )
    drops = (is_last or is_terminal) and not keeps_last
    names = {name for name in leaves if name not in (*_FLAGS, "discount") and not is_seen(name)}
    names = sorted(name for name in names if drops and np.any(leaves[name][-1:]))
    steps, notes = len(leaves[_LAST]) - drops, ()
    # Without the flag, a mask of 0 at the last step that is kept means termination.
    if _TERMINAL not in leaves:
        masks = {name: leaves[name] for name in tabular.bootstrap_masks(leaves)}
        is_terminal = any(not mask[:steps][-1:].any() for mask in masks.values())
        notes = (" ".join([_NO_TERMINAL, *tabular.flag_notes(masks)]),)
    if names:
        notes += (
            f"Last steps are left out, though they are not zero in {', '.join(names)}. Open with "
            "last='keep' if these are steps of their own.",
        )
    expected = "observations of one step or more, and one after the last"
    has_steps, got = steps > 0 and any(map(is_seen, leaves)), f"{steps} steps of {list(leaves)}"
    check(has_steps, where, expected, f"{got}. Leave it out")
    # Flag the last step, and take next observations from the row after each.
    is_end = np.arange(steps) == steps - 1
    items = {TERMINATED: is_end & is_terminal, TRUNCATED: is_end & is_last & (not is_terminal)}
    for name, leaf in leaves.items():
        if name not in _FLAGS:
            items[f"next/{name}" if within(name, "reward") else name] = leaf[:steps]
        if is_seen(name):
            # A last step that is kept has no next observation: zeros stand in for it.
            after = leaf[1:] if drops else np.concatenate([leaf[1:], np.zeros_like(leaf[:1])])
            items[f"next/{name}"] = after
    check_names(where, items)
    cut = np.array([not drops])
    return Table(items, np.array([steps]), facts, notes=notes, left_out=left_out, cut=cut)


def _numeric_leaves(where: str, episode: Any) -> tuple[Leaves, Leaves, set[str]]:
    """Returns an episode's numbers for each step, its single numbers, and the names of others."""
    names = f" with {list(episode)}" if isinstance(episode, Mapping) else ""
    check(_is_episode(episode), where, "a dict with 'steps'", type(episode).__name__ + names)
    is_numeric = lambda array: array.dtype == bool or jnp.issubdtype(array.dtype, np.number)
    arrays = _step_arrays(where, episode["steps"])
    leaves = {name: leaf for name, leaf in arrays.items() if is_numeric(leaf) and leaf.shape}
    tabular.check_present(where, leaves, [_LAST])
    # Parts of the transition must have one length. Other arrays of other lengths are left out.
    roles = {n: TERMINATED if n in _FLAGS else usual_leaf(n, "/") or n for n in leaves}
    _, odd = tabular.step_columns(where, leaves, roles)
    leaves = {name: leaf for name, leaf in leaves.items() if name not in odd}
    # Single numbers outside the steps are facts about the episode.
    others = dict(_flatten({name: each for name, each in episode.items() if name != "steps"}))
    facts = {name: each for name, each in others.items() if is_numeric(each) and not each.shape}
    return leaves, facts, (arrays.keys() - leaves.keys()) | (others.keys() - facts.keys())


def _check_flags(where: str, leaves: Leaves) -> None:
    """Raises if `is_first` is set after the first step, or another flag before the last."""
    for name in {*_FLAGS} & leaves.keys():
        flag = leaves[name]
        is_flag = f"{where}: '{name}'"
        check(flag.ndim == 1, is_flag, "one flag a step", flag.shape)
        # Find the flags at steps where RLDS has none.
        inner = np.flatnonzero(flag[1:] if name == _FIRST else flag[:-1]) + (name == _FIRST)
        expected = f"it of the {name.removeprefix('is_')} step alone"
        check(not len(inner), is_flag, expected, f"it of step {inner[:1]} of {len(flag)}")


def _step_arrays(where: str, steps: Any) -> Leaves:
    """Returns the leaves `[T, ...]` of an episode's steps by name."""
    got = "an iterator. Make it a list, or give an iterator of episodes, which is taken into memory"
    is_iterator = isinstance(steps, Iterator)
    check(not is_iterator, f"{where}: 'steps'", "what can be gone through again", got)
    # Steps are a dict of arrays, or dicts of single values that are stacked here.
    if isinstance(steps, Mapping):
        return dict(_flatten(steps))
    rows = [dict(_flatten(step)) for step in steps]
    check(rows, where, "one step or more", "none")
    shapes = [{name: leaf.shape for name, leaf in row.items()} for row in rows]
    for number, row in enumerate(shapes):
        expected = f"the shapes of the first, {shapes[0]}"
        check(row == shapes[0], f"{where}: step {number}", expected, row)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _flatten(entry: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the array of each leaf of nested dicts."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
            continue
        is_masked = np.ma.is_masked(value)
        check(not is_masked, f"'{name}'", "values everywhere", "a masked array. Fill it")
        try:
            yield f"{prefix}{name}", np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        except ValueError:
            # Lists of several lengths are no array; their leaf is left out.
            yield f"{prefix}{name}", np.empty((), object)
