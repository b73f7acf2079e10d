"""Columns of P rows, each in a raw file, and a file with the number of each row.

The row at place p of a column begins at byte p times its width. A file has the name of its leaf
(`next/observation.bin`), or that of its first leaf and how many more it has (`observation+3.bin`).
Rows are read through a mapping and written by `pwrite`, so that a full disk is an error, and
written rows do not count as memory of this process.

`.numbers` holds, for each place, the number of the row that is there, or that will be written there
next. It changes before the row does: whoever checks it after reading a row knows whether that was
the right row. The number is in the high 48 bits of a word; the low 16 bits are a check of it.
"""

import contextlib
import ctypes
import dataclasses
import errno
import functools
import itertools
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import numpy as np

from jrb._store import files
from jrb._store.errors import DamagedError
from jrb._store.files import Folder
from jrb._store.threads import share

SMALL = 1 << 17
"""A gather of fewer bytes may make another copy, which takes no time that matters."""

_SMALLEST_BLOCK, _MOST_BLOCKS = 1 << 18, 4096  # bytes of a block in all columns; blocks of a table
_ODD = np.uint64(0x9E3779B97F4A7C15)  # an odd number without a pattern, from the golden ratio
_ALIGNMENT = 64  # bytes; XLA takes memory that is aligned so without a copy
_LONGEST = 255  # bytes of the name of a file
_PIECE = 1 << 20  # bytes for a checksum that are read at a time
_NUMBERS_AT_ONCE = 1 << 14  # checked by a thread at a time; 4x as many leave its cache, 2x slower
_FIRST = 8 << 20  # bytes of a table that has no rows yet
_MOST_OPEN = 32  # files of a table that stay open


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf that every row has."""

    # Such as `next/observation`, whose parts contain no `/`, and `%25` for `%`; `.` for items that
    # are a single array.
    name: str
    kind: tuple[Any, ...]  # dtype and shape of an item, for the owner
    width: int  # its bytes in a row


@dataclasses.dataclass(frozen=True)
class Column:
    """One leaf of all rows, or several, in a file."""

    leaves: tuple[Leaf, ...]  # in the order that they have in a row
    block: int = 0  # rows of a block, the unit of checksums

    @classmethod
    def of(cls, name: str, kind: tuple[Any, ...], width: int) -> "Column":
        """Returns the column of one leaf."""
        return cls((Leaf(name, kind, width),))

    @property
    def width(self) -> int:
        return sum(leaf.width for leaf in self.leaves)

    @property
    def parts(self) -> list[slice]:
        """The bytes of each leaf in a row."""
        ends = itertools.accumulate(leaf.width for leaf in self.leaves)
        return [slice(end - leaf.width, end) for leaf, end in zip(self.leaves, ends, strict=True)]

    @property
    def file(self) -> str:
        """The file's name: the first leaf's, in which `+` is escaped, and `+` how many more."""
        first, more = self.leaves[0].name, len(self.leaves) - 1
        parts = [quote(part, safe="%", errors="surrogatepass") for part in first.split("/")]
        # No part is empty or begins with a dot: `..` would lead out of the folder.
        parts = [part.replace(".", "%2E", 1) if part[:1] == "." else part or "%" for part in parts]
        name = "items" if first == "." else "/".join(parts)
        return f"{name}+{more}.bin" if more else f"{name}.bin"

    @property
    def display_name(self) -> str:
        return ", ".join(f"leaf '{leaf.name}'" for leaf in self.leaves)


NUMBERS = ".numbers"
"""The name of the file with the numbers of rows; no leaf has this name."""
_NUMBERS = Column.of(NUMBERS, (), 8)


def folder_of(generation: int) -> str:
    """Returns the name of the folder of the table that a generation has made."""
    return f"rows-{generation:d}" if generation else "rows"  # a number: no path leads elsewhere


def files_of(columns: tuple[Column, ...]) -> list[str]:
    """Returns the names of the columns' files in the folder of the table.

    If a leaf's name is not possible for a file, or is the name of another file or folder, the file
    is named by the index of its column.
    """
    names: list[str] = []
    folders: set[str] = set()
    for number, column in enumerate(columns):
        file, parts = column.file, column.file.split("/")
        above = {"/".join(parts[:end]) for end in range(1, len(parts))}
        is_free = file not in folders and not above.union([file]).intersection(names)
        if not is_free or max(len(os.fsencode(part)) for part in parts) > _LONGEST:
            file, above = f"#{number}.bin", set()
        names.append(file)
        folders |= above
    return names


def blocked(columns: tuple[Column, ...], slots: int, room: int) -> tuple[Column, ...]:
    """Returns the columns with the size of blocks, for a table of N rows with room for P.

    A block has 256 kB in all columns, or more where there would be over 4096 blocks. It is at most
    half the spare room, so that it never has both the newest and the oldest rows of a ring.
    """
    # Large blocks make few checksums; with small ones, a commit that changes few rows is cheap.
    block = max(_SMALLEST_BLOCK // _row_width(columns), -(-slots // _MOST_BLOCKS), 1)
    if room > slots:
        block = max(1, min(block, (room - slots) // 2))
    return tuple(dataclasses.replace(column, block=block) for column in columns)


def _row_width(columns: tuple[Column, ...]) -> int:
    return max(sum(column.width for column in columns), 1)


class RowTable:
    """The files of all columns, mapped into memory.

    A process may open only 256 or 1024 files, but items may have thousands of leaves. So only the
    first `_MOST_OPEN` files stay open. Others are opened for each write, and each read of blocks;
    mappings need no open file.
    """

    rows: list[np.ndarray]

    def __init__(
        self, folder: Folder, name: str, columns: tuple[Column, ...], room: int, writable: bool
    ) -> None:
        self.columns: tuple[Column, ...] = columns
        self.room: int = room
        self._folder, self._writable = folder, writable
        self._names = [f"{name}/{file}" for file in (*files_of(columns), NUMBERS)]
        self.paths: list[str] = [folder.path_of(one) for one in self._names]
        self._open_files: dict[int, int] = {}  # by the numbers of their columns
        self._closed_files: dict[int, os.stat_result] = {}
        weakref.finalize(self, _close, self._open_files)
        self._map(room)

    def _map(self, room: int) -> None:
        """Maps all files, and keeps the first ones open."""
        mappings = []
        for number in range(-1, len(self.columns)):  # the numbers first, which are used most
            is_new = number not in self._open_files and number not in self._closed_files
            if is_new and len(self._open_files) < _MOST_OPEN:
                self._open_files[number] = self._open(number)
            with self._file(number) as file:
                if is_new and number not in self._open_files:
                    self._closed_files[number] = os.fstat(file)
                mappings.append(_mapped(file, room, self._column(number).width))
        words, *rows = mappings
        self.room, self.rows = room, rows
        self._words: np.ndarray = words.reshape(-1).view(np.uint64)

    def _column(self, number: int) -> Column:
        return self.columns[number] if number >= 0 else _NUMBERS

    def _open(self, number: int) -> int:
        size = self._column(number).width * self.room
        expected = f"{self.paths[number]}: {self._column(number).display_name}: expected {size}"
        try:
            flags = os.O_RDWR if self._writable else os.O_RDONLY
            file = self._folder.open(self._names[number], flags)
        except FileNotFoundError:
            raise DamagedError(f"{expected} bytes, found no file.") from None
        actual = os.fstat(file).st_size
        if actual < size:
            os.close(file)
            raise DamagedError(f"{expected} bytes, found {actual}.")
        return file

    def _file(self, number: int) -> contextlib.AbstractContextManager[int]:
        """Returns a context in which the file of a column is open; -1 for the numbers."""
        file = self._open_files.get(number)
        return self._reopened(number) if file is None else contextlib.nullcontext(file)

    @contextlib.contextmanager
    def _reopened(self, number: int) -> Iterator[int]:
        file = self._open(number)
        try:
            # Another file may have been put in its place, to which nothing may be written.
            first = self._closed_files.get(number)
            if first is not None and not os.path.samestat(os.fstat(file), first):
                path = self.paths[number]
                raise OSError(
                    errno.ESTALE, "expected the file that was opened, found another", path
                )
            yield file
        finally:
            os.close(file)

    # The numbers of rows.

    def numbers(self, places: np.ndarray | None = None) -> np.ndarray:
        """Returns the numbers of the rows at some places, or at all, uint64."""
        words = self._words if places is None else self._words.take(places)
        return words >> np.uint64(16)

    def newest(self) -> int:
        """Returns the largest number, which may be of a row that is still to be written."""
        return int(self._words.max(initial=0)) >> 16

    def is_after(self, number: int) -> np.ndarray:
        """Returns which places have a larger number than `number`, bool `[P]`."""
        return self._words >= np.uint64(number + 1 << 16)

    def number(self, places: np.ndarray, numbers: np.ndarray, lasting: bool) -> None:
        """Sets the numbers of the rows that will be written at places, synced if `lasting`."""
        numbers = numbers.astype(np.uint64)
        words = numbers << np.uint64(16) | _checks(places.astype(np.uint64), numbers)
        self.put(-1, places, words[:, None].view(np.uint8))
        if lasting:
            self.sync(-1)

    def check_numbers(self) -> None:
        """Raises `DamagedError` unless all numbers are what was written."""

        def check(start: int) -> None:
            # Another process may be writing: words are copied before they are checked.
            words = self._words[start : start + _NUMBERS_AT_ONCE].copy()
            numbers = words >> np.uint64(16)
            checks = _checks(np.arange(start, start + len(words), dtype=np.uint64), numbers)
            is_right = (words.astype(np.uint16) == checks.astype(np.uint16)) & (numbers != 0)
            if is_right.all():
                return
            wrong = np.flatnonzero(~is_right & (words != 0))  # 0 where there never was a row
            if len(wrong):
                raise DamagedError(
                    f"{self.paths[-1]}: leaf '.numbers': the number of place {start + wrong[0]} "
                    "was damaged."
                )

        share(check, range(0, self.room, _NUMBERS_AT_ONCE))

    # Rows.

    def take(self, number: int, places: np.ndarray, part: slice | None = None) -> np.ndarray:
        """Returns rows of a column, or a part of them, uint8 `[B, width]`, at places `[B]`."""
        rows = self.rows[number]
        if part is not None and part != slice(0, rows.shape[1]):
            return rows[places, part]
        shape = len(places), rows.shape[1]
        out = None if math.prod(shape) < SMALL else aligned(shape)
        return rows.take(places, 0, out, "clip")  # "raise" would copy them once more

    def put(self, first: int, places: np.ndarray, *columns: np.ndarray) -> None:
        """Writes rows of columns from `first` on, uint8 `[B, width]`; if it fails, only some."""
        # Places of a ring mostly follow one another: one call of the system for each run.
        spans = [(start, stop, int(places[start])) for start, stop in runs(places)]
        for number, rows in enumerate(columns, first):
            width = rows.shape[1]
            if not width:
                continue
            with self._file(number) as file:
                for start, stop, place in spans:
                    data = rows[start:stop].reshape(-1).data
                    files.write_at(file, self.paths[number], place * width, data)

    def read(self, number: int, place: int, target: np.ndarray) -> None:
        """Fills a target, uint8 `[B, width]`, with the rows of a column from a place on.

        It reads the file, as pages of a mapping count as memory of the process.
        """
        if target.size:
            with self._file(number) as file:
                data = target.reshape(-1).data
                files.read_at(file, self.paths[number], place * target.shape[1], data)

    def checksum(self, number: int, block: int, is_named: np.ndarray) -> int:
        """Returns the CRC-32 of the rows of a block that `is_named`, bool `[P]`, selects."""
        column, checksum = self.columns[number], 0
        places = range(block * column.block, min((block + 1) * column.block, self.room))
        step = max(1, _PIECE // max(column.width, 1))
        buffer = np.empty((min(step, len(places)), column.width), np.uint8)
        for start in places[::step]:
            rows = buffer[: places.stop - start]
            self.read(number, start, rows)
            checksum = checksum_of(rows, is_named[start : start + len(rows)], checksum)
        return checksum

    def check(self, number: int, block: int, expected: int, checksum: int) -> None:
        """Raises `DamagedError` unless the rows of a block are what was written."""
        column = self.columns[number]
        if checksum != expected:
            raise DamagedError(
                f"{self.paths[number]}: {column.display_name}, block {block}: expected the "
                f"checksum {expected:08x}, found {checksum:08x}: the bytes from "
                f"{block * column.block * column.width} on were damaged."
            )

    def sync(self, number: int) -> None:
        """Makes all writes to a column durable; -1 for the numbers."""
        with self._file(number) as file:
            files.sync(file, self.paths[number])

    def grow(self, room: int, reserve: bool) -> None:
        for number in (*range(len(self.columns)), -1):
            path, size = self.paths[number], room * self._column(number).width
            with self._file(number) as file:
                if os.fstat(file).st_size < size:  # else its final size was reserved at once
                    files.resize(file, path, size, reserve or number < 0)
                    files.sync(file, path)
        self._map(room)


def checksum_of(rows: np.ndarray, is_named: np.ndarray, checksum: int = 0) -> int:
    """Returns the CRC-32 of the rows that `is_named` selects, continued from `checksum`."""
    rows = rows if is_named.all() else rows[is_named]
    return zlib.crc32(rows.reshape(-1).data, checksum) if rows.size else checksum


def _checks(places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the 16-bit checks of numbers at places, all as uint64; overwrites `places`."""
    places *= _ODD
    places += numbers
    places *= _ODD
    places >>= np.uint64(48)
    return places


def _close(open_files: dict[int, int]) -> None:
    for file in open_files.values():
        os.close(file)


def first_room(columns: tuple[Column, ...], most: int) -> int:
    """Returns the initial room, in rows, of a table that grows up to P as it is filled.

    All arrays with an entry for each place grow with it, so that a table takes memory and disk only
    for rows that were written, and not for those that could be.
    """
    return min(most, max(1, _FIRST // (_NUMBERS.width + _row_width(columns))))


def make(folder: Folder, name: str, columns: tuple[Column, ...], room: int, reserve: bool) -> None:
    """Makes the files of a table, full of zeros."""
    if reserve:
        folder.check_free(room * sum(column.width for column in (_NUMBERS, *columns)))
    try:
        folder.make(name)
        paths = [f"{name}/{one}" for one in (NUMBERS, *files_of(columns))]
        folders = dict.fromkeys(map(os.path.dirname, paths))
        for inner in folders:
            folder.make(inner)
        for file, column in zip(paths, (_NUMBERS, *columns), strict=True):
            descriptor = folder.create(file)
            try:
                path, size = folder.path_of(file), column.width * room
                files.resize(descriptor, path, size, reserve or column is _NUMBERS)
                files.sync(descriptor, path)
            finally:
                os.close(descriptor)
            if column is _NUMBERS:  # it identifies the folder, so it is durable first
                folder.sync(name)
        for inner in folders:
            folder.sync(inner)
    except OSError:
        folder.clear(name, sign=NUMBERS)
        raise


def _mapped(file: int, room: int, width: int) -> np.ndarray:
    """Maps a file, and returns its rows, uint8 `[P, width]`, which change as the file does."""
    if not width * room:
        return np.zeros((room, width), np.uint8)
    size = room * width
    address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {size} bytes: {os.strerror(code)}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    # Not at exit: other threads may still read then, and the system unmaps all anyway.
    weakref.finalize(memory, _libc().munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8).reshape(room, width)


@functools.cache
def _libc() -> Any:
    """Returns the system's C library: Python's own `mmap` keeps a file open for each mapping."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Returns the runs of consecutive places, as pairs of a start and a stop in the array."""
    if not len(places):
        return []
    breaks = (places[1:] - places[:-1] != 1).nonzero()[0] + 1
    return list(itertools.pairwise([0, *breaks.tolist(), len(places)]))


def is_zero(rows: np.ndarray) -> bool:
    """Returns True if all bytes are 0; the first 4096 mostly show that they are not."""
    flat = rows.reshape(-1)
    return not flat[:4096].any() and not flat[4096:].any()


def aligned(
    shape: tuple[int, ...],
    dtype: Any = np.uint8,
    make: Callable[[int, Any], np.ndarray] = np.empty,
) -> np.ndarray:
    """Returns an array that is aligned so that XLA takes it without a copy, made by `make`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = make(size + _ALIGNMENT, np.uint8)
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)
