"""A file for HDF5, which takes an error of the disk badly: it crashes, or says nothing."""

import io
import os
from typing import Any

from jrb._store import files
from jrb.types import Item


class Shelter(io.RawIOBase):
    """An open file whose writes never fail; `check` raises what went wrong.

    Args:
        file: opened to be read and written.
        path: of it.
    """

    def __init__(self, file: int, path: str) -> None:
        self._file, self._path, self._at = file, path, 0
        self._error: OSError | None = None

    def check(self) -> None:
        """Raises what went wrong first."""
        if self._error is not None:
            raise self._error

    def write(self, data: Item) -> int:
        """Writes all, where nothing has gone wrong yet."""
        size = memoryview(data).nbytes
        try:
            if self._error is None:
                files.write_at(self._file, self._path, self._at, memoryview(data))
        except OSError as error:
            self._error = error
        self._at += size
        return size

    def readinto(self, target: Any) -> int:
        """Reads; zeros where nothing is, as after a write that failed."""
        view = memoryview(target).cast("B")
        view[:] = bytes(len(view))
        os.preadv(self._file, [view], self._at)
        self._at += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Goes to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: os.fstat(self._file).st_size}
        self._at = start[whence] + offset
        return self._at

    def tell(self) -> int:
        """The place."""
        return self._at

    def truncate(self, size: int | None = None) -> int:
        """Gives the file a size."""
        size = self._at if size is None else size
        try:
            files.resize(self._file, self._path, size, reserve=False)
        except OSError as error:
            self._error = self._error or error
        return size

    def readable(self) -> bool:
        """Yes."""
        return True

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True
