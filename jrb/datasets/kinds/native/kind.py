"""Our own checkpoints and stores: what `jrb.save` and `jrb.MemmapStorage` have made. T steps."""

import abc
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import h5py
import numpy as np

from jrb import _saved
from jrb._base import checks
from jrb._store import generation, opening
from jrb._store.errors import StaleError
from jrb.datasets.kind import Description, Kind, Source
from jrb.datasets.kinds.native import saved
from jrb.datasets.reading import hdf5, rings
from jrb.datasets.reading.flat import Flat, Table
from jrb.keys import Keys

_LARGEST_HEAD = 200  # bytes of the first line of a generation
_H5_FORMAT = "jrb-h5"
_MOST = 8  # that are remembered

Stamp = tuple[int, ...]
"""What tells a file, as it is now, from what may lie at its path later."""


@dataclasses.dataclass(frozen=True)
class _Ours(Flat):
    """What both layouts have in common: they are opened once, and remembered.

    Attributes:
        keys: where the parts of a transition lie in an item; None for those of the buffer.
        stamp: of what was opened; `jrb.datasets.open` fills it in.
    """

    keys: Keys | None = None
    stamp: Stamp | None = None

    @abc.abstractmethod
    def opened(self, source: Source) -> "Opened":
        """What lies there now."""

    def pinned(self, source: Source) -> Kind:
        """The kind of what is there now: where that changes, reading it is an error."""
        opened = self.opened(source)
        kind = dataclasses.replace(self, **opened.pins)
        _remember(source, kind, opened)
        return kind

    def describe(self, source: Source) -> Description:
        """What there is, from the flags; next observations that are none are cut."""
        with self.table(source) as table:
            found = super().describe(source)
            cut = self._held(source).cut(found.lengths, self._terminated(table))
            return found if cut is None else dataclasses.replace(found, cut=cut)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """All steps, and what the store says of them."""
        yield self._held(source).table

    def _held(self, source: Source) -> "Opened":
        """What was opened; or, where it is not remembered, what is there, if that is the same."""
        opened = _remembered.get((source, self))
        if opened is not None:
            return opened
        opened = self.opened(source)
        if self.stamp not in (None, opened.pins["stamp"]):
            raise StaleError(
                f"{source}: expected what was there when the dataset was opened, found something "
                "else. Open it again."
            )
        _remember(source, self, opened)
        return opened


@dataclasses.dataclass(frozen=True)
class Native(_Ours):
    """What a buffer held when it was saved.

    Attributes:
        generation: which one; None for the newest when it is opened.
    """

    name: ClassVar[str] = "jrb"
    looks_for: ClassVar[str] = "a folder that jrb.save or jrb.MemmapStorage has made"

    generation: int | None = None

    def __post_init__(self) -> None:
        if self.generation is not None:
            checks.count("generation", self.generation)

    def is_own(self, source: str, name: str) -> bool:
        """Returns whether a file is the checkpoint's."""
        return _saved.is_own(source, name)

    def recognises(self, source: Source) -> bool:
        """Whether there is a generation of a store."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return False
        with contextlib.suppress(OSError, ValueError, TypeError):
            folder = opening.folder_at(source)
            for number in generation.numbers(folder)[-1:]:
                with open(folder.open(generation.name_of(number)), "rb") as file:
                    head = json.loads(file.readline(_LARGEST_HEAD))
                return isinstance(head, dict) and head.get("format") == generation.FORMAT
        return False

    def opened(self, source: Source) -> "Opened":
        """A generation."""
        stored = saved.stored(source, self.generation)
        number = stored.generation
        path = os.path.join(source, generation.name_of(number))
        opened = Opened(source, stored, self.keys)
        stamp = (*_stamp(path), stored.lost)
        opened.pins.update(generation=number, stamp=stamp)
        return opened


@dataclasses.dataclass(frozen=True)
class NativeH5(_Ours):
    """What a buffer held when it was saved with `layout="h5"`."""

    name: ClassVar[str] = "jrb-h5"
    looks_for: ClassVar[str] = "a file that jrb.save(..., layout='h5') has made"

    def recognises(self, source: Source) -> bool:
        """Whether the file says so."""
        if not hdf5.is_hdf5(source):
            return False
        with contextlib.suppress(OSError, ValueError), h5py.File(source, "r") as file:
            return file.attrs.get("format") == _H5_FORMAT
        return False

    def opened(self, source: Source) -> "Opened":
        """All of it, in memory."""
        opened = Opened(source, saved.InMemory(source), self.keys)
        opened.pins.update(stamp=_stamp(source))
        return opened


def _stamp(path: str) -> Stamp:
    about = os.stat(path)
    return about.st_ino, about.st_mtime_ns, about.st_size


class Opened:
    """What is known of a checkpoint.

    Attributes:
        table: all steps.
        valid: bool `[T]`, which next observations are there; None if no leaf says so.
        pins: fields of the kind that stand for it.
    """

    table: Table
    valid: np.ndarray | None
    pins: dict[str, Any]

    def __init__(self, path: str, stored: saved.InRows | saved.InMemory, keys: Keys | None) -> None:
        found = stored.buffer.keys if keys is None else keys
        rows = stored.rows(dataclasses.replace(stored.buffer, keys=found))
        leaves = stored.leaves()
        mark = leaves.pop(saved.VALID, None)
        self.valid = None if mark is None else rings.is_set(mark.take(rows.order))
        table, about = rings.table(path, leaves, found, rows), stored.metadata
        self.table = dataclasses.replace(
            table,
            facts={**table.facts, **stored.facts},
            metadata=about.get("metadata", {}),
            notes=table.notes + stored.notes + tuple(about.get("notes", ())),
        )
        self.pins = {}

    def cut(self, lengths: np.ndarray, terminated: np.ndarray) -> np.ndarray | None:
        """See `Description.cut`.

        Raises:
            ValueError: a next observation lacks within an episode.
        """
        if self.valid is None:
            return None
        last = np.cumsum(lengths) - 1
        inside = np.delete(self.valid, last)
        if not inside.all():
            raise ValueError(
                f"leaf '{saved.VALID}': expected True but for last steps of episodes, got "
                f"{np.count_nonzero(~inside)} others."
            )
        return ~self.valid[last] & ~terminated


_remembered: dict[tuple[Source, Kind], Opened] = {}


def _remember(source: Source, kind: Kind, opened: Opened) -> None:
    """Keeps what was opened last: a dataset asks for it again and again."""
    _remembered.pop((source, kind), None)
    while len(_remembered) >= _MOST:
        _remembered.pop(next(iter(_remembered)), None)
    _remembered[source, kind] = opened
