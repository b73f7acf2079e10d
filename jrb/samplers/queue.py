"""First in, first out; and the base of samplers that draw each anchor once, in order."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb.ring import Ring
from jrb.types import Anchors, AnchorUpdate, Draw, DrawCounts, Sampler
from jrb.types.messages import PartState


class OnceInOrder(Sampler):
    """Draws each anchor once, in the order in which they entered, or in reverse.

    Its state has `count`, int32 `[]`, the anchors that were not drawn yet.
    """

    in_order: ClassVar[bool] = True
    consumes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.flag("count_draws", self.count_draws)

    def ready(self, state: PartState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if an anchor was not drawn yet."""
        return state.count > 0


class QueueState(DrawCounts):
    """The number of anchors that a queue still has to give.

    Attributes:
        count: int32 `[]`, the anchors not drawn yet, always the newest ones.
    """

    count: jax.Array = pytree.tally()


@pytree.component
class Queue(OnceInOrder):
    """Draws each anchor once, oldest first: for data that is used once, as on policy.

    `draw` takes from the queue, `sample` looks at its head. If fewer than B are left, the batch is
    masked at its end. An item that is overwritten before it was drawn is lost. The key is not used.

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

    def init(self, ring: Ring) -> QueueState:
        """Returns an empty queue."""
        return QueueState(count=jnp.zeros((), jnp.int32))

    def on_write(
        self, ring: Ring, state: QueueState, change: AnchorUpdate, anchors: Anchors
    ) -> QueueState:
        """Appends the anchors that entered, and removes those that departed before their turn."""
        before = anchors.count + change.departed_count - change.entered_count
        lost = change.departed_from(jnp.maximum(before - state.count, 0))
        pending = state.count + change.entered_count - lost
        return state.replace(count=jnp.clip(pending, 0, anchors.count))

    def draw(
        self,
        ring: Ring,
        state: QueueState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[QueueState, Draw]:
        """Draws the B anchors at the head of the queue."""
        offset = jnp.arange(batch_size, dtype=jnp.int32)
        mask = offset < state.count
        ranks = jnp.where(mask, anchors.count - state.count + offset, 0)
        after = state.replace(count=state.count - jnp.minimum(state.count, batch_size))
        return after, anchors.uniform_draw(ranks, mask, key)

    def num_pending(self, state: QueueState, anchors: Anchors) -> jax.Array:
        """Returns the length of the queue."""
        return state.count

    def rebuild_index(
        self, ring: Ring, state: QueueState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> QueueState:
        """Keeps the length of the queue, if there are so many anchors: the newest ones."""
        return state.replace(count=jnp.minimum(state.count, new.count))

    def import_state(
        self, state: QueueState, old: QueueState, slots: jax.Array, new_slots: jax.Array
    ) -> QueueState:
        """Drops from the queue what was drawn from the other buffer's queue."""
        return state.replace(count=jnp.minimum(state.count, old.count))
