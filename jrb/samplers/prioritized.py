"""Anchors in proportion to their priority."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb import sum_tree
from jrb._core.compiling import by_description
from jrb._util import checks, display, pytree
from jrb._util import tree as trees
from jrb._util.tree import Tree
from jrb._xla import dependencies, random_bits
from jrb.keys import Path, find, path_name
from jrb.occupancy import Occupancy
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Draw,
    DrawCounts,
    IncomingPriorities,
    Item,
    PrioritizedSampler,
    ShardedSampler,
    ShardStats,
)

_NO_ANCHOR = -1.0
DROPPED = -2.0
"""What stands for the priority of an anchor that was dropped."""
_CHUNK = 256  # slots that are cleared at once, where many leave
_RUN = 4096  # slots whose masses are computed at once, where all are


class Priorities(DrawCounts):
    """What a prioritized sampler knows of every slot.

    Attributes:
        raw: float32 `[N]`, the priority p of each anchor; -1 where there is no anchor, -2 where
            there is one that was dropped.
        waiting: float32 `[N]`, the priorities that came with rows which may become anchors later,
            -1 where none did; None for units whose rows are anchors at once.
        masses: a sum-tree over (p + eps)^alpha, 0 where there is no anchor.
        smallest: a tree of the least positive mass, or None: for `normalize="buffer"`.
        largest: a tree of the greatest p, or None: for `new_priority="max_in_buffer"`.
        highest: float32 `[]`, the greatest p seen so far, 1 at first.
        alpha: float32 `[]`.
        refused: uint32 `[]`, how many priorities were NaN, infinite or negative.
        dropped: bool `[]`, whether anchors were dropped since the buffer was empty.
        is_attached: True if it belongs to a buffer, which reports every anchor; no array.
    """

    raw: jax.Array
    waiting: jax.Array | None = None
    masses: Tree
    smallest: Tree | None
    largest: Tree | None
    highest: jax.Array
    alpha: jax.Array
    refused: jax.Array
    dropped: jax.Array
    is_attached: bool = pytree.static(default=False)

    def summary(self, ring: Ring) -> dict[str, str]:
        """How the priorities of what may be drawn spread, and how many were refused."""
        raw, refused = display.known(self.raw), display.known(self.refused)
        some = None if raw is None else raw[raw > 0]
        found = {} if some is None else {"priorities": display.spread(some)}
        return found | ({"refused": f"{int(refused):,}"} if refused else {})


@pytree.component
class Prioritized(PrioritizedSampler, ShardedSampler):
    """Draws anchor i with probability P(i) = (p_i + eps)^alpha / sum_k (p_k + eps)^alpha.

    The importance weights (N P(i))^-beta, over N anchors, undo the bias of that in a loss; they are
    divided by the largest one, so that they only scale down.

    Attributes:
        alpha: how much priorities matter, at least 0; 0 is uniform. `set_alpha` changes it later.
        beta: how much of the bias is undone, 1 for all; `sample(..., beta=)` takes a schedule.
        eps: what is added to every priority, at least 0.
        stratified: one draw from each of B equal parts of the mass, for less variance.
        normalize: what the weights are divided by: the largest in the "batch", the largest that any
            anchor in the "buffer" would get, or None for nothing.
        new_priority: the priority p of new items: "max", the largest seen so far (1 at first);
            "max_in_buffer", the largest held when they are written (1 if nothing is held); or a
            number.
        priority_key: the path to a leaf of the items, a real number each, that is the priority of
            what is written; None for that of new items. `add(..., priorities=)` does without a
            leaf.
        count_draws: whether to count how often each item is drawn (see `jrb.types.Sampler`).

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
    new_priority: Literal["max", "max_in_buffer"] | float = "max"
    priority_key: Path | None = None
    count_draws: bool = False
    takes_priorities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "eps"):
            _check_number(name, getattr(self, name))
        if self.priority_key is not None:
            checks.path("priority_key", self.priority_key)
        if 0 < self.eps < sum_tree.SMALLEST:
            raise ValueError(
                f"eps: expected 0, or at least {sum_tree.SMALLEST:.3g}, got {self.eps}."
            )
        if self.normalize not in ("batch", "buffer", None):
            raise ValueError(
                f"normalize: expected 'batch', 'buffer' or None, got {self.normalize!r}."
            )
        if self.new_priority not in ("max", "max_in_buffer"):
            _check_number("new_priority", self.new_priority, "'max', 'max_in_buffer' or ")
        checks.flag("count_draws", self.count_draws)

    def init(self, ring: Ring) -> Priorities:
        """No anchors."""
        tree = functools.partial(trees.init, ring.capacity, None)
        return Priorities(
            raw=jnp.full(ring.capacity, _NO_ANCHOR, jnp.float32),
            masses=tree("sum"),
            smallest=tree("min") if self.normalize == "buffer" else None,
            largest=tree("max") if self.new_priority == "max_in_buffer" else None,
            highest=jnp.ones((), jnp.float32),
            alpha=jnp.full((), self.alpha, jnp.float32),
            refused=jnp.zeros((), jnp.uint32),
            dropped=jnp.zeros((), jnp.bool_),
        )

    def attach(self, state: Priorities, has_delayed_anchors: bool) -> Priorities:
        """Told of every anchor from here on."""
        waiting = jnp.full_like(state.raw, _NO_ANCHOR) if has_delayed_anchors else None
        return state.replace(is_attached=True, waiting=waiting)

    def priorities_from_items(self, items: Item) -> jax.Array | None:
        """Those at `priority_key`."""
        if self.priority_key is None:
            return None
        leaf = find(items, self.priority_key, "Prioritized: priority_key")
        where = f"Prioritized: priority_key: leaf '{path_name(self.priority_key)}'"
        if not pytree.is_array(leaf) or leaf.shape[2:] not in ((), (1,)):
            raise ValueError(
                f"{where}: expected one number for each item, got "
                f"{leaf.shape[2:] if pytree.is_array(leaf) else pytree.leaf_names(leaf)}."
            )
        return checks.real_numbers(where, leaf).reshape(leaf.shape[:2])

    def on_write(
        self, ring: Ring, state: Priorities, change: AnchorUpdate, anchors: Anchors
    ) -> Priorities:
        """New anchors enter with the priority of new items, those that left lose theirs."""
        default, left = self._new_priority(state, change.incoming), change.removed
        if change.expired is not None and change.most is not None:
            left = jnp.concatenate([change.expired.run(ring, change.most), left])
        elif change.expired is not None:
            state = self._without_run(ring, state, change.expired)
        state, new = self._entering(ring, state, change, default)
        if change.consecutive:
            return self._set_run(self._without(state, left), change.entered[0], new)
        return self._set(state, (left, _none_at(left)), (change.entered, new))

    def _entering(
        self, ring: Ring, state: Priorities, change: AnchorUpdate, default: jax.Array
    ) -> tuple[Priorities, jax.Array]:
        """The state, and the priority of each anchor that enters: one that was given, or not."""
        given, waiting, own = change.incoming, state.waiting, None
        if given is not None and given.priorities is not None:
            good = _is_priority(given.priorities)
            own = jnp.where(good, given.priorities, _NO_ANCHOR)
            wrong = ~good.reshape(len(given.row_mask), -1) & given.row_mask
            state = state.replace(
                highest=jnp.maximum(
                    state.highest, jnp.max(_greatest(given.priorities, given.row_mask))
                ),
                refused=state.refused + jnp.sum(wrong, dtype=jnp.uint32),
            )
        if waiting is not None:
            entered = trees.column(change.entered)
            waiting = _noted(waiting, given, own)
            own = trees.read(waiting, entered)
            none = jnp.minimum(own, _NO_ANCHOR)  # what it is in any case, once `own` was read
            state = state.replace(waiting=trees.put(waiting, entered, none))
            own = own.reshape(-1)
        if own is None:
            return state, jnp.broadcast_to(default, change.entered.shape)
        if default.ndim:  # of each row of time; as many anchors enter with each
            default = jnp.repeat(default, own.size // default.size)
        # Of `own < 0` and a default of 0 XLA makes a maximum, which flushes what is below 2^-126.
        return state, jnp.where(own == _NO_ANCHOR, default, own)

    def _without(self, state: Priorities, slots: jax.Array) -> Priorities:
        """No anchor at slots, int32 `[K]`; N where there is none to leave."""
        if not slots.size:
            return state
        slots = trees.column(slots)
        # None of it known before the slots: a constant would wait for nothing (see `rows.in_line`).
        none = jnp.minimum(slots.astype(jnp.float32), _NO_ANCHOR)
        put = lambda tree, leaf: None if tree is None else trees.set_leaves(tree, slots, leaf)
        return state.replace(
            raw=trees.put(state.raw, slots, none),
            masses=put(state.masses, none - _NO_ANCHOR),
            smallest=put(state.smallest, none + jnp.inf),
            largest=put(state.largest, none),
        )

    def _without_run(self, ring: Ring, state: Priorities, expired: Occupancy) -> Priorities:
        """No mass in a run of any length."""
        chunk = min(ring.capacity, _CHUNK)

        def clear(trip: jax.Array, state: Priorities) -> Priorities:
            done = jnp.minimum(trip * chunk, expired.count)
            rest = Occupancy(first=ring.slot_after(expired.first, done), count=expired.count - done)
            return self._without(state, rest.run(ring, chunk))

        def clear_at_once() -> Priorities:
            slots = jnp.arange(ring.capacity, dtype=jnp.int32)
            raw = jnp.where(expired.holds(ring, slots), _NO_ANCHOR, state.raw)
            return self._put(state.replace(raw=raw), raw, trees.set_all)

        trips = (dependencies.at_least(expired.count) + chunk - 1) // chunk
        return lax.platform_dependent(
            cpu=lambda: dependencies.loop(trips, clear, state),
            default=clear_at_once,  # the trips would be unknown
        )

    def _new_priority(self, state: Priorities, given: IncomingPriorities | None) -> jax.Array:
        """The priority of new items, float32 `[]`; or `[T]`, of those that come with each row."""
        if self.new_priority == "max":
            if given is None or given.priorities is None or len(given.row_mask) == 1:
                return state.highest
            before = jnp.concatenate(
                [state.highest[None], _greatest(given.priorities, given.row_mask)[:-1]]
            )
            return lax.cummax(before)
        if state.largest is None:
            return jnp.float32(self.new_priority and max(self.new_priority, sum_tree.SMALLEST))
        held = trees.root(state.largest)
        return jnp.where(held < 0, 1.0, held)

    def draw(
        self,
        ring: Ring,
        state: Priorities,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[Priorities, Draw]:
        """Walks down the sum-tree; where no anchor has mass, all are equally likely.

        Unless some were dropped: then nothing is drawn.
        """
        words, slots, mass, total = sum_tree.draw(state.masses, key, batch_size, self.stratified)
        some = total > 0
        none = (anchors.count == 0) | (state.dropped & ~some)
        mask = jnp.broadcast_to(~none, (batch_size,))
        alike = anchors.uniform_draw(random_bits.below(anchors.count, *words), mask, key)
        beta = self.exponent(beta)
        divisor = self._divisor(state, anchors, mass, total)
        ratio = jnp.log(jnp.where(some, mass, 1.0)) - jnp.log(divisor)
        # A weight of 0 is for what was not drawn.
        weights = jnp.maximum(jnp.exp(-beta * ratio), sum_tree.SMALLEST)
        slots = jnp.where(some, slots, alike.slots)
        inverse = 1 / jnp.where(some, total, 1.0)  # a quotient may be rounded in two ways
        if self.normalize == "buffer":
            slots = slots + dependencies.token(divisor)
        return state, Draw(
            slots=slots,
            probabilities=jnp.where(some, mass * inverse, alike.probabilities),
            weights=jnp.where(mask, weights, 0.0),
            mask=mask,
        )

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Beta, float32 `[]`; None stands for the sampler's own."""
        return jnp.asarray(self.beta if beta is None else beta, jnp.float32)

    def ready(self, state: Priorities, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Whether there is an anchor that was not dropped."""
        return (anchors.count > 0) & (~state.dropped | (trees.root(state.masses) > 0))

    def stats(self, ring: Ring, state: Priorities, anchors: Anchors) -> ShardStats:
        """The roots of the trees, and the greatest priority so far."""
        smallest = state.smallest
        return ShardStats(
            num_anchors=anchors.count,
            mass=trees.root(state.masses),
            num_drawable=jnp.where(state.dropped, 0, anchors.count),
            min_mass=jnp.float32(jnp.inf) if smallest is None else trees.root(smallest),
            max_priority=state.highest,
        )

    def sync_shards(self, state: Priorities, stats: ShardStats) -> Priorities:
        """New items get the greatest priority that any shard has seen."""
        return state.replace(highest=jnp.max(stats.max_priority))

    def _divisor(
        self, state: Priorities, anchors: Anchors, mass: jax.Array, total: jax.Array
    ) -> jax.Array:
        """The mass m for which (mass / m)^-beta is the weight; 1 where there is no mass.

        In the quotient of two (N P)^-beta, N and the total cancel.
        """
        if self.normalize == "batch":
            divisor = jnp.min(mass)
        elif state.smallest is not None:
            divisor = trees.root(state.smallest)
        else:
            divisor = total / jnp.maximum(anchors.count, 1).astype(jnp.float32)
        return jnp.where(total > 0, divisor, 1.0)

    def update(
        self, ring: Ring, state: Priorities, slots: jax.Array, priorities: jax.Array, ok: jax.Array
    ) -> Priorities:
        """New priorities for anchors; the last one wins where a slot stands twice.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            slots: int32 `[B]`.
            priorities: float32 `[B]`. One that is NaN, infinite or negative is refused and counted:
                the old one stays. Of the others, each was seen, replaced or not.
            ok: bool `[B]`, False where nothing is to be done.
        """
        index = slots.astype(jnp.uint32)
        member = ok & (index < ring.capacity) & (trees.read(state.raw, index) >= 0)
        good = _is_priority(priorities)
        index = jnp.where(member & good, index, np.uint32(ring.capacity))
        raw, last = trees.put_last(state.raw, index, priorities)
        greatest = jnp.max(jnp.where(index < ring.capacity, priorities, 0.0), initial=0.0)
        state = state.replace(
            raw=raw,
            highest=jnp.maximum(state.highest, greatest),
            refused=state.refused + jnp.sum(member & ~good, dtype=jnp.uint32),
        )
        return self._put(state, last, lambda tree, leaf: trees.set_leaves(tree, index, leaf))

    def drop(self, ring: Ring, state: Priorities, slots: jax.Array, ok: jax.Array) -> Priorities:
        """No mass for anchors, whatever priorities they get later; until the slot is overwritten.

        The number of anchors, by which `normalize=None` scales weights, still counts them.
        """
        index = slots.astype(jnp.uint32)
        member = ok & (index < ring.capacity) & (trees.read(state.raw, index) >= 0)
        state = state.replace(dropped=state.dropped | member.any())
        dropped = jnp.full(slots.shape, DROPPED, jnp.float32)
        return self._set(state, (jnp.where(member, slots, ring.capacity), dropped))

    def priorities(self, state: Priorities) -> jax.Array:
        """The priorities p."""
        return state.raw

    def rebuild_index(
        self, ring: Ring, state: Priorities, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Priorities:
        """Anchors that stay keep their priority; others get that of new items. Costs O(N)."""
        none = jnp.full_like(state.raw, _NO_ANCHOR)
        fresh = jnp.broadcast_to(self._new_priority(state, None), none.shape)
        if state.waiting is not None:
            fresh = jnp.where(state.waiting == _NO_ANCHOR, fresh, state.waiting)
        fresh = jnp.where(state.raw == _NO_ANCHOR, fresh, state.raw)
        is_anchor = jnp.zeros(none.shape, jnp.bool_).at[entered].set(True, mode="drop")
        raw, waiting = jnp.where(is_anchor, fresh, none), state.waiting
        if waiting is not None:
            waiting = jnp.where(is_anchor, none, waiting)
        return self._put(state.replace(raw=raw, waiting=waiting), raw, trees.set_all)

    def set_alpha(self, state: Priorities, alpha: jax.Array | float) -> Priorities:
        """Another alpha, and all masses computed anew from the priorities; costs O(N).

        On the CPU, the same alpha as before costs nothing, unless under `vmap`. A traced alpha that
        is negative or not finite leaves the old one.
        """
        alpha = jnp.asarray(alpha, jnp.float32)
        if alpha.shape:
            raise ValueError(f"alpha: expected a single number, got shape {alpha.shape}.")
        if not isinstance(alpha, jax.core.Tracer):
            _check_number("alpha", float(alpha))
        return _with_alpha(self, state, alpha)

    def assign(
        self,
        state: Priorities,
        slots: jax.Array,
        priorities: jax.Array,
        highest: jax.Array | float | None = None,
    ) -> Priorities:
        """Priorities that come from elsewhere, such as another buffer; costs O(N).

        Args:
            state: the sampler's state.
            slots: int32 `[K]`, distinct; those that are no anchors are left alone.
            priorities: real numbers `[K]`; a negative one leaves what is there.
            highest: the greatest priority seen there; None for the greatest of both.
        """
        new = jnp.asarray(checks.real_numbers("assign: priorities", priorities))
        here = (state.raw[slots] >= 0) & jnp.isfinite(new) & (new >= 0)
        raw = state.raw.at[jnp.where(here, slots, state.raw.size)].set(new, mode="drop")
        if highest is None:
            highest = jnp.maximum(state.highest, jnp.max(new, initial=0.0, where=here))
        highest = jnp.asarray(highest).astype(jnp.float32)
        state = state.replace(raw=raw, highest=highest)
        return self._put(state, raw, trees.set_all)

    def import_state(
        self, state: Priorities, old: Priorities, slots: jax.Array, new_slots: jax.Array
    ) -> Priorities:
        """Takes over what another buffer's sampler knew of its anchors.

        Args:
            state: the sampler's state, after the items were written.
            old: the other sampler's state.
            slots: int32 `[K]`, where the items were.
            new_slots: int32 `[K]`, where they are.
        """
        known, waiting = old.raw[slots], state.waiting
        if waiting is not None and old.waiting is not None:
            waiting = waiting.at[new_slots].set(old.waiting[slots])
        state = state.replace(alpha=old.alpha, refused=old.refused, waiting=waiting)
        state = self.assign(state, new_slots, known, old.highest)
        gone = jnp.where(known == DROPPED, new_slots, state.raw.size)
        raw = state.raw.at[gone].set(DROPPED, mode="drop")
        state = state.replace(raw=raw, dropped=(known == DROPPED).any())
        return self._put(state, raw, trees.set_all)

    def concat_shard_states(self, states: list[Priorities]) -> Priorities:
        """The priorities of one shard after those of the other; the greatest, and all refusals."""
        joined = lambda leaves: jnp.concatenate(list(map(jnp.asarray, leaves)))
        waiting = [one.waiting for one in states if one.waiting is not None]
        return states[0].replace(
            raw=joined([one.raw for one in states]),
            waiting=joined(waiting) if waiting else None,
            highest=jnp.max(jnp.stack([jnp.asarray(one.highest) for one in states])),
            refused=jnp.sum(jnp.stack([jnp.asarray(one.refused) for one in states])),
        )

    def _set(self, state: Priorities, *sets: tuple[jax.Array, jax.Array]) -> Priorities:
        """Priorities at slots, some after others.

        Args:
            state: the sampler's state.
            sets: of each: slots, int32 `[K]`, N where there is none; and the priorities, float32
                `[K]`, equal where slots are.
        """
        sets = tuple(one for one in sets if one[0].size)
        if not sets:
            return state
        columns = (map(trees.column, one) for one in sets)
        slots, new = map(jnp.concatenate, zip(*columns, strict=True))
        counts = tuple(one.size for one, _ in sets)
        state = state.replace(raw=trees.put_in_turns(state.raw, slots, new, counts))
        put = lambda tree, leaf: trees.set_leaves(tree, slots, leaf, counts)
        return self._put(state, new, put)

    def _set_run(self, state: Priorities, first: jax.Array, raw: jax.Array) -> Priorities:
        """Priorities, float32 `[K]`, at the slots from `first` on."""
        state = state.replace(raw=lax.dynamic_update_slice_in_dim(state.raw, raw, first, axis=0))
        return self._put(state, raw, lambda tree, leaf: trees.set_run(tree, first, leaf))

    def _put(
        self, state: Priorities, raw: jax.Array, put: Callable[[Tree, jax.Array], Tree]
    ) -> Priorities:
        """What each tree keeps of the priorities `raw`, put into it."""
        positive = sum_tree.is_positive(raw)
        has_mass = raw >= 0 if self.eps else positive
        mass = sum_tree.bounded(state.masses, _power(raw, self.eps, state.alpha), has_mass)
        mass = jnp.where(raw < 0, 0.0, mass)
        least = jnp.where(mass > 0, mass, jnp.inf)
        # A maximum may take what is below 2^-126 for 0, and a new item would get no mass.
        seen = jnp.where(positive, jnp.maximum(raw, sum_tree.SMALLEST), raw)
        return state.replace(
            masses=put(state.masses, mass),
            smallest=None if state.smallest is None else put(state.smallest, least),
            largest=None if state.largest is None else put(state.largest, seen),
        )

    def reset(self, ring: Ring, state: Priorities, token: jax.Array) -> Priorities:
        """As at the start; only alpha stays."""
        waiting = state.waiting
        if waiting is not None:
            waiting = dependencies.overwrite(waiting, _NO_ANCHOR, token)
        return state.replace(
            raw=dependencies.overwrite(state.raw, _NO_ANCHOR, token),
            waiting=waiting,
            masses=trees.cleared(state.masses, token),
            smallest=None if state.smallest is None else trees.cleared(state.smallest, token),
            largest=None if state.largest is None else trees.cleared(state.largest, token),
            highest=jnp.ones_like(state.highest),
            refused=jnp.zeros_like(state.refused),
            dropped=jnp.zeros_like(state.dropped),
        )


def _power(raw: jax.Array, eps: float, alpha: jax.Array) -> jax.Array:
    """(raw + eps)^alpha, also of numbers that arithmetic takes for 0, as they are below 2^-126.

    Such a number is m 2^-149, with its bits for m: so (m 2^-23)^alpha is scaled by 2^(-126 alpha).
    """
    if eps:
        return (jnp.maximum(raw, 0.0) + eps) ** alpha
    bits = lax.bitcast_convert_type(raw, jnp.int32)
    is_tiny = (bits > 0) & (bits < 1 << 23)
    base = jnp.where(is_tiny, bits.astype(jnp.float32) * 2.0**-23, jnp.maximum(raw, 0.0))
    return base**alpha * jnp.where(is_tiny, jnp.exp2(-126.0 * alpha), 1.0)


@by_description()
def _with_alpha(sampler: Prioritized, state: Priorities, alpha: jax.Array) -> Priorities:
    alpha = jnp.where(jnp.isfinite(alpha) & (alpha >= 0), alpha, state.alpha)
    changed = (alpha != state.alpha).astype(jnp.int32)
    largest, state = state.largest, state.replace(alpha=alpha, largest=None)  # of no masses
    laid = lax.platform_dependent(
        cpu=lambda: _laid_in_runs(sampler, state, changed),
        default=lambda: sampler._put(state, state.raw, trees.set_all),  # the trips are not known
    )
    return laid.replace(largest=largest)


def _laid_in_runs(sampler: Prioritized, state: Priorities, changed: jax.Array) -> Priorities:
    """All masses computed anew, a run at a time, if `changed`, int32 `[]`, is 1 and not 0."""
    capacity = state.raw.size
    size = min(_RUN, capacity)

    def lay(trip: jax.Array, carry: tuple[Priorities, jax.Array]) -> tuple[Priorities, jax.Array]:
        state, read = carry
        first = jnp.minimum(trip * size, capacity - size)
        raw = dependencies.read(lambda: lax.dynamic_slice_in_dim(state.raw, first, size))
        laid = sampler._put(state, raw, lambda tree, leaf: trees.set_run(tree, first, leaf))
        return laid, read + dependencies.token(raw)

    trips = -(-capacity // size) * dependencies.alone(changed)
    laid, read = dependencies.loop(trips, lay, (state, jnp.zeros_like(changed)))
    # Nothing is put there: it is for later writes, which have to wait for what was read.
    nowhere = (capacity + read)[None]
    return laid.replace(raw=trees.put(laid.raw, nowhere, jnp.zeros(1, jnp.float32)))


def _noted(
    waiting: jax.Array, given: IncomingPriorities | None, priorities: jax.Array | None
) -> jax.Array:
    """What waits for items to become anchors, float32 `[N]`, with priorities of those written."""
    if given is None:
        return waiting
    new = _none_at(given.slots) if priorities is None else priorities
    if given.first_slot is None:
        return trees.put(waiting, given.slots, new)
    return lax.dynamic_update_slice_in_dim(waiting, new, given.first_slot, axis=0)


def _greatest(priorities: jax.Array, written: jax.Array) -> jax.Array:
    """The greatest priority that came with each row of time, float32 `[T]`."""
    seen = jnp.where(_is_priority(priorities), priorities, 0.0)
    return jnp.where(written, seen.reshape(len(written), -1), 0.0).max(axis=1)


def _is_priority(number: Any) -> jax.Array:
    return jnp.isfinite(number) & (number >= 0)


def _none_at(slots: jax.Array) -> jax.Array:
    """What stands for the priority where there is no anchor, float32 `[K]`."""
    return jnp.full(slots.shape, _NO_ANCHOR, jnp.float32)


def _check_number(name: str, value: object, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected {also}a number, got {value!r}.")
    if not 0 <= value <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name}: expected {also}a finite number of at least 0, got {value}.")
