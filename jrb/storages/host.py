"""Rows that lie on the host: what a state knows of them, and how jitted code reaches them."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jrb import prng, pytree
from jrb.disk.behind import Behind
from jrb.disk.live import Live
from jrb.disk.opening import create
from jrb.disk.table import Column
from jrb.types import Item

VERSION = jax.ShapeDtypeStruct((2,), jnp.uint32)


class Host:
    """The rows of one buffer, which all its states share.

    Attributes:
        live: the store.
        spec: one item, `jax.ShapeDtypeStruct`s.
        names: of its leaves.
    """

    def __init__(self, live: Live, spec: Item) -> None:
        self.live, self.spec = live, spec
        self.names = tuple(pytree.leaf_names(spec))
        self._behind = Behind(live)
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
        return words(self.live.put(number(version), at, rows, patient))

    def put_behind(self, version: Any, slots: Any, *leaves: Any, patient: bool = False) -> Any:
        """The same by a thread; what goes wrong on the disk comes out at the next call."""
        at, rows = self.rows(slots, leaves)
        return words(self._behind.put(number(version), at, rows, patient))

    def rows(self, slots: Any, leaves: tuple[Any, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Slots, int64 `[B]`, and the bytes of each leaf there, uint8 `[B, width]`."""
        at = np.asarray(slots).reshape(-1).astype(np.int64)
        kept = at < self.live.table.capacity
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
        rows = self.live.take(number(version), [kept[id(slots)] for slots in places])
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
        return self.host.live.table.capacity


def init(path: Any, prealloc: bool, capacity: int, spec: Item) -> Hosted:
    """A new store for N items.

    Raises:
        ValueError, OSError: as `jrb.disk.opening.create`.
    """
    live = create(path, columns(spec), capacity, prealloc)
    return Hosted(version=jnp.zeros(2, jnp.uint32), host=Host(live, spec))


def columns(spec: Item) -> tuple[Column, ...]:
    """The columns of a store for such items.

    Raises:
        ValueError: names of leaves that cannot be told apart as files, or are too long.
    """
    found, files = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        raw = prng.raw_spec(leaf)
        kind = (str(leaf.dtype), tuple(leaf.shape))
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


def nbytes(capacity: int, spec: Item) -> dict[str, int]:
    """The bytes of each leaf's file."""
    return {column.name: column.width * capacity for column in columns(spec)}


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
