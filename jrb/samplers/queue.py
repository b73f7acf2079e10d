"""First in, first out."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb.ring import Ring
from jrb.types import Anchors, AnchorUpdate, Draw, DrawCounts, Sampler


class QueueState(DrawCounts):
    """What a queue still has to give.

    Attributes:
        count: int32 `[]`, the anchors not drawn yet, always the newest ones.
        told: whether it belongs to a buffer, which tells it of all anchors; no array.
    """

    count: jax.Array = pytree.tally()
    told: bool = pytree.static(default=False)


@pytree.component
class Queue(Sampler):
    """Draws each anchor once, oldest first: for data that is used once, as on policy.

    `draw` takes from the queue, `sample` looks at its head. Where too little is there, the batch is
    masked at its end. What is overwritten before it was drawn is lost. The key is not used.

    Attributes:
        count_draws: whether to count how often each item is drawn (see `jrb.types.Sampler`).

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
    in_order: ClassVar[bool] = True
    consumes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.flag("count_draws", self.count_draws)

    def init(self, ring: Ring) -> QueueState:
        """An empty queue."""
        return QueueState(count=jnp.zeros((), jnp.int32), draws=self.no_draws(ring))

    def joined(self, state: QueueState, has_delayed_anchors: bool) -> QueueState:
        """Told of every anchor from here on."""
        return state.replace(told=True)

    def on_write(
        self, ring: Ring, state: QueueState, change: AnchorUpdate, anchors: Anchors
    ) -> QueueState:
        """What entered joins the end of the queue, what left is lost."""
        before = anchors.count + change.left_count - change.entered_count
        unread = state.count + change.entered_count
        lost = change.left_from(jnp.maximum(before - state.count, 0))
        count = jnp.clip(unread - lost, 0, anchors.count)
        return state.replace(count=count)

    def draw(
        self,
        ring: Ring,
        state: QueueState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[QueueState, Draw]:
        """The B at the head of the queue."""
        place = jnp.arange(batch_size, dtype=jnp.int32)
        mask = place < state.count
        chosen = jnp.where(mask, anchors.count - state.count + place, 0)
        taken = jnp.minimum(state.count, batch_size)
        after = state.replace(count=state.count - taken)
        return after, anchors.drawn(chosen, mask, key)

    def ready(self, state: QueueState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Whether something is in the queue."""
        return state.count > 0

    def unread(self, state: QueueState, anchors: Anchors) -> jax.Array:
        """All that was not drawn."""
        return state.count

    def has_unread(self, state: QueueState) -> jax.Array:
        """Whether something is in the queue."""
        return state.count > 0

    def rebuild_index(
        self, ring: Ring, state: QueueState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> QueueState:
        """As many as before, if there are, are still to be drawn: the newest ones."""
        return state.replace(count=jnp.minimum(state.count, new.count))

    def adopt(
        self, state: QueueState, old: QueueState, slots: jax.Array, places: jax.Array
    ) -> QueueState:
        """What was drawn from another buffer's queue is not drawn again."""
        return state.replace(count=jnp.minimum(state.count, old.count))

    def merged(self, states: list[QueueState]) -> QueueState:
        """Any of them: shards are put together when nothing is left to draw."""
        return states[0]
