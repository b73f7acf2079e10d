"""Draws in proportion to a function of stored leaves: staleness, recency, curricula."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jrb import sum_tree
from jrb._util import checks, pytree
from jrb.keys import Path
from jrb.ring import Ring
from jrb.samplers.prioritized import Weighing, draw_by_mass
from jrb.types import Anchors, AnchorUpdate, Draw, LimitedSampler, ShardedSampler, ShardStats
from jrb.types.messages import DrawCounts, PartState


class WeightedState(DrawCounts):
    """The slots that may be drawn.

    Attributes:
        is_anchor: bool `[N]`.
    """

    is_anchor: jax.Array


@pytree.component
class Weighted(ShardedSampler, LimitedSampler):
    """Draws each anchor in proportion to its weight, which a function computes at each draw.

    Use it where weights follow from stored leaves and change with time: a limit on the staleness
    of data that other versions of a policy have collected, recency, curricula. A draw costs O(N),
    in one pass. An anchor of weight 0 is never drawn; if all have weight 0, there is nothing to
    draw: the batch is masked, and outside `jit` a draw raises. Weights that are negative, infinite
    or NaN count as 0. Items must be on the device, as in `jrb.DeviceStorage`.

    Importance weights are (n P(i))^-beta over n anchors; with the default beta of 0 they are 1.

    Attributes:
        function: `function(leaves, age, context)` returns the weight of every slot, `[N]`. It must
            be made of JAX operations. `leaves` is a dict of arrays `[N, ...]`, by the names in
            `leaves`, such as "next/reward". `age`, int32 `[N]`, is the number of rows that are
            newer in the environment of a slot, 0 for the newest, and -1 for slots that may not be
            drawn: their leaves have no meaning, and their weights are ignored. It is None if the
            writer keeps no order of time. `context` is the pytree given as
            `sample(..., context=...)` or `draw(..., context=...)`, None if none is given; it may be
            traced, so a new version of a policy compiles nothing.
        leaves: the paths of the leaves that the function reads.
        beta: the exponent of importance weights.
        normalize: the divisor of importance weights: "batch" for the largest in the batch, None for
            no division.
        count_draws: if True, draws of each item are counted (see `jrb.types.Sampler`).
        max_draws: the number of draws after which an item is used up, as for `jrb.Uniform`; None
            for no limit.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> def fresh(leaves, age, version):
        ...     staleness = version - leaves["version"]
        ...     return jnp.where(staleness <= 2, jnp.exp2(-staleness.astype(float)), 0.0)
        >>> sampler = jrb.Weighted(fresh, leaves=("version",))
        >>> buffer = jrb.ReplayBuffer(8, batch_size=4, sampler=sampler)
        >>> state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.arange(8)})
        >>> batch = buffer.sample(state, jax.random.key(0), context=jnp.int32(7))
        >>> sorted({*batch.data["version"].tolist()} - {5, 6, 7})
        []
    """

    function: Callable[[dict[str, jax.Array], Any, Any], jax.Array]
    leaves: tuple[Path, ...] = ()
    beta: float = 0.0
    normalize: Literal["batch", "buffer"] | None = "batch"
    count_draws: bool = False
    max_draws: int | None = None
    reads: ClassVar[tuple[Path, ...] | None] = property(  # pyright: ignore[reportAssignmentType]
        lambda self: self.leaves
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise TypeError(
                f"function: expected a function of leaves, ages and a context, got "
                f"{self.function!r}."
            )
        if not isinstance(self.leaves, tuple):
            raise TypeError(f"leaves: expected a tuple of paths, got {self.leaves!r}.")
        for path in self.leaves:
            checks.path("leaves", path)
        checks.choice("normalize", self.normalize, ("batch", None))

    def init(self, ring: Ring) -> WeightedState:
        """Returns the state of a buffer without anchors."""
        return WeightedState(is_anchor=jnp.zeros(ring.capacity, jnp.bool_))

    def on_write(
        self, ring: Ring, state: WeightedState, change: AnchorUpdate, anchors: Anchors
    ) -> WeightedState:
        """Marks the anchors that entered, after those that departed."""
        is_anchor = state.is_anchor.at[change.departed_slots(ring)].set(False, mode="drop")
        return state.replace(is_anchor=is_anchor.at[change.entered].set(True, mode="drop"))

    def draw(
        self,
        ring: Ring,
        state: WeightedState,
        anchors: Anchors,
        key: jax.Array,
        batch_size: int,
        beta: jax.Array | float | None = None,
    ) -> tuple[WeightedState, Draw]:
        """Draws by a sum-tree over the weights, which is made for this draw."""
        weighing = Weighing(self.exponent(beta), self.normalize)
        tree = self._tree(ring, state, anchors)
        return state, draw_by_mass(tree, key, batch_size, anchors, weighing)

    def stats(self, ring: Ring, state: WeightedState, anchors: Anchors) -> ShardStats:
        """Returns the sum of the weights of this shard's anchors."""
        return ShardStats.uniform(anchors).replace(
            mass=sum_tree.root(self._tree(ring, state, anchors)),
            min_mass=jnp.float32(sum_tree.LARGEST),
        )

    def exponent(self, beta: jax.Array | float | None) -> jax.Array:
        """Returns beta, float32 `[]`."""
        return jnp.asarray(self.beta if beta is None else beta, jnp.float32)

    def import_state(
        self, state: WeightedState, old: PartState, slots: jax.Array, new_slots: jax.Array
    ) -> WeightedState:
        """Returns the state as it is: its anchors are those of the items that were written."""
        return state

    def concat_shard_states(self, states: list[PartState]) -> WeightedState:
        """Returns the state of the first shard, as none of them knows more than its anchors."""
        return states[0]

    def rebuild_index(
        self, ring: Ring, state: WeightedState, entered: jax.Array, old: Anchors, new: Anchors
    ) -> WeightedState:
        """Marks the anchors after an edit."""
        none = jnp.zeros_like(state.is_anchor)
        return state.replace(is_anchor=none.at[entered].set(True, mode="drop"))

    def _tree(self, ring: Ring, state: WeightedState, anchors: Anchors) -> sum_tree.Tree:
        """Returns a sum-tree over the weights of anchors; other slots have weight 0."""
        facts: Any = anchors.facts
        is_anchor = state.is_anchor if facts.is_drawable is None else facts.is_drawable
        # Ranks and sums over all anchors need to know which slots are none.
        age = facts.age
        if age is not None:
            # Of groups, the ages have an axis of items.
            age = jnp.where(is_anchor.reshape(-1, *(1,) * (age.ndim - 1)), age, -1)
        weights = jnp.asarray(self.function(facts.leaves, age, facts.context))
        is_real = jnp.issubdtype(weights.dtype, jnp.number) or weights.dtype == jnp.bool_
        if weights.shape != (ring.capacity,) or not is_real:
            raise ValueError(
                f"Weighted: function: expected a number for each slot, of shape "
                f"({ring.capacity},), got {weights.dtype} of shape {weights.shape}."
            )
        weights = weights.astype(jnp.float32)
        is_drawn = is_anchor & jnp.isfinite(weights) & sum_tree.is_positive(weights)
        tree = sum_tree.neutral(ring.capacity, "sum")
        return sum_tree.set_all(
            tree, sum_tree.limit_masses(tree, jnp.where(is_drawn, weights, 0.0))
        )
