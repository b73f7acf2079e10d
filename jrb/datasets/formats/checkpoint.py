"""Checkpoints and stores of jrb as datasets, loaded by `jrb.load`.

K episodes, T steps of all of them.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import jrb
from jrb.authoring import enable_x64, leaf_names
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import DamagedError
from jrb.datasets.format import Source, native
from jrb.datasets.reading import tabular
from jrb.datasets.reading.names import check, leaves_in_ted
from jrb.datasets.reading.tabular import DONE, FLAGS, TERMINATED, TRUNCATED, VALID, Table
from jrb.keys import Keys

_Loaded = tuple[Table, int | None, str]
"""The steps, the number of the generation, and the identity of the files."""


@dataclasses.dataclass(frozen=True)
class Checkpoint(tabular.TableFormat):
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
        """Returns True if a folder is a checkpoint."""
        is_folder = isinstance(source, str) and os.path.isdir(source)
        return is_folder and jrb.checkpoint.is_checkpoint(source)

    def snapshot(self, source: Source) -> "Checkpoint":
        """Returns the format for the generation that is the newest now, which it keeps loaded."""
        loaded = self._load(source)
        _, generation, stamp = loaded
        snapshot = dataclasses.replace(self, generation=generation, stamp=stamp, verify=False)
        vars(snapshot)["_loaded"] = loaded
        return snapshot

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Yields the steps as they were loaded, or loads the files of the stamp."""
        loaded = vars(self).get("_loaded") or self._load(source)
        if self.stamp not in (None, loaded[2]):
            raise jrb.StaleError(
                f"{source}: expected the files that were there when the dataset was opened, got "
                "others. Open it again."
            )
        if self.stamp is not None:  # else the next source may be another one
            vars(self)["_loaded"] = loaded
        yield loaded[0]

    def _load(self, source: Source) -> _Loaded:
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
        """Returns True if a file is a checkpoint."""
        is_file = isinstance(source, str) and os.path.isfile(source)
        return is_file and jrb.checkpoint.is_checkpoint(source)

    def _newest(self, source: Source) -> int | None:
        return None


def _load(path: str, format: Checkpoint, number: int | None) -> _Loaded:
    """Loads one generation, or a file; refuses all but one buffer whose items are in episodes.

    Items are read when they are asked for, from memory or from the files of a store.
    """
    with enable_x64():
        options = {"generation": number, "verify": format.verify}
        buffer, state = jrb.load(path, format.buffer, **options)
        if not isinstance(buffer, ReplayBuffer):
            inside = (os.path.join(path, name) for name in sorted(os.listdir(path)))
            parts = ", ".join(each for each in inside if jrb.checkpoint.is_checkpoint(each))
            check(False, path, "a single buffer", f"several. Open one of them: {parts}")
        keys = format.keys or buffer.keys
        if keys != buffer.keys:
            keyed = dataclasses.replace(buffer, keys=keys, storage=jrb.DeviceStorage())
            buffer, state = keyed, jrb.rebuild(buffer, state, keyed)
        episodes = jrb.episodes(buffer, state)
    names = leaf_names(buffer.stored(state))
    twice = [name for name in names if names.count(name) > 1]
    got = f"{len(twice)} of this name. Load it with jrb.load, and rename one"
    where = f"{path}: leaf '{', '.join(twice[:1])}'"
    check(not twice, where, "leaves with names of their own", got)
    facts = {
        "environment": np.array([each.environment for each in episodes], np.int64),
        "complete": np.array([each.complete for each in episodes], bool),
        "running": np.array([not each.ended for each in episodes], bool),
        "cut": np.array([each.cut for each in episodes], bool),
    }
    slots = [np.asarray(each.slots) for each in episodes]
    stat = os.stat(path)
    about = stat.st_mtime_ns if number is None else jrb.checkpoint.metadata(path, number)
    leaves = list(leaves_in_ted(path, names, keys).values())
    order = np.concatenate([np.zeros(0, np.int32), *slots])
    ends = np.cumsum([len(each) for each in slots], dtype=np.int64)
    is_last = np.isin(np.arange(len(order)), ends - 1)

    def take(at: np.ndarray) -> dict[str, np.ndarray]:
        # Reads are compiled for each length, so lengths are rounded up to powers of two.
        padding = (1 << (len(at) - 1).bit_length()) - len(at) if len(at) else 0
        padded = np.pad(at, (0, padding), mode="edge" if len(at) else "constant")
        with enable_x64():  # every leaf in the dtype of the files
            items = buffer.take(state, jnp.asarray(padded, jnp.int32))
            arrays = [np.array(_raw(leaf))[: len(at)] for leaf in jax.tree.leaves(items)]
        steps = dict(zip(leaves, arrays, strict=True))
        flags = {name: tabular.is_set(steps.pop(name)) for name in FLAGS if name in steps}
        terminated, truncated = tabular.combined_flags(len(at), *map(flags.get, FLAGS))
        return {**steps, TERMINATED: terminated, TRUNCATED: truncated}

    # All columns of a slice are read at once: a table asks for two slices, one a row longer.
    @functools.lru_cache(maxsize=2)
    def read(start: int, stop: int) -> dict[str, np.ndarray]:
        steps = take(order[start:stop])
        valid = tabular.is_set(steps.get(VALID, np.ones(stop - start)))
        inside = valid | is_last[start:stop]
        got, where = f"{np.count_nonzero(~inside)} others", f"{path}: leaf '{VALID}'"
        check(inside.all(), where, "True but for last steps of episodes", got)
        return steps

    last, columns = take(order[is_last]), dict[str, tabular.DerivedColumn]()
    for name, leaf in last.items():
        column = lambda start, stop, name=name: read(start, stop)[name].copy()
        shape = (len(order), *leaf.shape[1:])
        columns[name] = tabular.DerivedColumn(shape, native(leaf.dtype), column)
    cut = None
    if columns.pop(VALID, None) is not None:  # `Dataset` adds it again
        cut = ~tabular.is_set(last[VALID]) & ~last[TERMINATED]
    elif not any(name.split("/")[:2] == ["next", "observation"] for name in columns):
        cut = ~last[TERMINATED]
    notes = (tabular.DONE_NOTE,) * ({*FLAGS}.intersection(leaves) == {DONE})
    table = Table(columns, ends, facts, notes=notes, cut=cut)
    return table, number, repr((stat.st_ino, about, len(slots)))


def _raw(leaf: Any) -> Any:
    """Returns PRNG keys as their words, other arrays as they are."""
    is_keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_keys else leaf
