"""Epochs: everything once, then everything again in another order."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from jrb._base import permutation, pytree, random_bits
from jrb.ring import Ring
from jrb.samplers.uniform import draw_of
from jrb.types import Anchors, Change, Draw, Sampler


class Epoch(pytree.State):
    """How far an epoch is.

    Attributes:
        seed: uint32 `[2]`, which permutation it follows.
        length: int32 `[]`, the anchors there were at its start.
        position: int32 `[]`, how many of them were drawn.
        left: int32 `[]`, how many anchors have gone since, around the ring.
    """

    seed: jax.Array
    length: jax.Array = pytree.tally()
    position: jax.Array = pytree.tally()
    left: jax.Array = pytree.tally()


@pytree.component
class WithoutReplacement(Sampler):
    """Draws each anchor once an epoch, in random order, in O(1) memory.

    `draw` moves on; `sample` shows what the next `draw` with the same key gives. An epoch is over
    the slots that were held at its start: rows written meanwhile join the next one, and a slot that
    was overwritten meanwhile gives its new item. The key chooses the order when an epoch begins;
    within one it changes nothing. The last batch of an epoch is short: the rest of it is masked.
    Units with fewer anchors than slots: one that left gives one that came since, or a masked item;
    and where a write shuffles the anchors that stay (episodes, stacks or strict n-step returns of
    several environments), the next draw begins an epoch.

    Attributes:
        drop_last: whether a short last batch is left out, and the next epoch begun instead.
        shuffle: whether the order is random; if not, anchors come in theirs, oldest first.
    """

    drop_last: bool = False
    shuffle: bool = True
    consumes: ClassVar[bool] = True

    def init(self, ring: Ring) -> Epoch:
        """The end of an epoch without anchors."""
        zero = jnp.zeros((), jnp.int32)
        return Epoch(
            seed=jnp.zeros(2, jnp.uint32),
            length=zero,
            position=jnp.zeros_like(zero),
            left=jnp.zeros_like(zero),
        )

    def on_write(self, ring: Ring, state: Epoch, change: Change, anchors: Anchors) -> Epoch:
        """Anchors leave from the front: places move. Where others move too, the epoch ends."""
        turn = _turn(ring, state, anchors)
        left = (state.left.astype(jnp.uint32) + change.left_count.astype(jnp.uint32)) % turn
        length = jnp.where(change.moved, 0, state.length)
        return state.replace(left=left.astype(jnp.int32), length=length)

    def draw(
        self,
        ring: Ring,
        state: Epoch,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[Epoch, Draw]:
        """The next B of the epoch, or the first B of the next one."""
        epoch = self._continued(state, anchors, key, batch_size)
        place = epoch.position + jnp.arange(batch_size, dtype=jnp.int32)
        inside = place < epoch.length
        if self.drop_last:
            inside = inside & (epoch.position + batch_size <= epoch.length)
        at = jnp.where(inside, place, 0)
        if self.shuffle:
            at = permutation.permute(epoch.seed, epoch.length, at)
        turn = _turn(ring, epoch, anchors).astype(jnp.int32)
        behind = at - epoch.left
        chosen = jnp.where(behind < 0, behind + turn, behind)
        mask = inside & (chosen < anchors.count)
        epoch = epoch.replace(position=epoch.position + jnp.sum(inside, dtype=jnp.int32))
        return epoch, draw_of(anchors, jnp.where(mask, chosen, 0), mask, key)

    def _continued(self, state: Epoch, anchors: Anchors, key: jax.Array, batch_size: int) -> Epoch:
        """The same epoch, or a new one if too little of it remains."""
        needed = batch_size if self.drop_last else 1
        over = state.position + needed > state.length
        zero = jnp.zeros_like(state.position)
        new = Epoch(seed=random_bits.seed(key), length=anchors.count, position=zero, left=zero)
        return jax.tree.map(lambda a, b: jnp.where(over, a, b), new, state)

    def ready(self, state: Epoch, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Whether there is an anchor; with `drop_last`, whether there is a whole batch."""
        return anchors.count >= (batch_size if self.drop_last and batch_size else 1)


def _turn(ring: Ring, state: Epoch, anchors: Anchors) -> jax.Array:
    """After how many that left a place of the epoch is another anchor's again, uint32 `[]`.

    Where all slots are anchors that is the ring, so that a place stays a slot's; else as many as
    the epoch began with. It never changes within an epoch, or an anchor might be drawn twice.
    """
    length = jnp.maximum(state.length, 1)
    return (jnp.full_like(length, ring.capacity) if anchors.all_held else length).astype(jnp.uint32)
