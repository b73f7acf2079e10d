"""Queries over episodes: those with a return, a length or an end that is asked for.

K episodes. The episodes of a buffer and those of a dataset share these methods.
"""

import abc
import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from jrb._util import checks

Facts = Mapping[str, Callable[[], Any]]
"""Functions that read a fact about each episode, by the name of the fact."""


class Queries(abc.ABC):
    """The methods of a sequence of episodes that choose some of them, or sort them."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of episodes K."""

    @abc.abstractmethod
    def _facts_of_each(self) -> Facts:
        """Returns functions that read a fact about each episode, `[K]`, or a pytree of leaves.

        There are at least "length" and "complete", and "return" if there are rewards.
        """

    @abc.abstractmethod
    def _choose(self, find: Callable[[Any], np.ndarray]) -> Self:
        """Returns the episodes at the indices that `find(self)` returns, int64."""

    def where(
        self,
        condition: str | None = None,
        *,
        min_return: float | None = None,
        max_return: float | None = None,
        min_length: float | None = None,
        max_length: float | None = None,
        complete: bool | None = None,
        env: int | Sequence[int] | None = None,
        since: int | None = None,
        predicate: Callable[[Any], Any] | None = None,
    ) -> Self:
        """Returns the episodes that meet all conditions, in their order.

        Only flags, rewards and numbers are read, unless there is a `predicate`, which is called
        for the episodes that meet all other conditions.

        Args:
            condition: a text such as "return > 100 and length < 500", of comparisons, `and`, `or`,
                `not`, `+ - * /`, numbers, strings, and facts about an episode: `length`, `return`
                and `complete`; in a buffer also `ended`, `env` and `age`, the number of rows of
                its environment that are newer than its first one; in a dataset those in `facts`.
            min_return: the least sum of an episode's rewards, as stored.
            max_return: the greatest one.
            min_length: the least number of rows.
            max_length: the greatest one.
            complete: True for episodes that have ended and whose first row is there, False for all
                others.
            env: the number of an environment, or several; for buffers, and datasets that have it.
            since: only episodes that lie within the `since` newest rows of their environment; for
                buffers.
            predicate: a function from an episode to true or false.

        Raises:
            ValueError: there is no such fact, or not a single one for each episode; or the text is
                no condition.
            TypeError: an argument has another type.
        """
        tests: list[tuple[str, Callable[[Any], Any]]] = []
        bounds = {"min_return": min_return, "max_return": max_return}
        bounds |= {"min_length": min_length, "max_length": max_length}
        for name, bound in bounds.items():
            if bound is not None:
                number = np.asarray(bound)
                if number.shape or number.dtype.kind not in "iuf" or np.isnan(number):
                    raise TypeError(f"{name}: expected a number, got {bound!r}.")
                compare = operator.ge if name.startswith("min") else operator.le
                tests.append((name[4:], lambda value, f=compare, bound=bound: f(value, bound)))
        if complete is not None:
            checks.flag("complete", complete)
            tests.append(("complete", lambda value: value == complete))
        if env is not None:
            envs = np.asarray(env)
            if envs.dtype.kind not in "iu" or envs.ndim > 1:
                raise TypeError(f"env: expected an integer, or a list of some, got {env!r}.")
            tests.append(("env", lambda value: np.isin(value, envs)))
        if since is not None:
            checks.count("since", since)
            tests.append(("age", lambda value: value < since))
        if predicate is not None and not callable(predicate):
            raise TypeError(f"predicate: expected a function of an episode, got {predicate!r}.")
        parsed = None if condition is None else Condition(condition)
        # Raise for unknown facts now, as the episodes may be chosen much later.
        for name in [name for name, _ in tests] + ([] if parsed is None else parsed.names):
            _check_fact(self._facts_of_each(), name, "where")

        def find(episodes: Any) -> np.ndarray:
            # Decide by facts first: the predicate may read all leaves of an episode.
            read = lambda name: read_fact(episodes._facts_of_each(), name, "where")
            mask = np.ones(len(episodes), bool)
            for name, test in tests:
                mask &= test(read(name))
            if parsed is not None:
                mask &= parsed.holds(read)
            indices = np.flatnonzero(mask)
            if predicate is None:
                return indices
            return indices[[bool(predicate(episodes[number])) for number in indices.tolist()]]

        return self._choose(find)

    def best(self, fraction: float) -> Self:
        """Returns the `fraction` of the episodes that has the highest returns, in their order.

        At least one is kept, and of equal returns the earlier ones.
        """
        checks.fraction("fraction", fraction)
        _check_fact(self._facts_of_each(), "return", "best")

        def find(episodes: Any) -> np.ndarray:
            # A stable sort keeps the earlier of equal returns; the second one restores the order.
            returns = read_fact(episodes._facts_of_each(), "return", "best")
            count = max(1, round(fraction * len(returns)))
            return np.sort(np.argsort(-returns, kind="stable")[:count])

        return self._choose(find)

    def sort(self, key: str | Callable[[Any], Any], *, descending: bool = False) -> Self:
        """Returns the episodes in the order of a key; those with equal keys keep their order.

        Keys that are NaN come last.

        Args:
            key: the name of a fact, as in `where`; or a function from an episode to the value that
                is compared, which may read items.
            descending: True to begin with the greatest key.
        """
        checks.flag("descending", descending)
        if isinstance(key, str):
            _check_fact(self._facts_of_each(), key, "sort")
        elif not callable(key):
            raise TypeError(f"key: expected the name of a fact or a function, got {key!r}.")

        def find(episodes: Any) -> np.ndarray:
            if isinstance(key, str):
                keys = read_fact(episodes._facts_of_each(), key, "sort").tolist()
            else:
                keys = list(map(key, episodes))
            # Comparisons with NaN are all False, and would leave the others in no order.
            rank = lambda number: ((keys[number] != keys[number]) != descending, keys[number])
            order = sorted(range(len(keys)), key=rank, reverse=descending)
            return np.asarray(order, np.int64)

        return self._choose(find)


def _check_fact(facts: Facts, name: str, method: str) -> None:
    if name not in facts:
        raise ValueError(
            f"{method}: expected a fact that is known of these episodes, one of {sorted(facts)}, "
            f"got '{name}'{', of episodes without rewards' if name == 'return' else ''}."
        )


def read_fact(facts: Facts, name: str, method: str) -> np.ndarray:
    """Returns one number for each episode, `[K]`; raises if the fact has several."""
    value = facts[name]()
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise ValueError(
            f"{method}: expected one {name} for each episode, got several, as the reward has more "
            "than one number. Use a function of an episode: where(predicate=...), sort(key=...)."
        )
    return value


# Conditions as text.

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_NODES = (
    *(ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Compare),
    *(ast.Name, ast.Load, ast.Constant, *_OPERATORS),
)
_RETURN = "__return__"  # the name of the fact `return` for Python's parser
_STRING_OR_RETURN = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\breturn\b"""
_LONGEST = 1000  # the most characters of a condition, as its parser recurses


class Condition:
    """A condition on facts about an episode, read from a text; no code in the text is run.

    Attributes:
        names: the names of the facts in the condition.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"condition: expected a text as 'length > 10', got {text!r}.")
        self._text = text
        if len(text) > _LONGEST:
            raise self._error(f"{len(text)} characters, more than {_LONGEST}")
        # Python reads `return` as a statement. Strings keep the word.
        rename = lambda match: match[1] or _RETURN
        text = re.sub(_STRING_OR_RETURN, rename, text.strip())
        try:
            self._tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise self._error("a text that cannot be read") from error
        names = set()
        for node in filter(lambda node: isinstance(node, ast.expr), ast.walk(self._tree)):
            # Operators have no text of their own.
            operators = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.expr)]
            value = node.value if isinstance(node, ast.Constant) else 0
            is_known = all(isinstance(part, _NODES) for part in (node, *operators))
            if not is_known or not isinstance(value, int | float | str):
                raise self._error(f"'{ast.unparse(node)}'")
            if isinstance(node, ast.Name):
                node.id = "return" if node.id == _RETURN else node.id
                names.add(node.id)
        self.names: list[str] = sorted(names)

    def holds(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns for which episodes the condition holds, bool `[K]`; `read` returns a fact."""
        try:
            with np.errstate(all="ignore"):  # a number divided by zero is infinite or NaN
                flags = np.asarray(self._evaluate(self._tree, read))
        except TypeError as error:  # such as a comparison of a number with a string
            raise self._error("values of kinds that do not go together") from error
        except OverflowError as error:
            raise self._error("a number that is too large") from error
        if flags.dtype != bool:
            raise self._error("a value that is neither true nor false")
        return flags

    def _evaluate(self, node: ast.AST, read: Callable[[str], np.ndarray]) -> Any:
        """Returns the value of a part of the condition: flags, float64 numbers, or strings."""
        match node:
            case ast.Constant() | ast.Name():
                value = read(node.id) if isinstance(node, ast.Name) else node.value
                value = np.asarray(value)
                return value.astype(np.float64) if value.dtype.kind in "iuf" else value
            case ast.UnaryOp(op=op, operand=part):
                value = self._evaluate(part, read)
                return ~value if isinstance(op, ast.Not) else -value
            case ast.BinOp(op=op, left=left, right=right):
                pair = [self._evaluate(part, read) for part in (left, right)]
                # Flags count as 0 and 1; of two flags, NumPy's `+` is a flag.
                pair = [it.astype(np.float64) if it.dtype == bool else it for it in pair]
                return _OPERATORS[type(op)](*pair)
            case ast.BoolOp(op=op, values=parts):
                # These operators raise for numbers, of which Python's own would take any.
                join = operator.and_ if isinstance(op, ast.And) else operator.or_
                return functools.reduce(join, [self._evaluate(part, read) for part in parts])
            case ast.Compare(left=left, ops=ops, comparators=others):
                # A chain such as 10 < length < 20 compares neighbours.
                values = [self._evaluate(part, read) for part in (left, *others)]
                pairs = zip(ops, values, values[1:], strict=False)
                flags = [_OPERATORS[type(op)](one, other) for op, one, other in pairs]
                return functools.reduce(operator.and_, flags)
            case _:
                raise self._error(f"'{ast.unparse(node)}'")

    def _error(self, got: str) -> ValueError:
        return ValueError(
            f"condition: expected comparisons of facts about an episode, such as 'return > 100 and "
            f"length < 500', got {got} in {self._text[:100]!r}."
        )
