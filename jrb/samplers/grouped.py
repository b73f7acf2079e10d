"""Draws of groups of items that share a key: completions of a prompt, tasks, levels."""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrb._util import checks, display, pytree
from jrb._xla import dependencies, gather
from jrb.keys import Path, path_name
from jrb.ring import Ring, locate
from jrb.samplers.uniform import Uniform
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Draw,
    DrawCounts,
    OrderedSampler,
    PrioritizedSampler,
    ShardedSampler,
    ShardStats,
    SlotFacts,
)

_RUN = 64  # the number of groups that are counted together


class GroupedState(DrawCounts):
    """A table of groups. G groups, K items in each.

    Attributes:
        keys: int32 `[G]`, the key of each group.
        sizes: int32 `[G]`, the number of its items; 0 for a free place in the table.
        order: int32 `[G]`, the number of groups whose last item is older; a permutation.
        slots: int32 `[G, K]`, the slots of its items, in the order in which they entered; N where
            there is none.
        key_of: int32 `[N]`, the key of the item in each slot.
        group_of: int32 `[N]`, the place in the table of each slot's group; G for none.
    """

    keys: jax.Array
    sizes: jax.Array
    order: jax.Array
    slots: jax.Array
    key_of: jax.Array
    group_of: jax.Array

    def summary(self, ring: Ring) -> dict[str, str]:
        """Returns the number of groups, for the `repr` of a state."""
        return {"groups": display.count(self.sizes > 0)}


@pytree.component
class Grouped(ShardedSampler):
    """Draws groups of items that share an integer, wherever they are stored.

    A batch of B has B / K groups, one after another: reshape its leaves to `[B / K, K, ...]`. The
    items of a group are in the order in which they entered; if a group has fewer than K, its last
    entries are masked. `Sample.info["group"]`, int32 `[B]`, is the key of each entry's group. The
    weight of an item is that of its group, and its probability that of its group by K. Use it for
    the completions of a prompt (GRPO), for tasks in meta-learning, or for levels.

    The last K items of a key form its group. At most G groups are known: if there is another key,
    the group goes to which no item was added for the longest time, and its items are not drawn any
    more. If anchors enter later than their rows, as episodes do, a group gets them then. Edits of
    the key are refused. A write of an item costs O(G), a draw O(G + B), and `extend` writes row by
    row.

    With `jrb.Sharded`, each shard has its own groups: write the items of a group to one shard.

    Attributes:
        key: the path of an integer that int32 holds, one for each item.
        num_groups: G, the most groups that are known.
        per_group: K, the most items in a group.
        sampler: draws the groups: `Uniform()`, without replacement if no group may be in a batch
            twice; `Newest(...)`, by the last item of each; or a `Weighted`, whose function gets
            leaves `[G, K, ...]` and `age`, int32 `[G, K]`, and returns `[G]`. Where a group has no
            item, `age` is -1; if rows have no order of time, it is 0 elsewhere.
        partial: "pad" draws every group; "drop" only those that have K items.
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).

    Reference: Shao et al., 2024, "DeepSeekMath", section 4.1 (GRPO, outputs of one question).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> spread = lambda leaves, age, context: jnp.std(leaves["reward"], axis=1)
        >>> widest = jrb.Weighted(spread, leaves=("reward",))
        >>> sampler = jrb.Grouped("prompt", 10, per_group=2, sampler=widest, partial="drop")
        >>> items = {"prompt": jnp.array([7, 8, 9, 7, 8]), "reward": jnp.array([0.0, 1, 1, 3, 1])}
        >>> buffer, state = jrb.from_items(items, sampler=sampler, batch_size=4)
        >>> batch = buffer.sample(state, jax.random.key(0))
        >>> batch.info["group"].tolist(), batch.data["reward"].tolist()
        ([7, 7, 7, 7], [0.0, 3.0, 0.0, 3.0])
    """

    key: Path
    num_groups: int
    per_group: int
    sampler: ShardedSampler = Uniform()
    partial: Literal["pad", "drop"] = "pad"
    count_draws: bool = False
    # Which group goes may depend on what the row before has overwritten.
    row_by_row: ClassVar[bool] = True
    reads: ClassVar[tuple[Path, ...] | None] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: self.sampler.reads
    )
    reads_written: ClassVar[tuple[Path, ...]] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: (self.key,)
    )
    normalize: ClassVar[Any] = property(lambda self: self.sampler.normalize)

    def __post_init__(self) -> None:
        checks.path("key", self.key)
        checks.count("num_groups", self.num_groups, 2**31 - 1)
        checks.count("per_group", self.per_group)
        checks.choice("partial", self.partial, ("pad", "drop"))
        checks.flag("count_draws", self.count_draws)
        one = self.sampler
        is_of_groups = isinstance(one, ShardedSampler) and not isinstance(one, PrioritizedSampler)
        if not is_of_groups or one.reads_written:
            raise TypeError(
                "sampler: expected one that can draw groups: jrb.Uniform(), jrb.Newest(...) or "
                f"jrb.Weighted(...), got {one!r}."
            )
        if one.count_draws:
            raise ValueError(
                "sampler: expected one without count_draws, as draws of items are counted: "
                "Grouped(..., count_draws=True)."
            )

    @property
    def _ring(self) -> Ring:
        """The ring of groups."""
        return Ring(self.num_groups, 1)

    def init(self, ring: Ring) -> GroupedState:
        """Returns a table without groups."""
        count = self.num_groups
        return GroupedState(
            keys=jnp.zeros(count, jnp.int32),
            sizes=jnp.zeros(count, jnp.int32),
            order=jnp.arange(count, dtype=jnp.int32),
            slots=jnp.full((count, self.per_group), ring.capacity, jnp.int32),
            key_of=jnp.zeros(ring.capacity, jnp.int32),
            group_of=jnp.full(ring.capacity, count, jnp.int32),
        )

    def on_write(
        self, ring: Ring, state: GroupedState, change: AnchorUpdate, anchors: Anchors
    ) -> GroupedState:
        """Removes anchors that departed from their groups, then adds those that entered."""
        # Note the keys of all rows, as some may become anchors later.
        if change.incoming is not None:
            slots = change.incoming.slots
            keys = self._read_keys(change.incoming.leaves, slots.size)
            state = state.replace(key_of=gather.put(state.key_of, slots, keys))
        # Slots that are overwritten leave their groups too.
        departed = jnp.concatenate([change.departed_slots(ring), change.entered])
        return _add(_remove(state, departed), change.entered)

    def _read_keys(self, leaves: dict[str, jax.Array], count: int) -> jax.Array:
        """Returns the keys of written items, int32 `[K]`; raises unless they are integers."""
        what = f"Grouped: key: expected one integer that int32 holds at '{path_name(self.key)}'"
        if len(leaves) != 1:
            raise ValueError(f"{what}, got the leaves {sorted(leaves)}.")
        (leaf,) = leaves.values()
        is_integer = jnp.issubdtype(leaf.dtype, jnp.integer) and np.can_cast(leaf.dtype, np.int32)
        if not is_integer or leaf.size != count:
            raise TypeError(f"{what}, got {leaf.dtype} of shape {leaf.shape[1:]} for an item.")
        return leaf.reshape(-1).astype(jnp.int32)

    def draw(
        self,
        ring: Ring,
        state: GroupedState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[GroupedState, Draw]:
        """Draws B / K groups, and takes all of their items."""
        count = self._num_groups(batch_size)
        groups, own = self._groups(state, anchors)
        _, drawn = self.sampler.draw(self._ring, own, groups, key, count, beta)
        # Move items up over the missing ones before them, so that missing items come last. A sort
        # would take longer on a CPU.
        slots, keys = gather.read_items((state.slots, drawn.slots), (state.keys, drawn.slots))
        has_item, group = slots < ring.capacity, np.arange(count, dtype=np.int32)[:, None]
        place = jnp.cumsum(has_item, axis=1, dtype=jnp.int32) - 1
        place = jnp.where(has_item, place, self.per_group)
        none = jnp.full_like(slots, ring.capacity)
        slots = none.at[group, place].set(slots, mode="drop").reshape(-1)
        each = jax.tree.map(lambda leaf: jnp.repeat(leaf, self.per_group), drawn)
        each = each.keep_where(slots < ring.capacity)
        return state, each.replace(
            slots=jnp.where(each.mask, slots, 0),
            probabilities=each.probabilities * (1 / self.per_group),
            group=jnp.repeat(keys, self.per_group),
        )

    def _num_groups(self, batch_size: int) -> int:
        """Returns the number of groups in a batch."""
        if batch_size % self.per_group:
            raise ValueError(
                f"batch_size: expected a multiple of per_group={self.per_group}, got {batch_size}: "
                "Grouped draws whole groups."
            )
        return batch_size // self.per_group

    def _groups(self, state: GroupedState, anchors: Anchors) -> tuple[Anchors, Any]:
        """Returns the groups that may be drawn as anchors, and a state of the sampler of groups."""
        sizes = dependencies.materialize(lambda: state.sizes)
        may_be_drawn = sizes >= (1 if self.partial == "pad" else self.per_group)
        count = jnp.sum(may_be_drawn, dtype=jnp.int32)

        def search(ranks: jax.Array) -> jax.Array:
            # By runs: a running sum over 10^4 groups would take 5 times as long on a CPU.
            padding = (0, -self.num_groups % _RUN)
            runs = jnp.pad(may_be_drawn.astype(jnp.int32), padding).reshape(-1, _RUN)
            run, rank = locate(jnp.sum(runs, axis=1, dtype=jnp.int32), ranks)
            passed = jnp.cumsum(runs[run], axis=1, dtype=jnp.int32)
            return run * _RUN + jnp.sum(passed <= rank[:, None], axis=1, dtype=jnp.int32)

        def nth(ranks: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            if isinstance(self.sampler, OrderedSampler):
                # From the group that is longest without a new item to the newest.
                order = dependencies.materialize(lambda: state.order)
                place = jnp.argsort(jnp.where(may_be_drawn, order, self.num_groups))[ranks]
            else:
                # If the first groups of the table may be drawn and no others, a rank is a place.
                # On a GPU, a branch would ask the host first.
                places = jnp.arange(self.num_groups, dtype=jnp.int32)
                has_no_gap = jnp.all(may_be_drawn == (places < count))
                place = lax.platform_dependent(
                    ranks,
                    cpu=lambda ranks: lax.cond(has_no_gap, lambda ranks: ranks, search, ranks),
                    default=search,
                )
            return place.astype(jnp.int32), jnp.ones(ranks.shape, jnp.float32)

        facts = None if anchors.facts is None else self._facts(state, anchors.facts)
        groups = Anchors(count, nth, facts=facts)
        place = jnp.arange(self.num_groups, dtype=jnp.int32)
        entered = jnp.where(may_be_drawn, place, self.num_groups)
        own = self.sampler.init(self._ring)
        return groups, self.sampler.rebuild_index(self._ring, own, entered, groups, groups)

    def _facts(self, state: GroupedState, facts: SlotFacts) -> SlotFacts:
        """Returns the facts about the items of all groups, arrays `[G, K, ...]`."""
        slots = dependencies.materialize(lambda: state.slots)
        has_item, safe = slots < state.key_of.size, jnp.minimum(slots, state.key_of.size - 1)
        age = jnp.zeros_like(slots) if facts.age is None else facts.age[safe]
        leaves = {name: leaf[safe] for name, leaf in facts.leaves.items()}
        return SlotFacts(leaves, jnp.where(has_item, age, -1), facts.context)

    def ready(self, state: GroupedState, anchors: Anchors, batch_size: int | None) -> jax.Array:
        """Returns True if a group may be drawn."""
        groups, own = self._groups(state, anchors)
        count = None if batch_size is None else self._num_groups(batch_size)
        return self.sampler.ready(own, groups, count)

    def stats(self, ring: Ring, state: GroupedState, anchors: Anchors) -> ShardStats:
        """Returns the statistics of this shard's groups."""
        groups, own = self._groups(state, anchors)
        stats = self.sampler.stats(self._ring, own, groups)
        return stats.replace(num_anchors=stats.num_anchors * self.per_group)

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns the exponent of the sampler of groups."""
        return self.sampler.exponent(beta)

    def import_state(
        self, state: GroupedState, old: GroupedState, slots: jax.Array, new_slots: jax.Array
    ) -> GroupedState:
        """Returns the state as it is: its groups are those of the items that were written."""
        return state

    def concat_shard_states(self, states: list[Any]) -> GroupedState:
        """Returns the state of the first shard, as `import_state` uses none of it."""
        return states[0]

    def rebuild_index(
        self, ring: Ring, state: GroupedState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> GroupedState:
        """Makes the groups again from all anchors, oldest first."""
        blank = self.init(ring)
        return _add(blank.replace(key_of=state.key_of, draws=state.draws), entered)


def _remove(state: GroupedState, departed: jax.Array) -> GroupedState:
    """Removes slots, int32 `[M]`, N for padding, from the groups that they are in."""
    capacity, (num_groups, per_group) = state.key_of.size, state.slots.shape
    group = jnp.where(departed < capacity, gather.read_at(state.group_of, departed), num_groups)
    safe = jnp.minimum(group, num_groups - 1)
    members = gather.read(state.slots, safe)
    # Write N over the places that have one of these slots.
    at = jnp.where(members == departed[:, None], group[:, None], num_groups)
    place = np.arange(per_group, dtype=np.int32)
    slots = state.slots.at[at, place].set(capacity, mode="drop")
    remaining = jnp.sum(slots[safe] < capacity, axis=1, dtype=jnp.int32)
    none = jnp.full_like(departed, num_groups) + dependencies.zero_depending_on(group)
    return state.replace(
        slots=slots,
        sizes=gather.put(state.sizes, group, remaining),
        group_of=gather.put(state.group_of, departed, none),
    )


def _add(state: GroupedState, entered: jax.Array) -> GroupedState:
    """Adds slots, int32 `[M]`, N for padding, to the groups of their keys, one after another."""
    capacity, (num_groups, per_group) = state.key_of.size, state.slots.shape
    places = jnp.arange(num_groups, dtype=jnp.int32)

    def add(state: GroupedState, slot: jax.Array) -> tuple[GroupedState, None]:
        is_real = slot < capacity
        key = gather.read_at(state.key_of, slot[None])[0]
        # The group of the key; or a free place, or that of the group longest without a new item.
        # A reduction to a place and its value, as `argmin`, would take 3 times as long on a CPU.
        first = lambda mask: jnp.min(jnp.where(mask, places, num_groups))
        order = jnp.where(state.sizes > 0, state.order, -1)
        same = first((state.keys == key) & (state.sizes > 0))
        is_known = same < num_groups
        group = jnp.where(is_known, same, first(order == jnp.min(order)))
        # Of a group that goes, all items leave; of one that is full, the oldest.
        members = gather.read(state.slots, group[None])[0]
        place = np.arange(per_group, dtype=np.int32)
        kept = jnp.where(is_known, members, capacity)
        freed = lax.argmax(kept == capacity, 0, jnp.int32)  # 0 if no place is free
        leaves = jnp.where(is_known & (place != freed), capacity, members)
        # Items keep their order: the new one is last, and takes the place of none, or of the first.
        row = jnp.where(place < freed, kept, jnp.append(kept[1:], slot))
        none = jnp.full_like(leaves, num_groups)
        at = jnp.where(is_real, group, num_groups)[None]
        slots = jnp.append(jnp.where(is_real, leaves, capacity), slot)
        size = jnp.sum(row < capacity, dtype=jnp.int32)
        # The group becomes the newest, and those that were newer move up.
        is_newer = is_real & (state.order > gather.read(state.order, group[None]))
        order = jnp.where(is_newer, state.order - 1, state.order)
        return state.replace(
            keys=gather.put(state.keys, at, key),
            sizes=gather.put(state.sizes, at, size),
            order=gather.put(order, at, jnp.int32(num_groups - 1)),
            slots=state.slots.at[at[0]].set(row, mode="drop"),
            group_of=gather.put(state.group_of, slots, jnp.append(none, group)),
        ), None

    # Without a loop for a single item.
    if entered.size == 1:
        return add(state, entered[0])[0]
    return lax.scan(add, state, entered)[0]
