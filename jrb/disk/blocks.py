"""Arrays as blocks of bytes, and how to tell whether a block is still the same.

A block is known by three sums: CRC-32 of all its bytes; Adler-32 too, where the two together are to
tell that nothing changed; and CRC-32 of a few bytes, one in 8 kB, which is enough to notice that
a block comes from elsewhere.
"""

import dataclasses
import zlib
from collections.abc import Callable

from jrb.disk.files import Bytes

SMALLEST, LARGEST, MOST = 1 << 16, 1 << 20, 256
EXTENT = 32 << 20
"""Bytes of the largest file of blocks."""

WITNESS = 16 << 20
"""Bytes of the largest array that is looked at as a whole to tell one history from another."""

_STRIDE = 8191  # bytes; a prime, so that it meets every column of a table

Sums = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Source:
    """One array to be saved.

    Attributes:
        name: of the leaf.
        kind: what must be the same for blocks to be comparable, such as dtype and shape.
        size: bytes.
        read: from a start and a stop to those bytes; where `fresh` is given, without a copy.
        by_slot: whether `fresh` tells what changed, so that blocks need not be compared.
        fresh: pairs of a start and a stop, the bytes that may have changed since the last save if
            that was of the same history; None for all.
        edge: the byte before which the newest ones were at the last save.
    """

    name: str
    kind: tuple
    size: int
    read: Callable[[int, int], Bytes]
    by_slot: bool = False
    fresh: list[tuple[int, int]] | None = None
    edge: int = 0


def block_size(size: int) -> int:
    """Bytes of the blocks of an array: about 256 of them, a power of two, within bounds."""
    wanted = 1 << max(size // MOST, 1).bit_length()
    return min(max(wanted, SMALLEST), LARGEST)


def bounds(size: int, block: int) -> list[tuple[int, int]]:
    """Start and stop of each block."""
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def sums(data: Bytes, compared: bool) -> Sums:
    """The three sums of a block; the second one is 0 unless blocks are to be compared."""
    return zlib.crc32(data), zlib.adler32(data) if compared else 0, sample(data)


def is_fresh(source: Source, start: int, stop: int) -> bool:
    """Whether some bytes of a block may have changed."""
    return source.fresh is None or any(
        first < stop and start < last for first, last in source.fresh
    )


def check(data: Bytes) -> int:
    """The first of them."""
    return zlib.crc32(data)


def sample(data: Bytes) -> int:
    """The sum over a few bytes of a block."""
    return zlib.crc32(bytes(memoryview(data)[::_STRIDE]))
