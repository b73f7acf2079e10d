"""The format of Minari: JSON, and HDF5 with one group per episode or one folder per episode.

The folders hold Arrow or Parquet files and JSON. K episodes, T steps of one episode.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jrb.authoring import require
from jrb.datasets.format import Source
from jrb.datasets.formats.arrays import read_json
from jrb.datasets.formats.hdf5_groups import EpisodeGroup, GroupFormat, open_groups
from jrb.datasets.reading import arrow, hdf5, tabular
from jrb.datasets.reading.names import check, explain_damage, usual_leaf
from jrb.datasets.reading.tabular import Column, DerivedColumn, EpisodeTables

METADATA = "metadata.json"
HDF5_FILE = "main_data.hdf5"
_COUNTS = {"total_episodes", "total_steps"}
_PADDED = ("actions", "rewards", "terminations", "truncations")  # have a last empty row in tables


class JpegColumn(DerivedColumn):
    """A column of JPEG images, decoded when they are read."""


class MinariSpace(NamedTuple):
    """The space of one array: its path of fields in tables, and its shape if it is a `Box`."""

    fields: tuple[str, ...]
    shape: tuple[int, ...] | None


class MinariMetadata(NamedTuple):
    """The metadata of a dataset, read from the file next to its data."""

    folder: str  # the folder of the data
    # The entries of the file, with JSON texts decoded, and the id in `env_spec` as `environment`.
    entries: dict[str, Any]
    spaces: dict[str, MinariSpace]  # the space of each array, by its name in HDF5

    @property
    def is_hdf5(self) -> bool:
        """True if the data are in an HDF5 file, not in folders of tables."""
        return self.entries.get("data_format", "hdf5") == "hdf5"


@dataclasses.dataclass(frozen=True)
class Minari(GroupFormat):
    """Datasets of Minari: the folder of a dataset, or its subfolder `data`.

    Entries of tuples become entries of dicts, `_index_0` and so on. `infos` with T + 1 rows, where
    the first is from the reset, become `info`, known before the action, and `next/info`, which
    came with the reward; `infos` with T rows become `info`. JPEG images are decoded. Other values
    than numeric arrays, and infos and further arrays whose shape or dtype varies by episode, are
    left out.
    """

    name: ClassVar[str] = "minari"
    looks_for: ClassVar[str] = (
        f"a folder, or one with a folder data, with {METADATA} "
        f"({', '.join(sorted(_COUNTS))}) and {HDF5_FILE}, or Arrow or Parquet files"
    )
    own_files: ClassVar[str] = (
        r"(data/)?(metadata\.json|main_data\.hdf5|additional_data_\d+\.hdf5|"
        r"\d+/(metadata\.json|[^/]+\.(arrow|parquet)))"
    )
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"episode_(0|[1-9]\d*)")
    needed: ClassVar[tuple[str, ...]] = ("rewards", "observations", *_PADDED)
    own: ClassVar[tuple[str, ...]] = (*needed, "infos")
    carried: ClassVar[tuple[str, ...]] = ("observation", "info")

    def matches(self, source: Source) -> bool:
        """Returns True if a folder has Minari's metadata and data."""
        try:
            metadata = _read_metadata(source)
        except (ValueError, OSError):
            return False
        has_data = not metadata.is_hdf5 or os.path.isfile(os.path.join(metadata.folder, HDF5_FILE))
        return has_data and metadata.entries.keys() >= _COUNTS

    def files(self, source: Source) -> list[str]:
        """Returns the files with arrays and metadata."""
        metadata = _read_metadata(source)
        folder = metadata.folder
        if metadata.is_hdf5:
            return [os.path.join(folder, name) for name in (METADATA, HDF5_FILE)]
        return [os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names]

    def groups(self, source: Source) -> list[EpisodeGroup]:
        """Returns the groups or folders of all episodes, sorted by number."""
        metadata = _read_metadata(source)
        folder = metadata.folder
        if metadata.is_hdf5:
            path = os.path.join(folder, HDF5_FILE)
            groups = tabular.read_once([path], self, lambda: self.groups_in(0, path))
        else:
            numbers = sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
            path_of = lambda number: os.path.join(folder, str(number))
            groups = [EpisodeGroup(path_of(k), f"episode_{k}", k) for k in numbers]
        # The metadata count the episodes, so that none can be missing without an error.
        numbers, count = {each.number for each in groups}, metadata.entries.get("total_episodes")
        first_missing = min({*range(len(numbers) + 1)} - numbers)
        got = f"{len(groups)}; the first that is missing is {first_missing}"
        check(len(groups) == count, folder, f"{count} episodes as {METADATA} says", got)
        return groups

    def facts(self, source: Source, where: EpisodeGroup) -> dict[str, Any]:
        """Returns an episode's attributes as facts, nested ones by flat names (`options/a`)."""
        if where.path.endswith(HDF5_FILE):
            # All groups' attributes are read at once and cached.
            all_groups = lambda: open_groups(self.groups(source))
            read = lambda: {each.name: dict(group.attrs) for each, group in all_groups()}
            facts = tabular.read_once([where.path], "minari facts", read)[where.name]
        else:
            facts = _flatten(read_json(os.path.join(where.path, METADATA)))
        return {name: hdf5.to_python(fact) for name, fact in facts.items() if name != "total_steps"}

    def about(self, source: Source) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Returns the metadata, and notes: those in the metadata, on JPEG, and on gaps."""
        groups, about = self.groups(source), _read_metadata(source).entries
        # Of the first episode, see which columns hold JPEG images.
        ((_, arrays),) = self._arrays(source, groups[:1])
        is_jpeg = lambda column: isinstance(column, JpegColumn | arrow.ImageColumn)
        jpeg = [usual_leaf(name, "/") or name for name, column in arrays.items() if is_jpeg(column)]
        stored_notes, notes = about.get("notes"), list[str]()
        if isinstance(stored_notes, list) and all(isinstance(note, str) for note in stored_notes):
            notes += stored_notes
            # In the metadata, they would be shown again.
            about = {name: value for name, value in about.items() if name != "notes"}
        if jpeg:
            notes.append(
                f"Images of {', '.join(jpeg)} are kept as JPEG, which loses detail: these are the "
                "decoded images, not the ones that were seen."
            )
        return {**about, "jpeg": jpeg}, (*notes, *self.file_notes(source))

    def tables(self, source: Source, numbers: Sequence[int] | None) -> EpisodeTables:
        """Yields the place and the table of each episode in `numbers`; None for all."""
        groups, files = self.groups(source), self.files(source)
        # Leave out further arrays that not all episodes have in one form.
        alike = tabular.read_once(files, (self, "alike"), lambda: self._alike(source, groups))
        selection = groups if numbers is None else [groups[number] for number in numbers]
        for where, arrays in self._arrays(source, selection):
            others = {n for n in arrays if n.split("/")[0] not in self.needed} - alike
            table = self.table(where, {n: array for n, array in arrays.items() if n not in others})
            facts = self.facts(source, where) if numbers is None else {}
            left_out = {*table.left_out, *others}
            yield where, dataclasses.replace(table, left_out=left_out, facts=facts)

    def _alike(self, source: Source, groups: Sequence[EpisodeGroup]) -> set[str]:
        """Returns the names of arrays that Minari does not need, but all episodes have alike."""
        alike: set[Any] | None = None
        for _, arrays in self._arrays(source, groups):
            # An array's form is its row, its dtype, and how many rows it has beyond the steps.
            steps, forms = len(arrays.get("rewards") or ()), set[Any]()
            for name, array in tabular.sort_arrays(arrays)[0].items():
                if name.split("/")[0] not in self.needed:
                    forms.add(
                        (name, tuple(array.shape[1:]), np.dtype(array.dtype), len(array) - steps)
                    )
            alike = forms if alike is None else alike & forms
        return {name for name, *_ in alike or ()}

    def _arrays(
        self, source: Source, groups: Sequence[EpisodeGroup]
    ) -> Iterator[tuple[EpisodeGroup, dict[str, Column]]]:
        """Yields each episode's arrays by their names in HDF5; None for values that are none."""
        metadata = _read_metadata(source)
        spaces = metadata.spaces
        if not metadata.is_hdf5:
            yield from ((where, _read_tables(where, spaces, self.own)) for where in groups)
            return
        for where, group in open_groups(groups):
            arrays = hdf5.columns_below(group)
            for name in spaces.keys() & arrays.keys():
                # JPEG images are rows of bytes, of equal or different lengths.
                shape, column = spaces[name].shape, arrays[name]
                is_other = bool(shape and column.shape) and tuple(column.shape[1:]) != shape
                if shape and is_other and np.dtype(column.dtype).kind in "Ou":
                    arrays[name] = _jpeg_column(column, f"{where}: '{name}'", shape)
            yield where, arrays


def _read_metadata(source: Source) -> MinariMetadata:
    """Returns the metadata of a dataset; raises if there are none, or they are not Minari's."""
    folders = (source, os.path.join(source, "data")) if isinstance(source, str) else ()
    paths = [os.path.join(folder, METADATA) for folder in folders]
    path = next(filter(os.path.isfile, paths), "")
    expected = f"a folder with '{METADATA}', or one with such a folder 'data'"
    check(path, source, expected, "none")
    entries, spaces = tabular.read_once([path], "minari", lambda: _parse_metadata(path))
    return MinariMetadata(os.path.dirname(path), entries, spaces)


def _parse_metadata(path: str) -> tuple[dict[str, Any], dict[str, MinariSpace]]:
    damage = (ValueError, RecursionError, AttributeError, TypeError)
    with explain_damage(path, "metadata of Minari in JSON", damage):
        about = read_json(path)
        # Minari stores spaces and specs as texts of JSON within the JSON.
        for name in ("observation_space", "action_space", "env_spec", "eval_env_spec"):
            if isinstance(about.get(name), str):
                about[name] = json.loads(about[name])
        if "id" in (spec := about.get("env_spec") or {}):
            about["environment"] = spec["id"]
        spaces = _spaces("observations", ("observations",), about.get("observation_space"))
        spaces |= _spaces("actions", ("actions",), about.get("action_space"))
    data_format = about.get("data_format", "hdf5")
    is_known = data_format in ("hdf5", "arrow", "parquet")
    check(is_known, f"{path}: data_format", "hdf5, arrow or parquet", repr(data_format))
    return about, spaces


def _spaces(name: str, fields: tuple[str, ...], space: Any) -> dict[str, MinariSpace]:
    """Returns the spaces of all single arrays within a space, by name."""
    inner = space.get("subspaces") if isinstance(space, Mapping) else None
    spaces: dict[str, MinariSpace] = {}
    # A tuple has a list of spaces, a dict a dict of them; all else is the space of one array.
    if isinstance(inner, list):
        for number, each in enumerate(inner):
            spaces |= _spaces(f"{name}/_index_{number}", (*fields, str(number)), each)
    elif isinstance(inner, Mapping):
        for part, each in inner.items():
            spaces |= _spaces(f"{name}/{part}", (*fields, part), each)
    else:
        shape = space.get("shape") if isinstance(space, Mapping) else None
        is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        spaces[name] = MinariSpace(fields, tuple(shape) if shape and is_shape else None)
    return spaces


def _jpeg_column(column: Column, where: str, shape: tuple[int, ...]) -> JpegColumn:
    """Returns the column of images `[T, *shape]` of a column of encoded bytes."""

    def read(start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, *shape), np.uint8)
        for place, data in enumerate(column[start:stop]):
            image = arrow.decode_image(np.asarray(data, np.uint8).tobytes(), where)
            check(image.shape == shape, where, f"images {list(shape)}", list(image.shape))
            values[place] = image
        return values

    return JpegColumn((len(column), *shape), np.dtype(np.uint8), read)


def _read_tables(
    where: EpisodeGroup, spaces: Mapping[str, MinariSpace], own: Sequence[str]
) -> dict[str, Column]:
    """Returns the arrays by name of the tables in an episode's folder."""
    paths = arrow.table_paths(where.path)
    check(paths, where, "a file of Arrow or Parquet", "none")
    files = arrow.ArrowFiles(paths)
    numbers, _, others = arrow.fields_by_type(files.schema)
    types, arrays = require("pyarrow", "datasets").types, dict[str, Column]()
    names = {space.fields: name for name, space in spaces.items()}
    # Take numeric fields, and bytes of images below the arrays that Minari names.
    for path, kind in [*((path, None) for path in numbers.values()), *others]:
        name, column = names.get(path, "/".join(path)), None
        if kind is None:
            column = arrow.ArrowColumn(files, path)
            column = _reshape_rows(column, files.schema, path, spaces.get(name))
        elif types.is_binary(kind) and path[0] in own:
            column = arrow.ImageColumn(files, path, has_channels=False)
        # Tables have as many rows as there are observations, one more than actions.
        if column is not None and path[0] in _PADDED:
            column = tabular.rows_at(column, np.arange(len(column) - 1))
        arrays[name] = column
    return arrays


def _reshape_rows(
    column: Column, schema: Any, path: tuple[str, ...], space: MinariSpace | None
) -> Column:
    """Returns a column with flat rows in the shape of its space, or of its field's metadata."""
    # The shape is in the metadata of the field in the schema, or that of the space.
    field = schema.field(path[0])
    for part in path[1:]:
        field = field.type.field(part)
    sizes = (field.metadata or {}).get(b"shape", b"").split(b",")
    shape = tuple(int(size) for size in sizes if size.isdigit())
    shape = space.shape if space is not None and space.shape is not None else shape
    if not shape or math.prod(shape) != math.prod(column.shape[1:]):
        return column
    read = lambda start, stop: column[start:stop].reshape(stop - start, *shape)
    return DerivedColumn((len(column), *shape), column.dtype, read)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the entries of nested dicts by flat names (`options/a`)."""
    entries: dict[str, Any] = {}
    for name, entry in tree.items():
        is_nested = isinstance(entry, dict)
        entries |= _flatten(entry, f"{prefix}{name}/") if is_nested else {f"{prefix}{name}": entry}
    return entries
