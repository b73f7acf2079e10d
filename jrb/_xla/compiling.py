"""Compiles functions of states, once for each description, and prepares their arguments.

Gradients neither enter nor leave a state: JAX could not differentiate the loops and conditionals
that work on it. Inside `jax.shard_map` a state may vary over a mesh axis over which an index or a
mask does not. JAX's operations convert such operands to one type, but branches and loop carries do
not, so all arguments are made to vary over the same axes first.

A function is compiled for one of two uses: inside a loop or a larger program, or as the program of
one method that Python calls. To wake a thread costs ten times as much in the second case
(see `jrb._xla.gather`).
"""

import collections
import contextvars
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax import lax

from jrb._util import pytree
from jrb._xla import compat

Axes = frozenset[Any]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class SerialLimits(NamedTuple):
    """The largest gather that one thread finishes before XLA could wake a second one.

    Attributes:
        nbytes: the most bytes of a gather from any array.
        rows: the most rows of a gather from an array that is too large for the caches.
    """

    nbytes: int
    rows: int


# To wake a thread takes 2 to 5 us in a loop, and 40 to 90 us in a separate call.
IN_A_LOOP = SerialLimits(nbytes=24 << 10, rows=64)
STANDALONE = SerialLimits(nbytes=48 << 10, rows=256)

_limits = contextvars.ContextVar("serial_limits", default=IN_A_LOOP)


def current_limits() -> SerialLimits:
    """Returns the limits of the function that is being traced."""
    # A `jax.jit` that is called for both uses needs them as a static argument: otherwise it would
    # keep those with which it was traced first.
    return _limits.get()


def with_limits(limits: SerialLimits, function: F) -> F:
    """Wraps a function so that these limits hold while it is traced."""

    @functools.wraps(function)
    def trace(*args: Any, **kwargs: Any) -> Any:
        before = _limits.set(limits)
        try:
            return function(*args, **kwargs)
        finally:
            _limits.reset(before)

    return cast(F, trace)


def standalone_program(function: F) -> F:
    """Wraps a function that is compiled as the program of one method."""
    return with_limits(STANDALONE, function)


def with_unified_arguments(function: F) -> F:
    """Wraps a function to `unify_arguments` first, and to let arrays of any ranks broadcast."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Users may forbid rank promotion for their own code.
        with jax.numpy_rank_promotion("allow"):
            args, kwargs = unify_arguments((args, kwargs))
            return function(*args, **kwargs)

    return cast(F, run)


def unify_arguments(arguments: Any) -> Any:
    """Stops gradients of the arrays in a pytree, and lets all vary over the same mesh axes."""
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    axes = frozenset()
    if manual_axes():
        # All axes of all arrays: JAX refuses branches and carries that mix types.
        axes = axes.union(*(varying_axes(jax.typeof(array)) for array in arrays))

    def unify(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return vary(lax.stop_gradient(leaf), axes) if axes else lax.stop_gradient(leaf)

    return jax.tree.map(unify, arguments)


def varying_axes(aval: Any) -> Axes:
    """Returns the mesh axes over which an array of this type varies, inside `jax.shard_map`."""
    # The attribute is `vma` in older versions of JAX, and `manual_axis_type` in newer ones.
    manual = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", None) or getattr(manual, "varying", None) or frozenset()


def vary(array: jax.Array, axes: Axes) -> jax.Array:
    """Returns the array, cast to a type that varies over these mesh axes too."""
    missing = tuple(axes - varying_axes(jax.typeof(array)))
    if not missing:
        return array
    return array if compat.CAST_TO_VARYING is None else compat.CAST_TO_VARYING(array, missing)


def manual_axes() -> Axes:
    """Returns the mesh axes of the enclosing `jax.shard_map`; an empty set outside of one."""
    if not compat.HAS_MESH_IN_TYPES:
        return frozenset()
    return frozenset(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


class _Results(dict):
    """Results of functions of one description, by function; see `kept_by_description`.

    Attributes:
        description: a copy of the description. No result refers to the user's object, whose end
            would otherwise not be noticed.
        is_derived: True if the description is itself a result for another one, with which it goes.
    """

    __slots__ = ("__weakref__", "description", "is_derived")

    def __init__(self, description: Any) -> None:
        super().__init__()
        self.description: Any = description
        self.is_derived: bool = False


# The most descriptions without an owner whose programs stay for a while: some 100 MB.
_MOST_RETAINED = 12
# Results live while a description that uses them lives, which has an entry in `_by_id`, and for a
# while longer in `_retained`. `_by_value` finds the results of equal descriptions.
_by_id: dict[int, tuple[weakref.ref, _Results]] = {}
_by_value: "weakref.WeakValueDictionary[Any, _Results]" = weakref.WeakValueDictionary()
_retained: collections.OrderedDict[int, _Results] = collections.OrderedDict()


def _results_of(description: Any) -> _Results:
    """Returns the results for all descriptions that equal this one."""
    # A look-up by `id` is quicker than one by value, which compares all fields. Another object may
    # have had this `id` before.
    entry = _by_id.get(id(description))
    if entry is not None and entry[0]() is description:
        return entry[1]
    results = _by_value.get(description)
    if results is None:
        # Copy all fields as they are, without another `__post_init__`.
        own = object.__new__(type(description))
        vars(own).update(vars(description))
        _by_value[own] = results = _Results(own)
    # The copy itself comes here from within a program that is being traced. An entry for it would
    # keep it alive for ever.
    if results.description is not description:
        reference = weakref.ref(description, functools.partial(_release, id(description)))
        _by_id[id(description)] = reference, results
    return results


def _release(key: int, _: weakref.ref) -> None:
    """Removes the entry of a description that has died, and retains its results for a while."""
    # At its end, the interpreter sets the globals of this module to None.
    entry = (_by_id or {}).pop(key, None)
    if entry is None or entry[1].is_derived:
        return
    results = entry[1]
    _retained[id(results)] = results
    _retained.move_to_end(id(results))
    while len(_retained) > _MOST_RETAINED:
        _retained.popitem(last=False)


def kept_by_description(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Caches the results of a function of a description for as long as an equal one lives.

    Compiled programs of descriptions that no longer exist would take some 10 MB each in a sweep
    over many. Those of the last few are kept, for loops that make an equal description in each
    step. The function gets a copy of the description.
    """

    @functools.wraps(function)
    def get_result(description: Any) -> T:
        results = _results_of(description)
        if function not in results:
            result: Any = function(results.description)
            results[function] = result
            # The results of a derived description go when those of this one go.
            if pytree.is_component(type(result)):
                _results_of(result).is_derived = True
        return results[function]

    return get_result


def per_description(
    *static: str, donated: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
    """Turns `function(description, *arrays)` into a function from a description to its program.

    A call of the compiled program inspects arrays only. If the description were a static argument,
    it would be compared field by field at every call, and never be freed.

    Args:
        static: the names of static arguments.
        donated: the names of donated arguments.
    """

    def decorate(function: Callable[..., Any]) -> Callable[[Any], Any]:
        @kept_by_description
        def programs(description: Any) -> Callable[[SerialLimits], Any]:
            # The limits are read while the function is traced, so each has a program of its own.
            return functools.cache(
                lambda limits: jax.jit(
                    functools.partial(
                        with_limits(limits, with_unified_arguments(function)), description
                    ),
                    static_argnames=static,
                    donate_argnames=donated,
                    # Inside a larger program, a separate function would have to be lowered,
                    # called, and inlined again by XLA.
                    inline=True,
                )
            )

        return lambda description: programs(description)(current_limits())

    return decorate


def by_description(*static: str, donated: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Compiles a function once for each description, its first argument (`per_description`)."""

    def decorate(function: F) -> F:
        program = per_description(*static, donated=donated)(function)

        @functools.wraps(function)
        def call_program(description: Any, *args: Any, **kwargs: Any) -> Any:
            return program(description)(*args, **kwargs)

        return cast(F, call_program)

    return decorate
