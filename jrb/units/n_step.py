"""N-step returns."""

import jax
import jax.numpy as jnp

from jrb._base import checks, pytree
from jrb._engine import anchor_queue, episodes, rows
from jrb._engine.anchor_queue import AnchorQueue
from jrb.keys import Keys, path_name, within
from jrb.ring import Ring
from jrb.types import Anchors, Change, Context, Item, Look, Sampler, Unit, Write, Writer
from jrb.units.transition import all_held, every_slot


class Steps(pytree.State):
    """What n-step returns must know before they read.

    Attributes:
        ended: bool `[N]`, which slots end an episode.
        length: int32 `[E]`, the rows of the running episode, up to n; None unless `strict`.
        queue: the anchors; None unless `strict`.
        n: what they were counted for, no array; None unless `strict`.
    """

    ended: jax.Array
    length: jax.Array | None = pytree.tally()
    queue: AnchorQueue | None
    n: int | None = pytree.static(default=None)


@pytree.component
class NStep(Unit):
    """Up to n transitions in a row, as one with their discounted return.

    From an anchor at row t, with m the rows from t to the end of its episode or to the newest row,
    at most n: the reward is sum_{k<m} discount^k r_{t+k}; all of `next`, done flags too,
    is that of row t + m - 1; the rest is that of row t. `Sample.info` has `steps`, int32 `[B]`, m;
    and `discount`, float32 `[B]`, discount^m, which the value of the next observation is multiplied
    with unless the episode terminated.

    Attributes:
        n: the most rows in a return.
        discount: gamma, from 0 to 1.
        strict: whether rows near the newest one wait until they have n rows or the end of their
            episode. Otherwise they are drawn with the rows that are there.

    Reference: Sutton, 1988, "Learning to predict by the methods of temporal differences"; Hessel et
    al., 2018, "Rainbow", section 3 (multi-step learning).
    """

    n: int
    discount: float
    strict: bool = False

    def __post_init__(self) -> None:
        checks.count("n", self.n)
        checks.fraction("discount", self.discount)
        checks.flag("strict", self.strict)

    @property
    def lag(self) -> int:
        """Rows wait for others, if strict; at the end of an episode they do not."""
        return self.n - 1 if self.strict else 0

    @property
    def waits(self) -> bool:
        """Rows wait for others, if strict."""
        return self.strict

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """The ring has n rows, in order of time."""
        checks.window("NStep: n", self.n, ring.rows)
        checks.in_time("NStep", writer)

    def init(self, context: Context, spec: Item) -> Steps:
        """No rows. Raises if the items have no done flag, or no real reward."""
        ring, keys = context.ring, context.keys
        episodes.check(spec, keys)
        reward = keys.get(spec, "reward")
        dtype = pytree.dtype_of(reward)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"NStep: leaf '{path_name(keys.reward)}': expected a reward of a floating dtype, "
                f"got {dtype}. Discounted sums are fractions: store it as float32."
            )
        return Steps(
            ended=jnp.zeros(ring.capacity, jnp.bool_),
            length=jnp.zeros(ring.envs, jnp.int32) if self.strict else None,
            queue=anchor_queue.init(ring) if self.strict else None,
            n=self.n if self.strict else None,
        )

    def on_write(
        self, context: Context, state: Steps, write: Write, items: Item
    ) -> tuple[Steps, Change]:
        """Rows enter when written; if strict, when their return is complete."""
        done = episodes.ending(context, write, items)
        ended = rows.put(state.ended, write, done)
        if state.queue is None or state.length is None:
            return state.replace(ended=ended), every_slot(context, write)
        length = episodes.lengths(state.length, done, write, self.n)
        complete = self._complete(context, write, done, length[:-1])
        anchors, change = anchor_queue.after_write(
            context, state.queue, write, complete, self.lag if context.ring.envs > 1 else 0
        )
        state = state.replace(ended=ended, length=length[-1], queue=anchors)
        return state, change

    def _complete(
        self, context: Context, write: Write, done: jax.Array, length: jax.Array
    ) -> jax.Array:
        """The slots whose return each row completes, int32 `[T * E * n]`, by time.

        The row n - 1 back, and where the episode ends all rows since.
        """
        back = jnp.arange(self.n - 1, -1, -1, dtype=jnp.int32)
        here = (back < length[..., None]) & (done[..., None] | (back == self.n - 1))
        return anchor_queue.rows_back(context, write, back, here)

    def truncate(
        self, context: Context, state: Steps, which: jax.Array
    ) -> tuple[Steps, Change | None]:
        """The newest rows end their episodes; if strict, returns that waited are complete."""
        ended = episodes.mark_newest(context, state.ended, which)
        if state.queue is None or state.length is None:
            return state.replace(ended=ended), None
        now = anchor_queue.look_back(context.ring)
        back = jnp.arange(self.n - 2, -1, -1, dtype=jnp.int32)  # n - 1 back was complete before
        waiting = (which & (context.held.count > 0))[:, None] & (back < state.length[:, None])
        entered = anchor_queue.rows_back(context, now, back, waiting[None])
        anchors, change = anchor_queue.after_write(context, state.queue, now, entered, slack=0)
        length = jnp.where(which, 0, state.length)
        return state.replace(ended=ended, length=length, queue=anchors), change

    def ends(self, context: Context, state: Steps, slots: jax.Array) -> jax.Array:
        """Those that were written or truncated so."""
        return rows.get(state.ended, slots)

    def anchors(self, context: Context, state: Steps) -> Anchors:
        """All that is held; if strict, the rows with a complete return."""
        if state.queue is None:
            return all_held(context)
        return anchor_queue.anchors(context.ring, state.queue)

    def look(
        self, context: Context, state: Steps, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> Look:
        """Rewards at all rows of the return, `next` at its last, the rest at its first."""
        ring, keys = context.ring, context.keys
        steps = episodes.steps_ahead(context, state.ended, slots, self.n)
        step = jnp.minimum(jnp.arange(self.n, dtype=jnp.int32), steps[:, None] - 1)
        window = ring.slot_after(slots[:, None], step * ring.envs)
        reward, last = path_name(keys.reward), window[:, -1]

        def where(name: str) -> jax.Array:
            if within(name, reward):
                return window
            return last if keys.is_next(name) else slots

        powers = jnp.asarray([self.discount**m for m in range(self.n + 1)], jnp.float32)
        discount = jnp.where(mask, powers[steps], 0.0)
        info = {"steps": jnp.where(mask, steps, 0), "discount": discount}
        return Look(where=where, mask=mask, info=info)

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """The rewards become their discounted sum."""
        steps, reward = look.info["steps"], path_name(keys.reward)

        def total(path: tuple, leaf: jax.Array) -> jax.Array:
            if not within(pytree.leaf_name(path), reward):
                return leaf
            wide = pytree.wide(leaf)
            sum_ = jnp.zeros_like(wide[:, 0])
            for k in reversed(range(self.n)):
                here = (k < steps).reshape(-1, *(1,) * (sum_.ndim - 1))
                sum_ = jnp.where(here, wide[:, k], 0) + self.discount * sum_
            return sum_.astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(total, raw), look.info
