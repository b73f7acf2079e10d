"""A unit of one's own: a transition, and the action that was taken one row before it.

`jrb.types.Unit` says which methods a unit has. This one reads a row before the anchor (`lookback`),
so it must know where episodes begin, and which rows are not held any more.
"""

import jax
import jax.numpy as jnp

from jrb.authoring import (
    all_held,
    emptied,
    episode_ends,
    episode_lengths,
    every_slot,
    leaf_name,
    put_rows,
    read_rows,
)
from jrb.keys import Keys, path_name, within
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Context,
    Item,
    ReadPlan,
    State,
    Unit,
    WritePlan,
    component,
    tally,
)


class PreviousActionState(State):
    """Holds, by slot, whether a row follows another one of its episode, bool `[N]`.

    `running`, int32 `[E]`, counts the rows of the running episodes, up to 2.
    """

    follows: jax.Array
    running: jax.Array = tally()


@component
class PreviousAction(Unit):
    """Stands for a transition, with the previous action in `Sample.info["previous_action"]`.

    That is 0 in the first row of an episode, as `info["is_first"]`, bool `[B]`, tells. The action
    before the oldest row may have been overwritten: then the entry of this row is masked.
    """

    @property
    def max_entry_delay(self) -> int:
        """Every row is an anchor as soon as it is written."""
        return 0

    @property
    def has_delayed_anchors(self) -> bool:
        """No row becomes an anchor later than it is written."""
        return False

    @property
    def lookback(self) -> int:
        """The previous row is read."""
        return 1

    def init(self, context: Context, spec: Item) -> PreviousActionState:
        """Returns the state without rows. Raises if the items have no action."""
        context.keys.get(spec, "action")
        ring = context.ring
        return PreviousActionState(
            follows=jnp.zeros(ring.capacity, bool), running=jnp.zeros(ring.envs, jnp.int32)
        )

    def on_write(
        self, context: Context, state: PreviousActionState, plan: WritePlan, items: Item
    ) -> tuple[PreviousActionState, AnchorUpdate]:
        """What is written enters, what it overwrites leaves."""
        ends = episode_ends(context, plan, items)
        length, running = episode_lengths(state.running, ends, plan, most=2)
        follows = put_rows(state.follows, plan, length > 1)
        return PreviousActionState(follows=follows, running=running), every_slot(context, plan)

    def truncate(
        self, context: Context, state: PreviousActionState, which: jax.Array
    ) -> tuple[PreviousActionState, None]:
        """The next row is the first of an episode; no anchors come or go."""
        return state.replace(running=jnp.where(which, 0, state.running)), None

    def is_episode_end(
        self, context: Context, state: PreviousActionState, slots: jax.Array
    ) -> jax.Array:
        """A row ends an episode if the next one, or the one to come, does not follow it."""
        ring = context.ring
        is_newest = context.held.after(ring, slots) <= 0
        open_end = state.running[ring.env_of(slots)] > 0
        return ~jnp.where(is_newest, open_end, state.follows[ring.slot_after(slots, ring.envs)])

    def episode_step(self, state: PreviousActionState, slots: jax.Array) -> jax.Array:
        """Counts the rows of the episode before each slot, up to 1: more does not matter."""
        return state.follows[slots].astype(jnp.int32)

    def init_mid_episode(
        self, state: PreviousActionState, before: jax.Array
    ) -> PreviousActionState:
        """Goes on in episodes whose first rows are not held, after `jrb.rebuild` or an edit."""
        return state.replace(running=jnp.minimum(before, 2))

    def anchors(self, context: Context, state: PreviousActionState) -> Anchors:
        """Every slot that holds an item is an anchor."""
        return all_held(context)

    def plan_read(
        self,
        context: Context,
        state: PreviousActionState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Actions are read at the row before the anchor and at the anchor, all else there."""
        ring, action = context.ring, path_name(context.keys.action)
        follows = read_rows(state.follows, slots)
        is_held = context.held.before(ring, slots) > 0
        both = jnp.stack([ring.slot_before(slots, ring.envs), slots], axis=1)
        return ReadPlan(
            where=lambda name: both if within(name, action) else slots,
            mask=mask & (is_held | ~follows),
            info={"is_first": mask & ~follows},
            residuals=follows & is_held,
        )

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Actions are `[B, 2, ...]` here: the previous ones go to `info`."""

        def previous(leaf: jax.Array) -> jax.Array:
            known = plan.residuals.reshape(-1, *(1,) * (leaf.ndim - 2))
            return jnp.where(known, leaf[:, 0], jnp.zeros((), leaf.dtype))

        action = path_name(keys.action)
        own = lambda path, leaf: leaf[:, 1] if within(leaf_name(path), action) else leaf
        data = jax.tree_util.tree_map_with_path(own, raw)
        info = {"previous_action": jax.tree.map(previous, keys.get(raw, "action"))}
        return data, {**plan.info, **info}

    def reset(
        self, ring: Ring, state: PreviousActionState, token: jax.Array
    ) -> PreviousActionState:
        """No episode runs; what `follows` says of slots that hold nothing is not looked at."""
        return emptied(state, token)
