"""The base classes of samplers: one for all, and others for order, limits, priorities and shards.

A sampler of your own is a subclass of `Sampler` with at least the method `draw`. Subclass
`OrderedSampler` if the order of anchors matters, `PrioritizedSampler` if anchors have priorities,
`LimitedSampler` if it can limit how often an item is drawn, and also `ShardedSampler` if shards
must draw with exact probabilities. A call that needs a method for which there is no default raises
`MissingMethodError`, which names the method.
"""

import abc
from typing import Any, ClassVar, Literal

import jax

from jrb._util import checks
from jrb._xla import dependencies
from jrb.keys import Path
from jrb.ring import Ring
from jrb.types.messages import (
    Anchors,
    AnchorUpdate,
    Draw,
    DrawCounts,
    MissingMethodError,
    PartState,
    ShardStats,
)


class Sampler(abc.ABC):
    """Decides which anchors are drawn, and with which probability.

    Attributes:
        consumes: True if a draw changes which anchors later draws can return, as for a queue.
        prioritized: True for subclasses of `PrioritizedSampler`, and only for them.
        row_by_row: True if what a written row does depends on the rows before it in one call: then
            `on_write` is called for one row at a time.
        count_draws: if True, the engine counts how often each item is drawn, int32 `[N]`, in the
            sampler's state, which must be a `DrawCounts`. `Sample.info["draws"]`, int32 `[B]`, is
            the number of earlier draws of each item, and `jrb.stats` summarizes the draws of all
            items. `draw` counts, `sample` does not; an item that is in a batch twice counts twice;
            a new item starts at 0.
        max_draws: the number of draws after which an item is used up; None except for subclasses of
            `LimitedSampler`.
        reads: the paths of leaves whose values in all slots a draw needs, in `Anchors.facts`; None
            for a sampler that needs no facts. Items must then be on the device, and `sample` and
            `draw` take a `context`.
        reads_written: the paths of leaves of which `on_write` gets the values in written items, in
            `AnchorUpdate.incoming`. They cannot be edited.
    """

    consumes: ClassVar[bool] = False
    prioritized: ClassVar[bool] = False
    row_by_row: ClassVar[bool] = False
    reads: ClassVar[tuple[Path, ...] | None] = None
    reads_written: ClassVar[tuple[Path, ...]] = ()
    count_draws: bool = False
    max_draws: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # By name, as `OrderedSampler` is a subclass of this class and not defined yet.
        ordered = {"check", "num_pending"} & vars(cls).keys()
        if ordered and "OrderedSampler" not in [base.__name__ for base in cls.__mro__]:
            raise TypeError(
                f"{cls.__name__}.{min(ordered)}: expected a class below jrb.types.OrderedSampler, "
                "as only the methods of those are called."
            )

    def init(self, ring: Ring) -> Any:
        """Returns the state of a buffer without anchors: by default nothing but counts of draws."""
        return DrawCounts() if self.count_draws else {}

    def on_write(self, ring: Ring, state: PartState, change: AnchorUpdate, anchors: Anchors) -> Any:
        """Returns the state after anchors entered and departed.

        It is not called if the state has no arrays, as there is nothing to update.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            change: the anchors that departed, then those that entered; a slot may be in both.
            anchors: the anchors after the write.
        """
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
        """Draws a batch of anchors.

        Read large arrays of the state in `jrb.authoring.materialize` or in a loop, and compute the
        slots from these reads: later writes then wait for the slots and happen in place.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            anchors: the anchors to draw from.
            key: a PRNG key. It is consumed.
            batch_size: B.
            beta: the exponent of importance weights, float `[]`; None for the sampler's own.

        Returns:
            The state after the draw; and the drawn anchors, arrays `[B]`.
        """

    def ready(self, state: PartState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if a draw would give at least one item, bool `[]`."""
        return anchors.count > 0

    def put_back(self, state: PartState, mask: jax.Array, kept: jax.Array) -> Any:
        """Returns the state after a draw as if only its first `kept` anchors had been drawn.

        `mask` is that of the draw, bool `[B]`, and `kept` is int32 `[]`. A unit that packs several
        anchors into one entry may have no room for all. By default raises MissingMethodError if the
        sampler consumes anchors.
        """
        # Draws of a limited number are counted later, and only those that remain.
        if self.consumes and self.max_draws is None:
            raise missing_method(self, "put_back", "draw")
        return state

    def import_state(
        self, state: PartState, old: PartState, slots: jax.Array, new_slots: jax.Array
    ) -> Any:
        """Takes over what the state `old` of another buffer knew about items that were copied.

        By default raises MissingMethodError if the state has arrays other than counts of draws.

        Args:
            state: the state of this buffer after the items were written.
            old: the state of the same sampler in the other buffer.
            slots: int32 `[K]`, the slots of the items in the other buffer.
            new_slots: int32 `[K]`, their slots in this buffer.
        """
        return self._unless_stateful(state, "import_state", "rebuild")

    def rebuild_index(
        self, ring: Ring, state: PartState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Any:
        """Returns the state for new anchors, after an edit changed where episodes end.

        By default raises MissingMethodError if the state has arrays other than counts of draws.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            entered: int32 `[K]`, the slots of all anchors; N or more for padding.
            old: the anchors before the edit.
            new: the anchors after the edit.
        """
        return self._unless_stateful(state, "rebuild_index", "set")

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without anchors: by default that of `init`, in the memory of `state`.

        Use `jrb.authoring.overwrite` for large arrays: they then wait for `token`, an int32 zero.
        """
        # Counts of draws stay, as a new item in a slot sets its count to 0.
        others = dependencies.overwrite_with(_without_counts(state), lambda: self.init(ring), token)
        if not isinstance(state, DrawCounts):
            return others
        return others.replace(draws=state.draws, drawable=state.drawable)

    def _unless_stateful(self, state: PartState, needed: str, method: str) -> Any:
        """Returns `state`; raises if it has other arrays than counts: no default fits them."""
        if jax.tree.leaves(_without_counts(state)):
            raise missing_method(self, needed, method)
        return state


def _without_counts(state: PartState) -> Any:
    is_counted = isinstance(state, DrawCounts)
    return state.replace(draws=None, drawable=None) if is_counted else state


def missing_method(sampler: Sampler, needed: str, method: str, base: str = "Sampler") -> TypeError:
    """Returns the error of `method`, which needs a method that the sampler does not have."""
    return MissingMethodError(
        f"{method}: expected a sampler with a method {needed}, got {type(sampler).__name__}, for "
        f"which no default would be right. See jrb.types.{base}."
    )


class OrderedSampler(Sampler):
    """A sampler that uses the order of anchors, such as a queue. Environments share one clock."""

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises ValueError if the unit's anchors enter in an order that the sampler cannot use."""
        return

    def num_pending(self, state: PartState, anchors: Anchors) -> jax.Array | None:
        """Returns how many of the newest anchors were not drawn yet and must be kept, int32 `[]`.

        `jrb.BlockWhenFull` does not overwrite them. Returns None if all may be overwritten, except
        anchors with draws left if there is a limit of draws: the default. Samplers that consume
        without such a limit must write this method.
        """
        if self.consumes and self.max_draws is None:
            raise missing_method(self, "num_pending", "rebuild", "OrderedSampler")
        return None


class LimitedSampler(Sampler):
    """A sampler with a field `max_draws`, the number of draws after which an item is used up.

    The engine counts draws, and passes only anchors that have draws left to `draw`, `ready` and
    `stats`: in the order of their slots, or from the oldest row to the newest for an
    `OrderedSampler`. From samplers with priorities it drops all others. Of an item that is in a
    batch more often than it has draws left, the last entries are masked. Units whose ranks stand
    for several slots must refuse these samplers in `check`.
    """

    consumes: ClassVar[bool] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: self.max_draws is not None
    )

    def __post_init__(self) -> None:
        checks.flag("count_draws", self.count_draws)
        if self.max_draws is not None:
            checks.count("max_draws", self.max_draws, 2**30)
            # A limit needs the counts.
            object.__setattr__(self, "count_draws", True)


class PrioritizedSampler(Sampler):
    """A sampler that draws anchors by priorities which users set.

    The state holds a priority for each slot, the exponent alpha, and what else the sampler needs. A
    template is `examples/parts/rank_based.py`.

    Attributes:
        takes_priorities: True if `on_write` uses the priorities in `AnchorUpdate.incoming`, so that
            `add(..., priorities=)` works.
        stratified: True if a draw takes one anchor from each of B equal parts of the total mass.
        normalize: the divisor of importance weights: "batch" for the largest weight in the batch,
            "buffer" for the largest weight that any anchor could get, None for no division.
    """

    prioritized: ClassVar[bool] = True
    takes_priorities: ClassVar[bool] = False
    stratified: bool = False
    # Abstract, so that an author decides: either a field of the description or a property.
    normalize: Literal["batch", "buffer"] | None = property(  # pyright: ignore
        abc.abstractmethod(lambda self: None)
    )

    def attach(self, state: PartState, has_delayed_anchors: bool) -> Any:
        """Returns the state that `init` made, with an array for pending priorities if needed.

        Args:
            state: the state that `init` made.
            has_delayed_anchors: True if rows may become anchors later than they are written.
        """
        return state

    @abc.abstractmethod
    def on_write(self, ring: Ring, state: PartState, change: AnchorUpdate, anchors: Anchors) -> Any:
        """Removes the priorities of anchors that departed, then sets those of anchors that entered.

        `change.departed_slots(ring)` departed. `change.entered` get the priority of new items.
        """

    @abc.abstractmethod
    def priorities(self, state: PartState) -> jax.Array:
        """Returns the priority of each slot, float32 `[N]`.

        It is -1 for a slot that is no anchor, and -2 for an anchor that was dropped or used up.
        """

    @abc.abstractmethod
    def update(
        self, ring: Ring, state: PartState, slots: jax.Array, priorities: jax.Array, ok: jax.Array
    ) -> Any:
        """Sets new priorities of anchors.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            slots: int32 `[B]`; slots that are no anchors are ignored. Of equal slots, the last
                counts.
            priorities: float32 `[B]`; those that are NaN, infinite or negative are ignored.
            ok: bool `[B]`, False for entries to ignore.
        """

    @abc.abstractmethod
    def assign(
        self,
        state: PartState,
        slots: jax.Array,
        priorities: jax.Array,
        highest: jax.Array | float | None = None,
    ) -> Any:
        """Sets priorities that come from elsewhere, such as from another buffer.

        Args:
            state: the sampler's state.
            slots: int32 `[K]`, distinct; slots that are no anchors are ignored.
            priorities: real numbers `[K]`; a negative one leaves the old priority.
            highest: the greatest priority ever seen, for new items; None for the greatest of the
                state's own and the valid ones in `priorities`.
        """

    @abc.abstractmethod
    def set_alpha(self, state: PartState, alpha: jax.Array | float) -> Any:
        """Sets the exponent of the priorities to a number, which may be traced.

        The state must hold alpha, since `empty`, `rebuild` and checkpoints keep its value.
        """

    @abc.abstractmethod
    def import_state(
        self, state: PartState, old: PartState, slots: jax.Array, new_slots: jax.Array
    ) -> Any:
        """Returns the state with priorities, alpha and whatever else `old` knew (see `Sampler`)."""

    @abc.abstractmethod
    def rebuild_index(
        self, ring: Ring, state: PartState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Any:
        """Keeps the priorities of anchors that remain after an edit changed where episodes end.

        Slots in `entered`, int32 `[K]`, that were no anchors get the priority of new items; slots
        outside it are no longer anchors.
        """

    @abc.abstractmethod
    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without anchors: that of `init`, except that alpha keeps its value."""

    def drop(self, ring: Ring, state: PartState, slots: jax.Array, ok: jax.Array) -> Any:
        """Removes anchors, `slots`, int32 `[B]`, from all later draws.

        Entries where `ok`, bool `[B]`, is False are ignored. By default raises MissingMethodError.
        """
        raise missing_method(self, "drop", "drop", "PrioritizedSampler")


class ShardedSampler(Sampler):
    """A sampler whose shards together draw as a single buffer would.

    Each shard draws its part of a batch alone. From the `ShardStats` of all shards, the engine
    computes probabilities and importance weights over all items. Samplers that consume anchors need
    none of this: each shard draws for itself, and weights have no meaning.

    Attributes:
        normalize: the divisor of importance weights, as in `PrioritizedSampler`.
    """

    normalize: Literal["batch", "buffer"] | None = None

    @abc.abstractmethod
    def stats(self, ring: Ring, state: PartState, anchors: Anchors) -> ShardStats:
        """Returns the statistics that this shard reports to the others.

        `ShardStats.mass` is the total mass of the shard's anchors, on a scale that all shards
        share: `draw` must give anchor i with probability m_i / mass. A sampler that draws all
        anchors with the same probability returns `ShardStats.uniform(anchors)`.
        """

    @abc.abstractmethod
    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns the exponent of importance weights, float32 `[]`; 0 if all weights are 1.

        `beta`, float `[]`, replaces the sampler's own; None keeps that.
        """

    def for_shard(self, num_shards: int) -> "ShardedSampler":
        """Returns the sampler for each of `num_shards` shards, which together draw as this one."""
        return self

    def sync_shards(self, state: PartState, stats: ShardStats) -> Any:
        """Returns this shard's state after a draw; `stats` has arrays `[S]`, of all shards.

        For example, new items get the priority `jnp.max(stats.max_priority)`.
        """
        return state

    def concat_shard_states(self, states: list[PartState]) -> Any:
        """Returns one state made of the states of several shards, for `import_state`.

        Slot s of shard k becomes slot k N + s. The engine concatenates counts of draws. By default
        raises MissingMethodError if the states have other arrays.
        """
        return self._unless_stateful(states[0], "concat_shard_states", "rebuild")
