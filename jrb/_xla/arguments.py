"""Entries of the engine: what holds for the arguments of every verb, in one place.

A state is data: no derivative goes into it or comes out. The loops and conditionals that work on it
have none that JAX could form.

Inside `jax.shard_map`, a state may vary over an axis of the mesh over which an index or a mask does
not. Operations of JAX bring their operands to one type; branches and carries of loops do not.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax import lax

from jrb._xla import compat

F = TypeVar("F", bound=Callable[..., Any])


def entry(function: F) -> F:
    """The same function, with admitted arguments; it may broadcast ranks whatever users forbid."""

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            args, kwargs = admitted((args, kwargs))
            return function(*args, **kwargs)

    return cast(F, entered)


def admitted(arguments: Any) -> Any:
    """The same arguments, constant under differentiation, and varying over the same mesh axes.

    Args:
        arguments: a pytree; what is no array of JAX stays as it is.
    """
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    axes = frozenset()
    if compat.in_shard_map():
        axes = axes.union(*(compat.varying_axes(jax.typeof(array)) for array in arrays))

    def admit(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return compat.vary(lax.stop_gradient(leaf), axes) if axes else lax.stop_gradient(leaf)

    return jax.tree.map(admit, arguments)
