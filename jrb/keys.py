"""Keys: the paths of the parts of a transition in an item, and functions that look them up.

Ends of episodes follow from them: from done flags, or from episode numbers. E environments, T time.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrb._util import checks, pytree
from jrb._util.public import PublicNames
from jrb._util.pytree import PyTree

__all__ = ["TED", "Keys", "Path", "find", "leaves_at", "lookup", "path_name", "within"]
__dir__: PublicNames = lambda: __all__

Path = str | tuple[str, ...]
"""A name, or a tuple of names from the outermost container inwards: dict keys or attributes."""


@pytree.component
class Keys:
    """The paths of the parts of a transition in an item; by default those of TorchRL's TED format.

    Name every part that the items have. The reward, the done flags and the next observation count
    as coming after the action, as do all leaves in the container of a nested next observation. If
    items have a flag or a next observation under a usual name that is not named here, methods that
    need it raise; None declares that a leaf of that name is something else.

    A reward or a flag may have a leaf for each agent below its path. The episode of an environment
    then ends when all its agents are done or, if a flag has an entry `__all__`, when that is set.

    Example:
        >>> keys = Keys(reward="r", next_observation="next_obs")
        >>> keys.get({"obs": 1, "r": 0.5, "next_obs": 2}, "reward")
        0.5

    Attributes:
        observation: the observation before the action.
        action: the action.
        reward: the reward for the action.
        done: a flag that is set if the episode ends, as are `terminated` and `truncated`. None if
            no leaf is such a flag.
        terminated: a flag that is set if the episode ends in a terminal state.
        truncated: a flag that is set if the episode is cut off, such as by a time limit.
        next_observation: the observation after the action; None if there is no such leaf.
        episode: an integer that numbers the episodes, such as TorchRL's `traj_ids`; None if the
            items have none. An episode ends where the number changes from one row of an environment
            to the next, and where a flag is set; flags are then optional. The end of a row's
            episode is known only with the next row.
    """

    observation: Path = "observation"
    action: Path = "action"
    reward: Path = ("next", "reward")
    done: Path | None = ("next", "done")
    terminated: Path | None = ("next", "terminated")
    truncated: Path | None = ("next", "truncated")
    next_observation: Path | None = ("next", "observation")
    episode: Path | None = None

    def __post_init__(self) -> None:
        for name, path in vars(self).items():
            if path is not None or name in ("observation", "action", "reward"):
                checks.path(name, path)

    def get(self, item: PyTree, name: str) -> Any:
        """Returns the entry of `item` that plays the role `name` ("reward", "done", ...).

        Raises:
            ValueError: the item has no entry at that path; the message lists the paths that exist.
        """
        path = getattr(self, name)
        entry = lookup(item, path)
        if entry is None:
            raise ValueError(
                f"{name}: expected a leaf at '{path_name(path)}', got an item with the leaves "
                f"{pytree.leaf_names(item)}. Name the right one with "
                f"keys=jrb.Keys({self.guesses(item, name)})."
            )
        return entry

    def guesses(self, item: PyTree, role: str) -> str:
        """Returns arguments of `Keys` to suggest, from leaves that have usual names of roles."""
        guesses = {role: "..."}
        # Roles that have an entry keep it; for others, take the first leaf with a usual name.
        paths = [tuple(name.split("/")) for name in pytree.leaf_names(item)]
        for each, usual in _USUAL.items():
            near = [path for path in paths if path[-1].lower() in usual.split()]
            if near and lookup(item, getattr(self, each)) is None:
                guesses[each] = repr(near[0] if near[0][1:] else near[0][0])
        return ", ".join(f"{each}={path}" for each, path in guesses.items())

    def flags(self, item: PyTree) -> dict[str, Any]:
        """Returns the leaves that are flags (done, terminated, truncated) by their names."""
        paths = (self.done, self.terminated, self.truncated)
        return {name: leaf for path in paths for name, leaf in leaves_at(item, path).items()}

    def ends(self, item: PyTree, is_set: Callable[[Any], Any]) -> Any:
        """Returns True where flags of `item` (at least one) end an episode; `is_set` gives bools.

        Any flag ends an episode. If agents have flags of their own, each agent must have one set,
        unless a flag has an entry `__all__`, which then decides.
        """
        # The ends of agents by their names below a flag; "" is for the environment.
        agents: dict[str, Any] = {}
        for path in (self.done, self.terminated, self.truncated):
            prefix, leaves = path_name(path), leaves_at(item, path)
            every = leaves.get(f"{prefix}/__all__")
            # Combine the flags of each agent: `terminated/a` and `truncated/a` belong to one.
            for name, flag in (leaves if every is None else {prefix: every}).items():
                agent, is_end = name[len(prefix) :], is_set(flag)
                agents[agent] = agents[agent] | is_end if agent in agents else is_end
        # The episode ends with a flag of the environment, or when all agents are done.
        own = [agents.pop("")] if "" in agents else []
        all_agents = [functools.reduce(operator.and_, agents.values())] if agents else []
        return functools.reduce(operator.or_, own + all_agents)

    def find_unnamed(self, item: PyTree) -> dict[str, str]:
        """Returns, by role, entries that have a usual name of the role but are not named here.

        Only roles without an entry at their path count; and only entries at the top of the item, or
        in a container that holds a part named here.
        """
        paths = [getattr(self, field.name) for field in dataclasses.fields(self)]
        # Elsewhere a leaf called `done` may be anything, such as a part of the observation.
        containers = {"", *(path_name(path).rpartition("/")[0] for path in paths)}
        played = [path_name(path) for path in paths if lookup(item, path) is not None]
        seen, unnamed = path_name(self.observation).rpartition("/")[2], {}
        for role in ("done", "terminated", "truncated", "next_observation"):
            path = getattr(self, role)
            if path is None or path_name(path) in played:
                continue
            # The names of the role: its own, and the same with `next_`.
            usual = {role, f"next_{seen if role == 'next_observation' else role}"}
            for name in pytree.leaf_names(item):
                is_played = any(within(name, other) for other in played)
                parts = name.split("/")
                for depth, part in enumerate(() if is_played else parts):
                    if part in usual and "/".join(parts[:depth]) in containers:
                        unnamed.setdefault(role, "/".join(parts[: depth + 1]))
        return unnamed

    def is_next(self, name: str) -> bool:
        """Returns True if the leaf `name` is about the time after the action.

        These are the reward, the flags and the next observation, and all leaves in the container of
        a nested next observation, unless it also holds the observation or the action.
        """
        roles = (self.reward, self.done, self.terminated, self.truncated, self.next_observation)
        names = [path_name(role).removesuffix("/__all__") for role in roles]
        if isinstance(self.next_observation, tuple) and len(self.next_observation) > 1:
            # All that is in `next` came after the action, also leaves of the user's own.
            container = path_name(self.next_observation[:-1])
            before = (path_name(self.observation), path_name(self.action))
            names += [container] * (not any(within(role, container) for role in before))
        return any(map(functools.partial(within, name), names))

    def twin(self, name: str) -> str | None:
        """Returns the observation leaf for a leaf of the next observation; None for others."""
        after = path_name(self.next_observation)
        if not within(name, after):
            return None
        return path_name(self.observation) + name[len(after) :]


_USUAL = {  # names that leaves of other libraries have
    "observation": "obs observations state states ob observation",
    "action": "act actions a action",
    "reward": "rew rewards r reward",
    "done": "dones terminal terminals is_terminal is_last d done",
    "terminated": "terminations terminated",
    "truncated": "truncations timeout timeouts truncated",
    "next_observation": "next_obs next_observations next_state next_states obs_next obs2",
}


def within(name: str, prefix: str) -> bool:
    """Returns True if the leaf `name` ("next/reward") is at or below `prefix` ("next")."""
    return name == prefix or name.startswith(prefix + "/")


def find(item: PyTree, path: Path, what: str) -> Any:
    """Returns the entry of `item` at `path`.

    Raises:
        ValueError: there is no entry; the message begins with `what` and lists existing paths.
    """
    entry = lookup(item, path)
    if entry is None:
        raise ValueError(
            f"{what}: expected something at '{path_name(path)}', got an item with the leaves "
            f"{pytree.leaf_names(item)}."
        )
    return entry


TED = Keys()
"""The keys of the TED format: `observation`, `action`, `next: {observation, reward, done, ...}`."""


def path_name(path: Path | None) -> str:
    """Returns `next/reward` for `("next", "reward")`; for None "", which is the name of no leaf."""
    return path if isinstance(path, str) else "/".join(path or ())


def leaves_at(item: PyTree, path: Path | None) -> dict[str, Any]:
    """Returns the leaves of `item` at or below `path`, by their names in the item."""
    leaves = jax.tree_util.tree_leaves_with_path(lookup(item, path))
    below = lambda inner: "".join("/" + pytree.part_name(part) for part in inner)
    return {path_name(path) + below(inner): leaf for inner, leaf in leaves}


def lookup(item: PyTree, path: Path | None) -> Any:
    """Returns the entry of `item` at `path`, or None if there is no such entry."""
    if path is None:
        return None
    for name in (path,) if isinstance(path, str) else path:
        if isinstance(item, Mapping):
            item = item.get(name)
        elif hasattr(item, "_fields"):
            # A named tuple has methods too, which are no entries.
            item = getattr(item, name) if name in item._fields else None
        else:
            # Arrays have attributes such as `real`, which are no leaves.
            item = None if hasattr(item, "dtype") else getattr(item, name, None)
            item = None if callable(item) else item
    return item


def check_ends(spec: PyTree, keys: Keys, is_needed: bool = True) -> None:
    """Raises if a done flag is misnamed or not one number; if `is_needed`, also without a flag."""
    # Unless `is_needed`, items may have no flags, but none under unknown names.
    for role, name in keys.find_unnamed(spec).items():
        path = tuple(name.split("/")) if lookup(spec, name) is None else name
        raise ValueError(
            f"{role}: leaf '{name}': expected a leaf that keys= names, got one that it does not, "
            f"while nothing lies at '{path_name(getattr(keys, role))}'. Name it with "
            f"keys=jrb.Keys({role}={path!r}); or write {role}=None if it is something else."
        )
    flags = _require_flags(spec, keys) if is_needed and keys.episode is None else keys.flags(spec)
    for name, flag in flags.items():
        where = f"done: leaf '{name}'"
        if flag.shape not in ((), (1,)):
            raise ValueError(
                f"{where}: expected shape () or (1,) for one transition, got {flag.shape}. "
                "Reduce it: an episode ends for an environment as a whole."
            )
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(flag.dtype, kind) for kind in kinds):
            raise TypeError(
                f"{where}: expected a bool, integer or floating dtype, got {flag.dtype}. "
                "Compare it, as done > 0."
            )


def no_numbers(envs: int, spec: PyTree, keys: Keys) -> jax.Array | None:
    """Returns zeros as first episode numbers, integers `[E]`; None if `keys.episode` is None.

    Raises:
        ValueError, TypeError: the items have no such leaf, or it is not one integer.
    """
    if keys.episode is None:
        return None
    # Numbers are compared from row to row: one integer for each.
    leaf, where = keys.get(spec, "episode"), f"episode: leaf '{path_name(keys.episode)}'"
    if not pytree.is_array(leaf) or leaf.shape not in ((), (1,)):
        shape = leaf.shape if pytree.is_array(leaf) else pytree.leaf_names(leaf)
        raise ValueError(
            f"{where}: expected shape () or (1,) for one transition, got {shape}. An episode has "
            "one number."
        )
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        raise TypeError(f"{where}: expected an integer dtype, got {leaf.dtype}. Count episodes.")
    return jnp.zeros(envs, leaf.dtype)


def episode_changes(
    items: PyTree, keys: Keys, written: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds where the episode number changes from one row of an environment to the next.

    Args:
        items: leaves `[T, E, ...]`.
        keys: the paths of their parts.
        written: bool `[T, 1]` or `[T, E]`, False for masked rows, which are skipped.
        before: integers `[E]`, the episode numbers of the newest rows before these.

    Returns:
        Bool `[T, E]`, True for rows before a change; bool `[E]`, True if the row before these is
        such a row; and the numbers of the last rows that are not masked, like `before`.
    """
    numbers = keys.get(items, "episode")
    numbers = numbers.reshape(numbers.shape[:2])
    length, env = numbers.shape[0], jnp.arange(numbers.shape[1], dtype=jnp.int32)
    row = jnp.arange(length, dtype=jnp.int32)[:, None]
    # The last row that passes up to each row, and the one before that; -1 for the rows before.
    last = lax.cummax(jnp.where(written, row, -1) + jnp.zeros_like(env), axis=0)
    earlier = jnp.concatenate([jnp.full_like(last[:1], -1), last[:-1]])
    number = lambda at: jnp.where(at < 0, before, numbers[jnp.maximum(at, 0), env])
    # Compare each number with that of the row before that was not masked.
    changed = written & (numbers != number(earlier))
    at = jnp.where(changed & (earlier >= 0), earlier, length)
    cuts = jnp.zeros(numbers.shape, jnp.bool_).at[at, env].set(True, mode="drop")
    return cuts, jnp.any(changed & (earlier < 0), axis=0), number(last[-1])


def ends_of(items: PyTree, keys: Keys, lead: int = 2) -> jax.Array:
    """Returns True for items that end an episode by their flags, bool `[T, E]`."""
    # `lead` is the number of axes before those of an item.
    _require_flags(items, keys)
    is_set = lambda flag: (flag != jnp.zeros((), flag.dtype)).reshape(flag.shape[:lead])
    return keys.ends(items, is_set)


def _require_flags(item: PyTree, keys: Keys) -> dict[str, jax.Array]:
    """Returns the flags of ends of episodes by name; raises ValueError if there are none."""
    flags = keys.flags(item)
    if not flags:
        raise ValueError(
            f"done: expected a leaf at '{path_name(keys.done)}', '{path_name(keys.terminated)}' or "
            f"'{path_name(keys.truncated)}', got an item with the leaves {pytree.leaf_names(item)}."
            f" Name the right ones with keys=jrb.Keys({keys.guesses(item, 'done')})."
        )
    return flags
