"""A storage of rows in memory-mapped files on the host (see `jrb._store`)."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jrb._store import files
from jrb._store.block_store import BlockStore, Source
from jrb._store.blocks import rows_per_block
from jrb._store.files import StaleError
from jrb._store.linked_rows import LinkedRows
from jrb._store.shared_rows import SharedRows
from jrb._util import casting, checks, pytree
from jrb.keys import Keys
from jrb.ring import Ring
from jrb.storages import host_rows
from jrb.storages.device import shared_leaves
from jrb.storages.host_rows import HostRows, HostStorage
from jrb.types import Item

ITEMS = "items/"
"""The prefix of the names of arrays with the rows of items."""

ENTRIES = ".entries"
"""The name of the array that says where next observations are; see `jrb._store.linked_rows`."""


class StoreRows(HostRows):
    """The rows in the files of a store."""

    takes_back: ClassVar[bool] = True

    def __init__(self, store: BlockStore, ring: Ring, spec: Item, twins: dict[int, int]) -> None:
        super().__init__(ring.capacity, spec)
        self.store: BlockStore = store
        self.turn: AbstractContextManager[Any] = store.turn
        names = list(item_sources(spec, ring.capacity))
        if twins:
            self.shared: SharedRows = LinkedRows(store, names, ENTRIES, twins, ring.envs)
        else:
            self.shared = SharedRows(store, names)
        self.path: str | None = store.path

    @property
    def reach(self) -> int:
        """See `HostRows.reach`."""
        return self.shared.reach

    def put(self, version: int, slots: np.ndarray, *leaves: Any, patient: bool = False) -> int:
        """See `HostRows.put`."""
        at = np.asarray(slots).reshape(-1)
        rows = [host_rows.bytes_of(np.asarray(leaf), len(at)) for leaf in leaves]
        is_kept = at < self.capacity
        if not is_kept.all():
            at, rows = at[is_kept], [leaf[is_kept] for leaf in rows]
        return self.shared.write_rows(version, at, rows, patient)

    def read(self, version: int, slots: Sequence[np.ndarray], first: int = 0) -> list[np.ndarray]:
        """See `HostRows.read`."""
        # Leaves that share their slots still do so when these are flat.
        flat = {id(at): at.reshape(-1) for at in slots}
        leaves = self.shared.read_rows(version, [flat[id(at)] for at in slots], first)
        return [
            leaf.view(spec.dtype).reshape((*at.shape, *spec.shape))
            for leaf, spec, at in zip(leaves, self.raw[first:], slots, strict=False)
        ]

    def check_newest(self, version: int) -> None:
        """See `HostRows.check_newest`."""
        self.shared.check_newest(version)

    def drawing(self) -> AbstractContextManager[None]:
        """See `HostRows.drawing`."""
        return self.shared.drawing.enter()

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """See `HostRows.writing`."""
        is_newest = version == self.shared.version
        try:
            yield
        except StaleError:
            raise  # another was faster
        except BaseException:
            if is_newest:
                self.shared.undo_last_write(version)
            raise


def item_sources(spec: Item, capacity: int, are_linked: bool = False) -> dict[str, Source]:
    """Returns the arrays of a store, by name, for items of this spec.

    With `are_linked`, next observations are not in the order of slots; see `LinkedRows`.
    """
    sources = {}
    for name, leaf in zip(pytree.unique_names(spec), jax.tree.leaves(spec), strict=True):
        raw = casting.raw_spec(leaf)
        kind = [str(leaf.dtype), str([capacity, *leaf.shape])]
        width = raw.size * raw.dtype.itemsize
        sources[ITEMS + name] = Source(kind, f"leaf '{name}'", capacity, width)
    if are_linked:
        kind = ["int32", str([capacity])]
        sources[ENTRIES] = Source(kind, "the entries of next observations", capacity, 4)
    return sources


class StoreArrays(HostStorage):
    """A storage whose rows are in the files of a store; see `MemmapStorage`."""

    path: str | os.PathLike[str] | None
    prealloc: bool
    share_next_observations: bool
    unbound: ClassVar[tuple[str, ...]] = ("path", "device_capacity", "prealloc")

    def check(self) -> None:
        """Checks these fields, and makes the path absolute, so that a later `chdir` is harmless."""
        if self.path is not None:
            try:
                path = files.absolute_path(self.path, f"{type(self).__name__}: path")
            except (TypeError, ValueError) as error:
                error.add_note("None stands for a temporary folder.")
                raise
            object.__setattr__(self, "path", path)
        checks.flag("prealloc", self.prealloc)
        checks.flag("share_next_observations", self.share_next_observations)
        if self.prealloc and self.share_next_observations:
            raise ValueError(
                "prealloc: expected False with share_next_observations=True, as the room that next "
                "observations need is not known before, got True. Leave one of them out."
            )

    def at(self, path: str | os.PathLike[str] | None) -> Self:
        """Returns this storage with another folder."""
        return dataclasses.replace(self, path=path)  # pyright: ignore[reportArgumentType]: it is one

    def elsewhere(self) -> Self:
        """Returns this storage with a temporary folder."""
        return self.at(None)

    def twins(self, spec: Item, keys: Keys) -> dict[int, int]:
        """Returns, for the number of each next observation that is shared, the observation's."""
        if not self.share_next_observations:
            return {}
        numbers = {name: number for number, name in enumerate(pytree.leaf_names(spec))}
        pairs = shared_leaves(spec, keys).items()
        return {numbers[name]: numbers[observation] for name, observation in pairs}

    def make_rows(self, ring: Ring, spec: Item, keys: Keys) -> StoreRows:
        """Creates files full of zeros. Raises if the disk has no space for them."""
        twins = self.twins(spec, keys)
        sources = item_sources(spec, ring.capacity, self.share_next_observations)
        rounds = self._reserved_rounds
        store = BlockStore.create(None if self.path is None else os.fspath(self.path))
        try:
            store.folder.check_free(rounds * self._file_bytes(sources))
            for name, source in sources.items():
                num_blocks = -(-source.rows // rows_per_block(source.rows, source.width))
                store.array(name, source, reserve=rounds * num_blocks)
            store.keep_open()
            return StoreRows(store, ring, spec, twins)
        except BaseException:
            store.close()
            raise

    @property
    def _reserved_rounds(self) -> int:
        """The number of times that the files keep room for all rows."""
        # Rows of the last commit stay as they are: until the next one, as many may be added.
        return 0 if not self.prealloc else 1 if self.path is None else 2

    def open_rows(self, store: BlockStore, ring: Ring, spec: Item, keys: Keys) -> StoreRows:
        """Returns the rows of a store that has been opened, whose files keep the room they have."""
        rows = StoreRows(store, ring, spec, self.twins(spec, keys))
        for name in rows.shared.names:
            array = store.arrays[name]
            array.reserved = self._reserved_rounds * array.spec.num_blocks
        return rows

    def _file_bytes(self, sources: dict[str, Source]) -> int:
        """Returns the bytes of all full files, whose last blocks are padded."""
        blocks = [(it, rows_per_block(it.rows, it.width)) for it in sources.values()]
        return sum(-(-it.rows // block) * block * it.width for it, block in blocks)

    def nbytes(self, ring: Ring, spec: Item, keys: Keys) -> dict[str, int]:
        """Returns the bytes of the rows of a full ring, in whole blocks, and of the version.

        Next observations that are shared count as if each were the observation of the next row.
        """
        sources = item_sources(spec, ring.capacity, self.share_next_observations)
        shared = [list(sources)[number] for number in self.twins(spec, keys)]
        size = self._file_bytes({name: it for name, it in sources.items() if name not in shared})
        return {"files": size, "device": pytree.nbytes(host_rows.WORDS)}


@pytree.component
class MemmapStorage(StoreArrays):
    """Keeps the items in files on the host, one for each leaf, and reads them through mappings.

    Sampler, writer and priorities stay on the device. Outside `jit`, methods read and write between
    jitted parts; inside, and in `scan`, by ordered callbacks; under `vmap` they are refused.

    States share their rows: an older state can neither be written to nor draw rows that were
    overwritten since (`jrb.StaleError`). `jrb.save` to the path is a commit, which writes only what
    changed. `jrb.load` of the path returns the last commit, all of it, after a crash too: the first
    write into a block of a commit goes to another position of the file. So until the next commit
    the files grow by the blocks that are overwritten, at most to twice their size. Older
    generations that are kept (`keep=`) and those that readers have loaded take room beside it.

    One process may write. Any number of others may load the path; they read the rows of the commit
    that they loaded as long as they hold its state, however many commits follow, and the files keep
    these rows for them. If a file is truncated meanwhile, the process crashes. If a process loads a
    path that it writes already, the state that is written to first stays valid, and the other
    becomes stale, even if that write fails.

    In a process, one thread may write while others draw. Outside `jit`, a write waits for draws
    and saves that are under way, at most a second. After a later write, or one inside `jit`, such a
    draw or save may raise `jrb.StaleError`, and nothing is saved.

    Attributes:
        path: a folder that does not exist or is empty; None for a temporary one, which is removed
            with the last state, or with the program. A state that went through `jit` is also held
            by JAX, until the program ends or calls `jax.clear_caches()`.
        prealloc: if True, `init` reserves all room on the disk, so that it cannot be full later:
            once the size of the items without a path, else twice. If False, files grow as they are
            filled, and a write to a full disk raises OSError and changes nothing.
        share_next_observations: if True, a next observation that equals, bit for bit, the
            observation of the same environment's next row takes no room of its own in the files:
            about half of them for frames. Reads return exactly what was written, and no row is
            removed early, whatever the writer and the number of episodes. `add` takes 1.2 to 1.5
            times as long. `prealloc` must be False.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(1000, batch_size=2, storage=jrb.MemmapStorage())
        >>> state = buffer.add(buffer.init({"x": jnp.zeros(3)}), {"x": jnp.ones(3)})
        >>> buffer.sample(state, jax.random.key(0)).data["x"].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    path: str | os.PathLike[str] | None = None
    prealloc: bool = False
    share_next_observations: bool = False

    def __post_init__(self) -> None:
        self.check()
