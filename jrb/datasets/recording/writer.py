"""Keeps a recorder's items in memory and writes them as parts. E environments."""

import contextlib
import dataclasses
import itertools
import os
import secrets
import threading
from typing import Any

import numpy as np

from jrb.authoring import Folder, Lock, make_folder
from jrb.checkpoint import LockedError
from jrb.datasets.reading.names import check
from jrb.datasets.reading.tabular import combine_flags, is_set
from jrb.datasets.recording import parts
from jrb.datasets.recording.items import FLAGS, ItemSpec
from jrb.datasets.recording.parts import RecordingSchema

_MOST_ITEMS = 1 << 20  # the maximum number of items of a part, unless `chunk` is given
_STREAM = np.dtype([("is_over", "?"), ("episode", "i8"), ("step", "i8"), ("own_number", "i8")])


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """The progress of a writer. It is replaced at once, so that an interrupt sees old or new."""

    next_episode: int  # the number of the next new episode
    number: int = 1  # the number of the part that is in memory
    held: int = 0  # the number of items in this part
    # True if an attempt to seal the part failed. Readers may have seen it nevertheless, so no item
    # may be added to it.
    is_due: bool = False
    sealed: int = 0  # the number of items in all sealed parts
    streams: np.ndarray | None = None  # [E], the last sealed step of each environment
    begins: tuple[int, ...] = ()  # indices in the part of items that follow a `truncate`
    restarts: np.ndarray | None = None  # bool [E], True if the next item follows a `truncate`


class RecordWriter:
    """Keeps items in memory and writes them as parts of `chunk` items, or of 16 MiB for None.

    Any thread may call it. A call that raises has no effect.
    """

    def __init__(self, path: str, name: str, chunk: int | None) -> None:
        self._folder: Folder = _recording_folder(path)
        self.name: str
        self._lock: Lock
        while True:
            self.name = parts.new_writer_name(name)
            # A writer that starts now may hold the lock, to remove it as one of a dead writer.
            with contextlib.suppress(LockedError):
                self._lock = Lock(self._folder, f".{self.name}.lock")
                break
        self._chunk, self._capacity, self._process = chunk, 0, os.getpid()
        self._mutex = threading.RLock()
        self._memory: tuple[list[np.ndarray], np.ndarray] = [], np.zeros(0, np.int32)
        self._schema: RecordingSchema | None = None
        self.spec: ItemSpec | None = None
        # Unique numbers of episodes: 31 random bits above 32 bits to count with.
        self.progress: Progress = Progress(secrets.randbits(31) << 32)
        self.is_closed: bool = False

    def check(self) -> None:
        """Raises `ValueError` if the writer is closed, `LockedError` in a forked process."""
        if os.getpid() != self._process:
            self._lock.check()
        if self.is_closed:
            raise ValueError(
                f"{self._folder.path}: expected an open recorder, got one that was closed. Make "
                "another one for the same path: it continues in parts of its own."
            )

    def begin(self, spec: ItemSpec, num_envs: int | None, metadata: dict[str, Any]) -> None:
        """Writes a first part without rows, whose schema describes the items."""
        schema = RecordingSchema(num_envs, spec.leaves, spec.notes, metadata)
        with self._mutex:
            self.check()
            self._lock.check()
            # All writers of a recording need the same leaves.
            path = self._folder.path
            for writer in parts.part_counts(path):
                with contextlib.suppress(FileNotFoundError):
                    other = parts.schema_of(os.path.join(path, parts.part_name(writer, 0)))
                    parts.check_same_leaves(path, schema, writer, other)
            # Another thread may have written it meanwhile.
            if self.spec is not None:
                return
            # Write the part, and choose how many items the later ones hold.
            own = {name: np.zeros(0, dtype) for name, dtype in parts.TYPES.items()}
            leaves = {leaf.name: np.zeros((0, *leaf.shape), leaf.numpy) for leaf in schema.leaves}
            self._write(0, schema.encode(own, leaves))
            width = max(1, sum(leaf.width for leaf in spec.arrays))
            self._capacity = self._chunk or min(max(1, parts.PART_BYTES // width), _MOST_ITEMS)
            self._schema = schema
            # Set the spec last, so that after an interrupt the next call does it all again.
            self.spec = spec

    def put(self, arrays: list[np.ndarray], count: int, envs: np.ndarray | None) -> None:
        """Adds `count` items, leaves `[count, ...]`, or one `[...]`; `envs` are their environments.

        After an `OSError` these items are not added, and earlier ones are still in memory.
        """
        with self._mutex:
            self.check()
            room, now = len(self._memory[1]), self.progress
            # Seal the items in memory if these do not fit, or if an earlier attempt failed.
            if now.held and (now.is_due or now.held + count > room):
                self.seal()
                now = self.progress
            # Allocate memory for a part, unless that of the last one has the right size.
            size = max(self._capacity, count)
            if not now.held and room != size and self.spec is not None:
                columns = [np.empty((size, *leaf.shape), leaf.numpy) for leaf in self.spec.arrays]
                self._memory = columns, np.zeros(size, np.int32)
            # Copy the items behind those in memory. They do not count before `progress` is
            # replaced.
            columns, numbers = self._memory
            stop = now.held + count
            for column, array in zip(columns, arrays, strict=True):
                column[now.held : stop] = array
            if envs is not None:
                numbers[now.held : stop] = envs
            # The first item of an environment after a `truncate` begins an episode.
            begins, restarts = now.begins, now.restarts
            if restarts is not None:
                present, first = np.unique([0] if envs is None else envs, return_index=True)
                begins += tuple((now.held + first[restarts[present]]).tolist())
                restarts = restarts.copy()
                restarts[present] = False
                restarts = restarts if restarts.any() else None
            self.progress = dataclasses.replace(
                now, held=stop, is_due=False, begins=begins, restarts=restarts
            )

    def truncate(self, which: np.ndarray) -> None:
        """Makes the next item of each environment in the mask `which`, bool `[E]`, a first step."""
        with self._mutex:
            self.check()
            before = self.progress.restarts
            restarts = which.copy() if before is None else before | which
            self.progress = dataclasses.replace(
                self.progress, restarts=restarts if restarts.any() else None
            )

    def seal(self) -> None:
        """Writes the items in memory as a part; after an `OSError` they stay in memory."""
        with self._mutex:
            self.check()
            now = self.progress
            if not now.held:
                return
            self._lock.check()
            self.progress = dataclasses.replace(now, is_due=True)
            data, next_episode, streams = self._encode(now)
            self._write(now.number, data)
            self.progress = Progress(
                next_episode,
                number=now.number + 1,
                sealed=now.sealed + now.held,
                streams=streams,
                restarts=now.restarts,
            )

    def _write(self, number: int, data: bytes) -> None:
        """Writes a part atomically, so that it can be written again after a failure."""
        name = parts.part_name(self.name, number)
        self._folder.write_new(f".{name}.new", [data])
        self._folder.replace(f".{name}.new", name)
        self._folder.sync()

    def _encode(self, now: Progress) -> tuple[bytes, int, np.ndarray]:
        """Returns the part's bytes, the next episode number, and each stream's last step."""
        spec, schema = self.spec, self._schema
        if spec is None or schema is None:
            raise ValueError(f"{self._folder.path}: expected items of a known structure.")
        # Rows are sorted by environment; within each they stay in the order of time.
        envs = self._memory[1][: now.held]
        order = np.argsort(envs, kind="stable")
        envs = envs[order]
        columns = [column[: now.held] for column in self._memory[0]]
        columns = columns if schema.num_envs is None else [column[order] for column in columns]
        begins = np.isin(order, now.begins)
        # An episode ends by flags, or by another number of the user's than that of the step before.
        flags = {flag: is_set(columns[number]) for flag, number in spec.flags.items()}
        terminated, truncated = combine_flags(now.held, *map(flags.get, FLAGS))
        is_over, own_numbers = terminated | truncated, np.zeros(now.held, np.int64)
        if spec.episode is not None:
            own_numbers = columns[spec.episode].reshape(-1).astype(np.int64)
        # Number episodes and steps. At first, all environments are at the end of an episode.
        if now.streams is None:
            streams = np.zeros(schema.num_envs or 1, _STREAM)
            streams["is_over"] = True
        else:
            streams = now.streams.copy()
        episode, step, next_episode = _number_steps(
            envs, begins, is_over, own_numbers, streams, now.next_episode
        )
        own = dict(zip(parts.TYPES, (episode, step, envs, terminated, truncated), strict=True))
        named = {leaf.name: column for leaf, column in zip(spec.arrays, columns, strict=True)}
        return schema.encode(own, named), next_episode, streams

    def close(self) -> None:
        """Seals the items in memory and releases the lock."""
        if os.getpid() != self._process:
            # In a fork, a mutex that another thread held is never released.
            return
        with self._mutex:
            if self.is_closed:
                return
            self.seal()
            self._folder.remove(f".{self.name}.lock")
            self._lock.release()
            self.is_closed = True


def _number_steps(
    envs: np.ndarray,
    begins: np.ndarray,
    is_over: np.ndarray,
    own_numbers: np.ndarray,
    streams: np.ndarray,
    next_episode: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the episode and the step of each row of a part, and the next episode number.

    Rows are sorted by `envs`. `streams` has the last step of each environment, and is updated.
    """
    episode, step = np.zeros((2, len(envs)), np.int64)
    bounds = np.searchsorted(envs, np.arange(len(streams) + 1))
    for env, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        if start == stop:
            continue
        # Find the first steps among the rows of this environment, given its last sealed step.
        last, part, row = streams[env], slice(start, stop), np.arange(stop - start)
        is_first = begins[part] | np.append(last["is_over"], is_over[start : stop - 1])
        before = np.append(last["own_number"], own_numbers[start : stop - 1])
        is_first |= before != own_numbers[part]
        # Rows before the first step of a new episode continue one of an earlier part.
        count = np.cumsum(is_first)
        first = np.maximum.accumulate(np.where(is_first, row, -1 - last["step"]))
        episode[part] = np.where(count == 0, last["episode"], next_episode - 1 + count)
        step[part] = row - first
        next_episode += int(count[-1])
        # Remember the last step, from which the next part continues.
        end = stop - 1
        streams[env] = is_over[end], episode[end], step[end], own_numbers[end]
    return episode, step, next_episode


def _recording_folder(path: str) -> Folder:
    """Returns a recording's folder; creates it if missing, and removes files of dead writers."""
    make_folder(path)
    folder = Folder(path)
    # Never write next to files of another kind.
    others = [name for name in folder.names() if not (parts.is_own(name) or name.startswith("."))]
    got = f"'{', '.join(others[:1])}' in it. Choose another path"
    check(not others, path, "a recording, or an empty folder", got)
    for match in filter(None, map(parts.HIDDEN.fullmatch, folder.names())):
        # The system releases the lock of a process that ends, even in a crash.
        with contextlib.suppress(LockedError, OSError, ValueError):
            lock = Lock(folder, f".{match[1]}.lock")
            try:
                folder.remove(match[0])
                folder.remove(f".{match[1]}.lock")
            finally:
                lock.release()
    return folder
