"""A custom storage, in which bool leaves take one bit per entry instead of one byte.

`jrb.types.Storage` documents the methods of a storage. This one wraps another storage: it packs
items before they are written, and unpacks them after they are read.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jrb
from jrb.authoring import leaf_names
from jrb.ring import Ring
from jrb.types import Context, Item, SlotsForLeaf, State, Storage, WritePlan, component, static


class BitState(State):
    """The state of the inner storage of packed rows, and the spec of an unpacked item."""

    rows: Any
    structure: Any = static(default=None)


@component
class BitStorage(Storage):
    """Packs bool leaves, eight entries to a byte, and keeps the items in the storage `rows`."""

    rows: Storage = jrb.DeviceStorage()

    def init(self, context: Context, spec: Item) -> BitState:
        """Returns an empty state for packed items."""
        bits = lambda leaf: jax.ShapeDtypeStruct((-(-leaf.size // 8),), jnp.uint8)
        packed = jax.tree.map(lambda leaf: bits(leaf) if _is_bits(leaf) else leaf, spec)
        leaves, tree = jax.tree.flatten(spec)
        return BitState(rows=self.rows.init(context, packed), structure=(tree, tuple(leaves)))

    def spec(self, state: BitState) -> Item:
        """Returns the spec of one unpacked item."""
        return jax.tree.unflatten(*state.structure)

    def write(
        self, context: Context, state: BitState, plan: WritePlan, items: Item
    ) -> tuple[BitState, WritePlan]:
        """Packs the items, and writes them to the inner storage."""
        packed = jax.tree.map(_packed, items, self.spec(state))
        rows, plan = self.rows.write(context, state.rows, plan, packed)
        return state.replace(rows=rows), plan

    def read(self, context: Context, state: BitState, where: SlotsForLeaf) -> Item:
        """Reads packed items in one gather, and unpacks them."""
        return jax.tree.map(_unpacked, self.rows.read(context, state.rows, where), self.spec(state))

    def edit(
        self,
        context: Context,
        state: BitState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> BitState:
        """Packs the new values of some leaves, and writes them to the inner storage."""
        spec = self.spec(state)
        specs = dict(zip(leaf_names(spec), jax.tree.leaves(spec), strict=True))
        packed = {name: _packed(value, specs[name]) for name, value in values.items()}
        return state.replace(rows=self.rows.edit(context, state.rows, slots, packed))

    def reset(self, ring: Ring, state: BitState, token: jax.Array) -> BitState:
        """Empties the inner storage."""
        return state.replace(rows=self.rows.reset(ring, state.rows, token))

    def slotted(self, state: BitState) -> Item:
        """Returns the arrays whose rows change only when their slots are written."""
        return self.rows.slotted(state.rows)


def _is_bits(leaf: Any) -> bool:
    return leaf.dtype == jnp.bool_ and leaf.size > 1


def _packed(leaf: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a bool leaf `[..., *shape]` as bytes `[..., K]`; other leaves unchanged."""
    if not _is_bits(spec):
        return leaf
    lead = leaf.shape[: leaf.ndim - len(spec.shape)]
    return jnp.packbits(leaf.reshape(*lead, spec.size), axis=-1)


def _unpacked(leaf: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an unpacked leaf; the inverse of `_packed`."""
    if not _is_bits(spec):
        return leaf
    bits = jnp.unpackbits(leaf, axis=-1, count=spec.size)
    return bits.reshape(*leaf.shape[:-1], *spec.shape).astype(bool)
