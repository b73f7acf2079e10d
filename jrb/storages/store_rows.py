"""Rows in the files of a store (see `jrb._store`)."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jrb._store import paths
from jrb._store.errors import StaleError
from jrb._store.opening import create
from jrb._store.store import Store
from jrb._store.table import Column
from jrb._util import checks, prng_keys, pytree
from jrb.ring import Ring
from jrb.storages.host_rows import VERSION, HostRows, Version, bytes_of, number, words
from jrb.storages.on_host import HostArrays
from jrb.types import Item


class StoreRows(HostRows):
    """The rows of a store.

    Attributes:
        store: where they are.
        expiring: whether rows that a commit has promised may go when the ring comes round to them.
    """

    store: Store
    expiring: bool
    path: str | None

    def __init__(self, store: Store, spec: Item, expiring: bool) -> None:
        super().__init__(store.slots, spec)
        self.store, self.expiring = store, expiring
        self.path = store.path

    @property
    def reach(self) -> int:
        """See `HostRows.reach`."""
        return self.store.reach

    def put(
        self, version: Version, slots: np.ndarray, *leaves: Any, patient: bool = False
    ) -> np.ndarray:
        """See `HostRows.put`."""
        return self._put(version, slots, leaves, self.expiring, patient)

    def put_again(self, version: Version, slots: np.ndarray, *leaves: Any) -> np.ndarray:
        """See `HostRows.put_again`; the table grows rather than that a row which is saved goes."""
        return self._put(version, slots, leaves, expiring=False, patient=True)

    def _put(
        self, version: Version, slots: np.ndarray, leaves: tuple, expiring: bool, patient: bool
    ) -> np.ndarray:
        at = np.asarray(slots).reshape(-1).astype(np.int64)
        rows = [bytes_of(np.asarray(leaf), len(at)) for leaf in leaves]
        kept = at < self.capacity
        if not kept.all():
            at, rows = at[kept], [leaf[kept] for leaf in rows]
        return words(self.store.put(number(version), at, rows, expiring, patient))

    def read(self, version: Version, slots: list[np.ndarray]) -> list[np.ndarray]:
        """See `HostRows.read`."""
        return self.store.take(self.number(version), slots)

    def read_leaf(self, version: Version, leaf: int, slots: np.ndarray) -> np.ndarray:
        """See `HostRows.read_leaf`."""
        return self.store.take_column(number(version), leaf, slots)

    def check_newest(self, version: Version) -> None:
        """See `HostRows.check_newest`."""
        self.store.check_newest(number(version))

    def drawing(self) -> AbstractContextManager[None]:
        """A time during which other threads overwrite nothing."""
        return self.store.drawing.entered()

    @contextlib.contextmanager
    def writing(self, version: Version) -> Iterator[None]:
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


def make(
    path: Any, prealloc: bool, slack: float, ring: Ring, spec: Item, is_chronological: bool
) -> StoreRows:
    """A new store for N items.

    Args:
        path: of its folder; None for a temporary one.
        prealloc: whether room is set aside on the disk now.
        slack: how much room there is beside N, as a part of it, for what is written between two
            commits.
        ring: the ring's shape.
        spec: of an item.
        is_chronological: whether rows are written in the order of time.

    Raises:
        ValueError, OSError: as `jrb._store.opening.create`.
    """
    made, room = columns(spec), _room(path, slack, ring, spec, is_chronological)
    store = create(path, made, ring.capacity, room, prealloc)
    return StoreRows(store, spec, is_chronological or path is None)


def _room(path: object, slack: float, ring: Ring, spec: Item, is_chronological: bool) -> int:
    """P, for how many rows there is room."""
    width = max(sum(column.width for column in columns(spec)), 1)
    beside = max(ring.envs, min(_BESIDE // width, ring.capacity))
    if path is not None:  # what is saved is not written over; but in time, where there is no room
        beside = max(beside, int(slack * ring.capacity) if is_chronological else ring.capacity)
    return ring.capacity + beside


_BESIDE = 8 << 20  # bytes: writes of less happen as a whole or not at all


def columns(spec: Item) -> tuple[Column, ...]:
    """The columns of a store for such items.

    Raises:
        ValueError: names of leaves that cannot be told apart as files, or are too long.
    """
    found, files, folders = [], set[str](), set[str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        raw = prng_keys.raw_spec(leaf)
        kind = (str(leaf.dtype), str(list(leaf.shape)))
        name = "/".join(map(_part, path)) if path else "."
        found.append(Column.of(name, kind, raw.size * raw.dtype.itemsize))
        file = found[-1].file
        parts = file.split("/")
        above = {"/".join(parts[:end]) for end in range(1, len(parts))}
        is_taken = file in files or file in folders or not above.isdisjoint(files)
        if is_taken or max(map(len, parts)) > 250:
            raise ValueError(
                f"init: leaf '{pytree.leaf_name(path)}': expected a name that no other leaf has, "
                f"and that a file can have, got {file[:80]!r}. Rename it."
            )
        files.add(file)
        folders |= above
    return tuple(found)


def _part(key: Any) -> str:
    """A part of a name, without what has a meaning in it."""
    name = pytree.part_name(key).replace("%", "%25").replace("/", "%2F")
    return "%2E" if name == "." else name


def _checked_path(name: str, path: object) -> str | None:
    """An absolute path, or None."""
    try:
        return None if path is None else paths.absolute(path, f"{name}: path")
    except (TypeError, ValueError) as error:
        error.add_note("None stands for a temporary folder.")
        raise


def _check_slack(slack: Any) -> None:
    """Raises unless it is a part of N."""
    if isinstance(slack, bool) or not isinstance(slack, int | float) or not slack >= 0:
        raise ValueError(
            f"slack: expected a number of at least 0, the room beside N as a part of it, got "
            f"{slack!r}."
        )


class StoreArrays(HostArrays):
    """A storage whose rows are in the files of a store.

    Attributes:
        path: of its folder; None for a temporary one.
        prealloc: whether room is set aside on the disk at once.
        slack: the room beside N, as a part of N.
    """

    path: str | os.PathLike[str] | None
    prealloc: bool
    slack: float
    unbound: ClassVar[tuple[str, ...]] = ("path", "device_capacity", "prealloc", "slack")
    takes_back: ClassVar[bool] = True

    def check(self) -> None:
        """Checks these fields, and makes the path absolute: a later `chdir` changes nothing."""
        object.__setattr__(self, "path", _checked_path(type(self).__name__, self.path))
        checks.flag("prealloc", self.prealloc)
        _check_slack(self.slack)

    def at(self, path: str | os.PathLike[str] | None) -> Self:
        """The same in another folder."""
        return dataclasses.replace(self, path=path)  # pyright: ignore[reportArgumentType]: it is one

    def elsewhere(self) -> Self:
        """The same in a temporary folder."""
        return self.at(None)

    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> StoreRows:
        """Files full of zeros. Raises if there is no room for them."""
        return make(self.path, self.prealloc, self.slack, ring, spec, is_chronological)

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> int:
        """The bytes of all files when they are full, of the numbers of rows, and of the version."""
        width = 8 + sum(column.width for column in columns(spec))
        rows = _room(self.path, self.slack, ring, spec, is_chronological)
        return width * rows + pytree.nbytes(VERSION)
