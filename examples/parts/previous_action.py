"""A custom unit: a transition, and the action that was taken one row before it.

`jrb.types.Unit` documents the methods of a unit. This one reads the row before the anchor
(`lookback`), so it must know where episodes begin, and which rows were overwritten.
"""

import jax
import jax.numpy as jnp

from jrb.authoring import empty_state, episode_lengths, leaf_name, read_rows
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
    """The state: `follows`, bool `[N]`, False for slots with the first row of an episode.

    `running`, int32 `[E]`, is the number of rows of the running episodes, up to 2.
    """

    follows: jax.Array
    running: jax.Array = tally()


@component
class PreviousAction(Unit):
    """Samples transitions, with the previous action in `Sample.info["previous_action"]`.

    The previous action is 0 at the first row of an episode, where `info["is_first"]`, bool `[B]`,
    is True. Where the previous row was overwritten, the entry is masked.
    """

    @property
    def max_entry_delay(self) -> int:
        """0: every row is an anchor as soon as it is written."""
        return 0

    @property
    def has_delayed_anchors(self) -> bool:
        """False: no row becomes an anchor later than it is written."""
        return False

    @property
    def lookback(self) -> int:
        """1: the previous row is read too."""
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
        """Makes written rows anchors; rows that they overwrite are anchors no more."""
        ends = plan.episode_ends(context.keys, items)
        length, running = episode_lengths(state.running, ends, plan, most=2)
        follows = plan.put(state.follows, length > 1)
        state = PreviousActionState(follows=follows, running=running)
        return state, AnchorUpdate.of_held(context, plan)

    def truncate(
        self, context: Context, state: PreviousActionState, which: jax.Array
    ) -> tuple[PreviousActionState, None]:
        """Makes the next row the first of an episode; the anchors stay the same."""
        return state.replace(running=jnp.where(which, 0, state.running)), None

    def is_episode_end(
        self, context: Context, state: PreviousActionState, slots: jax.Array
    ) -> jax.Array:
        """Returns True if the environment's next row, even if still to come, begins an episode."""
        ring = context.ring
        is_newest = context.held.after(ring, slots) <= 0
        open_end = state.running[ring.env_of(slots)] > 0
        return ~jnp.where(is_newest, open_end, state.follows[ring.slot_after(slots, ring.envs)])

    def episode_step(self, state: PreviousActionState, slots: jax.Array) -> jax.Array:
        """Returns the number of earlier rows of the episode, up to 1, which is all it needs."""
        return state.follows[slots].astype(jnp.int32)

    def init_mid_episode(
        self, state: PreviousActionState, before: jax.Array
    ) -> PreviousActionState:
        """Continues episodes whose first rows are not stored, after `jrb.rebuild` or an edit."""
        return state.replace(running=jnp.minimum(before, 2))

    def anchors(self, context: Context, state: PreviousActionState) -> Anchors:
        """Returns all slots that hold an item."""
        return Anchors.of_held(context)

    def plan_read(
        self,
        context: Context,
        state: PreviousActionState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Plans to read actions at the row before the anchor and the anchor, the rest at it."""
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
        """Moves the previous actions from the actions read, `[B, 2, ...]`, to `info`."""

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
        """Empties the state: no episode runs. `follows` is not read at empty slots."""
        return empty_state(state, token)
