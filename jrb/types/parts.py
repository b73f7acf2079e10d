"""The base class of each kind of part, and a check that a value is such a part."""

import difflib
from typing import Any

from jrb._util import pytree
from jrb.types.sampler import PrioritizedSampler, Sampler
from jrb.types.storage import Storage
from jrb.types.unit import Unit
from jrb.types.writer import Writer

BASES: dict[str, type] = {"sampler": Sampler, "unit": Unit, "writer": Writer, "storage": Storage}


def check_part(name: str, value: object) -> None:
    """Raises TypeError unless `value` is an instance of the base class for the part `name`."""
    # A class instead of an instance, or a name: suggest the part of jrb that was meant.
    base: Any = BASES[name]
    if isinstance(value, type | str):
        kind, names, classes = value if isinstance(value, str) else value.__name__, [], [base]
        # Collect the names of all parts of jrb of this kind.
        while classes:
            cls = classes.pop()
            classes += cls.__subclasses__()
            is_part = pytree.is_component(cls) and cls.__module__.startswith("jrb.")
            names += [cls.__name__] * (is_part and cls.__name__[0] != "_")
        # Find the closest name, in any case; a class of the user's is meant itself.
        close = difflib.get_close_matches(kind.lower(), [it.lower() for it in names], 1)
        meant = [f"jrb.{it}" for it in names if close == [it.lower()]]
        if not meant and isinstance(value, type) and issubclass(value, base):
            meant = [kind]
        mend = f"Did you mean {meant[0]}(...)?" if meant else f"Make a {base.__name__}."
        raise TypeError(f"{name}: expected a part, got {value!r}. {mend}")
    # The base for priorities has no defaults that would lose them.
    if isinstance(value, Sampler) and value.prioritized:
        base = PrioritizedSampler
    if isinstance(value, base):
        return
    # Name the methods that a value of another class lacks.
    lacking = sorted(method for method in base.__abstractmethods__ if method not in dir(value))
    without = f" without {', '.join(lacking)}" if lacking else ""
    raise TypeError(
        f"{name}: expected a part below jrb.types.{base.__name__}, got {type(value).__name__}"
        f"{without}. Make {base.__name__} its base."
    )
