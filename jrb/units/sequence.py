"""Windows of consecutive transitions, for recurrent networks and models of the world."""

from typing import Literal

import jax
import jax.numpy as jnp

from jrb._base import checks, pytree
from jrb._engine import anchor_queue, episodes, rows
from jrb._engine.anchor_queue import AnchorQueue
from jrb._engine.episodes import Episodes
from jrb.keys import Keys, Path, find, path_name, within
from jrb.ring import Ring
from jrb.types import Anchors, Change, Context, Item, Look, Sampler, Unit, Write, Writer
from jrb.units.transition import all_held, every_slot


class Windows(pytree.State):
    """What windows must know before they read; what a description does not need is None.

    Attributes:
        ended: bool `[N]`, which slots end an episode.
        length: int32 `[E]`, the rows of the running episode, up to L.
        queue: the anchors, where only whole windows are drawn.
        episodes: the episodes, where these are drawn.
        enough: the rows that anchors were counted for, no array; None where every row is one.
    """

    ended: jax.Array
    length: jax.Array | None = pytree.tally()
    queue: AnchorQueue | None
    episodes: Episodes | None
    enough: int | None = pytree.static(default=None)


@pytree.component
class Sequence(Unit):
    """L transitions in a row, of one environment and one episode, from the anchor on.

    Data have leaves `[B, burn_in + L, ...]`, and `Sample.mask`, bool of that shape, says which rows
    are real. A window never crosses the end of an episode or the newest row.

    Attributes:
        length: L.
        burn_in: rows before the anchor that come first in the window, to warm up a recurrent state.
            Where the episode, or what is held of it, begins later, they are masked, and repeat its
            first row.
        over: what is equally likely under `Uniform`: "steps", every anchor; or "episodes", every
            episode that has an anchor, then every anchor in it.
        short: "drop" draws whole windows only; "pad" draws from every row, masks what lies behind
            the episode's last row, and repeats that row there.
        eta: how `update_priority` reduces priorities `[B, L]`, over the real rows without burn-in:
            eta * max + (1 - eta) * mean.
        first: paths to leaves that are read for the window's first row only, `[B, ...]`, such as
            the recurrent state that was stored with each row.

    Reference: Kapturowski et al., 2019, "Recurrent experience replay in distributed reinforcement
    learning", section 2.3 (burn-in; stored states; eta = 0.9).
    """

    length: int
    burn_in: int = 0
    over: Literal["steps", "episodes"] = "steps"
    short: Literal["drop", "pad"] = "drop"
    eta: float = 1.0
    first: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.first, tuple):
            raise TypeError(f"first: expected a tuple of paths, got {self.first!r}. Write it (f,).")
        checks.count("length", self.length)
        if self.burn_in != 0:
            checks.count("burn_in", self.burn_in)
        checks.choice("over", self.over, ("steps", "episodes"))
        checks.choice("short", self.short, ("drop", "pad"))
        checks.fraction("eta", self.eta)

    @property
    def _enough(self) -> int:
        """The rows that must follow an anchor, itself included."""
        return self.length if self.short == "drop" else 1

    @property
    def lag(self) -> int | None:
        """All whole windows wait for as many rows; episodes are no rows."""
        return 0 if self.over == "steps" else None

    @property
    def waits(self) -> bool:
        """First rows of whole windows wait for the last ones."""
        return self.short == "drop" or self.over == "episodes"

    @property
    def reach(self) -> int:
        """Burn-in."""
        return self.burn_in

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """The ring holds a window, in order of time; episodes are drawn by a fitting sampler."""
        checks.window("Sequence: burn_in + length", self.burn_in + self.length, ring.rows)
        checks.in_time("Sequence", writer)
        if self.over == "episodes" and sampler.prioritized:
            raise ValueError(
                f"Sequence: over='episodes': expected a sampler without priorities, got "
                f"{type(sampler).__name__}. It would say two things about how likely a row is: "
                "each episode alike, and each row by its priority. Use over='steps'."
            )
        if self.over == "episodes" and sampler.in_order and ring.envs > 1:
            raise ValueError(
                f"Sequence: over='episodes': expected a sampler that draws in any order, got "
                f"{type(sampler).__name__}. Episodes of several environments have no order of "
                "their own. Use over='steps'."
            )

    def init(self, context: Context, spec: Item) -> Windows:
        """No rows. Raises if the items have no done flag."""
        ring = context.ring
        episodes.check(spec, context.keys)
        for path in self.first:
            find(spec, path, "Sequence: first")
        whole = self.over == "steps" and self.short == "drop"
        return Windows(
            ended=jnp.zeros(ring.capacity, jnp.bool_),
            length=jnp.zeros(ring.envs, jnp.int32) if whole else None,
            queue=anchor_queue.init(context) if whole else None,
            episodes=episodes.init(ring, self._enough) if self.over == "episodes" else None,
            enough=self._enough if whole or self.over == "episodes" else None,
        )

    def on_write(
        self, context: Context, state: Windows, write: Write, items: Item
    ) -> tuple[Windows, Change]:
        """A row enters when written; whole windows do with their last row."""
        done = episodes.ends(items, context.keys)
        ended = rows.put(state.ended, write, done)
        state = state.replace(ended=ended)
        if state.queue is not None and state.length is not None:
            length = episodes.lengths(state.length, done, write, self.length)
            whole = (length[:-1] == self.length)[..., None]
            back = jnp.full(1, self.length - 1, jnp.int32)
            entered = anchor_queue.rows_back(context, write, back, whole)
            anchors, change = anchor_queue.after_write(
                context, state.queue, write, entered, slack=0
            )
            return state.replace(queue=anchors, length=length[-1]), change
        if state.episodes is not None:
            after, change, _ = episodes.after_write(
                context, state.episodes, write, done, self._enough
            )
            return state.replace(episodes=after), change
        return state, every_slot(context, write)

    def truncate(self, context: Context, state: Windows, which: jax.Array) -> tuple[Windows, None]:
        """The newest rows end their episodes."""
        table, length = state.episodes, state.length
        truncated = state.replace(
            ended=episodes.mark_newest(context, state.ended, which),
            length=None if length is None else jnp.where(which, 0, length),
            episodes=None if table is None else episodes.truncated(table, which, self._enough),
        )
        return truncated, None

    def ends(self, context: Context, state: Windows, slots: jax.Array) -> jax.Array:
        """Those that were written or truncated so."""
        return rows.get(state.ended, slots)

    def anchors(self, context: Context, state: Windows) -> Anchors:
        """The first rows of windows."""
        if state.queue is not None:
            return anchor_queue.anchors(context.ring, state.queue)
        if state.episodes is not None:
            return episodes.anchors(context, state.episodes, self._enough)
        return all_held(context)

    def look(
        self, context: Context, state: Windows, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> Look:
        """Every leaf at every row of the window."""
        ring = context.ring
        before, after = jnp.int32(0), jnp.int32(self.length)
        if self.short == "pad":
            after = episodes.steps_ahead(context, state.ended, slots, self.length)[:, None]
        if self.burn_in:
            before = episodes.steps_back(context, state.ended, slots, self.burn_in)[:, None]
        step = jnp.arange(-self.burn_in, self.length, dtype=jnp.int32)
        real = mask[:, None] & (step >= -before) & (step < after)
        step = jnp.clip(step, -before, after - 1)
        ahead = jnp.where(step < 0, step + ring.rows, step) * ring.envs
        window = ring.slot_after(slots[:, None], jnp.broadcast_to(ahead, real.shape))
        start = window[:, :1]
        where = lambda name: start if self._is_single(name) else window
        return Look(where=where, mask=real, info={})

    def _is_single(self, name: str) -> bool:
        """Whether a leaf is read for the first row only."""
        return any(within(name, path_name(path)) for path in self.first)

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """The windows as they are; of leaves that are read once, that one."""
        if not self.first:
            return raw, look.info

        def single(path: tuple, leaf: jax.Array) -> jax.Array:
            return leaf[:, 0] if self._is_single(pytree.leaf_name(path)) else leaf

        return jax.tree_util.tree_map_with_path(single, raw), look.info

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes that `reduce_priorities` takes, for a mask of this shape."""
        return [(mask[0], self.length), mask]

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """One priority for each window, float32 `[B]`.

        Args:
            priorities: float32 `[B, L]`, or `[B, burn_in + L]`, of which burn-in is left out.
            mask: bool `[B, burn_in + L]`.
        """
        priorities, real = priorities[:, -self.length :], mask[:, -self.length :]
        priorities = jnp.where(priorities < 0, jnp.nan, priorities)  # refused as a whole
        count = jnp.maximum(jnp.sum(real, axis=1), 1).astype(jnp.float32)
        mean = jnp.sum(jnp.where(real, priorities, 0.0), axis=1) / count
        most = jnp.max(jnp.where(real, priorities, 0.0), axis=1)
        return self.eta * most + (1 - self.eta) * mean
