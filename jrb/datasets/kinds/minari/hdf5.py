"""Minari's sets in HDF5: a group for each episode, `episode_0` and so on.

Older ones keep episodes that came later in files of their own beside the main one, which links to
them.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np
from h5py import h5d  # pyright: ignore[reportAttributeAccessIssue]: in C

from jrb.datasets.kinds.minari.about import MAIN
from jrb.datasets.kinds.minari.leaf import (
    Leaf,
    Space,
    Stored,
    image_shape,
    images,
    is_image,
    shape_of,
)
from jrb.datasets.reading import hdf5

_EPISODE = re.compile(r"episode_(0|[1-9]\d*)")
_JPEG = b"\xff\xd8\xff"


class Files:
    """The open files of a set.

    Args:
        folder: where they lie.
        spaces: those of single arrays, by their names, as far as they are known.
        jpeg: whether images may be JPEG.
        stack: closes them.
    """

    def __init__(
        self,
        folder: str,
        spaces: Mapping[str, Space],
        jpeg: bool,
        stack: contextlib.ExitStack,
    ) -> None:
        self._folder, self._spaces, self._jpeg, self._stack = folder, spaces, jpeg, stack
        self._images = {name for name, space in spaces.items() if is_image(space)}
        self._open: dict[str, h5py.File] = {}
        self._main: Any = self._file(MAIN)

    def numbers(self) -> list[int]:
        """Those of the episodes, in order."""
        with _sound(os.path.join(self._folder, MAIN)):
            found = (_EPISODE.fullmatch(name) for name in self._main)
            return sorted(int(match[1]) for match in found if match)

    def stored(self, number: int, names: Iterable[str] | None = None) -> Stored:
        """The leaves of an episode, or those of these names."""
        where = self._where(number)
        leaves: dict[str, Leaf] = {}
        others: list[str] = []
        with _sound(where):
            group = self._group(number).id
            for name, found in hdf5.walk(where, group) if names is None else _named(group, names):
                leaf = self._leaf(f"{where}: '{name}'", name, found)
                if leaf is None:
                    others.append(name)
                else:
                    leaves[name] = leaf
        return Stored(where, leaves, tuple(others))

    def attributes(self, number: int) -> dict[str, Any]:
        """What is said of an episode."""
        with _sound(self._where(number)):
            found = self._group(number).attrs
            return {name: hdf5.plain(found[name]) for name in found}

    def _where(self, number: int) -> str:
        return f"{os.path.join(self._folder, MAIN)}: 'episode_{number}'"

    def _file(self, name: str) -> h5py.File:
        if name not in self._open:
            path = os.path.join(self._folder, name)
            if not os.path.isfile(path):
                raise ValueError(f"{path}: expected a file of HDF5, found none.")
            self._open[name] = self._stack.enter_context(hdf5.opened(path))
        return self._open[name]

    def _group(self, number: int) -> Any:
        """The group of an episode; a link leads to files in the same folder, and nowhere else."""
        name = f"episode_{number}"
        link = self._main.get(name, getlink=True)
        file, path = self._main, name
        if isinstance(link, h5py.ExternalLink):
            other = os.path.basename(link.filename)
            if other == MAIN or not os.path.isfile(os.path.join(self._folder, other)):
                raise ValueError(
                    f"{self._main.filename}: '{name}': expected another file '{other}' beside "
                    f"it, where it links to, got none. Put it into {self._folder}."
                )
            file, path = self._file(other), link.path.strip("/")
        elif not isinstance(link, h5py.HardLink):
            raise ValueError(
                f"{self._main.filename}: '{name}': expected a group, got a {type(link).__name__}."
            )
        is_own = isinstance(file.get(path, getlink=True), h5py.HardLink)
        group = file[path] if is_own and _EPISODE.fullmatch(path) else None
        if not isinstance(group, h5py.Group):
            raise ValueError(
                f"{file.filename}: '{path}': expected a group of an episode, got none."
            )
        return group

    def _leaf(self, where: str, name: str, found: h5d.DatasetID) -> Leaf | None:
        """A leaf of numbers or images, in its own file; None for all else."""
        shape, dtype = found.shape, found.dtype
        hdf5.check_stored(where, found)
        if not shape:
            return None
        varies = h5py.check_vlen_dtype(dtype) == np.uint8
        if not varies and dtype.kind not in "biufc":
            return None
        dataset = h5py.Dataset(found)
        if varies or self._is_jpeg(name, dataset):
            return _images(where, dataset, self._spaces.get(name))
        return Leaf(shape[0], shape[1:], dtype, lambda: _read(where, dataset))

    def _is_jpeg(self, name: str, dataset: h5py.Dataset) -> bool:
        """Whether images are JPEG though all rows are of one length, as they are by chance."""
        if not self._jpeg or dataset.dtype != np.uint8 or dataset.ndim != 2:
            return False
        if name in self._spaces:
            return name in self._images
        return len(dataset) > 0 and dataset[0].tobytes().startswith(_JPEG)


@contextlib.contextmanager
def _sound(where: str) -> Iterator[None]:
    """Raises `ValueError`, with the name of the file, for all that HDF5 makes of damaged ones."""
    try:
        yield
    except (
        OSError,
        KeyError,
        RuntimeError,
        TypeError,
        MemoryError,
        OverflowError,
        ValueError,
    ) as error:
        if isinstance(error, ValueError) and where.split(": ")[0] in str(error):
            raise  # one of those below
        raise ValueError(f"{where}: expected a whole file, got one that is not: {error}") from error


def _read(where: str, dataset: h5py.Dataset) -> np.ndarray:
    with _sound(where):
        return dataset[()]


def _images(where: str, dataset: h5py.Dataset, space: Space | None) -> Leaf | None:
    if not len(dataset):
        return None
    shape = shape_of(space)
    if shape is None:
        shape = image_shape(where, dataset[0].tobytes())
    read = lambda: images(where, [frame.tobytes() for frame in _read(where, dataset)], shape)
    return Leaf(len(dataset), shape, np.dtype(np.uint8), read, is_jpeg=True)


def _named(group: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The datasets of these names."""
    for name in names:
        yield name, hdf5.follow(name, group, os.fsencode(name))
