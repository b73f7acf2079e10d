"""One anchor, one transition."""

from typing import Any

import jax
import jax.numpy as jnp

from jrb import pytree
from jrb.keys import Keys
from jrb.ring import Ring
from jrb.types import Anchors, Change, Held, Item, Look, Write


@pytree.component
class Transition:
    """Every slot that holds an item is an anchor, and stands for that item."""

    def init(self, ring: Ring, spec: Item, keys: Keys) -> dict[str, Any]:
        """Nothing to remember."""
        del ring, spec, keys
        return {}

    def on_write(
        self,
        ring: Ring,
        state: dict[str, Any],
        held: Held,
        write: Write,
        items: Item,
        keys: Keys,
    ) -> tuple[dict[str, Any], Change]:
        """What is written enters; what it overwrites left."""
        del items, keys
        new, free = write.rows * ring.envs, ring.capacity - held.count
        change = Change(
            entered=write.slots.reshape(-1),
            left=jnp.zeros(0, jnp.int32),
            entered_count=new,
            left_count=new - jnp.minimum(new, free),
            consecutive=write.consecutive,
        )
        return state, change

    def anchors(self, ring: Ring, state: dict[str, Any], held: Held) -> Anchors:
        """All that is held."""
        del state
        return Anchors(count=held.count, nth=lambda i: ring.slot_after(held.first, i))

    def look(
        self,
        ring: Ring,
        state: dict[str, Any],
        held: Held,
        slots: jax.Array,
        mask: jax.Array,
        keys: Keys,
    ) -> Look:
        """Every leaf at the anchor."""
        del ring, state, held, keys
        return Look(where=lambda name: slots, mask=mask, info={})

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """The items as they are."""
        del keys
        return raw, look.info

    def reset(self, ring: Ring, state: dict[str, Any], token: jax.Array) -> dict[str, Any]:
        """Nothing to forget."""
        del ring, token
        return state
