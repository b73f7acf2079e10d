"""Reads a buffer's items as a table of its episodes. K episodes, T steps over all of them."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jrb import read
from jrb.authoring import enable_x64, tree_nbytes
from jrb.buffer import ReplayBuffer
from jrb.datasets.format import Source, native_dtype
from jrb.datasets.reading import tabular
from jrb.datasets.reading.names import check
from jrb.datasets.reading.tabular import DONE, FLAGS, TERMINATED, TRUNCATED, VALID, Table
from jrb.state import BufferState

_PIECE = 32 << 20  # bytes of items that are read together


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
        self._size = max(1, _PIECE // max(1, tree_nbytes(buffer.stored(state))))
        self._piece = functools.lru_cache(maxsize=2)(self._checked)

    def __len__(self) -> int:
        return len(self._slots)

    def at(self, rows: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Reads all leaves of some rows, with the stored flags as `terminated` and `truncated`."""
        slots = self._slots[rows]
        # JAX would convert 64-bit leaves.
        with enable_x64():
            items = read.take_items(self._buffer, self._state, slots)
        steps = dict(zip(self._leaves, jax.tree.leaves(items), strict=True))
        # Combine the flags that the items have into the two that every table has.
        flags = {name: tabular.is_set(steps.pop(name)) for name in FLAGS if name in steps}
        terminated, truncated = tabular.combine_flags(len(slots), *map(flags.get, FLAGS))
        return {**steps, TERMINATED: terminated, TRUNCATED: truncated}

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads the rows of one leaf from `start` to `stop`."""
        # Find the pieces that have these rows; at least one, for the shape of an empty result.
        first = start // self._size * self._size
        begins = range(first, max(stop, first + 1), self._size)
        rows = lambda begin: slice(max(0, start - begin), stop - begin)
        return np.concatenate([self._piece(begin)[name][rows(begin)] for begin in begins])

    def _checked(self, begin: int) -> dict[str, np.ndarray]:
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
