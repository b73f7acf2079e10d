"""Last in, first out."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import checks, pytree
from jrb._util import tree as trees
from jrb._xla import dependencies
from jrb.ring import Ring
from jrb.types import Anchors, AnchorUpdate, Draw, DrawCounts, Sampler


class LifoState(DrawCounts):
    """What a stack still has to give.

    Anchors are numbered as they enter, modulo 2^32. They leave in that order, so that those there
    are have the last numbers, and a number says at which place its anchor stands now.

    Attributes:
        numbers: uint32 `[N]`, around a ring, of the anchors not drawn yet, oldest first.
        bottom: int32 `[]`, where the oldest of them stands.
        count: int32 `[]`, how many they are.
        following: uint32 `[]`, the number of the next anchor.
        told: whether it belongs to a buffer, which tells it of all anchors; no array.
    """

    numbers: jax.Array
    bottom: jax.Array = pytree.cursor()
    count: jax.Array = pytree.tally()
    following: jax.Array
    told: bool = pytree.static(default=False)


@pytree.component
class Lifo(Sampler):
    """Draws each anchor once, newest first: always the newest of those not drawn yet.

    `draw` takes from the stack, `sample` looks at its top; the first of a batch is the newest.
    Where too little is there, the batch is masked at its end. What is overwritten before it was
    drawn is lost. The key is not used. 4 bytes a slot; a draw costs O(B), a write O(log N) more.

    Anchors have to leave in the order in which they came: over several environments, stacks of
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
    in_order: ClassVar[bool] = True
    consumes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.flag("count_draws", self.count_draws)

    def check(self, ring: Ring, unit: Any) -> None:
        """Raises where anchors may leave before others that came before them."""
        if ring.envs > 1 and unit.max_entry_delay != 0:
            raise ValueError(
                f"Lifo: expected anchors that leave in the order in which they came, got "
                f"{type(unit).__name__} over {ring.envs} environments, of which some leave early. "
                "Use jrb.Queue(), a single environment, or another unit."
            )

    def init(self, ring: Ring) -> LifoState:
        """Nothing to give."""
        return LifoState(
            numbers=jnp.zeros(ring.capacity, jnp.uint32),
            bottom=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            following=jnp.zeros((), jnp.uint32),
            draws=self.no_draws(ring),
        )

    def joined(self, state: LifoState, has_delayed_anchors: bool) -> LifoState:
        """Told of every anchor from here on."""
        return state.replace(told=True)

    def on_write(
        self, ring: Ring, state: LifoState, change: AnchorUpdate, anchors: Anchors
    ) -> LifoState:
        """What left is lost from the bottom, what entered and stays is laid on top.

        If anchors left otherwise than in their order, nobody knows which: then all are lost.
        """
        in_turn = change.left_from(change.left_count) == 0
        following = state.following + change.entered_count.astype(jnp.uint32)
        state = state.replace(following=following, count=jnp.where(in_turn, state.count, 0))
        lost = _older(ring, state, anchors.count)
        state = state.replace(bottom=ring.slot_after(state.bottom, lost), count=state.count - lost)
        given = 0 if change.given is None else change.given.slots.size
        most = min(max(change.entered.size, given), ring.capacity)
        return _laid(ring, state, jnp.minimum(change.entered_count, anchors.count), most)

    def draw(
        self,
        ring: Ring,
        state: LifoState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[LifoState, Draw]:
        """The B on top."""
        place = jnp.arange(batch_size, dtype=jnp.int32)
        mask = place < state.count
        numbers = _numbers(ring, state, jnp.where(mask, state.count - 1 - place, 0))
        chosen = _place(state, anchors.count, numbers)
        taken = jnp.minimum(state.count, batch_size) + dependencies.token(numbers)
        after = state.replace(count=state.count - taken)
        return after, anchors.drawn(jnp.where(mask, chosen, 0), mask, key)

    def ready(self, state: LifoState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Whether something is there."""
        return state.count > 0

    def unread(self, state: LifoState, anchors: Anchors) -> jax.Array:
        """All from the oldest that was not drawn."""
        oldest = dependencies.read(lambda: state.numbers[state.bottom])
        return jnp.where(state.count > 0, (state.following - oldest).astype(jnp.int32), 0)

    def has_unread(self, state: LifoState) -> jax.Array:
        """Whether something is there."""
        return state.count > 0

    def rebuild_index(
        self, ring: Ring, state: LifoState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> LifoState:
        """Anchors that were drawn are not drawn again; those that appear are. Costs O(N).

        Where anchors are episodes, the same number of steps from the newest is the same one.
        """
        if not entered.size:
            lost = _older(ring, state, new.count)
            return state.replace(
                bottom=ring.slot_after(state.bottom, lost), count=state.count - lost
            )
        place = jnp.arange(ring.capacity, dtype=jnp.int32)
        slots = lambda anchors, at, here: jnp.where(
            here, anchors.nth(jnp.where(here, at, 0), jax.random.key(0))[0], ring.capacity
        )
        mark = lambda slots: jnp.zeros(ring.capacity, jnp.bool_).at[slots].set(True, mode="drop")
        at = _place(state, old.count, _numbers(ring, state, place))
        kept = mark(slots(old, at, place < state.count))
        known = mark(slots(old, place, place < old.count))
        now = slots(new, place, place < new.count)
        gives = (now < ring.capacity) & (kept | ~known)[jnp.minimum(now, ring.capacity - 1)]
        to = jnp.where(gives, jnp.cumsum(gives, dtype=jnp.int32) - 1, ring.capacity)
        numbers = state.following - (new.count - place).astype(jnp.uint32)
        return state.replace(
            numbers=state.numbers.at[to].set(numbers, mode="drop"),
            bottom=jnp.zeros_like(state.bottom),
            count=jnp.sum(gives, dtype=jnp.int32),
        )

    def adopt(
        self, state: LifoState, old: LifoState, slots: jax.Array, places: jax.Array
    ) -> LifoState:
        """What was drawn from another buffer's stack is not drawn again."""
        size, old_size = state.numbers.size, old.numbers.size
        down = jnp.arange(min(size, old_size), dtype=jnp.int32)  # from the top
        at = (old.bottom + jnp.maximum(old.count - 1 - down, 0)) % old_size
        age = old.following - old.numbers[at]
        here = (down < old.count) & (age <= state.count.astype(jnp.uint32))
        count = jnp.sum(here, dtype=jnp.int32)
        to = jnp.where(here, count - 1 - down, size)
        numbers = state.numbers.at[to].set(state.following - age, mode="drop")
        return state.replace(numbers=numbers, bottom=jnp.zeros_like(state.bottom), count=count)

    def merged(self, states: list[LifoState]) -> LifoState:
        """Any of them: shards are put together when nothing is left to draw."""
        return states[0]


def _numbers(ring: Ring, state: LifoState, at: jax.Array) -> jax.Array:
    """The numbers so far from the bottom, uint32 like `at` (int32 `[B]`, in [0, N))."""
    index = ring.slot_after(state.bottom, at)
    dims = lax.GatherDimensionNumbers((), (0,), (0,))
    read = lambda: lax.gather(state.numbers, index[:, None], dims, (1,), mode="clip")
    return dependencies.read(read)


def _place(state: LifoState, anchors: jax.Array, numbers: jax.Array) -> jax.Array:
    """The places among so many anchors, int32 `[]`, of those with these numbers, int32 `[B]`."""
    return anchors - (state.following - numbers).astype(jnp.int32)


def _older(ring: Ring, state: LifoState, anchors: jax.Array) -> jax.Array:
    """How many from the bottom are none of the last so many anchors any more, int32 `[]`."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        at = jnp.minimum(middle, ring.capacity - 1)[None]
        gone = _place(state, anchors, _numbers(ring, state, at))[0] < 0
        searching = low < high
        low = jnp.where(searching & gone, middle + 1, low)
        return low, jnp.where(searching & ~gone, middle, high)

    start = (jnp.zeros_like(state.count), state.count)
    return dependencies.loop(ring.capacity.bit_length(), halve, start)[0]


def _laid(ring: Ring, state: LifoState, new: jax.Array, most: int) -> LifoState:
    """The last `new` anchors, int32 `[]`, of at most so many, are laid on top."""
    place = jnp.arange(most, dtype=jnp.int32)
    at = ring.slot_after(state.bottom, jnp.minimum(state.count + place, ring.capacity))
    at = jnp.where(place < new, at, ring.capacity)
    numbers = state.following - (new - place).astype(jnp.uint32)
    return state.replace(numbers=trees.put(state.numbers, at, numbers), count=state.count + new)
