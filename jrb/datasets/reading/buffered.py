"""The items of a buffer as a table of its episodes. K episodes, T steps of all of them."""

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
from jrb.datasets.format import Source, native
from jrb.datasets.reading import tabular
from jrb.datasets.reading.names import check
from jrb.datasets.reading.tabular import DONE, FLAGS, TERMINATED, TRUNCATED, VALID, Table
from jrb.state import BufferState

_PIECE = 32 << 20  # bytes of items that are read together


@dataclasses.dataclass(frozen=True)
class InMemory(tabular.TableFormat):
    """A table as the source of a dataset."""

    name: ClassVar[str] = "table in memory"
    looks_for: ClassVar[str] = "a table"

    def matches(self, source: Source) -> bool:
        """Returns True for a table."""
        return isinstance(source, Table)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Yields it."""
        yield source


def episode_table(
    where: str, buffer: ReplayBuffer, state: BufferState, leaves: Sequence[str]
) -> Table:
    """Returns the table of the episodes that a buffer holds; items are read when asked for.

    `leaves` has the names in TED of the leaves of an item, in their order.
    """
    with enable_x64():
        episodes = read.episodes(buffer, state)
    slots = [np.zeros(0, np.int32), *(np.asarray(each.slots) for each in episodes)]
    order, ends = np.concatenate(slots), np.cumsum([*map(len, slots)], dtype=np.int64)[1:]
    is_last = np.isin(np.arange(len(order)), ends - 1)
    size = max(1, _PIECE // max(1, tree_nbytes(buffer.stored(state))))

    def taken(at: np.ndarray) -> dict[str, np.ndarray]:
        with enable_x64():  # every leaf in the dtype that it has
            items = read.taken(buffer, state, at)
        steps = dict(zip(leaves, jax.tree.leaves(items), strict=True))
        flags = {name: tabular.is_set(steps.pop(name)) for name in FLAGS if name in steps}
        terminated, truncated = tabular.combined_flags(len(at), *map(flags.get, FLAGS))
        return {**steps, TERMINATED: terminated, TRUNCATED: truncated}

    # A read of each episode alone costs a call, and one of each column reads all of them.
    @functools.lru_cache(maxsize=2)
    def piece(number: int) -> dict[str, np.ndarray]:
        rows = slice(number * size, (number + 1) * size)
        steps = taken(order[rows])
        if VALID in steps:
            wrong = np.count_nonzero(~tabular.is_set(steps[VALID]) & ~is_last[rows])
            expected = "True but for last steps of episodes"
            check(not wrong, f"{where}: leaf '{VALID}'", expected, f"{wrong} others")
        return steps

    def rows_of(name: str, start: int, stop: int) -> np.ndarray:
        first = start // size
        pieces = [piece(number)[name] for number in range(first, -(-stop // size))]
        rows = np.concatenate(pieces or [last[name][:0]])
        return rows[start - first * size : stop - first * size]

    last, columns = taken(order[is_last]), dict[str, Any]()
    for name, leaf in last.items():
        shape, column = (len(order), *leaf.shape[1:]), functools.partial(rows_of, name)
        columns[name] = tabular.DerivedColumn(shape, native(leaf.dtype), column)
    cut = None
    if columns.pop(VALID, None) is not None:  # `Dataset` adds it again
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
    return Table(columns, ends, facts, notes=notes, cut=cut)
