"""Checks JSON that was read from a file, before anything relies on it."""

import re
from collections.abc import Callable
from typing import Any

NATURAL = range(1 << 62)
"""Numbers of rows, bytes and generations."""

_DEEPEST = 100  # levels, far below the limit of Python's recursion

_Kind = type | range
Schema = (
    _Kind | re.Pattern[str] | tuple[_Kind, ...] | list[Any] | dict[Any, Any] | Callable[..., Any]
)
"""What a value has to be.

A type, and no other, so that True is no number; a range of whole numbers; a pattern of a whole
text; a tuple of types and ranges;
`[schema]` for a list of any length, `[schema, schema]` for one of two; `{name: schema}` for an
object that may have further entries, where a name that ends in `?` may be missing, and `...` stands
for all names; or a function from the value to its schema.
"""


def check(value: Any, schema: Schema, where: str, depth: int = _DEEPEST) -> None:
    """Raises `ValueError`, which names the entry, unless a value is as its schema says."""
    if not depth:
        raise ValueError(f"{where}: expected at most {_DEEPEST} levels")
    if isinstance(schema, list):
        count = None if len(schema) == 1 else len(schema)
        fits = isinstance(value, list) and count in (None, len(value))
        _expect(fits, where, "a list" if count is None else f"a list of {count}", value)
        for number, entry in enumerate(value):
            check(entry, schema[number if count else 0], f"{where}[{number}]", depth - 1)
    elif isinstance(schema, dict):
        _expect(isinstance(value, dict), where, "an object", value)
        for name, inner in schema.items():
            key = name if name is ... else name.removesuffix("?")
            _expect(name is ... or name != key or key in value, where, f"'{key}' in it", value)
            for each in value if name is ... else {key} & value.keys():
                check(value[each], inner, f"{where}.{each}", depth - 1)
    elif isinstance(schema, re.Pattern):
        fits = isinstance(value, str) and schema.fullmatch(value)
        _expect(bool(fits), where, f"text like {schema.pattern}", value)
    elif callable(schema) and not isinstance(schema, type):
        check(value, schema(value), where, depth - 1)
    else:
        kinds = schema if isinstance(schema, tuple) else (schema,)
        fits = any(
            type(value) is int and value in kind if isinstance(kind, range) else type(value) is kind
            for kind in kinds
        )
        _expect(fits, where, " or ".join(map(_name, kinds)), value)


def _expect(fits: bool, where: str, wanted: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{where}: expected {wanted}, got {repr(value)[:80]}")


def _name(kind: _Kind) -> str:
    if isinstance(kind, range):
        return f"a number from {kind.start} to {kind.stop - 1}"
    return "nothing" if kind is type(None) else f"a {kind.__name__}"
