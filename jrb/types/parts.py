"""The base of each kind of part, and checks against it."""

import difflib
import inspect
from typing import Any

from jrb.types.sampler import PrioritizedSampler, Sampler
from jrb.types.storage import Storage
from jrb.types.unit import Unit
from jrb.types.writer import Writer

BASES: dict[str, type] = {"sampler": Sampler, "unit": Unit, "writer": Writer, "storage": Storage}


def _below(base: type) -> list[type]:
    """Returns all classes below one that have no abstract methods."""
    inner = [it for cls in base.__subclasses__() for it in (cls, *_below(cls))]
    return [cls for cls in inner if not inspect.isabstract(cls) and cls.__name__[0] != "_"]


def check_part(name: str, value: object) -> None:
    """Raises unless it is an instance of the base of its kind, not a class or a string."""
    base: Any = BASES[name]
    if isinstance(value, type | str):
        kind = value if isinstance(value, str) else value.__name__
        names = [cls.__name__ for cls in _below(base) if cls.__module__.startswith("jrb.")]
        close = difflib.get_close_matches(kind.lower(), [it.lower() for it in names], 1)
        found = [f"jrb.{it}" for it in names if close == [it.lower()]]
        if not found and isinstance(value, type) and issubclass(value, base):
            found = [kind]
        mend = f"Did you mean {found[0]}(...)?" if found else f"Make a {base.__name__}."
        raise TypeError(f"{name}: expected a part, got {value!r}. {mend}")
    if isinstance(value, Sampler) and value.prioritized:
        base = PrioritizedSampler  # has no defaults that would lose priorities
    if isinstance(value, base):
        return
    lacking = sorted(method for method in base.__abstractmethods__ if method not in dir(value))
    without = f" without {', '.join(lacking)}" if lacking else ""
    raise TypeError(
        f"{name}: expected a part below jrb.types.{base.__name__}, got {type(value).__name__}"
        f"{without}. Make {base.__name__} its base."
    )
