"""Stacks of frames, built when they are drawn from frames that are stored once."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._core import episode_ends, rows
from jrb._util import checks, prng_keys, pytree
from jrb._xla import dependencies, gather
from jrb.keys import Keys, Path, path_name, within
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
from jrb.types.parts import check_part
from jrb.units import anchors as anchor_queue
from jrb.units import episodes
from jrb.units.anchors import AnchorQueue
from jrb.units.transition import Transition


class FrameStackState(pytree.State):
    """What frame stacks must know before they read.

    Attributes:
        back: uint8 or int32 `[N]`, the rows of its episode before each slot, up to k - 1.
        length: int32 `[E]`, the rows of the running episode, up to k.
        queue: the anchors.
        unit: the state of the unit whose observations are stacked.
        k: what the rows were counted for; no array.
    """

    back: jax.Array
    length: jax.Array = pytree.tally()
    queue: AnchorQueue
    unit: Any
    k: int = pytree.static(default=0)


@pytree.component
class FrameStack(Unit):
    """Single frames are stored, stacks of the last k are drawn, oldest first.

    Leaves of the observation and of the next observation become `[B, k, ...]`, for windows
    `[B, L, k, ...]`, bit for bit what stacking in the environment gives. A stack never crosses the
    beginning of an episode; an anchor whose stack is no longer held as a whole is not drawn, and as
    a row of burn-in it is masked.

    Attributes:
        k: frames in a stack.
        paths: which leaves, as paths into the item; None for all of the observation and the next.
        unit: whose observations are stacked, such as `NStep(3, 0.99)` or `Sequence(80)`.
        pad: what stands before the first frame of an episode: "first", that frame; or "zeros".

    Reference: Mnih et al., 2015, "Human-level control through deep reinforcement learning",
    methods (preprocessing).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> rows = {"observation": jnp.arange(4), "next": {"done": jnp.arange(4) == 1}}
        >>> buffer, state = jrb.from_items(rows, unit=jrb.FrameStack(3))
        >>> batch = buffer.sample(state, jax.random.key(0), batch_size=32)
        >>> sorted(set(map(tuple, batch.data["observation"].tolist())))
        [(0, 0, 0), (0, 0, 1), (2, 2, 2), (2, 2, 3)]
    """

    k: int
    paths: tuple[Path, ...] | None = None
    unit: Unit = Transition()
    pad: Literal["first", "zeros"] = "first"

    def __post_init__(self) -> None:
        checks.count("k", self.k)
        checks.choice("pad", self.pad, ("first", "zeros"))
        check_part("unit", self.unit)
        if isinstance(self.paths, str):
            raise TypeError(
                f"paths: expected a tuple of paths, got {self.paths!r}. Write {(self.paths,)}."
            )

    @property
    def has_delayed_anchors(self) -> bool:
        """As those of the inner unit."""
        return self.unit.has_delayed_anchors

    @property
    def lookback(self) -> int:
        """The frames before, and what the inner unit reads."""
        return self.k - 1 + self.unit.lookback

    @property
    def requires_contiguous_history(self) -> bool:
        """The frames before a row must be held."""
        return True

    @property
    def row_steps(self) -> np.ndarray | None:
        """Those of the inner unit."""
        return self.unit.row_steps

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """The ring holds a stack, in order of time."""
        checks.window("FrameStack: k", self.k, ring.rows)
        checks.chronological("FrameStack", writer)
        self.unit.check(ring, sampler, writer)
        if isinstance(self.unit, FrameStack):
            raise ValueError(
                "FrameStack: unit: expected a unit of single frames, got a FrameStack."
            )
        if self.unit.max_entry_delay is None:
            raise ValueError(
                "FrameStack: expected a unit whose anchors are rows, got sample_by='episodes'. "
                "Use sample_by='windows'."
            )

    @property
    def max_entry_delay(self) -> int:
        """That of the inner unit; and stacks leave early."""
        return self.k - 1 + (self.unit.max_entry_delay or 0)

    def init(self, context: Context, spec: Item) -> FrameStackState:
        """No rows. Raises if the items have no done flag, or nothing at one of the paths."""
        ring, keys = context.ring, context.keys
        episode_ends.check(spec, keys)
        names = pytree.leaf_names(spec)
        for prefix in self._prefixes(keys):
            if self.paths is None and prefix == path_name(keys.next_observation):
                continue  # not every item has it
            if not any(within(name, prefix) for name in names):
                raise ValueError(
                    f"FrameStack: paths: expected leaves at '{prefix}', got an item with the "
                    f"leaves {names}."
                )
        for name in names:
            self._check_twin(name, spec, keys)
        for path in self.unit.goals:
            if any(within(name, path_name(path)) for name in names if self._stacked(name, keys)):
                raise ValueError(
                    f"FrameStack: '{path_name(path)}': expected a goal that is not stacked. "
                    "Name the frames alone with paths=."
                )
        return FrameStackState(
            back=jnp.zeros(ring.capacity, jnp.uint8 if self.k <= 256 else jnp.int32),
            length=jnp.zeros(ring.envs, jnp.int32),
            queue=anchor_queue.init(context),
            unit=self.unit.init(context, spec),
            k=self.k,
        )

    def _prefixes(self, keys: Keys) -> list[str]:
        paths = (keys.observation, keys.next_observation) if self.paths is None else self.paths
        return [path_name(path) for path in paths]

    def _stacked(self, name: str, keys: Keys) -> bool:
        return any(within(name, prefix) for prefix in self._prefixes(keys))

    def _check_twin(self, name: str, spec: Item, keys: Keys) -> None:
        if not self._stacked(name, keys) or not keys.is_next(name):
            return
        twin = keys.twin(name)
        named = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
        if twin not in named or named[twin] != named[name]:
            raise ValueError(
                f"FrameStack: leaf '{name}': expected a leaf of the next observation, and one "
                f"like it in the observation ('{twin or path_name(keys.observation)}'), whose "
                f"rows are the frames before it, got {named.get(twin or name)}."
            )

    def on_write(
        self, context: Context, state: FrameStackState, write: WritePlan, items: Item
    ) -> tuple[FrameStackState, AnchorUpdate]:
        """Anchors of the inner unit enter; they leave when the ring's tail cuts their stack."""
        inner, change = self.unit.on_write(context, state.unit, write, items)
        done = episode_ends.ending(context, write, items)
        length, running = episodes.lengths(state.length, done, write, self.k)
        later = rows.after(write, anchor_queue.waited(state.queue))  # `back` was read for it
        back = rows.put(state.back, later, (length - 1).astype(state.back.dtype))
        lookback = lambda slots: gather.items_at(back, slots).astype(jnp.int32)
        entered = _still_whole(context, write, change.entered, lookback)
        anchors, own = anchor_queue.after_write(
            context, state.queue, write, entered, self.max_entry_delay, lookback
        )
        cut = self._cut(context, write, lookback)
        anchors = dependencies.delay_writes_until(anchors, jnp.minimum(jnp.min(cut, initial=0), 0))
        own = AnchorUpdate(
            entered=entered,
            consecutive=change.consecutive and write.bounded,
            expired=change.expired,
            most=change.most,
            removed=jnp.concatenate([change.removed, cut]),
            entered_count=own.entered_count,
            departed_count=own.departed_count,
            departed_from=own.departed_from,
            reordered=own.reordered,
        )
        state = state.replace(back=back, length=running, queue=anchors, unit=inner)
        return state, own

    def truncate(
        self, context: Context, state: FrameStackState, which: jax.Array
    ) -> tuple[FrameStackState, AnchorUpdate | None]:
        """As the inner unit does; the next rows begin stacks anew."""
        inner, change = self.unit.truncate(context, state.unit, which)
        state = state.replace(unit=inner, length=jnp.where(which, 0, state.length))
        if change is None:
            return state, None
        now, lookback = (
            anchor_queue.no_rows(context.ring),
            functools.partial(_back, state),
        )
        entered = _still_whole(context, now, change.entered, lookback)
        anchors, own = anchor_queue.after_write(context, state.queue, now, entered, slack=0)
        return state.replace(queue=anchors), own

    def is_episode_end(
        self, context: Context, state: FrameStackState, slots: jax.Array
    ) -> jax.Array:
        """Those after which a stack begins anew, and those that the inner unit knows."""
        ring, held = context.ring, context.held
        after = ring.slot_after(slots, ring.envs)
        last = held.after(ring, slots) <= 0
        running = state.length[ring.env_of(slots)] > 0
        begins = jnp.where(last, ~running, state.back[after] == 0) & (self.k > 1)
        return begins | self.unit.is_episode_end(context, state.unit, slots)

    def episode_step(self, state: FrameStackState, slots: jax.Array) -> jax.Array | None:
        """The rows of its episode before each slot, int32, as far as this or the inner unit counts.

        Where this unit counts to the end, the inner one knows nothing better: windows that cross
        episodes count their stride.
        """
        own, inner = _back(state, slots), self.unit.episode_step(state.unit, slots)
        if self.k == 1:
            return inner
        return own if inner is None else jnp.where(own < self.k - 1, own, jnp.maximum(own, inner))

    def init_mid_episode(self, state: FrameStackState, before: jax.Array) -> FrameStackState:
        """An empty state whose next rows have so many rows of their episodes behind them.

        Args:
            state: without rows.
            before: int32 `[E]`; those rows are not held, so that no stack may reach them.
        """
        inner = self.unit.init_mid_episode(state.unit, before)
        return state.replace(length=jnp.minimum(before, self.k), unit=inner)

    def _cut(self, context: Context, write: WritePlan, lookback: Any) -> jax.Array:
        """The slots at the ring's tail whose stacks reach beyond it, int32 `[(k - 1) E]`."""
        ring, held = context.ring, context.held
        slots = held.moved(ring, *write.lengths).oldest(ring, self.k - 1)
        row = jnp.arange(self.k - 1, dtype=jnp.int32)[:, None]
        safe = jnp.minimum(slots, ring.capacity - 1)
        cut = dependencies.materialize(lambda: lookback(safe)) > row
        return jnp.where(cut, slots, ring.capacity).reshape(-1)

    def anchors(self, context: Context, state: FrameStackState) -> Anchors:
        """Anchors of the inner unit whose stack is held."""
        return anchor_queue.anchors(context.ring, state.queue)

    def plan_read(
        self,
        context: Context,
        state: FrameStackState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Frames at the k last rows before each row at which the inner unit reads observations.

        Next observations are read once, and the frames before them from the observations.
        """
        keys = context.keys
        inner = self.unit.plan_read(context, state.unit, slots, mask, key)
        here = inner.where(path_name(keys.observation))
        there = inner.where(path_name(keys.next_observation))
        frames, whole, real = self._stack(context, state, here)
        if here is not there:
            more, _, more_real = self._stack(context, state, there)
            frames = jnp.concatenate([frames, more[..., 1:]], axis=-1)
            real = jnp.concatenate([real, more_real[..., 1:]], axis=-1)
        mask = inner.mask & whole if inner.mask.shape == whole.shape else inner.mask
        is_mark = lambda leaf: (leaf.shape, leaf.dtype) == (mask.shape, mask.dtype)
        masked = lambda leaf: leaf & mask if is_mark(leaf) else leaf
        info = {
            name: it.map(masked) if isinstance(it, AuxRead) else masked(it)
            for name, it in inner.info.items()
        }
        return ReadPlan(
            where=self._where(inner.where, frames, keys),
            mask=mask,
            info=info,
            residuals=(dataclasses.replace(inner, info=info), real),
        )

    def _where(self, inner: SlotsForLeaf, frames: jax.Array, keys: Keys) -> SlotsForLeaf:
        def where(name: str) -> jax.Array:
            return frames if self._many(name, keys) else inner(name)

        return where

    def _many(self, name: str, keys: Keys) -> bool:
        """Whether many frames of this leaf are read: for its stack, or for that of its twin."""
        if keys.twin(name) is not None:
            return False
        return self._stacked(name, keys) or self._is_twin(name, keys)

    def _is_twin(self, name: str, keys: Keys) -> bool:
        """Whether a next observation that is stacked needs the frames of this leaf."""
        before = path_name(keys.observation)
        if not within(name, before):
            return False
        return self._stacked(path_name(keys.next_observation) + name[len(before) :], keys)

    def _stack(
        self, context: Context, state: FrameStackState, slots: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The slots of the stacks that end at slots `[...]`.

        Returns:
            int32 `[..., k]`, oldest first; whether each stack is held, bool `[...]`; and which
            frames are of the episode, bool `[..., k]`.
        """
        ring, held = context.ring, context.held
        back = gather.read(state.back, slots).astype(jnp.int32)
        oldest = held.before(ring, slots)
        step = jnp.arange(self.k - 1, -1, -1, dtype=jnp.int32)
        near = jnp.minimum(step, jnp.minimum(back, oldest)[..., None])
        return (
            ring.slot_before(slots[..., None], near * ring.envs),
            back <= oldest,
            step <= back[..., None],
        )

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Frames that were read once are put together; the rest is the inner unit's."""
        inner, real = plan.residuals
        axis, last = plan.mask.ndim, self.k - 1
        named = dict(zip(pytree.leaf_names(raw), jax.tree.leaves(raw), strict=True))
        cut = lambda leaf, start, stop: lax.slice_in_dim(leaf, start, stop, axis=axis)
        frames = lambda name: self._filled(named[name], real)

        def stack(path: tuple, leaf: jax.Array) -> jax.Array:
            name = pytree.leaf_name(path)
            twin = keys.twin(name)
            if not self._stacked(name, keys):
                return leaf if not self._many(name, keys) else cut(leaf, last, self.k)[(*rest, 0)]
            if twin is None:
                return cut(frames(name), 0, self.k)
            return _moved_on(frames(twin), self.k, leaf, axis)

        rest = (slice(None),) * axis
        return self.unit.reduce(jax.tree_util.tree_map_with_path(stack, raw), inner, keys)

    def _filled(self, frames: jax.Array, real: jax.Array) -> jax.Array:
        """Zeros instead of the first frame, if so wished."""
        if self.pad == "first":
            return frames
        real = real.reshape(*real.shape, *(1,) * (frames.ndim - real.ndim))
        return jnp.where(real, frames, jnp.zeros_like(frames))

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those of the inner unit."""
        return self.unit.priority_shapes(mask)

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """As the inner unit does."""
        return self.unit.reduce_priorities(priorities, mask)

    def reset(self, ring: Ring, state: FrameStackState, token: jax.Array) -> FrameStackState:
        """No rows."""
        emptied = dependencies.emptied(state, token)
        return emptied.replace(unit=self.unit.reset(ring, state.unit, token))


def _moved_on(frames: jax.Array, k: int, new: jax.Array, axis: int) -> jax.Array:
    """Stacks of k: the last k - 1 of these frames, along an axis, and a new one behind them."""
    many, dims = frames.shape[axis], range(frames.ndim)
    if prng_keys.is_keys(frames.dtype):  # which cannot be padded
        before = lax.slice_in_dim(frames, many - k + 1, many, axis=axis)
        return jnp.concatenate([before, jnp.expand_dims(new, axis)], axis=axis)
    # On the CPU, XLA takes longer to concatenate frames than to choose between two arrays of them.
    widths = [(k - 1 - many, 1, 0) if dim == axis else (0, 0, 0) for dim in dims]
    before = lax.pad(frames, np.zeros((), frames.dtype), widths)
    is_new = lax.eq(lax.broadcasted_iota(jnp.int32, before.shape, axis), np.int32(k - 1))
    last = lax.broadcast_in_dim(new, before.shape, [dim for dim in dims if dim != axis])
    return lax.select(is_new, last, before)


def _back(state: FrameStackState, slots: jax.Array) -> jax.Array:
    """How many rows of its episode came before each slot, int32, up to k - 1."""
    return state.back[slots].astype(jnp.int32)


def _still_whole(context: Context, write: WritePlan, slots: jax.Array, lookback: Any) -> jax.Array:
    """The slots, N where the stack is no longer held once the write is done."""
    ring, held = context.ring, context.held
    safe = jnp.minimum(slots, ring.capacity - 1)
    after = held.moved(ring, *write.lengths)
    fits = dependencies.materialize(lambda: lookback(safe)) <= after.before(ring, safe)
    whole = fits & after.holds(ring, safe)
    return jnp.where(whole, slots, ring.capacity)
