"""Which base a part of each kind has."""

from typing import Any

from jrb.types.sampler import PrioritizedSampler, Sampler
from jrb.types.storage import Storage
from jrb.types.unit import Unit
from jrb.types.writer import Writer

BASES: dict[str, type] = {"sampler": Sampler, "unit": Unit, "writer": Writer, "storage": Storage}


def check_part(name: str, value: object) -> None:
    """Raises unless it is an instance of the base of its kind, not a class or a string."""
    if isinstance(value, type | str):
        raise TypeError(
            f"{name}: expected a part, got {value!r}. Make one, such as jrb.Uniform() or "
            "jrb.DeviceStorage()."
        )
    base: Any = BASES[name]
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
