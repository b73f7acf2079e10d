"""Checkpoints and stores of jrb as datasets, loaded by `jrb.load`."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import jrb
from jrb.authoring import enable_x64, leaf_names
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import DamagedError
from jrb.datasets.format import Source
from jrb.datasets.reading import tabular
from jrb.datasets.reading.buffered import episode_table
from jrb.datasets.reading.names import check, leaves_in_ted
from jrb.datasets.reading.tabular import Table
from jrb.keys import Keys

_Loaded = tuple[Table, int | None, str]
"""The steps, the number of the generation, and the identity of the files."""


@dataclasses.dataclass(frozen=True)
class Checkpoint(tabular.TableFormat):
    """The items of a buffer as they were saved, in episodes.

    Attributes:
        keys: paths to the parts of a transition in an item; None for those of the buffer.
        generation: number of the generation; None for the newest one when the dataset is opened.
        verify: False to open a store without reading all of its rows.
        buffer: the description; needed if that holds functions, as for `jrb.load`.
        stamp: identity of the opened files; `jrb.datasets.open` fills it in.
    """

    name: ClassVar[str] = "jrb"
    looks_for: ClassVar[str] = "a folder that jrb.save or jrb.MemmapStorage has made"

    keys: Keys | None = None
    generation: int | None = None
    verify: bool = True
    buffer: ReplayBuffer | None = None
    stamp: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields; whoever unpickles them loads the files again."""
        return {name: value for name, value in self.__dict__.items() if name != "_loaded"}

    def matches(self, source: Source) -> bool:
        """Returns True if a folder is a checkpoint."""
        is_folder = isinstance(source, str) and os.path.isdir(source)
        return is_folder and jrb.checkpoint.is_checkpoint(source)

    def snapshot(self, source: Source) -> "Checkpoint":
        """Returns the format for the generation that is the newest now, which it keeps loaded."""
        loaded = self._load(source)
        _, generation, stamp = loaded
        snapshot = dataclasses.replace(self, generation=generation, stamp=stamp, verify=False)
        vars(snapshot)["_loaded"] = loaded
        return snapshot

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Yields the steps as they were loaded, or loads the files of the stamp."""
        loaded = vars(self).get("_loaded") or self._load(source)
        if self.stamp not in (None, loaded[2]):
            raise jrb.StaleError(
                f"{source}: expected the files that were there when the dataset was opened, got "
                "others. Open it again."
            )
        if self.stamp is not None:  # else the next source may be another one
            vars(self)["_loaded"] = loaded
        yield loaded[0]

    def _load(self, source: Source) -> _Loaded:
        """Loads a checkpoint, which another process may be saving to."""
        while True:
            newest = self._newest(source)
            number = newest if self.generation is None else self.generation
            try:
                return _load(source, self, number)
            except (DamagedError, FileNotFoundError, jrb.StaleError):
                # Another generation may have replaced this one meanwhile.
                if self.generation is not None or self._newest(source) == newest:
                    raise

    def _newest(self, source: Source) -> int | None:
        return jrb.checkpoint.metadata(source)["generation"]


@dataclasses.dataclass(frozen=True)
class CheckpointFile(Checkpoint):
    """The items of a buffer that was saved with `layout="h5"`."""

    name: ClassVar[str] = "jrb-h5"
    looks_for: ClassVar[str] = "a file that jrb.save(..., layout='h5') has made"

    def matches(self, source: Source) -> bool:
        """Returns True if a file is a checkpoint."""
        is_file = isinstance(source, str) and os.path.isfile(source)
        return is_file and jrb.checkpoint.is_checkpoint(source)

    def _newest(self, source: Source) -> int | None:
        return None


def _load(path: str, format: Checkpoint, number: int | None) -> _Loaded:
    """Loads one generation, or a file; refuses all but one buffer whose items are in episodes."""
    with enable_x64():
        options = {"generation": number, "verify": format.verify}
        buffer, state = jrb.load(path, format.buffer, **options)
        if not isinstance(buffer, ReplayBuffer):
            inside = (os.path.join(path, name) for name in sorted(os.listdir(path)))
            parts = ", ".join(each for each in inside if jrb.checkpoint.is_checkpoint(each))
            check(False, path, "a single buffer", f"several. Open one of them: {parts}")
        keys = format.keys or buffer.keys
        if keys != buffer.keys:
            keyed = dataclasses.replace(buffer, keys=keys, storage=jrb.DeviceStorage())
            buffer, state = keyed, jrb.rebuild(buffer, state, keyed)
    names = leaf_names(buffer.stored(state))
    twice = [name for name in names if names.count(name) > 1]
    got = f"{len(twice)} of this name. Load it with jrb.load, and rename one"
    where = f"{path}: leaf '{', '.join(twice[:1])}'"
    check(not twice, where, "leaves with names of their own", got)
    table = episode_table(path, buffer, state, [*leaves_in_ted(path, names, keys).values()])
    stat = os.stat(path)
    about = stat.st_mtime_ns if number is None else jrb.checkpoint.metadata(path, number)
    return table, number, repr((stat.st_ino, about, len(table.ends)))
