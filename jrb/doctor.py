"""Finds what makes a training step slow: copies of the buffer, retracing, missing donation.

The step is compiled unchanged, and its jaxpr is searched for copies (`jrb.jaxpr_search`). A copy is
reported only if the compiled program allocates memory for it.
"""

import dataclasses
import inspect
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import debugging, eager
from jrb._util.pytree import SpecKey
from jrb._util.wording import bytes_text
from jrb.jaxpr_search import CopySearch, Finding, large_constants, without_ones
from jrb.state import BufferState
from jrb.types.messages import DrawInputs

_CALLS = 5
"""The number of calls that are timed, after a first one."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings about a training step; printed, it is a text.

    Attributes:
        findings: the problems; empty if there are none.
        copied: the bytes of temporaries, and of results outside the arguments' memory, with all
            states donated.
        traces: how often the step is traced in three calls, each with the state of the one before;
            more than 1 means that it is compiled again.
        seconds: the median time of a call, with all states donated.
        parts: of each method in the step: its name, how often it is called, and the median time
            of one call that is compiled alone.
    """

    findings: tuple[Finding, ...]
    copied: int
    traces: int
    seconds: float
    parts: tuple[tuple[str, int, float], ...]

    def __str__(self) -> str:
        parts = ", ".join(
            f"{method} {seconds * 1e6:,.0f} us" + (f" x {count}" if count > 1 else "")
            for method, count, seconds in self.parts
        )
        lines = [
            f"A call takes {self.seconds * 1e6:,.0f} us" + (f" ({parts} alone)." if parts else "."),
            f"It is traced {self.traces} time{'s' * (self.traces != 1)} in three calls, and uses "
            f"{bytes_text(self.copied)} beside its arguments.",
            *(f"- {finding}" for finding in self.findings),
        ]
        return "\n".join(lines if self.findings else [*lines, "Nothing is wrong."])


def doctor(step: Callable[..., Any], *args: Any) -> Report:
    """Finds what makes a training step slow, and where.

    It compiles the step twice and runs it about ten times, on copies of the arguments. Storages on
    the host are not copied: these runs write to them. The state should be much larger than a
    batch.

    Args:
        step: a function, compiled or not; its results may be anything, the new state among them.
        args: its arguments. At least one contains a `BufferState`, or the step closes over one.

    Returns:
        A report: print it, or look at `findings`.

    Example:
        >>> import jax, jax.numpy as jnp, jrb
        >>> buffer = jrb.ReplayBuffer(10_000, batch_size=32)
        >>> state = buffer.init({"x": jnp.zeros(16)})
        >>> def step(state, item, key):
        ...     batch = buffer.sample(state, key)
        ...     return buffer.add(state, item), batch.data["x"].sum()
        >>> report = jrb.testing.doctor(step, state, {"x": jnp.ones(16)}, jax.random.key(0))
        >>> [finding.mend for finding in report.findings][0]
        'Use draw, and write to the state that it returns'
    """
    is_dynamic = [
        any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(a)) for a in args
    ]
    # Other arguments, such as descriptions, are closed over: `jit` would refuse them.
    dynamic = [index for index, has_arrays in enumerate(is_dynamic) if has_arrays]

    def call(*arrays: Any) -> Any:
        whole = list(args)
        for index, array in zip(dynamic, arrays, strict=True):
            whole[index] = array
        return step(*whole)

    # Compile the step with all states donated, and run it.
    arrays = [args[index] for index in dynamic]
    with_state = tuple(n for n, one in enumerate(arrays) if states_in(one))
    names, labels = _label_leaves(step, args, dynamic)
    compiled = jax.jit(call, donate_argnums=with_state)
    # The program is searched before XLA has optimized it, as only then operations have lines.
    closed, result = jax.make_jaxpr(call, return_shape=True)(*arrays)
    # A state that is only read cannot be donated, of which JAX warns.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        memory: Any = compiled.lower(*arrays).compile().memory_analysis()
        traces, seconds = _time_step(compiled, arrays, with_state)
    copied = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # Search the program for copies; report those for which the compiled program has memory.
    copies: dict[tuple[str, str], tuple[int, Finding, bool]] = {}
    CopySearch(_large_shapes(arrays), copies).program(closed.jaxpr, labels)
    findings = [
        *_find_undonated(step, args, names, result),
        *{(one.where, one.mend): one for one in large_constants(closed)}.values(),
        *(one for nbytes, one, is_certain in copies.values() if is_certain or nbytes <= copied),
    ]
    return Report(tuple(findings), copied, traces, seconds, _time_parts(step, args))


def states_in(tree: Any) -> list[BufferState]:
    """Returns all states in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda one: isinstance(one, BufferState))
    return [leaf for leaf in leaves if isinstance(leaf, BufferState)]


def _label_leaves(step: Any, args: tuple, dynamic: list[int]) -> tuple[list[str], list[str]]:
    """Returns the names of all arguments, and those of all leaves of the `dynamic` ones."""
    try:
        parameters = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        parameters = []
    names = [parameters[n] if n < len(parameters) else f"argument {n}" for n in range(len(args))]
    labels = [
        f"{names[index]}{jax.tree_util.keystr(path)}"
        for index in dynamic
        for path, _ in jax.tree_util.tree_flatten_with_path(args[index])[0]
    ]
    return names, labels


def _large_shapes(arrays: Any) -> set[tuple[int, ...]]:
    """Returns the shapes of the large arrays of states; for a stack, also those of one state."""
    shapes = set()
    for state in states_in(arrays):
        for leaf in jax.tree.leaves(state):
            for axes in range(state.edits.ndim + 1):
                # Large is an array with an entry for every second slot, or more: to copy others
                # costs nothing.
                if state.ring is None or leaf.size >= state.ring.capacity // 2:
                    shapes.add(without_ones(leaf.shape[axes:]))
    return shapes - {()}


def _find_undonated(step: Any, args: tuple, names: list[str], result: Any) -> Iterator[Finding]:
    """Finds arguments with a state of which a compiled step returns a new one without donation."""
    if not states_in(result) or not hasattr(step, "lower"):
        return
    # Look at the step as the user has compiled it: `doctor` itself donates all states.
    infos = step.lower(*args).args_info[0]
    for name, argument, info in zip(names, args, infos, strict=False):
        donated = [leaf.donated for leaf in jax.tree.leaves(info)]
        if states_in(argument) and not all(donated):
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(states_in(argument)))
            code = getattr(inspect.unwrap(step), "__code__", None)
            yield Finding(
                f"{name}: is not donated, so every call copies {bytes_text(nbytes)}",
                "" if code is None else f"{code.co_filename}:{code.co_firstlineno}",
                f'Compile it by jax.jit(step, donate_argnames="{name}")',
            )


def _time_step(compiled: Any, arrays: list[Any], with_state: tuple[int, ...]) -> tuple[int, float]:
    """Returns how often a step is traced if each call gets the last state, and the median time."""
    seconds: list[float] = []
    results: list[Any] = []
    for _ in range(_CALLS + 1):
        unused, arguments = list(results), list(arrays)
        for index in with_state:
            # Pass on the state that the last call returned, recognised by its structure and shapes;
            # each result is used once.
            new = [one for one in unused if _shapes_of(one) == _shapes_of(arrays[index])]
            arguments[index] = new[0] if new else jax.tree.map(jnp.copy, arrays[index])
            unused = [one for one in unused if not new or one is not new[0]]
        begin = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
        results = [result, *(result if type(result) in (tuple, list) else ())]
    return compiled._cache_size(), statistics.median(seconds[1:])


def _shapes_of(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", None) for leaf in leaves]


def _time_parts(step: Any, args: tuple) -> tuple[tuple[str, int, float], ...]:
    """Returns the methods that a step calls, how often, and the time of each one alone."""
    calls: dict[Any, int] = {}

    def note_call(method: str, buffer: Any, state: Any, arguments: dict, result: Any) -> None:
        size = result[1].indices.shape[0] if method == "sample" else None
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, arguments))
        # Storages on the host are left out: timing a method would write to them.
        if not buffer.storage.is_on_host:
            call = method, buffer, size, SpecKey(specs)
            calls[call] = calls.get(call, 0) + 1

    # Trace the step under an observer; a compiled one is not traced again for known arguments.
    untraced = step.__wrapped__ if hasattr(step, "lower") else step
    debugging.OBSERVERS.append(note_call)
    try:
        jax.eval_shape(lambda: untraced(*args))
    finally:
        debugging.OBSERVERS.remove(note_call)
    return tuple((call[0], count, _time_alone(*call)) for call, count in calls.items())


def _time_alone(method: str, buffer: Any, size: int | None, specs: SpecKey) -> float:
    """Returns the median time of a method that is compiled alone, with zeros as arguments."""

    def run(state: Any, arguments: Any) -> Any:
        if method == "sample":
            return eager.draw(buffer, state, arguments["key"], size or 0, DrawInputs())
        if method == "add":
            return eager.write(buffer, state, arguments["items"], None)
        return eager.update(buffer, state, arguments["which"], arguments["priorities"])

    def make(spec: Any) -> jax.Array:
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), spec.shape)
        return jnp.zeros(spec.shape, spec.dtype)

    state, arguments = jax.tree.map(make, specs.spec)
    compiled, seconds = jax.jit(run, donate_argnums=0), []
    for _ in range(_CALLS + 1):
        begin = time.perf_counter()
        result = jax.block_until_ready(compiled(state, arguments))
        seconds.append(time.perf_counter() - begin)
        state = result[0] if method == "sample" else result
    return statistics.median(seconds[1:])
