"""A storage of one's own: boolean leaves take a bit for each entry instead of a byte.

`jrb.types.Storage` says which methods a storage has. This one holds another one, which keeps the
rows, and changes what goes in and comes out.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jrb
from jrb.authoring import leaf_names
from jrb.ring import Ring
from jrb.types import Context, Item, SlotsForLeaf, State, Storage, WritePlan, component, static


class BitState(State):
    """Holds the state of the storage of packed rows, and the spec of an item as it came."""

    rows: Any
    structure: Any = static(default=None)


@component
class BitStorage(Storage):
    """Packs boolean leaves, eight entries to a byte; `rows` is the storage that keeps them."""

    rows: Storage = jrb.DeviceStorage()

    def init(self, context: Context, spec: Item) -> BitState:
        """Returns room for packed rows."""
        bits = lambda leaf: jax.ShapeDtypeStruct((-(-leaf.size // 8),), jnp.uint8)
        packed = jax.tree.map(lambda leaf: bits(leaf) if _is_bits(leaf) else leaf, spec)
        leaves, tree = jax.tree.flatten(spec)
        return BitState(rows=self.rows.init(context, packed), structure=(tree, tuple(leaves)))

    def spec(self, state: BitState) -> Item:
        """Returns the spec of one item as it came."""
        return jax.tree.unflatten(*state.structure)

    def write(
        self, context: Context, state: BitState, plan: WritePlan, items: Item
    ) -> tuple[BitState, WritePlan]:
        """Packs the items, and has them written."""
        packed = jax.tree.map(_packed, items, self.spec(state))
        rows, plan = self.rows.write(context, state.rows, plan, packed)
        return state.replace(rows=rows), plan

    def read(self, context: Context, state: BitState, where: SlotsForLeaf) -> Item:
        """Reads packed rows, in one gather, and unpacks them."""
        return jax.tree.map(_unpacked, self.rows.read(context, state.rows, where), self.spec(state))

    def edit(
        self,
        context: Context,
        state: BitState,
        slots: jax.Array | None,
        values: dict[str, jax.Array],
    ) -> BitState:
        """Packs the new values of some leaves, and has them written."""
        spec = self.spec(state)
        specs = dict(zip(leaf_names(spec), jax.tree.leaves(spec), strict=True))
        packed = {name: _packed(value, specs[name]) for name, value in values.items()}
        return state.replace(rows=self.rows.edit(context, state.rows, slots, packed))

    def reset(self, ring: Ring, state: BitState, token: jax.Array) -> BitState:
        """Leaves to the inner storage what an empty one is."""
        return state.replace(rows=self.rows.reset(ring, state.rows, token))

    def slotted(self, state: BitState) -> Item:
        """Names the arrays whose rows change only when their slots are written."""
        return self.rows.slotted(state.rows)


def _is_bits(leaf: Any) -> bool:
    return leaf.dtype == jnp.bool_ and leaf.size > 1


def _packed(leaf: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns entries `[..., *shape]` as bytes `[..., K]`; other leaves as they are."""
    if not _is_bits(spec):
        return leaf
    lead = leaf.shape[: leaf.ndim - len(spec.shape)]
    return jnp.packbits(leaf.reshape(*lead, spec.size), axis=-1)


def _unpacked(leaf: jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns what `_packed` was given."""
    if not _is_bits(spec):
        return leaf
    bits = jnp.unpackbits(leaf, axis=-1, count=spec.size)
    return bits.reshape(*leaf.shape[:-1], *spec.shape).astype(bool)
