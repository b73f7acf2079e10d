"""A custom prioritized sampler, which draws anchors by the rank of their priority.

`jrb.types.PrioritizedSampler` and `jrb.types.ShardedSampler` document its methods. Arrays of size N
are read by `materialize`, so that later writes are ordered after the read.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrb.authoring import last_of_equals, materialize, overwrite
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Draw,
    PrioritizedSampler,
    ShardedSampler,
    ShardStats,
    State,
    component,
)


class RankBasedState(State):
    """The state: `raw`, float32 `[N]`, is the priority of each slot, -1 if it is no anchor.

    `highest` is the greatest priority so far, which new items get; `alpha` is the exponent.
    """

    raw: jax.Array
    highest: jax.Array
    alpha: jax.Array


@component
class RankBased(PrioritizedSampler, ShardedSampler):
    """Draws the anchor of rank r among n with probability r^-alpha / sum_{k <= n} k^-alpha.

    Rank 1 has the greatest priority. Each batch sorts all priorities, in O(N log N). In a sharded
    buffer, ranks count within each shard.

    Reference: Schaul et al., 2016, "Prioritized experience replay", section 3.3.
    """

    alpha: float = 0.7
    beta: float = 0.5
    normalize: ClassVar[str] = "batch"

    def init(self, ring: Ring) -> RankBasedState:
        """Returns a state without anchors."""
        return RankBasedState(
            raw=jnp.full(ring.capacity, -1, jnp.float32),
            highest=jnp.ones((), jnp.float32),
            alpha=jnp.full((), self.alpha, jnp.float32),
        )

    def on_write(
        self, ring: Ring, state: RankBasedState, change: AnchorUpdate, anchors: Anchors
    ) -> RankBasedState:
        """Removes departed anchors, then adds new ones: a slot may do both in one write."""
        raw = state.raw.at[change.departed_slots(ring)].set(-1, mode="drop")
        return state.replace(raw=raw.at[change.entered].set(state.highest, mode="drop"))

    def draw(
        self,
        ring: Ring,
        state: RankBasedState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: Any = None,
    ) -> tuple[RankBasedState, Draw]:
        """Draws one anchor from each of B equal parts of the mass of all ranks."""
        mass = _masses(ring, state, anchors)
        reached = jnp.cumsum(mass)
        part = jnp.arange(batch_size, dtype=jnp.float32) + jax.random.uniform(key, (batch_size,))
        rank = jnp.searchsorted(reached, part / batch_size * reached[-1], side="right")
        has_mass = jnp.sum(mass > 0)  # of low ranks, powers may underflow to 0
        rank = jnp.minimum(rank, jnp.maximum(has_mass - 1, 0))  # rounding may exceed it
        slots = materialize(lambda: jnp.argsort(-state.raw)[rank]).astype(jnp.int32)
        mask = jnp.broadcast_to(anchors.count > 0, (batch_size,))
        probabilities = jnp.where(mask, mass[rank] / jnp.maximum(reached[-1], 1e-30), 0)
        count = anchors.count.astype(jnp.float32)
        weights = jnp.where(mask, count * probabilities, 1) ** -self.exponent(beta)
        weights = jnp.where(mask, weights / jnp.max(weights), 0)
        return state, Draw(slots=slots, probabilities=probabilities, weights=weights, mask=mask)

    def update(
        self,
        ring: Ring,
        state: RankBasedState,
        slots: jax.Array,
        priorities: jax.Array,
        ok: jax.Array,
    ) -> RankBasedState:
        """Sets new priorities, except invalid ones, and all but the last one of a slot."""
        old = materialize(lambda: state.raw.at[slots].get(mode="fill", fill_value=-1))
        ok = ok & (old >= 0) & jnp.isfinite(priorities) & (priorities >= 0)
        slots = last_of_equals(ring, jnp.where(ok, slots, ring.capacity))
        highest = jnp.maximum(state.highest, jnp.max(jnp.where(ok, priorities, 0), initial=0))
        raw = state.raw.at[slots].set(priorities, mode="drop")
        return state.replace(raw=raw, highest=highest)

    def priorities(self, state: RankBasedState) -> jax.Array:
        """Returns the priorities before the exponent, float32 `[N]`."""
        return state.raw

    def assign(
        self, state: RankBasedState, slots: jax.Array, priorities: jax.Array, highest: Any = None
    ) -> RankBasedState:
        """Sets the priorities of anchors at distinct slots, and the greatest priority so far."""
        new = priorities.astype(jnp.float32)
        new = jnp.where((state.raw[slots] >= 0) & (new >= 0), new, state.raw[slots])
        if highest is None:
            highest = jnp.maximum(state.highest, jnp.max(new, initial=0))
        highest = jnp.asarray(highest, jnp.float32)
        return state.replace(raw=state.raw.at[slots].set(new), highest=highest)

    def set_alpha(self, state: RankBasedState, alpha: Any) -> RankBasedState:
        """Sets the exponent."""
        return state.replace(alpha=jnp.asarray(alpha, jnp.float32))

    def rebuild_index(
        self, ring: Ring, state: RankBasedState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> RankBasedState:
        """Keeps the priorities of anchors that stay, and gives `highest` to new anchors."""
        is_anchor = jnp.zeros(ring.capacity, bool).at[entered].set(True, mode="drop")
        raw = jnp.where(state.raw >= 0, state.raw, state.highest)
        return state.replace(raw=jnp.where(is_anchor, raw, -1))

    def import_state(
        self, state: RankBasedState, old: RankBasedState, slots: jax.Array, new_slots: jax.Array
    ) -> RankBasedState:
        """Copies the priorities and alpha of another state."""
        return self.assign(state.replace(alpha=old.alpha), new_slots, old.raw[slots], old.highest)

    def stats(self, ring: Ring, state: RankBasedState, anchors: Anchors) -> ShardStats:
        """Returns this shard's statistics; the last rank has the least mass."""
        mass = _masses(ring, state, anchors)
        return ShardStats(
            num_anchors=anchors.count,
            mass=jnp.sum(mass),
            min_mass=jnp.maximum(anchors.count, 1).astype(jnp.float32) ** -state.alpha,
            max_priority=state.highest,
        )

    def exponent(self, beta: Any) -> jax.Array:
        """Returns beta, the exponent of the importance weights."""
        return jnp.asarray(self.beta if beta is None else beta, jnp.float32)

    def sync_shards(self, state: RankBasedState, stats: ShardStats) -> RankBasedState:
        """Sets the priority of new items to the greatest of all shards."""
        return state.replace(highest=jnp.max(stats.max_priority))

    def reset(self, ring: Ring, state: RankBasedState, token: jax.Array) -> RankBasedState:
        """Removes all anchors, and reuses the memory of their priorities; alpha stays."""
        raw = overwrite(state.raw, -1, token)
        return state.replace(raw=raw, highest=jnp.ones_like(state.highest))


def _masses(ring: Ring, state: RankBasedState, anchors: Anchors) -> jax.Array:
    """Returns the mass of each rank, float32 `[N]`; 0 after the last anchor."""
    rank = jnp.arange(1, ring.capacity + 1, dtype=jnp.int32)
    return jnp.where(rank <= anchors.count, rank.astype(jnp.float32) ** -state.alpha, 0)
