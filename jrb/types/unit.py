"""The contract of units."""

import abc
from typing import Any, ClassVar

import jax
import numpy as np

from jrb._base import ordering
from jrb.keys import Keys, Path
from jrb.ring import Ring
from jrb.types.messages import Anchors, Change, Context, Item, Look, PartState, Write
from jrb.types.sampler import Sampler
from jrb.types.writer import Writer


class Unit(abc.ABC):
    """What does one anchor stand for?

    Attributes:
        one_row: whether what is drawn are items as they are stored, all leaves at the anchor.
    """

    one_row: ClassVar[bool] = False

    @property
    def lag(self) -> int | None:
        """By how many rows an anchor may be older than one that entered before it.

        0 if anchors enter in the order of their rows, None if anchors are no rows. Units that hold
        another one ask it for this.
        """
        raise TypeError(
            f"unit: expected one that says by how many rows its anchors may lag, got "
            f"{type(self).__name__} without it. Give it a `lag`, 0 if its anchors enter in the "
            "order of their rows (see jrb.types.Unit)."
        )

    @property
    def waits(self) -> bool:
        """Whether rows may become anchors later than they are written."""
        return True

    @property
    def reach(self) -> int:
        """How many rows before an anchor may be read for it."""
        return 0

    @property
    def row_steps(self) -> np.ndarray | None:
        """How many rows after its anchor each row of a window lies, int `[L]`; None without rows.

        The rows are those of `Sample.mask`, `[B, L]`; where one is not real it may lie elsewhere.
        """
        return None

    @property
    def goals(self) -> tuple[Path, ...]:
        """The paths to leaves that are compared with each other, and so are of one shape."""
        return ()

    @property
    def needs_past(self) -> bool:
        """Whether streams may not be cut and laid end to end: other items would be drawn."""
        return False

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises if the unit does not fit the ring or another part."""
        return

    @abc.abstractmethod
    def init(self, context: Context, spec: Item) -> Any:
        """The state when nothing is held."""

    @abc.abstractmethod
    def on_write(
        self, context: Context, state: PartState, write: Write, items: Item
    ) -> tuple[Any, Change]:
        """What a write does to the anchors."""

    @abc.abstractmethod
    def anchors(self, context: Context, state: PartState) -> Anchors:
        """The anchors there are."""

    @abc.abstractmethod
    def look(
        self, context: Context, state: PartState, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> Look:
        """What to read for these anchors, `[B]`.

        Args:
            context: of the buffer.
            state: the unit's state. Its arrays are read by `jrb._base.ordering.read` where that
                decides which slots are read, or which entries are real; what the user is told
                beside, by a `Lookup`. Later writes wait for nothing else.
            slots: int32 `[B]`, the anchors.
            mask: bool `[B]`, False where nothing was drawn.
            key: the draw's key, for `random_bits.fold` with a number of one's own.
        """

    @abc.abstractmethod
    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """From what was read to `Sample.data` and `Sample.info`.

        A `Lookup` in `look.info` is left there: what it tells comes into `Sample.info` afterwards.
        """

    def truncate(
        self, context: Context, state: PartState, which: jax.Array
    ) -> tuple[Any, Change | None]:
        """Ends the episodes of some environments, bool `[E]`, at the newest row.

        Returns:
            The state, and what it did to the anchors; None where none come or go.
        """
        raise TypeError(
            f"truncate: expected a unit with a method truncate, got {type(self).__name__}. "
            "See jrb.types.Unit."
        )

    def ends(self, context: Context, state: PartState, slots: jax.Array) -> jax.Array:
        """After which rows time does not go on, as far as the unit knows: bool like `slots`."""
        raise TypeError(
            f"ends: expected a unit with a method ends, got {type(self).__name__}. "
            "See jrb.types.Unit."
        )

    def rows_before(self, state: PartState, slots: jax.Array) -> jax.Array | None:
        """How many rows of its episode came before each slot, int32; None if it does not matter."""
        return None

    def resume(self, state: PartState, before: jax.Array) -> Any:
        """An empty state whose next rows have so many rows of their episodes behind them.

        Args:
            state: without rows.
            before: int32 `[E]`; those rows are not held.
        """
        return state

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that `reduce_priorities` takes, for a mask of this shape."""
        return []

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """From one for each row, float32 `[B, L]`, to one for each anchor, float32 `[B]`."""
        raise TypeError(
            f"update_priority: expected a unit with a method reduce_priorities, got "
            f"{type(self).__name__}. See jrb.types.Unit."
        )

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """The state when nothing is held any more; arrays are written after the token."""
        return ordering.emptied(state, token)
