"""Finds in a jaxpr where XLA copies a large array, and which constants are large; for `doctor`.

XLA writes to a large array of a state in place (`scatter`, `dynamic_update_slice`, the carry of a
loop) only if data dependencies put every other use of the array before the write. An operation that
makes another array of that size is a copy too.
"""

import dataclasses
import functools
import operator
import os
from collections.abc import Iterator
from typing import Any

import jax

from jrb._util.wording import bytes_text

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FOLDERS = (os.path.dirname(os.path.abspath(file)) for file in (jax.__file__, dataclasses.__file__))
_OTHERS = *(folder + os.sep for folder in _FOLDERS), "<string>", "<frozen"
_SAME_MEMORY = {"reshape", "squeeze", "expand_dims", "stop_gradient", "pvary", "pcast"}
_ORDER = "Use draw, and write to the state that it returns"
_MENDS = {
    "select_n": "Under vmap lax.cond computes both states and chooses: pass mask= to add instead",
    "slice": "Do not index a stack of states: use vmap over it, or keep the states apart",
}
_MANY_BYTES = 100_000
"""The least number of bytes of a constant that is reported."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that makes a step slow.

    Attributes:
        problem: a description of the problem, with the argument and the size.
        where: the line of the program, "file:line"; "" if there is no particular one.
        mend: advice on a change of the program.
    """

    problem: str
    where: str
    mend: str

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.problem}. {self.mend}"


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without axes of length 1; by such shapes large arrays are recognised."""
    return tuple(size for size in shape if size != 1)


def _where(eqn: Any) -> str:
    """Returns the innermost source line of an operation that is outside of JAX and jrb."""
    frames = _frames(eqn)
    return next((line for file, line in frames if not file.startswith(_OWN)), "")


def _frames(eqn: Any) -> Iterator[tuple[str, str]]:
    """Yields the files and lines of an operation, innermost first, without those of JAX."""
    for frame in getattr(getattr(eqn.source_info, "traceback", None), "frames", ()):
        if not frame.file_name.startswith(_OTHERS):
            yield frame.file_name, f"{frame.file_name}:{frame.line_num}"


def large_constants(closed: Any) -> Iterator[Finding]:
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
                yield from large_constants(inner)


def _variables(terms: Any) -> list[Any]:
    """Returns the operands of an operation that are no literals."""
    return [term for term in terms if not hasattr(term, "val")]


@dataclasses.dataclass
class _Array:
    """A large array of a state between two writes, and the operations that use it.

    Attributes:
        label: the name of the argument that it comes from.
        nbytes: its size in bytes.
        uses: for each operation: its number; the numbers of operations that it depends on, as the
            bits of an integer; its source line; True if it writes to the array.
    """

    label: str
    nbytes: int
    uses: list[tuple[int, int, str, bool]] = dataclasses.field(default_factory=list)


class CopySearch:
    """Searches one program, or the body of a loop or of a branch, for copies.

    Args:
        shapes: the shapes of large arrays, without axes of length 1.
        copies: receives, by line and mend, the bytes, the finding, and True if it is certain.
    """

    def __init__(
        self, shapes: set[tuple[int, ...]], copies: dict[tuple[str, str], tuple[int, Finding, bool]]
    ) -> None:
        self._shapes, self._copies, self._arrays, self._count = shapes, copies, [], 0

    def program(self, jaxpr: Any, labels: list[str], line: str = "") -> None:
        """Searches a program whose arguments have these labels."""
        values = {
            var: (0, self._array(var, it)) for var, it in zip(jaxpr.invars, labels, strict=True)
        }
        self._visit(jaxpr, values, line)
        # Compare each write with the results and with all other uses of its array.
        results = {id(values[var][1]) for var in _variables(jaxpr.outvars) if var in values}
        for array in self._arrays:
            for number, earlier, where, writes in array.uses:
                if not writes:
                    continue
                if id(array) in results:
                    problem = "is returned, and written to"
                    self._add(array, problem, where, "Return only the state after the write")
                for other, _, other_where, _ in array.uses:
                    # XLA keeps a copy for each other use on which the write does not depend by its
                    # data.
                    if other != number and not earlier >> other & 1:
                        problem = f"is used here, and in no certain order written to at {where}"
                        self._add(array, problem, other_where, _ORDER)

    def _array(self, var: Any, label: str) -> _Array | None:
        """Returns a new `_Array` for a variable that is large and comes from an argument."""
        if not label or without_ones(var.aval.shape) not in self._shapes:
            return None
        self._arrays.append(_Array(label, var.aval.size * var.aval.dtype.itemsize))
        return self._arrays[-1]

    def _add(
        self, array: _Array, problem: str, where: str, mend: str, is_certain: bool = False
    ) -> None:
        # Of several findings with one line and one mend, keep the largest.
        text = f"{array.label} ({bytes_text(array.nbytes)}) {problem}, so XLA copies it"
        if array.nbytes > self._copies.get((where, mend), (0,))[0]:
            self._copies[where, mend] = array.nbytes, Finding(text, where, mend), is_certain

    def _visit(self, jaxpr: Any, values: dict[Any, tuple[int, _Array | None]], line: str) -> None:
        """Visits operations; `values` maps variables to earlier operations and large arrays."""
        for eqn in jaxpr.eqns:
            ins = [
                values.get(var, (0, None)) if not hasattr(var, "val") else (0, None)
                for var in eqn.invars
            ]
            where, name = line or _where(eqn), eqn.primitive.name
            inner = _called_program(eqn)
            if inner is not None:
                inside = dict(zip(inner.invars, ins, strict=True))
                # A program that jrb compiles has its first caller's lines: use this caller's line.
                file = next((file for file, _ in _frames(eqn)), "")
                is_of_jrb = file.startswith(_OWN) and file != _OWN + "doctor.py"
                self._visit(inner, inside, where if line or is_of_jrb else "")
                outs = [(0, None) if hasattr(var, "val") else inside[var] for var in inner.outvars]
            elif name in _SAME_MEMORY:
                outs = ins[:1]
            elif name == "optimization_barrier":
                # Each result waits for all operands.
                outs = [(_union(ins), array) for _, array in ins]
            else:
                outs = self._operation(eqn, ins, where, line)
            values.update(zip(eqn.outvars, outs, strict=True))

    def _operation(
        self, eqn: Any, ins: Any, where: str, line: str
    ) -> list[tuple[int, _Array | None]]:
        """Records the arrays that an operation uses; returns the `values` of its results."""
        earlier, number = _union(ins), self._count
        # The operations before this one are those before any of its operands. Sets of operations
        # are the bits of an integer.
        self._count += 1
        origin = self._origins(eqn, ins, line)
        for position, (_, array) in enumerate(ins):
            if array is not None:
                writes = (position, True) in origin
                array.uses.append((number, earlier, where, writes))
        # A result is an operand unchanged, an operand that was written to, or another array, which
        # is a copy if it is large.
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
                # XLA may select in the memory of one of the two: that costs time, but no memory.
                self._add(array, f"is made anew by `{name}`", where, mend, name == "select_n")
            outs.append((earlier | 1 << number, array))
        return outs

    def _origins(self, eqn: Any, ins: Any, line: str) -> list[tuple[int | None, bool]]:
        """Returns for each result the operand whose memory it uses, and True if that is written to.

        It also searches the bodies of loops and branches.
        """
        name, params = eqn.primitive.name, eqn.params
        labels = ["" if array is None else array.label for _, array in ins]
        others: list[tuple[int | None, bool]] = [(None, False)] * len(eqn.outvars)
        if name.startswith("scatter") or name == "dynamic_update_slice":
            return [(0, True)]
        if name == "cond":
            branches = [branch.jaxpr for branch in params["branches"]]
            for branch in branches:
                CopySearch(self._shapes, self._copies).program(branch, labels[1:], line)
            return [_of_branches(branches, n) for n in range(len(eqn.outvars))]
        # Find the carry of a loop among its operands: constants come first, a condition's too.
        if name == "scan":
            body, skipped = params["jaxpr"].jaxpr, 0
            first, count = params["num_consts"], params["num_carry"]
        elif name == "while":
            body, skipped = params["body_jaxpr"].jaxpr, params["cond_nconsts"]
            first, count = params["body_nconsts"], len(eqn.outvars)
        else:
            return others
        inner = labels[skipped:] if name == "while" else labels
        CopySearch(self._shapes, self._copies).program(body, inner, line)
        # A loop that passes an array on unchanged only reads it.
        changes = [body.invars[first + n] is not body.outvars[n] for n in range(count)]
        carried = [(skipped + first + n, changed) for n, changed in enumerate(changes)]
        return [*carried, *others[count:]]


def _of_branches(branches: list[Any], number: int) -> tuple[int | None, bool]:
    """Returns the operand of a `cond` whose memory a result uses, and True if it is written to."""
    outs = [branch.outvars[number] for branch in branches]
    for position in range(len(branches[0].invars)):
        # If all branches return it unchanged, it is only read. If only some do, another writes it.
        same = [out is branch.invars[position] for out, branch in zip(outs, branches, strict=True)]
        if any(same):
            return position + 1, not all(same)
    # If no branch returns an operand, each of them writes to one of the type of the result.
    for position, var in enumerate(branches[0].invars):
        if var.aval == outs[0].aval:
            return position + 1, True
    return None, False


def _called_program(eqn: Any) -> Any:
    """Returns the program that an operation calls once, such as that of a `jit` in a `jit`."""
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        inner = getattr(eqn.params.get(name), "jaxpr", eqn.params.get(name))
        if hasattr(inner, "eqns") and len(inner.invars) == len(eqn.invars):
            return inner
    return None


def _union(ins: Any) -> int:
    return functools.reduce(operator.or_, (earlier for earlier, _ in ins), 0)
