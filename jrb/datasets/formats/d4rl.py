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

from jrb.authoring import ExpansionLimit, checks, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5
from jrb.datasets.reading.columns import (
    TERMINATED,
    TRUNCATED,
    Column,
    DerivedColumn,
    Table,
    TableFormat,
    check_lengths,
    check_names_present,
    flag_column,
    left_out_note,
    table_of,
)

_NAMES = {
    "observations": "observation",
    "actions": "action",
    "rewards": "next/reward",
    "terminals": TERMINATED,
    "timeouts": TRUNCATED,
    "next_observations": "next/observation",
}
_NEEDED = ("observations", "actions", "rewards", "terminals")


@dataclasses.dataclass(frozen=True)
class D4RL(TableFormat):
    """Datasets of D4RL.

    Attributes:
        horizon: the number of steps after which an episode is truncated, for files without
            `timeouts`; None if it is not known.
    """

    name: ClassVar[str] = "d4rl"
    looks_for: ClassVar[str] = f"an HDF5 file with {', '.join(_NEEDED)} at its top"

    horizon: int | None = None

    def __post_init__(self) -> None:
        if self.horizon is not None:
            checks.count("horizon", self.horizon)

    def matches(self, source: Source) -> bool:
        """Returns whether the arrays are there."""
        return set(_NEEDED) <= {name for name, about in hdf5.top(source).items() if about}

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file."""
        with hdf5.opened(source) as file:
            every = {
                name: array
                for name, array in hdf5.below(file).items()
                if name in _NAMES or name.startswith("infos/")
            }
            arrays = {name: array for name, array in every.items() if array.is_numeric}
            check_names_present(source, arrays, _NEEDED)
            check_lengths(source, arrays)
            ExpansionLimit(source, [source], self.max_expansion).add(declared_nbytes(arrays))
            columns: dict[str, Column] = {
                _NAMES.get(name) or "info" + name.removeprefix("infos"): array
                for name, array in arrays.items()
            }
            notes = self._add_time_outs(source, columns)
            metadata = hdf5.strings(file)
            if isinstance(group := hdf5.own(file, "metadata"), h5py.Group):
                metadata |= hdf5.strings(group)
            yield table_of(
                source,
                columns,
                files=[source],
                cache_key=("d4rl", self.horizon),
                notes=notes + left_out_note(every.keys() - arrays.keys()),
                metadata=metadata,
            )

    def _add_time_outs(self, source: Source, columns: dict[str, Column]) -> tuple[str, ...]:
        """Adds time-outs by the horizon to a file without any, and returns the note on them."""
        if TRUNCATED in columns and self.horizon is not None:
            raise ValueError(
                f"{source}: horizon: expected None for a file with its own 'timeouts', got "
                f"{self.horizon}. Leave it out."
            )
        if TRUNCATED in columns:
            return ()
        terminated, horizon = flag_column(columns[TERMINATED], TERMINATED, source), self.horizon
        columns[TRUNCATED] = DerivedColumn(
            terminated.shape, terminated.dtype, lambda a, b: _time_outs(terminated[:], horizon)[a:b]
        )
        if horizon is None:
            return (
                "There are no time-outs in the file: episodes end where one terminated only, and "
                "may be several in one. Give horizon= if you know it.",
            )
        return (
            f"There are no time-outs in the file: every {horizon} steps stand for one (horizon=).",
        )


def _time_outs(terminated: np.ndarray, horizon: int | None) -> np.ndarray:
    """Returns flags of every `horizon`-th step since the last termination."""
    if horizon is None:
        return np.zeros_like(terminated)
    steps = np.arange(len(terminated))
    starts = np.concatenate([[0], np.flatnonzero(terminated) + 1])
    start = starts[np.searchsorted(starts, steps, side="right") - 1]
    return ((steps - start + 1) % horizon == 0) & ~terminated
