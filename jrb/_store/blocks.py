"""One array on a disk: rows in blocks, each at a position of the array's file.

A block is a power of two of rows, at most 256 kB unless a row has more. The table of an array gives
the position and the checksum of each block; a block that was never written has no position, and its
rows are zeros. A position to which a kept generation refers is never written: the first write into
such a block copies it to a free position. So a commit has nothing to undo, and loses nothing
(`block_store.py`).

Rows are read through a mapping and written by `pwrite`: a full disk is an error of the write, not a
signal of a later read, and written rows do not count as memory of this process. A block is written
whole at first, since to read a hole of a file may take room on the disk.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import itertools
import math
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jrb._store import files
from jrb._store.files import DamagedError, Folder

try:  # the checksums of zlib, in a fraction of the time
    crc32: Callable[[Any], int] = importlib.import_module("isal.isal_zlib").crc32
except ImportError:
    crc32 = zlib.crc32

BLOCK: int = 1 << 18
"""The most bytes of a block, unless a single row has more."""

NO_POSITION = -1
RUN = 16
"""The blocks that a thread hashes, reads or writes at a time: about 4 MB."""

Reader = Callable[[int, int], np.ndarray]
"""Returns the rows from a start to a stop, uint8 `[n, width]`; several threads call it."""

_ALIGNMENT = 64  # bytes; XLA takes memory that is aligned so without a copy
_LARGE = 1 << 16  # bytes of rows that take longer to copy than to align


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The facts about an array with blocks that a generation records beside its table.

    Attributes:
        kind: JSON of the owner, such as dtype and shape.
        label: the name of the array in messages, such as `leaf 'observation'`.
        rows: N.
        width: the bytes of a row.
        block: the rows of a block, a power of two.
        file: the name of the file below the folder of the store.
    """

    kind: Any
    label: str
    rows: int
    width: int
    block: int
    file: str = ""

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // self.block)

    @property
    def size(self) -> int:
        """The bytes of a block."""
        return self.block * self.width

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        """Returns the start and the stop of the rows from one block to another."""
        return first * self.block, min((last + 1) * self.block, self.rows)


def rows_per_block(rows: int, width: int) -> int:
    """Returns the largest number of rows in a block that `BLOCK` allows, a power of two."""
    largest = 1 << max(BLOCK // max(width, 1), 1).bit_length() - 1
    # An array that fits one block is not padded to its largest size.
    return min(largest, 1 << max(rows - 1, 0).bit_length())


class BlockArray:
    """An array of an open store.

    Attributes:
        name: such as `storage/arrays/uint32`.
        spec: its rows and its file.
        positions: int64 `[K]`, the position of each block.
        checksums: uint64 `[K]`, of the bytes of each block; 0 for a block without a position.
        path: of the file.
        moves: the number of blocks that were given another position since the array was opened.
        reserved: the number of positions for which the file keeps room on the disk.
    """

    def __init__(self, folder: Folder, name: str, spec: ArraySpec) -> None:
        self.name: str = name
        self.spec: ArraySpec = spec
        self.positions: np.ndarray = np.full(spec.num_blocks, NO_POSITION, np.int64)
        self.checksums: np.ndarray = np.zeros(spec.num_blocks, np.uint64)
        self.path: str = folder.path_of(spec.file)
        self.moves: int = 0
        self._folder, self._turn = folder, threading.Lock()
        self._committed: np.ndarray = np.zeros(0, np.bool_)  # positions of kept generations
        self._used: np.ndarray = np.zeros(0, np.bool_)  # committed positions, and those in use now
        self._lacks_checksum: np.ndarray = np.zeros(spec.num_blocks, np.bool_)
        self._is_synced, self._has_failed = True, False
        self.reserved: int = 0
        self._open_file: list[int] = []  # the file, if it stays open for writes
        self._mapped: np.ndarray = np.zeros((0, spec.width), np.uint8)
        self._shift = spec.block.bit_length() - 1
        self._in_order = -1, 0  # `moves` and the result of `_rows_in_order` at that time

    # Positions.

    def set_used_positions(self, tables: list[np.ndarray]) -> None:
        """Takes the positions of all kept generations, to which nothing is written from now on."""
        refer = [*tables, self.positions]
        num_positions = 1 + max(int(table.max(initial=NO_POSITION)) for table in refer)
        used = np.zeros(num_positions, np.bool_)
        for table in tables:
            used[table[table >= 0]] = True
        committed = used.copy()
        used[self.positions[self.positions >= 0]] = True
        self._committed, self._used = committed, used

    def commit_positions(self) -> None:
        """Lets no later write change the blocks that the array has now, as a commit has them."""
        committed = np.zeros(self._used.size, np.bool_)
        committed[: self._committed.size] = self._committed
        committed[self.positions[self.positions >= 0]] = True
        self._committed = committed

    def take_position(self) -> int:
        """Returns the lowest free position, and marks it as used."""
        with self._turn:
            if self._used.all():
                grown = np.zeros(self._used.size + max(8, self._used.size // 8), np.bool_)
                grown[: self._used.size] = self._used
                self._used = grown
            position = int(self._used.argmin())
            self._used[position] = True
            return position

    def free_position(self, position: int) -> None:
        """Marks a position as free to which nothing refers, neither the table nor a generation."""
        self._used[position] = False

    def is_committed(self, block: int) -> bool:
        """Returns True if a kept generation refers to the block, which must then be copied."""
        position = self.positions.item(block)
        return 0 <= position < self._committed.size and bool(self._committed[position])

    def clear_block(self, block: int) -> None:
        """Makes all rows of a block zeros, which take no room on the disk."""
        position = self.positions.item(block)
        if position != NO_POSITION and not self.is_committed(block):
            self.free_position(position)
        self.positions[block], self.checksums[block] = NO_POSITION, 0
        self.moves += 1

    # The file.

    def open(self, flags: int = os.O_RDONLY) -> AbstractContextManager[int]:
        """Returns a context with the open file; it opens the file unless that stays open."""
        if self._open_file:
            return contextlib.nullcontext(self._open_file[0])
        return self._reopen_file(flags)

    @contextlib.contextmanager
    def _reopen_file(self, flags: int) -> Iterator[int]:
        try:
            file = self._folder.open(self.spec.file, flags)
        except FileNotFoundError:
            raise DamagedError(
                f"{self.path}: {self.spec.label}: expected a file, found none."
            ) from None
        try:
            yield file
        finally:
            os.close(file)

    def keep_open(self) -> None:
        """Keeps the file open for writes until the array is gone."""
        with self.open(os.O_RDWR) as file:
            self._open_file.append(os.dup(file))
            weakref.finalize(self, os.close, self._open_file[0])

    def make_file(self, reserve: int = 0) -> None:
        """Makes an empty file, with room on the disk for some positions.

        A file of this name that is there already belongs to no generation. The name lasts only when
        the folder is synced.
        """
        file = self._folder.create(self.spec.file)
        try:
            self.reserved = reserve
            if reserve:
                files.resize(file, self.path, reserve * self.spec.size, reserve=True)
        finally:
            os.close(file)

    @property
    def reach(self) -> int:
        """The row from which on no block was ever written; rows there are zeros."""
        written = np.flatnonzero(self.positions != NO_POSITION)
        return min((int(written[-1]) + 1) * self.spec.block, self.spec.rows) if written.size else 0

    def is_whole(self) -> bool:
        """Returns True if the file has all positions of the table."""
        try:
            with self.open() as file:
                num_positions = 1 + int(self.positions.max(initial=NO_POSITION))
                return os.fstat(file).st_size >= num_positions * self.spec.size
        except DamagedError:
            return False

    # Whole blocks, for arrays in memory.

    def find_changed_blocks(
        self, rows: np.ndarray, first: int
    ) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yields the blocks, from `first` on, that are not as in the table, and their checksums."""
        for number, start in enumerate(range(0, len(rows), self.spec.block), first):
            part = rows[start : start + self.spec.block].reshape(-1)
            is_new = self.positions[number] == NO_POSITION
            if is_new and is_zero(part):
                continue
            checksum = checksum_of(part)
            if is_new or self._lacks_checksum[number] or checksum != self.checksums[number]:
                yield number, part, checksum

    def write_blocks(self, blocks: list[tuple[int, np.ndarray, int]]) -> None:
        """Writes whole blocks, uint8, with their checksums to free positions."""
        if not blocks or not self.spec.width:
            return
        # Write to free positions first, and let the table refer to them when all is written.
        taken = [self.take_position() for _ in blocks]
        self._is_synced, size = False, self.spec.size
        with self.open(os.O_RDWR) as file:
            for (_, data, _), position in zip(blocks, taken, strict=True):
                if data.size < size:  # the last block of the array
                    data = np.append(data, np.zeros(size - data.size, np.uint8))
                files.write_at(file, self.path, position * size, data.data)
            # The transfer begins while other blocks are hashed; `sync` waits for its end.
            if hasattr(_libc(), "sync_file_range"):
                length = (max(taken) + 1 - min(taken)) * size
                _libc().sync_file_range(file, min(taken) * size, length, 2)  # only begins to write
        for (block, _, checksum), position in zip(blocks, taken, strict=True):
            self.positions[block], self.checksums[block] = position, checksum
            self._lacks_checksum[block] = False
        self.moves += 1

    def read_tasks(self, target: np.ndarray) -> Iterator[Callable[[], None]]:
        """Yields tasks that fill the target, uint8 `[N, width]`, and check what they read."""
        for first in range(0, self.spec.num_blocks, RUN):
            start, stop = self.spec.rows_of(first, first + RUN - 1)
            yield functools.partial(self.fill, target[start:stop], first)

    def fill(self, target: np.ndarray, first: int) -> None:
        """Fills the target, uint8 `[n, width]`, from the start of a block on, in whole blocks.

        Raises `DamagedError` if a block is damaged.
        """
        with self.open() as file:
            for block, start in enumerate(range(0, len(target), self.spec.block), first):
                rows = target[start : start + self.spec.block]
                self._read_block(file, block, rows.reshape(-1))

    def read_block(self, block: int) -> np.ndarray:
        """Returns the bytes of a block, uint8; raises `DamagedError` if they are damaged."""
        start, stop = self.spec.rows_of(block, block)
        target = np.empty((stop - start, self.spec.width), np.uint8)
        self.fill(target, block)
        return target.reshape(-1)

    def _read_block(self, file: int, block: int, target: np.ndarray) -> None:
        """Fills the target, uint8, with the bytes of a block, and checks them."""
        position = self.positions.item(block)
        if position == NO_POSITION or not target.size:
            target[:] = 0
            return
        offset, where = position * self.spec.size, f"{self.path}: {self.spec.label}, block {block}"
        if (size := os.fstat(file).st_size) < offset + target.size:
            raise DamagedError(f"{where}: expected {offset + target.size} bytes, found {size}.")
        files.read_at(file, self.path, offset, target.data)
        checksum, expected = checksum_of(target), self.checksums.item(block)
        if checksum != expected and not self._lacks_checksum[block]:
            raise DamagedError(
                f"{where}: expected the checksum {expected:016x}, found {checksum:016x}: the bytes "
                f"from {offset} on were damaged."
            )

    # Rows, for storages on disk.

    def read_rows(self, slots: np.ndarray, highest: int = -1) -> np.ndarray:
        """Returns rows, uint8 `[B, width]`, at slots, int `[B]`; unwritten ones are zeros.

        `highest` is the highest slot; -1 if it is unknown.
        """
        mapped, block, file_rows, lowest = self._mapped, self.spec.block, slots, 0
        # `argmin` of small arrays takes a third of the time of `min`, whose code is in Python.
        if highest < 0 and slots.size:
            highest = slots.item(slots.argmax())
        # Until the first block of a commit is overwritten, each block is at its own place.
        if highest >= self._rows_in_order():
            positions = self.positions.take(slots >> self._shift)
            file_rows = positions * block + (slots & block - 1)
            lowest = file_rows.item(file_rows.argmin())
            highest = file_rows.item(file_rows.argmax())
        if highest >= len(mapped):
            mapped = self._map(highest // block + 1)
        if lowest >= 0:
            shape = len(slots), self.spec.width
            rows = allocate_aligned(shape) if math.prod(shape) >= _LARGE else None
            return mapped.take(file_rows, 0, rows, "clip")  # "raise" would copy once more
        is_written = file_rows >= 0
        rows = np.zeros((len(slots), self.spec.width), np.uint8)
        rows[is_written] = mapped.take(file_rows[is_written], 0, None, "clip")
        return rows

    def _rows_in_order(self) -> int:
        """Returns the number of rows in the first blocks whose positions are their numbers."""
        moves, num_rows = self._in_order
        if moves != self.moves:
            moves = self.moves
            odd = np.flatnonzero(self.positions != np.arange(len(self.positions)))
            num_rows = (odd.item(0) if odd.size else len(self.positions)) * self.spec.block
            self._in_order = moves, num_rows
        return num_rows

    def _map(self, num_positions: int) -> np.ndarray:
        """Maps the file, which has at least these positions; the rows change as it does.

        More is mapped than there is: nothing beyond the end is read before the file has grown.
        """
        with self.open() as file:
            size = os.fstat(file).st_size
            if size < num_positions * self.spec.size:
                raise DamagedError(
                    f"{self.path}: {self.spec.label}: expected {num_positions * self.spec.size} "
                    f"bytes, found {size}."
                )
            room = 1 << num_positions.bit_length()
            self._mapped = _map_rows(file, room * self.spec.block, self.spec.width)
        return self._mapped

    def begin_write(
        self, slots: np.ndarray, rows: np.ndarray, pieces: list[tuple[int, int]]
    ) -> "RowWrite":
        """Writes the blocks that get a new position, and plans the writes into all others.

        Args:
            slots: integers `[B]`.
            rows: uint8 `[B, width]`; of equal slots the last one wins.
            pieces: the runs of consecutive slots, as `find_runs` returns them.
        """
        write, block = RowWrite(self), self.spec.block
        if not self.spec.width:
            return write
        self._is_synced = False
        # Cut each run at the boundaries of blocks.
        try:
            for start, stop in pieces:
                while start < stop:
                    number, first = divmod(slots.item(start), block)
                    count = min(block - first, stop - start)
                    part = rows[start : start + count]
                    if number in write.moved:
                        offset = (write.moved[number] * block + first) * self.spec.width
                        with self.open(os.O_RDWR) as file:
                            files.write_at(file, self.path, offset, part.reshape(-1).data)
                    elif self.positions.item(number) == NO_POSITION or self.is_committed(number):
                        self._copy_block(write, number, first, part)
                    else:
                        write.in_place.append((number, first, part))
                    start += count
        except BaseException:
            write.cancel()
            raise
        return write

    def _copy_block(self, write: "RowWrite", number: int, first: int, rows: np.ndarray) -> None:
        """Writes a block to a free position, with some of its rows changed."""
        whole = np.zeros((self.spec.block, self.spec.width), np.uint8)
        with self.open(os.O_RDWR) as file:
            if len(rows) < self.spec.block and self.positions[number] != NO_POSITION:
                # Checked, as the new block gets a checksum of its own, which would hide damage.
                start, stop = self.spec.rows_of(number, number)
                self._read_block(file, number, whole[: stop - start].reshape(-1))
            whole[first : first + len(rows)] = rows
            write.moved[number] = position = self.take_position()
            files.write_at(file, self.path, position * self.spec.size, whole.reshape(-1).data)

    def write_rows(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows, uint8 `[B, width]`, at slots, int `[B]`; of equal slots the last one wins.

        If it fails, some of the rows may be written; none of a kept generation has changed.
        """
        self.begin_write(slots, rows, find_runs(slots)).finish()

    # Commits.

    def sync(self) -> None:
        """Computes the missing checksums, and makes all writes durable."""
        if self._is_synced and not self._lacks_checksum.any():
            return
        with self.open(os.O_RDWR) as file:
            for block in np.flatnonzero(self._lacks_checksum).tolist():
                self.checksums[block] = checksum_of(self.read_block(block))
                self._lacks_checksum[block] = False
            if self._has_failed:
                self._rewrite(file)
            self._has_failed = True  # until the sync below succeeds
            files.sync(file, self.path)
            self._has_failed, self._is_synced = False, True

    def _rewrite(self, file: int) -> None:
        """Writes all blocks again that no generation has yet."""
        # After a sync that failed, the system may take their pages for written.
        for block in range(self.spec.num_blocks):
            if self.positions[block] != NO_POSITION and not self.is_committed(block):
                offset = self.positions.item(block) * self.spec.size
                files.write_at(file, self.path, offset, self.read_block(block).data)

    def truncate_file(self) -> None:
        """Shortens the file by the free positions at its end."""
        used = np.flatnonzero(self._used)
        num_positions = max(int(used[-1]) + 1 if used.size else 0, self.reserved)
        with self.open(os.O_RDWR) as file:
            if os.fstat(file).st_size > num_positions * self.spec.size:
                files.resize(file, self.path, num_positions * self.spec.size, reserve=False)
        self._used = self._used[:num_positions].copy()


class RowWrite:
    """A write of rows that has begun: blocks at new positions are written, all others are not.

    A full disk is an error of the beginning, after which nothing has changed.

    Attributes:
        moved: the new position of each block that gets one.
        in_place: the writes into other blocks: block, first row in the block, and the rows.
    """

    def __init__(self, array: BlockArray) -> None:
        self.moved: dict[int, int] = {}
        self.in_place: list[tuple[int, int, np.ndarray]] = []
        self._array = array

    def finish(self) -> None:
        """Makes the array have the new rows; after an interrupt it may be called again."""
        array = self._array
        width, block = array.spec.width, array.spec.block
        if self.in_place:
            with array.open(os.O_RDWR) as file:
                for number, first, rows in self.in_place:
                    array._lacks_checksum[number] = True
                    offset = (array.positions.item(number) * block + first) * width
                    files.write_at(file, array.path, offset, rows.reshape(-1).data)
        for number, position in self.moved.items():
            array._lacks_checksum[number] = True
            array.positions[number] = position
            array.moves += 1

    def cancel(self) -> None:
        """Frees the new positions."""
        for position in self.moved.values():
            self._array.free_position(position)


def checksum_of(data: np.ndarray) -> int:
    """Returns 64 bits for bytes, uint8 `[n]`: CRC-32, and the sum of words of 64 bits, folded.

    The CRC finds each change of up to 32 bits in a row. With the sum, another block passes for the
    old one in one case of 2^64, and this takes 1.1 times as long as the CRC alone.
    """
    words = data[: data.size & -8].view(np.uint64)
    total = int(words.sum(dtype=np.uint64)) if words.size else 0
    return ((total ^ total >> 32) & 0xFFFFFFFF) << 32 | crc32(data.data)


def find_runs(slots: np.ndarray) -> list[tuple[int, int]]:
    """Returns the runs of consecutive slots, as pairs of a start and a stop in the array."""
    if not len(slots):
        return []
    breaks = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
    return list(itertools.pairwise([0, *breaks.tolist(), len(slots)]))


def is_zero(rows: np.ndarray) -> bool:
    """Returns True if all bytes are 0; the first 4096 mostly show that they are not."""
    flat = rows.reshape(-1)
    return not flat[:4096].any() and not flat[4096:].any()


def allocate_aligned(shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
    """Returns an array, aligned so that XLA takes it without a copy; its values are undefined."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def _map_rows(file: int, rows: int, width: int) -> np.ndarray:
    """Maps a file, and returns its rows, uint8 `[rows, width]`, which change as the file does."""
    if not width * rows:
        return np.zeros((rows, width), np.uint8)
    size = rows * width
    address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {size} bytes: {os.strerror(code)}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    # Not at exit: other threads may still read then, and the system unmaps all anyway.
    weakref.finalize(memory, _libc().munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8).reshape(rows, width)


@functools.cache
def _libc() -> Any:
    """Returns the system's C library: Python's own `mmap` keeps a file open for each mapping."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "sync_file_range"):
        library.sync_file_range.argtypes = [
            *(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint),
        ]
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
