"""Columns of P rows, each a raw file; and a file of the numbers of rows.

The row at place p of a column begins at byte p times its width. A file is called like its leaf
(`next/observation.bin`), or like the first one of those in it (`observation+3.bin`). Rows are read
through a mapping and written by `pwrite`, so that a full disk is an error and what was written is
no memory of this process. `.numbers` holds, for each place, the number of the row that lies there,
or that will be written there next: it changes before the row does, and so tells whoever read a row
whether that was still the one it wanted. The number is in the high 48 bits of a word; the low 16
bits are a check of it.
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

SMALLEST, MOST = 1 << 18, 4096
SMALL = 1 << 17
"""Bytes of a gather below which another copy does not matter."""

_ODD = np.uint64(0x9E3779B97F4A7C15)  # of no pattern: the golden ratio's
_BITS, _CHECK = np.uint64(16), np.uint64(48)  # of a word: those of its check, and of the rest
_ALIGNMENT = 64  # bytes; where XLA takes memory without a copy
_FEW = 4096  # bytes
_LONGEST = 255  # bytes of a name
_PIECE = 1 << 20  # bytes that are looked at at a time
_NUMBERS_AT_ONCE = 1 << 16  # by one thread, in its cache
_FIRST = 8 << 20  # bytes of a table that has no rows yet
_MOST_OPEN = 32  # files of a table
_FAILED = ctypes.c_void_p(-1).value


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of all rows.

    Attributes:
        name: such as `next/observation`, in which a part has no `/`, and `%` stands for itself as
            `%25`; `.` for items that are one array.
        kind: dtype and shape of an item, for the owner.
        width: bytes of it in a row.
    """

    name: str
    kind: tuple[Any, ...]
    width: int


@dataclasses.dataclass(frozen=True)
class Column:
    """A file of all rows, of one leaf or of several that lie side by side in it.

    Attributes:
        leaves: in the order in which they lie in a row.
        block: rows of a block, the unit of checksums.
    """

    leaves: tuple[Leaf, ...]
    block: int = 0

    @classmethod
    def of(cls, name: str, kind: tuple, width: int) -> "Column":
        """That of one leaf."""
        return cls((Leaf(name, kind, width),))

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return sum(leaf.width for leaf in self.leaves)

    @property
    def parts(self) -> list[slice]:
        """The bytes of each leaf in a row."""
        ends = itertools.accumulate(leaf.width for leaf in self.leaves)
        return [slice(end - leaf.width, end) for leaf, end in zip(self.leaves, ends, strict=True)]

    @property
    def file(self) -> str:
        """The file's name: that of the first leaf, and how many more. A `+` is in no leaf's."""
        first, more = self.leaves[0].name, len(self.leaves) - 1
        parts = [quote(part, safe="%", errors="surrogatepass") for part in first.split("/")]
        name = "items" if first == "." else "/".join(map(_visible, parts))
        return f"{name}+{more}.bin" if more else f"{name}.bin"

    @property
    def told(self) -> str:
        """Its leaves, for messages."""
        return ", ".join(f"leaf '{leaf.name}'" for leaf in self.leaves)


def files_of(columns: tuple[Column, ...]) -> list[str]:
    """The names of their files, in the folder of the table.

    Leaves may have names that are one as files, or that a file cannot have: these files are called
    like the number of their column.
    """
    found: list[str] = []
    folders: set[str] = set()
    for number, column in enumerate(columns):
        file, parts = column.file, column.file.split("/")
        above = {"/".join(parts[:end]) for end in range(1, len(parts))}
        is_free = file not in folders and not above.union([file]).intersection(found)
        if not is_free or max(len(os.fsencode(part)) for part in parts) > _LONGEST:
            file, above = f"#{number}.bin", set()
        found.append(file)
        folders |= above
    return found


def blocked(columns: tuple[Column, ...], slots: int, room: int) -> tuple[Column, ...]:
    """The columns with blocks for a table of N rows with room for P.

    They are of 256 kB in all, or there are 4096 of them; and so small that none holds the newest
    rows of a ring and the oldest ones too, between which nothing lies but the rest of the room.
    """
    width = max(sum(column.width for column in columns), 1)
    block = max(SMALLEST // width, -(-slots // MOST))
    block = max(1, min(block, (room - slots) // 2)) if room > slots else max(1, block)
    return tuple(dataclasses.replace(column, block=block) for column in columns)


def _visible(part: str) -> str:
    """Never empty, and never `..`."""
    return "%2E" + part[1:] if part.startswith(".") else part or "%"


NUMBERS = ".numbers"
"""The name of the file of the numbers, which no leaf has."""
_NUMBERS = Column.of(NUMBERS, (), 8)


class Table:
    """The files of all columns, open as long as they are few.

    A process may open 256 or 1024 files, and items may have thousands of leaves. Of many columns
    all but the first files are opened each time they are written to, or read by blocks; mappings
    need no open file.

    Args:
        folder: the store's.
        name: of the table's folder in it.
        columns: of the rows.
        room: P.
        writable: whether rows will be written.

    Raises:
        DamagedError: a file is missing, or too short.
    """

    columns: tuple[Column, ...]
    writable: bool
    paths: list[str]
    room: int
    rows: list[np.ndarray]

    def __init__(
        self, folder: Folder, name: str, columns: tuple[Column, ...], room: int, writable: bool
    ) -> None:
        self.columns, self.writable = columns, writable
        self._folder, self.room = folder, room
        self._names = [f"{name}/{file}" for file in (*files_of(columns), NUMBERS)]
        self.paths = [folder.path_of(one) for one in self._names]
        self._kept: dict[int, int] = {}  # open files by the numbers of their columns
        self._known: dict[int, os.stat_result] = {}  # the others
        weakref.finalize(self, _close, self._kept)
        for number in range(-1, len(columns)):  # the numbers first, which are used most
            file = self._open(number)
            if len(self._kept) < _MOST_OPEN:
                self._kept[number] = file
            else:
                self._known[number] = os.fstat(file)
                os.close(file)
        self._map(room)

    def _map(self, room: int) -> None:
        mapped = []
        for number, column in enumerate(self.columns):
            with self._opened(number) as file:
                mapped.append(_mapped(file, room, column.width))
        words = _mapped(self._kept[-1], room, _NUMBERS.width).reshape(-1).view(np.uint64)
        self.room, self.rows, self._words = room, mapped, words

    def _open(self, number: int) -> int:
        column = self.columns[number] if number >= 0 else _NUMBERS
        how = os.O_RDWR if self.writable else os.O_RDONLY
        return _open(self._folder, self._names[number], column, self.room, how)

    def _opened(self, number: int) -> contextlib.AbstractContextManager[int]:
        """A time during which the file of a column is open; -1 for the numbers."""
        kept = self._kept.get(number)
        return self._opened_again(number) if kept is None else contextlib.nullcontext(kept)

    @contextlib.contextmanager
    def _opened_again(self, number: int) -> Iterator[int]:
        file = self._open(number)
        try:
            if not os.path.samestat(os.fstat(file), self._known[number]):
                path = self.paths[number]
                raise OSError(
                    errno.ESTALE, "expected the file that was opened, found another", path
                )
            yield file
        finally:
            os.close(file)

    def newer(self, places: np.ndarray, number: int) -> np.ndarray:
        """Whether the row at each place has a higher number than this one."""
        return self._words[places] > np.uint64(number << 16 | 0xFFFF)

    def places_after(self, number: int) -> np.ndarray:
        """The places of rows with higher numbers than this one."""
        if self.highest() <= number:  # as mostly, and quicker found
            return np.zeros(0, np.int64)
        return np.flatnonzero(self._words > np.uint64(number << 16 | 0xFFFF))

    def highest(self) -> int:
        """The highest number of all."""
        return int(self._words.max(initial=0)) >> 16

    def newest(self, places: np.ndarray) -> int:
        """That one of some places at which the row with the highest number is; -1 if of none."""
        return int(places[self._words[places].argmax()]) if len(places) else -1

    def newest_number(self, places: np.ndarray) -> int:
        """The highest number of the rows at some places; 0 if of none."""
        if not len(places):
            return 0
        words = self._words.take(places)
        return words.item(words.argmax()) >> 16  # `max` of an array takes 3 to 6 us more

    def check_numbers(self) -> None:
        """Raises `DamagedError` unless all numbers are what was written."""
        share(self._check_some, range(0, self.room, _NUMBERS_AT_ONCE))

    def _check_some(self, start: int) -> None:
        """Those from this place on."""
        words = self._words[start : start + _NUMBERS_AT_ONCE]
        first = int(words[0]) >> 16
        if first and np.array_equal(words, _in_line(start, first, len(words))):
            return  # as mostly, and quicker found
        words = words.copy()  # another process may be writing: each is to be looked at once
        places = np.arange(start, start + len(words), dtype=np.uint64)
        numbers = words >> _BITS
        right = words.astype(np.uint16) == _checks(places, numbers).astype(np.uint16)
        right &= numbers != 0
        wrong = np.flatnonzero(~(right | (words == 0)))
        if len(wrong):
            raise DamagedError(
                f"{self.paths[-1]}: leaf '.numbers': the number of place {start + wrong[0]} was "
                "damaged."
            )

    def take(self, number: int, places: np.ndarray, part: slice | None = None) -> np.ndarray:
        """Rows of a column, or a part of them, uint8 `[B, width]`, at places `[B]`, all there."""
        whole = self.rows[number]
        if part is not None and part != slice(0, whole.shape[1]):
            return whole[places, part]
        shape = len(places), whole.shape[1]
        out = None if math.prod(shape) < SMALL else aligned(shape)
        return whole.take(places, 0, out, "clip")  # "raise" would copy them once more

    def put(self, first: int, places: np.ndarray, *columns: np.ndarray) -> None:
        """Writes rows of some columns that follow one another, uint8 `[B, width]` each.

        Args:
            first: the number of the first column.
            places: `[B]`, where they are written.
            columns: the rows of each.

        Raises:
            OSError: the disk is full or broken; some of the rows may be written.
        """
        where = [(start, stop, int(places[start])) for start, stop in runs(places)]
        for number, rows in enumerate(columns, first):
            width = rows.shape[1]
            if not width:
                continue
            with self._opened(number) as file:
                for start, stop, place in where:
                    data = rows[start:stop].reshape(-1).data
                    files.write_at(file, self.paths[number], place * width, data)

    def number(self, places: np.ndarray, numbers: np.ndarray, lasting: bool) -> None:
        """Says which rows will be written at places, int64 `[B]`; on the disk too if `lasting`."""
        self.put(-1, places, _words(places, numbers.astype(np.uint64))[:, None].view(np.uint8))
        if lasting:
            self.sync(-1)

    def again(self, number: int, places: np.ndarray) -> None:
        """Writes rows once more, as they are, so that the next sync takes them to the disk."""
        step = max(1, (4 << 20) // max(self.columns[number].width, 1))
        for start in range(0, len(places), step):
            part = places[start : start + step]
            self.put(number, part, self.take(number, part))

    def sync(self, number: int) -> None:
        """What was written to a column is on the disk afterwards; -1 for the numbers."""
        with self._opened(number) as file:
            files.sync(file, self.paths[number])

    def read_blocks(self, number: int, stretch: "Stretch", target: np.ndarray) -> list[int]:
        """Reads rows of a column to where they belong in a target, uint8 `[N, width]`.

        Returns:
            The checksum of each block.
        """
        width = target.shape[1]
        direct = isinstance(stretch.rows, slice) and target.flags.c_contiguous
        inner = target[stretch.rows] if direct else np.empty((stretch.count, width), np.uint8)
        for start, stop, place in stretch.spans:
            self._read(number, place, inner[start:stop])
        if not direct:
            target[stretch.rows] = inner
        whole = inner.reshape(-1).data
        edges = [edge * width for edge in stretch.edges]
        return [zlib.crc32(whole[a:b]) for a, b in itertools.pairwise(edges)]

    def _read(self, number: int, place: int, target: np.ndarray) -> None:
        if target.size:
            offset = place * target.shape[1]
            view = target.reshape(-1).data
            with self._opened(number) as file:
                files.read_at(file, self.paths[number], offset, view)

    def numbers_at(self, places: np.ndarray) -> np.ndarray:
        """The numbers of the rows at places, uint64."""
        return self._words[places] >> np.uint64(16)

    def grow(self, room: int, reserve: bool) -> None:
        """Makes room for so many rows.

        Raises:
            OSError: there is none; then nothing has changed.
        """
        for number, column in [*enumerate(self.columns), (-1, _NUMBERS)]:
            path, size = self.paths[number], room * column.width
            with self._opened(number) as file:
                if os.fstat(file).st_size < size:  # else all was set aside when it was made
                    files.resize(file, path, size, reserve or column is _NUMBERS)
                    files.sync(file, path)
        self._map(room)

    def sum_of(self, number: int, block: int, named: np.ndarray) -> int:
        """The checksum, CRC-32, of those rows of a block that are named, bool `[P]`."""
        size = self.columns[number].block
        part = slice(block * size, (block + 1) * size)
        rows = self.rows[number][part]
        return _sum(rows if named[part].all() else rows[named[part]])

    def check(self, number: int, block: int, named: np.ndarray, expected: int) -> str:
        """What is wrong with a block of a column; nothing if its rows have that checksum."""
        found = self._sum_read(number, block, named)
        return "" if found == expected else self.damage(number, block, expected, found)

    def _sum_read(self, number: int, block: int, named: np.ndarray) -> int:
        """The same as `sum_of`, by reading: what is mapped counts as memory of the process."""
        column, found = self.columns[number], 0
        places = range(block * column.block, min((block + 1) * column.block, self.room))
        step = max(1, _PIECE // max(column.width, 1))
        buffer = np.empty((min(step, len(places)), column.width), np.uint8)
        for start in places[::step]:
            rows = buffer[: places.stop - start]
            self._read(number, start, rows)
            mask = named[start : start + len(rows)]
            rows = rows if mask.all() else rows[mask]
            found = zlib.crc32(rows.reshape(-1).data, found) if rows.size else found
        return found

    def damage(self, number: int, block: int, expected: int, found: int) -> str:
        """What is said of a block whose rows are not what was written."""
        column = self.columns[number]
        return (
            f"{self.paths[number]}: {column.told}, block {block}: expected the checksum "
            f"{expected:08x}, found {found:08x}: the bytes from "
            f"{block * column.block * column.width} on were damaged."
        )


class Stretch:
    """Rows of blocks that follow one another, and where they go.

    Args:
        blocks: their numbers.
        size: how many rows a block has.
        runs: int64 `[K, 3]`, of the rows that lie there: where in a target the first one goes, its
            place, and how many follow both; by their places.

    Attributes:
        count: how many rows.
        rows: where they go, int64 `[count]`; a slice where they follow one another.
        spans: for each run, which of the rows are in it, and the place of the first.
        edges: how many of the rows are in the blocks before each one, and in all.
    """

    rows: np.ndarray | slice
    edges: list[int]

    def __init__(self, blocks: range, size: int, runs: np.ndarray) -> None:
        first, place, length = np.concatenate([[[0, 0, 0]], runs]).T  # before the first one
        ends = np.cumsum(length)
        starts = ends - length
        self.count: int = int(ends[-1])
        spans = zip(starts.tolist(), ends.tolist(), place.tolist(), strict=True)
        self.spans: list[tuple[int, int, int]] = list(spans)[1:]
        if len(runs) == 1:
            self.rows = slice(int(first[1]), int(first[1]) + self.count)
        else:
            self.rows = np.arange(self.count) + np.repeat(first - starts, length)
        bounds = np.arange(blocks.start, blocks.stop + 1) * size
        run = np.searchsorted(place, bounds, side="right") - 1
        self.edges = (starts[run] + np.clip(bounds - place[run], 0, length[run])).tolist()


def _sum(rows: np.ndarray) -> int:
    return zlib.crc32(rows.reshape(-1).data) if rows.size else 0


def _words(places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers with their checks, uint64; 0 for a place that never had one."""
    words = numbers << _BITS | _checks(places.astype(np.uint64), numbers)
    words[numbers == 0] = 0
    return words


def _checks(places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The checks of numbers, of 16 bits; all uint64, and the places are written over."""
    places *= _ODD
    places += numbers
    places *= _ODD
    places >>= _CHECK
    return places


def _in_line(place: int, number: int, count: int) -> np.ndarray:
    """The same as `_words`, for places and numbers that both follow one another."""
    steps, checks = _steps()
    odd, all_bits = int(_ODD), (1 << 64) - 1
    words = checks[:count] + np.uint64((place * odd + number) * odd & all_bits)
    words >>= _CHECK
    words += steps[:count]
    words += np.uint64(number << 16 & all_bits)
    return words


@functools.cache
def _steps() -> tuple[np.ndarray, np.ndarray]:
    """What words grow by from place to place: the number, and what the check is the top of."""
    steps = np.arange(_NUMBERS_AT_ONCE, dtype=np.uint64)
    return steps << _BITS, steps * _ODD * (_ODD + np.uint64(1))


def _close(kept: dict[int, int]) -> None:
    for file in kept.values():
        os.close(file)


def first_room(columns: tuple[Column, ...], most: int) -> int:
    """Returns for how many rows a table of at most P has room at first; it grows as it is filled.

    All that has an entry for each place grows with it, so that a table takes memory and disk for
    what is written, and not for what could be.
    """
    width = _NUMBERS.width + sum(column.width for column in columns)
    return min(most, max(1, _FIRST // width))


def make(folder: Folder, name: str, columns: tuple[Column, ...], room: int, reserve: bool) -> None:
    """Makes the files of a table, full of zeros.

    Raises:
        OSError: there is no room for them; then there are none.
    """
    if reserve:
        folder.check_free(room * (_NUMBERS.width + sum(column.width for column in columns)))
    try:
        folder.make(name)
        paths = [f"{name}/{one}" for one in (NUMBERS, *files_of(columns))]
        folders = dict.fromkeys(map(os.path.dirname, paths))
        for inner in folders:
            folder.make(inner)
        for file, column in zip(paths, (_NUMBERS, *columns), strict=True):
            opened = folder.create(file)
            try:
                size = column.width * room
                files.resize(opened, folder.path_of(file), size, reserve or column is _NUMBERS)
                files.sync(opened, folder.path_of(file))
            finally:
                os.close(opened)
            if column is _NUMBERS:  # by which the folder can be told: before there is another file
                folder.sync(name)
        for inner in folders:
            folder.sync(inner)
    except OSError:
        folder.clear(name, sign=NUMBERS)
        raise


def _open(folder: Folder, name: str, column: Column, room: int, how: int) -> int:
    wanted = f"{folder.path_of(name)}: {column.told}: expected {column.width * room} bytes"
    try:
        file = folder.open(name, how)
    except FileNotFoundError:
        raise DamagedError(f"{wanted}, found no file.") from None
    found = os.fstat(file).st_size
    if found < column.width * room:
        os.close(file)
        raise DamagedError(f"{wanted}, found {found}.")
    return file


def _mapped(file: int, room: int, width: int) -> np.ndarray:
    """The rows, uint8 `[P, width]`, as they are in the file at any time."""
    if not width * room:
        return np.zeros((room, width), np.uint8)
    size = room * width
    address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {size} bytes: {os.strerror(code)}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8).reshape(room, width)


@functools.cache
def _libc() -> Any:
    """The system's `mmap`: that of Python keeps a file of its own open for each mapping."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Where places follow one another: pairs of a start and a stop in the array."""
    if not len(places):
        return []
    breaks = (places[1:] - places[:-1] != 1).nonzero()[0] + 1
    edges = [0, *breaks.tolist(), len(places)]
    return list(itertools.pairwise(edges))


def is_zero(rows: np.ndarray) -> bool:
    """Whether all bytes are 0; a look at the first ones mostly tells that they are not."""
    flat = rows.reshape(-1)
    return not flat[:_FEW].any() and not flat[_FEW:].any()


def aligned(
    shape: tuple[int, ...],
    dtype: Any = np.uint8,
    make: Callable[[int, Any], np.ndarray] = np.empty,
) -> np.ndarray:
    """An array where XLA takes it without a copy, empty or as another function makes it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = make(size + _ALIGNMENT, np.uint8)
    first = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)
