"""Functions that copy a dataset into a buffer, in memory or in files.

Episodes are dealt to E environments; a row holds one step of every environment.

A copy in files is committed regularly with the number of rows written so far. The saved buffer is
read-only (`jrb.ReadOnly`) once the copy is complete. The folder `root` holds one copy of each
dataset for all processes of a user:

```
<root>/<name>-<digest>      a copy, named by a digest of the files' content and of the options
<root>/.known/<digest>      a file with that digest, named by the files' paths, sizes and times
<root>/.locks/<name>        the lock of the process that makes or removes a copy
```

K episodes, N capacity.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrb import checkpoint
from jrb.authoring import (
    Folder,
    Lock,
    absolute_path,
    checks,
    leaf_name,
    make_folder,
    require,
    store_at,
    tree_nbytes,
)
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import LockedError
from jrb.datasets.format import Episode, count_steps, regroup_steps, slice_steps
from jrb.datasets.output import track_progress
from jrb.datasets.reading.names import check
from jrb.loops import jitted
from jrb.migrate import rebuild, with_parts, writable
from jrb.samplers import Uniform
from jrb.state import BufferState
from jrb.storages import DeviceStorage, MemmapStorage
from jrb.types import Storage
from jrb.units import Transition
from jrb.writers import PerEnvironment, ReadOnly, RoundRobin

_PIECE = 8 << 20  # the maximum bytes of a piece that is written at once
_BETWEEN = 512 << 20  # bytes between two commits
_PAUSE = 0.2  # seconds between two attempts to lock a copy
_SIZE = 32  # bytes of a digest
_MARK = {"rows": 0, "of": np.zeros(_SIZE, np.uint8)}
_LIGHT = {"sampler": Uniform(), "unit": Transition(), "batch_size": None, "min_size": None}
"""The parts with which a copy is written: they have little state."""

_log = logging.getLogger("jrb.datasets")


@dataclasses.dataclass(frozen=True, eq=False)
class Streams:
    """A dataset whose episodes are dealt to environments; each has a stream of steps."""

    datasets: tuple[Any, ...]  # the episodes of each environment
    num_envs: int | None  # E; None for a single stream without an axis of environments
    rows: int  # the number of steps of the longest stream
    is_even: bool  # True if all streams have the same length
    row_bytes: int  # the bytes of one step of all environments


def select_episodes(dataset: Any, fraction: float | None, episodes: Any) -> Any:
    """Returns the dataset of the first episodes (a fraction or number), a slice, or indices."""
    is_one = fraction is None or episodes is None
    check(is_one, "buffer", "fraction= or episodes=", "both. Leave one of them out")
    if fraction is not None:
        checks.fraction("fraction", fraction)
        return dataset[: max(1, round(fraction * len(dataset)))]
    if episodes is None:
        return dataset
    if isinstance(episodes, slice):
        return dataset[episodes]
    if isinstance(episodes, int | np.integer) and not isinstance(episodes, bool):
        checks.count("episodes", int(episodes), len(dataset))
        return dataset[: int(episodes)]
    # All else must be indices of episodes.
    numbers = np.asarray(episodes)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not numbers.size:
        raise TypeError(
            f"episodes: expected a number, a slice or numbers of episodes, got {episodes!r}."
        )
    is_right = numbers.min() >= 0 and numbers.max() < len(dataset)
    check(is_right, "episodes", f"numbers below {len(dataset)}", repr(episodes))
    return dataset.only(dataset.numbers[numbers])


def fill_buffer(
    dataset: Any,
    storage: Storage | None,
    num_envs: int | None,
    cache: bool,
    root: str | os.PathLike[str] | None,
    show: bool | None,
    parts: dict[str, Any],
) -> tuple[ReplayBuffer, BufferState]:
    """Returns a buffer with all steps of a dataset, and its state; see `Dataset.buffer`."""
    # Check the arguments before anything is read or written.
    for name in ("capacity", "writer"):
        if name in parts:
            raise TypeError(
                f"buffer: {name}: expected none, as the buffer holds all steps and is only read, "
                f"got {parts[name]!r}. For another one there is jrb.rebuild."
            )
    is_right, expected = root is None or cache, "None without cache=True, which it is for"
    check(is_right, "buffer: root", expected, repr(root))
    flow, options = deal_to_buffer(dataset, num_envs, "buffer")
    options |= {"storage": storage or DeviceStorage(), **parts}
    options["writer"] = ReadOnly(options["writer"])
    buffer = ReplayBuffer(**options)
    if cache:
        copy_buffer, state = _open_cached(dataset, flow, buffer, root, show)
        if storage is None:
            return copy_buffer, state
        return buffer, rebuild(copy_buffer, state, buffer)
    # A storage with a path is a copy in files, which a later call continues or opens.
    if isinstance(storage, MemmapStorage) and storage.path is not None:
        path = os.fspath(storage.path)
        return buffer, _make_copy(flow, buffer, path, _digest(dataset, num_envs), show)
    # All other storages are filled at once.
    return buffer, fill_state(flow, writable(buffer), show)


def deal_to_buffer(dataset: Any, num_envs: int | None, who: str) -> tuple[Streams, dict[str, Any]]:
    """Returns the streams of a buffer, and the arguments of `jrb.ReplayBuffer` that fit them."""
    if num_envs is not None:
        checks.count("num_envs", num_envs)
    flow = deal_episodes(dataset, num_envs)
    check(flow.rows, who, "at least one step", f"none in {dataset!r}")
    # Choose a writer with which all environments need not be equally full, if their streams differ.
    writer = RoundRobin() if flow.is_even else PerEnvironment()
    size = flow.rows * (num_envs or 1)
    return flow, {"capacity": size, "num_envs": num_envs, "writer": writer, "cast": True}


def fill_state(flow: Streams, buffer: ReplayBuffer, show: bool | None) -> BufferState:
    """Returns the state of a new buffer to which all rows were written."""
    state = buffer.init(flow.datasets[0].spec)
    for state, _, _ in write_streams(flow, buffer, state, 0, show):  # noqa: B007, B020
        pass
    return state


def _open_cached(
    dataset: Any,
    flow: Streams,
    buffer: ReplayBuffer,
    root: str | os.PathLike[str] | None,
    show: bool | None,
) -> tuple[ReplayBuffer, BufferState]:
    """Returns the buffer over the dataset's copy in `root`, which is made if missing, and state."""
    # All users of the copy share its items, so no transform may change them.
    for transform in buffer.transforms:
        is_free = getattr(transform, "inverse", None) is None
        expected = "transforms without an inverse, which changes what is stored"
        got = f"{transform!r}. Leave it out, or name a MemmapStorage with a path"
        check(is_free, "buffer: cache", expected, got)
    path, digest = copy_of(dataset, flow.num_envs, root_of(root))
    copy_buffer = dataclasses.replace(buffer, storage=MemmapStorage(path))
    # A complete copy is opened without the lock, also while another process opens it.
    state = _open_copy(copy_buffer, path, digest)
    if state is None:
        with lock_copy(path, wait=True):
            state = _make_copy(flow, copy_buffer, path, digest, show)
    return copy_buffer, state


def _make_copy(
    flow: Streams, buffer: ReplayBuffer, path: str, digest: bytes, show: bool | None
) -> BufferState:
    """Opens the copy in files at the path, or makes or continues it; returns the state."""
    # A store that is open already belongs to the user, and is not closed after a failure.
    before = store_at(path)
    try:
        state = _open_copy(buffer, path, digest)
        if state is not None:
            return state
        writing, rows = dataclasses.replace(writable(buffer), **_LIGHT), 0
        # Continue an unfinished copy at its last commit, or begin a new one.
        if _has_commit(path):
            _, state, rows = _load(path, buffer, digest)
            _log.warning("%s: continuing a copy that has %d of %d rows", path, rows, flow.rows)
        else:
            state = writing.init(flow.datasets[0].spec)
        mark = lambda rows: {"rows": rows, "of": np.frombuffer(digest, np.uint8)}
        # Commit regularly, so that a crash loses only the last rows.
        for state, rows, is_due in write_streams(flow, writing, state, rows, show):  # noqa: B020
            if is_due:
                checkpoint.save(path, writing, state, extra=mark(rows))
        # Build the state of the user's parts once, and commit it: the copy is complete.
        if (buffer.sampler, buffer.unit) != (writing.sampler, writing.unit):
            state = with_parts(writing, state, buffer)
        checkpoint.save(path, buffer, state, extra=mark(flow.rows))
        return state
    except BaseException:
        # A notebook keeps the exception, whose frames would otherwise keep the store locked.
        store = store_at(path)
        if store is not None and store is not before:
            store.close()
        raise


def _open_copy(buffer: ReplayBuffer, path: str, digest: bytes) -> BufferState | None:
    """Returns the state of a complete copy; None if there is no copy, or it is incomplete."""
    if not _has_commit(path):
        return None
    description, state, _ = _load(path, buffer, digest)
    # A writer other than `ReadOnly` marks a copy that is not complete.
    if description.writer.writes:
        return None
    return state if description == buffer else with_parts(description, state, buffer)


def _has_commit(path: str) -> bool:
    """Returns True if a copy at the path has been committed at least once."""
    try:
        return bool(checkpoint.generations(path))
    except FileNotFoundError:
        return False


def _load(path: str, buffer: ReplayBuffer, digest: bytes) -> tuple[Any, BufferState, int]:
    """Returns the saved buffer, its state and the number of rows; raises for another dataset."""
    cause = None
    # The copy may be complete or not, or have been made with other parts, which it then describes
    # itself.
    for given in (buffer, dataclasses.replace(writable(buffer), **_LIGHT), None):
        try:
            description, state, mark = checkpoint.load(path, given, extra=_MARK, verify=False)
        except ValueError as error:
            cause = error
            continue
        # The digest says which dataset, episodes and options the copy is of.
        if mark["of"].tobytes() != digest:
            break
        return description, state, mark["rows"]
    raise ValueError(
        f"{path}: expected nothing there, or a copy of this dataset, found another store; or files "
        "of the dataset were changed since, or it was asked for other episodes. Remove it, or "
        "choose another path."
    ) from cause


# Streams of steps, one for each environment.


def deal_episodes(dataset: Any, num_envs: int | None) -> Streams:
    """Deals episodes in order, each to the environment that has the fewest steps so far."""
    steps, numbers = [0] * (num_envs or 1), [[] for _ in range(num_envs or 1)]
    for number, length in enumerate(dataset.lengths.tolist()):
        env = steps.index(min(steps))
        steps[env] += length
        numbers[env].append(number)
    datasets = tuple(dataset.only(dataset.numbers[each]) for each in numbers)
    row_bytes = max(1, tree_nbytes(dataset.spec)) * len(steps)
    return Streams(datasets, num_envs, max(steps), len(set(steps)) == 1, row_bytes)


def write_streams(
    flow: Streams, buffer: ReplayBuffer, state: BufferState, rows: int, show: bool | None
) -> Iterator[tuple[BufferState, int, bool]]:
    """Writes the rows of `flow` from the row `rows` on to a state, which is donated.

    Yields, after each piece, the state, the number of rows written, and True if a commit is due.
    Rewards that are NaN or infinite are kept; a warning is logged.
    """
    methods, last, num_nonfinite, first_episode = jitted(buffer), rows, 0, np.inf
    with track_progress(flow.rows, "reading", show) as advance:
        advance(rows)
        for items, mask, count in _pieces(flow, rows):
            # Count rewards that are not finite, and find the first episode that has one.
            for reward in jax.tree.leaves(items["next"].get("reward", ())):
                if reward.dtype.kind in "biu":
                    continue
                is_nonfinite = ~np.isfinite(reward)
                num_nonfinite += int(is_nonfinite.sum())
                # The lengths of a stream's episodes say which of them has a row.
                for env, dataset in enumerate(flow.datasets):
                    column = is_nonfinite if flow.num_envs is None else is_nonfinite[:, env]
                    steps = rows + np.flatnonzero(column.reshape(len(column), -1).any(axis=1))
                    places = np.searchsorted(np.cumsum(dataset.lengths), steps, side="right")
                    first_episode = min([first_episode, *dataset.numbers[places].tolist()])
            # Write the piece, and report whether enough was written for a commit.
            state = methods.extend(state, items, mask)
            advance(count)
            rows += count
            is_due = (rows - last) * flow.row_bytes >= _BETWEEN
            last = rows if is_due else last
            yield state, rows, is_due
    # One warning for the whole dataset, not one for each piece.
    if num_nonfinite:
        source = flow.datasets[0].source
        _log.warning(
            "%s: %d rewards are NaN or infinite, the first in episode %d: they are kept as they "
            "are. Dataset.where(predicate=...) leaves such episodes out",
            source if isinstance(source, str) else type(source).__name__,
            num_nonfinite,
            first_episode,
        )


def _pieces(flow: Streams, start: int) -> Iterator[tuple[Episode, Any, int]]:
    """Yields items, mask and row count of equally long pieces, from the row `start` on.

    All pieces have one length, so that one compiled program writes them. Items are zero, and the
    mask is False, where a stream has ended. Full pieces of equally long streams have no mask.
    """
    # Cut each stream into blocks of one size, and take them from all streams in step.
    size = max(1, min(_PIECE // flow.row_bytes, flow.rows - start))
    parts = [regroup_steps(_blocks_after(dataset, start), size) for dataset in flow.datasets]
    for blocks in itertools.zip_longest(*parts):
        counts = [0 if block is None else count_steps(block) for block in blocks]
        some = blocks[int(np.argmax(counts))]
        # Fill rows `[size, E, ...]`, which stay zero where a stream has no more steps.
        lead = (size, len(blocks))
        items = jax.tree.map(lambda x, s=lead: np.zeros((*s, *x.shape[1:]), x.dtype), some)
        for env, block in enumerate(blocks):
            if block is not None:
                put = lambda target, leaf, env=env: np.copyto(target[: len(leaf), env], leaf)
                jax.tree.map(put, items, block)
        # Equally long streams end in the same row, so they need a mask of rows only, or none.
        mask = np.arange(size)[:, None] < counts
        if flow.is_even:
            mask = None if mask.all() else mask[:, 0]
        if flow.num_envs is None:
            items = slice_steps(items, (slice(None), 0))
        yield items, mask, max(counts)


def _blocks_after(dataset: Any, skip: int) -> Iterator[Episode]:
    """Yields the blocks of a dataset without its first `skip` steps."""
    # Skip whole episodes by their number, and the first steps of the next one by reading them.
    ends = np.cumsum(dataset.lengths)
    first = int(np.searchsorted(ends, skip, side="right"))
    skip -= int(ends[first - 1]) if first else 0
    for block in dataset.only(dataset.numbers[first:]).blocks():
        steps = count_steps(block)
        if steps > skip:
            yield slice_steps(block, slice(skip, None))
        skip = max(0, skip - steps)


# Copies in the user's folder.


def root_of(root: str | os.PathLike[str] | None) -> str:
    """Returns the absolute path of a folder of datasets; None stands for the user's cache."""
    if root is not None:
        return absolute_path(root, "root")
    return require("platformdirs", "datasets").user_cache_dir("jrb", appauthor=False)


def copy_of(dataset: Any, num_envs: int | None, root: str) -> tuple[str, bytes]:
    """Returns the path of a dataset's copy, and the 32-byte digest of its content."""
    # A note saves reading all files again: it is named by their sizes and times, and has the digest
    # of their content.
    note = os.path.join(root, ".known", _digest(dataset, num_envs).hex())
    make_folder(os.path.dirname(note))
    content = b""
    with contextlib.suppress(FileNotFoundError), open(note, "rb") as file:
        content = file.read()
    # Without a note on files of these sizes and times, read them all, and write the note.
    if len(content) != _SIZE:
        content = _digest(dataset, num_envs, reads=True)
        # Replace the note at once, as other processes may read it.
        with open(f"{note}.{os.getpid()}", "wb") as file:
            file.write(content)
        os.replace(file.name, note)
    source = dataset.source
    # The copy's name begins with that of the files, for people who look into the folder.
    whole = os.path.basename(source) if isinstance(source, str) else dataset.format.name
    return os.path.join(root, f"{os.path.splitext(whole)[0]}-{content.hex()[:16]}"), content


@contextlib.contextmanager
def lock_copy(path: str, wait: bool) -> Iterator[None]:
    """Locks a copy to make or remove it; if another process has the lock, waits or raises."""
    root, name = os.path.split(path)
    # Locks are in a folder of their own, as the copy's folder may not exist yet.
    locks, is_warned = os.path.join(root, ".locks"), False
    make_folder(locks)
    folder = Folder(locks)
    while True:
        try:
            lock = Lock(folder, name)
            break
        except LockedError:
            if not wait:
                raise
        # Warn once, and try again until the other process has finished or died.
        if not is_warned:
            _log.warning("%s: waiting for another process, which makes this copy", path)
        is_warned = True
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        lock.release()


def _digest(dataset: Any, num_envs: int | None, reads: bool = False) -> bytes:
    """Returns a 32-byte digest of a dataset's files, episodes, spec and options.

    Files count by their content if `reads` is True, else by path, size and time of change.
    """
    source = dataset.source
    # A concatenation has the files of all its datasets; an object in memory has none.
    if isinstance(source, tuple):
        files: list[Any] = [_digest(part, None, reads).hex() for part in source]
    elif not isinstance(source, str):
        raise TypeError(
            f"expected a dataset in files, got one in a {type(source).__name__}, which nothing "
            "tells from another. Leave out the path of the storage, and cache=."
        )
    else:
        files = []
        # Paths count only in notes: a copy stays valid if its files are moved.
        for path in _files(source):
            about = os.stat(path)
            if not reads:
                files.append((path, about.st_size, about.st_mtime_ns))
                continue
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            files.append((os.path.relpath(path, source), content))
    # Add all else on which the stored items depend, JAX's dtypes included.
    leaves = jax.tree_util.tree_leaves_with_path(dataset.spec)
    spec = [(leaf_name(path), str(leaf.dtype), leaf.shape) for path, leaf in leaves]
    is_x64 = jax.dtypes.canonicalize_dtype(float).itemsize == 8
    options = repr(dataset.format), dataset.final, num_envs, is_x64
    numbers = dataset.numbers.tolist(), dataset.lengths.tolist()
    return hashlib.sha256(json.dumps([spec, options, files, numbers]).encode()).digest()


def _files(source: str) -> Iterator[str]:
    """Yields the path of a file, or of all files below a folder, sorted; follows links."""
    if os.path.isfile(source):
        yield source
    visited = set[str]()
    for folder, folders, names in os.walk(source, followlinks=True):
        # Links may lead back to a folder above, so each folder is entered once.
        folders[:] = [] if os.path.realpath(folder) in visited else sorted(folders)
        visited.add(os.path.realpath(folder))
        paths = (os.path.join(folder, name) for name in sorted(names))
        yield from filter(os.path.isfile, paths)
