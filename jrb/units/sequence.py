"""The unit of windows of consecutive transitions, for recurrent networks and world models."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import checks, display, pytree
from jrb._xla import dependencies, gather
from jrb.keys import Keys, Path, check_ends, find, path_name, within
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    AuxRead,
    Context,
    Item,
    OrderedSampler,
    PrioritizedSampler,
    ReadPlan,
    Sampler,
    Unit,
    WritePlan,
    Writer,
)
from jrb.units import anchors as anchor_queue
from jrb.units import episodes
from jrb.units.anchors import AnchorQueue
from jrb.units.episodes import EpisodeTable

_MANY = 2**30  # rows of an episode, from which on the count restarts at about half of it
_UNKNOWN = _MANY // 2
_LONG = 1024  # rows of a window, beyond which its offsets are no constants of the program


class SequenceState(pytree.State):
    """The ends of episodes, and the anchors; fields that the options do not need are None.

    Attributes:
        ended: bool `[N]`, True for slots that end an episode.
        before: `[N]`, the number of rows before each slot in its episode: uint8, at most 1; int32
            if a stride is counted. If the stride crosses episodes: 0 or less at first rows, else
            more, and equal to `phase` modulo the stride.
        length: int32 `[E]`, the number of rows of the running episode, as far as needed.
        phase: int32 `[E]`, the number of rows of the environment so far, modulo the stride; None
            unless the stride crosses episodes.
        queue: the anchors; None if every row is an anchor, or episodes are.
        episodes: the table of episodes, if these are anchors.
        rule: the options that determine the anchors; not an array; None if every row is an anchor.
    """

    ended: jax.Array
    before: jax.Array
    length: jax.Array = pytree.tally()
    phase: jax.Array | None = pytree.tally()
    queue: AnchorQueue | None
    episodes: EpisodeTable | None
    rule: tuple[Any, ...] | None = pytree.static(default=None)

    def summary(self, ring: Ring) -> dict[str, str]:
        """Returns the number of ends of episodes, for the `repr` of a state."""
        return {"ends of episodes": display.count(self.ended)}


@pytree.component
class Sequence(Unit):
    """Samples windows of L consecutive transitions of one environment and one episode.

    `Sample.data` has leaves `[B, burn_in + L, ...]`; `Sample.mask`, bool `[B, burn_in + L]`, is
    True for real rows. A window never crosses the newest row, nor the end of an episode unless
    `cross_episodes`. `Sample.info` has `is_first` and `is_last`, bool like the mask, True for the
    first and last rows of episodes, also of those that `truncate` ended. A row does not become a
    first row when the row before it is overwritten. `ReplayBuffer.set` can write to the rows of
    windows, for example recomputed recurrent states.

    Attributes:
        length: L, the number of rows in a window without burn-in.
        burn_in: the number of rows read before the anchor, to warm up a recurrent state. Rows
            before the first row of the episode or of the ring are masked and repeat that row.
        sample_by: what `Uniform` draws with equal probability. "windows": every anchor. "episodes":
            every episode with an anchor, the running one included; then every anchor in it.
            "whole_episodes": every complete episode whose first row is held. The window is then the
            episode, padded to L, or its first L rows, and its anchor is the first row.
        partial: "drop" draws complete windows only. "pad" draws from every row; the rows after the
            end of the episode are masked and repeat its last row. Has no effect with
            sample_by="whole_episodes".
        priority_max_weight: w in the reduction of priorities `[B, L]` by `update_priority`:
            w * max + (1 - w) * mean over the real rows without burn-in (eta in R2D2).
        first_only: the paths of leaves that are read only at the window's first row, `[B, ...]`,
            such as the recurrent state that was stored with each row.
        stride: only the rows 0, stride, 2 * stride, ... are anchors, counted from the first row of
            the episode or, with `cross_episodes`, of the environment; if a rebuilt buffer lacks
            that row, from the first row known. With stride < L, windows overlap by L - stride rows.
            Ignored in a ring of fewer than L + stride - 1 rows, which could be without an anchor.
        cross_episodes: if True, windows continue in the next episode of the environment: a row is
            an anchor once L rows from it on are written. Items then need no done flag; without one,
            `is_first` shows where `truncate` was called.
        slots: if True, `Sample.info` has `slots`, int32 like the mask: the slot of each row; for a
            masked row, that of the row which it repeats.

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
            one = self.first_only
            paths = tuple(one) if isinstance(one, list) else (one,)
            raise TypeError(f"first_only: expected a tuple of paths, got {one!r}. Write {paths}.")
        checks.count("length", self.length)
        if self.burn_in != 0:
            checks.count("burn_in", self.burn_in)
        checks.choice("sample_by", self.sample_by, ("windows", "episodes", "whole_episodes"))
        checks.choice("partial", self.partial, ("drop", "pad"))
        checks.fraction("priority_max_weight", self.priority_max_weight)
        checks.count("stride", self.stride, _UNKNOWN)
        checks.flag("cross_episodes", self.cross_episodes)
        checks.flag("slots", self.slots)
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
    def _is_padded(self) -> bool:
        return self.partial == "pad" or self.sample_by == "whole_episodes"

    @property
    def _enough(self) -> int:
        """The number of rows that an anchor needs from itself on."""
        return 1 if self._is_padded else self.length

    @property
    def max_entry_delay(self) -> int | None:
        """0 for windows, which enter in the order of their first rows; None for episodes."""
        return 0 if self.sample_by == "windows" else None

    @property
    def anchors_are_rows(self) -> bool:
        """True if windows start at every row, whatever the ends of episodes."""
        starts_at_ends = self.partial == "pad" or self.cross_episodes
        return self.sample_by == "windows" and self.stride == 1 and starts_at_ends

    @property
    def has_delayed_anchors(self) -> bool:
        """True if rows become anchors when their windows or episodes end."""
        return self.partial == "drop" or self.sample_by != "windows"

    @property
    def anchor_rows(self) -> int:
        """L, or 1 if windows are padded."""
        return self._enough

    @property
    def lookback(self) -> int:
        """The number of rows of burn-in."""
        return self.burn_in

    @property
    def anchor_requirement(self) -> str:
        """With partial="drop" a complete window; by whole episodes a complete episode."""
        if self.sample_by == "whole_episodes":
            need = "An anchor needs an episode that is stored from its first row to its last. "
            return f"{need}End it by a flag or truncate, and let the capacity hold the longest one."
        if self._enough == 1:
            return ""
        rows = f"{self.length} rows of one {'environment' if self.cross_episodes else 'episode'}"
        return f"An anchor needs {rows}. Take partial='pad' to draw shorter windows too."

    @property
    def requires_contiguous_history(self) -> bool:
        """True for whole episodes, as a seam between environments would cut them."""
        return self.sample_by == "whole_episodes"

    @property
    def row_steps(self) -> np.ndarray:
        """The rows from the anchor to each row: negative in burn-in, then 0 to L - 1."""
        return np.arange(-self.burn_in, self.length, dtype=np.int32)

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises if no window fits into the ring, or the writer or sampler do not fit."""
        checks.window("Sequence: burn_in + length", self.burn_in + self.length, ring.rows)
        checks.chronological("Sequence", writer)
        reads = sampler.reads is not None or sampler.reads_written
        if self.sample_by == "episodes" and (reads or isinstance(sampler, PrioritizedSampler)):
            raise ValueError(
                f"Sequence: sample_by='episodes': expected a sampler that draws all alike, got "
                f"{type(sampler).__name__}. It would say two things about how likely a row is: "
                "each episode alike, and each row by its priority. Use sample_by='windows'."
            )
        if self.sample_by == "episodes" and sampler.max_draws is not None:
            raise ValueError(
                "Sequence: sample_by='episodes': expected a sampler without max_draws, got "
                f"{sampler!r}. It would draw each row alike, not each episode. Use "
                "sample_by='windows' or 'whole_episodes'."
            )
        is_ordered = isinstance(sampler, OrderedSampler)
        if sampler.max_draws is not None and writer.blocks_when_full:
            is_ordered = True  # rows are freed in the order of time
        if self.sample_by != "windows" and is_ordered and ring.envs > 1:
            raise ValueError(
                f"Sequence: sample_by={self.sample_by!r}: expected a sampler that draws in any "
                f"order, got {type(sampler).__name__}. Episodes of several environments have no "
                "order of their own. Use sample_by='windows'."
            )
        if self.stride > 1 and writer.blocks_when_full:
            # With fewer rows, a full ring could have no window to draw, and block forever.
            num_rows = self.burn_in + self._enough + self.stride - 1
            checks.window("Sequence: burn_in + length + stride - 1", num_rows, ring.rows)

    def init(self, context: Context, spec: Item) -> SequenceState:
        """Returns an empty state; raises if items have no done flag, unless windows cross ends."""
        ring = context.ring
        check_ends(spec, context.keys, is_needed=not self.cross_episodes)
        for path in self.first_only:
            find(spec, path, "Sequence: first_only")
        # Anchors that are some of the rows are queued; if all rows are, none is stored.
        is_row = self.sample_by == "windows"
        is_queued = is_row and (self.partial == "drop" or self.stride > 1)
        crosses = self.cross_episodes and self.stride > 1
        rule = self.sample_by, self._enough, self.stride, self.cross_episodes
        return SequenceState(
            ended=jnp.zeros(ring.capacity, jnp.bool_),
            before=jnp.zeros(ring.capacity, jnp.uint8 if self.stride == 1 else jnp.int32),
            length=jnp.zeros(ring.envs, jnp.int32),
            phase=jnp.zeros(ring.envs, jnp.int32) if crosses else None,
            queue=anchor_queue.init(context) if is_queued else None,
            episodes=None if is_row else episodes.init(ring, self._enough),
            rule=rule if is_queued or not is_row else None,
        )

    def on_write(
        self, context: Context, state: SequenceState, plan: WritePlan, items: Item
    ) -> tuple[SequenceState, AnchorUpdate]:
        """Makes rows, windows or episodes anchors when the last row that they need is written."""
        done = plan.episode_ends(context.keys, items)
        # Rows of an episode are counted as far as an anchor depends on them, for a stride all.
        if self.stride > 1:
            most = 2**31 - 1
        elif self.sample_by == "whole_episodes":
            most = context.ring.rows + 1
        else:
            most = max(self._enough, 2)
        # `length`: rows of the episode up to each row; `steps`: rows that count for the stride.
        length, running = episodes.lengths(state.length, done, plan, most)
        steps = jnp.minimum(length - 1, 1) if self.stride == 1 else length - 1
        if state.phase is not None:
            passed = plan.passed_by_clock
            to_next = -(state.phase + passed - 1) % self.stride  # rows until the phase is 0
            # Equal to the phase modulo the stride, and 0 or less at first rows only.
            steps = jnp.where(length == 1, 0, self.stride) - to_next
            state = state.replace(phase=(state.phase + passed[-1]) % self.stride)
        ended = plan.put(state.ended, done)
        # Keep the counts below 2^31, and the same modulo the stride.
        if self.stride > 1:
            surplus = _UNKNOWN // self.stride * self.stride
            running = jnp.where(running >= _MANY, running - surplus, running)
        # Two small writes in turn: both at once would wake a thread (see `WritePlan.in_line`).
        later = plan.in_line(ended)
        before = later.put(state.before, steps.astype(state.before.dtype))
        state = state.replace(ended=ended, before=before, length=running)
        # Update the anchors: in a queue, all rows, or episodes in a table.
        if state.queue is not None:
            entered = self._complete_anchors(context, plan, length, steps)
            queue, update = anchor_queue.after_write(context, state.queue, plan, entered, slack=0)
            return state.replace(queue=queue), update
        if state.episodes is None:
            return state, AnchorUpdate.of_held(context, plan)
        whole = length if self.sample_by == "whole_episodes" else None
        table, update, _ = episodes.after_write(
            context, state.episodes, plan, done, self._enough, whole
        )
        return state.replace(episodes=table), update

    def _complete_anchors(
        self, context: Context, plan: WritePlan, length: jax.Array, steps: jax.Array
    ) -> jax.Array:
        """Returns the anchor that each row completes, int32 `[T * E]`; N if it completes none."""
        # A row completes the window that begins L - 1 rows before, if that is in the same episode.
        back = self._enough - 1
        enters = jnp.ones_like(length, jnp.bool_) if self.cross_episodes else length > back
        # In a smaller ring, a stride could leave no anchor.
        if context.ring.rows >= self._enough + self.stride - 1:
            enters = enters & ((steps - back) % self.stride == 0)
        # The anchor of a padded window is the row itself.
        if self._is_padded:
            return jnp.where(enters, plan.slots, context.ring.capacity).reshape(-1)
        back = jnp.full(1, back, jnp.int32)
        return anchor_queue.rows_back(context, plan, back, enters[..., None])

    def truncate(
        self, context: Context, state: SequenceState, which: jax.Array
    ) -> tuple[SequenceState, AnchorUpdate | None]:
        """Ends episodes at the newest rows."""
        table, update = state.episodes, None
        if table is not None:
            whole = state.length if self.sample_by == "whole_episodes" else None
            table, update = episodes.truncate(context, table, which, self._enough, whole)
        ended = episodes.mark_newest(context, state.ended, which)
        length = jnp.where(which, 0, state.length)
        return state.replace(ended=ended, length=length, episodes=table), update

    def is_episode_end(self, context: Context, state: SequenceState, slots: jax.Array) -> jax.Array:
        """Returns True for rows that were written or truncated as ends."""
        return gather.items_at(state.ended, slots)

    def episode_step(self, state: SequenceState, slots: jax.Array) -> jax.Array:
        """Returns the number of rows before each slot in its episode; at most 1 without a stride.

        If a stride crosses episodes, the number is 0 or less for first rows, and equals `phase`
        modulo the stride.
        """
        return state.before[slots].astype(jnp.int32)

    def init_mid_episode(self, state: SequenceState, before: jax.Array) -> SequenceState:
        """Returns an empty state whose next rows continue episodes of `before` rows.

        Args:
            state: the state of an empty buffer.
            before: int32 `[E]`, as from `episode_step`; these rows are not held. If the number is
                unknown, it is large, and the stride is counted from the next row on.
        """
        # A multiple of the stride, far from 0: not a first row, and a row of the stride.
        unknown = _UNKNOWN // self.stride * self.stride
        fits = before < (_MANY if self.stride > 1 else unknown)
        before, table = jnp.where(fits, before, unknown), state.episodes
        if state.phase is not None:
            state = state.replace(phase=before % self.stride)
        if table is not None and self.sample_by == "whole_episodes":
            # The episode runs, but is not in the table.
            table = table.replace(length=jnp.minimum(before, 2))
        return state.replace(length=jnp.maximum(before, 0), episodes=table)

    def anchors(self, context: Context, state: SequenceState) -> Anchors:
        """Returns the anchors, which are the first rows of windows."""
        if state.queue is not None:
            return anchor_queue.anchors(context.ring, state.queue)
        if state.episodes is None:
            return Anchors.of_held(context)
        whole = self.sample_by == "whole_episodes"
        return episodes.anchors(context, state.episodes, self._enough, whole)

    def plan_read(
        self,
        context: Context,
        state: SequenceState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Reads every leaf at every row of the window."""
        ring, ended = context.ring, None if self.cross_episodes else state.ended
        is_cut = self._is_padded or self.burn_in > 0
        # Complete windows have constant offsets: NumPy's, unless they are large.
        of: Any = jnp if is_cut or self.length > _LONG else np
        before, after = of.int32(0), of.int32(self.length)
        if self._is_padded:
            after = episodes.steps_ahead(context, ended, slots, self.length)[:, None]
        if self.burn_in:
            before = episodes.steps_back(context, ended, slots, self.burn_in)[:, None]
        # Rows beyond the ends of the episode repeat its outermost rows, and are masked.
        step = of.arange(-self.burn_in, self.length, dtype=np.int32)
        real = mask[:, None] & ((step >= -before) & (step < after))
        near = of.clip(step, -before, after - 1)
        # Steps back, in burn-in, are steps forward around the ring.
        ahead = of.where(near < 0, near + ring.rows, near) * ring.envs
        window = ring.slot_after(slots[:, None], ahead)
        # Without burn-in and padding the first row is the anchor, which needs no arithmetic.
        start = window[:, :1] if is_cut else slots[:, None]
        # Only the outermost real rows of a window can be an episode's first and last.
        first, last, oldest, newest = start, window[:, -1:], step == -before, step == after - 1
        if self.cross_episodes:
            first, last, oldest, newest = window, window, True, True
        info: dict[str, Any] = {
            "is_first": AuxRead(state.before, first, lambda steps: real & oldest & (steps <= 0)),
            "is_last": AuxRead(state.ended, last, lambda ends: real & newest & ends),
        }
        if self.slots:
            info["slots"] = window
        where = lambda name: start if self._is_single(name) else window
        return ReadPlan(where=where, mask=real, info=info)

    def _is_single(self, name: str) -> bool:
        """Returns True for leaves that are read for the first row only."""
        return any(within(name, path_name(path)) for path in self.first_only)

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Returns the windows as they were read, and one row of leaves in `first_only`."""
        if not self.first_only:
            return raw, plan.info
        single = lambda path, leaf: leaf[:, 0] if self._is_single(pytree.leaf_name(path)) else leaf
        return jax.tree_util.tree_map_with_path(single, raw), plan.info

    def reset(self, ring: Ring, state: SequenceState, token: jax.Array) -> SequenceState:
        """Returns the emptied state; flags stay, as those of empty slots are not used."""
        return dependencies.empty_state(state, token)

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns `[B, L]` and `[B, burn_in + L]`."""
        return [(mask[0], self.length), mask]

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns one priority for each window, float32 `[B]`.

        Args:
            priorities: float32 `[B, L]`, or `[B, burn_in + L]`, whose burn-in is ignored.
            mask: bool `[B, burn_in + L]`, True for real rows.
        """
        priorities, real = priorities[:, -self.length :], mask[:, -self.length :]
        # A window with NaN is refused; the maximum would hide a negative priority.
        priorities = jnp.where(priorities < 0, jnp.nan, priorities)
        count = jnp.maximum(jnp.sum(real, axis=1), 1).astype(jnp.float32)
        mean = jnp.sum(jnp.where(real, priorities, 0.0), axis=1) / count
        greatest = jnp.max(jnp.where(real, priorities, 0.0), axis=1)
        # A share of 0 does not count, as 0 times an infinite priority is NaN.
        share = self.priority_max_weight
        if share in (0, 1):
            return greatest if share else mean
        return share * greatest + (1 - share) * mean
