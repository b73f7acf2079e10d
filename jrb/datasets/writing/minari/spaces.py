"""Spaces of Gymnasium, as Minari writes them in JSON: given, or told from arrays."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrb._base.pytree import PyTree
from jrb.datasets.kinds.minari.leaf import shape_of, subspaces

Bounds = tuple[int, int]
"""The least and the greatest number."""

_MOST = np.iinfo(np.int64).max


def entries(where: str, tree: PyTree) -> dict[str, Any] | None:
    """What lies in a container, by name (`_index_0` and so on in a tuple); None for an array.

    Raises:
        TypeError: a container that is no dict, tuple or list.
        ValueError: names that HDF5 takes for paths, or a container without any.
    """
    if hasattr(tree, "dtype"):
        return None
    if isinstance(tree, tuple | list):
        found = {f"_index_{number}": entry for number, entry in enumerate(tree)}
    elif isinstance(tree, Mapping):
        found = {str(name): entry for name, entry in tree.items()}
    else:
        raise TypeError(f"'{where}': expected dicts and tuples, got {type(tree).__name__}.")
    if not found or any("/" in name or name in ("", ".") for name in found):
        raise ValueError(f"'{where}': expected names without a slash, got {list(found)}.")
    return found


def as_json(name: str, space: Any) -> dict[str, Any]:
    """A space that somebody gave.

    Args:
        name: of the argument.
        space: one of Gymnasium, or what Minari writes of one, as a dict or its text.

    Raises:
        TypeError: something else, or a space that has no such form.
    """
    if isinstance(space, str):
        try:
            space = json.loads(space)
        except ValueError as error:
            raise ValueError(f"{name}: expected JSON of a space, got {space!r}.") from error
    if isinstance(space, dict) and "type" in space:  # Gymnasium's own are mappings, but no dicts
        return space
    return _of_gymnasium(name, space)


def _of_gymnasium(name: str, space: Any) -> dict[str, Any]:
    match type(space).__name__:
        case "Box":
            bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
            return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
        case "Discrete":
            about = {"start": int(space.start), "n": int(space.n)}
            return {"type": "Discrete", "dtype": "int64", **about}
        case "MultiDiscrete":
            about = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"type": "MultiDiscrete", "dtype": str(space.dtype), **about}
        case "MultiBinary":
            return {"type": "MultiBinary", "n": np.asarray(space.n).tolist()}
        case "Dict":
            inner = {key: as_json(name, entry) for key, entry in space.spaces.items()}
            return {"type": "Dict", "subspaces": inner}
        case "Tuple":
            return {"type": "Tuple", "subspaces": [as_json(name, each) for each in space.spaces]}
        case other:
            raise TypeError(
                f"{name}: expected a space of arrays (Box, Discrete, MultiDiscrete, MultiBinary, "
                f"Dict, Tuple), got {other}."
            )


def check(name: str, space: Mapping[str, Any], tree: PyTree) -> None:
    """Refuses a space that is not that of the arrays `[T, ...]`.

    Raises:
        ValueError: another structure, or another shape.
    """
    inner, found = subspaces(space), entries(name, tree)
    if (inner is None) != (found is None) or (inner or {}).keys() != (found or {}).keys():
        raise ValueError(
            f"'{name}': expected a space of {said(tree)}, got {space.get('type')} of "
            f"{list(inner or [])}."
        )
    for part, entry in (inner or {}).items():
        check(f"{name}/{part}", entry, (found or {})[part])
    if inner is None and shape_of(space) != tree.shape[1:]:
        raise ValueError(
            f"'{name}': expected a space of shape {tree.shape[1:]}, got {space.get('type')} of "
            f"shape {shape_of(space)}."
        )


def said(tree: PyTree) -> str:
    """An array or a container in a few words."""
    if hasattr(tree, "dtype"):
        return f"{tree.dtype} of shape {tree.shape[1:]}"
    return f"{type(tree).__name__} of {list(entries('.', tree) or {})}"


def derived(name: str, tree: PyTree, bounds: Mapping[str, Bounds]) -> dict[str, Any]:
    """The space of arrays `[T, ...]`.

    Single integers are `Discrete`, up to the greatest that there is; flags `MultiBinary`; all else
    is a `Box`, as wide as the dtype.

    Args:
        name: of the tree.
        tree: the arrays, nested.
        bounds: those of single integers, by name.
    """
    inner = entries(name, tree)
    if inner is not None:
        found = {part: derived(f"{name}/{part}", entry, bounds) for part, entry in inner.items()}
        numbered = [f"_index_{number}" for number in range(len(found))]
        if found.keys() == set(numbered):  # a tuple, or what was one when it was read
            return {"type": "Tuple", "subspaces": [found[part] for part in numbered]}
        return {"type": "Dict", "subspaces": found}
    shape, dtype = tree.shape[1:], tree.dtype
    if dtype.kind == "b" and shape:
        return {"type": "MultiBinary", "n": shape[0] if len(shape) == 1 else list(shape)}
    if not shape and dtype.kind in "biu":
        least, greatest = bounds[name]
        start = min(least, 0)
        if greatest - start < _MOST:
            about = {"start": start, "n": greatest - start + 1}
            return {"type": "Discrete", "dtype": "int64", **about}
    ends = zip(("low", "high"), _range(dtype), strict=True)
    about = {side: np.full(shape, end, dtype).tolist() for side, end in ends}
    return {"type": "Box", "dtype": str(dtype), "shape": list(shape), **about}


def _range(dtype: np.dtype) -> tuple[float, float]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
