"""A uniform sample of all that ever came."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import rows
from jrb._util import checks, display, pytree
from jrb._xla import dependencies, random_bits
from jrb.ring import Ring
from jrb.types import Item, WritePlan
from jrb.writers.one_by_one import OneByOne, write_of

_MOST = np.uint32(2**32 - 2)


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

    def adopt(self, ring: Ring, state: ReservoirState, old: ReservoirState) -> ReservoirState:
        """Items are counted on; but a larger one that is not full counts what it holds only."""
        full = state.count >= ring.capacity
        return state.replace(came=jnp.where(full, jnp.maximum(state.came, old.came), state.came))

    def best(self, ring: Ring, state: ReservoirState, count: int) -> jax.Array:
        """Any `count` of them are as good: the first."""
        return jnp.arange(min(count, int(state.count)), dtype=jnp.int32)
