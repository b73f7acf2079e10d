"""What a checkpoint of ours holds, row by row.

Rows of a store are read where they lie, and the checksums of their blocks compared before that. N
capacity, E environments, R = N / E rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import _saved, checkpoint, read
from jrb._base import checks, prng_keys, pytree, versions
from jrb._engine import columns, episodes
from jrb._engine.steps import context_of
from jrb._store import opening
from jrb._store.errors import DamagedError, StaleError
from jrb._store.generation import Generation, Location
from jrb._store.store import Store
from jrb.buffer import ReplayBuffer
from jrb.checkpoint import commits, host_items, matching, native, state_specs
from jrb.datasets.reading import rings
from jrb.datasets.reading.rings import Leaf, Rows
from jrb.keys import Keys, path_name
from jrb.state import BufferState
from jrb.storages import DeviceStorage

VALID = "next/valid"
"""The leaf by which our own datasets tell next observations that are none."""

ENDS, FACTS = ".dataset/ends", ".dataset/facts/"
"""The arrays by which a store that was written as a dataset tells where episodes end, int64 `[K]`,
and what is known of each."""


def stored(path: str, number: int | None) -> "InRows | InMemory":
    """What lies at a path, read by rows where it can be."""
    store = opening.reopen(path, number, check=False)
    opening.check(store, rows=False)
    opened = Generation(store.folder, store.generation)
    meta = _saved.meta_of(opened)
    _check(path, meta)
    buffer, spec = _described(path, meta)
    _check_names(path, spec)
    if isinstance(buffer.storage, DeviceStorage) and buffer.storage.once:
        return InMemory(path, opened.number)
    return InRows(path, buffer, spec, store, opened)


def _described(path: str, meta: dict[str, Any]) -> tuple[ReplayBuffer, Any]:
    """The description, without transforms, which no stored item depends on; and the items' spec."""
    node = meta["buffer"]
    if isinstance(node, dict) and "fields" in node:
        node = {**node, "fields": {**node["fields"], "transforms": {"tuple": []}}}
    with versions.enable_x64():
        return matching.fitting(path, {**meta, "buffer": node}, None, None)


def _check_names(path: str, spec: Any) -> None:
    """Raises if two leaves have one name, by which a dataset knows them."""
    names = pytree.leaf_names(spec)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"{path}: leaf '{twice[0]}': expected leaves with names of their own, got "
            f"{len(twice)} of this name, as {{'a': {{'b': ...}}, 'a/b': ...}} has. Load it with "
            "jrb.load, and rename one."
        )


def _check(path: str, meta: dict[str, Any]) -> None:
    """Raises unless a generation is one of a buffer with items that anybody can read."""
    kind, form = meta.get("kind"), meta.get("form")
    if kind in (_saved.MIX, _saved.SEVERAL):
        parts = [_saved.path_of(path, name) for name in meta.get("parts", {})]
        raise ValueError(
            f"{path}: expected a single buffer, got several. Open one of them: {', '.join(parts)}."
        )
    if kind not in (native.KIND, commits.KIND):
        raise ValueError(f"{path}: expected a checkpoint of a buffer, got one of kind {kind!r}.")
    if form is not None:
        raise ValueError(
            f"{path}: expected a checkpoint with its items as they are, got one whose items are "
            f"of kind {form.get('kind')!r}. Load it with jrb.load, and save it as it is."
        )
    if meta.get("batch"):
        raise ValueError(
            f"{path}: expected a single buffer, got {meta['batch']} of them under vmap. Load them "
            "with jrb.load, and save each by itself."
        )


class InRows:
    """The rows of a store.

    Args:
        path: of the folder.
        buffer: the description.
        spec: of one item.
        store: its rows.
        opened: its generation.
    """

    notes: tuple[str, ...]
    lost: int

    def __init__(
        self, path: str, buffer: ReplayBuffer, spec: Any, store: Store, opened: Generation
    ) -> None:
        self.path, self.buffer, self.spec, self.notes = path, buffer, spec, ()
        self.generation, self.lost = opened.number, len(store.lost)
        self._store, self._opened = store, opened
        self._whole: set[tuple[int, int]] = set()  # columns and blocks
        self._names = pytree.leaf_names(spec)
        self._specs = [prng_keys.raw_spec(leaf) for leaf in jax.tree.leaves(spec)]
        self._locations = self._leaves_in_order()
        widths = [location.leaf.width for location in self._locations]
        wanted = [pytree.nbytes(leaf) for leaf in self._specs]
        if widths != wanted or store.slots != buffer.capacity:
            raise DamagedError(
                f"{path}: expected {buffer.capacity} rows of {self._names} with {wanted} bytes, "
                f"got {store.slots} with {widths}."
            )

    def _leaves_in_order(self) -> list[Location]:
        """Where each leaf of the items lies."""
        found = self._opened.leaves
        if self._opened.body["meta"]["kind"] == commits.KIND:
            return list(found.values())
        names = pytree.unique_names({"storage": self._blank.storage})
        return [found[name] for name in names if name in found]

    @functools.cached_property
    def _blank(self) -> BufferState:
        """The specs of the state that was saved."""
        with versions.enable_x64():
            return state_specs.blank(host_items.on_device(self.buffer), self.spec)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the store says of the dataset in it."""
        return dict(self._opened.body["meta"].get("dataset", {}))

    def leaves(self) -> dict[str, Leaf]:
        """All leaves by name."""
        return {
            name: Leaf(spec, functools.partial(self._take, number))
            for number, (name, spec) in enumerate(zip(self._names, self._specs, strict=True))
        }

    def _take(self, number: int, slots: np.ndarray) -> np.ndarray:
        """Rows of a leaf, checked."""
        spec, location = self._specs[number], self._locations[number]
        self._check_blocks(location.column, slots)
        words = self._store.take_column(self._store.version, location.column, slots, location.part)
        shape = (len(slots), *spec.shape)
        if not spec.size:
            return np.zeros(shape, spec.dtype)
        words = np.ascontiguousarray(words)
        if columns.is_small(spec.dtype) and jnp.issubdtype(spec.dtype, jnp.integer):
            return words.view(columns.word_dtype(spec.dtype)).astype(spec.dtype).reshape(shape)
        return words.view(spec.dtype).reshape(shape)

    def _check_blocks(self, number: int, slots: np.ndarray) -> None:
        """Compares the checksums of blocks that were not looked at yet."""
        for block in self._store.blocks_of(slots):
            damage = (number, block) not in self._whole and self._store.sums.damage(number, block)
            if damage and len(self._store.gone()):
                raise StaleError(
                    f"{self.path}: expected rows as generation {self._store.generation} has them, "
                    "found some that were overwritten since. Open it again."
                )
            if damage:
                raise DamagedError(damage)
            self._whole.add((number, block))

    def rows(self, buffer: ReplayBuffer) -> Rows:
        """The rows that are held, by the flags that the keys of this description name."""
        if ENDS in self._opened.arrays:
            return self._told()
        checks.in_time("jrb.datasets", buffer.writer)
        episodes.check(self.spec, buffer.keys)
        writer, unit = self._parts()
        context = context_of(buffer, writer)
        slots = np.asarray(context.held.from_oldest(buffer.ring))
        counts = np.broadcast_to(np.asarray(context.held.rows(buffer.ring)), buffer.ring.envs)
        here = np.arange(buffer.ring.rows)[:, None] < counts
        held, here = here, self._without_lost(slots, here)
        lost = read.has_lost_beginning(buffer, writer, unit) | (held != here).any(axis=0)
        over = np.array(buffer.unit.ends(context, unit, jnp.asarray(slots)))
        return rings.in_episodes(slots, self._over(buffer.keys, slots, here, over), here, lost)

    def _told(self) -> Rows:
        """All rows, with the episodes that were written."""
        ends = self._opened.array(ENDS, np.int64)
        if (np.diff(ends, prepend=0) < 1).any() or ends[-1:].tolist() != [self._store.slots]:
            raise DamagedError(f"{self.path}: expected ends of episodes in their order.")
        order = np.arange(self._store.slots)
        no = np.zeros(len(ends), bool)
        return Rows(order, ends, no.astype(np.int64), running=no, cut=no)

    @property
    def facts(self) -> dict[str, np.ndarray]:
        """What was known of each episode when it was written."""
        entries = {name: entry for name, entry in self._opened.arrays.items() if FACTS in name}
        return {
            name.removeprefix(FACTS): self._opened.array(name, np.dtype(entry["kind"][0]))
            for name, entry in entries.items()
        }

    def _over(
        self, keys: Keys, slots: np.ndarray, here: np.ndarray, over: np.ndarray
    ) -> np.ndarray:
        """Which rows `[R, E]` end an episode, besides those that end one anyway."""
        leaves = self.leaves()
        for name in keys.flags(self.spec):
            over[here] |= rings.is_set(leaves[name].take(slots[here]))
        if keys.episode is not None:
            number = np.zeros(slots.shape, leaves[path_name(keys.episode)].spec.dtype)
            number[here] = leaves[path_name(keys.episode)].take(slots[here]).reshape(-1)
            over[:-1] |= here[1:] & (number[1:] != number[:-1])
        return over

    def _without_lost(self, slots: np.ndarray, here: np.ndarray) -> np.ndarray:
        """Those that are held, `[R, E]`, without the rows up to the last that is gone."""
        lost = here & np.isin(slots, self._store.lost)
        if not lost.any():
            return here
        left = here & ~(lost[::-1].cumsum(axis=0)[::-1] > 0)
        self.notes = (
            f"{int(here.sum() - left.sum())} of {int(here.sum())} steps are gone, the oldest ones: "
            "more was written after the last save than there is room for beside the ring.",
        )
        return left

    def _parts(self) -> tuple[Any, Any]:
        """The states of writer and unit."""
        want = {"unit": self._blank.unit, "writer": self._blank.writer}
        names, found = pytree.unique_names(want), []
        for name, leaf in zip(names, jax.tree.leaves(want), strict=True):
            entry = self._opened.arrays.get(name)
            if entry is None or entry["kind"] != [str(leaf.dtype), str(list(leaf.shape))]:
                raise DamagedError(
                    f"{self.path}: leaf '{name}': expected {leaf.dtype}{list(leaf.shape)}, got "
                    f"{entry and entry['kind']}."
                )
            found.append(jnp.asarray(self._opened.array(name, leaf.dtype).reshape(leaf.shape)))
        parts = jax.tree.unflatten(jax.tree.structure(want), found)
        return parts["writer"], parts["unit"]


class InMemory:
    """A checkpoint that is loaded as a whole, as its rows are not whole items.

    Args:
        path: of the checkpoint.
        number: of the generation.
    """

    notes: tuple[str, ...] = ("This layout is read as a whole, and kept in memory.",)
    metadata: dict[str, Any] = {}
    facts: dict[str, np.ndarray] = {}
    lost: int = 0

    def __init__(self, path: str, number: int | None = None) -> None:
        self.buffer, self._state = checkpoint.load(path, generation=number)
        self.generation = number or 0
        self._held = read.items(self.buffer, self._state)

    def leaves(self) -> dict[str, Leaf]:
        """All leaves by name."""
        names, leaves = pytree.leaf_names(self._held), jax.tree.leaves(self._held)
        spec = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        return {
            name: Leaf(spec(leaf), leaf.__getitem__)
            for name, leaf in zip(names, leaves, strict=True)
        }

    def rows(self, buffer: ReplayBuffer) -> Rows:
        """The rows that are held, as `jrb.episodes` has them."""
        found = read.episodes(buffer, self._state)
        place = np.zeros(buffer.capacity, np.int64)
        slots, count = buffer.in_order(self._state)
        place[np.asarray(slots)[: int(count)]] = np.arange(int(count))
        return Rows(
            np.concatenate([np.zeros(0, np.int64), *(place[each.slots] for each in found)]),
            np.cumsum([len(each) for each in found], dtype=np.int64),
            np.array([each.environment for each in found], np.int64),
            np.array([not each.ended for each in found], bool),
            np.array([each.cut for each in found], bool),
        )
