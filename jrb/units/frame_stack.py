"""The unit of frame stacks, which are built from single frames when they are drawn."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import casting, checks, pytree
from jrb._xla import dependencies, gather
from jrb.keys import Keys, Path, check_ends, path_name, within
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    AuxRead,
    Context,
    Item,
    ReadPlan,
    Sampler,
    Unit,
    WritePlan,
    Writer,
)
from jrb.types.parts import check_part
from jrb.units import anchors as anchor_queue
from jrb.units import episodes
from jrb.units.anchors import AnchorQueue
from jrb.units.transition import Transition, WrappingUnit


class FrameStackState(pytree.State):
    """The number of rows before each slot in its episode, and the anchors with a complete stack.

    Attributes:
        back: uint8 or int32 `[N]`, the number of rows before each slot in its episode, up to k - 1.
        length: int32 `[E]`, the number of rows of the running episode, at most k.
        queue: the anchors.
        unit: the state of the inner unit.
        k: the k that these counts are for; not an array.
    """

    back: jax.Array
    length: jax.Array = pytree.tally()
    queue: AnchorQueue
    unit: Any
    k: int = pytree.static(default=0)

    def rows_before(self, slots: jax.Array) -> jax.Array:
        """Returns the number of rows before each slot in its episode, int32, at most k - 1."""
        return gather.items_at(self.back, slots).astype(jnp.int32)


@pytree.component
class FrameStack(WrappingUnit):
    """Stores single frames, and draws stacks of the last k frames, oldest first.

    Leaves of the observation and of the next observation become `[B, k, ...]`, for windows
    `[B, L, k, ...]`, bit for bit as if the environment stacked them. A stack never crosses the
    beginning of an episode. A row whose stack is partly lost is no anchor, and masked in burn-in.

    So near the oldest row of a full ring, a stack still has its own k frames: only in front of the
    true first row of an episode it is filled up. If the oldest episode has lost its first row, its
    k - 1 oldest rows are not drawn, but their frames are in the stacks of the next rows.

    Attributes:
        k: the number of frames in a stack.
        paths: the leaves to stack; None for all leaves of the observation and the next one.
        unit: the unit whose observations are stacked, such as `NStep(3, 0.99)` or `Sequence(80)`.
        pad: the filling before an episode's first frame: "first" for that frame, or "zeros".

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
    def lookback(self) -> int:
        """The k - 1 frames before a row, and the lookback of the inner unit."""
        return self.k - 1 + self.unit.lookback

    @property
    def anchor_requirement(self) -> str:
        """The requirement of the inner unit, and the frames of the stack."""
        stack = (
            f"Of the {self.k - 1} rows before an anchor, those of its episode must be stored. "
            "Write more rows, or make the capacity larger."
        )
        return f"{self.unit.anchor_requirement} {stack if self.k > 1 else ''}".strip()

    @property
    def requires_contiguous_history(self) -> bool:
        """True: the frames before a row must be held."""
        return True

    @property
    def max_entry_delay(self) -> int:
        """The delay of the inner unit plus k - 1 rows, as anchors depart before their row does."""
        return self.k - 1 + (self.unit.max_entry_delay or 0)

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises unless the ring has k rows and the writer keeps the order of time."""
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

    def init(self, context: Context, spec: Item) -> FrameStackState:
        """Returns an empty state; raises if items lack a done flag or leaves at a path."""
        ring, keys = context.ring, context.keys
        check_ends(spec, keys)
        names = pytree.leaf_names(spec)
        named = dict(zip(names, jax.tree.leaves(spec), strict=True))
        # Not every item has a next observation; paths that are given must exist.
        for path in (keys.observation,) if self.paths is None else self.paths:
            if not any(within(name, path_name(path)) for name in names):
                raise ValueError(
                    f"FrameStack: paths: expected leaves at '{path_name(path)}', got an item with "
                    f"the leaves {names}."
                )
        # The earlier frames of a next observation are read from the observation.
        for name in names:
            twin = keys.twin(name)
            if not self._is_stacked(name, keys) or not keys.is_next(name):
                continue
            if twin not in named or named[twin] != named[name]:
                raise ValueError(
                    f"FrameStack: leaf '{name}': expected a leaf of the next observation, and one "
                    f"like it in the observation ('{twin or path_name(keys.observation)}'), whose "
                    f"rows are the frames before it, got {named.get(twin or name)}."
                )
        # Goals, and what was achieved, are compared as they are stored.
        stacked = [name for name in names if self._is_stacked(name, keys)]
        for path in self.unit.goals:
            if any(within(name, path_name(path)) for name in stacked):
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

    def _is_stacked(self, name: str, keys: Keys) -> bool:
        paths = (keys.observation, keys.next_observation) if self.paths is None else self.paths
        return any(within(name, path_name(path)) for path in paths)

    def _is_read_often(self, name: str, keys: Keys) -> bool:
        """Returns True if many frames of a leaf are read: for its own stack or for its twin's.

        In a stack of next observations, the frames before the last are observations.
        """
        if keys.twin(name) is not None:
            return False
        before = path_name(keys.observation)
        twin = path_name(keys.next_observation) + name[len(before) :]
        has_twin = within(name, before) and self._is_stacked(twin, keys)
        return has_twin or self._is_stacked(name, keys)

    def on_write(
        self, context: Context, state: FrameStackState, plan: WritePlan, items: Item
    ) -> tuple[FrameStackState, AnchorUpdate]:
        """Adds anchors of the inner unit, and removes them when their stack is cut."""
        ring, held = context.ring, context.held
        # Count the rows before each new one in its episode.
        inner, change = self.unit.on_write(context, state.unit, plan, items)
        done = plan.episode_ends(context.keys, items)
        length, running = episodes.lengths(state.length, done, plan, self.k)
        # The queue waits for the reads of `back` that chose its anchors; so does this write.
        zero = jnp.minimum(jnp.min(state.queue.head) + jnp.min(state.queue.count), 0)
        back = plan.after(zero).put(state.back, (length - 1).astype(state.back.dtype))
        state = state.replace(back=back, length=running, unit=inner)
        # An anchor of the inner unit enters if its stack is still held when the write is done.
        entered = _keep_whole_stacks(context, plan, change.entered, state)
        queue, own = anchor_queue.after_write(
            context, state.queue, plan, entered, self.max_entry_delay, state.rows_before
        )
        # Slots at the ring's tail whose stacks reach beyond it, `[(k - 1) E]`, are removed too.
        after = held.advance(ring, plan.expired_by_clock, plan.rows_by_clock)
        slots = after.oldest(ring, self.k - 1)
        row = jnp.arange(self.k - 1, dtype=jnp.int32)[:, None]
        # Padding, N, is out of range: it reads the last slot, and stays N below.
        safe = jnp.minimum(slots, ring.capacity - 1)
        is_cut = dependencies.materialize(lambda: state.rows_before(safe)) > row
        cut = jnp.where(is_cut, slots, ring.capacity).reshape(-1)
        # The next write to the queue waits for the read of `back`, of which `cut` was made.
        queue = dependencies.delay_writes_until(queue, jnp.minimum(jnp.min(cut, initial=0), 0))
        removed = cut if change.removed is None else jnp.concatenate([change.removed, cut])
        own = dataclasses.replace(
            own,
            consecutive=change.consecutive and plan.bounded,
            expired=change.expired,
            most=change.most,
            removed=removed,
        )
        return state.replace(queue=queue), own

    def truncate(
        self, context: Context, state: FrameStackState, which: jax.Array
    ) -> tuple[FrameStackState, AnchorUpdate | None]:
        """Truncates as the inner unit does; the next rows begin new stacks."""
        inner, change = self.unit.truncate(context, state.unit, which)
        state = state.replace(unit=inner, length=jnp.where(which, 0, state.length))
        if change is None:
            return state, None
        now = anchor_queue.no_rows(context.ring)
        entered = _keep_whole_stacks(context, now, change.entered, state)
        queue, own = anchor_queue.after_write(context, state.queue, now, entered, slack=0)
        return state.replace(queue=queue), own

    def is_episode_end(
        self, context: Context, state: FrameStackState, slots: jax.Array
    ) -> jax.Array:
        """Returns True for ends that the inner unit knows, and rows before a new episode."""
        ring, held = context.ring, context.held
        after = ring.slot_after(slots, ring.envs)
        is_newest = held.after(ring, slots) <= 0
        # The next row of a running episode has rows before it; that of a new one has none.
        is_running = state.length[ring.env_of(slots)] > 0
        is_last = jnp.where(is_newest, ~is_running, state.back[after] == 0) & (self.k > 1)
        return is_last | self.unit.is_episode_end(context, state.unit, slots)

    def episode_step(self, state: FrameStackState, slots: jax.Array) -> jax.Array | None:
        """Returns the number of rows before each slot in its episode, as far as a unit counts.

        This unit counts only up to k - 1. At this limit, the inner unit's number is returned if it
        is greater. Below it, this unit's number is right, while windows across episodes count their
        stride.
        """
        own, inner = state.rows_before(slots), self.unit.episode_step(state.unit, slots)
        if self.k == 1:
            return inner
        return own if inner is None else jnp.where(own < self.k - 1, own, jnp.maximum(own, inner))

    def init_mid_episode(self, state: FrameStackState, before: jax.Array) -> FrameStackState:
        """Returns an empty state whose next rows continue episodes of `before` rows, int32 `[E]`.

        Those rows are not held, so that no stack may reach them.
        """
        inner = self.unit.init_mid_episode(state.unit, before)
        return state.replace(length=jnp.minimum(before, self.k), unit=inner)

    def anchors(self, context: Context, state: FrameStackState) -> Anchors:
        """Returns the anchors of the inner unit whose stack is held."""
        return anchor_queue.anchors(context.ring, state.queue)

    def plan_read(
        self,
        context: Context,
        state: FrameStackState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Reads k frames for each row at which the inner unit reads an observation.

        Of a next observation, only the last frame is read; the frames before it are observations.
        """
        keys, inner = context.keys, self.unit.plan_read(context, state.unit, slots, mask, key)
        # Find the stacks of the rows at which the inner unit reads observations.
        at, at_next = (
            inner.where(path_name(path)) for path in (keys.observation, keys.next_observation)
        )
        frames, is_whole, real = self._locate_stacks(context, state, at)
        # Read at the same array of slots, the stack of the next observation is the other one, moved
        # on by one. At different rows, as in n-step returns, its frames are read too.
        if at is not at_next:
            more, _, more_real = self._locate_stacks(context, state, at_next)
            frames = jnp.concatenate([frames, more[..., 1:]], axis=-1)
            real = jnp.concatenate([real, more_real[..., 1:]], axis=-1)
        mask = inner.mask
        # If an entry has several rows, the stacks of all must be held.
        if is_whole.shape[: mask.ndim] == mask.shape:
            mask &= is_whole.all(axis=tuple(range(mask.ndim, is_whole.ndim)))

        def apply_mask(value: jax.Array) -> jax.Array:
            # Flags of rows are False where the mask is; other values stay.
            is_flag = (value.shape, value.dtype) == (mask.shape, mask.dtype)
            return value & mask if is_flag else value

        info = {
            name: entry.map(apply_mask) if isinstance(entry, AuxRead) else apply_mask(entry)
            for name, entry in inner.info.items()
        }
        return ReadPlan(
            where=lambda name: frames if self._is_read_often(name, keys) else inner.where(name),
            mask=mask,
            info=info,
            residuals=(dataclasses.replace(inner, info=info), real),
        )

    def _locate_stacks(
        self, context: Context, state: FrameStackState, slots: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the slots of stacks that end at `slots`, int32 `[..., k]`, oldest first.

        Also returns True for stacks that are held, `[...]`, and frames in the episode, `[..., k]`.
        """
        ring, held = context.ring, context.held
        back = gather.read(state.back, slots).astype(jnp.int32)
        oldest = held.before(ring, slots)
        step = jnp.arange(self.k - 1, -1, -1, dtype=jnp.int32)
        # Frames before the episode, or that are not held, repeat the first one that is there.
        near = jnp.minimum(step, jnp.minimum(back, oldest)[..., None])
        stack = ring.slot_before(slots[..., None], near * ring.envs)
        return stack, back <= oldest, step <= back[..., None]

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Makes stacks of the frames that were read; the inner unit reduces the result."""
        inner, real = plan.residuals
        axis = real.ndim - 1
        named = dict(zip(pytree.leaf_names(raw), jax.tree.leaves(raw), strict=True))

        def pad_frames(name: str) -> jax.Array:
            leaf = named[name]
            # `plan_read` has repeated the first frame already.
            if self.pad == "first":
                return leaf
            mask = real.reshape(*real.shape, *(1,) * (leaf.ndim - real.ndim))
            return jnp.where(mask, leaf, jnp.zeros_like(leaf))

        def stack(path: tuple, leaf: jax.Array) -> jax.Array:
            name = pytree.leaf_name(path)
            twin = keys.twin(name)
            if not self._is_stacked(name, keys):
                if not self._is_read_often(name, keys):
                    return leaf
                # Read k times for the stack of its twin, but not stacked: its own row is the last.
                return lax.index_in_dim(leaf, self.k - 1, axis, keepdims=False)
            # Its own frames are the first k; others are for the stack of its twin.
            if twin is None:
                return lax.slice_in_dim(pad_frames(name), 0, self.k, axis=axis)
            return _append_frame(pad_frames(twin), self.k, leaf, axis)

        return self.unit.reduce(jax.tree_util.tree_map_with_path(stack, raw), inner, keys)


def _append_frame(frames: jax.Array, k: int, new: jax.Array, axis: int) -> jax.Array:
    """Returns stacks of k frames: the last k - 1 of `frames`, along `axis`, and then `new`."""
    many, dims = frames.shape[axis], range(frames.ndim)
    # PRNG keys cannot be padded.
    if casting.is_keys(frames.dtype):
        before = lax.slice_in_dim(frames, many - k + 1, many, axis=axis)
        return jnp.concatenate([before, jnp.expand_dims(new, axis)], axis=axis)
    # On the CPU, XLA takes longer to concatenate frames than to choose between two arrays of them.
    widths = [(k - 1 - many, 1, 0) if dim == axis else (0, 0, 0) for dim in dims]
    before = lax.pad(frames, np.zeros((), frames.dtype), widths)
    is_new = lax.eq(lax.broadcasted_iota(jnp.int32, before.shape, axis), np.int32(k - 1))
    last = lax.broadcast_in_dim(new, before.shape, [dim for dim in dims if dim != axis])
    return lax.select(is_new, last, before)


def _keep_whole_stacks(
    context: Context, plan: WritePlan, slots: jax.Array, state: FrameStackState
) -> jax.Array:
    """Returns the slots; N replaces those whose stack is not held after the write."""
    ring = context.ring
    safe = jnp.minimum(slots, ring.capacity - 1)
    after = context.held.advance(ring, plan.expired_by_clock, plan.rows_by_clock)
    before = dependencies.materialize(lambda: state.rows_before(safe))
    is_whole = (before <= after.before(ring, safe)) & after.holds(ring, safe)
    return jnp.where(is_whole, slots, ring.capacity)
