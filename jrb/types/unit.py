"""The contract of units."""

import abc
from typing import Any, ClassVar, NoReturn

import jax
import numpy as np

from jrb._util import checks, pytree
from jrb._xla import dependencies
from jrb.keys import Keys, Path
from jrb.ring import Ring
from jrb.types.messages import (
    Anchors,
    AnchorUpdate,
    Context,
    Item,
    MissingMethodError,
    PartState,
    ReadPlan,
    WritePlan,
)
from jrb.types.sampler import Sampler
from jrb.types.writer import Writer


class Unit(abc.ABC):
    """Decides what one anchor stands for. A template is `examples/parts/previous_action.py`.

    A unit has to write `max_entry_delay`, `lookback`, `init`, `on_write`, `anchors`, `plan_read`,
    `reduce`, `truncate` and `is_episode_end`; the rest has defaults. `jrb.ReplayBuffer.set` of the
    flags that end episodes makes the unit's state anew by `init` and `on_write`.

    Attributes:
        one_row: True if items are drawn as they are stored, all leaves at the anchor.
    """

    one_row: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def max_entry_delay(self) -> int | None:
        """The most rows by which an anchor may be older than one that entered before it.

        0 if anchors enter in the order of their rows, also if all wait equally long; None if they
        are not rows. For samplers that need an order, and for units that contain other units.
        """

    @property
    def has_delayed_anchors(self) -> bool:
        """True if rows may become anchors later than they are written.

        The default is safe; False saves a sampler with priorities an array `[N]`.
        """
        return True

    @property
    @abc.abstractmethod
    def lookback(self) -> int:
        """The rows before an anchor that may be read for it.

        They are not overwritten while the anchor waits to be drawn (`jrb.BlockWhenFull`).
        """

    @property
    def row_steps(self) -> np.ndarray | None:
        """The rows from the anchor to each row of a window, int `[L]`; None without windows.

        The columns are those of `Sample.mask`, `[B, L]`. A masked entry may be of any row.
        """
        return None

    @property
    def goals(self) -> tuple[Path, ...]:
        """The paths to leaves that are compared with each other, and so are of one shape."""
        return ()

    @property
    def requires_contiguous_history(self) -> bool:
        """True if the unit reads rows before an anchor, or whole episodes.

        Environments cannot be concatenated then, as a rebuild to fewer of them would.
        """
        return self.lookback > 0

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises if the unit does not fit the ring or another part.

        By default, rows have to be in order of time, unless the unit is `one_row`.
        """
        # A unit that looks at its anchor alone does not care in which order rows were written.
        if not self.one_row:
            checks.chronological(type(self).__name__, writer)

    @abc.abstractmethod
    def init(self, context: Context, spec: Item) -> Any:
        """Returns the state when nothing is held; `spec` is of one item, to be checked."""

    @abc.abstractmethod
    def on_write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, AnchorUpdate]:
        """Returns the state after a write, and what it does to the anchors."""

    @abc.abstractmethod
    def anchors(self, context: Context, state: PartState) -> Anchors:
        """Returns the anchors. If `plan_read` masks every one of a batch, the draw raises."""

    @abc.abstractmethod
    def plan_read(
        self, context: Context, state: PartState, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> ReadPlan:
        """Returns what to read for these anchors.

        Args:
            context: the buffer's context.
            state: the unit's state. Its arrays are read by `jrb.authoring.read_rows`, or for
                `Sample.info` by an `AuxRead`.
            slots: int32 `[B]`, the anchors.
            mask: bool `[B]`, False where nothing was drawn.
            key: the draw's key; `jax.random.fold_in` makes one of the unit's own from it.
        """

    @abc.abstractmethod
    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Returns `Sample.data` and `Sample.info` from what was read.

        An `AuxRead` in `plan.info` is left there: its value comes into `Sample.info` afterwards.
        """

    @abc.abstractmethod
    def truncate(
        self, context: Context, state: PartState, which: jax.Array
    ) -> tuple[Any, AnchorUpdate | None]:
        """Ends the episodes of some environments, bool `[E]`, at the newest row.

        Returns:
            The state, and what it did to the anchors; None where none come or go.
        """

    @abc.abstractmethod
    def is_episode_end(self, context: Context, state: PartState, slots: jax.Array) -> jax.Array:
        """Returns True of rows after which time does not go on, bool like `slots`.

        A unit that looks at no other row than its anchor may know of none.
        """

    def episode_step(self, state: PartState, slots: jax.Array) -> jax.Array | None:
        """Returns how many rows of its episode came before each slot; None if it does not matter.

        By default raises MissingMethodError if the unit reads rows before an anchor.
        """
        if self.lookback:
            self._lacks("episode_step")
        return None

    def init_mid_episode(self, state: PartState, before: jax.Array) -> Any:
        """Returns an empty state whose next rows come after others of their episodes.

        By default raises MissingMethodError if the unit reads rows before an anchor.

        Args:
            state: without rows.
            before: int32 `[E]`, how many rows came before; they are not held.
        """
        if self.lookback:
            self._lacks("init_mid_episode")
        return state

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shapes that `reduce_priorities` takes, for a mask of this shape."""
        return []

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns one priority for each anchor, float32 `[B]`, from those of rows, `[B, L]`."""
        raise TypeError(
            f"update_priority: expected a unit with a method reduce_priorities, got "
            f"{type(self).__name__}. See jrb.types.Unit."
        )

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state when nothing is held any more; arrays are written after the token.

        By default `cursor()` and `tally()` fields become 0 (`jrb.authoring.emptied`). Raises
        MissingMethodError if the state has other arrays: only the unit knows what they mean.
        """
        nothing: Any = None
        others = pytree.leaf_names(pytree.mapped_marks(state, lambda mark, value: nothing))
        if others:
            self._lacks("reset", f", as its state has the arrays {others}")
        return dependencies.emptied(state, token)

    def _lacks(self, method: str, why: str = "") -> NoReturn:
        raise MissingMethodError(
            f"expected a unit with a method {method}, got {type(self).__name__}{why}. "
            f"See jrb.types.Unit.{method}."
        )
