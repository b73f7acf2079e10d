"""Prioritized experience replay: anchors are drawn in proportion to their priority^alpha."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb import sum_tree
from jrb._util import checks, display, pytree
from jrb._xla import dependencies, gather
from jrb._xla.compiling import by_description
from jrb.ring import Ring
from jrb.sum_tree import Tree
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Draw,
    DrawCounts,
    LimitedSampler,
    PrioritizedSampler,
    ShardedSampler,
    ShardStats,
)

_NO_ANCHOR = -1.0
DROPPED = -2.0
"""The priority of an anchor that `drop` removed, or that was drawn `max_draws` times."""
_RUN = 4096  # the number of slots whose masses are computed at a time, if all change


class PrioritizedState(DrawCounts):
    """The priorities of all slots.

    Attributes:
        raw: float32 `[N]`, the priority p of each anchor; -1 for a slot that is no anchor, -2 for
            an anchor that was dropped, or used up.
        waiting: float32 `[N]`, the priorities given with rows that are not anchors yet, -1 for
            none; None for units whose rows are anchors at once.
        masses: a sum-tree over (p + eps)^alpha, 0 for slots that are no anchors.
        smallest: a tree of minima over the positive masses; None unless `normalize="buffer"`.
        largest: a tree of maxima over the priorities of anchors, 0 for other slots; None unless
            `new_priority="largest_held"`.
        largest_of_others: float32 `[]`, the greatest p that another shard held at the last draw, 0
            for none; None if `largest` is None.
        highest: float32 `[]`, the greatest p seen so far, initially 1.
        alpha: float32 `[]`, the exponent of the priorities.
        refused: uint32 `[]`, the number of given priorities that were NaN, infinite or negative.
    """

    raw: jax.Array
    waiting: jax.Array | None = None
    masses: Tree
    smallest: Tree | None
    largest: Tree | None = None
    largest_of_others: jax.Array | None = None
    highest: jax.Array
    alpha: jax.Array
    refused: jax.Array

    def summary(self, ring: Ring) -> dict[str, str]:
        """Returns the spread of priorities and the number of refused ones, for the `repr`."""
        raw, refused = display.host_values(self.raw), display.host_values(self.refused)
        facts = {} if raw is None else {"priorities": display.spread(raw[raw > 0])}
        return facts | ({"refused": f"{int(refused):,}"} if refused else {})


@pytree.component
class Prioritized(PrioritizedSampler, ShardedSampler, LimitedSampler):
    """Draws anchor i with probability P(i) = (p_i + eps)^alpha / sum_k (p_k + eps)^alpha.

    The importance weights (N P(i))^-beta, over N anchors, correct the bias of these probabilities
    in a loss; they are divided by the largest one, so that they only scale down.

    An anchor of mass 0 is never drawn: one that was dropped, or of priority 0 with `eps=0`. If no
    anchor has mass, there is nothing to draw, as in an empty buffer.

    Attributes:
        alpha: how much priorities matter, at least 0; 0 is uniform. `set_alpha` changes it later.
        beta: how much of the bias is corrected, 1 for all; `sample(..., beta=)` takes a schedule.
        eps: added to every priority, at least 0.
        stratified: if True, one draw from each of B equal parts of the mass, for less variance.
        normalize: the divisor of the weights: "batch" for the largest in the batch, "buffer" for
            the largest that any anchor would get, None for no division.
        new_priority: the priority p of new items: "max" for the largest seen so far (initially 1);
            "largest_held" for the largest of the anchors held when the item enters, without those
            that it overwrites, or 1 if none is above 0; or a number. `add(..., priorities=)` passes
            one for each item. "largest_held" costs 4.6 bytes a slot and O(log N) an update, and
            `extend` writes row by row.
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).
        max_draws: the number of draws after which an item is used up, as for `jrb.Uniform`; it then
            counts as dropped, with priority -2. None for no limit.

    Reference: Schaul et al., 2016, "Prioritized experience replay", section 3.3 and 3.4.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> sampler = jrb.Prioritized(alpha=1.0, beta=1.0, eps=0.0)
        >>> buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=sampler)
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(2)})
        >>> state = buffer.update_priority(state, jnp.array([0, 1]), jnp.array([1.0, 3.0]))
        >>> batch = buffer.sample(state, jax.random.key(0))
        >>> batch.data["x"].tolist(), batch.probabilities.tolist()
        ([0, 1, 1, 1], [0.25, 0.75, 0.75, 0.75])
    """

    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-6
    stratified: bool = True
    normalize: Literal["batch", "buffer"] | None = "batch"
    new_priority: Literal["max", "largest_held"] | float = "max"
    count_draws: bool = False
    max_draws: int | None = None
    takes_priorities: ClassVar[bool] = True
    row_by_row: ClassVar[bool] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: self.new_priority == "largest_held"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta", "eps"):
            _check_number(name, getattr(self, name))
        # XLA flushes smaller numbers to 0, which would be no eps at all.
        if 0 < self.eps < sum_tree.SMALLEST:
            raise ValueError(
                f"eps: expected 0, or at least {sum_tree.SMALLEST:.3g}, got {self.eps}."
            )
        if self.normalize not in ("batch", "buffer", None):
            raise ValueError(
                f"normalize: expected 'batch', 'buffer' or None, got {self.normalize!r}."
            )
        if self.new_priority not in ("max", "largest_held"):
            _check_number("new_priority", self.new_priority, "'max', 'largest_held' or ")

    def init(self, ring: Ring) -> PrioritizedState:
        """Returns the state without anchors."""
        # Keep only the trees that the options need.
        is_buffer, is_held = self.normalize == "buffer", self.new_priority == "largest_held"
        return PrioritizedState(
            raw=jnp.full(ring.capacity, _NO_ANCHOR, jnp.float32),
            masses=sum_tree.neutral(ring.capacity, "sum"),
            smallest=sum_tree.neutral(ring.capacity, "min") if is_buffer else None,
            largest=sum_tree.neutral(ring.capacity, "max") if is_held else None,
            largest_of_others=jnp.zeros((), jnp.float32) if is_held else None,
            highest=jnp.ones((), jnp.float32),
            alpha=jnp.full((), self.alpha, jnp.float32),
            refused=jnp.zeros((), jnp.uint32),
        )

    def attach(self, state: PrioritizedState, has_delayed_anchors: bool) -> PrioritizedState:
        """Makes an array for the priorities of rows that become anchors later."""
        if not has_delayed_anchors:
            return state
        return state.replace(waiting=jnp.full_like(state.raw, _NO_ANCHOR))

    def on_write(
        self, ring: Ring, state: PrioritizedState, change: AnchorUpdate, anchors: Anchors
    ) -> PrioritizedState:
        """Removes the masses of anchors that departed, then sets those of anchors that entered."""
        # A run of unknown length is removed by itself, all other slots below.
        clear = lambda state, slots: self._set_priorities(
            state, (slots, jnp.minimum(slots.astype(jnp.float32), _NO_ANCHOR))
        )

        def clear_all(state: PrioritizedState, departs: jax.Array) -> PrioritizedState:
            raw = jnp.where(departs, _NO_ANCHOR, state.raw)
            return self._put_masses(state.replace(raw=raw), raw, sum_tree.set_all)

        state, change = change.clear_expired(ring, state, clear, clear_all)
        departed = change.departed_slots(ring)
        # The largest held priority is read without the anchors that depart or are overwritten.
        if state.largest is not None:
            slots = jnp.concatenate([departed, change.entered])
            zeros = jnp.minimum(slots, 0).astype(jnp.float32)
            state = state.replace(largest=sum_tree.set_leaves(state.largest, slots, zeros))
        state, new = self._find_new_priorities(state, change)
        # The next writes to the tree of maxima wait for the read of the default.
        if state.largest is not None:
            departed = departed + dependencies.zero_depending_on(new)
        # Made from the slots, as writes of a constant would wait for nothing.
        none = jnp.minimum(departed.astype(jnp.float32), _NO_ANCHOR)
        # One scatter for both; those that depart come first, as a slot may do both in one call.
        if not change.consecutive:
            return self._set_priorities(state, (departed, none), (change.entered, new))
        # The written slots are a slice of the leaves, which needs no scatter; not all need enter.
        state = self._set_priorities(state, (departed, none))
        new = jnp.where(change.entered < ring.capacity, new, _NO_ANCHOR)
        written: Any = change.incoming
        first = written.first_slot
        raw = lax.dynamic_update_slice_in_dim(state.raw, new, first, axis=0)
        put = lambda tree, leaves: sum_tree.set_run(tree, first, leaves)
        return self._put_masses(state.replace(raw=raw), new, put)

    def _find_new_priorities(
        self, state: PrioritizedState, change: AnchorUpdate
    ) -> tuple[PrioritizedState, jax.Array]:
        """Returns the state, and the priorities of anchors that enter, float32 `[K]`."""
        incoming, waiting, own = change.incoming, state.waiting, None
        default = self._default_priority(state)
        # Take the priorities that came with the items, where they are good.
        if incoming is not None and incoming.priorities is not None:
            good = _is_priority(incoming.priorities)
            own = jnp.where(good, incoming.priorities, _NO_ANCHOR)
            by_row = lambda array: array.reshape(len(incoming.row_mask), -1)
            seen = jnp.where(incoming.row_mask, by_row(jnp.where(good, own, 0.0)), 0.0).max(axis=1)
            if self.new_priority == "max" and seen.size > 1:
                # A row gets the greatest priority before it, also if that is in the same call.
                default = lax.cummax(jnp.concatenate([state.highest[None], seen[:-1]]))
            refused = jnp.sum(by_row(~good) & incoming.row_mask, dtype=jnp.uint32)
            highest = jnp.maximum(state.highest, jnp.max(seen))
            state = state.replace(highest=highest, refused=state.refused + refused)
        # If rows become anchors later, note their priorities, and take those of earlier rows.
        if waiting is not None:
            entered = gather.column(change.entered)
            if incoming is not None:
                none = jnp.full(incoming.slots.shape, _NO_ANCHOR, jnp.float32)
                new = none if own is None else own
                first = incoming.first_slot
                if first is None:
                    waiting = gather.put(waiting, incoming.slots, new)
                else:
                    waiting = lax.dynamic_update_slice_in_dim(waiting, new, first, axis=0)
            own = gather.read_at(waiting, entered)
            # Always -1, but XLA knows that only once `own` was read.
            none = jnp.minimum(own, _NO_ANCHOR)
            state = state.replace(waiting=gather.put(waiting, entered, none))
            own = own.reshape(-1)
        if own is None:
            return state, jnp.broadcast_to(default, change.entered.shape)
        # With a default for each row of time, as many anchors enter with each row.
        if default.ndim:
            default = jnp.repeat(default, own.size // default.size)
        # Of `own < 0` and a default of 0 XLA makes a maximum, which flushes numbers below 2^-126.
        return state, jnp.where(own == _NO_ANCHOR, default, own)

    def _default_priority(self, state: PrioritizedState) -> jax.Array:
        """Returns the priority of new items that bring none, float32 `[]`."""
        number = self.new_priority
        if number == "max":
            return state.highest
        if state.largest is None or state.largest_of_others is None:
            return jnp.float32(max(number, sum_tree.SMALLEST) if number else 0.0)
        largest = jnp.maximum(sum_tree.root(state.largest), state.largest_of_others)
        # A default of 0 would leave a buffer of priorities 0 without mass for ever.
        return jnp.where(largest > 0, largest, 1.0)

    def draw(
        self,
        ring: Ring,
        state: PrioritizedState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[PrioritizedState, Draw]:
        """Draws by the sum-tree; if no anchor has mass, the batch is masked."""
        weighing = Weighing(self.exponent(beta), self.normalize, state.smallest)
        return state, draw_by_mass(
            state.masses, key, batch_size, anchors, weighing, stratified=self.stratified
        )

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns beta, float32 `[]`."""
        return jnp.asarray(self.beta if beta is None else beta, jnp.float32)

    def ready(self, state: PrioritizedState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if an anchor has mass."""
        return sum_tree.root(state.masses) > 0

    def priorities(self, state: PrioritizedState) -> jax.Array:
        """Returns the priorities p of all slots, float32 `[N]`."""
        return state.raw

    def update(
        self,
        ring: Ring,
        state: PrioritizedState,
        slots: jax.Array,
        priorities: jax.Array,
        ok: jax.Array,
    ) -> PrioritizedState:
        """Sets new priorities of anchors; if a slot occurs twice, its last priority counts.

        A priority that is NaN, infinite or negative is refused and counted, and the old one stays.
        All others count for `highest`, even if a later one in the batch replaces them.
        """
        index = slots.astype(jnp.uint32)
        # Neither a slot without an anchor nor one that was dropped comes back by a late update.
        is_anchor = ok & (index < ring.capacity) & (gather.read_at(state.raw, index) >= 0)
        good = _is_priority(priorities)
        index = jnp.where(is_anchor & good, index, np.uint32(ring.capacity))
        # `last` has the value that won at each duplicate: the tree is set in any order.
        raw, last = gather.put_last(state.raw, index, priorities)
        greatest = jnp.max(jnp.where(index < ring.capacity, priorities, 0.0), initial=0.0)
        state = state.replace(
            raw=raw,
            highest=jnp.maximum(state.highest, greatest),
            refused=state.refused + jnp.sum(is_anchor & ~good, dtype=jnp.uint32),
        )
        return self._put_masses(
            state, last, lambda tree, leaf: sum_tree.set_leaves(tree, index, leaf)
        )

    def drop(
        self, ring: Ring, state: PrioritizedState, slots: jax.Array, ok: jax.Array
    ) -> PrioritizedState:
        """Sets the mass of anchors to 0 until their slots are overwritten.

        They stay in the number of anchors, by which `normalize=None` scales weights.
        """
        index = slots.astype(jnp.uint32)
        is_anchor = ok & (index < ring.capacity) & (gather.read_at(state.raw, index) >= 0)
        # Below 0, so that it has no mass, and unlike -1, so that a late update does not revive it.
        dropped = jnp.full(slots.shape, DROPPED, jnp.float32)
        return self._set_priorities(state, (jnp.where(is_anchor, slots, ring.capacity), dropped))

    def set_alpha(self, state: PrioritizedState, alpha: jax.Array | float) -> PrioritizedState:
        """Sets alpha, and computes all masses from the priorities again; costs O(N).

        On the CPU, setting the current alpha again is free, except under `vmap`. A traced alpha
        that is negative or not finite is ignored.
        """
        alpha = jnp.asarray(alpha, jnp.float32)
        if alpha.shape:
            raise ValueError(f"alpha: expected a single number, got shape {alpha.shape}.")
        if not isinstance(alpha, jax.core.Tracer):
            _check_number("alpha", float(alpha))
        return _recompute_masses(self, state, alpha)

    def assign(
        self,
        state: PrioritizedState,
        slots: jax.Array,
        priorities: jax.Array,
        highest: jax.Array | float | None = None,
    ) -> PrioritizedState:
        """Sets priorities that come from elsewhere, as `PrioritizedSampler.assign`; costs O(N)."""
        new = jnp.asarray(checks.real_numbers("assign: priorities", priorities))
        # Slots that are no anchors, or dropped, stay so.
        valid = (state.raw[slots] >= 0) & _is_priority(new)
        raw = state.raw.at[jnp.where(valid, slots, state.raw.size)].set(new, mode="drop")
        if highest is None:
            highest = jnp.maximum(state.highest, jnp.max(new, initial=0.0, where=valid))
        highest = jnp.asarray(highest).astype(jnp.float32)
        return self._put_masses(state.replace(raw=raw, highest=highest), raw, sum_tree.set_all)

    def import_state(
        self, state: PrioritizedState, old: PrioritizedState, slots: jax.Array, new_slots: jax.Array
    ) -> PrioritizedState:
        """Takes over priorities, also pending ones, drops, alpha, and the count of refusals."""
        priorities, waiting = old.raw[slots], state.waiting
        is_dropped = (priorities == DROPPED) & (state.raw[new_slots] != _NO_ANCHOR)
        if waiting is not None and old.waiting is not None:
            waiting = waiting.at[new_slots].set(old.waiting[slots])
        # Alpha first, as `assign` computes masses with it.
        state = state.replace(alpha=old.alpha, refused=old.refused, waiting=waiting)
        state = self.assign(state, new_slots, priorities, old.highest)
        # `assign` leaves negative priorities out, so these are set afterwards.
        index = jnp.where(is_dropped, new_slots, state.raw.size)
        raw = state.raw.at[index].set(DROPPED, mode="drop")
        return self._put_masses(state.replace(raw=raw), raw, sum_tree.set_all)

    def rebuild_index(
        self, ring: Ring, state: PrioritizedState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> PrioritizedState:
        """Keeps the priorities of anchors that remain; others get that of new items. Costs O(N)."""
        none, waiting = jnp.full_like(state.raw, _NO_ANCHOR), state.waiting
        is_anchor = jnp.zeros(none.shape, jnp.bool_).at[entered].set(True, mode="drop")
        # The largest held priority is that of the slots that are anchors still.
        if state.largest is not None:
            state = self._put_masses(state, jnp.where(is_anchor, state.raw, none), sum_tree.set_all)
        fresh = self._default_priority(state)
        if waiting is not None:
            # A row that becomes an anchor by the edit brings the priority that came with it.
            fresh = jnp.where(waiting == _NO_ANCHOR, fresh, waiting)
            waiting = jnp.where(is_anchor, none, waiting)
        # Anchors keep their priority, or drop; slots that become anchors get a fresh one.
        raw = jnp.where(is_anchor, jnp.where(state.raw == _NO_ANCHOR, fresh, state.raw), none)
        return self._put_masses(state.replace(raw=raw, waiting=waiting), raw, sum_tree.set_all)

    def reset(self, ring: Ring, state: PrioritizedState, token: jax.Array) -> PrioritizedState:
        """Returns the state without anchors, except that alpha keeps its value."""
        clear = lambda raw: dependencies.overwrite(raw, _NO_ANCHOR, token)
        clear_tree = lambda tree: None if tree is None else sum_tree.clear(tree, token)
        others = state.largest_of_others
        return state.replace(
            raw=clear(state.raw),
            waiting=None if state.waiting is None else clear(state.waiting),
            masses=sum_tree.clear(state.masses, token),
            smallest=clear_tree(state.smallest),
            largest=clear_tree(state.largest),
            largest_of_others=None if others is None else jnp.zeros_like(others),
            highest=jnp.ones_like(state.highest),
            refused=jnp.zeros_like(state.refused),
        )

    def stats(self, ring: Ring, state: PrioritizedState, anchors: Anchors) -> ShardStats:
        """Returns the roots of the trees, and the greatest priority seen, or held."""
        smallest, largest = state.smallest, state.largest
        return ShardStats(
            num_anchors=anchors.count,
            mass=sum_tree.root(state.masses),
            min_mass=jnp.float32(sum_tree.LARGEST) if smallest is None else sum_tree.root(smallest),
            max_priority=state.highest if largest is None else sum_tree.root(largest),
        )

    def sync_shards(self, state: PrioritizedState, stats: ShardStats) -> PrioritizedState:
        """Gives new items the greatest priority that any shard has seen, or holds."""
        if state.largest is None:
            return state.replace(highest=jnp.max(stats.max_priority))
        # What other shards hold: all entries but one that equals this shard's own.
        second, first = jnp.sort(jnp.append(stats.max_priority, 0.0))[-2:]
        is_first = sum_tree.root(state.largest) == first
        return state.replace(largest_of_others=jnp.where(is_first, second, first))

    def concat_shard_states(self, states: list[PrioritizedState]) -> PrioritizedState:
        """Returns all priorities in a row, the greatest priority, and the sum of refusals."""
        concat = lambda leaves: jnp.concatenate(list(map(jnp.asarray, leaves)))
        waiting = [one.waiting for one in states if one.waiting is not None]
        return states[0].replace(
            raw=concat([one.raw for one in states]),
            waiting=concat(waiting) if waiting else None,
            highest=jnp.max(jnp.stack([jnp.asarray(one.highest) for one in states])),
            refused=jnp.sum(jnp.stack([jnp.asarray(one.refused) for one in states])),
        )

    def _set_priorities(
        self, state: PrioritizedState, *sets: tuple[jax.Array, jax.Array]
    ) -> PrioritizedState:
        """Sets priorities at slots, one set after the other.

        Each set is slots, int32 `[K]`, N for padding, and priorities, equal for equal slots.
        """
        sets = tuple(one for one in sets if one[0].size)
        if not sets:
            return state
        # Join the sets; the scatters keep their order by these counts.
        columns = (map(gather.column, one) for one in sets)
        slots, new = map(jnp.concatenate, zip(*columns, strict=True))
        counts = tuple(one.size for one, _ in sets)
        state = state.replace(raw=gather.put_in_turns(state.raw, slots, new, counts))
        put = lambda tree, leaf: sum_tree.set_leaves(tree, slots, leaf, counts)
        return self._put_masses(state, new, put)

    def _put_masses(
        self, state: PrioritizedState, raw: jax.Array, put: Callable[[Tree, jax.Array], Tree]
    ) -> PrioritizedState:
        """Computes the masses of priorities `raw`, and writes them to each tree with `put`."""
        if self.eps:
            has_mass, power = raw >= 0, (jnp.maximum(raw, 0.0) + self.eps) ** state.alpha
        else:
            # Arithmetic takes numbers below 2^-126 for 0. Such a number is m 2^-149, with its bits
            # for m: so (m 2^-23)^alpha is scaled by 2^(-126 alpha).
            has_mass, bits = sum_tree.is_positive(raw), lax.bitcast_convert_type(raw, jnp.int32)
            is_tiny = (bits > 0) & (bits < 1 << 23)
            base = jnp.where(is_tiny, bits.astype(jnp.float32) * 2.0**-23, jnp.maximum(raw, 0.0))
            power = base**state.alpha * jnp.where(is_tiny, jnp.exp2(-126.0 * state.alpha), 1.0)
        mass = jnp.where(raw < 0, 0.0, sum_tree.limit_masses(state.masses, power, has_mass))
        state = state.replace(masses=put(state.masses, mass))
        if state.smallest is not None:
            # Slots without mass are neutral in a tree of minima.
            least = jnp.where(mass > 0, mass, sum_tree.LARGEST)
            state = state.replace(smallest=put(state.smallest, least))
        if state.largest is not None:
            greatest = jnp.where(sum_tree.is_positive(raw), jnp.maximum(raw, sum_tree.SMALLEST), 0)
            # The statistics for other shards were read before.
            greatest += dependencies.zero_depending_on(state.largest_of_others).astype(raw.dtype)
            state = state.replace(largest=put(state.largest, greatest))
        return state


@by_description()
def _recompute_masses(
    sampler: Prioritized, state: PrioritizedState, alpha: jax.Array
) -> PrioritizedState:
    """Computes all masses again; on the CPU in place, in runs, and only if alpha changed."""
    alpha = jnp.where(jnp.isfinite(alpha) & (alpha >= 0), alpha, state.alpha)
    changed = (alpha != state.alpha).astype(jnp.int32)
    state, capacity = state.replace(alpha=alpha), state.raw.size
    size = min(_RUN, capacity)

    def set_masses(
        trip: jax.Array, carry: tuple[PrioritizedState, jax.Array]
    ) -> tuple[PrioritizedState, jax.Array]:
        # The token collects what was read: it keeps later writes behind all of these reads.
        state, token = carry
        # The last run begins earlier and computes some masses twice, to the same numbers.
        first = jnp.minimum(trip * size, capacity - size)
        raw = dependencies.materialize(lambda: lax.dynamic_slice_in_dim(state.raw, first, size))
        state = sampler._put_masses(
            state, raw, lambda tree, leaf: sum_tree.set_run(tree, first, leaf)
        )
        return state, token + dependencies.zero_depending_on(raw)

    def in_runs() -> PrioritizedState:
        # No run at all if alpha did not change.
        trips = -(-capacity // size) * dependencies.unbatched_flag(changed)
        after, token = dependencies.loop(trips, set_masses, (state, jnp.zeros_like(changed)))
        # Writes nothing, but makes later writes wait for these reads.
        nowhere = (capacity + token)[None]
        return after.replace(raw=gather.put(after.raw, nowhere, jnp.zeros(1, jnp.float32)))

    # Without a loop of unknown length.
    at_once = lambda: sampler._put_masses(state, state.raw, sum_tree.set_all)
    return lax.platform_dependent(cpu=in_runs, default=at_once)


def _is_priority(number: jax.Array) -> jax.Array:
    return jnp.isfinite(number) & (number >= 0)


def _check_number(name: str, value: Any, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected {alternative}a number, got {value!r}.")
    if not 0 <= value <= float(np.finfo(np.float32).max):
        raise ValueError(
            f"{name}: expected {alternative}a finite number of at least 0, got {value}."
        )


class Weighing(NamedTuple):
    """The options of importance weights.

    Attributes:
        exponent: beta, float32 `[]`.
        normalize: as in `Prioritized`.
        smallest: the tree of the smallest masses, for "buffer"; else None.
    """

    exponent: jax.Array
    normalize: Literal["batch", "buffer"] | None
    smallest: sum_tree.Tree | None = None


def draw_by_mass(
    tree: sum_tree.Tree,
    key: jax.Array,
    batch_size: int,
    anchors: Anchors,
    weighing: Weighing,
    stratified: bool = False,
) -> Draw:
    """Draws slots in proportion to the masses in a tree; if none has mass, the batch is masked."""
    _, slots, mass, total = sum_tree.draw(tree, key, batch_size, stratified)
    has_mass = total > 0
    mask = jnp.broadcast_to(has_mass, (batch_size,))
    # Equation 1: P(i) = m_i / M. Section 3.4: w_i = (N P(i))^-beta, over the largest of them:
    # N and M cancel, which leaves (m_i / m)^-beta for the divisor m.
    if weighing.normalize == "batch":
        divisor = jnp.min(mass)
    elif weighing.smallest is not None:
        divisor = sum_tree.root(weighing.smallest)
    else:
        divisor = total / jnp.maximum(anchors.count, 1).astype(jnp.float32)
    divisor = jnp.where(has_mass, divisor, 1.0)
    # By logarithms: m_i / m may overflow float32 where masses differ by more than 1e38.
    log_ratio = jnp.log(jnp.where(has_mass, mass, 1.0)) - jnp.log(divisor)
    # At least 2^-126: a weight of 0 is for padding.
    weights = jnp.maximum(jnp.exp(-weighing.exponent * log_ratio), sum_tree.SMALLEST)
    # Without mass, leaves have no meaning.
    slots = jnp.where(has_mass, slots, 0)
    # Later writes wait for the read of the divisor.
    if weighing.normalize == "buffer":
        slots = slots + dependencies.zero_depending_on(divisor)
    # Multiply by an inverse, as XLA may round a quotient in two ways.
    inverse = 1 / jnp.where(has_mass, total, 1.0)
    return Draw(
        slots=slots,
        probabilities=jnp.where(mask, mass * inverse, 0.0),
        weights=jnp.where(mask, weights, 0.0),
        mask=mask,
    )
