"""Files that declare many times more data than they store are refused before memory is allocated.

A kilobyte of a compressed or sparse file can declare gigabytes of zeros.
"""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

MAX_EXPANSION = 100.0
_ALWAYS = 32 << 20  # bytes that are taken whatever the ratio


class Limit:
    """The most bytes that arrays may take in memory, as a multiple of the bytes of their files.

    Args:
        source: the dataset, for the message.
        paths: its files.
        max_expansion: the multiple.
    """

    def __init__(self, source: object, paths: Iterable[str], max_expansion: float) -> None:
        self._source, self._max_expansion = source, max_expansion
        self._stored = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
        self._declared = 0

    def add(self, declared: int) -> None:
        """Counts the bytes of further arrays, before any of them is read.

        Raises:
            ValueError: it is too much; the message has both numbers and the argument that raises
                the limit.
        """
        self._declared += declared
        most = max(self._max_expansion * self._stored, _ALWAYS)
        if self._declared > most:
            ratio = math.ceil(self._declared / max(self._stored, 1))
            raise ValueError(
                f"{self._source}: expected arrays of at most {self._max_expansion:g} times the "
                f"{self._stored} bytes of the files, got {self._declared} declared bytes. The "
                "files may be damaged. If the data are right, raise the limit: "
                f"max_expansion={ratio}."
            )


def nbytes(columns: Mapping[str, Any]) -> int:
    """Returns the bytes that arrays take by their shapes and dtypes."""
    return sum(
        math.prod(map(int, column.shape)) * np.dtype(column.dtype).itemsize
        for column in columns.values()
    )
