"""The messages between the parts of a buffer.

N capacity, E environments, B batch, T time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import pytree
from jrb._xla import compiling, dependencies
from jrb.keys import Keys, Path, ends_of
from jrb.ring import Clock, Occupancy, Ring

_CHUNK = 256  # the number of slots that are cleared at a time, if many depart


class MissingMethodError(TypeError):
    """Raised if a call needs a method of a part that has no possible default."""


# As in chex, which takes 0.3 s to import, and whose types are unknown to type checkers.
Array: TypeAlias = jax.Array | np.ndarray | np.bool_ | np.number
PRNGKey: TypeAlias = jax.Array

Item = Any
"""A pytree of arrays in the structure of the user's transitions."""

PartState = Any
"""The state of a part: a pytree of arrays that its `init` makes and its methods replace."""

SlotsForLeaf = Callable[[str], jax.Array]
"""A function from a leaf's name ("next/reward") to the slots to read it at, int32 `[B, ...]`."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The facts about a buffer that its parts may use.

    Attributes:
        ring: the ring's shape.
        keys: the paths of the reward, the done flags, ... in an item.
        held: the slots that hold items; during a write, the slots that held items before it.
        reads_windows: True if the unit reads several consecutive rows of one environment.
        read_alone: the paths of leaves that are read at all slots, without other leaves.
    """

    ring: Ring
    keys: Keys
    held: Occupancy
    reads_windows: bool = False
    read_alone: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """The slots that the rows of one call go to. The writer makes it, all other parts read it.

    If one clock counts the rows of all environments, counts of rows have shape `[T]`; if each
    environment has its own clock (`jrb.PerEnvironment`), `[T, E]`.

    Attributes:
        starts: int32 `[T]`, the slot of environment 0 in each row; N if the row is dropped. Writers
            that choose a slot for each item alone set the slots of all items, int32 `[T * E]`.
        slots: int32 `[T, E]`, the slot of each item; N if it is dropped.
        written: bool `[T]` or `[T, E]`, False for masked rows; True also for rows that later rows
            of the same call overwrite.
        passed: int32 `[T]` or `[T, E]`, the number of written rows up to and including each row.
        expired: int32 `[]` or `[E]`, the number of rows that leave the buffer by this write, oldest
            first. If more rows are written than the ring has, some of these leave too.
        consecutive: True only if a single unmasked row is written, T = 1. Its slots follow one
            another, so a storage can write a slice.
        bounded: True if at most as many rows leave as are written.
        cuts: bool `[T, E]`, True for items that end an episode whatever their flags say; or None.
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

    @classmethod
    def of_rows(
        cls, ring: Ring, clock: Clock, length: int, mask: jax.Array | None
    ) -> tuple[Clock, Self]:
        """Returns the clock after T more rows, and their plan; of more than R, the last R stay.

        Args:
            ring: the shape of the ring, with R rows.
            clock: the position before the write, arrays `[]`, or `[E]` if each environment has
                its own.
            length: T.
            mask: bool `[T]`, the rows to write, or `[T, E]` with a clock `[E]`; None for all.
        """
        # `[]` where one clock serves all environments, `[E]` where each has its own.
        axes = clock.cursor.shape
        is_single = mask is None and length == 1 and not axes
        if mask is None:
            written = jnp.ones((length, *axes), jnp.bool_)
        else:
            written = jnp.broadcast_to(mask.reshape(length, *[-1] * len(axes)), (length, *axes))
        # A single row goes to the slot as it is, so that the write stays a slice, unconditionally.
        if is_single:
            passed, starts = jnp.ones(1, jnp.int32), clock.cursor[None] * ring.envs
        else:
            passed = jnp.cumsum(written, axis=0, dtype=jnp.int32)
            # Of more rows than the ring has, the last ones are kept: a plan has no slot twice.
            kept = written & (passed > passed[-1] - ring.rows)
            # A masked row has the `passed` of the row before it, so it takes no slot of its own.
            starts = ring.row_after(clock.cursor, passed - 1) * ring.envs
            starts = jnp.where(kept, starts, ring.capacity)
        slots = ring.row_slots(starts)
        plan = cls(
            # With a clock for each environment, the slots of a row do not follow one another.
            starts=slots.reshape(-1) if axes else starts,
            slots=slots,
            written=written,
            passed=passed,
            expired=jnp.maximum(clock.count - ring.rows + passed[-1], 0),
            consecutive=is_single,
        )
        return ring.advance(clock, plan.rows), plan

    @property
    def length(self) -> int:
        """T, the number of rows, masked ones included."""
        return self.passed.shape[0]

    @property
    def rows(self) -> jax.Array:
        """The number of rows that are written, int32 `[]` or `[E]`."""
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
        """Returns the plan with `token`, an int32 zero, added to its slots: writes wait for it."""
        return dataclasses.replace(self, starts=self.starts + token, slots=self.slots + token)

    def in_line(self, array: jax.Array) -> "WritePlan":
        """Returns the plan; in a program of a single method, its writes wait for `array`."""
        # XLA on the CPU hands kernels to another thread if more than nine could run at once. To
        # wake that thread takes longer than the kernels: without this wait, adds take 2 to 5 times
        # as long (see `jrb/_xla/README.md`).
        # An empty array has no element to wait for.
        if not (compiling.current_limits() == compiling.STANDALONE and array.size):
            return self
        return self.after(dependencies.zero_after(array))

    def put(self, array: jax.Array, rows: jax.Array) -> jax.Array:
        """Returns an array `[N, ...]` after rows `[T, E, ...]` were written to these slots."""
        # Writes a slice if slots are consecutive, else scatters all items that are not dropped.
        if self.consecutive:
            return lax.dynamic_update_slice_in_dim(array, rows[0], self.starts[0], axis=0)
        items = rows.reshape(self.slots.size, *rows.shape[2:])
        return array.at[self.slots.reshape(-1)].set(items, mode="drop")

    def episode_ends(self, keys: Keys, items: Item) -> jax.Array:
        """Returns True for the rows that end an episode, by a flag or a cut, bool `[T, E]`.

        Args:
            keys: the keys of the buffer.
            items: leaves `[T, E, ...]`; without any flag, only cuts end episodes.
        """
        # Without flags, episodes end only by cuts: see `ReplayBuffer.truncate`.
        done = ends_of(items, keys) if keys.flags(items) else jnp.zeros(self.slots.shape, jnp.bool_)
        return done if self.cuts is None else done | self.cuts


class DrawInputs(NamedTuple):
    """The arguments of a draw that may be traced.

    Attributes:
        beta: the exponent of importance weights, float `[]`; None for the sampler's own.
        context: the pytree for a sampler that reads leaves, such as `jrb.Weighted`; or None.
    """

    beta: Any = None
    context: Any = None


@dataclasses.dataclass(frozen=True)
class SlotFacts:
    """The facts about the items in all slots, for samplers with `Sampler.reads`.

    Entries of slots without an item have no meaning.

    Attributes:
        leaves: the leaves at `Sampler.reads`, arrays `[N, ...]` by name.
        age: int32 `[N]`, the number of rows of its environment that are newer than a slot's; None
            if the writer does not keep rows in the order of time.
        context: the pytree that was passed to the draw; None if none was.
        is_drawable: bool `[N]`, True for anchors that have draws left; None without `max_draws`.
    """

    leaves: dict[str, jax.Array]
    age: jax.Array | None
    context: Any
    is_drawable: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Anchors:
    """The slots that a sampler may draw, which it finds by their ranks.

    If all environments share a clock, ranks follow the order in which anchors entered.

    Attributes:
        count: int32 `[]`, the number of ranks.
        nth: a function of ranks, int32 `[B]` in [0, count), and a PRNG key. It returns the slots of
            the anchors at these ranks, int32 `[B]`, and the probability of each slot given its
            rank, float32 `[B]`. If a rank stands for several slots, such as an episode, the unit
            chooses one of them with the key. Otherwise the key is ignored and the probability is 1.
        all_held: True if the anchors are all slots that hold items, in the order of `Context.held`.
        facts: the facts about all slots during a draw, if the sampler has `Sampler.reads`.
    """

    count: jax.Array
    nth: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    all_held: bool = False
    facts: SlotFacts | None = None

    @classmethod
    def of_held(cls, context: Context) -> Self:
        """Returns every slot that holds an item, oldest first, as anchors."""
        ring, held = context.ring, context.held
        nth = lambda ranks, key: (held.nth(ring, ranks), jnp.ones(ranks.shape, jnp.float32))
        return cls(count=held.size, nth=nth, all_held=True)

    def uniform_draw(self, ranks: jax.Array, mask: jax.Array, key: jax.Array) -> "Draw":
        """Returns the draw of anchors that were chosen with equal probability.

        Args:
            ranks: int32 `[B]`, the ranks of the drawn anchors, in [0, count).
            mask: bool `[B]`, False for entries that are padding.
            key: the key of the draw, for `nth`.
        """
        slots, conditional = self.nth(ranks, key)
        # Times the inverse, as two programs of XLA may round a quotient of quotients in two ways.
        probabilities = conditional * (1 / jnp.maximum(self.count, 1).astype(jnp.float32))
        return Draw(
            slots=slots,
            probabilities=jnp.where(mask, probabilities, 0.0),
            weights=mask.astype(jnp.float32),
            mask=mask,
        )


@dataclasses.dataclass(frozen=True)
class IncomingItems:
    """The slots of one write, and what came with its items.

    Attributes:
        slots: int32 `[K]`, K = T * E, the slot of each item; N if it is dropped.
            `AnchorUpdate.entered` has the same order unless `Unit.has_delayed_anchors`.
        row_mask: bool `[T, 1]` or `[T, E]`, False for masked rows.
        priorities: float32 `[K]`, the priority given with each item; None if none were given.
        first_slot: int32 `[]`, the first of `slots` if they follow one another; else None.
        leaves: the leaves at `Sampler.reads_written`, arrays `[K, ...]` by name.
    """

    slots: jax.Array
    row_mask: jax.Array
    priorities: jax.Array | None
    first_slot: jax.Array | None = None
    leaves: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class AnchorUpdate:
    """The anchors that departed in one call, and those that entered after that.

    Most samplers need only `entered` and `departed_slots(ring)`.

    Attributes:
        entered: int32 `[K]`, the slots that became anchors, or were anchors and now hold a new
            item; N or more for padding.
        entered_count: int32 `[]`, the number of anchors that entered, also of those that departed.
        departed_count: int32 `[]`, the number of anchors that departed, also of those that entered.
        departed_from: a function of a rank in the order before the write, int32 `[]`, that returns
            the number of departed anchors with this rank or a higher one, int32 `[]`.
        reordered: bool `[]`, False if the remaining anchors keep their order (new rank = old rank -
            number of departed anchors before it) and new anchors are appended at the end; else
            True.
        consecutive: True if `entered` has the slots of `incoming`, which follow one another from
            its `first_slot` on, with N in place of those that do not enter.
        expired: a run of slots whose anchors departed, oldest first; some may be in `entered` too.
            None if all of them are.
        most: an upper bound of the number of slots in `expired`; None for N.
        removed: int32 `[M]`, further slots whose anchors departed; N or more for padding.
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
    incoming: IncomingItems | None = None

    @classmethod
    def of_held(cls, context: Context, plan: WritePlan) -> Self:
        """Returns the update by a write for a unit whose anchors are all slots that hold items."""
        ring, held = context.ring, context.held
        expired, written = plan.expired_by_clock, plan.rows_by_clock
        entered, leaving = plan.slots.reshape(-1), {}
        # In a bounded plan, each slot that departs enters again, with another item.
        if not plan.bounded:
            leaving = cls.departures(context, plan)
        # With one stream, ranks follow time: the oldest rows depart, and new rows come last.
        if held.streams == 1:
            count = expired[0] * ring.envs
            overwritten = jnp.maximum(held.rows(ring) + written - ring.rows, 0)[0]
            # A storage may give up rows before their slots are needed (`WritePlan.bounded`).
            # Then ranks move, though no slot is written.
            early = expired[0] > overwritten
            return cls(
                entered=entered,
                entered_count=written[0] * ring.envs,
                departed_count=count,
                departed_from=lambda rank: jnp.maximum(count - rank, 0),
                reordered=jnp.bool_(False) if plan.bounded else early,
                consecutive=plan.consecutive,
                **leaving,
            )
        # A new item has the rank of the item that it overwrites (see `Occupancy`): other ranks
        # change only if a stream grows, and only rows that leave without being overwritten depart.
        grown = jnp.maximum(written - expired, 0)
        removed = leaving.get("removed", jnp.zeros(0, jnp.int32))
        departs, safe = removed < ring.capacity, jnp.minimum(removed, ring.capacity - 1)
        at_or_behind = lambda rank: departs & (held.rank(ring, safe) >= rank)
        return cls(
            entered=entered,
            entered_count=jnp.sum(grown, dtype=jnp.int32),
            departed_count=jnp.sum(departs, dtype=jnp.int32),
            departed_from=lambda rank: jnp.sum(at_or_behind(rank), dtype=jnp.int32),
            reordered=jnp.any(grown > 0) if plan.bounded else jnp.any(departs),
            **leaving,
        )

    @staticmethod
    def departures(context: Context, plan: WritePlan) -> dict[str, Any]:
        """Returns fields of an update for expired rows: `expired` and `most`, or `removed`."""
        ring, held, expired = context.ring, context.held, plan.expired_by_clock
        # Shapes must not depend on values: room for as many rows as such a call can expire.
        most = min(plan.length, ring.rows) if plan.bounded else ring.rows
        if held.streams > 1:
            row = jnp.arange(most, dtype=jnp.int32)[:, None]
            slots = jnp.where(row < expired, held.oldest(ring, most), ring.capacity)
            return {"removed": slots.reshape(-1)}
        # With one stream, the expired rows are a run of slots from the oldest on.
        run = Occupancy(first=held.first, count=jnp.minimum(expired, ring.rows) * ring.envs)
        return {"expired": run, "most": most * ring.envs if plan.bounded else None}

    def departed_slots(self, ring: Ring) -> jax.Array:
        """Returns the slots whose anchors departed, int32 `[M]`; some may be in `entered` too.

        Padding is N or more. M is N if more rows can leave than are written; else it does not
        depend on N.
        """
        # Of a fixed length: the run is cut to `most`, which no write exceeds.
        removed = jnp.zeros(0, jnp.int32) if self.removed is None else self.removed
        if self.expired is None:
            return removed
        most = ring.capacity if self.most is None else self.most
        return jnp.concatenate([self.expired.run(ring, most), removed])

    def clear_expired(
        self,
        ring: Ring,
        state: Any,
        clear: Callable[[Any, jax.Array], Any],
        clear_all: Callable[[Any, jax.Array], Any],
    ) -> tuple[Any, "AnchorUpdate"]:
        """Returns state and update after `expired` is cleared; as they are if `most` bounds it.

        `clear(state, slots)` clears slots, int32 `[K]`, N for padding; `clear_all(state, departs)`
        those for which bool `[N]` is True. The CPU clears in chunks; on a GPU, a loop of unknown
        length would ask the host before each trip.
        """
        run, chunk = self.expired, min(ring.capacity, _CHUNK)
        if run is None or self.most is not None:
            return state, self

        def clear_next(trip: jax.Array, state: Any) -> Any:
            # The next slots of the run, after those that earlier trips have cleared.
            done = jnp.minimum(trip * chunk, run.count)
            following = Occupancy(ring.slot_after(run.first, done), count=run.count - done)
            return clear(state, following.run(ring, chunk))

        every = jnp.arange(ring.capacity, dtype=jnp.int32)
        trips = (dependencies.max_over_batch(run.size) + chunk - 1) // chunk
        state = lax.platform_dependent(
            cpu=lambda: dependencies.loop(trips, clear_next, state),
            default=lambda: clear_all(state, run.holds(ring, every)),
        )
        return state, dataclasses.replace(self, expired=None)


class Draw(pytree.State):
    """The anchors that a sampler drew.

    Attributes:
        slots: int32 `[B]`, the drawn anchors; any slot where `mask` is False.
        probabilities: float32 `[B]`, with which each anchor is drawn; 0 where `mask` is False.
        weights: float32 `[B]`, importance weights; 0 where `mask` is False.
        mask: bool `[B]`, False where there was nothing to draw.
        draws: int32 `[B]`, how often each item was drawn before. Samplers leave it None; the engine
            sets it if draws are counted.
        sampler: int32 `[B]`, the index of the sampler that drew each anchor; None for a single
            sampler.
        group: int32 `[B]`, the key of each anchor's group; None for samplers without groups.
    """

    slots: jax.Array
    probabilities: jax.Array
    weights: jax.Array
    mask: jax.Array
    draws: jax.Array | None = None
    sampler: jax.Array | None = None
    group: jax.Array | None = None

    def keep_where(self, where: jax.Array) -> "Draw":
        """Returns the draw with entries masked where `where`, bool `[B]` or `[]`, is False."""
        keep = lambda leaf: jnp.where(where, leaf, jnp.zeros_like(leaf))
        return self.replace(
            probabilities=keep(self.probabilities), weights=keep(self.weights), mask=keep(self.mask)
        )

    def normalize_weights(self) -> "Draw":
        """Returns the draw with its weights divided by the largest; those above 0 stay so."""
        largest = jnp.max(self.weights)
        weights = self.weights / jnp.where(largest > 0, largest, 1.0)
        weights = jnp.maximum(weights, np.finfo(np.float32).tiny)
        return self.replace(weights=jnp.where(self.mask, weights, 0.0))


class DrawCounts(pytree.State):
    """The base class of sampler states that can count draws; the engine updates the counts.

    Attributes:
        draws: int32 `[N]`, how often the item in each slot was drawn; None if that is not counted.
        drawable: with `max_draws`, a sum-tree over 1 for anchors with draws left and 0 for others.
    """

    draws: jax.Array | None = None
    drawable: PartState = None


class ShardStats(pytree.State):
    """The statistics that the sampler of one shard reports to all shards.

    Attributes:
        num_anchors: int32 `[]`, the number of anchors of the shard.
        mass: float32 `[]`, the sum of the masses of its anchors. The shard draws each anchor with
            probability anchor mass / `mass`; global probabilities and weights are computed from it.
            If all shards have mass 0, nothing is drawn.
        min_mass: float32 `[]`, the least positive mass of an anchor; infinite if it is unknown.
        max_priority: float32 `[]`, the greatest priority that the shard has seen, or holds.
    """

    num_anchors: jax.Array
    mass: jax.Array
    min_mass: jax.Array
    max_priority: jax.Array

    @classmethod
    def uniform(cls, anchors: Anchors) -> "ShardStats":
        """Returns the statistics of a shard that draws all its anchors with equal probability."""
        return cls(
            num_anchors=anchors.count,
            mass=anchors.count.astype(jnp.float32),
            min_mass=jnp.ones((), jnp.float32),
            max_priority=jnp.zeros((), jnp.float32),
        )


@dataclasses.dataclass(frozen=True)
class AuxRead:
    """An extra read from one of the unit's arrays whose result goes to `Sample.info`.

    It is gathered together with the items, so that later writes are ordered after it.

    Attributes:
        array: `[N]`, an array of the unit's state.
        slots: int32 `[B, L]`, the slots at which to read `array`.
        postprocess: a function from the values read, `[B, L]`, to the value in `Sample.info`.
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
        where: the slots at which to read each leaf.
        mask: bool `[B]` or `[B, L]`, True for real entries.
        info: the entries of `Sample.info`, each an array or an `AuxRead`. Transforms take the ends
            of episodes from the entry "is_last", bool like `mask`.
        residuals: further values that `reduce` needs, arrays or not.
    """

    where: SlotsForLeaf
    mask: jax.Array
    info: dict[str, Any]
    residuals: Any = None

    @property
    def aux_reads(self) -> dict[str, AuxRead]:
        """The entries of `info` that must still be read."""
        return {name: it for name, it in self.info.items() if isinstance(it, AuxRead)}


@dataclasses.dataclass(frozen=True)
class TransformContext:
    """The facts about a batch that a transform may use.

    Attributes:
        key: a PRNG key for this transform alone.
        mask: bool `[B]` or `[B, L]`, True for real entries.
        keys: the paths of the reward, the done flags, ... in an item.
        state: the state of the transform, if it is a `StatefulTransform`.
        ends: bool like `mask`, True for rows that end an episode, with or without a flag, from
            `info["is_last"]`; None if the unit does not know the ends.
    """

    key: jax.Array
    mask: jax.Array
    keys: Keys
    state: PartState = None
    ends: jax.Array | None = None
