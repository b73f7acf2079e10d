"""The messages between the parts of a buffer, and how most parts make and use them.

N capacity, E environments, B batch, T time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import pytree
from jrb._xla import compiling, dependencies
from jrb.keys import Keys, ends_of
from jrb.ring import Clock, Occupancy, Ring


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
        keys: the names of the parts of the items.
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
        consecutive: True only if a single row of time is written, T = 1, without a mask: its slots
            follow one another, and a storage writes a slice.
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

    def __post_init__(self) -> None:
        # A storage would write one slice for all rows, and those behind the first would be lost.
        if self.consecutive and self.slots.shape[0] != 1:
            raise ValueError(
                f"WritePlan: consecutive: expected a single row of time, T = 1, got slots of shape "
                f"{self.slots.shape}. Leave it False."
            )

    @property
    def length(self) -> int:
        """T."""
        return self.passed.shape[0]

    @property
    def rows(self) -> jax.Array:
        """The number of rows of time that are written, int32 `[]` or `[E]`."""
        return self.passed[-1]

    @property
    def written_by_clock(self) -> jax.Array:
        """`written` with an axis of clocks, bool `[T, 1]` or `[T, E]`."""
        return self.written.reshape(self.length, -1)

    @property
    def passed_by_clock(self) -> jax.Array:
        """`passed` with an axis of clocks, int32 `[T, 1]` or `[T, E]`."""
        return self.passed.reshape(self.length, -1)

    @property
    def expired_by_clock(self) -> jax.Array:
        """`expired` with an axis of clocks, int32 `[1]` or `[E]`."""
        return self.expired.reshape(-1)

    @property
    def rows_by_clock(self) -> jax.Array:
        """`rows` with an axis of clocks, int32 `[1]` or `[E]`."""
        return self.rows.reshape(-1)

    def after(self, token: jax.Array) -> "WritePlan":
        """Returns the plan with slots that are not known before `token`, an int32 zero."""
        return dataclasses.replace(self, starts=self.starts + token, slots=self.slots + token)

    def in_line(self, array: jax.Array) -> "WritePlan":
        """Returns a plan that waits, in a program for one method, until `array` was written."""
        # XLA's CPU compiler hands kernels to another thread where more than nine could run at once.
        # To wake it takes longer than they do: adds take 2 to 5 times as long (see
        # `jrb/_xla/README.md`).
        if not (compiling.current_limits() == compiling.STANDALONE and array.size):
            return self
        return self.after(dependencies.zero_after(array))


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The slots that a sampler may draw; with one clock, in the order in which they entered.

    Attributes:
        count: int32 `[]`.
        nth: a function of ranks, int32 `[B]` in [0, count), and a key. It returns the slots of
            these anchors, int32 `[B]`, and the probability of each given its rank, float32 `[B]`.
            If ranks count something larger than a slot, such as episodes, the unit chooses a slot
            in it by the key. Other units ignore the key, and the probability is 1.
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

    Most samplers need `entered` and `departed_slots(ring)` only.

    Attributes:
        entered: int32 `[K]`, slots that became anchors, or are anchors of a new item; N or more for
            padding.
        entered_count: int32 `[]`, how many anchors entered, including those that departed in the
            same call.
        departed_count: int32 `[]`, how many departed, including those that entered in the same
            call.
        departed_from: a function of a rank in the order before the write, int32 `[]`. Returns the
            number of departed anchors that had this rank or a higher one, int32 `[]`.
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

    def departed_slots(self, ring: Ring) -> jax.Array:
        """Returns the slots that are no anchors any more, unless they entered again, int32 `[M]`.

        N or more for padding. M is N if more rows departed than were written, else it does not grow
        with N.
        """
        # Of a fixed length: the run is cut to `most`, the greatest number that one write can
        # expire.
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
        postprocess: a function from the entries, `[B, L]`, to the value in `Sample.info`.
    """

    array: jax.Array
    slots: jax.Array
    postprocess: Callable[[jax.Array], jax.Array]

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "AuxRead":
        """Returns this read with `function` applied to its value."""
        # Bound now: `self.postprocess` of the new read is the function that is being made.
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
        keys: the names of the parts of the items.
        state: the transform's own, if it has one (see `StatefulTransform`).
        ends: bool like `mask`, the rows that end their episode by what the unit knows, also where
            no flag says so (`info["is_last"]`); None if it does not know.
    """

    key: jax.Array
    mask: jax.Array
    keys: Keys
    state: PartState = None
    ends: jax.Array | None = None


# How most parts make these messages, and use them.


def plan_rows(
    ring: Ring, clock: Clock, length: int, mask: jax.Array | None
) -> tuple[Clock, WritePlan]:
    """Plans T rows of time around the ring, one after the other; of more than R, the last R.

    Args:
        ring: its shape.
        clock: where it stands, `[]`, or `[E]` if each environment has its own.
        length: T.
        mask: bool `[T]`, the rows to write, or `[T, E]` with a clock `[E]`; None for all.
    """
    # `[]` where one clock serves all environments, `[E]` where each has its own.
    each = clock.cursor.shape
    single = mask is None and length == 1 and not each
    if mask is None:
        written = jnp.ones((length, *each), jnp.bool_)
    else:
        written = jnp.broadcast_to(mask.reshape(length, *[-1] * len(each)), (length, *each))
    if single:  # the slot as it is, so that the write stays a slice without a condition
        passed, starts = jnp.ones(1, jnp.int32), clock.cursor[None] * ring.envs
    else:
        passed = jnp.cumsum(written, axis=0, dtype=jnp.int32)
        # Of more rows than the ring has, the last ones: no slot stands twice in a plan.
        kept = written & (passed > passed[-1] - ring.rows)
        # A masked row has the `passed` of the row before it, so it takes no slot of its own.
        starts = ring.row_after(clock.cursor, passed - 1) * ring.envs
        starts = jnp.where(kept, starts, ring.capacity)
    slots = ring.row_slots(starts)
    plan = WritePlan(
        # With a clock for each environment, the slots of a row do not follow one another.
        starts=slots.reshape(-1) if each else starts,
        slots=slots,
        written=written,
        passed=passed,
        expired=jnp.maximum(clock.count - ring.rows + passed[-1], 0),
        consecutive=single,
    )
    return ring.advance(clock, plan.rows), plan


def put_rows(array: jax.Array, plan: WritePlan, rows: jax.Array) -> jax.Array:
    """Puts rows `[T, E, ...]` at the slots of a write, in an array `[N, ...]`."""
    # A slice for consecutive slots, else a scatter of items without those that `plan` drops.
    if plan.consecutive:
        return lax.dynamic_update_slice_in_dim(array, rows[0], plan.starts[0], axis=0)
    items = rows.reshape(plan.slots.size, *rows.shape[2:])
    return array.at[plan.slots.reshape(-1)].set(items, mode="drop")


def episode_ends(context: Context, plan: WritePlan, items: Item) -> jax.Array:
    """Returns which rows of a write are the last of their episodes, by flags or cuts, `[T, E]`.

    Args:
        context: the buffer's context.
        plan: of these rows.
        items: leaves `[T, E, ...]`; those without any flag end by cuts only.
    """
    # Without flags, episodes end where the writer of the buffer says so: by cuts, see `truncate`.
    if context.keys.flags(items):
        done = ends_of(items, context.keys)
    else:
        done = jnp.zeros(plan.slots.shape, jnp.bool_)
    return done if plan.cuts is None else done | plan.cuts


def all_held(context: Context) -> Anchors:
    """Returns every slot that holds an item, oldest first, as anchors."""
    ring, held = context.ring, context.held
    nth = lambda ranks, key: (held.nth(ring, ranks), jnp.ones(ranks.shape, jnp.float32))
    return Anchors(count=held.size, nth=nth, all_held=True)


def every_slot(context: Context, plan: WritePlan) -> AnchorUpdate:
    """Returns the update by a write if every slot that holds an item is an anchor."""
    ring, held = context.ring, context.held
    expired, written = plan.expired_by_clock, plan.rows_by_clock
    entered, leaving = plan.slots.reshape(-1), {}
    if not plan.bounded:  # else each slot that leaves enters again, with another item
        leaving = departures(context, plan)
    if held.streams == 1:
        count = expired[0] * ring.envs
        overwritten = jnp.maximum(held.rows(ring) + written - ring.rows, 0)[0]
        # A storage may give up rows before their slots are needed (`WritePlan.bounded`).
        early = expired[0] > overwritten  # ranks then move, though no slot is written
        return AnchorUpdate(
            entered=entered,
            entered_count=written[0] * ring.envs,
            departed_count=count,
            departed_from=lambda rank: jnp.maximum(count - rank, 0),
            reordered=jnp.bool_(False) if plan.bounded else early,
            consecutive=plan.consecutive,
            **leaving,
        )
    # An item that takes the place of another has its rank, too (see `Occupancy`): only what makes a
    # stream longer moves the ranks of others, and only rows that are not overwritten depart.
    grown = jnp.maximum(written - expired, 0)
    removed = leaving.get("removed", jnp.zeros(0, jnp.int32))
    departs, safe = removed < ring.capacity, jnp.minimum(removed, ring.capacity - 1)
    at_or_behind = lambda rank: departs & (held.rank(ring, safe) >= rank)
    return AnchorUpdate(
        entered=entered,
        entered_count=jnp.sum(grown, dtype=jnp.int32),
        departed_count=jnp.sum(departs, dtype=jnp.int32),
        departed_from=lambda rank: jnp.sum(at_or_behind(rank), dtype=jnp.int32),
        reordered=jnp.any(grown > 0) if plan.bounded else jnp.any(departs),
        **leaving,
    )


def departures(context: Context, plan: WritePlan) -> dict[str, Any]:
    """Returns the fields of an `AnchorUpdate` for rows that leave: a run of slots, or each slot."""
    ring, held, expired = context.ring, context.held, plan.expired_by_clock
    # Shapes must not depend on values: as many as could leave in any call of this length.
    most = min(plan.length, ring.rows) if plan.bounded else ring.rows
    if held.streams > 1:
        row = jnp.arange(most, dtype=jnp.int32)[:, None]
        slots = jnp.where(row < expired, held.oldest(ring, most), ring.capacity)
        return {"removed": slots.reshape(-1)}
    run = Occupancy(first=held.first, count=jnp.minimum(expired, ring.rows) * ring.envs)
    return {"expired": run, "most": most * ring.envs if plan.bounded else None}
