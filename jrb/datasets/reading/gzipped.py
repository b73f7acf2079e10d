"""Reads `.npy` arrays in gzip files a part at a time, decompressing on the way. N rows."""

import contextlib
import functools
import gzip
import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrb.datasets.reading.names import check, explain_damage

_DAMAGE = (OSError, EOFError, zlib.error, ValueError)
_explain_damage = functools.partial(
    explain_damage, expected="a whole gzipped .npy array", errors=_DAMAGE
)


class GzippedColumn:
    """The rows of the arrays in several files, one after the other; one file is open at a time.

    Only the rows that are read are in memory. To go on in a file, all between is decompressed; to
    go back, all from its beginning on. A single number counts as one row. `starts` has the first
    row of each file, and N.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths, self._number, self._begin = paths, -1, 0  # of the open file, its first row
        self._file: Any = None
        # Read the header of each file; all must have rows like those of the first.
        with contextlib.closing(self):
            headers = [self._open(number) for number in range(len(paths))]
        self.dtype: np.dtype = headers[0][0]
        _, *row = headers[0][1]
        for path, (dtype, shape) in zip(paths, headers, strict=True):
            is_same = dtype == self.dtype and [*shape[1:]] == row
            check(is_same, path, f"rows as in {paths[0]}, {self.dtype}{row}", f"{dtype}{shape[1:]}")
        self.starts: list[int] = [0, *itertools.accumulate(shape[0] for _, shape in headers)]
        self.shape: tuple[int, ...] = (self.starts[-1], *row)
        self._last = -1, np.empty((0, *row), self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        # Blocks of steps overlap by a row, which has the next observation of the row before. It is
        # kept, as the file would have to be decompressed again to go back.
        parts = [self._last[1] if start == self._last[0] < stop else self._last[1][:0]]
        start += len(parts[0])
        # Read the rows that each file has of these.
        for number, (begin, end) in enumerate(itertools.pairwise(self.starts)):
            if max(start, begin) < min(stop, end):
                parts.append(self._read(number, max(start, begin) - begin, min(stop, end) - begin))
        block = np.concatenate(parts)
        self._last = (stop - 1, block[-1:].copy()) if len(block) else self._last
        return block

    def close(self) -> None:
        """Closes the open file."""
        if self._file is not None:
            self._file.close()
        self._number, self._file = -1, None

    def _open(self, number: int) -> tuple[np.dtype, tuple[int, ...]]:
        """Opens a file in place of the open one; returns dtype and shape of its array."""
        self.close()
        with _explain_damage(self._paths[number]):
            self._file, self._number = gzip.open(self._paths[number]), number  # noqa: SIM115
            np.lib.format.read_magic(self._file)
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(self._file)
            # Rows of an array in Fortran's order are not together in the file.
            is_plain = not dtype.hasobject and (not is_fortran or len(shape) < 2)
            got = "pickled objects" if dtype.hasobject else "columns one after the other"
            check(is_plain, "data", "numbers, row by row", got)
            self._begin = self._file.tell()
        return dtype, shape or (1,)

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Reads rows of one file; raises `ValueError` if it is damaged."""
        if number != self._number:
            self._open(number)
        # Seek in decompressed bytes: gzip reads on to that place, or from the beginning to go back.
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        is_end = stop == self.starts[number + 1] - self.starts[number]
        with _explain_damage(self._paths[number]):
            self._file.seek(self._begin + start * width)
            data = self._file.read((stop - start) * width)
            # At the end of a file, gzip compares its CRC-32 with all that was read.
            is_whole = len(data) == (stop - start) * width and not (is_end and self._file.read(1))
            check(is_whole, "data", f"{stop} rows", "fewer or more")
        if is_end:
            self.close()
        return np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])
