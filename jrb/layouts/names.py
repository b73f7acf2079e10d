"""Converts between nested dicts of arrays and flat dicts with names such as `next/reward`."""

from collections.abc import Mapping
from typing import Any

from jrb._util.pytree import PyTree

Leaves = dict[str, Any]
"""Arrays by name: `{"observation": ..., "next/reward": ...}`."""


def flatten(items: PyTree, what: str) -> Leaves:
    """Returns the arrays of a nested dict by name; messages begin with `what`.

    Raises:
        TypeError: `items` is not a dict, or a leaf is neither an array nor a dict with entries.
        ValueError: a key is not a string, or has a slash.
    """
    leaves: Leaves = {}
    _flatten(items, "", leaves, what)
    return leaves


def _flatten(items: PyTree, prefix: str, leaves: Leaves, what: str) -> None:
    if not isinstance(items, Mapping):
        raise TypeError(
            f"{what}: expected a dict of arrays, got {type(items).__name__}. Layouts know dicts."
        )
    # An entry is an array, or a dict with entries of its own.
    for key, entry in items.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str) or "/" in key:
            raise ValueError(f"{what}: expected names without a slash, got {key!r}. Rename it.")
        if hasattr(entry, "shape") and hasattr(entry, "dtype"):
            leaves[name] = entry
        elif isinstance(entry, Mapping) and entry:
            _flatten(entry, name + "/", leaves, what)
        else:
            raise TypeError(
                f"{what}: leaf '{name}': expected an array or a dict of arrays, got "
                f"{type(entry).__name__}{' without any' * isinstance(entry, Mapping)}."
            )


def nest(leaves: Leaves) -> dict[str, Any]:
    """Returns the nested dict of arrays by name."""
    items: dict[str, Any] = {}
    for name, leaf in leaves.items():
        # Make the dicts on the path of the leaf.
        *path, last = name.split("/")
        inner = items
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = leaf
    return items
