"""Rows that lie on the host: what a state knows of them, and how jitted code reaches them."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jrb import prng, pytree
from jrb._store.errors import StaleError
from jrb._store.opening import create
from jrb._store.store import Store
from jrb._store.table import Column
from jrb.ring import Ring
from jrb.types import Item

VERSION = jax.ShapeDtypeStruct((2,), jnp.uint32)


class Host:
    """The rows of one buffer, which all its states share.

    Attributes:
        store: where they are.
        spec: one item, `jax.ShapeDtypeStruct`s.
        names: of its leaves.
        expiring: whether rows that a commit has promised may go when the ring comes round to them.
    """

    def __init__(self, store: Store, spec: Item, expiring: bool) -> None:
        self.store, self.spec, self.expiring = store, spec, expiring
        self.names = tuple(pytree.leaf_names(spec))
        self._raw = [prng.raw_spec(leaf) for leaf in jax.tree.leaves(spec)]

    def __reduce__(self) -> Any:
        raise TypeError(
            "A state whose rows are on the host: expected to be saved by jrb.save, not to be "
            "pickled or copied."
        )

    def put(self, version: Any, slots: Any, *leaves: Any, patient: bool = False) -> np.ndarray:
        """Writes leaves `[T, E, ...]` at slots `[T, E]`, those of N or more left out.

        Args:
            version: of the state, uint32 `[2]`.
            slots: where.
            leaves: in the order of the items' leaves, keys as their words.
            patient: whether draws that are under way are waited for.

        Returns:
            The version of the state after the write, uint32 `[2]`.
        """
        at, rows = self.rows(slots, leaves)
        return words(self.store.put(number(version), at, rows, self.expiring, patient))

    @contextlib.contextmanager
    def writing(self, version: Any) -> Iterator[None]:
        """A time after which, if something interrupts it, this version is the newest again."""
        before = number(version)
        is_newest = before == self.store.version
        try:
            yield
        except StaleError:
            raise  # another was faster
        except BaseException:
            if is_newest:
                self.store.take_back(before)
            raise

    def rows(self, slots: Any, leaves: tuple[Any, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Slots, int64 `[B]`, and the bytes of each leaf there, uint8 `[B, width]`."""
        at = np.asarray(slots).reshape(-1).astype(np.int64)
        kept = at < self.store.slots
        rows = [_bytes(np.asarray(leaf), len(at)) for leaf in leaves]
        if not kept.all():
            at, rows = at[kept], [leaf[kept] for leaf in rows]
        return at, rows

    def take(self, version: Any, places: list[Any]) -> list[np.ndarray]:
        """The leaves at slots of any shape, one array of slots for each; zeros at -1."""
        flat = {id(slots): np.asarray(slots).reshape(-1) for slots in places}
        kept = dict(flat)
        for name, slots in flat.items():
            if slots.size and slots.min() < 0:
                kept[name] = slots[slots >= 0]
        rows = self.store.take(number(version), [kept[id(slots)] for slots in places])
        found = []
        for leaf, spec, slots in zip(rows, self._raw, places, strict=True):
            every = flat[id(slots)]
            if len(leaf) < len(every):
                leaf = _spread(leaf, every >= 0)
            found.append(leaf.view(spec.dtype).reshape(*slots.shape, *spec.shape))
        return found

    def fetch(self, version: Any, places: list[Any], device: Any = None) -> Item:
        """The items at slots of any shape, on a device; None for the default one."""
        return self.items(jax.device_put(self.take(version, places), device))

    def shapes(self, places: list[Any]) -> list[jax.ShapeDtypeStruct]:
        """What `take` returns."""
        return [
            jax.ShapeDtypeStruct((*slots.shape, *spec.shape), spec.dtype)
            for slots, spec in zip(places, self._raw, strict=True)
        ]

    def call(self, version: jax.Array, places: list[jax.Array]) -> list[jax.Array]:
        """The same as `take`, from jitted code."""
        unique = {id(slots): slots for slots in places}
        index = [list(unique).index(id(slots)) for slots in places]

        def fetch(version: Any, *slots: Any) -> list[np.ndarray]:
            arrays = [np.asarray(one) for one in slots]
            return self.take(version, [arrays[number] for number in index])

        return call(fetch, self.shapes(places), version, *unique.values())

    def items(self, leaves: list[Any]) -> Item:
        """The items of these leaves, keys wrapped again."""
        specs, structure = jax.tree.flatten(self.spec)
        wrap = lambda leaf, spec: prng.wrapped(leaf, spec.dtype)
        return jax.tree.unflatten(structure, map(wrap, leaves, specs))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hosted:
    """What a state knows of its rows.

    Attributes:
        version: uint32 `[2]`, the number of the write that made it, high and low word.
        host: where they are.
    """

    version: jax.Array
    host: Host = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """N."""
        return self.host.store.slots


def init(path: Any, prealloc: bool, slack: float, ring: Ring, spec: Item, in_time: bool) -> Hosted:
    """A new store for N items.

    Args:
        path: of its folder; None for a temporary one.
        prealloc: whether room is set aside on the disk now.
        slack: how much room there is beside N, as a part of it, for what is written between two
            commits.
        ring: the ring's shape.
        spec: of an item.
        in_time: whether rows are written in the order of time.

    Raises:
        ValueError, OSError: as `jrb._store.opening.create`.
    """
    made, room = columns(spec), _room(path, slack, ring, spec, in_time)
    store = create(path, made, ring.capacity, room, prealloc)
    return Hosted(jnp.zeros(2, jnp.uint32), Host(store, spec, in_time or path is None))


def _room(path: Any, slack: float, ring: Ring, spec: Item, in_time: bool) -> int:
    """P, for how many rows there is room."""
    width = max(sum(column.width for column in columns(spec)), 1)
    beside = max(ring.envs, min(_BESIDE // width, ring.capacity))
    if path is not None:  # what is saved is not written over; but in time, where there is no room
        beside = max(beside, int(slack * ring.capacity) if in_time else ring.capacity)
    return ring.capacity + beside


_BESIDE = 8 << 20  # bytes: writes of less happen as a whole or not at all


def columns(spec: Item) -> tuple[Column, ...]:
    """The columns of a store for such items.

    Raises:
        ValueError: names of leaves that cannot be told apart as files, or are too long.
    """
    found, files = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        raw = prng.raw_spec(leaf)
        kind = (str(leaf.dtype), str(list(leaf.shape)))
        name = "/".join(map(_part, path)) if path else "."
        found.append(Column(name, kind, raw.size * raw.dtype.itemsize))
        file = found[-1].file
        inside = lambda one, other: f"{one}/".startswith(f"{other}/")
        taken = [other for other in files if inside(file, other) or inside(other, file)]
        if taken or max(map(len, file.split("/"))) > 250:
            raise ValueError(
                f"init: leaf '{pytree.leaf_name(path)}': expected a name that no other leaf has, "
                f"and that a file can have, got {file[:80]!r}. Rename it."
            )
        files.append(file)
    return tuple(found)


def _part(key: Any) -> str:
    """A part of a name, without what has a meaning in it."""
    name = pytree.part_name(key).replace("%", "%25").replace("/", "%2F")
    return "%2E" if name == "." else name


def device_of(array: jax.Array) -> Any:
    """Where an array has to stay; None if nowhere in particular."""
    return array.sharding if getattr(array, "committed", False) else None


def checked_path(name: str, path: Any) -> str | None:
    """A path as a string."""
    if path is not None and not path:
        raise ValueError(
            f"{name}: path: expected a path, or None for a temporary one, got {path!r}."
        )
    if path is None or isinstance(path, str | os.PathLike):
        return None if path is None else os.fsdecode(os.fspath(path))
    raise TypeError(f"{name}: path: expected a path, or None for a temporary one, got {path!r}.")


def check_slack(slack: Any) -> None:
    """Raises unless it is a part of N."""
    if isinstance(slack, bool) or not isinstance(slack, int | float) or not slack >= 0:
        raise ValueError(
            f"slack: expected a number of at least 0, the room beside N as a part of it, got "
            f"{slack!r}."
        )


def nbytes(path: Any, slack: float, ring: Ring, spec: Item, in_time: bool) -> dict[str, int]:
    """The bytes of each leaf's file, and of the numbers of the rows."""
    room = _room(path, slack, ring, spec, in_time)
    return {".numbers": 8 * room} | {one.name: one.width * room for one in columns(spec)}


def number(version: Any) -> int:
    """The number of a write, from its words."""
    high, low = np.asarray(version).tolist()
    return high << 32 | low


def words(version: int) -> np.ndarray:
    """The words of a number, uint32 `[2]`."""
    return np.array([version >> 32, version & 0xFFFFFFFF], np.uint32)


def _spread(rows: np.ndarray, here: np.ndarray) -> np.ndarray:
    """A row for each place, these ones where they are, zeros elsewhere."""
    whole = np.zeros((len(here), rows.shape[1]), np.uint8)
    whole[here] = rows
    return whole


def _bytes(leaf: np.ndarray, count: int) -> np.ndarray:
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
    del batched, argument
    raise TypeError(
        f"vmap: expected a storage on the device, got one on the host for {size} buffers or draws "
        "at once, whose rows lie in one place. Use one buffer with num_envs=E in place of E "
        "buffers, a larger batch in place of several draws, or jrb.DeviceStorage()."
    )
