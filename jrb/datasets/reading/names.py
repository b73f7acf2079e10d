"""Names that files have for their arrays, and the leaves in TED that they stand for."""

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
_SEPARATOR = re.compile(r"[./]")
_DEPTH = 64  # parts of a name


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Returns the key that sorts `part-9` before `part-10`, whatever is around the numbers."""
    parts = re.findall(r"\d+|\D+", name)
    key = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
    return [*key, (2, 0, name)]  # `a1` and `a01` have an order too


def check_names(source: object, names: Iterable[str]) -> None:
    """Refuses names that lead elsewhere, and such as no nested dict could hold together.

    Args:
        source: the file, for the message.
        names: with slashes between their parts.

    Raises:
        ValueError: a part that is empty, `.` or `..`; more than 64 parts; a name twice, or one
            that is also a group.
    """
    seen: set[str] = set()
    for name in names:
        parts = name.split("/")
        if len(parts) > _DEPTH or not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
            raise ValueError(
                f"{source}: expected names of arrays such as 'a/b', got {name[:99]!r}. Rename it."
            )
        if name in seen:
            raise ValueError(f"{source}: expected one array of each name, got {name!r} twice.")
        seen.add(name)
    for name in sorted(seen):
        if above := _above(name) & seen:
            raise ValueError(
                f"{source}: expected '{min(above)}' to be an array or a group of arrays, got both."
            )


def _above(name: str) -> set[str]:
    """Returns `a` and `a/b` for `a/b/c`."""
    parts = name.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def to_ted(
    names: Iterable[str], mapping: Mapping[str, Any] | Keys | None, source: object
) -> dict[str, str]:
    """Returns the leaves in TED of names in a file, `{"rewards": "next/reward"}`.

    Names that a mapping lacks are looked up among usual ones (`obs`, `next_obs`, `rewards`,
    `terminals`, ...). Others stay. Dots in them are levels, as slashes are; a name that is mapped
    or usual takes along the names below it (`obs.arm`, `obs/arm`).

    Args:
        names: those in the file.
        mapping: from names to fields of `jrb.Keys` (`"reward"`) or to leaves of TED
            (`("next", "reward")`, `"next/reward"`); or `jrb.Keys` with the names in the file, of
            which those that the file lacks may be TED's.
        source: the file, for errors.

    Raises:
        ValueError: the file has no name that is mapped; two names are mapped to one leaf; or a name
            is no path (`../x`).
        TypeError: a name is mapped to no path.
    """
    names = list(names)
    mapped, leaves = _mapped(names, mapping, source), dict[str, str]()
    for name in names:
        head, parts = _match(name, mapped)
        if head is not None:
            leaves[name] = "/".join([mapped[head], *parts])
            continue
        usual, parts = _usual(name), _SEPARATOR.split(name)
        if usual is not None and not any(within(usual, leaf) for leaf in mapped.values()):
            leaves[name] = usual
        else:
            leaves[name] = "/".join(parts) if all(parts) else name
    # Leaves below others, as `action.tokens` beside `action`, keep the name that they have.
    every = set(leaves.values())
    is_below = {
        name: "/" not in name and bool(_above(leaf) & every) for name, leaf in leaves.items()
    }
    leaves = {name: name if is_below[name] else leaf for name, leaf in leaves.items()}
    _check_apart(leaves, source, "mapping=")
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
        source: the file, for errors.

    Raises:
        ValueError: texts are mapped to another leaf.
    """
    names, texts = list(names), list(texts)
    mapped = _mapped([*names, *texts], mapping, source)
    mapped_texts = [text for text in texts if text in mapped]
    for text in mapped_texts:
        if mapped[text] != ROLES["episode"]:
            raise ValueError(
                f"{source}: mapping: '{mapped[text]}': expected numbers, got {text!r}, which holds "
                "texts."
            )
    if mapped_texts or ROLES["episode"] in to_ted(names, mapping, source).values():
        return mapped_texts
    usual = [text for text in texts if _usual(text) == ROLES["episode"]]
    return usual if len(usual) == 1 else []


def ted_names(names: Iterable[str], keys: Keys, roles: Iterable[str] = FIELDS) -> dict[str, str]:
    """Returns the leaves in TED of leaves of a buffer's items; those without a role keep theirs.

    Args:
        names: those of the leaves.
        keys: the paths to the parts of a transition.
        roles: the parts that are renamed.
    """
    paths, leaves = {role: path_name(getattr(keys, role)) for role in roles}, dict[str, str]()
    for name in names:
        # The longest path counts: `obs/now` may be the observation, and `obs` the next one.
        role = max(
            (r for r in paths if within(name, paths[r])), key=lambda r: len(paths[r]), default=""
        )
        leaves[name] = ROLES[role] + name[len(paths[role]) :] if role else name
    return leaves


def leaves_in_ted(source: object, names: Iterable[str], keys: Keys) -> dict[str, str]:
    """Returns the leaves in TED of all leaves of a buffer's items.

    Raises:
        ValueError: no reward, or two leaves of one name.
    """
    names = list(names)
    if not any(within(name, path_name(keys.reward)) for name in names):
        raise ValueError(
            f"{source}: reward: expected a leaf at '{path_name(keys.reward)}', got items with the "
            f"leaves {names}. Name the right one with keys=jrb.Keys(reward=...)."
        )
    leaves = ted_names(names, keys)
    _check_apart(leaves, source, "keys=jrb.Keys(...)")
    return leaves


def _mapped(
    names: list[str], mapping: Mapping[str, Any] | Keys | None, source: object
) -> dict[str, str]:
    """Returns the leaves of TED by names in the file, as a mapping has them."""
    if mapping is None:
        return {}
    is_present = lambda name: any(_match(other, {name: name})[0] is not None for other in names)
    mapped: dict[str, str] = {}
    if isinstance(mapping, Keys):
        for role, leaf in ROLES.items():
            path = path_name(getattr(mapping, role))
            # TED's own paths are the defaults, so that the file may lack them.
            if path and (path != leaf or role == "episode" or is_present(path)):
                mapped[path] = leaf
    elif isinstance(mapping, Mapping):
        for name, path in mapping.items():
            if isinstance(path, str):
                mapped[name] = ROLES.get(path, path)
            elif isinstance(path, tuple) and path and all(isinstance(part, str) for part in path):
                mapped[name] = "/".join(path)
            else:
                raise TypeError(
                    f"{source}: mapping: {name!r}: expected a name or a tuple of names, got "
                    f"{path!r}."
                )
    else:
        raise TypeError(f"mapping: expected a dict or jrb.Keys, got {mapping!r}.")
    for name in mapped:
        if not is_present(name):
            raise ValueError(
                f"{source}: mapping: expected names that are there, got {name!r}. There are "
                f"{sorted(names)}."
            )
    return mapped


def _match(name: str, mapped: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Returns the longest mapped name that a name is or lies below, and its parts below that."""
    for head in sorted(mapped, key=len, reverse=True):
        for form in (head, head.replace("/", ".")):
            if name == form or name.startswith((form + "/", form + ".")):
                return head, list(filter(None, _SEPARATOR.split(name[len(form) :])))
    return None, []


def _usual(name: str) -> str | None:
    """Returns the leaf of TED that a usual name stands for."""
    first, *parts = _SEPARATOR.split(name)
    if first != "next" or not parts:
        role = _ROLE_OF.get(first)
        return "/".join([ROLES[role], *parts]) if role else None
    role = _ROLE_OF.get(parts[0], "")
    leaf = "next/observation" if role == "observation" else ROLES.get(role, "")
    return "/".join([leaf, *parts[1:]]) if leaf.startswith("next/") else None


def _check_apart(leaves: dict[str, str], source: object, option: str) -> None:
    """Refuses leaves that two names have, that are below others, and that are no paths."""
    every = list(leaves.values())
    for name, leaf in leaves.items():
        if not {"", ".", ".."}.isdisjoint(leaf.split("/")):
            raise ValueError(f"{source}: expected names of leaves, got {name!r}.")
        if every.count(leaf) > 1 or _above(leaf) & set(every):
            names = [other for other, each in leaves.items() if each == leaf]
            raise ValueError(
                f"{source}: expected a leaf of its own for each name, got {names} for '{leaf}' "
                f"among {sorted(set(every))}. Tell them apart with {option}."
            )
