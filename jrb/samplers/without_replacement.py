"""Epochs: every anchor once, or a few times, then again in another order."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jrb._util import checks, pytree
from jrb._xla import random_bits
from jrb.ring import Ring
from jrb.types import Anchors, AnchorUpdate, Draw, DrawCounts, Sampler


class EpochState(DrawCounts):
    """The progress of an epoch.

    Attributes:
        seed: uint32 `[2]`, of the permutation of this pass.
        length: int32 `[]`, the anchors there were at its start.
        position: int32 `[]`, how many of them this pass has drawn.
        passes: int32 `[]`, how many were begun, including this one.
        left: int32 `[]`, how many anchors have departed since, around the ring.
    """

    seed: jax.Array
    length: jax.Array = pytree.tally()
    position: jax.Array = pytree.tally()
    passes: jax.Array = pytree.tally()
    left: jax.Array = pytree.tally()


@pytree.component
class WithoutReplacement(Sampler):
    """Draws each anchor once an epoch, or `uses` times, in random order, in O(1) memory.

    `draw` moves on; `sample` shows what the next `draw` with the same key gives. An epoch is over
    the slots that were held at its start: rows written meanwhile join the next one, and a slot that
    was overwritten meanwhile gives its new item. It goes over them in `uses` passes, one after the
    other, each in an order of its own: the second drawing of anything comes after the first of
    everything. Then nothing of it is drawn until the next epoch, which the next draw begins.

    The key chooses the order when a pass begins; within one it changes nothing. The last batch of a
    pass is short: the rest of it is masked. Units with fewer anchors than slots: one that left
    gives one that came since, or a masked item; and where a write shuffles the anchors that stay
    (episodes, stacks or strict n-step returns of several environments), the next draw begins an
    epoch.

    Attributes:
        drop_last: whether a short last batch is left out, and the next pass begun instead.
        shuffle: whether the order is random; if not, anchors come in theirs, oldest first.
        uses: the number of passes of an epoch: each anchor is drawn once in each.
        count_draws: whether to count how often each item is drawn (see `jrb.types.Sampler`).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(8, batch_size=2, sampler=jrb.WithoutReplacement())
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(4)})
        >>> drawn = []
        >>> for _ in range(2):
        ...     state, batch = buffer.draw(state, jax.random.key(0))
        ...     drawn += batch.data["x"].tolist()
        >>> sorted(drawn)
        [0, 1, 2, 3]
    """

    drop_last: bool = False
    shuffle: bool = True
    uses: int = 1
    count_draws: bool = False
    consumes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("drop_last", "shuffle", "count_draws"):
            checks.flag(name, getattr(self, name))
        checks.count("uses", self.uses, 2**31 - 1)

    def init(self, ring: Ring) -> EpochState:
        """Returns the end of an epoch without anchors."""
        tallies = ("length", "position", "passes", "left")
        zeros = {name: jnp.zeros((), jnp.int32) for name in tallies}
        return EpochState(seed=jnp.zeros(2, jnp.uint32), **zeros)

    def on_write(
        self, ring: Ring, state: EpochState, change: AnchorUpdate, anchors: Anchors
    ) -> EpochState:
        """Shifts ranks by the anchors that departed, or ends the epoch where others move too."""
        # Survivors have moved up by the departures, modulo the turn of ranks.
        departed = state.left.astype(jnp.uint32) + change.departed_count.astype(jnp.uint32)
        left = (departed % _turn(ring, state, anchors)).astype(jnp.int32)
        # Length 0 ends the epoch: the next draw finds nothing left of it.
        length = jnp.where(change.reordered, 0, state.length)
        return state.replace(left=left, length=length)

    def rebuild_index(
        self, ring: Ring, state: EpochState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> EpochState:
        """Continues the epoch if all rows that are held are anchors still, else ends it."""
        same = (old.count == new.count) & (old.all_held and new.all_held)
        return state.replace(length=jnp.where(same, state.length, 0))

    def draw(
        self,
        ring: Ring,
        state: EpochState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[EpochState, Draw]:
        """Draws the next B of the pass, or the first B of the next one."""
        # This pass continues; if fewer than needed remain, the next one begins, or a new epoch.
        needed = batch_size if self.drop_last else 1
        over = state.position + needed > state.length
        ends = over & ((state.passes >= self.uses) | (state.length < needed))
        epoch = state.replace(
            seed=jnp.where(over, random_bits.seed(key), state.seed),
            position=jnp.where(over, 0, state.position),
            passes=jnp.where(ends, 0, state.passes) + over.astype(jnp.int32),
            length=jnp.where(ends, anchors.count, state.length),
            left=jnp.where(ends, 0, state.left),
        )
        offset = epoch.position + jnp.arange(batch_size, dtype=jnp.int32)
        # The rest of a short last batch is masked.
        inside = offset < epoch.length
        if self.drop_last:
            inside = inside & (epoch.position + batch_size <= epoch.length)
        first_rank = jnp.where(inside, offset, 0)  # at the beginning of the epoch
        if self.shuffle:
            first_rank = random_bits.permute(epoch.seed, epoch.length, first_rank)
        turn = _turn(ring, epoch, anchors).astype(jnp.int32)
        # Since the epoch began, `left` anchors departed at the front: ranks moved by as many.
        ranks = first_rank - epoch.left
        # Those that departed are, around the turn, anchors that entered since.
        ranks = jnp.where(ranks < 0, ranks + turn, ranks)
        mask = inside & (ranks < anchors.count)
        epoch = epoch.replace(position=epoch.position + jnp.sum(inside, dtype=jnp.int32))
        return epoch, anchors.uniform_draw(jnp.where(mask, ranks, 0), mask, key)

    def ready(self, state: EpochState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if there is an anchor; with `drop_last`, if there is a full batch."""
        return anchors.count >= (batch_size if self.drop_last and batch_size else 1)

    def import_state(
        self, state: EpochState, old: EpochState, slots: jax.Array, new_slots: jax.Array
    ) -> EpochState:
        """Begins an epoch with the next draw, as items are in other slots."""
        return state


def _turn(ring: Ring, state: EpochState, anchors: Anchors) -> jax.Array:
    """Returns after how many departures a rank of the epoch is another anchor's, uint32 `[]`.

    If all slots are anchors, after N, so that a rank stays with its slot; else after as many as the
    epoch began with. It never changes within an epoch, or an anchor might be drawn twice.
    """
    length = jnp.maximum(state.length, 1)
    return (jnp.full_like(length, ring.capacity) if anchors.all_held else length).astype(jnp.uint32)
