"""A dataset in the files of a storage: made once, continued after a crash, opened at once.

While it is made, it is committed now and then, with the number of its rows. Until it is complete,
its description has a writer that writes; then one that is only read.
"""

import dataclasses
import logging
import os
from typing import Any

import numpy as np

from jrb import checkpoint
from jrb._store.store import writing
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import schema
from jrb.datasets.filling import Streams, written
from jrb.migrate import with_parts, writable
from jrb.samplers import Uniform
from jrb.state import BufferState
from jrb.units import Transition

_MARK = {"rows": 0, "of": np.zeros(32, np.uint8)}

_log = logging.getLogger("jrb.datasets")


def made(
    flow: Streams, buffer: ReplayBuffer, path: str, digest: bytes, show: bool | None
) -> BufferState:
    """Returns the state of a buffer whose rows are, or will be, in files at a path.

    Args:
        flow: the dataset as rows of time.
        buffer: a description that is only read, with a storage at this path.
        path: of the storage.
        digest: 32 bytes that tell the dataset from others.
        show: True for a bar; None where stderr is a terminal.

    Raises:
        ValueError: there is something else.
    """
    folder = os.path.realpath(path)
    before = writing.get(folder)
    try:
        return _made(flow, buffer, path, digest, show)
    except BaseException:
        # Else the frames of the exception, which a notebook keeps, would hold the lock.
        store = writing.get(folder)
        if store is not None and store is not before:
            store.close()
        raise


def _made(
    flow: Streams, buffer: ReplayBuffer, path: str, digest: bytes, show: bool | None
) -> BufferState:
    state = opened(buffer, path, digest)
    if state is not None:
        return state
    plain = _plain(buffer)
    if _is_begun(path):
        _, state, rows = _loaded(path, buffer, plain, digest)
        _log.warning("%s: continuing a copy that has %d of %d rows", path, rows, flow.rows)
    else:
        state, rows = plain.init(flow.datasets[0].spec), 0

    def commit(buffer: ReplayBuffer, state: BufferState, rows: int) -> None:
        mark = {"rows": rows, "of": np.frombuffer(digest, np.uint8)}
        checkpoint.save(path, buffer, state, extra=mark)

    for state, rows, is_due in written(flow, plain, state, rows, show):  # noqa: B020
        if is_due:
            commit(plain, state, rows)
    if (buffer.sampler, buffer.unit) != (plain.sampler, plain.unit):
        state = with_parts(plain, state, buffer)
    commit(buffer, state, flow.rows)
    return state


def opened(buffer: ReplayBuffer, path: str, digest: bytes) -> BufferState | None:
    """Returns the state of a copy that is complete; None if it is not."""
    if not _is_begun(path):
        return None
    description, state, _ = _loaded(path, buffer, _plain(buffer), digest)
    if description.writer.writes:
        return None
    return state if description == buffer else with_parts(description, state, buffer)


def _is_begun(path: str) -> bool:
    """Returns True if anything was committed there."""
    try:
        return bool(checkpoint.generations(path))
    except FileNotFoundError:
        return False


def _plain(buffer: ReplayBuffer) -> Any:
    """Returns the description that a copy is made by: its state is small."""
    parts = {"sampler": Uniform(), "unit": Transition(), "batch_size": None, "min_size": None}
    return dataclasses.replace(writable(buffer), **parts)


def _loaded(
    path: str, buffer: ReplayBuffer, plain: ReplayBuffer, digest: bytes
) -> tuple[ReplayBuffer, BufferState, int]:
    """Returns the description that is there, its state, and the number of its rows."""
    other = ValueError(
        f"{path}: expected nothing there, or a copy of this dataset, found another store; or files "
        "of the dataset were changed since, or it was asked for other episodes. Remove it, or "
        "choose another path."
    )
    for given in (buffer, plain, None):
        try:
            description, state, mark = checkpoint.load(path, given, extra=_MARK, verify=False)
        except schema.OtherError:
            continue
        except ValueError as error:
            raise other from error
        if mark["of"].tobytes() != digest:
            break
        return description, state, mark["rows"]
    raise other
