"""The unit of n-step returns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import checks, display, pytree
from jrb._xla import dependencies, gather
from jrb.keys import Keys, Path, check_ends, leaves_at, path_name, within
from jrb.ring import Ring
from jrb.types import (
    Anchors,
    AnchorUpdate,
    Context,
    Item,
    ReadPlan,
    Sampler,
    Unit,
    WritePlan,
    Writer,
)
from jrb.units import anchors as anchor_queue
from jrb.units import episodes
from jrb.units.anchors import AnchorQueue

_UNROLLED = 16
"""The number of rows of a return that are added without a loop, which keeps programs small."""


class NStepState(pytree.State):
    """The ends of episodes; and, if strict, the queue of complete returns.

    Attributes:
        ended: bool `[N]`, True for slots that end an episode.
        length: int32 `[E]`, the rows of the running episode, at most n; None unless `strict`.
        queue: the anchors; None unless `strict`.
        n: the n that `length` is limited to; not an array; None unless `strict`.
    """

    ended: jax.Array
    length: jax.Array | None = pytree.tally()
    queue: AnchorQueue | None
    n: int | None = pytree.static(default=None)

    def summary(self, ring: Ring) -> dict[str, str]:
        """Returns the number of ends of episodes, for the `repr` of a state."""
        return {"ends of episodes": display.count(self.ended)}


@pytree.component
class NStep(Unit):
    """Joins up to n consecutive transitions into one with their discounted return.

    Let m be the number of rows from an anchor at row t to the end of its episode or to the newest
    row, at most n. The reward is sum_{k<m} discount^k r_{t+k}; all other leaves of `next`, done
    flags too, are those of row t + m - 1; all other leaves are those of row t. `Sample.info` has
    `steps`, int32 `[B]`, which is m; and `discount`, float32 `[B]`, which is discount^m: multiply
    the value of the next observation by it, unless the episode terminated.

    If each row t has a discount g_t, as in dm_env, discount^k is replaced by the product g_t ...
    g_{t+k-1}, and `info["discount"]` is the product of all m. A row that terminates has g = 0
    there: the value of the next observation then does not count, whatever the flags say, nor does
    any later reward, even if it is not finite.

    If the reward has several leaves, such as one for each agent, each becomes a return.

    Attributes:
        n: the largest number of rows in a return.
        discount: gamma, from 0 to 1; or the path to a real leaf of shape `()` or `(1,)`, the
            discount of what follows each row.
        strict: if True, rows become anchors only when they have n rows or their episode ends. If
            False, rows near the newest one are drawn with the rows that there are.

    Reference: Sutton, 1988, "Learning to predict by the methods of temporal differences"; Hessel et
    al., 2018, "Rainbow", section 3 (multi-step learning).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> rows = {"next": {"reward": jnp.ones(4), "done": jnp.arange(4) == 3}}
        >>> buffer, state = jrb.from_items(rows, unit=jrb.NStep(3, discount=0.5))
        >>> batch = buffer.sample(state, jax.random.key(0), batch_size=32)
        >>> sorted(set(zip(batch.indices.tolist(), batch.data["next"]["reward"].tolist())))
        [(0, 1.75), (1, 1.75), (2, 1.5), (3, 1.0)]
    """

    n: int
    discount: float | Path
    strict: bool = False

    def __post_init__(self) -> None:
        checks.count("n", self.n)
        if not isinstance(self.discount, str | tuple):
            checks.fraction("discount", self.discount)
        checks.flag("strict", self.strict)

    @property
    def _discount_name(self) -> str | None:
        """The name of the leaf of discounts; None if the discount is a number."""
        return None if isinstance(self.discount, int | float) else path_name(self.discount)

    @property
    def max_entry_delay(self) -> int:
        """If strict, n - 1: where an episode ends, rows enter before older ones of others."""
        return self.n - 1 if self.strict else 0

    @property
    def anchors_are_rows(self) -> bool:
        """False if strict."""
        return not self.strict

    @property
    def has_delayed_anchors(self) -> bool:
        """True if strict."""
        return self.strict

    @property
    def anchor_rows(self) -> int:
        """If strict, n, as the episode may not end before; else 1."""
        return self.n if self.strict else 1

    @property
    def lookback(self) -> int:
        """0: rows are read from the anchor on."""
        return 0

    @property
    def anchor_requirement(self) -> str:
        """If strict, n rows of one episode or its end."""
        rows = f"An anchor needs {self.n} rows of one episode, or its end. "
        return f"{rows}strict=False draws fewer rows too." if self.strict and self.n > 1 else ""

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises unless the ring has n rows and the writer keeps the order of time."""
        checks.window("NStep: n", self.n, ring.rows)
        checks.chronological("NStep", writer)

    def init(self, context: Context, spec: Item) -> NStepState:
        """Returns an empty state; raises if items lack a flag, float reward or discount."""
        ring, keys = context.ring, context.keys
        check_ends(spec, keys)
        keys.get(spec, "reward")
        # An integer cannot hold a discounted sum.
        for name, leaf in leaves_at(spec, keys.reward).items():
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"NStep: leaf '{name}': expected a reward of a floating dtype, got "
                    f"{leaf.dtype}. Discounted sums are fractions: store it as float32."
                )
        if self._discount_name is not None:
            named = dict(zip(pytree.leaf_names(spec), jax.tree.leaves(spec), strict=True))
            leaf = named.get(self._discount_name)
            is_real = leaf is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
            if leaf is None or not is_real or leaf.shape not in ((), (1,)):
                raise ValueError(
                    f"NStep: discount: expected a floating leaf at '{self._discount_name}', "
                    "of shape () or (1,) for one transition, got "
                    f"{list(named) if leaf is None else leaf}."
                )
        return NStepState(
            ended=jnp.zeros(ring.capacity, jnp.bool_),
            length=jnp.zeros(ring.envs, jnp.int32) if self.strict else None,
            queue=anchor_queue.init(context) if self.strict else None,
            n=self.n if self.strict else None,
        )

    def on_write(
        self, context: Context, state: NStepState, plan: WritePlan, items: Item
    ) -> tuple[NStepState, AnchorUpdate]:
        """Makes rows anchors when they are written; if strict, when their return is complete."""
        done = plan.episode_ends(context.keys, items)
        ended = plan.put(state.ended, done)
        if state.queue is None or state.length is None:
            return state.replace(ended=ended), AnchorUpdate.of_held(context, plan)
        # Counted to n at most: a longer episode completes one return with each row.
        length, running = episodes.lengths(state.length, done, plan, self.n)
        # A row completes the return from n - 1 rows back; if an episode ends, those since then too.
        back = jnp.arange(self.n - 1, -1, -1, dtype=jnp.int32)
        completes = (back < length[..., None]) & (done[..., None] | (back == self.n - 1))
        entered = anchor_queue.rows_back(context, plan, back, completes)
        # At the end of an episode, returns enter before older rows of other environments.
        slack = self.max_entry_delay if context.ring.envs > 1 else 0
        queue, change = anchor_queue.after_write(context, state.queue, plan, entered, slack)
        return state.replace(ended=ended, length=running, queue=queue), change

    def truncate(
        self, context: Context, state: NStepState, which: jax.Array
    ) -> tuple[NStepState, AnchorUpdate | None]:
        """Ends episodes at the newest rows; if strict, pending returns become anchors."""
        ended = episodes.mark_newest(context, state.ended, which)
        if state.queue is None or state.length is None:
            return state.replace(ended=ended), None
        # Returns of fewer than n rows end here; the one from n - 1 rows back was complete before.
        now = anchor_queue.no_rows(context.ring)
        back = jnp.arange(self.n - 2, -1, -1, dtype=jnp.int32)
        ends = which & (context.held.rows(context.ring) > 0)
        completes = ends[:, None] & (back < state.length[:, None])
        entered = anchor_queue.rows_back(context, now, back, completes[None])
        queue, change = anchor_queue.after_write(context, state.queue, now, entered, slack=0)
        length = jnp.where(which, 0, state.length)
        return state.replace(ended=ended, length=length, queue=queue), change

    def reset(self, ring: Ring, state: NStepState, token: jax.Array) -> NStepState:
        """Returns the emptied state; flags stay, as those of empty slots are not used."""
        return dependencies.empty_state(state, token)

    def is_episode_end(self, context: Context, state: NStepState, slots: jax.Array) -> jax.Array:
        """Returns True for rows that were written or truncated as ends."""
        return gather.items_at(state.ended, slots)

    def anchors(self, context: Context, state: NStepState) -> Anchors:
        """Returns all held slots; if strict, those with a complete return."""
        if state.queue is None:
            return Anchors.of_held(context)
        return anchor_queue.anchors(context.ring, state.queue)

    def plan_read(
        self, context: Context, state: NStepState, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> ReadPlan:
        """Reads rewards at all rows of the return, `next` at its last, the rest at its first."""
        ring, keys = context.ring, context.keys
        steps = episodes.steps_ahead(context, state.ended, slots, self.n)
        # After its last row, a return repeats this row; `reduce` ignores the repeats.
        step = jnp.minimum(jnp.arange(self.n, dtype=jnp.int32), steps[:, None] - 1)
        window = ring.slot_after(slots[:, None], step * ring.envs)
        # As it repeats, its last column is the last real row.
        last = window[:, -1]

        def where(name: str) -> jax.Array:
            if within(name, path_name(keys.reward)) or name == self._discount_name:
                return window
            return last if keys.is_next(name) else slots

        info = {"steps": jnp.where(mask, steps, 0)}
        if isinstance(self.discount, int | float):
            # Choose among powers computed in Python, as float32 powers are off by some units in the
            # last place; by selects if they are few, as a gather would be one more kernel.
            powers = [self.discount**m for m in range(self.n + 1)]
            if self.n <= _UNROLLED:
                power = jnp.full(steps.shape, powers[0], jnp.float32)
                for number, each in enumerate(powers[1:], 1):
                    power = jnp.where(steps >= number, jnp.float32(each), power)
            else:
                power = jnp.asarray(powers, jnp.float32)[steps]
            info["discount"] = jnp.where(mask, power, 0.0)
        return ReadPlan(where=where, mask=mask, info=info)

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Replaces the rewards by their discounted sums."""
        steps, info, discounts = plan.info["steps"], dict(plan.info), None
        # Rows after the end repeat the last row, and do not count.
        inside = jnp.arange(self.n, dtype=jnp.int32) < steps[:, None]
        if self._discount_name is not None:
            named = dict(zip(pytree.leaf_names(raw), jax.tree.leaves(raw), strict=True))
            # In float32 at least: bfloat16 keeps three digits, of a product fewer.
            leaf = pytree.widen(named[self._discount_name])
            discounts = jnp.where(inside & plan.mask[:, None], leaf.reshape(inside.shape), 1)
            # Discounts after a discount of 0 are ignored: they may be NaN.
            times = lambda total, factor: total * jnp.where(total == 0, 1, factor)
            product = _fold_rows(times, jnp.ones_like(discounts[:, 0]), [discounts])
            info["discount"] = jnp.where(plan.mask, product, 0.0).astype(jnp.float32)

        def add(later: jax.Array, reward: jax.Array, real: jax.Array, *own: jax.Array) -> jax.Array:
            factor: Any = own[0] if own else self.discount
            # Rewards after a discount of 0 are ignored: 0 times infinity is NaN.
            later = jnp.where(factor == 0, 0, later) if own or not factor else later
            return jnp.where(real, reward, 0) + factor * later

        def reduce_leaf(path: tuple, leaf: jax.Array) -> jax.Array:
            name = pytree.leaf_name(path)
            if within(name, path_name(keys.reward)):
                # Flags and discounts `[B, n]` get the further axes of the reward.
                wide = pytree.widen(leaf)
                lift = lambda array: array.reshape(*array.shape, *(1,) * (wide.ndim - 2))
                columns = [wide, lift(inside)]
                if discounts is not None:
                    columns.append(lift(discounts).astype(wide.dtype))
                return _fold_rows(add, jnp.zeros_like(wide[:, 0]), columns, True).astype(leaf.dtype)
            # The leaf of discounts was read at all rows; it stays a leaf of one.
            if name == self._discount_name:
                return leaf[:, -1] if keys.is_next(name) else leaf[:, 0]
            return leaf

        return jax.tree_util.tree_map_with_path(reduce_leaf, raw), info


def _fold_rows(
    step: Callable[..., jax.Array], start: jax.Array, rows: list[jax.Array], reverse: bool = False
) -> jax.Array:
    """Applies `step(value, *row)` to rows `[B, n, ...]` along axis 1, from `start` on."""
    # Unroll the first steps, which are all of them if the return is short.
    order = range(rows[0].shape[1])[:: -1 if reverse else 1]
    for k in order[:_UNROLLED]:
        start = step(start, *(leaf[:, k] for leaf in rows))
    if len(order) <= _UNROLLED:
        return start
    # Loop over the other rows; each turn takes as many of them as were unrolled.
    others = slice(0, -_UNROLLED) if reverse else slice(_UNROLLED, None)
    others = [jnp.moveaxis(leaf[:, others], 1, 0) for leaf in rows]
    body = lambda value, row: (step(value, *row), None)
    return lax.scan(body, start, others, reverse=reverse, unroll=_UNROLLED)[0]
