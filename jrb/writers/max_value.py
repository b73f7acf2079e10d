"""The best items: a new one takes the place of the worst."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb import sum_tree
from jrb._util import display, pytree
from jrb._xla import dependencies
from jrb.keys import Path, find, path_name, within
from jrb.ring import Ring
from jrb.sum_tree import Tree
from jrb.types import Item, WritePlan
from jrb.writers.one_by_one import OneByOne, write_of


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
        here = dependencies.read(lambda: state.stamps.at[slots].get(mode="fill", fill_value=0))
        slots = jnp.where(here == number, slots, ring.capacity)
        waited = jnp.minimum(jnp.min(slots), 0)
        state = dependencies.after(state, waited)  # later writes wait for `here`
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
