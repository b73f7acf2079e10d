"""The contracts of samplers, with priorities and without.

A default that cannot know what the arrays of a state mean raises, and names the method to write.
"""

import abc
from typing import Any, ClassVar, Literal, NoReturn

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb._xla import dependencies
from jrb.ring import Ring
from jrb.types.messages import (
    Anchors,
    AnchorUpdate,
    Draw,
    DrawCounts,
    Item,
    MissingMethodError,
    PartState,
    ShardStats,
)


class Sampler(abc.ABC):
    """Which anchors next, and with what probability?

    Samplers with priorities are below `PrioritizedSampler`.

    Attributes:
        in_order: whether the order of anchors matters to what it draws.
        consumes: whether `draw` uses anchors up.
        prioritized: True below `PrioritizedSampler`, and nowhere else.
        takes_priorities: whether `on_write` looks at those in `AnchorUpdate.given`.
        count_draws: whether to count how often each item is drawn, int32 `[N]`: then its state is
            a `DrawCounts`. `Sample.info["draws"]`, int32 `[B]`, says how often each was drawn
            before, and `jrb.stats` how often all were. `draw` counts, `sample` does not; an item
            that stands twice in a batch was drawn twice; a new item counts from 0.
        stratified: whether a draw takes one from each of B equal parts of all mass.
        normalize: what importance weights are divided by: the largest in the "batch", or that any
            anchor in the "buffer" would get; None for nothing.
    """

    in_order: ClassVar[bool] = False
    consumes: ClassVar[bool] = False
    prioritized: ClassVar[bool] = False
    takes_priorities: ClassVar[bool] = False
    count_draws: bool = False
    stratified: bool = False
    normalize: Literal["batch", "buffer"] | None = None

    def init(self, ring: Ring) -> Any:
        """The state when there are no anchors; by default, counts at most."""
        return DrawCounts(draws=self.no_draws(ring)) if self.count_draws else {}

    def no_draws(self, ring: Ring) -> jax.Array | None:
        """What `DrawCounts.draws` is when nothing was drawn."""
        return jnp.zeros(ring.capacity, jnp.int32) if self.count_draws else None

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises if the sampler does not fit the ring, or the unit whose anchors it draws."""
        return

    def joined(self, state: PartState, has_delayed_anchors: bool) -> Any:
        """The state, empty, when a buffer begins to tell it of every anchor.

        Args:
            state: what `init` made.
            has_delayed_anchors: whether rows may become anchors later than they are written.
        """
        return state

    def given(self, items: Item) -> jax.Array | None:
        """The priorities that items bring along, real `[T, E]`; None for those of new items.

        Args:
            items: what will be written, leaves `[T, E, ...]`.
        """
        return None

    def on_write(self, ring: Ring, state: PartState, change: AnchorUpdate, anchors: Anchors) -> Any:
        """Learns which anchors came and went; `anchors` is from after the write."""
        return state

    @abc.abstractmethod
    def draw(
        self,
        ring: Ring,
        state: PartState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[Any, Draw]:
        """Draws a batch. `beta` is for samplers with importance weights, None for their own.

        Large arrays of the state are read by `jrb.authoring.materialize` or in a loop, and the
        slots are not known before these reads: then a write that waits for the slots is done in
        place.
        """

    def ready(self, state: PartState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Bool `[]`: whether a draw would give at least one item."""
        return anchors.count > 0

    def of_shard(self, shards: int) -> "Sampler":
        """The sampler of one of so many shards, which together do what this one would."""
        return self

    def share(self, ring: Ring, state: PartState, anchors: Anchors) -> ShardStats | None:
        """Returns what the other shards have to know, so that all together draw as one buffer.

        `ShardStats.uniform(anchors)` from a sampler that draws these anchors with the same
        probability, and no others. None from one that uses anchors up: then each
        shard draws for itself, and weights mean nothing.

        Raises:
            MissingMethodError: by default, unless the sampler `consumes`.
        """
        if self.consumes:
            return None
        self._lacks("share", "draw from shards")

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns the power of the importance weights over all shards, float32 `[]`.

        `beta` is None for the sampler's own. 0 from a sampler whose weights are all 1.

        Raises:
            MissingMethodError: by default.
        """
        self._lacks("exponent", "draw from shards")

    def sync_shards(self, state: PartState, shares: ShardStats) -> Any:
        """The state that knows what all shards said, arrays `[S]`."""
        return state

    def unread(self, state: PartState, anchors: Anchors) -> jax.Array | None:
        """int32 `[]`: how many of the last anchors may not be lost, for writers that see to it.

        None if nothing that is held may be.
        """
        return None

    def has_unread(self, state: PartState) -> jax.Array:
        """Bool `[]`: whether there is something left of an order that may not be lost."""
        if self.consumes and self.in_order:
            self._lacks("has_unread", "rebuild")
        return jnp.bool_(False)

    def adopt(self, state: PartState, old: PartState, slots: jax.Array, places: jax.Array) -> Any:
        """Takes over what another buffer's sampler knew of its anchors.

        Args:
            state: the sampler's state, after the items were written.
            old: the other sampler's state.
            slots: int32 `[K]`, where the items were.
            places: int32 `[K]`, where they are.

        Raises:
            MissingMethodError: by default, where the state has arrays other than counts of draws.
        """
        self._check_stateless(state, "adopt", "rebuild")
        return state

    def merged(self, states: list[PartState]) -> Any:
        """Returns what several shards' samplers knew of their anchors, for `adopt`.

        Slot s of shard k becomes slot k N + s. The engine takes care of counts of draws.

        Raises:
            MissingMethodError: by default, where states have arrays other than counts of draws.
        """
        self._check_stateless(states[0], "merged", "rebuild")
        return states[0]

    def update(
        self, ring: Ring, state: PartState, slots: jax.Array, priorities: jax.Array, ok: jax.Array
    ) -> Any:
        """New priorities, float32 `[B]`, for the anchors at `slots`, int32 `[B]`, where `ok`."""
        self._refuse("update_priority")

    def set_alpha(self, state: PartState, alpha: jax.Array | float) -> Any:
        """Another exponent of the priorities."""
        self._refuse("set_alpha")

    def assign(
        self,
        state: PartState,
        slots: jax.Array,
        priorities: jax.Array,
        highest: jax.Array | float | None = None,
    ) -> Any:
        """Priorities that come from elsewhere."""
        self._refuse("assign")

    def _lacks(self, method: str, verb: str) -> NoReturn:
        raise MissingMethodError(
            f"{verb}: expected a sampler with a method {method}, got {type(self).__name__}, for "
            f"which no default would be right. See jrb.types.Sampler.{method}."
        )

    def _check_stateless(self, state: PartState, method: str, verb: str) -> None:
        """Raises where only a method of the sampler can know what arrays of the state become."""
        counts = isinstance(state, DrawCounts)
        if jax.tree.leaves(state.replace(draws=None) if counts else state):
            self._lacks(method, verb)

    def _refuse(self, verb: str) -> NoReturn:
        raise TypeError(
            f"{verb}: expected a sampler with priorities, got {type(self).__name__}. "
            "Build the buffer with sampler=jrb.Prioritized()."
        )

    def drop(self, ring: Ring, state: PartState, slots: jax.Array, ok: jax.Array) -> Any:
        """The state in which the anchors at `slots`, int32 `[B]`, where `ok`, are drawn no more."""
        raise TypeError(
            f"drop: expected a sampler that can leave anchors out, got {type(self).__name__}. "
            "jrb.Prioritized() can; with alpha=0 it draws all others alike."
        )

    def priorities(self, state: PartState) -> jax.Array:
        """The priority of each slot, float32 `[N]`; negative where there is no anchor."""
        self._refuse("priorities")

    def rebuild_index(
        self, ring: Ring, state: PartState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Any:
        """Learns that all anchors were counted anew, as some ends of episodes were edited.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            entered: int32 `[K]`, the slots of all anchors; N or more where there is none.
            old: the anchors before.
            new: the anchors now.

        Raises:
            MissingMethodError: by default, where the state has arrays other than counts of draws.
        """
        self._check_stateless(state, "relearn", "set")
        return state

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state when there are no anchors any more.

        By default that of `init`, in the memory of `state`. Overwrite large arrays after the token,
        an int32 zero, by `jrb.authoring.overwrite`.

        Raises:
            MissingMethodError: by default, where `joined` has added arrays to those of `init`.
        """
        if not pytree.same_arrays(state, jax.eval_shape(lambda: self.init(ring))):
            self._lacks("reset", "empty")
        return dependencies.restored(state, lambda: self.init(ring), token)


class PrioritizedSampler(Sampler):
    """A sampler whose anchors have priorities.

    Abstract is what `Sampler` has no safe default for. The state keeps, for each slot, at least its
    priority; the rest is the sampler's own. `drop`, `merged` (from shards to one buffer) and
    `takes_priorities` (`add(..., priorities=)`) may be left out: then these calls raise.

    A template is `examples/parts/rank_based.py`.

    Attributes:
        normalize: what `draw` divides importance weights by, as of every `Sampler`. Say None for
            nothing: shards have to know it.
    """

    prioritized: ClassVar[bool] = True
    normalize: Literal["batch", "buffer"] | None = property(  # pyright: ignore
        abc.abstractmethod(lambda self: None)
    )

    @abc.abstractmethod
    def on_write(self, ring: Ring, state: PartState, change: AnchorUpdate, anchors: Anchors) -> Any:
        """New anchors get the priority of new items; those that left lose theirs.

        First `change.departed(ring)` leave, then `change.entered` come: a slot may be in both.
        """

    @abc.abstractmethod
    def update(
        self, ring: Ring, state: PartState, slots: jax.Array, priorities: jax.Array, ok: jax.Array
    ) -> Any:
        """Sets new priorities.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            slots: int32 `[B]`; those that are no anchors are left alone. Of a slot that stands
                twice, the last priority counts.
            priorities: float32 `[B]`; one that is NaN, infinite or negative is left out.
            ok: bool `[B]`, False where nothing is to be done.
        """

    @abc.abstractmethod
    def priorities(self, state: PartState) -> jax.Array:
        """Returns the priority of each slot, float32 `[N]`.

        -1 where there is no anchor, -2 where there is one that was dropped.
        """

    @abc.abstractmethod
    def assign(
        self,
        state: PartState,
        slots: jax.Array,
        priorities: jax.Array,
        highest: jax.Array | float | None = None,
    ) -> Any:
        """Sets priorities that come from elsewhere, such as another buffer.

        Args:
            state: the sampler's state.
            slots: int32 `[K]`, distinct; those that are no anchors are left alone.
            priorities: real numbers `[K]`; a negative one leaves what is there.
            highest: the greatest priority seen there; None for the greatest of both.
        """

    @abc.abstractmethod
    def set_alpha(self, state: PartState, alpha: jax.Array | float) -> Any:
        """Sets the exponent of the priorities, a number that may be traced.

        The state has to keep it: `empty`, `rebuild` and a checkpoint leave it as it is.
        """

    @abc.abstractmethod
    def rebuild_index(
        self, ring: Ring, state: PartState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Any:
        """Keeps the priorities of anchors that stay when ends of episodes were edited.

        `entered`, int32 `[K]`, has the slots of all anchors (N or more where there is none). Others
        are none any more; those that were none get the priority of new items.
        """

    @abc.abstractmethod
    def adopt(self, state: PartState, old: PartState, slots: jax.Array, places: jax.Array) -> Any:
        """Takes over priorities, alpha, and what else another state of this sampler knew.

        See `Sampler.adopt`.
        """

    @abc.abstractmethod
    def share(self, ring: Ring, state: PartState, anchors: Anchors) -> ShardStats:
        """Returns what the other shards have to know.

        `mass` says how much of the whole the anchors of this shard are, on a scale that is the same
        in all shards: `draw` gives anchor i with probability m_i / mass.
        """

    @abc.abstractmethod
    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns the power of the importance weights, float32 `[]`; None is the sampler's own."""

    @abc.abstractmethod
    def sync_shards(self, state: PartState, shares: ShardStats) -> Any:
        """Returns the state that knows what all shards said, arrays `[S]`.

        Such as the greatest priority seen, `jnp.max(shares.highest)`, which new items get.
        """

    @abc.abstractmethod
    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state when there are no anchors any more: that of `init`, but for alpha."""
