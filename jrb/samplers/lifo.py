"""Last in, first out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import pytree
from jrb._xla import dependencies, scatter
from jrb.ring import Ring
from jrb.samplers.queue import OnceInOrder
from jrb.types import Anchors, AnchorUpdate, Draw, DrawCounts


class LifoState(DrawCounts):
    """The stack of anchors that were not drawn yet.

    Anchors are numbered as they enter, modulo 2^32. They depart in that order, so that the anchors
    of a buffer have consecutive numbers, and a number gives the rank of its anchor.

    Attributes:
        numbers: uint32 `[N]`, of the anchors not drawn yet, oldest first, around a ring.
        bottom: int32 `[]`, the index of the oldest of them.
        count: int32 `[]`, how many there are.
        following: uint32 `[]`, the number of the next anchor.
    """

    numbers: jax.Array
    bottom: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()
    following: jax.Array


@pytree.component
class Lifo(OnceInOrder):
    """Draws each anchor once, newest first: always the newest of those not drawn yet.

    `draw` takes from the stack, `sample` looks at its top; the first of a batch is the newest. If
    fewer than B are left, the batch is masked at its end. An item that is overwritten before it was
    drawn is lost. The key is not used. 4 bytes a slot; a draw costs O(B), a write O(log N) more.

    Anchors have to depart in the order in which they entered: over several environments, stacks of
    frames and strict n-step returns do not, and are refused.

    Attributes:
        count_draws: whether to count how often each item is drawn (see `jrb.types.Sampler`).

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
        """Raises if anchors may depart before others that entered before them."""
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
        # Anchors that departed out of order cannot be told: then the whole stack is lost.
        in_order = change.departed_from(change.departed_count) == 0
        following = state.following + change.entered_count.astype(jnp.uint32)
        state = state.replace(following=following, count=jnp.where(in_order, state.count, 0))
        state = _without_departed(ring, state, anchors.count)
        new = jnp.minimum(change.entered_count, anchors.count)
        num_written = 0 if change.incoming is None else change.incoming.slots.size
        offset = jnp.arange(
            min(max(change.entered.size, num_written), ring.capacity), dtype=jnp.int32
        )
        at = ring.slot_after(state.bottom, jnp.minimum(state.count + offset, ring.capacity))
        at = jnp.where(offset < new, at, ring.capacity)
        numbers = state.following - (new - offset).astype(jnp.uint32)
        return state.replace(
            numbers=scatter.put(state.numbers, at, numbers), count=state.count + new
        )

    def draw(
        self,
        ring: Ring,
        state: LifoState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[LifoState, Draw]:
        """Draws the B anchors on top."""
        offset = jnp.arange(batch_size, dtype=jnp.int32)
        mask = offset < state.count
        numbers = _read_numbers(ring, state, jnp.where(mask, state.count - 1 - offset, 0))
        ranks = _ranks(state, anchors.count, numbers)
        taken = jnp.minimum(state.count, batch_size) + dependencies.zero_depending_on(numbers)
        after = state.replace(count=state.count - taken)
        return after, anchors.uniform_draw(jnp.where(mask, ranks, 0), mask, key)

    def num_pending(self, state: LifoState, anchors: Anchors) -> jax.Array:
        """Returns the number of anchors from the oldest that was not drawn on."""
        oldest = dependencies.materialize(lambda: state.numbers[state.bottom])
        return jnp.where(state.count > 0, (state.following - oldest).astype(jnp.int32), 0)

    def rebuild_index(
        self, ring: Ring, state: LifoState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> LifoState:
        """Keeps the slots on the stack that are anchors still, and adds new ones. Costs O(N).

        Where anchors are episodes, they are identified by their number of steps from the newest.
        """
        if not entered.size:
            return _without_departed(ring, state, new.count)
        index = jnp.arange(ring.capacity, dtype=jnp.int32)
        slots = lambda anchors, ranks, valid: jnp.where(
            valid, anchors.nth(jnp.where(valid, ranks, 0), jax.random.key(0))[0], ring.capacity
        )
        mark = lambda slots: jnp.zeros(ring.capacity, jnp.bool_).at[slots].set(True, mode="drop")
        ranks = _ranks(state, old.count, _read_numbers(ring, state, index))
        on_stack = mark(slots(old, ranks, index < state.count))
        was_anchor = mark(slots(old, index, index < old.count))
        now = slots(new, index, index < new.count)
        stays = (now < ring.capacity) & (on_stack | ~was_anchor)[
            jnp.minimum(now, ring.capacity - 1)
        ]
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
        """Removes from the stack what was drawn from the other buffer's stack."""
        size, old_size = state.numbers.size, old.numbers.size
        depth = jnp.arange(min(size, old_size), dtype=jnp.int32)  # from the top
        at = (old.bottom + jnp.maximum(old.count - 1 - depth, 0)) % old_size
        age = old.following - old.numbers[at]
        stays = (depth < old.count) & (age <= state.count.astype(jnp.uint32))
        count = jnp.sum(stays, dtype=jnp.int32)
        to = jnp.where(stays, count - 1 - depth, size)
        numbers = state.numbers.at[to].set(state.following - age, mode="drop")
        return state.replace(numbers=numbers, bottom=jnp.zeros_like(state.bottom), count=count)


def _read_numbers(ring: Ring, state: LifoState, height: jax.Array) -> jax.Array:
    """Returns the numbers at heights above the bottom, int32 `[B]` in [0, N), as uint32 `[B]`."""
    index = ring.slot_after(state.bottom, height)
    dims = lax.GatherDimensionNumbers((), (0,), (0,))
    read = lambda: lax.gather(state.numbers, index[:, None], dims, (1,), mode="clip")
    return dependencies.materialize(read)


def _ranks(state: LifoState, num_anchors: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns the ranks of anchors with these numbers, int32 `[B]`; negative if they departed."""
    return num_anchors - (state.following - numbers).astype(jnp.int32)


def _without_departed(ring: Ring, state: LifoState, num_anchors: jax.Array) -> LifoState:
    """Removes those from the bottom that are none of the newest so many anchors, int32 `[]`."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        at = jnp.minimum(middle, ring.capacity - 1)[None]
        departed = _ranks(state, num_anchors, _read_numbers(ring, state, at))[0] < 0
        searching = low < high
        low = jnp.where(searching & departed, middle + 1, low)
        return low, jnp.where(searching & ~departed, middle, high)

    # Numbers ascend from the bottom: a binary search finds the first that is an anchor still.
    bounds = (jnp.zeros_like(state.count), state.count)
    lost = dependencies.loop(ring.capacity.bit_length(), halve, bounds)[0]
    return state.replace(bottom=ring.slot_after(state.bottom, lost), count=state.count - lost)
