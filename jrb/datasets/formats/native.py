"""Checkpoints and stores of jrb as datasets, loaded by `jrb.load`.

K episodes, T steps.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import h5py
import jax
import jax.numpy as jnp
import numpy as np

from jrb import _saved, checkpoint, read
from jrb._core import episodes
from jrb._core.steps import context_of
from jrb._store import generation, opening
from jrb._store.errors import DamagedError, StaleError
from jrb._store.generation import Generation
from jrb._util import checks, prng_keys, pytree
from jrb._xla import compat
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import descriptions, host_items
from jrb.datasets.format import Description, Source
from jrb.datasets.reading import hdf5, vectorized
from jrb.datasets.reading.flat import Flat, Table
from jrb.datasets.reading.vectorized import Leaf, Rows
from jrb.keys import Keys, path_name
from jrb.state import BufferState
from jrb.storages.host_rows import HostView
from jrb.storages.on_host import HostArrays

VALID = "next/valid"
"""The leaf that marks missing next observations in datasets written by jrb."""


@dataclasses.dataclass(frozen=True)
class Native(Flat):
    """The items of a buffer as they were saved.

    Attributes:
        keys: paths to the parts of a transition in an item; None for those of the buffer.
        generation: number of the generation; None for the newest one when the dataset is opened.
        verify: whether rows that stay in the files of a store are all verified when it is opened.
        stamp: identity of the opened files; `jrb.datasets.open` fills it in.
    """

    name: ClassVar[str] = "jrb"
    looks_for: ClassVar[str] = "a folder that jrb.save or jrb.MemmapStorage has made"

    keys: Keys | None = None
    generation: int | None = None
    verify: bool = True
    stamp: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.generation is not None:
            checks.count("generation", self.generation)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields; whoever unpickles them opens the files again."""
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def is_own(self, source: str, name: str) -> bool:
        """Returns whether a file is the checkpoint's."""
        return _saved.is_own(source, name)

    def matches(self, source: Source) -> bool:
        """Returns whether there is a generation of a store."""
        if not isinstance(source, str) or not os.path.isdir(source):
            return False
        with contextlib.suppress(OSError):
            folder = opening.folder_at(source)
            last = generation.last(folder)
            return last is not None and generation.is_own(folder, generation.name_of(last))
        return False

    def snapshot(self, source: Source) -> "Native":
        """Returns the kind for the files as they are now, with what they hold."""
        opened = _opened(source, self)
        kind = dataclasses.replace(self, verify=False, **opened.pins)
        vars(kind)["_opened"] = opened
        return kind

    def describe(self, source: Source) -> Description:
        """Returns what there is; episodes whose last next observation is missing count as cut.

        Raises:
            ValueError: a next observation is missing within an episode.
        """
        opened, description = self._held(source), super().describe(source)
        if opened.valid is None:
            return description
        last = opened.table.ends - 1
        inside = np.delete(opened.valid, last)
        if not inside.all():
            raise ValueError(
                f"leaf '{VALID}': expected True but for last steps of episodes, got "
                f"{np.count_nonzero(~inside)} others."
            )
        cut = ~opened.valid[last] & ~opened.table.terminated
        return dataclasses.replace(description, cut=cut)

    @contextlib.contextmanager
    def table(self, source: Source) -> Iterator[Table]:
        """Yields all steps."""
        yield self._held(source).table

    def _held(self, source: Source) -> "_Opened":
        """Returns what the files hold, which have to be those of the stamp."""
        if "_opened" not in vars(self):
            opened = _opened(source, self)
            if self.stamp not in (None, opened.pins["stamp"]):
                raise StaleError(
                    f"{source}: expected the files that were there when the dataset was opened, "
                    "got others. Open it again."
                )
            if self.stamp is None:  # not snapshot: the next source may be another one
                return opened
            vars(self)["_opened"] = opened
        return vars(self)["_opened"]


@dataclasses.dataclass(frozen=True)
class NativeH5(Native):
    """The items of a buffer that was saved with `layout="h5"`, all of them in memory."""

    name: ClassVar[str] = "jrb-h5"
    looks_for: ClassVar[str] = "a file that jrb.save(..., layout='h5') has made"

    def matches(self, source: Source) -> bool:
        """Returns whether the file says so."""
        if not hdf5.is_hdf5(source):
            return False
        with contextlib.suppress(OSError, ValueError), h5py.File(source, "r") as file:
            return file.attrs.get("format") == _saved.H5
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class _Opened:
    """A loaded checkpoint, whose items are in memory or stay in the files of a store.

    Attributes:
        table: all steps.
        valid: bool `[T]`, which next observations are there; None if no leaf says so.
        pins: fields of the kind that identify the files.
    """

    table: Table
    valid: np.ndarray | None
    pins: dict[str, Any]


def _opened(path: str, kind: Native) -> _Opened:
    """Loads a checkpoint, which another process may be saving to."""
    while True:
        found = None if os.path.isfile(path) else _saved.opened(path, kind.generation)
        try:
            return _loaded(path, kind, found)
        except (DamagedError, FileNotFoundError, StaleError):
            is_newest = found is None or _saved.opened(path).number == found.number
            if is_newest or kind.generation is not None:
                raise  # else the next generation has replaced this one


def _loaded(path: str, kind: Native, found: Generation | None) -> _Opened:
    """Loads one generation, or a file."""
    given = None if found is None else _without_functions(path, found)
    number = kind.generation if found is None else found.number
    with compat.enable_x64():  # so that every leaf has the dtype of the files
        buffer, state = checkpoint.load(path, given, generation=number, verify=kind.verify)
        leaves, keys = _leaves(path, buffer, state), kind.keys or buffer.keys
        rows = _rows(buffer, state, keys, leaves)
    mark = leaves.pop(VALID, None)
    valid = None if mark is None else vectorized.is_set(mark.take(rows.order))
    table = vectorized.table(path, leaves, keys, rows)
    about = os.stat(path if found is None else os.path.join(path, generation.name_of(found.number)))
    stamp = about.st_ino, about.st_mtime_ns, about.st_size, len(rows.order)
    return _Opened(table, valid, {"generation": number, "stamp": stamp})


def _without_functions(path: str, found: Generation) -> ReplayBuffer:
    """Returns the description without functions as transforms: no stored item depends on them.

    Raises:
        ValueError: the checkpoint is not of one buffer with its items as they are.
    """
    meta, got = _saved.meta_of(found), ""
    if meta.get("kind") in (_saved.MIX, _saved.SEVERAL, _saved.SHARDED):
        parts = ", ".join(_saved.path_of(path, name) for name in meta["parts"])
        got = f"several. Open one of them: {parts}"
    elif meta.get("form"):
        got = f"one whose items are of kind '{meta['form']['kind']}'. Load it with jrb.load"
    elif meta["batch"]:
        got = f"{meta['batch']} states under vmap. Load them with jrb.load, and save each"
    if got:
        raise ValueError(f"{path}: expected a single buffer with its items as they are, got {got}.")
    fields = meta["buffer"]["fields"]
    kept = [part for part in fields["transforms"]["tuple"] if "named" not in part]
    node = {**meta["buffer"], "fields": {**fields, "transforms": {"tuple": kept}}}
    return host_items.prepared(descriptions.decoded(path, node, ReplayBuffer), given=False)


def _rows(buffer: ReplayBuffer, state: BufferState, keys: Keys, leaves: dict[str, Leaf]) -> Rows:
    """Returns the rows of the episodes that a buffer holds, by the flags that `keys` name.

    Not `jrb.episodes`: that compiles a function for the state, which JAX keeps, and a temporary
    store with it; and other keys belong to another state.
    """
    checks.chronological("jrb.datasets", buffer.writer)
    spec, ring = buffer.storage.spec(state.storage), buffer.ring
    episodes.check(spec, keys)
    context = context_of(dataclasses.replace(buffer, keys=keys), state.writer)
    slots = np.asarray(context.held.from_oldest(ring))
    counts = np.broadcast_to(np.asarray(context.held.rows(ring)), ring.envs)
    here = np.arange(ring.rows)[:, None] < counts
    over = np.array(buffer.unit.is_episode_end(context, state.unit, jnp.asarray(slots)))
    for name in keys.flags(spec):
        over[here] |= vectorized.is_set(leaves[name].take(slots[here]))
    if keys.episode is not None:
        number = np.zeros(slots.shape, leaves[path_name(keys.episode)].spec.dtype)
        number[here] = leaves[path_name(keys.episode)].take(slots[here]).reshape(-1)
        over[:-1] |= here[1:] & (number[1:] != number[:-1])
    lost = read.has_lost_beginning(buffer, state.writer, state.unit)
    return vectorized.in_episodes(slots, over, here, lost)


def _leaves(path: str, buffer: ReplayBuffer, state: BufferState) -> dict[str, Leaf]:
    """Returns the leaves by name, which are read by slots."""
    spec = buffer.storage.spec(state.storage)
    names, specs = pytree.leaf_names(spec), list(map(prng_keys.raw_spec, jax.tree.leaves(spec)))
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"{path}: leaf '{twice[0]}': expected leaves with names of their own, got "
            f"{len(twice)} of this name. Load it with jrb.load, and rename one."
        )
    if isinstance(buffer.storage, HostArrays):
        view = buffer.storage.view(state.storage)
        takes = [functools.partial(_taken, view, number) for number in range(len(names))]
    else:
        held, place = read.held_slots(buffer, state, "jrb.datasets"), np.zeros(buffer.capacity, int)
        place[held] = np.arange(len(held))
        items = jax.tree.leaves(read.taken(buffer, state, held))
        takes = [lambda slots, leaf=leaf: leaf[place[slots]] for leaf in items]
    return dict(zip(names, map(Leaf, specs, takes), strict=True))


def _taken(view: HostView, number: int, slots: np.ndarray) -> np.ndarray:
    """Returns the leaf of this number at slots, from the files."""
    spec = view.rows.raw[number]
    leaf = view.rows.read_leaf(view.version, number, slots)
    return leaf.view(spec.dtype).reshape(len(slots), *spec.shape)
