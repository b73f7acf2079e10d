"""A dataset in the files of a storage: made once, gone on with after a crash, opened at once.

While it is made, what is there is committed now and then, with how far it is. Until it is whole its
description has a writer that writes; then one that is only read.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from jrb import checkpoint
from jrb._store.store import writing
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import matching
from jrb.datasets.copying.filling import Streams
from jrb.datasets.copying.nonfinite_rewards import NotFinite
from jrb.datasets.copying.progress import track
from jrb.loops import Jitted
from jrb.migrate import with_parts, writable
from jrb.samplers import Uniform
from jrb.state import BufferState
from jrb.units import Transition

_BETWEEN = 512 << 20  # bytes between two commits
_MARK = {"rows": 0, "of": np.zeros(32, np.uint8)}

_log = logging.getLogger("jrb.datasets")


def kept(
    flow: Streams, buffer: ReplayBuffer, path: str, told: bytes, show: bool | None
) -> BufferState:
    """The state of a buffer whose rows are, or will be, in files at a path.

    Args:
        flow: the dataset as rows of time.
        buffer: a description that is only read, with a storage at this path.
        path: of the storage.
        told: 32 bytes, what tells the dataset from others.
        show: whether a bar shows how far it is; None where stderr is a terminal.

    Raises:
        ValueError: there is something else.
    """
    folder = os.path.realpath(path)
    before = writing.get(folder)
    try:
        return _kept(flow, buffer, path, told, show)
    except BaseException:
        # Else the frames of the exception, which a notebook keeps, would hold the lock.
        store = writing.get(folder)
        if store is not None and store is not before:
            store.close()
        raise


def _kept(
    flow: Streams, buffer: ReplayBuffer, path: str, told: bytes, show: bool | None
) -> BufferState:
    whole = opened(buffer, path, told)
    if whole is not None:
        return whole
    plain = _plain(buffer)
    if not _is_begun(path):
        state = plain.init(flow.datasets[0].spec)
        return _whole(flow, buffer, plain, state, 0, path, told, show)
    _, state, rows = _found(path, buffer, plain, told)
    _log.warning("%s: going on with a copy that has %d of %d rows", path, rows, flow.rows)
    return _whole(flow, buffer, plain, state, rows, path, told, show)


def opened(buffer: ReplayBuffer, path: str, told: bytes) -> BufferState | None:
    """The state of a copy that is whole; None if it is not."""
    if not _is_begun(path):
        return None
    found, state, _ = _found(path, buffer, _plain(buffer), told)
    if found.writer.writes:
        return None
    return state if found == buffer else with_parts(found, state, buffer)


def _is_begun(path: str) -> bool:
    """Whether anything was committed there."""
    try:
        return bool(checkpoint.generations(path))
    except FileNotFoundError:
        return False


def _plain(buffer: ReplayBuffer) -> Any:
    """The description that a copy is made by: its state is small."""
    parts = {"sampler": Uniform(), "unit": Transition(), "batch_size": None, "min_size": None}
    return dataclasses.replace(writable(buffer), **parts)


def _found(
    path: str, buffer: ReplayBuffer, plain: ReplayBuffer, told: bytes
) -> tuple[ReplayBuffer, BufferState, int]:
    """What is there: its description, its state, and how many rows of the dataset it has."""
    for given in (buffer, plain, None):
        try:
            found, state, mark = checkpoint.load(path, given, extra=_MARK, verify=False)
        except matching.OtherError:
            continue
        except ValueError as error:
            raise _other(path) from error
        if mark["of"].tobytes() != told:
            raise _other(path)
        return found, state, mark["rows"]
    raise _other(path)


def _other(path: str) -> ValueError:
    return ValueError(
        f"{path}: expected nothing there, or a copy of this dataset, found another store; or files "
        "of the dataset were changed since, or it was asked for other episodes. Remove it, or "
        "choose another path."
    )


def _whole(
    flow: Streams,
    buffer: ReplayBuffer,
    plain: ReplayBuffer,
    state: BufferState,
    rows: int,
    path: str,
    told: bytes,
    show: bool | None,
) -> BufferState:
    """The copy with the rows from this one on."""
    commit = functools.partial(_commit, path, told)
    last = state
    for last, there, is_due in written(flow, plain, state, rows, show):
        if is_due:
            commit(plain, last, there)
    if (buffer.sampler, buffer.unit) != (plain.sampler, plain.unit):
        last = with_parts(plain, last, buffer)
    commit(buffer, last, flow.rows)
    return last


def written(
    flow: Streams, buffer: ReplayBuffer, state: BufferState, rows: int, show: bool | None
) -> Iterator[tuple[BufferState, int, bool]]:
    """Writes the rows from this one on to a state, which is donated.

    Yields:
        The state after each piece, how many rows it has, and whether much was written since the
        last time that this was true.
    """
    into, row_bytes, last, odd = Jitted(buffer), flow.row_bytes, rows, NotFinite(flow)
    with track(flow.rows, "reading", show) as done:
        done(rows)
        for items, mask, count in flow.pieces(rows):
            odd.look(items, rows)
            state = into.extend(state, items, mask)
            done(count)
            rows += count
            is_due = (rows - last) * row_bytes >= _BETWEEN
            last = rows if is_due else last
            yield state, rows, is_due
    odd.tell()


def _commit(path: str, told: bytes, buffer: ReplayBuffer, state: BufferState, rows: int) -> None:
    mark = {"rows": rows, "of": np.frombuffer(told, np.uint8)}
    checkpoint.save(path, buffer, state, extra=mark)
