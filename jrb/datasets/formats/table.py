"""Parquet and Arrow tables with a row for each step: one file, or a folder of them."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jrb._util import expansion
from jrb.datasets.format import Source
from jrb.datasets.reading import arrow, arrow_columns
from jrb.datasets.reading.flags import read_flags, remembered_flags
from jrb.datasets.reading.flat import Column, Flat, Table
from jrb.datasets.reading.mapping import episode_text, to_ted
from jrb.keys import Keys


@dataclasses.dataclass(frozen=True)
class Tables(Flat):
    """Tables: Parquet, Feather, Arrow's files and streams.

    Columns hold numbers, lists of one length, or structs of these. The files of a folder follow
    each other by the numbers in their names.

    An observation is needed, and something that tells where episodes end: a column of flags, or one
    with the episode's number. Rewards and actions may lack.

    Attributes:
        mapping: from names of columns to fields of `jrb.Keys` or leaves of TED, or `jrb.Keys`; None
            where the names are usual ones. See `mapping.to_ted`.
    """

    name: ClassVar[str] = "table"
    looks_for: ClassVar[str] = "a Parquet or Arrow file with a row a step, or a folder of them"

    mapping: Mapping[str, Any] | Keys | None = None

    def is_own(self, source: str, name: str) -> bool:
        """Returns whether a file is one of the tables."""
        is_hidden = name[0] in "._" or "/" in name
        return not is_hidden and arrow.format_of(os.path.join(source, name)) is not None

    def matches(self, source: Source) -> bool:
        """Whether there is such a file."""
        return bool(arrow.tables(source))

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """The columns, which read what they are asked for."""
        paths = arrow.tables(source)
        if not paths:
            raise ValueError(f"{source}: expected Parquet or Arrow files, found none.")
        files = arrow.Files(paths)
        if not files.starts[-1]:
            raise ValueError(f"{source}: expected rows, found none.")
        leaves, others = arrow_columns.leaves(files.schema)
        numbers = [leaf.name for leaf in leaves]
        texts = episode_text(numbers, arrow_columns.texts(files.schema), self.mapping, source)
        names = to_ted([*numbers, *texts], self.mapping, source)
        columns: dict[str, Column] = {
            names[leaf.name]: arrow_columns.Column(files, leaf) for leaf in leaves
        }
        columns |= {names[name]: arrow_columns.Texts(files, name) for name in texts}
        if not any(name.split("/")[0] == "observation" for name in columns):
            raise ValueError(
                f"{source}: expected a column for the observation, got {sorted(names)}. Name it "
                'with mapping={"...": "observation"}.'
            )
        expansion.Limit(source, paths, self.max_expansion).add(expansion.nbytes(columns))
        flags = remembered_flags(paths, names, lambda: read_flags(columns, source))
        yield flags.table(
            columns,
            arrow_columns.left_out([each for each in others if each.split(" (")[0] not in texts]),
        )
