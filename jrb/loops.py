"""Compiled methods of a buffer that write in place, for loops in Python."""

import dis
import functools
import importlib
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jrb._core.lengths import Lengths
from jrb._core.methods import METHODS, Method
from jrb._core.validate import (
    accept_items,
    check_not_deleted,
    copy_array,
    copy_arrays,
    explain_jax_error,
    on_host,
    warn_of_refused,
)
from jrb._util import checks
from jrb._xla import compiling, random_bits
from jrb.buffer import ReplayBuffer
from jrb.mix import Description, Mix
from jrb.sharding import Sharded
from jrb.state import BufferState, Sample
from jrb.types.messages import PRNGKey


@overload
def jitted(buffer: Mix) -> "JittedMix": ...
@overload
def jitted(buffer: ReplayBuffer | Sharded) -> "Jitted": ...
def jitted(buffer: Description) -> "Jitted | JittedMix":
    """Returns the methods of a buffer, compiled and writing in place, for loops in Python.

    Outside `jit`, a method of a buffer that changes a state copies it. The methods returned here
    donate the state that they get: it is written in place, and the object that was passed must not
    be used again. **Continue with the state that is returned.** Samples stay valid.

    As inside `jit`, sampling from an empty buffer does not raise: `mask` is False and `weights` 0.
    Items with dtypes that JAX would change are errors, or converted if the buffer has `cast=True`.
    If the storage is on the host, only parts of each method are compiled: sampling from an empty
    buffer raises, and only arrays of the state that are on the device are donated.

    `sample` and `draw` also take an integer in place of a key, such as the number of the step:
    `methods.sample(state, 7)` returns what `jax.random.key(7)` gives, and the key is made inside
    the compiled call.

    An interrupt (Ctrl-C) waits until a method that changes a state has returned, as the state that
    was passed is gone. The assignment `state = methods.add(state, item)` may not happen any more:
    `methods.recover()` returns the newest state. Equal buffers share what is compiled, so if you
    use several states, give each its own `jrb.jitted(buffer)`.

    Args:
        buffer: a `ReplayBuffer`, a `Mix` or a `Sharded`.

    Returns:
        An object with the methods of the buffer, and `recover`.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(capacity=1000, batch_size=32)
        >>> methods = jrb.jitted(buffer)
        >>> state = methods.init({"x": jnp.zeros(3)})
        >>> for number in range(5):
        ...     state = methods.add(state, {"x": jnp.full(3, float(number))})
        >>> methods.sample(state, jax.random.key(0)).data["x"].shape
        (32, 3)
    """
    if not isinstance(buffer, ReplayBuffer | Mix | Sharded):
        raise TypeError(
            f"jitted: expected a ReplayBuffer or a Mix, or a Sharded, got {type(buffer).__name__}."
        )
    return JittedMix(buffer) if isinstance(buffer, Mix) else Jitted(buffer)


# How methods are compiled. The state is argument 0.


def _compile(
    method: Callable[..., Any], its: Method, static: tuple[int, ...], is_mix: bool
) -> Callable[..., Any]:
    """Compiles a method by what it reads and changes, for calls inside and outside `jit`."""
    if its.changes == "sampler" and not is_mix:
        return _compile_move(method, static, its.reads_items)
    donated = (0,) if its.changes else ()
    inside = jax.jit(method, donate_argnums=donated, static_argnums=static)
    if not (its.changes or its.reads_items):
        return inside
    # Inside another compiled function, it may be part of a loop: see `standalone_program`.
    outside = jax.jit(
        compiling.standalone_program(method), donate_argnums=donated, static_argnums=static
    )

    def call(states: Any, *args: Any) -> Any:
        first = states[0] if isinstance(states, (tuple, list)) and states else states
        is_inside = _is_traced(first) or (args and isinstance(args[0], jax.core.Tracer))
        return (inside if is_inside else outside)(states, *args)

    return call


def _compile_move(
    method: Callable[..., Any], static: tuple[int, ...], gathers: bool
) -> Callable[..., Any]:
    """Compiles a method that changes only the sampler's part of a state.

    Only this part is donated and returned, since each array that is returned adds a microsecond to
    a call. Inside another compiled function, where writes have to wait for reads, the method is
    called as it is.
    """

    # The sampler's state is an argument of its own: only whole arguments can be donated.
    def move_sampler(sampler: Any, others: BufferState, *args: Any) -> Any:
        result = method(others.replace(sampler=sampler), *args)
        state, *sample = result if isinstance(result, tuple) else (result,)
        return state.sampler, *sample

    numbers = tuple(number + 1 for number in static)
    function = compiling.standalone_program(move_sampler) if gathers else move_sampler
    compiled = jax.jit(function, donate_argnums=0, static_argnums=numbers)

    def call(state: BufferState, *args: Any) -> Any:
        if not isinstance(state, BufferState) or _is_traced(state):
            return method(state, *args)
        sampler, *sample = compiled(state.sampler, state.replace(sampler=None), *args)
        after = state.replace(sampler=sampler)
        return (after, *sample) if sample else after

    return call


def _is_traced(state: Any) -> bool:
    """Returns True if `state` is a buffer's state inside another compiled function."""
    return isinstance(getattr(state, "edits", None), jax.core.Tracer)


if TYPE_CHECKING:  # the methods, which are generated, have the signatures of the buffer's own

    class _BufferMethods(ReplayBuffer):
        """The signatures of methods that also take a seed as `key`."""

        def sample(
            self,
            state: BufferState,
            key: PRNGKey | int,
            batch_size: int | None = None,
            beta: jax.Array | float | None = None,
            context: Any = None,
        ) -> Sample:
            """Calls `ReplayBuffer.sample`."""
            ...

        def draw(
            self,
            state: BufferState,
            key: PRNGKey | int,
            batch_size: int | None = None,
            beta: jax.Array | float | None = None,
            context: Any = None,
        ) -> tuple[BufferState, Sample]:
            """Calls `ReplayBuffer.draw`."""
            ...

    _MixMethods = Mix
else:
    _BufferMethods = _MixMethods = object


class _Recoverable:
    """Finds the newest state that its methods returned, and holds it only after an interrupt."""

    def __init__(self, buffer: Description) -> None:
        self._newest: list[weakref.ref] = []  # the newest state, or the states of a mix
        held: dict[Any, Any] = {}  # the same, if it is held
        for name, method in _compiled_methods(buffer).items():
            if name in METHODS and METHODS[name].changes:
                method = _finish_despite_interrupts(name, method, self._newest, held)
            vars(self)[name] = method

    def recover(self) -> Any:
        """Returns the newest state of this object's methods, also if it was not assigned.

        An interrupt (Ctrl-C) of a method that changes a state is raised when the method has
        finished. The new state, or tuple of states of a mix, is then held until the next such call.
        Otherwise none is held: after an interrupt between two calls it is in your variable, or in
        one of an interrupted function, while the exception exists: in an `except` block, or the
        next cell of a notebook. Only the main thread counts, which gets all interrupts.

        Raises:
            ValueError: no method has returned a state, or nothing refers to it any more.
            DonatedError: the newest state was donated to a function of your own.
        """
        states = tuple([newest() for newest in self._newest])
        if not states or any(state is None or _is_traced(state) for state in states):
            raise ValueError(
                "recover: expected a state that a method returned and that is still referred to, "
                "found none: only that of an interrupted method is held. Load the last checkpoint."
            )
        check_not_deleted(states)
        return states if isinstance(self, JittedMix) else states[0]


class Jitted(_Recoverable, _BufferMethods):
    """The compiled methods of a buffer, with its arguments and results; made by `jitted`.

    Attributes:
        buffer: the buffer that the methods are from.
    """

    def __init__(self, buffer: ReplayBuffer | Sharded) -> None:
        super().__init__(buffer)
        self.buffer: Any = buffer


class JittedMix(_Recoverable, _MixMethods):
    """The compiled methods of a mix, with its arguments and results; made by `jitted`.

    Attributes:
        mix: the mix that the methods are from.
    """

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        self.mix: Mix = mix


# As `signal`, whose functions make enums: they take 4 us.
_signal: Any = importlib.import_module("_signal")
_CALL_FUNCTION_EX = dis.opmap["CALL_FUNCTION_EX"] if sys.version_info < (3, 12) else None
_STATIC = ("batch_size", "function", "n")  # the names of arguments that are no arrays


@compiling.kept_by_description
def _compiled_methods(buffer: Any) -> dict[str, Callable[..., Any]]:
    """Returns the methods of `Jitted` or `JittedMix`, which do not wait for interrupts yet."""
    is_mix = isinstance(buffer, Mix)
    parts = buffer.buffers if is_mix else (buffer,)
    is_on_host = any(on_host(it.buffer if isinstance(it, Sharded) else it) for it in parts)
    methods = {name: getattr(buffer, name) for name in _names_of(type(buffer))}
    if not is_mix:
        # `jit` does not take `...`, which means all slots: `_without_data` makes it None.
        methods["set"] = lambda state, where, values: buffer.set(
            state, ... if where is None else where, values
        )
    if is_on_host and isinstance(buffer, ReplayBuffer):
        # Host code around compiled parts, which can donate arrays of the state.
        methods["add"] = functools.partial(buffer._write, "add", donate=True)
        methods["extend"] = functools.partial(buffer._write, "extend", donate=True)
        methods["update_priority"] = functools.partial(buffer._update_priority, donate=True)
        methods["drop"] = functools.partial(buffer._drop, donate=True)
    compiled: dict[str, Callable[..., Any]] = {}
    for name, method in methods.items():
        parameters = list(inspect.signature(getattr(type(buffer), name)).parameters.values())[2:]
        static = tuple(1 + i for i, each in enumerate(parameters) if each.name in _STATIC)
        method = _accept_seeds(method) if any(each.name == "key" for each in parameters) else method
        if not is_on_host:
            method = _compile(method, METHODS[name], static, is_mix)
        run = explain_jax_error(method)
        if name == "extend" and not is_on_host:
            run = Lengths().wrap_extend(run)
        compiled[name] = _caller(buffer, name, run, parameters) if parameters else run
    for name in {"init", "nbytes", "take"} & set(dir(type(buffer))):
        compiled[name] = getattr(buffer, name)
    return compiled


def _caller(
    buffer: Any,
    name: str,
    run: Callable[..., Any],
    parameters: list[inspect.Parameter],
) -> Callable[..., Any]:
    """Returns a method that prepares its arguments for a compiled one, by position.

    Keyword arguments make a call of a jitted function a microsecond longer, as does a partial.
    """
    preparers: dict[str, Callable[[Any], Any]] = {
        "batch_size": _size,
        "key": lambda key: copy_array(random_bits.seed_or_key(key)),
        "sample": functools.partial(_without_data, name),
        "sample_or_indices": functools.partial(_without_data, name),
        "where": functools.partial(_without_data, name),
        "priorities": functools.partial(checks.given_numbers, f"{name}: priorities"),
    }
    if not isinstance(buffer, Mix):
        # Arrays of NumPy are copied, as the caller may change them; objects stay as they are.
        whole = buffer.buffer if isinstance(buffer, Sharded) else buffer
        of_objects, casts = whole.storage.of_objects, whole.cast
        accept = lambda items: items if of_objects else accept_items(items, name, casts)
        preparers |= {"item": accept, "items": accept, "values": accept}
    prepare = [preparers.get(each.name, copy_array) for each in parameters]
    names = [each.name for each in parameters]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    kind = JittedMix if isinstance(buffer, Mix) else Jitted
    has_priorities, title = "priorities" in names, f"{kind.__name__}.{name}()"
    # The defaults of missing arguments, by the number of arguments given.
    tails: dict[int, tuple[Any, ...]] = {len(names): ()}
    for count in reversed(range(len(names))):
        if names[count] in defaults:
            tails[count] = (defaults[names[count]], *tails[count + 1])

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) in tails:
            args += tails[len(args)]
        else:
            args = _by_position(title, names, defaults, args, kwargs)
        args = tuple([make(arg) for make, arg in zip(prepare, args, strict=True)])
        result = run(state, *args)
        # Looks for NaN while XLA computes: before the call, this would add 12 us.
        if has_priorities and isinstance(args[-1], np.ndarray):
            warn_of_refused(buffer, name, args[-1], args[0], depth=4)
        return result

    return call


def _finish_despite_interrupts(
    name: str, method: Callable[..., Any], newest: list[weakref.ref], held: dict[Any, Any]
) -> Callable[..., Any]:
    """Wraps a method that changes a state so that an interrupt (SIGINT) waits for its result.

    JAX handles signals when it makes the results of a program: an exception raised there drops
    them, after the arguments were donated. So the handler is exchanged during a call, and the
    original one is called at the end, when the result is in a local variable. From there on, Python
    handles signals only after calls of C, at backward jumps, and where functions start: the caller
    stores the result before. But in Python 3.11, C makes the call `add(*args)`: then the result is
    held until the donated state is dropped, where the caller's variable is assigned.
    """
    has_sample, ref = name == "draw", weakref.ref
    interrupt, get_handler, set_handler = _signal.SIGINT, _signal.getsignal, _signal.signal

    def note(result: Any) -> Any:
        """Makes the state of `result`, or the states of a mix, the newest, and returns it."""
        after = result[0] if has_sample else result
        newest[:] = map(ref, after) if isinstance(after, tuple) else (ref(after),)
        if held:
            held.clear()
        return after

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        handler = get_handler(interrupt)
        if not callable(handler):  # the system's default, an ignored signal, or a handler in C
            result = method(state, *args, **kwargs)
            if threading.current_thread() is threading.main_thread():
                note(result)
            return result
        is_over, is_interrupted, after = False, False, None

        def wait(number: int, frame: Any) -> None:
            nonlocal is_interrupted
            is_second, is_interrupted = is_interrupted, True
            # Compiling may take minutes; nothing is donated before it ends.
            arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
            if is_second and not is_over and not any(array.is_deleted() for array in arrays):
                handler(number, frame)

        try:
            set_handler(interrupt, wait)
        except ValueError:  # in another thread, which handles no signals
            return method(state, *args, **kwargs)
        try:
            try:
                result = method(state, *args, **kwargs)
                after = note(result)
                caller = sys._getframe(1)
                if caller.f_code.co_code[caller.f_lasti] == _CALL_FUNCTION_EX:
                    before = state[0] if isinstance(after, tuple) else state
                    held[ref(before, held.pop)] = after
            finally:
                is_over = True
                set_handler(interrupt, handler)
                if is_interrupted:
                    handler(interrupt, sys._getframe())
        except BaseException as error:
            if after is not None:
                held[None] = after
                error.add_note("The method had finished: its recover() returns the new state.")
            raise
        return result

    return call


def _by_position(
    title: str, names: list[str], defaults: dict[str, Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Returns all arguments of a call by position, or raises TypeError as Python would."""
    try:
        args += tuple(
            [kwargs.pop(it) if it in kwargs else defaults[it] for it in names[len(args) :]]
        )
    except KeyError as error:
        raise TypeError(f"{title} missing the argument {error}") from None
    if kwargs or len(args) > len(names):
        raise TypeError(f"{title} takes the arguments state, {', '.join(names)}.")
    return args


def _without_data(name: str, where: Any) -> Any:
    """Returns a sample without its items, to pass fewer arrays; or slots as int32, or a mask.

    Inside another compiled function, items stay: a later write has to wait for their reads.
    """
    is_sample = isinstance(where, Sample)
    if where is ... or isinstance(where.stamp if is_sample else where, jax.core.Tracer):
        return None if where is ... else where
    if not is_sample:
        slots = where if isinstance(where, jax.Array) else np.array(where)
        return slots if slots.dtype == np.bool_ else checks.indices(name, slots)
    where = where.replace(data=None)
    return copy_arrays(where) if isinstance(where.stamp, np.ndarray) else where


def _accept_seeds(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that also takes a seed, from which it makes the key inside `jit`.

    In a loop in Python, `jax.random.key` and `fold_in` take as long as sampling itself.
    """

    def call(state: Any, key: Any, *args: Any) -> Any:
        # A counter on the device is not made an int, which would wait for it.
        if getattr(key, "shape", None) == () and jnp.issubdtype(key.dtype, jnp.integer):
            key = jax.random.key(key.astype(jnp.uint32))
        return method(state, key, *args)

    return call


def _size(batch_size: Any) -> int | None:
    if batch_size is not None:
        checks.count("batch_size", batch_size)
    return batch_size if batch_size is None else int(batch_size)


def _names_of(source: type) -> list[str]:
    """Returns the names of the methods to compile: not `take`, which checks the slots' values."""
    return [name for name in METHODS if hasattr(source, name) and name != "take"]


def _generate(cls: type, source: type) -> None:
    """Adds to `cls` the methods of `source` with their signatures, for `help` and the docs."""
    for name in _names_of(source):

        def call(self: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            return vars(self)[name](*args, **kwargs)

        call.__doc__ = f"Calls `{source.__name__}.{name}`, compiled."
        call.__doc__ += " The state is donated." if METHODS[name].changes else ""
        call.__name__, call.__qualname__ = name, f"{cls.__name__}.{name}"
        vars(call)["__signature__"] = inspect.signature(getattr(source, name))
        setattr(cls, name, call)


_generate(Jitted, ReplayBuffer)
_generate(JittedMix, Mix)
