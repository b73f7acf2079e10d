"""A storage of rows in memory-mapped files on the host (see `jrb._store`)."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jrb._store import files
from jrb._store.errors import StaleError
from jrb._store.opening import create
from jrb._store.store import Store
from jrb._store.table import Column
from jrb._util import casting, checks, pytree
from jrb.ring import Ring
from jrb.storages import host_rows
from jrb.storages.host_rows import HostArrays, HostRows, Version
from jrb.types import Item


class StoreRows(HostRows):
    """The rows in the files of a store."""

    def __init__(self, store: Store, spec: Item, expiring: bool) -> None:
        super().__init__(store.slots, spec)
        self.store: Store = store
        self.path: str | None = store.path
        # True if committed rows may be overwritten when the ring comes round to them.
        self._expiring = expiring

    @property
    def reach(self) -> int:
        """See `HostRows.reach`."""
        return self.store.reach

    def put(
        self,
        version: Version,
        slots: np.ndarray,
        *leaves: Any,
        patient: bool = False,
        replace: bool = False,
    ) -> np.ndarray:
        """See `HostRows.put`."""
        at = np.asarray(slots).reshape(-1).astype(np.int64)
        rows = [host_rows.bytes_of(np.asarray(leaf), len(at)) for leaf in leaves]
        is_kept = at < self.capacity
        if not is_kept.all():
            at, rows = at[is_kept], [leaf[is_kept] for leaf in rows]
        # An edit never overwrites committed rows: the table grows instead.
        expiring = self._expiring and not replace
        return host_rows.words(
            self.store.put(host_rows.number(version), at, rows, expiring, patient)
        )

    def read(self, version: Version, slots: list[np.ndarray]) -> list[np.ndarray]:
        """See `HostRows.read`."""
        return self.store.take(host_rows.number(version), slots)

    def read_leaf(self, version: Version, leaf: int, slots: np.ndarray) -> np.ndarray:
        """See `HostRows.read_leaf`."""
        return self.store.take_column(host_rows.number(version), leaf, slots)

    def check_newest(self, version: Version) -> None:
        """See `HostRows.check_newest`."""
        self.store.check_newest(host_rows.number(version))

    def drawing(self) -> AbstractContextManager[None]:
        """See `HostRows.drawing`."""
        return self.store.drawing.entered()

    @contextlib.contextmanager
    def writing(self, version: Version) -> Iterator[None]:
        """See `HostRows.writing`."""
        before = host_rows.number(version)
        is_newest = before == self.store.version
        try:
            yield
        except StaleError:
            raise  # another was faster
        except BaseException:
            if is_newest:
                self.store.take_back(before)
            raise


_ATOMIC_BYTES = 8 << 20
"""Writes of fewer bytes happen completely or not at all."""


def columns(spec: Item) -> tuple[Column, ...]:
    """Returns the columns of a store for items of this spec."""
    every = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(spec):
        raw, parts = casting.raw_spec(leaf), []
        for key in path:
            # A leaf's name is a path of files: no part may contain a separator or be a dot.
            part = pytree.part_name(key).replace("%", "%25").replace("/", "%2F")
            parts.append("%2E" if part == "." else part)
        kind = (str(leaf.dtype), str(list(leaf.shape)))
        name = "/".join(parts) if path else "."
        every.append(Column.of(name, kind, raw.size * raw.dtype.itemsize))
    return tuple(every)


class StoreArrays(HostArrays):
    """A storage whose rows are in the files of a store; see `MemmapStorage`."""

    path: str | os.PathLike[str] | None
    prealloc: bool
    spare_fraction: float
    unbound: ClassVar[tuple[str, ...]] = ("path", "device_capacity", "prealloc", "spare_fraction")
    takes_back: ClassVar[bool] = True

    def check(self) -> None:
        """Checks these fields, and makes the path absolute, so that a later `chdir` is harmless."""
        if self.path is not None:
            try:
                path = files.absolute(self.path, f"{type(self).__name__}: path")
            except (TypeError, ValueError) as error:
                error.add_note("None stands for a temporary folder.")
                raise
            object.__setattr__(self, "path", path)
        checks.flag("prealloc", self.prealloc)
        fraction = self.spare_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not fraction >= 0:
            raise ValueError(
                "spare_fraction: expected a number of at least 0, the additional rows as a "
                f"fraction of N, got {fraction!r}."
            )

    def at(self, path: str | os.PathLike[str] | None) -> Self:
        """Returns this storage with another folder."""
        return dataclasses.replace(self, path=path)  # pyright: ignore[reportArgumentType]: it is one

    def elsewhere(self) -> Self:
        """Returns this storage with a temporary folder."""
        return self.at(None)

    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> StoreRows:
        """Creates files full of zeros. Raises if the disk has no space for them."""
        num_places = self._num_places(ring, spec, is_chronological)
        path = None if self.path is None else os.fspath(self.path)
        store = create(path, columns(spec), ring.capacity, num_places, self.prealloc)
        return StoreRows(store, spec, is_chronological or self.path is None)

    def nbytes(self, ring: Ring, spec: Item, is_chronological: bool) -> dict[str, int]:
        """Returns the bytes of all full files, with row numbers, and of the version."""
        # 8 bytes for the number of the row at each place (`rows/.numbers`).
        width = 8 + sum(column.width for column in columns(spec))
        size = width * self._num_places(ring, spec, is_chronological)
        return {"files": size, "device": pytree.nbytes(host_rows.VERSION)}

    def _num_places(self, ring: Ring, spec: Item, is_chronological: bool) -> int:
        """Returns P, the number of rows in the files when they are full."""
        width = max(sum(column.width for column in columns(spec)), 1)
        spare = max(ring.envs, min(_ATOMIC_BYTES // width, ring.capacity))
        if self.path is not None:
            # Committed rows are not overwritten. In the order of time the oldest may be, when no
            # place is free; otherwise any committed row may have to stay.
            fraction = int(self.spare_fraction * ring.capacity)
            spare = max(spare, fraction if is_chronological else ring.capacity)
        return ring.capacity + spare


@pytree.component
class MemmapStorage(StoreArrays):
    """Keeps the items in files on the host, one for each leaf, and reads them through mappings.

    Sampler, writer and priorities stay on the device. Outside `jit`, methods read and write between
    jitted parts; inside, and in `scan`, by ordered callbacks; under `vmap` they are refused. The
    raw rows of a leaf `next/observation` are in the file `rows/next/observation.bin`.

    States share their rows: an older state can neither be written to nor draw rows that were
    overwritten since (`jrb.StaleError`). `jrb.save` to the path is a commit, which writes only what
    changed. `jrb.load` of the path returns the last commit, after a crash too, as committed rows
    are not overwritten. Only if more rows are written between two commits than there are spare
    rows, the oldest committed rows are overwritten; after a crash, `jrb.load` then returns the
    commit without them, with a `jrb.LostWarning`.

    One process may write. Any number of others may load the path, and read the rows of the commit
    that they loaded until these are overwritten (`jrb.StaleError`). If a mapped file is truncated
    meanwhile, the process crashes. In a process, one thread may write while others draw: a write
    waits for draws that are under way. If a process loads a path that it writes already, the state
    that is written to first stays valid, and the other becomes stale.

    Attributes:
        path: a folder that does not exist or is empty; None for a temporary one, which is removed
            with the last state, or with the program. A state that went through `jit` is also held
            by JAX, until the program ends or calls `jax.clear_caches()`.
        prealloc: if True, `init` reserves all room on the disk, so that it cannot be full later. If
            False, files grow as they are filled, and a write to a full disk raises OSError.
        spare_fraction: the number of additional rows for writes between two commits, as a fraction
            of N. Writers that do not keep the order of time get as many as they need, at most N.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(1000, batch_size=2, storage=jrb.MemmapStorage())
        >>> state = buffer.add(buffer.init({"x": jnp.zeros(3)}), {"x": jnp.ones(3)})
        >>> buffer.sample(state, jax.random.key(0)).data["x"].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    path: str | os.PathLike[str] | None = None
    prealloc: bool = False
    spare_fraction: float = 0.25

    def __post_init__(self) -> None:
        self.check()
