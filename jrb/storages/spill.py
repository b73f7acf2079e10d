"""A storage of all rows on the host, and of the newest ones on the device too."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import packed
from jrb._util import checks, pytree
from jrb._xla import dependencies, gather
from jrb.keys import TED
from jrb.ring import Clock, Occupancy, Ring
from jrb.storages.host_rows import HostView, RowsSpec, UniqueSlots
from jrb.storages.memmap import StoreArrays, StoreRows
from jrb.types import Context, HostState, Item, SlotsForLeaf, WritePlan
from jrb.types.messages import plan_rows


class DeviceCacheState(pytree.State):
    """The newest rows, on the device."""

    items: Item  # leaves [H, ...]
    clock: Clock  # the position of the cache's own ring


class TieredState(pytree.State, HostState):
    """The state of a `SpillStorage`."""

    cache: DeviceCacheState  # the newest rows
    view: HostView  # all rows

    @property
    def capacity(self) -> int:
        """N, the number of slots."""
        return self.view.capacity

    @property
    def host_bytes(self) -> int:
        """The number of bytes of all rows on the host."""
        return self.view.host_bytes


class CachedSlots(NamedTuple):
    """The slots of an array, and where they are cached, arrays of one shape.

    Attributes:
        slots: int32, the slots.
        cache_rows: int32, their offsets in the cache.
        is_cached: bool, True for those that are cached.
    """

    slots: jax.Array
    cache_rows: jax.Array
    is_cached: jax.Array


def _uncached(located: CachedSlots, is_static: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slots that are not cached, int32 `[M]`, and their offsets in the batch.

    Offsets are padded to few lengths K, so that few programs are compiled: 0, an eighth of all
    slots, 1.5 times that, and so on; with `is_static` to all. Padding is an offset beyond the
    batch, where nothing is written.
    """
    flat, is_cached = np.asarray(located.slots).reshape(-1), np.asarray(located.is_cached)
    offsets = np.flatnonzero(~is_cached.reshape(-1))
    length = len(flat) if is_static else 0
    while length < len(offsets):
        length += -(-length // 2) if length else -(-len(flat) // 8)
    at = np.full(min(length, len(flat)), len(flat), np.int32)
    at[: len(offsets)] = offsets
    return flat[offsets], at


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
    """

    path: str | os.PathLike[str] | None
    device_capacity: int
    prealloc: bool = False
    state_type: ClassVar[type] = TieredState
    assembles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check()
        checks.count("device_capacity", self.device_capacity, 2**31 - 1)
        object.__setattr__(self, "device_capacity", int(self.device_capacity))

    @property
    def requires_chronological(self) -> bool:
        """True: the newest rows are those that were written last."""
        return True

    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> StoreRows:
        """Creates files full of zeros. Raises if the disk has no space for them."""
        if self.device_capacity % ring.envs:
            raise ValueError(
                f"device_capacity: expected a multiple of num_envs = {ring.envs}, got "
                f"{self.device_capacity}."
            )
        return super().make_rows(ring, spec, is_chronological)

    def cache_ring(self, ring: Ring) -> Ring:
        """Returns the shape of the ring of cached rows."""
        return Ring(rows=min(self.device_capacity // ring.envs, ring.rows), envs=ring.envs)

    def view(self, state: TieredState) -> HostView:
        """Returns the part of a state that refers to rows on the host."""
        return state.view

    def with_view(self, state: TieredState, view: HostView) -> TieredState:
        """Returns the state with another view."""
        return state.replace(view=view)

    def init(self, context: Context, spec: Item) -> TieredState:
        """Returns the state of compiled parts, with an empty cache."""
        cache = self.cache_ring(context.ring)
        items = jax.tree.map(lambda leaf: packed.zeros_column(cache.capacity, leaf), spec)
        state = DeviceCacheState(items=items, clock=cache.start())
        return TieredState(cache=state, view=super().init(context, spec))

    def attach(self, ring: Ring, view: HostView, held: Callable[[], Occupancy]) -> TieredState:
        """Returns the state of existing rows, the newest of which are cached again."""
        cache, occupancy = self.cache_ring(ring), held()
        size = int(occupancy.size)
        count = min(size // ring.envs, cache.rows)
        # The newest rows that the cache has room for end where the newest row ends.
        first = int(occupancy.first[0]) + size - count * ring.envs
        slots = (first + np.arange(count * ring.envs)) % ring.capacity
        newest = view.rows.fetch(view.version, slots)
        state = self.init(Context(ring, TED, occupancy), view.rows.spec).cache
        put = lambda column, new: packed.with_array(
            column, packed.stored_array(column).at[: len(slots)].set(packed.to_words(new))
        )
        items = jax.tree.map(put, state.items, newest, is_leaf=packed.is_column)
        clock = cache.advance(state.clock, jnp.int32(count))
        return TieredState(cache=DeviceCacheState(items=items, clock=clock), view=view)

    def write(
        self, context: Context, state: TieredState, plan: WritePlan, items: Item
    ) -> tuple[TieredState, WritePlan]:
        """Writes rows to the cache and to the host."""
        # The cache has a clock of its own, and plans the same rows around its smaller ring.
        mask = None if plan.consecutive else plan.written
        ring = self.cache_ring(context.ring)
        clock, put = plan_rows(ring, state.cache.clock, plan.passed.size, mask)
        write_to = lambda column, new: packed.put_column(column, put, packed.to_words(new))
        new = jax.tree.map(write_to, state.cache.items, items, is_leaf=packed.is_column)
        cache = DeviceCacheState(items=new, clock=clock)
        return TieredState(cache=cache, view=state.view.put(plan.slots, items)), plan

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
        located = self._find(context, state.cache, jnp.minimum(slots, capacity - 1))
        at = jnp.where(located.is_cached & (slots < capacity), located.cache_rows, size)

        def put(path: tuple, column: packed.Column) -> packed.Column:
            new = values.get(pytree.leaf_name(path))
            return column if new is None else packed.edit_column(column, at, new)

        every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=packed.is_column)
        cache = state.cache.replace(items=every(put, state.cache.items))
        return TieredState(cache=cache, view=state.view.edit(slots, values))

    def _find(self, context: Context, state: DeviceCacheState, slots: jax.Array) -> CachedSlots:
        ring, cache = context.ring, self.cache_ring(context.ring)
        age = context.held.after(ring, slots)
        is_cached = (age >= 0) & (age < state.clock.count)
        row = cache.row_after(state.clock.cursor, jnp.where(is_cached, cache.rows - 1 - age, 0))
        return CachedSlots(slots, row * ring.envs + slots % ring.envs, is_cached)

    def locate(self, context: Context, state: TieredState, where: SlotsForLeaf) -> UniqueSlots:
        """Returns the slots of each leaf, and which of them are cached."""
        find = functools.partial(self._find, context, state.cache)
        return UniqueSlots.of(list(map(where, state.view.rows.names)), find)

    def fetch(self, view: HostView, located: UniqueSlots, is_static: bool = False) -> Any:
        """Returns rows that are not cached, `[K, ...]`, and their offsets in the batch, `[K]`."""
        uncached = [_uncached(one, is_static) for one in located.values]
        # Only these rows are read; zeros are appended to the lengths of the offsets.
        slots, offsets = zip(*(uncached[number] for number in located.index), strict=True)
        leaves = view.rows.take(view.version, list(slots))
        padded = [
            np.concatenate([leaf, np.zeros((len(at) - len(leaf), *leaf.shape[1:]), leaf.dtype)])
            for leaf, at in zip(leaves, offsets, strict=True)
        ]
        return padded, [offsets for _, offsets in uncached]

    def fetched_shapes(self, rows: RowsSpec, located: UniqueSlots) -> Any:
        """Returns the shapes of what `fetch` returns, inside `jit`."""
        sizes = located.each(lambda one: one.slots.size)
        pairs = zip(sizes, rows.raw, strict=True)
        leaves = [jax.ShapeDtypeStruct((size, *spec.shape), spec.dtype) for size, spec in pairs]
        one = lambda each: jax.ShapeDtypeStruct((each.slots.size,), jnp.int32)
        return leaves, list(map(one, located.values))

    def assemble(
        self, context: Context, state: TieredState, located: UniqueSlots, fetched: Any
    ) -> Item:
        """Returns the items: cached ones from the device, and those that were fetched."""
        leaves, structure = jax.tree.flatten(state.view.rows.items(fetched[0]))
        # Leaves that share their slots share the offsets in the batch, too.
        places = [fetched[1][number] for number in located.index]
        cache_rows = located.each(lambda one: one.cache_rows)
        columns = zip(jax.tree.leaves(state.cache.items), cache_rows, strict=True)
        items = []
        for cached, new, at in zip(gather.read_items(*columns), leaves, places, strict=True):
            # Flattened, so that one scatter writes all rows from the host, for slots of any shape.
            words = packed.to_words(new)
            lead = cached.shape[: cached.ndim + 1 - words.ndim]
            line = cached.reshape(math.prod(lead), *words.shape[1:])
            line = packed.put_blocks(line, at, words[:, None]) if at.size else line
            items.append(packed.from_words(line.reshape(cached.shape), new.dtype))
        return jax.tree.unflatten(structure, items)

    def reset(self, ring: Ring, state: TieredState, token: jax.Array) -> TieredState:
        """Returns the state with an empty cache."""
        clock = self.cache_ring(ring).emptied(state.cache.clock)
        state = state.replace(cache=state.cache.replace(clock=clock))
        return dependencies.delay_writes_until(state, token)
