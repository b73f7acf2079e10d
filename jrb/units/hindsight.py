"""Goals chosen in hindsight."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrb._base import checks, ordering, pytree, random_bits
from jrb._engine import episodes, rows
from jrb._engine.episodes import Episodes
from jrb.keys import Keys, Path, find, path_name, within
from jrb.ring import Ring
from jrb.types import Anchors, Change, Context, Item, Look, Sampler, Unit, Write, Writer
from jrb.units.transition import all_held, every_slot

_WHICH, _WHERE = 2, 3  # the numbers that `bits.fold` gets


class Goals(pytree.State):
    """What must be known before a goal is read.

    Attributes:
        episodes: where each episode begins and ends.
        which: int32 `[N]`, the place of each slot's episode in their table.
    """

    episodes: Episodes
    which: jax.Array


@pytree.component
class Hindsight(Unit):
    """Transitions, some of them as if their goal had been one that was reached.

    With probability `ratio` the goal becomes what was achieved after a row g, in the observation
    and in the next one, and the reward is computed anew; done flags too, where `terminated` is
    given, else they stay. `Sample.info` has `relabeled`, bool `[B]`.

    Attributes:
        reward: from what was achieved and the goal, leaves of one transition, to its reward; must
            work under `vmap`.
        strategy: which row g: "future", any of the episode from the transition on; "final", its
            last that is held; "episode", any that is held; "random", any of the whole buffer.
        ratio: from 0 to 1.
        achieved: the path to what was achieved.
        goal: the path to the goal.
        next_goal: the path to the goal in the next observation, None if there is none.
        terminated: from what was achieved and the goal, to whether the episode terminates there,
            bool; must work under `vmap`. What is relabeled has that in its leaf `terminated`, and
            in its leaf `done` that or its own `truncated`. None leaves both as they are.

    Reference: Andrychowicz et al., 2017, "Hindsight experience replay", sections 3.3 and 4.5.
    """

    reward: Callable[[Any, Any], jax.Array]
    strategy: Literal["future", "final", "episode", "random"] = "future"
    ratio: float = 0.8
    achieved: Path = ("next", "observation", "achieved_goal")
    goal: Path = ("observation", "desired_goal")
    next_goal: Path | None = ("next", "observation", "desired_goal")
    terminated: Callable[[Any, Any], jax.Array] | None = None

    def __post_init__(self) -> None:
        checks.choice("strategy", self.strategy, ("future", "final", "episode", "random"))
        checks.fraction("ratio", self.ratio)
        if not callable(self.reward):
            raise TypeError(f"Hindsight: reward: expected a function, got {self.reward!r}.")
        if self.terminated is not None and not callable(self.terminated):
            raise TypeError(f"Hindsight: terminated: expected a function, got {self.terminated!r}.")

    @property
    def lag(self) -> int:
        """Anchors enter in the order of their rows."""
        return 0

    @property
    def waits(self) -> bool:
        """No: they are anchors at once."""
        return False

    def check(self, ring: Ring, sampler: Sampler, writer: Writer) -> None:
        """Rows in order of time."""
        checks.in_time("Hindsight", writer)

    @property
    def goals(self) -> tuple[Path, ...]:
        """The paths to goals, and to what was achieved."""
        return (*self._wanted, self.achieved)

    @property
    def _wanted(self) -> tuple[Path, ...]:
        return (self.goal,) if self.next_goal is None else (self.goal, self.next_goal)

    def init(self, context: Context, spec: Item) -> Goals:
        """No rows. Raises if goals are missing, or not like what is achieved."""
        ring, keys = context.ring, context.keys
        episodes.check(spec, keys)
        keys.get(spec, "reward")
        achieved = find(spec, self.achieved, "Hindsight: achieved")
        for path in self._wanted:
            goal = find(spec, path, "Hindsight: goal")
            mend = f"A goal must be what can be achieved at '{path_name(self.achieved)}'."
            pytree.check_like(achieved, goal, f"Hindsight: '{path_name(path)}'", mend)
        return Goals(episodes=episodes.init(ring, 1), which=jnp.zeros(ring.capacity, jnp.int32))

    def on_write(
        self, context: Context, state: Goals, write: Write, items: Item
    ) -> tuple[Goals, Change]:
        """What is written enters; what it overwrites left."""
        done = episodes.ending(context, write, items)
        after, _, which = episodes.after_write(context, state.episodes, write, done, 1)
        state = Goals(episodes=after, which=rows.put(state.which, write, which))
        return state, every_slot(context, write)

    def truncate(self, context: Context, state: Goals, which: jax.Array) -> tuple[Goals, None]:
        """The running episodes end."""
        after = episodes.truncated(state.episodes, which, 1)
        return state.replace(episodes=after), None

    def ends(self, context: Context, state: Goals, slots: jax.Array) -> jax.Array:
        """Those whose successor is of another episode."""
        ring, held = context.ring, context.held
        last = held.after(ring, slots) <= 0
        over = state.episodes.length[slots % ring.envs] == 0
        other = state.which[slots] != state.which[ring.slot_after(slots, ring.envs)]
        return jnp.where(last, over, other)

    def anchors(self, context: Context, state: Goals) -> Anchors:
        """All that is held."""
        return all_held(context)

    def look(
        self, context: Context, state: Goals, slots: jax.Array, mask: jax.Array, key: jax.Array
    ) -> Look:
        """What was achieved at the anchor and at the goal's row; the rest at the anchor."""
        coin = random_bits.unit_interval(
            random_bits.words(random_bits.fold(key, _WHICH), slots.size)[0]
        )
        relabeled = (coin < self.ratio) & mask
        chosen = self._rows(
            context, state, slots, random_bits.words(random_bits.fold(key, _WHERE), slots.size)
        )
        both = jnp.stack([slots, jnp.where(mask, chosen, slots)], axis=1)
        achieved = path_name(self.achieved)
        where = lambda name: both if within(name, achieved) else slots
        return Look(where=where, mask=mask, info={"relabeled": relabeled})

    def _rows(
        self, context: Context, state: Goals, slots: jax.Array, words: jax.Array
    ) -> jax.Array:
        """The slots of the rows whose achievement may become the goal, int32 `[B]`."""
        ring, held = context.ring, context.held
        if self.strategy == "random":
            return held.nth(ring, random_bits.below(held.size, *words))
        env = slots % ring.envs
        at = ordering.read(lambda: rows.get(state.which, slots))
        age, part = episodes.extent(context, state.episodes, env, at, 1)
        own = held.after(ring, slots)
        choices = {"future": own - age + 1, "final": jnp.ones_like(age), "episode": part}
        back = age + random_bits.below(jnp.maximum(choices[self.strategy], 1), *words)
        return ring.slot_before(held.newest(ring)[env], back * ring.envs)

    def reduce(self, raw: Item, look: Look, keys: Keys) -> tuple[Item, dict[str, jax.Array]]:
        """Other goals where it was so decided, and the rewards that they give."""
        changed = look.info["relabeled"]
        reached = jax.tree.leaves(find(raw, self.achieved, "Hindsight: achieved"))
        choose = lambda new, old: jnp.where(changed.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
        new = {path_name(self.achieved): [leaf[:, 0] for leaf in reached]}
        for path in self._wanted:
            old = jax.tree.leaves(find(raw, path, "Hindsight: goal"))
            new[path_name(path)] = [
                choose(leaf[:, 1], goal) for leaf, goal in zip(reached, old, strict=True)
            ]
        data = _with_leaves(raw, new)
        reward = self._anew(self.reward, "reward", data, keys.get(data, "reward"))
        found = {path_name(keys.reward): [choose(reward, keys.get(data, "reward"))]}
        for name, flag in self._flags(data, keys).items():
            found[name] = [choose(flag, keys.flags(data)[name])]
        return _with_leaves(data, found), look.info

    def _anew(self, function: Callable, what: str, data: Item, old: jax.Array) -> jax.Array:
        """What a function makes of achievements and goals, in the shape of `old`, `[B, ...]`."""
        part = lambda path: find(data, path, "Hindsight")
        new = jax.vmap(function)(part(self.achieved), part(self.goal))
        item = lambda array: array.shape[1:]
        if item(new) != item(old) and {item(new), item(old)} != {(), (1,)}:
            raise ValueError(
                f"Hindsight: {what}: expected shape {item(old)} for one transition, got "
                f"{item(new)}. Reduce it over the parts of the goal."
            )
        dtype = old.dtype if what == "reward" else jnp.bool_
        if new.dtype != dtype:
            raise TypeError(
                f"Hindsight: {what}: expected dtype {dtype}, got {new.dtype}. "
                "Cast it in the function."
            )
        return new.reshape(old.shape)

    def _flags(self, data: Item, keys: Keys) -> dict[str, jax.Array]:
        """The flags that are computed anew, by name, in their own dtypes."""
        there = keys.flags(data)
        done, over, cut = map(path_name, (keys.done, keys.terminated, keys.truncated))
        if self.terminated is None or not there.keys() & {done, over}:
            return {}
        like = there[over] if over in there else there[done]
        ends = self._anew(self.terminated, "terminated", data, like)
        found = {over: ends}
        found[done] = ends | _is_set(there[cut]).reshape(ends.shape) if cut in there else ends
        return {
            name: found[name].reshape(there[name].shape).astype(there[name].dtype)
            for name in (done, over)
            if name in there
        }


def _is_set(flag: jax.Array) -> jax.Array:
    return flag != jnp.zeros((), flag.dtype)


def _with_leaves(data: Item, new: dict[str, list[jax.Array]]) -> Item:
    """The data with other leaves, in order, at or below some paths."""
    rest = {name: iter(leaves) for name, leaves in new.items()}

    def visit(path: tuple, leaf: jax.Array) -> jax.Array:
        name = pytree.leaf_name(path)
        return next((next(rest[prefix]) for prefix in rest if within(name, prefix)), leaf)

    return jax.tree_util.tree_map_with_path(visit, data)
