"""Functions of the host that jitted code calls, in the order of the program."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import io_callback


def refusing(told: Callable[[int], str]) -> Callable[[jax.Array], jax.Array]:
    """A function that returns its argument, and raises `TypeError` under `vmap`.

    Args:
        told: from how many there would be at once to what is said then.
    """

    @jax.custom_batching.custom_vmap
    def single(argument: jax.Array) -> jax.Array:
        return argument

    @single.def_vmap
    def _refuse(size: int, batched: Any, argument: jax.Array) -> Any:
        raise TypeError(told(size))

    return single


def call(
    function: Callable[..., Any], shapes: Any, single: Callable[[jax.Array], jax.Array], *args: Any
) -> Any:
    """A function of NumPy arrays, called from jitted code in the order of the program.

    Args:
        function: may not use JAX.
        shapes: of what it returns.
        single: what `refusing` gave.
        args: of the function.

    Raises:
        TypeError: under `vmap`.
    """
    return io_callback(function, shapes, *map(single, args), ordered=True)
