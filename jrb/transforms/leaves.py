"""Finding the leaves that a transform is for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrb._util import pytree
from jrb._util.pytree import DType
from jrb.keys import Keys, Path, find, lookup, path_name, within
from jrb.types import Item

Paths = tuple[Path, ...]


def check_paths(name: str, paths: Any) -> None:
    """Raises unless `paths` is a tuple of paths, or None."""
    if paths is not None and (isinstance(paths, str) or not isinstance(paths, tuple)):
        raise TypeError(f"{name}: paths: expected a tuple of paths, got {paths!r}. Write (path,).")


def dtype_name(name: str, dtype: DType) -> str:
    """The name of a dtype that JAX keeps; raises for others."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name}: dtype: expected the name of one, got {dtype!r}.") from None
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise TypeError(
            f"{name}: dtype: expected one that JAX keeps, got {found}. Set jax_enable_x64."
        )
    return found.name


def observations(data: Item, keys: Keys) -> Paths:
    """The paths of the observation and the next observation, those of them that there are."""
    paths = (keys.observation, keys.next_observation)
    found = tuple(path for path in paths if path is not None and lookup(data, path) is not None)
    return found or (keys.observation,)  # which is then missed


def rewritten(
    data: Item, paths: Paths, what: str, change: Callable[[str, jax.Array], jax.Array]
) -> Any:
    """The data with every leaf at or below one of the paths changed.

    Args:
        data: a pytree.
        paths: each must lead somewhere.
        what: who asks, for the error's first words.
        change: from the name of a leaf and the leaf to the new leaf.

    Raises:
        ValueError: nothing lies at a path.
    """
    for path in paths:
        find(data, path, what)
    names = [path_name(path) for path in paths]

    def visit(path: tuple, leaf: jax.Array) -> jax.Array:
        name = pytree.leaf_name(path)
        return change(name, leaf) if any(within(name, prefix) for prefix in names) else leaf

    return jax.tree_util.tree_map_with_path(visit, data)
