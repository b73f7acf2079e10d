"""Windows of consecutive transitions, for recurrent networks and models of the world."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import anchor_queue, episodes, rows, whole_episodes
from jrb._core.anchor_queue import Queue
from jrb._core.episodes import Episodes
from jrb._util import checks, display, pytree
from jrb._xla import dependencies
from jrb.keys import Keys, Path, find, path_name, within
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    AuxRead,
    Context,
    ContiguousSlots,
    Item,
    ReadPlan,
    Sampler,
    SlotsForLeaf,
    Unit,
    WritePlan,
    Writer,
)
from jrb.units.transition import all_held, every_slot

_MANY = 2**30  # rows of an episode: so many are counted on from about half of it
_UNKNOWN = _MANY // 2
_LONG = 1024


class SequenceState(pytree.State):
    """What windows must know before they read; what a description does not need is None.

    Attributes:
        ended: bool `[N]`, which slots end an episode.
        before: the rows of its episode before each slot, `[N]`: uint8, 0 or 1 for more; int32 where
            a period is counted.
        length: int32 `[E]`, the rows of the running episode, as far as it matters.
        queue: the anchors, where not every row is one.
        episodes: the episodes, where these are drawn.
        rule: what anchors were counted for, no array; None where every row is one.
    """

    ended: jax.Array
    before: jax.Array
    length: jax.Array = pytree.tally()
    queue: Queue | None
    episodes: Episodes | None
    rule: tuple[Any, ...] | None = pytree.static(default=None)

    def summary(self, ring: Ring) -> dict[str, str]:
        """How many episodes have ended."""
        return {"ends of episodes": display.count(self.ended)}


@pytree.component
class Sequence(Unit):
    """L transitions in a row, of one environment and one episode, from the anchor on.

    Data have leaves `[B, burn_in + L, ...]`, and `Sample.mask`, bool of that shape, says which rows
    are real. A window never crosses the newest row, nor the end of an episode unless `across`.
    `Sample.info` has `is_first` and `is_last`, bool like the mask: which rows are the first and the
    last of their episodes, where `truncate` ended some too. They are exact: a row whose predecessor
    is no longer held is not taken for a first one. `ReplayBuffer.set` writes back into the rows of
    windows, such as recurrent states. With several environments on the device, windows
    are drawn faster with `storage=jrb.DeviceStorage(layout="environments")`.

    Attributes:
        length: L.
        burn_in: rows before the anchor that come first in the window, to warm up a recurrent state.
            Where the episode, or what is held of it, begins later, they are masked, and repeat its
            first row.
        over: what is equally likely under `Uniform`: "steps", every anchor; "episodes", every
            episode that has an anchor, the one that runs too, then every anchor in it; or "whole",
            every episode that is complete and of which the first row is held. Then the window is
            the episode, padded to L, of a longer one its first L rows, and its first row is the
            anchor.
        short: "drop" draws whole windows only; "pad" draws from every row, masks what lies behind
            the episode's last row, and repeats that row there. Of no meaning with over="whole".
        eta: how `update_priority` reduces priorities `[B, L]`, over the real rows without burn-in:
            eta * max + (1 - eta) * mean.
        first: paths to leaves that are read for the window's first row only, `[B, ...]`, such as
            the recurrent state that was stored with each row.
        period: anchors are only the rows 0, period, 2 * period, ... of an episode, counted from its
            first row, or from the first one known where a buffer was filled with less. With period
            < L windows overlap by L - period rows.
        across: whether windows run on from one episode into the next of the same environment; an
            anchor is every row from which L rows follow in time. Items need no done flag then, and
            without one `is_first` tells what `truncate` told.
        slots: whether `Sample.info` has `slots` too, int32 like the mask: where each row lies; for
            one that is masked, the row that it repeats.

    Reference: Kapturowski et al., 2019, "Recurrent experience replay in distributed reinforcement
    learning", section 2.3 (burn-in; stored states; eta = 0.9; windows that overlap by a half);
    Hafner et al., 2023, "Mastering diverse domains through world models", appendix (windows across
    episodes, with `is_first`).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> rows = {"x": jnp.arange(7), "next": {"done": jnp.arange(7) == 3}}
        >>> buffer, state = jrb.from_items(rows, unit=jrb.Sequence(3))
        >>> batch = buffer.sample(state, jax.random.key(0), batch_size=32)
        >>> sorted(set(map(tuple, batch.data["x"].tolist())))
        [(0, 1, 2), (1, 2, 3), (4, 5, 6)]
    """

    length: int
    burn_in: int = 0
    over: Literal["steps", "episodes", "whole"] = "steps"
    short: Literal["drop", "pad"] = "drop"
    eta: float = 1.0
    first: tuple[Path, ...] = ()
    period: int = 1
    across: bool = False
    slots: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.first, tuple):
            paths = tuple(self.first) if isinstance(self.first, list) else (self.first,)
            raise TypeError(f"first: expected a tuple of paths, got {self.first!r}. Write {paths}.")
        checks.count("length", self.length)
        if self.burn_in != 0:
            checks.count("burn_in", self.burn_in)
        checks.choice("over", self.over, ("steps", "episodes", "whole"))
        checks.choice("short", self.short, ("drop", "pad"))
        checks.fraction("eta", self.eta)
        checks.count("period", self.period, _UNKNOWN)
        checks.flag("across", self.across)
        checks.flag("slots", self.slots)
        self._check_together()

    def _check_together(self) -> None:
        """Raises where two options exclude each other."""
        if self.over != "steps" and (self.period > 1 or self.across):
            what = "across=True" if self.across else f"period={self.period}"
            raise ValueError(
                f"Sequence: {what}: expected over='steps', got over={self.over!r}, which counts "
                "episodes. Leave one of them out."
            )
        if self.over == "whole" and self.burn_in:
            raise ValueError(
                f"Sequence: burn_in: expected 0 with over='whole', got {self.burn_in}: nothing "
                "comes before an episode's first row. Split the window in the loss."
            )

    @property
    def _enough(self) -> int:
        """The rows that must follow an anchor, itself included."""
        return self.length if self.short == "drop" and self.over != "whole" else 1

    @property
    def _pads(self) -> bool:
        return self.short == "pad" or self.over == "whole"

    @property
    def _is_queued(self) -> bool:
        """Whether the anchors are rows, but not all of them."""
        return self.over == "steps" and (self.short == "drop" or self.period > 1)

    @property
    def _rule(self) -> tuple[Any, ...] | None:
        """What anchors are counted for; None where every row is one."""
        if self.over == "steps" and not self._is_queued:
            return None
        return self.over, self._enough, self.period, self.across

    @property
    def max_entry_delay(self) -> int | None:
        """All whole windows wait for as many rows; episodes are no rows."""
        return 0 if self.over == "steps" else None

    @property
    def has_delayed_anchors(self) -> bool:
        """First rows of whole windows wait for the last ones."""
        return self.short == "drop" or self.over != "steps"

    @property
    def lookback(self) -> int:
        """Burn-in."""
        return self.burn_in

    @property
    def info_follows_data(self) -> bool:
        """All of it is looked up together with the data."""
        return True

    @property
    def requires_contiguous_history(self) -> bool:
        """Whole episodes do: a seam would make two of one."""
        return self.over == "whole"

    @property
    def row_steps(self) -> np.ndarray:
        """Burn-in lies before the anchor."""
        return np.arange(-self.burn_in, self.length, dtype=np.int32)

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """The ring holds a window, in order of time; episodes are drawn by a fitting sampler."""
        checks.window("Sequence: burn_in + length", self.burn_in + self.length, ring.rows)
        checks.in_time("Sequence", writer)
        if self.over == "episodes" and sampler.prioritized:
            raise ValueError(
                f"Sequence: over='episodes': expected a sampler without priorities, got "
                f"{type(sampler).__name__}. It would say two things about how likely a row is: "
                "each episode alike, and each row by its priority. Use over='steps'."
            )
        if self.over != "steps" and sampler.in_order and ring.envs > 1:
            raise ValueError(
                f"Sequence: over={self.over!r}: expected a sampler that draws in any order, got "
                f"{type(sampler).__name__}. Episodes of several environments have no order of "
                "their own. Use over='steps'."
            )
        if self.period > 1 and writer.blocks_when_full:
            rows = self.burn_in + self._enough + self.period - 1
            checks.window("Sequence: burn_in + length + period - 1", rows, ring.rows)

    def init(self, context: Context, spec: Item) -> SequenceState:
        """No rows. Raises if the items have no done flag, unless windows run across ends."""
        ring = context.ring
        episodes.check(spec, context.keys, is_needed=not self.across)
        for path in self.first:
            find(spec, path, "Sequence: first")
        return SequenceState(
            ended=jnp.zeros(ring.capacity, jnp.bool_),
            before=jnp.zeros(ring.capacity, jnp.uint8 if self.period == 1 else jnp.int32),
            length=jnp.zeros(ring.envs, jnp.int32),
            queue=anchor_queue.init(context) if self._is_queued else None,
            episodes=None if self.over == "steps" else episodes.init(ring, self._enough),
            rule=self._rule,
        )

    def on_write(
        self, context: Context, state: SequenceState, write: WritePlan, items: Item
    ) -> tuple[SequenceState, AnchorUpdate]:
        """A row enters when written; whole windows and episodes do with their last row."""
        done = episodes.ending(context, write, items)
        most = self._most(context.ring)
        length, running = episodes.lengths(state.length, done, write, most)
        state = self._marked(state, write, done, length - 1, running)
        if state.queue is not None:
            entered = self._starts(context, state, write, length)
            queue, change = anchor_queue.after_write(context, state.queue, write, entered, slack=0)
            return state.replace(queue=queue), change
        if state.episodes is None:
            return state, every_slot(context, write)
        if self.over == "whole":
            table, change = whole_episodes.after_write(context, state.episodes, write, done, length)
        else:
            table, change, _ = episodes.after_write(
                context, state.episodes, write, done, self._enough
            )
        return state.replace(episodes=table), change

    def _most(self, ring: Ring) -> int:
        """Up to where the rows of an episode are counted."""
        if self.period > 1:
            return 2**31 - 1
        return ring.rows + 1 if self.over == "whole" else max(self._enough, 2)

    def _marked(
        self,
        state: SequenceState,
        write: WritePlan,
        done: jax.Array,
        before: jax.Array,
        running: jax.Array,
    ) -> SequenceState:
        """The state, but for its queue, that knows of these rows.

        Args:
            state: the one that does not.
            write: the rows.
            done: bool `[T, E]`, which end their episodes.
            before: int32 `[T, E]`, the rows of its episode before each.
            running: int32 `[E]`, the rows of the episode that goes on.
        """
        ended = rows.put(state.ended, write, done)
        later = rows.in_line(write, ended)
        if self.period == 1:
            before = jnp.minimum(before, 1)
        else:
            fewer = _UNKNOWN // self.period * self.period
            running = jnp.where(running >= _MANY, running - fewer, running)
        if self._reads_before and state.queue is not None:
            later = rows.after(later, anchor_queue.waited(state.queue))  # `before` was read for it
        return state.replace(
            ended=ended,
            before=rows.put(state.before, later, before.astype(state.before.dtype)),
            length=running,
        )

    @property
    def _reads_before(self) -> bool:
        """Whether where a window begins in its episode is told by its first row only."""
        return self.across and self.period > 1 and self.short == "drop"

    def _starts(
        self, context: Context, state: SequenceState, write: WritePlan, length: jax.Array
    ) -> jax.Array:
        """The anchors that each row completes, int32 `[T * E]`; N where it does not.

        `length`, int32 `[T, E]`, are the rows of its episode up to each row.
        """
        capacity = context.ring.capacity
        if self.short == "pad":
            at = jnp.where((length - 1) % self.period == 0, write.slots, capacity)
            return at.reshape(-1)
        whole = jnp.ones_like(length, jnp.bool_) if self.across else length >= self.length
        if self.period > 1 and not self.across:
            whole = whole & ((length - self.length) % self.period == 0)
        back = jnp.full(1, self.length - 1, jnp.int32)
        slots = anchor_queue.rows_back(context, write, back, whole[..., None])
        if not self._reads_before:
            return slots
        safe = jnp.minimum(slots, capacity - 1)
        before = rows.read(state.before, safe)
        return jnp.where(before % self.period == 0, slots, capacity)

    def truncate(
        self, context: Context, state: SequenceState, which: jax.Array
    ) -> tuple[SequenceState, AnchorUpdate | None]:
        """The newest rows end their episodes."""
        table, change = state.episodes, None
        if table is not None and self.over == "whole":
            table, change = whole_episodes.truncated(context, table, which, state.length)
        elif table is not None:
            table = episodes.truncated(table, which, self._enough)
        truncated = state.replace(
            ended=episodes.mark_newest(context, state.ended, which),
            length=jnp.where(which, 0, state.length),
            episodes=table,
        )
        return truncated, change

    def ends(self, context: Context, state: SequenceState, slots: jax.Array) -> jax.Array:
        """Those that were written or truncated so."""
        return rows.get(state.ended, slots)

    def episode_step(self, state: SequenceState, slots: jax.Array) -> jax.Array:
        """How many rows of its episode came before each slot, int32; up to 1 without a period."""
        return state.before[slots].astype(jnp.int32)

    def resume(self, state: SequenceState, before: jax.Array) -> SequenceState:
        """An empty state whose next rows have so many rows of their episodes behind them.

        Args:
            state: without rows.
            before: int32 `[E]`; those rows are not held. Where they are more than anybody knows, a
                period is counted from the next row on.
        """
        unknown = _UNKNOWN // self.period * self.period
        fits = before < (_MANY if self.period > 1 else unknown)  # a period goes on as it is counted
        table = state.episodes
        if table is not None and self.over == "whole":
            table = table.replace(length=jnp.minimum(before, 2))  # it runs, but is not in the table
        return state.replace(length=jnp.where(fits, before, unknown), episodes=table)

    def anchors(self, context: Context, state: SequenceState) -> Anchors:
        """The first rows of windows."""
        if state.queue is not None:
            return anchor_queue.anchors(context.ring, state.queue)
        if state.episodes is None:
            return all_held(context)
        return episodes.anchors(context, state.episodes, self._enough, self.over == "whole")

    def plan_read(
        self,
        context: Context,
        state: SequenceState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Every leaf at every row of the window."""
        ring, ended = context.ring, None if self.across else state.ended
        cut = self._pads or self.burn_in > 0
        # Of whole windows all is known while they are traced; long ones would be large constants.
        of: Any = jnp if cut or self.length > _LONG else np
        before, after = of.int32(0), of.int32(self.length)
        if self._pads:
            after = episodes.steps_ahead(context, ended, slots, self.length)[:, None]
        if self.burn_in:
            before = episodes.steps_back(context, ended, slots, self.burn_in)[:, None]
        step = of.arange(-self.burn_in, self.length, dtype=np.int32)
        real = mask[:, None] & ((step >= -before) & (step < after))
        near = of.clip(step, -before, after - 1)
        ahead = of.where(near < 0, near + ring.rows, near) * ring.envs
        window = ring.slot_after(slots[:, None], ahead)
        start = window[:, :1] if cut else slots[:, None]
        where: SlotsForLeaf = lambda name: start if self._is_single(name) else window
        if ring.envs == 1 and not cut:
            where = ContiguousSlots(where)
        first, last = (window, window) if self.across else (start, window[:, -1:])
        oldest, newest = (True, True) if self.across else (step == -before, step == after - 1)
        info: dict[str, Any] = {
            "is_first": AuxRead(state.before, first, lambda found: real & oldest & (found == 0)),
            "is_last": AuxRead(state.ended, last, lambda found: real & newest & found),
        }
        if self.slots:
            info["slots"] = window
        return ReadPlan(where=where, mask=real, info=info)

    def _is_single(self, name: str) -> bool:
        """Whether a leaf is read for the first row only."""
        return any(within(name, path_name(path)) for path in self.first)

    def reduce(
        self, raw: Item, plan_read: ReadPlan, keys: Keys
    ) -> tuple[Item, dict[str, jax.Array]]:
        """The windows as they are; of leaves that are read once, that one."""
        if not self.first:
            return raw, plan_read.info

        def single(path: tuple, leaf: jax.Array) -> jax.Array:
            return leaf[:, 0] if self._is_single(pytree.leaf_name(path)) else leaf

        return jax.tree_util.tree_map_with_path(single, raw), plan_read.info

    def reset(self, ring: Ring, state: SequenceState, token: jax.Array) -> SequenceState:
        """No rows; flags of slots that hold nothing are not looked at."""
        return dependencies.emptied(state, token)

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that `reduce_priorities` takes, for a mask of this shape."""
        return [(mask[0], self.length), mask]

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """One priority for each window, float32 `[B]`.

        Args:
            priorities: float32 `[B, L]`, or `[B, burn_in + L]`, of which burn-in is left out.
            mask: bool `[B, burn_in + L]`.
        """
        priorities, real = priorities[:, -self.length :], mask[:, -self.length :]
        priorities = jnp.where(priorities < 0, jnp.nan, priorities)  # refused as a whole
        count = jnp.maximum(jnp.sum(real, axis=1), 1).astype(jnp.float32)
        mean = jnp.sum(jnp.where(real, priorities, 0.0), axis=1) / count
        most = jnp.max(jnp.where(real, priorities, 0.0), axis=1)
        if self.eta in (0, 1):  # a share of 0 is not read: the other one may be infinite
            return most if self.eta else mean
        return self.eta * most + (1 - self.eta) * mean
