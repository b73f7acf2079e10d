"""The format of D4RL: one HDF5 file with arrays of all steps.

The arrays are `observations, actions, rewards, terminals`; optionally `timeouts,
next_observations, infos/*` of the same length, and `metadata/*`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import h5py
import numpy as np

from jrb.authoring import ExpansionLimit, checks, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5, tabular
from jrb.datasets.reading.names import check
from jrb.datasets.reading.tabular import TERMINATED, TRUNCATED, DerivedColumn, Table, TableFormat

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
        horizon: the number of steps after which episodes were truncated, for files without
            `timeouts`; None if it is unknown.
    """

    name: ClassVar[str] = "d4rl"
    looks_for: ClassVar[str] = f"an HDF5 file with {', '.join(_NEEDED)} at its top"

    horizon: int | None = None

    def __post_init__(self) -> None:
        if self.horizon is not None:
            checks.count("horizon", self.horizon)

    def matches(self, source: Source) -> bool:
        """Returns True if the file has D4RL's four main arrays."""
        return set(_NEEDED) <= {name for name, is_group in hdf5.top(source).items() if not is_group}

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file as a table."""
        with hdf5.open_file(source) as file:
            every = hdf5.below(file)
            names = [name for name in every if name in _NAMES or name.startswith("infos/")]
            arrays, texts, others = tabular.by_content({name: every[name] for name in names})
            tabular.check_present(source, arrays, _NEEDED)
            tabular.check_lengths(source, arrays)
            limit = ExpansionLimit(source, [source], self.max_expansion)
            limit.add(declared_nbytes(arrays))
            columns = {
                _NAMES.get(name, "info" + name.removeprefix("infos")): array
                for name, array in arrays.items()
            }
            notes: tuple[str, ...] = ()
            if TRUNCATED in columns:
                where, expected = f"{source}: horizon", "None for a file with its own 'timeouts'"
                check(self.horizon is None, where, expected, f"{self.horizon}. Leave it out")
            else:
                terminated = tabular.flag_column(columns[TERMINATED], TERMINATED, source)
                read = lambda start, stop: self._time_outs(terminated[:])[start:stop]
                columns[TRUNCATED] = DerivedColumn(terminated.shape, terminated.dtype, read)
                if self.horizon is None:
                    how = "episodes end where one terminated only, and may be several in one. Give "
                    how += "horizon= if you know it."
                else:
                    how = f"every {self.horizon} steps stand for one (horizon=)."
                notes = (f"There are no time-outs in the file: {how}",)
            metadata = hdf5.strings(file, limit)
            if isinstance(group := hdf5.own(file, "metadata"), h5py.Group):
                metadata |= hdf5.strings(group, limit)
            yield tabular.table_of(
                source,
                columns,
                files=[source],
                key=("d4rl", self.horizon),
                notes=notes,
                metadata=metadata,
                left_out=others | texts.keys(),
            )

    def _time_outs(self, terminated: np.ndarray) -> np.ndarray:
        """Returns bool `[T]`, True at every `horizon`-th step since the last termination."""
        if self.horizon is None:
            return np.zeros_like(terminated)
        steps = np.arange(len(terminated))
        starts = np.concatenate([[0], np.flatnonzero(terminated) + 1])
        start = starts[np.searchsorted(starts, steps, side="right") - 1]
        return ((steps - start + 1) % self.horizon == 0) & ~terminated
