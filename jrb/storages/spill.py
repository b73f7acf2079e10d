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
from jrb._core.host_proxy import DeviceProxy, UniqueSlots
from jrb._util import checks, pytree
from jrb._xla import dependencies, gather
from jrb.keys import TED
from jrb.ring import Clock, Occupancy, Ring
from jrb.storages.host_rows import HostView
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


@pytree.component
class DeviceCache(DeviceProxy):
    """The cache of the newest rows, which replaces a `SpillStorage` in jitted parts."""

    capacity: int

    def ring(self, ring: Ring) -> Ring:
        """Returns the shape of the ring of cached rows."""
        return Ring(rows=min(self.capacity // ring.envs, ring.rows), envs=ring.envs)

    def init(self, context: Context, spec: Item) -> DeviceCacheState:
        """Returns an empty cache."""
        cache = self.ring(context.ring)
        items = jax.tree.map(lambda leaf: packed.zeros_column(cache.capacity, leaf), spec)
        return DeviceCacheState(items=items, clock=cache.start())

    def spec(self, state: DeviceCacheState) -> Item:
        """Returns the spec of an item."""
        return packed.spec(state.items)

    def write(
        self, context: Context, state: DeviceCacheState, plan: WritePlan, items: Item
    ) -> tuple[tuple[jax.Array, DeviceCacheState], WritePlan]:
        """Returns the slots, int32 `[T, E]`, and the cache after the write."""
        # The cache has a clock of its own, and plans the same rows around its smaller ring.
        mask = None if plan.consecutive else plan.written
        ring = self.ring(context.ring)
        clock, put = plan_rows(ring, state.clock, plan.passed.size, mask)
        write_to = lambda column, new: packed.put_column(column, put, packed.to_words(new))
        new = jax.tree.map(write_to, state.items, items, is_leaf=packed.is_column)
        return (plan.slots, DeviceCacheState(items=new, clock=clock)), plan

    def edit(
        self,
        context: Context,
        state: DeviceCacheState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> DeviceCacheState:
        """Edits the rows that are cached."""
        capacity, size = context.ring.capacity, self.ring(context.ring).capacity
        slots = jnp.arange(capacity, dtype=jnp.int32) if slots is None else slots
        # Slots of N are padding: they go to `size`, which no scatter writes.
        row, is_cached = self.where(context, state, jnp.minimum(slots, capacity - 1))
        at = jnp.where(is_cached & (slots < capacity), row, size)

        def put(path: tuple, column: packed.Column) -> packed.Column:
            new = values.get(pytree.leaf_name(path))
            return column if new is None else packed.edit_column(column, at, new)

        every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=packed.is_column)
        return state.replace(items=every(put, state.items))

    def where(self, context: Context, state: DeviceCacheState, slots: jax.Array) -> Any:
        """Returns the offsets of slots in the cache, int32 `[...]`, and True for those cached."""
        ring, cache = context.ring, self.ring(context.ring)
        age = context.held.after(ring, slots)
        is_cached = (age >= 0) & (age < state.clock.count)
        row = cache.row_after(state.clock.cursor, jnp.where(is_cached, cache.rows - 1 - age, 0))
        return row * ring.envs + slots % ring.envs, is_cached

    def locate(
        self, context: Context, state: DeviceCacheState, where: list[jax.Array]
    ) -> UniqueSlots:
        """Returns the slots of each leaf, their offsets in the cache, and True for those cached."""
        return UniqueSlots.of(where, lambda slots: (slots, *self.where(context, state, slots)))

    def reset(self, ring: Ring, state: DeviceCacheState, token: jax.Array) -> DeviceCacheState:
        """Returns the emptied cache."""
        return state.replace(clock=self.ring(ring).emptied(state.clock))


@jax.jit
def _gathered(leaves: list[jax.Array], at: list[jax.Array]) -> list[jax.Array]:
    """Returns rows of each leaf, `[*slots, ...]`."""
    return [gather.items_at(leaf, row) for leaf, row in zip(leaves, at, strict=True)]


@functools.partial(jax.jit, donate_argnums=0)
def _merged(cached: list[jax.Array], others: list[jax.Array], at: list[jax.Array]) -> list:
    """Writes rows `[K, ...]` of each leaf at offsets among cached ones, `[*slots, ...]`."""
    merged = []
    for leaf, new, start in zip(cached, others, at, strict=True):
        lead = leaf.shape[: leaf.ndim + 1 - new.ndim]
        # Flattened, so that one scatter writes all rows from the host, for slots of any shape.
        line = leaf.reshape(math.prod(lead), *new.shape[1:])
        line = packed.put_blocks(line, start, new[:, None]) if start.size else line
        merged.append(line.reshape(leaf.shape))
    return merged


def _uncached(slots: np.ndarray, is_cached: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slots that are not cached, and their offsets in the batch.

    They are padded to few lengths, so that few programs are compiled: 0, an eighth of the batch,
    1.5 times that, and so on.
    """
    flat, offsets = slots.reshape(-1), np.flatnonzero(~is_cached.reshape(-1))
    if not len(offsets):
        return flat[:0], offsets.astype(np.int32)
    length = -(-len(flat) // 8)
    while length < len(offsets):
        length += -(-length // 2)
    # Padding has an offset beyond the batch, where nothing is written; any slot is read for it.
    at = np.full(min(length, len(flat)), len(flat), np.int32)
    at[: len(offsets)] = offsets
    return flat[np.where(at < len(flat), at, offsets[0])], at


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

    @property
    def device_part(self) -> DeviceCache:
        """The storage that replaces this one in jitted parts."""
        return DeviceCache(self.device_capacity)

    def device_state(self, state: TieredState) -> DeviceCacheState:
        """Returns the cached rows."""
        return state.cache

    def view(self, state: TieredState) -> HostView:
        """Returns the part of a state that refers to rows on the host."""
        return state.view

    def combine(self, view: HostView, device_state: DeviceCacheState) -> TieredState:
        """Returns the state made of a view of all rows and of the cached ones."""
        return TieredState(cache=device_state, view=view)

    def attach(self, ring: Ring, view: HostView, held: Callable[[], Occupancy]) -> TieredState:
        """Returns the state of existing rows, the newest of which are cached again."""
        part, occupancy = self.device_part, held()
        cache, size = part.ring(ring), int(occupancy.size)
        count = min(size // ring.envs, cache.rows)
        # The newest rows that the cache has room for end where the newest row ends.
        first = int(occupancy.first[0]) + size - count * ring.envs
        slots = (first + np.arange(count * ring.envs)) % ring.capacity
        newest = view.rows.fetch(view.version, [slots] * len(view.rows.names))
        state = part.init(Context(ring, TED, occupancy), view.rows.spec)
        put = lambda column, new: packed.with_array(
            column, packed.stored_array(column).at[: len(slots)].set(packed.to_words(new))
        )
        items = jax.tree.map(put, state.items, newest, is_leaf=packed.is_column)
        clock = cache.advance(state.clock, jnp.int32(count))
        return TieredState(cache=DeviceCacheState(items=items, clock=clock), view=view)

    def fetch(self, state: TieredState, slots: jax.Array, places: Any) -> Item:
        """Returns the items: cached ones from the device, all others from the host."""
        view = state.view
        offsets = [row for _, row, _ in places.each(lambda one: one)]
        # Dispatched first: the device gathers while the host reads its rows.
        cached = _gathered(jax.tree.leaves(state.cache.items), offsets)
        at = places.each(lambda one: _uncached(np.asarray(one[0]), np.asarray(one[2])))
        others = view.rows.items(view.rows.take(view.version, [uncached for uncached, _ in at]))
        leaves, structure = jax.tree.flatten(others)
        merged = _merged(cached, list(map(packed.to_words, leaves)), [offset for _, offset in at])
        unpacked = map(packed.from_words, merged, [leaf.dtype for leaf in leaves])
        return jax.tree.unflatten(structure, unpacked)

    def read(self, context: Context, state: TieredState, where: SlotsForLeaf) -> Item:
        """Returns the items: cached ones from the device, all others by a callback.

        The host sends a whole batch, with zeros in place of cached rows.
        """
        view, targets = state.view, list(map(where, state.view.rows.names))
        located = self.device_part.locate(context, state.cache, targets)
        slots = located.each(lambda one: jnp.where(one[2], -1, one[0]))  # -1 is not read
        others, structure = jax.tree.flatten(view.rows.items(view.rows.call(view.version, slots)))
        at = located.each(lambda one: one)
        pairs = zip(jax.tree.leaves(state.cache.items), at, strict=True)
        cached = gather.read_items(*((words, row) for words, (_, row, _) in pairs))
        items = []
        for leaf, other, (_, _, is_cached) in zip(cached, others, at, strict=True):
            # With axes of length 1 for those of the items, to choose whole rows.
            flags = is_cached.reshape(*is_cached.shape, *(1,) * (leaf.ndim - is_cached.ndim))
            merged = jnp.where(flags, leaf, packed.to_words(other))
            items.append(packed.from_words(merged, other.dtype))
        return jax.tree.unflatten(structure, items)

    def reset(self, ring: Ring, state: TieredState, token: jax.Array) -> TieredState:
        """Returns the state with an empty cache."""
        cache = self.device_part.reset(ring, state.cache, token)
        return dependencies.delay_writes_until(state.replace(cache=cache), token)
