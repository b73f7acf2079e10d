"""Parquet and Arrow tables with a row for each step: one file, or a folder of them."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import arrow
from jrb.datasets.reading.columns import Column, Table, TableFormat, check_roles_present, table_of
from jrb.datasets.reading.mapping import episode_text, to_ted
from jrb.keys import Keys


@dataclasses.dataclass(frozen=True)
class Tables(TableFormat):
    """Tables: Parquet, Feather, Arrow's files and streams.

    Columns hold numbers, lists of one length, or structs of these. The files of a folder follow
    each other by the numbers in their names.

    Needed are an observation, and a column that tells where episodes end: flags, or the episode's
    number or text. Rewards and actions may be missing.

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
        """Returns whether there is such a file."""
        return bool(arrow.tables(source))

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the files."""
        paths = arrow.tables(source)
        if not paths:
            raise ValueError(f"{source}: expected Parquet or Arrow files, found none.")
        files = arrow.ArrowFiles(paths)
        if not files.starts[-1]:
            raise ValueError(f"{source}: expected rows, found none.")
        numeric, others = arrow.numeric_leaves(files.schema)
        numbers = [leaf.name for leaf in numeric]
        texts = episode_text(numbers, arrow.text_columns(files.schema), self.mapping, source)
        leaves = to_ted([*numbers, *texts], self.mapping, source)
        columns: dict[str, Column] = {
            leaves[leaf.name]: arrow.ArrowColumn(files, leaf) for leaf in numeric
        }
        columns |= {leaves[name]: arrow.TextColumn(files, name) for name in texts}
        check_roles_present(source, columns, leaves, ("observation",))
        ExpansionLimit(source, paths, self.max_expansion).add(declared_nbytes(columns))
        notes = arrow.left_out([each for each in others if each.split(" (")[0] not in texts])
        key = tuple(sorted(leaves.items()))
        yield table_of(source, columns, files=paths, cache_key=key, notes=notes)
