"""One episode of RLDS, read into TED.

T steps of an episode, of which RLDS has one more if it tells of the last observation.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrb.datasets.format import Episode, shifted
from jrb.datasets.reading.columns import check_lengths, check_names_present
from jrb.datasets.reading.names import check_names
from jrb.layouts.names import Leaves, nest

_STEPS, _OBSERVATION = "steps", "observation"
_FIRST, _LAST, _TERMINAL = "is_first", "is_last", "is_terminal"


class Read(NamedTuple):
    """One episode.

    Attributes:
        items: in TED.
        is_cut: see `Description.cut`.
        facts: numbers that are known of it, by name.
        left_out: the names of what is no array of numbers.
        dropped: the names of what a last step holds besides zeros, and what is not read.
        is_told: whether its steps say if they are terminal.
    """

    items: Episode
    is_cut: bool
    facts: Leaves
    left_out: set[str]
    dropped: set[str]
    is_told: bool

    @property
    def steps(self) -> int:
        """T."""
        return len(self.items["next"]["terminated"])


def is_episode(episode: Any) -> bool:
    """Whether this may be one."""
    return isinstance(episode, Mapping) and _STEPS in episode


def held(episode: Any) -> Any:
    """The episode with steps that can be gone through again."""
    if not is_episode(episode) or not isinstance(episode[_STEPS], Iterator):
        return episode
    return {**episode, _STEPS: list(episode[_STEPS])}


def read(number: int, episode: Any, keeps_last: bool) -> Read:
    """An episode.

    Args:
        number: its place among others, for errors.
        episode: a dict with `steps`.
        keeps_last: whether the last step is read with its action and reward, though no observation
            comes after it.

    Raises:
        ValueError: it is none, or has no step; arrays of several lengths, or flags amid it.
    """
    if not is_episode(episode):
        raise ValueError(
            f"episode {number}: expected a dict with 'steps', got {type(episode).__name__}"
            f"{' with ' + str(list(episode)) if isinstance(episode, Mapping) else ''}."
        )
    where = f"episode {number}"
    beside = {name: value for name, value in episode.items() if name != _STEPS}
    leaves, left_out = _arrays(where, episode[_STEPS])
    check_names_present(where, leaves, [_LAST])
    check_lengths(where, leaves)
    _check_flags(where, leaves)
    facts = {name: array for name, array in _flat(beside) if _is_numeric(array)}
    single = {name: array for name, array in facts.items() if not array.shape}
    left_out |= {name for name, _ in _flat(beside)} - single.keys()
    ended = _is_set(leaves, _LAST) or _is_set(leaves, _TERMINAL)
    drops = ended and not keeps_last
    items = _to_ted(where, leaves, len(leaves[_LAST]) - drops)
    dropped = {name for name, leaf in leaves.items() if drops and _is_lost(name, leaf)}
    return Read(items, not drops, single, left_out, dropped, _TERMINAL in leaves)


def _is_lost(name: str, leaf: np.ndarray) -> bool:
    """Whether a last step that is left out has something in a leaf that a step has for itself."""
    is_flag = name in (_FIRST, _LAST, _TERMINAL, "discount")
    return not is_flag and not _is_seen(name) and bool(np.any(leaf[-1:]))


def _to_ted(where: str, leaves: Leaves, steps: int) -> Episode:
    """From the arrays of an episode, `[T + 1, ...]`, or `[T, ...]` without a last observation."""
    if steps < 1 or not any(_is_seen(name) for name in leaves):
        raise ValueError(
            f"{where}: expected observations of one step or more, and one after the last, got "
            f"{steps} steps of {list(leaves)}. Leave it out."
        )
    found: list[tuple[str, np.ndarray]] = []
    for name, leaf in leaves.items():
        if name in (_FIRST, _LAST, _TERMINAL):
            continue
        found.append(("next/reward" if name == "reward" else name, leaf[:steps]))
        if _is_seen(name):
            found.append((f"next/{name}", shifted(leaf, steps)))
    terminated, truncated = np.zeros(steps, bool), np.zeros(steps, bool)
    terminated[-1] = _is_set(leaves, _TERMINAL)
    truncated[-1] = _is_set(leaves, _LAST) and not terminated[-1]
    found += [("next/terminated", terminated), ("next/truncated", truncated)]
    check_names(where, [name for name, _ in found])
    return nest(dict(found))


def _is_seen(name: str) -> bool:
    return name.split("/")[0] == _OBSERVATION


def _is_set(leaves: Leaves, flag: str) -> bool:
    """Whether a flag of the last step is there and true."""
    return flag in leaves and bool(leaves[flag][-1:].any())


def _check_flags(where: str, leaves: Leaves) -> None:
    """Refuses steps that go on after the last one, or begin anew."""
    for name in (_FIRST, _LAST, _TERMINAL):
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
    """The arrays of all steps by name, and the names of what is none of numbers."""
    if isinstance(steps, Iterator):
        raise ValueError(
            f"{where}: 'steps': expected what can be gone through again, got an iterator. Make it "
            "a list, or give an iterator of episodes, which is taken into memory."
        )
    if isinstance(steps, Mapping):
        found = dict(_flat(steps))
    else:
        rows = [dict(_flat(step)) for step in steps]
        _check_rows(where, rows)
        found = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    leaves = {name: leaf for name, leaf in found.items() if _is_numeric(leaf) and leaf.shape}
    return leaves, found.keys() - leaves.keys()


def _check_rows(where: str, rows: list[Leaves]) -> None:
    """Refuses steps of several structures, or none at all."""
    if not rows:
        raise ValueError(f"{where}: expected one step or more, got none.")
    about = [{name: leaf.shape for name, leaf in row.items()} for row in rows]
    for number, row in enumerate(about):
        if row != about[0]:
            raise ValueError(
                f"{where}: step {number}: expected the shapes of the first, {about[0]}, got {row}."
            )


def _flat(entry: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of each leaf of nested dicts."""
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", _array(value)


def _array(value: Any) -> np.ndarray:
    """A value as an array; one of objects where it is none."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    try:
        return np.asarray(value)
    except ValueError:  # lists of several lengths
        return np.empty((), object)


def _is_numeric(array: np.ndarray) -> bool:
    return array.dtype == bool or jnp.issubdtype(array.dtype, np.number)
