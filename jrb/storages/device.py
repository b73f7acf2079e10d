"""Arrays on the device, one per leaf, `[N, ...]`."""

import functools
from typing import Any

import jax

from jrb._base import checks, ordering, pytree
from jrb._engine import columns
from jrb.ring import Ring
from jrb.storages import shared_next
from jrb.types import Context, Item, Storage, Where, Write
from jrb.types.messages import PartState


@pytree.component
class DeviceStorage(Storage):
    """Keeps every leaf of the items in one array `[N, ...]`, bit for bit.

    Attributes:
        once: whether observations are stored once: a next observation that is, bit for bit, the
            observation of the same environment's next row takes no memory. What comes out is what
            went in. Rows must come in the order of time.
        room: with `once`, how many other next observations there is room for, mostly those at the
            ends of episodes; at least E, at most N; None for the larger of N / 32 and E. Where
            more are held, the oldest rows leave early: `size` says so, and `take` finds a next
            observation only for slots that are held.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> frame = jnp.zeros((84, 84), jnp.uint8)
        >>> step = {"observation": frame, "next": {"observation": frame}}
        >>> twice = jrb.ReplayBuffer(10_000)
        >>> once = jrb.ReplayBuffer(10_000, storage=jrb.DeviceStorage(once=True))
        >>> round(once.nbytes(step) / twice.nbytes(step), 2)
        0.52
    """

    once: bool = False
    room: int | None = None

    def __post_init__(self) -> None:
        checks.flag("once", self.once)
        if self.room is not None:
            checks.count("room", self.room)

    @property
    def in_time(self) -> bool:
        """Whether rows must come in the order of time."""
        return self.once

    def init(self, context: Context, spec: Item) -> Any:
        """Zeros."""
        if self.once:
            return shared_next.init(context, spec, self._room(context.ring))
        return jax.tree.map(lambda leaf: columns.room(context.ring.capacity, leaf), spec)

    def _room(self, ring: Ring) -> int:
        room = max(ring.capacity // 32, ring.envs) if self.room is None else self.room
        if room < ring.envs:
            raise ValueError(
                f"room: expected at least one for each of {ring.envs} environments, got {room}."
            )
        room = min(room, ring.capacity)
        if ring.capacity + room + ring.envs >= 2**31:
            raise ValueError(
                f"capacity: expected, with room and num_envs, less than 2^31, got {ring.capacity}."
            )
        return room

    def spec(self, state: PartState) -> Item:
        """What one slot holds."""
        return columns.spec(state.items if self.once else state)

    def write(
        self, context: Context, state: PartState, write: Write, items: Item
    ) -> tuple[Any, Write]:
        """A slice for consecutive slots, else a scatter of items. Gradients stop here."""
        if self.once:
            return shared_next.write(context, state, write, items)
        put = lambda column, new: columns.put(column, write, columns.packed(new))
        return jax.tree.map(put, state, items, is_leaf=columns.is_column), write

    def read(self, context: Context, state: PartState, where: Where) -> Item:
        """One gather of whole items per leaf."""
        if self.once:
            return shared_next.read(context, state, where)

        def get(path: tuple, column: columns.Column) -> jax.Array:
            return columns.get(column, where(pytree.leaf_name(path)))

        every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=columns.is_column)
        return ordering.read(lambda: every(get, state))

    def shares(self, context: Context, state: PartState, names: frozenset[str]) -> bool:
        """Whether there are observations among them that are stored once."""
        return self.once and shared_next.is_shared(context, state, names)

    def edit(
        self,
        context: Context,
        state: PartState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> Any:
        """A scatter of items for each of the leaves, or another array for all."""

        def put(path: tuple, column: columns.Column) -> columns.Column:
            new = values.get(pytree.leaf_name(path))
            return column if new is None else columns.edit(column, slots, new)

        items = state.items if self.once else state
        new = jax.tree_util.tree_map_with_path(put, items, is_leaf=columns.is_column)
        return state.replace(items=new) if self.once else new

    def slotted(self, state: PartState) -> Item:
        """The items; not where next observations are."""
        return state.items if self.once else state
