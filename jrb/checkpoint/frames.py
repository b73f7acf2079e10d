"""The compressed rows of a `CompressedStorage` in a checkpoint, as they are in memory.

A leaf is an array of pages. A group of G slots has P of them: the lengths of its frames, uint32
`[G]`, and then the frames are in the first; the others are zeros, which take no room on the disk. A
save writes only groups with new rows. G rows have 1 MB or less before they are compressed: smaller
groups would cost room, as the last page of each is padded, and larger ones would be written for one
row. P is a power of two and never shrinks, since all pages are written when it changes.
"""

import functools

import numpy as np

from jrb._store.block_store import Source
from jrb._store.blocks import BlockArray
from jrb._store.files import DamagedError
from jrb._store.threads import run_all
from jrb.storages.compressed import CompressedRows

PAGE, GROUP = 1 << 13, 1 << 20
"""The bytes of a page; and the most bytes of the rows of a group, unless a single row has more."""

_LENGTH = np.dtype("<u4")


def slots_per_group(rows: CompressedRows, leaf: int) -> int:
    """Returns G, a power of two."""
    return 1 << max(GROUP // rows.widths[leaf], 1).bit_length() - 1


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
    needed = 1 << max(-(-int(totals.max()) // PAGE) - 1, 0).bit_length()
    pages = rows.num_pages[leaf] = max(rows.num_pages[leaf], needed)

    def read(start: int, stop: int) -> np.ndarray:
        first, last = start // pages, -(-stop // pages)
        target = np.zeros((last - first, pages * PAGE), np.uint8)
        for group in (first + np.flatnonzero(totals[first:last])).tolist():
            parts = frames[group * size : (group + 1) * size].tolist()
            data = np.frombuffer(b"".join([lengths[group].tobytes(), *parts]), np.uint8)
            target[group - first, : len(data)] = data
        return target.reshape(-1, PAGE)[start - first * pages : stop - first * pages]

    kind = ["uint8", str([num_groups * pages, PAGE]), "blosc2", str(size)]
    reach = (int(np.flatnonzero(totals).max(initial=-1)) + 1) * pages
    return Source(kind, label, num_groups * pages, PAGE, read, reach, block=1)


def load_frames(array: BlockArray, rows: CompressedRows, leaf: int) -> None:
    """Fills leaf number `leaf` with the frames that `frame_source` saved, after checks."""
    size, width, spec = slots_per_group(rows, leaf), rows.widths[leaf], array.spec
    num_groups = -(-rows.capacity // size)
    pages = rows.num_pages[leaf] = max(spec.rows // num_groups, 1)
    kind = ["uint8", str([num_groups * pages, PAGE]), "blosc2", str(size)]
    if (spec.kind, spec.width) != (kind, PAGE):
        raise DamagedError(f"{array.path}: {spec.label}: expected {kind}, got {spec.kind}.")

    def load(group: int) -> None:
        slots = np.arange(group * size, rows.capacity)[:size]
        data = np.zeros((pages, PAGE), np.uint8)
        try:
            array.fill(data, group * pages)
        except DamagedError as error:
            raise DamagedError(f"{error} They hold slots {slots[0]} to {slots[-1]}.") from error
        lengths = data.reshape(-1)[: size * _LENGTH.itemsize].view(_LENGTH)[: len(slots)]
        text, stop = data.tobytes(), size * _LENGTH.itemsize
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=False):
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
