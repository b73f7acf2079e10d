"""The base classes of transforms."""

import abc
from typing import Any, ClassVar

import jax

from jrb._util import pytree
from jrb.types.messages import Context, Item, PartState, TransformContext
from jrb.types.unit import Unit


class Transform(abc.ABC):
    """Changes data on the way out of a buffer.

    A plain function from data to data can be a transform too; this class is for transforms that
    need a `TransformContext`. If a transform has a method `inverse(item)`, the buffer applies it to
    each item before it is stored.
    """

    @abc.abstractmethod
    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns the changed data; its leaves are `[B, ...]` or `[B, L, ...]`."""

    def check(self, unit: Unit) -> None:  # noqa: B027
        """Raises if the transform does not fit the buffer's unit; by default, it fits all."""


class StatefulTransform(Transform):
    """A transform that learns from the items that are written, such as running statistics.

    Items are stored unchanged: `apply` gets the newest state in `batch.state`.
    `BufferState.transforms` has the states, in the order of the transforms that have one. Emptying
    the buffer keeps them.

    Attributes:
        unbound: the names of fields on which no state depends.
    """

    unbound: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def init(self, context: Context, spec: Item) -> PartState:
        """Returns the state before any write; `spec` describes one item as `on_write` gets it."""

    @abc.abstractmethod
    def on_write(
        self,
        context: Context,
        state: PartState,
        items: Item,
        mask: jax.Array,
        ended: jax.Array,
    ) -> PartState:
        """Returns the state after a write; how rows are cut into calls changes only its rounding.

        Args:
            context: the buffer's context before the write.
            state: the state before the write.
            items: leaves `[T, E, ...]`, to which the transforms before this one were applied.
            mask: bool `[T, E]`, True for items that are written.
            ended: bool `[T, E]`, True for written items that end an episode.
        """

    def truncate(self, state: PartState, which: jax.Array) -> Any:
        """Returns the state after environments `which`, bool `[E]`, were reset; here unchanged."""
        return state

    def import_state(self, state: PartState, old: PartState) -> Any:
        """Returns the state for a rebuilt buffer: by default `old`, if its arrays fit.

        Args:
            state: the state after the items were written to the rebuilt buffer.
            old: the state in the old buffer, of the same class of transform; its arrays may differ.
        """
        return old if pytree.are_alike(state, old) else state
