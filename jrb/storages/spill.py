"""A storage of all rows on the host, and of the newest ones on the device too."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import packed
from jrb._util import checks, pytree
from jrb._xla import dependencies, gather
from jrb.keys import TED, Keys
from jrb.ring import Occupancy, Ring
from jrb.storages.host_rows import HostRows, HostView, RowsSpec, UniqueSlots
from jrb.storages.memmap import StoreArrays, StoreRows
from jrb.types import Context, Item, SlotsForLeaf, WritePlan


class TieredState(HostView):
    """The state of a `SpillStorage`: all rows on the host, and the newest on the device."""

    cached: Any = None  # the newest rows, leaves [H, ...]
    clock: Any = None  # the position of the cache's own ring, a `Clock`


def _padded_lengths(sizes: list[int], counts: list[int]) -> list[int]:
    """Returns lengths of at least `counts`, so that few programs are compiled.

    They are 0, an eighth of `sizes`, 1.5 times that, and so on to all. One step is common to all:
    with steps of their own, there would be a program for each combination.
    """
    lengths = [0] * len(sizes)
    while any(length < count for length, count in zip(lengths, counts, strict=True)):
        longer = [
            length + -(-length // 2) if any(lengths) else -(-size // 8)
            for length, size in zip(lengths, sizes, strict=True)
        ]
        lengths = list(map(min, longer, sizes))
    return lengths


def _pad(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """Returns the array with rows of this value appended up to a length."""
    if len(array) == length:
        return array
    padded = np.empty((length, *array.shape[1:]), array.dtype)
    padded[: len(array)], padded[len(array) :] = array, value
    return padded


@pytree.component
class SpillStorage(StoreArrays):
    """Keeps all items in files on the host, and the newest ones in a ring on the device too.

    Draws are, bit for bit, those of a `DeviceStorage` of the whole capacity: cached rows are read
    on the device, all others on the host. Writes go to both. All else is as for
    `jrb.MemmapStorage`. Rows must be written in the order of time.

    Attributes:
        path: a folder that does not exist or is empty; None for a temporary one.
        device_capacity: H, the number of items on the device, a multiple of E, at most N.
        prealloc: if True, `init` reserves all room on the disk, so that it cannot be full later. If
            False, files grow as they are filled, and a write to a full disk raises OSError.
        share_next_observations: if True, files have each observation once, as those of
            `jrb.MemmapStorage`; the rows on the device have next observations of their own.
    """

    path: str | os.PathLike[str] | None
    device_capacity: int
    prealloc: bool = False
    share_next_observations: bool = False
    state_type: ClassVar[type] = TieredState
    assembles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check()
        checks.count("device_capacity", self.device_capacity, 2**31 - 1)

    @property
    def requires_chronological(self) -> bool:
        """True: the newest rows are those that were written last."""
        return True

    def make_rows(self, ring: Ring, spec: Item, keys: Keys) -> StoreRows:
        """Creates files full of zeros. Raises if the disk has no space for them."""
        if self.device_capacity % ring.envs:
            raise ValueError(
                f"device_capacity: expected a multiple of num_envs = {ring.envs}, got "
                f"{self.device_capacity}."
            )
        return super().make_rows(ring, spec, keys)

    def cache_ring(self, ring: Ring) -> Ring:
        """Returns the shape of the ring of cached rows."""
        return Ring(rows=min(self.device_capacity // ring.envs, ring.rows), envs=ring.envs)

    def init(self, context: Context, spec: Item) -> TieredState:
        """Returns the state of compiled parts, with an empty cache."""
        cache = self.cache_ring(context.ring)
        cached = jax.tree.map(lambda leaf: packed.zeros_column(cache.capacity, leaf), spec)
        return super().init(context, spec).replace(cached=cached, clock=cache.start())

    def attach(
        self, ring: Ring, rows: HostRows, version: int, held: Callable[[], Occupancy]
    ) -> TieredState:
        """Returns the state of existing rows, the newest of which are cached again."""
        cache, occupancy = self.cache_ring(ring), held()
        size = int(occupancy.size)
        count = min(size // ring.envs, cache.rows)
        # The newest rows that the cache has room for end where the newest row ends.
        first = int(occupancy.first[0]) + size - count * ring.envs
        slots = (first + np.arange(count * ring.envs)) % ring.capacity
        newest = rows.take(version, slots)
        state = self.init(Context(ring, TED, occupancy), rows.spec)
        put = lambda column, new: packed.with_array(
            column, packed.stored_array(column).at[: len(slots)].set(packed.to_words(new))
        )
        cached = jax.tree.map(put, state.cached, newest, is_leaf=packed.is_column)
        clock = cache.advance(state.clock, jnp.int32(count))
        return state.with_rows(rows, version).replace(cached=cached, clock=clock)

    def write(
        self, context: Context, state: TieredState, plan: WritePlan, items: Item
    ) -> tuple[TieredState, WritePlan]:
        """Writes rows to the cache and to the host."""
        # The cache has a clock of its own, and plans the same rows around its smaller ring.
        mask = None if plan.consecutive else plan.written
        ring = self.cache_ring(context.ring)
        clock, put = WritePlan.of_rows(ring, state.clock, plan.passed.size, mask)
        write_to = lambda column, new: packed.put_column(column, put, packed.to_words(new))
        cached = jax.tree.map(write_to, state.cached, items, is_leaf=packed.is_column)
        return state.put(plan.slots, items).replace(cached=cached, clock=clock), plan

    def edit(
        self,
        context: Context,
        state: TieredState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> TieredState:
        """Edits rows on the host, and those that are cached."""
        capacity, size = context.ring.capacity, self.cache_ring(context.ring).capacity
        slots = jnp.arange(capacity, dtype=jnp.int32) if slots is None else slots
        # Slots of N are padding: they go to `size`, which no scatter writes.
        at, is_cached = self._find(context, state, jnp.minimum(slots, capacity - 1))
        at = jnp.where(is_cached & (slots < capacity), at, size)

        def put(path: tuple, column: packed.Column) -> packed.Column:
            new = values.get(pytree.leaf_name(path))
            return column if new is None else packed.edit_column(column, at, new)

        every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=packed.is_column)
        return state.edit(slots, values).replace(cached=every(put, state.cached))

    def _find(
        self, context: Context, state: TieredState, slots: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the slots' places in the cache, int32, and which of them are cached."""
        ring, cache = context.ring, self.cache_ring(context.ring)
        age = context.held.after(ring, slots)
        is_cached = (age >= 0) & (age < state.clock.count)
        row = cache.row_after(state.clock.cursor, jnp.where(is_cached, cache.rows - 1 - age, 0))
        return row * ring.envs + slots % ring.envs, is_cached

    def locate(self, context: Context, state: TieredState, where: SlotsForLeaf) -> UniqueSlots:
        """Returns the slots at which the host reads the leaves; N for those that are cached."""
        unique = super().locate(context, state, where)
        return UniqueSlots(
            [
                jnp.where(self._find(context, state, slots)[1], context.ring.capacity, slots)
                for slots in unique.arrays
            ],
            unique.index,
        )

    def fetch(
        self, rows: HostRows, version: int, located: UniqueSlots, is_static: bool = False
    ) -> Any:
        """Returns rows that are not cached, `[K, ...]`, and their positions in the batch, `[K]`.

        K is one of few lengths, so that few programs are compiled; with `is_static`, it is that of
        all slots. Positions are padded with one beyond the batch, where nothing is written.
        """
        flat = [np.asarray(slots).reshape(-1) for slots in located.arrays]
        places = [np.flatnonzero(slots < rows.capacity).astype(np.int32) for slots in flat]
        read = [slots[at] for slots, at in zip(flat, places, strict=True)]
        leaves = rows.read(version, located.per_leaf(read))
        sizes = lengths = list(map(len, flat))
        if not is_static:
            lengths = _padded_lengths(sizes, list(map(len, places)))
        leaves = [
            _pad(leaf, length, 0)
            for leaf, length in zip(leaves, located.per_leaf(lengths), strict=True)
        ]
        return leaves, list(map(_pad, places, lengths, sizes))

    def fetched_shapes(self, rows: RowsSpec, located: UniqueSlots) -> Any:
        """Returns the shapes of what `fetch` returns, inside `jit`."""
        places = [jax.ShapeDtypeStruct((slots.size,), jnp.int32) for slots in located.arrays]
        pairs = zip(located.per_leaf(places), rows.raw, strict=True)
        return [jax.ShapeDtypeStruct(at.shape + it.shape, it.dtype) for at, it in pairs], places

    def assemble(
        self, context: Context, state: TieredState, where: SlotsForLeaf, fetched: Any
    ) -> Item:
        """Returns the items: cached ones from the device, and those that were fetched."""
        leaves, structure = jax.tree.flatten(state.rows.items(fetched[0]))
        unique = UniqueSlots.of(state.rows.names, where)
        cache_rows = [self._find(context, state, slots)[0] for slots in unique.arrays]
        columns = jax.tree.leaves(state.cached)
        cached = gather.read_items(*zip(columns, unique.per_leaf(cache_rows), strict=True))
        items = []
        for rows, new, at in zip(cached, leaves, unique.per_leaf(fetched[1]), strict=True):
            # Flattened, so that one scatter writes all rows from the host, for slots of any shape.
            words = packed.to_words(new)
            lead = rows.shape[: rows.ndim + 1 - words.ndim]
            line = rows.reshape(math.prod(lead), *words.shape[1:])
            line = packed.put_blocks(line, at, words[:, None]) if at.size else line
            items.append(packed.from_words(line.reshape(rows.shape), new.dtype))
        return jax.tree.unflatten(structure, items)

    def reset(self, ring: Ring, state: TieredState, token: jax.Array) -> TieredState:
        """Returns the state with an empty cache."""
        state = state.replace(clock=self.cache_ring(ring).empty(state.clock))
        return dependencies.delay_writes_until(state, token)
