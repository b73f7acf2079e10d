"""D4RL: one HDF5 file, arrays of all steps at its top.

`observations, actions, rewards, terminals`, perhaps `timeouts, next_observations, infos/*` of the
same length, and `metadata/*`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar

import h5py
import numpy as np

from jrb._util import checks, expansion
from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.derived import Flag
from jrb.datasets.reading.flags import Flags, read_flags, remembered_flags
from jrb.datasets.reading.flat import (
    Column,
    Flat,
    Table,
    check_lengths,
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
_TERMINATED, _TRUNCATED = "next/terminated", "next/truncated"
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

    def matches(self, source: Source) -> bool:
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
            expansion.Limit(source, [source], self.max_expansion).add(expansion.nbytes(found))
            columns: dict[str, Column] = {_name(name): leaf for name, leaf in found.items()}
            notes = self._told(source, columns)
            read = functools.partial(self._flags, source, columns)
            flags = remembered_flags([source], {"horizon": self.horizon}, read)
            about = hdf5.strings(file)
            if isinstance(metadata := hdf5.own(file, "metadata"), h5py.Group):
                about |= hdf5.strings(metadata)
            notes += left_out_note(every.keys() - found.keys())
            yield flags.table(columns, notes, about)

    def _flags(self, source: Source, columns: dict[str, Column]) -> Flags:
        """Where episodes end, time-outs put in where the file has none."""
        if _TRUNCATED in columns:
            return read_flags(columns, source)
        terminated = Flag(columns[_TERMINATED], _TERMINATED, source)[:]
        return read_flags({**columns, _TRUNCATED: _after(terminated, self.horizon)}, source)

    def _told(self, source: Source, columns: dict[str, Column]) -> tuple[str, ...]:
        """What is to be said of time-outs."""
        if _TRUNCATED not in columns:
            return (_said(self.horizon),)
        if self.horizon is not None:
            raise ValueError(
                f"{source}: horizon: expected None for a file with its own 'timeouts', got "
                f"{self.horizon}. Leave it out."
            )
        return ()


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
