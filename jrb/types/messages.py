"""The messages between the parts of a buffer. N capacity, E environments, B batch, T time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb.keys import Keys
from jrb.ring import Occupancy, Ring


class MissingMethodError(TypeError):
    """A call needs a method of a part which only the part's author can write."""


Item = Any
"""A pytree of arrays, as users have their transitions."""

PartState = Any
"""The state of a part, which its `init` made and its methods returned: a pytree of arrays."""

SlotsForLeaf = Callable[[str], jax.Array]
"""From the name of a leaf ("next/reward") to the slots it is read at, int32 `[B, ...]`."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The facts of a buffer that its parts may use.

    Attributes:
        ring: the ring's shape.
        keys: how the items are keyed.
        held: the slots that hold items; during a write, those that did before it.
        reads_windows: True if the unit reads rows of one environment that follow one another.
    """

    ring: Ring
    keys: Keys
    held: Occupancy
    reads_windows: bool = False


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """The slots that the rows of one call go to. A writer makes it, all other parts read it.

    With one clock for all environments, rows of time are counted once, `[T]`; with a clock for
    each (`jrb.PerEnvironment`), for each environment, `[T, E]`.

    Attributes:
        starts: int32 `[T]`, the slot of each row's environment 0; N if the row is dropped. For a
            writer that places items one by one, int32 `[T * E]`, their slots.
        slots: int32 `[T, E]`, the slot of each item; N if it is dropped.
        written: bool `[T]` or `[T, E]`, the rows of time that are not masked, also those that later
            rows of the same call overwrite.
        passed: int32 `[T]` or `[T, E]`, the running sum of `written`.
        expired: int32 `[]` or `[E]`, how many of the oldest rows leave, of those held before and
            those written.
        consecutive: True if nothing is dropped and all slots follow one another, so that a storage
            can write a slice.
        bounded: True if no more rows leave than are written.
        cuts: bool `[T, E]`, the items after which an episode ends whatever their flags say; None
            for none.
    """

    starts: jax.Array
    slots: jax.Array
    written: jax.Array
    passed: jax.Array
    expired: jax.Array
    consecutive: bool
    bounded: bool = True
    cuts: jax.Array | None = None

    @property
    def length(self) -> int:
        """T."""
        return self.passed.shape[0]

    @property
    def rows(self) -> jax.Array:
        """The number of rows of time that are written, int32 `[]` or `[E]`."""
        return self.passed[-1]

    @property
    def times(self) -> tuple[jax.Array, jax.Array]:
        """`written` and `passed` with an axis of clocks, `[T, 1]` or `[T, E]`."""
        wide = lambda array: array.reshape(self.length, -1)
        return wide(self.written), wide(self.passed)

    @property
    def lengths(self) -> tuple[jax.Array, jax.Array]:
        """The rows that leave and those that are written, by clock: int32 `[1]` or `[E]`."""
        return self.expired.reshape(-1), self.rows.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The slots that a sampler may draw, in the unit's order.

    Attributes:
        count: int32 `[]`.
        nth: from ranks, int32 `[B]` in [0, count), and a key, to the anchors of these ranks: slots,
            int32 `[B]`, and the probability of each slot given its rank, float32 `[B]`. The key is
            for units whose ranks count something larger than a slot, such as episodes; others
            ignore it, and their probability is 1.
        all_held: True if the anchors are all slots that hold items, in order.
    """

    count: jax.Array
    nth: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    all_held: bool = False

    def uniform_draw(self, ranks: jax.Array, mask: jax.Array, key: jax.Array) -> "Draw":
        """Returns the draw of anchors that were equally likely.

        Args:
            ranks: int32 `[B]`, among the anchors, in [0, count).
            mask: bool `[B]`, False for entries that are padding.
            key: the draw's key, for anchors that stand for more than a slot.
        """
        slots, within = self.nth(ranks, key)
        # Not divided by the count: XLA would round a quotient of quotients otherwise in a batch
        # than alone.
        chances = within * (1 / jnp.maximum(self.count, 1).astype(jnp.float32))
        return Draw(
            slots=slots,
            probabilities=jnp.where(mask, chances, 0.0),
            weights=mask.astype(jnp.float32),
            mask=mask,
        )


@dataclasses.dataclass(frozen=True)
class IncomingPriorities:
    """The slots of one write, and the priorities that came with its items.

    Attributes:
        slots: int32 `[K]`, K = T * E, the slot of each item; N if it is dropped. Unless rows become
            anchors later (`Unit.has_delayed_anchors`), `AnchorUpdate.entered` is in this order.
        row_mask: bool `[T, 1]` or `[T, E]`, the rows of time that are not masked.
        priorities: float32 `[K]`; None if none came.
        first_slot: int32 `[]`, the first slot if they all follow one another; else None.
    """

    slots: jax.Array
    row_mask: jax.Array
    priorities: jax.Array | None
    first_slot: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class AnchorUpdate:
    """The anchors that departed in one call, and then those that entered.

    Most samplers need `entered` and `departed(ring)` only.

    Attributes:
        entered: int32 `[K]`, slots that became anchors, or are anchors of a new item; N or more for
            padding.
        entered_count: int32 `[]`, how many anchors entered, including those that departed in the
            same call.
        departed_count: int32 `[]`, how many departed, including those that entered in the same
            call.
        departed_from: from a rank in the order before the write, int32 `[]`, to how many of those
            that departed had this rank or a later one, int32 `[]`.
        reordered: bool `[]`, False if survivors keep their order (new rank = old rank - departures
            before it) and arrivals are appended at the end; True otherwise.
        consecutive: True if `entered` is a run of slots without a gap or padding.
        expired: a run of slots that are no anchors any more, oldest first, unless they entered
            again; None if all of them did.
        most: the greatest number of slots in `expired`; None for no bound below N.
        removed: int32 `[M]`, further slots that are no anchors any more; N or more for padding.
        incoming: the slots that were written and their priorities; None if nothing was written.
    """

    entered: jax.Array
    entered_count: jax.Array
    departed_count: jax.Array
    departed_from: Callable[[jax.Array], jax.Array]
    reordered: jax.Array
    consecutive: bool = False
    expired: Occupancy | None = None
    most: int | None = None
    removed: jax.Array | None = None
    incoming: IncomingPriorities | None = None

    def departed(self, ring: Ring) -> jax.Array:
        """Returns the slots that are no anchors any more, unless they entered again, int32 `[M]`.

        N or more for padding. M is N if more rows departed than were written, else it does not grow
        with N.
        """
        removed = jnp.zeros(0, jnp.int32) if self.removed is None else self.removed
        if self.expired is None:
            return removed
        most = ring.capacity if self.most is None else self.most
        return jnp.concatenate([self.expired.run(ring, most), removed])


class Draw(pytree.State):
    """The anchors that a sampler drew.

    Attributes:
        slots: int32 `[B]`, anchors; any slot where `mask` is False.
        probabilities: float32 `[B]`, of drawing each; 0 where `mask` is False.
        weights: float32 `[B]`, importance weights; 0 where `mask` is False.
        mask: bool `[B]`, False where there was nothing to draw.
        draws: int32 `[B]`, how often each was drawn before. Samplers leave it out; the engine sets
            it if draws are counted.
        sampler: int32 `[B]`, which of several samplers drew each; None from a single one.
    """

    slots: jax.Array
    probabilities: jax.Array
    weights: jax.Array
    mask: jax.Array
    draws: jax.Array | None = None
    sampler: jax.Array | None = None


class DrawCounts(pytree.State):
    """The base of sampler states that can count draws. The engine makes and updates the counts.

    Attributes:
        draws: int32 `[N]`, how often the item in each slot was drawn; None if that is not counted.
    """

    draws: jax.Array | None = None


class ShardStats(pytree.State):
    """The statistics that the sampler of one shard reports to all shards.

    Attributes:
        num_anchors: int32 `[]`, its anchors.
        mass: float32 `[]`, the sum of the masses of its anchors: shards are drawn from in
            proportion to it.
        num_drawable: int32 `[]`, the anchors that may be drawn while no shard has mass.
        min_mass: float32 `[]`, the least positive mass of an anchor; infinite if that is not known.
        max_priority: float32 `[]`, the greatest priority that it has seen.
    """

    num_anchors: jax.Array
    mass: jax.Array
    num_drawable: jax.Array
    min_mass: jax.Array
    max_priority: jax.Array

    @classmethod
    def uniform(cls, anchors: Anchors) -> "ShardStats":
        """Returns those of a shard that draws all these anchors with the same probability."""
        return cls(
            num_anchors=anchors.count,
            mass=anchors.count.astype(jnp.float32),
            num_drawable=anchors.count,
            min_mass=jnp.ones((), jnp.float32),
            max_priority=jnp.zeros((), jnp.float32),
        )


@dataclasses.dataclass(frozen=True)
class AuxRead:
    """An extra read from one of the unit's arrays whose result goes to `Sample.info`.

    It is gathered together with the items, so that later writes are ordered after it.

    Attributes:
        array: `[N]`.
        slots: int32 `[B, L]`, the slots it is read at.
        postprocess: from the entries that were read, `[B, L]`, to the value in `Sample.info`.
    """

    array: jax.Array
    slots: jax.Array
    postprocess: Callable[[jax.Array], jax.Array]

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "AuxRead":
        """Returns this read with `function` applied to its value."""
        inner = self.postprocess
        return dataclasses.replace(self, postprocess=lambda entries: function(inner(entries)))


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The reads of a unit for a batch of anchors.

    Attributes:
        where: the slots to read, leaf by leaf.
        mask: bool `[B]` or `[B, L]`, which entries are real.
        info: the entries of `Sample.info`, each an array or an `AuxRead`. Transforms use the one
            named "is_last", bool like the mask, as ends of episodes.
        residuals: values that `reduce` needs, arrays or not.
    """

    where: SlotsForLeaf
    mask: jax.Array
    info: dict[str, Any]
    residuals: Any = None

    @property
    def aux_reads(self) -> dict[str, AuxRead]:
        """The entries of `info` that are still to be read."""
        return {name: it for name, it in self.info.items() if isinstance(it, AuxRead)}


@dataclasses.dataclass(frozen=True)
class TransformContext:
    """The facts of a batch that a transform may use.

    Attributes:
        key: a PRNG key of its own.
        mask: bool `[B]` or `[B, L]`, which entries are real.
        keys: how the items are keyed.
        state: the transform's own, if it has one (see `StatefulTransform`).
        ends: bool like `mask`, the rows that end their episode by what the unit knows, also where
            no flag says so (`info["is_last"]`); None if it does not know.
    """

    key: jax.Array
    mask: jax.Array
    keys: Keys
    state: PartState = None
    ends: jax.Array | None = None
