"""Arrays on the device, one per leaf, `[N, ...]`."""

import jax
import jax.numpy as jnp
from jax import lax

from jrb import order, pytree
from jrb.ring import Ring
from jrb.types import Item, Where, Write


@pytree.component
class DeviceStorage:
    """Keeps every leaf of the items in one array `[N, ...]` of the leaf's own dtype."""

    def init(self, ring: Ring, spec: Item) -> Item:
        """Zeros."""
        return jax.tree.map(lambda leaf: jnp.zeros((ring.capacity, *leaf.shape), leaf.dtype), spec)

    def spec(self, ring: Ring, state: Item) -> Item:
        """What one slot holds."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)

    def write(self, ring: Ring, state: Item, write: Write, items: Item) -> Item:
        """A slice for consecutive slots, else a scatter of rows."""
        put = _put_slice if write.consecutive else _put_rows
        return jax.tree.map(lambda leaf, rows: put(leaf, write, rows), state, items)

    def read(self, ring: Ring, state: Item, where: Where) -> Item:
        """One gather of whole items per leaf."""

        def gather(path: tuple, leaf: jax.Array) -> jax.Array:
            return leaf.at[where(pytree.leaf_name(path))].get(mode="promise_in_bounds")

        return order.once(lambda: jax.tree_util.tree_map_with_path(gather, state))


def _put_slice(leaf: jax.Array, write: Write, rows: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(leaf, rows[0], write.starts[0], axis=0)


def _put_rows(leaf: jax.Array, write: Write, rows: jax.Array) -> jax.Array:
    items = rows.reshape(-1, *rows.shape[2:])
    return leaf.at[write.slots.reshape(-1)].set(items, mode="drop")
