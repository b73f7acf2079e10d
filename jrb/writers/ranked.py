"""Writers that choose a slot for each item, and keep no order of time."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrb import sum_tree
from jrb._core import rows
from jrb._util import checks, display, pytree
from jrb._xla import dependencies, random_bits
from jrb.keys import Path, find, path_name, within
from jrb.ring import Occupancy, Ring
from jrb.sum_tree import Tree
from jrb.types import Item, WritePlan, Writer
from jrb.types.messages import PartState

_MOST = np.uint32(2**32 - 2)


class OneByOne(Writer):
    """What all writers do that choose a slot for each item, and number items as they come.

    Their states have `stamps`, uint32 `[N]`, the number of the item in each slot; `count`, int32
    `[]`, how many slots, from 0 on, hold items; and `number`, uint32 `[]`, of the next item.
    """

    is_chronological: ClassVar[bool] = False

    def held(self, ring: Ring, state: PartState) -> Occupancy:
        """The first slots."""
        return Occupancy(first=jnp.zeros(1, jnp.int32), count=state.count[None])

    def generation_of(self, ring: Ring, state: PartState, slots: jax.Array) -> jax.Array:
        """The number of the item."""
        return dependencies.materialize(lambda: state.stamps.at[slots].get(mode="clip"))

    def in_order(self, ring: Ring, state: PartState) -> tuple[jax.Array, jax.Array]:
        """By the numbers of the items."""
        return rows.by_number(state.stamps, state.number, state.count), state.count


def write_of(ring: Ring, slots: jax.Array, written: jax.Array) -> WritePlan:
    """The write of items at slots, int32 `[T * E]`, distinct but for N; rows bool `[T]` pass."""
    return WritePlan(
        starts=slots,
        slots=slots.reshape(written.size, ring.envs),
        written=written,
        passed=jnp.zeros(written.size, jnp.int32),
        expired=jnp.zeros((), jnp.int32),
        consecutive=False,
    )


class MaxValueState(pytree.State):
    """What is held, and how good it is.

    Attributes:
        ranks: a tree of the least rank, over float32 leaves `[N]`.
        stamps: uint32 `[N]`, the number of the item in each slot.
        count: int32 `[]`, the slots that hold items.
        number: uint32 `[]`, the items that came so far, modulo 2^32.
        key: the path to the ranks; no array.
    """

    ranks: Tree
    stamps: jax.Array
    count: jax.Array = pytree.cursor()
    number: jax.Array
    key: Path = pytree.static(default="")

    def summary(self, ring: Ring) -> dict[str, str]:
        """How many items are held."""
        return {"held": display.share(self.count, ring.capacity)}


@pytree.component
class MaxValue(OneByOne):
    """Keeps the N items of the highest rank, each for itself and in no order of time.

    A full buffer takes an item if its rank is above the lowest one held, whose place it gets; of
    equal ranks the old ones stay. An item whose rank is NaN is never taken. Costs O(log N) an item.

    Attributes:
        key: the path to the rank, real numbers of at most 32 bits that float32 holds exactly, such
            as ("next", "reward"); those of one item are added up, also of several leaves.

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
        """Nothing is held. Raises if the items have no such rank."""
        self._check(spec)
        return MaxValueState(
            ranks=sum_tree.neutral(ring.capacity, "min"),
            stamps=jnp.zeros(ring.capacity, jnp.uint32),
            count=jnp.zeros((), jnp.int32),
            number=jnp.zeros((), jnp.uint32),
            key=self.key,
        )

    def _check(self, spec: Item) -> None:
        for leaf in jax.tree.leaves(find(spec, self.key, "MaxValue: key")):
            dtype = pytree.dtype_of(leaf)
            exact = dtype is not None and (
                (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4)
                or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 2)
                or dtype == jnp.bool_
            )
            if not exact:
                raise TypeError(
                    f"MaxValue: key {self.key!r}: expected leaves of numbers that float32 holds "
                    f"exactly, got {dtype}. Store the rank as float32."
                )

    def plan(
        self, ring: Ring, state: MaxValueState, items: Item, mask: jax.Array | None
    ) -> tuple[MaxValueState, WritePlan]:
        """One item after the other; of those that want one slot in a call, the last has it."""
        leaves = jax.tree.leaves(find(items, self.key, "MaxValue: key"))
        length = leaves[0].shape[0]
        flat = [leaf.astype(jnp.float32).reshape(length * ring.envs, -1) for leaf in leaves]
        ranks = jnp.sum(flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1), axis=1)
        written = jnp.ones(length, jnp.bool_) if mask is None else mask
        wanted = jnp.repeat(written, ring.envs) & ~jnp.isnan(ranks)
        place = lambda i, carry: _place(ring, ranks[i], wanted[i], i, carry)
        slots = jnp.full(ranks.size, ring.capacity, jnp.int32)
        state, slots = dependencies.loop(ranks.size, place, (state, slots))
        number = state.number + jnp.arange(ranks.size, dtype=jnp.uint32)
        here = dependencies.materialize(
            lambda: state.stamps.at[slots].get(mode="fill", fill_value=0)
        )
        slots = jnp.where(here == number, slots, ring.capacity)
        waited = jnp.minimum(jnp.min(slots), 0)
        state = dependencies.delay_writes_until(state, waited)  # later writes wait for `here`
        state = state.replace(number=state.number + np.uint32(ranks.size))
        return state, write_of(ring, slots, written)

    def reset(self, ring: Ring, state: MaxValueState, token: jax.Array) -> MaxValueState:
        """Nothing is held; items are counted on, and no slot has the number of an item."""
        return state.replace(
            ranks=sum_tree.cleared(state.ranks, token),
            stamps=dependencies.overwrite(state.stamps, state.number, token),
            count=jnp.minimum(state.count, 0) + token,
            number=state.number + np.uint32(1),
        )

    def check_edit(self, verb: str, names: frozenset[str]) -> None:
        """The rank decided which items are held. Raises where it would change."""
        rank = path_name(self.key)
        for name in names:
            if within(name, rank):
                raise ValueError(
                    f"{verb}: leaf '{name}': expected leaves that MaxValue does not rank items by, "
                    "got one that it does. Rank by a leaf of its own."
                )

    def best(self, ring: Ring, state: MaxValueState, count: int) -> jax.Array:
        """The slots of the `count` best items, or of all, in the order of slots."""
        held = int(state.count)
        ranks = sum_tree.leaf_values(state.ranks)[:held]
        chosen = jnp.argsort(-ranks, stable=True)[:count]
        return jnp.sort(chosen).astype(jnp.int32)


def _place(ring: Ring, rank: jax.Array, wanted: jax.Array, i: jax.Array, carry: Any) -> Any:
    """Takes item i, or leaves it."""
    state, slots = carry
    lowest, worst = sum_tree.lowest(state.ranks)
    full = state.count >= ring.capacity
    taken = wanted & (~full | (rank > lowest))
    slot = jnp.where(full, worst + jnp.minimum(state.count, 0), state.count)
    at = jnp.where(taken, slot, ring.capacity)
    state = state.replace(
        ranks=sum_tree.set_leaves(state.ranks, at[None], rank[None]),
        stamps=state.stamps.at[at].set(state.number + i.astype(jnp.uint32), mode="drop"),
        count=state.count + (taken & ~full).astype(jnp.int32),
    )
    return state, slots.at[i].set(at)


class ReservoirState(pytree.State):
    """What is held of all that came.

    Attributes:
        seed: uint32 `[2]`, of the random numbers.
        stamps: uint32 `[N]`, the number of the item in each slot.
        count: int32 `[]`, the slots that hold items.
        number: uint32 `[]`, the items that came so far, modulo 2^32.
        came: uint32 `[]`, the same, but no more than 2^32 - 2.
    """

    seed: jax.Array
    stamps: jax.Array
    count: jax.Array = pytree.cursor()
    number: jax.Array
    came: jax.Array

    def summary(self, ring: Ring) -> dict[str, str]:
        """How many items are held, and of how many."""
        came = display.known(self.came)
        told = "" if came is None else f"{int(came):,}"
        return {"held": display.share(self.count, ring.capacity), "that ever came": told}


@pytree.component
class Reservoir(OneByOne):
    """Holds N of all items that ever came, each set of N equally likely.

    Item number n takes the place of one that is held with probability N / n. Each item goes for
    itself, and rows keep no order of time.

    Attributes:
        key: a PRNG key, or an integer to make one of. States under `vmap` make the same choices
            unless `state.writer.seed` differs between them.

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
        if isinstance(key, jax.Array):  # an array does not hash
            checks.key(key)
            key = tuple(np.asarray(random_bits.seed(key)).tolist())
        object.__setattr__(self, "key", key)
        self.__post_init__()

    def __post_init__(self) -> None:
        if isinstance(self.key, int) and not isinstance(self.key, bool):
            return
        if not (isinstance(self.key, tuple) and all(type(word) is int for word in self.key)):
            raise TypeError(f"Reservoir: key: expected a PRNG key or an integer, got {self.key!r}.")

    def init(self, ring: Ring, spec: Item) -> ReservoirState:
        """Nothing is held."""
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
        """Choices of its own."""
        return state.replace(seed=random_bits.fold_in(state.seed, number))

    def plan(
        self, ring: Ring, state: ReservoirState, items: Item, mask: jax.Array | None
    ) -> tuple[ReservoirState, WritePlan]:
        """A slot for each item, or none; of those that want one slot in a call, the last has it."""
        length, capacity = jax.tree.leaves(items)[0].shape[0], ring.capacity
        written = jnp.ones(length, jnp.bool_) if mask is None else mask
        comes = jnp.repeat(written, ring.envs)
        place = jnp.cumsum(comes, dtype=jnp.uint32) - comes.astype(jnp.uint32)
        bound = jnp.minimum(place, _MOST - state.came) + state.came + np.uint32(1)
        words = random_bits.counted(state.seed, state.number + place)
        chosen = random_bits.below(bound, *words).astype(jnp.uint32)
        slots = jnp.where(bound <= capacity, bound - np.uint32(1), chosen)
        slots = jnp.where(comes & (slots < capacity), slots, np.uint32(capacity))
        slots = rows.distinct(ring, slots.astype(jnp.int32)) + jnp.minimum(state.count, 0)
        total = jnp.sum(comes, dtype=jnp.uint32)
        came = jnp.minimum(total, _MOST - state.came) + state.came
        after = state.replace(
            stamps=state.stamps.at[slots].set(state.number + place, mode="drop"),
            count=jnp.minimum(came, capacity).astype(jnp.int32),
            number=state.number + total,
            came=came,
        )
        return after, write_of(ring, slots, written)

    def reset(self, ring: Ring, state: ReservoirState, token: jax.Array) -> ReservoirState:
        """Nothing is held, and nothing came; no slot has the number of an item."""
        return state.replace(
            stamps=dependencies.overwrite(state.stamps, state.number, token),
            count=jnp.minimum(state.count, 0) + token,
            number=state.number + np.uint32(1),
            came=jnp.zeros_like(state.came),
        )

    def import_state(
        self, ring: Ring, state: ReservoirState, old: ReservoirState
    ) -> ReservoirState:
        """Items are counted on; but a larger one that is not full counts what it holds only."""
        full = state.count >= ring.capacity
        return state.replace(came=jnp.where(full, jnp.maximum(state.came, old.came), state.came))

    def best(self, ring: Ring, state: ReservoirState, count: int) -> jax.Array:
        """Any `count` of them are as good: the first."""
        return jnp.arange(min(count, int(state.count)), dtype=jnp.int32)
