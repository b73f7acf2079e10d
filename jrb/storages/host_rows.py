"""Rows that lie on the host: what a state knows of them, and how jitted code reaches them."""

import abc
import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jrb._core.host_proxy import HostStorageProxy
from jrb._store import table
from jrb._store.errors import StaleError
from jrb._util import prng_keys, pytree
from jrb._util.pytree import SpecKey
from jrb._xla import compat, dependencies
from jrb.ring import Occupancy, Ring
from jrb.state import Device
from jrb.types import Context, HostState, HostStorage, Item, SlotsForLeaf, WritePlan
from jrb.types.messages import PartState

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
    return slots[slots >= 0] if slots.size and slots.item(slots.argmin()) < 0 else slots


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
    return io_callback(function, shapes, *map(_single, args), ordered=True)


@jax.custom_batching.custom_vmap
def _single(argument: jax.Array) -> jax.Array:
    return argument


@_single.def_vmap
def _refuse(size: int, batched: Any, argument: jax.Array) -> Any:
    raise TypeError(
        f"vmap: expected a storage on the device, got one on the host for {size} buffers or draws "
        "at once, whose rows lie in one place. Use one buffer with num_envs=E in place of E "
        "buffers, a larger batch in place of several draws, or jrb.DeviceStorage()."
    )


class HostArrays(HostStorage):
    """Keeps items in rows on the host, which a method makes: see `make_rows`."""

    state_type: ClassVar[type] = HostView

    @abc.abstractmethod
    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> HostRows:
        """Rows full of zeros.

        Args:
            ring: the ring's shape.
            spec: of one item.
            is_chronological: whether rows are written in the order of time.
        """

    @property
    def device_part(self) -> Any:
        """What stands for this storage in jitted parts."""
        return HostStorageProxy()

    def device_state(self, state: PartState) -> Any:
        """The state of `device_part`: nothing."""
        return None

    def view(self, state: PartState) -> HostView:
        """What a state knows of its rows."""
        return state

    def init(self, context: Context, spec: Item) -> Any:
        """Rows full of zeros."""
        device_state = self.device_part.init(context, spec)
        return self.make(context.ring, spec, device_state, is_chronological=True)

    def make(self, ring: Ring, spec: Item, device_state: PartState, is_chronological: bool) -> Any:
        """The same, with the state of `device_part`; and whether rows come in time."""
        return self.joined(view(self.make_rows(ring, spec, is_chronological)), device_state)

    def joined(self, view: HostView, device_state: PartState) -> Any:
        """The state of rows on the host and of what is on the device."""
        return view

    def elsewhere(self) -> Self:
        """The same storage for rows of its own, where it would else be at the path of others."""
        return self

    def attach(self, ring: Ring, view: HostView, held: Callable[[], Occupancy]) -> Any:
        """The state for rows that were there before; a function says which of them are held."""
        return view

    def spec(self, state: PartState) -> Item:
        """What one slot holds."""
        return self.view(state).rows.spec

    def spec_key(self, state: PartState) -> SpecKey:
        """The same, made once."""
        return self.view(state).rows.spec_key

    # Outside jit.

    def drawing(self, state: PartState) -> AbstractContextManager[None]:
        """A time during which nothing is overwritten."""
        return self.view(state).rows.drawing()

    def writing(self, state: PartState) -> AbstractContextManager[None]:
        """A time after which, if something interrupts it, this state is the newest again."""
        view = self.view(state)
        return view.rows.writing(view.version)

    def names(self, state: PartState) -> tuple[str, ...] | None:
        """Those of the leaves."""
        return self.view(state).rows.names

    def put(self, state: PartState, planned: Any, items: Item) -> Any:
        """Puts items, leaves `[T, E, ...]` or `[T, ...]`, at the slots that were planned."""
        view, leaves = self.view(state), map(prng_keys.raw, jax.tree.leaves(items))
        slots, device_state = self.device_part.planned(planned)
        version = view.rows.put(view.version, slots, *leaves, patient=True)
        return self.joined(view.after(version), device_state)

    def moved(self, state: PartState, planned: Any) -> Any:
        """The same state with that of the device part which was planned."""
        return self.joined(self.view(state), self.device_part.planned(planned)[1])

    def put_values(
        self, state: PartState, device_state: PartState, slots: np.ndarray, values: Item
    ) -> Any:
        """Other values for some leaves, all others as they are."""
        view, new = self.view(state), {name: prng_keys.raw(leaf) for name, leaf in values.items()}
        return self.joined(
            view.after(view.rows.edit(view.version, slots, tuple(new), *new.values())), device_state
        )

    def fetch(self, state: PartState, slots: jax.Array, places: Any) -> Item:
        """The items there: all leaves at slots `[B]`, or each in its place."""
        view = self.view(state)
        if places is None:
            leaves = view.rows.at(view.version, np.asarray(slots))
        else:
            leaves = view.rows.take(view.version, places.each(np.asarray))
        return view.rows.drawn(leaves, device_of(slots))

    def take(self, state: PartState, slots: np.ndarray) -> Item:
        """The items at slots of any shape."""
        view = self.view(state)
        return view.rows.fetch(view.version, [slots] * len(view.rows.names))

    # Inside jit.

    def write(
        self, context: Context, state: PartState, write: WritePlan, items: Item
    ) -> tuple[Any, WritePlan]:
        """To the device, and by a call to the host."""
        view, kept = self.view(state), self.device_state(state)
        planned, write = self.device_part.write(context, kept, write, items)
        slots, device_state = self.device_part.planned(planned)
        leaves = [lax.stop_gradient(prng_keys.raw(leaf)) for leaf in jax.tree.leaves(items)]
        version = call(view.rows.put, VERSION, view.version, slots, *leaves)
        return self.joined(view.after(version), device_state), write

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """On the device, and by a call to the host."""
        if slots is None:
            slots = jnp.arange(context.ring.capacity, dtype=jnp.int32)
        view, names = self.view(state), tuple(values)
        kept = self.device_part.edit(context, self.device_state(state), slots, values)
        edit = lambda version, slots, *leaves: view.rows.edit(version, slots, names, *leaves)
        leaves = [lax.stop_gradient(prng_keys.raw(leaf)) for leaf in values.values()]
        version = call(edit, VERSION, view.version, slots, *leaves)
        return self.joined(view.after(version), kept)

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> int:
        """The bytes of the rows, and of the version."""
        return ring.capacity * pytree.nbytes(spec) + pytree.nbytes(VERSION)

    def read(self, context: Context, state: PartState, where: SlotsForLeaf) -> Item:
        """A call to the host."""
        view = self.view(state)
        return view.rows.items(view.rows.call(view.version, list(map(where, view.rows.names))))

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """The same rows: what they hold is not looked at again."""
        return dependencies.delay_writes_until(state, token)
