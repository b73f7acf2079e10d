"""Writers that choose a slot for each item, and keep no order of time."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrb import sum_tree
from jrb._util import display, pytree
from jrb._xla import dependencies, random_bits
from jrb.keys import Path, find, path_name, within
from jrb.ring import Occupancy, Ring
from jrb.sum_tree import Tree
from jrb.types import Item, WritePlan, Writer
from jrb.types.messages import PartState

# The count of items stops here, so that one more still fits into 32 bits.
_MOST = np.uint32(2**32 - 2)


class OneByOne(Writer):
    """A writer that chooses a slot for each item alone, and numbers the items.

    States have `stamps`, uint32 `[N]`, the number of the item in each slot; `count`, int32 `[]`:
    slots 0 to `count` - 1 hold items; and `number`, uint32 `[]`, the number of the next item.
    """

    is_chronological: ClassVar[bool] = False

    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """Returns slots 0 to `count` - 1."""
        return Occupancy(first=jnp.zeros(1, jnp.int32), count=state.count[None])

    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """Returns the number of the item in each slot."""
        return dependencies.materialize(lambda: state.stamps.at[slots].get(mode="clip"))

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """Returns all slots, ordered by the numbers of their items, and the number of items."""
        slot = jnp.arange(state.stamps.size, dtype=jnp.int32)
        # Numbers are modulo 2^32: the greatest age is that of the oldest.
        age = jnp.where(slot < state.count, state.number - state.stamps, 0)
        return jnp.argsort(~age, stable=True).astype(jnp.int32), state.count

    def reset(self, ring: Ring, state: PartState, token: jax.Array) -> Any:
        """Returns the state without items, in which no slot has the number of an item."""
        return state.replace(
            # No item has the next number, so no stamp from before the reset is current again.
            stamps=dependencies.overwrite(state.stamps, state.number, token),
            count=jnp.minimum(state.count, 0) + token,
            number=state.number + np.uint32(1),
        )


def plan_slots(ring: Ring, slots: jax.Array, written: jax.Array) -> WritePlan:
    """Returns the plan of a write to slots, int32 `[T * E]`, distinct except for N."""
    return WritePlan(
        starts=slots,
        slots=slots.reshape(written.size, ring.envs),
        written=written,
        passed=jnp.zeros(written.size, jnp.int32),
        expired=jnp.zeros((), jnp.int32),
        consecutive=False,
    )


class MaxValueState(pytree.State):
    """The ranks and numbers of the items that are held.

    Attributes:
        ranks: a tree of minima over the ranks, float32 `[N]`.
        stamps: uint32 `[N]`, the number of the item in each slot.
        count: int32 `[]`, the number of slots that hold items.
        number: uint32 `[]`, the number of items written so far, modulo 2^32.
        key: the path to the ranks; not an array.
    """

    ranks: Tree
    stamps: jax.Array
    count: jax.Array = pytree.cursor()
    number: jax.Array
    key: Path = pytree.static(default="")

    def summary(self, ring: Ring) -> dict[str, str]:
        """Returns the number of items held, for the `repr` of a state."""
        return {"held": display.share(self.count, ring.capacity)}


@pytree.component
class MaxValue(OneByOne):
    """Keeps the N items with the highest ranks, in no order of time.

    A full buffer takes an item if its rank is above the lowest one held, and overwrites the item of
    that rank; of equal ranks, the old items stay. An item whose rank is NaN is never taken. Costs
    O(log N) per item.

    Attributes:
        key: the path to the rank, real numbers of at most 32 bits that float32 holds exactly, such
            as ("next", "reward"). Several numbers or leaves of an item are added up.

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(2, writer=jrb.MaxValue("score"))
        >>> state = buffer.init({"score": 0.0})
        >>> state = buffer.extend(state, {"score": jnp.array([1.0, 5.0, 2.0, 4.0])})
        >>> sorted(jrb.items(buffer, state)["score"].tolist())
        [4.0, 5.0]
    """

    key: Path

    def init(self, ring: Ring, spec: Item) -> MaxValueState:
        """Returns a state without items; raises if items have no such rank."""
        for leaf in jax.tree.leaves(find(spec, self.key, "MaxValue: key")):
            dtype = getattr(leaf, "dtype", None)
            is_exact = dtype is not None and (
                (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4)
                or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 2)
                or dtype == jnp.bool_
            )
            if not is_exact:
                raise TypeError(
                    f"MaxValue: key {self.key!r}: expected leaves of numbers that float32 holds "
                    f"exactly, got {dtype}. Store the rank as float32."
                )
        return MaxValueState(
            ranks=sum_tree.neutral(ring.capacity, "min"),
            stamps=jnp.zeros(ring.capacity, jnp.uint32),
            count=jnp.zeros((), jnp.int32),
            number=jnp.zeros((), jnp.uint32),
            key=self.key,
        )

    def plan(
        self, ring: Ring, state: MaxValueState, items: Item, mask: jax.Array | None
    ) -> tuple[MaxValueState, WritePlan]:
        """Plans items one by one; if several of a call get the same slot, the last is written."""
        leaves = jax.tree.leaves(find(items, self.key, "MaxValue: key"))
        length = leaves[0].shape[0]
        flat = [leaf.astype(jnp.float32).reshape(length * ring.envs, -1) for leaf in leaves]
        # Several leaves, or axes, below the key add up to one rank.
        ranks = jnp.sum(flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1), axis=1)
        written = jnp.ones(length, jnp.bool_) if mask is None else mask
        is_written = jnp.repeat(written, ring.envs)
        has_rank = is_written & ~jnp.isnan(ranks)
        numbers = state.number + jnp.cumsum(is_written, dtype=jnp.uint32) - np.uint32(1)

        def place_item(i: jax.Array, carry: Any) -> Any:
            state, slots = carry
            # A full buffer gives up the item of lowest rank, if that is below this one.
            lowest, worst = sum_tree.lowest(state.ranks)
            is_full = state.count >= ring.capacity
            is_taken = has_rank[i] & (~is_full | (ranks[i] > lowest))
            # A zero made of the count, which waits for earlier reads, makes this write wait too.
            slot = jnp.where(is_full, worst + jnp.minimum(state.count, 0), state.count)
            at = jnp.where(is_taken, slot, ring.capacity)
            number = numbers[i]
            state = state.replace(
                ranks=sum_tree.set_leaves(state.ranks, at[None], ranks[i][None]),
                stamps=state.stamps.at[at].set(number, mode="drop"),
                count=state.count + (is_taken & ~is_full).astype(jnp.int32),
            )
            return state, slots.at[i].set(at)

        slots = jnp.full(ranks.size, ring.capacity, jnp.int32)
        state, slots = dependencies.loop(ranks.size, place_item, (state, slots))
        # If a later item of the call got the same slot, the stamp there is another number.
        read = lambda: state.stamps.at[slots].get(mode="fill", fill_value=0)
        slots = jnp.where(dependencies.materialize(read) == numbers, slots, ring.capacity)
        # Later writes wait for that read.
        state = dependencies.delay_writes_until(state, jnp.minimum(jnp.min(slots), 0))
        state = state.replace(number=numbers[-1] + np.uint32(1))
        return state, plan_slots(ring, slots, written)

    def reset(self, ring: Ring, state: MaxValueState, token: jax.Array) -> MaxValueState:
        """Returns the state without items, in which no slot has the number of an item."""
        ranks = sum_tree.clear(state.ranks, token)
        return super().reset(ring, state, token).replace(ranks=ranks)

    def check_edit(self, method: str, names: frozenset[str]) -> None:
        """Raises ValueError for leaves of the rank, by which the items held were chosen."""
        rank = path_name(self.key)
        for name in names:
            if within(name, rank):
                raise ValueError(
                    f"{method}: leaf '{name}': expected leaves that MaxValue does not rank items "
                    "by, got one that it does. Rank by a leaf of its own."
                )

    def best(self, ring: Ring, state: MaxValueState, count: int) -> jax.Array:
        """Returns the slots of the `count` items of highest rank, or of all, ascending."""
        # Of equal ranks, the item in the lower slot comes first.
        ranks = sum_tree.leaf_values(state.ranks)[: int(state.count)]
        chosen = jnp.argsort(-ranks, stable=True)[:count]
        return jnp.sort(chosen).astype(jnp.int32)


class ReservoirState(pytree.State):
    """The numbers of the items that are held, and the number of all that came.

    Attributes:
        seed: uint32 `[2]`, the seed of the random choices.
        stamps: uint32 `[N]`, the number of the item in each slot.
        count: int32 `[]`, the number of slots that hold items.
        number: uint32 `[]`, the number of the next item, modulo 2^32.
        came: uint32 `[]`, the number of items since the reservoir was empty, at most 2^32 - 2.
    """

    seed: jax.Array
    stamps: jax.Array
    count: jax.Array = pytree.cursor()
    number: jax.Array
    came: jax.Array

    def summary(self, ring: Ring) -> dict[str, str]:
        """Returns the numbers of items held and of all that came, for the `repr` of a state."""
        total = display.host_values(self.came)
        of_all = "" if total is None else f"{int(total):,}"
        return {"held": display.share(self.count, ring.capacity), "that ever came": of_all}


@pytree.component
class Reservoir(OneByOne):
    """Keeps a uniformly random set of N items out of all that were ever written.

    Item number n > N overwrites a random item with probability N / n, and is left out otherwise.
    Each item is chosen alone, so rows are not kept together or in order of time.

    Attributes:
        key: a PRNG key, or an integer seed. States under `vmap` make the same choices unless
            `state.writer.seed` differs between them.

    Reference: Vitter, 1985, "Random sampling with a reservoir" (algorithm R).

    Example:
        >>> import jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(4, writer=jrb.Reservoir(0))
        >>> state = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(100)})
        >>> int(buffer.size(state))
        4
    """

    key: Any = 0

    def __init__(self, key: Any = 0) -> None:
        # An array does not hash, so a PRNG key becomes a tuple of its words.
        if isinstance(key, jax.Array):
            random_bits.check_key(key)
            key = tuple(np.asarray(random_bits.seed(key)).tolist())
        object.__setattr__(self, "key", key)
        self.__post_init__()

    def __post_init__(self) -> None:
        # The words of a PRNG key, as `__init__` gives them, or a seed.
        is_words = isinstance(self.key, tuple) and all(type(word) is int for word in self.key)
        if not is_words and (isinstance(self.key, bool) or not isinstance(self.key, int)):
            raise TypeError(f"Reservoir: key: expected a PRNG key or an integer, got {self.key!r}.")

    def init(self, ring: Ring, spec: Item) -> ReservoirState:
        """Returns a state without items."""
        if isinstance(self.key, int):
            seed = random_bits.seed(jax.random.key(self.key))
        else:
            seed = jnp.asarray(self.key, jnp.uint32)
        return ReservoirState(
            seed=seed,
            stamps=jnp.zeros(ring.capacity, jnp.uint32),
            count=jnp.zeros((), jnp.int32),
            number=jnp.zeros((), jnp.uint32),
            came=jnp.zeros((), jnp.uint32),
        )

    def in_shard(self, state: ReservoirState, number: jax.Array) -> ReservoirState:
        """Returns the state with a seed for this shard."""
        return state.replace(seed=random_bits.fold_in(state.seed, number))

    def plan(
        self, ring: Ring, state: ReservoirState, items: Item, mask: jax.Array | None
    ) -> tuple[ReservoirState, WritePlan]:
        """Plans a slot or none for each item; if several get the same slot, the last is written."""
        length, capacity = jax.tree.leaves(items)[0].shape[0], ring.capacity
        written = jnp.ones(length, jnp.bool_) if mask is None else mask
        is_written = jnp.repeat(written, ring.envs)
        # How many items of this call come before each: its number is `came + rank + 1`.
        rank = jnp.cumsum(is_written, dtype=jnp.uint32) - is_written.astype(jnp.uint32)
        # Item number n, `bound`, gets slot n - 1 while that exists; then a random slot below n.
        bound = jnp.minimum(rank, _MOST - state.came) + state.came + np.uint32(1)
        words = random_bits.words_at(state.seed, state.number + rank)
        chosen = random_bits.below(bound, *words).astype(jnp.uint32)
        slots = jnp.where(bound <= capacity, bound - np.uint32(1), chosen)
        slots = jnp.where(is_written & (slots < capacity), slots, np.uint32(capacity))
        # Of several items for one slot the last stays, as if they had come in single calls.
        slots = ring.distinct(slots.astype(jnp.int32)) + jnp.minimum(state.count, 0)
        # The count of all items stops at its limit.
        total = jnp.sum(is_written, dtype=jnp.uint32)
        num_items = jnp.minimum(total, _MOST - state.came) + state.came
        after = state.replace(
            stamps=state.stamps.at[slots].set(state.number + rank, mode="drop"),
            count=jnp.minimum(num_items, capacity).astype(jnp.int32),
            number=state.number + total,
            came=num_items,
        )
        return after, plan_slots(ring, slots, written)

    def reset(self, ring: Ring, state: ReservoirState, token: jax.Array) -> ReservoirState:
        """Returns the state without items, whose count of items starts at 0 again."""
        return super().reset(ring, state, token).replace(came=jnp.zeros_like(state.came))

    def import_state(
        self, ring: Ring, state: ReservoirState, old: ReservoirState
    ) -> ReservoirState:
        """Continues the count of items; if the buffer is not full, it counts only items held."""
        # A reservoir that is not full holds all items that count as having come.
        is_full = state.count >= ring.capacity
        return state.replace(came=jnp.where(is_full, jnp.maximum(state.came, old.came), state.came))

    def best(self, ring: Ring, state: ReservoirState, count: int) -> jax.Array:
        """Returns the first `count` slots, as those of any items are equally good."""
        return jnp.arange(min(count, int(state.count)), dtype=jnp.int32)
