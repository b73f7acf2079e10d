"""How the items of a buffer are keyed."""

import functools
from typing import Any

from jrb._base import pytree
from jrb._base.pytree import PyTree

Path = str | tuple[str, ...]
"""A name, or a tuple of names from the outside in; names reach into dicts and attributes alike."""


@pytree.component
class Keys:
    """Where the parts of a transition lie in an item; by default where TED puts them.

    Name all that the items have: what came after the action (reward, done flags, next observation)
    is told from the rest by these names, and by lying beside a nested next observation.

    Example:
        >>> keys = Keys(reward="r", next_observation="next_obs")
        >>> keys.get({"obs": 1, "r": 0.5, "next_obs": 2}, "reward")
        0.5

    Attributes:
        observation: what was seen before the action.
        action: what was done.
        reward: what came of it.
        done: whether the episode ends there; so do `terminated` and `truncated`.
        terminated: see `done`.
        truncated: see `done`.
        next_observation: what was seen after the action.
        episode: an integer, the number of the item's episode, such as TorchRL's `traj_ids`; None if
            the items have none. An episode ends before a row of the same environment that has
            another number than the one before it, besides where a flag says so. Then no flag is
            needed. How it goes on is known with the next row.
    """

    observation: Path = "observation"
    action: Path = "action"
    reward: Path = ("next", "reward")
    done: Path = ("next", "done")
    terminated: Path = ("next", "terminated")
    truncated: Path = ("next", "truncated")
    next_observation: Path = ("next", "observation")
    episode: Path | None = None

    def get(self, item: PyTree, name: str) -> Any:
        """The entry of `item` that plays the role `name` ("reward", "done", ...).

        Raises:
            ValueError: the item has nothing there; the message lists the paths that exist.
        """
        path = getattr(self, name)
        found = lookup(item, path)
        if found is None:
            raise ValueError(
                f"{name}: expected a leaf at '{path_name(path)}', got an item with the leaves "
                f"{pytree.leaf_names(item)}. Name the right one with "
                f"keys=jrb.Keys({self.guesses(item, name)})."
            )
        return found

    def guesses(self, item: PyTree, asked: str) -> str:
        """Arguments for all roles that have no leaf, as far as a leaf has a usual name."""
        guesses = {asked: "..."}
        for role, usual in _USUAL.items():
            if lookup(item, getattr(self, role)) is None:
                paths = [tuple(name.split("/")) for name in pytree.leaf_names(item)]
                near = [path for path in paths if path[-1].lower() in usual.split()]
                if near:
                    guesses[role] = repr(near[0] if near[0][1:] else near[0][0])
        return ", ".join(f"{role}={path}" for role, path in guesses.items())

    def flags(self, item: PyTree) -> dict[str, Any]:
        """What says that an episode ends: those of done, terminated and truncated that there are.

        Returns:
            From names of leaves to the leaves of `item`.
        """
        paths = (self.done, self.terminated, self.truncated)
        found = {path_name(path): lookup(item, path) for path in paths}
        return {name: leaf for name, leaf in found.items() if leaf is not None}

    def is_next(self, name: str) -> bool:
        """Whether the leaf of this name tells what came after the action.

        That is what `Keys` names so, and all that lies beside a nested next observation, unless the
        observation or the action lies there too.
        """
        roles = (self.reward, self.done, self.terminated, self.truncated, self.next_observation)
        names = list(map(path_name, roles))
        if isinstance(self.next_observation, tuple) and len(self.next_observation) > 1:
            beside = path_name(self.next_observation[:-1])
            before = (path_name(self.observation), path_name(self.action))
            names += [beside] * (not any(within(role, beside) for role in before))
        return any(map(functools.partial(within, name), names))

    def twin(self, name: str) -> str | None:
        """The leaf of the observation that a leaf of the next one continues; None for others."""
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
    """Whether the leaf `name` ("next/reward") is at or below `prefix` ("next")."""
    return name == prefix or name.startswith(prefix + "/")


def find(item: PyTree, path: Path, what: str) -> Any:
    """The entry of `item` at `path`.

    Raises:
        ValueError: there is nothing; the message begins with `what` and lists the paths that exist.
    """
    found = lookup(item, path)
    if found is None:
        raise ValueError(
            f"{what}: expected something at '{path_name(path)}', got an item with the leaves "
            f"{pytree.leaf_names(item)}."
        )
    return found


TED = Keys()
"""The keys of TED: `observation`, `action` and `next: {observation, reward, done, ...}`."""


def path_name(path: Path) -> str:
    """`next/reward` for `("next", "reward")`."""
    return path if isinstance(path, str) else "/".join(path)


def lookup(item: PyTree, path: Path) -> Any:
    """The entry of `item` at `path`, or None where there is none."""
    for name in (path,) if isinstance(path, str) else path:
        item = _entry(item, name)
    return item


def _entry(item: PyTree, name: str) -> Any:
    """What a container holds under a name; what is no container holds nothing."""
    if pytree.is_mapping(item):
        return item.get(name)
    if hasattr(item, "_fields"):  # a named tuple has methods too
        return getattr(item, name) if name in item._fields else None
    entry = None if hasattr(item, "dtype") else getattr(item, name, None)
    return None if callable(entry) else entry
