"""Rows that lie on the host: what a state knows of them, and how jitted code reaches them."""

import abc
import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._store import extremes, table
from jrb._store.errors import StaleError
from jrb._util import host_calls, prng_keys, pytree
from jrb._util.pytree import SpecKey
from jrb._xla import compat
from jrb.state import Device
from jrb.types import HostState, Item

Version = Any
"""uint32 `[2]` of JAX or NumPy: the number of a write, high and low word."""

VERSION = jax.ShapeDtypeStruct((2,), jnp.uint32)


class HostRows(abc.ABC):
    """The rows of one buffer, which all its states share.

    Each write makes another version, and belongs to the state that it returns. Versions are uint32
    `[2]`, high and low word.

    Attributes:
        capacity: N.
        spec: one item, `jax.ShapeDtypeStruct`s.
        spec_key: the same, to be looked up by.
        names: of its leaves.
        raw: the specs of its leaves as they lie on the host, keys as their words.
    """

    capacity: int
    spec: Item
    spec_key: SpecKey
    names: tuple[str, ...]
    raw: list[jax.ShapeDtypeStruct]

    path: str | None = None
    """Where a save is a commit of the rows themselves; None for nowhere."""

    def __init__(self, capacity: int, spec: Item) -> None:
        self.capacity, self.spec, self.spec_key = capacity, spec, SpecKey(spec)
        self.names = tuple(pytree.leaf_names(spec))
        self.raw = [prng_keys.raw_spec(leaf) for leaf in jax.tree.leaves(spec)]
        self._asked: tuple[Version, int] = (None, 0)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A state whose rows are on the host: expected to be saved by jrb.save, not to be "
            "pickled or copied."
        )

    @abc.abstractmethod
    def put(
        self, version: Version, slots: np.ndarray, *leaves: Any, patient: bool = False
    ) -> np.ndarray:
        """Writes leaves `[T, E, ...]` at slots `[T, E]`, those of N or more left out.

        Args:
            version: of the state, uint32 `[2]`.
            slots: where.
            leaves: in the order of the items' leaves, keys as their words.
            patient: whether draws that are under way are waited for.

        Returns:
            The version of the state after the write, uint32 `[2]`.

        Raises:
            StaleError: the state is not the newest.
        """

    def edit(
        self, version: Version, slots: np.ndarray, names: tuple[str, ...], *leaves: Any
    ) -> np.ndarray:
        """Writes some leaves `[B, ...]` at slots `[B]`, those of N or more left out.

        Args:
            version: of the state, uint32 `[2]`.
            slots: where; of those that stand twice, the last one counts.
            names: of the leaves.
            leaves: keys as their words.

        Returns:
            The version of the state after that, uint32 `[2]`.

        Raises:
            StaleError: the state is not the newest.
        """
        self.check_newest(version)
        every = np.asarray(slots).reshape(-1)
        distinct, last = np.unique(every[::-1], return_index=True)
        which = (len(every) - 1 - last)[distinct < self.capacity]
        at = every[which]
        rows = self.take(version, [at] * len(self.names))
        for name, leaf in zip(names, leaves, strict=True):
            number = self.names.index(name)
            rows[number] = np.asarray(leaf).reshape(len(every), *self.raw[number].shape)[which]
        return self.put_again(version, at, *rows)

    def put_again(self, version: Version, slots: np.ndarray, *leaves: Any) -> np.ndarray:
        """As `put`, of rows that keep their place in time, leaves `[B, ...]` at slots `[B]`."""
        return self.put(version, slots, *leaves)

    @abc.abstractmethod
    def read_leaf(self, version: Version, leaf: int, slots: np.ndarray) -> np.ndarray:
        """The leaf of this number at slots, integers `[B]`, as bytes, uint8 `[B, width]`.

        Raises:
            StaleError: something there was overwritten after this version.
        """

    def read(self, version: Version, slots: list[np.ndarray]) -> list[np.ndarray]:
        """Each leaf at slots of its own, as `read_leaf`."""
        return [self.read_leaf(version, leaf, at) for leaf, at in enumerate(slots)]

    @abc.abstractmethod
    def check_newest(self, version: Version) -> None:
        """Raises `StaleError` unless it is the newest version."""

    @property
    def reach(self) -> int:
        """Slots from this one on were never written, and hold zeros."""
        return self.capacity

    def number(self, version: Version) -> int:
        """The number of a write, from its words; draws ask for that of one version many times."""
        last, found = self._asked
        if last is not version:
            found = number(version)
            self._asked = version, found
        return found

    def drawing(self) -> AbstractContextManager[None]:
        """A time during which other threads overwrite nothing."""
        return contextlib.nullcontext()

    def writing(self, version: Version) -> AbstractContextManager[None]:
        """A time after which, if something interrupts it, this version is the newest again."""
        return contextlib.nullcontext()

    def take(self, version: Version, places: list[Any]) -> list[np.ndarray]:
        """The leaves at slots of any shape, one array of slots for each; zeros at -1."""
        every = {id(slots): np.asarray(slots).reshape(-1) for slots in places}
        known = {which: _known(slots) for which, slots in every.items()}
        rows = self.read(version, [known[id(slots)] for slots in places])
        found = []
        for leaf, spec, slots in zip(rows, self.raw, places, strict=True):
            if len(leaf) < slots.size:
                leaf = _spread(leaf, every[id(slots)] >= 0)
            found.append(leaf.view(spec.dtype).reshape((*slots.shape, *spec.shape)))
        return found

    def at(self, version: Version, slots: np.ndarray) -> list[np.ndarray]:
        """The same of all leaves at slots `[B]`, of which none is -1, in less time."""
        rows = self.read(version, [slots] * len(self.raw))
        return [
            leaf.view(spec.dtype).reshape((len(slots), *spec.shape))
            for leaf, spec in zip(rows, self.raw, strict=True)
        ]

    def fetch(self, version: Version, places: list[Any], device: Device = None) -> Item:
        """The items at slots of any shape, on a device; None for the default one."""
        return self.items(jax.device_put(self.take(version, places), device))

    def drawn(self, leaves: list[np.ndarray], device: Device) -> Item:
        """The items of these leaves on a device, for draws, which are of few shapes.

        Small arguments of a compiled function come to the default device five times as fast as by
        `device_put`; but for every shape it is compiled, and large ones it copies.
        """
        if device is None and all(leaf.nbytes < table.SMALL for leaf in leaves):
            return _handed_over(leaves, spec=self.spec_key)
        return self.items(jax.device_put(leaves, device))

    def call(self, version: jax.Array, places: list[jax.Array]) -> list[jax.Array]:
        """The same as `take`, from jitted code."""
        unique = {id(slots): slots for slots in places}
        index = [list(unique).index(id(slots)) for slots in places]
        shapes = [
            jax.ShapeDtypeStruct((*slots.shape, *spec.shape), spec.dtype)
            for slots, spec in zip(places, self.raw, strict=True)
        ]

        def fetch(version: Version, *slots: np.ndarray) -> list[np.ndarray]:
            arrays = [np.asarray(one) for one in slots]
            return self.take(version, [arrays[number] for number in index])

        return call(fetch, shapes, version, *unique.values())

    def items(self, leaves: list[Any]) -> Item:
        """The items of these leaves, keys wrapped again."""
        return _items(leaves, self.spec)


def _items(leaves: list[Any], spec: Item) -> Item:
    specs, structure = jax.tree.flatten(spec)
    wrap = lambda leaf, spec: prng_keys.wrapped(leaf, spec.dtype)
    return jax.tree.unflatten(structure, map(wrap, leaves, specs))


@functools.partial(jax.jit, static_argnames="spec")
def _handed_over(leaves: list[jax.Array], spec: SpecKey) -> Item:
    return _items(leaves, spec.spec)


class PlainRows(HostRows):
    """Rows anywhere, for which two methods say how they are written and read.

    A subclass has `write_rows(slots, leaves)` and `read_rows(leaf, slots)`. What was overwritten
    is told from what a state may still see by the number of the write, kept for every slot.
    """

    def __init__(self, capacity: int, spec: Item) -> None:
        super().__init__(capacity, spec)
        self._newest, self._written = 0, np.zeros(capacity, np.int64)

    @abc.abstractmethod
    def write_rows(self, slots: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Puts leaves `[B, ...]`, as in `raw`, at slots, distinct int64 `[B]`."""

    @abc.abstractmethod
    def read_rows(self, leaf: int, slots: np.ndarray) -> np.ndarray:
        """The leaf of this number at slots, integers `[B]`, in any order and more than once."""

    def put(
        self, version: Version, slots: np.ndarray, *leaves: Any, patient: bool = False
    ) -> np.ndarray:
        """See `HostRows.put`; of rows that go to one slot, the last one is written."""
        self.check_newest(version)
        at = np.asarray(slots).reshape(-1).astype(np.int64)
        distinct, last = np.unique(at[::-1], return_index=True)
        rows = (len(at) - 1 - last)[distinct < self.capacity]
        found = [
            np.asarray(leaf).reshape(len(at), *spec.shape)[rows]
            for leaf, spec in zip(leaves, self.raw, strict=True)
        ]
        self._newest += 1
        self._written[at[rows]] = self._newest
        self.write_rows(at[rows], found)
        return words(self._newest)

    def read_leaf(self, version: Version, leaf: int, slots: np.ndarray) -> np.ndarray:
        """See `HostRows.read_leaf`."""
        if (self._written[slots] > number(version)).any():
            raise _stale("whose rows are still there, got one of which something was overwritten")
        return bytes_of(self.read_rows(leaf, slots), len(slots))

    def check_newest(self, version: Version) -> None:
        """See `HostRows.check_newest`."""
        if number(version) != self._newest:
            raise _stale("that is the newest, got one that has been written to before")


def _stale(text: str) -> StaleError:
    return StaleError(
        f"expected a state {text}. States share their rows: go on with the state that the last "
        "write returned."
    )


class HostView(pytree.State, HostState):
    """What a state knows of its rows.

    Attributes:
        version: uint32 `[2]`, the number of the write that made it, high and low word.
        rows: where they are.
    """

    version: jax.Array = pytree.cursor()
    rows: HostRows = pytree.static(default=None)

    @property
    def capacity(self) -> int:
        """N."""
        return self.rows.capacity

    @property
    def host_bytes(self) -> int:
        """The bytes that all rows take, on the disk or in memory of the host."""
        return self.rows.capacity * pytree.nbytes(self.rows.spec)

    def after(self, version: Version) -> "HostView":
        """That of the state after a write."""
        return self.replace(version=_on_device(version))


@functools.partial(jax.jit, inline=True)
def _on_device(version: Version) -> jax.Array:
    """The same, in a fifth of the time of `jnp.asarray`."""
    return version


def view(rows: HostRows, version: int = 0) -> HostView:
    """What a state knows that has a version of these rows."""
    return HostView(version=jnp.asarray(words(version)), rows=rows)


def device_of(array: jax.Array) -> Any:
    """Where an array has to stay; None if nowhere in particular."""
    return array.sharding if compat.is_committed(array) else None


def number(version: Version) -> int:
    """The number of a write, from its words."""
    high, low = np.asarray(version).tolist()
    return high << 32 | low


def words(version: int) -> np.ndarray:
    """The words of a number, uint32 `[2]`."""
    return np.array([version >> 32, version & 0xFFFFFFFF], np.uint32)


def _known(slots: np.ndarray) -> np.ndarray:
    """Those that are not -1."""
    return slots[slots >= 0] if slots.size and extremes.least(slots) < 0 else slots


def _spread(rows: np.ndarray, here: np.ndarray) -> np.ndarray:
    """A row for each place, these ones where they are, zeros elsewhere."""
    whole = np.zeros((len(here), rows.shape[1]), np.uint8)
    whole[here] = rows
    return whole


def bytes_of(leaf: np.ndarray, count: int) -> np.ndarray:
    """Rows as bytes, uint8 `[B, width]`."""
    if not leaf.size:
        return np.zeros((count, 0), np.uint8)
    return np.ascontiguousarray(leaf).reshape(count, -1).view(np.uint8)


def call(function: Callable[..., Any], shapes: Any, *args: Any) -> Any:
    """A function of NumPy arrays, called from jitted code in the order of the program.

    Raises:
        TypeError: under `vmap`.
    """
    return host_calls.call(function, shapes, _single, *args)


_single = host_calls.refusing(
    lambda size: (
        f"vmap: expected a storage on the device, got one on the host for {size} buffers or draws "
        "at once, whose rows lie in one place. Use one buffer with num_envs=E in place of E "
        "buffers, a larger batch in place of several draws, or jrb.DeviceStorage()."
    )
)
