"""A chunk: n items, written once, as a whole.

Its body (see `framed`) has its `number`, the `sum` of the head's body, what is in `Index`, and for
each leaf the CRC-32 of blocks of 32 KiB; the leaves follow, `[n, ...]` each, one after the other.
Items lie environment by environment, those of one in the order of time. A leaf that is `shared` has
only the items at some places; of all others it is that of another leaf one item later, as next
observations mostly are.
"""

import dataclasses
import functools
import os
import weakref
import zlib

import numpy as np

from jrb._store import files
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb.datasets.recording import framed
from jrb.datasets.recording.heads import Head, natural

PREFIX = "chunk-"
"""What the names of chunks begin with."""

BLOCK = 1 << 15
"""Bytes that one checksum is over."""

Shared = dict[int, tuple[int, np.ndarray]]
"""By the number of a leaf: that of the leaf it shares items with, and the places where it does not.

Places are int64, ascending; the last item of a chunk is among them.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """What is in a chunk of n items. Places are int64, counted within the chunk, ascending.

    Attributes:
        counts: int64 `[E]`, the items of each environment.
        ends: places of items with which an episode ends, by their flags.
        terminated: places of items that terminated.
        truncated: places of items that were truncated.
        starts: places of items with which an episode begins, though no flag ended the one before.
    """

    counts: np.ndarray
    ends: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    starts: np.ndarray

    @property
    def items(self) -> int:
        """The number n of items."""
        return int(self.counts.sum())


def name_of(number: int) -> str:
    """The name of the file."""
    return f"{PREFIX}{number:012d}"


def write_chunk(
    folder: Folder,
    number: int,
    head_sum: int,
    columns: list[np.ndarray],
    index: Index,
    shared: Shared,
) -> None:
    """Writes a chunk, for good: written again, it has to be the same.

    Args:
        folder: of the writer.
        number: of the chunk.
        head_sum: the checksum of the head.
        columns: `[n, ...]`, C-contiguous, in the order of the head's leaves.
        index: of the chunk.
        shared: which leaves are mostly those of others one item later.

    Raises:
        OSError: the disk is full or broken.
    """
    columns = list(columns)
    for leaf, (_, places) in shared.items():
        columns[leaf] = columns[leaf][places]
    data = [_bytes(column) for column in columns]
    sums = [[zlib.crc32(one[at : at + BLOCK]) for at in range(0, len(one), BLOCK)] for one in data]
    body = {"number": number, "head": head_sum, "sums": sums}
    body |= {field.name: getattr(index, field.name).tolist() for field in _FIELDS}
    body["shared"] = [[leaf, seen, at.tolist()] for leaf, (seen, at) in shared.items()]
    framed.write(folder, name_of(number), body, data)


_FIELDS = dataclasses.fields(Index)


def _bytes(column: np.ndarray) -> memoryview:
    return column.reshape(-1).view(np.uint8).data if column.size else memoryview(b"")


class Chunk:
    """A chunk that was opened, its index checked.

    Args:
        folder: of its writer.
        number: of the chunk.
        head: of the writer.
        head_sum: the head's checksum.

    Raises:
        DamagedError: it is not what was written, or not there.
        ValueError: a newer version has written it.
    """

    index: Index
    path: str

    def __init__(self, folder: Folder, number: int, head: Head, head_sum: int) -> None:
        self.path, self._leaves = folder.path_of(name_of(number)), head.leaves
        try:
            self._file = folder.open(name_of(number))
        except FileNotFoundError:
            raise DamagedError(f"{self.path}: expected a chunk, found nothing there.") from None
        weakref.finalize(self, os.close, self._file)
        body, self._begin, _ = framed.read(self._file, self.path)
        try:
            self.index = _index_of(body, head, number, head_sum)
            self._shared = _shared_of(body, head, self.index.items)
            self._sums = self._sums_of(body)
        except framed.NONSENSE as error:
            raise DamagedError(f"{self.path}: expected chunk {number}, got {error!r}.") from error
        size, wanted = os.fstat(self._file).st_size, self._offset(len(self._leaves))
        if size != wanted:
            raise DamagedError(f"{self.path}: expected {wanted} bytes, found {size}.")
        self._near = functools.lru_cache(maxsize=4 * len(self._leaves))(self._blocks)

    def _size(self, leaf: int) -> int:
        """Bytes of a leaf in the file."""
        items = len(self._shared[leaf][1]) if leaf in self._shared else self.index.items
        return items * self._leaves[leaf].width

    def _offset(self, leaf: int) -> int:
        return self._begin + sum(map(self._size, range(leaf)))

    def _sums_of(self, body: framed.Body) -> list[list[int]]:
        """The checksums of each leaf's blocks."""
        wanted = [-(-self._size(leaf) // BLOCK) for leaf in range(len(self._leaves))]
        if [len(sums) for sums in body["sums"]] != wanted:
            raise ValueError("sums")
        return body["sums"]

    def read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Items from `start` to `stop` of the leaf of this number, `[stop - start, ...]`.

        Raises:
            DamagedError: it is not what was written.
        """
        if number not in self._shared:
            return self._stored(number, start, stop)
        seen, places = self._shared[number]
        found = np.empty((stop - start, *self._leaves[number].shape), self._leaves[number].numpy)
        later = self._stored(seen, start + 1, min(stop + 1, self.index.items))
        found[: len(later)] = later
        first, last = np.searchsorted(places, [start, stop])
        found[places[first:last] - start] = self._stored(number, first, last)
        return found

    def _stored(self, number: int, start: int, stop: int) -> np.ndarray:
        """Items of a leaf, counted as they lie in the file."""
        leaf = self._leaves[number]
        found = np.empty((stop - start, *leaf.shape), leaf.numpy)
        if found.size:
            begin, end = start * leaf.width, stop * leaf.width
            first, last = begin // BLOCK, -(-end // BLOCK)
            read = self._near if last - first == 1 else self._blocks
            data = read(number, first, last)
            at = begin - first * BLOCK
            found.reshape(-1).view(np.uint8)[:] = data[at : at + end - begin]
        return found

    def _blocks(self, number: int, first: int, last: int) -> np.ndarray:
        """Some blocks of a leaf, uint8, checked."""
        size, begin = self._size(number), first * BLOCK
        data = np.empty(min(last * BLOCK, size) - begin, np.uint8)
        view = data.data
        files.read_at(self._file, self.path, self._offset(number) + begin, view)
        for block in range(first, last):
            at = block * BLOCK - begin
            its, wanted = zlib.crc32(view[at : at + BLOCK]), self._sums[number][block]
            if its != wanted:
                raise DamagedError(
                    f"{self.path}: leaf '{self._leaves[number].name}', block {block}: expected the "
                    f"checksum {wanted:08x}, found {its:08x}: it was damaged."
                )
        return data


def _index_of(body: framed.Body, head: Head, number: int, head_sum: int) -> Index:
    """The index in a body."""
    if body["number"] != number or body["head"] != head_sum:
        raise ValueError("that of another chunk, or of another head")
    counts, *rest = (np.array(body[field.name], np.int64).reshape(-1) for field in _FIELDS)
    if len(counts) != head.envs or counts.min() < 0:
        raise ValueError("counts")
    return Index(counts, *(_ascending(places, int(counts.sum())) for places in rest))


def _shared_of(body: framed.Body, head: Head, items: int) -> Shared:
    """The leaves in a body that share items with others."""
    found: Shared = {}
    for leaf, seen, places in body["shared"]:
        one, other = head.leaves[natural(leaf)], head.leaves[natural(seen)]
        found[leaf] = seen, _ascending(np.array(places, np.int64), items)
        if (one.dtype, one.shape) != (other.dtype, other.shape) or found[leaf][1][-1] != items - 1:
            raise ValueError("shared")
    if any(seen in found for seen, _ in found.values()):
        raise ValueError("shared")
    return found


def _ascending(places: np.ndarray, items: int) -> np.ndarray:
    """The same places, all of them within so many items, each once."""
    if len(places) and (places[0] < 0 or places[-1] >= items or (np.diff(places) <= 0).any()):
        raise ValueError("places")
    return places
