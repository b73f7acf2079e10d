"""The contract of samplers."""

import abc
from typing import Any, ClassVar, NoReturn

import jax

from jrb._base import ordering
from jrb.ring import Ring
from jrb.types.messages import Anchors, Change, Draw, PartState


class Sampler(abc.ABC):
    """Which anchors next, and with what probability?

    Attributes:
        in_order: whether it draws anchors in their order.
        consumes: whether `draw` uses anchors up.
        prioritized: whether anchors have priorities: then it has `update`, `set_alpha`, `assign`.
    """

    in_order: ClassVar[bool] = False
    consumes: ClassVar[bool] = False
    prioritized: ClassVar[bool] = False

    def init(self, ring: Ring) -> Any:
        """The state when there are no anchors; by default there is nothing to remember."""
        return {}

    def joined(self, state: PartState) -> Any:
        """The state, empty, when a buffer begins to tell it of every anchor."""
        return state

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

    def has_unread(self, state: PartState) -> jax.Array:
        """Bool `[]`: whether there is something left of an order that may not be lost."""
        return jax.numpy.bool_(False)

    def adopt(self, state: PartState, old: PartState, slots: jax.Array, places: jax.Array) -> Any:
        """Takes over what another buffer's sampler knew of its anchors.

        Args:
            state: the sampler's state, after the items were written.
            old: the other sampler's state.
            slots: int32 `[K]`, where the items were.
            places: int32 `[K]`, where they are.
        """
        return state

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

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """The state when there are no anchors any more.

        Large arrays are overwritten after the token, an int32 zero (see `jrb._base.ordering`).
        """
        return ordering.emptied(state, token)
