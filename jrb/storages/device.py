"""Arrays on the device, one per leaf, `[N, ...]`."""

import jax
import jax.numpy as jnp
from jax import lax

from jrb import order, pytree, rows
from jrb.keys import Keys
from jrb.ring import Held, Ring
from jrb.types import Item, Where, Write


@pytree.component
class DeviceStorage:
    """Keeps every leaf of the items in one array `[N, ...]` of the leaf's own dtype."""

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Item:
        """Zeros."""
        del keys
        return jax.tree.map(lambda leaf: jnp.zeros((ring.capacity, *leaf.shape), leaf.dtype), spec)

    def spec(self, ring: Ring, state: Item, keys: Keys) -> Item:
        """What one slot holds."""
        del ring, keys
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)

    def write(
        self, ring: Ring, state: Item, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[Item, Write]:
        """A slice for consecutive slots, else a scatter of items. Gradients stop here."""
        del ring, held, keys
        put = lambda leaf, new: rows.put(leaf, write, lax.stop_gradient(new))
        return jax.tree.map(put, state, items), write

    def read(self, ring: Ring, state: Item, held: Held, where: Where, keys: Keys) -> Item:
        """One gather of whole items per leaf."""
        del ring, held, keys

        def get(path: tuple, leaf: jax.Array) -> jax.Array:
            return rows.get(leaf, where(pytree.leaf_name(path)))

        return order.once(lambda: jax.tree_util.tree_map_with_path(get, state))

    def reset(self, ring: Ring, state: Item, token: jax.Array) -> Item:
        """The same arrays: what they hold is not looked at again."""
        del ring, token
        return state

    def hold(self, state: Item, token: jax.Array) -> Item:
        """The same state: it is written where the writer says."""
        del token
        return state
