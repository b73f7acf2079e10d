"""Formats of plain arrays and of tables, with one row per step and names to be mapped.

An episode ends at flags, and where the value of `episode`, a number or a text, changes. Rewards may
be missing.
"""

import contextlib
import dataclasses
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from jrb.authoring import ExpansionLimit, declared_nbytes
from jrb.datasets.format import Source
from jrb.datasets.reading import arrow, hdf5, npz, tabular
from jrb.datasets.reading.names import check, episode_text, explain_damage, to_ted, usual_leaf
from jrb.datasets.reading.tabular import Column, Table, TableFormat
from jrb.keys import Keys

_ENDINGS = (".npz", ".h5", ".hdf5", ".parquet", ".arrow", ".feather")
_MOST = 100  # the maximum number of files of a folder that `check_whole` opens
_FOLDERS = ("", "data", "meta")  # folders with the files by which formats are recognised


@dataclasses.dataclass(frozen=True)
class Arrays(TableFormat):
    """One `.npz` or HDF5 file with arrays of one length.

    Arrays of another length that are no part of a transition are left out.

    Attributes:
        mapping: a dict from names in the file to fields of `jrb.Keys` or leaves in TED; or a
            `jrb.Keys` with the names in the file. None if the file has usual names.
    """

    name: ClassVar[str] = "arrays"
    looks_for: ClassVar[str] = "an .npz or HDF5 file with arrays of one length"

    mapping: Mapping[str, Any] | Keys | None = None

    def matches(self, source: Source) -> bool:
        """Returns True if numeric arrays have one length, or observation and action have names."""
        try:
            with _open_arrays(source, math.inf) as every:
                arrays, _, _ = tabular.sort_arrays(every)
                # Arrays of several lengths match only if names tell which of them belong to steps.
                roles = {str(usual_leaf(name)).split("/")[0] for name in arrays}
                lengths = {len(array) for array in arrays.values()}
                return len(lengths) == 1 or {"observation", "action"} <= roles
        except (ValueError, OSError):
            return False

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the file as a table."""
        with _open_arrays(source, self.max_expansion) as every:
            arrays, texts, left_out = tabular.sort_arrays(every)
            # A column of texts may tell episodes apart; other texts are left out.
            names = episode_text(arrays, texts, self.mapping, source)
            arrays |= {name: texts.pop(name) for name in names}
            roles, others = ("observation", "action"), left_out | texts.keys()
            yield _table(self, source, [source], arrays, roles, left_out=others)


@contextlib.contextmanager
def _open_arrays(path: str, max_expansion: float) -> Iterator[Mapping[str, Column]]:
    """Opens an HDF5 or `.npz` file; yields its arrays by name."""
    if hdf5.is_hdf5(path):
        with hdf5.open_file(path) as file:
            yield hdf5.columns_below(file)
    elif npz.is_npz(path):
        with npz.open_file(path, max_expansion) as arrays:
            yield arrays
    else:
        check(False, path, "an .npz or HDF5 file", "another")


@dataclasses.dataclass(frozen=True)
class Tables(TableFormat):
    """Parquet, Feather and Arrow files, Arrow streams, or a folder of such files.

    Columns hold numbers, lists of one length, or structs of these. The files of a folder are read
    in the order of the numbers in their names. Actions may be missing.

    Attributes:
        mapping: as in `Arrays`, with names of columns.
    """

    name: ClassVar[str] = "table"
    looks_for: ClassVar[str] = "a Parquet or Arrow file with a row a step, or a folder of them"

    mapping: Mapping[str, Any] | Keys | None = None

    def is_own(self, source: str, name: str) -> bool:
        """Returns True if the file `name` in the folder `source` is a table."""
        is_hidden = name[0] in "._" or "/" in name
        return not is_hidden and arrow.format_of(os.path.join(source, name)) is not None

    def matches(self, source: Source) -> bool:
        """Returns True if the source is a table, or a folder with a table."""
        return bool(arrow.table_paths(source))

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Opens the files as one table."""
        paths = arrow.table_paths(source)
        check(paths, source, "Parquet or Arrow files", "none")
        files = arrow.ArrowFiles(paths)
        check(files.starts[-1], source, "rows", "none")
        # Take numeric fields, and a column of texts that tells episodes apart.
        numbers, texts, others = arrow.fields_by_type(files.schema)
        texts = episode_text(numbers, texts, self.mapping, source)
        columns = {name: arrow.ArrowColumn(files, path) for name, path in numbers.items()}
        columns |= {name: arrow.TextColumn(files, (name,)) for name in texts}
        others = [(".".join(p), kind) for p, kind in others if p[0] not in texts]
        notes = arrow.note_left_out(others)
        yield _table(self, source, paths, columns, ("observation",), notes=notes)


def _table(
    format: Arrays | Tables,
    source: str,
    files: list[str],
    arrays: Mapping[str, Column],
    roles: tuple[str, ...],
    left_out: Set[str] = frozenset(),
    **about: Any,
) -> Table:
    """Returns the table of arrays, given by their names in the files."""
    # Name the arrays as in TED, and check lengths and sizes before anything is read.
    leaves = to_ted(arrays, format.mapping, source)
    tabular.check_roles_present(source, leaves, roles)
    columns, odd = tabular.step_columns(source, arrays, leaves)
    ExpansionLimit(source, files, format.max_expansion).add(declared_nbytes(columns))
    about |= {"key": tuple(sorted(leaves.items())), "left_out": left_out | odd}
    return tabular.table_of(source, columns, files=files, **about)


def check_whole(path: str) -> str:
    """Raises if a file, or one in a folder, is damaged and therefore matches no format.

    Returns a sentence on a file whose first bytes do not fit its ending; "" if there is none.
    """
    # Look at the files by which formats are recognised, and open each as its first bytes say.
    folders, paths = [os.path.join(path, name) for name in _FOLDERS], [path]
    if os.path.isdir(path):
        names = {each: sorted(os.listdir(each))[:_MOST] for each in folders if os.path.isdir(each)}
        paths = [os.path.join(each, name) for each in names for name in names[each]]
    for each in filter(os.path.isfile, paths):
        if hdf5.is_hdf5(each):
            with hdf5.open_file(each) as file:
                hdf5.columns_below(file)
        elif npz.is_npz(each) or zipfile.is_zipfile(each):
            with npz.open_file(each, math.inf):
                pass
        elif arrow.format_of(each):
            arrow.TableFile(each)
        elif each.endswith(".json"):
            read_json(each)
        elif each.endswith(_ENDINGS):
            return f"\n{each} does not begin as its name says, and may be damaged."
    return ""


def read_json(path: str) -> Any:
    """Reads a JSON file; raises `ValueError` if it is not valid JSON."""
    with explain_damage(path, "JSON", (ValueError, RecursionError)), open(path, "rb") as file:
        return json.load(file)
