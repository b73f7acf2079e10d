"""OGBench: one `.npz` file, arrays of all rows, without rewards.

`observations, actions, terminals`, perhaps `qpos, qvel, button_states` of the same length. An
episode of T steps has T + 1 rows. The last, at which `terminals` is 1, has the observation after
the last action, and an action that led nowhere. No episode terminates: each ends as its time is
over. The validation set is a file of its own beside it, `-val.npz`.

Reference: Park et al., OGBench: Benchmarking Offline Goal-Conditioned RL, 2025.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from jrb.datasets.format import Source
from jrb.datasets.reading import npz
from jrb.datasets.reading.columns import (
    TERMINATED,
    TRUNCATED,
    Column,
    Table,
    TableFormat,
    check_lengths,
    check_names_present,
    ends_of,
    flag_column,
    left_out_note,
    rows_at,
)

_NAMES = {"observations": "observation", "actions": "action"}
_NEEDED = ("observations", "actions", "terminals")
_NOTES = (
    "There are no rewards in the file, as goals are chosen after the fact.",
    "Episodes end by their time-outs; the action of the last row of each led nowhere and is left "
    "out.",
)


@dataclasses.dataclass(frozen=True)
class OGBench(TableFormat):
    """Datasets of OGBench."""

    name: ClassVar[str] = "ogbench"
    looks_for: ClassVar[str] = f"an .npz file with {', '.join(_NEEDED)} and no rewards"

    def matches(self, source: Source) -> bool:
        """Returns whether the arrays are there, and no rewards."""
        names = npz.top(source).keys()
        return set(_NEEDED) <= names and not any(name.startswith("reward") for name in names)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file, without the last row of each episode."""
        with npz.opened(source, self.max_expansion) as archive:
            check_names_present(source, archive.columns, _NEEDED)
            check_lengths(source, archive.columns)
            stops = ends_of(flag_column(archive.columns["terminals"], "terminals", source)[:])
            short = np.flatnonzero(np.diff(stops, prepend=0) < 2)
            if len(short):
                raise ValueError(
                    f"{source}: 'terminals': expected two rows or more of each episode, got one of "
                    f"episode {short[0]}."
                )
            is_step = np.ones(int(stops[-1]) if len(stops) else 0, bool)
            is_step[stops - 1] = False
            rows, ends = np.flatnonzero(is_step), stops - np.arange(1, len(stops) + 1)
            columns: dict[str, Column] = {
                _NAMES.get(name, name): rows_at(array, rows)
                for name, array in archive.columns.items()
                if name != "terminals"
            }
            columns["next/observation"] = rows_at(archive.columns["observations"], rows + 1)
            truncated = np.zeros(len(rows), bool)
            truncated[ends - 1] = True
            columns |= {TERMINATED: np.zeros_like(truncated), TRUNCATED: truncated}
            notes = _NOTES + left_out_note([*archive.texts, *archive.left_out])
            yield Table(columns, ends, notes=notes)
