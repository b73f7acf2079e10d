"""The contract of transforms."""

import abc
from typing import Any, ClassVar

import jax

from jrb._util import pytree
from jrb.types.messages import Context, Item, PartState, TransformContext


class Transform(abc.ABC):
    """Changes data on the way out of a buffer.

    Any function from data to data will do as well; this is for those that must know more. One with
    a method `inverse(item)` is undone on the way in, item by item.
    """

    @abc.abstractmethod
    def apply(self, data: Item, batch: TransformContext) -> Item:
        """Returns changed data; leaves are `[B, ...]` or `[B, L, ...]`."""


class StatefulTransform(Transform):
    """A transform that learns from what is written, such as running statistics.

    Items stay as they are stored: `apply` finds the newest state in `batch.state`. The states of a
    buffer are in `BufferState.transforms`, in the order of the transforms that have one. Emptying
    the buffer leaves them as they are.

    Attributes:
        unbound: names of fields on which no state depends.
    """

    unbound: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def init(self, context: Context, spec: Item) -> PartState:
        """Returns the state before any write; `spec` is of an item as `on_write` sees it."""

    @abc.abstractmethod
    def on_write(
        self,
        context: Context,
        state: PartState,
        items: Item,
        mask: jax.Array,
        ended: jax.Array,
    ) -> PartState:
        """Returns the state after a write, to rounding the same however rows are cut into calls.

        Args:
            context: the buffer's context before the write.
            state: what this returned last.
            items: as the transforms before this one make them of single items, `[T, E, ...]`.
            mask: bool `[T, E]`, which of them are written.
            ended: bool `[T, E]`, which of those end an episode.
        """

    def truncate(self, state: PartState, which: jax.Array) -> Any:
        """Returns the state after some environments, bool `[E]`, were reset; unchanged here."""
        return state

    def import_state(self, state: PartState, old: PartState) -> Any:
        """Returns the state in a rebuilt buffer, by default all that the old one had learned.

        Args:
            state: learned from the items that came along.
            old: of a transform of the same class, though its arrays may be others.
        """
        return old if pytree.alike(state, old) else state
