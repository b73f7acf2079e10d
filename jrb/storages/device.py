"""Arrays on the device, one per leaf, `[N, ...]`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jrb import checks, columns, order, pytree
from jrb.keys import Keys
from jrb.ring import Held, Ring
from jrb.storages import once as shared
from jrb.types import Item, Where, Write


@pytree.component
class DeviceStorage:
    """Keeps every leaf of the items in one array `[N, ...]`, bit for bit (see `jrb.columns`).

    Attributes:
        once: whether observations are stored once: a next observation that is, bit for bit, the
            observation of the same environment's next row takes no memory. What comes out is what
            went in. Rows must come in the order of time.
        room: with `once`, how many other next observations there is room for, mostly those at the
            ends of episodes; at least E, at most N; None for the larger of N / 32 and E. Where
            more are held, the oldest rows leave early: `size` says so, and `take` finds a next
            observation only for slots that are held.
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

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Any:
        """Zeros."""
        if self.once:
            return shared.init(ring, spec, keys, self._room(ring))
        return jax.tree.map(lambda leaf: columns.room(ring.capacity, leaf), spec)

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

    def spec(self, ring: Ring, state: Any, keys: Keys) -> Item:
        """What one slot holds."""
        del ring, keys
        return columns.spec(state.items if self.once else state)

    def write(
        self, ring: Ring, state: Any, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[Any, Write]:
        """A slice for consecutive slots, else a scatter of items. Gradients stop here."""
        if self.once:
            pairs = shared.pairs(self.spec(ring, state, keys), keys)
            return shared.write(ring, state, held, write, items, pairs)
        put = lambda column, new: columns.put(column, write, columns.packed(new))
        return jax.tree.map(put, state, items, is_leaf=columns.is_column), write

    def read(self, ring: Ring, state: Any, held: Held, where: Where, keys: Keys) -> Item:
        """One gather of whole items per leaf."""
        if self.once:
            pairs = shared.pairs(self.spec(ring, state, keys), keys)
            return shared.read(ring, state, held, where, pairs)

        def get(path: tuple, column: columns.Column) -> jax.Array:
            return columns.get(column, where(pytree.leaf_name(path)))

        every = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=columns.is_column)
        return order.once(lambda: every(get, state))

    def slotted(self, state: Any) -> Item:
        """The items; not where next observations are."""
        return state.items if self.once else state

    def reset(self, ring: Ring, state: Any, token: jax.Array) -> Any:
        """The same arrays: what they hold is not looked at again."""
        del ring
        if not self.once:
            return state
        head, count = jnp.minimum(state.head, 0) + token, jnp.minimum(state.count, 0)
        return state.replace(head=head, count=count)

    def hold(self, state: Any, token: jax.Array) -> Any:
        """The same state; where observations are shared, written after the token."""
        return state.replace(head=state.head + token) if self.once else state
