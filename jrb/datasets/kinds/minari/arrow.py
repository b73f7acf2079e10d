"""Minari's sets in Arrow or Parquet: a folder for each episode, `0` and so on.

All columns have T + 1 rows; the last one of all but observations and infos is padding.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jrb._base import extras
from jrb.datasets.kinds.minari import about as minari_about
from jrb.datasets.kinds.minari.leaf import (
    Leaf,
    Space,
    Stored,
    image_shape,
    images,
    shape_of,
    subspaces,
)

FORMATS = ("arrow", "parquet")
_COLUMNS = {
    "observations": "observation_space",
    "actions": "action_space",
    "rewards": "",
    "terminations": "",
    "truncations": "",
    "infos": "",
}
_WHOLE = ("observations", "infos")


class Column(NamedTuple):
    """One leaf of the columns.

    Attributes:
        name: such as `observations/image`.
        path: the names of the column and of fields that lead to it.
        field: Arrow's.
        space: what its space is, if that is known.
    """

    name: str
    path: tuple[str, ...]
    field: Any
    space: Space | None


class Files:
    """The files of a set.

    Args:
        folder: where they lie.
        about: its metadata.
    """

    def __init__(self, folder: str, about: Mapping[str, Any]) -> None:
        self._arrow = extras.require("pyarrow", "datasets")
        self._datasets = extras.require("pyarrow.dataset", "datasets")
        self._folder, self._about = folder, about
        self._layout: str = about["data_format"]

    def numbers(self) -> list[int]:
        """Those of the episodes, in order."""
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def stored(self, number: int, names: Iterable[str] | None = None) -> Stored:
        """The leaves of an episode, or those of these names."""
        where = os.path.join(self._folder, str(number))
        leaves: dict[str, Leaf] = {}
        others: list[str] = []
        with self._sound(where):
            episode = self._episode(where)
            rows = episode.count_rows()
            read = functools.cache(lambda name: episode.to_table(columns=[name]).column(0))
            for column in self._columns(where, episode.schema):
                if names is not None and column.name not in names:
                    continue
                array = functools.partial(self._read, where, column, read)
                leaf = self._leaf(f"{where}: '{column.name}'", column, rows, array)
                if leaf is None:
                    others.append(column.name)
                else:
                    leaves[column.name] = leaf
        return Stored(where, leaves, tuple(others))

    def attributes(self, number: int) -> dict[str, Any]:
        """What is said of an episode."""
        return minari_about.attributes(os.path.join(self._folder, str(number)))

    @contextlib.contextmanager
    def _sound(self, where: str) -> Iterator[None]:
        try:
            yield
        except (self._arrow.ArrowException, OSError, UnicodeError) as error:
            raise ValueError(
                f"{where}: expected whole files of {self._layout}, got others: {error}"
            ) from error

    def _episode(self, where: str) -> Any:
        """Arrow's dataset of the files of an episode."""
        names = [name for name in os.listdir(where) if name.endswith("." + self._layout)]
        if not names:
            raise ValueError(f"{where}: expected files of {self._layout}, found none.")
        paths = [os.path.join(where, name) for name in sorted(names, key=lambda n: (len(n), n))]
        return self._datasets.dataset(paths, format=self._layout)

    def _columns(self, where: str, schema: Any) -> Iterator[Column]:
        for name, space in _COLUMNS.items():
            if name in schema.names:
                column = Column(name, (name,), schema.field(name), self._about.get(space))
                yield from self._fields(where, column)

    def _fields(self, where: str, column: Column) -> Iterator[Column]:
        """The leaves of a column."""
        kind = column.field.type
        if not self._arrow.types.is_struct(kind):
            yield column
            return
        space: Space = column.space or {}
        inner = subspaces(space) or {}
        for field in map(kind.field, range(kind.num_fields)):
            if "/" in field.name:
                raise ValueError(
                    f"{where}: '{column.name}': expected names without a slash, got {field.name!r}."
                )
            part = f"_index_{field.name}" if space.get("type") == "Tuple" else field.name
            path = (*column.path, field.name)
            name = f"{column.name}/{part}"
            yield from self._fields(where, Column(name, path, field, inner.get(part)))

    def _leaf(self, where: str, column: Column, rows: int, read: Callable[[], Any]) -> Leaf | None:
        """A leaf of numbers or images; None for all else."""
        types, kind = self._arrow.types, column.field.type
        rows = rows if column.path[0] in _WHOLE else max(rows - 1, 0)
        if types.is_binary(kind):
            return _images(where, rows, column.space, read)
        is_list = types.is_fixed_size_list(kind)
        number = kind.value_type if is_list else kind
        if not (types.is_integer(number) or types.is_floating(number) or types.is_boolean(number)):
            return None
        shape = _shape(where, column) if is_list else ()

        def array() -> np.ndarray:
            found = read()
            found = np.array(found.flatten() if is_list else found)
            return found.reshape(-1, *shape)[:rows]

        return Leaf(rows, shape, np.dtype(number.to_pandas_dtype()), array)

    def _read(self, where: str, column: Column, read: Callable[[str], Any]) -> Any:
        """Arrow's array of a column, without a gap."""
        first, *rest = column.path
        with self._sound(where):
            array = read(first).combine_chunks()
            array.validate(full=True)
            gaps = array.null_count
            for name in rest:
                array = array.field(name)
                gaps += array.null_count
        if gaps:
            raise ValueError(f"{where}: '{column.name}': expected no nulls, got {gaps}.")
        return array


def _shape(where: str, column: Column) -> tuple[int, ...]:
    """The shape of rows that Arrow keeps flat: that of the space, or what is said beside them."""
    count = column.field.type.list_size
    told = (column.field.metadata or {}).get(b"shape")
    if told is not None:
        shape = tuple(int(side) for side in told.split(b",") if side.isdigit())
    else:
        shape = shape_of(column.space) if column.space else (count,)
    if shape is None or math.prod(shape) != count:
        raise ValueError(f"{where}: expected rows of shape {shape}, got {count} numbers in a row.")
    return shape


def _images(where: str, rows: int, space: Space | None, read: Callable[[], Any]) -> Leaf | None:
    if not rows:
        return None
    shape = shape_of(space)
    if shape is None:
        shape = image_shape(where, read()[0].as_py())
    return Leaf(
        rows,
        shape,
        np.dtype(np.uint8),
        lambda: images(where, read().to_pylist()[:rows], shape),
        is_jpeg=True,
    )
