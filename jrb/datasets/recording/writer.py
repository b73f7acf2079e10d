"""The items that a recorder has in memory, and the parts that they become.

E environments, n items of a part.
"""

import contextlib
import dataclasses
import os
import secrets
import threading

import numpy as np

from jrb._store import files
from jrb._store.errors import DamagedError, LockedError
from jrb._store.files import Folder
from jrb._store.lock import Lock
from jrb.datasets.recording import parts
from jrb.datasets.recording.items import ItemSpec
from jrb.datasets.recording.parts import RecordingSchema

_MOST_ITEMS = 1 << 20  # of a part


@dataclasses.dataclass(frozen=True, eq=False)
class StreamState:
    """The last item of each environment that is in a sealed part, arrays `[E]`.

    Attributes:
        is_over: True if the item ended its episode, or there is none.
        episode: int64, the number of the item's episode.
        step: int64, the position of the item in its episode.
        own_number: the number of the episode by the items themselves; None if they have none.
    """

    is_over: np.ndarray
    episode: np.ndarray
    step: np.ndarray
    own_number: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """How far a writer is; replaced as a whole, so that an interrupt finds the old or the new.

    Attributes:
        number: of the part that is open.
        held: the number of items in it.
        is_due: True once it was tried to seal the part. Then no item is added to it: readers may
            have seen the part, though the writer got an error.
        sealed: the number of items in sealed parts.
        episodes: the number of episodes in sealed parts.
        streams: where the sealed parts end; None before the first one.
        begins: positions of items that begin an episode because `truncate` was called.
        restarts: bool `[E]`, the environments whose next item does so; None for none.
    """

    number: int = 1
    held: int = 0
    is_due: bool = False
    sealed: int = 0
    episodes: int = 0
    streams: StreamState | None = None
    begins: tuple[int, ...] = ()
    restarts: np.ndarray | None = None


class RecordWriter:
    """Takes items into memory, and seals them a part at a time.

    Any thread may call it. Each call happens as a whole, or raises and has not happened.

    Args:
        path: of the recording.
        name: a part of the writer's own.
        chunk: the number of items of a part; None for as many as 16 MiB hold.

    Attributes:
        name: of the writer, with which its files begin.
        folder: of the recording.
        progress: how far the writer is.
        is_closed: True if it takes nothing any more.
    """

    def __init__(self, path: str, name: str, chunk: int | None) -> None:
        self.folder = _recording_folder(path)
        _remove_leftovers(self.folder)
        self.name, self._lock = _claimed(self.folder, name)
        self._chunk, self._capacity, self._process = chunk, 0, os.getpid()
        self._mutex = threading.RLock()
        self._memory: tuple[list[np.ndarray], np.ndarray] = [], np.zeros(0, np.int32)
        self._kind: tuple[ItemSpec, RecordingSchema] | None = None
        # No other writer has these numbers of episodes: 31 random bits above 32 to count with.
        self._first_episode = secrets.randbits(31) << 32
        self.progress, self.is_closed = Progress(), False

    def check(self) -> None:
        """Raises where nothing may be written any more.

        Raises:
            ValueError: the writer is closed.
            LockedError: this process was forked off from the one that writes.
        """
        if os.getpid() != self._process:
            self._lock.check()
        if self.is_closed:
            raise ValueError(
                f"{self.folder.path}: expected an open recorder, got one that was closed. Make "
                "another one for the same path: it continues in parts of its own."
            )

    def begin(self, spec: ItemSpec, schema: RecordingSchema) -> None:
        """Writes a part without rows, from which readers and other writers know the items.

        Raises:
            ValueError: other items were given before, here or to another writer.
        """
        with self._mutex:
            self.check()
            self._lock.check()
            check_same_leaves(self.folder.path, schema)
            if self._kind is not None:  # another thread began, or this one, and was interrupted
                parts.check_same_leaves(self.folder.path, schema, self.name, self._kind[1])
                return
            own = {name: np.zeros(0, dtype) for name, dtype in parts.TYPES.items()}
            leaves = {leaf.name: np.zeros((0, *leaf.shape), leaf.numpy) for leaf in schema.leaves}
            self._write(0, schema.encode(own, leaves))
            width = max(1, sum(leaf.width for leaf in spec.arrays))
            self._capacity = self._chunk or min(max(1, parts.PART_BYTES // width), _MOST_ITEMS)
            self._kind = spec, schema

    def put(self, arrays: list[np.ndarray], count: int, envs: np.ndarray | None) -> None:
        """Takes items.

        Args:
            arrays: `[m, ...]`, of every leaf; of a single item also `[...]`.
            count: m.
            envs: int32 `[m]`, the environment of each; None if there is one only.

        Raises:
            OSError: there was no room in memory, and the disk is full or broken. These items were
                not taken; all that were taken before are still in memory.
        """
        with self._mutex:
            self.check()
            self._make_room(count)
            now, (columns, numbers) = self.progress, self._memory
            stop = now.held + count
            for column, array in zip(columns, arrays, strict=True):
                column[now.held : stop] = array
            if envs is not None:
                numbers[now.held : stop] = envs
            begins, restarts = now.begins, now.restarts
            if restarts is not None:
                given, positions = np.unique([0] if envs is None else envs, return_index=True)
                begins = (*begins, *(now.held + positions[restarts[given]]).tolist())
                restarts = restarts.copy()
                restarts[given] = False
                restarts = restarts if restarts.any() else None
            self.progress = dataclasses.replace(
                now, held=stop, is_due=False, begins=begins, restarts=restarts
            )

    def truncate(self, which: np.ndarray) -> None:
        """Begins an episode with the next item of these environments, bool `[E]`."""
        with self._mutex:
            self.check()
            now = self.progress
            restarts = which if now.restarts is None else now.restarts | which
            self.progress = dataclasses.replace(
                now, restarts=restarts.copy() if restarts.any() else None
            )

    def _make_room(self, count: int) -> None:
        """Seals the open part, or allocates memory, so that `count` items fit in."""
        room = len(self._memory[1])
        if self.progress.held and (self.progress.is_due or self.progress.held + count > room):
            self.seal()
        wanted = max(self._capacity, count)
        if not self.progress.held and room != wanted:
            leaves = self._known[0].arrays
            columns = [np.empty((wanted, *leaf.shape), leaf.numpy) for leaf in leaves]
            self._memory = columns, np.zeros(wanted, np.int32)

    @property
    def _known(self) -> tuple[ItemSpec, RecordingSchema]:
        if self._kind is None:
            raise ValueError(f"{self.folder.path}: expected items of a known structure.")
        return self._kind

    def seal(self) -> None:
        """Writes what is in memory as a part, which is on the disk when this returns.

        Raises:
            OSError: the disk is full or broken. All is still in memory, and may be sealed later.
        """
        with self._mutex:
            self.check()
            now = self.progress
            if not now.held:
                return
            self._lock.check()
            self.progress = dataclasses.replace(now, is_due=True)
            data, episodes, streams = self._part(now)
            self._write(now.number, data)
            self.progress = Progress(
                number=now.number + 1,
                sealed=now.sealed + now.held,
                episodes=episodes,
                streams=streams,
                restarts=now.restarts,
            )

    def _write(self, number: int, data: bytes) -> None:
        """Writes a part as a whole. Written again after a failure, it is the same."""
        name = parts.part_name(self.name, number)
        self.folder.write_new(f".{name}.new", [data])
        self.folder.replace(f".{name}.new", name)
        self.folder.sync()

    def _part(self, now: Progress) -> tuple[bytes, int, StreamState]:
        """Returns the open part, the number of episodes after it, and where its streams end."""
        spec, schema = self._known
        columns, counts = [column[: now.held] for column in self._memory[0]], np.array([now.held])
        begins = np.zeros(now.held, bool)
        begins[list(now.begins)] = True
        envs = self._memory[1][: now.held]
        if schema.num_envs is not None:
            order = np.argsort(envs, kind="stable")
            columns = [column[order] for column in columns]
            begins, envs = begins[order], envs[order]
            counts = np.bincount(envs, minlength=schema.num_envs)
        terminated, truncated = _flags(spec, columns)
        own_numbers = None if spec.episode is None else columns[spec.episode].reshape(-1)
        streams = now.streams or _no_streams(len(counts), own_numbers)
        is_over = terminated | truncated
        first = self._first_episode + now.episodes
        num_begun, episode, step, streams = _numbered(
            counts, begins, is_over, own_numbers, streams, first
        )
        own = dict(zip(parts.TYPES, (episode, step, envs, terminated, truncated), strict=True))
        named = {leaf.name: column for leaf, column in zip(spec.arrays, columns, strict=True)}
        return schema.encode(own, named), now.episodes + num_begun, streams

    def close(self) -> None:
        """Seals what is in memory, and gives the right to write back."""
        if os.getpid() != self._process:
            return  # a mutex that another thread had at the fork stays taken
        with self._mutex:
            if self.is_closed:
                return
            self.seal()
            self.folder.remove(_lock_name(self.name))
            self._lock.release()
            self.is_closed = True


def check_same_leaves(path: str, schema: RecordingSchema) -> None:
    """Raises `ValueError` unless the writers of a recording that have begun have the same items."""
    for writer in parts.part_counts(path):
        with contextlib.suppress(FileNotFoundError):
            other = parts.schema_of(os.path.join(path, parts.part_name(writer, 0)))
            parts.check_same_leaves(path, schema, writer, other)


def _flags(spec: ItemSpec, columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps that terminated and those that were truncated, bool `[n]` each.

    A flag of any dtype is set where it is not 0, and every flag ends the episode. Without a flag of
    termination, `done` is one where `truncated` is not set.
    """
    none = np.zeros(len(columns[0]), bool)
    flags = {flag: (columns[number] != 0).reshape(-1) for flag, number in spec.flags.items()}
    done, truncated = flags.get("done", none), flags.get("truncated", none)
    terminated = flags.get("terminated", done & ~truncated)
    return terminated, truncated | (done & ~terminated)


def _no_streams(num_envs: int, own_numbers: np.ndarray | None) -> StreamState:
    zeros = np.zeros(num_envs, np.int64)
    own = None if own_numbers is None else np.zeros(num_envs, own_numbers.dtype)
    return StreamState(np.ones(num_envs, bool), zeros, zeros, own)


def _numbered(
    counts: np.ndarray,
    begins: np.ndarray,
    is_over: np.ndarray,
    own_numbers: np.ndarray | None,
    streams: StreamState,
    first_episode: int,
) -> tuple[int, np.ndarray, np.ndarray, StreamState]:
    """Divides rows into episodes.

    Args:
        counts: int64 `[E]`, the rows of each environment, which follow each other.
        begins: bool `[n]`, rows that begin an episode because `truncate` was called.
        is_over: bool `[n]`, rows with flags that end one.
        own_numbers: `[n]`, the numbers of episodes that items have.
        streams: the last items before these.
        first_episode: the number of the first episode that begins.

    Returns:
        The number of episodes that begin; for each row the number of its episode and its position
        in it, int64 `[n]`; and where the streams end after these rows.
    """
    env = np.flatnonzero(counts)  # those with rows
    stops = np.cumsum(counts)
    starts = stops - counts
    previous = np.roll(is_over, 1)
    previous[starts[env]] = streams.is_over[env]
    begins = begins | previous
    if own_numbers is not None and streams.own_number is not None:
        previous = np.roll(own_numbers, 1)
        previous[starts[env]] = streams.own_number[env]
        begins |= previous != own_numbers

    row, env_of, start = (
        np.arange(len(begins)),
        np.repeat(env, counts[env]),
        np.repeat(starts, counts),
    )
    begin = np.maximum.accumulate(np.where(begins, row, -1))
    continues = begin < start  # the episode of an earlier part
    episode = np.where(continues, streams.episode[env_of], first_episode - 1 + np.cumsum(begins))
    step = np.where(continues, streams.step[env_of] + 1 + row - start, row - begin)

    def last(before: np.ndarray, rows: np.ndarray) -> np.ndarray:
        after = before.copy()
        after[env] = rows[stops[env] - 1]
        return after

    own = streams.own_number
    own = None if own is None or own_numbers is None else last(own, own_numbers)
    ends = last(streams.is_over, is_over), last(streams.episode, episode), last(streams.step, step)
    return int(begins.sum()), episode, step, StreamState(*ends, own)


def _recording_folder(path: str) -> Folder:
    """Returns the folder of a recording, made if there is none.

    Raises:
        ValueError: there is something else at the path.
        OSError: it cannot be written to.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: expected a folder, or nothing, found a file.")
    files.make_folder(path)
    folder = Folder(path)
    others = [name for name in folder.names() if not (parts.is_own(name) or name.startswith("."))]
    if others:
        raise ValueError(
            f"{path}: expected a recording, or an empty folder, found '{others[0]}' in it. Choose "
            "another path."
        )
    return folder


def _remove_leftovers(folder: Folder) -> None:
    """Removes the unfinished parts and the locks of writers whose processes have died.

    The system takes the lock of a process back when it ends, however it ends.
    """
    for writer, names in parts.hidden_files(folder.names()).items():
        with (
            contextlib.suppress(LockedError, DamagedError, OSError),
            contextlib.ExitStack() as stack,
        ):
            stack.callback(Lock(folder, _lock_name(writer)).release)
            for name in [*names, _lock_name(writer)]:  # the lock last
                folder.remove(name)


def _claimed(folder: Folder, name: str) -> tuple[str, Lock]:
    """Returns the name of a new writer, and its lock."""
    while True:
        writer = parts.new_writer_name(name)
        try:
            return writer, Lock(folder, _lock_name(writer))
        except LockedError:
            continue  # another writer that begins has just taken the lock for a leftover


def _lock_name(writer: str) -> str:
    return f".{writer}.lock"
