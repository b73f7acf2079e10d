"""What the parts of a buffer say to each other.

N capacity, E environments, B batch, L window, T time. A *slot* (int32) is the place of an item, an
*anchor* a slot that a sampler may draw; slots are all that parts exchange. A part is a description
(see `jrb.pytree.component`): pure methods, no arrays; what it must remember is a state that the
buffer hands to it and takes back. A part of your own is a class with the same few methods.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax

from jrb import pytree
from jrb.keys import Keys
from jrb.ring import Held, Ring

State = Any
Item = Any
Where = Callable[[str], jax.Array]
"""From the name of a leaf ("next/reward") to the slots it is read at, int32 `[B, ...]`."""


@dataclasses.dataclass(frozen=True)
class Write:
    """Where the rows of one call go.

    Attributes:
        starts: int32 `[T]`, the slot of each row's environment 0; N where the row is dropped. For a
            writer that places items one by one, int32 `[T * E]`, their slots.
        slots: int32 `[T, E]`, the slot of each item; N where it is dropped.
        written: bool `[T]`, the rows of time that passed: those that are not masked, also if a
            longer call overwrites them.
        passed: int32 `[T]`, how many passed up to each row, itself included.
        gone: int32 `[]`, how many of the oldest rows leave, of those held before and those that
            passed.
        consecutive: True if nothing is dropped and all slots follow one another (a slice will do).
        bounded: True if no more rows leave than pass.
    """

    starts: jax.Array
    slots: jax.Array
    written: jax.Array
    passed: jax.Array
    gone: jax.Array
    consecutive: bool
    bounded: bool = True

    @property
    def rows(self) -> jax.Array:
        """int32 `[]`, the rows of time that passed."""
        return self.passed[-1]


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


@dataclasses.dataclass(frozen=True)
class Change:
    """What a write did to the anchors: some left, then some entered.

    Attributes:
        entered: int32 `[K]`, slots that became anchors, or are anchors of a new item; N or more
            where there is none.
        consecutive: True if `entered` is a run of slots without a gap.
        gone: a run of slots that are no anchors any more, oldest first, unless they entered again;
            None if all of them did.
        most: the most that `gone` can count; None for no bound below N.
        cut: int32 `[M]`, further slots that are no anchors any more; N or more where there is none.
        entered_count: int32 `[]`, how many anchors came, those included that went in the same call.
        left_count: int32 `[]`, how many anchors went, those included that came in the same call.
        left_from: how many of those that left stood at this place or behind it, int32 `[]`, in the
            order before the write.
        moved: bool `[]`, whether anchors that stayed moved otherwise than by all that left standing
            before them, and all that entered behind.
    """

    entered: jax.Array
    consecutive: bool
    gone: Held | None
    most: int | None
    cut: jax.Array
    entered_count: jax.Array
    left_count: jax.Array
    left_from: Callable[[jax.Array], jax.Array]
    moved: jax.Array


@pytree.state
class Draw:
    """What a sampler drew.

    Attributes:
        slots: int32 `[B]`, anchors; any slot where `mask` is False.
        probabilities: float32 `[B]`, with which each was drawn; 0 where `mask` is False.
        weights: float32 `[B]`, importance weights; 0 where `mask` is False.
        mask: bool `[B]`, False where there was nothing to draw.
    """

    slots: jax.Array
    probabilities: jax.Array
    weights: jax.Array
    mask: jax.Array


@dataclasses.dataclass(frozen=True)
class Look:
    """What a unit wants to read for a batch of anchors.

    Attributes:
        where: which slots to read, leaf by leaf.
        mask: bool `[B]` or `[B, L]`, which entries are real.
        info: a dict of arrays for the user, `Sample.info`.
        rest: what `reduce` needs to know, arrays or not.
    """

    where: Where
    mask: jax.Array
    info: dict[str, jax.Array]
    rest: Any = None


class Writer(Protocol):
    """Which slots do these rows go to?

    Attributes:
        in_time: whether rows lie around the ring in the order in which they came. Units that need
            more than one row ask for it.
    """

    in_time: ClassVar[bool]

    def init(self, ring: Ring, spec: Item, keys: Keys) -> State:
        """The state of a writer that wrote nothing."""
        ...

    def plan(
        self, ring: Ring, state: State, items: Item, mask: jax.Array | None, keys: Keys
    ) -> tuple[State, Write]:
        """Slots for rows of time.

        Args:
            ring: the ring's shape.
            state: the writer's state.
            items: what will be written, leaves `[T, E, ...]`.
            mask: bool `[T]`, the rows to write; None for all.
            keys: how the items are keyed.
        """
        ...

    def held(self, ring: Ring, state: State) -> Held:
        """The slots that hold items."""
        ...

    def stamp(self, ring: Ring, state: State, slots: jax.Array) -> jax.Array:
        """uint32 like `slots`: another number as soon as a slot holds another item."""
        ...

    def shrink(self, ring: Ring, state: State, rows: jax.Array) -> State:
        """The same without so many of the oldest rows, int32 `[]`."""
        ...

    def reset(self, ring: Ring, state: State, token: jax.Array) -> State:
        """Forgets all slots; no stamp from before is ever current again."""
        ...

    def hold(self, state: State, token: jax.Array) -> State:
        """The same state, from which no slot to write is known before `token`, an int32 zero."""
        ...


class Storage(Protocol):
    """Puts rows at slots, gets rows at slots.

    One that keeps items on the host says so by `on_host = True`, and has, besides, the methods by
    which verbs outside `jit` reach it between jitted parts: see `MemmapStorage`. One whose items
    are no arrays has `of_objects = True`, one that needs rows in order of time `in_time = True`.

    One may have `slotted(state)`, the arrays `[N or more, ...]` whose row s is changed only when
    slot s is written, for all s below N: a checkpoint then looks only there for what is new.
    """

    def init(self, ring: Ring, spec: Item, keys: Keys) -> State:
        """Room for N items of this spec (`jax.ShapeDtypeStruct` leaves)."""
        ...

    def spec(self, ring: Ring, state: State, keys: Keys) -> Item:
        """The spec of one item."""
        ...

    def write(
        self, ring: Ring, state: State, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[State, Write]:
        """Puts items, leaves `[T, E, ...]`, at the slots of `write`; `held` is from before.

        Returns:
            The state, and `write`: the same, or with more rows in `gone` where there was no room.
        """
        ...

    def read(self, ring: Ring, state: State, held: Held, where: Where, keys: Keys) -> Item:
        """One gather per leaf; must not be scheduled after a later write (see `jrb.order.once`)."""
        ...

    def reset(self, ring: Ring, state: State, token: jax.Array) -> State:
        """The state when nothing is held any more; the items may stay where they are."""
        ...

    def hold(self, state: State, token: jax.Array) -> State:
        """The same state, from which no place to write is known before `token`, an int32 zero."""
        ...


class Unit(Protocol):
    """What does one anchor stand for?

    Two methods are for units that know where episodes end. `truncate(ring, state, held, which)`
    ends those of some environments, bool `[E]`, at the newest row, and returns the state and a
    `Change`, or None where no anchors come or go. `ends(ring, state, held, slots)`, bool like
    `slots`, says after which rows time does not go on.

    Attributes:
        lag: by how many rows an anchor may be older than one that entered before it; 0 if anchors
            enter in the order of their rows, None if anchors are no rows. Units that hold another
            ask it for this.

    A unit whose items are windows may have `reduce_priorities(priorities, mask)`, from one for each
    row, float32 `[B, L]`, to one for each anchor, `[B]`; and `priority_shapes(mask_shape)`, the
    shapes that it takes. One that must know of rows which are not held any more has
    `rows_before(state, slots)` and `resume(state, before)`: see `FrameStack`.
    """

    lag: ClassVar[int | None]

    def check(self, ring: Ring, sampler: "Sampler", writer: Writer) -> None:
        """Raises if the unit does not fit the ring or another part."""
        ...

    def init(self, ring: Ring, spec: Item, keys: Keys) -> State:
        """The state when nothing is held."""
        ...

    def on_write(
        self, ring: Ring, state: State, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[State, Change]:
        """What a write does to the anchors; `held` is from before the write."""
        ...

    def anchors(self, ring: Ring, state: State, held: Held) -> Anchors:
        """The anchors there are."""
        ...

    def look(
        self,
        ring: Ring,
        state: State,
        held: Held,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
        keys: Keys,
    ) -> Look:
        """What to read for these anchors, `[B]`.

        Args:
            ring: the ring's shape.
            state: the unit's state. Its arrays are read by `jrb.order.once`.
            held: the slots that hold items.
            slots: int32 `[B]`, the anchors.
            mask: bool `[B]`, False where nothing was drawn.
            key: the draw's key, for `bits.fold` with a number of one's own.
            keys: how the items are keyed.
        """
        ...

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """From what was read to `Sample.data` and `Sample.info`."""
        ...

    def reset(self, ring: Ring, state: State, token: jax.Array) -> State:
        """The state when nothing is held any more; arrays are written after the token."""
        ...

    def hold(self, state: State, token: jax.Array) -> State:
        """The same state, from which no place to write is known before `token`, an int32 zero."""
        ...


class Sampler(Protocol):
    """Which anchors next, and with what probability?

    One that knows something of items which a buffer of another size should know too has
    `adopt(state, old, slots, places)`: see `Prioritized`. One that draws anchors in their order
    says so by `in_order = True`, one whose `draw` uses them up by `consumes = True`.
    """

    def init(self, ring: Ring) -> State:
        """The state when there are no anchors."""
        ...

    def on_write(self, ring: Ring, state: State, change: Change, anchors: Anchors) -> State:
        """Learns which anchors came and went; `anchors` is from after the write."""
        ...

    def draw(
        self,
        ring: Ring,
        state: State,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[State, Draw]:
        """Draws a batch. `beta` is for samplers with importance weights, None for their own.

        Large arrays of the state are read by `jrb.order.once` or in a loop, and the slots are not
        known before these reads: then a write that waits for the slots is done in place.
        """
        ...

    def ready(self, state: State, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Bool `[]`: whether a draw would give at least one item."""
        ...

    def reset(self, ring: Ring, state: State, token: jax.Array) -> State:
        """The state when there are no anchors any more.

        Large arrays are overwritten after the token, an int32 zero (see `jrb.order.overwrite`).
        """
        ...


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a transform may know of the batch.

    Attributes:
        key: a PRNG key of its own.
        mask: bool `[B]` or `[B, L]`, which entries are real.
        keys: how the items are keyed.
    """

    key: jax.Array
    mask: jax.Array
    keys: Keys


class Transform(Protocol):
    """What happens to data on the way out.

    Any function from data to data will do. One that must know more has a method
    `apply(data, batch)`, which is then called instead; one with a method `inverse(item)` is undone
    on the way in, item by item.
    """

    def __call__(self, data: Any) -> Any:
        """From data, leaves `[B, ...]` or `[B, L, ...]`, to data."""
        ...
