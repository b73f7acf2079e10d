"""What the arguments of a verb are made before anything is done with them, the same for all verbs.

A state is data. No derivative goes into it or comes out of it: the loops and conditionals that work
on it have none that JAX could form, and what an optimizer would make of one means nothing.

Inside `jax.shard_map`, a state may vary over an axis of the mesh over which an index or a mask does
not. Operations of JAX bring their operands to one type; branches and carries of loops do not.
"""

from typing import TypeVar

import jax
from jax import lax

from jrb._base import versions

T = TypeVar("T")


def admitted(arguments: T) -> T:
    """The same arguments, constant under differentiation, and varying over the same mesh axes.

    Args:
        arguments: a pytree; what is no array of JAX stays as it is.
    """
    leaves, structure = jax.tree.flatten(arguments)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    stop = lambda leaf, is_one: lax.stop_gradient(leaf) if is_one else leaf
    leaves = list(map(stop, leaves, is_array))
    if versions.in_shard_map():
        arrays = [leaf for leaf, is_one in zip(leaves, is_array, strict=True) if is_one]
        axes = frozenset().union(*(versions.varying_axes(jax.typeof(leaf)) for leaf in arrays))
        vary = lambda leaf, is_one: versions.vary(leaf, axes) if is_one else leaf
        leaves = list(map(vary, leaves, is_array))
    return jax.tree.unflatten(structure, leaves)
