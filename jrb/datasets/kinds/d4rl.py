"""D4RL: one HDF5 file, arrays of all steps at its top.

`observations, actions, rewards, terminals`, perhaps `timeouts, next_observations, infos/*` of the
same length, and `metadata/*`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import h5py
import numpy as np

from jrb._base import checks
from jrb.datasets.kind import Source
from jrb.datasets.reading import hdf5
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

_NAMES = {
    "observations": "observation",
    "actions": "action",
    "rewards": "next/reward",
    "terminals": "next/terminated",
    "timeouts": "next/truncated",
    "next_observations": "next/observation",
}
_FLAGS = ("next/terminated", "next/truncated")
_NEEDED = ("observations", "actions", "rewards", "terminals")


@dataclasses.dataclass(frozen=True)
class D4RL(Flat):
    """Sets of D4RL.

    Attributes:
        horizon: after how many steps an episode is truncated, for files without `timeouts`; None if
            nobody knows.
    """

    name: ClassVar[str] = "d4rl"
    looks_for: ClassVar[str] = f"an HDF5 file with {', '.join(_NEEDED)} at its top"

    horizon: int | None = None

    def __post_init__(self) -> None:
        if self.horizon is not None:
            checks.count("horizon", self.horizon)

    def recognises(self, source: Source) -> bool:
        """Whether the arrays are there."""
        return set(_NEEDED) <= {name for name, about in hdf5.top(source).items() if about}

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """The columns."""
        with hdf5.opened(source) as file:
            every = {name: leaf for name, leaf in hdf5.below(file).items() if _is_step(name)}
            found = {name: leaf for name, leaf in every.items() if leaf.is_numeric}
            needed(source, found, _NEEDED)
            check_lengths(source, found)
            columns: dict[str, Column] = {_name(name): leaf for name, leaf in found.items()}
            flags, notes = self._flags(source, columns)
            ends = ends_of(flags["next/terminated"] | flags["next/truncated"])
            about = hdf5.strings(file)
            if isinstance(metadata := hdf5.own(file, "metadata"), h5py.Group):
                about |= hdf5.strings(metadata)
            notes += left_out_note(every.keys() - found.keys())
            yield Table(columns | flags, ends, metadata=about, notes=notes)

    def _flags(
        self, source: Source, columns: dict[str, Column]
    ) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        """Both flags of each step, bool `[T]`, and what is to be said of them."""
        flags = {name: Flag(columns[name], name, source)[:] for name in _FLAGS if name in columns}
        if "next/truncated" not in flags:
            flags["next/truncated"] = _after(flags["next/terminated"], self.horizon)
            return flags, (_said(self.horizon),)
        if self.horizon is not None:
            raise ValueError(
                f"{source}: horizon: expected None for a file with its own 'timeouts', got "
                f"{self.horizon}. Leave it out."
            )
        return flags, ()


def _is_step(name: str) -> bool:
    return name in _NAMES or name.startswith("infos/")


def _name(name: str) -> str:
    return _NAMES.get(name) or "info" + name.removeprefix("infos")


def _after(terminated: np.ndarray, horizon: int | None) -> np.ndarray:
    """Time-outs after so many steps from the beginning of an episode."""
    steps = np.arange(len(terminated))
    ends = np.concatenate([[0], np.flatnonzero(terminated) + 1])
    begun = ends[np.searchsorted(ends, steps, side="right") - 1]
    if horizon is None:
        return np.zeros_like(terminated)
    return ((steps - begun + 1) % horizon == 0) & ~terminated


def _said(horizon: int | None) -> str:
    if horizon is None:
        return (
            "There are no time-outs in the file: episodes end where one terminated only, and may "
            "be several in one. Give horizon= if you know it."
        )
    return f"There are no time-outs in the file: every {horizon} steps stand for one (horizon=)."
