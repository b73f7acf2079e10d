"""Items written again, in their order, to another buffer."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrb.state import Buffer

_PIECE = 8 << 20  # bytes


def writable(buffer: Buffer) -> Any:
    """The same buffer, for filling one that is only read."""
    return dataclasses.replace(buffer, writer=buffer.writer.writable())


def replaying(buffer: Buffer) -> Any:
    """The buffer to write items with that another one held, in their order.

    Items without an order of time are written one by one.
    """
    if buffer.writer.is_chronological:
        return writable(buffer)
    return dataclasses.replace(buffer, num_envs=None)


def pieces(order: np.ndarray, row_bytes: int) -> Iterator[np.ndarray]:
    """Rows in parts that take a few megabytes each."""
    step = max(1, _PIECE // max(row_bytes, 1))
    for start in range(0, len(order), step):
        yield order[start : start + step]
