"""Finds what makes a training step slow: copies of the buffer, retracing, missing donation.

A step is compiled as it is, and its jaxpr is searched. A large array of a state that is written
(`scatter`, `dynamic_update_slice`, the carry of a loop) stays where it is only if every other
operation that reads it comes before, by its data. Whatever makes another array of that size is a
copy too. What is found is told only if the compiled program has memory for it.
"""

import dataclasses
import inspect
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrb._core import debugging, eager
from jrb._core.host_proxy import HostStorageProxy
from jrb._util.pytree import SpecKey
from jrb._util.wording import bytes_text
from jrb.state import BufferState
from jrb.types import HostStorage

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FOLDERS = (os.path.dirname(os.path.abspath(file)) for file in (jax.__file__, dataclasses.__file__))
_OTHERS = *(folder + os.sep for folder in _FOLDERS), "<string>", "<frozen"
_SAME_MEMORY = {"reshape", "squeeze", "expand_dims", "stop_gradient", "pvary", "pcast"}
_ORDER = "Use draw, and write to the state that it returns"
_MENDS = {
    "select_n": "Under vmap lax.cond computes both states and chooses: pass mask= to add instead",
    "slice": "Do not index a stack of states: use vmap over it, or keep the states apart",
}
_CALLS = 5  # that are timed, after the first
_MANY_BYTES = 100_000  # of a constant in a program


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that makes a step slow.

    Attributes:
        problem: what is wrong, with the argument and the size.
        where: the line of the program, "file:line"; "" if it is none in particular.
        mend: what to do.
    """

    problem: str
    where: str
    mend: str

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.problem}. {self.mend}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found out about a step; printed, it is a text.

    Attributes:
        findings: what is wrong; empty if nothing is.
        copied: bytes of temporaries and of results that lie elsewhere than the arguments, with all
            states donated.
        traces: how often the step is traced in three calls, each with the state of the one before;
            1 is right.
        seconds: the median time of a call, with all states donated.
        parts: of each verb in the step: its name, how often it is called, and the median time of
            one call that is compiled alone.
    """

    findings: tuple[Finding, ...]
    copied: int
    traces: int
    seconds: float
    parts: tuple[tuple[str, int, float], ...]

    def __str__(self) -> str:
        parts = ", ".join(
            f"{verb} {seconds * 1e6:,.0f} us" + (f" x {count}" if count > 1 else "")
            for verb, count, seconds in self.parts
        )
        lines = [
            f"A call takes {self.seconds * 1e6:,.0f} us" + (f" ({parts} alone)." if parts else "."),
            f"It is traced {self.traces} time{'s' * (self.traces != 1)} in three calls, and uses "
            f"{bytes_text(self.copied)} beside its arguments.",
            *(f"- {finding}" for finding in self.findings),
        ]
        return "\n".join(lines if self.findings else [*lines, "Nothing is wrong."])


def doctor(step: Callable[..., Any], *args: Any) -> Report:
    """Says what makes a training step slow, and where.

    It compiles the step twice and runs it about ten times, on copies of the arguments; only a
    storage on the host has no copy, and is written to. Give it a state that is much larger than
    a batch.

    Args:
        step: compiled or not; its results may be anything, the new state among them.
        args: its arguments. At least one has a `BufferState` in it, or the step closes over one.

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
    dynamic = [index for index, wanted in enumerate(is_dynamic) if wanted]

    def call(*arrays: Any) -> Any:
        whole = list(args)
        for index, array in zip(dynamic, arrays, strict=True):
            whole[index] = array
        return step(*whole)

    arrays = [args[index] for index in dynamic]
    with_state = tuple(n for n, one in enumerate(arrays) if states_in(one))
    names = _names(step, args)
    compiled = jax.jit(call, donate_argnums=with_state)
    # The program is searched before XLA has optimized it, as only then operations have lines.
    closed, result = jax.make_jaxpr(call, return_shape=True)(*arrays)
    with warnings.catch_warnings():  # a state that is only read cannot be donated
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        memory: Any = compiled.lower(*arrays).compile().memory_analysis()
        traces, seconds = _run(compiled, arrays, with_state)
    copied = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    labels = [
        f"{names[index]}{jax.tree_util.keystr(path)}"
        for index, one in zip(dynamic, arrays, strict=True)
        for path, _ in jax.tree_util.tree_flatten_with_path(one)[0]
    ]
    found: dict[tuple[str, str], tuple[int, Finding, bool]] = {}
    _Search(_shapes(arrays), found).program(closed.jaxpr, labels)
    findings = [
        *_not_donated(step, args, names, result),
        *{(one.where, one.mend): one for one in _constants(closed)}.values(),
        *(one for nbytes, one, is_certain in found.values() if is_certain or nbytes <= copied),
    ]
    return Report(tuple(findings), copied, traces, seconds, _parts(step, args))


def states_in(tree: Any) -> list[BufferState]:
    """Returns all states in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda one: isinstance(one, BufferState))
    return [leaf for leaf in leaves if isinstance(leaf, BufferState)]


def _names(step: Any, args: tuple) -> list[str]:
    try:
        parameters = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        parameters = []
    return [parameters[n] if n < len(parameters) else f"argument {n}" for n in range(len(args))]


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _shapes(arrays: Any) -> set[tuple[int, ...]]:
    """Returns the shapes of the large arrays of states; of stacked states, those of one too."""
    shapes = set()
    for state in states_in(arrays):
        for leaf in jax.tree.leaves(state):
            for axes in range(state.edits.ndim + 1):
                # An array with an entry for every second slot, at least: others cost nothing to
                # copy.
                if state.ring is None or leaf.size >= state.ring.capacity // 2:
                    shapes.add(_plain(leaf.shape[axes:]))
    return shapes - {()}


def _not_donated(step: Any, args: tuple, names: list[str], result: Any) -> Iterator[Finding]:
    """Finds arguments with a state that a compiled step returns anew, and does not donate."""
    if not states_in(result) or not hasattr(step, "lower"):
        return
    # As the user has compiled it: `call` above donates all states.
    info = step.lower(*args).args_info[0]
    for name, argument, told in zip(names, args, info, strict=False):
        donated = [leaf.donated for leaf in jax.tree.leaves(told)]
        if states_in(argument) and not all(donated):
            nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(states_in(argument)))
            code = getattr(inspect.unwrap(step), "__code__", None)
            yield Finding(
                f"{name}: is not donated, so every call copies {bytes_text(nbytes)}",
                "" if code is None else f"{code.co_filename}:{code.co_firstlineno}",
                f'Compile it by jax.jit(step, donate_argnames="{name}")',
            )


def _where(eqn: Any) -> str:
    """Returns the innermost line of an operation that is neither in JAX nor in jrb."""
    frames = _frames(eqn)
    return next((line for file, line in frames if not file.startswith(_OWN)), "")


def _frames(eqn: Any) -> Iterator[tuple[str, str]]:
    """Yields the files and lines of an operation, innermost first, without those of JAX."""
    for frame in getattr(getattr(eqn.source_info, "traceback", None), "frames", ()):
        if not frame.file_name.startswith(_OTHERS):
            yield frame.file_name, f"{frame.file_name}:{frame.line_num}"


def _constants(closed: Any) -> Iterator[Finding]:
    """Finds large arrays that a program, or one that it calls, has as constants."""
    # Reversed, so that the first operation that uses a constant stays in the dict.
    used_by = {var: eqn for eqn in reversed(closed.jaxpr.eqns) for var in _variables(eqn.invars)}
    for var, array in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        nbytes = getattr(array, "nbytes", 0)
        if nbytes >= _MANY_BYTES:
            yield Finding(
                f"an array of shape {array.shape}, {bytes_text(nbytes)}, is no argument of the "
                "step but a constant in it",
                _where(used_by[var]) if var in used_by else "",
                "Pass the state as an argument, and return the new one",
            )
    for eqn in closed.jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "consts") and hasattr(inner, "jaxpr"):
                yield from _constants(inner)


def _variables(terms: Any) -> list[Any]:
    """Returns the operands of an operation that are no literals."""
    return [term for term in terms if not hasattr(term, "val")]


@dataclasses.dataclass
class _Array:
    """A large array of a state, between two writes: who reads it, and who writes to it.

    Attributes:
        label: of the argument that it comes from.
        nbytes: its size.
        uses: of each operation: its number, those that it comes after, its line, and whether it
            writes. Sets of operations are the bits of a number.
    """

    label: str
    nbytes: int
    uses: list[tuple[int, int, str, bool]] = dataclasses.field(default_factory=list)


class _Search:
    """A search of one program, or of the body of a loop or of a branch, for copies.

    Args:
        shapes: those of large arrays, without axes of length 1.
        found: where findings go, by their line and what mends them, with the size.
    """

    def __init__(
        self, shapes: set[tuple[int, ...]], found: dict[tuple[str, str], tuple[int, Finding, bool]]
    ) -> None:
        self._shapes, self._found, self._arrays, self._count = shapes, found, [], 0

    def program(self, jaxpr: Any, labels: list[str], line: str = "") -> None:
        """Searches a program whose arguments have these labels."""
        known = {
            var: (0, self._array(var, it)) for var, it in zip(jaxpr.invars, labels, strict=True)
        }
        self._run(jaxpr, known, line)
        # An array that is returned as it was, although something writes to it.
        results = {id(known[var][1]) for var in _variables(jaxpr.outvars) if var in known}
        for array in self._arrays:
            for number, earlier, where, writes in array.uses:
                if not writes:
                    continue
                if id(array) in results:
                    problem = "is returned, and written to"
                    self._add(array, problem, where, "Return only the state after the write")
                for other, _, other_where, _ in array.uses:
                    # A read that is neither before the write by data, nor the write itself: XLA
                    # keeps a copy.
                    if other != number and not earlier >> other & 1:
                        problem = f"is used here, and in no certain order written to at {where}"
                        self._add(array, problem, other_where, _ORDER)

    def _array(self, var: Any, label: str) -> _Array | None:
        """Returns a new array if it is large, and comes from an argument."""
        if not label or _plain(var.aval.shape) not in self._shapes:
            return None
        self._arrays.append(_Array(label, var.aval.size * var.aval.dtype.itemsize))
        return self._arrays[-1]

    def _add(
        self, array: _Array, problem: str, where: str, mend: str, is_certain: bool = False
    ) -> None:
        text = f"{array.label} ({bytes_text(array.nbytes)}) {problem}, so XLA copies it"
        if array.nbytes > self._found.get((where, mend), (0,))[0]:
            self._found[where, mend] = array.nbytes, Finding(text, where, mend), is_certain

    def _run(self, jaxpr: Any, known: dict[Any, tuple[int, _Array | None]], line: str) -> None:
        """Goes through operations; `known` has what each array comes after, and large arrays."""
        for eqn in jaxpr.eqns:
            ins = [
                known.get(var, (0, None)) if not hasattr(var, "val") else (0, None)
                for var in eqn.invars
            ]
            where, name = line or _where(eqn), eqn.primitive.name
            inner = _called(eqn)
            if inner is not None:
                inside = dict(zip(inner.invars, ins, strict=True))
                # What jrb itself compiles has the lines of its first caller: keep those of this.
                file = next((file for file, _ in _frames(eqn)), "")
                is_of_jrb = file.startswith(_OWN) and file != os.path.abspath(__file__)
                self._run(inner, inside, where if line or is_of_jrb else "")
                outs = [(0, None) if hasattr(var, "val") else inside[var] for var in inner.outvars]
            elif name in _SAME_MEMORY:
                outs = ins[:1]
            elif name == "optimization_barrier":
                outs = [(_union(ins), array) for _, array in ins]
            else:
                outs = self._operation(eqn, ins, where, line)
            known.update(zip(eqn.outvars, outs, strict=True))

    def _operation(
        self, eqn: Any, ins: Any, where: str, line: str
    ) -> list[tuple[int, _Array | None]]:
        """Notes what an operation reads and writes; returns what its results come after."""
        earlier, number = _union(ins), self._count
        # Numbers of operations are bits: what comes before one is the union of what its operands
        # do.
        self._count += 1
        origin = self._origins(eqn, ins, line)
        for position, (_, array) in enumerate(ins):
            if array is not None:
                writes = (position, True) in origin
                array.uses.append((number, earlier, where, writes))
        outs: list[tuple[int, _Array | None]] = []
        sources = [array for _, array in ins if array is not None]
        for var, (position, writes) in zip(eqn.outvars, origin, strict=True):
            array = None
            if position is not None and not writes:
                array = ins[position][1]
            elif position is not None and ins[position][1] is not None:
                array = self._array(var, ins[position][1].label)
            elif sources and (array := self._array(var, sources[0].label)) is not None:
                name = "slice" if "slice" in eqn.primitive.name else eqn.primitive.name
                mend = _MENDS.get(name, "Leave the arrays of a state to its methods")
                # XLA may choose in the memory of one of both states: it takes time, and no memory.
                self._add(array, f"is made anew by `{name}`", where, mend, name == "select_n")
            outs.append((earlier | 1 << number, array))
        return outs

    def _origins(self, eqn: Any, ins: Any, line: str) -> list[tuple[int | None, bool]]:
        """Returns for each result the operand in whose memory it lies, and whether that changes.

        Searches the bodies of loops and branches, too.
        """
        name, params = eqn.primitive.name, eqn.params
        labels = ["" if array is None else array.label for _, array in ins]
        others: list[tuple[int | None, bool]] = [(None, False)] * len(eqn.outvars)
        if name.startswith("scatter") or name == "dynamic_update_slice":
            return [(0, True)]
        if name == "cond":
            branches = [branch.jaxpr for branch in params["branches"]]
            for branch in branches:
                _Search(self._shapes, self._found).program(branch, labels[1:], line)
            return [_of_branches(branches, n) for n in range(len(eqn.outvars))]
        if name == "scan":
            body, skipped = params["jaxpr"].jaxpr, 0
            first, count = params["num_consts"], params["num_carry"]
        elif name == "while":
            body, skipped = params["body_jaxpr"].jaxpr, params["cond_nconsts"]
            first, count = params["body_nconsts"], len(eqn.outvars)
        else:
            return others
        inner = labels[skipped:] if name == "while" else labels
        _Search(self._shapes, self._found).program(body, inner, line)
        # A loop that passes an array on unchanged only reads it.
        changes = [body.invars[first + n] is not body.outvars[n] for n in range(count)]
        carried = [(skipped + first + n, changed) for n, changed in enumerate(changes)]
        return [*carried, *others[count:]]


def _of_branches(branches: list[Any], number: int) -> tuple[int | None, bool]:
    """Returns the operand of a `cond` in whose memory a result lies, and whether that changes."""
    outs = [branch.outvars[number] for branch in branches]
    for position in range(len(branches[0].invars)):
        # Unchanged in all branches: it is read. In some: one of them writes to it.
        same = [out is branch.invars[position] for out, branch in zip(outs, branches, strict=True)]
        if any(same):
            return position + 1, not all(same)
    for position, var in enumerate(branches[0].invars):
        if var.aval == outs[0].aval:  # each branch writes to it
            return position + 1, True
    return None, False


def _called(eqn: Any) -> Any:
    """Returns the program that an operation calls once, such as that of a `jit` in a `jit`."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        inner = getattr(eqn.params.get(name), "jaxpr", eqn.params.get(name))
        if hasattr(inner, "eqns") and len(inner.invars) == len(eqn.invars):
            return inner
    return None


def _union(ins: Any) -> int:
    together = 0
    for earlier, _ in ins:
        together |= earlier
    return together


def _run(compiled: Any, arrays: list[Any], with_state: tuple[int, ...]) -> tuple[int, float]:
    """Returns how often a step is traced if each call gets the last state, and the median time."""
    seconds: list[float] = []
    results: list[Any] = []
    for _ in range(_CALLS + 1):
        left, given = list(results), list(arrays)
        for index in with_state:
            # The state that the last call returned, known by its structure and shapes; each is used
            # once.
            new = [one for one in left if _shapes_of(one) == _shapes_of(arrays[index])]
            given[index] = new[0] if new else jax.tree.map(jnp.copy, arrays[index])
            left = [one for one in left if not new or one is not new[0]]
        begin = time.perf_counter()
        result = jax.block_until_ready(compiled(*given))
        seconds.append(time.perf_counter() - begin)
        results = [result, *(result if type(result) in (tuple, list) else ())]
    return compiled._cache_size(), statistics.median(seconds[1:])


def _shapes_of(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", None) for leaf in leaves]


def _parts(step: Any, args: tuple) -> tuple[tuple[str, int, float], ...]:
    """Returns the verbs in a step, how often it calls each, and the time of each alone."""
    calls: dict[Any, int] = {}

    def note(verb: str, buffer: Any, state: Any, arguments: dict, result: Any) -> None:
        size = result[1].indices.shape[0] if verb == "sample" else None
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, arguments))
        if not isinstance(buffer.storage, HostStorage | HostStorageProxy):  # it would be written to
            call = verb, buffer, size, SpecKey(specs)
            calls[call] = calls.get(call, 0) + 1

    # A compiled step is not traced again for arguments that it knows.
    untraced = step.__wrapped__ if hasattr(step, "lower") else step
    debugging.OBSERVERS.append(note)
    try:
        jax.eval_shape(lambda: untraced(*args))
    finally:
        debugging.OBSERVERS.remove(note)
    return tuple((call[0], count, _time_alone(*call)) for call, count in calls.items())


def _time_alone(verb: str, buffer: Any, size: int | None, specs: SpecKey) -> float:
    def run(state: Any, arguments: Any) -> Any:
        if verb == "sample":
            return eager.draw(buffer, state, arguments["key"], size or 0, None)
        if verb == "add":
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
        state = result[0] if verb == "sample" else result
    return statistics.median(seconds[1:])
