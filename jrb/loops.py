"""Compiled verbs for Python loops, which write in place."""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import jax
import jax.core
import numpy as np

from jrb._core.host_proxy import on_host
from jrb._core.validate import explained, warn_of_refused
from jrb._util import casting, checks
from jrb._util.casting import copy_array as copy
from jrb._util.casting import copy_arrays as copied
from jrb._xla import compiling
from jrb.buffer import ReplayBuffer
from jrb.mix import Description, Mix
from jrb.sharding import Sharded
from jrb.state import BufferState, Sample
from jrb.types import Item


@overload
def jitted(buffer: Mix) -> "JittedMix": ...
@overload
def jitted(buffer: ReplayBuffer | Sharded) -> "Jitted": ...
@functools.lru_cache(maxsize=64)
def jitted(buffer: Description) -> "Jitted | JittedMix":
    """Returns the verbs of a buffer, each compiled, in place: for loops in Python.

    Outside `jit`, a verb that changes a state copies it. These donate the state that they are
    given: it is written in place, and the object that was passed may not be used again. **Go on
    with the state that comes back.** What was drawn stays valid.

    As inside `jit`, a draw from an empty buffer does not raise: `mask` is False and `weights` 0.
    Items with dtypes that JAX would change are handled as everywhere else: an error, or converted
    where the buffer has `cast=True`. Storages on the host work between jitted parts in any case,
    and their draws raise as outside `jit`; what of a state is on the device is donated there too.

    Args:
        buffer: a `ReplayBuffer`, a `Mix` or a `Sharded`.

    Returns:
        An object with the verbs of the buffer.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=1000, batch_size=32)
        >>> verbs = jrb.jitted(buffer)
        >>> state = verbs.init({"x": jnp.zeros(3)})
        >>> for number in range(5):
        ...     state = verbs.add(state, {"x": jnp.full(3, float(number))})
        >>> verbs.sample(state, jax.random.key(0)).data["x"].shape
        (32, 3)
    """
    if isinstance(buffer, Mix):
        return JittedMix(buffer)
    if not isinstance(buffer, ReplayBuffer | Sharded):
        raise TypeError(
            f"jitted: expected a ReplayBuffer or a Mix, or a Sharded, got {type(buffer).__name__}."
        )
    return Jitted(buffer)


def _writes(verb: Callable[..., Any], static: tuple[int, ...]) -> Callable[..., Any]:
    """Compiles a verb that writes items; the state is donated."""
    # Inside another compiled function, the verb may be part of a loop: see `gather.by_itself`.
    inside = jax.jit(verb, donate_argnums=0, static_argnums=static)
    outside = jax.jit(compiling.standalone_program(verb), donate_argnums=0, static_argnums=static)

    def called(state: Any, *args: Any) -> Any:
        return (inside if _is_traced(state) else outside)(state, *args)

    return called


def _reads(verb: Callable[..., Any], static: tuple[int, ...]) -> Callable[..., Any]:
    """Compiles a verb that reads some numbers of a state."""
    return jax.jit(verb, static_argnums=static)


def _draws(verb: Callable[..., Any], static: tuple[int, ...]) -> Callable[..., Any]:
    """Compiles a verb that reads items, and leaves the state as it is."""
    inside = jax.jit(verb, static_argnums=static)
    outside = jax.jit(compiling.standalone_program(verb), static_argnums=static)

    def called(states: Any, key: jax.Array, *args: Any) -> Any:
        first = states[0] if isinstance(states, (tuple, list)) and states else states
        is_inside = _is_traced(first) or isinstance(key, jax.core.Tracer)
        return (inside if is_inside else outside)(states, key, *args)

    return called


def _moves(
    verb: Callable[..., Any], static: tuple[int, ...], by_itself: bool = False
) -> Callable[..., Any]:
    """Compiles a verb that changes nothing in a state but what its sampler remembers.

    Only that is donated and returned, as each array that comes back makes a call a microsecond
    longer. Inside another compiled function, where writes have to wait for what was read, the verb
    is called as it is.
    """

    def moved(sampler: Any, rest: BufferState, *args: Any) -> Any:
        after = verb(rest.replace(sampler=sampler), *args)
        state, *sample = after if isinstance(after, tuple) else (after,)
        return state.sampler, *sample

    numbers = tuple(number + 1 for number in static)
    function = compiling.standalone_program(moved) if by_itself else moved
    compiled = jax.jit(function, donate_argnums=0, static_argnums=numbers)

    def called(state: BufferState, *args: Any) -> Any:
        if not isinstance(state, BufferState) or _is_traced(state):
            return verb(state, *args)
        sampler, *sample = compiled(state.sampler, state.replace(sampler=None), *args)
        after = state.replace(sampler=sampler)
        return (after, *sample) if sample else after

    return called


_moves_and_reads = functools.partial(_moves, by_itself=True)


def _is_traced(state: Any) -> bool:
    """Returns if a state is one of another compiled function; False for what is no state."""
    return isinstance(getattr(state, "edits", None), jax.core.Tracer)


def _set(buffer: ReplayBuffer | Sharded) -> Callable[..., Any]:
    """Returns `set`, for which None stands for `...`, which `jit` does not take."""
    return lambda state, where, values: buffer.set(state, ... if where is None else where, values)


def _drawn(self: Any, key: jax.Array, batch_size: Any = None, beta: Any = None) -> tuple:
    return copy(key), _count(batch_size), copy(beta)


def _drawn_of_mix(
    self: Any, key: jax.Array, batch_size: Any = None, beta: Any = None, proportions: Any = None
) -> tuple:
    return copy(key), _count(batch_size), copy(beta), copy(proportions)


def _updated(self: Any, sample_or_indices: Any, priorities: Any) -> tuple:
    which = _without_data("update_priority", sample_or_indices)
    return which, _numbers("update_priority", priorities)


def _written(verb: str) -> Callable[..., tuple]:
    return lambda self, item, mask=None, priorities=None: (
        self._accepted(item, verb),
        copy(mask),
        _numbers(verb, priorities),
    )


class _Verb(NamedTuple):
    """How a verb is compiled.

    Attributes:
        compile: one of the functions above.
        static: the numbers of arguments that are no arrays; the state is number 0.
        prepare: makes arguments as `jit` takes them, by position: names take a microsecond more at
            every call.
        has_priorities: whether the last argument is priorities.
        donates: whether the buffer's own verb has an argument `donate`.
    """

    compile: Callable[..., Any]
    static: tuple[int, ...] = ()
    prepare: Callable[..., tuple] = lambda self: ()
    has_priorities: bool = False
    donates: bool = False


_VERBS = {
    "add": _Verb(_writes, (), _written("add"), True, True),
    "extend": _Verb(_writes, (), _written("extend"), True, True),
    "sample": _Verb(_draws, (2,), _drawn),
    "draw": _Verb(_moves_and_reads, (2,), _drawn),
    "update_priority": _Verb(_moves, (), _updated, True, True),
    "set_alpha": _Verb(_moves, (), lambda self, alpha: (copy(alpha),)),
    "set": _Verb(
        _writes,
        (),
        lambda self, where, values: (
            None if where is ... else _without_data("set", where),
            self._accepted(values, "set"),
        ),
    ),
    "map": _Verb(_writes, (1, 2), lambda self, function, batch_size=1024: (function, batch_size)),
    "drop": _Verb(_moves, (), lambda self, where: (_without_data("drop", where),), donates=True),
    "truncate": _Verb(_writes, (), lambda self, mask=None: (copy(mask),)),
    "empty": _Verb(_writes),
    "size": _Verb(_reads),
    "in_order": _Verb(_reads),
    "newest": _Verb(_reads, (1,), lambda self, n: (n,)),
    "priorities": _Verb(_reads, (), lambda self, slots=None: (copy(slots),)),
    "can_add": _Verb(_reads),
    "can_sample": _Verb(_reads, (1,), lambda self, batch_size=None: (batch_size,)),
}
_VERBS_OF_MIX = {
    "sample": _Verb(_draws, (2,), _drawn_of_mix),
    "draw": _Verb(_writes, (2,), _drawn_of_mix),
    "update_priority": _Verb(_writes, (), _updated, True),
    "size": _Verb(_reads),
    "can_sample": _Verb(_reads),
}


def _bind(self: Any, buffer: Any, verbs: dict[str, _Verb], is_on_host: bool) -> None:
    """Puts the compiled verbs of a buffer in the place of the methods of a class."""
    for name, verb in verbs.items():
        run = _set(buffer) if name == "set" else getattr(buffer, name)
        if not is_on_host:
            run = verb.compile(run, verb.static)
        elif verb.donates and isinstance(buffer, ReplayBuffer):
            # The verb is host code around compiled parts, which can donate arrays of the state.
            run = functools.partial(getattr(buffer, f"_{name}"), donate=True)
        vars(self)[name] = _prepared(self, buffer, name, verb, explained(run))


def _prepared(
    self: Any, buffer: Any, name: str, verb: _Verb, run: Callable[..., Any]
) -> Callable[..., Any]:
    # A copy with the name of the verb, which Python puts into errors about missing arguments.
    code: Any = verb.prepare
    own = FunctionType(code.__code__, globals(), name, code.__defaults__, code.__closure__)
    own.__qualname__ = f"{type(self).__name__}.{name}"
    prepare = MethodType(own, self)  # a partial takes longer to call
    if not verb.has_priorities:
        return lambda state, *args, **kwargs: run(state, *prepare(*args, **kwargs))

    def called(state: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = prepare(*args, **kwargs)
        after = run(state, *arguments)
        # XLA computes meanwhile. Before the call, to look for NaN would make it 12 us longer.
        if isinstance(arguments[-1], np.ndarray):
            warn_of_refused(buffer, name, arguments[-1], depth=3)
        return after

    return called


def _generate(cls: type, source: type, verbs: dict[str, _Verb]) -> None:
    """Gives a class the verbs of another one, with their signatures, for `help` and the docs."""
    for name, verb in verbs.items():
        method = getattr(source, name)

        def called(self: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            return vars(self)[name](*args, **kwargs)

        donates = verb.compile not in (_reads, _draws)
        called.__doc__ = f"Calls `{source.__name__}.{name}`, compiled."
        called.__doc__ += " The state is donated." if donates else ""
        called.__name__, called.__qualname__ = name, f"{cls.__name__}.{name}"
        vars(called)["__signature__"] = inspect.signature(method)
        setattr(cls, name, called)


if TYPE_CHECKING:  # the verbs, which are generated, have the signatures of the buffer's own
    _Verbs, _MixVerbs = ReplayBuffer, Mix
else:
    _Verbs = _MixVerbs = object


class Jitted(_Verbs):
    """Compiled verbs of a buffer; made by `jitted`. They take and return what its own do.

    Attributes:
        buffer: whose verbs they are.
    """

    def __init__(self, buffer: ReplayBuffer | Sharded) -> None:
        self.buffer = buffer
        one = buffer.buffer if isinstance(buffer, Sharded) else buffer
        self._casts, self._of_objects = one.cast, one.storage.of_objects
        _bind(self, buffer, _VERBS, on_host(one))
        vars(self).update(init=buffer.init, nbytes=buffer.nbytes, take=buffer.take)

    def _accepted(self, items: Item, verb: str) -> Item:
        """Returns items that neither `jit` nor anybody else will change; objects as they are."""
        return items if self._of_objects else casting.accepted(items, verb, self._casts)


class JittedMix(_MixVerbs):
    """Compiled verbs of a mix; made by `jitted`. They take and return what its own do.

    Attributes:
        mix: whose verbs they are.
    """

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        parts = [part.buffer if isinstance(part, Sharded) else part for part in mix.buffers]
        _bind(self, mix, _VERBS_OF_MIX, any(map(on_host, parts)))
        vars(self).update(init=mix.init, nbytes=mix.nbytes)


_generate(Jitted, ReplayBuffer, _VERBS)
_generate(JittedMix, Mix, _VERBS_OF_MIX)


def _without_data(verb: str, where: Sample | jax.Array) -> Any:
    """Returns a sample without its items: fewer arrays to hand over. Or slots, as int32.

    Inside another compiled function it has them: a write that follows has to wait for their reads.
    """
    if isinstance(where, jax.core.Tracer):
        return where
    if not isinstance(where, Sample):
        return checks.indices(verb, where)
    if isinstance(where.stamp, jax.core.Tracer):
        return where
    where = where.replace(data=None)
    return copied(where) if isinstance(where.stamp, np.ndarray) else where


def _numbers(verb: str, priorities: Any) -> Any:
    """Returns priorities as `jit` takes them, which changes some numbers that NumPy has."""
    return checks.given_numbers(f"{verb}: priorities", priorities)


def _count(batch_size: Any) -> int | None:
    """Returns B as `jit` takes it."""
    if batch_size is None:
        return None
    checks.count("batch_size", batch_size)
    return int(batch_size)
