"""The format of many published agents: a folder with one `.npz` file per episode.

Two layouts are in use. In one, a row has an observation and the action taken after it. In the
other, as in dm_env, a row has an observation with the action and reward that led to it; the first
row has only the observation of the reset. T steps.

Reference: Hafner et al., Mastering Atari with Discrete World Models, 2021 (the second layout).
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jrb.authoring import checks
from jrb.datasets.format import Source
from jrb.datasets.reading import npz, tabular
from jrb.datasets.reading.names import check, natural_order, to_ted
from jrb.datasets.reading.tabular import DONE, TERMINATED, TRUNCATED, Column, EpisodeTables, Table
from jrb.keys import Keys, within

_FLAGS = {"is_terminal": TERMINATED, "is_last": DONE}
_ARRIVES = (
    "A row is taken for an observation, and the action and the reward that led to it: the first "
    "row of each file has the observation of the reset alone (arrives=)."
)


@dataclasses.dataclass(frozen=True)
class NpzEpisodes(tabular.EpisodeFormat):
    """A folder of `.npz` files, one per episode, in the order of the numbers in their names.

    Observations have as many rows as actions, or one more. If there are no flags, an episode
    terminated if its last `discount` or mask is 0, and was truncated otherwise.

    Attributes:
        mapping: as in `Arrays`.
        arrives: True if a row has the action and reward that led to its observation. None to
            assume this if the first file has `discount` or `is_first`, and its first row has zero
            actions and rewards; a note then says so.
    """

    name: ClassVar[str] = "npz-episodes"
    looks_for: ClassVar[str] = "a folder of .npz files, one for each episode"
    own_files: ClassVar[str] = r"[^/]+\.npz"

    mapping: Mapping[str, Any] | Keys | None = None
    arrives: bool | None = None

    def __post_init__(self) -> None:
        if self.arrives is not None:
            checks.flag("arrives", self.arrives)

    def files(self, source: Source) -> list[str]:
        """Returns the `.npz` files of a folder in order."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return []
        names = (name for name in os.listdir(source) if name.endswith(".npz") and name[0] != ".")
        return [os.path.join(source, name) for name in sorted(names, key=natural_order)]

    def matches(self, source: Source) -> bool:
        """Returns True if the source is a folder with `.npz` files."""
        return bool(self.files(source))

    def snapshot(self, source: Source) -> "NpzEpisodes":
        """Returns the format with `arrives` decided by the first file, if it is None."""
        paths = self.files(source)
        if self.arrives is not None or not paths:
            return self
        with npz.open_file(paths[0], self.max_expansion) as arrays:
            columns, _ = self._columns(paths[0], tabular.sort_arrays(arrays)[0])
            # The row of a reset has no action and no reward, so zeros stand there.
            led = [name for name in columns if within(name, "action") or name == "next/reward"]
            is_zero = not any(columns[name][:1].any() for name in led)
            arrives = is_zero and bool({"discount", "is_first"} & arrays.keys())
        return dataclasses.replace(self, arrives=arrives)

    def tables(self, source: Source, numbers: Sequence[int] | None) -> EpisodeTables:
        """Yields the file and the table of each episode in `numbers`; None for all."""
        paths = self.files(source)
        for path in paths if numbers is None else [paths[number] for number in numbers]:
            with npz.open_file(path, self.max_expansion) as arrays:
                every, texts, others = tabular.sort_arrays(arrays)
                columns, odd = self._columns(path, every)
                table = self._table(path, columns, others | texts.keys() | odd)
                yield path, dataclasses.replace(table, facts={"file": os.path.basename(path)})

    def _columns(
        self, path: str, arrays: Mapping[str, Column]
    ) -> tuple[dict[str, Column], set[str]]:
        """Returns the arrays by their names in TED, and the names of those of other lengths."""
        leaves = to_ted(arrays, self.mapping, path)
        # These flags of dm_env yield to flags with usual names.
        for name, leaf in _FLAGS.items():
            if name in leaves and leaf not in leaves.values():
                leaves[name] = leaf
        tabular.check_roles_present(path, leaves, ("observation", "action"))
        columns, odd = tabular.step_columns(path, arrays, leaves, ("observation",))
        return {name: column for name, column in columns.items() if name != "is_first"}, odd

    def _table(self, path: str, columns: Mapping[str, Column], left_out: set[str]) -> Table:
        """Returns the table of a file's steps, without rows that only complete other steps."""
        # Where rows arrive, drop all of the first row but its observation; observations then have a
        # row more.
        count = min(len(column) for name, column in columns.items() if not tabular.is_seen(name))
        rows = {len(column) for name, column in columns.items() if tabular.is_seen(name)}
        first = int(bool(self.arrives) and rows == {count})
        steps = count - first
        check(len(rows) == 1 and steps > 0, path, "observations of one step or more", rows)
        if first:
            rows = np.arange(1, count)
            columns = {
                name: column if tabular.is_seen(name) else tabular.rows_at(column, rows)
                for name, column in columns.items()
            }
        columns = tabular.with_next(columns, steps, ("observation",))
        if columns.keys().isdisjoint(tabular.FLAGS):
            # A mask tells how the episode ended; without one, it is taken for truncated.
            flag = DONE if tabular.bootstrap_masks(columns) else TRUNCATED
            columns[flag] = np.arange(steps) == steps - 1
        table = tabular.table_of(path, columns, notes=(_ARRIVES,) * first, left_out=left_out)
        got = f"one that ends after {table.ends[0]} of {steps} steps"
        check(len(table.ends) == 1, path, "one episode in the file", got)
        return table
