"""A storage in memory of the host whose rows are compressed one by one, without loss, by blosc2.

Measured for frames of 84 x 84 bytes: two threads read 256 of them in 1.5 to 2.5 ms instead of 1.0,
as half of the 4 us for a frame are a call of Python, which holds the interpreter's lock. Rows of 64
kB or more gain from threads, up to 1.8 times. To shuffle bytes takes twice the time for nothing; to
shuffle the bits of bools and of wider elements makes them up to 3 times smaller.

In a checkpoint, a leaf is an array of pages. A group of G slots has P of them: the lengths of its
frames, uint32 `[G]`, and then the frames are in the first; the others are zeros, which take no room
on the disk. A save writes only groups with new rows. G rows have 1 MB or less before they are
compressed: smaller groups would cost room, as the last page of each is padded, and larger ones
would be written for one row. P is a power of two and never shrinks, since all pages are written
when it changes.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from jrb._store.block_store import Source
from jrb._store.blocks import BlockArray
from jrb._store.files import DamagedError
from jrb._store.threads import WORKERS, run_all
from jrb._util import checks, pytree, wording
from jrb.keys import Keys
from jrb.ring import Ring
from jrb.storages import host_rows
from jrb.storages.host_rows import HostStorage, HostView, PlainRows, RowsSpec
from jrb.types import Item

_LARGE, _MANY = 1 << 16, 1 << 21  # the bytes of a row, and of all, from which on threads share them
_PAGE, _GROUP = 1 << 13, 1 << 20  # the bytes of a page, and of the rows of a group
_LENGTH = np.dtype("<u4")
_OVERHEAD = 32 + 33 + 8  # the bytes of a header of blosc2, of an object of Python, and of its place


class CompressedRows(PlainRows):
    """The rows of one buffer, which all its states share.

    Attributes:
        blosc2: the module.
        widths: the bytes of a row of each leaf, before it is compressed.
        is_compressed: for each leaf, True if its rows are.
        columns: the rows of each leaf, `[N, ...]`; or if they are compressed, their *frames*:
            objects `[N]`, bytes, which are empty where nothing was ever written.
        num_pages: for each leaf, the pages that a checkpoint has for each group of slots.
    """

    _owner: ClassVar[str] = "CompressedStorage: "

    def __init__(self, capacity: int, spec: Item, level: int, min_bytes: int) -> None:
        super().__init__(capacity, spec)
        self.blosc2: Any = wording.require("blosc2", "compressed")
        # By default, blosc2 keeps the interpreter's lock, and all other threads wait.
        self.blosc2.set_releasegil(True)
        self.widths: list[int] = list(map(pytree.nbytes, self.raw))
        self.is_compressed: list[bool] = [width >= min_bytes for width in self.widths]
        blank = lambda leaf: np.zeros((capacity, *leaf.shape), leaf.dtype)
        self.columns: list[np.ndarray] = [
            np.full(capacity, b"", object) if is_large else blank(leaf)
            for is_large, leaf in zip(self.is_compressed, self.raw, strict=True)
        ]
        self.num_pages: list[int] = [1] * len(self.columns)
        codec = self.blosc2.Codec.LZ4 if level == 1 else self.blosc2.Codec.ZSTD
        self._options = {"codec": codec, "clevel": level, "filters_meta": [0], "nthreads": 1}

    def prepare_rows(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        """See `PlainRows.prepare_rows`; compresses the rows of large leaves."""
        pairs = zip(leaves, self.is_compressed, strict=True)
        return [self._compress(leaf) if is_compressed else leaf for leaf, is_compressed in pairs]

    def _compress(self, leaf: np.ndarray) -> np.ndarray:
        """Returns the frames of the rows of a leaf, `[B, ...]`."""
        filters, is_byte = self.blosc2.Filter, leaf.itemsize == 1 and leaf.dtype != np.bool_
        shuffle = [filters.NOFILTER if is_byte else filters.BITSHUFFLE]
        options = self._options | {"typesize": leaf.itemsize, "filters": shuffle}
        compress = functools.partial(self.blosc2.compress2, **options)
        rows = host_rows.bytes_of(leaf, len(leaf))
        return np.fromiter(self._map_rows(compress, rows), object, len(rows))

    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        """See `PlainRows.write_rows`; large leaves are frames."""
        for column, rows in zip(self.columns, leaves, strict=True):
            column[slots] = rows

    def read_rows(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """See `PlainRows.read_rows`; rows that were compressed are returned as bytes."""
        stored = self.columns[leaf][slots]
        if not self.is_compressed[leaf]:
            return stored
        rows = np.zeros((len(slots), self.widths[leaf]), np.uint8)
        decompress = functools.partial(self.blosc2.decompress2, nthreads=1)
        self._map_rows(lambda row, frame: frame and decompress(frame, row), rows, stored)
        return rows

    def _map_rows(self, function: Callable[..., Any], rows: np.ndarray, *others: Any) -> list[Any]:
        """Returns what a function returns for each row, uint8 `[width]`, in several threads."""
        if rows.shape[1] < _LARGE or rows.size < _MANY:
            return list(map(function, rows, *others))
        results: list[Any] = [None] * len(rows)

        def work(first: int) -> None:
            parts = (column[first::WORKERS] for column in (rows, *others))
            results[first::WORKERS] = map(function, *parts)

        run_all([functools.partial(work, first) for first in range(WORKERS)])
        return results


class CompressedView(HostView):
    """The state of a `CompressedStorage`."""

    @property
    def host_bytes(self) -> int:
        """The bytes of memory that all rows take now; they change with every write."""
        if not isinstance(self.rows, CompressedRows):
            return 0
        columns = self.rows.columns
        frames = [column.tolist() for column in columns if column.dtype.hasobject]
        objects = sum(sum(map(sys.getsizeof, filter(None, column))) for column in frames)
        return objects + sum(column.nbytes for column in columns)


@pytree.component
class CompressedStorage(HostStorage):
    """Keeps the items in memory of the host, each row compressed without loss; for frames.

    Measured: 84 x 84 frames of MinAtar take 24 to 38 times less memory, rendered frames of a cart
    pole, 400 x 600 x 3, 270 times; noise and most vectors of floats do not become smaller. Each
    leaf is compressed separately: a unit reads only those that it needs, and single frames with
    `jrb.FrameStack` take half of observations and next observations. A batch of 256 frames of 84 x
    84 is read in 1 to 1.5 ms; `jrb.prefetch` draws while a step is computed.

    Sampler, writer and priorities stay on the device. States share their rows, and methods work
    inside `jit`, as for `jrb.MemmapStorage`. `jrb.save` writes rows as they are, compressed, and
    only where they have changed. `nbytes` counts the most memory that all rows may take; the `repr`
    of a state shows what they take now, after `empty` too. It needs the extra `compressed`: without
    it, `init` and `jrb.load` raise ModuleNotFoundError.

    Attributes:
        codec: the library that compresses; "blosc2" is the only one.
        level: from 1, the fastest, by LZ4, to 9; from 2 on by Zstandard, whose rows are up to half
            as large and take three times as long to read. A saved buffer may have another level.
        min_bytes: the bytes of a row from which on a leaf is compressed, which adds 73 bytes.
            Smaller leaves, such as rewards and flags, are kept as they are.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(1000, batch_size=2, storage=jrb.CompressedStorage())
        >>> frame = {"observation": jnp.zeros((84, 84), jnp.uint8), "reward": 0.0}
        >>> state = buffer.add(buffer.init(frame), frame)
        >>> buffer.sample(state, jax.random.key(0)).data["observation"].shape
        (2, 84, 84)
    """

    codec: str = "blosc2"
    level: int = 1
    min_bytes: int = 256
    state_type: ClassVar[type] = CompressedView
    unbound: ClassVar[tuple[str, ...]] = ("level",)

    def __post_init__(self) -> None:
        checks.choice("CompressedStorage: codec", self.codec, ("blosc2",))
        checks.count("CompressedStorage: level", self.level, 9)
        checks.count("CompressedStorage: min_bytes", self.min_bytes)

    def make_rows(self, ring: Ring, spec: Item, keys: Keys) -> CompressedRows:
        """Returns rows of zeros."""
        return CompressedRows(ring.capacity, spec, self.level, self.min_bytes)

    def nbytes(self, ring: Ring, spec: Item, keys: Keys) -> dict[str, int]:
        """Returns the most bytes that the rows may take, in memory of the host, and the version."""
        widths = map(pytree.nbytes, RowsSpec(ring.capacity, spec).raw)
        row = sum(width + _OVERHEAD * (width >= self.min_bytes) for width in widths)
        return {"host": ring.capacity * row, "device": pytree.nbytes(host_rows.WORDS)}


# Compressed rows in a checkpoint.


def slots_per_group(rows: CompressedRows, leaf: int) -> int:
    """Returns G, a power of two."""
    return 1 << max(_GROUP // rows.widths[leaf], 1).bit_length() - 1


def frame_source(rows: CompressedRows, version: int, leaf: int, label: str) -> Source:
    """Returns the pages of leaf number `leaf`, for a save."""
    size = slots_per_group(rows, leaf)
    num_groups = -(-rows.capacity // size)
    frames = np.full(num_groups * size, b"", object)
    frames[: rows.capacity] = rows.columns[leaf]
    rows.check_newest(version)  # after the copy, as another thread may write meanwhile
    # Find the bytes of each group, and the number of pages that the largest one needs.
    lengths = np.fromiter(map(len, frames.tolist()), _LENGTH, len(frames)).reshape(-1, size)
    totals = lengths.sum(1, dtype=np.int64)
    totals += np.where(totals, lengths[0].nbytes, 0)
    needed = 1 << max(-(-int(totals.max()) // _PAGE) - 1, 0).bit_length()
    pages = rows.num_pages[leaf] = max(rows.num_pages[leaf], needed)

    def read(start: int, stop: int) -> np.ndarray:
        first, last = start // pages, -(-stop // pages)
        target = np.zeros((last - first, pages * _PAGE), np.uint8)
        for group in (first + np.flatnonzero(totals[first:last])).tolist():
            parts = frames[group * size : (group + 1) * size].tolist()
            data = np.frombuffer(b"".join([lengths[group].tobytes(), *parts]), np.uint8)
            target[group - first, : len(data)] = data
        return target.reshape(-1, _PAGE)[start - first * pages : stop - first * pages]

    kind = ["uint8", str([num_groups * pages, _PAGE]), "blosc2", str(size)]
    reach = (int(np.flatnonzero(totals).max(initial=-1)) + 1) * pages
    return Source(kind, label, num_groups * pages, _PAGE, read, reach, block=1)


def load_frames(array: BlockArray, rows: CompressedRows, leaf: int) -> None:
    """Fills leaf number `leaf` with the frames that `frame_source` saved, after checks."""
    size, width, spec = slots_per_group(rows, leaf), rows.widths[leaf], array.spec
    num_groups = -(-rows.capacity // size)
    pages = rows.num_pages[leaf] = max(spec.rows // num_groups, 1)
    kind = ["uint8", str([num_groups * pages, _PAGE]), "blosc2", str(size)]
    if (spec.kind, spec.width) != (kind, _PAGE):
        raise DamagedError(f"{array.path}: {spec.label}: expected {kind}, got {spec.kind}.")

    def load(group: int) -> None:
        slots = range(group * size, rows.capacity)[:size]
        data = np.zeros((pages, _PAGE), np.uint8)
        try:
            array.fill(data, group * pages)
        except DamagedError as error:
            raise DamagedError(f"{error} They hold slots {slots[0]} to {slots[-1]}.") from error
        lengths = data.reshape(-1)[: size * _LENGTH.itemsize].view(_LENGTH)[: len(slots)]
        text, stop = data.tobytes(), size * _LENGTH.itemsize
        for slot, length in zip(slots, lengths.tolist(), strict=True):
            frame, stop = text[stop : stop + length], stop + length
            # blosc2 writes as many bytes as a frame says, wherever they go.
            sizes = rows.blosc2.get_cbuffer_sizes(frame) if len(frame) >= 32 else (0, 0, 0)
            if length and sizes[:2] != (width, length):
                raise DamagedError(
                    f"{array.path}: {spec.label}: slot {slot}: expected a row of {width} bytes, "
                    f"got a frame of {sizes[0]}."
                )
            rows.columns[leaf][slot] = frame

    groups = np.unique(np.flatnonzero(array.positions >= 0) // pages).tolist()
    run_all([functools.partial(load, group) for group in groups])
