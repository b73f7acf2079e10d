"""The format of OGBench: one `.npz` file with arrays of all rows, without rewards.

The arrays are `observations, actions, terminals`, often also `qpos, qvel, button_states`. An
episode of T steps has T + 1 rows. The last one, where `terminals` is 1, has the observation after
the last action, and an action without effect. No episode terminates: all end by a time limit. The
validation set is a separate file in the same folder, `-val.npz`.

Reference: Park et al., OGBench: Benchmarking Offline Goal-Conditioned RL, 2025.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from jrb.datasets.format import Source
from jrb.datasets.reading import npz, tabular
from jrb.datasets.reading.names import check
from jrb.datasets.reading.tabular import TERMINATED, TRUNCATED, Table, TableFormat

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
        """Returns True if the file has OGBench's arrays, and no rewards."""
        names = npz.top(source)
        return set(_NEEDED) <= names and not any(name.startswith("reward") for name in names)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file as a table; last rows serve only as next observations."""
        with npz.open_file(source, self.max_expansion) as every:
            arrays, texts, others = tabular.by_content(every)
            tabular.check_present(source, arrays, _NEEDED)
            tabular.check_lengths(source, arrays)
            stops = tabular.ends_of(
                tabular.flag_column(arrays["terminals"], "terminals", source)[:]
            )
            short = np.flatnonzero(np.diff(stops, prepend=0) < 2)
            got = f"one of episode {', '.join(map(str, short[:1]))}"
            where = f"{source}: 'terminals'"
            check(not len(short), where, "two rows or more of each episode", got)
            rows = np.delete(np.arange(len(arrays["terminals"])), stops - 1)
            ends, observation = stops - np.arange(1, len(stops) + 1), arrays["observations"]
            columns = {
                _NAMES.get(name, name): tabular.rows_at(array, rows)
                for name, array in arrays.items()
                if name != "terminals"
            }
            truncated = np.isin(np.arange(len(rows)), ends - 1)
            terminated = np.zeros_like(truncated)
            yield Table(
                {
                    **columns,
                    "next/observation": tabular.rows_at(observation, rows + 1),
                    TERMINATED: terminated,
                    TRUNCATED: truncated,
                },
                ends,
                notes=_NOTES,
                left_out=others | texts.keys(),
            )
