"""The items that a recorder has in memory, and the parts that they become.

E environments, n items of a part.
"""

import contextlib
import dataclasses
import itertools
import os
import secrets
import threading

import numpy as np

from jrb.authoring import Folder, Lock, check_system
from jrb.checkpoint import LockedError
from jrb.datasets.reading.tabular import combined_flags, is_set
from jrb.datasets.recording import parts
from jrb.datasets.recording.items import FLAGS, ItemSpec
from jrb.datasets.recording.parts import RecordingSchema

_MOST_ITEMS = 1 << 20  # of a part
_STREAM = np.dtype([("is_over", "?"), ("episode", "i8"), ("step", "i8"), ("own_number", "i8")])


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """The progress of a writer; replaced as a whole, so that an interrupt finds old or new."""

    next_episode: int  # the number of the next episode that begins
    number: int = 1  # of the part that is open
    held: int = 0  # items in it
    # It was tried to seal the part. No item is added to it any more: readers may have seen the
    # part, though the writer got an error.
    is_due: bool = False
    sealed: int = 0  # items in sealed parts
    streams: np.ndarray | None = None  # [E], the last sealed items; None before the first part
    begins: tuple[int, ...] = ()  # positions of items that begin an episode, after `truncate`
    restarts: np.ndarray | None = None  # bool [E], environments whose next item does so


class RecordWriter:
    """Takes items into memory, and seals them `chunk` at a time; None for what 16 MiB hold.

    Any thread may call it. Each call happens as a whole, or raises and has not happened.
    """

    def __init__(self, path: str, name: str, chunk: int | None) -> None:
        self._folder: Folder = _recording_folder(path)
        self.name: str
        self._lock: Lock
        while True:
            self.name = parts.new_writer_name(name)
            # Another writer that begins may have taken the new lock for one that was left behind.
            with contextlib.suppress(LockedError):
                self._lock = Lock(self._folder, f".{self.name}.lock")
                break
        self._chunk, self._capacity, self._process = chunk, 0, os.getpid()
        self._mutex = threading.RLock()
        self._memory: tuple[list[np.ndarray], np.ndarray] = [], np.zeros(0, np.int32)
        self._schema: RecordingSchema | None = None
        self.spec: ItemSpec | None = None
        # No other writer has these numbers of episodes: 31 random bits above 32 to count with.
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

    def begin(self, spec: ItemSpec, schema: RecordingSchema) -> None:
        """Writes a part without rows, from which readers and other writers know the items."""
        with self._mutex:
            self.check()
            self._lock.check()
            path = self._folder.path
            for writer in parts.part_counts(path):
                with contextlib.suppress(FileNotFoundError):
                    other = parts.schema_of(os.path.join(path, parts.part_name(writer, 0)))
                    parts.check_same_leaves(path, schema, writer, other)
            if self.spec is not None:  # another thread began
                return
            own = {name: np.zeros(0, dtype) for name, dtype in parts.TYPES.items()}
            leaves = {leaf.name: np.zeros((0, *leaf.shape), leaf.numpy) for leaf in schema.leaves}
            self._write(0, schema.encode(own, leaves))
            width = max(1, sum(leaf.width for leaf in spec.arrays))
            self._capacity = self._chunk or min(max(1, parts.PART_BYTES // width), _MOST_ITEMS)
            self._schema = schema
            self.spec = spec  # last: an interrupt before leaves all to be done again

    def put(self, arrays: list[np.ndarray], count: int, envs: np.ndarray | None) -> None:
        """Takes `count` items `[count, ...]`, or a single one `[...]`, of these environments.

        After an `OSError` these items were not taken; those before are still in memory.
        """
        with self._mutex:
            self.check()
            room, now = len(self._memory[1]), self.progress
            if now.held and (now.is_due or now.held + count > room):
                self.seal()
                now = self.progress
            size = max(self._capacity, count)
            if not now.held and room != size and self.spec is not None:
                columns = [np.empty((size, *leaf.shape), leaf.numpy) for leaf in self.spec.arrays]
                self._memory = columns, np.zeros(size, np.int32)
            columns, numbers = self._memory
            stop = now.held + count
            for column, array in zip(columns, arrays, strict=True):
                column[now.held : stop] = array
            if envs is not None:
                numbers[now.held : stop] = envs
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
        """Begins an episode with the next item of these environments, bool `[E]`."""
        with self._mutex:
            self.check()
            before = self.progress.restarts
            restarts = which.copy() if before is None else before | which
            self.progress = dataclasses.replace(
                self.progress, restarts=restarts if restarts.any() else None
            )

    def seal(self) -> None:
        """Writes the items in memory as a part; after an `OSError` they are still there."""
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
        """Writes a part as a whole. Written again after a failure, it is the same."""
        name = parts.part_name(self.name, number)
        self._folder.write_new(f".{name}.new", [data])
        self._folder.replace(f".{name}.new", name)
        self._folder.sync()

    def _encode(self, now: Progress) -> tuple[bytes, int, np.ndarray]:
        """Returns the open part, the number of the next episode, and where its streams end."""
        spec, schema = self.spec, self._schema
        if spec is None or schema is None:
            raise ValueError(f"{self._folder.path}: expected items of a known structure.")
        # Rows are sorted by environment; those of one stay in the order of time.
        envs = self._memory[1][: now.held]
        order = np.argsort(envs, kind="stable")
        envs = envs[order]
        columns = [column[: now.held] for column in self._memory[0]]
        columns = columns if schema.num_envs is None else [column[order] for column in columns]
        begins = np.zeros(now.held, bool)
        begins[list(now.begins)] = True
        begins = begins[order]
        flags = {flag: is_set(columns[number]) for flag, number in spec.flags.items()}
        terminated, truncated = combined_flags(now.held, *map(flags.get, FLAGS))
        is_over, own_numbers = terminated | truncated, np.zeros(now.held, np.int64)
        if spec.episode is not None:
            own_numbers = columns[spec.episode].reshape(-1).astype(np.int64)
        num_envs = schema.num_envs or 1
        streams = np.zeros(num_envs, _STREAM) if now.streams is None else now.streams.copy()
        if now.streams is None:
            streams["is_over"] = True
        episode, step = np.zeros((2, now.held), np.int64)
        next_episode = now.next_episode
        bounds = np.searchsorted(envs, np.arange(num_envs + 1))
        for env, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
            if start == stop:
                continue
            last, part, row = streams[env], slice(start, stop), np.arange(stop - start)
            begin = begins[part] | np.append(last["is_over"], is_over[start : stop - 1])
            before = np.append(last["own_number"], own_numbers[start : stop - 1])
            begin |= before != own_numbers[part]
            # Rows before the first that begins continue the episode of an earlier part.
            count = np.cumsum(begin)
            first = np.maximum.accumulate(np.where(begin, row, -1 - last["step"]))
            episode[part] = np.where(count == 0, last["episode"], next_episode - 1 + count)
            step[part] = row - first
            next_episode += int(count[-1])
            end = stop - 1
            streams[env] = is_over[end], episode[end], step[end], own_numbers[end]
        own = dict(zip(parts.TYPES, (episode, step, envs, terminated, truncated), strict=True))
        named = {leaf.name: column for leaf, column in zip(spec.arrays, columns, strict=True)}
        return schema.encode(own, named), next_episode, streams

    def close(self) -> None:
        """Seals the items in memory, and gives the right to write back."""
        if os.getpid() != self._process:
            return  # a mutex that another thread had at the fork stays taken
        with self._mutex:
            if self.is_closed:
                return
            self.seal()
            self._folder.remove(f".{self.name}.lock")
            self._lock.release()
            self.is_closed = True


def _recording_folder(path: str) -> Folder:
    """Returns the folder of a recording, made if there is none, without what dead writers left."""
    check_system(path)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: expected a folder, or nothing, found a file.")
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)
        Folder(os.path.dirname(path)).sync()
    folder = Folder(path)
    others = [name for name in folder.names() if not (parts.is_own(name) or name.startswith("."))]
    if others:
        raise ValueError(
            f"{path}: expected a recording, or an empty folder, found '{others[0]}' in it. Choose "
            "another path."
        )
    for match in filter(None, map(parts.HIDDEN.fullmatch, folder.names())):
        # The system takes the lock of a process back when it ends, however it ends.
        with contextlib.suppress(LockedError, OSError, ValueError):
            lock = Lock(folder, f".{match[1]}.lock")
            try:
                folder.remove(match[0])
                folder.remove(f".{match[1]}.lock")
            finally:
                lock.release()
    return folder
