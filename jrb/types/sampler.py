"""The contracts of samplers: every sampler's, and more for an order, for priorities, for shards.

Your own sampler is below `Sampler` and has at least `draw`. One for which the order of
anchors matters is below `OrderedSampler`, one with priorities below `PrioritizedSampler`, and one
that draws from shards with exact probabilities below `ShardedSampler` too. A call that needs a
method which only the sampler's author can write raises `MissingMethodError` and names it.
"""

import abc
from typing import Any, ClassVar, Literal

import jax

from jrb._xla import dependencies
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
    """Decides which anchors are drawn, and with what probability.

    Attributes:
        consumes: True if `draw` uses anchors up.
        prioritized: True below `PrioritizedSampler`, and nowhere else.
        count_draws: whether to count how often each item is drawn, int32 `[N]`; the state is then
            below `DrawCounts`, and the engine counts. `Sample.info["draws"]`, int32 `[B]`, has the
            draws of each item before this one, and `jrb.stats` those of all items. `draw` counts,
            `sample` does not; an item that stands twice in a batch counts twice; a new item counts
            from 0.
    """

    consumes: ClassVar[bool] = False
    prioritized: ClassVar[bool] = False
    count_draws: bool = False

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
        """Returns the state of a buffer without anchors; by default it keeps counts at most."""
        return DrawCounts() if self.count_draws else {}

    def on_write(self, ring: Ring, state: PartState, change: AnchorUpdate, anchors: Anchors) -> Any:
        """Returns the state after anchors entered and departed.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            change: the anchors that departed, then those that entered: a slot may be in both.
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
        """Draws a batch.

        Read large arrays of the state by `jrb.authoring.materialize` or in a loop, and compute the
        slots from these reads: a later write waits for the slots, and is then done in place.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            anchors: the anchors there are.
            key: a PRNG key. It is consumed.
            batch_size: B.
            beta: the exponent of importance weights, float `[]`; None for the sampler's own.

        Returns:
            The state after the draw, and the draw, arrays `[B]`.
        """

    def ready(self, state: PartState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if a draw would give at least one item, bool `[]`."""
        return anchors.count > 0

    def import_state(
        self, state: PartState, old: PartState, slots: jax.Array, new_slots: jax.Array
    ) -> Any:
        """Returns the state with what another buffer's sampler of this class knew of the items.

        By default raises MissingMethodError if the state has arrays other than counts of draws.

        Args:
            state: the state after the items were written.
            old: the state of the other sampler.
            slots: int32 `[K]`, where the items were.
            new_slots: int32 `[K]`, where they are.
        """
        return self._unless_stateful(state, "import_state", "rebuild")

    def rebuild_index(
        self, ring: Ring, state: PartState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Any:
        """Returns the state after ends of episodes were edited, which changes all anchors.

        By default raises MissingMethodError if the state has arrays other than counts of draws.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            entered: int32 `[K]`, the slots of all anchors; N or more for padding.
            old: the anchors before.
            new: the anchors now.
        """
        return self._unless_stateful(state, "rebuild_index", "set")

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without anchors, by default that of `init` in the memory of `state`.

        Overwrite large arrays after the token, an int32 zero, by `jrb.authoring.overwrite`.
        """
        draws = state.draws if isinstance(state, DrawCounts) else None  # 0 again when written
        own = state if draws is None else state.replace(draws=None)
        own = dependencies.restored(own, lambda: self.init(ring), token)
        return own if draws is None else own.replace(draws=draws)

    def _unless_stateful(self, state: PartState, method: str, verb: str) -> Any:
        """Returns the state, or raises where only the author knows what becomes of its arrays."""
        if jax.tree.leaves(state.replace(draws=None) if isinstance(state, DrawCounts) else state):
            raise missing_method(self, method, verb)
        return state


def missing_method(sampler: Sampler, methods: str, verb: str, base: str = "Sampler") -> TypeError:
    """Returns the error of a call that needs methods which the sampler does not have."""
    return MissingMethodError(
        f"{verb}: expected a sampler with a method {methods}, got {type(sampler).__name__}, for "
        f"which no default would be right. See jrb.types.{base}."
    )


class OrderedSampler(Sampler):
    """Draws by the order of anchors, such as a queue: only writers that keep one fit."""

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises ValueError if the unit's anchors, on this ring, have no order that fits."""
        return

    def num_pending(self, state: PartState, anchors: Anchors) -> jax.Array | None:
        """Returns how many of the newest anchors were not drawn yet and must be kept, int32 `[]`.

        `jrb.BlockWhenFull` does not overwrite them. None if all may be overwritten, the default of
        samplers that do not consume; others must have this method.
        """
        if self.consumes:
            raise missing_method(self, "num_pending", "rebuild", "OrderedSampler")
        return None


class PrioritizedSampler(Sampler):
    """Draws anchors by priorities that users set.

    The state keeps a priority for each slot, and the exponent alpha; more is up to the sampler.
    A template is `examples/parts/rank_based.py`.

    Attributes:
        takes_priorities: True if `on_write` uses those in `AnchorUpdate.incoming`, so that
            `add(..., priorities=)` works.
        stratified: True if a draw takes one anchor from each of B equal parts of all mass.
        normalize: the divisor of importance weights: the largest in the "batch", or the largest
            that any anchor in the "buffer" would get; None for no division. Shards use it.
    """

    prioritized: ClassVar[bool] = True
    takes_priorities: ClassVar[bool] = False
    stratified: bool = False
    # Abstract, so that an author decides: either a field of the description or a property.
    normalize: Literal["batch", "buffer"] | None = property(  # pyright: ignore
        abc.abstractmethod(lambda self: None)
    )

    def attach(self, state: PartState, has_delayed_anchors: bool) -> Any:
        """Returns the state that `init` made, perhaps with room for priorities that wait.

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

        -1 where there is no anchor, -2 where there is one that was dropped.
        """

    @abc.abstractmethod
    def update(
        self, ring: Ring, state: PartState, slots: jax.Array, priorities: jax.Array, ok: jax.Array
    ) -> Any:
        """Sets new priorities.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            slots: int32 `[B]`; those that are no anchors are left alone. If a slot stands twice,
                its last priority counts.
            priorities: float32 `[B]`; one that is NaN, infinite or negative is left out.
            ok: bool `[B]`, False for entries to leave out.
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
            priorities: real numbers `[K]`; a negative one leaves the priority as it is.
            highest: the greatest priority seen there; None for the greatest of both.
        """

    @abc.abstractmethod
    def set_alpha(self, state: PartState, alpha: jax.Array | float) -> Any:
        """Sets the exponent of the priorities, a number that may be traced.

        The state has to keep it: `empty`, `rebuild` and checkpoints leave it as it is.
        """

    @abc.abstractmethod
    def import_state(
        self, state: PartState, old: PartState, slots: jax.Array, new_slots: jax.Array
    ) -> Any:
        """Takes over priorities, alpha, and what else another state of this sampler knew."""

    @abc.abstractmethod
    def rebuild_index(
        self, ring: Ring, state: PartState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Any:
        """Keeps the priorities of anchors that stay when ends of episodes are edited.

        Slots in `entered`, int32 `[K]`, that were no anchors get the priority of new items; all
        others are anchors no more.
        """

    @abc.abstractmethod
    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without anchors: that of `init`, but for alpha."""

    def drop(self, ring: Ring, state: PartState, slots: jax.Array, ok: jax.Array) -> Any:
        """Returns the state in which some anchors are not drawn any more.

        By default raises MissingMethodError. Slots and `ok` are those of `update`.
        """
        raise missing_method(self, "drop", "drop", "PrioritizedSampler")


class ShardedSampler(Sampler):
    """Draws from shards, so that all together draw as one buffer would.

    Each shard draws its part of a batch alone. From what all shards report, `ShardStats`, the
    engine computes probabilities and importance weights over all of them. Samplers that consume
    anchors need none of this: each shard draws for itself, and weights mean nothing.

    Attributes:
        normalize: the divisor of importance weights, as of `PrioritizedSampler`.
    """

    normalize: Literal["batch", "buffer"] | None = None

    @abc.abstractmethod
    def stats(self, ring: Ring, state: PartState, anchors: Anchors) -> ShardStats:
        """Returns what the other shards have to know.

        `ShardStats.mass` says how much of the whole the anchors of this shard are, on a scale that
        is the same in all shards: `draw` gives anchor i with probability m_i / mass.
        `ShardStats.uniform(anchors)` from a sampler that draws all of them alike.
        """

    @abc.abstractmethod
    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns the exponent of importance weights, float32 `[]`; 0 if all weights are 1.

        `beta` is None for the sampler's own.
        """

    def for_shard(self, num_shards: int) -> "ShardedSampler":
        """Returns the sampler of one of `num_shards` shards, which together draw as this one."""
        return self

    def sync_shards(self, state: PartState, stats: ShardStats) -> Any:
        """Returns the state of this shard after a draw; `stats` is of all shards, arrays `[S]`.

        For example, new items get `jnp.max(stats.max_priority)`, the greatest priority of all.
        """
        return state

    def concat_shard_states(self, states: list[PartState]) -> Any:
        """Returns the states of several shards as one, for `import_state`.

        Slot s of shard k becomes slot k N + s. The engine takes care of counts of draws. By default
        raises MissingMethodError if states have other arrays.
        """
        return self._unless_stateful(states[0], "concat_shard_states", "rebuild")
