"""Goals chosen in hindsight."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import episode_ends, rows
from jrb._util import checks, pytree
from jrb._xla import dependencies, gather, random_bits
from jrb.keys import Keys, Path, find, leaves_at, path_name, within
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
from jrb.types.parts import check_part
from jrb.units import episodes
from jrb.units.episodes import EpisodeTable
from jrb.units.frame_stack import FrameStack
from jrb.units.sequence import Sequence
from jrb.units.transition import Transition

_WHICH, _WHERE, _ROUNDING = 2, 3, 4  # the numbers that `random_bits.fold` gets


class HindsightState(pytree.State):
    """What must be known before a goal is read.

    Attributes:
        episodes: where each episode begins and ends.
        which: int32 `[N]`, the place of each slot's episode in their table.
        unit: the state of the unit whose goals are changed.
    """

    episodes: EpisodeTable
    which: jax.Array
    unit: Any


@pytree.component
class Hindsight(Unit):
    """Transitions, some of them as if their goal had been one that was reached.

    In a share `ratio` of each batch the goal becomes what was achieved after a row g, in the
    observation and in the next one, and the reward is computed anew; done flags too, where
    `terminated` is given, else they stay. `Sample.info` has `relabeled`, bool `[B]`.

    Over another unit, a return or a window has one goal for all its rows: all their rewards are
    computed anew, of a return before they are summed, and so are done flags. Which rows it has
    stays as it is, also where the new goal is reached before its last row.

    Attributes:
        reward: from what was achieved and the goal, leaves of one transition, to its reward, or
            the pytree of rewards that items have; must work under `vmap`.
        strategy: which row g: "future", any of the episode from the transition on, or from the last
            row of the return or window; "final", its last that is held; "episode", any that is
            held; "random", any of the whole buffer.
        ratio: the share of each batch that is relabeled, from 0 to 1: ratio * B items at random
            positions, rounded up or down at random so that the share is right on average. Of
            several shards, B is the part that each draws. Masked items are not relabeled.
        achieved: the path to what was achieved.
        goal: the path to the goal.
        next_goal: the path to the goal in the next observation, None if there is none.
        terminated: from what was achieved and the goal, to whether the episode terminates there,
            bool; must work under `vmap`. What is relabeled has that in its leaf `terminated`, and
            in its leaf `done` that or its own `truncated`. None leaves both as they are.
        unit: whose goals are changed, such as `NStep(3, 0.99)` or `Sequence(80)`.

    Reference: Andrychowicz et al., 2017, "Hindsight experience replay", sections 3.3 and 4.5;
    Yang et al., 2020, "Bias-reduced multi-step hindsight experience replay", section 3.2 (returns
    with rewards of the new goal).

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> at = lambda place: {"achieved_goal": place, "desired_goal": jnp.full(4, 9.0)}
        >>> after = {"reward": jnp.zeros(4), "done": jnp.arange(4) == 3}
        >>> rows = {"observation": at(jnp.arange(4.0))}
        >>> rows["next"] = {"observation": at(jnp.arange(1.0, 5.0)), **after}
        >>> reward = lambda achieved, goal: jnp.float32(achieved == goal)
        >>> unit = jrb.Hindsight(reward, strategy="final", ratio=1.0)
        >>> buffer, state = jrb.from_items(rows, unit=unit)
        >>> data = buffer.sample(state, jax.random.key(0), batch_size=32).data
        >>> goals = sorted(set(data["observation"]["desired_goal"].tolist()))
        >>> goals, float(data["next"]["reward"].max())
        ([4.0], 1.0)
    """

    reward: Callable[[Any, Any], jax.Array]
    strategy: Literal["future", "final", "episode", "random"] = "future"
    ratio: float = 0.8
    achieved: Path = ("next", "observation", "achieved_goal")
    goal: Path = ("observation", "desired_goal")
    next_goal: Path | None = ("next", "observation", "desired_goal")
    terminated: Callable[[Any, Any], jax.Array] | None = None
    unit: Unit = Transition()

    def __post_init__(self) -> None:
        check_part("unit", self.unit)
        checks.choice("strategy", self.strategy, ("future", "final", "episode", "random"))
        checks.fraction("ratio", self.ratio)
        if not callable(self.reward):
            raise TypeError(f"Hindsight: reward: expected a function, got {self.reward!r}.")
        if self.terminated is not None and not callable(self.terminated):
            raise TypeError(f"Hindsight: terminated: expected a function, got {self.terminated!r}.")

    @property
    def max_entry_delay(self) -> int | None:
        """That of the inner unit."""
        return self.unit.max_entry_delay

    @property
    def has_delayed_anchors(self) -> bool:
        """As those of the inner unit."""
        return self.unit.has_delayed_anchors

    @property
    def lookback(self) -> int:
        """What the inner unit reads."""
        return self.unit.lookback

    @property
    def requires_contiguous_history(self) -> bool:
        """As the inner unit."""
        return self.unit.requires_contiguous_history

    @property
    def row_steps(self) -> np.ndarray | None:
        """Those of the inner unit."""
        return self.unit.row_steps

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Rows in order of time, of one episode for each goal."""
        checks.chronological("Hindsight", writer)
        self.unit.check(ring, sampler, writer)
        if isinstance(self.unit, Hindsight | FrameStack):
            raise ValueError(
                f"Hindsight: unit: expected one of single rows, as they are stored, got "
                f"{type(self.unit).__name__}. Stacks go around: FrameStack(k, unit=Hindsight(...))."
            )
        if isinstance(self.unit, Sequence) and self.unit.cross_episodes:
            raise ValueError(
                "Hindsight: unit: expected windows of one episode, as they get one goal, got "
                "cross_episodes=True. Leave it out."
            )

    @property
    def goals(self) -> tuple[Path, ...]:
        """The paths to goals, and to what was achieved."""
        return (*self._wanted, self.achieved)

    @property
    def _wanted(self) -> tuple[Path, ...]:
        return (self.goal,) if self.next_goal is None else (self.goal, self.next_goal)

    def init(self, context: Context, spec: Item) -> HindsightState:
        """No rows. Raises if goals are missing, or not like what is achieved."""
        ring, keys = context.ring, context.keys
        episode_ends.check(spec, keys)
        keys.get(spec, "reward")
        self._check_flags(spec, keys)
        achieved = find(spec, self.achieved, "Hindsight: achieved")
        for path in self._wanted:
            goal = find(spec, path, "Hindsight: goal")
            mend = f"A goal must be what can be achieved at '{path_name(self.achieved)}'."
            pytree.check_like(achieved, goal, f"Hindsight: '{path_name(path)}'", mend)
        return HindsightState(
            episodes=episodes.init(ring, 1),
            which=jnp.zeros(ring.capacity, jnp.int32),
            unit=self.unit.init(context, spec),
        )

    def _check_flags(self, spec: Item, keys: Keys) -> None:
        """Raises where flags of several agents would have to be computed anew."""
        for path in (keys.done, keys.terminated):
            names = list(leaves_at(spec, path))
            if self.terminated is not None and names not in ([], [path_name(path)]):
                raise ValueError(
                    "Hindsight: terminated: expected one flag for the environment at "
                    f"'{path_name(path)}', got {names}. Name it with keys=, or leave terminated= "
                    "out."
                )

    def on_write(
        self, context: Context, state: HindsightState, write: WritePlan, items: Item
    ) -> tuple[HindsightState, AnchorUpdate]:
        """Anchors are those of the inner unit."""
        done = episode_ends.ending(context, write, items)
        after, _, which = episodes.after_write(context, state.episodes, write, done, 1)
        inner, change = self.unit.on_write(context, state.unit, write, items)
        which = rows.put(state.which, write, which)
        return HindsightState(episodes=after, which=which, unit=inner), change

    def truncate(
        self, context: Context, state: HindsightState, which: jax.Array
    ) -> tuple[HindsightState, AnchorUpdate | None]:
        """The running episodes end."""
        after, _ = episodes.truncate(context, state.episodes, which, 1)
        inner, change = self.unit.truncate(context, state.unit, which)
        return state.replace(episodes=after, unit=inner), change

    def is_episode_end(
        self, context: Context, state: HindsightState, slots: jax.Array
    ) -> jax.Array:
        """Those whose successor is of another episode."""
        ring, held = context.ring, context.held
        last = held.after(ring, slots) <= 0
        over = state.episodes.length[ring.env_of(slots)] == 0
        other = state.which[slots] != state.which[ring.slot_after(slots, ring.envs)]
        return jnp.where(last, over, other)

    def episode_step(self, state: HindsightState, slots: jax.Array) -> jax.Array | None:
        """As far as the inner unit counts."""
        return self.unit.episode_step(state.unit, slots)

    def init_mid_episode(self, state: HindsightState, before: jax.Array) -> HindsightState:
        """An empty state whose next rows have so many rows of their episodes behind them."""
        return state.replace(unit=self.unit.init_mid_episode(state.unit, before))

    def anchors(self, context: Context, state: HindsightState) -> Anchors:
        """Those of the inner unit."""
        return self.unit.anchors(context, state.unit)

    def plan_read(
        self,
        context: Context,
        state: HindsightState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """All that the inner unit reads; what was achieved at rewards, flags and the goal too."""
        keys, achieved = context.keys, path_name(self.achieved)
        inner = self.unit.plan_read(context, state.unit, slots, mask, key)
        words = random_bits.words(random_bits.fold(key, _WHERE), slots.size)
        relabeled = self._which(key, slots.size) & mask
        paths = (self.achieved, keys.reward, _flag(keys))
        at = [inner.where(path_name(path)) for path in paths]
        chosen = self._rows(context, state, _wide(at[1])[:, -1], words)
        distinct = list({id(where): _wide(where) for where in at}.values())
        every = jnp.concatenate([*distinct, jnp.where(mask, chosen, slots)[:, None]], axis=1)
        where = lambda name: every if within(name, achieved) else inner.where(name)
        info = {**inner.info, "relabeled": relabeled}
        return ReadPlan(where=where, mask=inner.mask, info=info, residuals=(inner, _spans(at)))

    def _which(self, key: jax.Array, size: int) -> jax.Array:
        """Which of a batch are relabeled, bool `[B]`: floor(ratio * B) or one more of them.

        The number is rounded at random, so that the share is right on average for any B: of one
        item, or of the few that each of many shards draws.
        """
        count, fraction = divmod(round(self.ratio * size * 2**20), 2**20)
        seed = random_bits.seed(random_bits.fold(key, _WHICH))
        place = jnp.arange(size, dtype=jnp.int32)
        order = random_bits.permute(seed, jnp.int32(size), place)
        if not fraction:
            return order < count
        one_more = random_bits.bits(random_bits.fold(key, _ROUNDING), (1,)) < np.uint32(
            fraction << 12
        )
        return order < count + one_more.astype(jnp.int32)

    def _rows(
        self, context: Context, state: HindsightState, slots: jax.Array, words: jax.Array
    ) -> jax.Array:
        """The slots of the rows whose achievement may become the goal, int32 `[B]`.

        `slots`, int32 `[B]`, are the last rows that rewards are read at.
        """
        ring, held = context.ring, context.held
        if self.strategy == "random":
            return held.nth(ring, random_bits.below(held.size, *words))
        env = ring.env_of(slots)
        at = gather.read(state.which, slots)
        age, part = episodes.extent(context, state.episodes, env, at, 1)
        own = held.after(ring, slots)
        choices = {"future": own - age + 1, "final": jnp.ones_like(age), "episode": part}
        back = age + random_bits.below(jnp.maximum(choices[self.strategy], 1), *words)
        return ring.slot_before(held.newest(ring)[env], back * ring.envs)

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Other goals where it was so decided, and the rewards that they give."""
        (inner, spans), changed = plan.residuals, plan.info["relabeled"]
        reached = find(raw, self.achieved, "Hindsight: achieved")
        own, paid, flagged, goal = (
            jax.tree.map(lambda leaf, span=span: leaf[:, span], reached)
            for span in (*spans, slice(-1, None))
        )
        lead = lambda path: inner.where(path_name(path)).ndim
        cut = lambda leaf: leaf if lead(self.achieved) > 1 else leaf[:, 0]
        new = {path_name(self.achieved): [cut(leaf) for leaf in jax.tree.leaves(own)]}
        for path in self._wanted:
            old = jax.tree.leaves(find(raw, path, "Hindsight: goal"))
            wide = lambda leaf, path=path: leaf if lead(path) > 1 else leaf[:, 0]
            new[path_name(path)] = [
                _chosen(changed, wide(leaf), then)
                for leaf, then in zip(jax.tree.leaves(goal), old, strict=True)
            ]
        reward, axes = keys.get(raw, "reward"), lead(keys.reward)
        rewards = self._anew(self.reward, "reward", paid, goal, reward, axes)
        pairs = zip(jax.tree.leaves(rewards), jax.tree.leaves(reward), strict=True)
        new[path_name(keys.reward)] = [_chosen(changed, *pair) for pair in pairs]
        flags = self._flags(keys, keys.flags(raw), flagged, goal, lead(_flag(keys)))
        for name, flag in flags.items():
            new[name] = [_chosen(changed, flag, keys.flags(raw)[name])]
        data, info = self.unit.reduce(_with_leaves(raw, new), inner, keys)
        return data, {**info, **plan.info}

    def _anew(
        self, function: Callable, what: str, reached: Any, goal: Any, old: Any, lead: int
    ) -> Any:
        """What a function makes of what was reached, `[B, K, ...]`, and goals, `[B, 1, ...]`.

        In the shapes of `old`, whose leaves have `lead` axes before those of a transition.
        """
        one = lambda rows, goal: jax.vmap(function, (0, None))(rows, goal)
        new = jax.vmap(one)(reached, jax.tree.map(lambda leaf: leaf[:, 0], goal))
        pytree.check_structure(old, new, f"Hindsight: {what}", "Give what the items have there.")
        like = functools.partial(self._like, what, lead)
        return jax.tree.map(like, new, old)

    def _like(self, what: str, lead: int, new: jax.Array, old: jax.Array) -> jax.Array:
        """A leaf of what was computed anew, in the shape of the stored one."""
        items = new.shape[2:], old.shape[lead:]
        if items[0] != items[1] and set(items) != {(), (1,)}:
            raise ValueError(
                f"Hindsight: {what}: expected shape {items[1]} for one transition, got "
                f"{items[0]}. Reduce it over the parts of the goal."
            )
        dtype = old.dtype if what == "reward" else jnp.bool_
        if new.dtype != dtype:
            raise TypeError(
                f"Hindsight: {what}: expected dtype {dtype}, got {new.dtype}. "
                "Cast it in the function."
            )
        return new.reshape(old.shape)

    def _flags(
        self, keys: Keys, there: dict[str, jax.Array], reached: Any, goal: Any, lead: int
    ) -> dict[str, jax.Array]:
        """The flags that are computed anew, by name, in their own dtypes."""
        done, over, cut = map(path_name, (keys.done, keys.terminated, keys.truncated))
        if self.terminated is None or not there.keys() & {done, over}:
            return {}
        like = there[over] if over in there else there[done]
        ends = self._anew(self.terminated, "terminated", reached, goal, like, lead)
        found = {over: ends}
        found[done] = ends | _is_set(there[cut]).reshape(ends.shape) if cut in there else ends
        return {
            name: found[name].reshape(there[name].shape).astype(there[name].dtype)
            for name in (done, over)
            if name in there
        }

    def priority_shapes(self, mask: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Those of the inner unit."""
        return self.unit.priority_shapes(mask)

    def reduce_priorities(self, priorities: jax.Array, mask: jax.Array) -> jax.Array:
        """As the inner unit does."""
        return self.unit.reduce_priorities(priorities, mask)

    def reset(self, ring: Ring, state: HindsightState, token: jax.Array) -> HindsightState:
        """No rows."""
        emptied = dependencies.emptied(state, token)
        return emptied.replace(unit=self.unit.reset(ring, state.unit, token))


def _wide(slots: jax.Array) -> jax.Array:
    """Slots `[B]` as `[B, 1]`; those of many rows, `[B, K]`, as they are."""
    return slots if slots.ndim > 1 else slots[:, None]


def _spans(at: list[jax.Array]) -> list[slice]:
    """Where each of these slots, `[B]` or `[B, K]`, stand if all distinct ones are put together."""
    spans: dict[int, slice] = {}
    stop = 0
    for slots in at:
        if id(slots) not in spans:
            start, stop = stop, stop + _wide(slots).shape[1]
            spans[id(slots)] = slice(start, stop)
    return [spans[id(slots)] for slots in at]


def _chosen(changed: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new ones where `changed`, bool `[B]`; else the old ones, `[B, ...]`."""
    return jnp.where(changed.reshape(-1, *(1,) * (old.ndim - 1)), new, old)


def _flag(keys: Keys) -> Path | None:
    """The path to a flag; all flags are read at the same rows."""
    return keys.terminated if keys.done is None else keys.done


def _is_set(flag: jax.Array) -> jax.Array:
    return flag != jnp.zeros((), flag.dtype)


def _with_leaves(data: Item, new: dict[str, list[jax.Array]]) -> Item:
    """The data with other leaves, in order, at or below some paths."""
    rest = {name: iter(leaves) for name, leaves in new.items()}

    def visit(path: tuple, leaf: jax.Array) -> jax.Array:
        name = pytree.leaf_name(path)
        return next((next(rest[prefix]) for prefix in rest if within(name, prefix)), leaf)

    return jax.tree_util.tree_map_with_path(visit, data)
