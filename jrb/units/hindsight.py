"""The unit of hindsight experience replay."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jrb._util import checks, pytree
from jrb._xla import gather, random_bits
from jrb.keys import Keys, Path, check_ends, find, leaves_at, path_name, within
from jrb.ring import Ring
from jrb.types import AnchorUpdate, Context, Item, ReadPlan, Sampler, Unit, WritePlan, Writer
from jrb.types.parts import check_part
from jrb.units import episodes
from jrb.units.episodes import EpisodeTable
from jrb.units.frame_stack import FrameStack
from jrb.units.packed import Packed
from jrb.units.sequence import Sequence
from jrb.units.transition import Transition, WrappingUnit

_WHICH, _WHERE, _ROUNDING = 2, 3, 4  # for `random_bits.fold`, one for each random choice


class HindsightState(pytree.State):
    """The episodes, and the episode of each slot.

    Attributes:
        episodes: the table of all episodes.
        which: int32 `[N]`, the position in the table of each slot's episode.
        unit: the state of the unit whose goals are changed.
    """

    episodes: EpisodeTable
    which: jax.Array
    unit: Any


@pytree.component
class Hindsight(WrappingUnit):
    """Samples transitions, and relabels some of them with goals that were reached later.

    In a fraction `ratio` of each batch, the goal in the observation and in the next observation is
    replaced by what was achieved after a row g, and the reward is recomputed. Done flags are
    recomputed if `terminated` is given. `Sample.info` has `relabeled`, bool `[B]`.

    With another `unit`, all rows of a return or a window get the same goal. Their rewards (before a
    return sums them) and done flags are recomputed. The rows themselves stay the same, even if the
    new goal is reached before the last one.

    Attributes:
        reward: a function of what was achieved and of the goal, both of one transition. It returns
            the reward, or a pytree of rewards as in the items; must work under `vmap`.
        strategy: the choice of row g. "future": any row of the episode from the transition on, or
            from the last row of the return or window. "final": the episode's last row that is
            held. "episode": any row of it that is held. "random": any row of the buffer. In a full
            ring, the oldest episode consists of its rows that are held, from the oldest on; inside
            a `FrameStack`, rows whose own stack is lost may still be chosen for goals.
        ratio: the fraction of each batch that is relabeled, from 0 to 1: ratio * B items at random
            positions, rounded up or down at random so that the fraction is right on average. With
            several shards, B is the part that each draws. Masked items are not relabeled.
        achieved: the path to what was achieved.
        goal: the path to the goal.
        next_goal: the path to the goal in the next observation, None if there is none.
        terminated: a function of what was achieved and of the goal that returns a bool, True if the
            episode terminates there; must work under `vmap`. It sets the leaf `terminated` of
            relabeled items, and `done` to that or `truncated`. None leaves both as they are.
        unit: the unit whose goals are changed, such as `NStep(3, 0.99)` or `Sequence(80)`.

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

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Raises unless rows are in order of time, and those of one anchor in one episode."""
        checks.chronological("Hindsight", writer)
        self.unit.check(ring, sampler, writer)
        if isinstance(self.unit, Hindsight | FrameStack | Packed):
            raise ValueError(
                f"Hindsight: unit: expected one of an item or a window, as it is stored, got "
                f"{type(self.unit).__name__}. Stacks go around: FrameStack(k, unit=Hindsight(...))."
            )
        if isinstance(self.unit, Sequence) and self.unit.cross_episodes:
            raise ValueError(
                "Hindsight: unit: expected windows of one episode, as they get one goal, got "
                "cross_episodes=True. Leave it out."
            )

    @property
    def goals(self) -> tuple[Path, ...]:
        """The paths to the goals and, last, to what was achieved."""
        goals = (self.goal,) if self.next_goal is None else (self.goal, self.next_goal)
        return (*goals, self.achieved)

    def init(self, context: Context, spec: Item) -> HindsightState:
        """Returns an empty state; raises if goals are missing, or not like achieved goals."""
        ring, keys = context.ring, context.keys
        check_ends(spec, keys)
        keys.get(spec, "reward")
        # Flags of several agents are not recomputed.
        for path in (keys.done, keys.terminated):
            names = list(leaves_at(spec, path))
            if self.terminated is not None and names not in ([], [path_name(path)]):
                raise ValueError(
                    "Hindsight: terminated: expected one flag for the environment at "
                    f"'{path_name(path)}', got {names}. Name it with keys=, or leave terminated= "
                    "out."
                )
        achieved = find(spec, self.achieved, "Hindsight: achieved")
        # The last of `goals` is what was achieved, which all others must be like.
        for path in self.goals[:-1]:
            goal = find(spec, path, "Hindsight: goal")
            mend = f"A goal must be what can be achieved at '{path_name(self.achieved)}'."
            pytree.check_like(achieved, goal, f"Hindsight: '{path_name(path)}'", mend)
        return HindsightState(
            episodes=episodes.init(ring, 1),
            which=jnp.zeros(ring.capacity, jnp.int32),
            unit=self.unit.init(context, spec),
        )

    def on_write(
        self, context: Context, state: HindsightState, plan: WritePlan, items: Item
    ) -> tuple[HindsightState, AnchorUpdate]:
        """Updates the inner unit and the episodes, and stores the episode of each row."""
        done = plan.episode_ends(context.keys, items)
        after, _, which = episodes.after_write(context, state.episodes, plan, done, 1)
        inner, change = self.unit.on_write(context, state.unit, plan, items)
        which = plan.put(state.which, which)
        return HindsightState(episodes=after, which=which, unit=inner), change

    def truncate(
        self, context: Context, state: HindsightState, which: jax.Array
    ) -> tuple[HindsightState, AnchorUpdate | None]:
        """Ends the running episodes of environments `which`, bool `[E]`."""
        after, _ = episodes.truncate(context, state.episodes, which, 1)
        inner, change = self.unit.truncate(context, state.unit, which)
        return state.replace(episodes=after, unit=inner), change

    def is_episode_end(
        self, context: Context, state: HindsightState, slots: jax.Array
    ) -> jax.Array:
        """Returns True for slots whose row is the last of its episode."""
        ring, held = context.ring, context.held
        is_newest = held.after(ring, slots) <= 0
        is_over = state.episodes.length[ring.env_of(slots)] == 0
        is_other = state.which[slots] != state.which[ring.slot_after(slots, ring.envs)]
        return jnp.where(is_newest, is_over, is_other)

    def plan_read(
        self,
        context: Context,
        state: HindsightState,
        slots: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> ReadPlan:
        """Reads what the inner unit reads, and what was achieved at all rows that need it."""
        keys, achieved = context.keys, path_name(self.achieved)
        inner = self.unit.plan_read(context, state.unit, slots, mask, key)
        words = random_bits.words(random_bits.fold(key, _WHERE), slots.size)
        relabeled = self._choose_relabeled(key, slots.size) & mask
        # What was achieved is read at the rows at which the inner unit reads it, rewards and flags.
        # Each distinct set of rows is read once.
        wide: dict[int, jax.Array] = {}
        paths = self.achieved, keys.reward, _flag_path(keys)
        at = [inner.where(path_name(path)) for path in paths]
        for where in at:
            wide[id(where)] = where if where.ndim > 1 else where[:, None]
        # Choose the row of the new goal. Masked entries read their own row, which is in range.
        chosen = self._choose_goal_rows(context, state, wide[id(at[1])][:, -1], words)
        chosen = jnp.where(mask, chosen, slots)[:, None]
        # One gather for all rows of what was achieved; `reduce` cuts them apart by these spans.
        every = jnp.concatenate([*wide.values(), chosen], axis=1)
        stops = np.cumsum([rows.shape[1] for rows in wide.values()])
        spans = {
            one: slice(stop - rows.shape[1], stop)
            for (one, rows), stop in zip(wide.items(), stops.tolist(), strict=True)
        }
        return ReadPlan(
            where=lambda name: every if within(name, achieved) else inner.where(name),
            mask=inner.mask,
            info={**inner.info, "relabeled": relabeled},
            residuals=(inner, [spans[id(where)] for where in at]),
        )

    def _choose_relabeled(self, key: jax.Array, size: int) -> jax.Array:
        """Returns True for items to relabel, bool `[B]`: floor(ratio * B) of them, or one more.

        The number is rounded at random, so that the fraction is right on average for any B, even
        for one item, or for the few that each of many shards draws.
        """
        # In parts of 2^-20, as a product of floats may miss a whole number by one.
        count, fraction = divmod(round(self.ratio * size * 2**20), 2**20)
        seed = random_bits.seed(random_bits.fold(key, _WHICH))
        order = random_bits.permute(seed, jnp.int32(size), jnp.arange(size, dtype=jnp.int32))
        if not fraction:
            return order < count
        bits = random_bits.bits(random_bits.fold(key, _ROUNDING), (1,))
        return order < count + (bits < np.uint32(fraction << 12)).astype(jnp.int32)

    def _choose_goal_rows(
        self, context: Context, state: HindsightState, slots: jax.Array, words: jax.Array
    ) -> jax.Array:
        """Returns the slots of random rows whose achieved goal may replace the goal, int32 `[B]`.

        `slots`, int32 `[B]`, are the last rows at which rewards are read.
        """
        ring, held = context.ring, context.held
        if self.strategy == "random":
            return held.nth(ring, random_bits.below(held.size, *words))
        env = ring.env_of(slots)
        at = gather.read(state.which, slots)
        age, part = episodes.extent(context, state.episodes, env, at, 1)
        own = held.after(ring, slots)
        # The number of rows, counted from the end of the episode, to choose the goal from.
        choices = {"future": own - age + 1, "final": jnp.ones_like(age), "episode": part}
        # Rows are counted from the newest back: `age` of them came after the episode.
        back = age + random_bits.below(jnp.maximum(choices[self.strategy], 1), *words)
        return ring.slot_before(held.newest(ring)[env], back * ring.envs)

    def reduce(self, raw: Item, plan: ReadPlan, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Sets the goals, rewards and flags of relabeled items."""
        (inner, spans), relabeled = plan.residuals, plan.info["relabeled"]
        reached = find(raw, self.achieved, "Hindsight: achieved")
        # Take the span of each set of rows out of the one array that was read.
        own, rewarded, flagged, goal = (
            jax.tree.map(lambda leaf, span=span: leaf[:, span], reached)
            for span in (*spans, slice(-1, None))
        )
        lead = lambda path: inner.where(path_name(path)).ndim
        first = lambda leaf, path: leaf if lead(path) > 1 else leaf[:, 0]

        def relabel(new: Any, old: Any) -> list[jax.Array]:
            lift = lambda leaf: relabeled.reshape(-1, *(1,) * (leaf.ndim - 1))
            pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
            return [jnp.where(lift(was), now, was) for now, was in pairs]

        # The new leaves, in order, by the path that they are below.
        own = [first(leaf, self.achieved) for leaf in jax.tree.leaves(own)]
        new = {path_name(self.achieved): own}
        for path in self.goals[:-1]:
            goals = [first(leaf, path) for leaf in jax.tree.leaves(goal)]
            new[path_name(path)] = relabel(goals, find(raw, path, "Hindsight: goal"))
        old = keys.get(raw, "reward")
        rewards = _compute_items(self.reward, "reward", rewarded, goal, old, lead(keys.reward))
        new[path_name(keys.reward)] = relabel(rewards, old)
        flags, flag_lead = keys.flags(raw), lead(_flag_path(keys))
        for name, flag in self._compute_flags(keys, flags, flagged, goal, flag_lead).items():
            new[name] = relabel(flag, flags[name])
        # The tree is visited in the order in which the leaves of each path were computed.
        remaining = {name: iter(leaves) for name, leaves in new.items()}

        def replace(path: tuple, leaf: jax.Array) -> jax.Array:
            name = pytree.leaf_name(path)
            prefixes = (prefix for prefix in remaining if within(name, prefix))
            return next((next(remaining[prefix]) for prefix in prefixes), leaf)

        data, info = self.unit.reduce(jax.tree_util.tree_map_with_path(replace, raw), inner, keys)
        return data, {**info, **plan.info}

    def _compute_flags(
        self, keys: Keys, old: dict[str, jax.Array], reached: Any, goal: Any, lead: int
    ) -> dict[str, jax.Array]:
        """Returns the flags `terminated` and `done` of the items, for other goals, by name.

        Arguments are those of `_compute_items`.
        """
        done, over, cut = map(path_name, (keys.done, keys.terminated, keys.truncated))
        if self.terminated is None or not old.keys() & {done, over}:
            return {}
        like = old[over] if over in old else old[done]
        ends = either = _compute_items(self.terminated, "terminated", reached, goal, like, lead)
        if cut in old:
            # A flag may be a number: whatever is not 0 is set.
            is_cut = old[cut] != jnp.zeros((), old[cut].dtype)
            either = ends | is_cut.reshape(ends.shape)
        new = {over: ends, done: either}
        return {
            name: flag.reshape(old[name].shape).astype(old[name].dtype)
            for name, flag in new.items()
            if name in old
        }


def _compute_items(
    function: Callable, what: str, reached: Any, goal: Any, old: Any, lead: int
) -> Any:
    """Returns `function` of what was reached, `[B, K, ...]`, and of goals, `[B, 1, ...]`.

    The result has the shapes of `old`, whose leaves have `lead` axes before those of a transition.
    """
    one = lambda rows, goal: jax.vmap(function, (0, None))(rows, goal)
    # One goal for all K rows of an entry.
    new = jax.vmap(one)(reached, jax.tree.map(lambda leaf: leaf[:, 0], goal))
    pytree.check_structure(old, new, f"Hindsight: {what}", "Give what the items have there.")

    def check_leaf(new: jax.Array, old: jax.Array) -> jax.Array:
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

    return jax.tree.map(check_leaf, new, old)


def _flag_path(keys: Keys) -> Path | None:
    """Returns the path to a flag; all flags are read at the same rows."""
    return keys.terminated if keys.done is None else keys.done
