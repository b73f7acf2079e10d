"""The files of a recording: chunks of items, each written once, as a whole.

```
writer-20260131T120000123456-name-0a1b2c3d   of each recorder that was ever opened at the path
    head                  how the items look, and where their parts are
    chunk-000000000000    the first items, and so on without a gap
    lock                  of the process that writes
```

A file begins with a line of JSON, `format`, `version`, and length and CRC-32 of the line that
follows, its body. That of a head is a `Head`. That of a chunk has its `number`, the `sum` of the
head's body, what is in `Index`, and for each leaf the CRC-32 of blocks of 32 KiB; the leaves
follow, `[n, ...]` each, one after the other. Items lie environment by environment, those of one in
the order of time. A leaf that is `shared` has only the items at some places; of all others it is
that of another leaf one item later, as next observations mostly are.

A file is written beside the others, synced, and renamed, and then its folder is synced: it is there
whole, or not at all, whatever happens. What was named once never changes.
"""

import dataclasses
import functools
import json
import os
import secrets
import time
import weakref
import zlib
from typing import Any

import numpy as np

from jrb._store import files
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.lock import Lock
from jrb.checkpoint import descriptions
from jrb.keys import Keys

FORMAT, VERSION = "jrb.recording", 1
BLOCK = 1 << 15
"""Bytes that one checksum is over."""

_WRITER, _HEAD, _CHUNK, _NEW = "writer-", "head", "chunk-", ".new"
_LARGEST_FIRST = 200  # bytes of the first line
_NONSENSE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)

Body = dict[str, Any]

Shared = dict[int, tuple[int, np.ndarray]]
"""By the number of a leaf: that of the leaf it shares items with, and the places where it does not.

Places are int64, ascending; the last item of a chunk is among them.
"""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of an item, as it lies in the files.

    Attributes:
        name: such as `next/reward`.
        dtype: the name of NumPy's.
        shape: of one item.
        keys: of PRNG keys, whose words these are, what made them; else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    keys: str | None = None

    @functools.cached_property
    def numpy(self) -> np.dtype:
        """The dtype."""
        return np.dtype(descriptions.dtype_of(self.dtype))

    @functools.cached_property
    def width(self) -> int:
        """Bytes of one item."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.numpy.itemsize


@dataclasses.dataclass(frozen=True)
class Head:
    """What all chunks of a writer have in common.

    Attributes:
        num_envs: E; None for one stream without an axis of environments.
        leaves: of an item.
        keys: how items are keyed.
        metadata: the user's, and when and with what it was written.
    """

    num_envs: int | None
    leaves: tuple[Leaf, ...]
    keys: Keys
    metadata: dict[str, Any]

    @property
    def envs(self) -> int:
        """How many streams there are."""
        return self.num_envs or 1

    @property
    def names(self) -> list[str]:
        """Those of the leaves."""
        return [leaf.name for leaf in self.leaves]


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


# Folders.


def claim(path: str, name: str) -> tuple[Folder, Lock]:
    """A new folder for a writer below a path, and the right to write there.

    Raises:
        ValueError: there is something else at the path.
        OSError: it cannot be written to.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: expected a folder, or nothing, found a file.")
    files.make_folder(path)
    root = Folder(path)
    others = [one for one in root.names() if not one.startswith((_WRITER, "."))]
    if others:
        raise ValueError(
            f"{path}: expected a recording, or an empty folder, found '{others[0]}' in it. Choose "
            "another path."
        )
    now = time.time_ns() // 1000
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 1_000_000))
    own = f"{_WRITER}{moment}{now % 1_000_000:06d}-{name}-{secrets.token_hex(4)}"
    root.make(own)
    folder = Folder(root.path_of(own))
    return folder, Lock(folder)


def writers(path: str) -> list[str]:
    """The folders of all writers that have begun, in the order in which they were opened."""
    root = Folder(path)
    names = [name for name in root.names() if name.startswith(_WRITER)]
    return [name for name in names if os.path.isfile(root.path_of(f"{name}/{_HEAD}"))]


def sealed(path: str) -> tuple[tuple[str, int], ...]:
    """The chunks that are there now: the folder of each writer, and how many it has.

    Raises:
        DamagedError: a chunk is missing between others.
    """
    root = Folder(path)
    return tuple((name, _count(root, name)) for name in writers(path))


def stamps(path: str, names: list[str]) -> tuple[int, ...]:
    """Numbers by which the heads of writers are told from others that were put in their place."""
    found = [os.stat(os.path.join(path, name, _HEAD)) for name in names]
    return tuple(n for stat in found for n in (stat.st_dev, stat.st_ino, stat.st_ctime_ns))


def _count(root: Folder, writer: str) -> int:
    names = {name for name in root.names(writer) if name.startswith(_CHUNK)}
    count, path = 0, root.path_of(writer)
    while _chunk_name(count) in names or os.path.isfile(f"{path}/{_chunk_name(count)}"):
        count += 1  # a listing may pass over one that came meanwhile, and show the next
    beyond = [name for name in names if name > _chunk_name(count) and not name.endswith(_NEW)]
    if beyond:
        raise DamagedError(
            f"{path}: expected chunks without a gap, found no {_chunk_name(count)} before "
            f"{min(beyond)}."
        )
    return count


def _chunk_name(number: int) -> str:
    return f"{_CHUNK}{number:012d}"


# Heads.


def write_head(folder: Folder, head: Head) -> int:
    """Writes a head; its checksum."""
    leaves = [[leaf.name, leaf.dtype, list(leaf.shape), leaf.keys] for leaf in head.leaves]
    keys = dataclasses.asdict(head.keys)
    body = {"num_envs": head.num_envs, "leaves": leaves, "keys": keys, "metadata": head.metadata}
    return _write(folder, _HEAD, body, [])


def read_head(folder: Folder) -> tuple[Head, int]:
    """A head, and its checksum.

    Raises:
        DamagedError: it is not what was written.
        ValueError: a newer version has written it.
    """
    file, path = folder.open(_HEAD), folder.path_of(_HEAD)
    try:
        body, _, checksum = _read(file, path)
    finally:
        os.close(file)
    try:
        return _head_of(body), checksum
    except _NONSENSE as error:
        raise DamagedError(f"{path}: expected the head of a recording, got {error!r}.") from error


def _head_of(body: Body) -> Head:
    leaves = tuple(Leaf(name, dtype, tuple(map(_natural, shape)), keys) for
                   name, dtype, shape, keys in body["leaves"])  # fmt: skip
    keys = {role: tuple(path) if isinstance(path, list) else path
            for role, path in body["keys"].items()}  # fmt: skip
    if not all(isinstance(leaf.name, str) and leaf.width >= 0 for leaf in leaves) or not leaves:
        raise ValueError("leaves")
    envs = body["num_envs"]
    if envs is not None and _natural(envs) < 1:
        raise ValueError("num_envs")
    return Head(envs, leaves, Keys(**keys), dict(body["metadata"]))


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(repr(value))
    return value


def check_alike(path: str, name: str, other: Head, head: Head) -> None:
    """Raises `ValueError` unless a head is of the same items as that of another writer."""
    if (other.leaves, other.keys) == (head.leaves, head.keys):
        return
    text = lambda one: [(leaf.name, leaf.keys or leaf.dtype, leaf.shape) for leaf in one.leaves]
    what = f"the leaves {text(other)}, got {text(head)}"
    if other.leaves == head.leaves:
        what = f"the keys {other.keys}, got {head.keys}"
    raise ValueError(
        f"{path}: expected items as the writer '{name}' has them, {what}. Record them to another "
        "path."
    )


# Chunks.


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
    found = {field.name: getattr(index, field.name).tolist() for field in _FIELDS}
    found["shared"] = [[leaf, seen, at.tolist()] for leaf, (seen, at) in shared.items()]
    _write(folder, _chunk_name(number), {"number": number, "head": head_sum, **found,
                                         "sums": sums}, data)  # fmt: skip


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

    def __init__(self, folder: Folder, number: int, head: Head, head_sum: int) -> None:
        self.path, self._leaves = folder.path_of(_chunk_name(number)), head.leaves
        try:
            self._file = folder.open(_chunk_name(number))
        except FileNotFoundError:
            raise DamagedError(f"{self.path}: expected a chunk, found nothing there.") from None
        weakref.finalize(self, os.close, self._file)
        body, self._begin, _ = _read(self._file, self.path)
        try:
            self.index = _index_of(body, head, number, head_sum)
            self._shared = _shared_of(body, head, self.index.items)
            self._sums = self._sums_of(body)
        except _NONSENSE as error:
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

    def _sums_of(self, body: Body) -> list[list[int]]:
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


def _index_of(body: Body, head: Head, number: int, head_sum: int) -> Index:
    """The index in a body."""
    if body["number"] != number or body["head"] != head_sum:
        raise ValueError("that of another chunk, or of another head")
    counts, *rest = (np.array(body[field.name], np.int64).reshape(-1) for field in _FIELDS)
    if len(counts) != head.envs or counts.min() < 0:
        raise ValueError("counts")
    return Index(counts, *(_ascending(places, int(counts.sum())) for places in rest))


def _shared_of(body: Body, head: Head, items: int) -> Shared:
    """The leaves in a body that share items with others."""
    found: Shared = {}
    for leaf, seen, places in body["shared"]:
        one, other = head.leaves[_natural(leaf)], head.leaves[_natural(seen)]
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


# What all files have in common.


def _write(folder: Folder, name: str, body: Body, data: list[memoryview]) -> int:
    text = json.dumps(body, separators=(",", ":")).encode() + b"\n"
    checksum = zlib.crc32(text)
    head = {"format": FORMAT, "version": VERSION, "size": len(text), "sum": checksum}
    first = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    folder.write_new(name + _NEW, [first, text, *data])
    folder.replace(name + _NEW, name)
    folder.sync()
    return checksum


def is_recording(path: str) -> bool:
    """Whether there is a writer's folder at a path, with a head that looks like one."""
    try:
        root = Folder(path)
        for name in writers(path):
            file = root.open(f"{name}/{_HEAD}")
            try:
                return json.loads(_first_line(file))["format"] == FORMAT
            finally:
                os.close(file)
    except (OSError, *_NONSENSE):
        pass
    return False


def _first_line(file: int) -> bytes:
    return os.pread(file, _LARGEST_FIRST, 0).partition(b"\n")[0]


def _read(file: int, path: str) -> tuple[Body, int, int]:
    """The body of a file, where what follows begins, and the body's checksum."""
    first = _first_line(file)
    try:
        head = json.loads(first)
        kind, version, size, checksum = (head[key] for key in ("format", "version", "size", "sum"))
        if kind != FORMAT or type(version) is not int or type(size) is not int:
            raise ValueError("its first line is another")
        if not 0 < size <= os.fstat(file).st_size:
            raise ValueError("it is cut short")
    except (*_NONSENSE, RecursionError) as error:
        raise DamagedError(f"{path}: expected a file of a recording, got {error!r}.") from error
    if version > VERSION:
        raise ValueError(
            f"{path}: expected version {VERSION} or older, got version {version}. A newer jrb "
            "wrote this; install that one."
        )
    text = os.pread(file, size, len(first) + 1)
    if zlib.crc32(text) != checksum:
        raise DamagedError(
            f"{path}: expected the checksum {checksum!r}, found {zlib.crc32(text)}: it was cut "
            "short or damaged."
        )
    try:
        return json.loads(text), len(first) + 1 + size, checksum
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: expected a body in JSON, got {error!r}.") from error
