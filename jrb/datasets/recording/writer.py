"""Checks a recorder's items, keeps them in memory, and writes them as parts.

T time, E environments.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import secrets
import threading
from typing import Any

import jax
import numpy as np

from jrb.authoring import Folder, Lock, casting, leaf_name, leaf_names, make_folder
from jrb.checkpoint import LockedError
from jrb.datasets.reading.names import check, check_names, check_reward, ted_names
from jrb.datasets.reading.tabular import combine_flags, is_set
from jrb.datasets.recording import parts
from jrb.datasets.recording.parts import TERMINATED, TRUNCATED, RecordedLeaf, RecordingSchema
from jrb.keys import Keys, path_name, within

_FLAGS = ("done", "terminated", "truncated")
_ROLES = ("observation", "action", "reward", "next_observation")
_RESERVED = ("next/done", TERMINATED, TRUNCATED)
_KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
_MOST_ITEMS = 1 << 20  # the maximum number of items of a part, unless `chunk` is given
_STREAM = np.dtype([("is_over", "?"), ("episode", "i8"), ("step", "i8"), ("own_number", "i8")])


@dataclasses.dataclass(frozen=True, eq=False)
class ItemSpec:
    """The structure, shapes and dtypes of items, and the roles of their leaves."""

    structure: Any
    specs: list[Any]  # the shape and dtype of each leaf, without leading axes
    names: list[str]  # the names of the leaves
    arrays: list[RecordedLeaf]  # the leaves as they are recorded, with their names in TED
    flags: dict[str, int]  # the index of the leaf of each flag, by its field of `jrb.Keys`
    episode: int | None  # the index of the leaf with the episode number; None if there is none

    @property
    def leaves(self) -> tuple[RecordedLeaf, ...]:
        """The recorded leaves that are not flags, sorted by name."""
        step_leaves = [leaf for n, leaf in enumerate(self.arrays) if n not in self.flags.values()]
        return tuple(sorted(step_leaves, key=lambda leaf: leaf.name))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on these items for users of the dataset, about keys and missing flags."""
        notes = [
            f"'{leaf.name}' holds the words of PRNG keys: "
            f"jax.random.wrap_key_data(words, impl='{leaf.key_impl}') makes them keys."
            for leaf in self.leaves
            if leaf.key_impl is not None
        ]
        if not self.flags:
            notes.append("The items have no flags: episodes end where the recorder was told so.")
        elif "terminated" not in self.flags:
            instead = "every episode counts as truncated"
            if "done" in self.flags:
                instead = f"'{self.names[self.flags['done']]}' stands for it, unless truncated"
            notes.append(f"The items have no flag of termination: {instead}.")
        return tuple(notes)

    def check(self, items: Any, lead: tuple[int, ...], method: str) -> list[Any]:
        """Returns the leaves `[*lead, ...]` of items, numbers as arrays; raises if one differs."""
        # Compare the structure first, to name the leaves that are missing or not expected.
        leaves, structure = jax.tree.flatten(items)
        if structure != self.structure:
            ours, names = set(self.names), leaf_names(items)
            text = (
                f"the leaves {self.names}, got {names}: missing {sorted(ours.difference(names))}, "
                f"not expected {sorted({*names} - ours)}"
            )
            if ours == {*names}:
                text = f"the structure {self.structure}, got {structure}"
            raise ValueError(
                f"{method}: expected an item with {text}. All items of a recorder look alike; "
                "record others to another path."
            )
        for number, (leaf, spec) in enumerate(zip(leaves, self.specs, strict=True)):
            where = f"{method}: leaf '{self.names[number]}'"
            # Python numbers are taken as the numbers that JAX makes of them.
            if not hasattr(leaf, "dtype"):
                leaf = leaves[number] = _number(leaf, spec, where)
            if leaf.dtype != spec.dtype:
                raise TypeError(
                    f"{where}: expected dtype {spec.dtype}, got {leaf.dtype}. Cast it yourself: a "
                    "recorder keeps every bit."
                )
            if leaf.shape != (*lead, *spec.shape):
                raise ValueError(
                    f"{where}: expected shape {(*lead, *spec.shape)}, got {leaf.shape}. Time comes "
                    "first, then the environments; add takes one timestep, append several."
                )
        return leaves


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
        terminated, truncated = combine_flags(now.held, *map(flags.get, _FLAGS))
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
    is_other = lambda name: name[0] != "." and not re.fullmatch(parts.OWN, name)
    others = list(filter(is_other, folder.names()))
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


# The structure of items.


def _number(leaf: object, spec: Any, where: str) -> np.ndarray:
    """Returns a Python number as an array of the dtype that JAX gives it."""
    if isinstance(leaf, int) and np.dtype(spec.dtype).kind == "i":
        # NumPy would wrap an integer that does not fit, without an error.
        bounds = np.iinfo(spec.dtype)
        fits = bounds.min <= leaf <= bounds.max
        check(fits, where, f"an integer that {spec.dtype} holds", leaf)
    return np.asarray(leaf).astype(jax.dtypes.canonicalize_dtype(type(leaf)))


def item_spec(example: Any, lead: int, keys: Keys, method: str) -> ItemSpec:
    """Returns the spec of items like `example`, whose leaves have `lead` leading axes.

    Raises for items without a reward, with names that collide in TED, or with other than numbers.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(example)
    names = [leaf_name(path) for path, _ in leaves]
    specs = [_leaf_spec(leaf, lead, f"{method}: leaf '{leaf_name(path)}'") for path, leaf in leaves]
    # A slash separates the levels of names in TED, so no key may have one.
    for path, _ in leaves:
        has_slash = any("/" in leaf_name((part,)) for part in path)
        check(not has_slash, method, "names without a slash", f"'{leaf_name(path)}'. Rename it")
    # A dataset needs rewards; the other parts of a transition may be missing.
    check_reward("reward", names, keys)
    # Name the leaves as in TED. Flags become columns of the recorder's own, so only the others need
    # names apart from each other.
    numbers = _single_numbers(names, specs, keys, method)
    episode = numbers.pop("episode", None)
    in_ted = ted_names(names, keys, _ROLES)
    step_names = [in_ted[name] for n, name in enumerate(names) if n not in numbers.values()]
    try:
        check_names(method, [*_RESERVED, *step_names])
    except ValueError as error:
        raise ValueError(
            f"{error} Each leaf needs a place of its own in TED, apart from the flags "
            f"{list(_RESERVED)}: name all parts with keys=jrb.Keys(...)."
        ) from error
    arrays = [_recorded_leaf(in_ted[name], spec) for name, spec in zip(names, specs, strict=True)]
    # Arrow gives the sizes of single values in 32 bits.
    for leaf in arrays:
        got, is_small = f"{leaf.dtype} of shape {leaf.shape}", leaf.width < 1 << 31
        check(is_small, f"{method}: leaf '{leaf.name}'", "less than 2 GiB in one item", got)
    return ItemSpec(structure, specs, names, arrays, numbers, episode)


def _single_numbers(names: list[str], specs: list[Any], keys: Keys, method: str) -> dict[str, int]:
    """Returns the leaf indices of the flags and the episode number, by their fields of `Keys`."""
    numbers: dict[str, int] = {}
    for role in (*_FLAGS, "episode"):
        # A flag is optional. If `keys` has a path for episode numbers, there must be such a leaf.
        path = path_name(getattr(keys, role))
        if not (role == "episode" and path) and not any(within(name, path) for name in names):
            continue
        # A leaf of this name must be one number; a group of leaves below it is none.
        place = names.index(path) if path in names else -1
        spec, where = specs[place], f"{method}: leaf '{path}'"
        is_number = place >= 0 and spec.shape in ((), (1,)) and not casting.is_keys(spec.dtype)
        got = spec if place >= 0 else "no such leaf"
        check(is_number, where, "one number for each item, of shape () or (1,)", got)
        if role == "episode" and spec.dtype.kind not in "iu":
            raise TypeError(
                f"{where}: expected integers, the numbers of episodes, got {spec.dtype}."
            )
        numbers[role] = place
    return numbers


def _recorded_leaf(name: str, spec: Any) -> RecordedLeaf:
    """Returns a leaf as it is recorded: keys as their words, in this machine's byte order."""
    if not casting.is_keys(spec.dtype):
        return RecordedLeaf(name, str(np.dtype(spec.dtype.type)), tuple(spec.shape))
    # Find the implementation of the keys, with which their words become keys again.
    words = jax.eval_shape(jax.random.key_data, spec)
    impls = [impl for impl in _KEY_IMPLS if jax.random.key(0, impl=impl).dtype == spec.dtype]
    if not impls:
        raise TypeError(f"leaf '{name}': expected keys of {_KEY_IMPLS}, got {spec.dtype}.")
    return RecordedLeaf(name, str(words.dtype), tuple(words.shape), impls[0])


def _leaf_spec(leaf: Any, lead: int, where: str) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "dtype"):
        leaf = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(type(leaf)))
    dtype = leaf.dtype if casting.is_keys(leaf.dtype) else np.dtype(leaf.dtype)
    if isinstance(dtype, np.dtype):
        check_numeric(where, dtype)
    has_lead = len(leaf.shape) >= lead
    check(has_lead, where, f"{lead} axes for time and environments", leaf.shape)
    return jax.ShapeDtypeStruct(tuple(leaf.shape[lead:]), dtype)


def check_numeric(where: str, dtype: np.dtype) -> None:
    """Raises `TypeError` for dtypes of texts, times, objects and structs."""
    # Dtypes of other packages, such as bfloat16, are of kind V too, but are numbers.
    if dtype.kind in "OSUMmV" and dtype.type.__module__ == "numpy":
        raise TypeError(
            f"{where}: expected numbers, got dtype {dtype}. Encode it, or leave it out."
        )
