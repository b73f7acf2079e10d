"""Checkpoints and stores of jrb as datasets, loaded by `jrb.load`.

K episodes, T steps of one.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import jrb
from jrb.authoring import enable_x64, leaf_names
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import DamagedError
from jrb.datasets.format import Description, Episode, Indexed, Source, shifted, spec_of
from jrb.datasets.reading.columns import (
    DONE,
    TERMINATED,
    TRUNCATED,
    combined_flags,
    is_seen,
)
from jrb.datasets.reading.vectorized import flag_notes, is_set, leaves_in_ted
from jrb.keys import Keys
from jrb.layouts.names import nest
from jrb.state import BufferState

_FLAGS = (DONE, TERMINATED, TRUNCATED)


@dataclasses.dataclass(frozen=True)
class Checkpoint(Indexed):
    """The items of a buffer as they were saved, in episodes.

    Attributes:
        keys: paths to the parts of a transition in an item; None for those of the buffer.
        generation: number of the generation; None for the newest one when the dataset is opened.
        verify: False to open a store without reading all of its rows.
        buffer: the description; needed if that holds functions, as for `jrb.load`.
        stamp: identity of the opened files; `jrb.datasets.open` fills it in.
    """

    name: ClassVar[str] = "jrb"
    looks_for: ClassVar[str] = "a folder that jrb.save or jrb.MemmapStorage has made"

    keys: Keys | None = None
    generation: int | None = None
    verify: bool = True
    buffer: ReplayBuffer | None = None
    stamp: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields; whoever unpickles them loads the files again."""
        return {name: value for name, value in self.__dict__.items() if name != "_loaded"}

    def matches(self, source: Source) -> bool:
        """Returns whether a folder is a checkpoint."""
        is_folder = isinstance(source, str) and os.path.isdir(source)
        return is_folder and jrb.checkpoint.is_checkpoint(source)

    def snapshot(self, source: Source) -> "Checkpoint":
        """Returns the format for the generation that is the newest now, which it keeps loaded."""
        loaded = self._load(source)
        fields = {"generation": loaded.generation, "stamp": loaded.stamp, "verify": False}
        snapshot = dataclasses.replace(self, **fields)
        vars(snapshot)["_loaded"] = loaded
        return snapshot

    def describe(self, source: Source) -> Description:
        """Describes the dataset; reads the last step of each episode, and its facts."""
        loaded = self._opened(source)
        last = loaded.read(np.array([slots[-1] for slots in loaded.slots], np.int32))
        terminated = last["next"]["terminated"]
        cut = None if loaded.has_next else ~terminated
        if "valid" in last["next"]:
            cut = ~is_set(last["next"]["valid"]) & ~terminated
        spec = spec_of(loaded.without_mark(last))
        lengths = np.array([len(slots) for slots in loaded.slots], np.int64)
        notes = flag_notes(loaded.names.values())
        return Description(spec, lengths, cut, loaded.facts, notes=notes)

    def pick(self, source: Source, numbers: Sequence[int]) -> Iterator[Episode]:
        """Yields the episodes of these numbers.

        Raises:
            ValueError: a next observation is missing within an episode.
        """
        loaded = self._opened(source)
        for number in numbers:
            episode = loaded.read(loaded.slots[number])
            inside = is_set(episode["next"].get("valid", np.ones(1)))[:-1]
            if not inside.all():
                raise ValueError(
                    f"{source}: leaf 'next/valid': expected True but for last steps of episodes, "
                    f"got {np.count_nonzero(~inside)} others in episode {number}."
                )
            yield loaded.without_mark(episode)

    def _opened(self, source: Source) -> "_Loaded":
        """Returns what was loaded, or loads the files of the stamp."""
        if "_loaded" in vars(self):
            return vars(self)["_loaded"]
        loaded = self._load(source)
        if self.stamp not in (None, loaded.stamp):
            raise jrb.StaleError(
                f"{source}: expected the files that were there when the dataset was opened, got "
                "others. Open it again."
            )
        if self.stamp is not None:  # else the next source may be another one
            vars(self)["_loaded"] = loaded
        return loaded

    def _load(self, source: Source) -> "_Loaded":
        """Loads a checkpoint, which another process may be saving to."""
        while True:
            newest = self._newest(source)
            number = newest if self.generation is None else self.generation
            try:
                return _load(source, self, number)
            except (DamagedError, FileNotFoundError, jrb.StaleError):
                # Another generation may have replaced this one meanwhile.
                if self.generation is not None or self._newest(source) == newest:
                    raise

    def _newest(self, source: Source) -> int | None:
        return jrb.checkpoint.metadata(source)["generation"]


@dataclasses.dataclass(frozen=True)
class CheckpointFile(Checkpoint):
    """The items of a buffer that was saved with `layout="h5"`."""

    name: ClassVar[str] = "jrb-h5"
    looks_for: ClassVar[str] = "a file that jrb.save(..., layout='h5') has made"

    def matches(self, source: Source) -> bool:
        """Returns whether a file is a checkpoint."""
        is_file = isinstance(source, str) and os.path.isfile(source)
        return is_file and jrb.checkpoint.is_checkpoint(source)

    def _newest(self, source: Source) -> int | None:
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class _Loaded:
    """A loaded checkpoint.

    Attributes:
        buffer: the description.
        state: the state, in memory or in the files of a store.
        slots: the slots of each episode, oldest first.
        names: the leaves in TED of the leaves of items.
        facts: as in `Description`.
        generation: number of the generation.
        stamp: identity of the files.
    """

    buffer: ReplayBuffer
    state: BufferState
    slots: list[np.ndarray]
    names: dict[str, str]
    facts: dict[str, np.ndarray]
    generation: int | None
    stamp: str

    @property
    def has_next(self) -> bool:
        """True if the next observations are stored."""
        return any(leaf.startswith("next/observation") for leaf in self.names.values())

    def read(self, slots: np.ndarray) -> Episode:
        """Reads the items at slots `[T]`, in TED, with `next/valid` as it is stored."""
        # Reads are compiled for each length, so lengths are rounded up to powers of two.
        padding = (1 << (len(slots) - 1).bit_length()) - len(slots) if len(slots) else 0
        padded = np.pad(slots, (0, padding), mode="edge" if len(slots) else "constant")
        with enable_x64():  # every leaf in the dtype of the files
            items = self.buffer.take(self.state, jnp.asarray(padded, jnp.int32))
            leaves = [np.array(_raw(leaf))[: len(slots)] for leaf in jax.tree.leaves(items)]
        steps = dict(zip(self.names.values(), leaves, strict=True))
        if not self.has_next:
            seen = {name: leaf for name, leaf in steps.items() if is_seen(name)}
            steps |= {f"next/{name}": shifted(leaf, len(slots)) for name, leaf in seen.items()}
        flags = {name: is_set(steps.pop(name)) for name in _FLAGS if name in steps}
        terminated, truncated = combined_flags(len(slots), *map(flags.get, _FLAGS))
        return nest({**steps, TERMINATED: terminated, TRUNCATED: truncated})

    def without_mark(self, episode: Episode) -> Episode:
        """Returns the steps without `next/valid`, which `Dataset` adds again."""
        after = {name: leaf for name, leaf in episode["next"].items() if name != "valid"}
        return {**episode, "next": after}


def _load(path: str, format: Checkpoint, number: int | None) -> _Loaded:
    """Loads one generation, or a file.

    Raises:
        ValueError: the checkpoint is not of one buffer whose items are in episodes.
    """
    with enable_x64():
        options = {"generation": number, "verify": format.verify}
        buffer, state = jrb.load(path, format.buffer, **options)
        if not isinstance(buffer, ReplayBuffer):
            inside = (os.path.join(path, name) for name in sorted(os.listdir(path)))
            parts = ", ".join(each for each in inside if jrb.checkpoint.is_checkpoint(each))
            raise ValueError(
                f"{path}: expected a single buffer, got several. Open one of them: {parts}"
            )
        keys = format.keys or buffer.keys
        if keys != buffer.keys:
            keyed = dataclasses.replace(buffer, keys=keys, storage=jrb.DeviceStorage())
            buffer, state = keyed, jrb.rebuild(buffer, state, keyed)
        episodes = jrb.episodes(buffer, state)
    own = leaf_names(buffer.stored(state))
    twice = [name for name in own if own.count(name) > 1]
    if twice:
        raise ValueError(
            f"{path}: leaf '{twice[0]}': expected leaves with names of their own, got "
            f"{len(twice)} of this name. Load it with jrb.load, and rename one."
        )
    names = leaves_in_ted(path, own, keys)
    slots = [np.asarray(each.slots) for each in episodes]
    facts = {
        "environment": np.array([each.environment for each in episodes], np.int64),
        "complete": np.array([each.complete for each in episodes], bool),
        "running": np.array([not each.ended for each in episodes], bool),
        "cut": np.array([each.cut for each in episodes], bool),
    }
    stat = os.stat(path)
    about = stat.st_mtime_ns if number is None else jrb.checkpoint.metadata(path, number)
    stamp = repr((stat.st_ino, about, len(slots)))
    return _Loaded(buffer, state, slots, names, facts, number, stamp)


def _raw(leaf: Any) -> Any:
    """Returns PRNG keys as their words, other arrays as they are."""
    is_keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_keys else leaf
