"""Which leaf of TED a name in a file stands for."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jrb.keys import TED, Keys, path_name, within

FIELDS = (
    "observation",
    "action",
    "reward",
    "done",
    "terminated",
    "truncated",
    "next_observation",
)
ROLES = {**{name: path_name(getattr(TED, name)) for name in FIELDS}, "episode": "episode"}
"""The fields of `jrb.Keys`, and the names that TED has for them."""

_USUAL = {
    "observation": ("obs", "observation", "observations"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "done": ("done", "dones"),
    "terminated": ("terminated", "terminal", "terminals", "termination", "terminations"),
    "truncated": ("truncated", "timeout", "timeouts", "truncation", "truncations"),
    "next_observation": ("next_obs", "next_observation", "next_observations"),
    "episode": ("episode", "episode_id", "episode_index"),
}
_ROLE_OF = {name: role for role, names in _USUAL.items() for name in names}
_PARTS = re.compile(r"[./]")


def to_ted(
    names: Iterable[str], mapping: Mapping[str, Any] | Keys | None, source: object
) -> dict[str, str]:
    """The leaves in TED of names in a file, `{"rewards": "next/reward"}`.

    What a mapping does not tell, usual names do (`obs`, `next_obs`, `rewards`, `terminals`, ...).
    Others keep theirs. Dots in them are levels, as slashes are; a name that is told or usual takes
    along what lies below it (`obs.arm`, `obs/arm`).

    Args:
        names: those in the file.
        mapping: from names to fields of `jrb.Keys` (`"reward"`) or to leaves of TED
            (`("next", "reward")`, `"next/reward"`); or `jrb.Keys` that say where in the file
            things lie, of which those that are not there may be TED's.
        source: what the names are of, for errors.

    Raises:
        ValueError: nothing has a name that the mapping tells; a field that `jrb.Keys` lacks; two
            names for one leaf; or a name that is no path (`../x`).
        TypeError: what the mapping says is no path.
    """
    names = list(names)
    told = _told(names, mapping, source)
    taken = set(told.values())
    leaves = {}
    for name in names:
        head, rest = _match(name, told)
        if head is not None:
            leaves[name] = "/".join([told[head], *rest])
            continue
        usual = _usual(name)
        is_free = usual is not None and not any(within(usual, leaf) for leaf in taken)
        leaves[name] = usual if usual is not None and is_free else _path(name)
    leaves = _apart(leaves)
    _check(leaves, source)
    return leaves


def episode_text(
    names: Iterable[str],
    texts: Iterable[str],
    mapping: Mapping[str, Any] | Keys | None,
    source: object,
) -> list[str]:
    """Returns the name of texts that tell episodes apart, in a list; an empty one if none do.

    Args:
        names: those of arrays of numbers.
        texts: those of arrays of texts.
        mapping: as for `to_ted`.
        source: what the names are of, for errors.

    Raises:
        ValueError: the mapping takes texts for something else.
    """
    names, texts = list(names), list(texts)
    told = _told([*names, *texts], mapping, source)
    mapped = {text: told[text] for text in texts if text in told}
    for text, leaf in mapped.items():
        if leaf != ROLES["episode"]:
            raise ValueError(
                f"{source}: mapping: '{leaf}': expected numbers, got {text!r}, which holds texts."
            )
    if mapped or ROLES["episode"] in to_ted(names, mapping, source).values():
        return list(mapped)
    usual = [text for text in texts if _usual(text) == ROLES["episode"]]
    return usual if len(usual) == 1 else []


def ted_names(names: Iterable[str], keys: Keys, roles: Iterable[str] = FIELDS) -> dict[str, str]:
    """The leaves in TED of leaves of a buffer's items; those that play no part keep their names.

    Args:
        names: those of the leaves.
        keys: where the parts of a transition lie.
        roles: which of them are told.
    """
    own = {role: path_name(getattr(keys, role)) for role in roles}
    return {name: _ted_name(name, own) for name in names}


def _ted_name(name: str, own: Mapping[str, str]) -> str:
    """By the longest of the paths that it is, or lies below."""
    fitting = [role for role in own if within(name, own[role])]
    if not fitting:
        return name
    role = max(fitting, key=lambda role: len(own[role]))
    return ROLES[role] + name[len(own[role]) :]


def _told(
    names: list[str], mapping: Mapping[str, Any] | Keys | None, source: object
) -> dict[str, str]:
    """What a mapping says, from names in the file to leaves of TED."""
    if mapping is None:
        return {}
    if isinstance(mapping, Keys):
        told = {path: ROLES[role] for role, path in _paths(mapping) if _is_said(path, role, names)}
    elif isinstance(mapping, Mapping):
        told = {name: _leaf(name, path, source) for name, path in mapping.items()}
    else:
        raise TypeError(f"mapping: expected a dict or jrb.Keys, got {mapping!r}.")
    for name in told:
        if not _is_there(name, names):
            raise ValueError(
                f"{source}: mapping: expected names that are there, got {name!r}. There are "
                f"{sorted(names)}."
            )
    return told


def _paths(keys: Keys) -> list[tuple[str, str]]:
    """The fields and where they lie."""
    given = [(role, getattr(keys, role)) for role in ROLES]
    return [(role, path_name(path)) for role, path in given if path is not None]


def _is_said(path: str, role: str, names: list[str]) -> bool:
    """Whether keys mean a path: not those that are TED's by default, and not there."""
    return path != ROLES[role] or role == "episode" or _is_there(path, names)


def _leaf(name: str, path: object, source: object) -> str:
    """The leaf of TED that a mapping names."""
    if isinstance(path, tuple) and path and all(isinstance(part, str) for part in path):
        return "/".join(path)
    if not isinstance(path, str):
        raise TypeError(
            f"{source}: mapping: {name!r}: expected a name or a tuple of names, got {path!r}."
        )
    return ROLES.get(path, path)


def _is_there(name: str, names: Iterable[str]) -> bool:
    """Whether it is one of these names, or some lie below it."""
    return any(_match(other, {name: None})[0] is not None for other in names)


def _match(name: str, told: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The longest told name that a name is or lies below; and its parts below that."""
    for head in sorted(told, key=len, reverse=True):
        if name == head:
            return head, []
        for form in (head, head.replace("/", ".")):
            if name == form or name.startswith((form + "/", form + ".")):
                return head, list(filter(None, _PARTS.split(name[len(form) :])))
    return None, []


def _usual(name: str) -> str | None:
    """The leaf of TED that a usual name stands for."""
    first, *rest = _PARTS.split(name)
    if first == "next" and rest:
        role = _ROLE_OF.get(rest[0])
        after = "next/" + role if role == "observation" else ROLES.get(role or "")
        is_after = after is not None and after.startswith("next/")
        return "/".join([after, *rest[1:]]) if after is not None and is_after else None
    role = _ROLE_OF.get(first)
    return "/".join([ROLES[role], *rest]) if role else None


def _path(name: str) -> str:
    """Dots as levels, where each has a name."""
    parts = _PARTS.split(name)
    return "/".join(parts) if all(parts) else name


def _apart(leaves: dict[str, str]) -> dict[str, str]:
    """Leaves below others, as `action.tokens` beside `action`, keep the name that they have."""
    every = set(leaves.values())
    return {
        name: name if "/" not in name and _is_under(leaf, every) else leaf
        for name, leaf in leaves.items()
    }


def _is_under(leaf: str, every: set[str]) -> bool:
    parts = leaf.split("/")
    return any("/".join(parts[:count]) in every for count in range(1, len(parts)))


def _check(leaves: dict[str, str], source: object) -> None:
    """Refuses leaves that two names have, that lie in others, and that are no paths."""
    by_leaf: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        by_leaf.setdefault(leaf, []).append(name)
        if any(part in ("", ".", "..") for part in leaf.split("/")):
            raise ValueError(f"{source}: expected names of leaves, got {name!r}.")
    for leaf, names in by_leaf.items():
        if len(names) > 1 or _is_under(leaf, set(by_leaf)):
            raise ValueError(
                f"{source}: expected a leaf of its own for each name, got {names} for '{leaf}' "
                f"among {sorted(by_leaf)}. Tell them apart with mapping=."
            )
