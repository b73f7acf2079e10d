"""The base class of units."""

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
    Draw,
    Item,
    MissingMethodError,
    PartState,
    ReadPlan,
    WritePlan,
)
from jrb.types.sampler import Sampler
from jrb.types.writer import Writer


class Unit(abc.ABC):
    """Decides which data an anchor stands for, such as a transition, n steps or a sequence.

    Subclasses must write `max_entry_delay`, `lookback`, `init`, `on_write`, `anchors`, `plan_read`,
    `reduce`, `truncate` and `is_episode_end`; all else has defaults. If `jrb.ReplayBuffer.set`
    edits the flags that end episodes, `init` and `on_write` make the state again. A template is
    `examples/parts/previous_action.py`.

    Attributes:
        one_row: True if a sample is the item at the anchor as it is stored.
        anchors_per_entry: M, the most anchors that an entry of a batch stands for. If it is more
            than 1, `arrange` assigns anchors to entries.
    """

    one_row: ClassVar[bool] = False
    anchors_per_entry: ClassVar[int] = 1

    @property
    @abc.abstractmethod
    def max_entry_delay(self) -> int | None:
        """The most rows by which an anchor can be older than an anchor that entered before it.

        It is 0 if anchors enter in the order of their rows, even if all wait equally long; None if
        ranks stand for episodes. Samplers that need an order and units around other units use it.
        """

    @property
    def has_delayed_anchors(self) -> bool:
        """True if rows may become anchors later than they are written.

        True, the default, is always correct; False saves prioritized samplers an array `[N]`.
        """
        return True

    @property
    def anchors_are_rows(self) -> bool:
        """True if every row becomes an anchor, all environments of a row together.

        False, the default, is always correct; then `jrb.Queue` takes no stride.
        """
        return False

    @property
    @abc.abstractmethod
    def lookback(self) -> int:
        """The number of rows before an anchor that may be read for it.

        They are not overwritten while the anchor waits to be drawn (`jrb.BlockWhenFull`).
        """

    @property
    def anchor_rows(self) -> int:
        """The rows of a long episode with which it has its first anchor; 1 by default."""
        return 1

    @property
    def row_steps(self) -> np.ndarray | None:
        """The rows from the anchor to each row of its window, int `[L]`; None without windows.

        They belong to the columns of `Sample.mask`, `[B, L]`. A masked entry may come from any row.
        """
        return None

    def rows_of(self, ring: Ring, sample: Any, length: int) -> tuple[jax.Array, jax.Array]:
        """Returns the slots of the last `length` rows of sampled windows, and their generations.

        Both are `[B, length]`, int32 and uint32. Only units with `row_steps` are asked, for a
        writer with `generation_is_lap`.
        """
        # Rows of a window have the stamp of its anchor, or one lap more or less across the seam.
        steps: Any = self.row_steps
        slots, laps = ring.rows_near(sample.indices, steps[-length:])
        return slots, sample.stamp[:, None] + laps

    @property
    def goals(self) -> tuple[Path, ...]:
        """The paths of leaves that are compared with each other, and so must have one shape."""
        return ()

    @property
    def anchor_requirement(self) -> str:
        """Sentences on the rows that an anchor needs besides its own, and how to get them, or "".

        Errors of draws that find no anchor quote it: "An anchor needs 8 rows of one episode. ...".
        By default "", which is right if every stored row is an anchor.
        """
        return ""

    @property
    def requires_contiguous_history(self) -> bool:
        """True if the unit reads rows before an anchor, or complete episodes.

        Then `jrb.rebuild` to fewer environments, which concatenates environments, is refused.
        """
        return self.lookback > 0

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises if the unit does not fit the ring, the sampler or the writer.

        By default, the writer must keep rows in the order of time unless `one_row` is True.
        """
        # A unit that reads only the row of its anchor works with any order of rows.
        if not self.one_row:
            checks.chronological(type(self).__name__, writer)

    @abc.abstractmethod
    def init(self, context: Context, spec: Item) -> Any:
        """Returns the state of an empty buffer; raises if the spec of an item does not fit."""

    @abc.abstractmethod
    def on_write(
        self, context: Context, state: PartState, plan: WritePlan, items: Item
    ) -> tuple[Any, AnchorUpdate]:
        """Returns the state after a write, and how the write changed the anchors."""

    @abc.abstractmethod
    def anchors(self, context: Context, state: PartState) -> Anchors:
        """Returns the anchors. A draw raises if `plan_read` masks every anchor of the batch."""

    def arrange(self, context: Context, state: PartState, drawn: Draw) -> tuple[Draw, jax.Array]:
        """Assigns drawn anchors to the entries of a batch, if `anchors_per_entry` is more than 1.

        Args:
            context: the buffer's context.
            state: the unit's state.
            drawn: arrays `[B M]`.

        Returns:
            The draw, arrays `[B M]`, of which M after another are for one entry, with a mask; and
            how many of the first drawn anchors have room, int32 `[]`. The sampler takes the others
            back.
        """
        self._lacks("arrange")

    @abc.abstractmethod
    def plan_read(
        self, context: Context, state: PartState, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> ReadPlan:
        """Returns the slots to read for a batch of anchors.

        Args:
            context: the buffer's context.
            state: the unit's state. Read its arrays with `jrb.authoring.read_rows`, or with an
                `AuxRead` if the result goes to `Sample.info`.
            slots: int32 `[B]`, the anchors; `[B M]` if an entry has M of them.
            mask: bool like `slots`, False where nothing was drawn.
            key: the key of the draw; use `jax.random.fold_in` to derive other keys from it.
        """

    @abc.abstractmethod
    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Returns `Sample.data` and `Sample.info`, made from the leaves that were read.

        Leave an `AuxRead` in `plan.info` as it is: the engine puts its value into `Sample.info`.
        """

    @abc.abstractmethod
    def truncate(
        self, context: Context, state: PartState, which: jax.Array
    ) -> tuple[Any, AnchorUpdate | None]:
        """Ends the running episodes of the environments `which`, bool `[E]`, at their newest rows.

        Returns:
            The state; and how it changed the anchors, None if none enter or depart.
        """

    @abc.abstractmethod
    def is_episode_end(self, context: Context, state: PartState, slots: jax.Array) -> jax.Array:
        """Returns True for slots whose row is the last of its episode, bool like `slots`.

        A unit that reads only the row of its anchor may return False for all.
        """

    def episode_step(self, state: PartState, slots: jax.Array) -> jax.Array | None:
        """Returns how many rows of its episode come before each slot; None if it does not matter.

        By default raises MissingMethodError if the unit reads rows before an anchor.
        """
        if self.lookback:
            self._lacks("episode_step")
        return None

    def init_mid_episode(self, state: PartState, before: jax.Array) -> Any:
        """Returns the state of an empty buffer in which the next rows continue running episodes.

        By default raises MissingMethodError if the unit reads rows before an anchor.

        Args:
            state: the state of an empty buffer.
            before: int32 `[E]`, the number of rows of the running episode that are not held.
        """
        if self.lookback:
            self._lacks("init_mid_episode")
        return state

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shapes of priorities that `reduce_priorities` takes, given the mask's."""
        return []

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns one priority for each anchor, float32 `[B]`, from those of its rows, `[B, L]`."""
        raise TypeError(
            f"update_priority: expected a unit with a method reduce_priorities, got "
            f"{type(self).__name__}. See jrb.types.Unit."
        )

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state of the emptied buffer. Writes to arrays must wait for `token`, a zero.

        By default sets `cursor()` and `tally()` fields to 0 (`jrb.authoring.empty_state`), and
        raises MissingMethodError if the state has other arrays, for which there is no default.
        """
        # Leave out the marked fields, which are set to 0: no other array has a default.
        nothing: Any = None
        others = pytree.leaf_names(pytree.map_marks(state, lambda mark, value: nothing))
        if others:
            self._lacks("reset", f", as its state has the arrays {others}")
        return dependencies.empty_state(state, token)

    def _lacks(self, method: str, why: str = "") -> NoReturn:
        raise MissingMethodError(
            f"expected a unit with a method {method}, got {type(self).__name__}{why}. "
            f"See jrb.types.Unit.{method}."
        )
