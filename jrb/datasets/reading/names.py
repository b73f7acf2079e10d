"""Names that files have for their arrays, looked at before they become names of leaves."""

import re
from collections.abc import Iterable

_NO_PARTS = ("", ".", "..")
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
    groups: set[str] = set()
    for name in names:
        parts = name.split("/")
        if len(parts) > _DEPTH or any(part in _NO_PARTS or "\0" in part for part in parts):
            raise ValueError(
                f"{source}: expected names of arrays such as 'a/b', got {name[:99]!r}. Rename it."
            )
        if name in seen:
            raise ValueError(f"{source}: expected one array of each name, got {name!r} twice.")
        seen.add(name)
        groups.update("/".join(parts[:count]) for count in range(1, len(parts)))
    for name in sorted(seen & groups):
        raise ValueError(
            f"{source}: expected '{name}' to be an array or a group of arrays, got both."
        )
