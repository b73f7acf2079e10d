"""Windows of consecutive transitions, for recurrent networks and models of the world."""

from typing import Literal

import jax
import jax.numpy as jnp

from jrb import checks, episodes, line, pytree, rows
from jrb.episodes import Episodes
from jrb.keys import Keys
from jrb.line import Line
from jrb.ring import Held, Ring
from jrb.types import Anchors, Change, Item, Look, Sampler, Write, Writer
from jrb.units.transition import all_held, every_slot


@pytree.state
class Windows:
    """What windows must know before they read; what a description does not need is None.

    Attributes:
        ended: bool `[N]`, which slots end an episode.
        length: int32 `[E]`, the rows of the running episode, up to L.
        line: the anchors, where only whole windows are drawn.
        episodes: the episodes, where these are drawn.
        enough: the rows that anchors were counted for, no array; None where every row is one.
    """

    ended: jax.Array
    length: jax.Array | None
    line: Line | None
    episodes: Episodes | None
    enough: int | None = pytree.static(None)


@pytree.component
class Sequence:
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

    Reference: Kapturowski et al., 2019, "Recurrent experience replay in distributed reinforcement
    learning", section 2.3 (burn-in; eta = 0.9).
    """

    length: int
    burn_in: int = 0
    over: Literal["steps", "episodes"] = "steps"
    short: Literal["drop", "pad"] = "drop"
    eta: float = 1.0

    def __post_init__(self) -> None:
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

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """The ring holds a window, in order of time; episodes are drawn by a fitting sampler."""
        checks.window("Sequence: burn_in + length", self.burn_in + self.length, ring.rows)
        checks.in_time("Sequence", writer)
        if self.over == "episodes" and hasattr(sampler, "update"):
            raise ValueError(
                f"Sequence: over='episodes': expected a sampler without priorities, got "
                f"{type(sampler).__name__}. It would say two things about how likely a row is: "
                "each episode alike, and each row by its priority. Use over='steps'."
            )
        if self.over == "episodes" and getattr(sampler, "in_order", False) and ring.envs > 1:
            raise ValueError(
                f"Sequence: over='episodes': expected a sampler that draws in any order, got "
                f"{type(sampler).__name__}. Episodes of several environments have no order of "
                "their own. Use over='steps'."
            )

    def init(self, ring: Ring, spec: Item, keys: Keys) -> Windows:
        """No rows. Raises if the items have no done flag."""
        episodes.check(spec, keys)
        whole = self.over == "steps" and self.short == "drop"
        return Windows(
            ended=jnp.zeros(ring.capacity, jnp.bool_),
            length=jnp.zeros(ring.envs, jnp.int32) if whole else None,
            line=line.init(ring) if whole else None,
            episodes=episodes.init(ring, self._enough) if self.over == "episodes" else None,
            enough=self._enough if whole or self.over == "episodes" else None,
        )

    def on_write(
        self, ring: Ring, state: Windows, held: Held, write: Write, items: Item, keys: Keys
    ) -> tuple[Windows, Change]:
        """A row enters when written; whole windows do with their last row."""
        done = episodes.ends(items, keys)
        ended = rows.put(state.ended, write, done)
        state = state.replace(ended=ended)  # pyright: ignore
        if state.line is not None and state.length is not None:
            length = episodes.lengths(state.length, done, write, self.length)
            whole = (length[:-1] == self.length)[..., None]
            back = jnp.full(1, self.length - 1, jnp.int32)
            entered = line.rows_back(ring, held, write, back, whole)
            anchors, change = line.after_write(ring, state.line, held, write, entered, slack=0)
            return state.replace(line=anchors, length=length[-1]), change  # pyright: ignore
        if state.episodes is not None:
            after, change, _ = episodes.after_write(
                ring, state.episodes, held, write, done, self._enough
            )
            return state.replace(episodes=after), change  # pyright: ignore
        return state, every_slot(ring, held, write)

    def truncate(
        self, ring: Ring, state: Windows, held: Held, which: jax.Array
    ) -> tuple[Windows, None]:
        """The newest rows end their episodes."""
        table, length = state.episodes, state.length
        truncated = state.replace(  # pyright: ignore
            ended=episodes.mark_newest(ring, held, state.ended, which),
            length=None if length is None else jnp.where(which, 0, length),
            episodes=None if table is None else episodes.truncated(table, which, self._enough),
        )
        return truncated, None

    def ends(self, ring: Ring, state: Windows, held: Held, slots: jax.Array) -> jax.Array:
        """Those that were written or truncated so."""
        del ring, held
        return rows.get(state.ended, slots)

    def anchors(self, ring: Ring, state: Windows, held: Held) -> Anchors:
        """The first rows of windows."""
        if state.line is not None:
            return line.anchors(ring, state.line)
        if state.episodes is not None:
            return episodes.anchors(ring, state.episodes, held, self._enough)
        return all_held(ring, held)

    def look(
        self,
        ring: Ring,
        state: Windows,
        held: Held,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
        keys: Keys,
    ) -> Look:
        """Every leaf at every row of the window."""
        del key, keys
        before, after = jnp.int32(0), jnp.int32(self.length)
        if self.short == "pad":
            after = episodes.steps_ahead(ring, held, state.ended, slots, self.length)[:, None]
        if self.burn_in:
            before = episodes.steps_back(ring, held, state.ended, slots, self.burn_in)[:, None]
        step = jnp.arange(-self.burn_in, self.length, dtype=jnp.int32)
        real = mask[:, None] & (step >= -before) & (step < after)
        step = jnp.clip(step, -before, after - 1)
        ahead = jnp.where(step < 0, step + ring.rows, step) * ring.envs
        window = ring.slot_after(slots[:, None], jnp.broadcast_to(ahead, real.shape))
        return Look(where=lambda name: window, mask=real, info={})

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """The windows as they are."""
        del keys
        return raw, look.info

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

    def reset(self, ring: Ring, state: Windows, token: jax.Array) -> Windows:
        """No rows."""
        return state.replace(  # pyright: ignore
            length=None if state.length is None else jnp.zeros_like(state.length),
            line=None if state.line is None else line.reset(state.line, token),
            episodes=None if state.episodes is None else episodes.reset(state.episodes, token),
        )

    def hold(self, state: Windows, token: jax.Array) -> Windows:
        """The same, its line or episodes written after the token."""
        return state.replace(  # pyright: ignore
            line=None if state.line is None else line.hold(state.line, token),
            episodes=None if state.episodes is None else episodes.hold(state.episodes, token),
        )
