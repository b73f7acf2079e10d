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
from jrb.datasets.reading.names import check, to_ted, usual_leaf
from jrb.datasets.reading.tabular import DONE, TERMINATED, TRUNCATED, Table, TableFormat

_NEEDED = ("observations", "actions", "terminals")
_MADE = {DONE, TERMINATED, TRUNCATED, "next/observation"}
"""The leaves that the layout implies: a file that has them too has another layout."""
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
        names = npz.numeric_names(source)
        has_more = not _MADE.isdisjoint(map(usual_leaf, names - {"terminals"}))
        has_more |= any(name.startswith("reward") for name in names)
        return set(_NEEDED) <= names and not has_more

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file as a table; last rows serve only as next observations."""
        with npz.open_file(source, self.max_expansion) as every:
            arrays, texts, others = tabular.sort_arrays(every)
            tabular.check_present(source, arrays, _NEEDED)
            leaves = to_ted(arrays, None, source, _NEEDED)
            columns, odd = tabular.step_columns(source, arrays, leaves)
            # Find the last row of each episode, which has only an observation.
            stops = tabular.ends_of(
                tabular.flag_column(columns[TERMINATED], "terminals", source)[:]
            )
            short = np.flatnonzero(np.diff(stops, prepend=0) < 2)
            got = f"one of episode {', '.join(map(str, short[:1]))}"
            where = f"{source}: 'terminals'"
            check(not len(short), where, "two rows or more of each episode", got)
            # Steps are all other rows, and the row after each has its next observation.
            rows = np.delete(np.arange(len(columns[TERMINATED])), stops - 1)
            ends, observation = stops - np.arange(1, len(stops) + 1), columns["observation"]
            # Leaves that the layout implies take the place of arrays of their name.
            odd |= {name for name in leaves if leaves[name] in _MADE} - {"terminals"}
            columns = {
                leaf: tabular.rows_at(column, rows)
                for leaf, column in columns.items()
                if leaf not in _MADE
            }
            columns["next/observation"] = tabular.rows_at(observation, rows + 1)
            yield Table(
                tabular.with_flags(columns, ends, source),
                ends,
                notes=_NOTES + tabular.flag_notes(columns) * bool(tabular.bootstrap_masks(columns)),
                left_out=others | texts.keys() | odd,
            )
