"""A sampler of epochs, in each of which every anchor is drawn once or a few times."""

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
        seed: uint32 `[2]`, the seed of the permutation of this pass.
        length: int32 `[]`, the number of anchors at the start of the epoch; 0 to begin a new one.
        position: int32 `[]`, the number of anchors that this pass has drawn, with padding.
        passes: int32 `[]`, the number of passes begun in this epoch.
        left: int32 `[]`, the number of anchors that departed in this epoch, modulo `_rank_period`.
    """

    seed: jax.Array
    length: jax.Array = pytree.tally()
    position: jax.Array = pytree.tally()
    passes: jax.Array = pytree.tally()
    left: jax.Array = pytree.tally()


@pytree.component
class WithoutReplacement(Sampler):
    """Draws each anchor once per epoch, or `uses` times, in random order, in O(1) memory.

    `draw` advances the epoch; `sample` returns what `draw` with the same key would. An epoch covers
    the slots that are held at its start: rows that are written later belong to the next epoch, and
    a slot that is overwritten gives its new item. An epoch has `uses` passes, each in another
    order, so that every anchor is drawn once before any is drawn twice. The draw after the last
    pass begins a new epoch.

    The key chooses the order when a pass begins; other keys have no effect. If the last batch of a
    pass is short, its end is masked. If a unit has fewer anchors than slots, an anchor that
    departed is replaced by one that entered since, or masked; and if a write reorders the anchors
    that remain (episodes, frame stacks or strict n-step returns of several environments), the next
    draw begins a new epoch.

    Attributes:
        drop_last: if True, a short last batch is left out, and the next pass begins instead.
        shuffle: if True, the order is random; otherwise oldest first.
        uses: the number of passes in an epoch, each of which draws every anchor once.
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).

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
        """Returns an epoch without anchors, which has ended."""
        tallies = ("length", "position", "passes", "left")
        zeros = {name: jnp.zeros((), jnp.int32) for name in tallies}
        return EpochState(seed=jnp.zeros(2, jnp.uint32), **zeros)

    def on_write(
        self, ring: Ring, state: EpochState, change: AnchorUpdate, anchors: Anchors
    ) -> EpochState:
        """Counts departed anchors, which shift ranks; ends the epoch if ranks are reordered."""
        # Survivors have moved up by the departures, modulo the period of ranks.
        departed = state.left.astype(jnp.uint32) + change.departed_count.astype(jnp.uint32)
        shift = (departed % _rank_period(ring, state, anchors)).astype(jnp.int32)
        # Length 0 ends the epoch: the next draw finds nothing left of it.
        length = jnp.where(change.reordered, 0, state.length)
        return state.replace(left=shift, length=length)

    def rebuild_index(
        self, ring: Ring, state: EpochState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> EpochState:
        """Continues the epoch if all held rows were anchors and still are; else ends it."""
        is_same = (old.count == new.count) & (old.all_held and new.all_held)
        return state.replace(length=jnp.where(is_same, state.length, 0))

    def draw(
        self,
        ring: Ring,
        state: EpochState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[EpochState, Draw]:
        """Draws the next B anchors of the pass, or the first B of the next pass."""
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
        # The next positions of the pass, each with the rank that it had when the epoch began.
        offset = epoch.position + jnp.arange(batch_size, dtype=jnp.int32)
        # The end of a short last batch is masked.
        inside = offset < epoch.length
        if self.drop_last:
            inside = inside & (epoch.position + batch_size <= epoch.length)
        first_rank = jnp.where(inside, offset, 0)
        if self.shuffle:
            first_rank = random_bits.permute(epoch.seed, epoch.length, first_rank)
        period = _rank_period(ring, epoch, anchors).astype(jnp.int32)
        # Since the epoch began, `left` anchors departed at the front: ranks moved by as many.
        ranks = first_rank - epoch.left
        # Anchors that departed are replaced by some that entered since.
        ranks = jnp.where(ranks < 0, ranks + period, ranks)
        mask = inside & (ranks < anchors.count)
        # The last draw goes beyond the end of the pass: `put_back` has to know where it began.
        epoch = epoch.replace(position=epoch.position + batch_size)
        return epoch, anchors.uniform_draw(jnp.where(mask, ranks, 0), mask, key)

    def put_back(self, state: EpochState, mask: jax.Array, kept: jax.Array) -> EpochState:
        """Returns the state in which the pass continues with the last anchors that it drew."""
        return state.replace(position=state.position - (mask.size - kept))

    def ready(self, state: EpochState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if there is an anchor; with `drop_last`, if there is a full batch."""
        return anchors.count >= (batch_size if self.drop_last and batch_size else 1)

    def import_state(
        self, state: EpochState, old: EpochState, slots: jax.Array, new_slots: jax.Array
    ) -> EpochState:
        """Returns `state`: the next draw begins an epoch, as items are in other slots."""
        return state


def _rank_period(ring: Ring, state: EpochState, anchors: Anchors) -> jax.Array:
    """Returns the number of departures after which a rank belongs to another anchor, uint32 `[]`.

    It is N if all held slots are anchors, so that a rank stays with its slot; else the length of
    the epoch. It is constant within an epoch, or an anchor could be drawn twice.
    """
    length = jnp.maximum(state.length, 1)
    return (jnp.full_like(length, ring.capacity) if anchors.all_held else length).astype(jnp.uint32)
