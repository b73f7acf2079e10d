"""One anchor, one transition."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb import checks, pytree
from jrb.keys import Keys
from jrb.ring import Held, Ring
from jrb.types import Anchors, Change, Item, Look, Sampler, Write, Writer


@pytree.component
class Transition:
    """Every slot that holds an item is an anchor, and stands for that item."""

    lag: ClassVar[int] = 0

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Fits everything but a queue of items without an order of time."""
        del ring
        if getattr(sampler, "in_order", False):
            checks.in_time(type(sampler).__name__, writer)

    def init(self, ring: Ring, spec: Item, keys: Keys) -> dict[str, Any]:
        """Nothing to remember."""
        del ring, spec, keys
        return {}

    def on_write(
        self, ring: Ring, state: dict[str, Any], held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[dict[str, Any], Change]:
        """What is written enters; what it overwrites left."""
        del items, keys
        return state, every_slot(ring, held, write)

    def anchors(self, ring: Ring, state: dict[str, Any], held: Held) -> Anchors:
        """All that is held."""
        del state
        return all_held(ring, held)

    def look(
        self,
        ring: Ring,
        state: dict[str, Any],
        held: Held,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
        keys: Keys,
    ) -> Look:
        """Every leaf at the anchor."""
        del ring, state, held, key, keys
        return Look(where=lambda name: slots, mask=mask, info={})

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """The items as they are."""
        del keys
        return raw, look.info

    def truncate(
        self, ring: Ring, state: dict[str, Any], held: Held, which: jax.Array
    ) -> tuple[dict[str, Any], None]:
        """Nothing crosses from one row to the next."""
        del ring, held, which
        return state, None

    def ends(self, ring: Ring, state: dict[str, Any], held: Held, slots: jax.Array) -> jax.Array:
        """Nothing is known of ends."""
        del ring, state, held
        return jnp.zeros(slots.shape, jnp.bool_)

    def reset(self, ring: Ring, state: dict[str, Any], token: jax.Array) -> dict[str, Any]:
        """Nothing to forget."""
        del ring, token
        return state

    def hold(self, state: dict[str, Any], token: jax.Array) -> dict[str, Any]:
        """Nothing is written."""
        del token
        return state


def all_held(ring: Ring, held: Held) -> Anchors:
    """Every slot that holds an item, oldest first."""

    def nth(places: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key
        return ring.slot_after(held.first, places), jnp.ones(places.shape, jnp.float32)

    return Anchors(count=held.count, nth=nth, all_held=True)


def every_slot(ring: Ring, held: Held, write: Write) -> Change:
    """The change where every slot that holds an item is an anchor."""
    left = write.gone * ring.envs
    overwritten = jnp.maximum(held.count // ring.envs + write.rows - ring.rows, 0)
    early = write.gone - overwritten  # then places and slots do not go round together
    gone = Held(first=held.first, count=jnp.minimum(write.gone, ring.rows) * ring.envs)
    return Change(
        entered=write.slots.reshape(-1),
        consecutive=write.consecutive,
        gone=None if write.bounded else gone,
        most=None,
        cut=jnp.zeros(0, jnp.int32),
        entered_count=write.rows * ring.envs,
        left_count=left,
        left_from=lambda place: jnp.maximum(left - place, 0),
        moved=early > 0 if not write.bounded else jnp.bool_(False),
    )
