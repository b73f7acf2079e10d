"""What the parts of a buffer say to each other. N capacity, E environments, B batch, T time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb.keys import Keys
from jrb.occupancy import Occupancy
from jrb.ring import Ring


class MissingMethodError(TypeError):
    """A call needs a method of a part which only the part's author can write."""


Item = Any
"""A pytree of arrays, as users have their transitions."""

PartState = Any
"""What a part's own `init` made, and its methods returned since: a pytree of arrays."""

SlotsForLeaf = Callable[[str], jax.Array]
"""From the name of a leaf ("next/reward") to the slots it is read at, int32 `[B, ...]`."""


@dataclasses.dataclass(frozen=True)
class ContiguousSlots:
    """Slots `[B, L]` of one leaf that follow one another, slot 0 after the last: runs of the ring.

    Storages need not know; one that does can read runs where it would read slots.

    Attributes:
        where: the slots.
    """

    where: SlotsForLeaf

    def __call__(self, name: str) -> jax.Array:
        """The slots that a leaf is read at."""
        return self.where(name)


@dataclasses.dataclass(frozen=True)
class Context:
    """What a part may know of the buffer that it belongs to.

    Attributes:
        ring: the ring's shape.
        keys: how the items are keyed.
        held: the slots that hold items; while something is written, those that did before.
    """

    ring: Ring
    keys: Keys
    held: Occupancy


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """Where the rows of one call go.

    Attributes:
        starts: int32 `[T]`, the slot of each row's environment 0; N where the row is dropped. For a
            writer that places items one by one, int32 `[T * E]`, their slots.
        slots: int32 `[T, E]`, the slot of each item; N where it is dropped.
        written: bool `[T]`, the rows of time that passed: those that are not masked, also if a
            longer call overwrites them. In lanes `[T, E]`, for each environment.
        passed: int32 `[T]`, how many passed up to each row, itself included. In lanes `[T, E]`.
        expired: int32 `[]`, how many of the oldest rows leave, of those held before and those that
            passed. In lanes `[E]`.
        consecutive: True if nothing is dropped and all slots follow one another (a slice will do).
        bounded: True if no more rows leave than pass.
        cuts: bool `[T, E]`, the items after which time does not go on, whatever their flags say;
            None for none.
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
        """int32 `[]`, the rows of time that passed; in lanes `[E]`."""
        return self.passed[-1]

    @property
    def times(self) -> tuple[jax.Array, jax.Array]:
        """`written` and `passed` for each environment: `[T, 1]`, in lanes `[T, E]`."""
        wide = lambda array: array.reshape(self.length, -1)
        return wide(self.written), wide(self.passed)

    @property
    def lengths(self) -> tuple[jax.Array, jax.Array]:
        """The rows that leave and that come for each environment: int32 `[1]`, in lanes `[E]`."""
        return self.expired.reshape(-1), self.rows.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The anchors there are, in an order that is theirs.

    Attributes:
        count: int32 `[]`.
        nth: from places, int32 `[B]` in [0, count), and a key, to the anchors there: slots, int32
            `[B]`, and the probability of each slot given its place, float32 `[B]`. The key is for
            units that count something larger than a slot, such as episodes; others ignore it, and
            their probability is 1.
        all_held: whether they are all slots that hold items, in order.
    """

    count: jax.Array
    nth: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    all_held: bool = False

    def drawn(self, chosen: jax.Array, mask: jax.Array, key: jax.Array) -> "Draw":
        """The draw of anchors that were equally likely.

        Args:
            chosen: int32 `[B]`, their places among the anchors, in [0, count).
            mask: bool `[B]`, which of them count.
            key: the draw's key, for anchors that stand for more than a slot.
        """
        slots, within = self.nth(chosen, key)
        # Not divided by the count: XLA would round a quotient of quotients otherwise in a batch
        # than alone.
        share = within * (1 / jnp.maximum(self.count, 1).astype(jnp.float32))
        return Draw(
            slots=slots,
            probabilities=jnp.where(mask, share, 0.0),
            weights=mask.astype(jnp.float32),
            mask=mask,
        )


@dataclasses.dataclass(frozen=True)
class IncomingPriorities:
    """What is written, and the priorities that came with it.

    Attributes:
        slots: int32 `[K]`, all that is written; N where it is dropped. Where no row waits to become
            an anchor (`Unit.has_delayed_anchors`), an anchor that enters stands at the same place
            in `entered`.
        written: bool `[T, 1]` or `[T, E]`, the rows of time that passed, of K / T items each.
        priorities: float32 `[K]`; None where none came.
        first: int32 `[]`, the first of the slots if they all follow one another; else None.
    """

    slots: jax.Array
    written: jax.Array
    priorities: jax.Array | None
    first: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class AnchorUpdate:
    """What a write did to the anchors: some left, then some entered.

    Attributes:
        entered: int32 `[K]`, slots that became anchors, or are anchors of a new item; N or more
            where there is none.
        consecutive: True if `entered` is a run of slots without a gap.
        expired: a run of slots that are no anchors any more, oldest first, unless they entered
            again; None if all of them did.
        most: the most that `expired` can count; None for no bound below N.
        removed: int32 `[M]`, further slots that are no anchors any more; N or more where there is
            none.
        entered_count: int32 `[]`, how many anchors came, those included that went in the same call.
        left_count: int32 `[]`, how many anchors went, those included that came in the same call.
        left_from: how many of those that left stood at this place or behind it, int32 `[]`, in the
            order before the write.
        moved: bool `[]`, whether anchors that stayed moved otherwise than by all that left standing
            before them, and all that entered behind.
        given: what was written, and the priorities that came with it; None if nothing was.
    """

    entered: jax.Array
    consecutive: bool
    expired: Occupancy | None
    most: int | None
    removed: jax.Array
    entered_count: jax.Array
    left_count: jax.Array
    left_from: Callable[[jax.Array], jax.Array]
    moved: jax.Array
    given: IncomingPriorities | None = None

    def departed(self, ring: Ring) -> jax.Array:
        """Returns the slots that are no anchors any more, unless they entered again, int32 `[M]`.

        N or more where there is none. M is N where more rows left than were written, else it does
        not grow with N.
        """
        if self.expired is None:
            return self.removed
        most = ring.capacity if self.most is None else self.most
        return jnp.concatenate([self.expired.run(ring, most), self.removed])


class Draw(pytree.State):
    """What a sampler drew.

    Attributes:
        slots: int32 `[B]`, anchors; any slot where `mask` is False.
        probabilities: float32 `[B]`, with which each was drawn; 0 where `mask` is False.
        weights: float32 `[B]`, importance weights; 0 where `mask` is False.
        mask: bool `[B]`, False where there was nothing to draw.
        draws: int32 `[B]`, how often each was drawn before; a sampler leaves it out, the engine
            fills it in where draws are counted.
    """

    slots: jax.Array
    probabilities: jax.Array
    weights: jax.Array
    mask: jax.Array
    draws: jax.Array | None = None


class DrawCounts(pytree.State):
    """How often each item was drawn: part of the states of samplers that can count.

    The engine counts; a sampler makes it (`Sampler.no_draws`) and hands it on.

    Attributes:
        draws: int32 `[N]`, by slot; None where it is not counted.
    """

    draws: jax.Array | None = None


class ShardStats(pytree.State):
    """What the sampler of one of several shards says of itself to the others.

    Attributes:
        count: int32 `[]`, its anchors.
        mass: float32 `[]`, of all of them: shards are drawn from in proportion to it.
        alike: int32 `[]`, the anchors that it may draw while no shard has mass.
        smallest: float32 `[]`, the least positive mass of an anchor, infinite if it keeps none.
        highest: float32 `[]`, the greatest priority that it has seen.
    """

    count: jax.Array
    mass: jax.Array
    alike: jax.Array
    smallest: jax.Array
    highest: jax.Array

    @classmethod
    def uniform(cls, anchors: Anchors) -> "ShardStats":
        """Returns the share of a shard that draws all these anchors with the same probability."""
        return cls(
            count=anchors.count,
            mass=anchors.count.astype(jnp.float32),
            alike=anchors.count,
            smallest=jnp.ones((), jnp.float32),
            highest=jnp.zeros((), jnp.float32),
        )


@dataclasses.dataclass(frozen=True)
class AuxRead:
    """What the user is told that stands in an array of the unit: read together with the items.

    Who waits for the items then waits for this too, and where nobody uses it, nothing is read.

    Attributes:
        array: `[N]`.
        slots: int32 `[B, L]`, where it is read.
        told: from what is there, `[B, L]`, to what the user gets.
    """

    array: jax.Array
    slots: jax.Array
    told: Callable[[jax.Array], jax.Array]

    def then(self, change: Callable[[jax.Array], jax.Array]) -> "AuxRead":
        """The same, of which the user gets what `change` makes of it."""
        return dataclasses.replace(self, told=lambda found: change(self.told(found)))


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """What a unit wants to read for a batch of anchors.

    Attributes:
        where: which slots to read, leaf by leaf.
        mask: bool `[B]` or `[B, L]`, which entries are real.
        info: a dict of arrays for the user, `Sample.info`, or of how they are looked up. Under the
            name "is_last", bool like the mask, transforms learn of the ends of episodes.
        rest: what `reduce` needs to know, arrays or not.
    """

    where: SlotsForLeaf
    mask: jax.Array
    info: dict[str, Any]
    rest: Any = None

    @property
    def lookups(self) -> dict[str, AuxRead]:
        """What is looked up for `info`, by its names there."""
        return {name: it for name, it in self.info.items() if isinstance(it, AuxRead)}


@dataclasses.dataclass(frozen=True)
class TransformContext:
    """What a transform may know of the batch.

    Attributes:
        key: a PRNG key of its own.
        mask: bool `[B]` or `[B, L]`, which entries are real.
        keys: how the items are keyed.
        state: the transform's own, if it has one (see `StatefulTransform`).
        ends: bool like `mask`, the rows after which the unit knows that their episode ended, also
            where no flag says so: its `info["is_last"]`. None if it does not tell.
    """

    key: jax.Array
    mask: jax.Array
    keys: Keys
    state: PartState = None
    ends: jax.Array | None = None
