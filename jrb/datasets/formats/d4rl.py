"""The format of D4RL: one HDF5 file with arrays of all steps.

The arrays are `observations, actions, rewards, terminals`; optionally `timeouts,
next_observations, infos/*` and others of the same length, and `metadata/*`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import h5py
import numpy as np

from jrb.authoring import ExpansionLimit, checks, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import hdf5, tabular
from jrb.datasets.reading.names import check, to_ted
from jrb.datasets.reading.tabular import TERMINATED, TRUNCATED, Table, TableFormat
from jrb.keys import Keys, within

_NEEDED = ("observations", "actions", "rewards", "terminals")
_OWN = (*_NEEDED, "timeouts", "next_observations")


@dataclasses.dataclass(frozen=True)
class D4RL(TableFormat):
    """Datasets of D4RL.

    Attributes:
        horizon: the number of steps after which episodes were truncated, for files without
            `timeouts`; None if it is unknown.
        mapping: as in `Arrays`, for further arrays.
    """

    name: ClassVar[str] = "d4rl"
    looks_for: ClassVar[str] = f"an HDF5 file with {', '.join(_NEEDED)} at its top"

    horizon: int | None = None
    mapping: Mapping[str, Any] | Keys | None = None

    def __post_init__(self) -> None:
        if self.horizon is not None:
            checks.count("horizon", self.horizon)

    def matches(self, source: Source) -> bool:
        """Returns True if the file has D4RL's four main arrays."""
        names = hdf5.top_level(source)
        return all(name in names and not names[name] for name in _NEEDED)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file as a table."""
        with hdf5.open_file(source) as file:
            every = hdf5.columns_below(file)
            # Separate the arrays of steps from those that describe the dataset.
            about = {name for name in every if within(name, "metadata")}
            arrays, texts, others = tabular.sort_arrays({n: every[n] for n in every.keys() - about})
            tabular.check_present(source, arrays, _NEEDED)
            leaves = to_ted(sorted(arrays), self.mapping, source, _OWN, "/")
            columns, odd = tabular.step_columns(source, arrays, leaves)
            limit = ExpansionLimit(source, [source], self.max_expansion)
            limit.add(declared_nbytes(columns))
            # Metadata are at the top and in the group `metadata`.
            metadata = hdf5.read_scalars(file, limit)
            if isinstance(group := hdf5.open_entry(file, "metadata"), h5py.Group):
                metadata |= hdf5.read_scalars(group, limit)
            # Derive time-outs from the horizon only if nothing in the file marks them.
            has_ends = not columns.keys().isdisjoint((TRUNCATED, tabular.EPISODE))
            if self.horizon is not None:
                expected = "None for a file with its own 'timeouts' or numbers of episodes"
                check(not has_ends, f"{source}: horizon", expected, f"{self.horizon}. Leave it out")
                columns = _with_time_outs(source, columns, self.horizon)
            # Scalars at the top and in `metadata` are in the metadata.
            inner = {name: name.removeprefix("metadata/") for name in every}
            scalars = {name for name in every if not every[name].shape and "/" not in inner[name]}
            table = tabular.table_of(
                source,
                columns,
                files=[source],
                key=("d4rl", self.horizon, *sorted(leaves.items())),
                metadata=metadata,
                left_out=(others | texts.keys() | odd | about) - scalars,
            )
            how = f"every {self.horizon} steps stand for one (horizon=)."
            if self.horizon is None:
                how = "episodes end where one terminated only, and may be several in one. Give "
                how += "horizon= if you know it."
                # A bootstrap mask can imply time-outs.
                has_ends |= bool(table.columns[TRUNCATED].any())
            notes = (f"There are no time-outs in the file: {how}",) * (not has_ends)
            yield dataclasses.replace(table, notes=notes + table.notes)


def _with_time_outs(source: Source, columns: dict[str, Any], horizon: int) -> dict[str, Any]:
    """Returns columns with time-outs at every `horizon`-th step since the last end."""
    flags = tabular.with_flags(columns, np.array([len(columns[TERMINATED])]), source)

    def read(start: int, stop: int) -> np.ndarray:
        terminated, truncated = (np.asarray(flags[name][:]) for name in (TERMINATED, TRUNCATED))
        steps = np.arange(len(terminated))
        # Count steps from the first step of each episode, as the known ends have it.
        begins = np.concatenate([[0], np.flatnonzero(terminated | truncated) + 1])
        begin = begins[np.searchsorted(begins, steps, side="right") - 1]
        is_late = (steps - begin + 1) % horizon == 0
        return (truncated | (is_late & ~terminated))[start:stop]

    return flags | {TRUNCATED: dataclasses.replace(flags[TRUNCATED], read=read)}
