"""Samplers that draw each anchor once: first in first out, and last in first out."""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import checks, pytree
from jrb._xla import dependencies, gather
from jrb.ring import Ring
from jrb.types import Anchors, AnchorUpdate, Draw, DrawCounts, OrderedSampler
from jrb.types.messages import PartState


class OnceInOrder(OrderedSampler):
    """A sampler that draws each anchor once. Its state has `count`, the anchors not drawn yet."""

    consumes: ClassVar[bool] = True

    @abc.abstractmethod
    def take(
        self, ring: Ring, state: PartState, anchors: Anchors, batch_size: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the next B anchors to draw.

        Returns:
            Their ranks, int32 `[B]`; False where none is left, bool `[B]`; and the number of
            anchors by which `count` decreases, int32 `[]`.
        """

    def draw(
        self,
        ring: Ring,
        state: PartState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[Any, Draw]:
        """Draws the next B anchors; if fewer remain, the end of the batch is masked."""
        ranks, mask, num_taken = self.take(ring, state, anchors, batch_size)
        # Entries beyond the anchors that remain repeat rank 0, and are masked.
        after = state.replace(count=state.count - num_taken)
        return after, anchors.uniform_draw(jnp.where(mask, ranks, 0), mask, key)

    def __post_init__(self) -> None:
        checks.flag("count_draws", self.count_draws)

    def put_back(self, state: PartState, mask: jax.Array, kept: jax.Array) -> Any:
        """Returns the state in which the last anchors that were taken are the next again."""
        return state.replace(
            count=state.count + jnp.maximum(jnp.sum(mask, dtype=jnp.int32) - kept, 0)
        )

    def ready(self, state: PartState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if there is an anchor that was not drawn yet."""
        return state.count > 0


class QueueState(DrawCounts):
    """The length of a queue.

    Attributes:
        count: int32 `[]`, the number of anchors from the queue's head on, always the newest; with a
            stride, those that are passed over included.
        rows: int32 `[]`, the number of rows that entered so far, modulo the stride; None without.
        rule: the stride and the number of environments; not an array; None without a stride.
    """

    count: jax.Array = pytree.tally()
    rows: jax.Array | None = pytree.tally()
    rule: tuple[int, int] | None = pytree.static(default=None)

    def offsets(self, batch_size: int) -> jax.Array:
        """Returns the distance of the next B anchors from the head; `count` or more if none."""
        step = jnp.arange(batch_size, dtype=jnp.int32)
        if self.rows is None or self.rule is None:
            return step
        # Anchors enter row by row. Of a period of `stride` rows, the first row is drawn.
        stride, envs = self.rule
        start = (self.rows * envs - self.count) % (stride * envs)  # the head within its period
        number = jnp.minimum(start, envs) + step
        # No more periods than there are in the queue, as larger numbers could overflow.
        periods = jnp.minimum(number // envs, self.count // (stride * envs) + 2)
        return periods * (stride * envs) + number % envs - start


@pytree.component
class Queue(OnceInOrder):
    """Draws each anchor once, oldest first: for data that is used once, as on policy.

    `draw` removes anchors from the queue, `sample` only reads its head. If fewer than B anchors are
    left, the end of the batch is masked. An item that is overwritten before it was drawn is lost.
    The key is not used.

    Attributes:
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).
        stride: only the rows 0, stride, 2 * stride, ... are drawn, counted from the first row that
            was stored; other rows are passed over. With `Sequence(L, cross_episodes=True)` and a
            stride of L, windows follow each other without overlap. Above 1 it needs a unit of which
            every row is an anchor (`jrb.types.Unit.anchors_are_rows`).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, batch_size=2, sampler=jrb.Queue())
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(3)})
        >>> state, first = buffer.draw(state, jax.random.key(0))
        >>> state, second = buffer.draw(state, jax.random.key(0))
        >>> first.data["x"].tolist(), second.data["x"][second.mask].tolist()
        ([0, 1], [2])
    """

    count_draws: bool = False
    stride: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.count("stride", self.stride, 2**15)

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises ValueError if a stride counts rows, and anchors are not rows."""
        if self.stride > 1 and not unit.anchors_are_rows:
            raise ValueError(
                f"Queue: stride={self.stride}: expected a unit of which every row is an anchor, "
                f"got {unit}. Use Sequence(..., cross_episodes=True), or its own stride instead."
            )

    def init(self, ring: Ring) -> QueueState:
        """Returns an empty queue."""
        zero, has_stride = jnp.zeros((), jnp.int32), self.stride > 1
        rule = (self.stride, ring.envs) if has_stride else None
        return QueueState(count=zero, rows=zero if has_stride else None, rule=rule)

    def on_write(
        self, ring: Ring, state: QueueState, change: AnchorUpdate, anchors: Anchors
    ) -> QueueState:
        """Appends the anchors that entered, and removes those that departed before their turn."""
        # The queue was the end of the order before the write: `lost` of its anchors departed.
        before = anchors.count + change.departed_count - change.entered_count
        lost = change.departed_from(jnp.maximum(before - state.count, 0))
        pending = state.count + change.entered_count - lost
        if state.rows is not None:
            rows = state.rows + change.entered_count // ring.envs
            state = state.replace(rows=rows % self.stride)
        return state.replace(count=jnp.clip(pending, 0, anchors.count))

    def take(
        self, ring: Ring, state: QueueState, anchors: Anchors, batch_size: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the B anchors at the head of the queue, its oldest."""
        # The queue is the newest `count` anchors: its head has the rank of the first of them.
        offsets = state.offsets(batch_size)
        is_pending = offsets < state.count
        num_taken = jnp.max(jnp.where(is_pending, offsets + 1, 0))
        return anchors.count - state.count + offsets, is_pending, num_taken

    def ready(self, state: QueueState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if there is an anchor that was not drawn yet."""
        return state.count > state.offsets(1)[0]

    def num_pending(self, state: QueueState, anchors: Anchors) -> jax.Array:
        """Returns the length of the queue, from the first anchor on that will be drawn."""
        return jnp.maximum(state.count - state.offsets(1)[0], 0)

    def rebuild_index(
        self, ring: Ring, state: QueueState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> QueueState:
        """Keeps the length of the queue, but at most all anchors; it has the newest of them."""
        return state.replace(count=jnp.minimum(state.count, new.count))

    def import_state(
        self, state: QueueState, old: QueueState, slots: jax.Array, new_slots: jax.Array
    ) -> QueueState:
        """Removes as many anchors as were drawn from the other buffer's queue."""
        # The newest row is the same in both, and with an equal stride its number too.
        rows = state.rows if old.rule is None or state.rule != old.rule else old.rows
        return state.replace(count=jnp.minimum(state.count, old.count), rows=rows)


class LifoState(DrawCounts):
    """The stack of anchors that were not drawn yet.

    Anchors are numbered as they enter, modulo 2^32. They depart in that order, so that the anchors
    of a buffer have consecutive numbers, and a number gives the rank of its anchor.

    Attributes:
        numbers: uint32 `[N]`, the numbers of the anchors not drawn yet, oldest first, in a ring.
        bottom: int32 `[]`, the index in `numbers` of the oldest of them.
        count: int32 `[]`, the number of anchors on the stack.
        following: uint32 `[]`, the number that the next anchor gets.
    """

    numbers: jax.Array
    bottom: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()
    following: jax.Array

    def ranks(self, num_anchors: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns the ranks of anchors by their numbers, int32 `[B]`; negative if they departed."""
        return num_anchors - (self.following - numbers).astype(jnp.int32)

    def read(self, ring: Ring, height: jax.Array) -> jax.Array:
        """Returns the numbers at heights above the bottom, int32 `[B]` in [0, N)."""
        index = ring.slot_after(self.bottom, height)
        # A `lax.gather`, as `self.numbers[index]` would check each index for being negative.
        dims = lax.GatherDimensionNumbers((), (0,), (0,))
        read = lambda: lax.gather(self.numbers, index[:, None], dims, (1,), mode="clip")
        return dependencies.materialize(read)


@pytree.component
class Lifo(OnceInOrder):
    """Draws each anchor once, newest first: the newest anchor that was not drawn yet.

    `draw` removes anchors from the stack, `sample` only reads its top; the first entry of a batch
    is the newest. If fewer than B anchors are left, the end of the batch is masked. An item that is
    overwritten before it was drawn is lost. The key is not used. Memory: 4 bytes a slot. A draw
    costs O(B), and a write O(log N) more.

    Anchors must depart in the order in which they entered. With several environments, frame stacks
    and strict n-step returns do not, and are refused.

    Attributes:
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(9, batch_size=2, sampler=jrb.Lifo())
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(4)})
        >>> state, sample = buffer.draw(state, jax.random.key(0))
        >>> state = buffer.add(state, {"x": 4})
        >>> sample.data["x"].tolist(), buffer.draw(state, jax.random.key(0))[1].data["x"].tolist()
        ([3, 2], [4, 1])
    """

    count_draws: bool = False

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises ValueError if anchors may depart in another order than they entered."""
        if ring.envs > 1 and unit.max_entry_delay != 0:
            raise ValueError(
                f"Lifo: expected anchors that leave in the order in which they came, got "
                f"{type(unit).__name__} over {ring.envs} environments, of which some leave early. "
                "Use jrb.Queue(), a single environment, or another unit."
            )

    def init(self, ring: Ring) -> LifoState:
        """Returns an empty stack."""
        return LifoState(
            numbers=jnp.zeros(ring.capacity, jnp.uint32),
            bottom=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            following=jnp.zeros((), jnp.uint32),
        )

    def on_write(
        self, ring: Ring, state: LifoState, change: AnchorUpdate, anchors: Anchors
    ) -> LifoState:
        """Removes anchors that departed from the bottom, and puts those that entered on top."""
        # The ranks of anchors that departed out of order are unknown: then the stack is lost.
        in_order = change.departed_from(change.departed_count) == 0
        following = state.following + change.entered_count.astype(jnp.uint32)
        state = state.replace(following=following, count=jnp.where(in_order, state.count, 0))
        state = _remove_departed(ring, state, anchors.count)
        # Of the anchors that entered, no more than these are anchors still.
        new = jnp.minimum(change.entered_count, anchors.count)
        # As many numbers as may be put at once: shapes must not depend on how many entered.
        num_written = 0 if change.incoming is None else change.incoming.slots.size
        most = min(max(change.entered.size, num_written), ring.capacity)
        offset = jnp.arange(most, dtype=jnp.int32)
        at = ring.slot_after(state.bottom, jnp.minimum(state.count + offset, ring.capacity))
        at = jnp.where(offset < new, at, ring.capacity)
        numbers = state.following - (new - offset).astype(jnp.uint32)
        return state.replace(
            numbers=gather.put(state.numbers, at, numbers), count=state.count + new
        )

    def take(
        self, ring: Ring, state: LifoState, anchors: Anchors, batch_size: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the B anchors on top of the stack."""
        depth = jnp.arange(batch_size, dtype=jnp.int32)
        numbers = state.read(ring, jnp.maximum(state.count - 1 - depth, 0))
        # The next write is at `count`: it waits for this read.
        num_taken = jnp.minimum(state.count, batch_size) + dependencies.zero_depending_on(numbers)
        return state.ranks(anchors.count, numbers), depth < state.count, num_taken

    def num_pending(self, state: LifoState, anchors: Anchors) -> jax.Array:
        """Returns the number of anchors from the oldest one on the stack to the newest of all."""
        oldest = dependencies.materialize(lambda: state.numbers[state.bottom])
        return jnp.where(state.count > 0, (state.following - oldest).astype(jnp.int32), 0)

    def rebuild_index(
        self, ring: Ring, state: LifoState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> LifoState:
        """Keeps slots on the stack that are still anchors, and adds new anchors. Costs O(N).

        If anchors are episodes, each is identified by its position counted from the newest.
        """
        if not entered.size:
            return _remove_departed(ring, state, new.count)
        index = jnp.arange(ring.capacity, dtype=jnp.int32)

        def find_slots(anchors: Anchors, ranks: jax.Array, valid: jax.Array) -> jax.Array:
            slots, _ = anchors.nth(jnp.where(valid, ranks, 0), jax.random.key(0))
            return jnp.where(valid, slots, ring.capacity)

        # Sets of slots as flags `[N]`: the slots that were anchors, and those on the stack.
        mark = lambda slots: jnp.zeros(ring.capacity, jnp.bool_).at[slots].set(True, mode="drop")
        ranks = state.ranks(old.count, state.read(ring, index))
        on_stack = mark(find_slots(old, ranks, index < state.count))
        was_anchor = mark(find_slots(old, index, index < old.count))
        # Put the anchors that were on the stack, and those that are new, on an empty stack.
        slots = find_slots(new, index, index < new.count)
        safe = jnp.minimum(slots, ring.capacity - 1)
        stays = (slots < ring.capacity) & (on_stack | ~was_anchor)[safe]
        to = jnp.where(stays, jnp.cumsum(stays, dtype=jnp.int32) - 1, ring.capacity)
        numbers = state.following - (new.count - index).astype(jnp.uint32)
        return state.replace(
            numbers=state.numbers.at[to].set(numbers, mode="drop"),
            bottom=jnp.zeros_like(state.bottom),
            count=jnp.sum(stays, dtype=jnp.int32),
        )

    def import_state(
        self, state: LifoState, old: LifoState, slots: jax.Array, new_slots: jax.Array
    ) -> LifoState:
        """Removes the anchors that were drawn from the other buffer's stack."""
        size, old_size = state.numbers.size, old.numbers.size
        # Read the other stack from its top.
        depth = jnp.arange(min(size, old_size), dtype=jnp.int32)
        at = (old.bottom + jnp.maximum(old.count - 1 - depth, 0)) % old_size
        # An anchor is identified by its age in anchors, which is the same in both buffers.
        age = old.following - old.numbers[at]
        stays = (depth < old.count) & (age <= state.count.astype(jnp.uint32))
        # Those that stay are the first ones from the top, and fill the new stack from its bottom.
        count = jnp.sum(stays, dtype=jnp.int32)
        to = jnp.where(stays, count - 1 - depth, size)
        numbers = state.numbers.at[to].set(state.following - age, mode="drop")
        return state.replace(numbers=numbers, bottom=jnp.zeros_like(state.bottom), count=count)


def _remove_departed(ring: Ring, state: LifoState, num_anchors: jax.Array) -> LifoState:
    """Removes all but the newest `num_anchors` anchors, int32 `[]`, from the bottom."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        at = jnp.minimum(middle, ring.capacity - 1)[None]
        departed = state.ranks(num_anchors, state.read(ring, at))[0] < 0
        searching = low < high
        low = jnp.where(searching & departed, middle + 1, low)
        return low, jnp.where(searching & ~departed, middle, high)

    # Numbers ascend from the bottom: a binary search finds the first that is an anchor still.
    bounds = (jnp.zeros_like(state.count), state.count)
    lost = dependencies.loop(ring.capacity.bit_length(), halve, bounds)[0]
    return state.replace(bottom=ring.slot_after(state.bottom, lost), count=state.count - lost)
