"""All rows on the host, the newest ones on the device too."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import columns, rows
from jrb._core.host_proxy import DeviceProxy, UniqueSlots
from jrb._util import checks, pytree
from jrb._xla import dependencies, gather
from jrb.keys import TED
from jrb.ring import Clock, Occupancy, Ring
from jrb.storages.host_rows import HostView
from jrb.storages.memmap import StoreArrays, StoreRows
from jrb.types import Context, HostState, Item, SlotsForLeaf, WritePlan


class DeviceCacheState(pytree.State):
    """The newest rows, on the device.

    Attributes:
        items: leaves `[H, ...]`.
        clock: where they lie; a ring of its own.
    """

    items: Item
    clock: Clock


class TieredState(pytree.State, HostState):
    """The state of a storage that spills.

    Attributes:
        hot: the newest rows.
        view: all rows.
    """

    hot: DeviceCacheState
    view: HostView

    @property
    def capacity(self) -> int:
        """N."""
        return self.view.capacity

    @property
    def host_bytes(self) -> int:
        """See `HostView`."""
        return self.view.host_bytes


@pytree.component
class DeviceCache(DeviceProxy):
    """The newest rows of a ring, and what stands for the rest of it in jitted parts."""

    capacity: int

    def ring(self, ring: Ring) -> Ring:
        """The shape of the hot ring."""
        return Ring(rows=min(self.capacity // ring.envs, ring.rows), envs=ring.envs)

    def init(self, context: Context, spec: Item) -> DeviceCacheState:
        """No rows."""
        hot = self.ring(context.ring)
        items = jax.tree.map(lambda leaf: columns.room(hot.capacity, leaf), spec)
        return DeviceCacheState(items=items, clock=hot.start())

    def spec(self, state: DeviceCacheState) -> Item:
        """What one slot holds."""
        return columns.spec(state.items)

    def write(
        self, context: Context, state: DeviceCacheState, write: WritePlan, items: Item
    ) -> tuple[tuple[jax.Array, DeviceCacheState], WritePlan]:
        """The slots, int32 `[T, E]`, and the last of the rows put where they belong."""
        mask = None if write.consecutive else write.written
        ring = self.ring(context.ring)
        clock, put = rows.plan_rows(ring, state.clock, write.passed.size, mask)
        write_to = lambda column, new: columns.put(column, put, columns.packed(new))
        new = jax.tree.map(write_to, state.items, items, is_leaf=columns.is_column)
        return (write.slots, DeviceCacheState(items=new, clock=clock)), write

    def edit(
        self,
        context: Context,
        state: DeviceCacheState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> DeviceCacheState:
        """The same for those that are hot."""
        capacity, size = context.ring.capacity, self.ring(context.ring).capacity
        slots = jnp.arange(capacity, dtype=jnp.int32) if slots is None else slots
        row, here = self.where(context, state, jnp.minimum(slots, capacity - 1))
        at = jnp.where(here & (slots < capacity), row, size)

        def put(path: tuple, column: columns.Column) -> columns.Column:
            new = values.get(pytree.leaf_name(path))
            return column if new is None else columns.edit(column, at, new)

        every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=columns.is_column)
        return state.replace(items=every(put, state.items))

    def planned(
        self, plan: tuple[jax.Array, DeviceCacheState]
    ) -> tuple[jax.Array, DeviceCacheState]:
        """The slots, and the cached rows."""
        return plan

    def slots_of(self, plan: tuple[jax.Array, DeviceCacheState]) -> tuple[jax.Array, None]:
        """The slots, without the cached rows."""
        return plan[0], None

    def where(self, context: Context, state: DeviceCacheState, slots: jax.Array) -> Any:
        """Returns offsets of slots, int32 `[...]`, among the cached rows, and which are cached."""
        ring, held, hot = context.ring, context.held, self.ring(context.ring)
        back = held.after(ring, slots)
        here = (back >= 0) & (back < state.clock.count)
        row = hot.row_after(state.clock.cursor, jnp.where(here, hot.rows - 1 - back, 0))
        return row * ring.envs + slots % ring.envs, here

    def locate(
        self, context: Context, state: DeviceCacheState, where: list[jax.Array]
    ) -> UniqueSlots:
        """The slots at which leaves are read, their places among the cached rows, and which are."""
        return UniqueSlots.of(where, lambda slots: (slots, *self.where(context, state, slots)))

    def reset(self, ring: Ring, state: DeviceCacheState, token: jax.Array) -> DeviceCacheState:
        """No rows."""
        return state.replace(clock=self.ring(ring).emptied(state.clock))


@jax.jit
def _gathered(leaves: list[jax.Array], at: list[jax.Array]) -> list[jax.Array]:
    """Rows of each leaf, `[*slots, ...]`."""
    return [gather.items_at(leaf, row) for leaf, row in zip(leaves, at, strict=True)]


@functools.partial(jax.jit, donate_argnums=0)
def _merged(hot: list[jax.Array], cold: list[jax.Array], at: list[jax.Array]) -> list[jax.Array]:
    """Rows `[*slots, ...]` into which others are put, at places among them, one after the other."""
    found = []
    for warm, rest, start in zip(hot, cold, at, strict=True):
        lead = warm.shape[: warm.ndim + 1 - rest.ndim]
        line = warm.reshape(math.prod(lead), *rest.shape[1:])
        line = rows.put_blocks(line, start, rest[:, None]) if start.size else line
        found.append(line.reshape(warm.shape))
    return found


def _cold(slots: np.ndarray, hot: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots that are not hot, and where in the batch they stand.

    In few lengths, so that little is compiled: none, or an eighth of the batch and then half more,
    again and again.
    """
    flat, cold = slots.reshape(-1), np.flatnonzero(~hot.reshape(-1))
    if not len(cold):
        return flat[:0], cold.astype(np.int32)
    length = -(-len(flat) // 8)
    while length < len(cold):
        length += -(-length // 2)
    at = np.full(min(length, len(flat)), len(flat), np.int32)
    at[: len(cold)] = cold
    return flat[np.where(at < len(flat), at, cold[0])], at


@pytree.component
class SpillStorage(StoreArrays):
    """Keeps all items in files on the host, and the newest ones in a ring on the device too.

    Draws are, bit for bit, those of a `DeviceStorage` of the whole capacity: what is hot is read on
    the device, the rest on the host. Writes go to both. Otherwise as `jrb.MemmapStorage`. Rows must
    come in the order of time.

    Attributes:
        path: of a folder that is not there, or is empty; None for a temporary one.
        device_capacity: H, how many items are on the device, a multiple of E; at most N are.
        prealloc: whether the disk sets all room aside in `init`, so that it cannot be full later.
            Otherwise files grow as they are filled, and a full disk is an `OSError` of the write.
        spare_fraction: additional rows for what is written between two commits, as a fraction of N.
    """

    path: str | os.PathLike[str] | None
    device_capacity: int
    prealloc: bool = False
    spare_fraction: float = 0.25
    state_type: ClassVar[type] = TieredState

    def __post_init__(self) -> None:
        self.check()
        checks.count("device_capacity", self.device_capacity, 2**31 - 1)
        object.__setattr__(self, "device_capacity", int(self.device_capacity))

    @property
    def requires_chronological(self) -> bool:
        """The newest rows are told by the order in which they came."""
        return True

    def make_rows(self, ring: Ring, spec: Item, is_chronological: bool) -> StoreRows:
        """Files full of zeros. Raises if there is no room for them."""
        checks.divides("device_capacity", self.device_capacity, ring.envs)
        return super().make_rows(ring, spec, is_chronological)

    @property
    def device_part(self) -> DeviceCache:
        """What stands for this storage in jitted parts."""
        return DeviceCache(self.device_capacity)

    def device_state(self, state: TieredState) -> DeviceCacheState:
        """The cached rows."""
        return state.hot

    def view(self, state: TieredState) -> HostView:
        """What a state knows of its rows."""
        return state.view

    def joined(self, view: HostView, device_state: DeviceCacheState) -> TieredState:
        """The state of all rows and of the cached ones."""
        return TieredState(hot=device_state, view=view)

    def attach(self, ring: Ring, view: HostView, held: Callable[[], Occupancy]) -> TieredState:
        """The state for rows that were there before: the newest ones are made hot again."""
        part, hot, known = self.device_part, self.device_part.ring(ring), held()
        count = min(int(known.size) // ring.envs, hot.rows)
        first = int(known.first[0]) + int(known.size) - count * ring.envs
        slots = (first + np.arange(count * ring.envs)) % ring.capacity
        newest = view.rows.fetch(view.version, [slots] * len(view.rows.names))
        state = part.init(Context(ring, TED, known), view.rows.spec)
        clock = hot.advance(state.clock, jnp.int32(count))
        put = lambda column, new: columns.with_array(
            column, columns.array(column).at[: len(slots)].set(columns.packed(new))
        )
        items = jax.tree.map(put, state.items, newest, is_leaf=columns.is_column)
        return TieredState(hot=DeviceCacheState(items=items, clock=clock), view=view)

    def fetch(self, state: TieredState, slots: jax.Array, places: Any) -> Item:
        """The items there: cached ones on the device, which the host does not wait for."""
        view, each = state.view, places.each(lambda one: one)
        hot = _gathered(jax.tree.leaves(state.hot.items), [row for _, row, _ in each])
        at = places.each(lambda one: _cold(np.asarray(one[0]), np.asarray(one[2])))
        cold = view.rows.items(view.rows.take(view.version, [slots for slots, _ in at]))
        leaves, structure = jax.tree.flatten(cold)
        words = list(map(columns.packed, leaves))
        merged = _merged(hot, words, [place for _, place in at])
        found = map(columns.unpacked, merged, [leaf.dtype for leaf in leaves])
        return jax.tree.unflatten(structure, found)

    def read(self, context: Context, state: TieredState, where: SlotsForLeaf) -> Item:
        """From the device, and what is not there by a call to the host."""
        view = state.view
        found = self.device_part.locate(context, state.hot, list(map(where, view.rows.names)))
        at = found.each(lambda one: one)
        slots = found.each(lambda one: jnp.where(one[2], -1, one[0]))
        leaves, structure = jax.tree.flatten(view.rows.items(view.rows.call(view.version, slots)))
        pairs = list(zip(jax.tree.leaves(state.hot.items), at, strict=True))
        hot = gather.read_items(*((words, row) for words, (_, row, _) in pairs))
        merged = [
            jnp.where(_over(here, warm), warm, columns.packed(cold))
            for warm, cold, (_, _, here) in zip(hot, leaves, at, strict=True)
        ]
        unpacked = map(columns.unpacked, merged, [leaf.dtype for leaf in leaves])
        return jax.tree.unflatten(structure, unpacked)

    def reset(self, ring: Ring, state: TieredState, token: jax.Array) -> TieredState:
        """No cached rows."""
        hot = self.device_part.reset(ring, state.hot, token)
        return dependencies.delay_writes_until(state.replace(hot=hot), token)


def _over(here: jax.Array, rows: jax.Array) -> jax.Array:
    """Flags `[...]` with axes for those of an item behind them."""
    return here.reshape(*here.shape, *(1,) * (rows.ndim - here.ndim))
