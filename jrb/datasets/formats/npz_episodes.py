"""Episodes in a file each: a folder of `.npz` files, as many published codes write while they act.

Two layouts are in use. In one, a row has an observation, and the action taken after it. In the
other, a row has what arrives together, as in steps of dm_env: an observation, and the action and
the reward that led to it; the first row has the observation of the reset alone. T steps.

Reference: Hafner et al., Mastering Atari with Discrete World Models, 2021 (what arrives together).
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jrb.authoring import checks
from jrb.datasets.format import Description, Episode, Indexed, Source
from jrb.datasets.reading import npz
from jrb.datasets.reading.columns import (
    DONE,
    TERMINATED,
    TRUNCATED,
    Column,
    Table,
    check_roles_present,
    is_seen,
    left_out_note,
    rows_at,
    table_of,
)
from jrb.datasets.reading.mapping import to_ted
from jrb.datasets.reading.names import natural_order
from jrb.keys import Keys, within

_FLAGS = {"is_terminal": TERMINATED, "is_last": DONE, "is_first": None}
_ARRIVES = (
    "A row is taken for an observation, and the action and the reward that led to it: the first "
    "row of each file has the observation of the reset alone (arrives=)."
)


@dataclasses.dataclass(frozen=True)
class NpzEpisodes(Indexed):
    """A folder of `.npz` files, one for each episode, in the natural order of their names.

    Observations have as many rows as actions, or one more. Without flags of ends, an episode whose
    last `discount` is 0 terminated, and all others are truncated.

    Attributes:
        mapping: as of plain arrays, from names in the files to those of `jrb.Keys` or of leaves.
        arrives: True if a row has the action and the reward that led to its observation. None to
            decide by the first row of the first file: its actions and rewards are zero, and there
            is a `discount` or `is_first`; a note tells it.
    """

    name: ClassVar[str] = "npz-episodes"
    looks_for: ClassVar[str] = "a folder of .npz files, one for each episode"
    own_files: ClassVar[str] = r"[^/]+\.npz"

    mapping: Mapping[str, Any] | Keys | None = None
    arrives: bool | None = None

    def __post_init__(self) -> None:
        if self.arrives is not None:
            checks.flag("arrives", self.arrives)

    def matches(self, source: Source) -> bool:
        """Returns whether there are such files."""
        return bool(_files(source))

    def snapshot(self, source: Source) -> "NpzEpisodes":
        """Returns the format with `arrives` as the first file shows it."""
        paths = _files(source)
        if self.arrives is not None or not paths:
            return self
        with npz.opened(paths[0], self.max_expansion) as archive:
            columns = self._columns(paths[0], archive)
            led = [name for name in columns if within(name, "action") or name == "next/reward"]
            is_zero = not any(columns[name][:1].any() for name in led)
            arrives = is_zero and bool({"discount", "is_first"} & archive.columns.keys())
        return dataclasses.replace(self, arrives=arrives)

    def describe(self, source: Source) -> Description:
        """Describes the dataset, from the shapes and flags of all files."""
        paths = _files(source)
        if not paths:
            raise ValueError(f"{source}: expected {self.looks_for}, got none.")
        spec, lengths, is_cut, notes = None, list[int](), list[bool](), dict[str, None]()
        for path in paths:
            with npz.opened(path, self.max_expansion) as archive:
                table = self._table(path, archive)
                spec = table.spec if spec is None else spec
                if table.spec != spec:
                    raise ValueError(
                        f"{path}: expected the leaves of {paths[0]}, {spec}, got {table.spec}."
                    )
                lengths.append(int(table.ends[0]))
                is_cut.append(bool(table.is_cut[0]))
                notes |= dict.fromkeys(table.notes)
        facts = {"file": np.array([os.path.basename(path) for path in paths])}
        cut = np.array(is_cut) if any(is_cut) else None
        return Description(spec, np.array(lengths, np.int64), cut, facts, notes=tuple(notes))

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers."""
        paths = _files(source)
        for number in numbers:
            with npz.opened(paths[number], self.max_expansion) as archive:
                table = self._table(paths[number], archive)
                yield table.rows(0, int(table.ends[0]))

    def _columns(self, path: str, archive: npz.Archive) -> dict[str, Column]:
        """Returns the arrays by their leaves in TED."""
        leaves = to_ted(archive.columns, self.mapping, path)
        columns = {leaves[name]: column for name, column in archive.columns.items()}
        check_roles_present(path, columns, leaves, ("observation", "action"))
        for name, leaf in _FLAGS.items():
            flag = columns.pop(name, None)
            if flag is not None and leaf is not None:
                columns.setdefault(leaf, flag)
        return columns

    def _table(self, path: str, archive: npz.Archive) -> Table:
        """Returns the steps of a file, without a row that has no action or no step after it."""
        columns = self._columns(path, archive)
        counts = {len(column) for name, column in columns.items() if not is_seen(name)}
        stops = {len(column) for name, column in columns.items() if is_seen(name)}
        count, stop = min(counts), min(stops)
        first = int(bool(self.arrives) and stop == count)
        steps = count - first
        if len(counts) > 1 or len(stops) > 1 or stop not in (count, count + 1) or steps < 1:
            rows = {name: len(column) for name, column in columns.items()}
            raise ValueError(f"{path}: expected steps of one number in all arrays, got {rows}.")
        rows, parts = np.arange(steps), dict[str, Column]()
        for name, column in columns.items():
            parts[name] = rows_at(column, rows + (0 if is_seen(name) else first))
            if is_seen(name) and stop > steps:
                parts[f"next/{name}"] = rows_at(column, rows + 1)
        if not parts.keys() & {TERMINATED, TRUNCATED, DONE}:
            terminated = np.zeros(steps, bool)
            terminated[-1] = "discount" in parts and not parts["discount"][-1:].any()
            parts[TERMINATED] = terminated
        notes = (_ARRIVES,) * first + left_out_note([*archive.texts, *archive.left_out])
        table = table_of(path, parts, notes=notes)
        if len(table.ends) > 1:
            raise ValueError(
                f"{path}: expected one episode in the file, got one that ends after "
                f"{table.ends[0]} of {steps} steps."
            )
        return table


def _files(source: Source) -> list[str]:
    if not isinstance(source, str) or not os.path.isdir(source):
        return []
    names = (name for name in os.listdir(source) if name.endswith(".npz") and name[0] != ".")
    return [os.path.join(source, name) for name in sorted(names, key=natural_order)]
