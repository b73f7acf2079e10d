"""The unit of single transitions, and the base class of units around other units."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import checks, pytree
from jrb._xla import dependencies
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
from jrb.types.messages import PartState


@pytree.component
class Transition(Unit):
    """Samples single transitions: every slot that holds an item is an anchor."""

    one_row: ClassVar[bool] = True

    @property
    def max_entry_delay(self) -> int:
        """0: anchors enter in the order of their rows."""
        return 0

    @property
    def anchors_are_rows(self) -> bool:
        """True: every row is an anchor."""
        return True

    @property
    def has_delayed_anchors(self) -> bool:
        """False: rows are anchors at once."""
        return False

    @property
    def lookback(self) -> int:
        """0: only the row of the anchor is read."""
        return 0

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises if the sampler uses the order of anchors and the writer keeps no order."""
        if isinstance(sampler, OrderedSampler):
            checks.chronological(type(sampler).__name__, writer)

    def init(self, context: Context, spec: Item) -> dict[str, Any]:
        """Returns a state without arrays."""
        return {}

    def on_write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, AnchorUpdate]:
        """Makes new items anchors; those that they overwrite depart."""
        return state, AnchorUpdate.of_held(context, plan)

    def anchors(self, context: Context, state: PartState) -> Anchors:
        """Returns all slots that hold items."""
        return Anchors.of_held(context)

    def plan_read(
        self, context: Context, state: PartState, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> ReadPlan:
        """Reads every leaf at the anchor."""
        return ReadPlan(where=lambda name: slots, mask=mask, info={})

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Returns the items as they are."""
        return raw, plan.info

    def truncate(self, context: Context, state: PartState, which: jax.Array) -> tuple[Any, None]:
        """Changes nothing: no transition crosses from one row to the next."""
        return state, None

    def is_episode_end(self, context: Context, state: PartState, slots: jax.Array) -> jax.Array:
        """Returns False for all slots, as the unit keeps no ends."""
        return jnp.zeros(slots.shape, jnp.bool_)


class WrappingUnit(Unit):
    """The base class of units around another unit, whose methods are the defaults.

    Attributes:
        unit: the inner unit; its state is the field `unit` of the state.
    """

    unit: Unit

    @property
    def max_entry_delay(self) -> int | None:
        """The value of the inner unit."""
        return self.unit.max_entry_delay

    @property
    def has_delayed_anchors(self) -> bool:
        """The value of the inner unit."""
        return self.unit.has_delayed_anchors

    @property
    def lookback(self) -> int:
        """The value of the inner unit."""
        return self.unit.lookback

    @property
    def anchor_requirement(self) -> str:
        """The requirement of the inner unit."""
        return self.unit.anchor_requirement

    @property
    def anchor_rows(self) -> int:
        """The value of the inner unit."""
        return self.unit.anchor_rows

    @property
    def requires_contiguous_history(self) -> bool:
        """The value of the inner unit."""
        return self.unit.requires_contiguous_history

    @property
    def row_steps(self) -> np.ndarray | None:
        """The rows of the inner unit."""
        return self.unit.row_steps

    def anchors(self, context: Context, state: PartState) -> Anchors:
        """Returns the anchors of the inner unit."""
        return self.unit.anchors(context, state.unit)

    def episode_step(self, state: PartState, slots: jax.Array) -> jax.Array | None:
        """Returns the number of earlier rows that the inner unit counts."""
        return self.unit.episode_step(state.unit, slots)

    def init_mid_episode(self, state: PartState, before: jax.Array) -> Any:
        """Returns the state in which the inner unit continues running episodes."""
        return state.replace(unit=self.unit.init_mid_episode(state.unit, before))

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shapes that the inner unit takes."""
        return self.unit.priority_shapes(mask)

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the priorities that the inner unit computes."""
        return self.unit.reduce_priorities(priorities, mask)

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the emptied state; flags stay, as those of empty slots are not used."""
        emptied = dependencies.empty_state(state, token)
        return emptied.replace(unit=self.unit.reset(ring, state.unit, token))
