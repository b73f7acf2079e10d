"""Compilation of functions of states: with arguments that JAX admits, once for each description.

A state is data: no derivative goes into it or comes out. The loops and conditionals that work on it
have none that JAX could form. Inside `jax.shard_map` a state may vary over an axis of the mesh over
which an index or a mask does not; operations of JAX bring their operands to one type, branches and
carries of loops do not.

A function is compiled for one of two uses: as part of a loop or a larger program, or as the program
of one verb that Python calls. To wake a thread costs ten times as much in the second
(see `jrb._xla.gather`).
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax import lax

from jrb._xla import compat

Axes = frozenset[Any]

F = TypeVar("F", bound=Callable[..., Any])


class SerialLimits(NamedTuple):
    """The largest gather that one thread finishes before XLA could wake a second one.

    Attributes:
        nbytes: of any array.
        rows: of an array that is in no cache.
    """

    nbytes: int
    rows: int


IN_A_LOOP = SerialLimits(nbytes=24 << 10, rows=64)
STANDALONE = SerialLimits(nbytes=48 << 10, rows=256)

_limits = contextvars.ContextVar("serial_limits", default=IN_A_LOOP)


def current_limits() -> SerialLimits:
    """Returns the limits of the function that is being traced."""
    # A `jax.jit` that is called for both uses needs them as a static argument: it would go on with
    # whichever it traced first.
    return _limits.get()


def traced_with(limits: SerialLimits, function: F) -> F:
    """Wraps a function so that these limits hold while it is traced."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        before = _limits.set(limits)
        try:
            return function(*args, **kwargs)
        finally:
            _limits.reset(before)

    return cast(F, traced)


def standalone_program(function: F) -> F:
    """Wraps a function that is compiled as the program of one verb."""
    return traced_with(STANDALONE, function)


def entry(function: F) -> F:
    """Wraps a function so that its arguments are admitted, and ranks broadcast in any case."""

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):  # users may forbid it for their own code
            args, kwargs = admitted((args, kwargs))
            return function(*args, **kwargs)

    return cast(F, entered)


def admitted(arguments: Any) -> Any:
    """Makes the arrays of a pytree constant under differentiation, and of one set of mesh axes."""
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    axes = frozenset()
    if in_shard_map():
        # All of them: a branch or a carry that mixes two would be refused.
        axes = axes.union(*(varying_axes(jax.typeof(array)) for array in arrays))

    def admit(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return vary(lax.stop_gradient(leaf), axes) if axes else lax.stop_gradient(leaf)

    return jax.tree.map(admit, arguments)


def varying_axes(aval: Any) -> Axes:
    """Returns the mesh axes over which an array of this type varies, inside `jax.shard_map`."""
    manual = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", None) or getattr(manual, "varying", None) or frozenset()


def vary(array: jax.Array, axes: Axes) -> jax.Array:
    """Returns an array of a type that varies over these axes too."""
    missing = tuple(axes - varying_axes(jax.typeof(array)))
    if not missing:
        return array
    return array if compat.CAST_TO_VARYING is None else compat.CAST_TO_VARYING(array, missing)


def in_shard_map() -> bool:
    return bool(manual_axes())


def manual_axes() -> Axes:
    """Returns the mesh axes that belong to the `jax.shard_map` around this, if there is one."""
    if not compat.HAS_MESH_IN_TYPES:
        return frozenset()
    return frozenset(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def per_description(
    *static: str, donated: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
    """Turns a function of a description and arrays into one that returns its compiled program.

    A call of the program looks at arrays alone. As an argument of one program for all, the
    description would be compared field by field at every call.

    Args:
        static: the names of arguments that are no arrays.
        donated: the names of arguments that are donated.
    """

    def decorated(function: Callable[..., Any]) -> Callable[[Any], Any]:
        @functools.lru_cache(maxsize=1024)
        def compiled(description: Any, limits: SerialLimits) -> Any:
            return jax.jit(
                functools.partial(traced_with(limits, entry(function)), description),
                static_argnames=static,
                donate_argnames=donated,
                # As a function of its own inside a larger program, it would have to be lowered,
                # called and inlined again by XLA.
                inline=True,
            )

        return lambda description: compiled(description, current_limits())

    return decorated


def by_description(*static: str, donated: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Compiles a function once for each description, its first argument (`per_description`)."""

    def decorated(function: F) -> F:
        program = per_description(*static, donated=donated)(function)

        @functools.wraps(function)
        def called(description: Any, *args: Any, **kwargs: Any) -> Any:
            return program(description)(*args, **kwargs)

        return cast(F, called)

    return decorated
