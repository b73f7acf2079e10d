"""The contract of samplers."""

import abc
from typing import Any, ClassVar, Literal, NoReturn

import jax
import jax.numpy as jnp

from jrb._base import ordering
from jrb.ring import Ring
from jrb.types.messages import Anchors, Change, Draw, DrawCounts, Item, PartState, Share


class Sampler(abc.ABC):
    """Which anchors next, and with what probability?

    Attributes:
        in_order: whether the order of anchors matters to what it draws.
        consumes: whether `draw` uses anchors up.
        prioritized: whether anchors have priorities: then it has `update`, `set_alpha`, `assign`.
        takes_priorities: whether `on_write` looks at those in `Change.given`.
        counted: whether it is counted how often each item is drawn, int32 `[N]`: then its state is
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
    counted: bool = False
    stratified: bool = False
    normalize: Literal["batch", "buffer"] | None = None

    def init(self, ring: Ring) -> Any:
        """The state when there are no anchors; by default, counts at most."""
        return DrawCounts(draws=self.no_draws(ring)) if self.counted else {}

    def no_draws(self, ring: Ring) -> jax.Array | None:
        """What `DrawCounts.draws` is when nothing was drawn."""
        return jnp.zeros(ring.capacity, jnp.int32) if self.counted else None

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises if the sampler does not fit the ring, or the unit whose anchors it draws."""
        return

    def joined(self, state: PartState, waits: bool) -> Any:
        """The state, empty, when a buffer begins to tell it of every anchor.

        Args:
            state: what `init` made.
            waits: whether rows may become anchors later than they are written.
        """
        return state

    def given(self, items: Item) -> jax.Array | None:
        """The priorities that items bring along, real `[T, E]`; None for those of new items.

        Args:
            items: what will be written, leaves `[T, E, ...]`.
        """
        return None

    def on_write(self, ring: Ring, state: PartState, change: Change, anchors: Anchors) -> Any:
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

        Large arrays of the state are read by `jrb._base.ordering.read` or in a loop, and the slots
        are not known before these reads: then a write that waits for the slots is done in place.
        """

    def ready(self, state: PartState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Bool `[]`: whether a draw would give at least one item."""
        return anchors.count > 0

    def of_shard(self, shards: int) -> "Sampler":
        """The sampler of one of so many shards, which together do what this one would."""
        return self

    def share(self, ring: Ring, state: PartState, anchors: Anchors) -> Share | None:
        """What other shards have to know, so that all together draw as one buffer would.

        By default all anchors are alike. None if each shard goes its own way, and weights mean
        nothing.
        """
        if self.consumes:
            return None
        return Share(
            count=anchors.count,
            mass=anchors.count.astype(jnp.float32),
            alike=anchors.count,
            smallest=jnp.ones((), jnp.float32),
            highest=jnp.zeros((), jnp.float32),
        )

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """The power of the importance weights, float32 `[]`; `beta` is None for the sampler's own.

        By default none: all weights are 1.
        """
        return jnp.zeros((), jnp.float32)

    def heed(self, state: PartState, shares: Share) -> Any:
        """The state that knows what all shards said, arrays `[S]`."""
        return state

    def unread(self, state: PartState, anchors: Anchors) -> jax.Array | None:
        """int32 `[]`: how many of the last anchors may not be lost, for writers that see to it.

        None if nothing that is held may be.
        """
        return None

    def has_unread(self, state: PartState) -> jax.Array:
        """Bool `[]`: whether there is something left of an order that may not be lost."""
        return jnp.bool_(False)

    def adopt(self, state: PartState, old: PartState, slots: jax.Array, places: jax.Array) -> Any:
        """Takes over what another buffer's sampler knew of its anchors.

        Args:
            state: the sampler's state, after the items were written.
            old: the other sampler's state.
            slots: int32 `[K]`, where the items were.
            places: int32 `[K]`, where they are.
        """
        return state

    def merged(self, states: list[PartState]) -> Any:
        """What several shards' samplers knew of their anchors, for `adopt`: one after the other.

        By default how often each was drawn, if that is counted.
        """
        first = states[0]
        if not isinstance(first, DrawCounts) or first.draws is None:
            return first
        return first.replace(draws=jnp.concatenate([jnp.asarray(one.draws) for one in states]))

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
        """Priorities that come from elsewhere, such as another buffer."""
        self._refuse("assign")

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

    def relearn(
        self, ring: Ring, state: PartState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> Any:
        """Learns that all anchors were counted anew, as some ends of episodes were edited.

        Args:
            ring: the ring's shape.
            state: the sampler's state.
            entered: int32 `[K]`, the slots of all anchors; N or more where there is none.
            old: the anchors before.
            new: the anchors now.
        """
        change = Change(
            entered=entered,
            consecutive=False,
            expired=None,
            most=None,
            removed=jnp.zeros(0, jnp.int32),
            entered_count=new.count,
            left_count=old.count,
            left_from=lambda place: jnp.maximum(old.count - place, 0),
            moved=jnp.bool_(True),
        )
        return self.on_write(ring, state, change, new)

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """The state when there are no anchors any more.

        Large arrays are overwritten after the token, an int32 zero (see `jrb._base.ordering`).
        """
        return ordering.emptied(state, token)
