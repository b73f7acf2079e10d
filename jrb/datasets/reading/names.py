"""Maps the names of arrays in files to the names of leaves in TED."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jrb.keys import TED, Keys, path_name, within

FIELDS = tuple(field.name for field in dataclasses.fields(Keys) if field.name != "episode")
ROLES: dict[str, str] = {
    **{name: path_name(getattr(TED, name)) for name in FIELDS},
    "episode": "episode",
}
"""The fields of `jrb.Keys`, here called roles, and the names of their leaves in TED."""

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "observation": ("obs", "observation", "observations"),
    "action": ("action", "actions"),
    "next/reward": ("reward", "rewards"),
    "next/done": ("done", "dones"),
    "next/terminated": ("terminated", "terminal", "terminals", "termination", "terminations"),
    "next/truncated": ("truncated", "timeout", "timeouts", "truncation", "truncations"),
    "next/observation": ("next_obs", "next_observation", "next_observations"),
    "episode": ("episode", "episode_id", "episode_index"),
    "info": ("info", "infos", "env_infos"),
}
"""The names that arrays of all formats have in files, by the leaf in TED for which they stand."""

MASK_NAMES = ("mask", "masks", "discount", "discounts", "not_done", "not_dones")
"""The leaves, at the top or below `next`, that are 0 where the next value counts as 0."""

_LEAF_OF = {name: leaf for leaf, names in USUAL_NAMES.items() for name in names}
_DEPTH = 64  # maximum number of parts of a name


def check(is_right: object, where: object, expected: str, got: object) -> None:
    """Raises `ValueError` unless `is_right`; the message names file, expectation and finding."""
    if not is_right:
        raise ValueError(f"{where}: expected {expected}, got {got}.")


@contextlib.contextmanager
def explain_damage(
    where: object, expected: str, errors: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Turns the errors that a library raises for damaged files into a `ValueError`."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except errors as error:
        got = f"one that is damaged or of another kind: {error}"
        raise ValueError(f"{where}: expected {expected}, got {got}") from error


def has_signature(path: object, signature: bytes) -> bool:
    """Returns True if a path is a file that begins with these bytes."""
    if not isinstance(path, str) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(signature)) == signature


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key that orders names by the numbers in them: `part-9` before `part-10`."""
    parts = re.findall(r"\d+|\D+", name)
    key = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
    return [*key, (2, 0, name)]  # so that `a1` and `a01` differ


def check_names(source: object, names: Iterable[str]) -> None:
    """Raises for names such as `../a`, and for names that no nested dict can hold together."""
    seen: set[str] = set()
    for name in names:
        parts = name.split("/")
        is_path = len(parts) <= _DEPTH and {"", ".", ".."}.isdisjoint(parts) and "\0" not in name
        check(is_path, source, "names of arrays such as 'a/b'", f"{name[:99]!r}. Rename it")
        check(name not in seen, source, "one array of each name", f"{name!r} twice")
        seen.add(name)
    # A name below that of an array would need the array to be a dict.
    for name in sorted(seen):
        above = ", ".join(names_above(name) & seen)
        check(not above, source, f"'{above}' to be an array or a group of arrays", "both")


def names_above(name: str) -> set[str]:
    """Returns the names above a name: `a` and `a/b` for `a/b/c`."""
    parts = name.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def to_ted(
    names: Iterable[str],
    mapping: Mapping[str, Any] | Keys | None,
    source: object,
    own: Iterable[str] = (),
    separators: str = "./",
) -> dict[str, str]:
    """Returns the leaf in TED for each name in a file, such as `{"rewards": "next/reward"}`.

    `mapping` is a dict from names in the file to fields of `jrb.Keys` (`"reward"`) or to leaves of
    TED (`("next", "reward")`, `"next/reward"`); or a `jrb.Keys` with the names in the file. Names
    without a mapping are looked up in `USUAL_NAMES`, and else kept. Dots and slashes, or the given
    `separators`, separate levels: a name that is mapped or usual also renames the names below it
    (`obs.arm`, `obs/arm`). `own` are usual names that a format prescribes: another usual name of
    the same leaf then keeps its own.
    """
    names = list(names)
    leaf_of, leaves = _normalize_mapping(names, mapping, source), dict[str, str]()
    # Names that the format prescribes stand for their leaves, unless the user has mapped others to
    # these.
    for name in own:
        is_free = not any(within(_LEAF_OF[name], leaf) for leaf in leaf_of.values())
        if is_free and any(_match_head(other, {name}, separators)[0] for other in names):
            leaf_of[name] = _LEAF_OF[name]
    for name in names:
        # The mapping comes first, then usual names, and all other names are kept.
        head, parts = _match_head(name, leaf_of, separators)
        if head is not None:
            leaves[name] = "/".join([leaf_of[head], *parts])
            continue
        usual, parts = usual_leaf(name, separators), re.split(f"[{separators}]", name)
        if usual is not None and not any(within(usual, leaf) for leaf in leaf_of.values()):
            leaves[name] = usual
        else:
            leaves[name] = "/".join(parts) if all(parts) else name
    # A leaf below another one, such as `action.tokens` if there is `action`, keeps its name.
    all_leaves = set(leaves.values())
    is_below = {
        name: "/" not in name and bool(names_above(leaf) & all_leaves)
        for name, leaf in leaves.items()
    }
    leaves = {name: name if is_below[name] else leaf for name, leaf in leaves.items()}
    _check_distinct(leaves, source, "mapping=")
    return leaves


def episode_text(
    names: Iterable[str],
    texts: Iterable[str],
    mapping: Mapping[str, Any] | Keys | None,
    source: object,
) -> list[str]:
    """Returns [name] of the column of texts that identifies the episode of each step, or []."""
    names, texts, episode = list(names), list(texts), ROLES["episode"]
    leaf_of = _normalize_mapping([*names, *texts], mapping, source)
    # Texts have no other role than to identify episodes.
    mapped_texts = [text for text in texts if text in leaf_of]
    for text in mapped_texts:
        where, got = f"{source}: mapping: '{leaf_of[text]}'", f"{text!r}, which holds texts"
        check(leaf_of[text] == episode, where, "numbers", got)
    if mapped_texts or episode in to_ted(names, mapping, source).values():
        return mapped_texts
    # Without a mapping, a single column of texts with a usual name is taken; of several, none.
    usual = [text for text in texts if usual_leaf(text) == episode]
    return usual if len(usual) == 1 else []


def ted_names(names: Iterable[str], keys: Keys, roles: Iterable[str] = FIELDS) -> dict[str, str]:
    """Returns the leaf in TED for each leaf of a buffer's items; leaves without a role stay."""
    leaves, paths = dict[str, str](), {role: path_name(getattr(keys, role)) for role in roles}
    for name in names:
        # The longest path wins: `obs/now` may be the observation, and `obs` the next observation.
        fitting = [role for role, path in paths.items() if within(name, path)]
        role = max(fitting, key=lambda role: len(paths[role]), default=None)
        leaves[name] = name if role is None else ROLES[role] + name[len(paths[role]) :]
    return leaves


def leaves_in_ted(source: object, names: Iterable[str], keys: Keys) -> dict[str, str]:
    """Returns the leaf in TED for each leaf of a buffer's items; raises without a reward."""
    names = list(names)
    check_reward(f"{source}: reward", names, keys)
    leaves = ted_names(names, keys)
    _check_distinct(leaves, source, "keys=jrb.Keys(...)")
    return leaves


def check_reward(where: str, names: list[str], keys: Keys) -> None:
    """Raises if a buffer's items have no leaf for the reward."""
    path = path_name(keys.reward)
    got = f"items with the leaves {names}. Name the right one with keys=jrb.Keys(reward=...)"
    check(any(within(name, path) for name in names), where, f"a leaf at '{path}'", got)


def _normalize_mapping(
    names: list[str], mapping: Mapping[str, Any] | Keys | None, source: object
) -> dict[str, str]:
    """Returns a mapping in one form: leaf in TED by name in the file; raises if it is wrong."""
    if mapping is None:
        return {}
    is_present = lambda name: any(_match_head(other, {name})[0] is not None for other in names)
    leaf_of: dict[str, str] = {}
    if isinstance(mapping, Keys):
        for role, leaf in ROLES.items():
            path = path_name(getattr(mapping, role))
            # A path equal to TED's may be a default of `Keys`, so the file may lack it.
            if path and (path != leaf or role == "episode" or is_present(path)):
                leaf_of[path] = leaf
    elif isinstance(mapping, Mapping):
        for name, path in mapping.items():
            if isinstance(path, str):
                leaf_of[name] = ROLES.get(path, path)
            elif isinstance(path, tuple) and path and all(isinstance(part, str) for part in path):
                leaf_of[name] = "/".join(path)
            else:
                raise TypeError(
                    f"{source}: mapping: {name!r}: expected a name or a tuple of names, got "
                    f"{path!r}."
                )
    else:
        raise TypeError(f"mapping: expected a dict or jrb.Keys, got {mapping!r}.")
    for name in leaf_of:
        # A name that is misspelled would otherwise have no effect.
        got = f"{name!r}. There are {sorted(names)}"
        check(is_present(name), f"{source}: mapping", "names that are there", got)
    return leaf_of


def _match_head(
    name: str, heads: Iterable[str], separators: str = "./"
) -> tuple[str | None, list[str]]:
    """Returns the longest of `heads` that equals or contains a name, and the parts below it."""
    for head in sorted(heads, key=len, reverse=True):
        # Files may separate levels by dots where the mapping has slashes.
        for form in (head, head.replace("/", ".")):
            if name == form or name.startswith(tuple(form + each for each in separators)):
                parts = re.split(f"[{separators}]", name[len(form) :])
                return head, list(filter(None, parts))
    return None, []


def usual_leaf(name: str, separators: str = "./") -> str | None:
    """Returns the leaf in TED for a usual name such as `obs` or `next.reward`; else None."""
    # Below `next`, only rewards, flags and observations are usual.
    first, *parts = re.split(f"[{separators}]", name)
    if first != "next" or not parts:
        leaf = _LEAF_OF.get(first)
        return "/".join([leaf, *parts]) if leaf else None
    leaf = _LEAF_OF.get(parts[0], "")
    leaf = "next/observation" if leaf == "observation" else leaf
    return "/".join([leaf, *parts[1:]]) if leaf.startswith("next/") else None


def _check_distinct(leaves: dict[str, str], source: object, option: str) -> None:
    """Raises if two names have one leaf, a leaf is below another, or a leaf is not a path."""
    all_leaves = list(leaves.values())
    for name, leaf in leaves.items():
        is_path = {"", ".", ".."}.isdisjoint(leaf.split("/"))
        check(is_path, source, "names of leaves", repr(name))
        is_distinct = all_leaves.count(leaf) == 1 and names_above(leaf).isdisjoint(all_leaves)
        names = [other for other, each in leaves.items() if each == leaf]
        got = f"{names} for '{leaf}' among {sorted({*all_leaves})}. Tell them apart with {option}"
        check(is_distinct, source, "a leaf of its own for each name", got)
