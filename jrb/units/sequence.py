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
            a stride is counted.
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
    """Windows of L consecutive transitions of one environment and one episode.

    `Sample.data` has leaves `[B, burn_in + L, ...]`; `Sample.mask`, bool `[B, burn_in + L]`, says
    which rows are real. A window never crosses the newest row, nor the end of an episode unless
    `cross_episodes`. `Sample.info` has `is_first` and `is_last`, bool like the mask: the first and
    last rows of episodes, those included that `truncate` ended. A row whose predecessor was
    overwritten does not count as a first row. `ReplayBuffer.set` writes back into the rows of
    windows, such as recomputed recurrent states.

    Attributes:
        length: L.
        burn_in: rows read before the anchor, to warm up a recurrent state. Rows before the
            episode's first row, or before the oldest row stored, are masked and repeat that row.
        sample_by: what is equally likely under `Uniform`. "windows": every anchor. "episodes":
            every episode with an anchor, the running one included; then every anchor in it.
            "whole_episodes": every complete episode whose first row is stored. The window is then
            the episode, padded to L, or its first L rows, and its anchor is the first row.
        partial: "drop" draws complete windows only. "pad" draws from every row; the rows behind the
            end of the episode are masked and repeat its last row. Has no effect with
            sample_by="whole_episodes".
        priority_max_weight: w in the reduction of priorities `[B, L]` by `update_priority`:
            w * max + (1 - w) * mean over the real rows without burn-in (eta in R2D2).
        first_only: paths to leaves that are read for the window's first row only, `[B, ...]`, such
            as the recurrent state that was stored with each row.
        stride: only the rows 0, stride, 2 * stride, ... of an episode are anchors, counted from its
            first row, or from the first one known where a buffer was filled with less. With stride
            < L windows overlap by L - stride rows.
        cross_episodes: if True, windows run on into the next episode of the environment: a row is
            an anchor once L rows follow it in time. Items need no done flag then; without one
            `is_first` shows where `truncate` was called.
        slots: if True, `Sample.info` has `slots`, int32 like the mask: the slot of each row; of a
            masked one, the slot of the row that it repeats.

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
    sample_by: Literal["windows", "episodes", "whole_episodes"] = "windows"
    partial: Literal["drop", "pad"] = "drop"
    priority_max_weight: float = 1.0
    first_only: tuple[Path, ...] = ()
    stride: int = 1
    cross_episodes: bool = False
    slots: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.first_only, tuple):
            paths = (
                tuple(self.first_only) if isinstance(self.first_only, list) else (self.first_only,)
            )
            raise TypeError(
                f"first_only: expected a tuple of paths, got {self.first_only!r}. Write {paths}."
            )
        checks.count("length", self.length)
        if self.burn_in != 0:
            checks.count("burn_in", self.burn_in)
        checks.choice("sample_by", self.sample_by, ("windows", "episodes", "whole_episodes"))
        checks.choice("partial", self.partial, ("drop", "pad"))
        checks.fraction("priority_max_weight", self.priority_max_weight)
        checks.count("stride", self.stride, _UNKNOWN)
        checks.flag("cross_episodes", self.cross_episodes)
        checks.flag("slots", self.slots)
        self._check_together()

    def _check_together(self) -> None:
        """Raises where two options exclude each other."""
        if self.sample_by != "windows" and (self.stride > 1 or self.cross_episodes):
            what = "cross_episodes=True" if self.cross_episodes else f"stride={self.stride}"
            raise ValueError(
                f"Sequence: {what}: expected sample_by='windows', got "
                f"sample_by={self.sample_by!r}, which counts episodes. Leave one of them out."
            )
        if self.sample_by == "whole_episodes" and self.burn_in:
            raise ValueError(
                f"Sequence: burn_in: expected 0 with sample_by='whole_episodes', got "
                f"{self.burn_in}: nothing comes before an episode's "
                "first row. Split the window in the loss."
            )

    @property
    def _enough(self) -> int:
        """The rows that must follow an anchor, itself included."""
        return self.length if self.partial == "drop" and self.sample_by != "whole_episodes" else 1

    @property
    def _pads(self) -> bool:
        return self.partial == "pad" or self.sample_by == "whole_episodes"

    @property
    def _is_queued(self) -> bool:
        """Whether the anchors are rows, but not all of them."""
        return self.sample_by == "windows" and (self.partial == "drop" or self.stride > 1)

    @property
    def _rule(self) -> tuple[Any, ...] | None:
        """What anchors are counted for; None where every row is one."""
        if self.sample_by == "windows" and not self._is_queued:
            return None
        return self.sample_by, self._enough, self.stride, self.cross_episodes

    @property
    def max_entry_delay(self) -> int | None:
        """All whole windows wait for as many rows; episodes are no rows."""
        return 0 if self.sample_by == "windows" else None

    @property
    def has_delayed_anchors(self) -> bool:
        """First rows of whole windows wait for the last ones."""
        return self.partial == "drop" or self.sample_by != "windows"

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
        return self.sample_by == "whole_episodes"

    @property
    def row_steps(self) -> np.ndarray:
        """Burn-in lies before the anchor."""
        return np.arange(-self.burn_in, self.length, dtype=np.int32)

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """The ring holds a window, in order of time; episodes are drawn by a fitting sampler."""
        checks.window("Sequence: burn_in + length", self.burn_in + self.length, ring.rows)
        checks.chronological("Sequence", writer)
        if self.sample_by == "episodes" and sampler.prioritized:
            raise ValueError(
                f"Sequence: sample_by='episodes': expected a sampler without priorities, got "
                f"{type(sampler).__name__}. It would say two things about how likely a row is: "
                "each episode alike, and each row by its priority. Use sample_by='windows'."
            )
        if self.sample_by != "windows" and sampler.in_order and ring.envs > 1:
            raise ValueError(
                f"Sequence: sample_by={self.sample_by!r}: expected a sampler that draws in any "
                f"order, got {type(sampler).__name__}. Episodes of several environments have no "
                "order of their own. Use sample_by='windows'."
            )
        if self.stride > 1 and writer.blocks_when_full:
            rows = self.burn_in + self._enough + self.stride - 1
            checks.window("Sequence: burn_in + length + stride - 1", rows, ring.rows)

    def init(self, context: Context, spec: Item) -> SequenceState:
        """No rows. Raises if the items have no done flag, unless windows run across ends."""
        ring = context.ring
        episodes.check(spec, context.keys, is_needed=not self.cross_episodes)
        for path in self.first_only:
            find(spec, path, "Sequence: first_only")
        return SequenceState(
            ended=jnp.zeros(ring.capacity, jnp.bool_),
            before=jnp.zeros(ring.capacity, jnp.uint8 if self.stride == 1 else jnp.int32),
            length=jnp.zeros(ring.envs, jnp.int32),
            queue=anchor_queue.init(context) if self._is_queued else None,
            episodes=None if self.sample_by == "windows" else episodes.init(ring, self._enough),
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
        if self.sample_by == "whole_episodes":
            table, change = whole_episodes.after_write(context, state.episodes, write, done, length)
        else:
            table, change, _ = episodes.after_write(
                context, state.episodes, write, done, self._enough
            )
        return state.replace(episodes=table), change

    def _most(self, ring: Ring) -> int:
        """Up to where the rows of an episode are counted."""
        if self.stride > 1:
            return 2**31 - 1
        return ring.rows + 1 if self.sample_by == "whole_episodes" else max(self._enough, 2)

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
        if self.stride == 1:
            before = jnp.minimum(before, 1)
        else:
            fewer = _UNKNOWN // self.stride * self.stride
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
        return self.cross_episodes and self.stride > 1 and self.partial == "drop"

    def _starts(
        self, context: Context, state: SequenceState, write: WritePlan, length: jax.Array
    ) -> jax.Array:
        """The anchors that each row completes, int32 `[T * E]`; N where it does not.

        `length`, int32 `[T, E]`, are the rows of its episode up to each row.
        """
        capacity = context.ring.capacity
        if self.partial == "pad":
            at = jnp.where((length - 1) % self.stride == 0, write.slots, capacity)
            return at.reshape(-1)
        whole = jnp.ones_like(length, jnp.bool_) if self.cross_episodes else length >= self.length
        if self.stride > 1 and not self.cross_episodes:
            whole = whole & ((length - self.length) % self.stride == 0)
        back = jnp.full(1, self.length - 1, jnp.int32)
        slots = anchor_queue.rows_back(context, write, back, whole[..., None])
        if not self._reads_before:
            return slots
        safe = jnp.minimum(slots, capacity - 1)
        before = rows.read(state.before, safe)
        return jnp.where(before % self.stride == 0, slots, capacity)

    def truncate(
        self, context: Context, state: SequenceState, which: jax.Array
    ) -> tuple[SequenceState, AnchorUpdate | None]:
        """The newest rows end their episodes."""
        table, change = state.episodes, None
        if table is not None and self.sample_by == "whole_episodes":
            table, change = whole_episodes.truncated(context, table, which, state.length)
        elif table is not None:
            table = episodes.truncated(table, which, self._enough)
        truncated = state.replace(
            ended=episodes.mark_newest(context, state.ended, which),
            length=jnp.where(which, 0, state.length),
            episodes=table,
        )
        return truncated, change

    def is_episode_end(self, context: Context, state: SequenceState, slots: jax.Array) -> jax.Array:
        """Those that were written or truncated so."""
        return rows.get(state.ended, slots)

    def episode_step(self, state: SequenceState, slots: jax.Array) -> jax.Array:
        """How many rows of its episode came before each slot, int32; up to 1 without a stride."""
        return state.before[slots].astype(jnp.int32)

    def init_mid_episode(self, state: SequenceState, before: jax.Array) -> SequenceState:
        """An empty state whose next rows have so many rows of their episodes behind them.

        Args:
            state: without rows.
            before: int32 `[E]`; those rows are not held. Where they are more than anybody knows, a
                stride is counted from the next row on.
        """
        unknown = _UNKNOWN // self.stride * self.stride
        fits = before < (_MANY if self.stride > 1 else unknown)  # a stride goes on as it is counted
        table = state.episodes
        if table is not None and self.sample_by == "whole_episodes":
            table = table.replace(length=jnp.minimum(before, 2))  # it runs, but is not in the table
        return state.replace(length=jnp.where(fits, before, unknown), episodes=table)

    def anchors(self, context: Context, state: SequenceState) -> Anchors:
        """The first rows of windows."""
        if state.queue is not None:
            return anchor_queue.anchors(context.ring, state.queue)
        if state.episodes is None:
            return all_held(context)
        return episodes.anchors(
            context, state.episodes, self._enough, self.sample_by == "whole_episodes"
        )

    def plan_read(
        self,
        context: Context,
        state: SequenceState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Every leaf at every row of the window."""
        ring, ended = context.ring, None if self.cross_episodes else state.ended
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
        first, last = (window, window) if self.cross_episodes else (start, window[:, -1:])
        oldest, newest = (
            (True, True) if self.cross_episodes else (step == -before, step == after - 1)
        )
        info: dict[str, Any] = {
            "is_first": AuxRead(state.before, first, lambda found: real & oldest & (found == 0)),
            "is_last": AuxRead(state.ended, last, lambda found: real & newest & found),
        }
        if self.slots:
            info["slots"] = window
        return ReadPlan(where=where, mask=real, info=info)

    def _is_single(self, name: str) -> bool:
        """Whether a leaf is read for the first row only."""
        return any(within(name, path_name(path)) for path in self.first_only)

    def reduce(
        self, raw: Item, plan_read: ReadPlan, keys: Keys
    ) -> tuple[Item, dict[str, jax.Array]]:
        """The windows as they are; of leaves that are read once, that one."""
        if not self.first_only:
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
        if self.priority_max_weight in (
            0,
            1,
        ):  # a share of 0 is not read: the other one may be infinite
            return most if self.priority_max_weight else mean
        return self.priority_max_weight * most + (1 - self.priority_max_weight) * mean
