"""OGBench: one `.npz` file, arrays of all rows, without rewards.

`observations, actions, terminals`, perhaps `qpos, qvel, button_states` of the same length. An
episode of T steps has T + 1 rows. The last, at which `terminals` is 1, has the observation after
the last action, and an action that led nowhere. No episode terminates: each ends as its time is
over. The set for validation lies in a file of its own beside it, `-val.npz`.

Reference: Park et al., OGBench: Benchmarking Offline Goal-Conditioned RL, 2025.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import jax
import numpy as np

from jrb.datasets.format import Description, Episode, Source
from jrb.datasets.reading import npz
from jrb.datasets.reading.derived import Flag
from jrb.datasets.reading.flat import (
    Column,
    Flat,
    Table,
    check_lengths,
    ends_of,
    left_out_note,
    needed,
)

_NAMES = {"observations": "observation", "actions": "action"}
_NEEDED = ("observations", "actions", "terminals")
_PADDING = ""  # a name that no array in a file has
_NOTES = (
    "There are no rewards in the file, as goals are chosen after the fact.",
    "Episodes end by their time-outs; the action of the last row of each led nowhere and is left "
    "out.",
)


@dataclasses.dataclass(frozen=True)
class OGBench(Flat):
    """Sets of OGBench."""

    name: ClassVar[str] = "ogbench"
    looks_for: ClassVar[str] = f"an .npz file with {', '.join(_NEEDED)} and no rewards"

    def matches(self, source: Source) -> bool:
        """Whether the names are there, and none of rewards."""
        names = npz.top(source).keys()
        return set(_NEEDED) <= names and not any(name.startswith("reward") for name in names)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """All rows, and of each whether it is the last of an episode."""
        with npz.opened(source, self.max_expansion) as archive:
            needed(source, archive.columns, _NEEDED)
            check_lengths(source, archive.columns)
            columns: dict[str, Column] = {
                _NAMES.get(name, name): leaf for name, leaf in archive.columns.items()
            }
            ends = ends_of(Flag(columns.pop("terminals"), "terminals", source)[:])
            _check_rows(source, ends)
            padding = np.zeros(int(ends[-1]) if len(ends) else 0, bool)
            padding[ends - 1] = True
            columns |= {
                "next/terminated": np.zeros_like(padding),
                "next/truncated": np.append(padding[1:], True)[: len(padding)],
                _PADDING: padding,
            }
            yield Table(
                columns, ends, notes=_NOTES + left_out_note([*archive.texts, *archive.left_out])
            )

    def describe(self, source: Source) -> Description:
        """What there is, without the last rows."""
        found = super().describe(source)
        spec = {name: leaf for name, leaf in found.spec.items() if name != _PADDING}
        return dataclasses.replace(found, spec=spec, lengths=found.lengths - 1, cut=None)

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The episodes of these numbers."""
        return map(_without_padding, super().pick(source, numbers))

    def blocks(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """The same steps, those of episodes that lie side by side together."""
        return map(_without_padding, super().blocks(source, numbers))


def _check_rows(source: Source, ends: np.ndarray) -> None:
    """Refuses episodes of one row, which have no step."""
    short = np.flatnonzero(np.diff(ends, prepend=0) < 2)
    if len(short):
        raise ValueError(
            f"{source}: 'terminals': expected two rows or more of each episode, got one of episode "
            f"{short[0]}."
        )


def _without_padding(block: Episode) -> Episode:
    real = ~block[_PADDING]
    steps = {name: leaf for name, leaf in block.items() if name != _PADDING}
    return jax.tree.map(lambda leaf: leaf[real], steps)
