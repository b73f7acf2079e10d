"""The format of jrb's own checkpoints and memory-mapped stores, and tables of buffers' episodes.

K episodes, T steps over all of them.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

import jrb
from jrb import read
from jrb.authoring import enable_x64, leaf_names, tree_nbytes
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import DamagedError
from jrb.checkpoint.descriptions import buffers_by_name
from jrb.datasets.format import Source, native_dtype
from jrb.datasets.reading import tabular
from jrb.datasets.reading.names import check, leaves_in_ted
from jrb.datasets.reading.tabular import DONE, FLAGS, TERMINATED, VALID, Table
from jrb.keys import Keys
from jrb.state import BufferState

_PIECE = 32 << 20  # bytes of items that are read together

_LoadedSteps = tuple[Table, int | None, str]
"""The table of steps, the number of the generation, and the stamp of the files."""


@dataclasses.dataclass(frozen=True)
class Checkpoint(tabular.TableFormat):
    """A checkpoint folder, or the folder of a `jrb.MemmapStorage`, as episodes.

    Attributes:
        keys: the paths of a transition's parts in an item; None for the saved buffer's.
        generation: the number of the generation; None for the newest at the time of opening.
        verify: False to open a store without reading and verifying all of its rows.
        buffer: the buffer, needed only if it contains functions, as for `jrb.load`.
        state: the number of one of the saved states, if these are under `vmap`; a tuple of numbers
            for several axes.
        part: the name of one of several saved buffers, such as "demo", or "0" in a tuple or mix.
        stamp: the identity of the opened files, set by `jrb.datasets.open`.
    """

    name: ClassVar[str] = "jrb"
    looks_for: ClassVar[str] = "a folder that jrb.save or jrb.MemmapStorage has made"
    has_generations: ClassVar[bool] = True

    keys: Keys | None = None
    generation: int | None = None
    verify: bool = True
    buffer: ReplayBuffer | None = None
    state: int | tuple[int, ...] | None = None
    part: str | None = None
    stamp: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields without the loaded items, which a copy loads again."""
        return {name: value for name, value in self.__dict__.items() if name != "_content"}

    def matches(self, source: Source) -> bool:
        """Returns True if the source is a folder with a checkpoint."""
        is_folder = isinstance(source, str) and os.path.isdir(source)
        return is_folder and jrb.checkpoint.is_checkpoint(source)

    def snapshot(self, source: Source) -> "Checkpoint":
        """Loads the given generation, or else the newest, and returns a format fixed to it."""
        content = self._load(source)
        _, generation, stamp = content
        snapshot = dataclasses.replace(self, generation=generation, stamp=stamp, verify=False)
        vars(snapshot)["_content"] = content
        return snapshot

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Yields the loaded steps, or loads them; raises if the files have another stamp."""
        content = vars(self).get("_content") or self._load(source)
        if self.stamp not in (None, content[2]):
            raise jrb.StaleError(
                f"{source}: expected the files that were there when the dataset was opened, got "
                "others. Open it again."
            )
        # Without a stamp, the format may read several sources, so nothing is kept.
        if self.stamp is not None:
            vars(self)["_content"] = content
        yield content[0]

    def _load(self, source: Source) -> _LoadedSteps:
        """Loads a generation; tries again if another process replaces it meanwhile."""
        newest_of = lambda: jrb.checkpoint.metadata(source)["generation"]
        while True:
            newest = newest_of() if self.has_generations else None
            number = newest if self.generation is None else self.generation
            try:
                return _load(source, self, number)
            except (DamagedError, FileNotFoundError, jrb.StaleError):
                # Another generation may have replaced this one meanwhile.
                is_fixed = self.generation is not None or not self.has_generations
                if is_fixed or newest_of() == newest:
                    raise


@dataclasses.dataclass(frozen=True)
class CheckpointFile(Checkpoint):
    """A file that `jrb.save(..., layout="h5")` wrote, as episodes."""

    name: ClassVar[str] = "jrb-h5"
    looks_for: ClassVar[str] = "a file that jrb.save(..., layout='h5') has made"
    has_generations: ClassVar[bool] = False

    def matches(self, source: Source) -> bool:
        """Returns True if the source is a checkpoint in one file."""
        is_file = isinstance(source, str) and os.path.isfile(source)
        return is_file and jrb.checkpoint.is_checkpoint(source)


def _load(path: str, format: Checkpoint, number: int | None) -> _LoadedSteps:
    """Loads a generation, or a file; raises unless it holds a single buffer with episodes."""
    with enable_x64():
        # Load the buffer, take one of several buffers and states, and apply the keys of the user.
        options = {"generation": number, "verify": format.verify}
        buffer, state = jrb.load(path, format.buffer, **options)
        if format.part is not None or not isinstance(buffer, ReplayBuffer):
            buffer, state = _part_of(path, buffer, state, format.part)
        state = read.one_state(path, state, format.state)
        keys = format.keys or buffer.keys
        if keys != buffer.keys:
            keyed = dataclasses.replace(buffer, keys=keys, storage=jrb.DeviceStorage())
            buffer, state = keyed, jrb.rebuild(buffer, state, keyed)
    # Names of leaves can collide, as in `{"a/b": x, "a": {"b": y}}`.
    names = leaf_names(buffer.item_spec(state))
    duplicates = [name for name in names if names.count(name) > 1]
    got = f"{len(duplicates)} of this name. Load it with jrb.load, and rename one"
    where = f"{path}: leaf '{', '.join(duplicates[:1])}'"
    check(not duplicates, where, "leaves with names of their own", got)
    table = episode_table(path, buffer, state, [*leaves_in_ted(path, names, keys).values()])
    # The stamp changes with the file, with the generation's metadata, or with the number of
    # episodes.
    stat = os.stat(path)
    about = stat.st_mtime_ns if number is None else jrb.checkpoint.metadata(path, number)
    return table, number, repr((stat.st_ino, about, len(table.ends)))


def _part_of(path: str, buffer: Any, state: Any, part: str | None) -> tuple[ReplayBuffer, Any]:
    """Returns one of several buffers, or of the shards of one, and its state."""
    parts = {} if isinstance(buffer, ReplayBuffer) else buffers_by_name(buffer)
    expected = (
        f"one of {list(parts)}, as it has several buffers" if parts else "None, as it has one"
    )
    check(part in parts, f"{path}: part", expected, repr(part))
    # Shards have names as parts of a tuple or a mix have.
    if isinstance(buffer, jrb.Sharded):
        names = buffer.names()
        states = {names[number]: one for number, one in buffer.split(state).items()}
    else:
        states = buffers_by_name(state)
    one = parts[str(part)]
    check(isinstance(one, ReplayBuffer), f"{path}: part", "the name of a single buffer", repr(part))
    return one, states[str(part)]


# The episodes of a buffer.


@dataclasses.dataclass(frozen=True)
class InMemory(tabular.TableFormat):
    """The format of a dataset whose source is a `Table` in memory."""

    name: ClassVar[str] = "table in memory"
    looks_for: ClassVar[str] = "a table"

    def matches(self, source: Source) -> bool:
        """Returns True for a `Table`."""
        return isinstance(source, Table)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Yields the source, which is the table."""
        yield source


class EpisodeRows:
    """Reads a buffer's items in the order of its episodes, as columns under names in TED.

    Items are read in pieces of 32 MiB with all columns, and the last two pieces are cached: columns
    are read one after the other, and a call for each short episode would be slow.
    """

    def __init__(
        self,
        where: str,
        buffer: ReplayBuffer,
        state: BufferState,
        leaves: Sequence[str],
        episodes: read.Episodes,
    ) -> None:
        self._where, self._buffer, self._state, self._leaves = where, buffer, state, leaves
        # Concatenate the slots of all episodes: row t of the table is the item in slot `_slots[t]`.
        slots = [np.zeros(0, np.int32), *(np.asarray(each.slots) for each in episodes)]
        self._slots = np.concatenate(slots)
        self.ends: np.ndarray = np.cumsum([*map(len, slots)], dtype=np.int64)[1:]
        self._size = max(1, _PIECE // max(1, tree_nbytes(buffer.item_spec(state))))
        self._piece = functools.lru_cache(maxsize=2)(self._read_piece)

    def __len__(self) -> int:
        return len(self._slots)

    def at(self, rows: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Reads all leaves of some rows, with the stored flags as `terminated` and `truncated`."""
        slots = self._slots[rows]
        # JAX would convert 64-bit leaves.
        with enable_x64():
            items = read.take_items(self._buffer, self._state, slots)
        steps = dict(zip(self._leaves, jax.tree.leaves(items), strict=True))
        return tabular.merge_flags(steps, len(slots))

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads the rows of one leaf from `start` to `stop`."""
        # Find the pieces that have these rows; at least one, for the shape of an empty result.
        first = start // self._size * self._size
        begins = range(first, max(stop, first + 1), self._size)
        rows = lambda begin: slice(max(0, start - begin), stop - begin)
        return np.concatenate([self._piece(begin)[name][rows(begin)] for begin in begins])

    def _read_piece(self, begin: int) -> dict[str, np.ndarray]:
        """Reads a piece; raises if a step other than an episode's last has `next/valid` False."""
        steps = self.at(slice(begin, begin + self._size))
        # Only a last step may lack its next observation.
        if VALID in steps:
            places = begin + np.flatnonzero(~tabular.is_set(steps[VALID]))
            wrong, where = np.setdiff1d(places, self.ends - 1), f"{self._where}: leaf '{VALID}'"
            expected = "True but for last steps of episodes"
            check(not len(wrong), where, expected, f"{len(wrong)} others")
        return steps


def episode_table(
    where: str, buffer: ReplayBuffer, state: BufferState, leaves: Sequence[str]
) -> Table:
    """Returns the table of a buffer's episodes, whose items are read when they are accessed.

    `leaves` are the names in TED of an item's leaves, in the order of its pytree.
    """
    with enable_x64():
        episodes = read.episodes(buffer, state)
    # Read the last step of each episode, for the shapes of leaves and the episodes that are cut.
    rows, columns = EpisodeRows(where, buffer, state, leaves, episodes), dict[str, Any]()
    last = rows.at(rows.ends - 1)
    for name, leaf in last.items():
        shape, column = (len(rows), *leaf.shape[1:]), functools.partial(rows.column, name)
        columns[name] = tabular.DerivedColumn(shape, native_dtype(leaf.dtype), column)
    # Next observations may be missing everywhere, or at marked steps: `Dataset` marks these again.
    cut = None
    if columns.pop(VALID, None) is not None:
        cut = ~tabular.is_set(last[VALID]) & ~last[TERMINATED]
    elif not any(name.split("/")[:2] == ["next", "observation"] for name in columns):
        cut = ~last[TERMINATED]
    facts = {
        "environment": np.array([each.environment for each in episodes], np.int64),
        "complete": np.array([each.complete for each in episodes], bool),
        "running": np.array([not each.ended for each in episodes], bool),
        "cut": np.array([each.cut for each in episodes], bool),
    }
    notes = (tabular.DONE_NOTE,) * ({*FLAGS}.intersection(leaves) == {DONE})
    return Table(columns, rows.ends, facts, notes=notes, cut=cut)
