"""Reads `.npz` archives of other programs, one array at a time, as `np.load` does. T rows."""

import contextlib
import functools
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrb.authoring import MAX_EXPANSION, ExpansionLimit
from jrb.datasets.reading.names import check, check_names, explain_damage, has_signature
from jrb.datasets.reading.tabular import Column, DerivedColumn, sort_arrays

is_npz: Callable[[object], bool] = functools.partial(has_signature, signature=b"PK\x03\x04")
"""Returns True if a path is a file that begins as a zip archive."""
# Errors of zipfile, zlib and NumPy on damage; `RuntimeError` includes `NotImplementedError`.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)
_explain_damage = functools.partial(explain_damage, expected="a whole .npz file", errors=_DAMAGE)


@contextlib.contextmanager
def open_file(path: str, max_expansion: float = MAX_EXPANSION) -> Iterator[dict[str, Column]]:
    """Opens an archive; yields its arrays by name (`a/b`), None for members that are no arrays.

    Raises if it is cut short, damaged or encrypted, or declares more than `max_expansion` times
    the bytes that it stores.
    """
    with open(path, "rb") as file, contextlib.ExitStack() as stack:
        with _explain_damage(path):
            archive = stack.enter_context(zipfile.ZipFile(file))
            members = archive.infolist()
            # zipfile accepts a directory with fewer members than the archive's end record counts.
            file.seek(-12 - len(archive.comment), os.SEEK_END)
            num_declared = int.from_bytes(file.read(2), "little")
            is_whole = num_declared in (len(members), 0xFFFF)
            check(is_whole, "directory", f"{num_declared} members", len(members))
        # Name the arrays as `np.load` does.
        names = [info.filename.removesuffix(".npy") for info in members]
        check_names(path, names)
        # Checked before decompression: a kilobyte can hold gigabytes of zeros.
        ExpansionLimit(path, [path], max_expansion).add(sum(each.file_size for each in members))
        arrays = [_open_array(f"{path}: '{info.filename}'", archive, info) for info in members]
        yield dict(zip(names, arrays, strict=True))


def numeric_names(path: Any) -> set[str]:
    """Returns the names of the numeric arrays in a file; none if it is not an intact archive."""
    try:
        with open_file(path, math.inf) if is_npz(path) else contextlib.nullcontext({}) as arrays:
            return {*sort_arrays(arrays)[0]}
    except (ValueError, OSError):
        return set()


def _open_array(
    where: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> DerivedColumn | None:
    """Reads an array's header, and all of it at the first access; returns None if it is none."""
    with _explain_damage(where), archive.open(info) as file:
        shape, dtype = (), np.dtype(object)
        if info.filename.endswith(".npy"):
            # Version 3 differs from 2 in names of fields only; arrays with fields are left out.
            is_first = np.lib.format.read_magic(file) == (1, 0)
            read = np.lib.format.read_array_header_1_0
            read = read if is_first else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        if dtype.hasobject:
            # It may be a damaged array, so it is read to the end, where zipfile checks CRC-32.
            while file.read(1 << 20):
                pass
            return None
        # The header must fit the size of the member, before an array of its shape is allocated.
        size, nbytes = info.file_size - file.tell(), math.prod(shape) * dtype.itemsize
        check(size == nbytes, "data", f"{nbytes} bytes for shape {shape} of {dtype}", size)

    @functools.cache
    def read_whole() -> np.ndarray:
        # The sizes fit, so this reads to the end of the member, where zipfile checks its CRC-32.
        with _explain_damage(where), archive.open(info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return DerivedColumn(shape, dtype, lambda start, stop: np.array(read_whole()[start:stop]))
