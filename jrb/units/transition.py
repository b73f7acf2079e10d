"""One anchor, one transition."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb.keys import Keys
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Context,
    Item,
    OrderedSampler,
    ReadPlan,
    Sampler,
    Unit,
    WritePlan,
    Writer,
)
from jrb.units.anchors import all_held, every_slot


@pytree.component
class Transition(Unit):
    """Every slot that holds an item is an anchor, and stands for that item."""

    one_row: ClassVar[bool] = True

    @property
    def max_entry_delay(self) -> int:
        """Anchors enter in the order of their rows."""
        return 0

    @property
    def has_delayed_anchors(self) -> bool:
        """No: they are anchors at once."""
        return False

    @property
    def lookback(self) -> int:
        """The anchor alone."""
        return 0

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Fits everything but a queue of items without an order of time."""
        if isinstance(sampler, OrderedSampler):
            checks.chronological(type(sampler).__name__, writer)

    def init(self, context: Context, spec: Item) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def on_write(
        self, context: Context, state: dict[str, Any], write: WritePlan, items: Item
    ) -> tuple[dict[str, Any], AnchorUpdate]:
        """What is written enters; what it overwrites left."""
        return state, every_slot(context, write)

    def anchors(self, context: Context, state: dict[str, Any]) -> Anchors:
        """All that is held."""
        return all_held(context)

    def plan_read(
        self,
        context: Context,
        state: dict[str, Any],
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Every leaf at the anchor."""
        return ReadPlan(where=lambda name: slots, mask=mask, info={})

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """The items as they are."""
        return raw, plan.info

    def truncate(
        self, context: Context, state: dict[str, Any], which: jax.Array
    ) -> tuple[dict[str, Any], None]:
        """Nothing crosses from one row to the next."""
        return state, None

    def is_episode_end(
        self, context: Context, state: dict[str, Any], slots: jax.Array
    ) -> jax.Array:
        """Nothing is known of ends."""
        return jnp.zeros(slots.shape, jnp.bool_)
